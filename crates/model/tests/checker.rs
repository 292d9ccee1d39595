//! The checker walks through the protocol, and finds what is wrong with every broken variant of it.

use std::time::Instant;

use codelia_model::{Bounds, Budget, Protocol, Variant};
use stateright::{Checker, Expectation, HasDiscoveries, Model};

const NONE: Budget =
    Budget { crashes: 0, pauses: 0, partitions: 0, cuts: 0, lags: 0, drains: 0, full: 0, slow: 0 };

const ONE_HOLDER: &str = "a living sandbox is its holder's alone";
const NO_STALE_COMMIT: &str = "nobody commits under a lease that is not theirs";
const STARTED_ONCE: &str = "a started run is started again only if that was asked for";
const NOTHING_LOST: &str = "without a fault nothing is lost";
const EVERY_RUN_ENDS: &str = "every run ends when the faults do";
const LOST: &str = "a run is lost";
const TAKEN_OVER: &str = "a session is taken over";

fn bounds(retries: &[u8], ticks: u8, faults: Budget) -> Bounds {
    Bounds { retries: retries.to_vec(), faults, ticks, pushes: 2, heals: false }
}

/// A worker dies, and what it had begun is lost or tried again.
fn crashes() -> Bounds {
    bounds(&[0, 1], 5, Budget { crashes: 1, ..NONE })
}

/// A worker stands still past its lease, with a statement of its own or of another on the way.
fn pauses() -> Bounds {
    bounds(&[1], 5, Budget { pauses: 1, slow: 1, ..NONE })
}

/// A worker whose clock lags is cut off from the database.
fn partitions() -> Bounds {
    bounds(&[0], 6, Budget { partitions: 1, lags: 1, ..NONE })
}

/// Connections break under statements that go on without anybody, and a worker drains.
fn cuts() -> Bounds {
    bounds(&[0], 1, Budget { cuts: 1, slow: 1, full: 1, drains: 1, ..NONE })
}

/// A worker drains while a run is being recorded for it.
fn drains() -> Bounds {
    bounds(&[0], 2, Budget { drains: 1, slow: 1, full: 1, ..NONE })
}

/// The right protocol keeps every property, and the walk saw what it was to see.
fn holds(name: &str, bounds: Bounds, seen: &[&'static str]) {
    let began = Instant::now();
    let protocol = Protocol { variant: Variant::Right, bounds };
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

/// From every state, all runs end once the faults stop.
fn heals(name: &str, bounds: Bounds, ticks: u8) {
    holds(&format!("{name}, healed"), Bounds { heals: true, ticks, ..bounds }, &["all runs exit"]);
}

/// The checker finds what is wrong with a variant.
fn rejected(variant: Variant, bounds: Bounds, property: &'static str) {
    let began = Instant::now();
    let wanted = HasDiscoveries::AllOf([property].into());
    let checked = Protocol { variant, bounds }.checker().finish_when(wanted).spawn_bfs().join();
    let path = checked.assert_any_discovery(property).into_actions();
    println!(
        "{variant:?}: not \"{property}\", {} states in {:.1?}",
        checked.unique_state_count(),
        began.elapsed()
    );
    for event in path {
        println!("    {}{:?}", if event.is_slow { "slowly " } else { "" }, event.action);
    }
}

#[test]
fn protocol_holds_under_every_fault() {
    holds("crashes", crashes(), &[LOST, TAKEN_OVER]);
    holds("partitions", partitions(), &[LOST, TAKEN_OVER]);
    holds("pauses", pauses(), &[TAKEN_OVER]);
    holds("drains", drains(), &[TAKEN_OVER]);
    holds("cuts", cuts(), &[TAKEN_OVER]);
}

#[test]
fn every_run_ends_after_faults_stop() {
    heals("crashes", crashes(), 2);
    heals("partitions", partitions(), 3);
    heals("pauses", pauses(), 2);
    heals("drains", drains(), 1);
    heals("cuts", cuts(), 1);
}

#[test]
fn without_commit_guard_stale_worker_commits() {
    rejected(Variant::NoEpochGuard, pauses(), NO_STALE_COMMIT);
}

#[test]
fn without_self_fencing_sandbox_outlives_lease() {
    rejected(Variant::NoSelfFencing, partitions(), ONE_HOLDER);
}

#[test]
fn without_push_memory_run_starts_twice() {
    rejected(Variant::NoPushMemory, crashes(), STARTED_ONCE);
}

#[test]
fn unrequested_retry_starts_run_twice() {
    rejected(Variant::UnaskedRetry, crashes(), STARTED_ONCE);
}

#[test]
fn without_insert_lock_drained_worker_loses_run() {
    rejected(Variant::UnlockedInsert, drains(), NOTHING_LOST);
}

#[test]
fn without_turns_late_hand_back_restarts_run() {
    rejected(Variant::AnyTurn, cuts(), STARTED_ONCE);
}

#[test]
fn without_expiry_mark_late_renewal_revives_worker() {
    rejected(Variant::UnmarkedDeath, Bounds { pushes: 1, ..pauses() }, ONE_HOLDER);
}

#[test]
fn revived_lease_leaves_run_unfinished() {
    rejected(Variant::SecondThoughts, Bounds { heals: true, ..drains() }, EVERY_RUN_ENDS);
}
