//! The accept loop. It never ends because of a connection or for lack of descriptors.

use std::{convert::Infallible, future::Future, io, net::IpAddr, time::Duration};

use codelia_telemetry::{metrics, task};
use futures::{StreamExt, stream};
use http::{Request, Response};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{body::Body, transport::Server};
use tower::Service;

use crate::{
    Limits, Source,
    admission::Admission,
    calls::CountedService,
    connection::{Connection, Supervisor},
};

/// Before the next attempt to accept, after one failed for lack of descriptors or memory.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Accepts connections.
pub trait Listener: Send {
    /// A connection.
    type Io: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection; returns it with the address of the client, if it has one.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Io, Option<IpAddr>)>> + Send;
}

impl Listener for TcpListener {
    type Io = TcpStream;

    async fn accept(&mut self) -> io::Result<(TcpStream, Option<IpAddr>)> {
        let (stream, address) = Self::accept(self).await?;
        stream.set_nodelay(true)?;
        Ok((stream, Some(address.ip())))
    }
}

/// What every connection of a listener shares.
#[derive(Debug, Clone)]
struct ConnectionServer<S> {
    server: Server,
    service: S,
    limits: Limits,
    shutdown: CancellationToken,
}

/// Serves connections until `shutdown`, then waits for the open calls.
pub async fn serve<L, S>(
    mut listener: L,
    server: Server,
    service: S,
    limits: Limits,
    shutdown: CancellationToken,
) where
    L: Listener,
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    let (admission, open) = (Admission::new(&limits), TaskTracker::new());
    let server = ConnectionServer { server, service, limits, shutdown: shutdown.clone() };
    let mut is_refusing = false;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let (io, source) = match accepted {
            Ok((io, address)) => (io, Source::of(address)),
            Err(error) => {
                recover(&error).await;
                continue;
            }
        };
        let admitted = admission.admit(source);
        if let (Err(cap), false) = (&admitted, is_refusing) {
            tracing::warn!(cap = cap.as_str(), source = ?source.0, "too many connections, refusing new ones");
        }
        is_refusing = admitted.is_err();
        match admitted {
            Ok(permit) => {
                let (connection, supervisor) = Connection::new(io, permit);
                let served = server.clone().serve(connection, supervisor, source);
                task::background("connection", open.track_future(served));
            }
            Err(cap) => metrics().connection_refused(cap.as_str()),
        }
    }
    drop(listener);
    open.close();
    open.wait().await;
}

impl<S> ConnectionServer<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    /// Serves one connection until it is closed. The transport closes it politely when `asked`
    /// fires, and waits for it indefinitely, so an unused one is killed soon after.
    async fn serve<IO>(self, connection: Connection<IO>, supervisor: Supervisor, source: Source)
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { server, service, limits, shutdown } = self;
        let service = CountedService { inner: service, calls: supervisor.calls.clone(), source };
        let asked = CancellationToken::new();
        let until = asked.clone().cancelled_owned();
        // The stream must not end: its end would close the connection.
        let incoming = stream::iter([io::Result::Ok(connection)]).chain(stream::pending());
        let served = server.serve_with_incoming_shutdown(service, incoming, until);
        let close = async {
            supervisor.end(&limits, &shutdown).await;
            asked.cancel();
            supervisor.kill_when_unused().await;
        };
        tokio::select! {
            served = served => {
                if let Err(error) = served {
                    tracing::debug!(%error, "connection failed");
                }
            }
            () = close => {}
        }
    }
}

/// An error of one connection needs nothing. Without descriptors or memory, accepting again at once
/// would only use the CPU.
async fn recover(error: &io::Error) {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, PermissionDenied};
    if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | PermissionDenied) {
        tracing::debug!(%error, "connection not accepted");
        return;
    }
    tracing::warn!(%error, "cannot accept connections, retrying");
    sleep(RETRY_DELAY).await;
}
