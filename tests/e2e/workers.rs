//! Workers start, drain and die; each run reaches exactly one outcome.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CreateSessionRequest, DrainWorkerRequest, ListWorkersRequest, Lost, Run, RunState,
    SessionEndReason, StartRunRequest, WorkerState,
    outcome::Kind::{self, Exited},
};
use codelia_tests::{Client, Cluster, ClusterOptions, eventually, shell, within};
use rustix::process::Signal;
use tonic::Code;

fn two_workers_one_root() -> ClusterOptions {
    ClusterOptions { workers: 2, shared_root: true, slots: 1, ..ClusterOptions::default() }
}

/// A run that waits for the file `go` in the session's directory.
struct Waiting {
    run: Run,
    directory: String,
}

/// Starts a waiting run. Returns when its output is stored.
async fn waiting(cluster: &Cluster, client: &Client, session: &str) -> Result<Waiting> {
    let run = client
        .start(shell(session, "pwd; until [ -e go ]; do sleep 0.05; done; echo done"))
        .await?;
    let mut stream = client.watch(&run.name, 0).await?;
    let mut seen = codelia_tests::Transcript::from_position(0);
    while seen.stdout.is_empty() {
        let event = within("the first output", stream.message()).await?.context("an event")?;
        seen.push(event.event.unwrap_or_default());
    }
    eventually("the output is stored", || async {
        let stored = cluster.database.number("SELECT count(*) FROM run_output").await.ok()?;
        (stored > 0).then_some(())
    })
    .await;
    let run = client.get_run(&run.name).await?;
    Ok(Waiting { run, directory: seen.stdout_text().trim().to_owned() })
}

async fn is_gone(operator: &Client, worker: &str) {
    eventually(("the worker is gone", worker), || async {
        let workers = operator
            .admin()
            .list_workers(ListWorkersRequest::default())
            .await
            .ok()?
            .into_inner()
            .workers;
        let found = workers.into_iter().find(|found| found.worker_id == worker)?;
        (found.state() == WorkerState::Gone).then_some(())
    })
    .await;
}

#[tokio::test]
async fn run_of_killed_worker_is_lost_and_stopped() -> Result<()> {
    let mut cluster = Cluster::start_with(two_workers_one_root()).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let Waiting { run, directory } = waiting(&cluster, &client, &session.name).await?;
    let dead = cluster.worker(&run.worker_id);
    dead.process.signal(Signal::KILL)?;
    dead.process.exited().await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Kind::Lost(Lost { reason: "worker_lost".into() }));
    assert_eq!(seen.stdout_text().trim(), directory, "earlier output is kept");

    // The session moves to another worker, with its files, under a higher epoch.
    let next = client.exec(&session.name, "touch go; echo here").await?;
    assert_eq!(next.outcome(), Exited(0));
    assert_ne!(next.run().worker_id, run.worker_id);
    assert!(next.assigned.context("assigned")?.lease_epoch > session.lease_epoch);
    crate::exec::nothing_works_in(&directory).await;
    cluster.end().await
}

#[tokio::test]
async fn queued_run_of_killed_worker_moves() -> Result<()> {
    let mut cluster = Cluster::start_with(two_workers_one_root()).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let first = waiting(&cluster, &client, &session.name).await?.run;
    let queued = client.start(shell(&session.name, "echo x | tee -a log")).await?;
    eventually("the second run waits for the slot", || async {
        (client.get_run(&queued.name).await.ok()?.state() == RunState::Queued).then_some(())
    })
    .await;
    let dead = cluster.worker(&first.worker_id);
    dead.process.signal(Signal::KILL)?;
    dead.process.exited().await?;
    let seen = client.watch_to_end(&queued.name, 0).await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("x\n", Exited(0)));
    assert_ne!(seen.run().worker_id, first.worker_id);
    assert_eq!(
        client.get_run(&first.name).await?.outcome.context("an outcome")?.kind,
        Some(Kind::Lost(Lost { reason: "worker_lost".into() }))
    );
    assert_eq!(
        client.exec(&session.name, "cat log").await?.stdout_text(),
        "x\n",
        "the run was executed once"
    );
    cluster.end().await
}

