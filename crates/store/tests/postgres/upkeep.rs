//! One owner of the periodic work, and what it costs: rows read, whatever the number of rows.

use std::time::Duration;

use codelia_store::{
    AuditFilter, EventKind, Retention, SessionEndReason, SessionFilter, SessionRef, SessionState,
    Store, Upkeep,
};
use codelia_tests::eventually;
use codelia_types::SessionId;
use sqlx::Row;
use uuid::Uuid;

use crate::harness::{Fixture, LONG, Registered};

/// Rows in the tables of these tests.
const MANY: i64 = 200_000;
/// Rows and index entries that a statement may read to return a page or a batch.
const FEW: i64 = 10_000;

fn upkeep(store: &Store) -> Upkeep {
    Upkeep::new(store.clone(), Retention::default())
}

#[tokio::test]
async fn one_process_owns_upkeep() {
    let fixture = Fixture::new().await;
    let (mut one, mut other) = (upkeep(&fixture.store), upkeep(&fixture.store));
    let session = fixture.session().await;
    fixture.insert(session.id, 0).await;
    assert!(one.pass().await.unwrap().0.is_owner);
    assert!(!other.pass().await.unwrap().0.is_owner);
    let (pass, _) = one.pass().await.unwrap();
    assert!(pass.is_owner && pass.queue_depth == 1);
    let (pass, wait) = other.pass().await.unwrap();
    assert!(!pass.is_owner && pass.queue_depth == 1, "the owner stored what it counted: {pass:?}");
    assert!(pass.queue_age > Duration::ZERO, "and when the oldest was created: {pass:?}");
    assert!(wait > Duration::ZERO && wait <= Duration::from_secs(3), "{wait:?}");
    one.release().await.unwrap();
    assert!(other.pass().await.unwrap().0.is_owner, "a released row is free at once");
    fixture.end().await;
}

#[tokio::test]
async fn dead_owner_is_replaced() {
    let fixture = Fixture::new().await;
    let second = fixture.database.store().await.unwrap();
    let mut dead = upkeep(&fixture.store);
    assert!(dead.pass().await.unwrap().0.is_owner);
    let mut successor = upkeep(&second);
    let (first, wait) = successor.pass().await.unwrap();
    assert!(!first.is_owner);
    // The event to wait for is a time: the end of the claim.
    tokio::time::sleep(wait).await;
    assert!(successor.pass().await.unwrap().0.is_owner);
    assert!(
        !dead.pass().await.unwrap().0.is_owner,
        "an owner that was replaced knows it at its next pass"
    );
    second.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn claim_from_before_clock_was_set_back_is_free() {
    let fixture = Fixture::new().await;
    assert!(upkeep(&fixture.store).pass().await.unwrap().0.is_owner);
    let mut successor = upkeep(&fixture.store);
    fixture.execute("UPDATE upkeep_owner SET until = now() + interval '4 seconds'").await;
    assert!(
        !successor.pass().await.unwrap().0.is_owner,
        "the clocks of two transactions may differ a little"
    );
    fixture.execute("UPDATE upkeep_owner SET until = now() + interval '1 hour'").await;
    assert!(successor.pass().await.unwrap().0.is_owner);
    fixture.end().await;
}

/// The clock was ahead when the session was found expired, and so was the time of the next look at
/// it.
#[tokio::test]
async fn expired_session_ends_although_clock_was_set_back() {
    let fixture = Fixture::new().await;
    let mut upkeep = upkeep(&fixture.store);
    upkeep.pass().await.unwrap();
    let id = fixture.session().await.id;
    let ahead = "UPDATE sessions SET expires_at = now() - interval '1 second', check_at = now() + interval '10 minutes'";
    fixture.execute(ahead).await;
    upkeep.pass().await.unwrap();
    assert_eq!(fixture.end_reason(id).await, None, "the clock was not set back");
    fixture.execute("UPDATE upkeep_owner SET until = now() + interval '10 minutes'").await;
    assert_eq!(upkeep.pass().await.unwrap().0.expired, 1);
    assert_eq!(fixture.end_reason(id).await, Some(SessionEndReason::Expired));
    fixture.end().await;
}

/// A session with an idle time of an hour whose last check was `minutes` ago, due now.
async fn due_session(fixture: &Fixture, minutes: i32) -> SessionId {
    let id = fixture.session_with(24 * LONG, Some(LONG)).await.id;
    fixture
        .execute(&format!(
            "UPDATE sessions SET created_at = now() - interval '1 day', check_at = now(),
                 checked_at = now() - interval '{minutes} minutes' WHERE id = '{id}'"
        ))
        .await;
    id
}

/// Inserts a run that ended `ended` minutes ago.
async fn ended_run(fixture: &Fixture, worker: &Registered, session: SessionId, ended: i32) -> Uuid {
    let by_id = SessionRef::Id(session);
    let found = fixture.store.session_get(&fixture.tenant, &by_id).await.unwrap().unwrap();
    let lease = match fixture.lease(&found, worker).await {
        Some(lease) => lease,
        None => panic!("no lease on {session}"),
    };
    let run = fixture.insert(session, 0).await;
    fixture.commit(run, worker, &lease).await.unwrap();
    fixture.store.lease_release(session, &lease.token).await.unwrap();
    fixture.end_run_earlier(run.0, ended).await;
    run.0
}

async fn end_reason(fixture: &Fixture, id: SessionId) -> Option<SessionEndReason> {
    fixture
        .store
        .session_get(&fixture.tenant, &SessionRef::Id(id))
        .await
        .unwrap()
        .unwrap()
        .end_reason
}

#[tokio::test]
async fn idle_time_counts_from_last_end() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let (recent, old) = (due_session(&fixture, 60).await, due_session(&fixture, 60).await);
    ended_run(&fixture, &worker, recent, 59).await;
    ended_run(&fixture, &worker, old, 61).await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 1);
    assert_eq!(end_reason(&fixture, recent).await, None);
    assert_eq!(end_reason(&fixture, old).await, Some(SessionEndReason::Idle));
    // The session is looked at again when an hour has passed since the end of its run.
    let query = format!(
        "SELECT extract(epoch FROM check_at - now())::bigint FROM sessions WHERE id = '{recent}'"
    );
    assert!((1..=60).contains(&fixture.scalar(&query).await));
    fixture.end().await;
}

