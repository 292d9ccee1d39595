//! Connection to the API server: endpoint, credentials and service clients.

mod calls;
mod client_file;
mod diagnosis;
mod server;

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1;
use secrecy::{ExposeSecret, SecretString};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use crate::settings::Settings;

pub use self::{
    calls::{Call, List},
    client_file::{ClientFile, FILE},
    diagnosis::KeyRejected,
    server::{Server, parse_endpoint},
};

/// Certificates that the system trusts.
const SYSTEM_CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

pub type Service = InterceptedService<Channel, ApiKey>;

/// An authenticated connection to a server. Clones share it.
#[derive(Debug, Clone)]
pub struct Client {
    service: Service,
    server: Arc<Server>,
}

/// Adds the API key to every call.
#[derive(Debug, Clone)]
pub struct ApiKey(MetadataValue<Ascii>);

impl Interceptor for ApiKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

impl Client {
    /// Connects to the server that [`Server::find`] finds.
    pub async fn connect(settings: &Settings) -> Result<Self> {
        Self::connect_with(Server::find(settings)?).await
    }

    /// Connects to the server at `endpoint`, which this process started.
    pub async fn connect_to(endpoint: &str, key: &SecretString, ca: Option<&Path>) -> Result<Self> {
        let source = "this process".to_owned();
        Self::connect_with(Server {
            endpoint: endpoint.to_owned(),
            endpoint_source: source.clone(),
            key: key.clone(),
            key_source: source,
            tls_ca: ca.map(Path::to_owned),
        })
        .await
    }

    async fn connect_with(server: Server) -> Result<Self> {
        let mut header: MetadataValue<Ascii> =
            format!("Bearer {}", server.key.expose_secret()).parse().with_context(|| {
                format!("the API key from {} is not printable ASCII", server.key_source)
            })?;
        header.set_sensitive(true);
        let channel = match transport(&server)?.connect().await {
            Ok(channel) => channel,
            Err(error) => return Err(diagnosis::explain(&server, error.into()).await),
        };
        let service = InterceptedService::new(channel, ApiKey(header));
        Ok(Self { service, server: Arc::new(server) })
    }

    /// Adds to an error of the connection or the key what was expected and what was found.
    pub async fn explained<T>(&self, result: Result<T>) -> Result<T> {
        match result {
            Err(error) => Err(diagnosis::explain(&self.server, error).await),
            ok => ok,
        }
    }
}

macro_rules! services {
    ($($name:ident: $module:ident::$client:ident,)+) => {
        impl Client {$(
            #[doc = concat!("A `", stringify!($client), "` on this connection.")]
            pub fn $name(&self) -> v1::$module::$client<Service> {
                v1::$module::$client::new(self.service.clone())
            }
        )+}
    };
}

services! {
    sessions: session_service_client::SessionServiceClient,
    runs: run_service_client::RunServiceClient,
    files: file_service_client::FileServiceClient,
    approvals: approval_service_client::ApprovalServiceClient,
    policies: policy_service_client::PolicyServiceClient,
    info: info_service_client::InfoServiceClient,
    audit: audit_service_client::AuditServiceClient,
    tools: tool_service_client::ToolServiceClient,
    volumes: volume_service_client::VolumeServiceClient,
    flags: flag_service_client::FlagServiceClient,
    admin: admin_service_client::AdminServiceClient,
}

fn transport(server: &Server) -> Result<Endpoint> {
    let uri = server.uri()?;
    let is_tls = uri.scheme_str() == Some("https");
    let transport = Endpoint::from(uri)
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    if is_tls { Ok(transport.tls_config(tls(server.tls_ca.as_deref())?)?) } else { Ok(transport) }
}

fn tls(ca: Option<&Path>) -> Result<ClientTlsConfig> {
    let path = ca.unwrap_or(Path::new(SYSTEM_CERTIFICATES));
    let pem = std::fs::read(path)
        .with_context(|| format!("cannot read CA certificates from {}", path.display()))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

/// The parent of the runs and approvals of all sessions.
pub(crate) const ALL_SESSIONS: &str = "sessions/-";

/// Returns the resource name of an object that is given by it, or by its id in a collection.
pub fn resource_name(collection: &str, text: &str) -> String {
    let is_name = text.strip_prefix(collection).is_some_and(|rest| rest.starts_with('/'));
    if is_name { text.to_owned() } else { format!("{collection}/{text}") }
}

/// Returns the resource name of a session given by id, alias or resource name.
pub fn session_name(session: &str) -> String {
    resource_name("sessions", session)
}

/// Returns the resource name of a run given by id or resource name.
pub fn run_name(run: &str) -> String {
    if run.starts_with("sessions/") { run.to_owned() } else { format!("sessions/-/runs/{run}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_become_resource_names() {
        assert_eq!(session_name("work"), "sessions/work");
        assert_eq!(session_name("sessions/work"), "sessions/work");
        assert_eq!(run_name("7"), "sessions/-/runs/7");
        assert_eq!(run_name("sessions/a/runs/7"), "sessions/a/runs/7");
    }
}
