//! Statements on runs read a bounded number of rows, however long history and queue are.

use std::time::Duration;

use codelia_store::{
    Cancellation, DrainedBy, HeldSessions, Quotas, RunAdmission, RunFilter, RunState, Store,
    WantedSessions,
};
use codelia_tests::eventually;
use codelia_types::{LeaseToken, RunId, SessionId};
use sqlx::{AssertSqlSafe, Connection};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{
    harness::{Fixture, LONG, ROOT, Registered, exited},
    upkeep::rows_read,
};

/// Rows and index entries that a statement may read at most, with the first uses of its connection.
const FEW: i64 = 3000;

/// Fills history: 200,000 runs of tenant a in the last 20 hours, a fifth of them in `session`, all
/// with a label, and one run of tenant b before them.
async fn fill_history(fixture: &Fixture, session: SessionId) {
    let run = fixture.insert(fixture.session().await.id, 0).await;
    fixture.store.run_cancel(&fixture.tenant, run, &Cancellation::default()).await.unwrap();
    fixture
        .execute(&format!(
            r#"CREATE TEMP TABLE filler AS
             SELECT n, (left(run_id_at(now() - n * interval '0.36 s')::text, 14) || '7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid AS id,
                    now() - n * interval '0.36 s' AS at
             FROM generate_series(1, 200001) AS n;
             INSERT INTO ended_runs (id, tenant_id, session_id, spec, summary, labels, attempt, created_at, ended_at, result)
             SELECT f.id, CASE WHEN n > 200000 THEN 'b' ELSE 'a' END,
                    CASE WHEN n % 5 = 0 THEN '{session}'::uuid ELSE gen_random_uuid() END,
                    r.spec, r.summary, '{{"k": "v"}}', 1, at, at, '{{"outcome": {{"kind": "canceled"}}}}'
             FROM filler f, ended_runs r;
             INSERT INTO run_labels SELECT (label_tokens('a', '{{"k": "v"}}'))[1], id FROM filler;"#,
        ))
        .await;
}

#[tokio::test]
async fn run_lists_read_few_rows() {
    let fixture = Fixture::new().await;
    // Older than its runs.
    let session = SessionId(Uuid::from_u128(1 << 80));
    fill_history(&fixture, session).await;
    let hours = |hours: u64| OffsetDateTime::now_utc() - Duration::from_secs(hours * 3600);
    let at = |time: OffsetDateTime| {
        let millis = u128::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap();
        Some(RunId(Uuid::from_u128(millis << 80)))
    };
    let all = RunFilter::default();
    let filters = [
        all.clone(),
        RunFilter { before: at(hours(10)), ..all.clone() },
        RunFilter { state: Some(RunState::Ended), ..all.clone() },
        RunFilter { session: Some(session), before: at(hours(10)), ..all.clone() },
        RunFilter { created_before: Some(hours(10)), ..all.clone() },
        RunFilter { created_after: Some(hours(10)), ..all.clone() },
        RunFilter {
            labels: [("k".to_owned(), "v".to_owned())].into(),
            before: at(hours(10)),
            ..all.clone()
        },
    ];
    for filter in &filters {
        let read = rows_read(&fixture, async |store| {
            assert_eq!(store.run_list(&fixture.tenant, filter, 50).await.unwrap().len(), 50);
        });
        let read = read.await;
        assert!(read < FEW, "{read} rows for {filter:?}");
    }
    let others = rows_read(&fixture, async |store| {
        assert_eq!(store.run_list(&fixture.other, &all, 50).await.unwrap().len(), 1);
        let queued = RunFilter { state: Some(RunState::Queued), ..all.clone() };
        assert!(store.run_list(&fixture.tenant, &queued, 50).await.unwrap().is_empty());
    });
    let read = others.await;
    assert!(read < FEW, "{read} rows of other tenants");
    fixture.end().await;
}

/// Fills the queue: 100,000 runs of `session`, and 20,000 other sessions with one run each.
async fn fill_queue(fixture: &Fixture, session: SessionId) {
    fixture
        .execute(&format!(
            "INSERT INTO sessions (id, tenant_id, spec, labels, expires_at)
             SELECT ('10000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'b', s.spec, '{{}}', s.expires_at
             FROM generate_series(1, 20000) AS n, sessions s WHERE s.id = '{session}';
             INSERT INTO live_runs (id, tenant_id, session_id, spec, labels, retries, state)
             SELECT ('10000000-0000-7000-9000-' || lpad(to_hex(n), 12, '0'))::uuid,
                    CASE WHEN n > 20000 THEN 'a' ELSE 'b' END,
                    CASE WHEN n > 20000 THEN '{session}' ELSE ('10000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid END,
                    r.spec, '{{}}', 0, 'queued'
             FROM generate_series(1, 120000) AS n, (SELECT spec FROM live_runs LIMIT 1) AS r;
             INSERT INTO waiting_sessions (session_id, tenant_id, mode, root, allow_data_loss)
             SELECT id, 'b', 'logical', '00000000-0000-0000-0000-000000000000', false FROM sessions WHERE tenant_id = 'b'"
        ))
        .await;
}

#[tokio::test]
async fn long_queue_is_read_in_part() {
    let fixture = Fixture::new().await;
    let (session, free) = (fixture.session().await, fixture.session().await);
    let worker = fixture.worker("w").await;
    let run = fixture.insert(session.id, 0).await;
    fixture.insert(free.id, 0).await;
    fill_queue(&fixture, session.id).await;
    let quotas = Quotas::default();
    let read = rows_read(&fixture, async |store| {
        let wanted = store.lease_list_wanted(&worker.id, worker.incarnation, 8).await.unwrap();
        assert_eq!((wanted.free.len(), wanted.held.len()), (8, 0));
        assert!(
            wanted.free[..2].iter().any(|id| [session.id, free.id].contains(id)),
            "both tenants come first"
        );
        let lease =
            store.lease_acquire(session.id, &worker.id, worker.incarnation).await.unwrap().unwrap();
        let queued = store
            .run_list_queued(&worker.id, worker.incarnation, HeldSessions::All, 1000)
            .await
            .unwrap();
        assert!(queued.len() > 100 && queued.iter().all(|(_, of, _)| *of == session.id));
        store.run_begin(run, &lease.token).await.unwrap().unwrap();
        store.run_commit(fixture.names(run, &lease), &lease.token, &exited(0)).await.unwrap();
        store
            .run_cancel(&fixture.tenant, queued[1].0, &Cancellation::default())
            .await
            .unwrap()
            .unwrap();
        assert!(store.run_expire_queued_any_tenant(100).await.unwrap() == 0);
        store.lease_sweep_any_tenant(100).await.unwrap();
        let token = LeaseToken { worker: worker.id.clone(), ..lease.token.clone() };
        store.lease_release(session.id, &token).await.unwrap();
    });
    let read = read.await;
    assert!(read < FEW, "{read} rows");
    assert!(matches!(
        fixture.insert_try(session.id, 0, None, quotas).await,
        RunAdmission::OverQuota("concurrent_runs")
    ));
    fixture.end().await;
}

/// Lets a worker hold 20,000 sessions that are idle.
async fn hold_idle_sessions(fixture: &Fixture, worker: &Registered) {
    fixture
        .execute(&format!(
            "INSERT INTO sessions (id, tenant_id, spec, labels, expires_at, home_root, lease_worker, lease_incarnation, lease_epoch)
             SELECT ('10000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, 'b', s.spec, '{{}}', s.expires_at,
                    w.root_id, w.id, w.incarnation, 1
             FROM generate_series(1, 20000) AS n, (SELECT * FROM sessions LIMIT 1) AS s, workers w WHERE w.id = '{}'",
            worker.id
        ))
        .await;
}

#[tokio::test]
async fn poll_does_not_read_idle_sessions() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture
        .store
        .run_hand_back(fixture.run_ref(run, session.id), 0, &worker.id, worker.incarnation)
        .await
        .unwrap();
    hold_idle_sessions(&fixture, &worker).await;
    let list = async |store: &Store, sessions: HeldSessions<'_>| {
        let queued =
            store.run_list_queued(&worker.id, worker.incarnation, sessions, 1000).await.unwrap();
        assert_eq!(queued.iter().map(|(id, ..)| *id).collect::<Vec<_>>(), [run]);
    };
    // Everything that a worker does all the time.
    let read = rows_read(&fixture, async |store| {
        let (id, incarnation) = (&worker.id, worker.incarnation);
        list(store, HeldSessions::Among(&[session.id, SessionId::generate()])).await;
        store
            .run_list_assigned_since(id, incarnation, OffsetDateTime::now_utc(), &[])
            .await
            .unwrap();
        assert_eq!(
            store.lease_list_wanted(id, incarnation, 8).await.unwrap(),
            WantedSessions::default()
        );
        store.worker_renew(id, incarnation, LONG, 0).await.unwrap();
        assert!(store.session_list_removable(id, incarnation, ROOT, 100).await.unwrap().is_empty());
    });
    let read = read.await;
    assert!(read < FEW, "{read} rows");
    let read_all = rows_read(&fixture, async |store| list(store, HeldSessions::All).await).await;
    assert!(read_all > 20_000, "a read of all sessions counts: {read_all} rows");
    fixture.end().await;
}

#[tokio::test]
async fn holder_finds_run_queued_without_its_knowledge() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    fixture.store.worker_drain(&worker.id, DrainedBy::Operator).await.unwrap().unwrap();
    let run = fixture.insert(session.id, 0).await;
    assert_eq!(fixture.run(run).await.state, RunState::Queued);
    fixture.store.worker_undrain(&worker.id).await.unwrap().unwrap();
    let list = async |by: &Registered| {
        fixture.store.lease_list_wanted(&by.id, by.incarnation, 9).await.unwrap()
    };
    let neighbour = fixture.worker("neighbour").await;
    assert_eq!(list(&neighbour).await, WantedSessions::default(), "it neither takes nor clears it");
    assert_eq!(list(&worker).await, WantedSessions { free: vec![], held: vec![session.id] });
    assert_eq!(list(&worker).await, WantedSessions::default(), "reported once");
    fixture.end().await;
}

#[tokio::test]
async fn insert_that_waits_for_acquisition_is_found() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let mut holder = fixture.database.connection().await.unwrap();
    // As `lease_acquire`, in two steps.
    let mut acquisition = holder.begin().await.unwrap();
    let acquire = format!(
        "UPDATE sessions SET home_root = '{ROOT}', lease_worker = '{}', lease_incarnation = '{}', lease_epoch = 1",
        worker.id, worker.incarnation.0
    );
    sqlx::raw_sql(AssertSqlSafe(acquire)).execute(&mut *acquisition).await.unwrap();
    let insert = fixture.insert(session.id, 0);
    let commit = async {
        let blocked = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("the insert waits", async || (fixture.scalar(blocked).await == 1).then_some(()))
            .await;
        acquisition.commit().await.unwrap();
    };
    let (run, ()) = tokio::join!(insert, commit);
    assert_eq!(
        fixture.run(run).await.state,
        RunState::Queued,
        "the worker reads before the insert commits"
    );
    let wanted = fixture.store.lease_list_wanted(&worker.id, worker.incarnation, 9).await.unwrap();
    assert_eq!(wanted, WantedSessions { free: vec![], held: vec![session.id] });
    fixture.end().await;
}

