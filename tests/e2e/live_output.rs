//! Output after the limit: an attached caller receives all of it, or an error.

use std::{fs::File, process::Stdio};

use anyhow::{Context, Result};
use codelia_proto::v1::outcome::Kind::Exited;
use codelia_tests::{Client, Cluster, Exec, Process, Terminal, eventually, shell};

use crate::output::{limited, proc_number};

/// Twenty times the stored output of these tests, different in each line.
const NUMBERS: &str = "seq 1 3000000";
const LIMIT: &str = "1m";

#[tokio::test]
async fn redirected_output_is_complete_past_the_limit() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let path = cluster.directory().join("out");
    let mut run =
        cluster.cli(&client, &["run", "--output-limit", LIMIT, "--", "sh", "-c", NUMBERS]);
    run.stdout(File::create(&path)?).stderr(Stdio::piped());
    let mut child = run.spawn()?;
    let status =
        eventually("the command ends", || std::future::ready(child.try_wait().transpose())).await?;
    assert_eq!(status.code(), Some(0));
    let expected: String = (1..=3_000_000).map(|number| format!("{number}\n")).collect();
    assert!(std::fs::read_to_string(&path)? == expected, "the file differs");
    cluster.end().await
}

#[tokio::test]
async fn incomplete_redirected_output_has_its_own_exit_code() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let start = ["run", "-d", "--output-limit", LIMIT, "--", "sh", "-c", NUMBERS];
    let started = Process::finish(cluster.cli(&client, &start), b"").await?;
    let id = started.stdout.trim().to_owned();
    let name = format!("sessions/-/runs/{id}");
    eventually("the run ends", || async { client.get_run(&name).await.ok()?.outcome }).await;
    // Too late for what was not stored.
    let late = Process::finish(cluster.cli(&client, &["attach", &id]), b"").await?;
    assert_eq!((late.code, late.stdout.len()), (Some(123), 1 << 20), "{}", late.stderr);
    assert!(
        late.stderr.contains("output incomplete: only the first 1 MiB were stored"),
        "{}",
        late.stderr
    );
    assert!(late.stderr.contains("--output-limit"), "{}", late.stderr);
    // A person sees the message; the exit code stays the command's.
    let mut terminal = Terminal::start(&cluster.cli(&client, &["attach", &id]), 80, 24)?;
    terminal.shows("output incomplete").await?;
    assert_eq!(terminal.exited().await?.code(), Some(0));
    cluster.end().await
}

#[tokio::test]
async fn stalled_callers_stop_only_their_own_run() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "true").await?;
    let worker = cluster.workers[0].process.pid();
    let read = || proc_number(worker, "io", "rchar:");
    let memory_before = proc_number(worker, "status", "VmRSS:")?;

    let mut stalled = Vec::new();
    for _ in 0..2 {
        let caller = Client::connect(&client.endpoint, &client.secret).await?;
        let mut exec = Exec::start(&caller, limited(shell(&session.name, "exec yes"), 1)).await?;
        exec.until_started().await?;
        stalled.push(exec);
    }
    // Nobody reads: the commands must stop writing.
    let (mut last, mut quiet) = (0, 0);
    eventually("the commands wait", || {
        let now = read().unwrap_or_default();
        quiet = if now - last < 10_000 { quiet + 1 } else { 0 };
        last = now;
        std::future::ready((quiet > 20).then_some(()))
    })
    .await;
    let grown = proc_number(worker, "status", "VmRSS:")?.saturating_sub(memory_before);
    assert!(grown < 32 * 1024, "the worker grew by {grown} kB");
    let other = client.exec(&session.name, "seq 1 100000").await?;
    assert_eq!(other.outcome(), Exited(0), "another run is not stopped");

    // A caller that reads again gets everything from where it stopped: the transcript has no gap.
    let mut first = stalled.swap_remove(0);
    first.until("a lot of output", |seen| seen.stdout.len() > 30 << 20).await?;
    assert!(first.transcript.stdout.chunks(2).all(|line| line == b"y\n"));
    drop((first, stalled));
    cluster.end().await
}

#[tokio::test]
async fn slow_caller_receives_the_end_of_the_output() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec = Exec::start(&client, limited(shell(&session.name, NUMBERS), 1000)).await?;
    exec.until_stdout("1\n").await?;
    let name = exec.transcript.queued.as_ref().context("queued")?.name.clone();
    let seen = exec.finish().await?;
    let run = seen.run();
    assert_eq!((run.output_bytes, run.output_total_bytes), (1000, Some(seen.position)));
    assert!(seen.stdout.ends_with(b"3000000\n"));
    assert_eq!(seen.truncated_at, Some(1000));
    // What is stored is the beginning of what was received.
    let stored = client.watch_to_end(&name, 0).await?;
    assert_eq!(stored.stdout, seen.stdout[..1000]);
    cluster.end().await
}
