//! Leases: one live holder, and a stale holder can change nothing.

use std::time::Duration;

use codelia_store::{
    DrainedBy, Error, NewWorker, ReleaseOutcome, RunAdmission, RunState, Session, SessionRef,
    SweepReport,
};
use codelia_tests::eventually;
use codelia_types::{Incarnation, LeaseToken, LostReason, Outcome};
use futures::future::join_all;
use sqlx::Connection;
use uuid::Uuid;

use crate::harness::{Fixture, LONG, Registered, new_worker};

#[tokio::test]
async fn concurrent_acquire_has_one_winner() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let names = ["w0", "w1", "w2", "w3", "w4", "w5"];
    let workers = join_all(names.map(|name| fixture.worker(name))).await;
    let leases = join_all(workers.iter().map(|worker| fixture.lease(&session, worker))).await;
    assert_eq!(leases.iter().flatten().count(), 1);
    assert_eq!(leases.into_iter().flatten().next().unwrap().token.epoch.0, 1);
    fixture.end().await;
}

#[tokio::test]
async fn acquire_raises_epoch_and_fences_previous_holder() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let (old, new) = (fixture.worker("old").await, fixture.worker("new").await);
    let first = fixture.lease(&session, &old).await.unwrap();
    assert!(fixture.lease(&session, &new).await.is_none(), "the holder is alive");
    let run = fixture.insert(session.id, 0).await;

    fixture.expire_worker(&old).await;
    let second = fixture.lease(&session, &new).await.unwrap();
    assert_eq!(second.token.epoch.0, first.token.epoch.0 + 1);
    assert!(second.has_files);
    assert_eq!(
        (first.lost, second.lost, second.retried),
        (0, 1, 0),
        "the new holder reports what it ended"
    );

    assert!(matches!(fixture.commit(run, &old, &first).await, Err(Error::Fenced)));
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Lost(LostReason::WorkerLost)));
    fixture.end().await;
}

#[tokio::test]
async fn expired_lease_cannot_renew_or_commit() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    // A renewal for zero seconds has expired when the next statement runs.
    fixture.store.worker_renew(&worker.id, worker.incarnation, Duration::ZERO, 0).await.unwrap();

    assert!(matches!(
        fixture.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await,
        Err(Error::Fenced)
    ));
    assert!(matches!(fixture.commit(run, &worker, &lease).await, Err(Error::Fenced)));
    assert_eq!(fixture.run(run).await.state, RunState::Running, "no sweep ran yet");
    fixture.end().await;
}

#[tokio::test]
async fn new_incarnation_fences_old_and_reacquires() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let before = fixture.worker("w").await;
    fixture.lease(&session, &before).await.unwrap();
    let after = fixture.worker("w").await;
    assert!(matches!(
        fixture.store.worker_renew(&before.id, before.incarnation, LONG, 0).await,
        Err(Error::Fenced)
    ));
    assert_eq!(fixture.lease(&session, &after).await.unwrap().token.epoch.0, 2);
    fixture.end().await;
}

#[tokio::test]
async fn session_with_files_stays_on_its_root() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let home = fixture.worker("home").await;
    fixture.lease(&session, &home).await.unwrap();
    fixture.expire_worker(&home).await;
    let stranger = fixture.worker_on("stranger", Uuid::from_u128(2), LONG).await;
    assert!(fixture.lease(&session, &stranger).await.is_none());
    let neighbour = fixture.worker("neighbour").await;
    assert!(fixture.lease(&session, &neighbour).await.is_some(), "the same root");
    fixture.end().await;
}

#[tokio::test]
async fn session_abandons_files_only_if_allowed() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let home = fixture.worker("home").await;
    fixture.lease(&session, &home).await.unwrap();
    fixture.insert(session.id, 0).await;
    fixture.expire_worker(&home).await;
    let stranger = fixture.worker_on("stranger", Uuid::from_u128(2), LONG).await;
    let set = async |change: &str| fixture.database.execute(change).await.unwrap();

    set("UPDATE sessions SET allow_data_loss = true").await;
    assert!(fixture.lease(&session, &stranger).await.is_none(), "its worker may still restart");
    fixture.insert(session.id, 0).await;
    set("UPDATE workers SET heartbeat_at = now() - interval '2 minutes' WHERE id = 'home'").await;
    set("UPDATE upkeep_owner SET until = now(), watching_since = now() - interval '2 minutes'")
        .await;
    set("UPDATE sessions SET allow_data_loss = false").await;
    assert!(fixture.lease(&session, &stranger).await.is_none(), "data loss is not allowed");
    let refused = fixture.insert_try(session.id, 0, None, fixture.quotas).await;
    assert!(matches!(refused, RunAdmission::SessionDataLost), "{refused:?}");
    set("UPDATE sessions SET allow_data_loss = true").await;
    assert!(!fixture.lease(&session, &stranger).await.unwrap().has_files);
    fixture.end().await;
}

