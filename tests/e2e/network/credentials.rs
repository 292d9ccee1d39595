//! Secrets that the proxy attaches to requests: the destination gets them, programs reach it with
//! their usual trust store, and nothing in the sandbox or in the record has the secret.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Result, ensure};
use codelia_proto::v1::{CreateSessionRequest, NetworkMode, TextList};
use codelia_tests::{Exec, TestNetwork, Transcript, eventually, shell};
use uuid::Uuid;

use super::{ALLOWED, CA, OTHER, PROXY_VARIABLES, Place, exit_code, network_policy, restart};

/// A host whose credentials are a user name and a password.
const LOGIN: &str = "login.example.com";

const POLICY: &str =
    "network: {mode: proxy, allowed_hosts: ['*.example.com'], credentials: [token, login]}";

/// What secrets look like. The pattern does not match itself.
const PATTERN: &str = "s3cr3t-[0-9a-f]";

/// Gets `/hello` from a host: `fetch.py HOST [AUTHORITIES]`.
const FETCH: &str = r#"
import ssl, sys, urllib.error, urllib.request

context = ssl.create_default_context(cafile=sys.argv[2] if len(sys.argv) > 2 else None)
try:
    print(urllib.request.urlopen(f"https://{sys.argv[1]}/hello", timeout=20, context=context).read())
except urllib.error.URLError as error:
    print("untrusted" if isinstance(error.reason, ssl.SSLCertVerificationError) else repr(error))
"#;

/// Programs that print what they get from `https://$HOST/hello?NAME`, as every program does that
/// knows nothing of certificate authorities.
const CLIENTS: [(&str, &str); 4] = [
    ("curl", "curl -fsS --max-time 20 \"https://$HOST/hello?curl\""),
    (
        "python",
        "/usr/bin/python3 -c 'import os, urllib.request as r; print(r.urlopen(\"https://\" + \
         os.environ[\"HOST\"] + \"/hello?python\", timeout=20).read())'",
    ),
    (
        "requests",
        "/usr/bin/python3 -c 'import os; from pip._vendor import requests as r; print(r.get(\"https://\" + \
         os.environ[\"HOST\"] + \"/hello?requests\", timeout=20).text)'",
    ),
    (
        "node",
        "node -e 'fetch(`https://${process.env.HOST}/hello?node`).then(r => r.text()).then(t => \
         console.log(t), e => {console.error(e); process.exit(1)})'",
    ),
];

struct Secrets {
    token: String,
    password: String,
}

/// An installation with credentials for two hosts.
async fn start(mode: &'static str) -> Result<Option<(Place, Secrets)>> {
    let Some(network) = TestNetwork::start().await? else { return Ok(None) };
    network.serve(&[LOGIN])?;
    let secret = || format!("s3cr3t-{}", Uuid::new_v4().simple());
    let secrets = Secrets { token: secret(), password: secret() };
    let file = network.www().join("../credentials.toml");
    let text = format!(
        "[[credential]]\nname = \"token\"\nhost = \"{ALLOWED}\"\nheader = \"Authorization\"\n\
         value = \"Bearer {}\"\n\
         [[credential]]\nname = \"login\"\nhost = \"{LOGIN}\"\nusername = \"ci\"\npassword = \"{}\"\n",
        secrets.token, secrets.password
    );
    fs::write(&file, text)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
    let settings = vec![
        ("CODELIA_EGRESS_CREDENTIALS_FILE", file.display().to_string()),
        ("CODELIA_EGRESS_EXTRA_ROOTS_FILE", network.authority().display().to_string()),
        ("CODELIA_LOG_FILTER", "debug".to_owned()),
    ];
    let place = Place::start_next_to(network, mode, POLICY, settings).await?;
    Ok(place.map(|place| (place, secrets)))
}

/// Runs a script with the trust store that every program of the sandbox has.
async fn run(place: &Place, session: &str, script: &str) -> Result<Transcript> {
    Exec::start(&place.client, shell(session, script)).await?.finish().await
}

async fn session(place: &Place) -> Result<String> {
    let session = place.session(&[ALLOWED, LOGIN, OTHER], &[]).await?;
    place.client.put(&session, "fetch.py", FETCH).await?;
    Ok(session)
}

async fn fetch(place: &Place, session: &str, arguments: &str) -> Result<String> {
    let done = run(place, session, &format!("/usr/bin/python3 fetch.py {arguments}")).await?;
    ensure!(exit_code(&done) == Some(0), "{done:?}");
    Ok(done.stdout_text().trim().to_owned())
}

async fn secrets_stay_outside(mode: &'static str, clients: &[&str]) -> Result<()> {
    let Some((place, secrets)) = start(mode).await? else { return Ok(()) };
    let session = session(&place).await?;
    programs_reach_the_host(&place, &session, &secrets, clients).await?;

    let basic = base64(&format!("ci:{}", secrets.password));
    ensure!(fetch(&place, &session, LOGIN).await?.contains("hello"), "the host with a password");
    let requests = place.network.requests();
    ensure!(requests.iter().any(|line| line.ends_with(&format!(" Basic {basic}"))), "{requests:?}");

    // The TLS of another host is not terminated: it shows its own certificate, which the sandbox
    // does not trust by itself. And the host with credentials does not.
    ensure!(
        fetch(&place, &session, &format!("{OTHER} {CA}")).await?.contains("hello"),
        "its own certificate"
    );
    ensure!(fetch(&place, &session, OTHER).await? == "untrusted", "another host is terminated");
    ensure!(
        fetch(&place, &session, &format!("{ALLOWED} {CA}")).await? == "untrusted",
        "not terminated"
    );
    let requests = place.network.requests();
    ensure!(
        requests.iter().any(|line| line.ends_with(&format!("{OTHER} /hello -"))),
        "{requests:?}"
    );

    nothing_inside_has_a_secret(&place, &session).await?;
    nothing_recorded_has_a_secret(&place, &[&secrets.token, &secrets.password, &basic]).await?;
    let worker = place.cluster.workers[0].process.pid();
    let status = fs::read_to_string(format!("/proc/{}/status", restart::proxy(worker).await))?;
    ensure!(status.contains("Seccomp:\t2\n"), "the proxy did this under its filter: {status}");
    place.end().await
}

