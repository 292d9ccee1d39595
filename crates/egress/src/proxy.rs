//! What all sandboxes have in common: settings, secrets, the way out, and the queue of reports.

use std::{fs, io, path::PathBuf, sync::Arc};

use codelia_policy::EgressRules;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, pem::PemObject},
};

use crate::{
    address::AddressRules,
    authority::{Authority, AuthorityError},
    config::{self, Config},
    connect::Connector,
    credentials::{self, Credential, Credentials, CredentialsError},
    limits::Capacity,
    report::Reports,
    resolver::{Resolver, parse_servers},
    target::Target,
    terminate,
    upstream::Upstream,
};

const RESOLV_CONF: &str = "/etc/resolv.conf";

/// The proxy cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No DNS server is configured.
    #[error("no DNS server: set the proxy's resolvers or name one in {RESOLV_CONF}")]
    NoResolver,
    /// Hosts have credentials, but their TLS cannot be terminated.
    #[error("credentials need a certificate authority: set its files")]
    NoAuthority,
    /// The credentials cannot be used.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// The certificate authority cannot be used.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// A file has no certificate.
    #[error("{0} has no valid certificate")]
    Roots(PathBuf),
    /// TLS cannot be set up.
    #[error("cannot set up TLS")]
    Tls(#[from] rustls::Error),
}

/// The state of the process.
#[derive(Debug)]
pub(crate) struct Proxy {
    pub(crate) config: Config,
    pub(crate) connector: Connector,
    credentials: Credentials,
    pub(crate) tls: Option<Tls>,
    pub(crate) capacity: Arc<Capacity>,
    pub(crate) reports: Reports,
}

/// What terminating TLS takes.
#[derive(Debug)]
pub(crate) struct Tls {
    pub(crate) authority: Authority,
    pub(crate) client: Arc<ClientConfig>,
}

impl Proxy {
    /// Reads all files. The process needs none afterwards.
    pub(crate) fn new(config: Config, max_connections: usize) -> Result<Self, SetupError> {
        let (credentials, mut logins) = match &config.credentials_file {
            Some(path) => credentials::read(path)?,
            None => Default::default(),
        };
        let tls = if credentials.is_empty() { None } else { Some(Tls::new(&config)?) };
        let upstream_of = |(tenant, config): (&String, &config::Upstream)| {
            let login = logins.tenants.remove(tenant);
            (tenant.clone(), Upstream { config: config.clone(), login })
        };
        let tenant_upstreams = config.tenant_upstreams.iter().map(upstream_of).collect();
        let connector = Connector {
            addresses: AddressRules::new(config.private_addresses.clone(), config.own_addresses.clone()),
            resolver: Resolver::new(resolvers(&config)?),
            upstream: config.upstream.clone().map(|config| Upstream { config, login: logins.upstream }),
            tenant_upstreams,
            timeout: config.connect_timeout,
        };
        let (capacity, reports) = (Capacity::new(max_connections), Reports::default());
        Ok(Self { config, connector, credentials, tls, capacity, reports })
    }

    /// The secret that requests of a sandbox for this host get.
    pub(crate) fn credential(&self, rules: &EgressRules, target: &Target) -> Option<Arc<Credential>> {
        self.credentials.find(&rules.credentials, &target.host)
    }
}

impl Tls {
    fn new(config: &Config) -> Result<Self, SetupError> {
        let files = config.authority.as_ref().ok_or(SetupError::NoAuthority)?;
        Ok(Self { authority: Authority::load(files)?, client: terminate::client_config(roots(config)?)? })
    }
}

fn resolvers(config: &Config) -> Result<Vec<std::net::SocketAddr>, SetupError> {
    if !config.resolvers.is_empty() {
        return Ok(config.resolvers.clone());
    }
    let text = read(&PathBuf::from(RESOLV_CONF))?;
    let servers = parse_servers(&text);
    if servers.is_empty() { Err(SetupError::NoResolver) } else { Ok(servers) }
}

/// The system's authorities and the configured ones. Those that cannot be read are left out, which
/// fails connections at most.
fn roots(config: &Config) -> Result<RootCertStore, SetupError> {
    let mut roots = RootCertStore::empty();
    let system = rustls_native_certs::load_native_certs();
    roots.add_parsable_certificates(system.certs);
    if let Some(path) = &config.extra_roots_file {
        let text = read(path)?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text.as_bytes()).collect();
        let certificates = certificates.ok().filter(|found| !found.is_empty());
        for certificate in certificates.ok_or_else(|| SetupError::Roots(path.clone()))? {
            roots.add(certificate)?;
        }
    }
    Ok(roots)
}

fn read(path: &PathBuf) -> Result<String, SetupError> {
    fs::read_to_string(path).map_err(|source| SetupError::Read { path: path.clone(), source })
}
