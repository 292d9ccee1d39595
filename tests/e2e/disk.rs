//! Limits of the files of a session, while runs go: bytes, inodes, and the size of one file.

use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, FilesystemPolicy, LimitExceeded, Limits, Outcome, Policy,
    RemoveFileRequest, Run, StartRunRequest, TextList, TransactionMode, outcome,
};
use codelia_tests::{Client, Cluster, Process, Scratch, available, eventually, refusal, shell};
use tonic::Code;

use crate::{
    isolation::{isolating, isolating_with},
    transactions::run,
};

const MIB: i64 = 1 << 20;
const BYTES: i64 = 64 * MIB;
const INODES: i64 = 2000;

/// Writes at most 2 GB, in files that are smaller than the largest one allowed.
const FILL: &str = "for i in 1 2 3 4 5 6 7 8 9 10; do \
    dd if=/dev/zero of=big$i bs=1M count=200 2>/dev/null; done; echo survived";
/// Writes at most 1 GB, slowly.
const TRICKLE: &str = "i=0; while [ $i -lt 1000 ]; do \
    dd if=/dev/zero bs=1M count=1 2>/dev/null >> slow; sleep 0.02; i=$((i+1)); done; echo survived";

/// A session with limits, its directory on the host, and a neighbour with the defaults.
struct Fixture {
    cluster: Cluster,
    client: Client,
    session: String,
    directory: PathBuf,
    neighbour: String,
}

impl Fixture {
    async fn start(mode: &'static str) -> Result<Option<Self>> {
        let cluster = match mode {
            "logical" => Cluster::start().await?,
            _ => match isolating(mode, 1).await? {
                Some(cluster) => cluster,
                None => return Ok(None),
            },
        };
        let client = cluster.tenant("a").await?;
        let session = create(&client, BYTES, INODES).await?;
        let directory = cluster.session_directories()?.pop().context("a session directory")?;
        let directory = directory.parent().context("above the workspace")?.to_owned();
        let neighbour = client.session().await?.name;
        Ok(Some(Self { cluster, client, session, directory, neighbour }))
    }

    async fn run(&self, script: &str) -> Result<Run> {
        run(&self.client, shell(&self.session, script)).await
    }

    /// Runs a script that must succeed.
    async fn succeeds(&self, script: &str) -> Result<()> {
        let run = self.run(script).await?;
        ensure!(kind(&run) == Some(outcome::Kind::Exited(0)), "{script}: {:?}", run.outcome);
        Ok(())
    }

    /// Runs a script that must be stopped for a limit. Prints by how much it exceeded the limit.
    async fn is_stopped(&self, script: &str, resource: &str) -> Result<()> {
        let began = Instant::now();
        let run = self.run(script).await?;
        ensure!(is_limit(&run, resource), "{script}: {:?}", run.outcome);
        let (bytes, inodes) = allocated(&self.directory)?;
        let (over_bytes, over_inodes) = (bytes - BYTES, inodes - INODES);
        println!(
            "{resource}: stopped after {:?}; {over_bytes} bytes and {over_inodes} inodes over the limit",
            began.elapsed()
        );
        Ok(())
    }
}

async fn create(client: &Client, disk_bytes: i64, inodes: i64) -> Result<String> {
    let limits = Limits { disk_bytes: Some(disk_bytes), inodes: Some(inodes), ..Limits::default() };
    let session =
        client.create(CreateSessionRequest { limits: Some(limits), ..Default::default() }).await?;
    let granted = session.limits.context("limits")?;
    ensure!((granted.disk_bytes, granted.inodes) == (Some(disk_bytes), Some(inodes)));
    // The worker takes it with its first run.
    client.exec(&session.name, "true").await?;
    Ok(session.name)
}

fn kind(run: &Run) -> Option<outcome::Kind> {
    run.outcome.clone().and_then(|Outcome { kind }| kind)
}

fn is_limit(run: &Run, resource: &str) -> bool {
    matches!(kind(run), Some(outcome::Kind::Limit(LimitExceeded { resource: found })) if found == resource)
}

