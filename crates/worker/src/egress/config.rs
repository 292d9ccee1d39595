//! The settings of the proxy, from the worker's.

use std::path::Path;

use codelia_egress::{Authority, Config, Upstream, UpstreamProtocol, User};

use crate::{EgressOptions, EgressUpstream};

/// `nobody`: no session has it, and it owns nothing.
const UNPRIVILEGED: User = User { uid: 65534, gid: 65534 };
/// The files of the certificate authority in its directory.
const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";

pub(super) fn config(options: &EgressOptions) -> Config {
    Config {
        user: rustix::process::geteuid().is_root().then_some(UNPRIVILEGED),
        resolvers: options.resolvers.clone(),
        private_addresses: options.private_addresses.iter().filter_map(|text| text.parse().ok()).collect(),
        own_addresses: Vec::new(),
        upstream: options.upstream.map(upstream),
        tenant_upstreams: options
            .tenant_upstreams
            .iter()
            .map(|(tenant, one)| (tenant.to_string(), upstream(*one)))
            .collect(),
        credentials_file: options.credentials_file.clone(),
        authority: options.ca_dir.as_deref().map(authority),
        extra_roots_file: options.extra_roots_file.clone(),
        ask_timeout: options.ask_timeout,
        connect_timeout: options.connect_timeout,
        header_timeout: options.header_timeout,
    }
}

fn upstream(upstream: EgressUpstream) -> Upstream {
    match upstream {
        EgressUpstream::Socks5(address) => Upstream { protocol: UpstreamProtocol::Socks5, address },
        EgressUpstream::Http(address) => Upstream { protocol: UpstreamProtocol::Connect, address },
    }
}

fn authority(directory: &Path) -> Authority {
    Authority { certificate_file: directory.join(CA_CERTIFICATE), key_file: directory.join(CA_KEY) }
}
