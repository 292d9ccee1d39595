//! Programs that connect over IPv6 only.

use std::process::Command;

use anyhow::{Result, ensure};

use super::{ALLOWED, OTHER, Place};

/// Resolves a name or takes an address, connects to the echo server there, and prints what comes
/// back or what fails. Nothing of it works over IPv4.
const CLIENT: &str = r#"
import socket, sys
try:
    address = socket.getaddrinfo(sys.argv[1], 9000, socket.AF_INET6, socket.SOCK_STREAM)[0][4]
    client = socket.socket(socket.AF_INET6)
    client.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    client.settimeout(20)
    client.connect(address)
    client.sendall(b"hi\n")
    print(address[0], client.recv(100).decode())
except OSError as error:
    print(type(error).__name__, error.strerror)
"#;

async fn allowed_name_is_reached_by_ipv6_alone(mode: &'static str) -> Result<()> {
    let Some(place) = Place::start(mode).await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[9000]).await?;
    place.client.put(&session, "client.py", CLIENT).await?;
    let connect = |host: &str| format!("/usr/bin/python3 client.py {host}");
    let reached = place.output(&session, &connect(ALLOWED)).await?;
    ensure!(reached.starts_with("2001:2::") && reached.contains("echo:hi"), "{reached}");
    let other = place.output(&session, &connect(OTHER)).await?;
    ensure!(other.starts_with("gaierror"), "{other}");
    let address = place.network.address6().to_string();
    let direct = place.output(&session, &connect(&address)).await?;
    ensure!(direct.contains("Network is unreachable"), "{direct}");
    // The control: the host has a way to that address, where nothing listens.
    let control = Command::new("/usr/bin/python3").args(["-c", CLIENT, &address]).output()?;
    let control = String::from_utf8(control.stdout)?;
    ensure!(control.contains("Connection refused"), "{control}");
    ensure!(
        !place.network.queries().iter().any(|line| line.contains(OTHER)),
        "a refused name left the host"
    );
    place.end().await
}

#[tokio::test]
async fn allowed_name_is_reached_by_ipv6_alone_in_mode_bwrap() -> Result<()> {
    allowed_name_is_reached_by_ipv6_alone("bwrap").await
}

#[tokio::test]
async fn allowed_name_is_reached_by_ipv6_alone_in_mode_nsjail() -> Result<()> {
    allowed_name_is_reached_by_ipv6_alone("nsjail").await
}

#[tokio::test]
async fn allowed_name_is_reached_by_ipv6_alone_in_mode_container() -> Result<()> {
    allowed_name_is_reached_by_ipv6_alone("container").await
}