#[tokio::test]
async fn outdated_waiting_session_is_cleared_once_listed() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    let run = fixture.insert(session.id, 0).await;
    fixture.store.run_cancel(&fixture.tenant, run, &Cancellation::default()).await.unwrap();
    let list = async || {
        fixture.store.lease_list_wanted(&worker.id, worker.incarnation, 9).await.unwrap().free
    };
    let rows = async || fixture.scalar("SELECT count(*) FROM waiting_sessions").await;
    assert_eq!(rows().await, 1);
    assert!(list().await.is_empty());
    assert_eq!(rows().await, 0);
    fixture.insert(session.id, 0).await;
    assert_eq!(list().await, [session.id], "it waits again");
    fixture.end().await;
}

#[tokio::test]
async fn insert_near_quota_needs_one_connection() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let mut options = codelia_store::Options::from_url(&fixture.database.url()).unwrap();
    // One connection for runs.
    options.max_connections = std::num::NonZeroU32::new(3);
    options.acquire_timeout = Duration::from_secs(2);
    let store = codelia_store::Store::connect(options).await.unwrap();
    let quotas = Quotas { concurrent_runs: 2, ..Quotas::default() };
    let key = Some(("key", &b"hash"[..]));
    let small = Fixture { store, database: fixture.database, ..fixture };
    for _ in 0..2 {
        small.insert_try(session.id, 0, key, quotas).await;
        small.insert_try(session.id, 0, None, quotas).await;
    }
    let refused = small.insert_try(session.id, 0, Some(("other", b"hash")), quotas).await;
    assert!(matches!(refused, RunAdmission::OverQuota("concurrent_runs")), "{refused:?}");
    small.end().await;
}

