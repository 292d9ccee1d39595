//! Quotas hold exactly under concurrent calls. Revoked keys stop working immediately.

use codelia_store::{NewKey, Quotas, RunAdmission, Scope, SessionCreated};
use futures::future::join_all;

use crate::harness::{Fixture, SessionRequest};

#[tokio::test]
async fn concurrent_inserts_respect_run_quota() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let quotas = Quotas { concurrent_runs: 5, ..Quotas::default() };
    let answers = join_all((0..40).map(|_| fixture.insert_try(session.id, 0, None, quotas))).await;
    let recorded = answers.iter().filter(|a| matches!(a, RunAdmission::Recorded { .. })).count();
    let refused = answers.iter().filter(|a| matches!(a, RunAdmission::OverQuota("concurrent_runs"))).count();
    assert_eq!((recorded, refused), (5, 35));
    fixture.end().await;
}

#[tokio::test]
async fn queued_runs_have_separate_quota() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let quotas = Quotas { queued_runs: 1, ..Quotas::default() };
    assert!(matches!(fixture.insert_try(session.id, 0, None, quotas).await, RunAdmission::Recorded { .. }));
    assert!(matches!(
        fixture.insert_try(session.id, 0, None, quotas).await,
        RunAdmission::OverQuota("queued_runs")
    ));
    fixture.end().await;
}

#[tokio::test]
async fn concurrent_creates_respect_session_quota() {
    let fixture = Fixture::new().await;
    let quotas = Quotas { sessions: 3, ..Quotas::default() };
    let answers = join_all((0..20).map(|_| fixture.session_try(SessionRequest::default(), quotas))).await;
    let new = answers.iter().filter(|a| matches!(a, Ok(SessionCreated::New { .. }))).count();
    assert_eq!(new, 3);
    assert_eq!(fixture.store.tenant_usage(&fixture.tenant).await.unwrap().sessions, 3);
    fixture.end().await;
}

#[tokio::test]
async fn revoked_key_does_not_authenticate() {
    let fixture = Fixture::new().await;
    let new = NewKey {
        tenant: &fixture.tenant,
        display_name: "k",
        secret_hash: [7; 32],
        scopes: &[Scope::Run],
        expires_at: None,
    };
    let key = fixture.store.key_create(new).await.unwrap().unwrap();
    let caller = fixture.store.key_authenticate(&[7; 32]).await.unwrap().unwrap().caller;
    assert_eq!((caller.tenant, caller.scopes), (fixture.tenant.clone(), vec![Scope::Run]));
    assert!(
        fixture.store.key_revoke(&fixture.other, key.id).await.unwrap().is_none(),
        "another tenant must not revoke it"
    );
    fixture.store.key_revoke(&fixture.tenant, key.id).await.unwrap().unwrap();
    assert!(fixture.store.key_authenticate(&[7; 32]).await.unwrap().is_none());
    fixture.end().await;
}
