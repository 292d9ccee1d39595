//! What a program sends must name the host that it asked for, on every request.

use codelia_egress::Options;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::{
    client::{self, connect, connect_transparently, get, read_text, send_raw, socks, status},
    dns_server::DnsServer,
    namespace,
    rig::{Rig, Sandbox, rules},
    server::{Server, TestAuthority, client_config},
};

async fn rig(names: &[&str]) -> (Rig, Sandbox) {
    let (dns, resolver) = DnsServer::start().await;
    for name in names {
        dns.set_address(name, "93.184.216.34");
    }
    let rig = Rig::start(Options { resolvers: vec![resolver], ..Options::default() });
    let mut rules = rules(&["a.test", "b.test"]);
    rules.allowed_ports.extend([8080, 9418]);
    let sandbox = rig.open(rules);
    (rig, sandbox)
}

/// A tunnel to this target, each way.
async fn tunnels(sandbox: &Sandbox, host: &str, port: u16) -> [TcpStream; 3] {
    [
        connect(sandbox.proxy, &format!("{host}:{port}")).await.unwrap(),
        socks(sandbox.proxy, host, port).await.unwrap(),
        connect_transparently(sandbox.resolver, host, port).await,
    ]
}

#[test]
fn host_header_must_name_the_target() {
    namespace::run("agreement::host_header_must_name_the_target", async {
        let (mut rig, sandbox) = rig(&["a.test", "b.test"]).await;
        let server = Server::http("93.184.216.34:80", "reached").await;
        for header in [
            "Host: b.test",
            "Host: a.test:81",
            "Host: a.test\r\nHost: b.test",
            "X: y",
            "Host: a.test, b.test",
        ] {
            let request = format!("GET http://a.test/ HTTP/1.1\r\n{header}\r\n\r\n");
            let response = send_raw(sandbox.proxy, request.as_bytes()).await;
            assert!(matches!(status(&response).0, 400 | 403), "{header}: {response}");
            let response =
                send_raw(sandbox.proxy, b"CONNECT a.test:80 HTTP/1.1\r\nHost: b.test\r\n\r\n")
                    .await;
            assert_eq!(status(&response), (403, "host_mismatch".to_owned()), "{response}");
            for mut stream in tunnels(&sandbox, "a.test", 80).await {
                stream
                    .write_all(format!("GET / HTTP/1.1\r\n{header}\r\n\r\n").as_bytes())
                    .await
                    .unwrap();
                assert_eq!(read_text(&mut stream).await, "", "{header}");
            }
        }
        rig.refusal("host_mismatch").await;
        let reached = server.accepted();
        for mut stream in tunnels(&sandbox, "a.test", 80).await {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n").await.unwrap();
            assert!(read_text(&mut stream).await.contains("reached"), "the control");
        }
        assert_eq!(server.accepted(), reached + 3);
    });
}

#[test]
fn keep_alive_cannot_carry_a_second_host() {
    namespace::run("agreement::keep_alive_cannot_carry_a_second_host", async {
        let (_rig, sandbox) = rig(&["a.test", "b.test"]).await;
        let server = Server::http("93.184.216.34:80", "reached").await;
        // Two requests at once, and one inside the body of another.
        let two = "GET http://a.test/1 HTTP/1.1\r\nHost: a.test\r\n\r\nGET http://b.test/2 HTTP/1.1\r\nHost: b.test\r\n\r\n";
        let response = send_raw(sandbox.proxy, two.as_bytes()).await;
        assert!(response.contains("/1") && !response.contains("/2"), "{response}");
        for mut stream in tunnels(&sandbox, "a.test", 80).await {
            let two =
                b"GET /1 HTTP/1.1\r\nHost: a.test\r\n\r\nGET /2 HTTP/1.1\r\nHost: b.test\r\n\r\n";
            stream.write_all(two).await.unwrap();
            let response = read_text(&mut stream).await;
            assert!(response.contains("/1") && !response.contains("/2"), "{response}");
        }
        let direct = "GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\nconnection: close\r\n\r\n";
        let direct = send_raw(server.address, direct.as_bytes()).await;
        assert!(
            direct.contains("/1") && direct.contains("/2"),
            "the control: the server takes both"
        );
    });
}

