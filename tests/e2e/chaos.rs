//! A short chaos run, and proof that it detects a disabled safeguard.

use anyhow::Result;
use codelia_proto::v1::SandboxMode;
use codelia_tests::{
    PgBouncer,
    chaos::{Defect, DisabledSafeguard, Fault, Findings, Options, planned_faults, run_seed},
};

fn options(seed: u64, runs: usize) -> Options {
    Options {
        seed,
        runs,
        sessions: runs / 10,
        modes: vec![SandboxMode::Logical],
        max_run_ticks: 10,
        faults: Fault::ALL.to_vec(),
        pooler: false,
        disabled: DisabledSafeguard::None,
        defects: Vec::new(),
        min_exits: 0.6,
    }
}

#[tokio::test]
async fn no_run_is_lost_doubled_or_left_behind() -> Result<()> {
    let report = run_seed(&options(1, 150)).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

/// A seed with faults after which every run must exit. Each of them happens.
fn harmless() -> Options {
    let faults = vec![Fault::Drain, Fault::RollingRestart, Fault::RestartApi, Fault::HalfOpen];
    let with_seed = |seed| Options { faults: faults.clone(), min_exits: 1.0, ..options(seed, 120) };
    let has_all = |options: &Options| {
        let planned = planned_faults(options);
        faults.iter().all(|fault| planned.contains(fault))
    };
    (1..).map(with_seed).find(has_all).expect("a seed with all faults")
}

#[tokio::test]
async fn restarts_and_broken_connections_lose_no_run() -> Result<()> {
    let report = run_seed(&harmless()).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    assert_eq!(report.outcomes.get("lost"), None, "{report:#?}");
    println!("{report:?}");
    Ok(())
}

/// The control of the test above: with each defect, its check finds something.
#[tokio::test]
async fn chaos_detects_planted_defects() -> Result<()> {
    let report = run_seed(&Options { defects: Defect::ALL.to_vec(), ..harmless() }).await?;
    let expected = [
        Findings::UNEXPLAINED_LOSS,
        Findings::FEW_EXITS,
        Findings::WRONG_OUTPUT,
        Findings::WRONG_FILE,
        Findings::WRONG_WATCH,
        Findings::WRONG_END,
        Findings::EXPOSED,
    ];
    for begin in expected {
        assert!(report.findings.has(begin), "nothing begins with {begin:?}: {report:#?}");
    }
    Ok(())
}

/// Runs a seed with only this fault in every round.
async fn survives(faults: &[Fault]) -> Result<()> {
    let options = Options { faults: faults.to_vec(), min_exits: 0.3, ..options(1, 90) };
    let report = run_seed(&options).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

#[tokio::test]
async fn killed_backends_lose_nothing_without_cause() -> Result<()> {
    survives(&[Fault::KillBackend]).await
}

#[tokio::test]
async fn full_database_disk_loses_nothing_without_cause() -> Result<()> {
    survives(&[Fault::FullDatabaseDisk]).await
}

#[tokio::test]
async fn clock_jumps_lose_nothing_without_cause() -> Result<()> {
    survives(&[Fault::ClockForward, Fault::ClockBackward]).await
}

#[tokio::test]
async fn promoted_standby_loses_nothing_without_cause() -> Result<()> {
    survives(&[Fault::Failover]).await
}

/// The faults that PgBouncer could hide, double or prolong: between it and the processes, and
/// between it and the server.
#[tokio::test]
async fn pooler_loses_nothing_without_cause() -> Result<()> {
    if !PgBouncer::is_available() {
        return Ok(());
    }
    let faults = vec![
        Fault::KillWorker,
        Fault::Cut,
        Fault::Stall,
        Fault::Partition,
        Fault::CrashPostgres,
        Fault::Drain,
    ];
    let report =
        run_seed(&Options { faults, pooler: true, min_exits: 0.3, ..options(1, 150) }).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

/// Returns whether chaos detects the disabled safeguard with one of a few seeds. Workers are cut
/// off from the database while they have long runs. A slow machine may need most of the seeds: the
/// next holder must start a run before the cut-off one ends.
async fn is_detected(disabled: DisabledSafeguard, by: &str) -> Result<bool> {
    for seed in 1..=8 {
        let faults = vec![Fault::Partition];
        let weak =
            Options { faults, sessions: 4, max_run_ticks: 30, disabled, ..options(seed, 150) };
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
