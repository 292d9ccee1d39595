//! A session as the table `sessions` has it.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::{
    Limits, LimitsRequest, NetworkPolicy, Policy, SessionFlags, SessionProfile, SessionScopes,
};
use codelia_types::{
    DiskMechanism, DiskUsage, KeyId, LeaseEpoch, Mode, NetworkMode, RunId, SessionId, TenantId,
    WorkerId,
};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, row, words::words};

/// Selects sessions with their live holder by a condition and its arguments.
macro_rules! select_sessions {
    ($spec:literal, $condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            "SELECT " + $spec + r#" AS "spec!: Json<SessionSpec>", s.id, s.tenant_id, s.alias,
                      s.labels AS "labels: Json<BTreeMap<String, String>>", s.state, s.end_reason,
                      s.created_at, s.expires_at, s.idle_ttl, s.ended_at, s.lease_epoch, s.allow_data_loss, s.created_by,
                      s.quarantined_at, s.quarantine_reason, s.quarantine_run,
                      s.network AS "network: Json<NetworkPolicy>", w.id AS "holder?", w.address AS "holder_address?",
                      d.bytes AS "disk_bytes?", d.inodes AS "disk_inodes?", d.mechanism AS "disk_mechanism?",
                      d.measured_at AS "disk_measured_at?"
               FROM sessions s
               LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                   AND w.lease_until > now()
               LEFT JOIN session_disk d ON d.session_id = s.id
               WHERE "# + $condition,
            $($argument),*
        )
        .try_map(|row| Ok($crate::session::record::session!(row)))
    };
}

/// Makes a [`Session`] from its columns.
macro_rules! session {
    ($row:ident) => {
        $crate::Session {
            id: codelia_types::SessionId($row.id),
            tenant: $crate::row::parse("sessions.tenant_id", &$row.tenant_id)?,
            created_by: $row.created_by.map(codelia_types::KeyId),
            alias: $row.alias,
            spec: $row.spec.0,
            network: $row.network.map(|json| json.0),
            labels: $row.labels.0,
            state: $crate::row::parse("sessions.state", &$row.state)?,
            end_reason: $crate::row::parse_optional(
                "sessions.end_reason",
                $row.end_reason.as_deref(),
            )?,
            created_at: $row.created_at,
            expires_at: $row.expires_at,
            idle_ttl: $row.idle_ttl.as_ref().map($crate::row::duration),
            allow_data_loss: $row.allow_data_loss,
            ended_at: $row.ended_at,
            holder: $crate::row::parse_optional("sessions.lease_worker", $row.holder.as_deref())?,
            lease_epoch: codelia_types::LeaseEpoch($row.lease_epoch),
            holder_address: $row.holder_address,
            quarantine: $row.quarantine_reason.zip($row.quarantined_at).map(|(reason, at)| {
                $crate::SessionQuarantine {
                    reason,
                    run: $row.quarantine_run.map(codelia_types::RunId),
                    at,
                }
            }),
            disk: $crate::session::record::disk_from_columns(
                $row.disk_bytes,
                $row.disk_inodes,
                $row.disk_mechanism.as_deref(),
                $row.disk_measured_at,
            )?,
        }
    };
}

pub(super) use {select_sessions, session};

/// The settings of a session, which its runs inherit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// The mode of its runs.
    pub mode: Mode,
    /// The limits of runs that request none.
    pub limits: Limits,
    /// The limits that were requested explicitly.
    #[serde(rename = "asked")]
    pub requested_limits: LimitsRequest,
    /// The network mode of runs that request none.
    pub network: Option<NetworkMode>,
    /// The policy of its runs. A run's own policy can only tighten it.
    pub policy: Policy,
    /// Decisions of mode flags about it.
    #[serde(default, skip_serializing_if = "SessionFlags::is_empty")]
    pub flags: SessionFlags,
    /// Decisions of the policies of its project and user about it.
    #[serde(default, skip_serializing_if = "SessionScopes::is_empty")]
    pub scopes: SessionScopes,
    /// The profile that it was created with. Its policy is part of `policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<SessionProfile>,
}

/// A session.
#[derive(Debug, Clone)]
pub struct Session {
    /// Identifies the session and its directory.
    pub id: SessionId,
    /// The tenant that owns it.
    pub tenant: TenantId,
    /// The key that created it.
    pub created_by: Option<KeyId>,
    /// A display name, unique among the tenant's open sessions.
    pub alias: Option<String>,
    /// The spec that it was created with.
    pub spec: SessionSpec,
    /// The network policy, if it was changed since.
    pub network: Option<NetworkPolicy>,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Whether it takes runs.
    pub state: SessionState,
    /// Why it ended.
    pub end_reason: Option<SessionEndReason>,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When it expires.
    pub expires_at: OffsetDateTime,
    /// How long it may be idle before it ends.
    pub idle_ttl: Option<Duration>,
    /// Whether it may start again empty if its files are lost.
    pub allow_data_loss: bool,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// The live worker that holds its lease.
    pub holder: Option<WorkerId>,
    /// The lease epoch. Every acquisition increments it.
    pub lease_epoch: LeaseEpoch,
    /// The address of the holder.
    pub holder_address: Option<String>,
    /// Why it takes no runs and no changes of its files.
    pub quarantine: Option<SessionQuarantine>,
    /// The use of its files, once they were measured.
    pub disk: Option<SessionDisk>,
}

/// Why a session takes no runs and no changes of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionQuarantine {
    /// Why.
    pub reason: String,
    /// The run because of which it was done; `None` if a file call was.
    pub run: Option<RunId>,
    /// When.
    pub at: OffsetDateTime,
}

/// The last measurement of the files of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionDisk {
    /// Bytes and inodes.
    pub usage: DiskUsage,
    /// The mechanism that limits them.
    pub mechanism: DiskMechanism,
    /// When they were measured.
    pub measured_at: OffsetDateTime,
}

words! {
    /// The state of a session.
    SessionState {
        /// The session accepts runs.
        Open = "open",
        /// The session accepts no runs. Its directory is or will be removed.
        Ended = "ended",
    }
}

words! {
    /// Why a session ended.
    SessionEndReason {
        /// A caller closed it.
        Closed = "closed",
        /// The expiry time came.
        Expired = "expired",
        /// The session was idle for too long.
        Idle = "idle",
        /// The files were lost.
        DataLost = "data_lost",
    }
}

/// How a caller refers to a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRef {
    /// By id.
    Id(SessionId),
    /// By alias. Matches only open sessions.
    Alias(String),
}

impl SessionRef {
    /// Id and alias as query arguments. One of them is set.
    pub(crate) fn columns(&self) -> (Option<Uuid>, Option<&str>) {
        match self {
            Self::Id(id) => (Some(id.0), None),
            Self::Alias(alias) => (None, Some(alias)),
        }
    }
}

/// The columns of `session_disk`, all null without a row.
pub(super) fn disk_from_columns(
    bytes: Option<i64>,
    inodes: Option<i64>,
    mechanism: Option<&str>,
    measured_at: Option<OffsetDateTime>,
) -> Result<Option<SessionDisk>, Error> {
    let (Some(bytes), Some(inodes), Some(mechanism), Some(measured_at)) =
        (bytes, inodes, mechanism, measured_at)
    else {
        return Ok(None);
    };
    let usage = DiskUsage { bytes: bytes.unsigned_abs(), inodes: inodes.unsigned_abs() };
    let mechanism = row::parse("session_disk.mechanism", mechanism)?;
    Ok(Some(SessionDisk { usage, mechanism, measured_at }))
}
