//! Sessions whose files are in a disk image of their own (`worker.disk: image`): what a full one
//! sees, and what is left of it.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, Limits, Session, StartRunRequest, TransactionMode, outcome,
};
use codelia_tests::{Client, Cluster, ClusterOptions, available, eventually, is_root, shell};
use rustix::process::Signal;
use serde_json::Value;

use crate::isolation::{diagnosis, isolating_with};

const IMAGE: (&str, &str) = ("CODELIA_WORKER_DISK", "image");
const LIMIT: i64 = 16 << 20;
const INODES: i64 = 300;

/// Writes 64 MiB, then more room than there is at once, then empty files until one fails.
const FILL: &str = "dd if=/dev/zero of=big bs=64k count=1024 2>&1 | grep -o 'No space left'; stat -c %s big; rm big
    fallocate -l 64M big 2>&1 | grep -o 'No space left'; rm -f big
    truncate -s 1G sparse && ln sparse link && echo sparse
    i=0; while [ $i -lt 1000 ] && true > n$i; do i=$((i + 1)); done 2>/dev/null; echo $i; rm -f n*; echo room > new && cat new";

/// Starts an installation whose sessions have images.
async fn cluster(mode: &'static str) -> Result<Option<Cluster>> {
    if !available("loop", (!is_root()).then_some("only root can use loop devices")) {
        return Ok(None);
    }
    isolating_with(mode, 1, vec![(IMAGE.0, IMAGE.1.to_owned())]).await
}

async fn session(client: &Client) -> Result<Session> {
    let limits = Limits { disk_bytes: Some(LIMIT), inodes: Some(INODES), ..Limits::default() };
    Ok(client.create(CreateSessionRequest { limits: Some(limits), ..Default::default() }).await?)
}

/// The mounts, devices and files of images below the directory of an installation.
fn images(cluster: &Cluster) -> Result<Vec<String>> {
    let below = cluster.directory().display().to_string();
    let mut found = Vec::new();
    for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
        found.extend(
            line.split(' ').nth(4).filter(|point| point.starts_with(&below)).map(str::to_owned),
        );
    }
    for device in fs::read_dir("/sys/block")? {
        let file = fs::read_to_string(device?.path().join("loop/backing_file")).unwrap_or_default();
        found.extend(Some(file).filter(|file| file.starts_with(&below)));
    }
    for worker in &cluster.workers {
        for entry in fs::read_dir(worker.root.join("images"))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            found.extend(Some(name).filter(|name| !name.starts_with("blank-")));
        }
    }
    Ok(found)
}

async fn nothing_is_left(cluster: &Cluster) {
    let is_clean = || async { images(cluster).is_ok_and(|found| found.is_empty()).then_some(()) };
    eventually("no image is left", is_clean).await;
}

/// Kills the worker without notice, and starts it again.
async fn kill_worker(cluster: &mut Cluster) -> Result<()> {
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await
}

/// Whether later mounts below the directory of tests reach the mount namespace of the engine.
fn has_shared_mounts() -> Result<bool> {
    let table = fs::read_to_string("/proc/self/mountinfo")?;
    let place = std::env::temp_dir();
    let above = table
        .lines()
        .filter(|line| line.split(' ').nth(4).is_some_and(|point| place.starts_with(point)));
    let nearest =
        above.max_by_key(|line| line.split(' ').nth(4).map(str::len)).context("a mount")?;
    Ok(nearest.contains(" shared:"))
}

