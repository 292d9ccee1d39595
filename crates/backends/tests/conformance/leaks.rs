//! Ways around the egress proxy. In network mode `proxy` no packet leaves a sandbox. As a control,
//! every packet is seen when the same script runs outside, and the ordinary ones when it runs in
//! network mode `host`. The host's network is a namespace of the test, with a capture at its only
//! exit.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use codelia_sys::network;
use codelia_types::{NetworkMode, Outcome};

use crate::harness::{Fixture, Kind, command, is_root};

/// A way to send a packet: its name, a script, and what a captured frame contains. Each has its own
/// destination.
struct Leak {
    name: &'static str,
    script: &'static str,
    seen: &'static [u8],
    /// Whether a command that shares the host's network can do it too.
    is_ordinary: bool,
}

const fn ordinary(name: &'static str, script: &'static str, seen: &'static [u8]) -> Leak {
    Leak { name, script, seen, is_ordinary: true }
}

const fn privileged(name: &'static str, script: &'static str, seen: &'static [u8]) -> Leak {
    Leak { name, script, seen, is_ordinary: false }
}

/// Functions for the scripts: an address, and a socket that does not wait.
const PERL: &str = r"use Socket qw(:all);
sub four { pack_sockaddr_in($_[1], inet_aton($_[0])) }
sub six { pack_sockaddr_in6($_[1], inet_pton(AF_INET6, $_[0])) }
sub open_socket { socket(S, $_[0], $_[1] | 2048, $_[2] // 0) }
";

#[rustfmt::skip]
const LEAKS: &[Leak] = &[
    ordinary("UDP", r#"open_socket(AF_INET, SOCK_DGRAM); send(S, "x", 0, four("192.0.2.1", 9))"#, &[192, 0, 2, 1]),
    ordinary("TCP", r#"open_socket(AF_INET, SOCK_STREAM); connect(S, four("192.0.2.2", 443))"#, &[192, 0, 2, 2]),
    ordinary("DNS to another server", r#"open_socket(AF_INET, SOCK_DGRAM); send(S, "\0\1\1\0\0\1\0\0\0\0\0\0\4leak\0\0\1\0\1", 0, four("192.0.2.3", 53))"#, &[192, 0, 2, 3]),
    ordinary("DNS over TCP", r#"open_socket(AF_INET, SOCK_STREAM); connect(S, four("192.0.2.4", 53))"#, &[192, 0, 2, 4]),
    ordinary("DNS over TLS", r#"open_socket(AF_INET, SOCK_STREAM); connect(S, four("192.0.2.5", 853))"#, &[192, 0, 2, 5]),
    ordinary("QUIC", r#"open_socket(AF_INET, SOCK_DGRAM); send(S, "\xc0\0\0\0\1" . "\0" x 1195, 0, four("192.0.2.6", 443))"#, &[192, 0, 2, 6]),
    ordinary("TCP fast open", r#"open_socket(AF_INET, SOCK_STREAM); send(S, "x", 0x20000000, four("192.0.2.7", 443))"#, &[192, 0, 2, 7]),
    ordinary("metadata service", r#"open_socket(AF_INET, SOCK_STREAM); connect(S, four("169.254.169.254", 80))"#, &[169, 254, 169, 254]),
    ordinary("UDP over IPv6", r#"open_socket(AF_INET6, SOCK_DGRAM); send(S, "x", 0, six("2001:db8:1::8", 9))"#, &[0x20, 1, 0xd, 0xb8, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8]),
    ordinary("TCP to a mapped address", r#"open_socket(AF_INET6, SOCK_STREAM); connect(S, six("::ffff:192.0.2.9", 443))"#, &[192, 0, 2, 9]),
    ordinary("ping", r#"open_socket(AF_INET, SOCK_DGRAM, 1); send(S, "\x08\0\0\0\0\0\0\0x", 0, four("192.0.2.10", 0))"#, &[192, 0, 2, 10]),
    ordinary("broadcast", r#"open_socket(AF_INET, SOCK_DGRAM); setsockopt(S, SOL_SOCKET, SO_BROADCAST, 1); send(S, "leak-11", 0, four("255.255.255.255", 9))"#, b"leak-11"),
    ordinary("multicast", r#"open_socket(AF_INET, SOCK_DGRAM); send(S, "leak-12", 0, four("239.1.2.3", 9))"#, b"leak-12"),
    privileged("source routing", r#"open_socket(AF_INET, SOCK_DGRAM); setsockopt(S, 0, 4, pack("C*", 131, 7, 4, 192, 0, 2, 13)); send(S, "x", 0, four("198.18.0.5", 9))"#, &[192, 0, 2, 13]),
    ordinary("SO_BINDTODEVICE", r#"open_socket(AF_INET, SOCK_DGRAM); setsockopt(S, SOL_SOCKET, 25, "exit\0"); send(S, "x", 0, four("192.0.2.14", 9))"#, &[192, 0, 2, 14]),
    privileged("IP_TRANSPARENT", r#"open_socket(AF_INET, SOCK_DGRAM); setsockopt(S, 0, 19, 1); bind(S, four("192.0.2.99", 9)) && send(S, "x", 0, four("192.0.2.15", 9))"#, &[192, 0, 2, 15]),
    privileged("raw socket", r#"open_socket(AF_INET, 3, 1) && send(S, "\x08\0\xf7\xff\0\0\0\0", 0, four("192.0.2.16", 0))"#, &[192, 0, 2, 16]),
    privileged("raw IPv6 socket", r#"open_socket(AF_INET6, 3, 58) && send(S, "\x80\0\0\0\0\0\0\0", 0, six("2001:db8:1::17", 0))"#, &[0x20, 1, 0xd, 0xb8, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x17]),
    privileged("packet socket", r#"open_socket(17, 3, 8) && send(S, "\2\0\0\0\0\2\2\0\0\0\0\1\x08\0leak-18", 0, pack("SniSCCa8", 17, 0x800, $ENV{EXIT}, 1, 0, 6, "\2\0\0\0\0\2"))"#, b"leak-18"),
];

/// The network that the test has instead of the host's: one exit, behind which nothing answers.
const NETWORK: &str = "set -e
    ip link add exit type veth peer name outside
    ip link set lo up; ip link set exit up; ip link set outside up
    ip addr add 203.0.113.1/24 dev exit; ip -6 addr add 2001:db8::1/64 dev exit nodad
    ip neigh add 203.0.113.2 lladdr 02:00:00:00:00:02 dev exit nud permanent
    ip -6 neigh add 2001:db8::2 lladdr 02:00:00:00:00:02 dev exit nud permanent
    ip route add default via 203.0.113.2; ip -6 route add default via 2001:db8::2
    echo '0 2147483647' > /proc/sys/net/ipv4/ping_group_range
    cat /sys/class/net/exit/ifindex 2>/dev/null || ip -o link show exit | cut -d: -f1";

/// Prints each frame at the exit in hexadecimal, and answers a line with a line.
const CAPTURE: &str = r#"socket(S, 17, 3, 0x300) or die "$!"; $| = 1; print "ready\n";
    while (1) { my $r = ""; vec($r, fileno S, 1) = 1; vec($r, 0, 1) = 1; select($r, undef, undef, undef);
        while (recv(S, my $frame, 65536, 0x40)) { print unpack("H*", $frame), "\n" }
        if (vec($r, 0, 1)) { sysread(STDIN, my $line, 1) or exit; print "end\n" } }"#;

struct Capture {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Capture {
    fn start() -> Self {
        let mut process = Command::new("perl")
            .args(["-e", CAPTURE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) =
            (process.stdin.take().unwrap(), BufReader::new(process.stdout.take().unwrap()));
        let mut capture = Self { process, input, output };
        assert_eq!(capture.line(), "ready");
        capture
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The frames since the last call. Sending is finished by then: it puts a frame in every
    /// capture.
    fn frames(&mut self) -> Vec<String> {
        self.input.write_all(b"?").unwrap();
        std::iter::from_fn(|| Some(self.line()).filter(|line| line != "end")).collect()
    }

    /// The leaks that were seen since the last call.
    fn seen(&mut self) -> Vec<&'static str> {
        let frames = self.frames();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let is_seen = |leak: &&Leak| frames.iter().any(|frame| frame.contains(&hex(leak.seen)));
        LEAKS.iter().filter(is_seen).map(|leak| leak.name).collect()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = (self.process.kill(), self.process.wait());
    }
}

/// One program that tries every way.
fn script() -> String {
    LEAKS
        .iter()
        .map(|leak| format!("{};\n", leak.script))
        .fold(PERL.to_owned(), |all, one| all + &one)
        + "print qq(tried\\n)"
}

async fn run(fixture: &mut Fixture, mode: NetworkMode, exit: &str) {
    fixture.policy.network.mode = Some(mode);
    let mut attack = command(&["perl", "-e", &script()]);
    attack.env.insert("EXIT".to_owned(), exit.to_owned());
    let finished = fixture.launch(&fixture.session(), &attack).await.unwrap().finish().await;
    assert_eq!(
        (finished.stdout.as_str(), &finished.outcome),
        ("tried\n", &Outcome::Exited(0)),
        "{finished:?}"
    );
}

async fn nothing_leaves(kind: Kind) {
    if !is_root("only root makes network namespaces") {
        return;
    }
    let Some(mut fixture) = Fixture::new(kind).await else { return };
    // The sandboxes start from this thread, so this becomes the host's network for them.
    network::unshare().unwrap();
    let made = Command::new("sh").args(["-c", NETWORK]).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let exit = String::from_utf8(made.stdout).unwrap().trim().to_owned();
    let mut capture = Capture::start();

    let outside = Command::new("perl").args(["-e", &script()]).env("EXIT", &exit).output().unwrap();
    assert!(outside.status.success(), "{outside:?}");
    assert_eq!(
        capture.seen(),
        LEAKS.iter().map(|leak| leak.name).collect::<Vec<_>>(),
        "the control"
    );
    run(&mut fixture, NetworkMode::Host, &exit).await;
    let is_ordinary = |leak: &&Leak| leak.is_ordinary;
    let ordinary: Vec<_> = LEAKS.iter().filter(is_ordinary).map(|leak| leak.name).collect();
    assert_eq!(capture.seen(), ordinary, "the control in a sandbox");
    for mode in [NetworkMode::Proxy, NetworkMode::None] {
        run(&mut fixture, mode, &exit).await;
        assert_eq!(capture.seen(), Vec::<&str>::new(), "{mode}");
    }
}

#[tokio::test]
async fn nothing_leaves_bwrap() {
    nothing_leaves(Kind::Bwrap).await;
}

#[tokio::test]
async fn nothing_leaves_nsjail() {
    nothing_leaves(Kind::Nsjail).await;
}

#[tokio::test]
async fn nothing_leaves_native() {
    nothing_leaves(Kind::Native).await;
}
