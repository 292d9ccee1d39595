//! State that all sandboxes share: settings, secrets, the way out, and the queue of reports.

use std::{fs, net::SocketAddr, path::Path, sync::Arc};

use codelia_policy::EgressRules;
use codelia_types::TenantId;

use crate::{
    address::AddressRules,
    config::{self, Config, Options},
    connect::Connector,
    credentials::{self, Credential, Credentials},
    error::SetupError,
    limits::Capacity,
    report::Reports,
    resolver::{RESOLV_CONF, Resolver, parse_servers},
    target::Target,
    tls::Tls,
    upstream::Upstream,
};

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

impl Proxy {
    /// Reads all files. The process needs none afterwards.
    pub(crate) fn new(config: Config, max_connections: usize) -> Result<Self, SetupError> {
        let options = &config.options;
        let (credentials, mut logins) = match &options.credentials_file {
            Some(path) => credentials::read(path)?,
            None => Default::default(),
        };
        let tls = if credentials.is_empty() { None } else { Some(Tls::new(options)?) };
        let upstream_of = |(tenant, config): (&TenantId, &config::Upstream)| {
            let login = logins.tenants.remove(tenant.as_str());
            (tenant.to_string(), Upstream { config: *config, login })
        };
        let tenant_upstreams = options.tenant_upstreams.iter().map(upstream_of).collect();
        let connector = Connector {
            addresses: AddressRules::new(
                options.private_addresses.clone(),
                config.own_addresses.clone(),
            ),
            resolver: Resolver::new(resolvers(options)?),
            upstream: options.upstream.map(|config| Upstream { config, login: logins.upstream }),
            tenant_upstreams,
            timeout: options.connect_timeout,
        };
        let capacity = Capacity::new(max_connections);
        let reports = Reports::default();
        Ok(Self { config, connector, credentials, tls, capacity, reports })
    }

    /// The secret that requests of a sandbox for this host get.
    pub(crate) fn credential(
        &self,
        rules: &EgressRules,
        target: &Target,
    ) -> Option<Arc<Credential>> {
        self.credentials.find(&rules.credentials, &target.host)
    }
}

fn resolvers(options: &Options) -> Result<Vec<SocketAddr>, SetupError> {
    if !options.resolvers.is_empty() {
        return Ok(options.resolvers.clone());
    }
    let path = Path::new(RESOLV_CONF);
    let text = fs::read_to_string(path).map_err(SetupError::read(path))?;
    let servers = parse_servers(&text);
    if servers.is_empty() { Err(SetupError::NoResolver) } else { Ok(servers) }
}
