//! The checker verifies the protocol and finds the flaw of every broken variant.

use std::time::Instant;

use codelia_model::{Bounds, FaultBudget, Protocol, Variant};
use stateright::{Checker, Expectation, HasDiscoveries, Model};

const NONE: FaultBudget = FaultBudget {
    crashes: 0,
    pauses: 0,
    partitions: 0,
    broken_connections: 0,
    lost_ticks: 0,
    drains: 0,
    full_pushes: 0,
    slow_calls: 0,
};

const ONE_HOLDER: &str = "only the lease holder has a running sandbox";
const NO_STALE_COMMIT: &str = "no worker commits without holding the lease";
const STARTED_ONCE: &str = "a run starts again only if retries are allowed";
const NOTHING_LOST: &str = "no run is lost without a fault";
const EVERY_RUN_ENDS: &str = "every run ends after the faults stop";
const LOST: &str = "a run is lost";
const TAKEN_OVER: &str = "another worker takes over the session";

fn bounds(retries: &[u8], ticks: u8, faults: FaultBudget) -> Bounds {
    Bounds { retries: retries.to_vec(), faults, ticks, pushes: 2, check_recovery: false }
}

/// A worker crashes, and its runs are lost or retried.
fn crashes() -> Bounds {
    bounds(&[0, 1], 5, FaultBudget { crashes: 1, ..NONE })
}

/// A worker is paused past its lease while a call is in flight.
fn pauses() -> Bounds {
    bounds(&[1], 5, FaultBudget { pauses: 1, slow_calls: 1, ..NONE })
}

/// A worker whose clock lags cannot reach the database.
fn partitions() -> Bounds {
    bounds(&[0], 6, FaultBudget { partitions: 1, lost_ticks: 1, ..NONE })
}

/// Connections break while statements continue, and a worker drains.
fn broken_connections() -> Bounds {
    bounds(&[0], 1, FaultBudget { broken_connections: 1, slow_calls: 1, full_pushes: 1, drains: 1, ..NONE })
}

/// A worker drains while an insert assigns a run to it.
fn drains() -> Bounds {
    bounds(&[0], 2, FaultBudget { drains: 1, slow_calls: 1, full_pushes: 1, ..NONE })
}

/// Checks that the protocol keeps every property, and that the search reached the states in `seen`.
fn check(name: &str, bounds: Bounds, seen: &[&'static str]) {
    let began = Instant::now();
    let protocol = Protocol { variant: Variant::Correct, bounds };
    let checked = protocol.checker().spawn_dfs().join();
    println!("{name}: {} states in {:.1?}", checked.unique_state_count(), began.elapsed());
    for property in checked.model().properties() {
        if property.expectation == Expectation::Always {
            checked.assert_no_discovery(property.name);
        }
    }
    for name in seen {
        checked.assert_any_discovery(name);
    }
}

/// Checks that from every state all runs end after the faults stop.
fn check_recovery(name: &str, bounds: Bounds, ticks: u8) {
    check(&format!("{name}, recovery"), Bounds { check_recovery: true, ticks, ..bounds }, &["all runs exit"]);
}

/// Checks that the variant violates the property, and prints the steps.
fn check_violation(variant: Variant, bounds: Bounds, property: &'static str) {
    let began = Instant::now();
    let until = HasDiscoveries::AllOf([property].into());
    let checked = Protocol { variant, bounds }.checker().finish_when(until).spawn_bfs().join();
    let path = checked.assert_any_discovery(property).into_actions();
    println!(
        "{variant:?} violates \"{property}\", {} states in {:.1?}",
        checked.unique_state_count(),
        began.elapsed()
    );
    for step in path {
        println!("    {}{:?}", if step.is_slow { "slowly " } else { "" }, step.action);
    }
}

#[test]
fn protocol_holds_under_every_fault() {
    check("crashes", crashes(), &[LOST, TAKEN_OVER]);
    check("partitions", partitions(), &[LOST, TAKEN_OVER]);
    check("pauses", pauses(), &[TAKEN_OVER]);
    check("drains", drains(), &[TAKEN_OVER]);
    check("broken connections", broken_connections(), &[TAKEN_OVER]);
}

#[test]
fn every_run_ends_after_faults_stop() {
    check_recovery("crashes", crashes(), 2);
    check_recovery("partitions", partitions(), 3);
    check_recovery("pauses", pauses(), 2);
    check_recovery("drains", drains(), 1);
    check_recovery("broken connections", broken_connections(), 1);
}

#[test]
fn without_commit_guard_stale_worker_commits() {
    check_violation(Variant::NoCommitGuard, pauses(), NO_STALE_COMMIT);
}

#[test]
fn without_self_fencing_sandbox_outlives_lease() {
    check_violation(Variant::NoSelfFencing, partitions(), ONE_HOLDER);
}

#[test]
fn without_push_memory_run_starts_twice() {
    check_violation(Variant::NoPushMemory, crashes(), STARTED_ONCE);
}

#[test]
fn unrequested_retry_starts_run_twice() {
    check_violation(Variant::UnrequestedRetry, crashes(), STARTED_ONCE);
}

#[test]
fn without_insert_lock_drained_worker_loses_run() {
    check_violation(Variant::NoInsertLock, drains(), NOTHING_LOST);
}

#[test]
fn without_turns_late_hand_back_restarts_run() {
    check_violation(Variant::NoTurnGuard, broken_connections(), STARTED_ONCE);
}

#[test]
fn without_expiry_mark_late_renewal_revives_worker() {
    check_violation(Variant::NoExpiryMark, Bounds { pushes: 1, ..pauses() }, ONE_HOLDER);
}

#[test]
fn revived_lease_leaves_run_unfinished() {
    check_violation(Variant::RevivedLease, Bounds { check_recovery: true, ..drains() }, EVERY_RUN_ENDS);
}
