//! The modes of Codelia that are compared, and which of them this host has.

use anyhow::{Result, ensure};
use codelia_tests::Cluster;
use codelia_types::Mode;

use crate::report::Report;

/// Modes that isolate, the fastest last.
pub(crate) const ISOLATING: [Mode; 2] = [Mode::Bwrap, Mode::Native];
/// All modes: those that isolate and the one that does not.
pub(crate) const ALL: [Mode; 3] = [Mode::Logical, Mode::Bwrap, Mode::Native];

/// Returns those of these modes that the workers of the cluster serve. Says which are left out.
pub(crate) async fn served(
    cluster: &Cluster,
    wanted: &[Mode],
    report: &mut Report,
) -> Result<Vec<Mode>> {
    let workers = cluster.store.worker_list(None, 10).await?;
    let (served, missing): (Vec<Mode>, Vec<Mode>) =
        wanted.iter().partition(|mode| workers.iter().all(|worker| worker.modes.contains(mode)));
    for mode in missing {
        report.note(&format!("left out: mode {mode} (see `codelia doctor`)", mode = mode.as_str()));
    }
    ensure!(!served.is_empty(), "this host has none of the modes {wanted:?}");
    Ok(served)
}
