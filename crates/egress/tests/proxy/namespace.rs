//! A network namespace for each test: the test starts itself again in a new one, so that it can
//! have any address without touching the host's network.

use std::process::Command;

use crate::require;

const INSIDE: &str = "CODELIA_TEST_INSIDE_NAMESPACE";

/// Addresses that belong to nobody here and are public to the proxy.
const PUBLIC: [&str; 2] = ["93.184.216.0/24", "2606:2800:220:1::/64"];
/// Addresses that the proxy must never connect to.
const PRIVATE: [&str; 6] = [
    "10.0.0.0/8",
    "169.254.169.254/32",
    "192.168.0.0/16",
    "100.100.100.200/32",
    "fd00::/16",
    "64:ff9b::/96",
];

/// Runs a test, given by its full name, in a namespace of its own.
pub(crate) fn run(test: &str, body: impl Future<Output = ()>) {
    if std::env::var_os(INSIDE).is_some() {
        set_up();
        return tokio::runtime::Runtime::new().unwrap().block_on(body);
    }
    let root = rustix::process::getuid().is_root();
    let new_namespace = || {
        let mut unshare = Command::new("unshare");
        unshare.args(if root { &["--net"][..] } else { &["--user", "--map-root-user", "--net"] });
        unshare
    };
    let usable =
        |mut command: Command| command.output().is_ok_and(|output| output.status.success());
    let mut namespace = new_namespace();
    namespace.arg("true");
    let mut version = Command::new("ip");
    version.arg("-V");
    let missing =
        (!usable(namespace) || !usable(version)).then_some("needs network namespaces and `ip`");
    if !require::available("programs", missing) {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let mut child = new_namespace();
    child.arg(program).args(["--exact", test, "--nocapture"]).env(INSIDE, "1");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

fn set_up() {
    ip(&["link", "set", "lo", "up"]);
    // IPv6 binds only addresses of interfaces otherwise.
    std::fs::write("/proc/sys/net/ipv6/ip_nonlocal_bind", "1").unwrap();
    // Every address of these networks is local, as those of names are in a sandbox.
    for network in PUBLIC.iter().chain(&PRIVATE).chain(&["198.18.0.0/15", "2001:2::/64"]) {
        ip(&["route", "add", "local", network, "dev", "lo"]);
    }
}

/// Lets every user bind low ports in this namespace, as in a sandbox's.
pub(crate) fn allow_low_ports() {
    std::fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0").unwrap();
}

fn ip(arguments: &[&str]) {
    let status = Command::new("ip").args(arguments).status().unwrap();
    assert!(status.success(), "ip {arguments:?}");
}
