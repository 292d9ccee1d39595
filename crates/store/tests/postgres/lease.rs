//! Leases: one live holder, and a stale one can do nothing.

use std::time::Duration;

use codelia_store::{Error, ReleaseOutcome, RunAdmission, RunState, Session, SweepReport};
use codelia_types::Outcome;
use futures::future::join_all;
use uuid::Uuid;

use crate::harness::{LONG, Registered, World};

#[tokio::test]
async fn of_many_workers_one_takes_a_session() {
    let world = World::new().await;
    let session = world.session().await;
    let names = ["w0", "w1", "w2", "w3", "w4", "w5"];
    let workers = join_all(names.map(|name| world.worker(name))).await;
    let leases = join_all(workers.iter().map(|worker| world.lease(&session, worker))).await;
    assert_eq!(leases.iter().flatten().count(), 1);
    assert_eq!(leases.into_iter().flatten().next().unwrap().token.epoch.0, 1);
    world.end().await;
}

#[tokio::test]
async fn each_acquisition_raises_the_epoch_and_fences_the_holder_before() {
    let world = World::new().await;
    let session = world.session().await;
    let (old, new) = (world.worker("old").await, world.worker("new").await);
    let first = world.lease(&session, &old).await.unwrap();
    assert!(world.lease(&session, &new).await.is_none(), "a live holder keeps it");
    let run = world.insert(session.id, 0).await;

    world.worker_dies(&old).await;
    let second = world.lease(&session, &new).await.unwrap();
    assert_eq!(second.token.epoch.0, first.token.epoch.0 + 1);
    assert!(second.has_files);

    assert!(matches!(world.commit(run, &old, &first).await, Err(Error::Fenced)));
    assert_eq!(world.run(run).await.outcome, Some(Outcome::Lost));
    world.end().await;
}

#[tokio::test]
async fn a_lease_that_ran_out_is_not_renewed_and_commits_nothing() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    // Renewed for no time at all: it has run out when the next statement looks.
    world.store.worker_renew(&worker.id, worker.incarnation, Duration::ZERO, 0).await.unwrap();

    assert!(matches!(
        world.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await,
        Err(Error::Fenced)
    ));
    assert!(matches!(world.commit(run, &worker, &lease).await, Err(Error::Fenced)));
    assert_eq!(world.run(run).await.state, RunState::Running, "nobody has swept it yet");
    world.end().await;
}

#[tokio::test]
async fn a_new_incarnation_of_a_worker_fences_the_old_and_takes_its_sessions_again() {
    let world = World::new().await;
    let session = world.session().await;
    let before = world.worker("w").await;
    world.lease(&session, &before).await.unwrap();
    let after = world.worker("w").await;
    assert!(matches!(
        world.store.worker_renew(&before.id, before.incarnation, LONG, 0).await,
        Err(Error::Fenced)
    ));
    assert_eq!(world.lease(&session, &after).await.unwrap().token.epoch.0, 2);
    world.end().await;
}

#[tokio::test]
async fn a_session_with_files_is_taken_only_where_its_files_are() {
    let world = World::new().await;
    let session = world.session().await;
    let home = world.worker("home").await;
    world.lease(&session, &home).await.unwrap();
    world.worker_dies(&home).await;
    let stranger = world.worker_on("stranger", Uuid::from_u128(2), LONG).await;
    assert!(world.lease(&session, &stranger).await.is_none());
    let neighbour = world.worker("neighbour").await;
    assert!(world.lease(&session, &neighbour).await.is_some(), "the same root");
    world.end().await;
}

