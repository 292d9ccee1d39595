//! Why a connection or query was refused or failed: the codes of records and of answers to
//! programs.

use std::net::IpAddr;

/// The kind of answer that a reason gets.
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

/// Defines the reasons. A row has the code, the kind of answer, and the remedy.
macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $class:ident, $remedy:literal;)+) => {
        /// A reason, with the code that records and programs get.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub(crate) enum Reason {
            $($(#[$doc])* $name,)+
        }

        impl Reason {
            const ALL: &[Self] = &[$(Self::$name),+];

            /// The code, which is stable.
            pub(crate) fn code(self) -> &'static str {
                match self {
                    $(Self::$name => $code,)+
                }
            }

            /// The kind of answer.
            pub(crate) fn class(self) -> Class {
                match self {
                    $(Self::$name => Class::$class,)+
                }
            }

            /// The way to avoid it, for the person who reads a program's output.
            pub(crate) fn remedy(self) -> &'static str {
                match self {
                    $(Self::$name => $remedy,)+
                }
            }
        }
    };
}

reasons! {
    HostNotAllowed = "host_not_allowed", Refused,
        "to allow it, add the host to network.allowed_hosts of the policy";
    HostBlocked = "host_blocked", Refused,
        "the policy blocks this host; see network.blocked_hosts";
    PortNotAllowed = "port_not_allowed", Refused,
        "to allow it, add the port to network.allowed_ports of the policy";
    /// A person refused it.
    Denied = "denied", Refused,
        "the request for this host was denied";
    /// Nobody decided in time.
    AskTimeout = "ask_timeout", Refused,
        "nobody approved this host in time; try again after `codelia approvals allow`";
    RulesChanged = "rules_changed", Refused,
        "the policy no longer allows this host";
    InvalidTarget = "invalid_target", Invalid,
        "use a host name in ASCII or a canonical IP address, and a port number";
    InvalidRequest = "invalid_request", Invalid,
        "send a valid CONNECT request or an http:// URL in absolute form";
    /// The head of a request or a handshake did not arrive in time.
    HeaderTimeout = "header_timeout", Invalid,
        "the request did not arrive in time";
    /// The `Host` header names another host than the target.
    HostMismatch = "host_mismatch", Refused,
        "the Host header must name the host of the request";
    /// The TLS handshake names another host than the target.
    SniMismatch = "sni_mismatch", Refused,
        "the TLS server name must be the requested host";
    SniMissing = "sni_missing", Refused,
        "the TLS server name must be the requested host";
    ProtocolNotSupported = "protocol_not_supported", Refused,
        "use HTTP/1.1 or TLS on this port";
    QueryTypeNotAllowed = "query_type_not_allowed", Refused,
        "only addresses can be looked up";
    /// A name below a wildcard looks as if it carries data.
    SuspiciousName = "suspicious_name", Refused,
        "the name is too long or too random for a wildcard; list it by itself";
    /// No socket is left for a name.
    TooManyNames = "too_many_names", Refused,
        "this sandbox used too many names; use the proxy variables (HTTPS_PROXY)";
    TooManyWildcardNames = "too_many_wildcard_names", Refused,
        "this sandbox used too many names below wildcards; list hosts by themselves";
    /// A program of the sandbox listens on the port at all addresses.
    AddressInUse = "address_in_use", Refused,
        "a program in this sandbox listens on this port at all addresses";
    /// An address that the name leads to is private or otherwise special.
    SpecialAddress = "special_address", Refused,
        "the host leads to a private or reserved address";
    /// An address that the name leads to is the installation's.
    OwnAddress = "own_address", Refused,
        "the host leads to an address of this installation";
    ResolveFailed = "resolve_failed", Failed,
        "the host name cannot be resolved";
    ConnectFailed = "connect_failed", Failed,
        "the host cannot be reached";
    ConnectTimeout = "connect_timeout", TimedOut,
        "the host did not answer in time";
    UpstreamRefused = "upstream_refused", Failed,
        "the installation's upstream proxy refused the connection";
    TlsFailed = "tls_failed", Failed,
        "the TLS handshake with the host failed";
    ConnectionLimit = "connection_limit", Refused,
        "this sandbox has too many connections; close some";
    QueryRate = "query_rate", Refused,
        "too many attempts; slow down";
    ByteLimit = "byte_limit", Refused,
        "this sandbox has transferred all bytes that it may";
    Capacity = "capacity", Refused,
        "the egress proxy has too many connections; try again";
}

/// A reason as the worker records it: its code, and what to do about it. `None` if the code is
/// unknown.
#[must_use]
pub fn known_reason(code: &str) -> Option<(&'static str, &'static str)> {
    let found = Reason::ALL.iter().find(|reason| reason.code() == code)?;
    Some((found.code(), found.remedy()))
}

/// The codes of all reasons.
pub fn reason_codes() -> impl Iterator<Item = &'static str> {
    Reason::ALL.iter().map(|reason| reason.code())
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
