//! Programs reach an allowed host and no other, with and without proxy variables.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use codelia_tests::available;

use super::{ALLOWED, OTHER, PROXY_VARIABLES, Place, exit_code, is_installed};

/// A program: the tool that it needs, and a script that succeeds only if it reaches `$HOST`.
struct Client {
    tool: &'static str,
    script: &'static str,
}

const CLIENTS: [Client; 11] = [
    Client { tool: "curl", script: "curl -fsS --max-time 20 https://$HOST/hello | grep -q hello" },
    Client { tool: "curl", script: "curl -fsS --max-time 20 http://$HOST/hello | grep -q hello" },
    Client {
        tool: "wget",
        script: "wget -q -t 1 -T 20 --ca-certificate=$SSL_CERT_FILE -O - https://$HOST/hello | grep -q hello",
    },
    Client {
        tool: "pip",
        script: "rm -rf wheels; /usr/bin/python3 -m pip download -q --no-deps --retries 0 --timeout 20 --no-cache-dir --disable-pip-version-check -d wheels --index-url https://$HOST/simple/ demo && ls wheels/demo-1.0-py3-none-any.whl",
    },
    Client {
        tool: "npm",
        script: "rm -rf node_modules; npm install --cafile=$SSL_CERT_FILE --no-audit --no-fund --no-package-lock --fetch-retries=0 --fetch-timeout=20000 --cache /tmp/npm-$$ --registry=https://$HOST/npm/ demo && test -f node_modules/demo/index.js",
    },
    Client {
        tool: "git",
        script: "rm -rf clone; git clone -q https://$HOST/repo.git clone && grep -q content clone/file",
    },
    Client {
        tool: "node",
        script: "node -e 'fetch(`https://${process.env.HOST}/hello`, {signal: AbortSignal.timeout(20000)}).then(r => r.text()).then(t => process.exit(t.startsWith(`hello`) ? 0 : 1), e => {console.error(e); process.exit(1)})'",
    },
    Client {
        tool: "java",
        script: "rm -f trust.p12; keytool -importcert -noprompt -alias ca -file $SSL_CERT_FILE -keystore trust.p12 -storetype PKCS12 -storepass changeit 2>/dev/null; java -Xmx128m -XX:TieredStopAtLevel=1 -Djavax.net.ssl.trustStore=trust.p12 -Djavax.net.ssl.trustStorePassword=changeit Get.java https://$HOST/hello",
    },
    Client {
        tool: "go",
        script: "GOPROXY=https://$HOST/go GONOSUMDB='*' GONOSUMCHECK=1 GOFLAGS=-mod=mod GOTOOLCHAIN=local GOCACHE=/tmp/gocache GOPATH=/tmp/gopath-$$ go list -m example.com/demo@v1.0.0",
    },
    Client {
        tool: "cargo",
        script: "CARGO_HOME=/tmp/cargo-$$ CARGO_NET_RETRY=0 CARGO_HTTP_TIMEOUT=20 ./cargo search -q --index sparse+https://$HOST/index/ demo | grep -q demo",
    },
    // Knows no proxy, and no HTTP.
    Client {
        tool: "python3",
        script: "/usr/bin/python3 -c 'import os, socket; s = socket.create_connection((os.environ[\"HOST\"], 9000), 20); s.sendall(b\"hi\\n\"); assert s.recv(100) == b\"echo:hi\\n\"'",
    },
];

const JAVA: &str = r#"
import java.net.*;
import java.net.http.*;
import java.time.Duration;

public class Get {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newBuilder().connectTimeout(Duration.ofSeconds(20)).build();
        HttpRequest request = HttpRequest.newBuilder(URI.create(args[0])).timeout(Duration.ofSeconds(20)).build();
        String body = client.send(request, HttpResponse.BodyHandlers.ofString()).body();
        System.exit(body.startsWith("hello") ? 0 : 1);
    }
}
"#;

