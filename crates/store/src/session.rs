//! The table `sessions`, but for its lease columns, which `lease.rs` owns.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::{Incarnation, LeaseEpoch, LimitsRequest, Mode, NetworkMode, SessionId, TenantId, WorkerId};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Quotas, Store};

/// What a session was created with; its runs start from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// Mode of its runs.
    pub mode: Mode,
    /// Limits asked for.
    pub limits: LimitsRequest,
    /// Network asked for.
    pub network: Option<NetworkMode>,
}

/// A session.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its name for people.
    pub alias: Option<String>,
    /// What it was created with.
    pub spec: SessionSpec,
    /// Free-form labels.
    pub labels: BTreeMap<String, String>,
    /// Whether it takes runs.
    pub state: SessionState,
    /// Why it ended.
    pub end_reason: Option<EndReason>,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When it ends at the latest.
    pub expires_at: OffsetDateTime,
    /// It also ends when it was idle for this long.
    pub idle_ttl: Option<Duration>,
    /// When it ended.
    pub ended_at: Option<OffsetDateTime>,
    /// Who holds it; `None` if nobody live does.
    pub holder: Option<WorkerId>,
    /// Raised each time a worker takes it.
    pub lease_epoch: LeaseEpoch,
    /// Where an api reaches the holder.
    pub holder_address: Option<String>,
}

/// Whether a session takes runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionState {
    /// It does.
    Open,
    /// It does not; its directory is gone or being removed.
    Ended,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndReason {
    /// Its caller closed it.
    Closed,
    /// Its absolute time was over.
    Expired,
    /// It was idle for too long.
    Idle,
}

/// How a caller names a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRef {
    /// By id.
    Id(SessionId),
    /// By alias; finds open sessions alone.
    Alias(String),
}

/// A session to be created.
#[derive(Debug)]
pub struct NewSession<'a> {
    /// Its id.
    pub id: SessionId,
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// Its name for people.
    pub alias: Option<&'a str>,
    /// What it is created with.
    pub spec: &'a SessionSpec,
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Absolute time to live.
    pub ttl: Duration,
    /// Idle time to live.
    pub idle_ttl: Option<Duration>,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
}

/// What became of a session to be created.
#[derive(Debug)]
pub enum SessionCreated {
    /// It is new.
    New(Box<Session>),
    /// The idempotency key is known, with the same request: the first session.
    Known(Box<Session>),
    /// The idempotency key is known, with another request.
    KeyReused,
    /// The tenant has as many open sessions as it may.
    OverQuota,
}

impl Store {
    /// Creates a session, within the tenant's quota.
    ///
    /// # Errors
    /// [`Error::Exists`] if an open session has the alias.
    pub async fn session_create(&self, new: NewSession<'_>, quotas: Quotas) -> Result<SessionCreated, Error> {
        todo!()
    }

    /// Returns a tenant's session.
    pub async fn session_get(&self, tenant: &TenantId, which: &SessionRef) -> Result<Option<Session>, Error> {
        todo!()
    }

    /// Lists a tenant's sessions, newest first, before `before`.
    pub async fn session_list(
        &self,
        tenant: &TenantId,
        state: Option<SessionState>,
        before: Option<SessionId>,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        todo!()
    }

    /// Moves an open session's end to `ttl` from now. `None` if it is not there or not open.
    pub async fn session_extend(
        &self,
        tenant: &TenantId,
        which: &SessionRef,
        ttl: Duration,
    ) -> Result<Option<Session>, Error> {
        todo!()
    }

    /// Ends a session as closed and its queued runs as canceled. An ended one stays as it is.
    pub async fn session_close(&self, tenant: &TenantId, which: &SessionRef) -> Result<Option<Session>, Error> {
        todo!()
    }

    /// Ends open sessions of any tenant whose absolute or idle time is over and that have no run
    /// that has not ended. Returns how many.
    pub async fn session_expire_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        todo!()
    }

    /// Ended sessions with files on this root that no other live worker holds.
    pub async fn session_list_removable(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        root_id: Uuid,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        todo!()
    }

    /// Records that an ended session's directory is gone, and ends its lease.
    pub async fn session_removed(&self, id: SessionId, root_id: Uuid) -> Result<(), Error> {
        todo!()
    }

    /// Of these ids, those that are not open or have their files on another root: directories of
    /// theirs found on this root belong to nobody.
    pub async fn session_orphans(&self, root_id: Uuid, ids: &[SessionId]) -> Result<Vec<SessionId>, Error> {
        todo!()
    }

    /// Deletes the rows of sessions that ended longer ago than `keep`, with their runs and output.
    pub async fn session_purge_any_tenant(&self, keep: Duration, limit: i64) -> Result<u64, Error> {
        todo!()
    }
}
