//! Sessions: created within the quota, ended once, never while a run is in them.

use std::time::Duration;

use codelia_store::{
    Cancellation, Error, SessionChange, SessionCreated, SessionEndReason, SessionRef, SessionState,
};
use codelia_types::Outcome;
use uuid::Uuid;

use crate::harness::{Fixture, LONG, ROOT, SessionRequest};

#[tokio::test]
async fn concurrent_migrations_apply_once() {
    let fixture = Fixture::new().await;
    let many = futures::future::join_all((0..4).map(|_| fixture.store.migrate())).await;
    assert!(many.into_iter().all(|applied| applied.unwrap() == 0));
    fixture.store.check_migrated().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn alias_is_free_after_session_end() {
    let fixture = Fixture::new().await;
    let request = SessionRequest { alias: Some("dev"), ..SessionRequest::default() };
    let create = || fixture.session_try(request, fixture.quotas);
    let SessionCreated::New { session: first, .. } = create().await.unwrap() else {
        panic!("not new")
    };
    assert!(matches!(create().await, Err(Error::AlreadyExists { .. })));

    let by_alias = SessionRef::Alias("dev".into());
    assert_eq!(
        fixture.store.session_get(&fixture.tenant, &by_alias).await.unwrap().unwrap().id,
        first.id
    );
    fixture.store.session_close(&fixture.tenant, &by_alias).await.unwrap().unwrap();
    assert!(fixture.store.session_get(&fixture.tenant, &by_alias).await.unwrap().is_none());
    let SessionCreated::New { session: second, .. } = create().await.unwrap() else {
        panic!("not new")
    };
    assert_ne!(first.id, second.id);
    fixture.end().await;
}

#[tokio::test]
async fn closing_twice_keeps_first_reason() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let run = fixture.insert(session.id, 0).await;
    let by_id = SessionRef::Id(session.id);
    let close = || fixture.store.session_close(&fixture.tenant, &by_id);
    let first = close().await.unwrap().unwrap();
    assert_eq!(
        (first.state, first.end_reason),
        (SessionState::Ended, Some(SessionEndReason::Closed))
    );
    assert_eq!(close().await.unwrap().unwrap().ended_at, first.ended_at);
    assert_eq!(
        fixture.run(run).await.outcome(),
        Some(&Outcome::Canceled),
        "the queued run is canceled"
    );
    fixture.end().await;
}

#[tokio::test]
async fn expiry_spares_session_with_run() {
    let fixture = Fixture::new().await;
    let instant = Duration::from_micros(1);
    let due = fixture.session_with(instant, None).await;
    let idle = fixture.session_with(LONG, Some(instant)).await;
    let busy = fixture.session_with(LONG, Some(instant)).await;
    let run = fixture.insert(busy.id, 0).await;
    let stays = fixture.session().await;

    assert_eq!(fixture.store.session_expire_any_tenant(100).await.unwrap(), 2);
    let reason = async |id| {
        fixture
            .store
            .session_get(&fixture.tenant, &SessionRef::Id(id))
            .await
            .unwrap()
            .unwrap()
            .end_reason
    };
    assert_eq!(reason(due.id).await, Some(SessionEndReason::Expired));
    assert_eq!(reason(idle.id).await, Some(SessionEndReason::Idle));
    assert_eq!(reason(busy.id).await, None);
    assert_eq!(reason(stays.id).await, None);

    fixture.store.run_cancel(&fixture.tenant, run, &Cancellation::default()).await.unwrap();
    assert_eq!(fixture.store.session_expire_any_tenant(100).await.unwrap(), 1);
    assert_eq!(reason(busy.id).await, Some(SessionEndReason::Idle));
    fixture.end().await;
}

#[tokio::test]
async fn expired_session_cannot_be_extended() {
    let fixture = Fixture::new().await;
    let expired = fixture.session_with(Duration::from_micros(1), None).await;
    let open = fixture.session().await;
    let extend = async |id| {
        let change = SessionChange { ttl: Some(LONG), ..SessionChange::default() };
        let session = SessionRef::Id(id);
        fixture.store.session_update(&fixture.tenant, &session, &change).await.unwrap()
    };
    assert!(extend(expired.id).await.is_none());
    assert!(extend(open.id).await.unwrap().expires_at >= open.expires_at);
    fixture.end().await;
}

#[tokio::test]
async fn file_call_marks_open_session_as_used() {
    let fixture = Fixture::new().await;
    let (used, unused) = (fixture.session().await, fixture.session().await);
    let expired = fixture.session_with(Duration::from_micros(1), None).await;
    let touch = async |tenant: &codelia_types::TenantId, id| {
        fixture.store.session_touch(tenant, id).await.unwrap()
    };
    assert!(touch(&fixture.tenant, used.id).await && touch(&fixture.tenant, used.id).await);
    assert!(!touch(&fixture.tenant, expired.id).await);
    assert!(!touch(&"stranger".parse().unwrap(), unused.id).await);
    let (first, second) = (fixture.worker("first").await, fixture.worker("second").await);
    for session in [&used, &unused] {
        assert!(
            !fixture.lease(session, &first).await.unwrap().has_files,
            "it was never leased before"
        );
    }
    fixture.expire_worker(&first).await;
    assert!(fixture.lease(&used, &second).await.unwrap().has_files);
    assert!(!fixture.lease(&unused, &second).await.unwrap().has_files);
    fixture.end().await;
}

#[tokio::test]
async fn ended_session_is_removed_after_its_runs() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    let removable = async || {
        fixture.store.session_list_removable(&worker.id, worker.incarnation, ROOT, 9).await.unwrap()
    };

    assert_eq!(removable().await, [session.id]);
    fixture.store.session_mark_removed(&[session.id], ROOT).await.unwrap();
    assert_eq!(removable().await, [session.id], "the run is still running");
    fixture.commit(run, &worker, &lease).await.unwrap();
    fixture.store.session_mark_removed(&[session.id], ROOT).await.unwrap();
    assert!(removable().await.is_empty());
    fixture.end().await;
}

#[tokio::test]
async fn unknown_and_foreign_sessions_are_orphans() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (held, unknown) = (fixture.session().await, codelia_types::SessionId::generate());
    fixture.lease(&held, &worker).await.unwrap();
    let ids = [held.id, unknown];
    assert_eq!(fixture.store.session_list_orphans(ROOT, &ids).await.unwrap(), [unknown]);
    let mut elsewhere = fixture.store.session_list_orphans(Uuid::from_u128(9), &ids).await.unwrap();
    elsewhere.sort();
    assert_eq!(elsewhere, ids);
    fixture.end().await;
}

#[tokio::test]
async fn same_key_returns_same_session() {
    let fixture = Fixture::new().await;
    let create = |hash: &'static [u8]| {
        let request =
            SessionRequest { idempotency: Some(("k", hash)), ..SessionRequest::default() };
        fixture.session_try(request, fixture.quotas)
    };
    let SessionCreated::New { session: first, .. } = create(b"1").await.unwrap() else {
        panic!("not new")
    };
    let SessionCreated::Existing(again) = create(b"1").await.unwrap() else {
        panic!("not existing")
    };
    assert_eq!(first.id, again.id);
    assert!(matches!(create(b"2").await.unwrap(), SessionCreated::KeyReused));
    fixture.end().await;
}
