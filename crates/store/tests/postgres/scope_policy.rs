//! Versions of the policies of scopes.

use std::time::Duration;

use codelia_policy::{Policy, PolicyScope};
use codelia_store::{
    MAX_POLICY_VERSIONS, NewPolicyVersion, Retention, ScopePolicySet, ScopeRef, Store, Upkeep,
};
use codelia_types::KeyId;

use crate::harness::Fixture;

fn of(fixture: &Fixture, scope: PolicyScope, name: &str) -> ScopeRef {
    ScopeRef { tenant: fixture.tenant.clone(), scope, name: name.to_owned() }
}

async fn set(
    store: &Store,
    of: &ScopeRef,
    policy: Option<&Policy>,
    expected: Option<i64>,
) -> ScopePolicySet {
    let new = NewPolicyVersion {
        policy,
        expected,
        restored: None,
        reason: "a test",
        key: KeyId::generate(),
    };
    store.scope_policy_set(of, new).await.unwrap()
}

#[tokio::test]
async fn one_of_two_changes_of_a_version_wins() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    for scope in
        [of(&fixture, PolicyScope::Organisation, ""), of(&fixture, PolicyScope::Project, "web")]
    {
        let policy = Policy::default();
        let results = tokio::join!(
            set(store, &scope, Some(&policy), Some(0)),
            set(store, &scope, Some(&policy), Some(0)),
        );
        let results = [results.0, results.1];
        let won = results.iter().filter(|result| matches!(result, ScopePolicySet::Set(_))).count();
        let lost =
            results.iter().filter(|result| matches!(result, ScopePolicySet::Changed(1))).count();
        assert_eq!((won, lost), (1, 1), "{results:?}");
    }
    let mut nobody = of(&fixture, PolicyScope::Project, "web");
    nobody.tenant = "nobody".parse().unwrap();
    assert!(matches!(set(store, &nobody, None, None).await, ScopePolicySet::NoTenant));
    fixture.end().await;
}

#[tokio::test]
async fn last_versions_of_a_policy_are_kept() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let policy = Policy::default();
    for scope in
        [of(&fixture, PolicyScope::Organisation, ""), of(&fixture, PolicyScope::User, "key")]
    {
        for _ in 0..MAX_POLICY_VERSIONS + 2 {
            set(store, &scope, Some(&policy), None).await;
        }
        let versions = store.scope_policy_history(&scope, None, 1000).await.unwrap();
        let (first, last) = (versions.last().unwrap().version, versions[0].version);
        assert_eq!((first, last), (3, MAX_POLICY_VERSIONS + 2), "{}", scope.scope);
    }
    fixture.end().await;
}

#[tokio::test]
async fn deleted_policies_are_purged_after_retention() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let policy = Policy::default();
    let (kept, deleted) =
        (of(&fixture, PolicyScope::Project, "kept"), of(&fixture, PolicyScope::Project, "old"));
    let stranger = of(&fixture, PolicyScope::User, &KeyId::generate().to_string());
    for scope in [&kept, &deleted, &stranger] {
        set(store, scope, Some(&policy), None).await;
    }
    set(store, &deleted, None, None).await;
    let retention = Retention { audit: Duration::ZERO, ..Retention::default() };
    Upkeep::new(store.clone(), retention).pass().await.unwrap();
    assert!(store.scope_policy(&kept, None).await.unwrap().is_some());
    for gone in [&deleted, &stranger] {
        assert_eq!(store.scope_policy(gone, None).await.unwrap(), None, "{gone:?}");
    }
    fixture.end().await;
}
