//! Queued runs: why they wait, and their end after the queue timeout.

use std::time::Duration;

use codelia_store::{DiskSpace, DrainedBy, RunState, WaitReason};
use codelia_tests::eventually;
use codelia_types::{Mode, Outcome, Reason};

use crate::harness::Fixture;

#[tokio::test]
async fn wait_reason_names_what_is_missing() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let run = fixture.insert(session.id, 0).await;
    let reason = || async { fixture.store.run_wait_reason(run).await.unwrap() };
    assert_eq!(reason().await, Some(WaitReason::NoWorker));
    fixture.worker_with("other", vec![Mode::Bwrap], 1).await;
    assert_eq!(reason().await, Some(WaitReason::NoMode(Mode::Logical)));
    let worker = fixture.worker_with("w", vec![Mode::Logical], 1).await;
    assert_eq!(reason().await, Some(WaitReason::Starting));
    fixture
        .store
        .worker_renew(&worker.id, worker.incarnation, Duration::from_secs(60), 1)
        .await
        .unwrap();
    assert_eq!(reason().await, Some(WaitReason::Busy));
    fixture.store.worker_drain(&worker.id, DrainedBy::Operator).await.unwrap().unwrap();
    assert_eq!(reason().await, Some(WaitReason::Draining));
    let space = DiskSpace { free: 1, reserve: 2, is_short: true };
    fixture.store.worker_report_disk(&worker.id, worker.incarnation, space).await.unwrap();
    assert_eq!(reason().await, Some(WaitReason::NoSpace));
    fixture.end().await;
}

#[tokio::test]
async fn run_ends_after_its_queue_timeout() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let patient = fixture.insert(session.id, 0).await;
    let run = fixture.insert_waiting(session.id, Duration::from_millis(1)).await;
    eventually("the run is ended", || async {
        (fixture.store.run_expire_queued_any_tenant(10).await.unwrap() == 1).then_some(())
    })
    .await;
    let run = fixture.run(run).await;
    let Some(Outcome::Refused(refusal)) = run.outcome() else { panic!("not refused") };
    assert_eq!(refusal.reason, Reason::QueueTimeout);
    assert!(
        refusal.message.contains("in 1ms (none ready: no worker is running)"),
        "{}",
        refusal.message
    );
    assert_eq!(fixture.run(patient).await.state, RunState::Queued);
    fixture.end().await;
}

#[tokio::test]
async fn queue_timeout_spares_runs_that_have_a_worker() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert_waiting(session.id, Duration::from_micros(1)).await;
    assert_eq!(fixture.store.run_expire_queued_any_tenant(10).await.unwrap(), 0);
    assert_eq!(fixture.run(run).await.state, RunState::Running);
    fixture.end().await;
}