#[tokio::test]
async fn a_session_leaves_its_files_only_if_it_may_and_their_worker_is_long_gone() {
    let world = World::new().await;
    let session = world.session().await;
    let home = world.worker("home").await;
    world.lease(&session, &home).await.unwrap();
    world.insert(session.id, 0).await;
    world.worker_dies(&home).await;
    let stranger = world.worker_on("stranger", Uuid::from_u128(2), LONG).await;
    let set = async |change: &str| world.database.execute(change).await.unwrap();

    set("UPDATE sessions SET allow_data_loss = true").await;
    assert!(world.lease(&session, &stranger).await.is_none(), "its worker may come back");
    world.insert(session.id, 0).await;
    set("UPDATE workers SET heartbeat_at = now() - interval '2 minutes' WHERE id = 'home'").await;
    set("UPDATE sessions SET allow_data_loss = false").await;
    assert!(world.lease(&session, &stranger).await.is_none(), "it may not");
    let refused = world.insert_try(session.id, 0, None, world.quotas).await;
    assert!(matches!(refused, RunAdmission::SessionDataLost), "{refused:?}");
    set("UPDATE sessions SET allow_data_loss = true").await;
    assert!(!world.lease(&session, &stranger).await.unwrap().has_files);
    world.end().await;
}

#[tokio::test]
async fn the_sweep_loses_started_runs_once_and_queues_those_that_may_be_retried() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    world.lease(&session, &worker).await.unwrap();
    let (lost, retried) = (world.insert(session.id, 0).await, world.insert(session.id, 1).await);

    assert_eq!(
        world.store.lease_sweep_any_tenant(100).await.unwrap(),
        SweepReport::default(),
        "the worker lives"
    );
    world.worker_dies(&worker).await;
    let swept = world.store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(swept, SweepReport { sessions: 1, retried: 1, lost: 1 });
    assert_eq!(world.store.lease_sweep_any_tenant(100).await.unwrap(), SweepReport::default(), "once");

    assert_eq!(world.run(lost).await.outcome, Some(Outcome::Lost));
    let again = world.run(retried).await;
    assert_eq!((again.state, again.attempt), (RunState::Queued, 2));

    let second = world.worker("v").await;
    let lease = world.lease(&session, &second).await.unwrap();
    world.store.run_begin(retried, &lease.token).await.unwrap().unwrap();
    world.worker_dies(&second).await;
    world.store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(world.run(retried).await.outcome, Some(Outcome::Lost), "its retries are used up");
    world.end().await;
}

#[tokio::test]
async fn a_session_is_released_only_when_none_of_its_runs_is_running() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    let release = || world.store.lease_release(session.id, &lease.token);

    assert_eq!(release().await.unwrap(), ReleaseOutcome::Busy);
    world.commit(run, &worker, &lease).await.unwrap();
    assert_eq!(release().await.unwrap(), ReleaseOutcome::Released);
    assert_eq!(release().await.unwrap(), ReleaseOutcome::NotHeld);
    world.end().await;
}

#[tokio::test]
async fn unowned_sessions_with_queued_runs_are_offered_fairly() {
    let world = World::new().await;
    let (first, second) = (world.session().await, world.session().await);
    world.insert(first.id, 0).await;
    world.insert(second.id, 0).await;
    let idle = world.session().await;
    let worker = world.worker("w").await;
    let wanted = world.store.lease_list_wanted(&worker.id, worker.incarnation, 10).await.unwrap();
    assert_eq!(wanted, [first.id, second.id]);
    assert!(!wanted.contains(&idle.id));
    world.end().await;
}

#[tokio::test]
async fn a_draining_worker_takes_no_session_and_gets_no_run() {
    let world = World::new().await;
    let (held, free) = (world.session().await, world.session().await);
    let worker = world.worker("w").await;
    world.lease(&held, &worker).await.unwrap();
    world.store.worker_drain(&worker.id).await.unwrap().unwrap();

    assert!(world.lease(&free, &worker).await.is_none());
    let run = world.insert(held.id, 0).await;
    assert_eq!(world.run(run).await.state, RunState::Queued);
    assert!(world.store.worker_renew(&worker.id, worker.incarnation, LONG, 0).await.unwrap().drain);
    world.end().await;
}

/// Whether a statement waits for a lock.
async fn somebody_waits(world: &World) {
    codelia_tests::eventually("a statement waits", || async {
        let waiting = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        (world.database.number(waiting).await.ok()? > 0).then_some(())
    })
    .await;
}