#[tokio::test]
async fn long_run_counts_when_it_ended_after_newer_ones() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let session = due_session(&fixture, 180).await;
    let run = fixture.insert(session, 0).await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 0, "a run is live");
    fixture.store.run_cancel(&fixture.tenant, run, &Default::default()).await.unwrap();
    // It began before everything that the next check looks at.
    let before = Uuid::from_u128(7);
    fixture.rename_run(run.0, before).await;
    fixture.execute(&format!("UPDATE sessions SET live_runs = ARRAY['{before}']::uuid[]")).await;
    ended_run(&fixture, &worker, session, 90).await;
    let again = "UPDATE sessions SET check_at = now(), idle_since = now() - interval '3 hours'";
    fixture.execute(again).await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 0);
    fixture.end_run_earlier(before, 61).await;
    fixture.execute(&format!("{again}, live_runs = ARRAY['{before}']::uuid[]")).await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 1);
    fixture.end().await;
}

#[tokio::test]
async fn session_of_earlier_version_gets_its_idle_time() {
    let fixture = Fixture::new().await;
    let session = fixture.session_with(24 * LONG, Some(LONG)).await.id;
    fixture
        .execute(
            "UPDATE sessions SET check_at = 'epoch', checked_at = NULL, created_at = now() - interval '1 day'",
        )
        .await;
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 0);
    assert_eq!(end_reason(&fixture, session).await, None);
    let waiting = fixture
        .scalar("SELECT count(*) FROM sessions WHERE check_at > now() AND checked_at <= now()");
    assert_eq!(waiting.await, 1);
    fixture.end().await;
}

#[tokio::test]
async fn changed_session_is_looked_at_again() {
    let fixture = Fixture::new().await;
    let session = fixture.session_with(24 * LONG, None).await;
    let change = codelia_store::SessionChange {
        idle_ttl: Some(Some(Duration::from_micros(1))),
        ..Default::default()
    };
    fixture
        .store
        .session_update(&fixture.tenant, &SessionRef::Id(session.id), &change)
        .await
        .unwrap();
    assert_eq!(fixture.store.session_expire_any_tenant(10).await.unwrap(), 1);
    assert_eq!(end_reason(&fixture, session.id).await, Some(SessionEndReason::Idle));
    fixture.end().await;
}

