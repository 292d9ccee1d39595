//! TLS of the public API and mutual TLS of the internal one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use codelia_proto::internal::v1::{OfferSessionRequest, worker_service_client::WorkerServiceClient};
use codelia_tests::{Certificates, Client, Cluster, ClusterOptions, Process};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

fn path(cluster: &Cluster, file: &str) -> String {
    cluster.directory().join(file).display().to_string()
}

async fn refuses_to_start(mut command: Command, why: &str) -> Result<()> {
    command.env("CODELIA_LOG_FORMAT", "human");
    let done = Process::finish(command, b"").await?;
    assert!(done.code.is_some_and(|code| code != 0), "the process started: {done:?}");
    let output = format!("{}{}", done.stdout, done.stderr);
    assert!(output.to_lowercase().contains(why), "{why:?} is missing in: {output}");
    Ok(())
}

#[tokio::test]
async fn api_serves_tls_from_configuration() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let secret = cluster.tenant("a").await?.secret;
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "api", &["localhost"])?;
    let (certificate, key) = (path(&cluster, "api.pem"), path(&cluster, "api.key"));
    cluster.add_api_with(&[("CODELIA_API_TLS_CERT", &certificate), ("CODELIA_API_TLS_KEY", &key)]).await?;
    let endpoint = format!("https://{}", cluster.apis[1].address);

    let trusting = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority.authority_pem()));
    let client = Client::connect_tls(&endpoint, &secret, trusting).await?;
    let session = client.session().await?;
    assert_eq!(client.exec(&session.name, "echo secret").await?.stdout_text(), "secret\n");

    let untrusted = Certificate::from_pem(Certificates::new()?.authority_pem());
    let distrusting = ClientTlsConfig::new().ca_certificate(untrusted);
    assert!(Client::connect_tls(&endpoint, &secret, distrusting).await.is_err());
    let plain = Client::connect(&format!("http://{}", cluster.apis[1].address), &secret).await;
    let answered = match plain {
        Ok(client) => client.session().await.is_ok(),
        Err(_) => false,
    };
    assert!(!answered, "the TLS port answered without TLS");
    cluster.end().await
}

#[tokio::test]
async fn api_and_worker_use_mtls_over_tcp() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() }).await?;
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "inside", &["codelia-worker"])?;
    let (ca, certificate, key) =
        (path(&cluster, "inside-ca.pem"), path(&cluster, "inside.pem"), path(&cluster, "inside.key"));
    let tls = [
        ("CODELIA_INTERNAL_TLS_CA", ca.as_str()),
        ("CODELIA_INTERNAL_TLS_CERT", &certificate),
        ("CODELIA_INTERNAL_TLS_KEY", &key),
    ];
    let worker = [tls.as_slice(), &[("CODELIA_WORKER_LISTEN", "127.0.0.1:0")]].concat();
    cluster.add_worker_with(&worker).await?;
    cluster.add_api_with(&tls).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(client.exec(&session.name, "echo through").await?.stdout_text(), "through\n");
    client.put(&session.name, "file", "through too").await?;
    assert_eq!(client.get(&session.name, "file").await?, "through too");

    let address = cluster.store.worker_list(None, 10).await?.remove(0).address;
    assert!(address.starts_with("https://"), "{address}");
    let trusting = || {
        let ca = Certificate::from_pem(authority.authority_pem());
        ClientTlsConfig::new().ca_certificate(ca).domain_name("codelia-worker")
    };
    let untrusted = Certificates::new()?;
    untrusted.write(cluster.directory(), "untrusted", &["codelia-worker"])?;
    let identity = Identity::from_pem(
        std::fs::read(cluster.directory().join("untrusted.pem"))?,
        std::fs::read(cluster.directory().join("untrusted.key"))?,
    );
    for tls in [trusting(), trusting().identity(identity)] {
        assert!(!is_answered(&address, Some(tls)).await, "the worker answered an untrusted caller");
    }
    assert!(!is_answered(&address.replace("https", "http"), None).await, "the worker answered without TLS");
    cluster.end().await
}

/// Returns whether a worker answers a call.
async fn is_answered(address: &str, tls: Option<ClientTlsConfig>) -> bool {
    let Ok(endpoint) = Endpoint::from_shared(address.to_owned()) else { return false };
    let endpoint = match tls {
        Some(tls) => endpoint.tls_config(tls),
        None => Ok(endpoint),
    };
    let Ok(endpoint) = endpoint else { return false };
    let mut worker = WorkerServiceClient::new(endpoint.connect_lazy());
    worker.offer_session(OfferSessionRequest { session_id: uuid::Uuid::now_v7().to_string() }).await.is_ok()
}

#[tokio::test]
async fn tcp_worker_without_certificates_refuses_to_start() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() }).await?;
    let mut command = cluster.command("worker", "open")?;
    command
        .env("CODELIA_WORKER_LISTEN", "127.0.0.1:0")
        .env("CODELIA_SANDBOX_ROOT", cluster.directory().join("root"));
    refuses_to_start(command, "certificates").await?;
    assert!(cluster.store.worker_list(None, 10).await?.is_empty());
    cluster.end().await
}

#[tokio::test]
async fn worker_socket_accepts_only_its_own_user() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let cluster = Cluster::start().await?;
    let address = cluster.store.worker_list(None, 10).await?.remove(0).address;
    let socket = PathBuf::from(address.trim_start_matches("unix:"));
    let mode = |path: &Path| Ok::<_, std::io::Error>(path.metadata()?.permissions().mode() & 0o777);
    assert_eq!(mode(&socket)?, 0o600);
    let parent = socket.parent().map(Path::to_owned).unwrap_or_default();
    assert_eq!(mode(&parent)?, 0o700);
    if !codelia_tests::available(
        "user",
        (!codelia_tests::is_root()).then_some("only root can call as another user"),
    ) {
        return cluster.end().await;
    }
    // With open file modes, the worker still checks the caller's user.
    for open in [&parent, &socket] {
        std::fs::set_permissions(open, std::fs::Permissions::from_mode(0o777))?;
    }
    for (user, answered) in [("0", true), ("65534", false)] {
        let done = Process::finish(greeting_as(user, &socket), b"").await?;
        assert_eq!(
            done.stdout.trim(),
            if answered { "answered" } else { "closed" },
            "as user {user}: {done:?}"
        );
    }
    cluster.end().await
}

/// Returns a program that opens HTTP/2 on a socket as a user and prints whether it was answered.
fn greeting_as(user: &str, socket: &Path) -> Command {
    let script = r"
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(10)
s.connect(sys.argv[1])
try:
    s.send(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
    print('answered' if s.recv(100) else 'closed')
except (ConnectionResetError, BrokenPipeError):
    print('closed')
";
    let mut command = Command::new("setpriv");
    command.args(["--reuid", user, "--clear-groups", "/usr/bin/python3", "-c", script]).arg(socket);
    command
}
