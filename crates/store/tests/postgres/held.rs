//! Changes that wait for a decision, and runs that need a worker of this version.

use codelia_store::{ChangesDecision, Error, NewRun, RunAdmission, RunCommit};
use codelia_tests::store_values::logical_run;
use codelia_types::{Changes, ChangesState, KeyId, RunId, TransactionMode};

use crate::harness::{Fixture, LONG, Registered, exited};

fn held() -> RunCommit {
    let mut commit = exited(0);
    commit.result.changes = Some(Changes::none(ChangesState::Held));
    RunCommit { held_for: Some(LONG), ..commit }
}

async fn state(fixture: &Fixture, run: RunId) -> Option<ChangesState> {
    fixture.run(run).await.changes.map(|changes| changes.state)
}

/// Makes a worker look as if an earlier version had registered it.
async fn is_outdated(fixture: &Fixture, worker: &Registered) {
    // An earlier version changes the incarnation and leaves the rest.
    let statement =
        format!("UPDATE workers SET features_of = '{}' WHERE id = '{}'", uuid::Uuid::new_v4(), worker.id);
    fixture.database.execute(&statement).await.unwrap();
}

#[tokio::test]
async fn only_holder_decides_about_changes_once() {
    let fixture = Fixture::new().await;
    let (old, session) = (fixture.worker("old").await, fixture.session().await);
    let lease = fixture.lease(&session, &old).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.store.run_commit(fixture.names(run, &lease), &lease.token, &held()).await.unwrap();
    assert_eq!(state(&fixture, run).await, Some(ChangesState::Held));

    fixture.expire_worker(&old).await;
    let new = fixture.worker("new").await;
    let taken = fixture.lease(&session, &new).await.unwrap();
    let found = taken.held.unwrap();
    assert_eq!((found.run, found.epoch), (run, lease.token.epoch));
    assert!(found.remaining <= LONG && !found.remaining.is_zero());

    let decision = ChangesDecision { session: session.id, run, apply: true, key: Some(KeyId::generate()) };
    let fenced = fixture.store.changes_decide(decision, &lease.token).await;
    assert!(matches!(fenced, Err(Error::Fenced)), "{fenced:?}");
    assert_eq!(state(&fixture, run).await, Some(ChangesState::Held));
    // The first decision counts. A repeated or another one changes nothing.
    for apply in [true, true, false] {
        let decided = fixture.store.changes_decide(ChangesDecision { apply, ..decision }, &taken.token).await;
        assert_eq!(decided.unwrap(), Some(ChangesState::Applied));
    }
    assert_eq!(state(&fixture, run).await, Some(ChangesState::Applied));
    assert_eq!(fixture.database.number("SELECT count(*) FROM held_changes").await.unwrap(), 0);
    fixture.end().await;
}

#[tokio::test]
async fn held_changes_of_ended_session_are_dropped() {
    let fixture = Fixture::new().await;
    let (worker, session) = (fixture.worker("w").await, fixture.session().await);
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.store.run_commit(fixture.names(run, &lease), &lease.token, &held()).await.unwrap();
    assert_eq!(fixture.store.changes_drop_ended_any_tenant(10).await.unwrap(), 0, "it is open");
    fixture
        .database
        .execute("UPDATE sessions SET state = 'ended', ended_at = now(), end_reason = 'closed'")
        .await
        .unwrap();
    assert_eq!(fixture.store.changes_drop_ended_any_tenant(10).await.unwrap(), 1);
    assert_eq!(state(&fixture, run).await, Some(ChangesState::Dropped));
    fixture.end().await;
}

#[tokio::test]
async fn outdated_worker_gets_no_transactional_run() {
    let fixture = Fixture::new().await;
    let (worker, session) = (fixture.worker("w").await, fixture.session().await);
    let mut spec = logical_run();
    spec.transaction = Some(TransactionMode::Apply);
    let insert = |spec| {
        let new = NewRun { spec, ..fixture.new_run(session.id) };
        fixture.store.run_insert(new, fixture.quotas)
    };
    let queued = match insert(&spec).await.unwrap() {
        RunAdmission::Recorded { run, .. } => run.id,
        other => panic!("{other:?}"),
    };
    let lease = fixture.lease(&session, &worker).await.unwrap();
    is_outdated(&fixture, &worker).await;
    // What waited is not begun, and what is new is refused. Other runs are not concerned.
    assert!(fixture.store.run_begin(queued, &lease.token).await.unwrap().is_none());
    assert!(matches!(insert(&spec).await.unwrap(), RunAdmission::WorkerLacks));
    let plain = logical_run();
    let assigned =
        matches!(insert(&plain).await.unwrap(), RunAdmission::Recorded { incarnation: Some(_), .. });
    assert!(assigned);

    // The control: a worker of this version begins it.
    fixture.expire_worker(&worker).await;
    let new = fixture.worker("new").await;
    let lease = fixture.lease(&session, &new).await.unwrap();
    assert!(fixture.store.run_begin(queued, &lease.token).await.unwrap().is_some());
    assert!(matches!(insert(&spec).await.unwrap(), RunAdmission::Recorded { incarnation: Some(_), .. }));
    fixture.end().await;
}

#[tokio::test]
async fn outdated_worker_cannot_take_held_changes() {
    let fixture = Fixture::new().await;
    let (first, session) = (fixture.worker("first").await, fixture.session().await);
    let lease = fixture.lease(&session, &first).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.store.run_commit(fixture.names(run, &lease), &lease.token, &held()).await.unwrap();
    fixture.expire_worker(&first).await;
    let old = fixture.worker("old").await;
    is_outdated(&fixture, &old).await;
    assert!(fixture.lease(&session, &old).await.is_none());
    // Without them, it can.
    assert!(fixture.lease(&fixture.session().await, &old).await.is_some());
    let new = fixture.worker("new").await;
    assert!(fixture.lease(&session, &new).await.is_some());
    fixture.end().await;
}
