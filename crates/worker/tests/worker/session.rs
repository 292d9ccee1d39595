//! Sessions: creation and removal of their directories.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use codelia_proto::internal::v1::CloseSessionRequest;
use codelia_store::SessionRef;
use codelia_tests::eventually;
use codelia_types::Outcome;

use crate::fixture::{Fixture, Settings, shell};

#[tokio::test]
async fn offered_session_has_private_directory() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let mode = std::fs::metadata(fixture.directory(session)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    fixture.end().await;
}

#[tokio::test]
async fn closing_session_ends_runs_and_removes_directory() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("touch file; sleep 1000")).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session)).await.unwrap();
    let request = CloseSessionRequest { session_id: session.to_string() };
    fixture.caller.clone().close_session(request).await.unwrap();
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::Canceled));
    expect_removed(&fixture, session).await;
    fixture.end().await;
}

#[tokio::test]
async fn poll_finds_close_in_store() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("sleep 1000")).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session)).await.unwrap();
    assert_eq!(fixture.ended(run).await.outcome(), Some(&Outcome::Canceled));
    expect_removed(&fixture, session).await;
    fixture.end().await;
}

#[tokio::test]
async fn expired_session_loses_its_directory() {
    let fixture = Fixture::new(Settings::default()).await;
    let session = fixture.session(Duration::from_millis(1500)).await;
    let (run, _) = fixture.record(session, &shell("touch file")).await;
    fixture.ended(run.id).await;
    expect_removed(&fixture, session).await;
    fixture.end().await;
}

async fn expect_removed(fixture: &Fixture, session: codelia_types::SessionId) {
    let directory = fixture.directory(session);
    eventually("the directory is removed", || async { (!directory.exists()).then_some(()) }).await;
    let released = || async { fixture.holder(session).await.is_none().then_some(()) };
    eventually("the lease has ended", released).await;
}
