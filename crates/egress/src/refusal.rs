//! Why a connection or query was refused or failed: the codes of records and of answers to
//! programs.

use std::net::IpAddr;

/// A reason, with the code that records and programs get.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    HostNotAllowed,
    HostBlocked,
    PortNotAllowed,
    /// A person refused it.
    Denied,
    /// Nobody decided in time.
    AskTimeout,
    RulesChanged,
    InvalidTarget,
    InvalidRequest,
    /// The head of a request or a handshake did not arrive in time.
    HeaderTimeout,
    /// The `Host` header names another host than the target.
    HostMismatch,
    /// The TLS handshake names another host than the target.
    SniMismatch,
    SniMissing,
    ProtocolNotSupported,
    QueryTypeNotAllowed,
    /// A name below a wildcard looks as if it carries data.
    SuspiciousName,
    /// No socket is left for a name.
    TooManyNames,
    TooManyWildcardNames,
    /// A program of the sandbox listens on the port at all addresses.
    AddressInUse,
    /// An address that the name leads to is private or otherwise special.
    SpecialAddress,
    /// An address that the name leads to is the installation's.
    OwnAddress,
    ResolveFailed,
    ConnectFailed,
    ConnectTimeout,
    UpstreamRefused,
    TlsFailed,
    ConnectionLimit,
    QueryRate,
    ByteLimit,
    Capacity,
}

/// What kind of answer a reason gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    /// The policy or a limit refuses it.
    Refused,
    /// The program sent something that is not valid.
    Invalid,
    /// The destination failed.
    Failed,
    /// The destination did not answer in time.
    TimedOut,
}

/// A reason as the worker records it: its code, and what to do about it. `None` if the
/// code is unknown.
#[must_use]
pub fn known_reason(code: &str) -> Option<(&'static str, &'static str)> {
    let found = Reason::ALL.into_iter().find(|reason| reason.code() == code)?;
    Some((found.code(), found.remedy()))
}

/// The codes of all reasons.
pub fn reason_codes() -> impl Iterator<Item = &'static str> {
    Reason::ALL.into_iter().map(Reason::code)
}

impl Reason {
    /// All of them.
    const ALL: [Self; 29] = [
        Self::HostNotAllowed,
        Self::HostBlocked,
        Self::PortNotAllowed,
        Self::Denied,
        Self::AskTimeout,
        Self::RulesChanged,
        Self::InvalidTarget,
        Self::InvalidRequest,
        Self::HeaderTimeout,
        Self::HostMismatch,
        Self::SniMismatch,
        Self::SniMissing,
        Self::ProtocolNotSupported,
        Self::QueryTypeNotAllowed,
        Self::SuspiciousName,
        Self::TooManyNames,
        Self::TooManyWildcardNames,
        Self::AddressInUse,
        Self::SpecialAddress,
        Self::OwnAddress,
        Self::ResolveFailed,
        Self::ConnectFailed,
        Self::ConnectTimeout,
        Self::UpstreamRefused,
        Self::TlsFailed,
        Self::ConnectionLimit,
        Self::QueryRate,
        Self::ByteLimit,
        Self::Capacity,
    ];