#[tokio::test]
async fn lost_run_is_retried_if_requested() -> Result<()> {
    let mut cluster = Cluster::start_with(two_workers_one_root()).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // The first attempt runs until it is killed, the second finds the file and exits.
    let script = "if [ -e tried ]; then echo again; else touch tried; echo up; exec sleep 100; fi";
    let run = client.start(StartRunRequest { retries: 1, ..shell(&session.name, script) }).await?;
    let holder = eventually("the first attempt has started", || async {
        let run = client.get_run(&run.name).await.ok()?;
        let begun = cluster
            .session_directories()
            .ok()?
            .iter()
            .any(|directory| directory.join("tried").exists());
        (run.state() == RunState::Running && begun).then_some(run.worker_id)
    })
    .await;
    cluster.worker(&holder).process.signal(Signal::KILL)?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(seen.outcome(), Exited(0));
    assert_eq!(seen.run().attempt, 2);
    assert!(seen.stdout_text().ends_with("again\n"));
    cluster.worker(&holder).process.exited().await?;
    cluster.end().await
}

#[tokio::test]
async fn terminated_worker_finishes_runs_and_releases_sessions() -> Result<()> {
    let settings = vec![("CODELIA_WORKER_DRAIN_GRACE", "60s".to_owned())];
    let mut cluster =
        Cluster::start_with(ClusterOptions { settings, ..two_workers_one_root() }).await?;
    let client = cluster.tenant("a").await?;
    let operator = cluster.operator().await?;
    let session = client.session().await?;
    let Waiting { run: running, directory } = waiting(&cluster, &client, &session.name).await?;
    let queued = client.start(shell(&session.name, "echo queued")).await?;
    let leaving = running.worker_id.clone();
    cluster.worker(&leaving).process.signal(Signal::TERM)?;
    eventually("the worker drains", || async {
        let workers = operator
            .admin()
            .list_workers(ListWorkersRequest::default())
            .await
            .ok()?
            .into_inner()
            .workers;
        let found = workers.into_iter().find(|found| found.worker_id == leaving)?;
        (found.state() == WorkerState::Draining).then_some(())
    })
    .await;

    // A new session goes elsewhere while the old one finishes.
    let other = client.session().await?;
    assert_ne!(client.exec(&other.name, "echo hi").await?.run().worker_id, leaving);
    std::fs::write(format!("{directory}/go"), "")?;

    let seen = client.watch_to_end(&running.name, 0).await?;
    assert!(seen.stdout_text().ends_with("\ndone\n") && seen.outcome() == Exited(0), "{seen:?}");
    assert_eq!(client.watch_to_end(&queued.name, 0).await?.stdout_text(), "queued\n");
    assert!(cluster.worker(&leaving).process.exited().await?.success());
    is_gone(&operator, &leaving).await;
    assert_ne!(client.exec(&session.name, "true").await?.run().worker_id, leaving);
    cluster.end().await
}

#[tokio::test]
async fn operator_can_drain_a_worker() -> Result<()> {
    let cluster = Cluster::start_with(two_workers_one_root()).await?;
    let client = cluster.tenant("a").await?;
    let operator = cluster.operator().await?;
    let session = client.session().await?;
    let holder = client.exec(&session.name, "echo x > file").await?.run().worker_id.clone();
    let drained = operator
        .admin()
        .drain_worker(DrainWorkerRequest { name: format!("workers/{holder}") })
        .await?;
    assert_eq!(drained.into_inner().worker.context("the worker")?.state(), WorkerState::Draining);
    let moved = eventually("the session moves", || async {
        let seen = client.exec(&session.name, "cat file").await.ok()?;
        (seen.run().worker_id != holder).then(|| seen.stdout_text())
    })
    .await;
    assert_eq!(moved, "x\n");
    cluster.end().await
}

