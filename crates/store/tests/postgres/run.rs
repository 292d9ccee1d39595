//! Runs: inserted once, begun only by the holder, ended once.

use codelia_store::{
    Cancellation, Error, NewRun, RunAdmission, RunFilter, RunState, SessionRef, Store,
};
use codelia_tests::{eventually, store_values::exit};
use codelia_types::{LeaseEpoch, LeaseToken, Outcome, RunId, SessionId};
use futures::future::join_all;
use sqlx::Connection;

use crate::harness::{Fixture, exited};

#[tokio::test]
async fn insert_assigns_run_to_live_holder() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let queued = fixture.insert(session.id, 0).await;
    assert_eq!(fixture.run(queued).await.state, RunState::Queued);

    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let RunAdmission::Recorded { run, incarnation, .. } =
        fixture.insert_try(session.id, 0, None, fixture.quotas).await
    else {
        panic!("run was not inserted")
    };
    assert_eq!((run.state, incarnation), (RunState::Running, Some(worker.incarnation)));
    assert_eq!((run.worker.as_ref(), run.lease_epoch), (Some(&worker.id), Some(lease.token.epoch)));
    assert_eq!(run.worker_address.as_deref(), Some("unix:/w"));
    assert_eq!(fixture.assigned(&worker).await.iter().map(|a| a.id).collect::<Vec<_>>(), [run.id]);
    fixture.end().await;
}

#[tokio::test]
async fn repeated_commit_keeps_first_result() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.commit(run, &worker, &lease).await.unwrap();
    let first = fixture.run(run).await.end.unwrap();
    fixture.commit(run, &worker, &lease).await.unwrap();
    let stranger = fixture.worker("v").await;
    assert!(matches!(fixture.commit(run, &stranger, &lease).await, Err(Error::Fenced)));
    assert_eq!(fixture.run(run).await.end.as_ref(), Some(&first));
    assert_eq!(first.result, exit(0), "as the worker reported it");
    assert!(first.started_at.unwrap() <= first.ended_at);
    fixture.end().await;
}

#[tokio::test]
async fn concurrent_inserts_with_one_key_create_one_run() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let answers = join_all(
        (0..10).map(|_| fixture.insert_try(session.id, 0, Some(("key", b"hash")), fixture.quotas)),
    )
    .await;
    let recorded =
        answers.iter().filter(|answer| matches!(answer, RunAdmission::Recorded { .. })).count();
    assert_eq!(recorded, 1);
    let mut ids: Vec<RunId> = answers
        .into_iter()
        .map(|answer| match answer {
            RunAdmission::Recorded { run, .. } | RunAdmission::Existing(run) => run.id,
            other => panic!("{other:?}"),
        })
        .collect();
    ids.dedup();
    assert_eq!(ids.len(), 1);
    let reused = fixture.insert_try(session.id, 0, Some(("key", b"other")), fixture.quotas).await;
    assert!(matches!(reused, RunAdmission::KeyReused));
    fixture.end().await;
}

/// Two processes insert and commit at the same time; each idempotency key is used by both.
#[tokio::test]
async fn several_processes_insert_and_commit_each_run_once() {
    const KEYS: usize = 128;
    let fixture = Fixture::new().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&fixture.session().await, &worker).await.unwrap();
    let other = fixture.database.store().await.unwrap();
    let start = async |store: &Store, key: usize| {
        let key = format!("key {key}");
        let new = NewRun {
            idempotency: Some((&key, b"hash")),
            check_quotas: false,
            ..fixture.new_run(lease.session)
        };
        match store.run_insert(new, fixture.quotas).await.unwrap() {
            RunAdmission::Recorded { run, .. } => {
                let names = fixture.names(run.id, &lease);
                store.run_commit(names, &lease.token, &exited(0)).await.unwrap();
                1
            }
            RunAdmission::Existing(_) => 0,
            answer => panic!("{answer:?}"),
        }
    };
    let stores = [&fixture.store, &other];
    let recorded = join_all((0..2 * KEYS).map(|at| start(stores[at % 2], at / 2))).await;
    assert_eq!(recorded.into_iter().sum::<usize>(), KEYS);
    assert!(fixture.assigned(&worker).await.is_empty());
    let ended = fixture.database.number("SELECT count(*) FROM ended_runs").await.unwrap();
    assert_eq!(ended, i64::try_from(KEYS).unwrap());
    other.close().await;
    fixture.end().await;
}

#[tokio::test]
async fn known_key_returns_run_after_session_end() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    fixture.insert_try(session.id, 0, Some(("key", b"hash")), fixture.quotas).await;
    fixture.store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    assert!(matches!(
        fixture.insert_try(session.id, 0, Some(("key", b"hash")), fixture.quotas).await,
        RunAdmission::Existing(_)
    ));
    assert!(matches!(
        fixture.insert_try(session.id, 0, None, fixture.quotas).await,
        RunAdmission::SessionEnded
    ));
    fixture.end().await;
}

