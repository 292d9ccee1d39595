//! Large output in a directory instead of the database.

use std::fs;

use anyhow::{Context, Result};
use codelia_proto::v1::outcome::Kind::Exited;
use codelia_tests::{Cluster, ClusterOptions, Process, Scratch, eventually, refusal, shell};
use tonic::Code;

/// 300,000 bytes on both streams, small enough for one flush or a few.
const SCRIPT: &str = "head -c 200000 /dev/urandom; head -c 100000 /dev/urandom >&2";
const STORE: &str = "CODELIA_OUTPUT_STORE";

fn store(scratch: &Scratch, name: &str) -> String {
    format!("file://{}", scratch.join(name).display())
}

/// The directories of days below the store.
fn days(scratch: &Scratch) -> Result<Vec<std::path::PathBuf>> {
    let entries = fs::read_dir(scratch.join("output"))?.collect::<Result<Vec<_>, _>>()?;
    Ok(entries.into_iter().map(|entry| entry.path()).filter(|path| path.is_dir()).collect())
}

#[tokio::test]
async fn large_output_is_kept_outside_the_database() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings = vec![(STORE, store(&scratch, "output")), ("CODELIA_OUTPUT_INLINE_KB", "16".to_owned())];
    let mut cluster = Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;

    // Large output is in objects, small output in rows.
    let run = client.start(shell(&session.name, SCRIPT)).await?;
    let live = client.watch_to_end(&run.name, 0).await?;
    assert_eq!((live.outcome(), live.stdout.len(), live.stderr.len()), (Exited(0), 200_000, 100_000));
    let in_rows = "SELECT coalesce(sum(octet_length(data)), 0)::bigint FROM run_output";
    assert!(cluster.database.number(in_rows).await? < 50_000);
    let small = client.exec(&session.name, "echo small").await?;
    assert_eq!(small.stdout, b"small\n");

    // A watch, the CLI and a watch from the middle read the same bytes.
    let again = client.watch_to_end(&run.name, 0).await?;
    assert!(again.stdout == live.stdout && again.stderr == live.stderr);
    let logs = tokio::process::Command::from(cluster.cli(&client, &["logs", &run.name])).output().await?;
    assert!(logs.stdout == live.stdout && logs.stderr == live.stderr);
    let rest = client.watch_to_end(&run.name, 123_456).await?;
    assert!(live.stdout.ends_with(&rest.stdout) && live.stderr.ends_with(&rest.stderr));
    assert_eq!(rest.stdout.len() + rest.stderr.len(), 300_000 - 123_456);

    // A process with another store does not start.
    for (other, remedy) in
        [(store(&scratch, "other"), "need the same one"), ("postgres".to_owned(), "set output.store")]
    {
        let mut command = cluster.command("api", "other")?;
        command.env(STORE, &other).env("CODELIA_API_LISTEN", "127.0.0.1:0");
        let refused = Process::finish(command, b"").await?;
        assert!(refused.code != Some(0) && refused.stderr.contains(remedy), "{}", refused.stderr);
    }

    // A store that fails keeps runs from ending; with it they end, with all output.
    let day = days(&scratch)?.pop().context("a day")?;
    fs::rename(&day, scratch.join("away"))?;
    fs::write(&day, b"")?;
    let stuck = client.start(shell(&session.name, SCRIPT)).await?;
    let worker = &cluster.workers[0].process;
    eventually("a failed write", || async { worker.read_log().contains("retrying").then_some(()) }).await;
    assert!(client.get_run(&stuck.name).await?.outcome.is_none());
    fs::remove_file(&day)?;
    fs::rename(scratch.join("away"), &day)?;
    let ended = client.watch_to_end(&stuck.name, 0).await?;
    assert_eq!((ended.outcome(), ended.stdout.len() + ended.stderr.len()), (Exited(0), 300_000));

    // A lost object is an error that names it.
    fs::remove_dir_all(&day)?;
    let status = client.watch_to_end(&run.name, 0).await.expect_err("the object is gone");
    let lost = refusal(&status);
    assert_eq!((lost.code, lost.reason.as_str()), (Code::DataLoss, "OUTPUT_DATA_LOST"));
    assert!(status.message().contains(run.name.rsplit('/').next().context("an id")?), "{status:?}");
    cluster.stop_processes().await?;
    cluster.end().await
}
