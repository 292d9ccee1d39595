//! Network modes `proxy` and `host`. In `proxy` the test takes the place of the egress proxy: it
//! serves the sockets of the sandbox from outside. What must not leave is in `leaks.rs`.

use std::{
    fs,
    net::{SocketAddr, TcpListener as HostListener},
    os::{
        fd::{AsRawFd, OwnedFd},
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
};

use codelia_backends::{EgressSockets, Prepared};
use codelia_policy::{EGRESS_TARGETS, NetworkPolicy};
use codelia_telemetry::task;
use codelia_types::{NetworkMode, Outcome};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, UdpSocket},
    task::JoinHandle,
};

use crate::harness::{Finished, Fixture, Kind, Session, command, in_mode, launch_in};

/// Perl functions for the scripts. `ask` sends a text and returns the answer, or the error.
const PERL: &str = r#"use Socket qw(:all);
sub open_to { my ($type, $host, $port) = @_;
    my ($family, $name) = $host =~ /:/
        ? (AF_INET6, pack_sockaddr_in6($port, inet_pton(AF_INET6, $host)))
        : (AF_INET, pack_sockaddr_in($port, inet_aton($host) // return "unknown"));
    socket(my $s, $family, $type, 0) or return "socket: $!";
    connect($s, $name) or return "$!";
    $s }
sub ask { my ($host, $port, $text) = @_;
    my $s = open_to(SOCK_STREAM, $host, $port); return $s unless ref $s;
    syswrite $s, $text; shutdown $s, 1; join "", <$s> }
sub datagram { my ($host, $port) = @_;
    my $s = open_to(SOCK_DGRAM, $host, $port); return $s unless ref $s;
    (defined send($s, "x", 0) && defined send($s, "x", 0)) ? "sent" : "$!" }
$| = 1;
"#;

pub(crate) fn perl(script: &str) -> Vec<String> {
    vec!["perl".to_owned(), "-e".to_owned(), format!("{PERL}{script}")]
}

fn use_network(fixture: &mut Fixture, mode: NetworkMode) {
    fixture.policy.network = NetworkPolicy { mode: Some(mode), ..NetworkPolicy::default() };
}

/// Prepares a sandbox in mode `proxy`.
async fn prepare(fixture: &Fixture, session: &Session) -> (Box<dyn Prepared>, EgressSockets) {
    let mut prepared = fixture.backend.prepare(&fixture.plan(session)).await.unwrap();
    let sockets = prepared.take_egress().unwrap();
    assert!(prepared.take_egress().is_none(), "they are handed out once");
    (prepared, sockets)
}

async fn run(prepared: Box<dyn Prepared>, script: &str) -> Finished {
    let argv = perl(script);
    let command = command(&argv.iter().map(String::as_str).collect::<Vec<_>>());
    launch_in(prepared, &command).await.unwrap().finish().await
}

fn listener(socket: OwnedFd) -> TcpListener {
    TcpListener::from_std(HostListener::from(socket)).unwrap()
}

/// Binds a socket of the sandbox, as the proxy does for a name.
fn bind(socket: OwnedFd, address: &str) -> TcpListener {
    let socket = TcpSocket::from_std_stream(socket.into());
    socket.bind(address.parse::<SocketAddr>().unwrap()).unwrap();
    socket.listen(16).unwrap()
}

/// Answers each connection with this name and the text that came.
fn serve(listener: TcpListener, name: &'static str) -> JoinHandle<()> {
    task::background("a server of the test", async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).await.unwrap();
            stream.write_all(format!("{name}:{text}").as_bytes()).await.unwrap();
        }
    })
}

/// Answers queries for addresses of the type A with this one. Returns the first query.
async fn answer_queries(socket: OwnedFd, address: [u8; 4]) -> Vec<u8> {
    let socket = UdpSocket::from_std(socket.into()).unwrap();
    let mut query = [0; 512];
    let (count, peer) = socket.recv_from(&mut query).await.unwrap();
    let query = query[..count].to_vec();
    let name = 1 + query[12..].iter().position(|byte| *byte == 0).unwrap();
    // The header without further records, the question, and the answer that refers to its name.
    let mut answer = [&query[..2], &[0x81, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]].concat();
    answer.extend(&query[12..12 + name + 4]);
    answer.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
    answer.extend(address);
    socket.send_to(&answer, peer).await.unwrap();
    query
}

