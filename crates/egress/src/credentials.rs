//! Secrets that the proxy adds to requests for certain hosts, so that no sandbox ever has them.
//!
//! They come from a TOML file that only its owner can read:
//!
//! ```toml
//! [[credential]]
//! name = "github"
//! host = "api.github.com"
//! header = "authorization"
//! value = "Bearer …"
//!
//! [[credential]]
//! name = "registry"
//! host = "pypi.example.com"
//! username = "ci"
//! password = "…"
//!
//! [upstream]
//! username = "codelia"
//! password = "…"
//!
//! [tenant_upstreams.team-7]
//! username = "team-7"
//! password = "…"
//! ```

use std::{collections::HashMap, fs, os::unix::fs::MetadataExt, path::Path, sync::Arc};

use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;

use crate::{error::SetupError, target::parse_name, upstream::Login};

/// Headers that the proxy itself sets.
const RESERVED: [&str; 5] = ["host", "content-length", "transfer-encoding", "connection", "te"];
/// The longest name or password of SOCKS5.
const MAX_LOGIN: usize = 255;

/// A header with a secret for one host.
#[derive(Debug)]
pub(crate) struct Credential {
    pub(crate) host: String,
    pub(crate) header: String,
    pub(crate) value: SecretString,
}

/// All secrets of the proxy.
#[derive(Debug, Default)]
pub(crate) struct Credentials {
    by_name: HashMap<String, Arc<Credential>>,
}

impl Credentials {
    /// The credential for a host, among those that a sandbox's rules name.
    pub(crate) fn find(&self, names: &[String], host: &str) -> Option<Arc<Credential>> {
        names
            .iter()
            .filter_map(|name| self.by_name.get(name))
            .find(|found| found.host == host)
            .cloned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.by_name.is_empty()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, rename = "credential")]
    credentials: Vec<Entry>,
    upstream: Option<LoginEntry>,
    #[serde(default)]
    tenant_upstreams: HashMap<String, LoginEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    host: String,
    header: Option<String>,
    value: Option<SecretString>,
    username: Option<String>,
    password: Option<SecretString>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LoginEntry {
    username: String,
    password: SecretString,
}

/// The secrets of upstream proxies.
#[derive(Debug, Default)]
pub(crate) struct Logins {
    /// Of the installation's.
    pub(crate) upstream: Option<Login>,
    /// By the id of the tenant.
    pub(crate) tenants: HashMap<String, Login>,
}

/// Reads the secrets of hosts and of upstream proxies.
pub(crate) fn read(path: &Path) -> Result<(Credentials, Logins), SetupError> {
    if fs::metadata(path).map_err(SetupError::read(path))?.mode() & 0o077 != 0 {
        return Err(SetupError::Mode(path.to_owned()));
    }
    let text = SecretString::from(fs::read_to_string(path).map_err(SetupError::read(path))?);
    // The error of the parser would quote the text.
    let file: File = toml::from_str(text.expose_secret())
        .map_err(|_| SetupError::Credentials(path.to_owned()))?;
    let mut by_name = HashMap::new();
    for entry in file.credentials {
        let name = entry.name.clone();
        let problem = |problem| SetupError::Credential { name: name.clone(), problem };
        let credential = Arc::new(entry.parse().map_err(problem)?);
        if by_name.insert(name.clone(), credential).is_some() {
            return Err(problem("the name is used twice"));
        }
    }
    let upstream = file.upstream.map(|entry| entry.parse("upstream".to_owned())).transpose()?;
    let mut tenants = HashMap::new();
    for (tenant, entry) in file.tenant_upstreams {
        let login = entry.parse(format!("tenant_upstreams.{tenant}"))?;
        tenants.insert(tenant, login);
    }
    Ok((Credentials { by_name }, Logins { upstream, tenants }))
}

impl LoginEntry {
    fn parse(self, name: String) -> Result<Login, SetupError> {
        if self.username.len().max(self.password.expose_secret().len()) > MAX_LOGIN {
            let problem = "user name and password have at most 255 bytes";
            return Err(SetupError::Credential { name, problem });
        }
        Ok(Login { username: self.username, password: self.password })
    }
}

impl Entry {
    fn parse(self) -> Result<Credential, &'static str> {
        let host = parse_name(&self.host).map_err(|_| "host must be a host name without a port")?;
        let (header, value) = match (self.header, self.value, self.username, self.password) {
            (Some(header), Some(value), None, None) => (header.to_ascii_lowercase(), value),
            (None, None, Some(username), Some(password)) => {
                ("authorization".to_owned(), Login { username, password }.basic())
            }
            _ => return Err("give either header and value, or username and password"),
        };
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        if header.is_empty() || !header.bytes().all(is_token) || RESERVED.contains(&header.as_str())
        {
            return Err("the header has no valid name or is set by the proxy");
        }
        if !value.expose_secret().bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
            return Err("the value has characters that headers cannot have");
        }
        Ok(Credential { host, header, value })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn read_text(text: &str, mode: u32) -> Result<(Credentials, Logins), SetupError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).unwrap();
        read(file.path())
    }

    #[test]
    fn credentials_are_found_by_name_and_host() {
        let text = r#"
            [[credential]]
            name = "a"
            host = "API.example.com"
            header = "X-Token"
            value = "s3cret"
            [[credential]]
            name = "b"
            host = "b.example.com"
            username = "user"
            password = "pass"
            [upstream]
            username = "u"
            password = "p"
            [tenant_upstreams.team-7]
            username = "t"
            password = "p"
        "#;
        let (credentials, logins) = read_text(text, 0o600).unwrap();
        assert_eq!(logins.upstream.unwrap().username, "u");
        assert_eq!(logins.tenants["team-7"].username, "t");
        let found = credentials.find(&["b".to_owned(), "a".to_owned()], "api.example.com").unwrap();
        assert_eq!((found.header.as_str(), found.value.expose_secret()), ("x-token", "s3cret"));
        let basic = credentials.find(&["b".to_owned()], "b.example.com").unwrap();
        assert_eq!(basic.value.expose_secret(), "Basic dXNlcjpwYXNz");
        assert!(
            credentials.find(&["b".to_owned()], "api.example.com").is_none(),
            "not named by the rules"
        );
        assert!(!format!("{credentials:?}").contains("s3cret"));
    }

    #[test]
    fn invalid_files_are_refused_without_quoting_them() {
        let entry = |fields: &str| {
            format!("[[credential]]\nname = \"a\"\nhost = \"a.example.com\"\n{fields}")
        };
        let texts = [
            entry("value = \"s3cret\""),
            entry("header = \"host\"\nvalue = \"s3cret\""),
            entry("header = \"a b\"\nvalue = \"s3cret\""),
            entry("header = \"a\"\nvalue = \"s3cret\\r\\nx: y\""),
            entry("header = \"a\"\nvalue = \"s3cret\"\nusername = \"x\""),
            entry("header = \"a\"\nvalue = \"s3cret"),
            entry("secret = \"s3cret\""),
        ];
        for text in texts {
            let error = read_text(&text, 0o600).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
        }
        assert!(matches!(read_text("", 0o640), Err(SetupError::Mode(_))));
        assert!(read_text("", 0o600).is_ok());
    }
}