#[tokio::test]
async fn run_needs_an_open_session_of_its_tenant() {
    let fixture = Fixture::new().await;
    let quarantined = fixture.session().await;
    fixture.quarantine(&quarantined).await;
    let insert = async |new| fixture.store.run_insert(new, fixture.quotas).await.unwrap();
    let in_quarantine = insert(fixture.new_run(quarantined.id)).await;
    assert!(matches!(in_quarantine, RunAdmission::SessionQuarantined(_)), "{in_quarantine:?}");
    let unknown = insert(fixture.new_run(SessionId::generate())).await;
    assert!(matches!(unknown, RunAdmission::NoSession), "{unknown:?}");
    let session = fixture.session().await;
    let foreign = insert(NewRun { tenant: &fixture.other, ..fixture.new_run(session.id) }).await;
    assert!(matches!(foreign, RunAdmission::NoSession), "{foreign:?}");
    fixture.end().await;
}

#[tokio::test]
async fn handed_back_run_can_begin_again() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    assert!(
        fixture
            .store
            .run_hand_back(fixture.run_ref(run, session.id), 0, &worker.id, worker.incarnation)
            .await
            .unwrap()
    );
    assert!(
        !fixture
            .store
            .run_hand_back(fixture.run_ref(run, session.id), 0, &worker.id, worker.incarnation)
            .await
            .unwrap()
    );
    let begin = || fixture.store.run_begin(run, &lease.token);
    let begun = begin().await.unwrap().unwrap();
    assert!(begin().await.unwrap().is_none());
    let late = fixture.store.run_hand_back(
        fixture.run_ref(run, session.id),
        0,
        &worker.id,
        worker.incarnation,
    );
    assert!(!late.await.unwrap(), "a late hand-back of an earlier turn changes nothing");
    assert!(
        fixture
            .store
            .run_hand_back(
                fixture.run_ref(run, session.id),
                begun.turn,
                &worker.id,
                worker.incarnation
            )
            .await
            .unwrap()
    );
    fixture.end().await;
}

#[tokio::test]
async fn handed_back_run_ends_if_canceled() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.store.run_cancel(&fixture.tenant, run, &Cancellation::default()).await.unwrap();
    assert_eq!(fixture.run(run).await.outcome(), None, "the control: its worker must end it");
    assert!(
        fixture
            .store
            .run_hand_back(fixture.run_ref(run, session.id), 0, &worker.id, worker.incarnation)
            .await
            .unwrap()
    );
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

/// The quarantine ends queued runs and cancels running ones; this one is neither in between.
#[tokio::test]
async fn handed_back_run_ends_if_its_session_is_quarantined() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    fixture.quarantine(&session).await;
    let run_ref = fixture.run_ref(run, session.id);
    assert!(fixture.store.run_hand_back(run_ref, 0, &worker.id, worker.incarnation).await.unwrap());
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

/// A statement that reads the run before it waits for the lock misses the cancellation.
#[tokio::test]
async fn handed_back_run_ends_if_canceled_at_that_moment() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    let mut caller = fixture.database.connection().await.unwrap();
    // As `run_cancel`, in two steps.
    let mut cancel = caller.begin().await.unwrap();
    sqlx::query("UPDATE live_runs SET cancel_requested_at = now()")
        .execute(&mut *cancel)
        .await
        .unwrap();
    let handed_back = fixture.store.run_hand_back(
        fixture.run_ref(run, session.id),
        0,
        &worker.id,
        worker.incarnation,
    );
    let commit = async {
        let blocked = "SELECT count(*) FROM pg_stat_activity
                       WHERE datname = current_database() AND wait_event_type = 'Lock'";
        eventually("it waits", async || (fixture.scalar(blocked).await == 1).then_some(())).await;
        cancel.commit().await.unwrap();
    };
    let (handed_back, ()) = tokio::join!(handed_back, commit);
    assert!(handed_back.unwrap(), "its worker is rid of it");
    assert_eq!(fixture.run(run).await.outcome(), Some(&Outcome::Canceled));
    fixture.end().await;
}

#[tokio::test]
async fn canceled_queued_run_never_begins() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let run = fixture.insert(session.id, 0).await;
    let canceled = fixture
        .store
        .run_cancel(&fixture.tenant, run, &Cancellation::default())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(canceled.outcome(), Some(&Outcome::Canceled));
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    assert!(fixture.store.run_begin(run, &lease.token).await.unwrap().is_none());
    fixture.end().await;
}