pub(crate) async fn sockets_serve_commands(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let (prepared, mut sockets) = prepare(&fixture, &fixture.session()).await;
    assert_eq!(sockets.targets.len(), EGRESS_TARGETS);
    let mut servers = vec![
        serve(listener(sockets.proxy), "proxy"),
        serve(listener(sockets.resolver_tcp), "resolver"),
    ];
    for (address, name) in [
        ("[::ffff:198.18.0.5]:443", "four"),
        ("[2001:2::5]:443", "six"),
        ("[::ffff:198.19.255.254]:80", "last"),
    ] {
        servers.push(serve(bind(sockets.targets.pop().unwrap(), address), name));
    }
    let queries =
        task::background("the resolver", answer_queries(sockets.resolver_udp, [198, 18, 0, 5]));
    let finished = run(
        prepared,
        r#"print join " ", ask("127.0.0.1", 3128, "a"), ask("127.0.0.53", 53, "b"), ask("198.18.0.5", 443, "c"),
            ask("2001:2::5", 443, "d"), ask("198.19.255.254", 80, "e"), ask("allowed.example", 443, "f")"#,
    )
    .await;
    let expected = "proxy:a resolver:b four:c six:d last:e four:f";
    assert_eq!(
        (finished.stdout.as_str(), &finished.outcome),
        (expected, &Outcome::Exited(0)),
        "{finished:?}"
    );
    let query = queries.await.unwrap();
    assert!(query.windows(17).any(|part| part == b"\x07allowed\x07example\0"), "{query:?}");
    assert!(finished.violations.is_empty(), "{finished:?}");
    servers.iter().for_each(JoinHandle::abort);
}

/// The host has a server on its loopback, and the sandbox has none at these addresses.
async fn everything_else_is_unreachable(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let host = HostListener::bind(("127.0.0.1", 0)).unwrap();
    let port = host.local_addr().unwrap().port();
    let (prepared, _sockets) = prepare(&fixture, &fixture.session()).await;
    let script = r#"for my $host ("192.0.2.1", "10.0.0.1", "169.254.169.254", "8.8.8.8", "198.20.0.1", "198.17.255.255",
            "2001:db8::1", "2001:2:0:1::1", "224.0.0.1", "255.255.255.255") {
            print "$host ", ask($host, 443, ""), ", ", datagram($host, 53), "\n" }
        print "host ", ask("127.0.0.1", PORT, ""), "\n", "free ", ask("198.18.7.7", 443, ""), ", ",
            datagram("198.18.7.7", 443), "\n"; "#;
    let finished = run(prepared, &script.replace("PORT", &port.to_string())).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    let lines: Vec<_> = finished.stdout.lines().collect();
    let (closed, refused) = ("Network is unreachable", "Connection refused");
    for line in &lines[..10] {
        assert_eq!(line.split_once(' ').unwrap().1, format!("{closed}, {closed}"), "{line}");
    }
    assert_eq!(lines[10..], [format!("host {refused}"), format!("free {refused}, {refused}")]);
    drop(std::net::TcpStream::connect(host.local_addr().unwrap()).unwrap());
}

async fn sandboxes_do_not_share_sockets(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let (first, mut first_sockets) = prepare(&fixture, &fixture.session()).await;
    let (second, second_sockets) = prepare(&fixture, &fixture.session()).await;
    let servers = [
        serve(listener(first_sockets.proxy), "first"),
        serve(bind(first_sockets.targets.pop().unwrap(), "[::ffff:198.18.0.5]:443"), "first"),
        serve(listener(second_sockets.proxy), "second"),
    ];
    let script = r#"print ask("127.0.0.1", 3128, ""), " ", ask("198.18.0.5", 443, "")"#;
    assert_eq!(run(first, script).await.stdout, "first: first:", "the control");
    assert_eq!(run(second, script).await.stdout, "second: Connection refused");
    servers.iter().for_each(JoinHandle::abort);
}

/// A server at all addresses and the port of a name is the documented corner case.
async fn own_servers_do_not_collide(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let (prepared, mut sockets) = prepare(&fixture, &fixture.session()).await;
    let server = serve(bind(sockets.targets.pop().unwrap(), "[::ffff:198.18.0.5]:443"), "proxy");
    let finished = run(
        prepared,
        r#"socket(S, AF_INET, SOCK_STREAM, 0); setsockopt(S, SOL_SOCKET, SO_REUSEADDR, 1);
        bind(S, pack_sockaddr_in(443, INADDR_LOOPBACK)) or die "bind: $!"; listen(S, 5);
        if (!fork) { accept(C, S); print C "own"; exit }
        print ask("127.0.0.1", 443, ""), " ", ask("198.18.0.5", 443, "x"), " ";
        socket(W, AF_INET, SOCK_STREAM, 0); setsockopt(W, SOL_SOCKET, SO_REUSEADDR, 1);
        close S; print bind(W, pack_sockaddr_in(443, INADDR_ANY)) ? "bound" : "$!"; wait"#,
    )
    .await;
    assert_eq!(finished.stdout, "own proxy:x Address already in use", "{finished:?}");
    server.abort();
}

