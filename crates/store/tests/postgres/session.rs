//! Sessions: created within the quota, ended once, never with a run in them.

use std::time::Duration;

use codelia_store::{Error, SessionCreated, SessionEndReason, SessionRef, SessionState};
use codelia_types::Outcome;
use uuid::Uuid;

use crate::harness::{LONG, ROOT, World};

#[tokio::test]
async fn migrations_run_at_once_by_many_are_applied_once() {
    let world = World::new().await;
    let many = futures::future::join_all((0..4).map(|_| world.store.migrate())).await;
    assert!(many.into_iter().all(|applied| applied.unwrap() == 0));
    world.store.check_migrated().await.unwrap();
    world.end().await;
}

#[tokio::test]
async fn an_alias_is_free_again_when_its_session_has_ended() {
    let world = World::new().await;
    let create = || world.session_try(Some("dev"), None, LONG, None, world.quotas);
    let SessionCreated::New(first) = create().await.unwrap() else { panic!("not new") };
    assert!(matches!(create().await, Err(Error::AlreadyExists { .. })));

    let by_alias = SessionRef::Alias("dev".into());
    assert_eq!(world.store.session_get(&world.tenant, &by_alias).await.unwrap().unwrap().id, first.id);
    world.store.session_close(&world.tenant, &by_alias).await.unwrap().unwrap();
    assert!(world.store.session_get(&world.tenant, &by_alias).await.unwrap().is_none());
    let SessionCreated::New(second) = create().await.unwrap() else { panic!("not new") };
    assert_ne!(first.id, second.id);
    world.end().await;
}

#[tokio::test]
async fn closing_twice_is_no_error_and_keeps_the_first_reason() {
    let world = World::new().await;
    let session = world.session().await;
    let run = world.insert(session.id, 0).await;
    let which = SessionRef::Id(session.id);
    let close = || world.store.session_close(&world.tenant, &which);
    let first = close().await.unwrap().unwrap();
    assert_eq!((first.state, first.end_reason), (SessionState::Ended, Some(SessionEndReason::Closed)));
    assert_eq!(close().await.unwrap().unwrap().ended_at, first.ended_at);
    assert_eq!(world.run(run).await.outcome, Some(Outcome::Canceled), "its queued run ended with it");
    world.end().await;
}

#[tokio::test]
async fn time_ends_a_session_but_not_one_with_a_run() {
    let world = World::new().await;
    let instant = Duration::from_micros(1);
    let due = world.session_with(instant, None).await;
    let idle = world.session_with(LONG, Some(instant)).await;
    let busy = world.session_with(LONG, Some(instant)).await;
    let run = world.insert(busy.id, 0).await;
    let stays = world.session().await;

    assert_eq!(world.store.session_expire_any_tenant(100).await.unwrap(), 2);
    let reason = async |id| {
        world.store.session_get(&world.tenant, &SessionRef::Id(id)).await.unwrap().unwrap().end_reason
    };
    assert_eq!(reason(due.id).await, Some(SessionEndReason::Expired));
    assert_eq!(reason(idle.id).await, Some(SessionEndReason::Idle));
    assert_eq!(reason(busy.id).await, None);
    assert_eq!(reason(stays.id).await, None);

    world.store.run_cancel(&world.tenant, run).await.unwrap();
    assert_eq!(world.store.session_expire_any_tenant(100).await.unwrap(), 1);
    assert_eq!(reason(busy.id).await, Some(SessionEndReason::Idle));
    world.end().await;
}

#[tokio::test]
async fn a_session_that_is_over_is_not_extended() {
    let world = World::new().await;
    let over = world.session_with(Duration::from_micros(1), None).await;
    let open = world.session().await;
    let extend =
        async |id| world.store.session_extend(&world.tenant, &SessionRef::Id(id), LONG).await.unwrap();
    assert!(extend(over.id).await.is_none());
    assert!(extend(open.id).await.unwrap().expires_at >= open.expires_at);
    world.end().await;
}

#[tokio::test]
async fn a_session_that_file_calls_use_has_files_and_one_that_is_over_is_not_used() {
    let world = World::new().await;
    let (used, unused) = (world.session().await, world.session().await);
    let over = world.session_with(Duration::from_micros(1), None).await;
    let note =
        async |tenant: &codelia_types::TenantId, id| world.store.session_use(tenant, id).await.unwrap();
    assert!(note(&world.tenant, used.id).await && note(&world.tenant, used.id).await);
    assert!(!note(&world.tenant, over.id).await);
    assert!(!note(&"stranger".parse().unwrap(), unused.id).await);
    let (first, second) = (world.worker("first").await, world.worker("second").await);
    for session in [&used, &unused] {
        assert!(!world.lease(session, &first).await.unwrap().has_files, "nobody had it before");
    }
    world.worker_dies(&first).await;
    assert!(world.lease(&used, &second).await.unwrap().has_files);
    assert!(!world.lease(&unused, &second).await.unwrap().has_files);
    world.end().await;
}

#[tokio::test]
async fn an_ended_session_is_removed_by_whoever_has_its_files() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    world.store.session_close(&world.tenant, &SessionRef::Id(session.id)).await.unwrap();
    let removable =
        async || world.store.session_list_removable(&worker.id, worker.incarnation, ROOT, 9).await.unwrap();

    assert_eq!(removable().await, [session.id]);
    world.store.session_removed(session.id, ROOT).await.unwrap();
    assert_eq!(removable().await, [session.id], "its run is still running");
    world.commit(run, &worker, &lease).await.unwrap();
    world.store.session_removed(session.id, ROOT).await.unwrap();
    assert!(removable().await.is_empty());
    world.end().await;
}

#[tokio::test]
async fn directories_of_unknown_removed_and_foreign_sessions_are_orphans() {
    let world = World::new().await;
    let worker = world.worker("w").await;
    let (held, unknown) = (world.session().await, codelia_types::SessionId::generate());
    world.lease(&held, &worker).await.unwrap();
    let ids = [held.id, unknown];
    assert_eq!(world.store.session_orphans(ROOT, &ids).await.unwrap(), [unknown]);
    let mut elsewhere = world.store.session_orphans(Uuid::from_u128(9), &ids).await.unwrap();
    elsewhere.sort();
    assert_eq!(elsewhere, ids);
    world.end().await;
}

#[tokio::test]
async fn sessions_that_ended_long_ago_are_purged_with_their_runs() {
    let world = World::new().await;
    let (old, open) = (world.session().await, world.session().await);
    let run = world.insert(old.id, 0).await;
    world.store.session_close(&world.tenant, &SessionRef::Id(old.id)).await.unwrap();
    assert_eq!(world.store.session_purge_any_tenant(LONG, 10).await.unwrap(), 0);
    assert_eq!(world.store.session_purge_any_tenant(Duration::ZERO, 10).await.unwrap(), 1);
    assert!(world.store.run_get(&world.tenant, run).await.unwrap().is_none());
    assert!(world.store.session_get(&world.tenant, &SessionRef::Id(open.id)).await.unwrap().is_some());
    world.end().await;
}

#[tokio::test]
async fn the_same_key_gives_the_same_session_and_another_request_is_told() {
    let world = World::new().await;
    let create = |hash: &'static [u8]| world.session_try(None, Some(("k", hash)), LONG, None, world.quotas);
    let SessionCreated::New(first) = create(b"1").await.unwrap() else { panic!("not new") };
    let SessionCreated::Existing(again) = create(b"1").await.unwrap() else { panic!("not known") };
    assert_eq!(first.id, again.id);
    assert!(matches!(create(b"2").await.unwrap(), SessionCreated::KeyReused));
    world.end().await;
}
