//! TLS of the public API and mutual TLS of the internal one.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;
use codelia_proto::internal::v1::{
    OfferSessionRequest, worker_service_client::WorkerServiceClient,
};
use codelia_tests::{Certificates, Client, Cluster, ClusterOptions, Process, eventually};
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
    cluster
        .add_api_with(&[("CODELIA_API_TLS_CERT", &certificate), ("CODELIA_API_TLS_KEY", &key)])
        .await?;
    let endpoint = format!("https://{}", cluster.apis[1].address);

    let trusting =
        ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authority.authority_pem()));
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
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() })
            .await?;
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "inside", &["codelia-worker"])?;
    let (ca, certificate, key) = (
        path(&cluster, "inside-ca.pem"),
        path(&cluster, "inside.pem"),
        path(&cluster, "inside.key"),
    );
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
    assert!(
        !is_answered(&address.replace("https", "http"), None).await,
        "the worker answered without TLS"
    );
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
    worker
        .offer_session(OfferSessionRequest {
            session_id: uuid::Uuid::now_v7().to_string(),
            is_new: false,
        })
        .await
        .is_ok()
}

#[tokio::test]
async fn tcp_worker_without_certificates_refuses_to_start() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() })
            .await?;
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

/// The settings that `codelia certs dev` prints for a process.
async fn dev_certificates(dir: &Path, arguments: &[&str]) -> Result<serde_json::Value> {
    let mut command = codelia_tests::Program::find()?.command();
    command.args(["--json", "certs", "dev", "--dir"]).arg(dir).args(arguments);
    let done = Process::finish(command, b"").await?;
    anyhow::ensure!(done.code == Some(0), "{done:?}");
    Ok(serde_json::from_str::<serde_json::Value>(&done.stdout)?["settings"].take())
}

fn settings(of: &serde_json::Value) -> Vec<(&str, &str)> {
    let entries = of.as_object().into_iter().flatten();
    entries.filter_map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
}

/// A client that trusts only the authority in the directory.
async fn connect(endpoint: &str, secret: &str, dir: &Path) -> Result<Client> {
    let authority = Certificate::from_pem(std::fs::read(dir.join("ca.pem"))?);
    Client::connect_tls(endpoint, secret, ClientTlsConfig::new().ca_certificate(authority)).await
}

async fn metric(address: &str, series: &str) -> Result<f64> {
    let page = crate::service::http_get(address, "/metrics").await?.1;
    let value = page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok());
    value.ok_or_else(|| anyhow::anyhow!("{series} is missing in {page}"))
}

/// Replaces the files one by one by renaming, as `certs dev --force` does.
#[tokio::test]
async fn changed_certificates_are_used_without_restart() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 0, ..ClusterOptions::default() }).await?;
    let (dir, old) = (cluster.directory().join("certs"), cluster.directory().join("old"));
    let certificates = dev_certificates(&dir, &["--days", "10"]).await?;
    let mut worker = settings(&certificates["worker"]);
    worker.push(("CODELIA_WORKER_LISTEN", "127.0.0.1:0"));
    cluster.add_worker_with(&worker).await?;
    let metrics = crate::service::free_address().await?;
    let mut api = settings(&certificates["api"]);
    api.push(("CODELIA_METRICS_LISTEN", &metrics));
    cluster.add_api_with(&api).await?;
    let endpoint = format!("https://{}", cluster.apis[1].address);
    let secret = cluster.tenant("a").await?.secret;
    let open = connect(&endpoint, &secret, &dir).await?;
    let session = open.session().await?.name;
    assert_eq!(open.exec(&session, "echo before").await?.stdout_text(), "before\n");
    let expiry = "codelia_tls_certificate_expiry_timestamp_seconds{certificate=\"public\"}";
    let first_expiry = metric(&metrics, expiry).await?;

    std::fs::create_dir(&old)?;
    for file in ["ca.pem", "api.pem", "api.key"] {
        std::fs::copy(dir.join(file), old.join(file))?;
    }
    dev_certificates(&dir, &["--days", "20", "--force"]).await?;
    let connected = || async { connect(&endpoint, &secret, &dir).await.ok() };
    let client = eventually("the new certificate is served", connected).await;
    assert!(connect(&endpoint, &secret, &old).await.is_err(), "new connections have the new one");
    assert_eq!(open.get_session(&session).await?.name, session, "the open connection still works");
    assert!(metric(&metrics, expiry).await? > first_expiry + 9.0 * 86400.0);
    // The new authority signed neither side of the old connection between api and worker.
    let runs = || async { client.exec(&session, "echo after").await.ok() };
    let after = eventually("api and worker use the new authority", runs).await;
    assert_eq!(after.stdout_text(), "after\n");

    let failures = "codelia_tls_certificate_reload_failures_total{certificate=\"public\"}";
    let failed_before = metric(&metrics, failures).await?;
    std::fs::copy(old.join("api.key"), dir.join("api.key"))?;
    let has_failed = || async {
        let failed = metric(&metrics, failures).await.ok()?;
        (failed > failed_before).then_some(())
    };
    eventually("the key of another certificate is counted", has_failed).await;
    connect(&endpoint, &secret, &dir).await?.get_session(&session).await?;
    let log = cluster.apis[1].process.read_log();
    assert!(log.contains("cannot be used") && log.contains("api.key"), "{log}");
    cluster.end().await
}

/// A worker's certificate is for servers: its key does not open other workers.
#[tokio::test]
async fn worker_certificate_does_not_call_workers() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() })
            .await?;
    let dir = cluster.directory().join("certs");
    let certificates = dev_certificates(&dir, &[]).await?;
    let mut worker = settings(&certificates["worker"]);
    worker.push(("CODELIA_WORKER_LISTEN", "127.0.0.1:0"));
    cluster.add_worker_with(&worker).await?;
    let address = cluster.store.worker_list(None, 10).await?.remove(0).address;
    for (name, answered) in [("internal-api", true), ("internal-worker", false)] {
        let read = |file: &str| std::fs::read(dir.join(file));
        let (cert, key) = (read(&format!("{name}.pem"))?, read(&format!("{name}.key"))?);
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(read("ca.pem")?))
            .identity(Identity::from_pem(cert, key))
            .domain_name("codelia-worker");
        assert_eq!(is_answered(&address, Some(tls)).await, answered, "{name}");
    }
    cluster.end().await
}

#[tokio::test]
async fn public_address_without_tls_is_refused_in_prod() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() })
            .await?;
    let api = |profile: &str| -> Result<Command> {
        let mut command = cluster.command("api", profile)?;
        command.env("CODELIA_PROFILE", profile).env("CODELIA_API_LISTEN", "0.0.0.0:0");
        command.env("CODELIA_SANDBOX_MODE", "bwrap");
        Ok(command)
    };
    refuses_to_start(api("prod")?, "api.allow_plaintext").await?;
    let mut behind_proxy = api("prod")?;
    behind_proxy.env("CODELIA_API_ALLOW_PLAINTEXT", "true");
    for (name, command, warns) in [("dev", api("dev")?, true), ("proxy", behind_proxy, false)] {
        let mut process = Process::start(name, command, cluster.directory())?;
        process.ready().await?;
        assert_eq!(
            process.read_log().contains("without TLS"),
            warns,
            "{name}: {}",
            process.read_log()
        );
        process.terminate().await?;
    }
    cluster.end().await
}