#[test]
fn plain_tunnel_to_http_port_carries_nothing_else() {
    namespace::run("agreement::plain_tunnel_to_http_port_carries_nothing_else", async {
        let (mut rig, sandbox) = rig(&["a.test"]).await;
        let _http = Server::echo("93.184.216.34:80").await;
        let _other = Server::echo("93.184.216.34:9418").await;
        for bytes in [
            &b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..],
            b"\r\nGET / HTTP/1.1\r\nHost: b.test\r\n\r\n",
            b"SSH-2.0-x\r\n",
        ] {
            for mut stream in tunnels(&sandbox, "a.test", 80).await {
                stream.write_all(bytes).await.unwrap();
                assert_eq!(read_text(&mut stream).await, "", "{bytes:?}");
            }
        }
        rig.refusal("protocol_not_supported").await;
        // On another port it passes, and HTTP is checked there too.
        for mut stream in tunnels(&sandbox, "a.test", 9418).await {
            stream.write_all(b"0032git-upload-pack /a\0host=a.test\0").await.unwrap();
            let mut answer = [0; 10];
            stream.read_exact(&mut answer).await.unwrap();
            assert_eq!(&answer, b"0032git-up");
        }
        for mut stream in tunnels(&sandbox, "a.test", 9418).await {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: b.test\r\n\r\n").await.unwrap();
            assert_eq!(read_text(&mut stream).await, "");
        }
    });
}

