//! Options of the egress proxy.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use codelia_types::TenantId;
use codelia_worker::{EgressOptions, EgressUpstream};

use crate::config::Config;

const DNS_PORT: u16 = 53;
/// Directory of the certificate authority in the data directory.
const CA_DIR: &str = "egress-ca";

/// Options of the egress proxy of runs with network mode `proxy`.
pub(super) fn egress(config: &Config) -> Result<EgressOptions> {
    let egress = &config.egress;
    let own_ca = || egress.credentials_file.as_ref().map(|_| config.data_dir.join(CA_DIR));
    let resolvers: Result<_> = list(&egress.resolvers).map(resolver).collect();
    let private_addresses: Result<_> = list(&egress.private_addresses).map(network).collect();
    Ok(EgressOptions {
        resolvers: resolvers.context("egress.resolvers")?,
        private_addresses: private_addresses.context("egress.private_addresses")?,
        upstream: egress.upstream.as_deref().map(upstream).transpose().context("egress.upstream")?,
        tenant_upstreams: tenant_upstreams(&egress.tenant_upstreams).context("egress.tenant_upstreams")?,
        credentials_file: absolute(egress.credentials_file.as_deref())?,
        ca_dir: absolute(egress.ca_dir.clone().or_else(own_ca).as_deref())?,
        extra_roots_file: absolute(egress.extra_roots_file.as_deref())?,
        ask_timeout: egress.ask_timeout,
        connect_timeout: egress.connect_timeout,
        header_timeout: egress.header_timeout,
    })
}

fn list(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|part| !part.is_empty())
}

/// The proxy may work in another directory.
fn absolute(path: Option<&Path>) -> Result<Option<PathBuf>> {
    Ok(path.map(std::path::absolute).transpose()?)
}

fn resolver(text: &str) -> Result<SocketAddr> {
    let address = text.parse::<IpAddr>().map(|address| SocketAddr::new(address, DNS_PORT));
    address
        .or_else(|_| text.parse())
        .with_context(|| format!("{text:?} is not an IP address, with or without a port"))
}

/// Checks that the text is `ADDRESS/BITS`.
fn network(text: &str) -> Result<String> {
    let parts = text
        .split_once('/')
        .and_then(|(address, bits)| Some((address.parse::<IpAddr>().ok()?, bits.parse::<u32>().ok()?)));
    let (address, bits) = parts.with_context(|| format!("{text:?} is not ADDRESS/BITS"))?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    ensure!(bits <= most, "{text:?} has more than {most} bits");
    Ok(text.to_owned())
}

/// Parses `TENANT=URL` with commas between them.
fn tenant_upstreams(text: &str) -> Result<BTreeMap<TenantId, EgressUpstream>> {
    let mut upstreams = BTreeMap::new();
    for entry in list(text) {
        // Not repeated in the message: it may hold a password.
        let (tenant, url) = entry.split_once('=').context("expected TENANT=URL")?;
        let id: TenantId =
            tenant.parse().ok().with_context(|| format!("{tenant:?} is not the id of a tenant"))?;
        let upstream = upstream(url).with_context(|| format!("tenant {tenant}"))?;
        ensure!(upstreams.insert(id, upstream).is_none(), "tenant {tenant} has two");
    }
    Ok(upstreams)
}

fn upstream(text: &str) -> Result<EgressUpstream> {
    let (protocol, address) = text.split_once("://").unwrap_or_default();
    let address = address.trim_end_matches('/');
    // Not repeated in the message: it may be a password.
    ensure!(!address.contains('@'), "put the user and password into egress.credentials_file");
    match (protocol, address.parse()) {
        ("socks5", Ok(address)) => Ok(EgressUpstream::Socks5(address)),
        ("http", Ok(address)) => Ok(EgressUpstream::Http(address)),
        _ => bail!("{text:?} is neither socks5://IP:PORT nor http://IP:PORT"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::options::tests::config;

    #[test]
    fn egress_keys_set_the_options() {
        assert_eq!(egress(&config(&[])).unwrap(), EgressOptions::default());
        let options = egress(&config(&[
            ("CODELIA_EGRESS_RESOLVERS", "192.0.2.1, 192.0.2.2:5353,[2001:db8::1]:53,2001:db8::2"),
            ("CODELIA_EGRESS_PRIVATE_ADDRESSES", "10.1.0.0/16,fd00:1::/32"),
            ("CODELIA_EGRESS_UPSTREAM", "socks5://192.0.2.9:1080"),
            ("CODELIA_EGRESS_TENANT_UPSTREAMS", "a=http://192.0.2.8:3128, b=socks5://192.0.2.7:1080"),
            ("CODELIA_EGRESS_CREDENTIALS_FILE", "/etc/codelia/credentials.toml"),
            ("CODELIA_EGRESS_EXTRA_ROOTS_FILE", "/etc/codelia/roots.pem"),
            ("CODELIA_EGRESS_ASK_TIMEOUT", "30s"),
            ("CODELIA_EGRESS_CONNECT_TIMEOUT", "3s"),
            ("CODELIA_EGRESS_HEADER_TIMEOUT", "4s"),
            ("CODELIA_DATA_DIR", "/var/lib/codelia"),
        ]))
        .unwrap();
        let resolvers = ["192.0.2.1:53", "192.0.2.2:5353", "[2001:db8::1]:53", "[2001:db8::2]:53"];
        let expected = EgressOptions {
            resolvers: resolvers.map(|text| text.parse().unwrap()).to_vec(),
            private_addresses: vec!["10.1.0.0/16".to_owned(), "fd00:1::/32".to_owned()],
            upstream: Some(EgressUpstream::Socks5("192.0.2.9:1080".parse().unwrap())),
            tenant_upstreams: [
                ("a".parse().unwrap(), EgressUpstream::Http("192.0.2.8:3128".parse().unwrap())),
                ("b".parse().unwrap(), EgressUpstream::Socks5("192.0.2.7:1080".parse().unwrap())),
            ]
            .into(),
            credentials_file: Some("/etc/codelia/credentials.toml".into()),
            ca_dir: Some("/var/lib/codelia/egress-ca".into()),
            extra_roots_file: Some("/etc/codelia/roots.pem".into()),
            ask_timeout: Duration::from_secs(30),
            connect_timeout: Duration::from_secs(3),
            header_timeout: Duration::from_secs(4),
        };
        assert_eq!(options, expected);
    }

    #[test]
    fn invalid_egress_value_names_its_key() {
        for (name, value) in [
            ("resolvers", "dns.example"),
            ("private_addresses", "10.0.0.0"),
            ("private_addresses", "10.0.0.0/33"),
            ("upstream", "socks5://proxy.example:1080"),
            ("upstream", "https://192.0.2.9:443"),
            ("upstream", "http://me:open-sesame@192.0.2.9:3128"),
            ("tenant_upstreams", "http://192.0.2.9:3128"),
            ("tenant_upstreams", "A=http://192.0.2.9:3128"),
            ("tenant_upstreams", "a=http://192.0.2.9:3128,a=http://192.0.2.8:3128"),
            ("tenant_upstreams", "a=http://me:open-sesame@192.0.2.9:3128"),
        ] {
            let variable = format!("CODELIA_EGRESS_{}", name.to_uppercase());
            let error = format!("{:#}", egress(&config(&[(&variable, value)])).unwrap_err());
            assert!(error.contains(&format!("egress.{name}")), "{error}");
            assert!(!error.contains("open-sesame"), "{error}");
        }
    }
}