#[tokio::test]
async fn other_tenant_cannot_see_or_cancel_run() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let run = fixture.insert(session.id, 0).await;
    assert!(fixture.store.run_get(&fixture.other, run).await.unwrap().is_none());
    assert!(
        fixture
            .store
            .run_cancel(&fixture.other, run, &Cancellation::default())
            .await
            .unwrap()
            .is_none()
    );
    assert!(fixture.store.output_read(&fixture.other, run, 0, 1024).await.unwrap().is_empty());
    assert!(
        fixture.store.run_list(&fixture.other, &RunFilter::default(), 10).await.unwrap().is_empty()
    );
    assert_eq!(fixture.run(run).await.state, RunState::Queued);
    fixture.end().await;
}

#[tokio::test]
async fn runs_list_by_page_and_state() {
    let fixture = Fixture::new().await;
    let session = fixture.session().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(fixture.insert(session.id, 0).await);
    }
    fixture.store.run_cancel(&fixture.tenant, ids[0], &Cancellation::default()).await.unwrap();
    let list = |filter: RunFilter, limit| {
        let fixture = &fixture;
        async move {
            let runs = fixture.store.run_list(&fixture.tenant, &filter, limit).await.unwrap();
            runs.into_iter().map(|run| run.id).collect::<Vec<_>>()
        }
    };
    assert_eq!(list(RunFilter::default(), 2).await, [ids[2], ids[1]]);
    assert_eq!(list(RunFilter { before: Some(ids[1]), ..Default::default() }, 2).await, [ids[0]]);
    assert_eq!(
        list(RunFilter { state: Some(RunState::Ended), ..Default::default() }, 9).await,
        [ids[0]]
    );
    fixture.end().await;
}

#[tokio::test]
async fn every_end_of_a_run_erases_its_secrets() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let kept = async || {
        fixture
            .database
            .number("SELECT count(*) FROM runs WHERE secret_env IS NOT NULL")
            .await
            .unwrap()
    };
    let session = fixture.session().await;
    let canceled = fixture.insert(session.id, 0).await;
    fixture.insert(session.id, 0).await;
    assert_eq!(kept().await, 2, "queued runs keep them");
    store.run_cancel(&fixture.tenant, canceled, &Cancellation::default()).await.unwrap();
    assert_eq!(kept().await, 1);
    store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    assert_eq!(kept().await, 0);

    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let run = fixture.insert(session.id, 0).await;
    assert!(
        store
            .run_hand_back(fixture.run_ref(run, session.id), 0, &worker.id, worker.incarnation)
            .await
            .unwrap()
    );
    let begun = store.run_begin(run, &lease.token).await.unwrap().unwrap();
    assert_eq!(begun.secret_env.unwrap().0, b"sealed", "a run that is handed back keeps them");
    fixture.commit(run, &worker, &lease).await.unwrap();
    assert_eq!(kept().await, 0);
    let run = fixture.insert(session.id, 0).await;
    store.run_abandon(fixture.run_ref(run, session.id), &lease.token).await.unwrap();
    assert_eq!(kept().await, 0);
    let (_lost, retried) =
        (fixture.insert(session.id, 0).await, fixture.insert(session.id, 1).await);
    fixture.expire_worker(&worker).await;
    store.lease_sweep_any_tenant(100).await.unwrap();
    assert_eq!(kept().await, 1, "only the run that is retried keeps them");

    let second = fixture.worker("v").await;
    let lease = fixture.lease(&session, &second).await.unwrap();
    store.run_begin(retried, &lease.token).await.unwrap().unwrap();
    store.session_close(&fixture.tenant, &SessionRef::Id(session.id)).await.unwrap();
    store
        .run_hand_back(fixture.run_ref(retried, session.id), 1, &second.id, second.incarnation)
        .await
        .unwrap();
    assert_eq!(kept().await, 0, "its session has ended");
    fixture.end().await;
}

/// A worker that shuts down hands back a run that it began, if the caller allowed another attempt.
#[tokio::test]
async fn run_is_retried_under_its_lease_only() {
    let fixture = Fixture::new().await;
    let store = &fixture.store;
    let session = fixture.session().await;
    let worker = fixture.worker("w").await;
    let lease = fixture.lease(&session, &worker).await.unwrap();
    let (once, again) = (fixture.insert(session.id, 0).await, fixture.insert(session.id, 1).await);
    assert!(!store.run_retry(once, &lease.token).await.unwrap(), "its caller allowed one attempt");
    let stale = LeaseToken { epoch: LeaseEpoch(lease.token.epoch.0 - 1), ..lease.token.clone() };
    assert!(!store.run_retry(again, &stale).await.unwrap());
    assert!(store.run_retry(again, &lease.token).await.unwrap());
    let run = fixture.run(again).await;
    assert_eq!((run.state, run.attempt), (RunState::Queued, 2));
    assert!(!store.run_retry(again, &lease.token).await.unwrap(), "it is queued already");
    store.run_begin(again, &lease.token).await.unwrap().unwrap();
    assert!(!store.run_retry(again, &lease.token).await.unwrap(), "no attempt is left");
    fixture.end().await;
}
