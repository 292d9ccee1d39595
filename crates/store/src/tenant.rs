//! The table `tenants`: quotas, highest limits and isolation floors.

use codelia_policy::{IsolationLevel, LimitsRequest};
use codelia_types::{KeyId, TenantId};
use serde::Serialize;
use serde_json::json;
use sqlx::{PgConnection, PgExecutor, types::Json};
use time::OffsetDateTime;

use crate::{Error, EventBody, EventKind, EventSubject, Store, TenantRetention, row};

/// Within this margin of a quota, inserts of a tenant are serialized so that they cannot exceed it
/// together. Below it they run concurrently: fewer than this many are in flight.
pub(crate) const QUOTA_MARGIN: i64 = 64;

/// A tenant.
#[derive(Debug, Clone)]
pub struct Tenant {
    /// The name that keys and rows refer to.
    pub id: TenantId,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// The most that it may have or do at once.
    pub quotas: Quotas,
    /// The highest limits that its sessions and runs may request, where they differ from the
    /// installation's.
    pub max_limits: LimitsRequest,
    /// The minimum isolation of its sessions and runs.
    pub floor: IsolationFloor,
    /// When an operator suspended it, and why.
    pub suspension: Option<(OffsetDateTime, String)>,
    /// When an operator deleted it. Its rows follow.
    pub deleted_at: Option<OffsetDateTime>,
    /// How long its rows are kept, where it differs from the installation.
    pub retention: TenantRetention,
}

/// The minimum isolation of a tenant's sessions and runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IsolationFloor {
    /// The minimum level.
    pub level: IsolationLevel,
    /// The lowest level that a run may request with an approval; `None` for none below `level`.
    pub ask: Option<IsolationLevel>,
    /// The decision that set it. A tenant without one has the highest level.
    pub decision: Option<FloorDecision>,
}

/// Who set an isolation floor, when and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FloorDecision {
    /// The reason that was given.
    pub reason: String,
    /// The key that set it; `None` if the installation itself did.
    pub key: Option<KeyId>,
    /// When it was set.
    pub at: OffsetDateTime,
}

/// The quotas of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Open sessions.
    pub sessions: i64,
    /// Unfinished runs.
    pub concurrent_runs: i64,
    /// Queued runs.
    pub queued_runs: i64,
    /// Requests per second and api process.
    pub requests_per_second: i64,
    /// Bytes of run output kept.
    pub output_bytes: i64,
    /// Bytes of the files of its sessions.
    pub disk_bytes: i64,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            sessions: 1_000,
            concurrent_runs: 1_000,
            queued_runs: 1_000,
            requests_per_second: 5_000,
            output_bytes: 10 * 1024 * 1024 * 1024,
            disk_bytes: 100 * 1024 * 1024 * 1024,
        }
    }
}

/// A change of quotas. `None` keeps the current value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct QuotasChange {
    /// See [`Quotas::sessions`].
    pub sessions: Option<i64>,
    /// See [`Quotas::concurrent_runs`].
    pub concurrent_runs: Option<i64>,
    /// See [`Quotas::queued_runs`].
    pub queued_runs: Option<i64>,
    /// See [`Quotas::requests_per_second`].
    pub requests_per_second: Option<i64>,
    /// See [`Quotas::output_bytes`].
    pub output_bytes: Option<i64>,
    /// See [`Quotas::disk_bytes`].
    pub disk_bytes: Option<i64>,
}

/// The current usage of a tenant.
#[derive(Debug, Clone, Copy, Default)]
pub struct TenantUsage {
    /// Open sessions.
    pub sessions: i64,
    /// Unfinished runs.
    pub concurrent_runs: i64,
    /// Queued runs.
    pub queued_runs: i64,
    /// Bytes of run output kept.
    pub output_bytes: i64,
    /// Bytes of the files of its sessions.
    pub disk_bytes: i64,
}

/// The bytes that a tenant stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredBytes {
    /// Output of runs.
    pub output: i64,
    /// Files of sessions.
    pub disk: i64,
}

