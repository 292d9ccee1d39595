//! Why a plan cannot be made.

use codelia_types::Mode;

/// A plan that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("mode {mode} cannot enforce {field} on this host{}", suffix(.remedy))]
pub struct PlanError {
    /// The path of the field at fault, as in the API.
    pub field: &'static str,
    /// The mode that was to enforce it.
    pub mode: Mode,
    /// A change that makes the host able to enforce it, if an operator can do something.
    pub remedy: Option<&'static str>,
}

fn suffix(remedy: &Option<&'static str>) -> String {
    remedy.map(|remedy| format!(": {remedy}")).unwrap_or_default()
}