#[tokio::test]
async fn sweep_loses_or_retries_started_runs_once() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    fixture.lease(&session, &worker).await.unwrap();
    let (lost, retried) =
        (fixture.insert(session.id, 0).await, fixture.insert(session.id, 1).await);

    assert_eq!(
        fixture.store.lease_sweep_any_tenant(100).await.unwrap(),
        SweepReport::default(),
        "the worker is alive"
    );
    fixture.expire_worker(&worker).await;
    let swept = fixture.store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(swept, SweepReport { sessions: 1, retried: 1, lost: 1 });
    assert_eq!(
        fixture.store.lease_sweep_any_tenant(100).await.unwrap(),
        SweepReport::default(),
        "nothing is left"
    );

    assert_eq!(fixture.run(lost).await.outcome(), Some(&Outcome::Lost(LostReason::WorkerLost)));
    let again = fixture.run(retried).await;
    assert_eq!((again.state, again.attempt), (RunState::Queued, 2));

    let second = fixture.worker("v").await;
    let lease = fixture.lease(&session, &second).await.unwrap();
    fixture.store.run_begin(retried, &lease.token).await.unwrap().unwrap();
    fixture.expire_worker(&second).await;
    fixture.store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(
        fixture.run(retried).await.outcome(),
        Some(&Outcome::Lost(LostReason::WorkerLost)),
        "no retries are left"
    );
    fixture.end().await;
}

#[tokio::test]
async fn sweep_retries_no_run_of_a_quarantined_session() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 1).await;
    fixture.quarantine(&session).await;
    fixture.expire_worker(&worker).await;
    let swept = fixture.store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(swept, SweepReport { sessions: 1, retried: 0, lost: 1 });
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Lost(LostReason::WorkerLost)));
    fixture.end().await;
}

#[tokio::test]
async fn release_is_refused_while_run_is_running() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    let release = || fixture.store.lease_release(session.id, &lease.token);

    assert_eq!(release().await.unwrap(), ReleaseOutcome::Busy);
    fixture.commit(run, &worker, &lease).await.unwrap();
    assert_eq!(release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(release().await.unwrap(), ReleaseOutcome::NotHeld);
    fixture.end().await;
}

#[tokio::test]
async fn unleased_sessions_with_queued_runs_are_listed() {
    let fixture = Fixture::new().await;
    let (first, second) = (fixture.session().await, fixture.session().await);
    fixture.insert(first.id, 0).await;
    fixture.insert(second.id, 0).await;
    let idle = fixture.session().await;
    let worker = fixture.worker("w").await;
    let wanted = fixture.store.lease_list_wanted(&worker.id, worker.incarnation, 10).await.unwrap();
    assert_eq!(wanted.free, [first.id, second.id]);
    assert!(wanted.held.is_empty() && !wanted.free.contains(&idle.id));
    fixture.end().await;
}

#[tokio::test]
async fn draining_worker_gets_no_sessions_or_runs() {
    let fixture = Fixture::new().await;
    let (held, free) = (fixture.session().await, fixture.session().await);
    let worker = fixture.worker("w").await;
    fixture.lease(&held, &worker).await.unwrap();
    fixture.store.worker_drain(&worker.id, DrainedBy::Operator).await.unwrap().unwrap();

    assert!(fixture.lease(&free, &worker).await.is_none());
    let run = fixture.insert(held.id, 0).await;
    assert_eq!(fixture.run(run).await.state, RunState::Queued);
    assert!(
        fixture.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap().drain
    );
    fixture.end().await;
}

/// Waits until a statement is blocked by a lock.
async fn statement_is_blocked(fixture: &Fixture) {
    statements_are_blocked(fixture, 1).await;
}

async fn statements_are_blocked(fixture: &Fixture, count: i64) {
    codelia_tests::eventually("statements are blocked", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (fixture.database.number(waiting).await.ok()? >= count).then_some(())
    })
    .await;
}

/// Creates a session whose holder has expired, and another worker that may acquire it.
async fn expired_holder(fixture: &Fixture) -> (Session, Registered) {
    let session = fixture.session().await;
    let (holder, other) = (fixture.worker("holder").await, fixture.worker("other").await);
    fixture.lease(&session, &holder).await.unwrap();
    fixture.store.worker_renew(&holder.id, holder.incarnation, Duration::ZERO, 0).await.unwrap();
    (session, other)
}