/// A statement that returns tenants: its text up to the columns, the text after them, and its
/// arguments.
macro_rules! tenants {
    ($before:literal, $after:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            $before
                + r#" id, created_at, quota_sessions, quota_concurrent_runs, quota_queued_runs,
                      quota_requests_per_second, quota_output_bytes, quota_disk_bytes,
                      max_limits AS "max_limits: Json<LimitsRequest>",
                      isolation_floor, isolation_ask_floor, floor_reason, floor_key, floor_set_at,
                      suspended_at, suspend_reason, deleted_at,
                      retention_runs, retention_output, retention_audit "#
                + $after,
            $($argument),*
        )
        .try_map(|row| {
            Ok(Tenant {
                id: row::parse("tenants.id", &row.id)?,
                created_at: row.created_at,
                quotas: Quotas {
                    sessions: row.quota_sessions,
                    concurrent_runs: row.quota_concurrent_runs,
                    queued_runs: row.quota_queued_runs,
                    requests_per_second: row.quota_requests_per_second,
                    output_bytes: row.quota_output_bytes,
                    disk_bytes: row.quota_disk_bytes,
                },
                max_limits: row.max_limits.0,
                floor: IsolationFloor {
                    level: row::parse("tenants.isolation_floor", &row.isolation_floor)?,
                    ask: row::parse_optional("tenants.isolation_ask_floor", row.isolation_ask_floor.as_deref())?,
                    decision: row.floor_reason.zip(row.floor_set_at).map(|(reason, at)| FloorDecision {
                        reason,
                        key: row.floor_key.map(KeyId),
                        at,
                    }),
                },
                suspension: row.suspended_at.zip(row.suspend_reason),
                deleted_at: row.deleted_at,
                retention: TenantRetention {
                    runs: row.retention_runs.as_ref().map(row::duration),
                    output: row.retention_output.as_ref().map(row::duration),
                    audit: row.retention_audit.as_ref().map(row::duration),
                },
            })
        })
    };
}

impl Store {
    /// Creates a tenant.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if the id is taken.
    pub async fn tenant_create(&self, id: &TenantId, quotas: Quotas) -> Result<Tenant, Error> {
        tenant_insert(&self.pools.runs, id, quotas)
            .await?
            .ok_or(Error::AlreadyExists { what: "tenant id" })
    }