async fn programs_reach_allowed_host(mode: &'static str) -> Result<()> {
    let Some(place) = Place::start(mode).await? else { return Ok(()) };
    offer_packages(&place.network.www())?;
    let session = place.session(&[ALLOWED], &[80, 443, 9000]).await?;
    place.client.put(&session, "Get.java", JAVA).await?;
    let has_cargo = copy_cargo(&place)?;
    for Client { tool, script } in CLIENTS {
        let missing = if *tool == *"cargo" { !has_cargo } else { !is_installed(tool) };
        if !available("programs", missing.then_some(tool)) {
            continue;
        }
        for (variables, unset) in [("with proxy variables", ""), ("without", PROXY_VARIABLES)] {
            let unset = if unset.is_empty() { String::new() } else { format!("unset {unset}; ") };
            let script = |host| format!("export HOME=/workspace HOST={host}; {unset}{script}");
            let done = place.run(&session, &script(ALLOWED)).await?;
            ensure!(
                exit_code(&done) == Some(0),
                "{tool} {variables} does not reach an allowed host: {done:?}"
            );
            let done = place.run(&session, &script(OTHER)).await?;
            ensure!(exit_code(&done) != Some(0), "{tool} {variables} reaches another host: {done:?}");
        }
    }
    let requests = place.network.requests();
    ensure!(requests.iter().any(|line| line.contains(ALLOWED)), "control: requests are logged");
    ensure!(!requests.iter().any(|line| line.contains(OTHER)), "{requests:?}");
    let queries = place.network.queries();
    ensure!(queries.iter().any(|line| line.contains(ALLOWED)), "control: queries are logged");
    ensure!(!queries.iter().any(|line| line.contains(OTHER)), "a refused name left the host: {queries:?}");
    place.end().await
}

#[tokio::test]
async fn programs_reach_allowed_host_only_in_mode_bwrap() -> Result<()> {
    programs_reach_allowed_host("bwrap").await
}

#[tokio::test]
async fn programs_reach_allowed_host_only_in_mode_nsjail() -> Result<()> {
    programs_reach_allowed_host("nsjail").await
}

/// An image has its own programs, so this uses only a shell.
#[tokio::test]
async fn allowed_host_is_reached_in_mode_container() -> Result<()> {
    let Some(place) = Place::start("container").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[80, 443, 9000]).await?;
    let get = |host: &str| {
        format!(
            r#"bash -c 'exec 3<>/dev/tcp/{host}/80; printf "GET /hello HTTP/1.0\r\nHost: {host}\r\n\r\n" >&3; grep hello <&3'"#
        )
    };
    let reached = place.output(&session, &get(ALLOWED)).await?;
    ensure!(reached.contains("hello"), "{reached}");
    let done = place.run(&session, &get(OTHER)).await?;
    ensure!(exit_code(&done) != Some(0), "{done:?}");
    place.end().await
}

/// `cargo` is usually in a home directory, which sandboxes do not see.
fn copy_cargo(place: &Place) -> Result<bool> {
    let Ok(output) = Command::new("cargo").args(["version", "-v"]).output() else { return Ok(false) };
    let Ok(sysroot) = Command::new("rustc").args(["--print", "sysroot"]).output() else { return Ok(false) };
    ensure!(output.status.success(), "cargo version");
    let cargo = Path::new(String::from_utf8(sysroot.stdout)?.trim()).join("bin/cargo");
    if !cargo.exists() {
        return Ok(false);
    }
    let workspace = place.cluster.session_directories()?.pop().context("a session directory")?;
    fs::copy(cargo, workspace.join("cargo"))?;
    Ok(true)
}

/// Writes an index for each package manager, with one package.
fn offer_packages(www: &Path) -> Result<()> {
    let script = www.join("../packages.py");
    fs::write(&script, PACKAGES)?;
    let made = Command::new("/usr/bin/python3").arg(&script).arg(www).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

const PACKAGES: &str = include_str!("packages.py");
