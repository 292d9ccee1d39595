//! The egress proxy: the only way from a sandbox in network mode `proxy` to another host.
//!
//! The worker starts it as a process of its own and speaks to it with the messages of [`control`].
//! Programs reach it as an HTTP or SOCKS5 proxy, or without knowing it: its resolver answers an
//! allowed name with an address inside the sandbox, and a socket there accepts connections for that
//! name. Both ways lead to one decision ([`codelia_policy::EgressRules::decide`]), and the proxy
//! connects only to addresses that it checked.

#![forbid(unsafe_code)]

mod accept;
mod address;
mod answer;
mod ask;
mod authority;
mod body;
mod client_hello;
mod config;
mod connect;
pub mod control;
mod credentials;
mod dns;
mod error;
mod exchange;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod head;
mod http;
mod limits;
mod names;
pub mod packet;
mod proxy;
mod read;
mod record;
mod refusal;
mod relay;
mod report;
mod resolver;
mod restrict;
mod run;
mod sandbox;
mod server;
mod socks;
mod suspicious;
mod target;
mod terminate;
mod tls;
mod tunnel;
mod upstream;

pub use authority::ensure_authority;
pub use config::{Authority, Config, InvalidUpstream, Options, Upstream, UpstreamProtocol, User};
pub use error::SetupError;
pub use refusal::{known_reason, reason_codes};
pub use restrict::RestrictError;
pub use run::{Error, run, serve};
pub use server::ServeError;
