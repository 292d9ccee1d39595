//! Two ways for connections to any address to reach a relay without a device or a stack of its own:
//! local addresses with a socket each (AnyIP), as Codelia has them, and an nftables redirect. The
//! same small relay serves both, so only the way in differs.

use std::{
    fs,
    process::Command,
    time::{Duration, Instant},
};

use anyhow::Result;
use codelia_tests::Scratch;

use super::{
    PYTHON, Parts,
    namespace::{Namespace, run},
    others::{Other, is_installed, start_ready},
};
use crate::report::Report;

const RELAY: &str = include_str!("relay.py");
const ANY_IP: &str = "small relay, AnyIP";
const REDIRECT: &str = "small relay, nftables";
/// The relay's address in the namespace with AnyIP.
const ADDRESS: &str = "198.18.0.2";
/// The relay's port in the namespace with a redirect.
const RULES: &str = "add table ip codelia
add chain ip codelia out { type nat hook output priority -100; }
add rule ip codelia out ip daddr != 127.0.0.0/8 meta l4proto tcp redirect to :7000
";
/// Namespaces whose setup is compared.
const SETUPS: usize = 20;

/// Starts a relay for each way that this host has.
pub(super) fn start(
    parts: &Parts,
    scratch: &Scratch,
    server: &str,
    report: &mut Report,
) -> Result<Vec<Other>> {
    let script = scratch.join("relay.py");
    fs::write(&script, RELAY)?;
    let relay = |namespace: &Namespace, way: &str| {
        start_ready(Command::new(PYTHON).arg(&script).args([namespace.name(), way, server]))
    };
    let mut ways = Vec::new();
    if parts.contain(ANY_IP) {
        let namespace = Namespace::create()?;
        set_any_ip(&namespace)?;
        let process = relay(&namespace, ADDRESS)?;
        ways.push(Other::inside(ANY_IP, ADDRESS, namespace, process));
    }
    if parts.contain(REDIRECT) {
        let namespace = Namespace::create()?;
        match set_redirect(&namespace) {
            Ok(()) => {
                let process = relay(&namespace, "redirect")?;
                ways.push(Other::inside(REDIRECT, server, namespace, process));
            }
            Err(error) => report.note(&format!("{REDIRECT}: not measured: {error:#}")),
        }
    }
    Ok(ways)
}

fn set_any_ip(namespace: &Namespace) -> Result<()> {
    run(Command::new("ip").args([
        "-n",
        namespace.name(),
        "route",
        "add",
        "local",
        "198.18.0.0/15",
        "dev",
        "lo",
    ]))
}

fn set_redirect(namespace: &Namespace) -> Result<()> {
    anyhow::ensure!(is_installed("nft"), "nft is not installed");
    // The rule sees only packets that have a route and a source address.
    let addresses = "ip addr add 10.0.0.1/32 dev lo && ip route add default dev lo";
    let line = format!("{addresses} && nft '{RULES}'");
    run(namespace.command("sh").args(["-c", &line]))
}

/// The time to set both up in a new namespace, with that of starting the tools.
pub(super) fn compare_setup(report: &mut Report) -> Result<()> {
    let any_ip = setup(set_any_ip)?;
    let redirect = match setup(set_redirect) {
        Ok(time) => format!("{:.1} ms", time.as_secs_f64() * 1e3),
        Err(error) => format!("not measured: {error:#}"),
    };
    let any_ip = any_ip.as_secs_f64() * 1e3;
    report
        .note(&format!("setup with the tools: AnyIP {any_ip:.1} ms, nftables redirect {redirect}"));
    Ok(())
}

fn setup(set: impl Fn(&Namespace) -> Result<()>) -> Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..SETUPS {
        let namespace = Namespace::create()?;
        let begun = Instant::now();
        set(&namespace)?;
        times.push(begun.elapsed());
    }
    times.sort();
    Ok(times[times.len() / 2])
}
