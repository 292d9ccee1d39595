//! A network for one test: a namespace with public-looking addresses, in which servers for HTTP,
//! TLS, plain TCP and DNS run. The host has a route to it; nothing leaves the host.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{Certificates, Process, Scratch, available, is_root};

const SERVERS: &str = include_str!("servers.py");
const PYTHON: &str = "/usr/bin/python3";

/// A network with servers. Dropping it removes it.
#[derive(Debug)]
pub struct TestNetwork {
    link: Link,
    servers: Process,
    scratch: Scratch,
}

impl TestNetwork {
    /// Creates a network, or returns `None` if this machine lacks something.
    pub async fn start() -> Result<Option<Self>> {
        Self::start_with(true).await
    }

    /// Creates a network that does not look at its packets, for measurements.
    pub async fn start_without_capture() -> Result<Option<Self>> {
        Self::start_with(false).await
    }

    async fn start_with(capture: bool) -> Result<Option<Self>> {
        let needs = [
            ("root", (!is_root()).then_some("only root can create network namespaces")),
            ("python", (!Path::new(PYTHON).exists()).then_some("/usr/bin/python3 is missing")),
        ];
        if !needs.into_iter().all(|(need, missing)| available(need, missing)) {
            return Ok(None);
        }
        let link = Link::create()?;
        let scratch = Scratch::new()?;
        fs::create_dir(scratch.join("www"))?;
        fs::write(scratch.join("servers.py"), SERVERS)?;
        fs::write(scratch.join("names"), "")?;
        let names = ["*.example.com", "example.com", "*.example.org"];
        Certificates::new()?.write(scratch.path(), "server", &names)?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "TERM", "--", "ip", "netns", "exec", &link.namespace, PYTHON]);
        command.arg(scratch.join("servers.py")).arg(link.server.to_string()).arg(scratch.path());
        command.args(capture.then_some("capture"));
        let mut servers = Process::start("servers", command, scratch.path())?;
        servers.ready().await?;
        Ok(Some(Self { link, servers, scratch }))
    }

    /// The address of the servers.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.link.server
    }

    /// Their address in IPv6.
    #[must_use]
    pub fn address6(&self) -> Ipv6Addr {
        six(self.link.server)
    }

    /// The host's own address in this network.
    #[must_use]
    pub fn host_address(&self) -> Ipv4Addr {
        self.link.host
    }

    /// The host's device that leads into this network.
    #[must_use]
    pub fn device(&self) -> &str {
        &self.link.device
    }

    /// The DNS server, as `IP:PORT`.
    #[must_use]
    pub fn resolver(&self) -> String {
        format!("{}:53", self.link.server)
    }

    /// The certificate of the authority that signed the servers' certificate.
    #[must_use]
    pub fn authority(&self) -> PathBuf {
        self.scratch.join("server-ca.pem")
    }

    /// The files that the servers offer.
    #[must_use]
    pub fn www(&self) -> PathBuf {
        self.scratch.join("www")
    }

    /// Has the DNS server answer a name with these addresses: all of them, or after `next` one
    /// after the other.
    pub fn name(&self, name: &str, addresses: &[&str]) -> Result<()> {
        let path = self.scratch.join("names");
        let names = fs::read_to_string(&path)?;
        // In one step: the server may read it now.
        let new = self.scratch.join("names.new");
        fs::write(&new, format!("{names}{name} {}\n", addresses.join(" ")))?;
        Ok(fs::rename(new, path)?)
    }

    /// Names the servers.
    pub fn serve(&self, names: &[&str]) -> Result<()> {
        let address = self.link.server.to_string();
        names.iter().try_for_each(|name| self.name(name, &[&address]))
    }

    /// The requests so far: `scheme method host path authorization`.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.log("requests")
    }

    /// The DNS queries so far: `type name`.
    #[must_use]
    pub fn queries(&self) -> Vec<String> {
        self.log("queries")
    }

    /// The packets that arrived so far: `protocol source destination port`.
    #[must_use]
    pub fn packets(&self) -> Vec<String> {
        self.log("packets")
    }

    fn log(&self, name: &str) -> Vec<String> {
        let text =
            fs::read_to_string(self.scratch.join(&format!("{name}.log"))).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// Ends the servers and removes the network.
    pub async fn end(mut self) -> Result<()> {
        self.servers.terminate().await?;
        self.link.remove()
    }
}

/// A network namespace, and a pair of devices that leads into it.
#[derive(Debug)]
struct Link {
    namespace: String,
    device: String,
    host: Ipv4Addr,
    server: Ipv4Addr,
    is_removed: bool,
}

impl Link {
    /// Creates it with addresses that no other test has.
    fn create() -> Result<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        // 93.184.0.0/16 in blocks of 16 addresses. Tests in other processes begin elsewhere.
        let first =
            std::process::id().wrapping_mul(37).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        for block in (0..4096).map(|n| first.wrapping_add(n) % 4096) {
            let base = u32::from(Ipv4Addr::new(93, 184, 0, 0)) + block * 16;
            let link = Self {
                namespace: format!("codelia-{block}"),
                device: format!("codelia{block}"),
                host: Ipv4Addr::from(base + 1),
                server: Ipv4Addr::from(base + 2),
                is_removed: false,
            };
            // Only one process creates a namespace of this name.
            if ip(&["netns", "add", &link.namespace]).is_ok() {
                link.connect()?;
                return Ok(link);
            }
        }
        bail!("no network namespace can be created; see `ip netns`")
    }

    fn connect(&self) -> Result<()> {
        let Self { namespace, device, host, server, .. } = self;
        // Without duplicate address detection, which takes a second.
        let (host_six, server_six) =
            (format!("{}/124", six(*host)), format!("{}/124", six(*server)));
        let (host, server) = (format!("{host}/28"), format!("{server}/28"));
        ip(&["link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", namespace])?;
        for (address, options) in [(&host, &[][..]), (&host_six, &["nodad"])] {
            ip(&[&["addr", "add", address, "dev", device], options].concat())?;
        }
        for (address, options) in [(&server, &[][..]), (&server_six, &["nodad"])] {
            ip(&[&["-n", namespace, "addr", "add", address, "dev", "eth0"], options].concat())?;
        }
        ip(&["-n", namespace, "link", "set", "lo", "up"])?;
        ip(&["-n", namespace, "link", "set", "eth0", "up"])?;
        ip(&["link", "set", device, "up"])
    }

    fn remove(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.is_removed, true) {
            return Ok(());
        }
        // With the namespace alone, the device would stay for a moment.
        let device = ip(&["link", "del", &self.device]);
        ip(&["netns", "del", &self.namespace]).and(device)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            eprintln!("cannot remove a test network: {error:#}");
        }
    }
}

/// The IPv6 address next to an IPv4 address.
fn six(address: Ipv4Addr) -> Ipv6Addr {
    let [_, _, third, fourth] = address.octets();
    Ipv6Addr::new(0x2606, 0x2800, 0x220, 1, 0, 0, 0, u16::from_be_bytes([third, fourth]))
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(arguments).output().context("start ip")?;
    ensure!(
        output.status.success(),
        "ip {arguments:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}
