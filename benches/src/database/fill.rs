//! Fills a database with the rows of an installation that has been used for a month.

use anyhow::Result;
use codelia_store::{RunFilter, SessionFilter};
use codelia_tests::Database;
use codelia_types::{RunId, SessionId};
use sqlx::types::time::OffsetDateTime;
use std::time::Duration;
use uuid::{NoContext, Timestamp, Uuid};

const DAY: Duration = Duration::from_secs(86_400);
const DAYS: u32 = 30;

/// Keeps Postgres from analyzing or vacuuming any table by itself.
pub(crate) async fn disable_autovacuum(database: &Database) -> Result<()> {
    database
        .execute(
            "DO $$ DECLARE t regclass; BEGIN
                 FOR t IN SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                          WHERE c.relkind = 'r' AND n.nspname = 'public' LOOP
                     EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', t);
                 END LOOP;
             END $$",
        )
        .await
}

/// Does now what autovacuum and the checkpointer would otherwise do during a measurement.
pub(crate) async fn settle(database: &Database) -> Result<()> {
    for statement in ["VACUUM ANALYZE", "CHECKPOINT"] {
        database.execute(statement).await?;
    }
    Ok(())
}

/// Adds partitions for the days before today, as if the installation had been there.
async fn add_past_partitions(database: &Database) -> Result<()> {
    database
        .execute(&format!(
            "DO $$ DECLARE first date := (now() AT TIME ZONE 'UTC')::date - {DAYS}; BEGIN
                 PERFORM create_run_partitions(first + n), create_audit_partition(first + n) FROM generate_series(0, {DAYS}) AS n;
             END $$"
        ))
        .await
}

/// Inserts ended runs with their output. Every row is a copy of one run that ended in the session
/// `template`, spread over the last month; half of them belong to its tenant, the rest to others.
pub(crate) async fn ended_runs(database: &Database, template: SessionId, count: u64) -> Result<()> {
    let template = template.0;
    database
        .execute(&format!(
            "INSERT INTO tenants (id, quota_sessions, quota_concurrent_runs, quota_queued_runs,
                                  quota_requests_per_second, quota_output_bytes)
             SELECT 'tenant-' || n, 1000, 1000, 1000, 1000, 1 << 30 FROM generate_series(1, 99, 2) AS n
             ON CONFLICT DO NOTHING;
             CREATE TEMP TABLE filled AS
             SELECT (substr(replace(run_id_at(at)::text, '-', ''), 1, 12) || '7' || substr(md5(n::text), 1, 19))::uuid AS id,
                    at, n, CASE WHEN n % 2 = 0 THEN 'load' ELSE 'tenant-' || n % 100 END AS tenant
             FROM (SELECT n, now() - interval '{DAYS} days' * (n::float8 / {count}) AS at
                   FROM generate_series(1, {count}) AS n) AS spread;
             INSERT INTO ended_runs (id, tenant_id, session_id, spec, summary, labels, attempt, worker_id, incarnation,
                                     lease_epoch, created_at, started_at, ended_at, output_bytes, result)
             SELECT f.id, f.tenant, CASE WHEN f.n % 10 = 0 THEN t.session_id ELSE md5((f.n / 25)::text)::uuid END,
                    t.spec, t.summary, CASE WHEN f.n % 1000 = 0 THEN '{{\"kind\": \"rare\"}}' ELSE t.labels END, 1, t.worker_id, t.incarnation,
                    t.lease_epoch, f.at, f.at, f.at, t.output_bytes, t.result
             FROM filled f, (SELECT * FROM ended_runs WHERE session_id = '{template}' LIMIT 1) AS t;
             INSERT INTO run_output (run_id, position, stream, stream_offset, data)
             SELECT id, 0, 1, 0, 'a line of output' FROM filled;
             INSERT INTO run_labels (token, run_id)
             SELECT unnest(label_tokens(tenant, '{{\"kind\": \"rare\"}}')), id FROM filled WHERE n % 1000 = 0;
             INSERT INTO tenant_output (tenant_id, day, bytes)
             SELECT tenant, run_day(id), count(*) * 17 FROM filled GROUP BY 1, 2
             ON CONFLICT (tenant_id, day) DO UPDATE SET bytes = tenant_output.bytes + excluded.bytes;
             DROP TABLE filled"
        ))
        .await
}

