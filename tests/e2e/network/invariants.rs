//! The security invariants of the network, one test each. `INV-S7` is in `asks.rs`.

use std::fs;

use anyhow::{Result, ensure};
use codelia_store::EventKind;
use codelia_tests::{Exec, Process, Up, eventually, shell};
use serde_json::Value;

use super::{ALLOWED, PROXY_VARIABLES, Place, exit_code};

/// How programs come to the proxy: name, what the shell does first, options of `curl`.
const WAYS: [(&str, &str, &str); 3] = [
    ("by HTTP", "", ""),
    ("by SOCKS", "", "-x socks5h://${HTTP_PROXY#http://}"),
    ("transparently", "unset PROXIES; ", ""),
];

/// Prints the HTTP status of a request, or `000`.
fn status(options: &str, url: &str) -> String {
    format!("curl -s -o /dev/null --max-time 20 -w '%{{http_code}}' {options} '{url}'")
}

#[tokio::test]
async fn inv_s1_shell_is_isolated_by_default() -> Result<()> {
    // Nothing is configured.
    let place = Up::new()?;
    let mut up = place.start().await?;
    let script = "test $(ls /proc | grep -c '^[0-9]') -lt 10 && ls /root /home 2>/dev/null";
    let run = place.command(&["run", "--json", "--", "bash", "-c", script]);
    let done = Process::finish(run, b"").await?;
    let record: Value = serde_json::from_str(&done.stdout)?;
    let isolating = ["native", "bwrap", "nsjail", "container"];
    ensure!(isolating.iter().any(|mode| record["isolation"] == *mode), "{done:?}");
    ensure!(
        record["mode"] != "SANDBOX_MODE_LOGICAL" && record["outputBytes"].is_null(),
        "{done:?}"
    );
    up.terminate().await?;
    place.leak_guard().expect_no_processes().await;
    Ok(())
}

#[tokio::test]
async fn inv_s2_network_is_none_by_default() -> Result<()> {
    let Some(place) = Place::start_under("bwrap", "{}", Vec::new()).await? else { return Ok(()) };
    let session = place.client.session().await?.name;
    let devices = place
        .output(&session, "ls /sys/class/net 2>/dev/null || cut -d: -f1 -s /proc/net/dev")
        .await?;
    let devices: Vec<&str> =
        devices.split_whitespace().filter(|word| *word != "face" && *word != "Inter-|").collect();
    ensure!(devices == ["lo"], "{devices:?}");
    let address = place.network.address();
    let done = place.run(&session, &status("", &format!("http://{address}/hello"))).await?;
    ensure!(done.stdout_text() == "000" && place.network.packets().is_empty(), "{done:?}");
    // The control: the host reaches it.
    let host = std::process::Command::new("sh")
        .args(["-c", &status("", &format!("http://{address}/hello"))])
        .output()?;
    ensure!(host.stdout == b"200", "{host:?}");
    place.end().await
}

/// Names that lead to these addresses, next to one that leads to the server.
async fn no_name_leads_to(addresses: &[&str]) -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&["*.example.com"], &[80, 443, 5432]).await?;
    for (number, address) in addresses.iter().enumerate() {
        let name = format!("inside{number}.example.com");
        place.network.name(&name, &[address])?;
        for (way, prefix, options) in WAYS {
            let script = format!("{prefix}{}", status(options, &format!("http://{name}/")));
            let done = place.run(&session, &script.replace("PROXIES", PROXY_VARIABLES)).await?;
            let code = done.stdout_text();
            ensure!(code == "403" || code == "000", "{address}, {way}: {done:?}");
        }
    }
    let refused = place.events(EventKind::NetworkRefused).await?;
    for (number, address) in addresses.iter().enumerate() {
        let name = format!("inside{number}.example.com");
        let of_name = refused.iter().filter(|event| event.body.detail["host"] == *name);
        let reasons: Vec<_> = of_name.map(|event| event.body.detail["reason"].clone()).collect();
        let is_special = |reason: &Value| reason == "special_address" || reason == "own_address";
        ensure!(!reasons.is_empty() && reasons.iter().all(is_special), "{address}: {reasons:?}");
    }
    let control = place.output(&session, &status("", &format!("http://{ALLOWED}/hello"))).await?;
    ensure!(control == "200", "the control: {control}");
    place.end().await
}