#[tokio::test]
async fn run_survives_api_restart() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = waiting(&cluster, &client, &session.name).await?.run;
    let address = cluster.apis[0].address.clone();
    cluster.apis[0].process.terminate().await?;
    cluster.add_api_with(&[("CODELIA_API_LISTEN", &address)]).await?;
    let client = Client::connect(&cluster.endpoint(1), &client.secret).await?;
    assert_eq!(client.get_run(&run.name).await?.state(), RunState::Running);
    client.exec(&session.name, "touch go").await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert!(seen.stdout_text().ends_with("\ndone\n") && seen.outcome() == Exited(0), "{seen:?}");
    cluster.end().await
}

#[tokio::test]
async fn restarted_worker_reacquires_its_sessions() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let first = client.exec(&session.name, "echo kept > file").await?;
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    let seen = client.exec(&session.name, "cat file").await?;
    assert_eq!(seen.stdout_text(), "kept\n");
    let epoch = |seen: &codelia_tests::Transcript| {
        seen.assigned.as_ref().map(|assigned| assigned.lease_epoch)
    };
    assert!(epoch(&seen) > epoch(&first));
    cluster.end().await
}

#[tokio::test]
async fn retries_are_limited_to_the_requested_number() -> Result<()> {
    let mut cluster = Cluster::start_with(two_workers_one_root()).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "touch begun.$(ls | wc -l); exec sleep 1000";
    let run = client.start(StartRunRequest { retries: 1, ..shell(&session.name, script) }).await?;
    for attempt in ["begun.0", "begun.1"] {
        let holder = eventually(attempt, || async {
            let directories = cluster.session_directories().ok()?;
            let begun = directories.iter().any(|directory| directory.join(attempt).exists());
            begun.then_some(client.get_run(&run.name).await.ok()?.worker_id)
        })
        .await;
        let number =
            cluster.workers.iter().position(|worker| worker.id == holder).context("its worker")?;
        cluster.workers[number].process.signal(Signal::KILL)?;
        cluster.workers[number].process.exited().await?;
        cluster.restart_worker(number).await?;
    }
    let seen = client.watch_to_end(&run.name, 0).await?;
    assert_eq!(
        (seen.outcome(), seen.run().attempt),
        (Kind::Lost(Lost { reason: "worker_lost".into() }), 2)
    );
    assert_eq!(client.exec(&session.name, "ls").await?.stdout_text(), "begun.0\nbegun.1\n");
    cluster.end().await
}

#[tokio::test]
async fn session_with_lost_files_ends_as_data_lost() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let (used, unused) = (client.session().await?, client.session().await?);
    let discardable = client.create(may_start_empty()).await?;
    for session in [&used, &discardable] {
        client.exec(&session.name, "echo x > file").await?;
    }
    cluster.workers[0].process.terminate().await?;
    for directory in cluster.session_directories()? {
        std::fs::remove_dir_all(directory)?;
    }
    let run = client.start(shell(&used.name, "cat file")).await?;
    cluster.restart_worker(0).await?;
    let seen = client.watch_to_end(&run.name, 0).await?;
    let Kind::Refused(refused) = seen.outcome() else { panic!("{seen:?}") };
    assert_eq!(refused.reason, "SESSION_DATA_LOST");
    let answer = client.start(shell(&used.name, "true")).await.expect_err("the session has ended");
    let answer = codelia_tests::refusal(&answer);
    assert_eq!(
        (answer.code, answer.reason.as_str()),
        (Code::FailedPrecondition, "SESSION_DATA_LOST")
    );
    assert_eq!(client.get_session(&used.name).await?.end_reason(), SessionEndReason::DataLost);
    // A session without runs has lost nothing.
    assert_eq!(client.exec(&unused.name, "echo hi").await?.outcome(), Exited(0));
    // A session that allows data loss restarts empty.
    assert_eq!(client.exec(&discardable.name, "ls; echo hi").await?.stdout_text(), "hi\n");
    cluster.end().await
}

fn may_start_empty() -> CreateSessionRequest {
    CreateSessionRequest { allow_data_loss: true, ..Default::default() }
}

