//! The server of the internal channel: a Unix socket for the worker's own user, or TLS with client
//! certificates. There is no unauthenticated option.

use std::{
    fs,
    io::{self, ErrorKind},
    net::{IpAddr, SocketAddr},
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
};

use codelia_proto::{
    internal::v1::{
        worker_file_service_server::WorkerFileServiceServer,
        worker_service_server::WorkerServiceServer,
    },
    v1::file_service_server::FileServiceServer,
};
use codelia_server::{Limits, TlsIdentity, Transport};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::{
    error::Error,
    files::FileService,
    options::{Listen, Options},
    rpc::service::RunService,
};

/// A bound listener.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener, Arc<TlsIdentity>),
}

/// Removes the socket's file when its listener is dropped.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(%error, path = %self.0.display(), "cannot remove socket file");
        }
    }
}

/// Binds the listener and returns the address under which apis reach it.
pub(crate) async fn bind(options: &Options) -> Result<(Listener, String), Error> {
    let (listener, address) = match &options.listen {
        Listen::Unix(path) => {
            let listener = bind_unix(path).await.map_err(failed(path.display()))?;
            let path = fs::canonicalize(path).map_err(failed(path.display()))?;
            let address = format!("unix:{}", path.display());
            (Listener::Unix(listener, SocketFile(path)), address)
        }
        Listen::Tcp(requested) => {
            let files = options.internal_tls.clone().ok_or(Error::TlsMissing)?;
            let identity = TlsIdentity::load(files).map_err(Error::Tls)?;
            let (listener, bound) = bind_tcp(*requested).await.map_err(failed(requested))?;
            (Listener::Tcp(listener, identity), format!("https://{bound}"))
        }
    };
    Ok((listener, options.worker.advertise.clone().unwrap_or(address)))
}

/// The services of the internal channel. They check no key: callers are trusted as [`serve`]
/// ensures.
pub(crate) fn services(runs: RunService, files: FileService) -> Routes {
    let files = Arc::new(files);
    Routes::new(WorkerServiceServer::new(runs))
        .add_service(FileServiceServer::from_arc(files.clone()))
        .add_service(WorkerFileServiceServer::from_arc(files))
}

/// Serves until `shutdown`, then waits for the calls in progress.
pub(crate) async fn serve(
    listener: Listener,
    services: Routes,
    limits: Limits,
    shutdown: CancellationToken,
) {
    let server = limits.server();
    match listener {
        Listener::Unix(listener, _file) => {
            codelia_server::serve(OwnUser(listener), server.into(), services, limits, shutdown)
                .await;
        }
        Listener::Tcp(listener, identity) => {
            let transport = Transport::with_tls(server, identity);
            codelia_server::serve(listener, transport, services, limits, shutdown).await;
        }
    }
}

fn failed(address: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { address: address.to_string(), source }
}

async fn bind_tcp(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}

async fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    remove_stale(path).await?;
    let listener = UnixListener::bind(path)?;
    // Others may have connected before this; `OwnUser` rejects them by their credentials.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Removes a socket that no process listens on.
async fn remove_stale(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Ok(_) => Err(io::Error::from(ErrorKind::AddrInUse)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) => Err(error),
    }
}

/// Accepts connections of the worker's own user and of root only.
#[derive(Debug)]
struct OwnUser(UnixListener);

impl codelia_server::Listener for OwnUser {
    type Io = UnixStream;

    async fn accept(&mut self) -> io::Result<(UnixStream, Option<IpAddr>)> {
        let (stream, _) = self.0.accept().await?;
        let uid = stream.peer_cred()?.uid();
        if uid == rustix::process::geteuid().as_raw() || uid == 0 {
            return Ok((stream, None));
        }
        tracing::warn!(uid, "rejected a connection of another user to the internal socket");
        Err(ErrorKind::PermissionDenied.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn socket_is_private_and_replaces_only_stale_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/worker.sock");
        let first = bind_unix(&path).await.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777,
            0o700
        );
        assert_eq!(bind_unix(&path).await.unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(first);
        bind_unix(&path).await.unwrap();
    }

    #[tokio::test]
    async fn own_connections_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker.sock");
        let mut listener = OwnUser(bind_unix(&path).await.unwrap());
        let _caller = UnixStream::connect(&path).await.unwrap();
        codelia_server::Listener::accept(&mut listener).await.unwrap();
    }
}
