//! A short chaos run, and proof that it detects a disabled safeguard.

use anyhow::Result;
use codelia_proto::v1::SandboxMode;
use codelia_tests::chaos::{DisabledSafeguard, Fault, Findings, Options, run_seed};

fn options(seed: u64, runs: usize) -> Options {
    Options {
        seed,
        runs,
        sessions: runs / 10,
        modes: vec![SandboxMode::Logical],
        max_run_ticks: 10,
        faults: Fault::ALL.to_vec(),
        disabled: DisabledSafeguard::None,
    }
}

#[tokio::test]
async fn no_run_is_lost_doubled_or_left_behind() -> Result<()> {
    let report = run_seed(&options(1, 150)).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

/// Returns whether chaos detects the disabled safeguard with one of a few seeds. Workers are cut off
/// from the database while they have long runs.
async fn is_detected(disabled: DisabledSafeguard, by: &str) -> Result<bool> {
    for seed in 1..=4 {
        let faults = vec![Fault::Partition];
        let weak = Options { faults, sessions: 4, max_run_ticks: 30, disabled, ..options(seed, 150) };
        let report = run_seed(&weak).await?;
        let is_guarded = disabled != DisabledSafeguard::CommitGuard;
        assert_eq!(report.rewritten_statements == 0, is_guarded, "{report:#?}");
        let unlawful = |what: &String| what.starts_with(Findings::UNAUTHORIZED_END);
        assert!(!is_guarded || !report.findings.doubled.iter().any(unlawful), "{report:#?}");
        if report.findings.doubled.iter().any(|what| what.starts_with(by)) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[tokio::test]
async fn chaos_detects_sandbox_outliving_its_lease() -> Result<()> {
    assert!(is_detected(DisabledSafeguard::SelfFencing, Findings::STALE_WRITE).await?);
    Ok(())
}

#[tokio::test]
async fn chaos_detects_unguarded_commit() -> Result<()> {
    assert!(is_detected(DisabledSafeguard::CommitGuard, Findings::UNAUTHORIZED_END).await?);
    Ok(())
}
