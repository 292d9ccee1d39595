//! Leases: what happens to a worker that lost its own.

use std::{sync::Arc, time::Duration};

use codelia_proto::internal::v1::PushResult;
use codelia_store::NewWorker;
use codelia_tests::{Database, Scratch, eventually};
use codelia_types::{Incarnation, Mode, Outcome};
use codelia_worker::{Error, Options, Service};
use uuid::Uuid;

use crate::{
    plain::Plain,
    world::{Shape, World, options, shell},
};

#[tokio::test]
async fn a_lease_that_leaves_no_time_to_kill_or_to_renew_is_refused() {
    let (database, scratch) = (Database::create().await.unwrap(), Scratch::new().unwrap());
    let store = database.store().await.unwrap();
    store.migrate().await.unwrap();
    let sound = options(&"w-1".parse().unwrap(), &scratch, Shape::default());
    let with = async |lease_margin| {
        let options = Options { lease_margin, ..sound.clone() };
        Service::start(options, store.clone(), vec![Arc::new(Plain::default())]).await.map(drop)
    };
    assert!(matches!(with(sound.lease_ttl).await, Err(Error::LeaseMargin)));
    assert!(matches!(with(Duration::ZERO).await, Err(Error::NotPositive("lease_margin"))));
    store.close().await;
    database.end().await.unwrap();
}

#[tokio::test]
async fn a_fenced_worker_kills_its_commands_and_begins_a_new_life() {
    let shape = Shape { lease_ttl: Duration::from_secs(3), ..Shape::default() };
    let world = World::new(shape).await;
    let session = world.held_session().await;
    let run = world.start(session, &shell("echo $$ > pid; exec sleep 1000")).await;
    let pid = eventually("the command runs", || async {
        let text = std::fs::read_to_string(world.directory(session).join("pid")).ok()?;
        text.trim().parse::<u32>().ok()
    })
    .await;
    let usurper = NewWorker {
        before: None,
        id: world.worker.clone(),
        incarnation: Incarnation::generate(),
        root_id: Uuid::new_v4(),
        address: "unix:/nowhere".into(),
        modes: vec![Mode::Logical],
        slots: 1,
        version: "0".into(),
        lease_ttl: Duration::from_millis(1),
    };
    world.store.worker_register(&usurper).await.unwrap();
    let process = std::path::PathBuf::from(format!("/proc/{pid}"));
    eventually("the command is killed", || async { (!process.exists()).then_some(()) }).await;
    assert_eq!(world.ended(run).await.outcome, Some(Outcome::Lost));
    // The new life takes the session again and goes on.
    let (next, _) = world.record(session, &shell("true")).await;
    assert_eq!(world.ended(next.id).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}

#[tokio::test]
async fn a_push_for_another_life_or_epoch_is_rejected() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (mut run, life) = world.record(session, &shell("true")).await;
    assert_eq!(world.push(&run, Some(Incarnation::generate())).await, PushResult::Rejected);
    run.lease_epoch = run.lease_epoch.map(|epoch| codelia_types::LeaseEpoch(epoch.0 + 1));
    assert_eq!(world.push(&run, life).await, PushResult::Rejected);
    assert_eq!(world.ended(run.id).await.outcome, Some(Outcome::Exited(0)), "the poll finds it");
    world.end().await;
}

#[tokio::test]
async fn an_old_push_is_left_to_the_poll() {
    let world = World::new(Shape::default()).await;
    let session = world.held_session().await;
    let (mut run, life) = world.record(session, &shell("true")).await;
    run.created_at -= Duration::from_secs(61);
    assert_eq!(world.push(&run, life).await, PushResult::Rejected);
    assert_eq!(world.ended(run.id).await.outcome, Some(Outcome::Exited(0)));
    world.end().await;
}