    /// Returns a tenant.
    pub async fn tenant_get(&self, id: &TenantId) -> Result<Option<Tenant>, Error> {
        let found = tenants!("SELECT", "FROM tenants WHERE id = $1", id.as_str());
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Lists tenants in the order of their ids, after `after`. For operators.
    pub async fn tenant_list_any_tenant(
        &self,
        after: Option<&TenantId>,
        limit: i64,
    ) -> Result<Vec<Tenant>, Error> {
        let page = tenants!(
            "SELECT",
            "FROM tenants WHERE id > $1 ORDER BY id LIMIT $2",
            after.map_or("", TenantId::as_str),
            limit,
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Changes a tenant's quotas. For operators.
    pub async fn tenant_set_quotas(
        &self,
        id: &TenantId,
        change: QuotasChange,
    ) -> Result<Option<Tenant>, Error> {
        let updated = tenants!(
            "UPDATE tenants SET
                 quota_sessions = coalesce($2, quota_sessions),
                 quota_concurrent_runs = coalesce($3, quota_concurrent_runs),
                 quota_queued_runs = coalesce($4, quota_queued_runs),
                 quota_requests_per_second = coalesce($5, quota_requests_per_second),
                 quota_output_bytes = coalesce($6, quota_output_bytes),
                 quota_disk_bytes = coalesce($7, quota_disk_bytes)
             WHERE id = $1
             RETURNING",
            "",
            id.as_str(),
            change.sessions,
            change.concurrent_runs,
            change.queued_runs,
            change.requests_per_second,
            change.output_bytes,
            change.disk_bytes,
        );
        Ok(updated.fetch_optional(&self.pools.runs).await?)
    }

    /// Sets the highest limits that a tenant's sessions and runs may request. For operators.
    pub async fn tenant_set_max_limits(
        &self,
        id: &TenantId,
        max: &LimitsRequest,
    ) -> Result<Option<Tenant>, Error> {
        let updated = tenants!(
            "UPDATE tenants SET max_limits = $2 WHERE id = $1
             RETURNING",
            "",
            id.as_str(),
            Json(max) as _,
        );
        Ok(updated.fetch_optional(&self.pools.runs).await?)
    }

    /// Sets the isolation floor of a tenant, with the lowest level that runs may ask for, and
    /// records an event. For operators. Existing sessions keep their mode, but new runs in them
    /// must meet the floor.
    pub async fn tenant_set_floor(
        &self,
        id: &TenantId,
        level: IsolationLevel,
        ask: Option<IsolationLevel>,
        reason: &str,
        key: Option<KeyId>,
    ) -> Result<Option<Tenant>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let updated = tenants!(
            "UPDATE tenants SET isolation_floor = $2, isolation_ask_floor = $5,
                                  floor_reason = $3, floor_key = $4, floor_set_at = now()
             WHERE id = $1
             RETURNING",
            "",
            id.as_str(),
            level.as_str(),
            reason,
            key.map(|key| key.0),
            ask.map(IsolationLevel::as_str),
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(updated) = updated else { return Ok(None) };
        let mut detail = json!({ "level": level.as_str(), "reason": reason });
        if let Some(ask) = ask {
            detail["ask"] = json!(ask.as_str());
        }
        let subject = EventSubject { tenant: Some(id.clone()), key, ..EventSubject::default() };
        let field = Some("isolation_floor".to_owned());
        let body = EventBody { kind: EventKind::IsolationFloorSet, field, detail };
        self.audit.commit(tx, &subject, &body).await?;
        Ok(Some(updated))
    }

    /// Sets how long the rows of a tenant are kept, and records an event. For operators.
    pub async fn tenant_set_retention(
        &self,
        id: &TenantId,
        retention: &TenantRetention,
        key: KeyId,
    ) -> Result<Option<Tenant>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let updated = sqlx::query!(
            "UPDATE tenants SET retention_runs = $2, retention_output = $3, retention_audit = $4
             WHERE id = $1",
            id.as_str(),
            retention.runs.map(row::interval) as _,
            retention.output.map(row::interval) as _,
            retention.audit.map(row::interval) as _,
        )
        .execute(&mut *tx)
        .await?;
        if updated.rows_affected() > 0 {
            let field = Some("retention".to_owned());
            let body =
                EventBody { kind: EventKind::RetentionSet, field, detail: retention.detail() };
            self.audit.commit(tx, &EventSubject::by(key, Some(id)), &body).await?;
        }
        self.tenant_get(id).await
    }

    /// Returns the current usage of a tenant.
    pub async fn tenant_usage(&self, id: &TenantId) -> Result<TenantUsage, Error> {
        let usage = sqlx::query_as!(
            TenantUsage,
            r#"SELECT
                 (SELECT count(*) FROM sessions WHERE open_tenant = $1) AS "sessions!",
                 (SELECT count(*) FROM live_runs WHERE tenant_id = $1) AS "concurrent_runs!",
                 (SELECT count(*) FROM live_runs WHERE tenant_id = $1 AND state IN ('held', 'queued')) AS "queued_runs!",
                 (SELECT coalesce(sum(bytes), 0)::bigint FROM tenant_output WHERE tenant_id = $1) AS "output_bytes!",
                 tenant_disk_bytes($1) AS "disk_bytes!""#,
            id.as_str(),
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok(usage)
    }

    /// Returns what a tenant stores, without what was written in the last seconds.
    pub async fn tenant_stored_bytes(&self, id: &TenantId) -> Result<StoredBytes, Error> {
        let stored = sqlx::query_as!(
            StoredBytes,
            r#"SELECT (SELECT coalesce(sum(bytes), 0)::bigint FROM tenant_output WHERE tenant_id = $1) AS "output!",
                      tenant_disk_bytes($1) AS "disk!""#,
            id.as_str(),
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok(stored)
    }

    /// Begins a transaction that holds the tenant's advisory lock.
    pub(crate) async fn tenant_lock(
        &self,
        id: &TenantId,
    ) -> Result<sqlx::Transaction<'static, sqlx::Postgres>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        sqlx::query!("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", id.as_str())
            .execute(&mut *tx)
            .await?;
        Ok(tx)
    }
}

/// Inserts a tenant; `None` if there is one with this id.
async fn tenant_insert(
    executor: impl PgExecutor<'_>,
    id: &TenantId,
    quotas: Quotas,
) -> Result<Option<Tenant>, Error> {
    let inserted = tenants!(
        "INSERT INTO tenants (id, quota_sessions, quota_concurrent_runs, quota_queued_runs,
                              quota_requests_per_second, quota_output_bytes, quota_disk_bytes)
         VALUES ($1, $2, $3, $4, $5, $6, $7)
         ON CONFLICT (id) DO NOTHING
         RETURNING",
        "",
        id.as_str(),
        quotas.sessions,
        quotas.concurrent_runs,
        quotas.queued_runs,
        quotas.requests_per_second,
        quotas.output_bytes,
        quotas.disk_bytes,
    );
    Ok(inserted.fetch_optional(executor).await?)
}

/// Inserts a tenant with the default quotas if there is none with this id. Returns whether the
/// tenant can be used then.
pub(crate) async fn tenant_insert_if_absent(
    connection: &mut PgConnection,
    id: &TenantId,
) -> Result<bool, Error> {
    tenant_insert(&mut *connection, id, Quotas::default()).await?;
    let usable = sqlx::query_scalar!(
        "SELECT true FROM tenants WHERE id = $1 AND suspended_at IS NULL AND deleted_at IS NULL",
        id.as_str(),
    );
    Ok(usable.fetch_optional(connection).await?.is_some())
}
