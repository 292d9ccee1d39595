//! The audit has exactly one `RUN_ENDED` for each run that has ended, whichever statement ended it.

use std::time::Duration;

use codelia_store::{Cancellation, Lease, SecretKey, Session, SessionRef};
use codelia_types::{KeyId, Outcome, RunId};
use futures::future::join_all;

use crate::{
    approval::{deny, needed},
    harness::{Fixture, LONG, Registered},
};

const MOMENT: Duration = Duration::from_micros(1);

/// A session that a worker holds, in an installation that signs its audit.
struct Held {
    fixture: Fixture,
    session: Session,
    worker: Registered,
    lease: Lease,
}

impl Held {
    async fn new() -> Self {
        let mut fixture = Fixture::new().await;
        let key = SecretKey::parse(&SecretKey::generate().unwrap()).unwrap();
        fixture.store = fixture.store.with_audit_key(Some(&key)).unwrap();
        let (session, worker) = (fixture.session().await, fixture.worker("w").await);
        let lease = fixture.lease(&session, &worker).await.unwrap();
        Self { fixture, session, worker, lease }
    }

    /// A run that its worker handed back: it is queued.
    async fn queued(&self) -> RunId {
        let run = self.fixture.insert(self.session.id, 0).await;
        assert!(self.hand_back(run).await);
        run
    }

    async fn hand_back(&self, run: RunId) -> bool {
        let run = self.fixture.run_ref(run, self.session.id);
        self.fixture
            .store
            .run_hand_back(run, 0, &self.worker.id, self.worker.incarnation)
            .await
            .unwrap()
    }

    async fn cancel(&self, run: RunId) {
        let cancellation = Cancellation::default();
        self.fixture
            .store
            .run_cancel(&self.fixture.tenant, run, &cancellation)
            .await
            .unwrap()
            .unwrap();
    }

    async fn close(&self) {
        let session = SessionRef::Id(self.session.id);
        self.fixture.store.session_close(&self.fixture.tenant, &session).await.unwrap();
    }

