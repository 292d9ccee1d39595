//! Draining: the worker takes nothing new, loses no run, and releases its sessions.

use std::time::Duration;

use codelia_store::{DrainedBy, RunState, WorkerState};
use codelia_tests::eventually;
use codelia_types::{LostReason, Outcome};

use crate::fixture::{Fixture, Settings, shell};

#[tokio::test]
async fn draining_worker_finishes_runs_and_releases_sessions() {
    let mut fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 0.5; exit 5")).await;
    fixture.shut_down().await;
    assert_eq!(fixture.row(run).await.outcome(), Some(&Outcome::Exited(5)));
    assert_eq!(fixture.holder(session).await, None);
    assert!(fixture.directory(session).exists(), "its files stay for the next worker");
    let workers = fixture.store.worker_list(None, 10).await.unwrap();
    assert_eq!(workers[0].state, WorkerState::Gone);
    fixture.end().await;
}

#[tokio::test]
async fn run_beyond_drain_grace_is_lost_with_reason() {
    let settings = Settings { drain_grace: Duration::from_millis(100), ..Settings::default() };
    let mut fixture = Fixture::new(settings).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 1000")).await;
    fixture.shut_down().await;
    assert_eq!(fixture.row(run).await.outcome(), Some(&Outcome::Lost(LostReason::DrainDeadline)));
    fixture.end().await;
}

#[tokio::test]
async fn operator_drain_releases_sessions_and_stops_runs() {
    let settings = Settings { lease_ttl: Duration::from_secs(3), ..Settings::default() };
    let fixture = Fixture::new(settings).await;
    let session = fixture.held_session().await;
    fixture.store.worker_drain(&fixture.worker, DrainedBy::Operator).await.unwrap();
    let released = || async { fixture.holder(session).await.is_none().then_some(()) };
    eventually("the session is released", released).await;
    let (run, _) = fixture.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Queued);
    fixture.end().await;
}

/// Nobody tells the worker of the run: it reads the request to drain only with its heartbeat, after
/// it was taken back.
#[tokio::test]
async fn run_queued_in_unnoticed_drain_is_found() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    fixture.store.worker_drain(&fixture.worker, DrainedBy::Operator).await.unwrap();
    let (run, _) = fixture.record(session, &shell("exit 3")).await;
    assert_eq!(run.state, RunState::Queued);
    fixture.store.worker_undrain(&fixture.worker).await.unwrap();
    assert_eq!(fixture.ended(run.id).await.outcome(), Some(&Outcome::Exited(3)));
    assert_eq!(fixture.holder(session).await.as_ref(), Some(&fixture.worker));
    fixture.end().await;
}

/// The worker keeps no session that it began to release during a drain that was taken back.
#[tokio::test]
async fn release_that_failed_is_finished_after_undrain() {
    const LOCK: &str = "BEGIN; SELECT id FROM sessions FOR UPDATE; SELECT pg_sleep(1000)";
    const BLOCKED: &str = "SELECT count(*) FROM pg_stat_activity
                           WHERE datname = current_database() AND wait_event_type = 'Lock'";
    const END: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                       WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let settings = Settings { lease_ttl: Duration::from_secs(6), ..Settings::default() };
    let fixture = Fixture::new(settings).await;
    let session = fixture.held_session().await;
    let beat = async || fixture.store.worker_list(None, 10).await.unwrap()[0].heartbeat_at;
    let fail_release = async {
        fixture.store.worker_drain(&fixture.worker, DrainedBy::Operator).await.unwrap();
        let is_blocked =
            async || (fixture.database.number(BLOCKED).await.unwrap() > 0).then_some(());
        eventually("the release waits", is_blocked).await;
        fixture.store.worker_undrain(&fixture.worker).await.unwrap();
        let before = beat().await;
        eventually("the worker knows", async || (beat().await > before).then_some(())).await;
        for which in ["wait_event_type = 'Lock'", "query LIKE '%pg_sleep%'"] {
            fixture.database.execute(&format!("{END} AND {which}")).await.unwrap();
        }
    };
    let (locked, ()) = tokio::join!(fixture.database.execute(LOCK), fail_release);
    locked.unwrap_err();
    let (run, _) = fixture.record(session, &shell("exit 3")).await;
    assert_eq!(fixture.ended(run.id).await.outcome(), Some(&Outcome::Exited(3)));
    fixture.end().await;
}
