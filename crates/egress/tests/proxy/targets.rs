//! Spellings of targets that must be refused, each way, with an allowed control.

use codelia_egress::{
    Config, Options,
    control::{Report, Via},
};
use codelia_policy::EgressRules;
use hickory_proto::{op::ResponseCode, rr::RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    client::{self, connect, get, query, send_raw, socks, socks_request, status},
    dns_server::DnsServer,
    namespace,
    rig::{Rig, rules},
    server::Server,
};

/// Hosts that no sandbox may reach, however they are written. The rules list every one of them, so
/// that only the parser and the check of addresses refuse them.
const REFUSED_HOSTS: &[&str] = &[
    // Loopback.
    "127.0.0.1",
    "127.0.0.2",
    "127.255.255.254",
    "127.1",
    "127.0.1",
    "0",
    "0.0.0.0",
    "0.0.0.0.",
    "127.0.0.1.",
    "2130706433",
    "017700000001",
    "0177.0.0.1",
    "0177.0.0.01",
    "0x7f000001",
    "0x7F.0.0.1",
    "0x7f.1",
    "0X7f000001",
    "127.0.0.01",
    "127.00.0.1",
    "127.0.0.0x1",
    "00000177.0.0.1",
    "127.0x0.1",
    "3221225472.1",
    // Private networks.
    "10.0.0.1",
    "10.1",
    "167772161",
    "0x0a000001",
    "012.0.0.1",
    "10.0.0.1.",
    "192.168.0.1",
    "192.168.1",
    "3232235521",
    "0xc0a80001",
    "172.16.0.1",
    "172.31.255.255",
    "100.64.0.1",
    "198.18.0.2",
    "198.19.255.255",
    "192.0.2.1",
    "203.0.113.9",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    // Metadata.
    "169.254.169.254",
    "169.254.170.2",
    "2852039166",
    "0xa9fea9fe",
    "0251.0376.0251.0376",
    "169.16689662",
    "0xa9.0xfe.0xa9.0xfe",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    // IPv6, mapped, compatible, translated, 6to4, Teredo, with zones.
    "[::1]",
    "[0:0:0:0:0:0:0:1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::127.0.0.1]",
    "[::ffff:0:127.0.0.1]",
    "[::ffff:10.0.0.1]",
    "[::ffff:169.254.169.254]",
    "[64:ff9b::127.0.0.1]",
    "[64:ff9b::a00:1]",
    "[64:ff9b::a9fe:a9fe]",
    "[64:ff9b:1::a00:1]",
    "[2002:7f00:1::]",
    "[2002:a00:1::1]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
    "[2001::1]",
    "[2001:db8::1]",
    "[2001:2::1]",
    "[fe80::1]",
    "[fe80::1%lo]",
    "[fe80::1%25lo]",
    "[::1%lo]",
    "[fd00::1]",
    "[fd00:ec2::254]",
    "[fc00::1]",
    "[ff02::1]",
    "[::1",
    "::1]",
    "[::1]]",
    "[[::1]]",
    "[127.0.0.1]",
    "[localhost]",
    "[]",
    "[::ffff:127.1]",
    "[::1/128]",
    "[v1.fe80]",
    "[::0x1]",
    // Names that are not plain ASCII names.
    "ⓛocalhost.test",
    "１２７.0.0.1",
    "127。0。0。1",
    "b\u{fc}cher.test",
    "al\u{200b}lowed.test",
    "xn--.test\u{7f}",
    "allowed.test%00.evil.test",
    "%61llowed.test",
    "allowed%2etest",
    "allowed.test%2f",
    "allowed test",
    "allowed.test\\evil.test",
    "allowed.test#.evil.test",
    "user@allowed.test",
    "user:pass@allowed.test",
    "@allowed.test",
    "allowed.test@10.0.0.1",
    "10.0.0.1@allowed.test",
    "allowed..test",
    ".allowed.test",
    "allowed.test..",
    "-allowed.test",
    "allowed-.test",
    "*.test",
    "allowed.test,evil.test",
    "allowed.test;evil.test",
    "allowed.test|",
    "`allowed.test`",
    "$(allowed).test",
    "allowed.test\t",
    "",
    ".",
    "..",
    // Names that lead to private addresses.
    "loopback.test",
    "private.test",
    "metadata.test",
    "mapped.test",
    "nat64.test",
    "self.test",
    "ula.test",
    // A name that the rules block, and one that they do not list.
    "blocked.test",
    "unlisted.example",
];

