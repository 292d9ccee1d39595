//! Reports the health of every service: serving while the database answers, until shutdown.

use std::time::Duration;

use codelia_store::Store;
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::server::methods::Methods;

const PING_INTERVAL: Duration = Duration::from_secs(1);
const PING_TIMEOUT: Duration = Duration::from_secs(2);
/// Consecutive pings without an answer after which the server reports that it is not serving.
const MAX_MISSED_PINGS: u32 = 3;

/// Keeps the health of the services up to date.
#[derive(Debug)]
pub(crate) struct HealthMonitor {
    store: Store,
    reporter: HealthReporter,
    names: Vec<String>,
}

impl HealthMonitor {
    /// Reports for every service and for the server as a whole.
    pub(crate) fn new(store: Store, reporter: HealthReporter, methods: &Methods) -> Self {
        Self { store, reporter, names: health_names(methods) }
    }

    /// Runs until it is dropped; reports that nothing is serving from shutdown on.
    pub(crate) async fn run(self, shutdown: CancellationToken) {
        shutdown.run_until_cancelled(self.watch_database()).await;
        self.report(ServingStatus::NotServing).await;
        std::future::pending().await
    }

    async fn watch_database(&self) {
        let mut missed = 0;
        loop {
            missed = if self.ping().await { 0 } else { missed + 1 };
            if missed == 0 {
                self.report(ServingStatus::Serving).await;
            } else if missed == MAX_MISSED_PINGS {
                tracing::warn!(missed, "database does not answer, reporting not serving");
                self.report(ServingStatus::NotServing).await;
            }
            tokio::time::sleep(PING_INTERVAL).await;
        }
    }

    async fn ping(&self) -> bool {
        matches!(tokio::time::timeout(PING_TIMEOUT, self.store.ping()).await, Ok(Ok(())))
    }

    async fn report(&self, status: ServingStatus) {
        for name in &self.names {
            self.reporter.set_service_status(name, status).await;
        }
    }
}

/// The names that health is reported for; the empty one is the server as a whole.
fn health_names(methods: &Methods) -> Vec<String> {
    std::iter::once(String::new()).chain(methods.services().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use codelia_proto::{
        PUBLIC_DESCRIPTORS,
        v1::{
            admin_service_server, file_service_server, policy_service_server, run_service_server,
            session_service_server,
        },
    };
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn health_names_match_services_in_descriptors() {
        let names = health_names(&Methods::load().unwrap());
        let declared = FileDescriptorSet::decode(PUBLIC_DESCRIPTORS).unwrap();
        let declared: usize = declared.file.iter().map(|file| file.service.len()).sum();
        assert_eq!(names.len(), declared + 1);
        for served in [
            "",
            session_service_server::SERVICE_NAME,
            run_service_server::SERVICE_NAME,
            file_service_server::SERVICE_NAME,
            policy_service_server::SERVICE_NAME,
            admin_service_server::SERVICE_NAME,
        ] {
            assert!(names.iter().any(|name| name == served), "{served:?} is not in {names:?}");
        }
    }
}
