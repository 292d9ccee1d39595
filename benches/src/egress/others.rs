//! Other programs of this machine that lead to the server.

use std::{
    fs,
    io::Read,
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_tests::Scratch;

use super::{PYTHON, Parts, WayResult, finished, namespace::Namespace, on_host, ways_in};
use crate::report::Report;

/// How long a program may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Another way to the server.
pub(super) struct Other {
    pub(super) name: &'static str,
    /// The address at which a client finds the server.
    address: String,
    kind: Kind,
}

enum Kind {
    /// A proxy.
    Proxy { address: String, _process: Killed },
    /// The client runs in a namespace that a program has connected.
    Inside { _process: Killed, namespace: Namespace },
    /// The client runs in a namespace that this command makes.
    Wrapper(&'static [&'static str]),
}

/// A process that is killed when dropped.
pub(super) struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Other {
    pub(super) fn inside(
        name: &'static str,
        address: &str,
        namespace: Namespace,
        process: Killed,
    ) -> Self {
        Self {
            name,
            address: address.to_owned(),
            kind: Kind::Inside { _process: process, namespace },
        }
    }

    pub(super) fn measure(&self, script: &Path) -> Result<WayResult> {
        let address = &self.address;
        let mut command = match &self.kind {
            Kind::Proxy { address: proxy, .. } => return on_host(script, &[address, proxy]),
            Kind::Inside { namespace, .. } => namespace.command(PYTHON),
            Kind::Wrapper(words) => {
                let mut command = Command::new(words[0]);
                command.args(&words[1..]).arg(PYTHON);
                command
            }
        };
        finished(command.arg(script).arg(address).output()?).with_context(|| self.name)
    }
}

/// Starts those that are installed. Says which are not.
pub(super) fn start(
    parts: &Parts,
    scratch: &Scratch,
    server: &str,
    report: &mut Report,
) -> Result<Vec<Other>> {
    let mut others = Vec::new();
    for name in ["tinyproxy", "squid", "slirp4netns", "pasta"] {
        if !parts.contain(name) {
            continue;
        }
        if !is_installed(name) {
            report.note(&format!("{name}: not installed, not measured"));
            continue;
        }
        let kind = match name {
            "tinyproxy" => tinyproxy(scratch)?,
            "squid" => squid(scratch)?,
            "slirp4netns" => slirp()?,
            _ if !runs_true(PASTA)? => {
                report.note(&format!("{name}: cannot run `true` here, not measured"));
                continue;
            }
            _ => Kind::Wrapper(PASTA),
        };
        others.push(Other { name, address: server.to_owned(), kind });
    }
    others.extend(ways_in::start(parts, scratch, server, report)?);
    Ok(others)
}

const PASTA: &[&str] = &["pasta", "--config-net", "-q", "--"];

/// Old versions of pasta hang on new kernels.
fn runs_true(wrapper: &[&str]) -> Result<bool> {
    let mut command = Command::new("timeout");
    Ok(command.args(["--kill-after=1", "10"]).args(wrapper).arg("true").output()?.status.success())
}

pub(super) fn is_installed(program: &str) -> bool {
    ["/usr/bin", "/usr/sbin", "/usr/local/bin"]
        .iter()
        .any(|dir| Path::new(dir).join(program).exists())
}

fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

/// Starts a proxy and waits until it accepts connections.
fn proxy(port: u16, command: &mut Command) -> Result<Kind> {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Killed(quiet.spawn().with_context(|| format!("{command:?}"))?);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        ensure!(begun.elapsed() < START_TIMEOUT, "{command:?} does not accept connections");
        sleep(Duration::from_millis(10));
    }
    Ok(Kind::Proxy { address: format!("127.0.0.1:{port}"), _process: process })
}

/// Starts a program that writes to its standard output when it is ready.
pub(super) fn start_ready(command: &mut Command) -> Result<Killed> {
    let process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut process = Killed(process.with_context(|| format!("{command:?}"))?);
    let mut output = process.0.stdout.take().context("standard output")?;
    output.read_exact(&mut [0]).with_context(|| format!("{command:?} ended early"))?;
    Ok(process)
}

fn tinyproxy(scratch: &Scratch) -> Result<Kind> {
    let port = free_port()?;
    let file = scratch.join("tinyproxy.conf");
    fs::write(
        &file,
        format!(
            "Port {port}\nListen 127.0.0.1\nMaxClients 100\nConnectPort 9000\nConnectPort 9001\n"
        ),
    )?;
    proxy(port, Command::new("tinyproxy").arg("-d").arg("-c").arg(file))
}

fn squid(scratch: &Scratch) -> Result<Kind> {
    let port = free_port()?;
    let file = scratch.join("squid.conf");
    let pid = scratch.join("squid.pid");
    let text = format!(
        "http_port 127.0.0.1:{port}\nhttp_access allow all\ncache deny all\naccess_log none\ncache_log /dev/null\npid_filename {}\n",
        pid.display()
    );
    fs::write(&file, text)?;
    proxy(port, Command::new("squid").args(["-N", "-f"]).arg(file))
}

/// A namespace that slirp4netns has connected. It is ready when the route is there.
fn slirp() -> Result<Kind> {
    let namespace = Namespace::create()?;
    let line = "exec slirp4netns --configure --mtu=65520 --ready-fd=3 --netns-type=path \"$0\" tap0 3>&1 >/dev/null 2>&1";
    let process = start_ready(Command::new("sh").args(["-c", line]).arg(namespace.path()))?;
    Ok(Kind::Inside { _process: process, namespace })
}
