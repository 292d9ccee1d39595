//! The life of the proxy process: settings, restrictions, service.

use std::{io, os::fd::OwnedFd, sync::Arc};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    config::Config,
    control::{OPEN_SOCKETS, Request},
    error::SetupError,
    packet,
    proxy::Proxy,
    restrict::{RestrictError, restrict},
    server::{self, ServeError},
};

/// Threads that serve. More do not help: the kernel does most of the work.
const MAX_THREADS: usize = 4;
/// Open files of which the limit need not be higher.
const MAX_FILES: u64 = 1 << 20;
/// A connection has two sockets. Half of all files are for sandboxes' own sockets.
const FILES_PER_CONNECTION: u64 = 4;

/// The proxy has failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The worker did not send settings first.
    #[error("the first control message has no settings")]
    NotConfigured,
    /// The control socket cannot be read.
    #[error(transparent)]
    Packet(#[from] packet::Error),
    /// The settings cannot be used.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// Privileges cannot be dropped.
    #[error(transparent)]
    Restrict(#[from] RestrictError),
    /// The worker cannot be served.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The runtime or a limit cannot be set up.
    #[error("cannot start the egress proxy")]
    Start(#[from] io::Error),
}

/// Runs the proxy in this process until the worker closes the control socket. Restricts the whole
/// process, irrevocably.
///
/// # Errors
/// The settings cannot be used, privileges cannot be dropped, or the control socket fails.
pub fn run(control: OwnedFd) -> Result<(), Error> {
    let threads = std::thread::available_parallelism()?.get().min(MAX_THREADS);
    let Some((request, _)) = packet::receive::<Request>(&control)? else { return Ok(()) };
    let Request::Configure(config) = request else { return Err(Error::NotConfigured) };
    let user = config.user;
    let proxy = Arc::new(Proxy::new(*config, max_connections()?)?);
    restrict(user)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let result = runtime.block_on(server::serve(control, proxy));
    // Connections end with the process.
    runtime.shutdown_background();
    Ok(result?)
}

/// Serves the control socket on this runtime, without restrictions.
///
/// # Errors
/// The settings cannot be used, or the control socket fails.
pub async fn serve(control: OwnedFd, config: Config) -> Result<(), Error> {
    let proxy = Arc::new(Proxy::new(config, max_connections()?)?);
    Ok(server::serve(control, proxy).await?)
}

/// Raises the limit of open files and shares it among connections.
fn max_connections() -> io::Result<usize> {
    let limit = getrlimit(Resource::Nofile);
    let files = limit.maximum.unwrap_or(MAX_FILES).min(MAX_FILES);
    setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum: limit.maximum })?;
    let connections = files.saturating_sub(OPEN_SOCKETS as u64) / FILES_PER_CONNECTION;
    Ok(usize::try_from(connections).unwrap_or(usize::MAX))
}