/// What is allocated below a directory: bytes and inodes.
fn allocated(directory: &Path) -> Result<(i64, i64)> {
    let (mut bytes, mut inodes) = (0, 0);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let metadata = entry.metadata()?;
        bytes += metadata.blocks().cast_signed() * 512;
        inodes += 1;
        if metadata.is_dir() {
            let below = allocated(&entry.path())?;
            (bytes, inodes) = (bytes + below.0, inodes + below.1);
        }
    }
    Ok((bytes, inodes))
}

/// How long a small run of the neighbour takes while `work` goes.
async fn slowest_neighbour(
    fixture: &Fixture,
    work: impl Future<Output = Result<()>>,
) -> Result<Duration> {
    let mut work = std::pin::pin!(work);
    let mut slowest = Duration::ZERO;
    loop {
        let began = Instant::now();
        let neighbour = fixture.client.exec(&fixture.neighbour, "echo text > file && cat file");
        tokio::select! {
            done = &mut work => return done.map(|()| slowest),
            written = neighbour => ensure!(written?.stdout_text() == "text\n"),
        }
        slowest = slowest.max(began.elapsed());
    }
}

async fn limits_bite(mode: &'static str) -> Result<()> {
    let Some(fixture) = Fixture::start(mode).await? else { return Ok(()) };
    // The control: below the limit nothing is stopped, whatever size files seem to have.
    fixture
        .succeeds("dd if=/dev/zero of=small bs=1M count=40 2>/dev/null; sleep 1; rm small")
        .await?;
    let sparse = "truncate -s 900M sparse; dd if=/dev/zero of=sparse bs=4k count=1 seek=9999 conv=notrunc \
                  2>/dev/null; sleep 1; rm sparse";
    fixture.succeeds(sparse).await?;
    let linked = "dd if=/dev/zero of=one bs=1M count=40 2>/dev/null; for i in 1 2 3 4; do ln one two$i; done; \
                  sleep 1; rm one two*";
    fixture.succeeds(linked).await?;

    let slowest = slowest_neighbour(&fixture, fixture.is_stopped(FILL, "disk_bytes")).await?;
    println!("{mode}: slowest run of the neighbour meanwhile: {slowest:?}");
    // A full session: what grows it is stopped, and what makes room is not.
    fixture
        .is_stopped("dd if=/dev/zero of=more bs=1M count=200 2>/dev/null; sleep 60", "disk_bytes")
        .await?;
    fixture.succeeds("sleep 1; rm -f big* more; echo fits > file; sleep 1; cat file").await?;

    fixture.is_stopped(TRICKLE, "disk_bytes").await?;
    let (bytes, _) = allocated(&fixture.directory)?;
    ensure!(bytes < BYTES + 64 * MIB, "{mode}: {bytes} bytes");
    fixture.succeeds("rm slow").await?;

    let many =
        "mkdir many; i=0; while [ $i -lt 300000 ]; do : > many/$i; i=$((i+1)); done; echo survived";
    fixture.is_stopped(many, "inodes").await?;
    fixture.succeeds("rm -r many").await?;

    // Only the command still has the file.
    let unlinked =
        "exec 3> hidden; rm hidden; dd if=/dev/zero bs=1M count=900 >&3 2>/dev/null; sleep 60";
    fixture.is_stopped(unlinked, "disk_bytes").await?;
    fixture.succeeds("echo fits > file").await?;
    fixture.cluster.end().await
}

#[tokio::test]
async fn limits_bite_in_bwrap() -> Result<()> {
    limits_bite("bwrap").await
}

#[tokio::test]
async fn limits_bite_in_nsjail() -> Result<()> {
    limits_bite("nsjail").await
}

#[tokio::test]
async fn limits_bite_in_native() -> Result<()> {
    limits_bite("native").await
}

#[tokio::test]
async fn limits_bite_in_container() -> Result<()> {
    limits_bite("container").await
}

#[tokio::test]
async fn limits_bite_in_logical() -> Result<()> {
    limits_bite("logical").await
}

