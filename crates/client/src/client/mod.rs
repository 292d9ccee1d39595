//! Connection to the API server: endpoint, credentials and service clients.

mod diagnosis;
mod server;

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    admin_service_client::AdminServiceClient, approval_service_client::ApprovalServiceClient,
    audit_service_client::AuditServiceClient, file_service_client::FileServiceClient,
    flag_service_client::FlagServiceClient, info_service_client::InfoServiceClient,
    policy_service_client::PolicyServiceClient, run_service_client::RunServiceClient,
    session_service_client::SessionServiceClient, tool_service_client::ToolServiceClient,
    volume_service_client::VolumeServiceClient,
};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use crate::settings::Settings;

pub use self::{
    diagnosis::KeyRejected,
    server::{Server, parse_endpoint},
};

/// File in the data directory with the endpoint and key of the local `up`.
pub const FILE: &str = "client.toml";

/// Certificates that the system trusts.
const SYSTEM_CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Contents of `client.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientFile {
    pub endpoint: String,
    pub api_key: String,
}

impl ClientFile {
    /// Reads the file in a data directory; `None` if it does not exist.
    pub fn read(data_dir: &Path) -> Result<Option<Self>> {
        let path = data_dir.join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
        };
        toml::from_str(&text).map(Some).with_context(|| format!("cannot read {}", path.display()))
    }
}

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

    pub fn sessions(&self) -> SessionServiceClient<Service> {
        SessionServiceClient::new(self.service.clone())
    }

    pub fn runs(&self) -> RunServiceClient<Service> {
        RunServiceClient::new(self.service.clone())
    }

    pub fn files(&self) -> FileServiceClient<Service> {
        FileServiceClient::new(self.service.clone())
    }

    pub fn approvals(&self) -> ApprovalServiceClient<Service> {
        ApprovalServiceClient::new(self.service.clone())
    }

    pub fn policies(&self) -> PolicyServiceClient<Service> {
        PolicyServiceClient::new(self.service.clone())
    }

    pub fn info(&self) -> InfoServiceClient<Service> {
        InfoServiceClient::new(self.service.clone())
    }

    pub fn audit(&self) -> AuditServiceClient<Service> {
        AuditServiceClient::new(self.service.clone())
    }

    pub fn tools(&self) -> ToolServiceClient<Service> {
        ToolServiceClient::new(self.service.clone())
    }

    pub fn volumes(&self) -> VolumeServiceClient<Service> {
        VolumeServiceClient::new(self.service.clone())
    }

    pub fn flags(&self) -> FlagServiceClient<Service> {
        FlagServiceClient::new(self.service.clone())
    }

    pub fn admin(&self) -> AdminServiceClient<Service> {
        AdminServiceClient::new(self.service.clone())
    }
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

/// Collects at most `limit` items from a paged list. `fetch` takes a page token and returns the
/// items and the next token.
pub async fn pages<T>(
    limit: usize,
    mut fetch: impl AsyncFnMut(String) -> Result<(Vec<T>, String), Status>,
) -> Result<Vec<T>> {
    let mut items = Vec::new();
    let mut token = String::new();
    loop {
        let (page, next_token) = fetch(token).await?;
        items.extend(page);
        if next_token.is_empty() || items.len() >= limit {
            items.truncate(limit);
            return Ok(items);
        }
        token = next_token;
    }
}

/// Returns the resource name of a session given by id, alias or resource name.
pub fn session_name(session: &str) -> String {
    if session.starts_with("sessions/") {
        session.to_owned()
    } else {
        format!("sessions/{session}")
    }
}

/// Returns the resource name of a run given by id or resource name.
pub fn run_name(run: &str) -> String {
    if run.starts_with("sessions/") { run.to_owned() } else { format!("sessions/-/runs/{run}") }
}

/// Returns the resource name of an approval given by id or resource name.
pub fn approval_name(approval: &str) -> String {
    if approval.starts_with("approvals/") {
        approval.to_owned()
    } else {
        format!("approvals/{approval}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn pages_stop_at_limit_or_end() {
        let page = async |token: String| {
            let next = if token.len() < 3 { format!("{token}x") } else { String::new() };
            Ok((vec![token.len(); 2], next))
        };
        assert_eq!(pages(3, page).await.unwrap(), [0, 0, 1]);
        assert_eq!(pages(usize::MAX, page).await.unwrap(), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn ids_become_resource_names() {
        assert_eq!(session_name("work"), "sessions/work");
        assert_eq!(session_name("sessions/work"), "sessions/work");
        assert_eq!(run_name("7"), "sessions/-/runs/7");
        assert_eq!(run_name("sessions/a/runs/7"), "sessions/a/runs/7");
    }
}
