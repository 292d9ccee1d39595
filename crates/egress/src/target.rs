//! Parses the host and port that a program asks for, strictly: what two programs could read
//! differently is refused.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::refusal::Reason;

/// The longest host name in bytes.
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// A host and port in canonical form.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Target {
    /// A lower-case name without a final dot, or an IP address without brackets.
    pub(crate) host: String,
    /// The address, if the host is one.
    pub(crate) address: Option<IpAddr>,
    pub(crate) port: u16,
}

impl Target {
    /// Parses `host:port`, where only a default makes the port optional.
    pub(crate) fn from_authority(text: &str, default_port: Option<u16>) -> Result<Self, Reason> {
        let (host, port) = split_port(text)?;
        let port = match port {
            Some(port) => parse_port(port)?,
            None => default_port.ok_or(Reason::InvalidTarget)?,
        };
        Self::from_host(host, port)
    }

    /// Parses a host: a name, an IPv4 address, or an IPv6 address in brackets.
    pub(crate) fn from_host(host: &str, port: u16) -> Result<Self, Reason> {
        if port == 0 {
            return Err(Reason::InvalidTarget);
        }
        let literal = match host.strip_prefix('[') {
            Some(rest) => {
                let inner = rest.strip_suffix(']').ok_or(Reason::InvalidTarget)?;
                Some(IpAddr::V6(inner.parse::<Ipv6Addr>().map_err(|_| Reason::InvalidTarget)?))
            }
            None if ends_in_number(host) => {
                Some(IpAddr::V4(host.parse::<Ipv4Addr>().map_err(|_| Reason::InvalidTarget)?))
            }
            None => None,
        };
        match literal {
            Some(address) => Ok(Self::from_address(address, port)),
            None => Ok(Self { host: parse_name(host)?, address: None, port }),
        }
    }

    pub(crate) fn from_address(address: IpAddr, port: u16) -> Self {
        Self { host: address.to_string(), address: Some(address), port }
    }

    /// Whether a `Host` header names this target. A header without a port names the host only.
    pub(crate) fn agrees_with_host_header(&self, header: &str) -> bool {
        Self::from_authority(header, Some(self.port)).is_ok_and(|named| named == *self)
    }

    /// The host as it is written in URLs and headers.
    pub(crate) fn url_host(&self) -> String {
        match self.address {
            Some(IpAddr::V6(address)) => format!("[{address}]"),
            _ => self.host.clone(),
        }
    }
}

/// Splits an absolute `http` URI into its target and its path with query.
pub(crate) fn parse_absolute_uri(uri: &str) -> Result<(Target, &str), Reason> {
    let (scheme, rest) = uri.split_once("://").ok_or(Reason::InvalidRequest)?;
    if !scheme.eq_ignore_ascii_case("http") {
        return Err(Reason::ProtocolNotSupported);
    }
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if path.contains('#') {
        return Err(Reason::InvalidRequest);
    }
    Ok((Target::from_authority(authority, Some(80))?, path))
}

/// Parses a host name into lower case without a final dot.
pub(crate) fn parse_name(text: &str) -> Result<String, Reason> {
    let name = text.strip_suffix('.').unwrap_or(text);
    if name.len() > MAX_NAME || ends_in_number(name) || !name.split('.').all(is_label) {
        return Err(Reason::InvalidTarget);
    }
    Ok(name.to_ascii_lowercase())
}

fn is_label(label: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=MAX_LABEL).contains(&label.len())
        && label.bytes().all(allowed)
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Whether programs may read the host as an IPv4 address: its last label is a number.
fn ends_in_number(host: &str) -> bool {
    let host = host.strip_suffix('.').unwrap_or(host);
    let label = host.rsplit('.').next().unwrap_or_default();
    let hex = label.strip_prefix("0x").or_else(|| label.strip_prefix("0X"));
    match hex {
        Some(digits) => digits.bytes().all(|byte| byte.is_ascii_hexdigit()),
        None => !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_digit()),
    }
}

fn split_port(text: &str) -> Result<(&str, Option<&str>), Reason> {
    let host_end = if text.starts_with('[') {
        text.find(']').ok_or(Reason::InvalidTarget)? + 1
    } else {
        text.find(':').unwrap_or(text.len())
    };
    match text.split_at(host_end) {
        (host, "") => Ok((host, None)),
        (host, rest) => Ok((host, Some(rest.strip_prefix(':').ok_or(Reason::InvalidTarget)?))),
    }
}

