//! Draining: the worker takes nothing new, loses no run, and releases its sessions.

use std::time::Duration;

use codelia_store::{DrainedBy, RunState, WorkerState};
use codelia_tests::eventually;
use codelia_types::Outcome;

use crate::fixture::{Fixture, Settings, shell};

#[tokio::test]
async fn draining_worker_finishes_runs_and_releases_sessions() {
    let mut fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 0.5; exit 5")).await;
    fixture.shut_down().await;
    assert_eq!(fixture.row(run).await.outcome, Some(Outcome::Exited(5)));
    assert_eq!(fixture.holder(session).await, None);
    assert!(fixture.directory(session).exists(), "its files stay for the next worker");
    let workers = fixture.store.worker_list(None, 10).await.unwrap();
    assert_eq!(workers[0].state, WorkerState::Gone);
    fixture.end().await;
}

#[tokio::test]
async fn run_beyond_drain_grace_is_canceled() {
    let settings = Settings { drain_grace: Duration::from_millis(100), ..Settings::default() };
    let mut fixture = Fixture::new(settings).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 1000")).await;
    fixture.shut_down().await;
    assert_eq!(fixture.row(run).await.outcome, Some(Outcome::Canceled));
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
