//! Runs: recorded once, begun by the holder alone, ended once.

use codelia_store::{Error, RunAdmission, RunFilter, RunState};
use codelia_types::{Outcome, RunId};
use futures::future::join_all;

use crate::harness::World;

#[tokio::test]
async fn a_run_of_a_held_session_is_its_holders_at_once() {
    let world = World::new().await;
    let session = world.session().await;
    let queued = world.insert(session.id, 0).await;
    assert_eq!(world.run(queued).await.state, RunState::Queued);

    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let RunAdmission::Recorded { run, incarnation } =
        world.insert_try(session.id, 0, None, world.quotas).await
    else {
        panic!("not recorded")
    };
    assert_eq!((run.state, incarnation), (RunState::Running, Some(worker.incarnation)));
    assert_eq!((run.worker.as_ref(), run.lease_epoch), (Some(&worker.id), Some(lease.token.epoch)));
    assert_eq!(run.worker_address.as_deref(), Some("unix:/w"));
    assert_eq!(world.assigned(&worker).await.iter().map(|a| a.id).collect::<Vec<_>>(), [run.id]);
    world.end().await;
}

#[tokio::test]
async fn a_result_is_committed_once_however_often_it_is_said() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    world.commit(run, &worker, &lease).await.unwrap();
    let ended_at = world.run(run).await.ended_at;
    world.commit(run, &worker, &lease).await.unwrap();
    let stranger = world.worker("v").await;
    assert!(matches!(world.commit(run, &stranger, &lease).await, Err(Error::Fenced)));
    let run = world.run(run).await;
    assert_eq!(run.ended_at, ended_at);
    assert_eq!(run.outcome, Some(Outcome::Exited(0)));
    assert!(run.started_at.unwrap() <= run.ended_at.unwrap());
    assert_eq!(run.sandbox_root.as_deref(), Some("/s"));
    world.end().await;
}

#[tokio::test]
async fn of_many_inserts_with_one_key_one_is_recorded() {
    let world = World::new().await;
    let session = world.session().await;
    let answers =
        join_all((0..10).map(|_| world.insert_try(session.id, 0, Some(("key", b"hash")), world.quotas)))
            .await;
    let recorded = answers.iter().filter(|answer| matches!(answer, RunAdmission::Recorded { .. })).count();
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
    let reused = world.insert_try(session.id, 0, Some(("key", b"other")), world.quotas).await;
    assert!(matches!(reused, RunAdmission::KeyReused));
    world.end().await;
}

#[tokio::test]
async fn a_known_key_answers_the_same_after_the_session_has_ended() {
    let world = World::new().await;
    let session = world.session().await;
    world.insert_try(session.id, 0, Some(("key", b"hash")), world.quotas).await;
    world.store.session_close(&world.tenant, &codelia_store::SessionRef::Id(session.id)).await.unwrap();
    assert!(matches!(
        world.insert_try(session.id, 0, Some(("key", b"hash")), world.quotas).await,
        RunAdmission::Existing(_)
    ));
    assert!(matches!(world.insert_try(session.id, 0, None, world.quotas).await, RunAdmission::SessionEnded));
    world.end().await;
}

#[tokio::test]
async fn a_run_that_was_not_begun_can_be_handed_back_and_begun_again_once() {
    let world = World::new().await;
    let session = world.session().await;
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    let run = world.insert(session.id, 0).await;
    assert!(world.store.run_hand_back(run, 0, &worker.id, worker.incarnation).await.unwrap());
    assert!(!world.store.run_hand_back(run, 0, &worker.id, worker.incarnation).await.unwrap());
    let begin = || world.store.run_begin(run, &lease.token);
    let begun = begin().await.unwrap().unwrap();
    assert!(begin().await.unwrap().is_none());
    let late = world.store.run_hand_back(run, 0, &worker.id, worker.incarnation);
    assert!(!late.await.unwrap(), "a hand-back that was given up and comes late undoes nothing");
    assert!(world.store.run_hand_back(run, begun.turn, &worker.id, worker.incarnation).await.unwrap());
    world.end().await;
}

#[tokio::test]
async fn a_canceled_queued_run_ends_at_once_and_is_never_begun() {
    let world = World::new().await;
    let session = world.session().await;
    let run = world.insert(session.id, 0).await;
    let canceled = world.store.run_cancel(&world.tenant, run).await.unwrap().unwrap();
    assert_eq!(canceled.outcome, Some(Outcome::Canceled));
    let worker = world.worker("w").await;
    let lease = world.lease(&session, &worker).await.unwrap();
    assert!(world.store.run_begin(run, &lease.token).await.unwrap().is_none());
    world.end().await;
}

#[tokio::test]
async fn another_tenant_sees_neither_run_nor_output_and_cancels_nothing() {
    let world = World::new().await;
    let session = world.session().await;
    let run = world.insert(session.id, 0).await;
    assert!(world.store.run_get(&world.other, run).await.unwrap().is_none());
    assert!(world.store.run_cancel(&world.other, run).await.unwrap().is_none());
    assert!(world.store.output_read(&world.other, run, 0, 1024).await.unwrap().is_empty());
    assert!(world.store.run_list(&world.other, &RunFilter::default(), 10).await.unwrap().is_empty());
    assert_eq!(world.run(run).await.state, RunState::Queued);
    world.end().await;
}

#[tokio::test]
async fn runs_are_listed_newest_first_by_page_and_state() {
    let world = World::new().await;
    let session = world.session().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(world.insert(session.id, 0).await);
    }
    world.store.run_cancel(&world.tenant, ids[0]).await.unwrap();
    let list = |filter: RunFilter, limit| {
        let world = &world;
        async move {
            let runs = world.store.run_list(&world.tenant, &filter, limit).await.unwrap();
            runs.into_iter().map(|run| run.id).collect::<Vec<_>>()
        }
    };
    assert_eq!(list(RunFilter::default(), 2).await, [ids[2], ids[1]]);
    assert_eq!(list(RunFilter { before: Some(ids[1]), ..Default::default() }, 2).await, [ids[0]]);
    assert_eq!(list(RunFilter { state: Some(RunState::Ended), ..Default::default() }, 9).await, [ids[0]]);
    world.end().await;
}
