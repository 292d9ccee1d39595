//! Leases: margins, fencing, and pushes under the wrong lease.

use std::{sync::Arc, time::Duration};

use codelia_backends::Backend;
use codelia_proto::internal::v1::PushResult;
use codelia_tests::{Database, Scratch, eventually};
use codelia_types::{Incarnation, LostReason, Outcome};
use codelia_worker::{Options, Service, WorkerOptions};

use crate::{
    fixture::{Fixture, Settings, options, shell},
    process_backend::ProcessBackend,
};

#[tokio::test]
async fn invalid_lease_margin_is_refused() {
    let ((database, store), scratch) =
        (Database::migrated().await.unwrap(), Scratch::new().unwrap());
    let sound = options(&"w-1".parse().unwrap(), &scratch, Settings::default());
    for lease_margin_percent in [0, 51] {
        let worker = WorkerOptions { lease_margin_percent, ..sound.worker.clone() };
        let options = Options { worker, ..sound.clone() };
        let backends: Vec<Arc<dyn Backend>> = vec![Arc::new(ProcessBackend::default())];
        let error = Service::start(options, store.clone(), backends).await.unwrap_err();
        assert!(error.to_string().starts_with("worker.lease_margin_percent: "), "{error}");
    }
    store.close().await;
    database.end().await.unwrap();
}

#[tokio::test]
async fn fenced_worker_kills_commands_and_registers_again() {
    let settings = Settings { lease_ttl: Duration::from_secs(3), ..Settings::default() };
    let fixture = Fixture::new(settings).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("echo $$ > pid; exec sleep 1000")).await;
    let pid = eventually("the command runs", || async {
        let text = std::fs::read_to_string(fixture.directory(session).join("pid")).ok()?;
        text.trim().parse::<u32>().ok()
    })
    .await;
    fixture.store.worker_register(&fixture.successor()).await.unwrap();
    let process = std::path::PathBuf::from(format!("/proc/{pid}"));
    eventually("the worker kills the command", || async { (!process.exists()).then_some(()) })
        .await;
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::Lost(LostReason::WorkerLost)));
    // The worker replaces the successor, whose root does not have the session's files.
    eventually("the worker registers again", || async {
        let workers = fixture.store.worker_list(None, 10).await.unwrap();
        workers.iter().any(|worker| worker.address != fixture.successor().address).then_some(())
    })
    .await;
    let (next, _) = fixture.record(session, &shell("true")).await;
    assert_eq!(fixture.ended(next.id).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}

#[tokio::test]
async fn push_with_wrong_incarnation_or_epoch_is_rejected() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (mut run, incarnation) = fixture.record(session, &shell("true")).await;
    assert_eq!(fixture.push(&run, Some(Incarnation::generate())).await, PushResult::Rejected);
    run.lease_epoch = run.lease_epoch.map(|epoch| codelia_types::LeaseEpoch(epoch.0 + 1));
    assert_eq!(fixture.push(&run, incarnation).await, PushResult::Rejected);
    assert_eq!(
        fixture.ended(run.id).await.outcome(),
        Some(&Outcome::Exited(0)),
        "the poll finds the run"
    );
    fixture.end().await;
}

#[tokio::test]
async fn old_push_is_left_to_poll() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let (mut run, incarnation) = fixture.record(session, &shell("true")).await;
    run.created_at -= Duration::from_secs(61);
    assert_eq!(fixture.push(&run, incarnation).await, PushResult::Rejected);
    assert_eq!(fixture.ended(run.id).await.outcome(), Some(&Outcome::Exited(0)));
    fixture.end().await;
}
