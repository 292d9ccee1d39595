//! The proxy as a process of its own: restricted, killed, and replaced.

use std::{
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
};

use codelia_egress::{
    Config, Options, User,
    control::{Decision, Report, Request},
    packet,
};
use hickory_proto::rr::RecordType;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    client::{connect, get, join_all, query, read_text, resolve},
    dns_server::DnsServer,
    namespace, require,
    rig::{Rig, rules},
    server::Server,
};

const CHILD: &str = "CODELIA_TEST_EGRESS_CHILD";

/// Not a test by itself: the proxy's process, started by the other tests.
#[test]
fn proxy_process() {
    if std::env::var_os(CHILD).is_some() {
        let result = std::thread::scope(|_| {
            use std::os::fd::AsFd;
            codelia_egress::run(std::io::stdin().as_fd().try_clone_to_owned().unwrap())
        });
        if let Err(error) = &result {
            eprintln!("{error:?}");
        }
        std::process::exit(i32::from(result.is_err()));
    }
}

/// Starts a proxy in a process of its own.
fn start(config: Config) -> (Rig, Child) {
    let (ours, theirs) = packet::pair().unwrap();
    let child = spawn(theirs);
    let rig = Rig::new(ours);
    rig.send(&Request::Configure(Box::new(config)), &[]);
    (rig, child)
}

fn spawn(control: OwnedFd) -> Child {
    let program = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command
        .args(["--exact", "restart::proxy_process", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1");
    command.stdin(Stdio::from(control)).stdout(Stdio::null()).spawn().unwrap()
}

/// Only root can change to another user.
fn is_root() -> bool {
    let root = rustix::process::getuid().is_root();
    require::available("root", (!root).then_some("only root can change to another user"))
}

async fn config() -> Config {
    let (dns, resolver) = DnsServer::start().await;
    for name in ["a.test", "b.test", "c.test"] {
        dns.set_address(name, "93.184.216.34");
    }
    let options = Options { resolvers: vec![resolver], ..Options::default() };
    Config { user: Some(User { uid: 65534, gid: 65534 }), ..options.into() }
}

#[test]
fn killed_proxy_is_replaced_and_takes_sockets_over() {
    if !is_root() {
        return;
    }
    namespace::run("restart::killed_proxy_is_replaced_and_takes_sockets_over", async {
        namespace::allow_low_ports();
        let _echo = Server::echo("93.184.216.34:443").await;
        let _http = Server::http("93.184.216.34:80", "reached").await;
        let config = config().await;
        let (mut rig, mut child) = start(config.clone());
        let sandbox = rig.open(rules(&["a.test", "c.test"]));
        let address = resolve(sandbox.resolver, "a.test").await;
        let mut live = TcpStream::connect((address, 443)).await.unwrap();
        let mut echo = [0; 3];
        live.write_all(b"hi\n").await.unwrap();
        live.read_exact(&mut echo).await.unwrap();
        rig.wait(|report| {
            matches!(report, Report::Assigned { assigned, .. } if assigned.port == 443)
                .then_some(())
        })
        .await;
        let (_, six) = query(sandbox.resolver, "a.test", RecordType::AAAA).await;
        rig.wait(|report| {
            matches!(report, Report::Assigned { assigned, .. } if (assigned.address, assigned.port) == (six[0], 443))
                .then_some(())
        })
        .await;
        let assigned = rig.assigned();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(read_text(&mut live).await, "", "its connections fail");

        // A program connects while no proxy serves: it waits in the backlog.
        let mut waiting = TcpStream::connect((address, 443)).await.unwrap();
        let mut waiting_six = TcpStream::connect((six[0], 443)).await.unwrap();
        let mut explicit = TcpStream::connect(sandbox.proxy).await.unwrap();
        // A socket that was bound without a report stands for no name.
        sandbox.bind_target(40, "::ffff:198.18.0.8".parse().unwrap(), 443);
        sandbox.bind_target(41, "2001:2::198.18.0.9".parse().unwrap(), 443);
        let (mut rig, child) = start(config);
        rig.reopen(&sandbox, rules(&["a.test", "c.test"]), assigned);
        waiting.write_all(b"yo\n").await.unwrap();
        waiting.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, b"yo\n");
        waiting_six.write_all(b"v6\n").await.unwrap();
        waiting_six.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, b"v6\n");
        explicit.write_all(b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n").await.unwrap();
        assert!(read_text(&mut explicit).await.contains("reached"));
        assert_eq!(resolve(sandbox.resolver, "a.test").await, address, "names keep their address");
        assert_eq!(
            resolve(sandbox.resolver, "c.test").await.to_string(),
            "198.18.0.10",
            "and share none"
        );
        for address in ["198.18.0.8:443", "[2001:2::198.18.0.9]:443"] {
            assert!(TcpStream::connect(address).await.is_err(), "{address} is refused");
        }
        drop((live, waiting, waiting_six));
        assert_eq!(rig.close(&sandbox).await.connections, 3);
        drop(rig);
        assert!(exits(child).await, "end of file ends the proxy");
    });
}

/// Waits for the end of a proxy and returns whether it succeeded.
async fn exits(mut child: Child) -> bool {
    tokio::task::spawn_blocking(move || child.wait().unwrap().success()).await.unwrap()
}

#[test]
fn proxy_serves_under_its_restrictions() {
    if !is_root() {
        return;
    }
    namespace::run("restart::proxy_serves_under_its_restrictions", async {
        namespace::allow_low_ports();
        let _http = Server::http("93.184.216.34:80", "reached").await;
        let (mut rig, mut child) = start(config().await);
        let sandbox = rig.open(rules(&["a.test", "b.test"]));
        assert!(get(sandbox.proxy, "http://a.test/").await.contains("reached"));
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_ascii_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
        };
        for name in ["CapEff:", "CapPrm:", "CapInh:", "CapAmb:"] {
            assert_eq!(field(name), ["0000000000000000"], "{name}");
        }
        assert_eq!(
            (field("NoNewPrivs:"), field("Seccomp:")),
            (vec!["1".to_owned()], vec!["2".to_owned()])
        );
        assert_ne!(field("Uid:")[1], "0");
        // Many connections at once use every thread.
        let many = (0..50).map(|_| get(sandbox.proxy, "http://a.test/"));
        for response in join_all(many).await {
            assert!(response.contains("reached"));
        }
        assert!(connect(sandbox.proxy, "missing.test:443").await.is_err());
        assert_eq!(query(sandbox.resolver, "b.test", RecordType::A).await.1.len(), 1);
        rig.decide(&sandbox, "b.test", 443, Decision::Always);
        assert!(rig.close(&sandbox).await.connections >= 51);
        assert!(child.try_wait().unwrap().is_none(), "it still runs");
        drop(rig);
        assert!(exits(child).await);
    });
}
