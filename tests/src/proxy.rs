//! A way to Postgres that can be cut, stalled and closed: TCP on one side, its Unix socket on the other.

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

/// What the way does to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProxyMode {
    /// They pass.
    Open,
    /// Connections stay and nothing comes through.
    Stalled,
    /// Connections break and none is made.
    Closed,
}

#[derive(Debug, Clone, Copy)]
struct State {
    passage: ProxyMode,
    /// How often every connection was broken.
    cuts: u64,
}

/// A piece of a statement and what stands in for it on the way: as long as itself.
pub type Replacement = (&'static str, &'static str);

/// One process's way to Postgres. It ends with its owner.
#[derive(Debug)]
pub struct Proxy {
    state: watch::Sender<State>,
    port: u16,
    replaced: Arc<AtomicUsize>,
}

#[derive(Debug, Clone)]
struct Way {
    socket: PathBuf,
    state: watch::Receiver<State>,
    replacements: &'static [Replacement],
    replaced: Arc<AtomicUsize>,
}

impl Proxy {
    /// Opens a way to the server whose socket is in `directory`.
    ///
    /// `replacements` are made in what is sent to it.
    pub fn start(directory: &Path, replacements: &'static [Replacement]) -> Result<Self> {
        let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let (state, watch) = watch::channel(State { passage: ProxyMode::Open, cuts: 0 });
        let replaced = Arc::<AtomicUsize>::default();
        let socket = directory.join(".s.PGSQL.5432");
        let way = Way { socket, state: watch, replacements, replaced: replaced.clone() };
        let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
        thread::spawn(move || runtime.block_on(accept(listener, way)));
        Ok(Self { state, port, replaced })
    }

    /// Where it listens on 127.0.0.1.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What happens from now on.
    pub fn set(&self, passage: ProxyMode) {
        self.state.send_modify(|state| {
            state.passage = passage;
            state.cuts += u64::from(passage == ProxyMode::Closed);
        });
    }

    /// Breaks every connection; new ones are made at once.
    pub fn cut(&self) {
        self.state.send_modify(|state| state.cuts += 1);
    }

    /// How many statements were rewritten_statements with.
    #[must_use]
    pub fn replaced(&self) -> usize {
        self.replaced.load(Ordering::Relaxed)
    }
}

async fn accept(listener: std::net::TcpListener, way: Way) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    let mut connections = JoinSet::new();
    let mut state = way.state.clone();
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
                let way = way.clone();
                connections.spawn(async move { carry(client, way).await });
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn carry(client: TcpStream, mut way: Way) -> io::Result<()> {
    if way.state.borrow_and_update().passage == ProxyMode::Closed {
        return Ok(());
    }
    client.set_nodelay(true)?;
    let server = UnixStream::connect(&way.socket).await?;
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let replacements = way.replacements;
    // Whichever side ends first ends both.
    tokio::select! {
        done = pass(from_client, to_server, way.clone(), replacements) => done,
        done = pass(from_server, to_client, way, &[]) => done,
    }
}

async fn pass(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut way: Way,
    replacements: &[Replacement],
) -> io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let open = way.state.wait_for(|state| state.passage != ProxyMode::Stalled).await;
        open.map_err(io::Error::other)?;
        swap(&mut buffer[..read], replacements, &way.replaced);
        to.write_all(&buffer[..read]).await?;
    }
}

/// A statement is sent in one write and is far shorter than the buffer, so it is never cut in two.
fn swap(bytes: &mut [u8], replacements: &[Replacement], replaced: &AtomicUsize) {
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
