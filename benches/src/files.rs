//! A directory up and down through the service as tar archives, next to `tar` and `cat` over a Unix
//! socket, and the memory that api and worker need for it. `make bench ARGS="files 256"` uses this
//! many MiB.

use std::{
    fs::{self, File},
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    ExportFilesRequest, ImportFilesFinish, ImportFilesOpen, ImportFilesRequest, RemoveFileRequest,
    export_files_response, import_files_request::Kind,
};
use codelia_store::LocalPostgres;
use codelia_tests::{Client, Cluster, ClusterOptions, Database, Scratch};
use rand::RngCore;
use tokio::sync::mpsc;

use crate::report::Report;

/// MiB that are copied, if no number is given.
pub(crate) const MEBIBYTES: u64 = 1024;
const FILE_MEBIBYTES: u64 = 64;
const ROUNDS: usize = 3;
/// Bytes that a process may grow by while any amount is copied.
const MAX_GROWTH: u64 = 32 << 20;
const CHUNK: usize = 256 * 1024;
const RAW: &str = "tar | socket | cat";

/// How long each way took in each round.
#[derive(Debug, Default)]
struct Times {
    up: Vec<Duration>,
    down: Vec<Duration>,
    raw_up: Vec<Duration>,
    raw_down: Vec<Duration>,
}

/// Copies in rounds, and compares the medians.
pub(crate) async fn measure(server: &LocalPostgres, mebibytes: u64) -> Result<Report> {
    let cluster = Cluster::start_on(Database::on(server).await?, ClusterOptions::default()).await?;
    let client = cluster.tenant("load").await?;
    let session = client.session().await?.name;
    let scratch = Scratch::new()?;
    let files = make_files(&scratch, mebibytes)?;
    let pids =
        [("api", cluster.apis[0].process.pid()), ("worker", cluster.workers[0].process.pid())];
    // Once, so that the memory of a first transfer does not count.
    import(&client, &session, &scratch.join("warm")).await?;
    let mut before = Vec::new();
    for (_, pid) in pids {
        // Sets the peak to the present.
        fs::write(format!("/proc/{pid}/clear_refs"), "5")?;
        before.push(peak(pid)?);
    }
    let mut times = Times::default();
    for _ in 0..ROUNDS {
        times.raw_up.push(raw_copy(&files, &scratch.join("copy.tar"))?);
        times.up.push(import(&client, &session, &files).await?);
        times.down.push(export(&client, &session).await?);
        times.raw_down.push(raw_copy(&files, Path::new("/dev/null"))?);
    }
    let mut report = Report::default();
    report.note(&format!(
        "{mebibytes} MiB in files of {FILE_MEBIBYTES} MiB, medians of {ROUNDS} rounds"
    ));
    note(&mut report, "up", &mut times.up, &mut times.raw_up, mebibytes);
    note(&mut report, "down", &mut times.down, &mut times.raw_down, mebibytes);
    for ((name, pid), before) in pids.into_iter().zip(before) {
        let grown = peak(pid)?.saturating_sub(before);
        let text = format!("{name} grew by {:.1} MiB at its peak", mib(grown));
        report.check(grown <= MAX_GROWTH, &format!("{text} (target ≤ {:.0} MiB)", mib(MAX_GROWTH)));
    }
    cluster.end().await?;
    Ok(report)
}

#[expect(clippy::cast_precision_loss, reason = "sizes stay far below 2^53")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[expect(clippy::cast_precision_loss, reason = "sizes stay far below 2^53")]
fn megabytes(mebibytes: u64) -> f64 {
    mebibytes as f64 * 1.048_576
}

fn note(
    report: &mut Report,
    way: &str,
    through: &mut [Duration],
    raw: &mut [Duration],
    mebibytes: u64,
) {
    let rate = |times: &mut [Duration]| {
        times.sort();
        megabytes(mebibytes) / times[times.len() / 2].as_secs_f64()
    };
    let through = rate(through);
    let raw = rate(raw);
    report.note(&format!(
        "{way}: {through:.0} MB/s, {RAW}: {raw:.0} MB/s ({:.0} %)",
        100.0 * through / raw
    ));
}