/// Answers every request for `/ws` as a WebSocket server does, and then sends back what it gets. It
/// takes further requests on connections that it did not upgrade.
async fn serve_websocket(mut stream: TcpStream) {
    let mut head = Vec::new();
    while let Ok(byte) = stream.read_u8().await {
        head.push(byte);
        if !head.ends_with(b"\r\n\r\n") {
            continue;
        }
        let request = String::from_utf8_lossy(&head).to_ascii_lowercase();
        let path = request.split(' ').nth(1).unwrap_or_default().to_owned();
        if path == "/ws" && request.contains("\r\nupgrade: websocket\r\n") {
            let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
            return;
        }
        let body = format!("no websocket at {path}");
        let answer = format!(
            "HTTP/1.1 426 Upgrade Required\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        let sent = stream.write_all(answer.as_bytes()).await;
        if sent.is_err() || request.contains("connection: close") {
            return;
        }
        head.clear();
    }
}

/// A request for a WebSocket at a target, which is a path or a URI.
fn websocket_request(uri: &str, host: &str) -> String {
    format!(
        "GET {uri} HTTP/1.1\r\nHost: {host}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
}

/// Streams to a host's HTTP port, each way, with the URI that a request for this path has there.
async fn ways(sandbox: &Sandbox, path: &str) -> Vec<(TcpStream, String)> {
    let tunnels = tunnels(sandbox, "a.test", 80).await;
    let mut ways: Vec<_> = tunnels.into_iter().map(|stream| (stream, path.to_owned())).collect();
    let stream = TcpStream::connect(sandbox.proxy).await.unwrap();
    ways.push((stream, format!("http://a.test{path}")));
    ways
}

#[test]
fn websocket_is_relayed_after_the_destination_agreed() {
    namespace::run("agreement::websocket_is_relayed_after_the_destination_agreed", async {
        let (mut rig, sandbox) = rig(&["a.test"]).await;
        let _server = Server::start("93.184.216.34:80", serve_websocket).await;
        for (mut stream, uri) in ways(&sandbox, "/ws").await {
            // Its first frame comes with the request.
            let request = websocket_request(&uri, "a.test") + "frame 1,";
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"frame 1,") {
                answer.push(stream.read_u8().await.unwrap());
            }
            assert!(answer.starts_with(b"HTTP/1.1 101 "), "{uri}");
            stream.write_all(b"\x81\x00GET / HTTP/1.1\r\nHost: b.test\r\n\r\n").await.unwrap();
            stream.shutdown().await.unwrap();
            let rest = read_text(&mut stream).await;
            assert!(
                rest.ends_with("GET / HTTP/1.1\r\nHost: b.test\r\n\r\n"),
                "frames, not requests: {rest}"
            );
            assert!(rig.allowed().await.sent > 40, "bytes after the upgrade count");
        }
        for (mut stream, uri) in ways(&sandbox, "/ws").await {
            stream.write_all(websocket_request(&uri, "b.test").as_bytes()).await.unwrap();
            assert!(!read_text(&mut stream).await.contains(" 101 "), "another host: {uri}");
            rig.refusal("host_mismatch").await;
        }
    });
}

#[test]
fn refused_websocket_carries_no_second_request() {
    namespace::run("agreement::refused_websocket_carries_no_second_request", async {
        let (_rig, sandbox) = rig(&["a.test", "b.test"]).await;
        let server = Server::start("93.184.216.34:80", serve_websocket).await;
        let second = "GET /second HTTP/1.1\r\nHost: b.test\r\n\r\n";
        for (mut stream, uri) in ways(&sandbox, "/plain").await {
            let both = websocket_request(&uri, "a.test") + second;
            stream.write_all(both.as_bytes()).await.unwrap();
            let answer = read_text(&mut stream).await;
            assert!(
                answer.contains("no websocket at /plain") && !answer.contains("/second"),
                "{answer}"
            );
        }
        // The control: the server itself takes both.
        let mut direct = TcpStream::connect(server.address).await.unwrap();
        let both = websocket_request("/plain", "a.test") + second;
        direct.write_all(both.as_bytes()).await.unwrap();
        direct.shutdown().await.unwrap();
        assert!(read_text(&mut direct).await.contains("/second"));
        // No other protocol than a WebSocket is asked for.
        for mut stream in tunnels(&sandbox, "a.test", 80).await {
            let h2c = websocket_request("/ws", "a.test").replace("websocket", "h2c") + second;
            stream.write_all(h2c.as_bytes()).await.unwrap();
            let answer = read_text(&mut stream).await;
            assert!(answer.contains("426") && !answer.contains("/second"), "{answer}");
        }
    });
}

#[test]
fn destination_may_speak_first() {
    namespace::run("agreement::destination_may_speak_first", async {
        let (_rig, sandbox) = rig(&["a.test"]).await;
        let greet = |mut stream: TcpStream| async move {
            stream.write_all(b"220 hello\r\n").await.unwrap();
            let mut line = [0; 6];
            stream.read_exact(&mut line).await.unwrap();
            stream.write_all(&line).await.unwrap();
        };
        let _server = Server::start("93.184.216.34:9418", greet).await;
        for mut stream in tunnels(&sandbox, "a.test", 9418).await {
            let mut greeting = [0; 11];
            stream.read_exact(&mut greeting).await.unwrap();
            assert_eq!(&greeting, b"220 hello\r\n");
            stream.write_all(b"QUIT\r\n").await.unwrap();
            assert_eq!(read_text(&mut stream).await, "QUIT\r\n");
        }
    });
}

#[test]
fn tls_name_must_be_the_target() {
    namespace::run("agreement::tls_name_must_be_the_target", async {
        let (mut rig, sandbox) = rig(&["a.test", "b.test"]).await;
        let authority = TestAuthority::new();
        let server = Server::https("93.184.216.34:443", &authority, "a.test", "reached").await;
        let connector = TlsConnector::from(client_config(&authority.pem()));
        for stream in tunnels(&sandbox, "a.test", 443).await {
            let name = ServerName::try_from("a.test").unwrap();
            let mut stream = connector.connect(name, stream).await.unwrap();
            stream
                .write_all(b"GET / HTTP/1.1\r\nHost: a.test\r\nconnection: close\r\n\r\n")
                .await
                .unwrap();
            let mut text = Vec::new();
            let _ = stream.read_to_end(&mut text).await;
            assert!(String::from_utf8_lossy(&text).contains("reached"), "the control");
        }
        for stream in tunnels(&sandbox, "a.test", 443).await {
            let name = ServerName::try_from("b.test").unwrap();
            assert!(connector.connect(name, stream).await.is_err());
            let record = rig.refusal("sni_mismatch").await;
            assert_eq!((record.host.as_str(), record.sent), ("a.test", 0), "nothing was sent on");
        }
        for stream in tunnels(&sandbox, "a.test", 443).await {
            // No name is sent for an address.
            let name = ServerName::try_from("93.184.216.34").unwrap();
            assert!(connector.connect(name, stream).await.is_err());
            rig.refusal("sni_missing").await;
        }
        // Encrypted ClientHello whose visible name is that of the provider.
        for (name, passes) in [("provider.example", false), ("a.test", true)] {
            for mut stream in tunnels(&sandbox, "a.test", 443).await {
                stream.write_all(&hello_with_ech(name)).await.unwrap();
                let mut answer = [0; 1];
                assert_eq!(stream.read_exact(&mut answer).await.is_ok(), passes, "{name}");
            }
        }
        rig.refusal("sni_mismatch").await;
        assert!(server.accepted() > 0);
    });
}

/// A ClientHello with this visible name and the extension of Encrypted ClientHello.
fn hello_with_ech(name: &str) -> Vec<u8> {
    let vector =
        |bytes: &[u8]| [&u16::try_from(bytes.len()).unwrap().to_be_bytes()[..], bytes].concat();
    let extension =
        |kind: u16, content: &[u8]| [&kind.to_be_bytes()[..], &vector(content)].concat();
    let server_name = vector(&[&[0][..], &vector(name.as_bytes())].concat());
    let extensions = [extension(0, &server_name), extension(0xfe0d, &[0; 64])].concat();
    let hello = [
        &[3, 3][..],
        &[7; 32],
        &[0],
        &vector(&[0x13, 1, 0xc0, 0x2b]),
        &[1, 0],
        &vector(&extensions),
    ]
    .concat();
    let length = u32::try_from(hello.len()).unwrap().to_be_bytes();
    let message = [&[1][..], &length[1..], &hello].concat();
    [&[22, 3, 1][..], &vector(&message)].concat()
}

#[test]
fn each_redirect_is_a_new_decision() {
    namespace::run("agreement::each_redirect_is_a_new_decision", async {
        let (mut rig, sandbox) = rig(&["a.test", "b.test", "evil.test"]).await;
        let redirect = |mut stream: TcpStream| async move {
            let mut buffer = [0; 1024];
            let count = stream.read(&mut buffer).await.unwrap();
            let request = String::from_utf8_lossy(&buffer[..count]).into_owned();
            let to =
                if request.contains("a.test") { "http://b.test/" } else { "http://evil.test/" };
            let answer =
                format!("HTTP/1.1 302 Found\r\nlocation: {to}\r\ncontent-length: 0\r\n\r\n");
            stream.write_all(answer.as_bytes()).await.unwrap();
        };
        let server = Server::start("93.184.216.34:80", redirect).await;
        // A client that follows redirects.
        let (mut url, mut hops) = ("http://a.test/".to_owned(), Vec::new());
        loop {
            let response = get(sandbox.proxy, &url).await;
            hops.push(status(&response));
            match response.lines().find_map(|line| line.strip_prefix("location: ")) {
                Some(location) => url = location.to_owned(),
                None => break,
            }
        }
        let expected = [(302, ""), (302, ""), (403, "host_not_allowed")];
        assert_eq!(hops, expected.map(|(status, reason)| (status, reason.to_owned())));
        assert_eq!((url.as_str(), server.accepted()), ("http://evil.test/", 2));
        assert_eq!(rig.refusal("host_not_allowed").await.host, "evil.test");
        let _ = client::resolve(sandbox.resolver, "a.test").await;
    });
}
