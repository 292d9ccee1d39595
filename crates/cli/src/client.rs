//! Connection to the API server: endpoint, credentials and service clients.

use std::{path::Path, time::Duration};

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{
    admin_service_client::AdminServiceClient, file_service_client::FileServiceClient,
    policy_service_client::PolicyServiceClient, run_service_client::RunServiceClient,
    session_service_client::SessionServiceClient,
};
use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};
use tonic::{
    Request, Status,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint},
};

use crate::config::Config;

/// File in the data directory with the endpoint and key of the local `up`.
pub(crate) const FILE: &str = "client.toml";

/// Certificates that the system trusts.
const SYSTEM_CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(20);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Contents of `client.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClientFile {
    pub(crate) endpoint: String,
    pub(crate) api_key: String,
}

impl ClientFile {
    /// Reads the file in a data directory; `None` if it does not exist.
    pub(crate) fn read(data_dir: &Path) -> Result<Option<Self>> {
        let path = data_dir.join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        toml::from_str(&text).map(Some).with_context(|| format!("cannot read {}", path.display()))
    }
}

pub(crate) type Service = InterceptedService<Channel, ApiKey>;

/// An authenticated connection to a server. Clones share it.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    service: Service,
}

/// Adds the API key to every call.
#[derive(Debug, Clone)]
pub(crate) struct ApiKey(MetadataValue<Ascii>);

impl Interceptor for ApiKey {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

impl Client {
    /// Connects to the configured server, or to the local `up` if none is configured.
    pub(crate) async fn connect(config: &Config) -> Result<Self> {
        let (endpoint, key) = find_server(config)?;
        Self::connect_to(&endpoint, &key, config.client.tls_ca.as_deref()).await
    }

    /// Connects to the server at `endpoint`.
    pub(crate) async fn connect_to(endpoint: &str, key: &SecretString, ca: Option<&Path>) -> Result<Self> {
        let mut header: MetadataValue<Ascii> = format!("Bearer {}", key.expose_secret())
            .parse()
            .context("the API key contains characters that a header cannot hold")?;
        header.set_sensitive(true);
        let channel = transport(endpoint, ca)?
            .connect()
            .await
            .with_context(|| format!("cannot reach {endpoint} (is the server running?)"))?;
        Ok(Self { service: InterceptedService::new(channel, ApiKey(header)) })
    }

    pub(crate) fn sessions(&self) -> SessionServiceClient<Service> {
        SessionServiceClient::new(self.service.clone())
    }

    pub(crate) fn runs(&self) -> RunServiceClient<Service> {
        RunServiceClient::new(self.service.clone())
    }

    pub(crate) fn files(&self) -> FileServiceClient<Service> {
        FileServiceClient::new(self.service.clone())
    }

    pub(crate) fn policies(&self) -> PolicyServiceClient<Service> {
        PolicyServiceClient::new(self.service.clone())
    }

    pub(crate) fn admin(&self) -> AdminServiceClient<Service> {
        AdminServiceClient::new(self.service.clone())
    }
}

/// Returns endpoint and key. The key in `client.toml` is never sent to a configured endpoint.
fn find_server(config: &Config) -> Result<(String, SecretString)> {
    let client = &config.client;
    match (&client.endpoint, &client.api_key) {
        (Some(endpoint), Some(key)) => return Ok((endpoint.clone(), key.clone())),
        (Some(_), None) => bail!("CODELIA_ENDPOINT is set but CODELIA_API_KEY is not"),
        (None, _) => {}
    }
    let Some(file) = ClientFile::read(&config.data_dir)? else {
        bail!(
            "no server configured: start one with `codelia up`, or set CODELIA_ENDPOINT and CODELIA_API_KEY ({} does not exist)",
            config.data_dir.join(FILE).display()
        );
    };
    let key = client.api_key.clone().unwrap_or_else(|| file.api_key.into());
    Ok((file.endpoint, key))
}

fn transport(endpoint: &str, ca: Option<&Path>) -> Result<Endpoint> {
    let transport = Endpoint::from_shared(endpoint.to_owned())
        .with_context(|| {
            format!("invalid endpoint {endpoint:?}: expected a URL such as http://127.0.0.1:7300")
        })?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(KEEP_ALIVE_INTERVAL)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .keep_alive_while_idle(true);
    if endpoint.starts_with("https:") { Ok(transport.tls_config(tls(ca)?)?) } else { Ok(transport) }
}

fn tls(ca: Option<&Path>) -> Result<ClientTlsConfig> {
    let path = ca.unwrap_or(Path::new(SYSTEM_CERTIFICATES));
    let pem = std::fs::read(path)
        .with_context(|| format!("cannot read CA certificates from {}", path.display()))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

/// Collects at most `limit` items from a paged list. `fetch` takes a page token and returns the
/// items and the next token.
pub(crate) async fn pages<T>(
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
pub(crate) fn session_name(session: &str) -> String {
    if session.starts_with("sessions/") { session.to_owned() } else { format!("sessions/{session}") }
}

/// Returns the resource name of a run given by id or resource name.
pub(crate) fn run_name(run: &str) -> String {
    if run.starts_with("sessions/") { run.to_owned() } else { format!("sessions/-/runs/{run}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::loaded;

    #[test]
    fn local_key_is_not_sent_to_configured_endpoint() {
        let loaded = loaded(None, &[], &[("CODELIA_ENDPOINT", "http://elsewhere:1")]).unwrap();
        assert!(find_server(&loaded.config).unwrap_err().to_string().contains("CODELIA_API_KEY"));
    }

    #[test]
    fn configured_key_overrides_client_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "endpoint = \"http://here:1\"\napi_key = \"cdl_a\"\n").unwrap();
        let data_dir = ("CODELIA_DATA_DIR", dir.path().to_str().unwrap());
        let (endpoint, key) = find_server(&loaded(None, &[], &[data_dir]).unwrap().config).unwrap();
        assert_eq!((endpoint.as_str(), key.expose_secret()), ("http://here:1", "cdl_a"));
        let both = [data_dir, ("CODELIA_API_KEY", "cdl_b")];
        let (_, key) = find_server(&loaded(None, &[], &both).unwrap().config).unwrap();
        assert_eq!(key.expose_secret(), "cdl_b");
    }

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
