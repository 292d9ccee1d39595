//! The server: listener, layers, services, shutdown.

use std::{future::Future, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use codelia_proto::{
    PUBLIC_DESCRIPTORS,
    v1::{
        admin_service_server::AdminServiceServer, approval_service_server::ApprovalServiceServer,
        audit_service_server::AuditServiceServer, file_service_server::FileServiceServer,
        flag_service_server::FlagServiceServer, info_service_server::InfoServiceServer,
        policy_service_server::PolicyServiceServer, run_service_server::RunServiceServer,
        session_service_server::SessionServiceServer, tool_service_server::ToolServiceServer,
        volume_service_server::VolumeServiceServer,
    },
};
use codelia_server::{Limits, TlsError, TlsFiles, TlsIdentity, Transport};
use codelia_store::Store;
use codelia_telemetry::{
    TenantPool, metrics,
    task::{CriticalTaskEnded, CriticalTasks},
};
use tokio::{net::TcpListener, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::server::{HealthReporter, health_reporter};
use tonic_reflection::server::Builder as Reflection;
use tower::ServiceExt;

use super::{
    methods::{InvalidMethods, Methods},
    rate_limit::RateLimits,
    request::RequestService,
    web::{Schema, WebService, to_grpc},
};
use crate::{
    admin::Admin,
    admission::quota::{RunQuota, SessionQuota, StorageQuota},
    approvals::Approvals,
    audit::service::AuditEvents,
    auth::{AuthService, Authenticator},
    cache::Recently,
    context::Context,
    files::{Files, RECORD_INTERVAL},
    flags::{self, FlagRules, Flags},
    info::Info,
    options::Options,
    policy::{cache::TenantPolicies, service::Policies},
    runs::Runs,
    sessions::{Sessions, cache::SessionCache},
    tools::{ToolCache, Tools},
    upkeep::{HealthMonitor, alerts, keep_up},
    volumes::Volumes,
    workers::WorkerCalls,
};

/// How many checks of large policies may wait, for each tenant.
const MAX_WAITING_CHECKS: usize = 64;
/// How long connections may take to close after their streams were ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Why the server cannot start or continue.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: std::io::Error,
    },
    /// The certificate or key of the public endpoint is unusable.
    #[error("cannot use the TLS certificate or key of the public endpoint")]
    Tls(#[source] TlsError),
    /// The certificates for the connections to workers are unusable.
    #[error("cannot use the TLS certificates for connections to workers")]
    InternalTls(#[source] TlsError),
    /// A method does not declare who may call it: a bug.
    #[error("cannot serve the methods of the API")]
    Methods(#[source] InvalidMethods),
    /// The messages of the API cannot be described for JSON: a bug.
    #[error("cannot describe the API for JSON")]
    Schema(#[source] prost_reflect::DescriptorError),
    /// Reflection cannot be set up: a bug.
    #[error("cannot set up gRPC reflection")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// A loop of upkeep ended: the process must be restarted.
    #[error("a loop of upkeep ended")]
    CriticalTask(#[source] CriticalTaskEnded),
}

/// A server that listens and does not answer yet.
#[derive(Debug)]
pub struct Service {
    context: Arc<Context>,
    methods: Arc<Methods>,
    connections: Limits,
    transport: Transport,
    certificates: Vec<Arc<TlsIdentity>>,
    listener: TcpListener,
    address: SocketAddr,
}

impl Service {
    /// Checks the certificates and listens.
    ///
    /// # Errors
    /// If the address is in use or a certificate is unusable.
    pub async fn bind(options: Options, store: Store) -> Result<Self, Error> {
        let identity = load(options.tls.as_ref()).map_err(Error::Tls)?;
        let internal_identity = load(options.internal_tls.as_ref()).map_err(Error::InternalTls)?;
        let methods = Arc::new(Methods::load().map_err(Error::Methods)?);
        metrics().start_api(methods.paths().map(|path| methods.label(path).to_owned()));
        let (listener, address) = listen(options.api.listen).await?;
        let connections = options.api.connections(options.open_files);
        let transport = transport(&connections, identity.clone());
        let certificates = identity.into_iter().chain(internal_identity.clone()).collect();
        let context = Arc::new(Context {
            worker_calls: WorkerCalls::new(store.clone(), internal_identity, options.api.placement),
            session_cache: SessionCache::default(),
            flags: FlagRules::default(),
            tenant_policies: TenantPolicies::default(),
            traversals: Recently::new(RECORD_INTERVAL),
            tools: ToolCache::default(),
            storage_quota: StorageQuota::default(),
            list_reads: RateLimits::default(),
            run_quota: RunQuota::default(),
            session_quota: SessionQuota::default(),
            policy_checks: TenantPool::new(MAX_WAITING_CHECKS),
            stop_streams: CancellationToken::new(),
            options,
            store,
        });
        Ok(Self { context, methods, connections, transport, certificates, listener, address })
    }

    /// The address it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Calls the worker with this address directly: it runs in this process.
    pub fn add_local_worker(&self, address: &str, services: Routes) {
        self.context.worker_calls.add_local(address, services);
    }

    /// Answers until `shutdown`, lets calls finish for the configured time, then ends them.
    ///
    /// # Errors
    /// If a loop of upkeep ends; not if a call or a connection fails.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<(), Error> {
        let (reporter, health) = health_reporter();
        let routes = add_reflection(api_routes(&self.context).add_service(health))?;
        let options = &self.context.options;
        // From the inside to the outside: a request passes them in the reverse order.
        let service = routes.map_request(to_grpc);
        let service = AuthService {
            auth: Authenticator::new(self.context.store.clone(), options, self.methods.clone()),
            inner: service,
        };
        let service = RequestService {
            methods: self.methods.clone(),
            access_log: options.access_log,
            inner: service,
        };
        let schema = Schema::load().map_err(Error::Schema)?;
        let service = WebService::new(schema, &options.api.cors_origins, service);
        let tasks = start_upkeep(&self.context, reporter, &self.methods, &shutdown);
        for identity in self.certificates {
            tasks.critical("certificates", identity.follow());
        }
        let serving = codelia_server::serve(
            self.listener,
            self.transport,
            service,
            self.connections,
            shutdown.clone(),
        );
        let lifetime = Lifetime {
            shutdown,
            grace: options.shutdown_grace,
            stop_streams: self.context.stop_streams.clone(),
        };
        lifetime.run(serving, tasks).await
    }
}

/// When the server stops, and how.
#[derive(Debug)]
struct Lifetime {
    shutdown: CancellationToken,
    grace: Duration,
    stop_streams: CancellationToken,
}

impl Lifetime {
    /// Serves until shutdown or until a task fails, then drains. Dropping `tasks` stops them.
    async fn run(
        self,
        serving: impl Future<Output = ()>,
        mut tasks: CriticalTasks,
    ) -> Result<(), Error> {
        let mut serving = pin!(serving);
        tokio::select! {
            () = &mut serving => return Ok(()),
            ended = tasks.failed() => {
                self.stop_streams.cancel();
                return Err(Error::CriticalTask(ended));
            }
            () = self.shutdown.cancelled() => {}
        }
        if timeout(self.grace, &mut serving).await.is_ok() {
            return Ok(());
        }
        tracing::info!(
            grace_seconds = self.grace.as_secs_f64(),
            "shutdown grace over, ending open streams"
        );
        self.stop_streams.cancel();
        if timeout(CLOSE_TIMEOUT, &mut serving).await.is_err() {
            tracing::debug!("connections are still open");
        }
        Ok(())
    }
}

/// Starts the loops of upkeep. They stop at shutdown but end only when dropped: a loop that ends
/// by itself is a failure.
fn start_upkeep(
    context: &Arc<Context>,
    reporter: HealthReporter,
    methods: &Methods,
    shutdown: &CancellationToken,
) -> CriticalTasks {
    let tasks = CriticalTasks::default();
    let health = HealthMonitor::new(context.store.clone(), reporter, methods);
    tasks.critical("health", health.run(shutdown.clone()));
    tasks.critical("mode flags", flags::follow(context.clone(), shutdown.clone()));
    let store = context.store.clone();
    tasks.critical("audit checkpoints", async move { store.audit_checkpoints_run().await });
    let webhook = context.options.webhook.clone();
    if let Some(webhook) = webhook {
        tasks.critical("alerts", alerts::send(webhook, context.store.clone()));
    }
    tasks.critical(
        "upkeep",
        keep_up(context.store.clone(), context.options.retention, shutdown.clone()),
    );
    tasks
}

fn load(files: Option<&TlsFiles>) -> Result<Option<Arc<TlsIdentity>>, TlsError> {
    files.cloned().map(TlsIdentity::load).transpose()
}

fn transport(connections: &Limits, identity: Option<Arc<TlsIdentity>>) -> Transport {
    let server = connections.server().accept_http1(true);
    match identity {
        Some(identity) => Transport::with_tls(server, identity),
        None => server.into(),
    }
}

async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), Error> {
    let failed = |source| Error::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

fn api_routes(context: &Arc<Context>) -> Routes {
    Routes::new(SessionServiceServer::new(Sessions { context: context.clone() }))
        .add_service(RunServiceServer::new(Runs { context: context.clone() }))
        .add_service(FileServiceServer::new(Files { context: context.clone() }))
        .add_service(ApprovalServiceServer::new(Approvals { context: context.clone() }))
        .add_service(AuditServiceServer::new(AuditEvents {
            context: context.clone(),
            check: Arc::default(),
        }))
        .add_service(PolicyServiceServer::new(Policies { context: context.clone() }))
        .add_service(AdminServiceServer::new(Admin { context: context.clone() }))
        .add_service(InfoServiceServer::new(Info { context: context.clone() }))
        .add_service(FlagServiceServer::new(Flags { context: context.clone() }))
        .add_service(ToolServiceServer::new(Tools { context: context.clone() }))
        .add_service(VolumeServiceServer::new(Volumes { context: context.clone() }))
}

/// Adds reflection in version v1, and in v1alpha for older tools.
fn add_reflection(routes: Routes) -> Result<Routes, Error> {
    let builder = || {
        Reflection::configure()
            .register_encoded_file_descriptor_set(PUBLIC_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = builder().build_v1().map_err(Error::Reflection)?;
    let v1alpha = builder().build_v1alpha().map_err(Error::Reflection)?;
    Ok(routes.add_service(v1).add_service(v1alpha))
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    fn lifetime() -> Lifetime {
        Lifetime {
            shutdown: CancellationToken::new(),
            grace: Duration::ZERO,
            stop_streams: CancellationToken::new(),
        }
    }

    #[tokio::test]
    async fn panic_in_upkeep_ends_the_server() {
        let (lifetime, tasks) = (lifetime(), CriticalTasks::default());
        let stop_streams = lifetime.stop_streams.clone();
        tasks.critical("upkeep", async { panic!("broken") });
        let ended = lifetime.run(pending(), tasks).await;
        assert!(
            matches!(ended, Err(Error::CriticalTask(CriticalTaskEnded { name: "upkeep" }))),
            "{ended:?}"
        );
        assert!(stop_streams.is_cancelled(), "open streams end with the server");
    }

    #[tokio::test]
    async fn early_return_of_upkeep_ends_the_server() {
        let tasks = CriticalTasks::default();
        tasks.critical("health", async {});
        let ended = lifetime().run(pending(), tasks).await;
        assert!(
            matches!(ended, Err(Error::CriticalTask(CriticalTaskEnded { name: "health" }))),
            "{ended:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn shutdown_ends_streams_after_grace() {
        let (lifetime, tasks) = (lifetime(), CriticalTasks::default());
        tasks.critical("upkeep", pending());
        lifetime.shutdown.cancel();
        let stop_streams = lifetime.stop_streams.clone();
        assert!(lifetime.run(pending(), tasks).await.is_ok());
        assert!(stop_streams.is_cancelled());
    }
}
