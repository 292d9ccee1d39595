//! Sessions: their directories come and go.

use std::{os::unix::fs::PermissionsExt, time::Duration};

use codelia_proto::internal::v1::CloseSessionRequest;
use codelia_store::SessionRef;
use codelia_tests::eventually;
use codelia_types::Outcome;

use crate::world::{Shape, World, shell};

#[tokio::test]
async fn a_session_has_a_private_directory_from_its_offer_on() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let mode = std::fs::metadata(world.directory(session)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    world.end().await;
}

#[tokio::test]
async fn a_closed_session_loses_its_runs_and_its_directory() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("touch file; sleep 1000")).await;
    world.store.session_close(&world.tenant, &SessionRef::Id(session)).await.unwrap();
    let request = CloseSessionRequest { session_id: session.to_string() };
    world.caller.clone().close_session(request).await.unwrap();
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::Canceled));
    gone(&world, session).await;
    world.end().await;
}

#[tokio::test]
async fn a_close_that_only_the_store_knows_of_is_found() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("sleep 1000")).await;
    world.store.session_close(&world.tenant, &SessionRef::Id(session)).await.unwrap();
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::Canceled));
    gone(&world, session).await;
    world.end().await;
}

#[tokio::test]
async fn a_session_whose_time_is_over_loses_its_directory() {
    let world = World::new(Shape::default()).await;
    let session = world.session(Duration::from_millis(1500)).await;
    let (run, _) = world.record(session, &shell("touch file")).await;
    world.ended(run.id).await;
    gone(&world, session).await;
    world.end().await;
}

async fn gone(world: &World, session: codelia_types::SessionId) {
    let directory = world.directory(session);
    eventually("the directory is gone", || async { (!directory.exists()).then_some(()) }).await;
    let unheld = || async { world.holder(session).await.is_none().then_some(()) };
    eventually("the lease has ended", unheld).await;
}