#[tokio::test]
async fn session_restarts_empty_only_if_data_loss_allowed() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let (client, operator) = (cluster.tenant("a").await?, cluster.operator().await?);
    let (kept, discardable) = (client.session().await?, client.create(may_start_empty()).await?);
    for session in [&kept, &discardable] {
        client.exec(&session.name, "echo x > file").await?;
    }
    assert!(discardable.allow_data_loss && !kept.allow_data_loss);
    cluster.add_worker().await?;
    cluster.workers[0].process.signal(Signal::KILL)?;
    cluster.workers[0].process.exited().await?;
    is_gone(&operator, "worker-0").await;
    // The worker may still return, so the run waits.
    let waiting = client.start(shell(&kept.name, "cat file")).await?;
    let long_ago =
        "UPDATE workers SET heartbeat_at = now() - interval '2 minutes' WHERE id = 'worker-0';
                    UPDATE upkeep_owner SET watching_since = now() - interval '2 minutes'";
    cluster.database.execute(long_ago).await?;

    let seen = client.exec(&discardable.name, "ls; echo new > other").await?;
    assert_eq!((seen.stdout_text().as_str(), seen.run().worker_id.as_str()), ("", "worker-1"));
    let answer =
        client.start(shell(&kept.name, "true")).await.expect_err("no worker has its files");
    let answer = codelia_tests::refusal(&answer);
    assert_eq!(
        (answer.code, answer.reason.as_str()),
        (Code::FailedPrecondition, "SESSION_DATA_LOST")
    );

    // The returning worker serves the kept session and drops the discarded one.
    cluster.restart_worker(0).await?;
    assert_eq!(client.watch_to_end(&waiting.name, 0).await?.stdout_text(), "x\n");
    assert_eq!(client.exec(&kept.name, "cat file").await?.stdout_text(), "x\n");
    assert_eq!(client.exec(&discardable.name, "ls").await?.stdout_text(), "other\n");
    let left = cluster.workers[0].root.join("sessions").join(&discardable.session_id);
    eventually("the discarded files are removed", || async { (!left.exists()).then_some(()) })
        .await;
    cluster.end().await
}

#[tokio::test]
async fn run_waits_when_no_worker_exists() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "true").await?;
    cluster.workers[0].process.terminate().await?;
    let run = client.start(shell(&session.name, "echo late")).await?;
    assert_eq!(run.state(), RunState::Queued);
    cluster.restart_worker(0).await?;
    assert_eq!(client.watch_to_end(&run.name, 0).await?.stdout_text(), "late\n");
    cluster.end().await
}

#[tokio::test]
async fn session_ended_during_worker_downtime_is_removed() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let ttl = Some(codelia_proto::duration_to_proto(Duration::from_secs(600)));
    let session = client.create(CreateSessionRequest { ttl, ..Default::default() }).await?;
    client.exec(&session.name, "echo x > file").await?;
    cluster.workers[0].process.terminate().await?;
    client.close(&session.name).await?;
    assert_eq!(cluster.session_directories()?.len(), 1);
    cluster.restart_worker(0).await?;
    eventually("the directory is removed", || async {
        cluster.session_directories().ok()?.is_empty().then_some(())
    })
    .await;
    cluster.end().await
}

#[tokio::test]
async fn new_sessions_prefer_workers_with_lower_numbers() -> Result<()> {
    let mut holders = Vec::new();
    for placement in ["lowest_number", "spread"] {
        let settings = vec![("CODELIA_API_PLACEMENT", placement.to_owned())];
        let shape = ClusterOptions { workers: 2, settings, ..ClusterOptions::default() };
        let cluster = Cluster::start_with(shape).await?;
        let client = cluster.tenant("a").await?;
        let mut found = std::collections::BTreeSet::new();
        for _ in 0..30 {
            found.insert(client.session().await?.worker_id);
        }
        holders.push(found.into_iter().collect::<Vec<_>>());
        cluster.end().await?;
    }
    assert_eq!(
        holders,
        [vec!["worker-0"], vec!["worker-0", "worker-1"]],
        "the control: both have some"
    );
    Ok(())
}
