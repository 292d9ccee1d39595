//! A little chaos, and that it would be noticed if Codelia did less than it does.

use anyhow::Result;
use codelia_proto::v1::SandboxMode;
use codelia_tests::chaos::{Fault, Options, Weakness, play};

fn options(seed: u64, runs: usize) -> Options {
    Options {
        seed,
        runs,
        modes: vec![SandboxMode::Logical],
        faults: Fault::ALL.to_vec(),
        weakness: Weakness::None,
    }
}

#[tokio::test]
async fn nothing_is_lost_doubled_or_left_behind() -> Result<()> {
    let report = play(&options(1, 150)).await?;
    assert!(report.findings.is_clean(), "{report:#?}");
    println!("{report:?}");
    Ok(())
}

#[tokio::test]
async fn a_commit_without_its_guard_is_noticed() -> Result<()> {
    let faults = vec![Fault::PauseWorker];
    let weak = Options { faults, weakness: Weakness::NoCommitGuard, ..options(1, 200) };
    let report = play(&weak).await?;
    assert!(report.tampered > 0, "the guard was there all the time: {report:#?}");
    assert!(!report.findings.doubled.is_empty(), "{report:#?}");
    Ok(())
}

#[tokio::test]
async fn a_lease_that_its_worker_takes_for_longer_is_noticed() -> Result<()> {
    let faults = vec![Fault::Partition];
    let weak = Options { faults, weakness: Weakness::NoFencing, ..options(1, 200) };
    let report = play(&weak).await?;
    assert!(!report.findings.doubled.is_empty(), "{report:#?}");
    Ok(())
}
