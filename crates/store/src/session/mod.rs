//! The table `sessions`, except for its lease columns, which `lease.rs` owns.

mod create;
mod disk;
mod end;
mod network;
mod quarantine;
mod update;

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use codelia_policy::{
    Limits, LimitsRequest, NetworkPolicy, Policy, SessionFlags, SessionProfile, SessionScopes,
};
use codelia_types::{KeyId, LeaseEpoch, Mode, NetworkMode, RunId, SessionId, TenantId, WorkerId};
use serde::{Deserialize, Serialize};
use sqlx::{postgres::types::PgInterval, types::Json};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Store, row};

pub use create::{NewSession, SessionCreated};
pub use disk::{DiskReport, DiskReported, SessionDisk, TenantDisk};
pub use network::SessionNetwork;
pub use quarantine::SessionQuarantine;
pub use update::SessionChange;

/// Selects sessions with their live holder by a condition and its arguments.
macro_rules! select_sessions {
    ($spec:literal, $condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            SessionRow,
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
    };
}

/// Reads sessions without their policies.
macro_rules! list_sessions {
    ($store:ident, $condition:literal, $($argument:expr),* $(,)?) => {
        select_sessions!("jsonb_set(s.spec, '{policy}', '{}')", $condition, $($argument),*)
            .fetch_all(&$store.pools.reads)
            .await?
    };
}

/// Sessions that are searched for labels before the index of labels is.
const LABEL_WINDOW: i64 = 2000;

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
    /// What mode flags decided about it.
    #[serde(default, skip_serializing_if = "SessionFlags::is_empty")]
    pub flags: SessionFlags,
    /// What the policies of its project and user decided about it.
    #[serde(default, skip_serializing_if = "SessionScopes::is_empty")]
    pub scopes: SessionScopes,
    /// The profile that it was created with. Its policy is part of `policy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<SessionProfile>,
}

/// A session.
#[derive(Debug, Clone)]
pub struct Session {
    /// The id.
    pub id: SessionId,
    /// The tenant.
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
    /// The state.
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
    /// What its files use, once they were measured.
    pub disk: Option<SessionDisk>,
}

/// The state of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionState {
    /// It accepts runs.
    Open,
    /// It accepts no runs. Its directory is or will be removed.
    Ended,
}

/// Why a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEndReason {
    /// A caller closed it.
    Closed,
    /// It reached its expiry time.
    Expired,
    /// It was idle for too long.
    Idle,
    /// Its files were lost.
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

impl SessionEndReason {
    /// The word for the reason in the database and in error details.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Expired => "expired",
            Self::Idle => "idle",
            Self::DataLost => "data_lost",
        }
    }
}

impl FromStr for SessionEndReason {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let all = [Self::Closed, Self::Expired, Self::Idle, Self::DataLost];
        all.into_iter().find(|reason| reason.as_str() == text).ok_or(())
    }
}

/// Which sessions to list.
#[derive(Debug, Clone, Default)]
pub struct SessionFilter {
    /// Sessions in this state.
    pub state: Option<SessionState>,
    /// Sessions that have all these labels.
    pub labels: BTreeMap<String, String>,
    /// Sessions older than this one.
    pub before: Option<SessionId>,
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

impl Store {
    /// Returns the id and spec of a tenant's session, without the cost of [`Store::session_get`].
    pub async fn session_spec(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<(SessionId, SessionSpec)>, Error> {
        let (id, alias) = session.columns();
        let row = sqlx::query!(
            r#"SELECT id, spec AS "spec: Json<SessionSpec>" FROM sessions
               WHERE tenant_id = $1 AND (id = $2 OR (alias = $3 AND state = 'open'))"#,
            tenant.as_str(),
            id,
            alias,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(row.map(|row| (SessionId(row.id), row.spec.0)))
    }

    /// Returns a tenant's session.
    pub async fn session_get(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = session.columns();
        select_sessions!(
            "s.spec",
            "s.tenant_id = $1 AND (s.id = $2 OR (s.alias = $3 AND s.state = 'open'))",
            tenant.as_str(),
            id,
            alias,
        )
        .fetch_optional(&self.pools.runs)
        .await?
        .map(Session::try_from)
        .transpose()
    }

    /// Returns the session with this alias that ended last.
    pub async fn session_last_ended(
        &self,
        tenant: &TenantId,
        alias: &str,
    ) -> Result<Option<Session>, Error> {
        select_sessions!(
            "s.spec",
            "s.tenant_id = $1 AND s.alias = $2 AND s.state = 'ended' ORDER BY s.ended_at DESC LIMIT 1",
            tenant.as_str(),
            alias,
        )
        .fetch_optional(&self.pools.runs)
        .await?
        .map(Session::try_from)
        .transpose()
    }

    /// Lists a tenant's sessions, newest first. Leaves out their policies, which may be large. Each
    /// kind of filter has a statement that reads little more than the rows of the page.
    pub async fn session_list(
        &self,
        tenant: &TenantId,
        filter: &SessionFilter,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        let before = filter.before.map_or(Uuid::max(), |id| id.0);
        let rows = match filter.state {
            _ if !filter.labels.is_empty() => {
                return self.session_list_labeled(tenant, filter, limit).await;
            }
            None => list_sessions!(
                self,
                "s.tenant_id = $1 AND s.id < $2 ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
            Some(SessionState::Open) => list_sessions!(
                self,
                "s.open_tenant = $1 AND s.id < $2 ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
            Some(SessionState::Ended) => list_sessions!(
                self,
                "s.tenant_id = $1 AND s.id < $2 AND s.state = 'ended' ORDER BY s.id DESC LIMIT $3",
                tenant.as_str(),
                before,
                limit,
            ),
        };
        rows.into_iter().map(Session::try_from).collect()
    }

    /// Looks for labels among the next sessions in the order of the page, which suffices if many
    /// have them, and else by the index of labels, which is fast if few have them.
    async fn session_list_labeled(
        &self,
        tenant: &TenantId,
        filter: &SessionFilter,
        limit: i64,
    ) -> Result<Vec<Session>, Error> {
        let before = filter.before.map_or(Uuid::max(), |id| id.0);
        let states: Vec<&str> = match filter.state {
            Some(state) => vec![state.as_str()],
            None => vec![SessionState::Open.as_str(), SessionState::Ended.as_str()],
        };
        let next = list_sessions!(
            self,
            "s.id = ANY (ARRAY(
                 SELECT id FROM (SELECT id, state, labels FROM sessions
                                 WHERE tenant_id = $1 AND id < $2 ORDER BY id DESC LIMIT $6) AS next
                 WHERE state = ANY ($4) AND labels @> $5 ORDER BY id DESC LIMIT $3))
             ORDER BY s.id DESC",
            tenant.as_str(),
            before,
            limit,
            &states as _,
            Json(&filter.labels) as _,
            LABEL_WINDOW,
        );
        if i64::try_from(next.len()).is_ok_and(|found| found >= limit) {
            return next.into_iter().map(Session::try_from).collect();
        }
        list_sessions!(
            self,
            "s.id = ANY (ARRAY(SELECT id FROM sessions
                               WHERE label_tokens(tenant_id, labels) @> label_tokens($1, $5) AND labels <> '{}'))
               -- Not by the index of tenants, which has all other sessions too.
               AND s.tenant_id || '' = $1 AND s.id < $2 AND s.state = ANY ($4)
             ORDER BY s.id DESC LIMIT $3",
            tenant.as_str(),
            before,
            limit,
            &states as _,
            Json(&filter.labels) as _,
        )
        .into_iter()
        .map(Session::try_from)
        .collect()
    }