fn parse_port(text: &str) -> Result<u16, Reason> {
    let canonical = !text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse() {
        Ok(port) if canonical => Ok(port),
        _ => Err(Reason::InvalidTarget),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn canonical_targets_are_parsed() {
        let parse =
            |text| Target::from_authority(text, None).map(|target| (target.host, target.port));
        assert_eq!(parse("Example.COM:443"), Ok(("example.com".to_owned(), 443)));
        assert_eq!(parse("example.com.:443"), Ok(("example.com".to_owned(), 443)));
        assert_eq!(parse("xn--bcher-kva.example:80"), Ok(("xn--bcher-kva.example".to_owned(), 80)));
        assert_eq!(parse("_acme.example.com:65535"), Ok(("_acme.example.com".to_owned(), 65535)));
        assert_eq!(parse("1.2.3.4:1"), Ok(("1.2.3.4".to_owned(), 1)));
        assert_eq!(parse("[2606:4700:0:0::1111]:443"), Ok(("2606:4700::1111".to_owned(), 443)));
        assert_eq!(parse("1password.com:443"), Ok(("1password.com".to_owned(), 443)));
    }

    #[test]
    fn ambiguous_targets_are_refused() {
        let long_label = format!("{}.com:443", "a".repeat(64));
        let long_name = format!("{}com:443", "a.".repeat(126));
        let targets = [
            "",
            ":",
            ":443",
            "example.com",
            "example.com:",
            "example.com:0",
            "example.com:65536",
            "example.com:99999",
            "example.com:+443",
            "example.com:-1",
            "example.com:0443",
            "example.com:https",
            "example.com:443:443",
            "example.com: 443",
            "example.com:443 ",
            " example.com:443",
            "user@example.com:443",
            "user:pass@example.com:443",
            "example.com@evil.com:443",
            "example%2ecom:443",
            "exa mple.com:443",
            "example.com\0:443",
            "example.com\r\n:443",
            "example.com/:443",
            "example.com?:443",
            "example.com#:443",
            "example.com\\:443",
            "bücher.example:443",
            "example。com:443",
            "ｅxample.com:443",
            ".example.com:443",
            "example..com:443",
            "example.com..:443",
            ".:443",
            "-example.com:443",
            "example-.com:443",
            "*.example.com:443",
            &long_label,
            &long_name,
            "2130706433:443",
            "0x7f000001:443",
            "0x7f.0.0.1:443",
            "0177.0.0.1:443",
            "127.1:443",
            "127.0.1:443",
            "127.0.0.1.:443",
            "127.0.0.01:443",
            "127.0.0.256:443",
            "1.2.3.4.5:443",
            "0:443",
            "example.0x1:443",
            "example.1:443",
            "::1:443",
            "[::1:443",
            "[::1]443",
            "[::1]",
            "[::1%25eth0]:443",
            "[fe80::1%eth0]:443",
            "[127.0.0.1]:443",
            "[example.com]:443",
            "[]:443",
            "[::ffff:127.1]:443",
        ];
        for text in targets {
            assert_eq!(Target::from_authority(text, None), Err(Reason::InvalidTarget), "{text:?}");
        }
    }

    #[test]
    fn absolute_uris_are_split() {
        let (target, path) = parse_absolute_uri("HTTP://Example.com/a?b").unwrap();
        assert_eq!((target.host.as_str(), target.port, path), ("example.com", 80, "/a?b"));
        assert_eq!(parse_absolute_uri("http://example.com:8080?q").unwrap().1, "?q");
        assert_eq!(parse_absolute_uri("http://example.com").unwrap().1, "");
        assert_eq!(parse_absolute_uri("https://example.com/"), Err(Reason::ProtocolNotSupported));
        for uri in ["/", "example.com/", "http:/example.com/", "http://example.com/#a", "*"] {
            assert!(parse_absolute_uri(uri).is_err(), "{uri}");
        }
    }

    #[test]
    fn host_header_must_agree() {
        let target = Target::from_authority("example.com:8080", None).unwrap();
        for header in ["example.com:8080", "EXAMPLE.com.", "example.com"] {
            assert!(target.agrees_with_host_header(header), "{header}");
        }
        for header in
            ["", "example.com:80", "evil.com", "evil.com:8080", "example.com:8080@evil.com"]
        {
            assert!(!target.agrees_with_host_header(header), "{header}");
        }
    }
}
