//! Each variant leaves out one safeguard. The checker must find the property that it violates.

use std::time::Instant;

use codelia_model::{Bounds, Protocol, Variant};
use stateright::{Checker, HasDiscoveries, Model};

use crate::configurations::*;

const ONE_HOLDER: &str = "only the lease holder has a running sandbox";
const NO_STALE_COMMIT: &str = "no worker commits without holding the lease";
const ONE_TABLE: &str = "a recorded run is live or ended, never both or neither";
const STARTED_ONCE: &str = "a run starts again only if retries are allowed";
const NOTHING_LOST: &str = "no run is lost without a fault";
const TAKEN_FROM_DEAD: &str = "a run is taken only from a dead worker";
const RESULT_KEPT: &str = "no stored result is reported as refused";
const CANCEL_IS_FINAL: &str = "a canceled run is not tried again";
const ONE_RUN_PER_KEY: &str = "an idempotency key names one run";
const ONE_OUTPUT: &str = "stored output is of one attempt";
const EXPIRED_IDLE: &str = "expiry ends no session with an unfinished run";
const FILES_KEPT: &str = "a command finds the files of earlier ones";
const FILES_FOUND: &str = "a session ends as lost only without its files";
const DIRECTORY_KEPT: &str = "no command runs in a removed directory";
const EVERY_RUN_ENDS: &str = "every run ends after the faults stop";

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

/// The same bounds, with a check in each state that all runs end.
fn recovering(bounds: Bounds) -> Bounds {
    Bounds { check_recovery: true, ..bounds }
}

#[test]
fn without_self_fencing_sandbox_outlives_lease() {
    check_violation(Variant::NoSelfFencing, partitions(), ONE_HOLDER);
}

#[test]
fn without_keep_alive_paused_sandbox_outlives_lease() {
    check_violation(Variant::NoKeepAlive, pauses(), ONE_HOLDER);
}

#[test]
fn lease_counted_from_answer_is_too_long() {
    check_violation(Variant::LeaseFromAnswer, slow_renewals(), ONE_HOLDER);
}

#[test]
fn without_margin_lagging_clock_outlives_lease() {
    check_violation(Variant::NoMargin, partitions(), ONE_HOLDER);
}

#[test]
fn revived_lease_leaves_run_unfinished() {
    check_violation(Variant::RevivedLease, recovering(drains()), EVERY_RUN_ENDS);
}

#[test]
fn without_expiry_mark_late_renewal_revives_worker() {
    check_violation(Variant::NoExpiryMark, pauses(), ONE_HOLDER);
}

#[test]
fn unguarded_registration_replaces_newer_incarnation() {
    check_violation(Variant::UnguardedRegistration, registrations(), ONE_HOLDER);
}

#[test]
fn unguarded_leave_ends_newer_incarnation() {
    check_violation(Variant::UnguardedLeave, leaves(), ONE_HOLDER);
}

#[test]
fn without_insert_lock_drained_worker_loses_run() {
    check_violation(Variant::NoInsertLock, drains(), NOTHING_LOST);
}

#[test]
fn without_commit_guard_stale_worker_commits() {
    check_violation(Variant::NoCommitGuard, pauses(), NO_STALE_COMMIT);
}

#[test]
fn without_push_memory_run_starts_twice() {
    check_violation(Variant::NoPushMemory, crashes(), STARTED_ONCE);
}

#[test]
fn without_turns_late_hand_back_restarts_run() {
    check_violation(Variant::NoTurnGuard, broken_connections(), STARTED_ONCE);
}

#[test]
fn unrequested_retry_starts_run_twice() {
    check_violation(Variant::UnrequestedRetry, crashes(), STARTED_ONCE);
}

#[test]
fn retried_cancel_queues_run_again() {
    check_violation(Variant::RetriedCancel, cancels(), CANCEL_IS_FINAL);
}

#[test]
fn without_abandon_rejected_run_never_ends() {
    check_violation(Variant::NoAbandon, recovering(rejections()), EVERY_RUN_ENDS);
}

#[test]
fn end_in_two_statements_hides_run() {
    check_violation(Variant::EndInTwoStatements, rejections(), ONE_TABLE);
}

#[test]
fn one_snapshot_commit_refuses_stored_result() {
    check_violation(Variant::OneSnapshotCommit, rejections(), RESULT_KEPT);
}

#[test]
fn key_of_live_runs_only_names_two_runs() {
    check_violation(Variant::KeyOfLiveRunsOnly, same_key(), ONE_RUN_PER_KEY);
}

#[test]
fn unlocked_key_names_two_runs() {
    check_violation(Variant::UnlockedKey, same_key(), ONE_RUN_PER_KEY);
}

#[test]
fn unguarded_append_mixes_output() {
    check_violation(Variant::UnguardedAppend, output(), ONE_OUTPUT);
}

#[test]
fn unlocked_append_mixes_output() {
    check_violation(Variant::UnlockedAppend, output(), ONE_OUTPUT);
}

#[test]
fn kept_output_is_mixed_with_retry() {
    check_violation(Variant::KeptOutput, output(), ONE_OUTPUT);
}

#[test]
fn weak_insert_lock_strands_run_of_closed_session() {
    check_violation(Variant::WeakInsertLock, recovering(closes()), EVERY_RUN_ENDS);
}

#[test]
fn one_snapshot_expiry_ends_busy_session() {
    check_violation(Variant::OneSnapshotExpiry, expiry(), EXPIRED_IDLE);
}

#[test]
fn start_while_closing_runs_without_directory() {
    check_violation(Variant::StartWhileClosing, closes(), DIRECTORY_KEPT);
}

#[test]
fn without_files_check_session_continues_empty() {
    check_violation(Variant::NoFilesCheck, lost_directories(), FILES_KEPT);
}

#[test]
fn without_home_check_session_leaves_its_files() {
    check_violation(Variant::NoHomeCheck, separate_roots(), FILES_FOUND);
}

#[test]
fn without_upkeep_expiry_run_never_ends() {
    check_violation(Variant::NoUpkeepExpiry, recovering(upkeep()), EVERY_RUN_ENDS);
}

#[test]
fn unlocked_sweep_takes_run_of_live_worker() {
    check_violation(Variant::UnlockedSweep, upkeep(), TAKEN_FROM_DEAD);
}

#[test]
fn without_waiting_row_run_never_starts() {
    check_violation(Variant::NoWaitingRow, recovering(drains()), EVERY_RUN_ENDS);
}