/// Files that do not compress, and an empty directory for the first transfer.
fn make_files(scratch: &Scratch, mebibytes: u64) -> Result<std::path::PathBuf> {
    let files = scratch.join("files");
    let warm = scratch.join("warm");
    fs::create_dir(&files)?;
    fs::create_dir(&warm)?;
    fs::write(warm.join("file"), vec![7; 1 << 20])?;
    let mut block = vec![0; 1 << 20];
    for number in 0..mebibytes.div_ceil(FILE_MEBIBYTES) {
        let mut file = File::create(files.join(number.to_string()))?;
        for _ in 0..FILE_MEBIBYTES.min(mebibytes - number * FILE_MEBIBYTES) {
            rand::rng().fill_bytes(&mut block);
            file.write_all(&block)?;
        }
    }
    Ok(files)
}

fn tar(files: &Path, output: impl Into<Stdio>) -> Result<Child> {
    let mut command = Command::new("tar");
    command.args(["--create", "--file=-", "--directory"]).arg(files).arg(".").stdout(output);
    command.spawn().context("tar")
}

/// The rate of the same bytes without the service.
fn raw_copy(files: &Path, to: &Path) -> Result<Duration> {
    let begun = Instant::now();
    let (sender, receiver) = UnixStream::pair()?;
    let mut tar = tar(files, std::os::fd::OwnedFd::from(sender))?;
    let mut cat = Command::new("cat")
        .stdin(std::os::fd::OwnedFd::from(receiver))
        .stdout(File::create(to)?)
        .spawn()
        .context("cat")?;
    ensure!(tar.wait()?.success() && cat.wait()?.success(), "tar or cat failed");
    Ok(begun.elapsed())
}

/// Sends an archive of the files to the session, in place of the former ones.
async fn import(client: &Client, session: &str, files: &Path) -> Result<Duration> {
    let request =
        RemoveFileRequest { parent: session.to_owned(), path: "copy".to_owned(), recursive: true };
    // There is nothing to remove the first time.
    let _ = client.files().remove_file(request).await;
    let begun = Instant::now();
    let mut tar = tar(files, Stdio::piped())?;
    let mut output = tar.stdout.take().context("the output of tar")?;
    let open =
        ImportFilesOpen { parent: session.to_owned(), path: "copy".to_owned(), overwrite: false };
    let (sender, messages) = mpsc::channel(4);
    let reading = tokio::task::spawn_blocking(move || -> Result<()> {
        let send = |kind| sender.blocking_send(ImportFilesRequest { kind: Some(kind) });
        send(Kind::Open(open))?;
        loop {
            let mut chunk = Vec::with_capacity(CHUNK);
            if output.by_ref().take(CHUNK as u64).read_to_end(&mut chunk)? == 0 {
                return Ok(send(Kind::Finish(ImportFilesFinish {}))?);
            }
            send(Kind::Data(chunk.into()))?;
        }
    });
    let messages = futures::stream::unfold(messages, |mut messages| async move {
        messages.recv().await.map(|message| (message, messages))
    });
    client.files().import_files(messages).await?;
    reading.await??;
    ensure!(tar.wait()?.success(), "tar failed");
    Ok(begun.elapsed())
}

/// Receives an archive of the files and counts its bytes.
async fn export(client: &Client, session: &str) -> Result<Duration> {
    let begun = Instant::now();
    let request = ExportFilesRequest {
        parent: session.to_owned(),
        path: "copy".to_owned(),
        ..Default::default()
    };
    let mut chunks = client.files().export_files(request).await?.into_inner();
    let mut is_complete = false;
    while let Some(chunk) = chunks.message().await? {
        is_complete = matches!(chunk.kind, Some(export_files_response::Kind::Summary(_)));
    }
    ensure!(is_complete, "the archive is not complete");
    Ok(begun.elapsed())
}

/// The peak memory of a process in bytes.
fn peak(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.strip_suffix("kB"));
    Ok(line.context("VmHWM")?.trim().parse::<u64>()? * 1024)
}
