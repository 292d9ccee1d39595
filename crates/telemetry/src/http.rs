//! HTTP endpoints for operators and probes: `/metrics`, `/startupz`, `/healthz`, `/readyz`. Each
//! connection serves one request and is closed after a short time, whatever the client does.

use std::{net::SocketAddr, num::NonZeroUsize, sync::Arc, time::Duration};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use codelia_types::duration;
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use prometheus::{Registry, TextEncoder};
use serde::{Deserialize, Deserializer, Serializer};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{metrics, task};

/// Before the next attempt to accept, after one failed for lack of descriptors or memory.
const RETRY_DELAY: Duration = Duration::from_millis(50);

codelia_types::options! {
    /// Metrics and the answers to probes over HTTP: the section `metrics` of the configuration.
    pub struct MetricsOptions {
        /// Address of the metrics; the empty text turns them off.
        #[serde(with = "address_or_off")]
        pub listen: Option<SocketAddr> = Some(SocketAddr::from(([127, 0, 0, 1], 7301))),
        /// Connections to the metrics port.
        pub max_connections: NonZeroUsize = const { NonZeroUsize::new(32).unwrap() },
        /// Life of such a connection; each serves one request.
        #[serde(with = "duration")]
        pub request_timeout: Duration = Duration::from_secs(10),
    }
}

/// An address, or the empty text for none.
mod address_or_off {
    use super::{Deserialize, Deserializer, Serializer, SocketAddr};

    #[expect(clippy::ref_option, reason = "serde passes the field")]
    pub(super) fn serialize<S: Serializer>(
        value: &Option<SocketAddr>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.serialize_str(&value.map(|address| address.to_string()).unwrap_or_default())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(from)?;
        if text.is_empty() {
            Ok(None)
        } else {
            text.parse().map(Some).map_err(serde::de::Error::custom)
        }
    }
}

/// Questions of probes. The answers are 200 for `true` and 503 for `false`; asking must not wait.
pub trait Probes: Send + Sync + 'static {
    /// `/startupz`: whether the process has started.
    fn is_started(&self) -> bool;
    /// `/healthz`: whether the process works, or is about to exit by itself. If not, it must be
    /// restarted.
    fn is_live(&self) -> bool;
    /// `/readyz`: whether the process can take work.
    fn is_ready(&self) -> bool;
}

/// Serves `/metrics` and the answers of `probes` until `shutdown` is cancelled.
pub async fn serve_metrics(
    listener: TcpListener,
    options: MetricsOptions,
    shutdown: CancellationToken,
    probes: Arc<impl Probes>,
) {
    serve(listener, options, shutdown, router(prometheus::default_registry().clone(), probes))
        .await;
}

