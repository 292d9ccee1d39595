//! Secrets that the proxy adds: the destination gets them, the sandbox and the record do not.

use std::os::unix::fs::PermissionsExt;

use codelia_egress::{Authority, Options, ensure_authority};
use codelia_policy::EgressRules;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::TlsConnector;

use crate::{
    client::{connect, connect_transparently, get, socks},
    dns_server::DnsServer,
    namespace,
    rig::{Rig, rules},
    server::{Server, TestAuthority, client_config},
};

const SECRET: &str = "s3cr3t-value";

async fn exchange(
    pem: &str,
    name: &str,
    stream: TcpStream,
    request: &str,
) -> Result<String, std::io::Error> {
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let mut stream = TlsConnector::from(client_config(pem)).connect(name, stream).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

#[test]
fn secret_reaches_its_host_only() {
    namespace::run("credentials::secret_reaches_its_host_only", async {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let file = format!(
            "[[credential]]\nname = \"api\"\nhost = \"api.test\"\nheader = \"authorization\"\nvalue = \"Bearer {SECRET}\"\n\
             [[credential]]\nname = \"wrong\"\nhost = \"wrong.test\"\nheader = \"authorization\"\nvalue = \"{SECRET}\"\n"
        );
        std::fs::write(path("credentials.toml"), file).unwrap();
        std::fs::set_permissions(path("credentials.toml"), PermissionsExt::from_mode(0o600))
            .unwrap();
        let servers = TestAuthority::new();
        std::fs::write(path("roots.pem"), servers.pem()).unwrap();
        let authority = Authority::in_directory(&path(""));
        ensure_authority(&authority).unwrap();
        let inside = std::fs::read_to_string(&authority.certificate_file).unwrap();

        let (dns, resolver) = DnsServer::start().await;
        dns.set_address("api.test", "93.184.216.34");
        dns.set_address("other.test", "93.184.216.35");
        dns.set_address("wrong.test", "93.184.216.35");
        let _api = Server::https("93.184.216.34:443", &servers, "api.test", "api").await;
        let _plain = Server::http("93.184.216.34:80", "plain").await;
        let _other = Server::https("93.184.216.35:443", &servers, "other.test", "other").await;
        let mut rig = Rig::start(Options {
            resolvers: vec![resolver],
            credentials_file: Some(path("credentials.toml")),
            ca_dir: Some(path("")),
            extra_roots_file: Some(path("roots.pem")),
            ..Options::default()
        });
        let names = ["api".to_owned(), "wrong".to_owned()];
        let with = EgressRules { credentials: names.to_vec(), ..rules(&["*.test"]) };
        let sandbox = rig.open(with);
        let request = "GET /x HTTP/1.1\r\nHost: api.test\r\nAuthorization: Bearer mine\r\n\r\n";
        let streams = [
            connect(sandbox.proxy, "api.test:443").await.unwrap(),
            socks(sandbox.proxy, "api.test", 443).await.unwrap(),
            connect_transparently(sandbox.resolver, "api.test", 443).await,
        ];
        for stream in streams {
            let response = exchange(&inside, "api.test", stream, request).await.unwrap();
            assert!(response.contains(&format!("authorization: Bearer {SECRET}")), "{response}");
            assert!(!response.contains("mine"), "replaced: {response}");
        }
        // Another host in the same handshake's request, and a second request.
        let stream = connect(sandbox.proxy, "api.test:443").await.unwrap();
        let response =
            exchange(&inside, "api.test", stream, "GET / HTTP/1.1\r\nHost: other.test\r\n\r\n")
                .await
                .unwrap();
        assert!(response.contains("host_mismatch") && !response.contains(SECRET), "{response}");
        let stream = connect(sandbox.proxy, "api.test:443").await.unwrap();
        let two = format!("{request}GET /second HTTP/1.1\r\nHost: api.test\r\n\r\n");
        let response = exchange(&inside, "api.test", stream, &two).await.unwrap();
        assert!(response.contains("/x") && !response.contains("/second"), "{response}");
        // In clear the secret is not sent.
        let response = get(sandbox.proxy, "http://api.test/").await;
        assert!(response.contains("plain") && !response.contains(SECRET), "{response}");
        // Other hosts are not terminated: the program sees the real certificate.
        let stream = connect(sandbox.proxy, "other.test:443").await.unwrap();
        let other = "GET / HTTP/1.1\r\nHost: other.test\r\nconnection: close\r\n\r\n";
        let response = exchange(&servers.pem(), "other.test", stream, other).await.unwrap();
        assert!(response.contains("other") && !response.contains(SECRET), "{response}");
        // A destination that cannot prove to be the host gets nothing.
        let stream = connect(sandbox.proxy, "wrong.test:443").await.unwrap();
        assert!(exchange(&inside, "wrong.test", stream, request).await.is_err());
        rig.refusal("tls_failed").await;
        // A sandbox whose rules do not name the credential does not get it.
        let without = rig.open(rules(&["*.test"]));
        let stream = connect(without.proxy, "api.test:443").await.unwrap();
        let plain = "GET / HTTP/1.1\r\nHost: api.test\r\nconnection: close\r\n\r\n";
        let response = exchange(&servers.pem(), "api.test", stream, plain).await.unwrap();
        assert!(response.contains("api") && !response.contains(SECRET), "{response}");
        rig.close(&sandbox).await;
        assert!(!format!("{:?}", rig.seen).contains(SECRET), "not in the record");
    });
}