    /// The code, which is stable.
    pub(crate) fn code(self) -> &'static str {
        match self {
            Self::HostNotAllowed => "host_not_allowed",
            Self::HostBlocked => "host_blocked",
            Self::PortNotAllowed => "port_not_allowed",
            Self::Denied => "denied",
            Self::AskTimeout => "ask_timeout",
            Self::RulesChanged => "rules_changed",
            Self::InvalidTarget => "invalid_target",
            Self::InvalidRequest => "invalid_request",
            Self::HeaderTimeout => "header_timeout",
            Self::HostMismatch => "host_mismatch",
            Self::SniMismatch => "sni_mismatch",
            Self::SniMissing => "sni_missing",
            Self::ProtocolNotSupported => "protocol_not_supported",
            Self::QueryTypeNotAllowed => "query_type_not_allowed",
            Self::SuspiciousName => "suspicious_name",
            Self::TooManyNames => "too_many_names",
            Self::TooManyWildcardNames => "too_many_wildcard_names",
            Self::AddressInUse => "address_in_use",
            Self::SpecialAddress => "special_address",
            Self::OwnAddress => "own_address",
            Self::ResolveFailed => "resolve_failed",
            Self::ConnectFailed => "connect_failed",
            Self::ConnectTimeout => "connect_timeout",
            Self::UpstreamRefused => "upstream_refused",
            Self::TlsFailed => "tls_failed",
            Self::ConnectionLimit => "connection_limit",
            Self::QueryRate => "query_rate",
            Self::ByteLimit => "byte_limit",
            Self::Capacity => "capacity",
        }
    }

    /// The kind of answer.
    pub(crate) fn class(self) -> Class {
        match self {
            Self::InvalidTarget | Self::InvalidRequest | Self::HeaderTimeout => Class::Invalid,
            Self::ResolveFailed | Self::ConnectFailed | Self::UpstreamRefused | Self::TlsFailed => {
                Class::Failed
            }
            Self::ConnectTimeout => Class::TimedOut,
            _ => Class::Refused,
        }
    }

    /// What to do about it, for the person who reads a program's output.
    pub(crate) fn remedy(self) -> &'static str {
        match self {
            Self::HostNotAllowed => {
                "to allow it, add the host to network.allowed_hosts of the policy"
            }
            Self::HostBlocked => "the policy blocks this host; see network.blocked_hosts",
            Self::PortNotAllowed => {
                "to allow it, add the port to network.allowed_ports of the policy"
            }
            Self::Denied => "the request for this host was denied",
            Self::AskTimeout => {
                "nobody approved this host in time; try again after `codelia approvals allow`"
            }
            Self::RulesChanged => "the policy no longer allows this host",
            Self::InvalidTarget => {
                "use a host name in ASCII or a canonical IP address, and a port number"
            }
            Self::InvalidRequest => {
                "send a valid CONNECT request or an http:// URL in absolute form"
            }
            Self::HeaderTimeout => "the request did not arrive in time",
            Self::HostMismatch => "the Host header must name the host of the request",
            Self::SniMismatch | Self::SniMissing => {
                "the TLS server name must be the requested host"
            }
            Self::ProtocolNotSupported => "use HTTP/1.1 or TLS on this port",
            Self::QueryTypeNotAllowed => "only addresses can be looked up",
            Self::SuspiciousName => {
                "the name is too long or too random for a wildcard; list it by itself"
            }
            Self::TooManyNames => {
                "this sandbox used too many names; use the proxy variables (HTTPS_PROXY)"
            }
            Self::TooManyWildcardNames => {
                "this sandbox used too many names below wildcards; list hosts by themselves"
            }
            Self::AddressInUse => "a program in this sandbox listens on this port at all addresses",
            Self::SpecialAddress => "the host leads to a private or reserved address",
            Self::OwnAddress => "the host leads to an address of this installation",
            Self::ResolveFailed => "the host name cannot be resolved",
            Self::ConnectFailed => "the host cannot be reached",
            Self::ConnectTimeout => "the host did not answer in time",
            Self::UpstreamRefused => "the installation's upstream proxy refused the connection",
            Self::TlsFailed => "the TLS handshake with the host failed",
            Self::ConnectionLimit => "this sandbox has too many connections; close some",
            Self::QueryRate => "too many attempts; slow down",
            Self::ByteLimit => "this sandbox has transferred all bytes that it may",
            Self::Capacity => "the egress proxy has too many connections; try again",
        }
    }
}

/// A refused or failed connection or query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// The pattern that decided.
    pub(crate) rule: Option<String>,
    /// The address that was refused or failed.
    pub(crate) address: Option<IpAddr>,
}

impl Refusal {
    pub(crate) fn at(reason: Reason, address: IpAddr) -> Self {
        Self { reason, rule: None, address: Some(address) }
    }

    pub(crate) fn by(reason: Reason, rule: &str) -> Self {
        Self { reason, rule: Some(rule.to_owned()), address: None }
    }
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Self { reason, rule: None, address: None }
    }
}
