//! A standby that is promoted although it misses the last lease: the worker that holds the lease
//! must stop its command before another command runs in the session.

use anyhow::{Result, ensure};
use codelia_proto::v1::{Outcome, RunState, StartRunRequest, outcome::Kind};
use sqlx::Connection;

use super::{
    database::{Replication, TestDatabase},
    plan::Fault,
};
use crate::{Client, Cluster, ClusterOptions, eventually, shell};

/// Longer than a promotion takes, so that only the fence can end leases.
const LEASE: &str = "8s";
const REMOVE_FENCE: &str =
    "DROP TRIGGER check_identity ON workers; DROP TRIGGER check_identity ON sessions;";
const SELECT_EPOCH: &str = "SELECT lease_epoch FROM sessions";

/// What happened to a session whose lease was lost.
#[derive(Debug)]
pub struct LostWindow {
    /// The epoch of the lease that the standby missed.
    pub lost_epoch: i64,
    /// The epoch of the next lease.
    pub new_epoch: i64,
    /// Whether the command under the lost lease wrote after the one under the next lease began.
    pub overlaps: bool,
}

/// Promotes a standby that misses a lease. Without the fence, it shows what the fence prevents.
///
/// # Errors
/// If the harness fails.
pub async fn promote_lagging_standby(is_fenced: bool) -> Result<LostWindow> {
    let (mut database, empty) =
        TestDatabase::start_with(&[Fault::Failover], Replication::Asynchronous).await?;
    let options =
        ClusterOptions { apis: 1, workers: 0, shared_root: true, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_on(empty, options).await?;
    for _ in 0..2 {
        cluster.add_worker_with(&[("CODELIA_WORKER_LEASE_TTL", LEASE)]).await?;
    }
    if !is_fenced {
        cluster.database.execute(REMOVE_FENCE).await?;
    }
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    client.exec(&session, "true").await?;
    let mut connection = cluster.database.connection().await?;
    let holder: String =
        sqlx::query_scalar("SELECT lease_worker FROM sessions").fetch_one(&mut connection).await?;
    connection.close().await?;
    database.stall_replication().await?;

    // The session moves to the other worker, which the standby does not learn.
    let status = cluster.worker(&holder).process.terminate().await?;
    ensure!(status.success(), "{status}");
    client.start(shell(&session, "while :; do echo old >> lines; sleep 0.05; done")).await?;
    eventually("the command writes", || async { client.get(&session, "lines").await.ok() }).await;
    let lost_epoch = cluster.database.number(SELECT_EPOCH).await?;

    database.start_fault(Fault::Failover, 0).await?;
    database.end_fault(Fault::Failover).await?;
    run_to_end(
        &client,
        &session,
        "for i in 1 2 3 4 5 6 7 8 9; do echo new >> lines; sleep 0.1; done",
    )
    .await?;
    let new_epoch = cluster.database.number(SELECT_EPOCH).await?;
    let lines =
        eventually("the lines", || async { client.get(&session, "lines").await.ok() }).await;
    let overlaps = lines.lines().skip_while(|line| *line == "old").any(|line| line == "old");
    eventually("the session is closed", || async { client.close(&session).await.ok() }).await;
    cluster.end().await?;
    database.end().await?;
    Ok(LostWindow { lost_epoch, new_epoch, overlaps })
}

/// Runs a script as soon as the database answers again.
async fn run_to_end(client: &Client, session: &str, script: &str) -> Result<()> {
    // The promoted standby may assign it to the holder that it knows, which is gone.
    let request = StartRunRequest { retries: 3, ..shell(session, script) };
    let start = || async { client.start(request.clone()).await.ok() };
    let run = eventually("an api accepts the run", start).await;
    let ended = || async {
        let run = client.get_run(&run.name).await.ok()?;
        (run.state() == RunState::Ended).then_some(run)
    };
    let outcome = eventually("the run ends", ended).await.outcome;
    ensure!(matches!(outcome, Some(Outcome { kind: Some(Kind::Exited(0)) })), "{outcome:?}");
    Ok(())
}