#[tokio::test]
async fn inv_s3_private_ranges_are_blocked() -> Result<()> {
    no_name_leads_to(&[
        "10.0.0.1",
        "172.16.5.4",
        "192.168.1.1",
        "127.0.0.1",
        "100.64.0.1",
        "0.0.0.0",
        "198.18.0.1",
        "224.0.0.1",
        "::1",
        "fc00::1",
        "fe80::1",
        "::ffff:10.0.0.1",
        "64:ff9b::a00:1",
        "2002:a00:1::1",
    ])
    .await
}

#[tokio::test]
async fn inv_s4_cloud_metadata_is_blocked() -> Result<()> {
    no_name_leads_to(&[
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "fd00:ec2::254",
        "::ffff:169.254.169.254",
    ])
    .await
}

#[tokio::test]
async fn inv_s5_all_capabilities_are_dropped() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let status = place.output(&session, "grep -e ^Cap -e ^NoNewPrivs /proc/self/status").await?;
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        ensure!(status.contains(&format!("{set}:\t0000000000000000")), "{status}");
    }
    ensure!(status.contains("NoNewPrivs:\t1"), "{status}");
    place.end().await
}

#[tokio::test]
async fn inv_s6_command_is_not_root() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let ids = place.output(&session, "id -u; id -g; id -G").await?;
    ensure!(ids.split_whitespace().all(|id| id != "0"), "{ids}");
    // Outside it is not root either.
    let marker = format!("1000.{}", std::process::id());
    let mut run =
        Exec::start(&place.client, shell(&session, &format!("echo up; exec sleep {marker}")))
            .await?;
    run.until_stdout("up").await?;
    let status = eventually("the command runs", || async { status_of(&["sleep", &marker]) }).await;
    for field in ["Uid:", "Gid:"] {
        let line = status.lines().find(|line| line.starts_with(field)).unwrap_or_default();
        let ids: Vec<&str> = line.split_whitespace().skip(1).collect();
        ensure!(ids.len() == 4 && ids.iter().all(|id| *id != "0"), "{line}");
    }
    drop(run);
    place.end().await
}

/// `/proc/PID/status` of the process with these arguments.
fn status_of(argv: &[&str]) -> Option<String> {
    let wanted: Vec<u8> = argv.iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found =
        processes.filter(|path| fs::read(path.join("cmdline")).is_ok_and(|line| line == wanted));
    fs::read_to_string(found.next()?.join("status")).ok()
}

#[tokio::test]
async fn inv_s8_resolved_address_is_what_counts() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&["*.example.com"], &[]).await?;
    let server = place.network.address().to_string();
    // The first answer is public, later ones are private: each connection has one answer, and uses
    // it.
    place.network.name("rebinding.example.com", &["next", &server, "127.0.0.1"])?;
    place.network.name("mixed.example.com", &[&server, "10.0.0.1"])?;
    let get = |name: &str| status("", &format!("http://{name}.example.com/hello"));
    let first = place.output(&session, &get("rebinding")).await?;
    ensure!(first == "200", "the control: {first}");
    let second = place.run(&session, &get("rebinding")).await?;
    ensure!(second.stdout_text() == "403", "{second:?}");
    let mixed = place.run(&session, &get("mixed")).await?;
    ensure!(mixed.stdout_text() == "403", "{mixed:?}");
    place.end().await
}

#[tokio::test]
async fn inv_s9_each_redirect_is_checked() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&["*.example.com"], &[]).await?;
    place.network.name("inside.example.com", &["10.0.0.1"])?;
    let follow = |to: &str| status("-L", &format!("http://{ALLOWED}/redirect?{to}"));
    let refused = [
        "http://inside.example.com/",
        "http://169.254.169.254/latest/meta-data/",
        "http://elsewhere.example.org/",
        "http://127.0.0.1:5432/",
    ];
    for to in refused {
        let done = place.run(&session, &follow(to)).await?;
        let code = done.stdout_text();
        // Loopback is the sandbox's own: no proxy is asked, and nothing listens there.
        let is_own = to.contains("127.0.0.1") && code == "302" && exit_code(&done) == Some(7);
        ensure!(code == "403" || is_own, "{to}: {done:?}");
    }
    let control = place.run(&session, &follow(&format!("http://{ALLOWED}/hello"))).await?;
    ensure!(control.stdout_text() == "200" && exit_code(&control) == Some(0), "{control:?}");
    place.end().await
}
