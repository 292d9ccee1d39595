//! Reads the rule of a flag. Every refusal names the field.

use std::time::Duration;

use codelia_policy::{FlagGuard, FlagRule, IsolationLevel};
use codelia_proto::v1;
use codelia_store::Caller;

use crate::{
    error::ApiError,
    wire::{
        resource_name::{self, TenantName},
        validate,
    },
};

/// Sessions, runs or setups before a limit is judged, unless the guard says otherwise.
const DEFAULT_MIN_COUNT: u32 = 20;
const MAX_MIN_COUNT: u32 = 1_000_000;
/// Setup times above this are counted together.
const MAX_SETUP: Duration = Duration::from_secs(120);

/// Validates a rule.
pub(super) fn rule(caller: &Caller, wire: Option<v1::FlagRule>) -> Result<FlagRule, ApiError> {
    let wire = wire.ok_or_else(|| ApiError::invalid("rule", "required"))?;
    let tenant = match wire.tenant.as_str() {
        "" => None,
        name => Some(match resource_name::tenant("rule.tenant", name)? {
            TenantName::Id(id) => id,
            TenantName::Own => caller.tenant.clone(),
        }),
    };
    let rule = FlagRule {
        tenant,
        labels: validate::labels(wire.labels).map_err(|error| error.within("rule"))?,
        percent: percent("rule.percent", wire.percent, 1)?.unwrap_or(100),
        mode: validate::enum_value::<v1::SandboxMode>("rule.mode", wire.mode)?.into(),
        floor: validate::enum_value::<v1::IsolationLevel>("rule.floor", wire.floor)?.to_level(),
        guard: wire.guard.map(guard).transpose()?,
    };
    match (rule.mode, rule.floor) {
        (None, None) => Err(ApiError::invalid("rule.mode", "set a mode, a floor, or both")),
        (Some(mode), Some(floor)) if IsolationLevel::from_mode(mode) < floor => {
            Err(ApiError::invalid(
                "rule.mode",
                format!(
                    "{mode} provides {}, below the floor {floor} of the same rule",
                    IsolationLevel::from_mode(mode)
                ),
            ))
        }
        _ => Ok(rule),
    }
}

fn guard(wire: v1::FlagGuard) -> Result<FlagGuard, ApiError> {
    let max_refused_percent =
        percent("rule.guard.max_refused_percent", wire.max_refused_percent, 0)?;
    let max_failed_percent = percent("rule.guard.max_failed_percent", wire.max_failed_percent, 0)?;
    let max_setup_p95 = validate::ttl("rule.guard.max_setup_p95", wire.max_setup_p95, MAX_SETUP)?;
    let min_count = match u32::try_from(wire.min_count) {
        Ok(0) => DEFAULT_MIN_COUNT,
        Ok(count) if count <= MAX_MIN_COUNT => count,
        _ => {
            return Err(ApiError::invalid(
                "rule.guard.min_count",
                format!("must be 0 to {MAX_MIN_COUNT}"),
            ));
        }
    };
    if max_refused_percent.is_none() && max_failed_percent.is_none() && max_setup_p95.is_none() {
        return Err(ApiError::invalid("rule.guard", "set at least one limit, or leave it out"));
    }
    Ok(FlagGuard { max_refused_percent, max_failed_percent, max_setup_p95, min_count })
}

fn percent(field: &str, wire: Option<i32>, least: u8) -> Result<Option<u8>, ApiError> {
    let Some(number) = wire else { return Ok(None) };
    match u8::try_from(number) {
        Ok(percent) if (least..=100).contains(&percent) => Ok(Some(percent)),
        _ => Err(ApiError::invalid(field, format!("must be {least} to 100"))),
    }
}
