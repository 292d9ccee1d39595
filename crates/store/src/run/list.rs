//! Listing runs, newest first. Each statement finds its rows by one index in the order of ids and
//! stops after a page. Ids carry the time, so a cursor and times are bounds on the id, which also
//! leave out partitions.
//!
//! Conditions compare whole rows, as in `(tenant_id, id) < ($1, $2)`, and lists are ordered by
//! them: an index that begins with another column has no use, and the planner cannot choose to walk
//! the primary key past the runs of other tenants.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use codelia_types::{RunId, RunResult, SessionId, TenantId};
use sqlx::{PgConnection, types::Json};
use time::{Duration, OffsetDateTime};
use uuid::Uuid;

use super::{
    record::{HELD, RunState, select_runs},
    summary::{RunSummary, SpecSummary},
};
use crate::{
    Error, Store,
    id_time::{first_id, made_at},
};

/// How far the clocks of the processes that make ids and of the database may differ.
const CLOCK_SKEW: Duration = Duration::seconds(10);
/// Runs with a label that are read at once, at least.
const MIN_LABELED_BATCH: i64 = 64;

/// Which runs to list.
#[derive(Debug, Clone, Default)]
pub struct RunFilter {
    /// Runs of this session.
    pub session: Option<SessionId>,
    /// Runs in this state.
    pub state: Option<RunState>,
    /// Runs inserted at this time or later.
    pub created_after: Option<OffsetDateTime>,
    /// Runs inserted before this time.
    pub created_before: Option<OffsetDateTime>,
    /// Runs that have all these labels.
    pub labels: BTreeMap<String, String>,
    /// Runs older than this one.
    pub before: Option<RunId>,
}