/// Rows and index entries that `work` reads, on connections of its own.
pub(crate) async fn rows_read(fixture: &Fixture, work: impl AsyncFn(&Store)) -> i64 {
    // A connection reports what it read when it ends.
    let ended = async |stores| {
        eventually("connections end", async || {
            (fixture.connections().await == (stores, 0)).then_some(())
        })
        .await;
        fixture.read_counter().await
    };
    let (stores, _) = fixture.connections().await;
    let before = ended(stores).await;
    let store = fixture.database.store().await.unwrap();
    work(&store).await;
    store.close().await;
    ended(stores).await - before
}

/// Fills the tables with sessions and events of tenant a, one open session in a hundred.
async fn many_rows(fixture: &Fixture) {
    fixture.session().await;
    fixture
        .execute(&format!(
            "INSERT INTO sessions (id, tenant_id, spec, labels, state, end_reason, created_at, expires_at, ended_at,
                                   removed_at, checked_at, check_at, idle_ttl)
             SELECT id_at(now() - n * interval '1 second'), 'a',
                    (SELECT spec FROM sessions LIMIT 1),
                    CASE WHEN n % 2 = 0 THEN '{{\"half\": \"yes\"}}'::jsonb
                         WHEN n % 1000 = 1 THEN '{{\"few\": \"yes\"}}'::jsonb ELSE '{{}}' END,
                    CASE WHEN n % 100 = 0 THEN 'open' ELSE 'ended' END,
                    CASE WHEN n % 100 = 0 THEN NULL ELSE 'closed' END,
                    now(), now() + interval '1 day',
                    CASE WHEN n % 100 = 0 THEN NULL ELSE now() END, CASE WHEN n % 100 = 0 THEN NULL ELSE now() END,
                    now(), now() + interval '1 hour', interval '1 hour'
             FROM generate_series(1, {MANY}) AS n;
             INSERT INTO audit (writer, id, at, kind, tenant_id, detail)
             SELECT id_at(now()), id_at(now() - n * interval '1 second'), now(),
                    CASE WHEN n % 2 = 0 THEN 'RUN_REFUSED' ELSE 'SYSCALL_BLOCKED' END, 'a', '{{}}'
             FROM generate_series(1, {MANY}) AS n;"
        ))
        .await;
}

#[tokio::test]
async fn pages_and_sweeps_read_few_rows() {
    let fixture = Fixture::new().await;
    many_rows(&fixture).await;
    let deep = SessionId(
        fixture.uuid(&format!("SELECT id_at(now() - {MANY} * interval '0.9 seconds')")).await,
    );
    let label = |name: &str| [(name.to_owned(), "yes".to_owned())].into();
    let filters = [
        SessionFilter { before: Some(deep), ..SessionFilter::default() },
        SessionFilter {
            state: Some(SessionState::Open),
            before: Some(deep),
            ..SessionFilter::default()
        },
        SessionFilter {
            state: Some(SessionState::Ended),
            before: Some(deep),
            ..SessionFilter::default()
        },
        SessionFilter { labels: label("half"), before: Some(deep), ..SessionFilter::default() },
        SessionFilter { labels: label("few"), ..SessionFilter::default() },
    ];
    for filter in &filters {
        let read = rows_read(&fixture, async |store| {
            assert_eq!(store.session_list(&fixture.tenant, filter, 50).await.unwrap().len(), 50);
        });
        let read = read.await;
        assert!(read < FEW, "{read} rows for {filter:?}");
    }
    let read = rows_read(&fixture, async |store| {
        for kind in [None, Some(EventKind::RunRefused)] {
            let filter = AuditFilter { kind, after: Some(deep.0), ..AuditFilter::default() };
            let events = store.audit_list(Some(&fixture.tenant), &filter, 50).await.unwrap();
            assert_eq!(events.len(), 50);
        }
        assert_eq!(store.session_expire_any_tenant(100).await.unwrap(), 0);
        store.worker_forget_any_tenant(100).await.unwrap();
    });
    let read = read.await;
    assert!(read < FEW, "{read}");
    fixture.end().await;
}