#[tokio::test]
async fn acquire_waits_for_renewal_in_flight() {
    let fixture = Fixture::new().await;
    let (session, other) = expired_holder(&fixture).await;
    let mut renewal = fixture.database.connection().await.unwrap();
    let renew =
        "BEGIN; UPDATE workers SET lease_until = now() + interval '1 hour' WHERE id = 'holder'";
    sqlx::raw_sql(renew).execute(&mut renewal).await.unwrap();
    let (taken, ()) = tokio::join!(fixture.lease(&session, &other), async {
        statement_is_blocked(&fixture).await;
        sqlx::raw_sql("COMMIT").execute(&mut renewal).await.unwrap();
    });
    assert!(taken.is_none(), "the holder renewed in time");
    fixture.end().await;
}

#[tokio::test]
async fn late_renewal_cannot_revive_replaced_holder() {
    let fixture = Fixture::new().await;
    let (session, other) = expired_holder(&fixture).await;
    // `now()` of this transaction is when the lease was live; its update runs after the
    // acquisition.
    let mut renewal = fixture.database.connection().await.unwrap();
    let early = "BEGIN; SELECT now()";
    sqlx::raw_sql(early).execute(&mut renewal).await.unwrap();
    fixture.lease(&session, &other).await.unwrap();
    let renew = "UPDATE workers SET lease_until = now() + interval '1 hour'
                 WHERE id = 'holder' AND lease_until > now() - interval '1 minute'";
    let renewed = sqlx::raw_sql(renew).execute(&mut renewal).await.unwrap();
    assert_eq!(renewed.rows_affected(), 0);
    fixture.end().await;
}

#[tokio::test]
async fn late_registration_cannot_replace_newer_one() {
    let fixture = Fixture::new().await;
    fixture.worker("w").await;
    // Both registrations have seen the first incarnation when they are executed.
    let mut lock = fixture.database.connection().await.unwrap();
    sqlx::raw_sql("BEGIN; LOCK TABLE workers IN SHARE MODE").execute(&mut lock).await.unwrap();
    let new = || NewWorker { incarnation: Incarnation::generate(), ..new_worker("w") };
    let (one, two) = (new(), new());
    let (first, second, ()) = tokio::join!(
        fixture.store.worker_register(&one),
        fixture.store.worker_register(&two),
        async {
            statements_are_blocked(&fixture, 2).await;
            sqlx::raw_sql("COMMIT").execute(&mut lock).await.unwrap();
        }
    );
    let registered = match (&first, &second) {
        (Ok(_), Err(Error::Fenced)) => one.incarnation,
        (Err(Error::Fenced), Ok(_)) => two.incarnation,
        both => panic!("{both:?}"),
    };
    let id = one.id;
    fixture.store.worker_renew(&id, registered, LONG, 0).await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn release_waits_for_insert_in_flight() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();

    // An insert of a run that is not committed yet and holds its locks.
    let mut insert = fixture.database.connection().await.unwrap();
    let record = format!(
        "BEGIN; SELECT id FROM sessions WHERE id = '{0}' FOR SHARE;
         INSERT INTO live_runs (id, tenant_id, session_id, spec, labels, retries, state, worker_id, incarnation, lease_epoch)
         SELECT gen_random_uuid(), tenant_id, id, '{{}}', '{{}}', 0, 'running', lease_worker, lease_incarnation, lease_epoch
         FROM sessions WHERE id = '{0}'",
        session.id
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(record)).execute(&mut insert).await.unwrap();
    let release = fixture.store.lease_release(session.id, &lease.token);
    let (released, ()) = tokio::join!(release, async {
        statement_is_blocked(&fixture).await;
        sqlx::raw_sql("COMMIT").execute(&mut insert).await.unwrap();
    });
    assert_eq!(released.unwrap(), ReleaseOutcome::Busy);
    fixture.end().await;
}

#[tokio::test]
async fn drain_survives_reregistration_but_not_restart() {
    let fixture = Fixture::new().await;
    let first = fixture.worker("w").await;
    fixture.store.worker_drain(&first.id, DrainedBy::Operator).await.unwrap().unwrap();
    fixture.store.worker_renew(&first.id, first.incarnation, Duration::ZERO, 0).await.unwrap();
    fixture.store.lease_sweep_any_tenant(10).await.unwrap();
    let again = fixture.register_again("w", Some(first.incarnation)).await;
    assert!(again.1.drain, "a drain outlives a lost lease");
    let restarted = fixture.register_again("w", None).await;
    assert!(!restarted.1.drain, "a new process starts undrained");
    fixture.end().await;
}

