//! Listing runs, newest first. Each statement finds its rows by one index in the order of ids and
//! stops after a page. Ids carry the time, so a cursor and times are bounds on the id, which also
//! leave out partitions.
//!
//! Conditions compare whole rows, as in `(tenant_id, id) < ($1, $2)`, and lists are ordered by
//! them: an index that begins with another column has no use, and the planner cannot choose to walk
//! the primary key past the runs of other tenants.

use std::collections::{BTreeMap, BTreeSet};

use codelia_types::{RunId, RunResult, SessionId, TenantId};
use sqlx::{PgConnection, Postgres, Transaction, types::Json};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{HELD, Run, RunFilter, RunRow, RunState, RunSummary, SpecSummary, select_runs};
use crate::{Error, Store, pools::Pool};

/// How far the clocks of the processes that make ids and of the database may differ.
const CLOCK_SKEW: Duration = Duration::seconds(10);
/// Runs with a label that are read at once, at least.
const MIN_LABELED_BATCH: i64 = 64;

type SummaryRow = RunRow<SpecSummary>;

/// Reads summaries of live or ended runs by a condition and its arguments.
macro_rules! select_summaries {
    ($table:ident, $executor:expr, $condition:literal, $($argument:expr),* $(,)?) => {
        select_runs!(
            $table SummaryRow,
            // A short spec that refers to settings has no summary. A run of an earlier version has
            // none, either: show only its program.
            r#"coalesce(r.summary, CASE
                   WHEN r.settings_hash IS NOT NULL
                   THEN jsonb_build_object('argv', r.spec #> '{command,argv}', 'argv_truncated', false)
                   ELSE jsonb_build_object(
                       'mode', r.spec -> 'mode', 'limits', r.spec -> 'limits',
                       'argv', jsonb_build_array(left(r.spec #>> '{command,argv,0}', 256)),
                       'argv_truncated', true) END)
               || coalesce((SELECT jsonb_build_object('mode', s.settings -> 'mode', 'limits', s.settings -> 'limits')
                            FROM run_settings s WHERE s.hash = r.settings_hash), '{}') AS "spec!: Json<SpecSummary>",
               jsonb_set(
                   CASE WHEN octet_length(r.result #>> '{outcome,detail,message}') > 1024
                        THEN jsonb_set(r.result, '{outcome,detail,message}',
                                       to_jsonb(left(r.result #>> '{outcome,detail,message}', 256) || '…'))
                        ELSE r.result END,
                   '{violations,seen}', '[]')
                   || jsonb_build_object('changes', jsonb_set(r.changes, '{entries}', '[]')) AS "result: Json<RunResult>""#,
            $condition,
            $($argument),*
        )
        .fetch_all($executor)
        .await?
    };
}

/// A page of a list as arguments of its statements.
struct Page {
    /// Ids below this one,
    before: Uuid,
    /// and from this one on.
    from: Uuid,
    created_after: OffsetDateTime,
    created_before: OffsetDateTime,
    /// States of live runs to list; empty ones match nothing.
    live_states: [&'static str; 3],
    ended: bool,
    limit: i64,
}

impl Page {
    fn new(filter: &RunFilter, limit: i64) -> Self {
        let upper = filter.created_before.map_or(Uuid::max(), |time| first_id(time + CLOCK_SKEW));
        let lower = filter.created_after.map_or(Uuid::nil(), |time| first_id(time - CLOCK_SKEW));
        // The runs of a session are not older than the session.
        let session = filter
            .session
            .and_then(|id| made_at(id.0))
            .map_or(Uuid::nil(), |time| first_id(time - CLOCK_SKEW));
        Self {
            before: filter.before.map_or(upper, |id| upper.min(id.0)),
            from: lower.max(session),
            created_after: filter.created_after.unwrap_or(OffsetDateTime::UNIX_EPOCH),
            created_before: filter.created_before.unwrap_or(LAST_TIME),
            live_states: match filter.state {
                None => [RunState::Queued.as_str(), RunState::Running.as_str(), HELD],
                Some(RunState::Ended) => ["", "", ""],
                Some(RunState::Queued) => [RunState::Queued.as_str(), HELD, ""],
                Some(RunState::Running) => [RunState::Running.as_str(), "", ""],
            },
            ended: matches!(filter.state, None | Some(RunState::Ended)),
            limit,
        }
    }

    fn lists_live(&self) -> bool {
        !self.live_states[0].is_empty()
    }
}

/// Later than every run.
const LAST_TIME: OffsetDateTime = time::macros::datetime!(9999-01-01 00:00 UTC);

/// The least id that is made at a time.
pub(crate) fn first_id(time: OffsetDateTime) -> Uuid {
    let millis = u128::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0);
    Uuid::from_u128(millis.min((1 << 48) - 1) << 80)
}

/// When an id was made.
fn made_at(id: Uuid) -> Option<OffsetDateTime> {
    let nanos = i128::try_from(id.as_u128() >> 80).ok()?.checked_mul(1_000_000)?;
    OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()
}

impl Store {
    /// Lists summaries of a tenant's runs, newest first.
    pub async fn run_list(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        let page = Page::new(filter, limit);
        let mut tx = ordered(&self.pools.reads).await?;
        // Runs that have not ended first: a run that ends meanwhile is found twice, but not missed.
        let rows = match (filter.labels.is_empty(), filter.session) {
            (false, _) => labeled(&mut tx, tenant, filter, page).await?,
            (true, None) => {
                let live = live_of_tenant(&mut tx, tenant, &page).await?;
                (live, ended_of_tenant(&mut tx, tenant, &page).await?)
            }
            (true, Some(session)) => {
                let live = live_of_session(&mut tx, tenant, session, &page).await?;
                (live, ended_of_session(&mut tx, tenant, session, &page).await?)
            }
        };
        tx.commit().await?;
        merge(rows, limit)
    }

    /// Lists summaries of runs that have not ended, of all tenants or of one, newest first. For
    /// operators.
    pub async fn run_list_active_any_tenant(
        &self,
        tenant: Option<&TenantId>,
        before: Option<RunId>,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        let mut tx = ordered(&self.pools.reads).await?;
        let page = Page::new(&RunFilter { before, ..RunFilter::default() }, limit);
        let rows = match tenant {
            Some(tenant) => live_of_tenant(&mut tx, tenant, &page).await?,
            None => {
                select_summaries!(
                    live,
                    &mut *tx,
                    "r.id < $1 ORDER BY r.id DESC LIMIT $2",
                    page.before,
                    limit
                )
            }
        };
        tx.commit().await?;
        merge((rows, Vec::new()), limit)
    }
}

/// Begins a transaction whose statements read rows in the order of an index. To read all rows of a
/// tenant and sort them is never better, but the planner may believe that while a table is small,
/// and plans each statement only once.
pub(crate) async fn ordered(pool: &Pool) -> Result<Transaction<'static, Postgres>, Error> {
    let mut tx = pool.begin().await?;
    read_in_order(&mut tx).await?;
    Ok(tx)
}

/// Makes a transaction one of [`ordered`].
pub(crate) async fn read_in_order(tx: &mut PgConnection) -> Result<(), Error> {
    sqlx::raw_sql("SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off")
        .execute(tx)
        .await?;
    Ok(())
}

/// Runs that ended meanwhile are in both; their end counts.
fn merge(
    (live, ended): (Vec<SummaryRow>, Vec<SummaryRow>),
    limit: i64,
) -> Result<Vec<RunSummary>, Error> {
    let ids: BTreeSet<Uuid> = ended.iter().map(|row| row.id).collect();
    let mut rows: Vec<_> =
        live.into_iter().filter(|row| !ids.contains(&row.id)).chain(ended).collect();
    rows.sort_unstable_by_key(|row| std::cmp::Reverse(row.id));
    rows.truncate(usize::try_from(limit).unwrap_or(0));
    rows.into_iter().map(Run::try_from).collect()
}

async fn live_of_tenant(
    connection: &mut PgConnection,
    tenant: &TenantId,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    if !page.lists_live() {
        return Ok(Vec::new());
    }
    Ok(select_summaries!(
        live,
        connection,
        "r.id = ANY (ARRAY(
             (SELECT id FROM live_runs
              WHERE (tenant_id, state, id) < ($1, $6, $2) AND (tenant_id, state, id) >= ($1, $6, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY tenant_id DESC, state DESC, id DESC LIMIT $8)
             UNION ALL
             (SELECT id FROM live_runs
              WHERE (tenant_id, state, id) < ($1, $7, $2) AND (tenant_id, state, id) >= ($1, $7, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY tenant_id DESC, state DESC, id DESC LIMIT $8)
             UNION ALL
             (SELECT id FROM live_runs
              WHERE (tenant_id, state, id) < ($1, $9, $2) AND (tenant_id, state, id) >= ($1, $9, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY tenant_id DESC, state DESC, id DESC LIMIT $8)))
         ORDER BY r.id DESC LIMIT $8",
        tenant.as_str(),
        page.before,
        page.from,
        page.created_after,
        page.created_before,
        page.live_states[0],
        page.live_states[1],
        page.limit,
        page.live_states[2],
    ))
}

async fn live_of_session(
    connection: &mut PgConnection,
    tenant: &TenantId,
    session: SessionId,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    if !page.lists_live() {
        return Ok(Vec::new());
    }
    Ok(select_summaries!(
        live,
        connection,
        "r.id = ANY (ARRAY(
             (SELECT id FROM live_runs
              WHERE (session_id, state, id) < ($9, $6, $2) AND (session_id, state, id) >= ($9, $6, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY session_id DESC, state DESC, id DESC LIMIT $8)
             UNION ALL
             (SELECT id FROM live_runs
              WHERE (session_id, state, id) < ($9, $7, $2) AND (session_id, state, id) >= ($9, $7, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY session_id DESC, state DESC, id DESC LIMIT $8)
             UNION ALL
             (SELECT id FROM live_runs
              WHERE (session_id, state, id) < ($9, $10, $2) AND (session_id, state, id) >= ($9, $10, $3)
                AND created_at > $4 AND created_at < $5
              ORDER BY session_id DESC, state DESC, id DESC LIMIT $8)))
           AND r.tenant_id || '' = $1
         ORDER BY r.id DESC LIMIT $8",
        tenant.as_str(),
        page.before,
        page.from,
        page.created_after,
        page.created_before,
        page.live_states[0],
        page.live_states[1],
        page.limit,
        session.0,
        page.live_states[2],
    ))
}

async fn ended_of_tenant(
    connection: &mut PgConnection,
    tenant: &TenantId,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    if !page.ended {
        return Ok(Vec::new());
    }
    Ok(select_summaries!(
        ended,
        connection,
        "(r.tenant_id, r.id) < ($1, $2) AND (r.tenant_id, r.id) >= ($1, $3) AND r.id < $2 AND r.id >= $3
           AND r.created_at > $4 AND r.created_at < $5
         ORDER BY r.tenant_id DESC, r.id DESC LIMIT $6",
        tenant.as_str(),
        page.before,
        page.from,
        page.created_after,
        page.created_before,
        page.limit,
    ))
}

async fn ended_of_session(
    connection: &mut PgConnection,
    tenant: &TenantId,
    session: SessionId,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    if !page.ended {
        return Ok(Vec::new());
    }
    Ok(select_summaries!(
        ended,
        connection,
        "(r.session_id, r.id) < ($7, $2) AND (r.session_id, r.id) >= ($7, $3) AND r.id < $2 AND r.id >= $3
           AND r.created_at > $4 AND r.created_at < $5 AND r.tenant_id || '' = $1
         ORDER BY r.session_id DESC, r.id DESC LIMIT $6",
        tenant.as_str(),
        page.before,
        page.from,
        page.created_after,
        page.created_before,
        page.limit,
        session.0,
    ))
}

/// Runs that have all labels: reads those that have the first one, in batches, until the page is
/// full.
async fn labeled(
    connection: &mut PgConnection,
    tenant: &TenantId,
    filter: &RunFilter,
    mut page: Page,
) -> Result<(Vec<SummaryRow>, Vec<SummaryRow>), Error> {
    let first: BTreeMap<_, _> = filter.labels.iter().take(1).collect();
    let batch = page.limit.max(MIN_LABELED_BATCH);
    let (mut live, mut ended) = (Vec::new(), Vec::new());
    loop {
        let ids = sqlx::query_scalar!(
            "SELECT run_id FROM run_labels
             WHERE token = (label_tokens($1, $2))[1] AND run_id < $3 AND run_id >= $4
             ORDER BY run_id DESC LIMIT $5",
            tenant.as_str(),
            Json(&first) as _,
            page.before,
            page.from,
            batch,
        )
        .fetch_all(&mut *connection)
        .await?;
        let Some(last) = ids.last() else { break };
        page.before = *last;
        if page.lists_live() {
            live.extend(labeled_live(connection, &ids, filter, &page).await?);
        }
        if page.ended {
            ended.extend(labeled_ended(connection, &ids, filter, &page).await?);
        }
        let found = i64::try_from(live.len() + ended.len()).unwrap_or(i64::MAX);
        if found >= page.limit || ids.len() < usize::try_from(batch).unwrap_or(0) {
            break;
        }
    }
    Ok((live, ended))
}

async fn labeled_live(
    connection: &mut PgConnection,
    ids: &[Uuid],
    filter: &RunFilter,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    Ok(select_summaries!(
        live,
        connection,
        "r.id = ANY ($1) AND r.labels @> $2 AND r.session_id = coalesce($3, r.session_id) AND r.state IN ($4, $5, $8)
           AND r.created_at > $6 AND r.created_at < $7",
        ids,
        Json(&filter.labels) as _,
        filter.session.map(|id| id.0),
        page.live_states[0],
        page.live_states[1],
        page.created_after,
        page.created_before,
        page.live_states[2],
    ))
}

async fn labeled_ended(
    connection: &mut PgConnection,
    ids: &[Uuid],
    filter: &RunFilter,
    page: &Page,
) -> Result<Vec<SummaryRow>, Error> {
    Ok(select_summaries!(
        ended,
        connection,
        "r.id = ANY ($1) AND r.labels @> $2 AND r.session_id = coalesce($3, r.session_id)
           AND r.created_at > $4 AND r.created_at < $5 AND r.id >= $6 AND r.id <= $7",
        ids,
        Json(&filter.labels) as _,
        filter.session.map(|id| id.0),
        page.created_after,
        page.created_before,
        ids.iter().min(),
        ids.iter().max(),
    ))
}