#[tokio::test]
async fn run_far_from_quota_is_not_counted() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let quotas = Quotas { concurrent_runs: 1, ..Quotas::default() };
    for _ in 0..2 {
        let new = codelia_store::NewRun { check_quotas: false, ..fixture.new_run(session.id) };
        let admission = fixture.store.run_insert(new, quotas).await.unwrap();
        assert!(matches!(admission, RunAdmission::Recorded { counted: None, .. }), "{admission:?}");
    }
    let counted = fixture.insert_try(session.id, 0, None, Quotas::default()).await;
    let RunAdmission::Recorded { counted: Some(counted), .. } = counted else {
        panic!("{counted:?}")
    };
    assert_eq!((counted.active, counted.queued), (2, 2));
    fixture.end().await;
}

#[tokio::test]
async fn key_of_removed_run_is_free_again() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let insert =
        async || fixture.insert_try(session.id, 0, Some(("key", b"hash")), fixture.quotas).await;
    let RunAdmission::Recorded { run, .. } = insert().await else { panic!("not recorded") };
    fixture.store.run_cancel(&fixture.tenant, run.id, &Cancellation::default()).await.unwrap();
    assert!(matches!(insert().await, RunAdmission::Existing(_)));
    fixture.execute("DELETE FROM ended_runs").await;
    assert!(matches!(insert().await, RunAdmission::Recorded { .. }));
    fixture.end().await;
}

