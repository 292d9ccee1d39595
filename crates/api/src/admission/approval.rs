//! Which runs need a person's decision before they may start.

use codelia_policy::{FilesystemMode, IsolationLevel, NetworkApproval, RunSpec};
use codelia_store::{ApprovalKind, Grant};
use codelia_types::{Mode, NetworkMode};

use crate::options::Options;

/// What a run needs before it may start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApprovalNeed {
    /// What must be granted, to the run or to its session.
    pub(crate) grant: Grant,
    /// For the person who decides.
    pub(crate) message: String,
}

/// Whether a run may request approvals while it runs, so that the key that started it is recorded.
pub(crate) fn may_ask(spec: &RunSpec) -> bool {
    spec.network == Some(NetworkMode::Proxy)
        || spec.policy.filesystem.mode == Some(FilesystemMode::Dynamic)
}

/// What an admitted run needs before it may start; `None` if it may start. `floor` is the isolation
/// that its tenant has without asking. Mode `logical` isolates nothing, so that its network needs
/// no approval of its own.
pub(crate) fn approval_needed(
    spec: &RunSpec,
    options: &Options,
    floor: IsolationLevel,
) -> Option<ApprovalNeed> {
    let level = IsolationLevel::from_mode(spec.mode);
    let (kind, wanted) = if level < floor {
        (ApprovalKind::Isolation, format!("isolation {level} instead of {floor}"))
    } else {
        let network = spec.network.filter(|_| spec.mode != Mode::Logical)?;
        match NetworkApproval::needed(&options.policy.network, options.default_network, network)? {
            NetworkApproval::Proxy => {
                (ApprovalKind::NetworkProxy, "the network through the egress proxy".to_owned())
            }
            NetworkApproval::Host => {
                (ApprovalKind::NetworkHost, "the host's whole network".to_owned())
            }
        }
    };
    let program = spec.command.argv.first().map_or("", String::as_str);
    let program: String = program.chars().take(100).collect();
    Some(ApprovalNeed {
        grant: Grant { kind, host: String::new(), port: 0 },
        message: format!("{program:?} requests {wanted} (mode {})", spec.mode),
    })
}
