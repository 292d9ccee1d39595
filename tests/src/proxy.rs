//! A TCP proxy to a server that can break, stall, half-open and refuse connections.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use anyhow::Result;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy as discard, sink},
    net::{TcpListener, TcpStream, UnixStream},
    runtime,
    sync::watch,
    task::JoinSet,
};

/// What the proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMode {
    /// It forwards everything.
    Open,
    /// It keeps connections and forwards nothing.
    Stalled,
    /// It closes connections and accepts none.
    Closed,
}

/// One end of a connection through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxySide {
    /// The end that connected to the proxy.
    Client,
    /// The end that the proxy connected to.
    Server,
}

/// The address of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProxyTarget {
    /// A Unix socket.
    Unix(PathBuf),
    /// `host:port`.
    Tcp(String),
}

impl ProxyTarget {
    /// The private server in `directory`.
    #[must_use]
    pub fn postgres(directory: &Path) -> Self {
        Self::Unix(directory.join("run/.s.PGSQL.5432"))
    }
}

#[derive(Debug, Clone)]
struct State {
    mode: ProxyMode,
    /// How often all connections were closed.
    cuts: u64,
    /// How often one side of all connections was closed, and which one last.
    half_opens: (u64, ProxySide),
    target: ProxyTarget,
}

/// A piece of a statement and its replacement, which must not be longer.
pub type Replacement = (&'static str, &'static str);

/// A proxy for the connections of one process. Dropping it stops it.
#[derive(Debug)]
pub struct Proxy {
    state: watch::Sender<State>,
    port: u16,
    replaced: Arc<AtomicUsize>,
}

#[derive(Debug, Clone)]
struct Route {
    state: watch::Receiver<State>,
    replacements: &'static [Replacement],
    replaced: Arc<AtomicUsize>,
}

impl Proxy {
    /// Starts a proxy to the private server in `directory`. Applies `replacements` to the
    /// statements that it forwards.
    pub fn start(directory: &Path, replacements: &'static [Replacement]) -> Result<Self> {
        Self::to(ProxyTarget::postgres(directory), replacements)
    }

    /// Starts a proxy to a server.
    pub fn to(target: ProxyTarget, replacements: &'static [Replacement]) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let half_opens = (0, ProxySide::Client);
        let state = State { mode: ProxyMode::Open, cuts: 0, half_opens, target };
        let (state, watch) = watch::channel(state);
        let replaced = Arc::<AtomicUsize>::default();
        let route = Route { state: watch, replacements, replaced: replaced.clone() };
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        thread::spawn(move || runtime.block_on(accept(listener, route)));
        Ok(Self { state, port, replaced })
    }

    /// The port on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Sets what to do with connections.
    pub fn set(&self, mode: ProxyMode) {
        self.state.send_modify(|state| {
            state.mode = mode;
            state.cuts += u64::from(mode == ProxyMode::Closed);
        });
    }

    /// Closes all connections. New ones are accepted.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// Closes one side of all connections and keeps the other open and silent, as if the peer had
    /// disappeared. New connections are forwarded.
    pub fn half_open(&self, closed: ProxySide) {
        self.state.send_modify(|state| state.half_opens = (state.half_opens.0 + 1, closed));
    }

    /// Closes all connections and sends new ones to another server.
    pub fn redirect(&self, target: ProxyTarget) {
        self.state.send_modify(|state| {
            state.target = target;
            state.cuts += 1;
        });
    }

    /// Number of replacements made.
    #[must_use]
    pub fn replaced(&self) -> usize {
        self.replaced.load(Ordering::Relaxed)
    }
}

async fn accept(listener: std::net::TcpListener, route: Route) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let mut connections = JoinSet::new();
    let mut state = route.state.clone();
    let mut cuts = 0;
    loop {
        tokio::select! {
            changed = state.changed() => {
                if changed.is_err() {
                    return;
                }
                let now = state.borrow_and_update().cuts;
                if now != cuts {
                    cuts = now;
                    connections.abort_all();
                }
            }
            Ok((client, _)) = listener.accept() => {
                let route = route.clone();
                connections.spawn(async move { forward(client, route).await });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

type Reader = Box<dyn AsyncRead + Send + Unpin>;
type Writer = Box<dyn AsyncWrite + Send + Unpin>;

async fn connect(target: &ProxyTarget) -> io::Result<(Reader, Writer)> {
    match target {
        ProxyTarget::Unix(path) => {
            let (from, to) = UnixStream::connect(path).await?.into_split();
            Ok((Box::new(from), Box::new(to)))
        }
        ProxyTarget::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let (from, to) = stream.into_split();
            Ok((Box::new(from), Box::new(to)))
        }
    }
}

async fn forward(client: TcpStream, mut route: Route) -> io::Result<()> {
    let State { mode, half_opens: (count, _), target, .. } =
        route.state.borrow_and_update().clone();
    if mode == ProxyMode::Closed {
        return Ok(());
    }
    client.set_nodelay(true)?;
    let (mut from_server, mut to_server) = connect(&target).await?;
    let (mut from_client, mut to_client) = client.into_split();
    let (replacements, mut state) = (route.replacements, route.state.clone());
    // Close both directions when either ends.
    let closed = tokio::select! {
        done = copy(&mut from_client, &mut to_server, route.clone(), replacements) => return done,
        done = copy(&mut from_server, &mut to_client, route, &[]) => return done,
        closed = half_opened(&mut state, count) => closed?,
    };
    match closed {
        ProxySide::Server => {
            drop((from_server, to_server));
            discard(&mut from_client, &mut sink()).await?;
        }
        ProxySide::Client => {
            drop((from_client, to_client));
            discard(&mut from_server, &mut sink()).await?;
        }
    }
    Ok(())
}

/// Waits until one side is to be closed, and returns it.
async fn half_opened(state: &mut watch::Receiver<State>, count: u64) -> io::Result<ProxySide> {
    let now = state.wait_for(|state| state.half_opens.0 != count).await;
    now.map(|state| state.half_opens.1).map_err(io::Error::other)
}

async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut route: Route,
    replacements: &[Replacement],
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let open = route.state.wait_for(|state| state.mode != ProxyMode::Stalled).await;
        open.map_err(io::Error::other)?;
        replace(&mut buffer[..read], replacements, &route.replaced);
        to.write_all(&buffer[..read]).await?;
    }
}

/// Replaces text in forwarded bytes. A statement is sent in one write and is far shorter than the
/// buffer, so it is never split.
fn replace(bytes: &mut [u8], replacements: &[Replacement], replaced: &AtomicUsize) {
    for (from, to) in replacements {
        let Some(at) = bytes.windows(from.len()).position(|window| window == from.as_bytes())
        else {
            continue;
        };
        let room = &mut bytes[at..at + from.len()];
        room.fill(b' ');
        room[..to.len()].copy_from_slice(to.as_bytes());
        replaced.fetch_add(1, Ordering::Relaxed);
    }
}
