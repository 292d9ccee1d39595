//! Limits of a sandbox. What one sandbox does slows no other.

use std::time::Duration;

use codelia_egress::{Options, control::TARGET_SOCKETS};
use hickory_proto::{op::ResponseCode, rr::RecordType};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{connect, get, join_all, query, read_text, send_raw, status},
    dns_server::DnsServer,
    namespace,
    rig::{Rig, rules},
    server::Server,
};

async fn options() -> Options {
    let (dns, resolver) = DnsServer::start().await;
    dns.set_address("a.test", "93.184.216.34");
    Options {
        resolvers: vec![resolver],
        header_timeout: Duration::from_secs(1),
        ..Options::default()
    }
}

#[test]
fn slow_and_many_connections_leave_others_served() {
    namespace::run("limits::slow_and_many_connections_leave_others_served", async {
        let _server = Server::http("93.184.216.34:80", "reached").await;
        let mut rig =
            Rig::start(Options { header_timeout: Duration::from_secs(600), ..options().await });
        let mut hostile_rules = rules(&["a.test"]);
        hostile_rules.limits.connections = 64;
        let (hostile, other) = (rig.open(hostile_rules), rig.open(rules(&["a.test"])));
        // Connections that send one byte and no more, until the limit of the sandbox.
        let mut slow = Vec::new();
        for _ in 0..64 {
            let mut stream = TcpStream::connect(hostile.proxy).await.unwrap();
            stream.write_all(b"G").await.unwrap();
            slow.push(stream);
        }
        for _ in 0..10_000 {
            // Some are reset before they are made.
            let _ = TcpStream::connect(hostile.proxy).await;
        }
        rig.refusal("connection_limit").await;
        for _ in 0..20 {
            assert!(get(other.proxy, "http://a.test/").await.contains("reached"));
        }
        drop(slow);
        // The hostile sandbox has its connections again, too.
        loop {
            if get(hostile.proxy, "http://a.test/").await.contains("reached") {
                break;
            }
            tokio::task::yield_now().await;
        }
        let totals = rig.close(&hostile).await;
        assert!(totals.refused >= 5000, "{totals:?}");
    });
}