#[tokio::test]
async fn lease_connection_recovers_from_cut_and_lock() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let connection = fixture.store.lease_connection(Duration::from_secs(1));
    let renew = || connection.renew(&worker.id, worker.incarnation, LONG, 0);
    renew().await.unwrap();
    let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE application_name = 'codelia lease' AND datname = current_database()";
    fixture.database.execute(cut).await.unwrap();
    assert!(
        matches!(renew().await, Err(Error::Unavailable(_))),
        "the control: the connection was cut"
    );
    renew().await.unwrap();
    let mut blocker = fixture.database.connection().await.unwrap();
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("SELECT FROM workers FOR UPDATE").execute(&mut *lock).await.unwrap();
    assert!(renew().await.unwrap_err().is_transient(), "the statement ends in time");
    lock.rollback().await.unwrap();
    renew().await.unwrap();
    blocker.close().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn busy_pool_does_not_delay_lease_connection() {
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let mut blocker = fixture.database.connection().await.unwrap();
    let mut lock = blocker.begin().await.unwrap();
    sqlx::query("LOCK TABLE sessions").execute(&mut *lock).await.unwrap();
    // More calls than their class has connections.
    let held = join_all((0..8).map(|_| fixture.store.tenant_usage(&fixture.tenant)));
    let connection = fixture.store.lease_connection(Duration::from_secs(10));
    let renewed = async {
        let busy = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
        eventually("the pool is busy", || async {
            (fixture.database.number(busy).await.ok()? >= 2).then_some(())
        })
        .await;
        connection.renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap();
        lock.rollback().await.unwrap();
    };
    let (held, ()) = futures::future::join(held, renewed).await;
    assert!(
        held.iter().any(Result::is_ok),
        "the control: the pool worked again once the lock was gone"
    );
    blocker.close().await.unwrap();
    fixture.end().await;
}

#[tokio::test]
async fn only_the_holder_gets_the_first_lease_again() {
    let fixture = Fixture::new().await;
    let (worker, other) = (fixture.worker("w").await, fixture.worker("v").await);
    let session = fixture.session().await;
    let get =
        async |lease: &LeaseToken| fixture.store.lease_get_first(session.id, lease).await.unwrap();
    let first = fixture.lease(&session, &worker).await.unwrap();
    let again = get(&first.token).await.unwrap();
    assert_eq!(
        (again.token, again.tenant, again.has_files),
        (first.token.clone(), first.tenant, false)
    );
    let others =
        LeaseToken { worker: other.id, incarnation: other.incarnation, ..first.token.clone() };
    assert!(get(&others).await.is_none(), "another worker holds it");
    fixture.store.lease_release(session.id, &first.token).await.unwrap();
    assert!(get(&first.token).await.is_none(), "nobody holds it");
    let second = fixture.lease(&session, &worker).await.unwrap();
    assert!(get(&first.token).await.is_none(), "it is held under a later epoch");
    assert!(get(&second.token).await.is_none(), "an earlier holder may have left files");
    fixture.end().await;
}

#[tokio::test]
async fn first_lease_needs_a_session_that_nobody_held() {
    let fixture = Fixture::new().await;
    let (worker, other) = (fixture.worker("w").await, fixture.worker("v").await);
    let acquire = async |session: &Session, worker: &Registered| {
        fixture.store.lease_acquire_first(session.id, &worker.id, worker.incarnation).await.unwrap()
    };
    let session = fixture.session().await;
    let leases = join_all([&worker, &other].map(|worker| acquire(&session, worker))).await;
    let [lease] = &leases.into_iter().flatten().collect::<Vec<_>>()[..] else {
        panic!("one winner")
    };
    assert_eq!((lease.token.epoch.0, lease.has_queue), (1, false));
    let run = fixture.insert(session.id, 0).await;
    assert_eq!(fixture.run(run).await.state, RunState::Running, "the lease counts");
    let second = fixture.session().await;
    let lease = acquire(&second, &worker).await.unwrap();
    let released = fixture.store.lease_release(second.id, &lease.token).await.unwrap();
    assert_eq!(released, ReleaseOutcome::Released);
    assert!(acquire(&second, &worker).await.is_none(), "it was held before");
    assert_eq!(fixture.lease(&second, &worker).await.unwrap().token.epoch.0, 2);

    let waiting = fixture.session().await;
    let run = fixture.insert(waiting.id, 0).await;
    assert_eq!(fixture.run(run).await.state, RunState::Queued);
    assert!(acquire(&waiting, &worker).await.unwrap().has_queue);
    let wanted = fixture.store.lease_list_wanted(&other.id, other.incarnation, 10).await.unwrap();
    assert_eq!(wanted.free, [], "it does not wait any more");

    let gone = fixture.session().await;
    fixture.expire_worker(&worker).await;
    assert!(acquire(&gone, &worker).await.is_none(), "the worker has no lease");
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(gone.id)).await.unwrap();
    assert!(acquire(&gone, &other).await.is_none(), "it has ended");
    fixture.end().await;
}
