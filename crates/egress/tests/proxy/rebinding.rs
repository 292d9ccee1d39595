//! Names that lead to private addresses in every way that a DNS server can arrange.

use std::net::IpAddr;

use codelia_egress::Options;
use hickory_proto::op::ResponseCode;

use crate::{
    client::{get, send_raw, status},
    dns_server::{Answer, DnsServer},
    namespace,
    rig::{Rig, rules},
    server::Server,
};

const PUBLIC: &str = "93.184.216.34";
const PUBLIC_V6: &str = "2606:2800:220:1::34";
const PRIVATE: &str = "10.0.0.1";
const PRIVATE_V6: &str = "fd00::1";

fn list(addresses: &[&str]) -> Vec<IpAddr> {
    addresses.iter().map(|address| address.parse().unwrap()).collect()
}

#[test]
fn rebinding_never_reaches_a_private_address() {
    namespace::run("rebinding::rebinding_never_reaches_a_private_address", async {
        let (dns, resolver) = DnsServer::start().await;
        let public = Server::http(&format!("{PUBLIC}:80"), "public").await;
        let public_v6 = Server::http(&format!("[{PUBLIC_V6}]:80"), "public v6").await;
        let private = Server::http(&format!("{PRIVATE}:80"), "private").await;
        let private_v6 = Server::http(&format!("[{PRIVATE_V6}]:80"), "private v6").await;
        let mut rig = Rig::start(Options { resolvers: vec![resolver], ..Options::default() });
        let sandbox = rig.open(rules(&["*.test"]));
        let refused = [
            ("private.test", Answer::Addresses(list(&[PRIVATE]))),
            ("mixed.test", Answer::Addresses(list(&[PUBLIC, PRIVATE]))),
            ("mixed-first.test", Answer::Addresses(list(&[PRIVATE, PUBLIC]))),
            ("mixed-v6.test", Answer::Addresses(list(&[PUBLIC, PRIVATE_V6]))),
            ("mixed-families.test", Answer::Addresses(list(&[PUBLIC_V6, PRIVATE]))),
            ("mapped.test", Answer::Addresses(list(&["::ffff:10.0.0.1"]))),
            ("nat64.test", Answer::Addresses(list(&["64:ff9b::a00:1"]))),
            ("metadata.test", Answer::Addresses(list(&["169.254.169.254"]))),
            ("alias.test", Answer::Aliases(vec!["a.example.", "b.example."], list(&[PRIVATE]))),
            ("alias-mixed.test", Answer::Aliases(vec!["a.example."], list(&[PUBLIC, PRIVATE]))),
            ("alias-local.test", Answer::Aliases(vec!["localhost."], list(&["127.0.0.1"]))),
            ("truncated.test", Answer::Truncated(list(&[PRIVATE]))),
        ];
        for (name, answer) in refused {
            dns.set(name, answer);
            let response = get(sandbox.proxy, &format!("http://{name}/")).await;
            assert_eq!(
                status(&response),
                (403, "special_address".to_owned()),
                "{name}: {response}"
            );
            let record = rig.refusal("special_address").await;
            assert!(record.address.is_some() && record.host == name, "{record:?}");
        }
        let allowed = [
            ("public.test", Answer::Addresses(list(&[PUBLIC])), "public"),
            ("public-v6.test", Answer::Addresses(list(&[PUBLIC_V6])), "public v6"),
            (
                "alias-public.test",
                Answer::Aliases(vec!["a.example.", "b.example."], list(&[PUBLIC])),
                "public",
            ),
            ("large.test", Answer::Truncated(list(&[PUBLIC])), "public"),
        ];
        for (name, answer, body) in allowed {
            dns.set(name, answer);
            let response = get(sandbox.proxy, &format!("http://{name}/")).await;
            assert!(response.contains(body), "{name}: {response}");
        }
        assert_eq!((public.accepted(), public_v6.accepted()), (3, 1));
        assert_eq!((private.accepted(), private_v6.accepted()), (0, 0));
        for server in [private, private_v6] {
            let direct =
                send_raw(server.address, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n").await;
            assert!(direct.contains("private"), "the control: {direct}");
        }
    });
}

#[test]
fn each_connection_resolves_again_and_checks_again() {
    namespace::run("rebinding::each_connection_resolves_again_and_checks_again", async {
        let (dns, resolver) = DnsServer::start().await;
        let public = Server::http(&format!("{PUBLIC}:80"), "public").await;
        let private = Server::http(&format!("{PRIVATE}:80"), "private").await;
        let rig = Rig::start(Options { resolvers: vec![resolver], ..Options::default() });
        let sandbox = rig.open(rules(&["*.test"]));
        // First public, then private, then public again, all with a TTL of 0.
        dns.set(
            "rebind.test",
            Answer::Sequence(vec![list(&[PUBLIC]), list(&[PRIVATE]), list(&[PUBLIC])]),
        );
        for number in 0..3 {
            let response = get(sandbox.proxy, "http://rebind.test/").await;
            if number == 1 {
                assert_eq!(status(&response).1, "special_address", "{response}");
            } else {
                assert!(response.contains("public"), "{response}");
            }
            // One query for each type, so no second answer can take the place of the one checked.
            assert_eq!(dns.queries("rebind.test"), 2 * (number + 1));
        }
        assert_eq!((public.accepted(), private.accepted()), (2, 0));
    });
}

#[test]
fn failures_of_dns_fail_the_connection_only() {
    namespace::run("rebinding::failures_of_dns_fail_the_connection_only", async {
        let (dns, resolver) = DnsServer::start().await;
        let _public = Server::http(&format!("{PUBLIC}:80"), "public").await;
        let options = Options {
            resolvers: vec![resolver],
            connect_timeout: std::time::Duration::from_secs(3),
            ..Options::default()
        };
        let rig = Rig::start(options);
        let sandbox = rig.open(rules(&["*.test"]));
        let circle = Answer::Aliases(vec!["b.test.", "circle.test.", "b.test."], list(&[PUBLIC]));
        let chain = Answer::Aliases(
            vec![
                "1.test.", "2.test.", "3.test.", "4.test.", "5.test.", "6.test.", "7.test.",
                "8.test.", "9.test.",
            ],
            list(&[PUBLIC]),
        );
        let many = Answer::Addresses(vec![PUBLIC.parse().unwrap(); 70]);
        let failures = [
            ("missing.test", Answer::Fail(ResponseCode::NXDomain)),
            ("failing.test", Answer::Fail(ResponseCode::ServFail)),
            ("refusing.test", Answer::Fail(ResponseCode::Refused)),
            ("empty.test", Answer::Addresses(Vec::new())),
            ("silent.test", Answer::Nothing),
            ("garbage.test", Answer::Garbage),
            ("circle.test", circle),
            ("chain.test", chain),
            ("many.test", many),
        ];
        for (name, answer) in failures {
            dns.set(name, answer);
            let response = get(sandbox.proxy, &format!("http://{name}/")).await;
            assert_eq!(status(&response), (502, "resolve_failed".to_owned()), "{name}: {response}");
        }
        dns.set_address("public.test", PUBLIC);
        assert!(get(sandbox.proxy, "http://public.test/").await.contains("public"));
    });
}
