//! The server itself: its listener, its layers, its services, its end.

use std::{future::Future, net::SocketAddr, pin::pin, sync::Arc, time::Duration};

use codelia_proto::{
    PUBLIC_DESCRIPTORS,
    v1::{
        admin_service_server::AdminServiceServer, file_service_server::FileServiceServer,
        policy_service_server::PolicyServiceServer, run_service_server::RunServiceServer,
        session_service_server::SessionServiceServer,
    },
};
use codelia_store::Store;
use codelia_telemetry::task;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Endpoint, Identity, Server, ServerTlsConfig, server::TcpIncoming},
};
use tonic_health::server::{HealthReporter, health_reporter};
use tonic_reflection::server::Builder as Reflection;
use tower::ServiceBuilder;

use crate::{
    admin::Admin,
    auth::Gate,
    context::Context,
    dispatch::{self, Dispatch},
    files::Files,
    maintenance,
    options::Options,
    policies::Policies,
    quota::OutputQuota,
    request::Calls,
    runs::Runs,
    session_cache::Specs,
    sessions::Sessions,
};

/// Large enough that a request far beyond every bound is read and refused by the name of its field.
const MAX_RUN_REQUEST: usize = 64 * 1024 * 1024;
const KEEPALIVE_EVERY: Duration = Duration::from_secs(30);
const KEEPALIVE_PATIENCE: Duration = Duration::from_secs(10);
/// Calls at once on one connection.
const MAX_STREAMS: u32 = 4096;
/// A client that floods one stream's input must not stall its others.
const STREAM_WINDOW: u32 = 256 * 1024;
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// How long connections may take to close once their streams are cut.
const CUT_PATIENCE: Duration = Duration::from_secs(2);

/// Why the server cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address cannot be listened on.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why not.
        source: std::io::Error,
    },
    /// The public endpoint's certificate or key cannot be used.
    #[error("the certificate or key of the public endpoint cannot be used")]
    Tls(#[source] tonic::transport::Error),
    /// The certificates for workers cannot be used.
    #[error("the certificates for the channel to workers cannot be used")]
    InternalTls(#[source] tonic::transport::Error),
    /// The descriptors of the API cannot be read: a defect.
    #[error("the descriptors of the API cannot be read")]
    Descriptors(#[source] prost::DecodeError),
    /// Reflection cannot be set up: a defect.
    #[error("reflection cannot be set up")]
    Reflection(#[source] tonic_reflection::server::Error),
    /// Serving failed.
    #[error("serving failed")]
    Serve(#[source] tonic::transport::Error),
}

/// A server that listens and does not answer yet.
#[derive(Debug)]
pub struct Service {
    context: Arc<Context>,
    server: Server,
    incoming: TcpIncoming,
    address: SocketAddr,
}

impl Service {
    /// Checks the certificates and listens.
    ///
    /// # Errors
    /// If the address is taken or a certificate cannot be used.
    pub async fn bind(options: Options, store: Store) -> Result<Self, Error> {
        let server = server(&options)?;
        check_internal_tls(&options)?;
        let (incoming, address) = listen(options.listen).await?;
        let context = Arc::new(Context {
            dispatch: Dispatch::new(store.clone(), options.internal_tls.clone()),
            specs: Specs::default(),
            output: OutputQuota::default(),
            cut: CancellationToken::new(),
            options,
            store,
        });
        Ok(Self { context, server, incoming, address })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `shutdown`, then lets calls finish for the configured time, then cuts them.
    ///
    /// # Errors
    /// If serving fails; not for the failure of a call or a connection.
    pub async fn serve(self, shutdown: CancellationToken) -> Result<(), Error> {
        let (reporter, health) = health_reporter();
        let routes = reflected(api(&self.context).add_service(health))?;
        let calls = Calls::new(PUBLIC_DESCRIPTORS).map_err(Error::Descriptors)?;
        // Whatever happens to this future, the tasks beside it end with it.
        let upkeep = shutdown.child_token();
        let _end_upkeep = upkeep.clone().drop_guard();
        start_upkeep(&self.context, reporter, &upkeep);
        let layers = ServiceBuilder::new().layer(calls).layer(Gate::new(self.context.store.clone()));
        let stop = shutdown.clone().cancelled_owned();
        let serving = self.server.layer(layers).serve_with_incoming_shutdown(routes, self.incoming, stop);
        drain(serving, &self.context, &shutdown).await
    }
}

async fn drain(
    serving: impl Future<Output = Result<(), tonic::transport::Error>>,
    context: &Context,
    shutdown: &CancellationToken,
) -> Result<(), Error> {
    let mut serving = pin!(serving);
    tokio::select! {
        ended = &mut serving => return ended.map_err(Error::Serve),
        () = shutdown.cancelled() => {}
    }
    if let Ok(ended) = tokio::time::timeout(context.options.shutdown_grace, &mut serving).await {
        return ended.map_err(Error::Serve);
    }
    tracing::info!("calls are still open after the grace period; they are cut");
    context.cut.cancel();
    match tokio::time::timeout(CUT_PATIENCE, &mut serving).await {
        Ok(ended) => ended.map_err(Error::Serve),
        Err(_) => Ok(()),
    }
}

fn start_upkeep(context: &Arc<Context>, reporter: HealthReporter, stop: &CancellationToken) {
    task::background("sweep", maintenance::sweep(context.clone(), stop.clone()));
    task::background("health", maintenance::watch_health(context.clone(), reporter, stop.clone()));
}

fn server(options: &Options) -> Result<Server, Error> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_EVERY))
        .http2_keepalive_timeout(Some(KEEPALIVE_PATIENCE))
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let Some(tls) = &options.tls else { return Ok(server) };
    let identity = Identity::from_pem(&tls.cert_pem, &tls.key_pem);
    server.tls_config(ServerTlsConfig::new().identity(identity)).map_err(Error::Tls)
}

/// Certificates are used when a worker is first called; a bad one should be known before.
fn check_internal_tls(options: &Options) -> Result<(), Error> {
    let Some(tls) = &options.internal_tls else { return Ok(()) };
    let endpoint = Endpoint::from_static("https://codelia-worker");
    endpoint.tls_config(dispatch::client_tls(tls)).map(drop).map_err(Error::InternalTls)
}

async fn listen(address: SocketAddr) -> Result<(TcpIncoming, SocketAddr), Error> {
    let failed = |source| Error::Listen { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((TcpIncoming::from(listener).with_nodelay(Some(true)), bound))
}

fn api(context: &Arc<Context>) -> Routes {
    let runs = RunServiceServer::new(Runs { context: context.clone() });
    Routes::new(SessionServiceServer::new(Sessions { context: context.clone() }))
        .add_service(runs.max_decoding_message_size(MAX_RUN_REQUEST))
        .add_service(FileServiceServer::new(Files { context: context.clone() }))
        .add_service(PolicyServiceServer::new(Policies { context: context.clone() }))
        .add_service(AdminServiceServer::new(Admin { context: context.clone() }))
}

/// Adds reflection, in its current form and in the one that older tools speak.
fn reflected(routes: Routes) -> Result<Routes, Error> {
    let files = || {
        Reflection::configure()
            .register_encoded_file_descriptor_set(PUBLIC_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let current = files().build_v1().map_err(Error::Reflection)?;
    let older = files().build_v1alpha().map_err(Error::Reflection)?;
    Ok(routes.add_service(current).add_service(older))
}
