//! A TCP proxy to the Unix socket of Postgres that can break, stall and refuse connections.

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
    io::{AsyncReadExt, AsyncWriteExt},
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

#[derive(Debug, Clone, Copy)]
struct State {
    mode: ProxyMode,
    /// How often all connections were closed.
    cuts: u64,
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
    socket: PathBuf,
    state: watch::Receiver<State>,
    replacements: &'static [Replacement],
    replaced: Arc<AtomicUsize>,
}

impl Proxy {
    /// Starts a proxy to the private server in `directory`. Applies `replacements` to the
    /// statements that it forwards.
    pub fn start(directory: &Path, replacements: &'static [Replacement]) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (state, watch) = watch::channel(State { mode: ProxyMode::Open, cuts: 0 });
        let replaced = Arc::<AtomicUsize>::default();
        let socket = directory.join("run/.s.PGSQL.5432");
        let route = Route { socket, state: watch, replacements, replaced: replaced.clone() };
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
                let now = *state.borrow_and_update();
                if now.cuts != cuts {
                    cuts = now.cuts;
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

async fn forward(client: TcpStream, mut route: Route) -> io::Result<()> {
    if route.state.borrow_and_update().mode == ProxyMode::Closed {
        return Ok(());
    }
    client.set_nodelay(true)?;
    let server = UnixStream::connect(&route.socket).await?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let replacements = route.replacements;
    // Close both directions when either ends.
    tokio::select! {
        done = copy(from_client, to_server, route.clone(), replacements) => done,
        done = copy(from_server, to_client, route, &[]) => done,
    }
}

async fn copy(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
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
        let Some(at) = bytes.windows(from.len()).position(|window| window == from.as_bytes()) else {
            continue;
        };
        let room = &mut bytes[at..at + from.len()];
        room.fill(b' ');
        room[..to.len()].copy_from_slice(to.as_bytes());
        replaced.fetch_add(1, Ordering::Relaxed);
    }
}
