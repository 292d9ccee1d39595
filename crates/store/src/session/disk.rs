//! The tables `session_disk` and `tenant_disk_levels`: what the files of sessions use, and how near
//! that is to the limits of sessions and the quotas of tenants. See `migrations/0004_disk.sql`.

use std::ops::Range;

use codelia_policy::DiskLimits;
use codelia_types::{
    DiskMechanism, DiskUsage, Incarnation, LeaseEpoch, SessionId, TenantId, WorkerId,
};
use serde_json::json;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::{Error, EventBody, EventKind, EventSubject, Store, row};

/// The shares of a limit, in percent, that are recorded as events.
const LEVELS: [i16; 2] = [80, 100];

/// A measurement of the files of one held session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskReport {
    /// The session that was measured.
    pub session: SessionId,
    /// The epoch under which the worker holds it.
    pub epoch: LeaseEpoch,
    /// The mechanism that limits its files.
    pub mechanism: DiskMechanism,
    /// The bytes and inodes of its files.
    pub usage: DiskUsage,
    /// Their limits.
    pub limits: DiskLimits,
}

/// The use of all files of a tenant, and its quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantDisk {
    /// The tenant whose sessions were added up.
    pub tenant: TenantId,
    /// Bytes of the files of its sessions, on all workers.
    pub used: u64,
    /// The quota.
    pub quota: u64,
}

impl TenantDisk {
    /// Whether the tenant may write nothing more.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.used >= self.quota
    }
}

/// The result of [`Store::session_disk_report`].
#[derive(Debug, Clone, Default)]
pub struct DiskReported {
    /// The sessions whose usage is stored. Others are not held, or are to be reported again.
    pub sessions: Vec<SessionId>,
    /// The tenants of these sessions, and those that were asked for.
    pub tenants: Vec<TenantDisk>,
    /// How often a session or tenant crossed a level.
    pub crossings: u64,
}

impl Store {
    /// Stores what sessions of a worker use, and records an event for each level that a session or
    /// its tenant reaches. Leaves out sessions that the worker does not hold under the epoch of the
    /// report. Returns the tenants of the sessions, and `of_tenants`.
    pub async fn session_disk_report(
        &self,
        worker: &WorkerId,
        incarnation: Incarnation,
        reports: &[DiskReport],
        of_tenants: &[TenantId],
    ) -> Result<DiskReported, Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        let rows = insert_reports(&mut tx, worker, incarnation, reports).await?;
        let mut reported = DiskReported::default();
        let mut tenants: Vec<String> = of_tenants.iter().map(ToString::to_string).collect();
        let mut events = Vec::new();
        for row in rows {
            let tenant: TenantId = row::parse("sessions.tenant_id", &row.tenant_id)?;
            let subject = EventSubject {
                tenant: Some(tenant),
                session: Some(SessionId(row.id)),
                worker: Some(worker.clone()),
                ..EventSubject::default()
            };
            let bytes = row.bytes_before..row.bytes_now;
            let inodes = row.inodes_before..row.inodes_now;
            let crossed = crossings("limits.disk_bytes", bytes, row.bytes, row.max_bytes)
                .chain(crossings("limits.inodes", inodes, row.inodes, row.max_inodes));
            events.extend(crossed.map(|body| (subject.clone(), body)));
            reported.sessions.push(SessionId(row.id));
            tenants.push(row.tenant_id);
        }
        // In order, so that two workers cannot wait for each other.
        tenants.sort_unstable();
        tenants.dedup();
        let used = sqlx::query!(
            r#"SELECT t.id AS "tenant!", d.used AS "used!", d.quota AS "quota!", d.level_before AS "before!",
                      d.level_now AS "now!"
               FROM unnest($1::text[]) AS t (id) CROSS JOIN LATERAL tenant_disk(t.id) AS d WHERE d.quota IS NOT NULL"#,
            &tenants,
        )
        .fetch_all(&mut *tx)
        .await?;
        for row in used {
            let tenant: TenantId = row::parse("sessions.tenant_id", &row.tenant)?;
            let subject = EventSubject { tenant: Some(tenant.clone()), ..EventSubject::default() };
            let crossed = crossings("quotas.disk_bytes", row.before..row.now, row.used, row.quota);
            events.extend(crossed.map(|body| (subject.clone(), body)));
            reported.tenants.push(TenantDisk {
                tenant,
                used: row.used.unsigned_abs(),
                quota: row.quota.unsigned_abs(),
            });
        }
        for (subject, body) in &events {
            self.audit.insert(&mut *tx, subject, body).await?;
            reported.crossings += 1;
        }
        tx.commit().await?;
        Ok(reported)
    }

    /// Deletes what is stored about directories that are removed from a root and belong to no
    /// session there.
    pub async fn session_disk_forget(&self, root_id: Uuid, ids: &[SessionId]) -> Result<(), Error> {
        let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
        sqlx::query!(
            "DELETE FROM session_disk WHERE session_id = ANY ($1) AND root = $2",
            &ids,
            root_id
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }
}

struct ReportedRow {
    id: Uuid,
    tenant_id: String,
    bytes: i64,
    inodes: i64,
    max_bytes: i64,
    max_inodes: i64,
    bytes_before: i16,
    bytes_now: i16,
    inodes_before: i16,
    inodes_now: i16,
}

async fn insert_reports(
    connection: &mut PgConnection,
    worker: &WorkerId,
    incarnation: Incarnation,
    reports: &[DiskReport],
) -> Result<Vec<ReportedRow>, Error> {
    let column =
        |of: fn(&DiskReport) -> u64| reports.iter().map(|r| row::bigint(of(r))).collect::<Vec<_>>();
    let ids: Vec<Uuid> = reports.iter().map(|report| report.session.0).collect();
    let epochs: Vec<i64> = reports.iter().map(|report| report.epoch.0).collect();
    let mechanisms: Vec<&str> = reports.iter().map(|report| report.mechanism.as_str()).collect();
    let rows = sqlx::query_file_as!(
        ReportedRow,
        "src/sql/session_disk_report.sql",
        worker.as_str(),
        incarnation.0,
        &ids,
        &epochs,
        &mechanisms as _,
        &column(|report| report.usage.bytes),
        &column(|report| report.usage.inodes),
        &column(|report| report.limits.bytes),
        &column(|report| report.limits.inodes),
    )
    .fetch_all(connection)
    .await?;
    Ok(rows)
}

/// The events for the levels above the start of a range and up to its end.
fn crossings(
    field: &'static str,
    reached: Range<i16>,
    used: i64,
    limit: i64,
) -> impl Iterator<Item = EventBody> {
    let crossed =
        LEVELS.into_iter().filter(move |&level| reached.start < level && level <= reached.end);
    crossed.map(move |level| EventBody {
        kind: if level < 100 { EventKind::LimitNear } else { EventKind::LimitReached },
        field: Some(field.to_owned()),
        detail: json!({ "used": used, "limit": limit, "percent": level }),
    })
}
