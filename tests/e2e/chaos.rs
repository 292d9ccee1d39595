//! A little chaos, and that it would be noticed if Codelia did less than it does.

use anyhow::Result;
use codelia_proto::v1::SandboxMode;
use codelia_tests::chaos::{Fault, Options, Weakness, play};

fn options(seed: u64, runs: usize) -> Options {
    Options {
        seed,
        runs,
        sessions: runs / 10,
        modes: vec![SandboxMode::Logical],
        longest: 10,
        faults: Fault::ALL.to_vec(),
        weakness: Weakness::None,
    }
}

#[tokio::test]
async fn no_run_is_lost_doubled_or_left_behind() -> Result<()> {
    let report = play(&options(1, 150)).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

/// Whether chaos notices, in one of a few seeds, that Codelia does less than it should: workers are cut off
/// while they have long runs, and are made to believe in their leases for too long.
async fn is_noticed(weakness: Weakness, by: &str) -> Result<bool> {
    for seed in 1..=4 {
        let faults = vec![Fault::Partition];
        let weak = Options { faults, sessions: 4, longest: 30, weakness, ..options(seed, 150) };
        let report = play(&weak).await?;
        let is_guarded = weakness != Weakness::NoGuard;
        assert_eq!(report.tampered == 0, is_guarded, "{report:#?}");
        let unlawful = |what: &String| what.contains("without the lease");
        assert!(!is_guarded || !report.findings.doubled.iter().any(unlawful), "{report:#?}");
        if report.findings.doubled.iter().any(|what| what.contains(by)) {
            return Ok(true);
        }
    }
    Ok(false)
}

#[tokio::test]
async fn chaos_detects_sandbox_outliving_its_lease() -> Result<()> {
    assert!(is_noticed(Weakness::NoFencing, "beside a later holder").await?);
    Ok(())
}

#[tokio::test]
async fn chaos_detects_unguarded_commit() -> Result<()> {
    assert!(is_noticed(Weakness::NoGuard, "without the lease").await?);
    Ok(())
}