/// Nothing that creates the network is left to the command: no descriptor, no capability.
async fn command_holds_nothing_of_the_network(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let (prepared, _sockets) = prepare(&fixture, &fixture.session()).await;
    let finished = run(
        prepared,
        r#"opendir D, "/proc/self/fd"; print join(",", sort grep { /\d/ && $_ != fileno D } readdir D), " ";
        open F, "/proc/self/status"; print join(",", map { /^Cap\w+:\s+0*(\w+)/ ? $1 : () } <F>), " ";
        my $request = pack("LSSLLCCSlLL", 32, 16, 5, 1, 0, 0, 0, 0, 1, 0, 1);
        socket(N, 16, 3, 0); send(N, $request, 0); recv(N, my $answer, 4096, 0);
        $! = -unpack("x16l", $answer); print "$!";"#,
    )
    .await;
    assert_eq!(finished.stdout, "0,1,2 0,0,0,0,0 Operation not permitted", "{finished:?}");
}

fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Whether a process is in the network namespace, whose name is a link's target.
fn is_in_use(namespace: &str) -> bool {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    let mut links = entries.filter_map(|entry| fs::read_link(entry.path().join("ns/net")).ok());
    links.any(|link| link.to_string_lossy() == namespace)
}

async fn nothing_of_the_network_is_left(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let session = fixture.session();
    // Connections of the backend to its engine stay open.
    drop(run(prepare(&fixture, &session).await.0, "").await);
    let before = open_descriptors();
    let (prepared, sockets) = prepare(&fixture, &session).await;
    let flags = |socket: &OwnedFd| {
        let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", socket.as_raw_fd())).unwrap();
        let flags =
            text.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
        i32::from_str_radix(&flags, 8).unwrap()
    };
    let all = [&sockets.proxy, &sockets.resolver_udp, &sockets.resolver_tcp]
        .into_iter()
        .chain(&sockets.targets);
    for socket in all {
        // O_CLOEXEC and O_NONBLOCK.
        assert_eq!(flags(socket) & 0o2_004_000, 0o2_004_000);
    }
    let argv = perl(r#"print readlink("/proc/self/ns/net"), "\n"; <STDIN>"#);
    let argv: Vec<_> = argv.iter().map(String::as_str).collect();
    let mut started = launch_in(prepared, &command(&argv)).await.unwrap();
    let namespace = started.line();
    assert!(namespace.starts_with("net:[") && is_in_use(&namespace), "{namespace}");
    assert_ne!(namespace, fs::read_link("/proc/self/ns/net").unwrap().to_string_lossy());
    started.finish().await;
    assert!(!is_in_use(&namespace));
    drop(sockets);
    // A sandbox that is not used leaves nothing either.
    let (prepared, sockets) = prepare(&fixture, &session).await;
    assert!(prepared.discard().await.is_clean());
    drop(sockets);
    // The runtime closes its own in the background.
    crate::cleanup::eventually("the descriptors are closed", || open_descriptors() == before).await;
}

/// Without a proxy that holds the sockets, nothing listens.
async fn closed_sockets_refuse_connections(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let (prepared, sockets) = prepare(&fixture, &fixture.session()).await;
    drop(sockets);
    let finished =
        run(prepared, r#"print ask("127.0.0.1", 3128, ""), ", ", ask("127.0.0.53", 53, "")"#).await;
    assert_eq!(finished.stdout, "Connection refused, Connection refused");
}

async fn programs_find_proxy_and_resolver(mut fixture: Fixture) {
    use_network(&mut fixture, NetworkMode::Proxy);
    let session = fixture.session();
    let script = "echo $HTTP_PROXY $https_proxy $ALL_PROXY $no_proxy; cat /etc/resolv.conf; grep hosts: /etc/nsswitch.conf
        getent hosts localhost | grep -c localhost";
    let finished = fixture.sh(&session, script).await;
    assert_eq!(
        finished.stdout,
        "http://127.0.0.1:3128 http://127.0.0.1:3128 http://127.0.0.1:3128 localhost,127.0.0.1,::1\n\
         nameserver 127.0.0.53\noptions edns0 ndots:0\nhosts: files dns\n1\n",
        "{finished:?}"
    );
    // The caller's own variable replaces both cases of ours.
    let mut own = command(&["sh", "-c", "env | grep -i -e ^https_proxy -e ^http_proxy | sort"]);
    own.env.insert("https_proxy".to_owned(), "http://own".to_owned());
    let finished = fixture.launch(&session, &own).await.unwrap().finish().await;
    let expected = "HTTP_PROXY=http://127.0.0.1:3128\nhttp_proxy=http://127.0.0.1:3128\nhttps_proxy=http://own\n";
    let (mut lines, mut wanted): (Vec<_>, Vec<_>) =
        (finished.stdout.lines().collect(), expected.lines().collect());
    lines.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(lines, wanted);
}

/// A command that shares the host's network reaches its servers, but not its abstract sockets.
async fn host_network_is_shared(mut fixture: Fixture) {
    let session = fixture.session();
    let host = HostListener::bind(("127.0.0.1", 0)).unwrap();
    let name = format!("codelia-test{}", session.dir.display());
    let _abstract = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&name).unwrap()).unwrap();
    let script = r#"my $s = open_to(SOCK_STREAM, "127.0.0.1", PORT); print ref $s ? "reached" : $s, ", ";
        socket(A, AF_UNIX, SOCK_STREAM, 0); print connect(A, pack_sockaddr_un("\0NAME")) ? "reached" : "$!", ", ";
        socket(L, AF_UNIX, SOCK_STREAM, 0); bind(L, pack_sockaddr_un("\0NAME-own")); listen(L, 1);
        socket(O, AF_UNIX, SOCK_STREAM, 0); print connect(O, pack_sockaddr_un("\0NAME-own")) ? "own" : "$!""#;
    let port = host.local_addr().unwrap().port().to_string();
    let script = script.replace("PORT", &port).replace("NAME", &name);
    let mut results = Vec::new();
    for mode in [NetworkMode::None, NetworkMode::Host] {
        use_network(&mut fixture, mode);
        let mut prepared = fixture.backend.prepare(&fixture.plan(&session)).await.unwrap();
        assert!(prepared.take_egress().is_none());
        results.push(run(prepared, &script).await.stdout);
    }
    assert_eq!(results[0], "Connection refused, Connection refused, own", "the control");
    let scoped =
        if codelia_sys::landlock::can_scope() { "Operation not permitted" } else { "reached" };
    assert_eq!(results[1], format!("reached, {scoped}, own"));
}

