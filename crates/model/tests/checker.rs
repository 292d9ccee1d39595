//! The checker verifies the protocol and finds the flaw of every broken variant.

mod configurations;
mod variants;

use std::time::Instant;

use codelia_model::{Bounds, Protocol, Variant};
use configurations::*;
use stateright::{Checker, Expectation, Model};

const CANCELED: &str = "a run is canceled";
const LOST: &str = "a run is lost";
const REFUSED: &str = "a run is refused";
const REMOVED: &str = "an ended session is removed";
const RETRIED: &str = "a run is retried";
const TAKEN_OVER: &str = "another worker takes over the session";

/// Checks that the protocol keeps every property in exactly so many states, and that the search
/// reached the states in `seen`.
fn check(name: &str, bounds: Bounds, states: usize, seen: &[&'static str]) {
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
    assert_eq!(checked.unique_state_count(), states, "{name}: the state space changed");
}

/// Also checks that from every state all runs end after the faults stop, and ended sessions are
/// removed.
fn check_recovery(name: &str, bounds: Bounds, states: usize, seen: &[&'static str]) {
    check(&format!("{name}, recovery"), Bounds { check_recovery: true, ..bounds }, states, seen);
}

/// The same bounds with less time: recovery takes long to check.
fn within(ticks: i8, bounds: Bounds) -> Bounds {
    Bounds { ticks, ..bounds }
}

#[test]
fn protocol_holds_under_every_fault() {
    check("crashes", crashes(), 217_123, &[LOST, TAKEN_OVER, RETRIED]);
    check("partitions", partitions(), 32_339, &[LOST, TAKEN_OVER]);
    check("pauses", pauses(), 814_924, &[TAKEN_OVER, RETRIED]);
    check("drains", drains(), 148_923, &[TAKEN_OVER]);
    check("slow renewals", slow_renewals(), 293_195, &[LOST, TAKEN_OVER]);
    check("two sessions", two_sessions(), 291_019, &[LOST, TAKEN_OVER, RETRIED]);
}

#[test]
fn protocol_holds_over_several_lease_times() {
    check("combined faults", combined_faults(), 233_722, &[LOST, TAKEN_OVER, RETRIED]);
    check("combined pauses", combined_pauses(), 972_214, &[LOST, TAKEN_OVER, RETRIED]);
}

#[test]
fn protocol_holds_when_clocks_jump() {
    let two_run = "a clock jump lets two workers run";
    check("forward jumps", forward_jumps(), 440_422, &[TAKEN_OVER, RETRIED, two_run]);
    check("clock jumps", clock_jumps(), 413_914, &[LOST, TAKEN_OVER, RETRIED]);
    check("worker jumps", worker_jumps(), 90_921, &[LOST, TAKEN_OVER, RETRIED]);
}

#[test]
fn protocol_holds_when_sessions_end() {
    check("cancels", cancels(), 361_295, &[CANCELED, LOST, RETRIED]);
    check("closes and crashes", closes_and_crashes(), 452_208, &[CANCELED, LOST, REMOVED, RETRIED]);
    check("expiry and crashes", expiry_and_crashes(), 81_695, &[REFUSED, REMOVED, RETRIED]);
}

#[test]
fn protocol_holds_when_files_are_lost() {
    check("lost directories", lost_directories(), 161_315, &[LOST, REFUSED, REMOVED]);
    check("separate roots", separate_roots(), 110_024, &[LOST, RETRIED]);
    check("allowed data loss", allowed_data_loss(), 217_074, &[LOST, TAKEN_OVER, RETRIED]);
}

#[test]
fn protocol_holds_for_output_and_upkeep() {
    check("output", output(), 363_609, &[LOST, RETRIED]);
    check("leaves", leaves(), 188_943, &[TAKEN_OVER]);
    check("upkeep", upkeep(), 722_163, &[LOST, RETRIED, "the upkeep has a new owner"]);
}

#[test]
fn every_run_ends_after_faults_stop() {
    check_recovery("crashes", within(2, crashes()), 69_811, &[]);
    check_recovery("partitions", within(3, partitions()), 7_949, &[]);
    check_recovery("pauses", within(2, pauses()), 39_353, &[]);
    check_recovery("drains", within(1, drains()), 43_740, &[]);
    check_recovery("broken connections", broken_connections(), 128_446, &[TAKEN_OVER]);
    check_recovery("clock jumps", within(2, clock_jumps()), 199_836, &[]);
    check_recovery("upkeep", within(2, upkeep()), 137_607, &[]);
    check_recovery("registrations", registrations(), 23_929, &[LOST]);
    check_recovery("rejections", rejections(), 3_146, &[LOST]);
    check_recovery("same key", same_key(), 76_976, &[LOST]);
    check_recovery("two sessions", within(1, two_sessions()), 54_695, &[]);
}

#[test]
fn every_ended_session_is_removed() {
    check_recovery("cancels", within(2, cancels()), 80_132, &[CANCELED]);
    check_recovery("closes", closes(), 98_273, &[CANCELED, REMOVED]);
    check_recovery(
        "closes and crashes",
        within(2, closes_and_crashes()),
        205_428,
        &[CANCELED, REMOVED],
    );
    check_recovery("expiry", expiry(), 111_402, &[REFUSED, REMOVED]);
    check_recovery(
        "expiry and crashes",
        within(4, expiry_and_crashes()),
        34_653,
        &[REFUSED, REMOVED],
    );
    check_recovery("lost directories", within(2, lost_directories()), 51_587, &[REFUSED, REMOVED]);
    check_recovery("separate roots", within(3, separate_roots()), 44_648, &[]);
}