/// Ports that no sandbox may reach on an allowed host.
const REFUSED_PORTS: &[&str] = &[
    "",
    "0",
    "00",
    "22",
    "25",
    "53",
    "5432",
    "7300",
    "7301",
    "3128",
    "8080",
    "65535",
    "65536",
    "99999",
    "4294967376",
    "-80",
    "+80",
    "80x",
    "x80",
    "http",
    "https",
    "0x50",
    "080",
    "0080",
    "80 ",
    " 80",
    "80:80",
    "80.0",
    "８０",
    "8_0",
];

struct World {
    rig: Rig,
    sandbox: crate::rig::Sandbox,
    dns: DnsServer,
    allowed: Server,
    /// Servers that nothing may reach.
    forbidden: Vec<Server>,
}

async fn world() -> World {
    let (dns, resolver) = DnsServer::start().await;
    let names = [
        ("allowed.test", "93.184.216.34"),
        ("blocked.test", "93.184.216.34"),
        ("unlisted.example", "93.184.216.34"),
        ("loopback.test", "127.0.0.1"),
        ("private.test", "10.0.0.1"),
        ("metadata.test", "169.254.169.254"),
        ("mapped.test", "::ffff:10.0.0.1"),
        ("nat64.test", "64:ff9b::a00:1"),
        ("self.test", "93.184.216.99"),
        ("ula.test", "fd00::1"),
    ];
    for (name, address) in names {
        dns.set_address(name, address);
    }
    let options = Options { resolvers: vec![resolver], ..Options::default() };
    let config = Config { own_addresses: vec!["93.184.216.99".parse().unwrap()], ..options.into() };
    let allowed = Server::http("93.184.216.34:80", "reached").await;
    let mut forbidden = Vec::new();
    let addresses = [
        "127.0.0.1",
        "10.0.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "100.100.100.200",
        "93.184.216.99",
    ];
    let v6 = ["[::1]", "[fd00::1]", "[64:ff9b::a00:1]"];
    for address in addresses.iter().chain(&v6) {
        for port in [80, 443] {
            forbidden.push(Server::http(&format!("{address}:{port}"), "private").await);
        }
    }
    // Ports on the allowed host that the rules do not list.
    for port in [22, 5432, 7300, 8080] {
        forbidden.push(Server::http(&format!("93.184.216.34:{port}"), "port").await);
    }
    let rig = Rig::start(config);
    let sandbox = rig.open(broad_rules());
    World { rig, sandbox, dns, allowed, forbidden }
}

fn broad_rules() -> EgressRules {
    let mut rules = rules(&["*.test"]);
    rules
        .allowed_hosts
        .extend(REFUSED_HOSTS.iter().map(|host| host.trim_matches(['[', ']']).to_owned()));
    rules.allowed_hosts.retain(|host| host != "unlisted.example");
    rules.blocked_hosts = vec!["blocked.test".to_owned()];
    rules
}

