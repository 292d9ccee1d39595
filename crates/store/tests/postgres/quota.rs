//! Quotas: exact, also when many callers come at once. Keys: revoked at once.

use codelia_store::{NewKey, Quotas, RunAdmission, Scope, SessionCreated};
use futures::future::join_all;

use crate::harness::{LONG, World};

#[tokio::test]
async fn many_inserts_at_once_record_no_more_runs_than_the_quota() {
    let world = World::new().await;
    let session = world.session().await;
    let quotas = Quotas { concurrent_runs: 5, ..Quotas::default() };
    let answers = join_all((0..40).map(|_| world.insert_try(session.id, 0, None, quotas))).await;
    let recorded = answers.iter().filter(|a| matches!(a, RunAdmission::Recorded { .. })).count();
    let refused = answers.iter().filter(|a| matches!(a, RunAdmission::OverQuota("concurrent_runs"))).count();
    assert_eq!((recorded, refused), (5, 35));
    world.end().await;
}

#[tokio::test]
async fn queued_runs_have_a_quota_of_their_own() {
    let world = World::new().await;
    let session = world.session().await;
    let quotas = Quotas { queued_runs: 1, ..Quotas::default() };
    assert!(matches!(world.insert_try(session.id, 0, None, quotas).await, RunAdmission::Recorded { .. }));
    assert!(matches!(
        world.insert_try(session.id, 0, None, quotas).await,
        RunAdmission::OverQuota("queued_runs")
    ));
    world.end().await;
}

#[tokio::test]
async fn many_creations_at_once_open_no_more_sessions_than_the_quota() {
    let world = World::new().await;
    let quotas = Quotas { sessions: 3, ..Quotas::default() };
    let answers = join_all((0..20).map(|_| world.session_try(None, None, LONG, None, quotas))).await;
    let new = answers.iter().filter(|a| matches!(a, Ok(SessionCreated::New(_)))).count();
    assert_eq!(new, 3);
    assert_eq!(world.store.tenant_usage(&world.tenant).await.unwrap().sessions, 3);
    world.end().await;
}

#[tokio::test]
async fn a_revoked_key_stands_for_nobody() {
    let world = World::new().await;
    let new =
        NewKey { tenant: &world.tenant, display_name: "k", secret_hash: [7; 32], scopes: &[Scope::Run] };
    let key = world.store.key_create(new).await.unwrap().unwrap();
    let caller = world.store.key_caller(&[7; 32]).await.unwrap().unwrap();
    assert_eq!((caller.tenant, caller.scopes), (world.tenant.clone(), vec![Scope::Run]));
    assert!(world.store.key_revoke(&world.other, key.id).await.unwrap().is_none(), "not the other tenant's");
    world.store.key_revoke(&world.tenant, key.id).await.unwrap().unwrap();
    assert!(world.store.key_caller(&[7; 32]).await.unwrap().is_none());
    world.end().await;
}
