//! Which server the command line calls, and what it says if that server cannot be used.

use std::{
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener},
    thread,
};

use anyhow::{Context, Result};
use codelia_tests::{Certificates, Client, Cluster, ClusterOptions, Process, ProcessOutput};
use serde_json::Value;

/// An installation without workers, and a client of it.
async fn installation() -> Result<(Cluster, Client)> {
    let cluster = Cluster::start_with(ClusterOptions { workers: 0, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    Ok((cluster, client))
}

async fn ps(
    cluster: &Cluster,
    client: &Client,
    settings: &[(&str, &str)],
) -> Result<ProcessOutput> {
    let mut command = cluster.cli(client, &["ps"]);
    command.envs(settings.iter().copied());
    Process::finish(command, b"").await
}

/// A server that answers every connection with these bytes, if any, and closes it.
fn server(answer: &'static [u8]) -> Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _ = stream.read(&mut [0; 1024]);
                let _ = stream.write_all(answer);
                let _ = stream.shutdown(std::net::Shutdown::Write);
                // Without this, unread bytes would reset the connection before the answer is read.
                let _ = stream.read_to_end(&mut Vec::new());
            });
        }
    });
    Ok(address)
}

#[tokio::test]
async fn wrong_endpoint_error_says_expected_and_found() -> Result<()> {
    let (mut cluster, client) = installation().await?;
    let authority = Certificates::new()?;
    authority.write(cluster.directory(), "api", &["localhost"])?;
    let file = |name: &str| cluster.directory().join(name).display().to_string();
    let (certificate, key, ca) = (file("api.pem"), file("api.key"), file("api-ca.pem"));
    cluster
        .add_api_with(&[("CODELIA_API_TLS_CERT", &certificate), ("CODELIA_API_TLS_KEY", &key)])
        .await?;
    let [plain, tls] = [0, 1].map(|api| cluster.apis[api].address.clone());
    let closed = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let http1 = server(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")?;
    let other = server(b"SSH-2.0-OpenSSH_9.2\r\n")?;

    for (endpoint, expected) in [
        (
            format!("http://{closed}"),
            format!("nothing accepts connections on {closed}: connection refused"),
        ),
        (plain.clone(), format!("the scheme is missing: expected http://{plain}")),
        (format!("ftp://{plain}"), "expected the scheme http or https, found ftp".to_owned()),
        (format!("http://{http1}"), "that speaks only HTTP/1.1".to_owned()),
        (format!("http://{other}"), "that speaks neither HTTP/2 nor TLS".to_owned()),
        (format!("http://{tls}"), format!("found one with TLS: use https://{tls}")),
        (format!("https://{plain}"), format!("found one without: use http://{plain}")),
    ] {
        let settings = [("CODELIA_ENDPOINT", endpoint.as_str()), ("CODELIA_CLIENT_TLS_CA", &ca)];
        let done = ps(&cluster, &client, &settings).await?;
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.stderr.contains(&expected), "{endpoint}: {done:?}");
        assert!(
            done.stderr.contains(&endpoint) && done.stderr.contains("CODELIA_ENDPOINT"),
            "{done:?}"
        );
        assert_eq!(done.stderr.lines().count(), 1, "{done:?}");
    }
    let endpoint = format!("https://{tls}");
    let settings = [("CODELIA_ENDPOINT", endpoint.as_str()), ("CODELIA_CLIENT_TLS_CA", &ca)];
    assert_eq!(
        ps(&cluster, &client, &settings).await?.code,
        Some(0),
        "the control: the right endpoint"
    );
    cluster.end().await
}

#[tokio::test]
async fn key_of_another_installation_is_explained() -> Result<()> {
    let (cluster, client) = installation().await?;
    let (elsewhere, stranger) = installation().await?;
    let done = ps(&cluster, &client, &[("CODELIA_API_KEY", &stranger.secret)]).await?;
    let expected = format!("expected a key of the installation at {}", client.endpoint);
    assert!(done.code == Some(1) && done.stderr.contains(&expected), "{done:?}");
    assert!(done.stderr.contains("from CODELIA_API_KEY"), "{done:?}");
    assert!(!done.stderr.contains(&stranger.secret), "{done:?}");
    let done = ps(&cluster, &client, &[("CODELIA_API_KEY", "hush")]).await?;
    assert!(
        done.stderr.contains("expected cdl_ and 43 characters") && !done.stderr.contains("hush"),
        "{done:?}"
    );
    elsewhere.end().await?;
    cluster.end().await
}

/// Calls `codelia` as a user with a home directory and no settings but `settings`.
async fn at_home(
    cluster: &Cluster,
    client: &Client,
    arguments: &[&str],
    input: &[u8],
) -> Result<ProcessOutput> {
    let mut command = cluster.cli(client, arguments);
    for name in ["CODELIA_DATA_DIR", "CODELIA_ENDPOINT", "CODELIA_API_KEY"] {
        command.env_remove(name);
    }
    command.env("XDG_CONFIG_HOME", cluster.directory().join("config"));
    Process::finish(command, input).await
}

#[tokio::test]
async fn contexts_select_the_server() -> Result<()> {
    let (cluster, client) = installation().await?;
    let (elsewhere, stranger) = installation().await?;
    let call = async |arguments: &[&str]| at_home(&cluster, &client, arguments, b"").await;
    for (name, client) in [("here", &client), ("there", &stranger)] {
        let arguments = ["context", "add", name, &client.endpoint, "--key-file", "-"];
        let done = at_home(&cluster, client, &arguments, format!("{}\n", client.secret).as_bytes())
            .await?;
        assert_eq!((done.code, done.stdout), (Some(0), format!("{name}\n")), "{}", done.stderr);
    }
    stranger
        .create(codelia_proto::v1::CreateSessionRequest {
            alias: "far".into(),
            ..Default::default()
        })
        .await?;
    assert_eq!(call(&["context", "use", "here"]).await?.code, Some(0));
    assert!(!call(&["session", "list"]).await?.stdout.contains("far"));
    assert!(call(&["session", "list", "--context", "there"]).await?.stdout.contains("far"));
    let shown = call(&["context", "show", "--json"]).await?;
    let shown: Value = serde_json::from_str(&shown.stdout)?;
    assert_eq!(
        (&shown["endpoint"], &shown["keyFrom"]),
        (&client.endpoint.as_str().into(), &"context here".into())
    );

    // A key is sent only to the endpoint that it is stored with.
    let refused = call(&["session", "list", "--endpoint", &stranger.endpoint]).await?;
    assert!(
        refused.code == Some(1) && refused.stderr.contains("CODELIA_API_KEY is not"),
        "{refused:?}"
    );
    let listed = call(&["context", "list"]).await?.stdout;
    assert!(listed.contains("here     *") && !listed.contains("cdl_"), "{listed}");
    let wrong = call(&["ps", "--context", "hree"]).await?;
    assert!(wrong.code == Some(1) && wrong.stderr.contains("did you mean"), "{wrong:?}");

    assert_eq!(call(&["context", "remove", "here"]).await?.code, Some(0));
    let file = fs::read_to_string(cluster.directory().join("config/codelia/contexts.toml"))
        .context("the file of contexts")?;
    assert!(!file.contains(&client.secret) && file.contains(&stranger.secret), "{file}");
    elsewhere.end().await?;
    cluster.end().await
}