    /// Sets the expiry of an open session to `ttl` from now. Returns `None` if the tenant has no
    /// such open session.
    pub async fn session_extend(
        &self,
        tenant: &TenantId,
        session: &SessionRef,
        ttl: Duration,
    ) -> Result<Option<Session>, Error> {
        let (id, alias) = session.columns();
        let extended = sqlx::query_scalar!(
            "UPDATE sessions SET expires_at = now() + $4::interval, check_at = now()
             WHERE tenant_id = $1 AND (id = $2 OR alias = $3) AND state = 'open' AND expires_at > now()
             RETURNING id",
            tenant.as_str(),
            id,
            alias,
            row::interval(ttl),
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        match extended {
            Some(id) => self.session_get(tenant, &SessionRef::Id(SessionId(id))).await,
            None => Ok(None),
        }
    }

    /// Records that a file call uses an open session. Returns `false` if it is not open. Writes
    /// only if no use was recorded yet, or the last one is older than a tenth of the idle time.
    pub async fn session_touch(&self, tenant: &TenantId, id: SessionId) -> Result<bool, Error> {
        let open = sqlx::query_scalar!(
            r#"WITH touched AS (
                   UPDATE sessions SET used_at = now()
                   WHERE tenant_id = $1 AND id = $2 AND state = 'open' AND expires_at > now()
                     AND (used_at IS NULL OR used_at < now() - idle_ttl / 10)
               )
               SELECT state = 'open' AND expires_at > now() AS "open!"
               FROM sessions WHERE tenant_id = $1 AND id = $2"#,
            tenant.as_str(),
            id.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(open.unwrap_or(false))
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
    created_by: Option<Uuid>,
    ended_at: Option<OffsetDateTime>,
    lease_epoch: i64,
    network: Option<Json<NetworkPolicy>>,
    holder: Option<String>,
    holder_address: Option<String>,
    quarantined_at: Option<OffsetDateTime>,
    quarantine_reason: Option<String>,
    quarantine_run: Option<Uuid>,
    disk_bytes: Option<i64>,
    disk_inodes: Option<i64>,
    disk_mechanism: Option<String>,
    disk_measured_at: Option<OffsetDateTime>,
}

impl TryFrom<SessionRow> for Session {
    type Error = Error;

    fn try_from(row: SessionRow) -> Result<Self, Error> {
        let quarantine = row.quarantine_reason.zip(row.quarantined_at);
        let disk = disk::from_columns(
            row.disk_bytes,
            row.disk_inodes,
            row.disk_mechanism.as_deref(),
            row.disk_measured_at,
        )?;
        Ok(Self {
            id: SessionId(row.id),
            tenant: row::parse("sessions.tenant_id", &row.tenant_id)?,
            quarantine: quarantine.map(|(reason, at)| SessionQuarantine {
                reason,
                run: row.quarantine_run.map(RunId),
                at,
            }),
            created_by: row.created_by.map(KeyId),
            alias: row.alias,
            spec: row.spec.0,
            network: row.network.map(|json| json.0),
            labels: row.labels.0,
            state: row::parse("sessions.state", &row.state)?,
            end_reason: row
                .end_reason
                .map(|text| row::parse("sessions.end_reason", &text))
                .transpose()?,
            created_at: row.created_at,
            expires_at: row.expires_at,
            idle_ttl: row.idle_ttl.as_ref().map(row::duration),
            allow_data_loss: row.allow_data_loss,
            ended_at: row.ended_at,
            holder: row
                .holder
                .map(|text| row::parse("sessions.lease_worker", &text))
                .transpose()?,
            lease_epoch: LeaseEpoch(row.lease_epoch),
            holder_address: row.holder_address,
            disk,
        })
    }
}
