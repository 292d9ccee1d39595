//! The end of sessions and their queues, and what leases and checks read of their runs.

use codelia_store::{
    Retention, RunAdmission, SessionCreated, SessionEndReason, SessionRef, Upkeep,
};
use codelia_types::{Outcome, Reason, SessionId};
use uuid::Uuid;

use crate::{
    harness::{Fixture, LONG, SessionRequest},
    upkeep::rows_read,
};

/// Rows and index entries that a statement may read.
const FEW: i64 = 3000;
const EXPIRED: &str =
    "UPDATE sessions SET expires_at = now() - interval '1 hour', check_at = now()";

impl Fixture {
    pub(crate) async fn end_reason(&self, session: SessionId) -> Option<SessionEndReason> {
        let found = self.store.session_get(&self.tenant, &SessionRef::Id(session)).await.unwrap();
        found.unwrap().end_reason
    }

    /// Adds queued runs like the one that the session has.
    async fn fill_queue(&self, session: SessionId, runs: i64) {
        self.execute(&format!(
            "INSERT INTO live_runs (id, tenant_id, session_id, spec, labels, retries, state)
             SELECT gen_random_uuid(), tenant_id, session_id, spec, labels, retries, state
             FROM generate_series(1, {runs}), (SELECT * FROM live_runs WHERE session_id = '{session}' LIMIT 1) AS r"
        ))
        .await;
    }

    /// Lets the clock of the database jump forward by an hour: every stored time is earlier by it.
    async fn jump_clock(&self) {
        self.execute(
            "UPDATE workers SET lease_until = lease_until - interval '1 hour', heartbeat_at = heartbeat_at - interval '1 hour';
             UPDATE upkeep_owner SET until = until - interval '1 hour', watching_since = watching_since - interval '1 hour'",
        )
        .await;
    }
}

#[tokio::test]
async fn queued_run_ends_with_expired_session() {
    let fixture = Fixture::new().await;
    let (free, held, worker) =
        (fixture.session().await, fixture.session().await, fixture.worker("w").await);
    let ended = fixture.insert(free.id, 0).await;
    let waiting = fixture.insert(held.id, 0).await;
    fixture.lease(&held, &worker).await.unwrap();
    fixture.execute(EXPIRED).await;
    let mut upkeep = Upkeep::new(fixture.store.clone(), Retention::default());
    assert_eq!(upkeep.pass().await.unwrap().0.expired, 1);
    assert_eq!(fixture.end_reason(free.id).await, Some(SessionEndReason::Expired));
    let outcome = fixture.run(ended).await.outcome().cloned();
    assert!(
        matches!(&outcome, Some(Outcome::Refused(refusal)) if refusal.reason == Reason::SessionEnded),
        "{outcome:?}"
    );
    assert_eq!(fixture.scalar("SELECT count(*) FROM waiting_sessions").await, 0);
    assert_eq!(fixture.end_reason(held.id).await, None, "its holder may start the run");
    assert_eq!(fixture.run(waiting).await.outcome(), None);
    // The holder dies.
    fixture.expire_worker(&worker).await;
    fixture.execute(EXPIRED).await;
    upkeep.pass().await.unwrap();
    assert_eq!(fixture.end_reason(held.id).await, Some(SessionEndReason::Expired));
    assert!(fixture.run(waiting).await.outcome().is_some());
    assert_eq!(fixture.scalar("SELECT count(*) FROM ending_sessions").await, 0);
    fixture.end().await;
}

#[tokio::test]
async fn long_queue_ends_in_batches() {
    let fixture = Fixture::new().await;
    let (closed, left) = (fixture.session().await, fixture.session().await);
    for session in [&closed, &left] {
        fixture.insert(session.id, 0).await;
    }
    for session in [&closed, &left] {
        fixture.fill_queue(session.id, 1200).await;
    }
    fixture
        .store
        .session_close(&fixture.tenant, &SessionRef::Id(closed.id))
        .await
        .unwrap()
        .unwrap();
    let canceled = async || {
        fixture
            .scalar(
                "SELECT count(*) FROM ended_runs WHERE result #>> '{outcome,kind}' = 'canceled'",
            )
            .await
    };
    assert_eq!(canceled().await, 1201, "all have ended when the call returns");
    // A process dies after it has closed the session.
    fixture
        .execute(&format!(
            "UPDATE sessions SET state = 'ended', end_reason = 'closed', ended_at = now() WHERE id = '{0}';
             INSERT INTO ending_sessions VALUES ('{0}', '{{\"kind\": \"canceled\"}}')",
            left.id
        ))
        .await;
    let mut upkeep = Upkeep::new(fixture.store.clone(), Retention::default());
    while fixture.scalar("SELECT count(*) FROM ending_sessions").await > 0 {
        upkeep.pass().await.unwrap();
    }
    assert_eq!(canceled().await, 2402);
    let largest = "SELECT max(runs) FROM (SELECT count(*) AS runs FROM ended_runs GROUP BY xmin::text) AS batch";
    assert!(fixture.scalar(largest).await <= 500, "rows of one transaction");
    fixture.end().await;
}

#[tokio::test]
async fn sweep_reads_only_dead_leases() {
    let fixture = Fixture::new().await;
    let (alive, dead) = (fixture.worker("alive").await, fixture.worker("dead").await);
    let (held, lost) = (fixture.session().await, fixture.session().await);
    fixture.lease(&held, &alive).await.unwrap();
    fixture.lease(&lost, &dead).await.unwrap();
    fixture
        .execute(
            "INSERT INTO sessions (id, tenant_id, spec, labels, expires_at, lease_worker, lease_incarnation, home_root)
             SELECT gen_random_uuid(), tenant_id, spec, labels, expires_at, lease_worker, lease_incarnation, home_root
             FROM generate_series(1, 20000), (SELECT * FROM sessions WHERE lease_worker = 'alive') AS s",
        )
        .await;
    fixture.expire_worker(&dead).await;
    let read = rows_read(&fixture, async |store| {
        assert_eq!(store.lease_sweep_any_tenant(100).await.unwrap().sessions, 1);
        assert_eq!(store.lease_sweep_any_tenant(100).await.unwrap().sessions, 0);
    });
    let read = read.await;
    assert!(read < FEW, "{read} rows");
    fixture.end().await;
}

