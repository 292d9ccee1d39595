//! The specification of a run, as an api pushes it to a worker.

use codelia_policy::{Policy, RunSpec, RunTool};
use codelia_types::TransactionMode;

use crate::{
    error::{InvalidField, enum_value, required},
    internal::v1 as internal,
    run::read_command,
    sandbox::{read_limits, read_requested_limits},
    time::{duration_to_proto, read_duration},
    v1,
};

impl From<&RunSpec> for internal::RunSpec {
    fn from(spec: &RunSpec) -> Self {
        Self {
            command: Some((&spec.command).into()),
            mode: v1::SandboxMode::from(spec.mode).into(),
            network: spec.network.map_or(v1::NetworkMode::Unspecified, Into::into).into(),
            limits: Some((&spec.limits).into()),
            requested_limits: Some((&spec.requested_limits).into()),
            policy: Some((&spec.policy).into()),
            ends_with_caller: spec.ends_with_caller,
            tool: spec.tool.as_ref().map(|tool| internal::RunTool {
                id: tool.id.to_string(),
                version: tool.version,
                level: v1::IsolationLevel::from(Some(tool.level)).into(),
            }),
            transaction: spec.transaction.map_or(v1::TransactionMode::Unspecified, Into::into).into(),
            hold_timeout: match spec.transaction {
                Some(TransactionMode::Hold { timeout }) => Some(duration_to_proto(timeout)),
                Some(TransactionMode::Apply | TransactionMode::Preview) | None => None,
            },
        }
    }
}

impl TryFrom<internal::RunSpec> for RunSpec {
    type Error = InvalidField;

    fn try_from(wire: internal::RunSpec) -> Result<Self, InvalidField> {
        let mode: v1::SandboxMode = enum_value("mode", wire.mode)?;
        let network: v1::NetworkMode = enum_value("network", wire.network)?;
        let transaction: v1::TransactionMode = enum_value("transaction", wire.transaction)?;
        let hold_timeout =
            wire.hold_timeout.as_ref().map(|wire| read_duration("hold_timeout", wire)).transpose()?;
        let command = read_command(required("command", wire.command)?);
        let limits = read_limits(&required("limits", wire.limits)?);
        let requested = read_requested_limits(&required("requested_limits", wire.requested_limits)?);
        let policy = Policy::try_from(required("policy", wire.policy)?);
        Ok(Self {
            command: command.map_err(|error| error.within("command"))?,
            mode: required("mode", mode.to_mode())?,
            network: network.to_mode(),
            limits: limits.map_err(|error| error.within("limits"))?,
            requested_limits: requested.map_err(|error| error.within("requested_limits"))?,
            policy: policy.map_err(|error| InvalidField::from(error).within("policy"))?,
            ends_with_caller: wire.ends_with_caller,
            tool: wire.tool.map(read_tool).transpose().map_err(|error| error.within("tool"))?,
            transaction: transaction.to_mode(hold_timeout.unwrap_or(TransactionMode::DEFAULT_HOLD)),
        })
    }
}

fn read_tool(wire: internal::RunTool) -> Result<RunTool, InvalidField> {
    let level: v1::IsolationLevel = enum_value("level", wire.level)?;
    Ok(RunTool {
        id: required("id", wire.id.parse().ok())?,
        version: wire.version,
        level: required("level", level.to_level())?,
    })
}
