//! Leaving: nothing new, nothing lost, nothing kept.

use std::time::Duration;

use codelia_store::{RunState, WorkerState};
use codelia_tests::eventually;
use codelia_types::Outcome;

use crate::world::{Shape, World, shell};

#[tokio::test]
async fn a_worker_that_leaves_lets_its_runs_end_and_gives_everything_back() {
    let mut world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("sleep 0.5; exit 5")).await;
    world.leave().await;
    assert_eq!(world.row(run).await.outcome, Some(Outcome::Exited(5)));
    assert_eq!(world.holder(session).await, None);
    assert!(world.directory(session).exists(), "its files wait for the next worker");
    let workers = world.store.worker_list(None, 10).await.unwrap();
    assert_eq!(workers[0].state, WorkerState::Gone);
    world.end().await;
}

#[tokio::test]
async fn a_run_that_outlasts_the_grace_is_canceled() {
    let shape = Shape { drain_grace: Duration::from_millis(100), ..Shape::default() };
    let mut world = World::new(shape).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("sleep 1000")).await;
    world.leave().await;
    assert_eq!(world.row(run).await.outcome, Some(Outcome::Canceled));
    world.end().await;
}

#[tokio::test]
async fn an_operator_s_drain_gives_sessions_back_and_takes_no_new_runs() {
    let shape = Shape { lease_ttl: Duration::from_secs(3), ..Shape::default() };
    let world = World::new(shape).await;
    let session = world.held_session().await;
    world.store.worker_drain(&world.worker).await.unwrap();
    let given_back = || async { world.holder(session).await.is_none().then_some(()) };
    eventually("the session is given back", given_back).await;
    let (run, _) = world.record(session, &shell("true")).await;
    assert_eq!(run.state, RunState::Queued);
    world.end().await;
}
