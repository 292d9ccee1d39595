//! Programs reach an allowed host and no other, with and without proxy variables.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{Limits, StartRunRequest};
use codelia_tests::{ENGINE_SOCKET, Exec, Scratch, available, engine_command};

use super::{
    ALLOWED, OTHER, POLICY, PROXY_VARIABLES, Place, exit_code, is_installed, with_authority,
};

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

/// Runs every client with and without proxy variables, for both hosts: `number variables host
/// code`.
const DRIVER: &str = r#"
attempt() {
    (
        export HOME=/workspace HOST=$3
        [ $2 = with ] || unset $PROXY_VARIABLES
        sh /tmp/client-$1
    ) > /tmp/log 2>&1
    code=$?
    echo "$1 $2 $3 $code"
    [ $3 = $OTHER ] || [ $code = 0 ] || tail -c 2000 /tmp/log >&2
}
for client in $CLIENTS; do
    for variables in with without; do
        for host in $ALLOWED $OTHER; do attempt $client $variables $host; done
    done
done
"#;

async fn programs_reach_allowed_host(mode: &'static str) -> Result<()> {
    let Some(place) = Place::start(mode).await? else { return Ok(()) };
    offer_packages(&place.network.www())?;
    let session = place.session(&[ALLOWED], &[80, 443, 9000]).await?;
    place.client.put(&session, "Get.java", JAVA).await?;
    let has_cargo = copy_cargo(&place)?;
    let is_missing = |tool| if tool == "cargo" { !has_cargo } else { !is_installed(tool) };
    let mut clients: Vec<_> = CLIENTS.iter().enumerate().collect();
    clients.retain(|(_, client)| {
        available("programs", is_missing(client.tool).then_some(client.tool))
    });
    let done = Exec::start(&place.client, all_clients(&session, &clients)).await?.finish().await?;
    ensure!(exit_code(&done) == Some(0), "{done:?}");
    let results = done.stdout_text();
    for (number, Client { tool, .. }) in clients {
        for variables in ["with", "without"] {
            let reaches = |host| results.contains(&format!("{number} {variables} {host} 0\n"));
            let has_tried = |host| results.contains(&format!("{number} {variables} {host} "));
            ensure!(reaches(ALLOWED), "{tool} {variables} proxy variables fails: {done:?}");
            ensure!(
                has_tried(OTHER) && !reaches(OTHER),
                "{tool} {variables} proxy variables reaches another host: {done:?}"
            );
        }
    }
    let requests = place.network.requests();
    ensure!(requests.iter().any(|line| line.contains(ALLOWED)), "control: requests are logged");
    ensure!(!requests.iter().any(|line| line.contains(OTHER)), "{requests:?}");
    let queries = place.network.queries();
    ensure!(queries.iter().any(|line| line.contains(ALLOWED)), "control: queries are logged");
    ensure!(
        !queries.iter().any(|line| line.contains(OTHER)),
        "a refused name left the host: {queries:?}"
    );
    place.end().await
}

/// One run for all clients: a sandbox may take long to start.
fn all_clients(session: &str, clients: &[(usize, &Client)]) -> StartRunRequest {
    let numbers: Vec<_> = clients.iter().map(|(number, _)| number.to_string()).collect();
    let mut script = format!(
        "ALLOWED={ALLOWED} OTHER={OTHER} PROXY_VARIABLES='{PROXY_VARIABLES}' CLIENTS='{}'\n",
        numbers.join(" ")
    );
    for (number, client) in clients {
        script += &format!("cat > /tmp/client-{number} <<'END'\n{}\nEND\n", client.script);
    }
    let limits = Limits {
        timeout: Some(prost_types::Duration { seconds: 600, nanos: 0 }),
        ..Limits::default()
    };
    StartRunRequest { limits: Some(limits), ..with_authority(session, &(script + DRIVER)) }
}

#[tokio::test]
async fn programs_reach_allowed_host_only_in_mode_bwrap() -> Result<()> {
    programs_reach_allowed_host("bwrap").await
}

#[tokio::test]
async fn programs_reach_allowed_host_only_in_mode_container() -> Result<()> {
    programs_reach_allowed_host("container").await
}

