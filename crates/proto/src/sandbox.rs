//! Sandbox modes, network modes and limits.

use codelia_policy::{Limit, Limits, LimitsRequest};
use codelia_types::{Mode, NetworkMode};

use crate::{
    duration_to_proto,
    error::{InvalidField, integer, required},
    time::read_duration,
    v1,
};

impl v1::SandboxMode {
    /// The mode, or `None` if it is unspecified.
    #[must_use]
    pub fn to_mode(self) -> Option<Mode> {
        match self {
            Self::Unspecified => None,
            Self::Logical => Some(Mode::Logical),
            Self::Bwrap => Some(Mode::Bwrap),
            Self::Nsjail => Some(Mode::Nsjail),
            Self::Native => Some(Mode::Native),
            Self::Container => Some(Mode::Container),
        }
    }
}

impl From<Mode> for v1::SandboxMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::Logical,
            Mode::Bwrap => Self::Bwrap,
            Mode::Nsjail => Self::Nsjail,
            Mode::Native => Self::Native,
            Mode::Container => Self::Container,
        }
    }
}

impl v1::NetworkMode {
    /// The mode, or `None` if it is unspecified.
    #[must_use]
    pub fn to_mode(self) -> Option<NetworkMode> {
        match self {
            Self::Unspecified => None,
            Self::None => Some(NetworkMode::None),
            Self::Proxy => Some(NetworkMode::Proxy),
            Self::Host => Some(NetworkMode::Host),
        }
    }
}

impl From<NetworkMode> for v1::NetworkMode {
    fn from(mode: NetworkMode) -> Self {
        match mode {
            NetworkMode::None => Self::None,
            NetworkMode::Proxy => Self::Proxy,
            NetworkMode::Host => Self::Host,
        }
    }
}

impl From<&Limits> for v1::Limits {
    fn from(limits: &Limits) -> Self {
        Self {
            timeout: Some(duration_to_proto(limits.timeout)),
            memory_bytes: Some(limits.memory_bytes.cast_signed()),
            cpu_millicores: Some(limits.cpu_millicores.cast_signed()),
            pids: Some(limits.pids.cast_signed()),
            open_files: Some(limits.open_files.cast_signed()),
            output_bytes: Some(limits.output_bytes.cast_signed()),
            cpu_time: Some(duration_to_proto(limits.cpu_time)),
            file_bytes: Some(limits.file_bytes.cast_signed()),
            tmp_bytes: Some(limits.tmp_bytes.cast_signed()),
            disk_bytes: Some(limits.disk_bytes.cast_signed()),
            inodes: Some(limits.inodes.cast_signed()),
        }
    }
}

impl From<&LimitsRequest> for v1::Limits {
    fn from(limits: &LimitsRequest) -> Self {
        Self {
            timeout: limits.timeout.map(duration_to_proto),
            memory_bytes: limits.memory_bytes.map(u64::cast_signed),
            cpu_millicores: limits.cpu_millicores.map(u64::cast_signed),
            pids: limits.pids.map(u64::cast_signed),
            open_files: limits.open_files.map(u64::cast_signed),
            output_bytes: limits.output_bytes.map(u64::cast_signed),
            cpu_time: limits.cpu_time.map(duration_to_proto),
            file_bytes: limits.file_bytes.map(u64::cast_signed),
            tmp_bytes: limits.tmp_bytes.map(u64::cast_signed),
            disk_bytes: limits.disk_bytes.map(u64::cast_signed),
            inodes: limits.inodes.map(u64::cast_signed),
        }
    }
}

/// The name of a limit in a `Limits` message.
fn name(limit: Limit) -> &'static str {
    limit.field().trim_start_matches("limits.")
}

/// Converts limits of an internal message. The api has checked them against the ceilings.
pub(crate) fn read_requested_limits(wire: &v1::Limits) -> Result<LimitsRequest, InvalidField> {
    let time = |limit: Limit, wire: &Option<prost_types::Duration>| {
        wire.as_ref().map(|wire| read_duration(name(limit), wire)).transpose()
    };
    // An amount above `i64::MAX` arrives as a negative number and is refused here.
    let amount = |limit: Limit, wire: Option<i64>| wire.map(|wire| integer(name(limit), wire)).transpose();
    Ok(LimitsRequest {
        timeout: time(Limit::Timeout, &wire.timeout)?,
        memory_bytes: amount(Limit::MemoryBytes, wire.memory_bytes)?,
        cpu_millicores: amount(Limit::CpuMillicores, wire.cpu_millicores)?,
        pids: amount(Limit::Pids, wire.pids)?,
        open_files: amount(Limit::OpenFiles, wire.open_files)?,
        output_bytes: amount(Limit::OutputBytes, wire.output_bytes)?,
        cpu_time: time(Limit::CpuTime, &wire.cpu_time)?,
        file_bytes: amount(Limit::FileBytes, wire.file_bytes)?,
        tmp_bytes: amount(Limit::TmpBytes, wire.tmp_bytes)?,
        disk_bytes: amount(Limit::DiskBytes, wire.disk_bytes)?,
        inodes: amount(Limit::Inodes, wire.inodes)?,
    })
}

/// Converts limits of an internal message that must all be present.
pub(crate) fn read_limits(wire: &v1::Limits) -> Result<Limits, InvalidField> {
    let (read, defaults) = (read_requested_limits(wire)?, Limits::default());
    Ok(Limits {
        timeout: required(name(Limit::Timeout), read.timeout)?,
        memory_bytes: required(name(Limit::MemoryBytes), read.memory_bytes)?,
        cpu_millicores: required(name(Limit::CpuMillicores), read.cpu_millicores)?,
        pids: required(name(Limit::Pids), read.pids)?,
        open_files: required(name(Limit::OpenFiles), read.open_files)?,
        output_bytes: required(name(Limit::OutputBytes), read.output_bytes)?,
        cpu_time: required(name(Limit::CpuTime), read.cpu_time)?,
        file_bytes: required(name(Limit::FileBytes), read.file_bytes)?,
        tmp_bytes: required(name(Limit::TmpBytes), read.tmp_bytes)?,
        // Absent in messages of a former version.
        disk_bytes: read.disk_bytes.unwrap_or(defaults.disk_bytes),
        inodes: read.inodes.unwrap_or(defaults.inodes),
    })
}