/// Inserts runs, sessions, events and workers in the proportions of an installation with many
/// tenants.
pub(crate) async fn installation(
    database: &Database,
    template: SessionId,
    runs: u64,
) -> Result<()> {
    let ended = runs / 25;
    let open = runs / 250;
    let events = runs / 5 * 2;
    add_past_partitions(database).await?;
    disable_autovacuum(database).await?;
    database
        .execute(
            "INSERT INTO workers (id, incarnation, root_id, address, modes, slots, version, state, lease_until)
             SELECT 'worker-' || n, gen_random_uuid(), gen_random_uuid(), 'unix:/none', '{logical}', 8, 'bench', 'ready',
                    now() + interval '1 day' FROM generate_series(1, 50) AS n",
        )
        .await?;
    ended_runs(database, template, runs).await?;
    let template = template.0;
    database
        .execute(&format!(
            "INSERT INTO sessions (id, tenant_id, spec, labels, state, end_reason, created_at, expires_at, ended_at, removed_at)
             SELECT md5(n::text)::uuid, CASE WHEN n % 2 = 0 THEN 'load' ELSE 'tenant-' || n % 100 END, t.spec, t.labels,
                    'ended', 'closed', at, at, at, at
             FROM (SELECT n, now() - interval '{DAYS} days' * (n::float8 / {ended}) AS at
                   FROM generate_series(0, {ended}) AS n) AS spread,
                  (SELECT * FROM sessions WHERE id = '{template}') AS t;
             INSERT INTO sessions (id, tenant_id, spec, labels, expires_at, idle_ttl, check_at)
             SELECT gen_random_uuid(), CASE WHEN n % 2 = 0 THEN 'load' ELSE 'tenant-' || n % 100 END, t.spec, t.labels,
                    now() + interval '1 day', interval '12 hours', now() + interval '12 hours'
             FROM generate_series(0, {open}) AS n, (SELECT * FROM sessions WHERE id = '{template}') AS t;
             INSERT INTO audit (writer, id, at, kind, tenant_id, detail)
             SELECT '{template}', (substr(replace(run_id_at(at)::text, '-', ''), 1, 12) || '7' || substr(md5(n::text), 1, 19))::uuid, at,
                    'RUN_REFUSED', CASE WHEN n % 2 = 0 THEN 'load' ELSE 'tenant-' || n % 100 END, '{{\"reason\": \"FILL\"}}'
             FROM (SELECT n, now() - interval '{DAYS} days' * (n::float8 / {events}) AS at
                   FROM generate_series(1, {events}) AS n) AS spread"
        ))
        .await
}

/// An id of the middle of the month.
pub(crate) fn middle_id() -> Uuid {
    let at = OffsetDateTime::now_utc() - DAY * (DAYS / 2);
    let seconds = u64::try_from(at.unix_timestamp()).unwrap_or_default();
    Uuid::new_v7(Timestamp::from_unix(NoContext, seconds, 0))
}

/// Runs older than the middle of the month.
pub(crate) fn deep_page() -> RunFilter {
    RunFilter { before: Some(RunId(middle_id())), ..RunFilter::default() }
}

/// Sessions older than the middle of the month.
pub(crate) fn deep_sessions() -> SessionFilter {
    SessionFilter { before: Some(SessionId(middle_id())), ..SessionFilter::default() }
}

/// Runs of one hour, a week ago.
pub(crate) fn week_ago() -> RunFilter {
    let at = OffsetDateTime::now_utc() - DAY * 7;
    RunFilter {
        created_after: Some(at),
        created_before: Some(at + Duration::from_secs(3600)),
        ..RunFilter::default()
    }
}

/// Runs with a label that one run in a thousand has.
pub(crate) fn rare_label() -> RunFilter {
    RunFilter { labels: [("kind".to_owned(), "rare".to_owned())].into(), ..RunFilter::default() }
}