#[tokio::test]
async fn lease_and_check_read_few_runs() {
    let fixture = Fixture::new().await;
    let (session, used) = (fixture.session().await, fixture.session().await);
    let worker = fixture.worker("w").await;
    for session in [&session, &used] {
        let lease = fixture.lease(session, &worker).await.unwrap();
        fixture.store.lease_release(session.id, &lease.token).await.unwrap();
        fixture.insert(session.id, 0).await;
    }
    fixture.fill_queue(session.id, 20_000).await;
    // Runs that never started, from before the last check.
    fixture
        .execute(&format!(
            "INSERT INTO ended_runs (id, tenant_id, session_id, spec, labels, attempt, created_at, ended_at, result)
             SELECT (left(run_id_at(now() - interval '20 minutes')::text, 14) || '7' || right(gen_random_uuid()::text, 21))::uuid,
                    'a', '{}', '{{}}', '{{}}', 1, now(), now(), '{{\"outcome\": {{\"kind\": \"canceled\"}}}}'
             FROM generate_series(1, 20000);
             UPDATE sessions SET check_at = now()",
            session.id
        ))
        .await;
    let read = rows_read(&fixture, async |store| {
        assert_eq!(store.session_expire_any_tenant(100).await.unwrap(), 0);
        let lease =
            store.lease_acquire(session.id, &worker.id, worker.incarnation).await.unwrap().unwrap();
        assert!(!lease.has_files, "no run started");
    });
    let read = read.await;
    assert!(read < FEW, "{read} rows");
    // A run that began before the last check and ended after it.
    let run = Uuid::from_u128(7);
    fixture
        .execute(&format!(
            "INSERT INTO ended_runs (id, tenant_id, session_id, spec, labels, attempt, created_at, started_at, ended_at, result)
             VALUES ('{run}', 'a', '{}', '{{}}', '{{}}', 1, now(), now(), now(), '{{\"outcome\": {{\"kind\": \"exited\", \"detail\": 0}}}}');
             UPDATE sessions SET live_runs = ARRAY['{run}']::uuid[]",
            used.id
        ))
        .await;
    assert!(fixture.lease(&used, &worker).await.unwrap().has_files);
    fixture.end().await;
}

#[tokio::test]
async fn session_far_from_quota_is_not_counted() {
    let fixture = Fixture::new().await;
    let quotas = codelia_store::Quotas { sessions: 1, ..fixture.quotas };
    let create = async |check_quota| {
        let request = SessionRequest { check_quota, ttl: LONG, ..SessionRequest::default() };
        fixture.session_try(request, quotas).await.unwrap()
    };
    for _ in 0..2 {
        let created = create(false).await;
        assert!(matches!(created, SessionCreated::New { open: None, .. }), "{created:?}");
    }
    assert!(matches!(create(true).await, SessionCreated::OverQuota));
    let counted = fixture.session_try(SessionRequest::default(), fixture.quotas).await.unwrap();
    assert!(matches!(counted, SessionCreated::New { open: Some(2), .. }), "{counted:?}");
    fixture
        .execute(
            "INSERT INTO sessions (id, tenant_id, spec, labels, expires_at)
             SELECT gen_random_uuid(), tenant_id, spec, labels, expires_at
             FROM generate_series(1, 20000), (SELECT * FROM sessions LIMIT 1) AS s",
        )
        .await;
    let read = rows_read(&fixture, async |store| {
        let request = SessionRequest { check_quota: false, ..SessionRequest::default() };
        fixture.session_try_in(store, request, quotas).await.unwrap();
    });
    let read = read.await;
    assert!(read < FEW, "{read} rows");
    fixture.end().await;
}

#[tokio::test]
async fn clock_jump_loses_no_files() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let home = fixture.worker("home").await;
    let lease = fixture.lease(&session, &home).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.commit(run, &home, &lease).await.unwrap();
    let mut upkeep = Upkeep::new(fixture.store.clone(), Retention::default());
    upkeep.pass().await.unwrap();
    fixture.execute("UPDATE upkeep_owner SET watching_since = now() - interval '1 day'").await;
    fixture.jump_clock().await;
    // A worker on another root is the first to register again.
    let stranger = fixture.worker_on("stranger", Uuid::from_u128(2), LONG).await;
    let allow = "UPDATE sessions SET allow_data_loss = true";
    for _ in 0..2 {
        let queued = fixture.insert_try(session.id, 0, None, fixture.quotas).await;
        assert!(
            matches!(queued, RunAdmission::Recorded { .. }),
            "its files are not lost: {queued:?}"
        );
        fixture.execute(allow).await;
        assert!(fixture.lease(&session, &stranger).await.is_none());
        fixture.execute("UPDATE sessions SET allow_data_loss = false").await;
        upkeep.pass().await.unwrap();
    }
    // The control: nobody has returned while the upkeep watched.
    fixture.execute("UPDATE upkeep_owner SET watching_since = now() - interval '2 minutes'").await;
    let refused = fixture.insert_try(session.id, 0, None, fixture.quotas).await;
    assert!(matches!(refused, RunAdmission::SessionDataLost), "{refused:?}");
    fixture.execute(allow).await;
    assert!(fixture.lease(&session, &stranger).await.is_some());
    fixture.end().await;
}
