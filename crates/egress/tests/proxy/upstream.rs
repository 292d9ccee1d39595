//! An upstream proxy: all decisions are made before it, and it gets addresses only.

use std::os::unix::fs::PermissionsExt;

use codelia_egress::{Options, Upstream, UpstreamProtocol};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::mpsc,
};

use crate::{
    client::{get, status},
    dns_server::{Answer, DnsServer},
    namespace,
    rig::{Rig, rules},
    server::Server,
};

/// A proxy that reports what it was asked for and connects there.
async fn start_upstream(protocol: UpstreamProtocol) -> (Server, mpsc::UnboundedReceiver<String>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let serve = move |mut stream: TcpStream| {
        let sender = sender.clone();
        async move {
            let asked = match protocol {
                UpstreamProtocol::Socks5 => accept_socks(&mut stream).await,
                UpstreamProtocol::Connect => accept_connect(&mut stream).await,
            };
            let destination = asked.rsplit(' ').next().unwrap().to_owned();
            sender.send(asked).unwrap();
            let Ok(mut destination) = TcpStream::connect(destination).await else { return };
            let success: &[u8] = match protocol {
                UpstreamProtocol::Socks5 => &[5, 0, 0, 1, 0, 0, 0, 0, 0, 0],
                UpstreamProtocol::Connect => b"HTTP/1.1 200 OK\r\n\r\n",
            };
            stream.write_all(success).await.unwrap();
            let _ = tokio::io::copy_bidirectional(&mut stream, &mut destination).await;
        }
    };
    (Server::start("127.0.0.1:0", serve).await, receiver)
}

async fn accept_socks(stream: &mut TcpStream) -> String {
    let mut greeting = [0; 3];
    stream.read_exact(&mut greeting).await.unwrap();
    assert_eq!(greeting, [5, 1, 2], "with a password");
    stream.write_all(&[5, 2]).await.unwrap();
    let mut login = [0; 11];
    stream.read_exact(&mut login).await.unwrap();
    assert_eq!(&login, b"\x01\x04user\x04pass");
    stream.write_all(&[1, 0]).await.unwrap();
    let mut request = [0; 10];
    stream.read_exact(&mut request).await.unwrap();
    assert_eq!(request[..4], [5, 1, 0, 1], "by address");
    let [a, b, c, d] = [request[4], request[5], request[6], request[7]];
    format!("{a}.{b}.{c}.{d}:{}", u16::from_be_bytes([request[8], request[9]]))
}

async fn accept_connect(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.contains("Proxy-Authorization: Basic dXNlcjpwYXNz\r\n"), "{head}");
    head.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn upstream_gets_checked_addresses_only() {
    namespace::run("upstream::upstream_gets_checked_addresses_only", async {
        let _server = Server::http("93.184.216.34:80", "reached").await;
        let dir = tempfile::tempdir().unwrap();
        let credentials = dir.path().join("credentials.toml");
        std::fs::write(&credentials, "[upstream]\nusername = \"user\"\npassword = \"pass\"\n")
            .unwrap();
        std::fs::set_permissions(&credentials, PermissionsExt::from_mode(0o600)).unwrap();
        for protocol in [UpstreamProtocol::Socks5, UpstreamProtocol::Connect] {
            let (dns, resolver) = DnsServer::start().await;
            dns.set_address("a.test", "93.184.216.34");
            dns.set(
                "mixed.test",
                Answer::Addresses(vec![
                    "93.184.216.34".parse().unwrap(),
                    "10.0.0.1".parse().unwrap(),
                ]),
            );
            let (upstream, mut asked) = start_upstream(protocol).await;
            let rig = Rig::start(Options {
                resolvers: vec![resolver],
                upstream: Some(Upstream { protocol, address: upstream.address }),
                credentials_file: Some(credentials.clone()),
                ..Options::default()
            });
            let sandbox = rig.open(rules(&["a.test", "mixed.test"]));
            assert!(get(sandbox.proxy, "http://a.test/").await.contains("reached"));
            assert_eq!(asked.recv().await.unwrap(), "93.184.216.34:80");
            assert_eq!(
                status(&get(sandbox.proxy, "http://mixed.test/").await).1,
                "special_address"
            );
            assert_eq!(
                status(&get(sandbox.proxy, "http://unlisted.test/").await).1,
                "host_not_allowed"
            );
            assert_eq!(upstream.accepted(), 1, "decided before the upstream proxy");
        }
    });
}

#[test]
fn each_tenant_leaves_through_its_own_upstream() {
    namespace::run("upstream::each_tenant_leaves_through_its_own_upstream", async {
        let _server = Server::http("93.184.216.34:80", "reached").await;
        let dir = tempfile::tempdir().unwrap();
        let credentials = dir.path().join("credentials.toml");
        let login = "username = \"user\"\npassword = \"pass\"\n";
        let sections = ["upstream", "tenant_upstreams.one", "tenant_upstreams.two"];
        let text: String = sections.iter().map(|section| format!("[{section}]\n{login}")).collect();
        std::fs::write(&credentials, text).unwrap();
        std::fs::set_permissions(&credentials, PermissionsExt::from_mode(0o600)).unwrap();
        let (dns, resolver) = DnsServer::start().await;
        dns.set_address("a.test", "93.184.216.34");
        let protocols =
            [UpstreamProtocol::Socks5, UpstreamProtocol::Connect, UpstreamProtocol::Socks5];
        let [(one, _one), (two, _two), (shared, _shared)] = [
            start_upstream(protocols[0]).await,
            start_upstream(protocols[1]).await,
            start_upstream(protocols[2]).await,
        ];
        let upstream = |server: &Server, at: usize| Upstream {
            protocol: protocols[at],
            address: server.address,
        };
        let tenants = [("one", upstream(&one, 0)), ("two", upstream(&two, 1))];
        let rig = Rig::start(Options {
            resolvers: vec![resolver],
            upstream: Some(upstream(&shared, 2)),
            tenant_upstreams: tenants
                .map(|(tenant, upstream)| (tenant.parse().unwrap(), upstream))
                .into(),
            credentials_file: Some(credentials),
            ..Options::default()
        });
        for (tenant, seen) in
            [("one", [1, 0, 0]), ("two", [1, 1, 0]), ("one", [2, 1, 0]), ("other", [2, 1, 1])]
        {
            let sandbox = rig.open_of(tenant, rules(&["a.test"]));
            assert!(get(sandbox.proxy, "http://a.test/").await.contains("reached"), "{tenant}");
            assert_eq!([one.accepted(), two.accepted(), shared.accepted()], seen, "{tenant}");
        }
    });
}
