//! The table `sessions`, but for its lease columns, which `lease.rs` owns.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use codelia_policy::{Limits, LimitsRequest, Policy};
use codelia_types::{
    Incarnation, LeaseEpoch, LeaseToken, Mode, NetworkMode, Outcome, Reason, Refusal, SessionId, TenantId,
    WorkerId,
};
use serde::{Deserialize, Serialize};
use sqlx::{PgExecutor, postgres::types::PgInterval, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Quotas, Store, error::is_unique_violation, row, tenant::QUOTA_MARGIN};

/// Reads sessions with their live holder; the condition and its arguments follow.
macro_rules! select_sessions {
    ($condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            SessionRow,
            r#"SELECT s.id, s.tenant_id, s.alias, s.spec AS "spec: Json<SessionSpec>",
                      s.labels AS "labels: Json<BTreeMap<String, String>>", s.state, s.end_reason,
                      s.created_at, s.expires_at, s.idle_ttl, s.ended_at, s.lease_epoch, s.allow_data_loss,
                      w.id AS "holder?", w.address AS "holder_address?"
               FROM sessions s
               LEFT JOIN workers w ON w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                   AND w.lease_until > now()
               WHERE "# + $condition,
            $($argument),*
        )
    };
}

/// What a session was created with; its runs start from it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// Mode of its runs.
    pub mode: Mode,
    /// Limits of its runs, unless they ask for others.
    pub limits: Limits,
    /// Which of the limits somebody asked for.
    #[serde(rename = "asked")]
    pub requested_limits: LimitsRequest,
    /// Network of its runs, unless they ask for another.
    pub network: Option<NetworkMode>,
    /// What its runs may do; a run's own policy can only tighten it.
    pub policy: Policy,
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
    pub end_reason: Option<SessionEndReason>,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When it ends at the latest.
    pub expires_at: OffsetDateTime,
    /// It also ends when it was idle for this long.
    pub idle_ttl: Option<Duration>,
    /// Whether it starts again empty if its files are gone.
    pub allow_data_loss: bool,
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
pub enum SessionEndReason {
    /// Its caller closed it.
    Closed,
    /// Its absolute time was over.
    Expired,
    /// It was idle for too long.
    Idle,
    /// Its files were found to be gone.
    DataLost,
}

impl SessionState {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Ended => "ended",
        }
    }
}

impl FromStr for SessionState {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        [Self::Open, Self::Ended].into_iter().find(|state| state.as_str() == text).ok_or(())
    }
}

impl FromStr for SessionEndReason {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text {
            "closed" => Ok(Self::Closed),
            "expired" => Ok(Self::Expired),
            "idle" => Ok(Self::Idle),
            "data_lost" => Ok(Self::DataLost),
            _ => Err(()),
        }
    }
}

/// How a caller names a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionRef {
    /// By id.
    Id(SessionId),
    /// By alias; finds open sessions alone.
    Alias(String),
}

impl SessionRef {
    /// Id and alias, one of them set, as statements take them.
    pub(crate) fn columns(&self) -> (Option<Uuid>, Option<&str>) {
        match self {
            Self::Id(id) => (Some(id.0), None),
            Self::Alias(alias) => (None, Some(alias)),
        }
    }
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
    /// Whether it starts again empty if its files are gone.
    pub allow_data_loss: bool,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
}

/// What became of a session to be created.
#[derive(Debug)]
pub enum SessionCreated {
    /// It is new.
    New(Box<Session>),
    /// The idempotency key is known, with the same request: the first session.
    Existing(Box<Session>),
    /// The idempotency key is known, with another request.
    KeyReused,
    /// The tenant has as many open sessions as it may.
    OverQuota,
}

impl Store {
    /// Creates a session, within the tenant's quota.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if an open session has the alias.
    pub async fn session_create(&self, new: NewSession<'_>, quotas: Quotas) -> Result<SessionCreated, Error> {
        if !self.session_insert(&self.pool, &new, quotas.sessions - QUOTA_MARGIN).await? {
            if let Some(known) = self.session_known(&new).await? {
                return Ok(known);
            }
            // Near the quota creations wait for each other, so that none slips through.
            let mut tx = self.tenant_lock(new.tenant).await?;
            let inserted = self.session_insert(&mut *tx, &new, quotas.sessions).await?;
            tx.commit().await?;
            if !inserted {
                return Ok(self.session_known(&new).await?.unwrap_or(SessionCreated::OverQuota));
            }
        }
        let session = self.session_get(new.tenant, &SessionRef::Id(new.id)).await?;
        session
            .map(|session| SessionCreated::New(Box::new(session)))
            .ok_or(Error::RowMissing { what: "session" })
    }