/// An image as users have them: with variables, an entry point and a user of its own, and links
/// where programs look for the resolver.
const OWN_IMAGE: &str = "FROM codelia-base
COPY etc /etc
ENV HTTP_PROXY=http://192.0.2.1:1 https_proxy=http://192.0.2.1:1 ALL_PROXY=http://192.0.2.1:1 NO_PROXY=*
ENTRYPOINT [\"/bin/false\"]
USER daemon
WORKDIR /nonexistent
";

fn build_own_image(name: &str) -> Result<()> {
    let context = Scratch::new()?;
    fs::write(context.join("Dockerfile"), OWN_IMAGE)?;
    fs::create_dir(context.join("etc"))?;
    symlink("../run/systemd/resolve/stub-resolv.conf", context.join("etc/resolv.conf"))?;
    symlink("/usr/share/nsswitch.conf", context.join("etc/nsswitch.conf"))?;
    engine_command(&["build", "--quiet", "--tag", name, &context.path().display().to_string()])
        .map(drop)
}

/// The programs are those of the image here.
#[tokio::test]
async fn allowed_host_is_reached_in_mode_container() -> Result<()> {
    let image = format!("codelia-test-{}", uuid::Uuid::new_v4());
    let settings = vec![("CODELIA_SANDBOX_CONTAINER_IMAGE", image.clone())];
    if std::env::var_os(ENGINE_SOCKET).is_some() {
        build_own_image(&image)?;
    }
    let Some(place) = Place::start_without_host_programs("container", POLICY, settings).await?
    else {
        return Ok(());
    };
    let session = place.session(&[ALLOWED], &[80, 443, 9000]).await?;
    let found = place
        .output(&session, "cat /etc/resolv.conf; grep hosts: /etc/nsswitch.conf; pwd; env")
        .await?;
    ensure!(
        found.starts_with("nameserver 127.0.0.53\n") && found.contains("\nhosts: files dns\n"),
        "{found}"
    );
    ensure!(
        found.contains("\nhttps_proxy=http://127.0.0.1:") && !found.contains("192.0.2.1"),
        "{found}"
    );
    // The engine itself replaces a link at /etc/resolv.conf.
    let link = place.output(&session, "readlink /etc/nsswitch.conf").await?;
    ensure!(link == "/usr/share/nsswitch.conf\n", "the image has a link: {link:?}");
    let get = |host: &str, how: &str| {
        let open = "urllib.request.urlopen(f\"{scheme}://HOST/hello\", timeout=20).read()";
        let script =
            format!("import urllib.request\nfor scheme in (\"http\", \"https\"): print({open})");
        format!("{how} python3 -c '{}'", script.replace("HOST", host))
    };
    let without =
        PROXY_VARIABLES.split(' ').fold("env".to_owned(), |all, name| format!("{all} -u {name}"));
    for how in ["", &without] {
        let reached = place.output(&session, &get(ALLOWED, how)).await?;
        ensure!(reached.matches("hello").count() == 2, "{how}: {reached}");
        let done = place.run(&session, &get(OTHER, how)).await?;
        ensure!(exit_code(&done) == Some(1), "{how}: {done:?}");
    }
    let requests = place.network.requests();
    ensure!(
        requests.len() == 4 && !requests.iter().any(|line| line.contains(OTHER)),
        "{requests:?}"
    );
    place.end().await?;
    engine_command(&["rmi", "--force", &image]).map(drop)
}

/// `cargo` is usually in a home directory, which sandboxes do not see.
fn copy_cargo(place: &Place) -> Result<bool> {
    let Ok(output) = Command::new("cargo").args(["version", "-v"]).output() else {
        return Ok(false);
    };
    let Ok(sysroot) = Command::new("rustc").args(["--print", "sysroot"]).output() else {
        return Ok(false);
    };
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
pub(super) fn offer_packages(www: &Path) -> Result<()> {
    let script = www.join("../packages.py");
    fs::write(&script, PACKAGES)?;
    let made = Command::new("/usr/bin/python3").arg(&script).arg(www).output()?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

const PACKAGES: &str = include_str!("packages.py");