/// A session whose holder has run out of time, and somebody else who may take it.
async fn overdue(world: &World) -> (Session, Registered) {
    let session = world.session().await;
    let (holder, other) = (world.worker("holder").await, world.worker("other").await);
    world.lease(&session, &holder).await.unwrap();
    world.store.worker_renew(&holder.id, holder.incarnation, Duration::ZERO, 0).await.unwrap();
    (session, other)
}

#[tokio::test]
async fn a_session_is_not_taken_while_its_holders_renewal_is_on_its_way() {
    let world = World::new().await;
    let (session, other) = overdue(&world).await;
    let mut renewal = world.database.connection().await.unwrap();
    let renew = "BEGIN; UPDATE workers SET lease_until = now() + interval '1 hour' WHERE id = 'holder'";
    sqlx::raw_sql(renew).execute(&mut renewal).await.unwrap();
    let (taken, ()) = tokio::join!(world.lease(&session, &other), async {
        somebody_waits(&world).await;
        sqlx::raw_sql("COMMIT").execute(&mut renewal).await.unwrap();
    });
    assert!(taken.is_none(), "the holder was renewed in time");
    world.end().await;
}

#[tokio::test]
async fn a_holder_that_was_replaced_is_not_revived_by_a_renewal_that_comes_late() {
    let world = World::new().await;
    let (session, other) = overdue(&world).await;
    // Its clock stands still at a time when the lease was live; it is executed after the session was taken.
    let mut renewal = world.database.connection().await.unwrap();
    let early = "BEGIN; SELECT now()";
    sqlx::raw_sql(early).execute(&mut renewal).await.unwrap();
    world.lease(&session, &other).await.unwrap();
    let renew = "UPDATE workers SET lease_until = now() + interval '1 hour'
                 WHERE id = 'holder' AND lease_until > now() - interval '1 minute'";
    let renewed = sqlx::raw_sql(renew).execute(&mut renewal).await.unwrap();
    assert_eq!(renewed.rows_affected(), 0);
    world.end().await;
}

#[tokio::test]
async fn a_session_is_not_given_back_while_a_run_is_being_recorded_for_its_holder() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();

    // A run whose commit takes its time, with the locks of an insert.
    let mut insert = world.database.connection().await.unwrap();
    let record = format!(
        "BEGIN; SELECT id FROM sessions WHERE id = '{0}' FOR KEY SHARE;
         INSERT INTO runs (id, tenant_id, session_id, spec, labels, retries, state, worker_id, incarnation, lease_epoch)
         SELECT gen_random_uuid(), tenant_id, id, '{{}}', '{{}}', 0, 'running', lease_worker, lease_incarnation, lease_epoch
         FROM sessions WHERE id = '{0}'",
        session.id
    );
    sqlx::raw_sql(sqlx::AssertSqlSafe(record)).execute(&mut insert).await.unwrap();
    let release = world.store.lease_release(session.id, &lease.token);
    let (released, ()) = tokio::join!(release, async {
        somebody_waits(&world).await;
        sqlx::raw_sql("COMMIT").execute(&mut insert).await.unwrap();
    });
    assert_eq!(released.unwrap(), ReleaseOutcome::Busy);
    world.end().await;
}

#[tokio::test]
async fn a_process_that_registers_again_is_drained_if_it_was() {
    let world = World::new().await;
    let first = world.worker("w").await;
    world.store.worker_drain(&first.id).await.unwrap().unwrap();
    world.store.worker_renew(&first.id, first.incarnation, Duration::ZERO, 0).await.unwrap();
    world.store.lease_sweep_any_tenant(10).await.unwrap();
    let again = world.register_again("w", Some(first.incarnation)).await;
    assert!(again.1.drain, "an operator's word outlives a lost lease");
    let restarted = world.register_again("w", None).await;
    assert!(!restarted.1.drain, "a new process begins anew");
    world.end().await;
}