async fn full_image_refuses_writes(mode: &'static str) -> Result<()> {
    let missing = (mode == "container" && !has_shared_mounts()?)
        .then_some("mounts of this host do not reach the container engine");
    if !available("shared_mounts", missing) {
        return Ok(());
    }
    let Some(mut cluster) = cluster(mode).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let (full, neighbour) = (session(&client).await?, client.session().await?);
    let (filled, other) =
        tokio::try_join!(client.exec(&full.name, FILL), client.exec(&neighbour.name, FILL))?;
    let text = filled.stdout_text();
    let lines: Vec<_> = text.lines().collect();
    let ["No space left", size, "No space left", "sparse", files, "room"] = lines[..] else {
        anyhow::bail!("{text:?} {:?}", filled.stderr_text());
    };
    let bytes = size.parse::<i64>()?;
    ensure!(bytes > LIMIT - (1 << 20) && bytes < LIMIT + (1 << 20), "{bytes}");
    println!("{mode}: limit {LIMIT}, written {bytes}, overshoot {}", bytes - LIMIT);
    let files = files.parse::<i64>()?;
    ensure!(files > INODES - 20 && files < INODES + 20, "{files}");
    ensure!(
        other.stdout_text() == "67108864\nsparse\n1000\nroom\n",
        "the control: {}",
        other.stdout_text()
    );

    let refused = client.put(&full.name, "upload", &"x".repeat(20 << 20)).await;
    ensure!(refused.is_err(), "an upload that does not fit");
    client.put(&full.name, "upload", "fits").await?;
    client.put(&full.name, "upload", "replaced").await?;
    let transaction = TransactionMode::Apply.into();
    let change = "mkdir -p dir/deep && echo 1 > dir/deep/file && rm upload && dd if=/dev/zero of=big bs=1M count=20";
    for (script, code) in [(change, 1), ("echo 2 > file", 0)] {
        let run =
            client.start(StartRunRequest { transaction, ..shell(&full.name, script) }).await?;
        let ended = client.watch_to_end(&run.name, 0).await?.outcome();
        ensure!(ended == outcome::Kind::Exited(code), "{ended:?}");
    }
    ensure!(
        client
            .exec(&full.name, "cat file upload; ls")
            .await?
            .stdout_text()
            .starts_with("2\nreplaced")
    );

    kill_worker(&mut cluster).await?;
    ensure!(
        client.exec(&full.name, "cat file").await?.stdout_text() == "2\n",
        "files outlive the worker"
    );
    kill_worker(&mut cluster).await?;
    for session in [full, neighbour] {
        client.close(&session.name).await?;
    }
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn full_image_refuses_writes_in_mode_bwrap() -> Result<()> {
    full_image_refuses_writes("bwrap").await
}

#[tokio::test]
async fn full_image_refuses_writes_in_mode_nsjail() -> Result<()> {
    full_image_refuses_writes("nsjail").await
}

#[tokio::test]
async fn full_image_refuses_writes_in_mode_native() -> Result<()> {
    full_image_refuses_writes("native").await
}

#[tokio::test]
async fn full_image_refuses_writes_in_mode_container() -> Result<()> {
    full_image_refuses_writes("container").await
}

#[tokio::test]
async fn image_moves_with_its_session() -> Result<()> {
    if !available("loop", (!is_root()).then_some("only root can use loop devices")) {
        return Ok(());
    }
    let settings = vec![(IMAGE.0, IMAGE.1.to_owned())];
    let shape =
        ClusterOptions { workers: 2, shared_root: true, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    let client = cluster.tenant("a").await?;
    let session = session(&client).await?;
    let holder = client.exec(&session.name, "echo kept > file").await?.run().worker_id.clone();
    let number =
        cluster.workers.iter().position(|worker| worker.id == holder).context("its worker")?;
    cluster.workers[number].process.terminate().await?;
    ensure!(client.exec(&session.name, "cat file").await?.stdout_text() == "kept\n");
    client.close(&session.name).await?;
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn stopped_worker_leaves_no_mount() -> Result<()> {
    let Some(mut cluster) = cluster("bwrap").await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = session(&client).await?;
    client.exec(&session.name, "echo kept > file").await?;
    ensure!(images(&cluster)?.len() > 2, "the control: it is mounted");
    cluster.workers[0].process.terminate().await?;
    let is_mounted = |path: &String| Path::new(path).is_absolute();
    let unmounted = || async { (!images(&cluster).ok()?.iter().any(is_mounted)).then_some(()) };
    eventually("the image is unmounted", unmounted).await;
    cluster.restart_worker(0).await?;
    ensure!(client.exec(&session.name, "cat file").await?.stdout_text() == "kept\n");
    client.close(&session.name).await?;
    nothing_is_left(&cluster).await;
    cluster.end().await
}

fn disk_check(found: &Value) -> Result<(bool, String)> {
    let checks = found["checks"].as_array().context("checks")?;
    let check =
        checks.iter().find(|check| check["check"] == "disk limits").context("disk limits")?;
    Ok((check["good"] == true, check["found"].as_str().unwrap_or_default().to_owned()))
}

#[tokio::test]
async fn doctor_shows_disk_mechanism() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { workers: 0, apis: 0, ..Default::default() }).await?;
    let (is_good, found) = disk_check(&diagnosis(&cluster, &[]).await?)?;
    ensure!(
        is_good
            && ["project_quota", "user_quota", "scan"].iter().any(|word| found.starts_with(word))
    );
    // No kernel has quotas on its own file systems.
    let chosen = [("CODELIA_WORKER_DISK", "project_quota"), ("CODELIA_SANDBOX_ROOT", "/proc/sys")];
    let (is_good, found) = disk_check(&diagnosis(&cluster, &chosen).await?)?;
    ensure!(!is_good && found.contains("worker.disk: project_quota"), "{found}");
    cluster.end().await
}