impl World {
    /// The control: the servers can be reached, but not through the proxy.
    async fn nothing_private_was_reached(&self) {
        for server in &self.forbidden {
            assert_eq!(server.accepted(), 0, "{}", server.address);
            let direct =
                send_raw(server.address, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").await;
            assert!(direct.contains(" 200 OK"), "{direct}");
        }
    }
}

#[test]
fn table_has_a_hundred_spellings() {
    assert!(REFUSED_HOSTS.len() + REFUSED_PORTS.len() >= 150);
}

#[test]
fn connect_refuses_every_spelling() {
    namespace::run("targets::connect_refuses_every_spelling", async {
        let mut world = world().await;
        let authorities = REFUSED_HOSTS.iter().map(|host| format!("{host}:80"));
        let ports = REFUSED_PORTS.iter().map(|port| format!("allowed.test:{port}"));
        for authority in authorities.chain(ports).chain(["allowed.test".to_owned()]) {
            let response =
                send_raw(world.sandbox.proxy, request("CONNECT", &authority, None).as_bytes())
                    .await;
            let (status, reason) = status(&response);
            assert!(matches!(status, 400 | 403) && !reason.is_empty(), "{authority:?}: {response}");
            world.rig.refusal(&reason).await;
        }
        for authority in ["allowed.test:80", "ALLOWED.test:80", "allowed.test.:80"] {
            let mut stream = connect(world.sandbox.proxy, authority).await.unwrap();
            stream.write_all(b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n").await.unwrap();
            assert!(client::read_text(&mut stream).await.contains("reached"), "{authority}");
            let record = world.rig.allowed().await;
            assert_eq!(
                (record.host.as_str(), record.port, record.via),
                ("allowed.test", 80, Via::Connect)
            );
            assert_eq!(record.address, Some("93.184.216.34".parse().unwrap()));
            assert_eq!(record.rule.as_deref(), Some("*.test"));
            assert!(record.sent > 0 && record.received > 0, "{record:?}");
        }
        assert_eq!(world.allowed.accepted(), 3);
        world.nothing_private_was_reached().await;
    });
}

#[test]
fn absolute_form_refuses_every_spelling() {
    namespace::run("targets::absolute_form_refuses_every_spelling", async {
        let world = world().await;
        let urls = REFUSED_HOSTS.iter().map(|host| format!("http://{host}/"));
        let ports = REFUSED_PORTS.iter().map(|port| format!("http://allowed.test:{port}/"));
        let others = [
            "https://allowed.test/",
            "ftp://allowed.test/",
            "//allowed.test/",
            "/",
            "*",
            "allowed.test/",
        ];
        for url in urls.chain(ports).chain(others.map(str::to_owned)) {
            let authority = url
                .split("//")
                .nth(1)
                .and_then(|rest| rest.split('/').next())
                .unwrap_or("allowed.test");
            let response =
                send_raw(world.sandbox.proxy, request("GET", &url, Some(authority)).as_bytes())
                    .await;
            let (status, reason) = status(&response);
            assert!(matches!(status, 400 | 403) && !reason.is_empty(), "{url:?}: {response}");
        }
        for url in ["http://allowed.test/", "HTTP://ALLOWED.TEST:80/", "http://allowed.test./?q"] {
            assert!(get(world.sandbox.proxy, url).await.contains("reached"), "{url}");
        }
        assert_eq!(world.allowed.accepted(), 3);
        world.nothing_private_was_reached().await;
    });
}

fn request(method: &str, target: &str, host: Option<&str>) -> String {
    let host = host.map(|host| format!("Host: {host}\r\n")).unwrap_or_default();
    format!("{method} {target} HTTP/1.1\r\n{host}\r\n")
}

#[test]
fn socks_refuses_every_spelling() {
    namespace::run("targets::socks_refuses_every_spelling", async {
        let world = world().await;
        for host in REFUSED_HOSTS {
            let (code, _) = socks(world.sandbox.proxy, host, 80).await.unwrap_err();
            assert!(matches!(code, 1 | 2), "{host:?}: {code}");
        }
        for port in [0, 22, 5432, 7300, 8080, 65535] {
            assert!(socks(world.sandbox.proxy, "allowed.test", port).await.is_err(), "{port}");
        }
        // Addresses in binary form, and other commands.
        let addresses: [&[u8]; 4] =
            [&[1, 127, 0, 0, 1], &[1, 10, 0, 0, 1], &[1, 169, 254, 169, 254], &[1, 0, 0, 0, 0]];
        for address in addresses {
            let request = [&[5, 1, 0][..], address, &[0, 80]].concat();
            assert_eq!(
                socks_request(world.sandbox.proxy, &request).await.unwrap_err().0,
                2,
                "{address:?}"
            );
        }
        let mapped: std::net::Ipv6Addr = "::ffff:10.0.0.1".parse().unwrap();
        let request = [&[5, 1, 0, 4][..], &mapped.octets(), &[0, 80]].concat();
        assert_eq!(socks_request(world.sandbox.proxy, &request).await.unwrap_err().0, 2);
        for command in [2, 3, 9] {
            let request = [&[5, command, 0, 3, 12][..], b"allowed.test", &[0, 80]].concat();
            assert_eq!(socks_request(world.sandbox.proxy, &request).await.unwrap_err().0, 7);
        }
        let mut stream = socks(world.sandbox.proxy, "Allowed.test", 80).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n").await.unwrap();
        assert!(client::read_text(&mut stream).await.contains("reached"));
        world.nothing_private_was_reached().await;
    });
}

#[test]
fn transparent_way_refuses_every_spelling() {
    namespace::run("targets::transparent_way_refuses_every_spelling", async {
        let mut world = world().await;
        let leads_to_private = |host: &str| {
            host.ends_with(".test")
                && host
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || b".0123456789".contains(&byte))
        };
        let (mut refused, mut reset) = (0, 0);
        for host in REFUSED_HOSTS {
            let labels: Vec<_> = host.split('.').collect();
            if labels.iter().any(|label| label.is_empty() || label.len() > 63) {
                continue;
            }
            let (code, addresses) = query(world.sandbox.resolver, host, RecordType::A).await;
            if leads_to_private(host) && code == ResponseCode::NoError {
                // The name is allowed; where it leads to shows when a program connects.
                if let Ok(mut stream) = tokio::net::TcpStream::connect((addresses[0], 80)).await {
                    let _ = stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await;
                    assert!(stream.read_u8().await.is_err(), "{host}");
                }
                reset += 1;
            } else {
                assert_eq!((code, addresses.len()), (ResponseCode::Refused, 0), "{host:?}");
                refused += 1;
            }
        }
        assert!(refused >= 90 && reset >= 6, "{refused} refused, {reset} reset");
        // Queries ask no server; only connections do.
        let before = world.dns.all_queries();
        let mut stream =
            client::connect_transparently(world.sandbox.resolver, "allowed.test", 80).await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n").await.unwrap();
        assert!(client::read_text(&mut stream).await.contains("reached"));
        assert_eq!(world.dns.all_queries(), before + 2);
        let record = world.rig.allowed().await;
        assert_eq!((record.host.as_str(), record.via), ("allowed.test", Via::Transparent));
        let assigned = |report: &Report| matches!(report, Report::Assigned { assigned, .. } if assigned.host == "allowed.test");
        assert_eq!(
            world.rig.seen.iter().filter(|report| assigned(report)).count(),
            2,
            "ports 80 and 443"
        );
        world.nothing_private_was_reached().await;
    });
}

#[test]
fn resolver_answers_allowed_names_only() {
    namespace::run("targets::resolver_answers_allowed_names_only", async {
        let mut world = world().await;
        let resolver = world.sandbox.resolver;
        for kind in [RecordType::HTTPS, RecordType::SRV] {
            assert_eq!(
                query(resolver, "allowed.test", kind).await,
                (ResponseCode::NoError, Vec::new()),
                "{kind}"
            );
            assert_eq!(
                query(resolver, "unlisted.example", kind).await.0,
                ResponseCode::Refused,
                "{kind}"
            );
        }
        for kind in
            [RecordType::TXT, RecordType::NULL, RecordType::MX, RecordType::ANY, RecordType::AXFR]
        {
            assert_eq!(
                query(resolver, "allowed.test", kind).await.0,
                ResponseCode::Refused,
                "{kind}"
            );
        }
        assert_eq!(world.rig.refusal("query_type_not_allowed").await.host, "allowed.test");
        let data = "nbswy3dpfqqho33snrscc4tfmfsgs3thebrgk2lom4wca3tpmvzs6zlqmjwge.x.test";
        assert_eq!(query(resolver, data, RecordType::A).await.0, ResponseCode::Refused);
        assert_eq!(world.rig.refusal("suspicious_name").await.via, Via::Dns);
        assert_eq!(world.dns.all_queries(), 0, "no query left the sandbox");
        let same = client::resolve(resolver, "allowed.test").await;
        assert_eq!(client::resolve(resolver, "ALLOWED.test").await, same);
        let six = query(resolver, "allowed.test", RecordType::AAAA).await;
        let expected = format!("2001:2::{same}").parse().unwrap();
        assert_eq!(six, (ResponseCode::NoError, vec![expected]), "the address next to it");
        assert_eq!(
            query(resolver, "unlisted.example", RecordType::AAAA).await.0,
            ResponseCode::Refused
        );
        assert!(tcp_answers(resolver).await, "over TCP too");
    });
}

#[test]
fn names_are_reached_by_ipv6() {
    namespace::run("targets::names_are_reached_by_ipv6", async {
        let mut world = world().await;
        let (_, addresses) = query(world.sandbox.resolver, "allowed.test", RecordType::AAAA).await;
        let mut stream = tokio::net::TcpStream::connect((addresses[0], 80)).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n").await.unwrap();
        assert!(client::read_text(&mut stream).await.contains("reached"));
        assert_eq!(world.rig.allowed().await.via, Via::Transparent);
        // The same decision: another name in the request is refused.
        let mut stream = tokio::net::TcpStream::connect((addresses[0], 80)).await.unwrap();
        stream.write_all(b"GET / HTTP/1.1\r\nHost: unlisted.example\r\n\r\n").await.unwrap();
        assert_eq!(client::read_text(&mut stream).await, "");
        world.rig.refusal("host_mismatch").await;
        world.nothing_private_was_reached().await;
    });
}

#[test]
fn kernel_without_ipv6_answers_with_ipv4_only() {
    namespace::run("targets::kernel_without_ipv6_answers_with_ipv4_only", async {
        let world = world().await;
        let sandbox = world.rig.open_without_ipv6(crate::rig::rules(&["allowed.test"]));
        let empty = (ResponseCode::NoError, Vec::new());
        assert_eq!(query(sandbox.resolver, "allowed.test", RecordType::AAAA).await, empty);
        let mut stream = client::connect_transparently(sandbox.resolver, "allowed.test", 80).await;
        stream.write_all(b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n").await.unwrap();
        assert!(client::read_text(&mut stream).await.contains("reached"));
    });
}

async fn tcp_answers(resolver: std::net::SocketAddr) -> bool {
    use hickory_proto::{
        op::{Message, MessageType, OpCode, Query},
        rr::Name,
    };
    let mut message = Message::new(9, MessageType::Query, OpCode::Query);
    message.add_query(Query::query(Name::from_ascii("allowed.test.").unwrap(), RecordType::A));
    let bytes = message.to_vec().unwrap();
    let mut stream = tokio::net::TcpStream::connect(resolver).await.unwrap();
    stream.write_u16(u16::try_from(bytes.len()).unwrap()).await.unwrap();
    stream.write_all(&bytes).await.unwrap();
    let mut answer = vec![0; usize::from(stream.read_u16().await.unwrap())];
    stream.read_exact(&mut answer).await.unwrap();
    Message::from_vec(&answer).unwrap().answers.len() == 1
}