#[tokio::test]
async fn writes_of_transactional_runs_count() -> Result<()> {
    let Some(fixture) = Fixture::start("bwrap").await? else { return Ok(()) };
    let transaction = TransactionMode::Apply.into();
    let request = |script| StartRunRequest { transaction, ..shell(&fixture.session, script) };
    let stopped = run(&fixture.client, request(FILL)).await?;
    ensure!(is_limit(&stopped, "disk_bytes"), "{:?}", stopped.outcome);
    fixture.succeeds("test ! -e big1").await?;
    // The control.
    let done = run(&fixture.client, request("echo text > file")).await?;
    ensure!(kind(&done) == Some(outcome::Kind::Exited(0)), "{:?}", done.outcome);
    fixture.succeeds("cat file").await?;
    fixture.cluster.end().await
}

#[tokio::test]
async fn writes_below_overlay_paths_count() -> Result<()> {
    const TOOLS: &str = "/usr/local";
    let place = Scratch::new()?;
    fs::write(place.join("policy.yaml"), format!("filesystem: {{overlay_paths: [{TOOLS}]}}"))?;
    let settings =
        vec![("CODELIA_SANDBOX_POLICY", place.join("policy.yaml").display().to_string())];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let overlay_paths = Some(TextList { values: vec![TOOLS.to_owned()] });
    let filesystem = Some(FilesystemPolicy { overlay_paths, ..Default::default() });
    let policy = Some(Policy { filesystem, ..Default::default() });
    let limits = Some(Limits { disk_bytes: Some(BYTES), ..Limits::default() });
    let session =
        client.create(CreateSessionRequest { limits, policy, ..Default::default() }).await?.name;
    let in_overlay = |script: &str| shell(&session, &format!("cd {TOOLS} && {script}"));

    // The control: below the limit nothing is stopped.
    let small = "dd if=/dev/zero of=small bs=1M count=40 2>/dev/null; sleep 1; rm small";
    let done = run(&client, in_overlay(small)).await?;
    ensure!(kind(&done) == Some(outcome::Kind::Exited(0)), "{:?}", done.outcome);
    let stopped = run(&client, in_overlay(FILL)).await?;
    ensure!(is_limit(&stopped, "disk_bytes"), "{:?}", stopped.outcome);
    ensure!(!Path::new(TOOLS).join("big1").exists(), "the host was changed");
    cluster.end().await
}

/// Allocates up to 4.5 GB at once, without writing anything.
const ALLOCATE: &str =
    "for i in 1 2 3 4 5; do fallocate -l 900M $(mktemp huge-XXXXXX); done; sleep 60";
/// Each run allocates at least one of the files before it is stopped.
const MAX_RUNS: usize = 8;

#[tokio::test]
async fn run_is_refused_far_above_the_limit() -> Result<()> {
    let space = rustix::fs::statvfs(std::env::temp_dir().as_path())?;
    let is_small = space.f_bavail * space.f_frsize < 12 << 30;
    if !available("disk", is_small.then_some("less than 12 GiB are free for tests")) {
        return Ok(());
    }
    let Some(fixture) = Fixture::start("native").await? else { return Ok(()) };
    for _ in 0..MAX_RUNS {
        let ended = fixture.run(ALLOCATE).await?;
        if let Some(outcome::Kind::Refused(refused)) = kind(&ended) {
            ensure!(refused.reason == "SESSION_DISK_FULL", "{refused:?}");
            ensure!(refused.message.contains("codelia rm"), "{refused:?}");
            let (bytes, _) = allocated(&fixture.directory)?;
            ensure!(bytes > BYTES + (4 << 30), "{bytes}");
            // Not even one that would delete files, but file calls can.
            let refused = fixture.run("rm -f huge-*").await?;
            ensure!(
                matches!(kind(&refused), Some(outcome::Kind::Refused(_))),
                "{:?}",
                refused.outcome
            );
            for file in fs::read_dir(fixture.directory.join("workspace"))? {
                let path = file?.file_name().to_string_lossy().into_owned();
                let request = RemoveFileRequest {
                    parent: fixture.session.clone(),
                    path,
                    ..Default::default()
                };
                fixture.client.files().remove_file(request).await?;
            }
            let is_usable = || async { fixture.succeeds("echo fits > file").await.ok() };
            eventually("a run starts again", is_usable).await;
            return fixture.cluster.end().await;
        }
        // The control: less above the limit a run may start, and is stopped when it grows the
        // session.
        ensure!(is_limit(&ended, "disk_bytes"), "{:?}", ended.outcome);
    }
    anyhow::bail!("no run was refused; {:?} are allocated", allocated(&fixture.directory)?)
}

