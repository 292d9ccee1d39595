//! The way to a server: where it is, who we are, the services.

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

/// The file in the data directory that tells how to reach the local `up`.
pub(crate) const FILE: &str = "client.toml";

/// Where distributions keep the certificates they trust.
const SYSTEM_CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// What `client.toml` says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClientFile {
    pub(crate) endpoint: String,
    pub(crate) api_key: String,
}

impl ClientFile {
    /// Reads it from a data directory; `None` if there is none.
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

pub(crate) type Service = InterceptedService<Channel, Key>;

/// A connection to a server.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    service: Service,
}

/// Puts our key on every call.
#[derive(Debug, Clone)]
pub(crate) struct Key(MetadataValue<Ascii>);

impl Interceptor for Key {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

impl Client {
    /// Connects to the configured server, else to the local `up`.
    pub(crate) async fn connect(config: &Config) -> Result<Self> {
        let (endpoint, key) = find(config)?;
        Self::connect_to(&endpoint, &key, config.client.tls_ca.as_deref()).await
    }

    /// Connects to a server.
    pub(crate) async fn connect_to(endpoint: &str, key: &SecretString, ca: Option<&Path>) -> Result<Self> {
        let mut header: MetadataValue<Ascii> = format!("Bearer {}", key.expose_secret())
            .parse()
            .context("the API key has characters no key has")?;
        header.set_sensitive(true);
        let reach = || format!("cannot reach {endpoint} (is the server running?)");
        let channel = target(endpoint, ca)?.connect().await.with_context(reach)?;
        Ok(Self { service: InterceptedService::new(channel, Key(header)) })
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

/// A setting of `endpoint` alone must not send the local key elsewhere.
fn find(config: &Config) -> Result<(String, SecretString)> {
    let client = &config.client;
    match (&client.endpoint, &client.api_key) {
        (Some(endpoint), Some(key)) => return Ok((endpoint.clone(), key.clone())),
        (Some(_), None) => bail!("CODELIA_ENDPOINT is set but CODELIA_API_KEY is not"),
        (None, _) => {}
    }
    let Some(file) = ClientFile::read(&config.data_dir)? else {
        bail!(
            "no server is known: start one with `codelia up`, or set CODELIA_ENDPOINT and CODELIA_API_KEY (there is no {})",
            config.data_dir.join(FILE).display()
        );
    };
    let key = client.api_key.clone().unwrap_or_else(|| file.api_key.into());
    Ok((file.endpoint, key))
}

fn target(endpoint: &str, ca: Option<&Path>) -> Result<Endpoint> {
    let target = Endpoint::from_shared(endpoint.to_owned())
        .with_context(|| format!("{endpoint} is no endpoint, such as http://127.0.0.1:7300"))?
        .connect_timeout(Duration::from_secs(5))
        .http2_keep_alive_interval(Duration::from_secs(20))
        .keep_alive_timeout(Duration::from_secs(10))
        .keep_alive_while_idle(true);
    if endpoint.starts_with("https:") { Ok(target.tls_config(tls(ca)?)?) } else { Ok(target) }
}

fn tls(ca: Option<&Path>) -> Result<ClientTlsConfig> {
    let path = ca.unwrap_or(Path::new(SYSTEM_CERTIFICATES));
    let pem =
        std::fs::read(path).with_context(|| format!("cannot read the certificates in {}", path.display()))?;
    Ok(ClientTlsConfig::new().ca_certificate(Certificate::from_pem(pem)))
}

/// The things on the pages that `next` answers, page token by page token, until there are `limit`.
pub(crate) async fn pages<T>(
    limit: usize,
    mut next: impl AsyncFnMut(String) -> Result<(Vec<T>, String), Status>,
) -> Result<Vec<T>> {
    let mut things = Vec::new();
    let mut token = String::new();
    loop {
        let (page, next_token) = next(token).await?;
        things.extend(page);
        if next_token.is_empty() || things.len() >= limit {
            things.truncate(limit);
            return Ok(things);
        }
        token = next_token;
    }
}

/// The resource name of a session given by id, alias or name.
pub(crate) fn session_name(given: &str) -> String {
    if given.starts_with("sessions/") { given.to_owned() } else { format!("sessions/{given}") }
}

/// The resource name of a run given by id or name.
pub(crate) fn run_name(given: &str) -> String {
    if given.starts_with("sessions/") { given.to_owned() } else { format!("sessions/-/runs/{given}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::loaded;

    #[test]
    fn the_local_key_is_not_sent_to_an_endpoint_that_was_set() {
        let loaded = loaded(None, &[], &[("CODELIA_ENDPOINT", "http://elsewhere:1")]).unwrap();
        assert!(find(&loaded.config).unwrap_err().to_string().contains("CODELIA_API_KEY"));
    }

    #[test]
    fn the_server_is_found_by_its_file_and_a_key_that_was_set_wins() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "endpoint = \"http://here:1\"\napi_key = \"cdl_a\"\n").unwrap();
        let data_dir = ("CODELIA_DATA_DIR", dir.path().to_str().unwrap());
        let (endpoint, key) = find(&loaded(None, &[], &[data_dir]).unwrap().config).unwrap();
        assert_eq!((endpoint.as_str(), key.expose_secret()), ("http://here:1", "cdl_a"));
        let both = [data_dir, ("CODELIA_API_KEY", "cdl_b")];
        let (_, key) = find(&loaded(None, &[], &both).unwrap().config).unwrap();
        assert_eq!(key.expose_secret(), "cdl_b");
    }

    #[tokio::test]
    async fn pages_are_read_to_the_limit_or_the_end() {
        let page = async |token: String| {
            let next = if token.len() < 3 { format!("{token}x") } else { String::new() };
            Ok((vec![token.len(); 2], next))
        };
        assert_eq!(pages(3, page).await.unwrap(), [0, 0, 1]);
        assert_eq!(pages(usize::MAX, page).await.unwrap(), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn names_are_taken_as_they_are_and_ids_are_completed() {
        assert_eq!(session_name("work"), "sessions/work");
        assert_eq!(session_name("sessions/work"), "sessions/work");
        assert_eq!(run_name("7"), "sessions/-/runs/7");
        assert_eq!(run_name("sessions/a/runs/7"), "sessions/a/runs/7");
    }
}