#[test]
fn heads_that_do_not_arrive_end_the_connection() {
    namespace::run("limits::heads_that_do_not_arrive_end_the_connection", async {
        let _http = Server::http("93.184.216.34:80", "reached").await;
        let mut rig = Rig::start(options().await);
        let sandbox = rig.open(rules(&["a.test"]));
        for bytes in [
            &b""[..],
            b"GET http://a.test/ HTTP/1.1\r\nHost: a",
            b"\x05",
            b"\x05\x01\0\x05\x01\0\x03",
        ] {
            send_raw(sandbox.proxy, bytes).await;
            rig.refusal("header_timeout").await;
        }
        let mut stream = connect(sandbox.proxy, "a.test:80").await.unwrap();
        stream.write_all(b"\x16\x03\x01\x02\x00\x01\x00").await.unwrap();
        assert_eq!(read_text(&mut stream).await, "");
        rig.refusal("header_timeout").await;
        let large = format!("GET http://a.test/ HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(40_000));
        assert_eq!(status(&send_raw(sandbox.proxy, large.as_bytes()).await).0, 400);
    });
}

#[test]
fn bytes_are_limited_in_each_direction() {
    namespace::run("limits::bytes_are_limited_in_each_direction", async {
        let _echo = Server::echo("93.184.216.34:443").await;
        let mut rig = Rig::start(options().await);
        for received in [false, true] {
            let mut limited = rules(&["a.test"]);
            let limit = if received {
                &mut limited.limits.received_bytes
            } else {
                &mut limited.limits.sent_bytes
            };
            *limit = Some(1_000_000);
            let sandbox = rig.open(limited);
            let stream = connect(sandbox.proxy, "a.test:443").await.unwrap();
            let (mut read, mut write) = stream.into_split();
            #[allow(clippy::disallowed_methods)]
            let sender = tokio::spawn(async move {
                let chunk = [0; 10_000];
                while write.write_all(&chunk).await.is_ok() {}
            });
            let mut buffer = vec![0; 65536];
            let mut total = 0;
            while let Ok(count @ 1..) = read.read(&mut buffer).await {
                total += count;
            }
            sender.await.unwrap();
            assert!(total <= 1_000_000, "{total}");
            let record = rig.refusal("byte_limit").await;
            assert!(record.sent.max(record.received) > 1_000_000, "{record:?}");
            assert_eq!(
                status(&get(sandbox.proxy, "http://a.test/").await).1,
                "byte_limit",
                "later ones too"
            );
            rig.refusal("byte_limit").await;
        }
    });
}

#[test]
fn idle_connections_end() {
    namespace::run("limits::idle_connections_end", async {
        let _echo = Server::echo("93.184.216.34:443").await;
        let mut rig = Rig::start(options().await);
        let mut idle = rules(&["a.test"]);
        idle.limits.idle_timeout = Duration::from_millis(300);
        let sandbox = rig.open(idle);
        let mut stream = connect(sandbox.proxy, "a.test:443").await.unwrap();
        stream.write_all(b"hello\n").await.unwrap();
        assert_eq!(read_text(&mut stream).await, "hello\n");
        assert_eq!(rig.allowed().await.sent, 6);
    });
}

#[test]
fn queries_are_limited() {
    namespace::run("limits::queries_are_limited", async {
        let mut rig = Rig::start(options().await);
        let mut slow = rules(&["a.test"]);
        slow.limits.queries_per_second = 20;
        let sandbox = rig.open(slow);
        join_all((0..30).map(|_| query(sandbox.resolver, "a.test", RecordType::AAAA))).await;
        rig.refusal("query_rate").await;
    });
}

#[test]
fn names_are_refused_when_sockets_run_out() {
    namespace::run("limits::names_are_refused_when_sockets_run_out", async {
        let mut rig = Rig::start(options().await);
        let mut fast = rules(&["*.test"]);
        fast.limits.queries_per_second = 1000;
        let sandbox = rig.open(fast);
        // Each name has two ports.
        for number in 0..TARGET_SOCKETS / 2 {
            let (_, addresses) =
                query(sandbox.resolver, &format!("n{number}.test"), RecordType::A).await;
            assert_eq!(addresses.len(), 1, "{number}");
        }
        let (code, addresses) = query(sandbox.resolver, "more.test", RecordType::A).await;
        assert_eq!((code, addresses.len()), (ResponseCode::Refused, 0));
        assert_eq!(rig.refusal("too_many_names").await.host, "more.test");
        let (_, remedy) = codelia_egress::known_reason("too_many_names").unwrap();
        assert!(remedy.contains("proxy variables"), "{remedy}");
        assert_eq!(
            query(sandbox.resolver, "n0.test", RecordType::A).await.1.len(),
            1,
            "known names still work"
        );
        assert_eq!(
            query(sandbox.resolver, "n0.test", RecordType::AAAA).await,
            (ResponseCode::NoError, Vec::new()),
            "an address of IPv6 is optional"
        );
    });
}

#[test]
fn most_sockets_are_kept_for_ipv4() {
    namespace::run("limits::most_sockets_are_kept_for_ipv4", async {
        let rig = Rig::start(options().await);
        let mut fast = rules(&["*.test"]);
        fast.limits.queries_per_second = 1000;
        let sandbox = rig.open(fast);
        let (mut four, mut six) = (0, 0);
        for number in 0..TARGET_SOCKETS / 2 {
            let name = format!("n{number}.test");
            six += query(sandbox.resolver, &name, RecordType::AAAA).await.1.len();
            four += query(sandbox.resolver, &name, RecordType::A).await.1.len();
        }
        // Each name has two ports, and each port a socket.
        assert_eq!((four, six), (TARGET_SOCKETS / 3, TARGET_SOCKETS / 6));
    });
}

#[test]
fn server_at_all_addresses_keeps_its_port() {
    namespace::run("limits::server_at_all_addresses_keeps_its_port", async {
        let mut rig = Rig::start(options().await);
        let sandbox = rig.open(rules(&["*.test"]));
        let own = std::net::TcpListener::bind("0.0.0.0:443").unwrap();
        assert!(query(sandbox.resolver, "a.test", RecordType::A).await.1.is_empty());
        rig.refusal("address_in_use").await;
        drop(own);
        assert_eq!(query(sandbox.resolver, "a.test", RecordType::A).await.1.len(), 1);
        // A server at its own address does not collide.
        std::net::TcpListener::bind("127.0.0.1:443").unwrap();
    });
}
