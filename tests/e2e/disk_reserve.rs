//! A disk that really falls below the reserve of its worker while a run grows. Postgres is on it
//! too.

use std::fs::File;

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{LimitExceeded, RemoveFileRequest, outcome::Kind};
use codelia_store::LocalPostgres;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Database, Exec, Scratch, SmallDisk, eventually, refusal,
    shell, within,
};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tonic::{Code, Status};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 1024 * MIB;
const RESERVE_MB: u64 = 200;
/// What can be written before the disk is short.
const ROOM_MB: u64 = 96;

/// Writes at most 50 MiB a second, until it is stopped.
const GROW: &str = "while :; do head -c 1048576 /dev/zero >> filler; sleep 0.02; done";
/// Writes a line 20 times a second, until it is allowed to end.
const LOG: &str = "until [ -e done ]; do echo line >> log; sleep 0.05; done; echo survived";

fn free_bytes(disk: &SmallDisk) -> Result<u64> {
    let found = statvfs(disk.path())?;
    Ok(found.f_bavail * found.f_frsize)
}

/// An installation whose sessions and database are on one disk, which is almost full.
async fn cluster_on(disk: &SmallDisk, server: &LocalPostgres) -> Result<Cluster> {
    let options = ClusterOptions { workers: 0, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(Database::on(server).await?, options).await?;
    let ballast = free_bytes(disk)? - (RESERVE_MB + ROOM_MB) * MIB;
    fallocate(File::create(disk.path().join("ballast"))?, FallocateFlags::empty(), 0, ballast)?;
    let (root, reserve) =
        (disk.path().join("root").display().to_string(), format!("{RESERVE_MB} MiB"));
    let settings =
        [("CODELIA_SANDBOX_ROOT", root.as_str()), ("CODELIA_WORKER_DISK_RESERVE", &reserve)];
    cluster.add_worker_with(&settings).await?;
    Ok(cluster)
}

/// The lines that a run has written to its log.
async fn lines(client: &Client, session: &str) -> Result<usize, Status> {
    Ok(client.get(session, "log").await?.lines().count())
}

/// Whether a new run, and a call that writes a file, are refused for the reserve.
async fn are_refused(client: &Client, session: &str) -> Result<()> {
    let refused = client.exec(session, "true").await?.outcome();
    let Kind::Refused(refused) = refused else { anyhow::bail!("{refused:?}") };
    ensure!(refused.reason == "DISK_FULL", "{refused:?}");
    ensure!(refused.message.contains("disk_reserve") && refused.message.contains("codelia rm"));
    let put = client.put(session, "more", "text").await.err().context("no space")?;
    let put = refusal(&put);
    ensure!((put.code, put.reason.as_str()) == (Code::ResourceExhausted, "DISK_FULL"), "{put:?}");
    Ok(())
}

#[tokio::test]
async fn grower_leaves_the_reserve_to_others() -> Result<()> {
    let place = Scratch::new()?;
    let Some(disk) = SmallDisk::ext4(&place.join("disk"), DISK_BYTES, 0)? else { return Ok(()) };
    let server = LocalPostgres::start_throwaway(&disk.path().join("postgres")).await?;
    let cluster = cluster_on(&disk, &server).await?;
    let (grower, neighbour) = (cluster.tenant("grower").await?, cluster.tenant("neighbour").await?);
    let (growing, other) = (grower.session().await?.name, neighbour.session().await?.name);
    // The control: with enough free, both may write.
    for (client, session) in [(&grower, &growing), (&neighbour, &other)] {
        let written = client.exec(session, "head -c 8388608 /dev/zero > eight && rm eight").await?;
        ensure!(written.outcome() == Kind::Exited(0), "{written:?}");
        client.put(session, "small", "text").await?;
    }
    let mut steady = Exec::start(&neighbour, shell(&other, LOG)).await?;
    steady.until_started().await?;

    let stopped = within("the grower is stopped", grower.exec(&growing, GROW)).await?.outcome();
    ensure!(stopped == Kind::Limit(LimitExceeded { resource: "disk_bytes".into() }), "{stopped:?}");
    let free_mb = free_bytes(&disk)? / MIB;
    println!("reserve {RESERVE_MB} MiB, free {free_mb} MiB");
    ensure!(free_mb < RESERVE_MB, "the control: the disk is short: {free_mb} MiB");
    ensure!(free_mb > RESERVE_MB / 2, "most of the reserve is left: {free_mb} MiB");
    are_refused(&grower, &growing).await?;
    are_refused(&neighbour, &other).await?;

    // What was running and writes little continues, and the database may use the reserve.
    let before = lines(&neighbour, &other).await?;
    let more = || async {
        lines(&neighbour, &other).await.is_ok_and(|now| now > before + 10).then_some(())
    };
    eventually("the neighbour writes to its log", more).await;
    let fill = "CREATE TABLE filler AS SELECT repeat('x', 1000) FROM generate_series(1, 8000)";
    cluster.database.execute(fill).await?;

    // What the grower removes is room again, for everyone.
    let request =
        RemoveFileRequest { parent: growing.clone(), path: "filler".into(), recursive: false };
    grower.files().remove_file(request).await?;
    cluster.database.execute("DROP TABLE filler; CHECKPOINT").await?;
    eventually("there is room", || async { neighbour.put(&other, "done", "").await.ok() }).await;
    ensure!(steady.finish().await?.stdout_text() == "survived\n");
    ensure!(grower.exec(&growing, "cat small").await?.stdout_text() == "text");
    cluster.end().await?;
    server.stop().await?;
    Ok(())
}
