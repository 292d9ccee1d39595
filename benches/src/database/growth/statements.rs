//! The statements that are measured.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use codelia_store::{
    AuditFilter, HeldSessions, Retention, RunFilter, RunState, SessionFilter, SessionRef,
    SessionState,
};
use codelia_types::RunId;
use futures::future::BoxFuture;

use crate::database::{fill, store_load::StoreLoad};

const PAGE: i64 = 50;
const BATCH: i64 = 500;
const MONTHS: Duration = Duration::from_secs(90 * 86_400);
const KEEP: Retention = Retention { runs: MONTHS, output: MONTHS, audit: MONTHS };

/// When a statement is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// For every run or session.
    Path,
    /// Again and again, whether or not anything runs.
    Periodic,
    /// When a caller asks.
    List,
}

impl Kind {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Path => "path",
            Self::Periodic => "periodic",
            Self::List => "list",
        }
    }

    /// Whether it may not grow with the number of rows.
    pub(super) fn is_bounded(self) -> bool {
        self != Self::List
    }
}

/// The rows that the statements are executed on.
#[derive(Debug)]
pub(super) struct Subject {
    pub(super) load: StoreLoad,
    /// An ended run of the load's tenant.
    ended: RunId,
}

impl Subject {
    pub(super) async fn prepare(load: StoreLoad) -> Result<Self> {
        let listed = load.store.run_list(&load.tenant, &fill::deep_page(), 1).await?;
        let ended = listed.first().context("no ended run")?.id;
        Ok(Self { load, ended })
    }
}

pub(super) struct Statement {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) measure: for<'a> fn(&'a Subject) -> BoxFuture<'a, Result<Duration>>,
}

/// A statement: its name and kind, what is prepared before the clock starts, and what is measured.
macro_rules! statement {
    ($name:literal, $kind:ident, |$subject:ident| $measured:expr) => {
        statement!($name, $kind, |$subject| {} => |_| $measured)
    };
    ($name:literal, $kind:ident, |$subject:ident| $prepared:expr => |$value:pat_param| $measured:expr) => {
        Statement {
            name: $name,
            kind: Kind::$kind,
            measure: |$subject| {
                Box::pin(async move {
                    let $value = $prepared;
                    let begin = Instant::now();
                    $measured.await?;
                    Ok(begin.elapsed())
                })
            },
        }
    };
}

fn lease(subject: &Subject) -> &codelia_store::Lease {
    &subject.load.leases[0]
}

pub(super) static STATEMENTS: [Statement; 34] = [
    statement!("session_create", Path, |s| s.load.create_session(None)),
    statement!("lease_acquire", Path, |s| s.load.create_session(None).await? => |session| s.load.lease(session)),
    statement!("run_insert", Path, |s| s.load.insert(lease(s).session)),
    statement!("run_commit", Path, |s| s.load.insert(lease(s).session).await? => |run| s.load.commit(run, lease(s))),
    statement!("run_insert, queued", Path, |s| s.load.create_session(None).await? => |session| s.load.insert(session)),
    statement!("run_get, ended", Path, |s| s.load.store.run_get(&s.load.tenant, s.ended)),
    statement!("session_get", Path, |s| s
        .load
        .store
        .session_get(&s.load.tenant, &SessionRef::Id(lease(s).session))),
    statement!("session_close", Path, |s| SessionRef::Id(s.load.create_session(None).await?) =>
        |session| s.load.store.session_close(&s.load.tenant, &session)),
    statement!("key_authenticate", Path, |s| s.load.store.key_authenticate(&[0; 32])),
    statement!("run_list_assigned", Periodic, |s| s
        .load
        .store
        .run_list_assigned(&s.load.worker, s.load.incarnation)),
    statement!("run_list_queued, one session", Periodic, |s| s.load.store.run_list_queued(
        &s.load.worker,
        s.load.incarnation,
        HeldSessions::Among(&[lease(s).session]),
        1000
    )),
    statement!("lease_list_wanted", Periodic, |s| s.load.store.lease_list_wanted(
        &s.load.worker,
        s.load.incarnation,
        64
    )),
    statement!("tenant_stored_bytes", Periodic, |s| s
        .load
        .store
        .tenant_stored_bytes(&s.load.tenant)),
    statement!("lease_sweep", Periodic, |s| s.load.store.lease_sweep_any_tenant(BATCH)),
    statement!("run_expire_queued", Periodic, |s| s.load.store.run_expire_queued_any_tenant(BATCH)),
    statement!("session_expire", Periodic, |s| s.load.store.session_expire_any_tenant(BATCH)),
    statement!("tenant_sweep", Periodic, |s| s.load.store.tenant_sweep_any_tenant(BATCH)),
    statement!("run_queue", Periodic, |s| s.load.store.run_queue_any_tenant()),
    statement!("session_list_removable", Periodic, |s| s.load.store.session_list_removable(
        &s.load.worker,
        s.load.incarnation,
        s.load.root,
        BATCH
    )),
    statement!("session_purge, nothing due", Periodic, |s| s
        .load
        .store
        .session_purge_any_tenant(KEEP.runs, BATCH)),
    statement!("run_list, first page", List, |s| s.load.store.run_list(
        &s.load.tenant,
        &RunFilter::default(),
        PAGE
    )),
    statement!("run_list, deep page", List, |s| fill::deep_page() =>
        |filter| s.load.store.run_list(&s.load.tenant, &filter, PAGE)),
    statement!("run_list, of a session", List, |s| RunFilter { session: Some(lease(s).session), ..RunFilter::default() } =>
        |filter| s.load.store.run_list(&s.load.tenant, &filter, PAGE)),
    statement!("run_list, running", List, |s| RunFilter { state: Some(RunState::Running), ..RunFilter::default() } =>
        |filter| s.load.store.run_list(&s.load.tenant, &filter, PAGE)),
    statement!("run_list, of a week ago", List, |s| fill::week_ago() =>
        |filter| s.load.store.run_list(&s.load.tenant, &filter, PAGE)),
    statement!("run_list, by a rare label", List, |s| fill::rare_label() =>
        |filter| s.load.store.run_list(&s.load.tenant, &filter, PAGE)),
    statement!("session_list, first page", List, |s| s.load.store.session_list(
        &s.load.tenant,
        &SessionFilter::default(),
        PAGE
    )),
    statement!("session_list, open", List, |s| SessionFilter { state: Some(SessionState::Open), ..Default::default() } =>
        |filter| s.load.store.session_list(&s.load.tenant, &filter, PAGE)),
    statement!("session_list, deep page", List, |s| fill::deep_sessions() =>
        |filter| s.load.store.session_list(&s.load.tenant, &filter, PAGE)),
    statement!("audit_list, first page", List, |s| s.load.store.audit_list(
        Some(&s.load.tenant),
        &AuditFilter::default(),
        PAGE
    )),
    statement!("audit_list, deep page", List, |s| AuditFilter { after: Some(fill::middle_id()), ..AuditFilter::default() } =>
        |filter| s.load.store.audit_list(Some(&s.load.tenant), &filter, PAGE)),
    statement!("output_read", List, |s| s.load.store.output_read(
        &s.load.tenant,
        s.ended,
        0,
        1 << 20
    )),
    statement!("tenant_usage", List, |s| s.load.store.tenant_usage(&s.load.tenant)),
    statement!("worker_list", List, |s| s.load.store.worker_list(None, PAGE)),
];
