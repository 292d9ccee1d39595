//! Changes that wait for a decision: applied or dropped as a whole, also when the worker is killed
//! or another one takes the session.

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    ApplyChangesRequest, ChangesState, DiscardChangesRequest, Run, StartRunRequest,
    TransactionMode, outcome,
};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Process, eventually, recorded_events, refusal, shell,
};
use rustix::process::Signal;
use tonic::{Code, Status};

use crate::{
    isolation::{is_usable, isolating},
    kills::started,
    transactions::{changes, nothing_is_left, run},
};

const HOLDS: &str = "SESSION_HOLDS_CHANGES";
const NOT_HELD: &str = "CHANGES_NOT_HELD";

fn held(session: &str, script: &str) -> StartRunRequest {
    StartRunRequest { transaction: TransactionMode::Hold.into(), ..shell(session, script) }
}

/// A run whose changes are dropped after a second.
fn held_shortly(session: &str, script: &str) -> StartRunRequest {
    let hold_timeout = Some(prost_types::Duration { seconds: 1, nanos: 0 });
    StartRunRequest { hold_timeout, ..held(session, script) }
}

async fn apply(client: &Client, run: &Run) -> Result<Run, Status> {
    let request = ApplyChangesRequest { name: run.name.clone() };
    Ok(client.runs().apply_changes(request).await?.into_inner().run.unwrap_or_default())
}

async fn discard(client: &Client, run: &Run) -> Result<Run, Status> {
    let request = DiscardChangesRequest { name: run.name.clone() };
    Ok(client.runs().discard_changes(request).await?.into_inner().run.unwrap_or_default())
}

fn reason(result: Result<Run, Status>) -> Result<String> {
    Ok(refusal(&result.err().context("refused")?).reason)
}

fn state(run: &Run) -> Result<ChangesState> {
    Ok(changes(run)?.state())
}

/// Waits until the changes of a run have this state.
async fn becomes(client: &Client, run: &Run, wanted: ChangesState) {
    let has_it = || async {
        let found = client.get_run(&run.name).await.ok()?;
        (found.changes?.state() == wanted).then_some(())
    };
    eventually("the changes are decided about", has_it).await;
}

/// Waits until a run ended as refused because of the changes that its session holds.
async fn is_refused(client: &Client, run: &Run) -> Result<()> {
    let ended = client.watch_to_end(&run.name, 0).await?;
    match ended.outcome() {
        outcome::Kind::Refused(refused) if refused.reason == HOLDS => Ok(()),
        other => anyhow::bail!("{other:?}"),
    }
}

async fn kill_worker(cluster: &mut Cluster) -> Result<()> {
    let process = &mut cluster.workers[0].process;
    process.signal(Signal::KILL)?;
    process.exited().await?;
    Ok(())
}

/// How many decisions are recorded: by a key, and because of the time.
async fn decisions(cluster: &Cluster) -> Result<(usize, usize)> {
    let events =
        recorded_events(&cluster.store, &"a".parse()?, Some(EventKind::ChangesDecided)).await?;
    let by_key = events.iter().filter(|event| event.subject.key.is_some()).count();
    Ok((by_key, events.len() - by_key))
}

