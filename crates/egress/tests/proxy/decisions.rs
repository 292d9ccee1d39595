//! Decisions of persons, and changes of rules while connections live.

use std::time::Duration;

use codelia_egress::{
    Options,
    control::{Decision, Report},
};
use codelia_policy::EgressRules;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    client::{connect, connect_transparently, get, read_text, status},
    dns_server::DnsServer,
    namespace,
    rig::{Rig, rules},
    server::Server,
};

async fn options() -> Options {
    let (dns, resolver) = DnsServer::start().await;
    for name in ["a.test", "b.test"] {
        dns.set_address(name, "93.184.216.34");
    }
    Options {
        resolvers: vec![resolver],
        ask_timeout: Duration::from_secs(600),
        ..Options::default()
    }
}

fn asking() -> EgressRules {
    EgressRules { ask_hosts: vec!["*.test".to_owned()], ..rules(&[]) }
}

async fn asked(rig: &mut Rig) -> (String, u16) {
    rig.wait(|report| match report {
        Report::Ask { host, port, .. } => Some((host.clone(), *port)),
        _ => None,
    })
    .await
}

#[test]
fn connection_waits_for_a_decision() {
    namespace::run("decisions::connection_waits_for_a_decision", async {
        let server = Server::http("93.184.216.34:80", "reached").await;
        let mut rig = Rig::start(options().await);
        let sandbox = rig.open(asking());
        for (decision, reached) in [(Decision::Once, true), (Decision::Deny, false)] {
            let before = server.accepted();
            let both = async {
                tokio::join!(
                    get(sandbox.proxy, "http://a.test/"),
                    get(sandbox.proxy, "http://a.test/")
                )
            };
            // The second connection asks again if it comes after a decision for once.
            let answers = async {
                assert_eq!(asked(&mut rig).await, ("a.test".to_owned(), 80));
                assert_eq!(server.accepted(), before, "no connection before the decision");
                rig.decide(&sandbox, "a.test", 80, decision);
                loop {
                    asked(&mut rig).await;
                    rig.decide(&sandbox, "a.test", 80, decision);
                }
            };
            let (first, second) = tokio::select! {
                both = both => both,
                () = answers => unreachable!("answers every question"),
            };
            assert_eq!(first.contains("reached"), reached, "{first}");
            assert_eq!(second.contains("reached"), reached, "{second}");
        }
        assert_eq!(
            status(&get(sandbox.proxy, "http://a.test/").await),
            (403, "denied".to_owned()),
            "later ones too"
        );
        rig.decide(&sandbox, "b.test", 80, Decision::Always);
        assert!(get(sandbox.proxy, "http://b.test/").await.contains("reached"), "decided before");
        let questions =
            rig.seen.iter().filter(|report| matches!(report, Report::Ask { .. })).count();
        assert!((2..=3).contains(&questions), "{questions}");
    });
}

#[test]
fn undecided_connection_is_refused_in_time() {
    namespace::run("decisions::undecided_connection_is_refused_in_time", async {
        let server = Server::http("93.184.216.34:80", "reached").await;
        let mut rig =
            Rig::start(Options { ask_timeout: Duration::from_millis(200), ..options().await });
        let sandbox = rig.open(asking());
        assert_eq!(
            status(&get(sandbox.proxy, "http://a.test/").await),
            (403, "ask_timeout".to_owned())
        );
        let mut stream = connect_transparently(sandbox.resolver, "b.test", 80).await;
        assert_eq!(read_text(&mut stream).await, "");
        rig.refusal("ask_timeout").await;
        assert_eq!(server.accepted(), 0);
    });
}

#[test]
fn waiting_connections_hold_no_slot_of_others() {
    namespace::run("decisions::waiting_connections_hold_no_slot_of_others", async {
        let _server = Server::http("93.184.216.34:80", "reached").await;
        let mut rig = Rig::start(options().await);
        let mut few = asking();
        few.limits.connections = 4;
        let (waiting, other) = (rig.open(few), rig.open(rules(&["a.test"])));
        let mut streams = Vec::new();
        for _ in 0..4 {
            streams.push(connect_later(waiting.proxy).await);
        }
        asked(&mut rig).await;
        assert!(get(other.proxy, "http://a.test/").await.contains("reached"));
        rig.close(&waiting).await;
        for mut stream in streams {
            assert_eq!(read_text(&mut stream).await, "", "the end of the sandbox ends them");
        }
    });
}

/// Asks for a tunnel without waiting for the answer.
async fn connect_later(proxy: std::net::SocketAddr) -> tokio::net::TcpStream {
    let mut stream = tokio::net::TcpStream::connect(proxy).await.unwrap();
    stream.write_all(b"CONNECT a.test:80 HTTP/1.1\r\n\r\n").await.unwrap();
    stream
}

#[test]
fn new_rules_end_connections_that_they_refuse() {
    namespace::run("decisions::new_rules_end_connections_that_they_refuse", async {
        let _echo = Server::echo("93.184.216.34:443").await;
        let mut rig = Rig::start(options().await);
        let sandbox = rig.open(rules(&["a.test", "b.test"]));
        let mut kept = connect(sandbox.proxy, "a.test:443").await.unwrap();
        let mut ended = connect(sandbox.proxy, "b.test:443").await.unwrap();
        let mut echo = [0; 3];
        for stream in [&mut kept, &mut ended] {
            stream.write_all(b"hi\n").await.unwrap();
            stream.read_exact(&mut echo).await.unwrap();
        }
        rig.update(&sandbox, rules(&["a.test"]));
        let cut = ended.read(&mut echo).await.unwrap_err();
        assert_eq!(cut.kind(), std::io::ErrorKind::ConnectionReset, "not an ordinary end");
        assert_eq!(rig.refusal("rules_changed").await.host, "b.test");
        kept.write_all(b"yo\n").await.unwrap();
        kept.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, b"yo\n");
        assert_eq!(connect(sandbox.proxy, "b.test:443").await.unwrap_err().1, "host_not_allowed");
        rig.update(&sandbox, rules(&["b.test"]));
        while connect(sandbox.proxy, "b.test:443").await.is_err() {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn closed_sandbox_accepts_nothing() {
    namespace::run("decisions::closed_sandbox_accepts_nothing", async {
        let _echo = Server::echo("93.184.216.34:443").await;
        let mut rig = Rig::start(options().await);
        let mut sandbox = rig.open(rules(&["a.test"]));
        let address = crate::client::resolve(sandbox.resolver, "a.test").await;
        let mut stream = connect(sandbox.proxy, "a.test:443").await.unwrap();
        let mut echo = [0; 3];
        stream.write_all(b"hi\n").await.unwrap();
        stream.read_exact(&mut echo).await.unwrap();
        let totals = rig.close(&sandbox).await;
        assert_eq!(
            (totals.connections, totals.refused, totals.sent, totals.received),
            (1, 0, 3, 3)
        );
        assert_eq!(read_text(&mut stream).await, "", "its connections end");
        let last = rig.seen.last();
        assert!(matches!(last, Some(Report::Closed { .. })), "{last:?}");
        // The worker's copies are the last ones.
        sandbox.drop_sockets();
        for address in [sandbox.proxy, (address, 443).into(), (address, 80).into()] {
            assert!(tokio::net::TcpStream::connect(address).await.is_err(), "{address}");
        }
        rig.close(&sandbox).await;
    });
}