/// Each program gets through, over the proxy variables and without them, and the host gets the
/// secret.
async fn programs_reach_the_host(
    place: &Place,
    session: &str,
    secrets: &Secrets,
    clients: &[&str],
) -> Result<()> {
    for (name, script) in CLIENTS.iter().filter(|(name, _)| clients.contains(name)) {
        for prefix in ["", &format!("unset {PROXY_VARIABLES}; ")] {
            let done =
                run(place, session, &format!("{prefix}export HOST={ALLOWED}; {script}")).await?;
            let text = done.stdout_text();
            ensure!(exit_code(&done) == Some(0) && text.contains("hello from"), "{name}: {done:?}");
        }
        let expected = format!("https GET {ALLOWED} /hello?{name} Bearer {}", secrets.token);
        let requests = place.network.requests();
        let count = requests.iter().filter(|line| **line == expected).count();
        ensure!(count == 2, "{name}: {requests:?}");
    }
    Ok(())
}

/// Looks for secrets and private keys in the environments and files of the sandbox.
async fn nothing_inside_has_a_secret(place: &Place, session: &str) -> Result<()> {
    let places = "/etc /tmp /var /run /home /root /workspace /dev/shm /opt /srv";
    let search = format!(
        "echo control: s3cr3t-0 > control
         grep -rasE '{PATTERN}|BEGIN [A-Z ]*PRIVATE KEY' {places}
         cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n' | grep -aE '{PATTERN}'
         env | grep -E '{PATTERN}'; true"
    );
    let found = run(place, session, &search).await?.stdout_text();
    ensure!(found == "/workspace/control:control: s3cr3t-0\n", "found inside: {found}");
    // The control of the second search.
    let control = search.replace("env |", "SECRET=s3cr3t-1 env |");
    let found = run(place, session, &control).await?.stdout_text();
    ensure!(found.ends_with("SECRET=s3cr3t-1\n"), "the control: {found}");
    Ok(())
}

/// Looks for secrets in the database and in the logs, at level `debug`.
async fn nothing_recorded_has_a_secret(place: &Place, secrets: &[&str]) -> Result<()> {
    let database = place.cluster.database.dump().await?;
    ensure!(database.contains("NETWORK_CONNECTED"), "the control");
    let mut logs = String::new();
    for entry in fs::read_dir(place.cluster.directory())? {
        let path = entry?.path();
        if path.extension() == Some(Path::new("log").as_os_str()) {
            logs.push_str(&fs::read_to_string(path)?);
        }
    }
    ensure!(logs.contains("egress proxy started"), "the control");
    for secret in secrets {
        ensure!(!logs.contains(secret), "a log has a secret");
        let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        ensure!(
            !database.contains(secret) && !database.contains(&hex),
            "the database has a secret"
        );
    }
    Ok(())
}

fn base64(text: &str) -> String {
    use base64::{Engine, engine::general_purpose::STANDARD};
    STANDARD.encode(text)
}

#[tokio::test]
async fn credentials_stay_outside_in_mode_bwrap() -> Result<()> {
    secrets_stay_outside("bwrap", &["curl", "python", "requests", "node"]).await
}

#[tokio::test]
async fn credentials_stay_outside_in_mode_nsjail() -> Result<()> {
    secrets_stay_outside("nsjail", &["curl", "python", "requests", "node"]).await
}

/// The image of the tests has no curl.
#[tokio::test]
async fn credentials_stay_outside_in_mode_container() -> Result<()> {
    secrets_stay_outside("container", &["python", "requests", "node"]).await
}

/// The control: a session that gives the credentials up reaches the host itself, without a secret.
#[tokio::test]
async fn session_without_grant_gets_no_credentials() -> Result<()> {
    let Some((place, _)) = start("bwrap").await? else { return Ok(()) };
    let mut policy = network_policy(&[ALLOWED], &[]);
    policy.network.get_or_insert_default().credentials = Some(TextList::default());
    let request = CreateSessionRequest {
        network: NetworkMode::Proxy.into(),
        policy: Some(policy),
        ..CreateSessionRequest::default()
    };
    let session = place.client.create(request).await?.name;
    place.client.put(&session, "ca.pem", &fs::read_to_string(place.network.authority())?).await?;
    place.client.put(&session, "fetch.py", FETCH).await?;
    ensure!(fetch(&place, &session, ALLOWED).await? == "untrusted", "its own certificate");
    ensure!(
        fetch(&place, &session, &format!("{ALLOWED} {CA}")).await?.contains("hello"),
        "is reached"
    );
    let requests = eventually("the request", || async {
        Some(place.network.requests()).filter(|requests| !requests.is_empty())
    })
    .await;
    ensure!(requests == [format!("https GET {ALLOWED} /hello -")], "{requests:?}");
    place.end().await
}
