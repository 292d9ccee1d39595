//! Changes of runs that wait for a decision.

use codelia_store::{ChangesDecision, Error, RunCommit};
use codelia_types::{Changes, ChangesState, KeyId, RunId};

use crate::harness::{Fixture, LONG, exited};

fn held() -> RunCommit {
    let mut commit = exited(0);
    commit.result.changes = Some(Changes::none(ChangesState::Held));
    RunCommit { held_for: Some(LONG), ..commit }
}

async fn state(fixture: &Fixture, run: RunId) -> Option<ChangesState> {
    Some(fixture.run(run).await.result()?.changes.as_ref()?.state)
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

    let decision =
        ChangesDecision { session: session.id, run, apply: true, key: Some(KeyId::generate()) };
    let fenced = fixture.store.changes_decide(decision, &lease.token).await;
    assert!(matches!(fenced, Err(Error::Fenced)), "{fenced:?}");
    assert_eq!(state(&fixture, run).await, Some(ChangesState::Held));
    // The first decision counts. A repeated or another one changes nothing.
    for apply in [true, true, false] {
        let decided =
            fixture.store.changes_decide(ChangesDecision { apply, ..decision }, &taken.token).await;
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
