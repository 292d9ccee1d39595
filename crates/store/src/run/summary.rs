//! Summaries of runs for lists. They stay small whatever the caller sent.

use codelia_policy::{Limits, RunSpec};
use codelia_types::Mode;
use serde::{Deserialize, Serialize};

use super::record::Run;

/// Maximum bytes of the arguments in a summary.
const MAX_ARGV: usize = 1024;

/// A run as listings show it: without environment, policy and violations, with a short command and
/// a short message if it was refused.
pub type RunSummary = Run<SpecSummary>;

/// The part of a spec that listings show. Stored with the run, because a spec may be large.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecSummary {
    /// The mode to execute it in.
    pub mode: Mode,
    /// The limits that the run is held to.
    pub limits: Limits,
    /// Program and arguments, as far as they fit.
    pub argv: Vec<String>,
    /// Whether some arguments are cut or missing.
    pub argv_truncated: bool,
}

impl SpecSummary {
    /// The summary of a spec.
    pub(super) fn new(spec: &RunSpec) -> Self {
        let mut left = MAX_ARGV;
        let mut argv = Vec::new();
        for argument in &spec.command.argv {
            let kept = &argument[..argument.floor_char_boundary(left)];
            argv.push(kept.to_owned());
            // An empty argument costs something too.
            left = left.saturating_sub(kept.len() + 1);
            if kept.len() < argument.len() || left == 0 {
                break;
            }
        }
        let argv_truncated = argv != spec.command.argv;
        Self { mode: spec.mode, limits: spec.limits.clone(), argv, argv_truncated }
    }
}

#[cfg(test)]
mod tests {
    use codelia_types::CommandSpec;

    use super::*;

    fn argv(argv: &[&str]) -> (Vec<String>, bool) {
        let command = CommandSpec::new(argv.iter().copied());
        let summary = SpecSummary::new(&RunSpec::new(command, Mode::Logical));
        (summary.argv, summary.argv_truncated)
    }

    #[test]
    fn short_command_is_kept_whole() {
        assert_eq!(argv(&["sh", "-c", ""]), (vec!["sh".into(), "-c".into(), String::new()], false));
    }

    #[test]
    fn long_command_is_cut_and_marked() {
        let (kept, truncated) = argv(&["sh", "-c", &"é".repeat(1000), "x"]);
        assert_eq!((kept.len(), truncated), (3, true));
        assert!(kept[2].len() > 1000 && kept[2].chars().all(|c| c == 'é'), "{kept:?}");
        let (kept, truncated) = argv(&vec![""; 5000]);
        assert_eq!((kept.len(), truncated), (MAX_ARGV, true));
    }
}
