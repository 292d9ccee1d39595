//! Which modes a request may have, and why one is refused.

use codelia_policy::IsolationLevel;
use codelia_store::Store;
use codelia_types::{Mode, Reason};

use super::rules::Rules;
use crate::error::ApiError;

/// Checks that the installation, the tenant's isolation floor and that of mode flags allow a mode.
/// Below the tenant's floor, each run may need an approval, unless an operator approved the level
/// of its tool.
pub(super) fn check_allowed(
    mode: Mode,
    rules: &Rules<'_>,
    flagged: Option<IsolationLevel>,
    of_tool: Option<IsolationLevel>,
) -> Result<(), ApiError> {
    if mode == Mode::Logical && !rules.options.allow_logical {
        return Err(mode_not_allowed(mode));
    }
    let lowest =
        [rules.ask_floor, of_tool].into_iter().flatten().fold(rules.floor, IsolationLevel::min);
    if IsolationLevel::from_mode(mode) < flagged.map_or(lowest, |flagged| flagged.max(lowest)) {
        let floor = flagged.map_or(rules.floor, |flagged| flagged.max(rules.floor));
        return Err(below_floor(mode, floor));
    }
    Ok(())
}

/// The installation does not allow the mode.
pub(crate) fn mode_not_allowed(mode: Mode) -> ApiError {
    let message = format!("mode: {mode} is not allowed on this installation; choose another");
    of_mode(Reason::ModeNotAllowed, message, mode)
}

/// The mode isolates less than the tenant's isolation floor.
pub(super) fn below_floor(mode: Mode, floor: IsolationLevel) -> ApiError {
    let message = format!(
        "mode: {mode} provides {}, this tenant requires at least {floor}; choose a stronger mode or ask an \
         operator to lower the floor (codelia tenants floor)",
        IsolationLevel::from_mode(mode)
    );
    of_mode(Reason::IsolationFloor, message, mode)
}

/// No live worker supports the mode.
pub(crate) fn mode_unavailable(mode: Mode) -> ApiError {
    let message = format!(
        "mode: no worker supports {mode}; choose another, or see with `codelia doctor` on a worker's host \
         what the mode needs"
    );
    of_mode(Reason::ModeUnavailable, message, mode)
}

fn of_mode(reason: Reason, message: String, mode: Mode) -> ApiError {
    ApiError::new(reason, message).with("field", "mode").with("mode", mode)
}

/// Rejects a mode that no live worker supports. Without any live worker, the run is queued.
pub(crate) async fn check_available(store: &Store, mode: Mode) -> Result<(), ApiError> {
    if store.worker_has_mode(mode).await? {
        return Ok(());
    }
    for other in Mode::ALL {
        if store.worker_has_mode(other).await? {
            return Err(mode_unavailable(mode));
        }
    }
    Ok(())
}
