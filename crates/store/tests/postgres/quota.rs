//! Quotas hold exactly under concurrent calls. Revoked keys stop working immediately.

use codelia_store::{NewKey, NewRun, Quotas, QuotasChange, RunAdmission, Scope, SessionCreated};
use futures::future::join_all;

use crate::harness::{Fixture, LONG, SessionRequest};

#[tokio::test]
async fn concurrent_inserts_respect_run_quota() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let quotas = Quotas { concurrent_runs: 5, ..Quotas::default() };
    let answers = join_all((0..40).map(|_| fixture.insert_try(session.id, 0, None, quotas))).await;
    let recorded = answers.iter().filter(|a| matches!(a, RunAdmission::Recorded { .. })).count();
    let refused =
        answers.iter().filter(|a| matches!(a, RunAdmission::OverQuota("concurrent_runs"))).count();
    assert_eq!((recorded, refused), (5, 35));
    fixture.end().await;
}

#[tokio::test]
async fn queued_runs_have_separate_quota() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let quotas = Quotas { queued_runs: 1, ..Quotas::default() };
    assert!(matches!(
        fixture.insert_try(session.id, 0, None, quotas).await,
        RunAdmission::Recorded { .. }
    ));
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
    let answers =
        join_all((0..20).map(|_| fixture.session_try(SessionRequest::default(), quotas))).await;
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

#[tokio::test]
async fn run_is_refused_if_its_key_changed() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let store = &fixture.store;
    let key = async |hash: [u8; 32], expires_at| {
        let new = NewKey {
            tenant: &fixture.tenant,
            display_name: "k",
            secret_hash: hash,
            scopes: &[Scope::Run],
            expires_at,
        };
        store.key_create(new).await.unwrap().unwrap().id
    };
    let start = async |key, key_version| {
        let new = NewRun { key, key_version: Some(key_version), ..fixture.new_run(session.id) };
        store.run_insert(new, fixture.quotas).await.unwrap()
    };
    let version =
        async |hash: [u8; 32]| store.key_authenticate(&hash).await.unwrap().unwrap().version;
    let (first, second) = (key([1; 32], None).await, key([2; 32], None).await);
    let (of_first, of_second) = (version([1; 32]).await, version([2; 32]).await);
    for _ in 0..2 {
        assert!(
            matches!(start(first, of_first).await, RunAdmission::Recorded { .. }),
            "nothing changed"
        );
    }
    assert!(matches!(start(second, of_first).await, RunAdmission::KeyChanged), "of another key");

    store.key_revoke(&fixture.tenant, first).await.unwrap().unwrap();
    assert!(matches!(start(first, of_first).await, RunAdmission::KeyChanged), "revoked");
    assert!(
        matches!(start(second, of_second).await, RunAdmission::Recorded { .. }),
        "the other is valid"
    );
    store.key_touch(&fixture.tenant, second).await.unwrap();
    assert!(
        matches!(start(second, of_second).await, RunAdmission::KeyChanged),
        "must be read again"
    );
    let of_second = version([2; 32]).await;
    assert!(matches!(start(second, of_second).await, RunAdmission::Recorded { .. }));

    let past = key([3; 32], Some(time::OffsetDateTime::now_utc() - LONG)).await;
    assert!(
        matches!(start(past, version([3; 32]).await).await, RunAdmission::KeyChanged),
        "expired"
    );
    let change = QuotasChange { sessions: Some(1), ..QuotasChange::default() };
    store.tenant_set_quotas(&fixture.tenant, change).await.unwrap();
    assert!(
        matches!(start(second, of_second).await, RunAdmission::KeyChanged),
        "its tenant changed"
    );
    assert_eq!(store.tenant_usage(&fixture.tenant).await.unwrap().concurrent_runs, 4);
    fixture.end().await;
}
