//! Output: exact, replayable, and limited.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CancelRunRequest, Limits, StartRunRequest,
    outcome::Kind::{Canceled, Exited},
};
use codelia_tests::{Client, Cluster, eventually, shell, within};
use sha2::{Digest, Sha256};
use tokio::time::Instant;

const MIB: i64 = 1024 * 1024;

/// Ten million random bytes on standard output, their hash on standard error.
const TEN_MEGABYTES: &str = "head -c 10000000 /dev/urandom > file; sha256sum < file >&2; cat file";

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn limited(request: StartRunRequest, output_bytes: i64) -> StartRunRequest {
    let limits = Limits { output_bytes: Some(output_bytes), ..Limits::default() };
    StartRunRequest { limits: Some(limits), ..request }
}

/// Reads a number from a file in `/proc/PID`.
pub(crate) fn proc_number(pid: u32, file: &str, field: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .with_context(|| format!("{field} in {text}"))?;
    Ok(line.split_whitespace().next().context("a number")?.parse()?)
}

#[tokio::test]
async fn large_output_is_exact_live_and_replayed() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, TEN_MEGABYTES)).await?;
    let live = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(live.outcome(), Exited(0));
    assert_eq!(live.stdout.len(), 10_000_000);
    let hash = sha256(&live.stdout);
    assert!(live.stderr_text().starts_with(&hash), "{hash} and {}", live.stderr_text());
    assert!(!live.run().output_truncated && live.truncated_at.is_none());

    let again = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((sha256(&again.stdout), &again.stderr), (hash, &live.stderr));

    // A watch from the middle of a chunk gets everything after it.
    let middle = 5_000_123;
    let rest = client.watch_to_end(&run.name, middle).await?;
    assert_eq!(i64::try_from(rest.stdout.len() + rest.stderr.len())?, live.position - middle);
    assert!(live.stdout.ends_with(&rest.stdout));
    assert!(rest.queued.is_some() && rest.finished.is_some());

    let nothing = client.watch_to_end(&run.name, live.position).await?;
    assert!(nothing.stdout.is_empty() && nothing.finished.is_some());
    cluster.end().await
}

#[tokio::test]
async fn watch_resumes_from_offset() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "seq 1 2000; until [ -e go ]; do sleep 0.05; done; seq 2001 4000; echo end >&2";
    let run = client.start(shell(&session.name, script)).await?;
    let mut seen = codelia_tests::Transcript::from_position(0);
    let mut stream = client.watch(&run.name, 0).await?;
    while !seen.stdout.ends_with(b"\n2000\n") {
        let event = within("the next event", stream.message()).await?.context("more")?.event;
        seen.push(event.unwrap_or_default());
    }
    drop(stream);
    client.exec(&session.name, "touch go").await?;
    let rest = client.watch_to_end(&run.name, seen.position).await?;
    let all: String = (1..=4000).map(|n| format!("{n}\n")).collect();
    assert_eq!(seen.stdout_text() + &rest.stdout_text(), all);
    assert_eq!(rest.stderr_text(), "end\n");
    cluster.end().await
}

#[tokio::test]
async fn endless_output_is_truncated_and_memory_stays_flat() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "true").await?;
    let worker = cluster.workers[0].process.pid();
    let memory_before = proc_number(worker, "status", "VmRSS:")?;
    let read_before = proc_number(worker, "io", "rchar:")?;

    let run = client.start(limited(shell(&session.name, "exec yes"), MIB)).await?;
    eventually("the worker has read and dropped 300 MB", || async {
        let read = proc_number(worker, "io", "rchar:").ok()? - read_before;
        (read > 300_000_000).then_some(())
    })
    .await;
    let grown = proc_number(worker, "status", "VmRSS:")?.saturating_sub(memory_before);
    assert!(grown < 24 * 1024, "the worker grew by {grown} kB");

    client
        .runs()
        .cancel_run(CancelRunRequest { name: run.name.clone(), ..Default::default() })
        .await?;
    client.watch_to_end(&run.name, 0).await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Canceled(codelia_proto::v1::Canceled::default()));
    assert_eq!((seen.truncated_at, seen.position), (Some(MIB), MIB));
    assert!(seen.stdout.chunks(2).all(|line| line == b"y\n"));
    assert!(seen.run().output_truncated && seen.run().output_bytes == MIB);
    cluster.end().await
}

#[tokio::test]
async fn output_of_exactly_the_limit_is_kept() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    for (bytes, cut) in [(4096, false), (4097, true)] {
        let request = shell(&session.name, &format!("head -c {bytes} /dev/zero"));
        let run = client.start(limited(request, 4096)).await?;
        client.watch_to_end(&run.name, 0).await?;
        let seen = client.watch_to_end(&run.name, 0).await?;
        assert_eq!((seen.stdout.len(), seen.run().output_truncated), (4096, cut));
        assert_eq!(seen.run().output_total_bytes, Some(bytes), "written, stored or not");
        assert_eq!(seen.outcome(), Exited(0), "the command is not killed");
    }
    cluster.end().await
}

#[tokio::test]
async fn stalled_watcher_delays_no_other() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client
        .start(shell(
            &session.name,
            &format!("until [ -e go ]; do sleep 0.02; done; {TEN_MEGABYTES}"),
        ))
        .await?;

    // Separate connections, so that only flow control can block them.
    let mut stalled = Vec::new();
    for _ in 0..3 {
        let idle = Client::connect(&client.endpoint, &client.secret).await?;
        stalled.push(idle.watch(&run.name, 0).await?);
    }
    client.exec(&session.name, "touch go").await?;
    let begun = Instant::now();
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((seen.stdout.len(), seen.outcome()), (10_000_000, Exited(0)));
    let other = client.exec(&session.name, "echo quick").await?;
    assert_eq!(other.stdout_text(), "quick\n");
    assert!(begun.elapsed() < Duration::from_secs(15), "took {:?}", begun.elapsed());

    // A watcher that reads again gets everything.
    let mut late = codelia_tests::Transcript::from_position(0);
    while let Some(response) = within("the late watcher's next event", stalled[0].message()).await?
    {
        late.push(response.event.unwrap_or_default());
    }
    assert_eq!(sha256(&late.stdout), sha256(&seen.stdout));
    drop(stalled);
    cluster.end().await
}
