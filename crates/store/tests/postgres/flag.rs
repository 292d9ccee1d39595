//! Mode flags: revisions, rollbacks, what is counted, and guards.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::{FlagGuard, FlagNumbers, FlagRef, FlagRule};
use codelia_store::{
    Flag, FlagAction, FlagRollback, FlagTally, MAX_FLAGS, NewFlagRevision, RolledBack, Store,
};
use codelia_types::{FlagId, KeyId, Mode};

use crate::harness::Fixture;

fn canary() -> FlagId {
    "canary".parse().unwrap()
}

fn rule(percent: u8) -> FlagRule {
    let labels = BTreeMap::from([("team".to_owned(), "x".to_owned())]);
    FlagRule { tenant: None, labels, percent, mode: Some(Mode::Bwrap), floor: None, guard: None }
}

async fn set(store: &Store, id: &FlagId, rule: &FlagRule) -> Option<Flag> {
    let new = NewFlagRevision { id, rule, reason: "why not", key: KeyId::generate() };
    store.flag_set(new).await.unwrap()
}

async fn roll_back(store: &Store, to: Option<i64>) -> RolledBack {
    let rollback = FlagRollback { id: &canary(), to, reason: "back", key: KeyId::generate() };
    store.flag_roll_back(rollback).await.unwrap()
}

/// The share of the present rule; `None` if the flag is off.
async fn percent(store: &Store) -> Option<u8> {
    store.flag_get(&canary()).await.unwrap().unwrap().rule.map(|rule| rule.percent)
}

#[tokio::test]
async fn rollbacks_go_back_step_by_step() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    assert!(matches!(roll_back(store, None).await, RolledBack::NotFound));
    for percent in [10, 20, 30] {
        let flag = set(store, &canary(), &rule(percent)).await.unwrap();
        assert_eq!(flag.rule, Some(rule(percent)));
    }
    for expected in [Some(20), Some(10), None] {
        assert!(matches!(roll_back(store, None).await, RolledBack::Done(_)));
        assert_eq!(percent(store).await, expected);
    }
    assert!(matches!(roll_back(store, None).await, RolledBack::IsOff));
    assert!(matches!(roll_back(store, Some(99)).await, RolledBack::NoRevision));
    assert!(matches!(roll_back(store, Some(3)).await, RolledBack::Done(_)));
    assert_eq!(percent(store).await, Some(30));
    assert!(matches!(roll_back(store, None).await, RolledBack::Done(_)));
    assert_eq!(percent(store).await, Some(20), "before the rule that was restored");
    let past = store.flag_history(&canary(), None, 100).await.unwrap();
    let past: Vec<_> = past.iter().map(|flag| (flag.revision, flag.origin)).collect();
    assert_eq!(past, [(8, 2), (7, 3), (6, 0), (5, 1), (4, 2), (3, 3), (2, 2), (1, 1)]);
    fixture.end().await;
}

#[tokio::test]
async fn rules_are_read_only_after_a_change() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let (first, flags) = store.flag_rules(None).await.unwrap().unwrap();
    assert_eq!(flags.iter().count(), 0);
    assert!(store.flag_rules(Some(first)).await.unwrap().is_none());
    set(store, &canary(), &rule(10)).await.unwrap();
    let (second, flags) = store.flag_rules(Some(first)).await.unwrap().unwrap();
    assert_eq!(flags.iter().map(|(flag, _)| flag.revision).collect::<Vec<_>>(), [1]);
    roll_back(store, None).await;
    let (_, flags) = store.flag_rules(Some(second)).await.unwrap().unwrap();
    assert_eq!(flags.iter().count(), 0, "it is off");
    fixture.end().await;
}

#[tokio::test]
async fn numbers_of_processes_add_up() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    set(store, &canary(), &rule(10)).await.unwrap();
    let flag = FlagRef { id: canary(), revision: 1 };
    for millis in [1, 100] {
        let tally = FlagTally::default();
        tally.count(&flag, |numbers| {
            numbers.sessions += 1;
            numbers.runs += 2;
            numbers.add_setup(Duration::from_millis(millis));
        });
        tally.flush(store).await.unwrap();
        tally.flush(store).await.unwrap();
    }
    let mut expected = FlagNumbers { sessions: 2, runs: 4, ..FlagNumbers::default() };
    expected.add_setup(Duration::from_millis(1));
    expected.add_setup(Duration::from_millis(100));
    assert_eq!(store.flag_get(&canary()).await.unwrap().unwrap().numbers, expected);
    let unknown = FlagRef { id: canary(), revision: 7 };
    store.flag_count(&unknown, &expected).await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn guard_rolls_back_once() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    set(store, &canary(), &rule(10)).await.unwrap();
    let guard = FlagGuard {
        max_refused_percent: None,
        max_failed_percent: Some(10),
        max_setup_p95: None,
        min_count: 4,
    };
    set(store, &canary(), &FlagRule { guard: Some(guard), ..rule(50) }).await.unwrap();
    let flag = FlagRef { id: canary(), revision: 2 };
    let failed = FlagNumbers { runs: 3, failed_runs: 3, ..FlagNumbers::default() };
    store.flag_count(&flag, &failed).await.unwrap();
    assert!(store.flag_check_guards().await.unwrap().is_empty(), "too few");
    store.flag_count(&flag, &failed).await.unwrap();
    let (one, two) = tokio::join!(store.flag_check_guards(), store.flag_check_guards());
    assert_eq!(one.unwrap().len() + two.unwrap().len(), 1);
    let now = store.flag_get(&canary()).await.unwrap().unwrap();
    assert_eq!((now.revision, now.action, now.key), (3, FlagAction::Guard, None));
    assert_eq!(now.rule, Some(rule(10)));
    assert!(now.reason.contains("6 of 6"), "{}", now.reason);
    fixture.end().await;
}

#[tokio::test]
async fn number_of_flags_is_limited() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    for number in 0..MAX_FLAGS {
        assert!(set(store, &format!("f{number}").parse().unwrap(), &rule(1)).await.is_some());
    }
    assert!(set(store, &canary(), &rule(1)).await.is_none());
    assert!(set(store, &"f7".parse().unwrap(), &rule(2)).await.is_some(), "a flag that exists");
    fixture.end().await;
}
