//! A worker drains itself after a sandbox with an unclean receipt.

use std::sync::Arc;

use codelia_proto::internal::v1::OfferSessionRequest;
use codelia_store::{EventKind, WorkerState};
use codelia_tests::{eventually, recorded_events};
use codelia_types::{Outcome, Receipt};

use crate::{
    fixture::{Fixture, Settings, shell},
    process_backend::ProcessBackend,
};

#[tokio::test]
async fn unclean_receipt_drains_the_worker() {
    let receipt = Receipt { mounts: 1, ..Receipt::default() };
    let fixture =
        Fixture::with(Settings::default(), vec![Arc::new(ProcessBackend { receipt })]).await;
    let session = fixture.held_session().await;
    let run = fixture.start(session, &shell("true")).await;
    let row = fixture.ended(run).await;
    let result = row.result().unwrap();
    assert_eq!((&result.outcome, result.receipt), (&Outcome::Exited(0), Some(receipt)));
    let state = || async {
        let workers = fixture.store.worker_list(None, 1).await.unwrap();
        workers.first().filter(|worker| worker.state == WorkerState::Draining).map(drop)
    };
    eventually("the worker drains", state).await;
    let kind = Some(EventKind::SandboxReceiptUnclean);
    let events = recorded_events(&fixture.store, &fixture.tenant, kind).await.unwrap();
    assert_eq!(events.iter().map(|event| event.subject.run).collect::<Vec<_>>(), [Some(run)]);
    let other = fixture.session(std::time::Duration::from_secs(600)).await;
    let offer = OfferSessionRequest { session_id: other.to_string(), is_new: false };
    assert!(!fixture.caller.clone().offer_session(offer).await.unwrap().into_inner().taken);
    fixture.end().await;
}