#[tokio::test]
async fn run_and_session_purge_read_what_they_delete() {
    let fixture = Fixture::new().await;
    many_rows(&fixture).await;
    fixture
        .execute(&format!(
            "INSERT INTO ended_runs (id, tenant_id, session_id, spec, labels, attempt, created_at, ended_at, result)
             SELECT run_id_at(now() - n * interval '1 second'), 'a', id_at(now() - n * interval '1 second'), '{{}}', '{{}}', 1,
                    now(), now() - n * interval '1 second', '{{\"outcome\": {{\"kind\": \"canceled\"}}}}'
             FROM generate_series(1, {MANY}) AS n"
        ))
        .await;
    let hour = Duration::from_secs(3600);
    let keep = Retention { runs: hour, output: hour / 2, ..Retention::default() };
    let read = rows_read(&fixture, async |store| {
        assert!(store.run_purge_any_tenant(&keep, 500).await.unwrap());
    });
    let read = read.await;
    assert!(read < FEW, "{read} for runs");
    let read = rows_read(&fixture, async |store| {
        assert_eq!(store.session_purge_any_tenant(Duration::ZERO, 500).await.unwrap(), 500);
    });
    let read = read.await;
    assert!(read < FEW, "{read} for sessions");
    let read = rows_read(&fixture, async |store| {
        let soon = std::time::Instant::now() + hour;
        assert!(store.output_purge_any_tenant(&keep, 500, soon).await.unwrap());
    });
    let read = read.await;
    assert!(read < FEW, "{read} for output");
    fixture.end().await;
}

#[tokio::test]
async fn workers_gone_for_a_day_are_forgotten() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let (holds, gone, recent) = (
        fixture.worker("holds").await,
        fixture.worker("gone").await,
        fixture.worker("recent").await,
    );
    fixture.worker("alive").await;
    fixture.lease(&session, &holds).await.unwrap();
    for worker in [&holds, &gone, &recent] {
        fixture.expire_worker(worker).await;
    }
    fixture
        .execute("UPDATE workers SET heartbeat_at = now() - interval '2 days' WHERE id IN ('holds', 'gone', 'alive')")
        .await;
    assert_eq!(fixture.store.worker_forget_any_tenant(10).await.unwrap(), 1);
    let listed: Vec<String> = fixture
        .store
        .worker_list(None, 10)
        .await
        .unwrap()
        .into_iter()
        .map(|worker| worker.id.into())
        .collect();
    assert_eq!(listed, ["alive", "holds", "recent"]);
    fixture.store.lease_sweep_any_tenant(10).await.unwrap();
    assert_eq!(fixture.store.worker_forget_any_tenant(10).await.unwrap(), 1, "its lease has ended");
    fixture.end().await;
}

impl Fixture {
    pub(crate) async fn execute(&self, statement: &str) {
        self.database.execute(statement).await.unwrap();
    }

    pub(crate) async fn scalar(&self, query: &str) -> i64 {
        self.value(query).await
    }

    async fn uuid(&self, query: &str) -> Uuid {
        self.value(query).await
    }

    async fn value<T>(&self, query: &str) -> T
    where
        T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
    {
        let mut connection = self.database.connection().await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(query.to_owned()))
            .fetch_one(&mut connection)
            .await
            .unwrap()
            .get(0)
    }

    /// Connections of stores, and others except the one that asks.
    async fn connections(&self) -> (i64, i64) {
        let mut connection = self.database.connection().await.unwrap();
        let row = sqlx::query(
            "SELECT count(*) FILTER (WHERE application_name = 'codelia'),
                    count(*) FILTER (WHERE application_name <> 'codelia' AND pid <> pg_backend_pid())
             FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'",
        );
        let row = row.fetch_one(&mut connection).await.unwrap();
        (row.get(0), row.get(1))
    }

    async fn read_counter(&self) -> i64 {
        self.scalar(
            "SELECT (SELECT coalesce(sum(seq_tup_read + coalesce(idx_tup_fetch, 0)), 0) FROM pg_stat_user_tables)::bigint
                  + (SELECT coalesce(sum(idx_tup_read), 0) FROM pg_stat_user_indexes)::bigint",
        )
        .await
    }

    /// Lets an ended run have ended this many minutes ago.
    async fn end_run_earlier(&self, run: Uuid, minutes: i32) {
        self.execute(&format!(
            "UPDATE ended_runs SET ended_at = now() - interval '{minutes} minutes' WHERE id = '{run}'"
        ))
        .await;
    }

    async fn rename_run(&self, run: Uuid, id: Uuid) {
        self.execute(&format!("UPDATE ended_runs SET id = '{id}' WHERE id = '{run}'")).await;
    }
}