async fn serve(
    listener: TcpListener,
    options: MetricsOptions,
    shutdown: CancellationToken,
    router: Router,
) {
    let permits = Arc::new(Semaphore::new(options.max_connections.get()));
    let time_limit = options.request_timeout;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match (accepted, permits.clone().try_acquire_owned()) {
            (Ok((stream, _)), Ok(permit)) => {
                task::background(
                    "metrics connection",
                    respond(stream, router.clone(), time_limit, permit),
                );
            }
            (Ok(_), Err(_)) => metrics().connection_refused("metrics.max_connections"),
            (Err(error), _) => {
                tracing::warn!(%error, "cannot accept connections for metrics, retrying");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// Answers one request.
async fn respond(
    stream: TcpStream,
    router: Router,
    time_limit: Duration,
    _permit: OwnedSemaphorePermit,
) {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match timeout(time_limit, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "metrics connection failed"),
        Err(_) => tracing::debug!("metrics connection closed: too slow"),
    }
}

fn router<P: Probes>(registry: Registry, probes: Arc<P>) -> Router {
    let probe = |ask: fn(&P) -> bool, words: [&'static str; 2]| {
        let probes = probes.clone();
        get(move || async move { answer(ask(&probes), words) })
    };
    Router::new()
        .route("/metrics", get(move || async move { render_metrics(&registry) }))
        .route("/startupz", probe(P::is_started, ["started\n", "not started\n"]))
        .route("/healthz", probe(P::is_live, ["ok\n", "stuck\n"]))
        .route("/readyz", probe(P::is_ready, ["ready\n", "not ready\n"]))
}

fn answer(holds: bool, [yes, no]: [&'static str; 2]) -> (StatusCode, &'static str) {
    if holds { (StatusCode::OK, yes) } else { (StatusCode::SERVICE_UNAVAILABLE, no) }
}

fn render_metrics(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::metrics::MeterProvider;
    use opentelemetry_sdk::{Resource, metrics::SdkMeterProvider};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::{Metrics, Step, pipeline::meter_provider};

    /// A registry with one value of each metric. The provider must outlive its use.
    fn recorded_metrics() -> (SdkMeterProvider, Registry) {
        let registry = Registry::new();
        let provider = meter_provider(&registry, Resource::builder().build(), None).unwrap();
        let metrics = Metrics::build(&provider.meter("codelia"));
        metrics.run_ended("exited", "logical");
        metrics.step(Step::Commit, Duration::from_millis(2));
        metrics.setup("logical", true, Duration::from_millis(1));
        metrics.request("StartRun", "Ok", Duration::from_millis(3));
        metrics.refused("QUOTA");
        metrics.connections_changed(1);
        metrics.connection_refused("max_connections");
        metrics.key_lookup();
        metrics.violation("SYSCALL_BLOCKED");
        metrics.egress.attempts("connect", "host_not_allowed", 2, 3, 4);
        metrics.egress.sandboxes(1);
        metrics.egress.restarted();
        metrics.worker(4, 1, 2);
        metrics.queue(3, Duration::from_secs(2));
        metrics.removals.removed(10, Duration::from_millis(1));
        metrics.watchers_changed(1);
        (provider, registry)
    }

    /// Started, live, ready.
    #[derive(Debug)]
    struct Fixed([bool; 3]);

    impl Probes for Fixed {
        fn is_started(&self) -> bool {
            self.0[0]
        }

        fn is_live(&self) -> bool {
            self.0[1]
        }

        fn is_ready(&self) -> bool {
            self.0[2]
        }
    }

    fn router_of(registry: Registry, probes: [bool; 3]) -> Router {
        router(registry, Arc::new(Fixed(probes)))
    }

    async fn fetch(router: Router, path: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let options =
            MetricsOptions { max_connections: NonZeroUsize::MIN, ..MetricsOptions::default() };
        let stop = CancellationToken::new();
        let server = task::background("metrics server", serve(listener, options, stop, router));
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        server.abort();
        response
    }

    #[tokio::test]
    async fn metrics_are_served_under_their_names() {
        let (_provider, registry) = recorded_metrics();
        let response = fetch(router_of(registry, [true; 3]), "/metrics").await;
        for line in [
            r#"codelia_runs_total{mode="logical",outcome="exited"} 1"#,
            r#"codelia_run_step_seconds_bucket{step="commit",le="0.002"} 1"#,
            r#"codelia_isolation_setup_seconds_count{mode="logical",prepared="true"} 1"#,
            r#"codelia_request_seconds_count{method="StartRun"} 1"#,
            r#"codelia_requests_total{code="Ok",method="StartRun"} 1"#,
            r#"codelia_refusals_total{reason="QUOTA"} 1"#,
            "codelia_connections 1",
            r#"codelia_connections_refused_total{cap="max_connections"} 1"#,
            "codelia_key_lookups_total 1",
            r#"codelia_sandboxes_total{mode="logical",prepared="true"} 1"#,
            r#"codelia_isolation_setup_p95_seconds{mode="logical"} 0.001"#,
            r#"codelia_violations_total{kind="SYSCALL_BLOCKED"} 1"#,
            r#"codelia_egress_attempts_total{outcome="host_not_allowed",via="connect"} 2"#,
            r#"codelia_egress_bytes_total{direction="received"} 4"#,
            "codelia_egress_sandboxes 1",
            "codelia_egress_restarts_total 1",
            "codelia_slots 4",
            "codelia_slots_busy 1",
            "codelia_leases 2",
            "codelia_queue_depth 3",
            "codelia_queue_age_seconds 2",
            "codelia_watchers 1",
            "codelia_session_directories_removed_total 1",
            "codelia_session_directories_removed_bytes_total 10",
        ] {
            assert!(response.lines().any(|found| found == line), "{line} is not in\n{response}");
        }
    }

    #[tokio::test]
    async fn each_probe_has_its_own_answer() {
        for (number, path) in ["/startupz", "/healthz", "/readyz"].into_iter().enumerate() {
            for holds in [true, false] {
                let mut probes = [!holds; 3];
                probes[number] = holds;
                let answer = fetch(router_of(Registry::new(), probes), path).await;
                let status = if holds { "HTTP/1.1 200" } else { "HTTP/1.1 503" };
                assert!(answer.starts_with(status), "{path}: {answer}");
            }
        }
    }
}