#[tokio::test]
async fn held_changes_wait_for_decision() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    client.put(&session, "file", "1\n").await?;
    let script = "echo 2 > file; echo 2 > new; sleep 1";
    let first = client.start(held(&session, script)).await?;
    started(&client, &first.name).await?;
    // It waits for the first one, whose changes then keep it from the workspace.
    let waiting = client.start(shell(&session, "echo 3 > file")).await?;
    client.watch_to_end(&first.name, 0).await?;
    is_refused(&client, &waiting).await?;
    let first = client.get_run(&first.name).await?;
    ensure!(
        state(&first)? == ChangesState::Held && changes(&first)?.expire_time.is_some(),
        "{first:?}"
    );

    // Files may be read, and nothing may change them.
    ensure!(client.get(&session, "file").await? == "1\n");
    let refused = client.put(&session, "file", "3\n").await.err().context("refused")?;
    ensure!(
        (refused.code(), refusal(&refused).reason.as_str()) == (Code::FailedPrecondition, HOLDS)
    );
    for request in [shell(&session, "echo 3 > file"), held(&session, "true")] {
        is_refused(&client, &client.start(request).await?).await?;
    }

    ensure!(state(&apply(&client, &first).await?)? == ChangesState::Applied);
    ensure!(client.exec(&session, "cat file new").await?.stdout_text() == "2\n2\n");
    ensure!(state(&apply(&client, &first).await?)? == ChangesState::Applied, "again");
    ensure!(reason(discard(&client, &first).await)? == NOT_HELD);

    let second = run(&client, held(&session, "rm file; echo 3 > new")).await?;
    ensure!(state(&discard(&client, &second).await?)? == ChangesState::Dropped);
    ensure!(state(&discard(&client, &second).await?)? == ChangesState::Dropped, "again");
    ensure!(reason(apply(&client, &second).await)? == NOT_HELD);
    ensure!(client.exec(&session, "cat file new").await?.stdout_text() == "2\n2\n");

    let failed = run(&client, held(&session, "rm file; exit 1")).await?;
    ensure!(state(&failed)? == ChangesState::Dropped, "only a success is held");
    let plain = run(&client, shell(&session, "true")).await?;
    ensure!(reason(apply(&client, &plain).await)? == NOT_HELD);
    ensure!(decisions(&cluster).await? == (2, 0));
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn held_changes_end_with_time_or_session() -> Result<()> {
    let Some(mut cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let expired = run(&client, held_shortly(&session, "echo > file")).await?;
    becomes(&client, &expired, ChangesState::Dropped).await;
    ensure!(client.exec(&session, "ls").await?.stdout_text().is_empty());
    // Also without a worker: the next one drops them before anyone uses the session.
    let alone = run(&client, held_shortly(&session, "echo > file")).await?;
    kill_worker(&mut cluster).await?;
    let expired = "SELECT count(*) FROM held_changes WHERE expires_at <= now()";
    let is_expired = || async { (cluster.database.number(expired).await.ok()? == 1).then_some(()) };
    eventually("the changes expire", is_expired).await;
    cluster.restart_worker(0).await?;
    becomes(&client, &alone, ChangesState::Dropped).await;
    nothing_is_left(&cluster).await;
    ensure!(decisions(&cluster).await? == (0, 2));

    let closed = run(&client, held(&session, "echo > file")).await?;
    ensure!(state(&closed)? == ChangesState::Held);
    client.close(&session).await?;
    // The worker drops them at any time from now on.
    let refused = reason(apply(&client, &closed).await)?;
    ensure!(refused == "SESSION_ENDED" || refused == NOT_HELD, "{refused}");
    becomes(&client, &closed, ChangesState::Dropped).await;
    ensure!(reason(apply(&client, &closed).await)? == NOT_HELD);
    ensure!(cluster.database.number("SELECT count(*) FROM held_changes").await? == 0);
    cluster.end().await
}

#[tokio::test]
async fn held_changes_move_with_their_session() -> Result<()> {
    let settings = vec![("CODELIA_SANDBOX_MODE", "bwrap".to_owned())];
    let options =
        ClusterOptions { workers: 0, shared_root: true, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(options).await?;
    if !is_usable(&cluster, "bwrap").await? {
        return cluster.end().await;
    }
    cluster.add_worker().await?;
    let client = cluster.tenant("a").await?;
    let sessions = [client.session().await?.name, client.session().await?.name];
    let mut runs = Vec::new();
    for session in &sessions {
        runs.push(run(&client, held(session, "echo 1 > file")).await?);
    }
    kill_worker(&mut cluster).await?;
    cluster.add_worker().await?;
    // Before anyone has decided, the next worker refuses what would change the files.
    let change = StartRunRequest { retries: 1, ..shell(&sessions[0], "echo 2 > file") };
    let refused = client.start(change).await?;
    is_refused(&client, &refused).await?;
    ensure!(state(&apply(&client, &runs[0]).await?)? == ChangesState::Applied);
    ensure!(state(&discard(&client, &runs[1]).await?)? == ChangesState::Dropped);
    for (session, expected) in sessions.iter().zip(["1\n", ""]) {
        let seen = client.exec(session, "cat file 2>/dev/null || true").await?.stdout_text();
        ensure!(seen == expected, "{seen}");
    }
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn cli_applies_and_discards_held_changes() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let codelia = |arguments: &[&str]| Process::finish(cluster.cli(&client, arguments), b"");
    let refused = codelia(&["run", "--hold", "--", "true"]).await?;
    ensure!(refused.code != Some(0) && refused.stderr.contains("--session"), "{refused:?}");
    ensure!(codelia(&["session", "create", "--alias", "work"]).await?.code == Some(0));
    for (command, word) in [("apply", "applied"), ("discard", "dropped")] {
        let hold = [
            "run",
            "--json",
            "-s",
            "work",
            "--transactional",
            "--hold",
            "--",
            "sh",
            "-c",
            "date > file",
        ];
        let record: serde_json::Value = serde_json::from_str(&codelia(&hold).await?.stdout)?;
        ensure!(
            record["transaction"] == "TRANSACTION_MODE_HOLD"
                && record["changes"]["state"] == "CHANGES_STATE_HELD",
            "{record}"
        );
        let id = record["runId"].as_str().context("runId")?;
        let diff = codelia(&["diff", id]).await?;
        ensure!(diff.stdout.contains("file") && diff.stderr.contains("held: "), "{diff:?}");
        let busy = codelia(&["run", "-s", "work", "--", "true"]).await?;
        ensure!(
            busy.code != Some(0) && busy.stderr.contains(&format!("codelia apply {id}")),
            "{busy:?}"
        );
        let decided = codelia(&[command, id]).await?;
        ensure!(decided.code == Some(0) && decided.stderr.contains(word), "{decided:?}");
    }
    cluster.end().await
}
