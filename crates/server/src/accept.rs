//! The accept loop. It never ends because of a connection or for lack of descriptors.

use std::{future::Future, io, net::IpAddr, time::Duration};

use codelia_telemetry::{metrics, task};
use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    HttpService, Limits, Source,
    admission::Admission,
    calls::CountedService,
    connection::{Connection, Supervisor},
    transport::Transport,
};

/// Before the next attempt to accept, after one failed for lack of descriptors or memory.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Accepts connections.
pub trait Listener: Send {
    /// A connection.
    type Io: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Waits for the next connection; returns it with the address of the client, if it has one.
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Io, Option<IpAddr>)>> + Send;

    /// Lets the kernel close the connection of a client that is gone, or reads nothing for the idle
    /// time: HTTP/1.1 has no pings. A client on this machine is seen to end.
    ///
    /// # Errors
    /// If the connection is closed already.
    fn detect_dead_client(_io: &Self::Io, _limits: &Limits) -> io::Result<()> {
        Ok(())
    }
}

impl Listener for TcpListener {
    type Io = TcpStream;

    async fn accept(&mut self) -> io::Result<(TcpStream, Option<IpAddr>)> {
        let (stream, address) = Self::accept(self).await?;
        stream.set_nodelay(true)?;
        Ok((stream, Some(address.ip())))
    }

    fn detect_dead_client(io: &TcpStream, limits: &Limits) -> io::Result<()> {
        let idle_ms = u32::try_from(limits.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        sockopt::set_socket_keepalive(io, true)?;
        sockopt::set_tcp_keepidle(io, limits.keepalive_interval)?;
        sockopt::set_tcp_keepintvl(io, limits.keepalive_interval)?;
        Ok(sockopt::set_tcp_user_timeout(io, idle_ms)?)
    }
}

/// What every connection of a listener shares.
#[derive(Debug, Clone)]
struct ConnectionServer<S> {
    transport: Transport,
    service: S,
    limits: Limits,
    shutdown: CancellationToken,
}

/// Serves connections until `shutdown`, then waits for the open calls.
pub async fn serve<L, S>(
    mut listener: L,
    transport: Transport,
    service: S,
    limits: Limits,
    shutdown: CancellationToken,
) where
    L: Listener,
    S: HttpService,
{
    let admission = Admission::new(&limits);
    let open = TaskTracker::new();
    let server = ConnectionServer { transport, service, limits, shutdown: shutdown.clone() };
    let mut is_refusing = false;
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let prepared = accepted.and_then(|(io, address)| {
            L::detect_dead_client(&io, &limits)?;
            Ok((io, Source::from_address(address)))
        });
        let (io, source) = match prepared {
            Ok(prepared) => prepared,
            Err(error) => {
                recover(&error).await;
                continue;
            }
        };
        let admitted = admission.admit(source);
        if let (Err(cap), false) = (&admitted, is_refusing) {
            tracing::warn!(
                cap = cap.as_str(),
                source = source.0.map(tracing::field::display),
                "too many connections, refusing new ones"
            );
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

impl<S: HttpService> ConnectionServer<S> {
    /// Serves one connection until it is closed. The transport closes it politely when `asked`
    /// fires, and waits for it indefinitely, so an unused one is killed soon after.
    async fn serve<IO>(self, connection: Connection<IO>, supervisor: Supervisor, source: Source)
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let Self { transport, service, limits, shutdown } = self;
        let service = CountedService { inner: service, calls: supervisor.calls.clone(), source };
        let asked = CancellationToken::new();
        let until = asked.clone().cancelled_owned();
        let served = transport.serve(service, connection, until);
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
    if matches!(error.kind(), ConnectionAborted | ConnectionReset | Interrupted | PermissionDenied)
    {
        tracing::debug!(%error, "connection not accepted");
        return;
    }
    tracing::warn!(%error, "cannot accept connections, retrying");
    sleep(RETRY_DELAY).await;
}