#[tokio::test]
async fn policy_lowers_limit_for_one_run() -> Result<()> {
    let Some(fixture) = Fixture::start("bwrap").await? else { return Ok(()) };
    let write = "dd if=/dev/zero of=file bs=1M count=40 2>/dev/null; sleep 3; rm file";
    let filesystem = FilesystemPolicy { max_total_bytes: Some(8 * MIB), ..Default::default() };
    let policy = Some(Policy { filesystem: Some(filesystem), ..Default::default() });
    let lowered = StartRunRequest { policy, ..shell(&fixture.session, write) };
    let stopped = run(&fixture.client, lowered).await?;
    ensure!(is_limit(&stopped, "disk_bytes"), "{:?}", stopped.outcome);
    // The control: the session allows it.
    fixture.succeeds(write).await?;
    fixture.cluster.end().await
}

#[tokio::test]
async fn largest_file_is_limited() -> Result<()> {
    let Some(fixture) = Fixture::start("bwrap").await? else { return Ok(()) };
    let write = "dd if=/dev/zero of=file bs=1M count=3 2>/dev/null; echo $?; wc -c < file";
    let limits = Some(Limits { file_bytes: Some(MIB), ..Limits::default() });
    let limited =
        fixture.client.start(StartRunRequest { limits, ..shell(&fixture.session, write) }).await?;
    let output = fixture.client.watch_to_end(&limited.name, 0).await?.stdout_text();
    ensure!(output.ends_with(&format!("\n{MIB}\n")) && !output.starts_with("0\n"), "{output}");
    let control = fixture.client.exec(&fixture.session, write).await?.stdout_text();
    ensure!(control == format!("0\n{}\n", 3 * MIB), "{control}");
    fixture.cluster.end().await
}

#[tokio::test]
async fn disk_limits_belong_to_the_session() -> Result<()> {
    let Some(fixture) = Fixture::start("bwrap").await? else { return Ok(()) };
    let Fixture { cluster, client, session, .. } = &fixture;
    for (field, limits) in [
        ("limits.disk_bytes", Limits { disk_bytes: Some(MIB), ..Limits::default() }),
        ("limits.inodes", Limits { inodes: Some(10), ..Limits::default() }),
    ] {
        let refused =
            client.start(StartRunRequest { limits: Some(limits), ..shell(session, "true") }).await;
        let refused = refusal(&refused.err().context(field)?);
        ensure!(refused.code == Code::InvalidArgument && refused.fields == [field], "{refused:?}");
        // The control: with a session of its own it acts.
        let new_session = Some(CreateSessionRequest::default());
        let own = StartRunRequest {
            parent: String::new(),
            new_session,
            limits: Some(limits),
            ..shell("", "true")
        };
        let run = client.start(own).await?;
        let parent = run.name.split("/runs/").next().context("a session")?.to_owned();
        let granted = client.get_session(&parent).await?.limits.context("limits")?;
        ensure!(
            granted.disk_bytes == limits.disk_bytes || granted.inodes == limits.inodes,
            "{granted:?}"
        );
    }
    let script = ["--", "sh", "-c", FILL];
    let run = [&["run", "--disk", "64m"][..], &script].concat();
    let stopped = Process::finish(cluster.cli(client, &run), b"").await?;
    ensure!(
        stopped.stderr.contains("killed: session directory is full (limit 64 MiB)"),
        "{stopped:?}"
    );
    let id = session.trim_start_matches("sessions/");
    let existing = ["run", "-s", id, "--disk", "64m", "--", "true"];
    let refused = Process::finish(cluster.cli(client, &existing), b"").await?;
    ensure!(
        refused.code == Some(125) && refused.stderr.contains("--disk needs a new session"),
        "{refused:?}"
    );
    fixture.cluster.end().await
}
