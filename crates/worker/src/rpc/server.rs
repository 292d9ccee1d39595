//! The server of the internal channel: a Unix socket for the worker's own user, or TLS with client
//! certificates. There is no unauthenticated option.

use std::{
    fs,
    io::{self, ErrorKind},
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use codelia_proto::internal::v1::{
    worker_file_service_server::WorkerFileServiceServer, worker_service_server::WorkerServiceServer,
};
use futures::{Stream, StreamExt};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{
    service::Routes,
    transport::{Certificate, Identity, Server, ServerTlsConfig, server::TcpIncoming},
};

use crate::{Error, InternalTls, Listen, Options, files::FileService, rpc::service::RunService};

/// An api that does not answer pings is taken for dead; the runs that end with it are canceled.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);

/// A bound listener.
#[derive(Debug)]
pub(crate) enum Listener {
    Unix(UnixListener, SocketFile),
    Tcp(TcpListener, ServerTlsConfig),
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
            let tls = options.internal_tls.as_ref().ok_or(Error::TlsMissing)?;
            let (listener, bound) = bind_tcp(*requested).await.map_err(failed(requested))?;
            (Listener::Tcp(listener, tls_config(tls)), format!("https://{bound}"))
        }
    };
    Ok((listener, options.advertise.clone().unwrap_or(address)))
}

/// The services of the internal channel.
pub(crate) fn services(runs: RunService, files: FileService) -> Routes {
    Routes::new(WorkerServiceServer::new(runs)).add_service(WorkerFileServiceServer::new(files))
}

/// Serves until `shutdown`, then waits for the calls in progress.
pub(crate) async fn serve(
    listener: Listener,
    services: Routes,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let server = Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT));
    let until = shutdown.cancelled_owned();
    match listener {
        Listener::Unix(listener, _file) => {
            let mut server = server;
            let served =
                server.add_routes(services).serve_with_incoming_shutdown(own_connections(listener), until);
            served.await.map_err(Error::Serve)
        }
        Listener::Tcp(listener, tls) => {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            let mut server = server.tls_config(tls).map_err(Error::Tls)?;
            server
                .add_routes(services)
                .serve_with_incoming_shutdown(incoming, until)
                .await
                .map_err(Error::Serve)
        }
    }
}

fn failed(address: impl ToString) -> impl FnOnce(io::Error) -> Error {
    move |source| Error::Listen { address: address.to_string(), source }
}

fn tls_config(tls: &InternalTls) -> ServerTlsConfig {
    ServerTlsConfig::new()
        .identity(Identity::from_pem(&tls.cert_pem, &tls.key_pem))
        .client_ca_root(Certificate::from_pem(&tls.ca_pem))
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
    // Others may have connected before this; `own_connections` rejects them by their credentials.
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
fn own_connections(listener: UnixListener) -> impl Stream<Item = io::Result<UnixStream>> {
    let own = rustix::process::geteuid().as_raw();
    UnixListenerStream::new(listener).filter_map(move |connection| async move {
        match connection.and_then(|stream| Ok((stream.peer_cred()?.uid(), stream))) {
            Ok((uid, stream)) if uid == own || uid == 0 => Some(Ok(stream)),
            Ok((uid, _)) => {
                tracing::warn!(uid, "rejected a connection of another user to the internal socket");
                None
            }
            Err(error) => Some(Err(error)),
        }
    })
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
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(bind_unix(&path).await.unwrap_err().kind(), ErrorKind::AddrInUse);
        drop(first);
        bind_unix(&path).await.unwrap();
    }

    #[tokio::test]
    async fn own_connections_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker.sock");
        let mut incoming = Box::pin(own_connections(bind_unix(&path).await.unwrap()));
        let _caller = UnixStream::connect(&path).await.unwrap();
        assert!(incoming.next().await.unwrap().is_ok());
    }
}