#[tokio::test]
async fn recent_and_known_assigned_runs_are_listed() {
    let fixture = Fixture::new().await;
    let (session, worker) = (fixture.session().await, fixture.worker("w").await);
    fixture.lease(&session, &worker).await.unwrap();
    let (first, second) =
        (fixture.insert(session.id, 0).await, fixture.insert(session.id, 0).await);
    let list = async |since: OffsetDateTime, known: &[RunId]| {
        let store = &fixture.store;
        let runs = store
            .run_list_assigned_since(&worker.id, worker.incarnation, since, known)
            .await
            .unwrap();
        let mut ids: Vec<RunId> = runs.into_iter().map(|run| run.id).collect();
        ids.sort_unstable_by_key(|id| id.0);
        ids
    };
    let (before, after) =
        (OffsetDateTime::UNIX_EPOCH, OffsetDateTime::now_utc() + Duration::from_secs(60));
    assert_eq!(list(before, &[]).await, [first, second]);
    assert!(list(after, &[]).await.is_empty());
    assert_eq!(list(after, &[first]).await, [first]);
    fixture
        .store
        .run_hand_back(fixture.run_ref(first, session.id), 0, &worker.id, worker.incarnation)
        .await
        .unwrap();
    assert!(list(after, &[first]).await.is_empty(), "it was handed back");
    fixture.end().await;
}
