//! Which server commands call, with which key, and where both come from.

use std::path::PathBuf;

use anyhow::{Context as _, Result, bail, ensure};
use secrecy::SecretString;
use tonic::transport::Uri;

use super::client_file::{self, ClientFile};
use crate::{
    contexts::{Context, Contexts},
    settings::Settings,
};

const EXAMPLE: &str = "http://127.0.0.1:7300";

/// The server that commands call.
#[derive(Debug, Clone)]
pub struct Server {
    pub endpoint: String,
    /// The flag, variable or file that names the endpoint.
    pub endpoint_source: String,
    pub key: SecretString,
    pub key_source: String,
    pub tls_ca: Option<PathBuf>,
}

impl Server {
    /// Finds the server: `--context` or `--endpoint`, then the configured context or endpoint, then
    /// the data directory if one is configured, then the context in use, then the default data
    /// directory. A key that is stored with an endpoint is never sent to another one.
    pub fn find(settings: &Settings) -> Result<Self> {
        let client = &settings.options;
        let is_flag = |path| settings.source(path) == Some("flag");
        match (&client.context, &client.endpoint) {
            (Some(name), Some(_)) if !is_flag("client.context") && !is_flag("client.endpoint") => {
                bail!(
                    "both context {name:?} ({}) and an endpoint ({}) are configured: remove one",
                    settings.source("client.context").unwrap_or_default(),
                    settings.source("client.endpoint").unwrap_or_default(),
                )
            }
            (Some(name), endpoint) if is_flag("client.context") || endpoint.is_none() => {
                let context = Contexts::read()?.get(name)?.clone();
                return Ok(Self::from_context(name, context, settings));
            }
            (_, Some(endpoint)) => return Self::from_options(settings, endpoint),
            (_, None) => {}
        }
        let names_data_dir = settings.source("data_dir").is_some() || client.api_key.is_some();
        if !names_data_dir && let Some((name, context)) = Contexts::read()?.current()? {
            return Ok(Self::from_context(&name, context, settings));
        }
        Self::from_data_dir(settings)
    }

    fn from_context(name: &str, context: Context, settings: &Settings) -> Self {
        let source = format!("context {name}");
        Self {
            endpoint: context.endpoint,
            endpoint_source: source.clone(),
            key: context.api_key.into(),
            key_source: source,
            tls_ca: context.tls_ca.or_else(|| settings.options.tls_ca.clone()),
        }
    }

    fn from_options(settings: &Settings, endpoint: &str) -> Result<Self> {
        let client = &settings.options;
        let endpoint_source = source(settings, "client.endpoint", "--endpoint");
        let Some(key) = client.api_key.clone() else {
            bail!(
                "{endpoint_source} is set but CODELIA_API_KEY is not: expected both, or a context"
            )
        };
        Ok(Self {
            endpoint: endpoint.to_owned(),
            endpoint_source,
            key,
            key_source: source(settings, "client.api_key", "a flag"),
            tls_ca: client.tls_ca.clone(),
        })
    }

    fn from_data_dir(settings: &Settings) -> Result<Self> {
        let path = settings.data_dir.join(client_file::FILE).display().to_string();
        let Some(file) = ClientFile::read(&settings.data_dir)? else {
            bail!(
                "no server configured: start one with `codelia up`, add one with `codelia context add`, or set \
                 CODELIA_ENDPOINT and CODELIA_API_KEY ({path} does not exist)"
            );
        };
        let (key, key_source) = match &settings.options.api_key {
            Some(key) => (key.clone(), source(settings, "client.api_key", "a flag")),
            None => (file.api_key.into(), path.clone()),
        };
        let tls_ca = settings.options.tls_ca.clone();
        Ok(Self { endpoint: file.endpoint, endpoint_source: path, key, key_source, tls_ca })
    }

    /// The endpoint as a URL with scheme and host.
    pub fn uri(&self) -> Result<Uri> {
        parse_endpoint(&self.endpoint)
            .with_context(|| format!("invalid endpoint ({})", self.endpoint_source))
    }
}

/// Parses an endpoint. The error says what is missing.
pub fn parse_endpoint(endpoint: &str) -> Result<Uri> {
    let expected = || format!("{endpoint:?}: expected a URL such as {EXAMPLE}");
    let uri: Uri = endpoint.parse().with_context(expected)?;
    match uri.scheme_str() {
        Some("http" | "https") => {}
        Some(other) => bail!("{endpoint:?}: expected the scheme http or https, found {other}"),
        None if uri.authority().is_some() => {
            bail!(
                "{endpoint:?}: the scheme is missing: expected http://{endpoint} or https://{endpoint}"
            )
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
fn source(settings: &Settings, path: &str, flag: &str) -> String {
    match settings.source(path).unwrap_or_default() {
        "flag" => flag.to_owned(),
        source => source
            .strip_prefix("env:")
            .or(source.strip_prefix("file:"))
            .unwrap_or(source)
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use secrecy::ExposeSecret;

    use super::*;
    use crate::{
        client::FILE,
        settings::{Options, Settings},
    };

    /// Settings from variables: the endpoint, the context and the key.
    fn settings(options: Options, data_dir: Option<&Path>) -> Settings {
        let variable =
            |is_set: bool, path, name: &str| is_set.then(|| (path, format!("env:{name}")));
        let sources = [
            variable(data_dir.is_some(), "data_dir", "CODELIA_DATA_DIR"),
            variable(options.endpoint.is_some(), "client.endpoint", "CODELIA_ENDPOINT"),
            variable(options.context.is_some(), "client.context", "CODELIA_CONTEXT"),
            variable(options.api_key.is_some(), "client.api_key", "CODELIA_API_KEY"),
        ];
        let data_dir = data_dir.unwrap_or(Path::new("/state/codelia")).to_owned();
        Settings { data_dir, options, sources: sources.into_iter().flatten().collect() }
    }

    fn endpoint(url: &str) -> Options {
        Options { endpoint: Some(url.into()), ..Options::default() }
    }

    #[test]
    fn local_key_is_not_sent_to_configured_endpoint() {
        let settings = settings(endpoint("http://elsewhere:1"), None);
        assert!(Server::find(&settings).unwrap_err().to_string().contains("CODELIA_API_KEY"));
    }

    #[test]
    fn configured_key_overrides_client_file() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(
            dir.path().join(FILE),
            "endpoint = \"http://here:1\"\napi_key = \"cdl_a\"\n",
        )
        .unwrap();
        let server = Server::find(&settings(Options::default(), Some(dir.path()))).unwrap();
        assert_eq!(
            (server.endpoint.as_str(), server.key.expose_secret()),
            ("http://here:1", "cdl_a")
        );
        let key = Options { api_key: Some("cdl_b".into()), ..Options::default() };
        let server = Server::find(&settings(key, Some(dir.path()))).unwrap();
        assert_eq!(
            (server.key.expose_secret(), server.key_source.as_str()),
            ("cdl_b", "CODELIA_API_KEY")
        );
    }

    #[test]
    fn endpoint_and_context_together_are_refused() {
        let both = Options { context: Some("prod".into()), ..endpoint("http://here:1") };
        let error = Server::find(&settings(both, None)).unwrap_err().to_string();
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