    async fn session_insert(
        &self,
        on: impl PgExecutor<'_>,
        new: &NewSession<'_>,
        most: i64,
    ) -> Result<bool, Error> {
        let inserted = sqlx::query_file!(
            "src/sql/session_create.sql",
            new.id.0,
            new.tenant.as_str(),
            new.alias,
            Json(new.spec) as _,
            Json(new.labels) as _,
            row::interval(new.ttl),
            new.idle_ttl.map(row::interval),
            new.idempotency.map(|(key, _)| key),
            new.idempotency.map(|(_, hash)| hash),
            most,
            new.allow_data_loss,
        )
        .fetch_optional(on)
        .await;
        match inserted {
            Ok(row) => Ok(row.is_some()),
            Err(error) if is_unique_violation(&error, "sessions_by_alias") => {
                Err(Error::AlreadyExists { what: "the alias" })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The session that an idempotency key stands for already.
    async fn session_known(&self, new: &NewSession<'_>) -> Result<Option<SessionCreated>, Error> {
        let Some((key, hash)) = new.idempotency else { return Ok(None) };
        let found = sqlx::query!(
            "SELECT id, request_hash FROM sessions WHERE tenant_id = $1 AND idempotency_key = $2",
            new.tenant.as_str(),
            key,
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(found) = found else { return Ok(None) };
        if found.request_hash.as_deref() != Some(hash) {
            return Ok(Some(SessionCreated::KeyReused));
        }
        let session = self.session_get(new.tenant, &SessionRef::Id(SessionId(found.id))).await?;
        Ok(session.map(|session| SessionCreated::Existing(Box::new(session))))
    }

    /// Returns a tenant's session.
    pub async fn session_get(&self, tenant: &TenantId, which: &SessionRef) -> Result<Option<Session>, Error> {
        let (id, alias) = which.columns();
        select_sessions!(
            "s.tenant_id = $1 AND (s.id = $2 OR (s.alias = $3 AND s.state = 'open'))",
            tenant.as_str(),
            id,
            alias,
        )
        .fetch_optional(&self.pool)
        .await?
        .map(Session::try_from)
        .transpose()
    }

    /// Lists a tenant's sessions, newest first, before `before`.
    pub async fn session_list(
        &self,
        tenant: &TenantId,
        state: Option<SessionState>,
        before: Option<SessionId>,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        select_sessions!(
            "s.tenant_id = $1 AND ($2::text IS NULL OR s.state = $2) AND ($3::uuid IS NULL OR s.id < $3)
             ORDER BY s.id DESC LIMIT $4",
            tenant.as_str(),
            state.map(SessionState::as_str),
            before.map(|id| id.0),
            limit,
        )
        .fetch_all(&self.pool)
        .await?
        .into_iter()
        .map(Session::try_from)
        .collect()
    }

    /// Moves an open session's end to `ttl` from now. `None` if it is not there or not open.
    pub async fn session_extend(
        &self,
        tenant: &TenantId,
        which: &SessionRef,
        ttl: Duration,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = which.columns();
        let extended = sqlx::query_scalar!(
            "UPDATE sessions SET expires_at = now() + $4::interval
             WHERE tenant_id = $1 AND (id = $2 OR alias = $3) AND state = 'open' AND expires_at > now()
             RETURNING id",
            tenant.as_str(),
            id,
            alias,
            row::interval(ttl),
        )
        .fetch_optional(&self.pool)
        .await?;
        match extended {
            Some(id) => self.session_get(tenant, &SessionRef::Id(SessionId(id))).await,
            None => Ok(None),
        }
    }

    /// Notes that a file call uses an open session; `false` if it is not open. Written only when the time is
    /// first set, or what is known is a tenth of the idle time old.
    pub async fn session_use(&self, tenant: &TenantId, id: SessionId) -> Result<bool, Error> {
        let open = sqlx::query_scalar!(
            r#"WITH used AS (
                   UPDATE sessions SET used_at = now()
                   WHERE tenant_id = $1 AND id = $2 AND state = 'open' AND expires_at > now()
                     AND (used_at IS NULL OR used_at < now() - idle_ttl / 10)
               )
               SELECT state = 'open' AND expires_at > now() AS "open!"
               FROM sessions WHERE tenant_id = $1 AND id = $2"#,
            tenant.as_str(),
            id.0,
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(open.unwrap_or(false))
    }

    /// Ends a session as closed and its queued runs as canceled. An ended one stays as it is.
    pub async fn session_close(
        &self,
        tenant: &TenantId,
        which: &SessionRef,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = which.columns();
        let found = sqlx::query_file_scalar!("src/sql/session_close.sql", tenant.as_str(), id, alias)
            .fetch_optional(&self.pool)
            .await?;
        match found {
            Some(id) => self.session_get(tenant, &SessionRef::Id(SessionId(id))).await,
            None => Ok(None),
        }
    }

    /// Ends a session whose files its holder cannot find. Its queued runs are refused.
    pub async fn session_data_lost(&self, id: SessionId, lease: &LeaseToken) -> Result<(), Error> {
        let refused = Outcome::Refused(Refusal {
            reason: Reason::SessionDataLost,
            message: "the session's files are gone".into(),
        });
        sqlx::query_file!(
            "src/sql/session_data_lost.sql",
            id.0,
            lease.worker.as_str(),
            lease.incarnation.0,
            lease.epoch.0,
            Json(refused) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Ends open sessions of any tenant whose absolute or idle time is over and that have no run
    /// that has not ended. Returns how many.
    pub async fn session_expire_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let ended = sqlx::query_file!("src/sql/session_expire.sql", limit).execute(&self.pool).await?;
        Ok(ended.rows_affected())
    }

    /// Ended sessions with files on this root that no other live worker holds.
    pub async fn session_list_removable(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        root_id: Uuid,
        limit: i64,
    ) -> Result<Vec<SessionId>, Error> {
        let ids = sqlx::query_scalar!(
            "SELECT s.id FROM sessions s
             WHERE s.state = 'ended' AND s.removed_at IS NULL AND s.home_root = $3
               AND ((s.lease_worker = $1 AND s.lease_incarnation = $2)
                    OR NOT EXISTS (SELECT 1 FROM workers w
                                   WHERE w.id = s.lease_worker AND w.incarnation = s.lease_incarnation
                                     AND w.lease_until > now()))
             ORDER BY s.ended_at LIMIT $4",
            worker.as_str(),
            incarnation.0,
            root_id,
            limit,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(ids.into_iter().map(SessionId).collect())
    }

    /// Records that an ended session's directory is gone, and ends its lease. Does nothing while a
    /// run of it is running: that one must be committed first.
    pub async fn session_removed(&self, id: SessionId, root_id: Uuid) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE sessions s SET removed_at = now(), lease_worker = NULL, lease_incarnation = NULL
             WHERE s.id = $1 AND s.state = 'ended' AND s.home_root = $2 AND s.removed_at IS NULL
               AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id AND r.state = 'running')",
            id.0,
            root_id,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Of these ids, those that are unknown, removed, or have their files on another root:
    /// directories of theirs found on this root belong to nobody.
    pub async fn session_orphans(&self, root_id: Uuid, ids: &[SessionId]) -> Result<Vec<SessionId>, Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        let orphans = sqlx::query_scalar!(
            r#"SELECT found.id AS "id!" FROM unnest($2::uuid[]) AS found (id)
               LEFT JOIN sessions s ON s.id = found.id
               -- An ended one is removed in the ordinary way, unless that was done already.
               WHERE s.id IS NULL OR s.removed_at IS NOT NULL OR s.home_root IS DISTINCT FROM $1"#,
            root_id,
            &ids,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(orphans.into_iter().map(SessionId).collect())
    }

    /// Deletes the rows of sessions that ended longer ago than `keep`, with their runs and output.
    pub async fn session_purge_any_tenant(&self, keep: Duration, limit: i64) -> Result<u64, Error> {
        let purged = sqlx::query!(
            "WITH old AS (
                 SELECT id FROM sessions
                 WHERE state = 'ended' AND removed_at IS NOT NULL AND ended_at < now() - $1::interval
                   AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = sessions.id AND r.state <> 'ended')
                 LIMIT $2 FOR UPDATE SKIP LOCKED
             ),
             runs_gone AS (DELETE FROM runs USING old WHERE runs.session_id = old.id)
             DELETE FROM sessions USING old WHERE sessions.id = old.id",
            row::interval(keep),
            limit,
        )
        .execute(&self.pool)
        .await?;
        Ok(purged.rows_affected())
    }
}

struct SessionRow {
    id: Uuid,
    tenant_id: String,
    alias: Option<String>,
    spec: Json<SessionSpec>,
    labels: Json<BTreeMap<String, String>>,
    state: String,
    end_reason: Option<String>,
    created_at: OffsetDateTime,
    expires_at: OffsetDateTime,
    idle_ttl: Option<PgInterval>,
    allow_data_loss: bool,
    ended_at: Option<OffsetDateTime>,
    lease_epoch: i64,
    holder: Option<String>,
    holder_address: Option<String>,
}

impl TryFrom<SessionRow> for Session {
    type Error = Error;

    fn try_from(row: SessionRow) -> Result<Self, Error> {
        Ok(Self {
            id: SessionId(row.id),
            tenant: row::parse("sessions.tenant_id", &row.tenant_id)?,
            alias: row.alias,
            spec: row.spec.0,
            labels: row.labels.0,
            state: row::parse("sessions.state", &row.state)?,
            end_reason: row.end_reason.map(|text| row::parse("sessions.end_reason", &text)).transpose()?,
            created_at: row.created_at,
            expires_at: row.expires_at,
            idle_ttl: row.idle_ttl.as_ref().map(row::duration),
            allow_data_loss: row.allow_data_loss,
            ended_at: row.ended_at,
            holder: row.holder.map(|text| row::parse("sessions.lease_worker", &text)).transpose()?,
            lease_epoch: LeaseEpoch(row.lease_epoch),
            holder_address: row.holder_address,
        })
    }
}