    /// Checks that the run has ended, that the audit says so once and how, and that it is intact.
    async fn ended(self, run: RunId, outcome: &str, reason: Option<&str>) {
        let fixture = &self.fixture;
        let reason = reason.map_or("null".to_owned(), |reason| format!("\"{reason}\""));
        let detail = format!(r#""outcome":"{outcome}","reason":{reason},"#);
        assert_eq!(fixture.run(run).await.outcome().map(Outcome::kind), Some(outcome));
        let rows = format!(
            "SELECT count(*) FROM audit a JOIN ended_runs r ON r.id = a.run_id
             WHERE a.kind = 'RUN_ENDED' AND a.tenant_id = r.tenant_id AND a.session_id = r.session_id
               AND a.worker_id IS NOT DISTINCT FROM r.worker_id AND a.run_id = '{run}'"
        );
        assert_eq!(fixture.scalar(&rows).await, 1);
        let described = format!("{rows} AND position('{detail}' IN a.detail) > 0");
        assert_eq!(fixture.scalar(&described).await, 1, "{detail}");
        self.corresponds().await;
    }

    /// Checks that ended runs and their events correspond one to one, and that the audit is intact.
    async fn corresponds(self) {
        let fixture = self.fixture;
        let different = "SELECT count(*) FROM (SELECT id FROM ended_runs) AS r
                         FULL JOIN (SELECT run_id, count(*) FROM audit WHERE kind = 'RUN_ENDED' GROUP BY run_id) AS a
                             ON a.run_id = r.id
                         WHERE r.id IS NULL OR a.run_id IS NULL OR a.count <> 1";
        assert_eq!(fixture.scalar(different).await, 0);
        fixture.store.audit_checkpoint().await.unwrap();
        let report = fixture.store.audit_verify(|_| {}).await.unwrap().unwrap();
        assert_eq!((report.problem_count, report.unlisted), (0, 0), "{report:?}");
        fixture.end().await;
    }
}

#[tokio::test]
async fn canceled_queued_run_has_its_end() {
    let held = Held::new().await;
    let run = held.queued().await;
    held.cancel(run).await;
    held.cancel(run).await;
    held.ended(run, "canceled", None).await;
}

#[tokio::test]
async fn canceled_held_run_has_its_end() {
    let held = Held::new().await;
    let run = held.fixture.hold(held.session.id, &needed(KeyId::generate(), LONG)).await;
    held.cancel(run).await;
    held.ended(run, "canceled", None).await;
}

#[tokio::test]
async fn canceled_run_that_is_handed_back_has_its_end() {
    let held = Held::new().await;
    let run = held.fixture.insert(held.session.id, 0).await;
    held.cancel(run).await;
    assert_eq!(
        held.fixture.scalar("SELECT count(*) FROM audit WHERE kind = 'RUN_ENDED'").await,
        0,
        "control"
    );
    assert!(held.hand_back(run).await);
    assert!(!held.hand_back(run).await);
    held.ended(run, "canceled", None).await;
}

#[tokio::test]
async fn run_of_closed_session_has_its_end() {
    let held = Held::new().await;
    let run = held.queued().await;
    held.close().await;
    held.ended(run, "canceled", None).await;
}

#[tokio::test]
async fn queued_run_of_expired_session_has_its_end() {
    let held = Held::new().await;
    let session = held.fixture.session().await;
    let run = held.fixture.insert(session.id, 0).await;
    held.fixture
        .execute(
            "UPDATE sessions SET expires_at = now(), check_at = now() WHERE lease_worker IS NULL",
        )
        .await;
    assert_eq!(held.fixture.store.session_expire_any_tenant(10).await.unwrap(), 1);
    held.fixture.store.run_end_queues_any_tenant(10).await.unwrap();
    held.ended(run, "refused", Some("SESSION_ENDED")).await;
}

#[tokio::test]
async fn run_that_waited_too_long_has_its_end() {
    let held = Held::new().await;
    let session = held.fixture.session().await;
    let run = held.fixture.insert_waiting(session.id, MOMENT).await;
    assert_eq!(held.fixture.store.run_expire_queued_any_tenant(10).await.unwrap(), 1);
    held.ended(run, "refused", Some("QUEUE_TIMEOUT")).await;
}

#[tokio::test]
async fn denied_run_has_its_end() {
    let held = Held::new().await;
    let approval = needed(KeyId::generate(), LONG);
    let run = held.fixture.hold(held.session.id, &approval).await;
    held.fixture.decided(approval.id, &deny()).await;
    held.ended(run, "refused", Some("APPROVAL_DENIED")).await;
}

#[tokio::test]
async fn undecided_run_has_its_end() {
    let held = Held::new().await;
    let run = held.fixture.hold(held.session.id, &needed(KeyId::generate(), MOMENT)).await;
    assert_eq!(held.fixture.store.approval_expire_any_tenant(10).await.unwrap(), 1);
    held.ended(run, "refused", Some("APPROVAL_EXPIRED")).await;
}

#[tokio::test]
async fn abandoned_run_has_its_end() {
    let held = Held::new().await;
    let run = held.fixture.insert(held.session.id, 0).await;
    let names = held.fixture.run_ref(run, held.session.id);
    assert!(held.fixture.store.run_abandon(names, &held.lease.token).await.unwrap());
    assert!(!held.fixture.store.run_abandon(names, &held.lease.token).await.unwrap());
    held.ended(run, "lost", Some("result_rejected")).await;
}

#[tokio::test]
async fn lost_run_has_its_end_and_retried_one_none() {
    let held = Held::new().await;
    let (run, retried) = (
        held.fixture.insert(held.session.id, 0).await,
        held.fixture.insert(held.session.id, 1).await,
    );
    held.fixture.expire_worker(&held.worker).await;
    held.fixture.store.lease_sweep_any_tenant(10).await.unwrap();
    assert_eq!(held.fixture.run(retried).await.outcome(), None);
    held.ended(run, "lost", Some("worker_lost")).await;
}

#[tokio::test]
async fn run_lost_with_its_lease_has_its_end() {
    let held = Held::new().await;
    let run = held.fixture.insert(held.session.id, 0).await;
    let (again, _) = held.fixture.register_again("w", None).await;
    held.fixture.lease(&held.session, &again).await.unwrap();
    held.ended(run, "lost", Some("worker_lost")).await;
}

#[tokio::test]
async fn run_of_suspended_tenant_has_its_end() {
    let held = Held::new().await;
    let run = held.queued().await;
    held.fixture
        .store
        .tenant_suspend(&held.fixture.tenant, "unpaid", KeyId::generate())
        .await
        .unwrap();
    held.fixture.store.tenant_sweep_any_tenant(10).await.unwrap();
    held.fixture.store.tenant_sweep_any_tenant(10).await.unwrap();
    held.ended(run, "canceled", None).await;
}

#[tokio::test]
async fn refused_end_leaves_the_run() {
    let held = Held::new().await;
    let run = held.queued().await;
    held.fixture
        .database
        .execute("ALTER TABLE audit ADD CONSTRAINT full_disk CHECK (false) NOT VALID")
        .await
        .unwrap();
    let canceled =
        held.fixture.store.run_cancel(&held.fixture.tenant, run, &Cancellation::default()).await;
    assert!(canceled.is_err(), "{canceled:?}");
    assert_eq!(held.fixture.run(run).await.outcome(), None);
    held.fixture.database.execute("ALTER TABLE audit DROP CONSTRAINT full_disk").await.unwrap();
    held.cancel(run).await;
    held.ended(run, "canceled", None).await;
}

/// Many runs, and every way to end them, several of them at the same time for the same runs.
#[tokio::test]
async fn ends_and_runs_correspond_under_load() {
    let held = Held::new().await;
    let mut runs = Vec::new();
    for number in 0..120 {
        runs.push(match number % 3 {
            0 => held.queued().await,
            _ => held.fixture.insert(held.session.id, number % 2).await,
        });
    }
    let ends = join_all(runs.iter().enumerate().map(async |(number, &run)| {
        let names = held.fixture.run_ref(run, held.session.id);
        match number % 5 {
            0 => drop(held.fixture.commit(run, &held.worker, &held.lease).await),
            1 => drop(held.fixture.store.run_abandon(names, &held.lease.token).await.unwrap()),
            2 => {
                held.cancel(run).await;
                held.hand_back(run).await;
            }
            3 => {
                held.fixture.commit(run, &held.worker, &held.lease).await.ok();
                held.cancel(run).await;
            }
            _ => {}
        }
    }));
    let sweep = async {
        for _ in 0..5 {
            held.fixture.store.run_end_queues_any_tenant(50).await.unwrap();
            held.fixture.store.lease_sweep_any_tenant(50).await.unwrap();
        }
    };
    tokio::join!(ends, sweep, held.close());
    held.fixture.expire_worker(&held.worker).await;
    held.fixture.store.lease_sweep_any_tenant(1000).await.unwrap();
    held.fixture.store.run_end_queues_any_tenant(1000).await.unwrap();
    assert_eq!(held.fixture.scalar("SELECT count(*) FROM live_runs").await, 0);
    assert_eq!(held.fixture.scalar("SELECT count(*) FROM ended_runs").await, 120);
    held.corresponds().await;
}
