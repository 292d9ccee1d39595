//! Promotion of a standby that misses the last leases.

use anyhow::Result;
use codelia_tests::chaos::promote_lagging_standby;

#[tokio::test]
async fn lost_lease_ends_before_session_moves() -> Result<()> {
    let found = promote_lagging_standby(true).await?;
    assert!(!found.overlaps, "{found:?}");
    assert!(found.new_epoch > found.lost_epoch, "{found:?}");
    Ok(())
}

/// The control: without the fence, the epoch is given twice, and both commands run.
#[tokio::test]
async fn lost_lease_overlaps_without_fence() -> Result<()> {
    let found = promote_lagging_standby(false).await?;
    assert!(found.overlaps && found.new_epoch <= found.lost_epoch, "{found:?}");
    Ok(())
}
