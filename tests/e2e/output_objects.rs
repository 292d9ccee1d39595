//! Large output in a directory instead of the database.

use std::fs;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    Lost,
    outcome::Kind::{self, Exited},
};
use codelia_store::{LocalPostgres, OutputLocation, OutputOptions, Retention};
use codelia_tests::{
    Cluster, ClusterOptions, Database, Process, Proxy, ProxyMode, Scratch, eventually, refusal,
    shell,
};
use codelia_types::ByteSize;
use rustix::process::Signal;
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

/// How many objects the store has.
fn objects(scratch: &Scratch) -> Result<usize> {
    days(scratch)?.iter().map(|day| Ok(fs::read_dir(day)?.count())).sum()
}

#[tokio::test]
async fn large_output_is_kept_outside_the_database() -> Result<()> {
    let scratch = Scratch::new()?;
    let settings =
        vec![(STORE, store(&scratch, "output")), ("CODELIA_OUTPUT_INLINE", "16 KiB".to_owned())];
    let mut cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;

    // Large output is in objects, small output in rows.
    let run = client.start(shell(&session.name, SCRIPT)).await?;
    let live = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(
        (live.outcome(), live.stdout.len(), live.stderr.len()),
        (Exited(0), 200_000, 100_000)
    );
    let in_rows = "SELECT coalesce(sum(octet_length(data)), 0)::bigint FROM run_output";
    assert!(cluster.database.number(in_rows).await? < 50_000);
    let small = client.exec(&session.name, "echo small").await?;
    assert_eq!(small.stdout, b"small\n");

    // A watch, the CLI and a watch from the middle read the same bytes.
    let again = client.watch_to_end(&run.name, 0).await?;
    assert!(again.stdout == live.stdout && again.stderr == live.stderr);
    let logs =
        tokio::process::Command::from(cluster.cli(&client, &["logs", &run.name])).output().await?;
    assert!(logs.stdout == live.stdout && logs.stderr == live.stderr);
    let rest = client.watch_to_end(&run.name, 123_456).await?;
    assert!(live.stdout.ends_with(&rest.stdout) && live.stderr.ends_with(&rest.stderr));
    assert_eq!(rest.stdout.len() + rest.stderr.len(), 300_000 - 123_456);

    // A process with another store does not start.
    for (other, remedy) in [
        (store(&scratch, "other"), "need the same one"),
        ("postgres".to_owned(), "set output.store"),
    ] {
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
    eventually("a failed write", || async { worker.read_log().contains("retrying").then_some(()) })
        .await;
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

const IN_OBJECTS: &str = "SELECT count(DISTINCT object) FROM run_output WHERE object IS NOT NULL";

/// Makes `now()` of new connections a year late.
fn year_later(database: &str) -> String {
    format!(
        "CREATE SCHEMA later;
         CREATE FUNCTION later.now() RETURNS timestamptz LANGUAGE sql STABLE
             AS $$ SELECT pg_catalog.now() + interval '1 year' $$;
         ALTER DATABASE {database} SET search_path = later, public, pg_catalog"
    )
}

/// `kill -9` of a worker between the object that it writes and the row that names it: the worker
/// does not reach the database from before the output to its end.
#[tokio::test]
async fn object_of_killed_worker_is_not_read_and_is_removed() -> Result<()> {
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let settings = vec![
        (STORE, store(&scratch, "output")),
        ("CODELIA_OUTPUT_INLINE", "16 KiB".to_owned()),
        // The lease outlasts the outage.
        ("CODELIA_WORKER_LEASE_TTL", "60s".to_owned()),
    ];
    let shape = ClusterOptions { workers: 0, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(Database::on(&server).await?, shape).await?;
    let proxy = Proxy::start(&scratch.join("postgres"), &[])?;
    let url = format!("postgres://codelia@127.0.0.1:{}/{}", proxy.port(), cluster.database.name());
    cluster.add_worker_with(&[("CODELIA_DATABASE_URL", &url)]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let kept = client.exec(&session.name, SCRIPT).await?;
    let before = cluster.database.number(IN_OBJECTS).await?;
    assert!(before > 0 && objects(&scratch)? == usize::try_from(before)?);

    let script =
        format!("touch begun; until [ -e go ]; do sleep 0.02; done; {SCRIPT}; exec sleep 1000");
    let run = client.start(shell(&session.name, &script)).await?;
    let directories = cluster.session_directories()?;
    eventually("the command has started", || async {
        directories.iter().any(|directory| directory.join("begun").exists()).then_some(())
    })
    .await;
    proxy.set(ProxyMode::Closed);
    for directory in &directories {
        fs::write(directory.join("go"), "")?;
    }
    eventually("an object without a row", || async {
        (objects(&scratch).ok()? > usize::try_from(before).ok()?).then_some(())
    })
    .await;
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    assert_eq!(cluster.database.number(IN_OBJECTS).await?, before);

    proxy.set(ProxyMode::Open);
    cluster.restart_worker(0).await?;
    let lost = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(
        (lost.outcome(), lost.stdout.len() + lost.stderr.len()),
        (Kind::Lost(Lost { reason: "worker_lost".into() }), 0)
    );
    let again = client.watch_to_end(&kept.run().name, 0).await?;
    assert!(again.stdout == kept.stdout && again.stderr == kept.stderr);

    // Objects are swept when their day is over.
    cluster.stop_processes().await?;
    let sweep = async || -> Result<usize> {
        let location = OutputLocation::Directory(scratch.join("output"));
        let output = OutputOptions {
            store: Some(location),
            inline: ByteSize::kib(16),
            ..OutputOptions::default()
        };
        let later = cluster.database.store().await?.with_output(&output).await?;
        while later.output_objects_purge_any_tenant(&Retention::default()).await? {}
        later.close().await;
        objects(&scratch)
    };
    assert!(sweep().await? > usize::try_from(before)?, "today");
    cluster.database.execute(&year_later(cluster.database.name())).await?;
    assert_eq!(sweep().await?, usize::try_from(before)?, "what rows name stays");
    cluster.end().await?;
    server.stop().await?;
    drop(scratch);
    Ok(())
}
