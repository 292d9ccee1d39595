//! The harness of the end-to-end tests: real processes of the built `codelia`, a real Postgres,
//! real sockets. Everything that a test starts ends with it, even if it panics, and leftovers fail
//! it.

#![forbid(unsafe_code)]
#![allow(clippy::expect_used, reason = "test code")]

mod browser;
mod certificates;
pub mod chaos;
mod client;
mod cluster;
mod engine;
mod eventually;
mod exec;
mod held_run;
mod host;
mod http1;
mod http2;
mod leak;
mod methods;
mod network;
mod pgbouncer;
mod postgres;
mod process;
mod program;
mod proxy;
mod recorded_events;
mod require;
mod scratch;
mod screen;
mod small_disk;
pub mod store_values;
mod terminal;
mod transcript;
mod up;
mod wrapped;

pub use browser::Browser;
pub use certificates::Certificates;
pub use client::{Authorized, Bearer, Client, Refusal, command, refusal, shell};
pub use cluster::{Cluster, ClusterOptions, SHARED_INSTALLATION, WORKER_LEASE_SECONDS};
pub use engine::{
    ENGINE_SOCKET, Engine, EngineKind, PODMAN_SOCKET, TEST_CONTAINER, engine_command,
    engine_docker, worker_containers,
};
pub use eventually::{TIMEOUT, eventually, within};
pub use exec::Exec;
pub use held_run::HeldRun;
pub use host::{HostSnapshot, user_processes};
pub use http1::Http1Response;
pub use http2::{Http2, UnfinishedCall};
pub use leak::{LeakGuard, abandoned_cgroups, processes_working_in};
pub use methods::{Method, all_methods, call, reflected_methods};
pub use network::TestNetwork;
pub use pgbouncer::PgBouncer;
pub use postgres::{Database, POSTGRES_URL};
pub use process::{Process, ProcessOutput, is_root};
pub use program::Program;
pub use proxy::{Proxy, ProxyMode, ProxySide, ProxyTarget, Replacement};
pub use recorded_events::{RecordedEvent, recorded_events};
pub use require::available;
pub use scratch::Scratch;
pub use screen::Screen;
pub use small_disk::SmallDisk;
pub use terminal::Terminal;
pub use transcript::Transcript;
pub use up::Up;
pub use wrapped::run_wrapped;