macro_rules! in_every_shared_kernel {
    ($($name:ident),+ $(,)?) => {
        in_mode!(bwrap = Bwrap: $($name),+);
        in_mode!(nsjail = Nsjail: $($name),+);
        in_mode!(native = Native: $($name),+);
        in_mode!(runc = Runc: $($name),+);
        in_mode!(podman = Podman: $($name),+);
    };
}

in_every_shared_kernel!(
    sockets_serve_commands,
    everything_else_is_unreachable,
    sandboxes_do_not_share_sockets,
    own_servers_do_not_collide,
    command_holds_nothing_of_the_network,
    nothing_of_the_network_is_left,
    closed_sockets_refuse_connections,
    programs_find_proxy_and_resolver,
    host_network_is_shared,
);

/// A kernel of its own has no network that could be set up from outside.
#[tokio::test]
async fn gvisor_refuses_networks_by_field() {
    let Some(mut fixture) = Fixture::new(Kind::Runsc).await else { return };
    let session = fixture.session();
    for mode in [NetworkMode::Proxy, NetworkMode::Host] {
        use_network(&mut fixture, mode);
        let error = fixture.try_plan(&session).unwrap_err();
        assert_eq!(error.field, "network");
        assert!(error.to_string().contains("runc"), "{error}");
    }
    // A plan that was made for another host is refused by the backend.
    (fixture.host.enforceable.egress, fixture.host.enforceable.violations) = (true, false);
    use_network(&mut fixture, NetworkMode::Proxy);
    let error = fixture.backend.prepare(&fixture.plan(&session)).await.unwrap_err();
    assert!(
        matches!(error, codelia_backends::Error::Unenforceable { field: "network" }),
        "{error}"
    );
}