/// Reads summaries of live or ended runs by a condition and its arguments.
macro_rules! select_summaries {
    ($table:ident, $connection:expr, $condition:literal $(+ $rest:literal)*, $($argument:expr),* $(,)?) => {
        select_runs!(
            $table
            // A short spec that refers to settings has no summary.
            r#"coalesce(r.summary, jsonb_build_object('argv', r.spec #> '{command,argv}', 'argv_truncated', false))
               || coalesce((SELECT jsonb_build_object('mode', s.settings -> 'mode', 'limits', s.settings -> 'limits')
                            FROM run_settings s WHERE s.hash = r.settings_hash), '{}') AS "spec!: Json<SpecSummary>",
               jsonb_set(
                   CASE WHEN octet_length(r.result #>> '{outcome,detail,message}') > 1024
                        THEN jsonb_set(r.result, '{outcome,detail,message}',
                                       to_jsonb(left(r.result #>> '{outcome,detail,message}', 256) || '…'))
                        ELSE r.result END,
                   '{violations,seen}', '[]')
                   || jsonb_build_object('changes', jsonb_set(r.changes, '{entries}', '[]')) AS "result: Json<RunResult>""#,
            $condition $(+ $rest)*,
            $($argument),*
        )
        .fetch_all(&mut *$connection)
        .await?
    };
}

/// Finds the runs of a page that have a value in a column, by the indexes that begin with it. Reads
/// runs that have not ended first: a run that ends meanwhile is found twice, but not missed.
macro_rules! find_by {
    ($column:literal, $value:expr, $connection:ident, $tenant:ident, $page:ident) => {{
        let mut found = Found::default();
        if !$page.live_states.is_empty() {
            found.live = select_summaries!(
                live,
                $connection,
                "r.id = ANY (ARRAY(
                     SELECT found.id FROM unnest($6::text[]) AS wanted (state) CROSS JOIN LATERAL (
                         SELECT id FROM live_runs
                         WHERE ("
                    + $column
                    + ", state, id) < ($8, wanted.state, $2)
                           AND ("
                    + $column
                    + ", state, id) >= ($8, wanted.state, $3)
                           AND created_at > $4 AND created_at < $5
                         ORDER BY "
                    + $column
                    + " DESC, state DESC, id DESC LIMIT $7) AS found))
                   AND r.tenant_id || '' = $1
                 ORDER BY r.id DESC LIMIT $7",
                $tenant.as_str(),
                $page.before,
                $page.from,
                $page.created_after,
                $page.created_before,
                $page.live_states as _,
                $page.limit,
                $value,
            );
        }
        if $page.lists_ended {
            found.ended = select_summaries!(
                ended,
                $connection,
                "(r."
                    + $column
                    + ", r.id) < ($7, $2) AND (r."
                    + $column
                    + ", r.id) >= ($7, $3)
                   AND r.id < $2 AND r.id >= $3
                   AND r.created_at > $4 AND r.created_at < $5 AND r.tenant_id || '' = $1
                 ORDER BY r."
                    + $column
                    + " DESC, r.id DESC LIMIT $6",
                $tenant.as_str(),
                $page.before,
                $page.from,
                $page.created_after,
                $page.created_before,
                $page.limit,
                $value,
            );
        }
        found
    }};
}

/// A page of a list as arguments of its statements.
struct Page {
    /// Ids below this one,
    before: Uuid,
    /// and from this one on.
    from: Uuid,
    created_after: OffsetDateTime,
    created_before: OffsetDateTime,
    /// States of live runs to list.
    live_states: &'static [&'static str],
    lists_ended: bool,
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
                None => &["queued", "running", HELD],
                Some(RunState::Queued) => &["queued", HELD],
                Some(RunState::Running) => &["running"],
                Some(RunState::Ended) => &[],
            },
            lists_ended: matches!(filter.state, None | Some(RunState::Ended)),
            limit,
        }
    }
}

/// Later than every run.
const LAST_TIME: OffsetDateTime = time::macros::datetime!(9999-01-01 00:00 UTC);

impl Store {
    /// Lists summaries of a tenant's runs, newest first.
    pub async fn run_list(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        let page = Page::new(filter, limit);
        let mut tx = self.pools.reads.begin_in_order().await?;
        let found = match filter.session {
            _ if !filter.labels.is_empty() => labeled(&mut tx, tenant, filter, page).await?,
            None => of_tenant(&mut tx, tenant, &page).await?,
            Some(session) => {
                find_by!("session_id", session.0, tx, tenant, page)
            }
        };
        tx.commit().await?;
        Ok(found.merge(limit))
    }

    /// Lists summaries of runs that have not ended, of all tenants or of one, newest first. For
    /// operators.
    pub async fn run_list_active_any_tenant(
        &self,
        tenant: Option<&TenantId>,
        before: Option<RunId>,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        let mut tx = self.pools.reads.begin_in_order().await?;
        let all = Page::new(&RunFilter { before, ..RunFilter::default() }, limit);
        let page = Page { lists_ended: false, ..all };
        let found = match tenant {
            Some(tenant) => of_tenant(&mut tx, tenant, &page).await?,
            None => Found {
                live: select_summaries!(
                    live,
                    tx,
                    "r.id < $1 ORDER BY r.id DESC LIMIT $2",
                    page.before,
                    limit
                ),
                ended: Vec::new(),
            },
        };
        tx.commit().await?;
        Ok(found.merge(limit))
    }
}

/// The runs of a page.
#[derive(Default)]
struct Found {
    live: Vec<RunSummary>,
    ended: Vec<RunSummary>,
}

impl Found {
    /// Runs that ended meanwhile are in both lists; their end counts.
    fn merge(self, limit: i64) -> Vec<RunSummary> {
        let ended: BTreeSet<RunId> = self.ended.iter().map(|run| run.id).collect();
        let live = self.live.into_iter().filter(|run| !ended.contains(&run.id));
        let mut runs: Vec<_> = live.chain(self.ended).collect();
        runs.sort_unstable_by_key(|run| Reverse(run.id));
        runs.truncate(usize::try_from(limit).unwrap_or(0));
        runs
    }
}

async fn of_tenant(
    connection: &mut PgConnection,
    tenant: &TenantId,
    page: &Page,
) -> Result<Found, Error> {
    Ok(find_by!("tenant_id", tenant.as_str(), connection, tenant, page))
}

/// Runs that have all labels: reads those that have the first one, in batches, until the page is
/// full.
async fn labeled(
    connection: &mut PgConnection,
    tenant: &TenantId,
    filter: &RunFilter,
    mut page: Page,
) -> Result<Found, Error> {
    let first: BTreeMap<_, _> = filter.labels.iter().take(1).collect();
    let batch = page.limit.max(MIN_LABELED_BATCH);
    let mut found = Found::default();
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
        if !page.live_states.is_empty() {
            found.live.extend(select_summaries!(
                live,
                connection,
                "r.id = ANY ($1) AND r.labels @> $2 AND r.session_id = coalesce($3, r.session_id)
                   AND r.created_at > $4 AND r.created_at < $5 AND r.state = ANY ($6)",
                &ids,
                Json(&filter.labels) as _,
                filter.session.map(|id| id.0),
                page.created_after,
                page.created_before,
                page.live_states as _,
            ));
        }
        if page.lists_ended {
            found.ended.extend(select_summaries!(
                ended,
                connection,
                "r.id = ANY ($1) AND r.labels @> $2 AND r.session_id = coalesce($3, r.session_id)
                   AND r.created_at > $4 AND r.created_at < $5 AND r.id >= $6 AND r.id <= $7",
                &ids,
                Json(&filter.labels) as _,
                filter.session.map(|id| id.0),
                page.created_after,
                page.created_before,
                ids.iter().min(),
                ids.iter().max(),
            ));
        }
        let count = i64::try_from(found.live.len() + found.ended.len()).unwrap_or(i64::MAX);
        if count >= page.limit || ids.len() < usize::try_from(batch).unwrap_or(0) {
            break;
        }
    }
    Ok(found)
}
