//! The caches of cargo, pip and npm in a volume: a second session downloads nothing that the first
//! one has.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, FilesystemPolicy, Limits, NetworkMode, Policy, TextList, VolumeMode,
};
use codelia_tests::{Exec, available};

use super::{
    ALLOWED, POLICY, Place, exit_code, is_installed, network_policy, programs, with_authority,
};
use crate::volumes;

const CACHE: &str = "/cache";

/// A package manager: its files, its script, and where its packages come from.
struct Manager {
    tool: &'static str,
    script: &'static str,
    downloads: &'static str,
}

const MANAGERS: [Manager; 3] = [
    Manager {
        tool: "pip",
        script: "PIP_CACHE_DIR=$CACHE/pip PIP_BREAK_SYSTEM_PACKAGES=1 /usr/bin/python3 -m pip install -q --no-deps --retries 0 --disable-pip-version-check --target site --index-url https://$HOST/simple/ demo && test -f site/demo.py",
        downloads: "/files/demo-1.0-py3-none-any.whl",
    },
    Manager {
        tool: "npm",
        script: "mkdir npm && cp package.json package-lock.json npm && cd npm && npm_config_cache=$CACHE/npm npm ci --cafile=$SSL_CERT_FILE --no-audit --no-fund --no-update-notifier --fetch-retries=0 && test -f node_modules/demo/index.js",
        downloads: "/files/demo-1.0.0.tgz",
    },
    Manager {
        tool: "cargo",
        script: "export PATH=$TOOLCHAIN/bin:$PATH CARGO_HOME=$CACHE/cargo CARGO_NET_RETRY=0 CARGO_HTTP_CAINFO=$SSL_CERT_FILE && cargo init -q --vcs none --name tiny app && cd app && mkdir .cargo && cp ../config.toml .cargo/ && cp ../Cargo.lock . && echo 'demo = \"1.0.0\"' >> Cargo.toml && echo 'fn main() { println!(\"{}\", demo::word()); }' > src/main.rs && cargo build -q --locked && ./target/debug/tiny | grep -q built",
        downloads: "/dl/demo-1.0.0.crate",
    },
];

/// Copies the toolchain to where sandboxes may see it, with hard links if possible.
fn stage_toolchain(directory: &Path) -> Result<Option<PathBuf>> {
    let Ok(printed) = Command::new("rustc").args(["--print", "sysroot"]).output() else {
        return Ok(None);
    };
    let sysroot = PathBuf::from(String::from_utf8(printed.stdout)?.trim());
    let target = directory.join("toolchain");
    for how in ["-rl", "-r"] {
        fs::create_dir_all(&target)?;
        let mut copy = Command::new("cp");
        copy.args([how, "--parents", "bin/cargo", "bin/rustc", "lib"])
            .arg(&target)
            .current_dir(&sysroot);
        if copy.stderr(Stdio::null()).status()?.success() {
            fs::set_permissions(&target, Permissions::from_mode(0o755))?;
            return Ok(Some(target));
        }
        fs::remove_dir_all(&target)?;
    }
    Ok(None)
}

/// A session with the cache, in which each package manager installs a package. Returns what was
/// downloaded.
async fn install(
    place: &Place,
    mode: VolumeMode,
    toolchain: &Path,
    managers: &[&Manager],
) -> Result<Vec<String>> {
    let mut policy = network_policy(&[ALLOWED], &[443]);
    let opened = Some(TextList { values: vec![toolchain.display().to_string()] });
    let mounted = volumes::mounting("packages", CACHE, mode).filesystem.unwrap_or_default();
    policy.filesystem = Some(FilesystemPolicy { read_only_paths: opened, ..mounted });
    let timeout = Some(prost_types::Duration { seconds: 300, nanos: 0 });
    let limits =
        Some(Limits { memory_bytes: Some(1 << 30), pids: Some(300), timeout, ..Limits::default() });
    let request = CreateSessionRequest {
        network: NetworkMode::Proxy.into(),
        policy: Some(Policy { ..policy }),
        limits,
        ..CreateSessionRequest::default()
    };
    let session = place.client.create(request).await?;
    place
        .client
        .put(&session.name, "ca.pem", &fs::read_to_string(place.network.authority())?)
        .await?;
    for name in ["package.json", "package-lock.json", "config.toml", "Cargo.lock"] {
        let text = fs::read_to_string(place.network.www().join("projects").join(name))?;
        place.client.put(&session.name, name, &text).await?;
    }
    let before = place.network.requests().len();
    for manager in managers {
        let script = format!(
            "export HOME=/workspace HOST={ALLOWED} CACHE={CACHE} TOOLCHAIN={}\n{}",
            toolchain.display(),
            manager.script
        );
        let done = Exec::start(&place.client, with_authority(&session.name, &script))
            .await?
            .finish()
            .await?;
        ensure!(exit_code(&done) == Some(0), "{}: {done:?}", manager.tool);
    }
    let requests = place.network.requests().split_off(before);
    place.client.close(&session.name).await?;
    Ok(requests)
}

#[tokio::test]
async fn second_session_with_a_cache_downloads_nothing() -> Result<()> {
    let staged = tempfile::Builder::new().prefix("codelia-test-").tempdir_in("/opt")?;
    fs::set_permissions(staged.path(), Permissions::from_mode(0o755))?;
    let toolchain = stage_toolchain(staged.path())?;
    let shown = toolchain.clone().unwrap_or_else(|| staged.path().to_owned());
    let policy = format!("{POLICY}\nfilesystem: {{read_only_paths: [{}]}}", shown.display());
    let Some(place) = Place::start_under("native", &policy, Vec::new()).await? else {
        return Ok(());
    };
    programs::offer_packages(&place.network.www())?;
    let is_missing = |tool| if tool == "cargo" { toolchain.is_none() } else { !is_installed(tool) };
    let mut managers: Vec<&Manager> = MANAGERS.iter().collect();
    managers
        .retain(|manager| available("programs", is_missing(manager.tool).then_some(manager.tool)));
    volumes::create(&place.client, "packages", None).await?;

    let first = install(&place, VolumeMode::Exclusive, &shown, &managers).await?;
    for mode in [VolumeMode::Copy, VolumeMode::Exclusive] {
        let again = install(&place, mode, &shown, &managers).await?;
        for manager in &managers {
            let count = |requests: &[String]| {
                requests.iter().filter(|line| line.contains(manager.downloads)).count()
            };
            ensure!(count(&first) == 1, "control: {} downloads once: {first:?}", manager.tool);
            ensure!(count(&again) == 0, "{} downloads again: {again:?}", manager.tool);
        }
    }
    let fetched = first.first().context("requests are logged")?;
    println!("requests of the first session: {}, such as {fetched}", first.len());
    place.end().await
}
