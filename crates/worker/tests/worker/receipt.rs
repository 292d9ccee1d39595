//! A sandbox that left something behind takes its worker out of rotation.

use std::sync::Arc;

use codelia_proto::internal::v1::OfferSessionRequest;
use codelia_store::{EventKind, WorkerState};
use codelia_tests::eventually;
use codelia_types::{Outcome, Receipt};

use crate::{
    plain::Plain,
    world::{Shape, World, shell},
};

#[tokio::test]
async fn a_worker_whose_sandbox_left_something_behind_takes_nothing_new() {
    let left = Receipt { mounts: 1, ..Receipt::default() };
    let world = World::with(Shape::default(), vec![Arc::new(Plain { left })]).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("true")).await;
    let row = world.ended(run).await;
    assert_eq!((row.outcome, row.receipt), (Some(Outcome::Exited(0)), Some(left)));
    let state = || async {
        let workers = world.store.worker_list(None, 1).await.unwrap();
        workers.first().filter(|worker| worker.state == WorkerState::Draining).map(drop)
    };
    eventually("the worker is out of rotation", state).await;
    let events = world
        .store
        .event_list(&world.tenant, Some(EventKind::SandboxReceiptUnclean), None, 10)
        .await
        .unwrap();
    assert_eq!(events.iter().map(|event| event.concerned.run).collect::<Vec<_>>(), [Some(run)]);
    let other = world.session(std::time::Duration::from_secs(600)).await;
    let offer = OfferSessionRequest { session_id: other.to_string() };
    assert!(!world.caller.clone().offer_session(offer).await.unwrap().into_inner().taken);
    world.end().await;
}
