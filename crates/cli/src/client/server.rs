//! Which server commands call, with which key, and where both come from.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use secrecy::SecretString;
use tonic::transport::Uri;

use super::ClientFile;
use crate::{
    config::Loaded,
    contexts::{Context, Contexts},
};

const EXAMPLE: &str = "http://127.0.0.1:7300";

/// The server that commands call.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) endpoint: String,
    /// The flag, variable or file that names the endpoint.
    pub(crate) endpoint_source: String,
    pub(crate) key: SecretString,
    pub(crate) key_source: String,
    pub(crate) tls_ca: Option<PathBuf>,
}

impl Server {
    /// Finds the server: `--context` or `--endpoint`, then the configured context or endpoint, then
    /// the data directory if one is configured, then the context in use, then the default data
    /// directory. A key that is stored with an endpoint is never sent to another one.
    pub(crate) fn find(loaded: &Loaded) -> Result<Self> {
        let client = &loaded.config.client;
        let is_flag = |path| loaded.source(path).as_deref() == Some("flag");
        match (&client.context, &client.endpoint) {
            (Some(name), Some(_)) if !is_flag("client.context") && !is_flag("client.endpoint") => bail!(
                "both context {name:?} ({}) and an endpoint ({}) are configured: remove one",
                loaded.source("client.context").unwrap_or_default(),
                loaded.source("client.endpoint").unwrap_or_default(),
            ),
            (Some(name), endpoint) if is_flag("client.context") || endpoint.is_none() => {
                let context = Contexts::read()?.get(name)?.clone();
                return Ok(Self::of_context(name, context, loaded));
            }
            (_, Some(endpoint)) => return Self::configured(loaded, endpoint),
            (_, None) => {}
        }
        let names_data_dir = loaded.is_set("data_dir") || client.api_key.is_some();
        if !names_data_dir && let Some((name, context)) = Contexts::read()?.current()? {
            return Ok(Self::of_context(&name, context, loaded));
        }
        Self::of_data_dir(loaded)
    }

    fn of_context(name: &str, context: Context, loaded: &Loaded) -> Self {
        let source = format!("context {name}");
        Self {
            endpoint: context.endpoint,
            endpoint_source: source.clone(),
            key: context.api_key.into(),
            key_source: source,
            tls_ca: context.tls_ca.or_else(|| loaded.config.client.tls_ca.clone()),
        }
    }

    fn configured(loaded: &Loaded, endpoint: &str) -> Result<Self> {
        let client = &loaded.config.client;
        let endpoint_source = source(loaded, "client.endpoint", "--endpoint");
        let Some(key) = client.api_key.clone() else {
            bail!("{endpoint_source} is set but CODELIA_API_KEY is not: expected both, or a context")
        };
        Ok(Self {
            endpoint: endpoint.to_owned(),
            endpoint_source,
            key,
            key_source: source(loaded, "client.api_key", "a flag"),
            tls_ca: client.tls_ca.clone(),
        })
    }

    fn of_data_dir(loaded: &Loaded) -> Result<Self> {
        let config = &loaded.config;
        let path = config.data_dir.join(super::FILE).display().to_string();
        let Some(file) = ClientFile::read(&config.data_dir)? else {
            bail!(
                "no server configured: start one with `codelia up`, add one with `codelia context add`, or set \
                 CODELIA_ENDPOINT and CODELIA_API_KEY ({path} does not exist)"
            );
        };
        let (key, key_source) = match &config.client.api_key {
            Some(key) => (key.clone(), source(loaded, "client.api_key", "a flag")),
            None => (file.api_key.into(), path.clone()),
        };
        let tls_ca = config.client.tls_ca.clone();
        Ok(Self { endpoint: file.endpoint, endpoint_source: path, key, key_source, tls_ca })
    }

    /// The endpoint as a URL with scheme and host.
    pub(crate) fn uri(&self) -> Result<Uri> {
        parse_endpoint(&self.endpoint).with_context(|| format!("invalid endpoint ({})", self.endpoint_source))
    }
}

/// Parses an endpoint. The error says what is missing.
pub(crate) fn parse_endpoint(endpoint: &str) -> Result<Uri> {
    let expected = || format!("{endpoint:?}: expected a URL such as {EXAMPLE}");
    let uri: Uri = endpoint.parse().with_context(expected)?;
    match uri.scheme_str() {
        Some("http" | "https") => {}
        Some(other) => bail!("{endpoint:?}: expected the scheme http or https, found {other}"),
        None if uri.authority().is_some() => {
            bail!("{endpoint:?}: the scheme is missing: expected http://{endpoint} or https://{endpoint}")
        }
        None => bail!(expected()),
    }
    ensure!(
        matches!(uri.path(), "" | "/") && uri.query().is_none(),
        "{endpoint:?}: expected only scheme, host and port, such as {EXAMPLE}"
    );
    Ok(uri)
}

/// Names the source of a configured value for people.
fn source(loaded: &Loaded, path: &str, flag: &str) -> String {
    match loaded.source(path).unwrap_or_default().as_str() {
        "flag" => flag.to_owned(),
        source => source.strip_prefix("env:").or(source.strip_prefix("file:")).unwrap_or(source).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret;

    use super::*;
    use crate::{client::FILE, config::tests::loaded};

    #[test]
    fn local_key_is_not_sent_to_configured_endpoint() {
        let loaded = loaded(None, &[], &[("CODELIA_ENDPOINT", "http://elsewhere:1")]).unwrap();
        assert!(Server::find(&loaded).unwrap_err().to_string().contains("CODELIA_API_KEY"));
    }

    #[test]
    fn configured_key_overrides_client_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE), "endpoint = \"http://here:1\"\napi_key = \"cdl_a\"\n").unwrap();
        let data_dir = ("CODELIA_DATA_DIR", dir.path().to_str().unwrap());
        let server = Server::find(&loaded(None, &[], &[data_dir]).unwrap()).unwrap();
        assert_eq!((server.endpoint.as_str(), server.key.expose_secret()), ("http://here:1", "cdl_a"));
        let both = [data_dir, ("CODELIA_API_KEY", "cdl_b")];
        let server = Server::find(&loaded(None, &[], &both).unwrap()).unwrap();
        assert_eq!((server.key.expose_secret(), server.key_source.as_str()), ("cdl_b", "CODELIA_API_KEY"));
    }

    #[test]
    fn endpoint_and_context_together_are_refused() {
        let both = [("CODELIA_ENDPOINT", "http://here:1"), ("CODELIA_CONTEXT", "prod")];
        let error = Server::find(&loaded(None, &[], &both).unwrap()).unwrap_err().to_string();
        assert!(error.contains("remove one"), "{error}");
    }

    #[test]
    fn invalid_endpoint_error_says_what_is_expected() {
        for (endpoint, expected) in [
            ("127.0.0.1:7300", "expected http://127.0.0.1:7300"),
            ("localhost:7300", "expected http://localhost:7300"),
            ("example", "expected http://example"),
            ("ftp://example", "found ftp"),
            ("http://example/v1", "only scheme, host and port"),
            ("/socket", EXAMPLE),
            ("", EXAMPLE),
            ("http://", EXAMPLE),
            ("a b", EXAMPLE),
        ] {
            let error = format!("{:#}", parse_endpoint(endpoint).unwrap_err());
            assert!(error.contains(expected), "{endpoint}: {error}");
        }
        for valid in ["http://a", "https://[::1]:7300/", "http://127.0.0.1:1"] {
            assert!(parse_endpoint(valid).is_ok(), "{valid}");
        }
    }
}
