//! The lease keeper: renews the one heartbeat that all session leases of this worker depend on.
//!
//! The worker measures its lease on the monotonic clock, from before the request was sent, so the
//! lease always ends here before it ends in the database. When it cannot renew in time, the worker
//! fences itself: it kills everything that runs under the lease, then registers a new incarnation.
//!
//! The keeper runs on a thread of its own with its own connection. Nothing that it calls may wait
//! for the worker's runtime, except to see killed runs end: load must not cost the lease.

use std::{future::Future, pin::pin, time::Duration};

use codelia_store::{Error, Heartbeat};
use codelia_telemetry::{backoff::jittered, metrics};
use codelia_types::Incarnation;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::lease::{
    progress::Progress,
    worker_lease::{LeaseHandle, LeaseTerm, WorkerLease},
};

/// How long the first registration is tried. The worker connected a moment ago.
const MAX_FIRST_REGISTRATION: Duration = Duration::from_secs(10);

/// Calls by which the keeper acts for the worker.
pub(crate) trait LeaseClient: Send + Sync {
    /// Registers a new incarnation.
    fn register(
        &self,
        incarnation: Incarnation,
    ) -> impl Future<Output = Result<Heartbeat, Error>> + Send;
    /// Renews all leases of the incarnation.
    fn renew(
        &self,
        incarnation: Incarnation,
    ) -> impl Future<Output = Result<Heartbeat, Error>> + Send;
    /// Called with the answer to each registration and renewal, and the lease that follows from it.
    fn on_heartbeat(&self, heartbeat: Heartbeat, lease: &WorkerLease);
    /// Kills and forgets everything of the lost lease. Its fence is already cancelled.
    fn kill_all(&self) -> impl Future<Output = ()> + Send;
}

/// Registers the first incarnation. A database that is slow to answer is asked again for a while.
pub(crate) async fn register_first(
    client: &impl LeaseClient,
    term: LeaseTerm,
    lease: &LeaseHandle,
) -> Result<(), Error> {
    let deadline = Instant::now() + MAX_FIRST_REGISTRATION;
    loop {
        match register(client, term).await {
            Ok(registered) => {
                lease.replace(registered);
                return Ok(());
            }
            Err(error) if error.is_transient() && Instant::now() < deadline => {
                retry(&error, term).await
            }
            Err(error) => return Err(error),
        }
    }
}

/// Keeps the lease: renews it, and registers again whenever it is lost. Never returns. Records
/// progress after each step, whether it succeeded or not.
pub(crate) async fn keep(
    client: &impl LeaseClient,
    term: LeaseTerm,
    lease: &LeaseHandle,
    progress: &Progress,
) {
    loop {
        let reason = renew_until_lost(client, term, lease, progress).await;
        tracing::error!(reason, "lease lost, killing sandboxes");
        metrics().lease_lost();
        record_until_done(term, progress, fence(client, lease)).await;
        lease.replace(register_until_done(client, term, progress).await);
        tracing::info!("registered again");
    }
}

/// Records progress while a step waits for others, here for killed sandboxes to end.
async fn record_until_done(term: LeaseTerm, progress: &Progress, step: impl Future<Output = ()>) {
    let mut step = pin!(step);
    while timeout(term.ttl / 3, &mut step).await.is_err() {
        progress.record();
    }
    progress.record();
}

/// Gives the current lease up: nothing starts or commits under it from here on, and everything
/// that runs under it is killed.
pub(crate) async fn fence(client: &impl LeaseClient, lease: &LeaseHandle) {
    lease.borrow().fence.cancel();
    client.kill_all().await;
}

async fn register(client: &impl LeaseClient, term: LeaseTerm) -> Result<WorkerLease, Error> {
    let incarnation = Incarnation::generate();
    let sent_at = Instant::now();
    let heartbeat = client.register(incarnation).await?;
    let lease = WorkerLease::new(incarnation, sent_at, heartbeat, term);
    client.on_heartbeat(heartbeat, &lease);
    Ok(lease)
}

/// Returns the reason of the loss.
async fn renew_until_lost(
    client: &impl LeaseClient,
    term: LeaseTerm,
    lease: &LeaseHandle,
    progress: &Progress,
) -> &'static str {
    loop {
        progress.record();
        let current = lease.current();
        let renewal_due = sleep_until(current.sent_at + term.ttl / 3);
        if current.fence.run_until_cancelled(renewal_due).await.is_none() {
            return "a run found it expired";
        }
        match renew(client, term, &current, progress).await {
            Ok(renewed) => lease.replace(renewed),
            Err(reason) => return reason,
        };
    }
}

/// Retries until the renewal succeeds or the lease has expired here.
async fn renew(
    client: &impl LeaseClient,
    term: LeaseTerm,
    current: &WorkerLease,
    progress: &Progress,
) -> Result<WorkerLease, &'static str> {
    loop {
        progress.record();
        let sent_at = Instant::now();
        match timeout_at(current.valid_until, client.renew(current.incarnation)).await {
            // After a pause of the process the answer may be read long after it arrived.
            Ok(Ok(_)) if !current.is_live() => return Err("the answer was read too late"),
            Ok(Ok(heartbeat)) => {
                let renewed = current.renewed(sent_at, heartbeat, term);
                client.on_heartbeat(heartbeat, &renewed);
                return Ok(renewed);
            }
            Ok(Err(Error::Fenced)) => {
                return Err("it expired in the store or another incarnation has it");
            }
            Err(_) => return Err("the store did not answer in time"),
            Ok(Err(error)) => tracing::warn!(%error, "lease renewal failed, retrying"),
        }
        if timeout_at(current.valid_until, sleep(jittered(term.ttl / 20))).await.is_err() {
            return Err("every renewal failed until it expired");
        }
    }
}

async fn register_until_done(
    client: &impl LeaseClient,
    term: LeaseTerm,
    progress: &Progress,
) -> WorkerLease {
    loop {
        progress.record();
        match register(client, term).await {
            Ok(lease) => return lease,
            Err(error) => retry(&error, term).await,
        }
    }
}

/// Waits before the next registration.
async fn retry(error: &Error, term: LeaseTerm) {
    tracing::warn!(%error, "registration failed, retrying");
    sleep(jittered(term.ttl / 20)).await;
}

#[cfg(test)]
mod tests {
    use std::{
        future::pending,
        sync::{
            Arc,
            atomic::{AtomicBool, AtomicUsize, Ordering},
        },
    };

    use codelia_store::{LeaseConnection, NewWorker, Store};
    use codelia_telemetry::task::{CriticalTasks, background};
    use codelia_tests::eventually;
    use time::OffsetDateTime;
    use tokio::runtime::Builder;

    use super::*;

    const TTL: Duration = Duration::from_secs(15);
    const LIVE: Duration = Duration::from_secs(11);
    const TERM: LeaseTerm = LeaseTerm { ttl: TTL, margin: Duration::from_secs(4) };

    #[derive(Debug, Default)]
    struct Database {
        hangs: AtomicBool,
        fails: AtomicBool,
        fences: AtomicBool,
        /// Answers at the very end of the lease.
        is_late: AtomicBool,
        registrations: AtomicUsize,
        /// Registrations that are not answered, before one is.
        unanswered: AtomicUsize,
        kills: AtomicUsize,
    }

    fn heartbeat() -> Heartbeat {
        Heartbeat { now: OffsetDateTime::UNIX_EPOCH, drain: false }
    }

    impl LeaseClient for Arc<Database> {
        async fn register(&self, _: Incarnation) -> Result<Heartbeat, Error> {
            self.registrations.fetch_add(1, Ordering::SeqCst);
            let take_one = |left: usize| left.checked_sub(1);
            match self.unanswered.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take_one) {
                Ok(_) => Err(Error::PoolExhausted),
                Err(_) => Ok(heartbeat()),
            }
        }

        async fn renew(&self, _: Incarnation) -> Result<Heartbeat, Error> {
            if self.fences.load(Ordering::SeqCst) {
                return Err(Error::Fenced);
            }
            if self.fails.load(Ordering::SeqCst) {
                return Err(Error::NotMigrated);
            }
            if self.is_late.load(Ordering::SeqCst) {
                sleep(LIVE - TTL / 3).await;
            }
            if self.hangs.load(Ordering::SeqCst) { pending().await } else { Ok(heartbeat()) }
        }

        fn on_heartbeat(&self, _: Heartbeat, _: &WorkerLease) {}

        async fn kill_all(&self) {
            self.kills.fetch_add(1, Ordering::SeqCst);
        }
    }

    async fn start(database: &Arc<Database>) -> (LeaseHandle, WorkerLease) {
        let lease = LeaseHandle::new("w".parse().unwrap(), WorkerLease::none());
        register_first(database, TERM, &lease).await.unwrap();
        let first = lease.current();
        let (client, kept) = (database.clone(), lease.clone());
        let progress = Progress::new(TERM);
        background("keeper", async move { keep(&client, TERM, &kept, &progress).await });
        (lease, first)
    }

    async fn lost_after(database: &Arc<Database>) -> Duration {
        let (lease, first) = start(database).await;
        let began = Instant::now();
        first.fence.cancelled().await;
        let took = began.elapsed();
        lease.subscribe().wait_for(|now| now.incarnation != first.incarnation).await.unwrap();
        assert_eq!(database.kills.load(Ordering::SeqCst), 1, "killed before it registered again");
        assert_eq!(database.registrations.load(Ordering::SeqCst), 2);
        took
    }

    #[tokio::test(start_paused = true)]
    async fn first_registration_waits_for_slow_database() {
        let lease = LeaseHandle::new("w".parse().unwrap(), WorkerLease::none());
        let slow = Arc::new(Database { unanswered: 3.into(), ..Default::default() });
        register_first(&slow, TERM, &lease).await.unwrap();
        assert_eq!(slow.registrations.load(Ordering::SeqCst), 4);
        let silent = Arc::new(Database { unanswered: usize::MAX.into(), ..Default::default() });
        assert!(register_first(&silent, TERM, &lease).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn renewed_lease_stays_live() {
        let database = Arc::new(Database::default());
        let (lease, first) = start(&database).await;
        sleep(TTL * 20).await;
        let now = lease.current();
        assert_eq!(now.incarnation, first.incarnation);
        assert!(now.is_live() && !first.fence.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn silent_database_loses_lease_before_expiry() {
        let database = Arc::new(Database { hangs: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    #[tokio::test(start_paused = true)]
    async fn failing_renewals_lose_lease_before_expiry() {
        let database = Arc::new(Database { fails: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    #[tokio::test(start_paused = true)]
    async fn fenced_worker_stops_at_next_heartbeat() {
        let database = Arc::new(Database { fences: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, TTL / 3);
    }

    #[tokio::test(start_paused = true)]
    async fn answer_read_after_expiry_does_not_renew() {
        let database = Arc::new(Database { is_late: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    /// A keeper that renews every third of the lease time, with this database, for many lease
    /// times.
    async fn turns_after_many_lease_times(database: Database) -> bool {
        let database = Arc::new(database);
        let lease = LeaseHandle::new("w".parse().unwrap(), WorkerLease::none());
        register_first(&database, TERM, &lease).await.unwrap();
        let progress = Arc::new(Progress::new(TERM));
        let kept = progress.clone();
        background("keeper", async move { keep(&database, TERM, &lease, &kept).await });
        sleep(TTL * 20).await;
        progress.is_recent()
    }

    #[tokio::test(start_paused = true)]
    async fn keeper_turns_while_database_fails() {
        assert!(
            turns_after_many_lease_times(Database { fails: true.into(), ..Default::default() })
                .await
        );
        assert!(
            turns_after_many_lease_times(Database { hangs: true.into(), ..Default::default() })
                .await
        );
    }

    /// Blocks the thread in a renewal, until the test ends.
    #[derive(Debug)]
    struct Blocked(std::sync::Mutex<std::sync::mpsc::Receiver<()>>);

    impl LeaseClient for Blocked {
        async fn register(&self, _: Incarnation) -> Result<Heartbeat, Error> {
            Ok(heartbeat())
        }

        async fn renew(&self, _: Incarnation) -> Result<Heartbeat, Error> {
            self.0.lock().unwrap().recv().unwrap_err();
            Ok(heartbeat())
        }

        fn on_heartbeat(&self, _: Heartbeat, _: &WorkerLease) {}

        async fn kill_all(&self) {}
    }

    #[tokio::test]
    async fn blocked_keeper_does_not_turn() {
        let (release, blocked) = std::sync::mpsc::channel();
        let progress = Arc::new(Progress::new(ROW_TERM));
        let (kept, tasks) = (progress.clone(), CriticalTasks::default());
        let start = move || async move {
            let client = Blocked(blocked.into());
            let lease = LeaseHandle::new("w".parse().unwrap(), WorkerLease::none());
            register_first(&client, ROW_TERM, &lease).await.unwrap();
            keep(&client, ROW_TERM, &lease, &kept).await;
        };
        tasks.critical_thread("keeper", start).unwrap();
        assert!(progress.is_recent(), "the control");
        eventually("the progress is old", || async { (!progress.is_recent()).then_some(()) }).await;
        drop(release);
        eventually("it progresses again", || async { progress.is_recent().then_some(()) }).await;
    }

    #[tokio::test(start_paused = true)]
    async fn lease_found_expired_is_not_kept() {
        let database = Arc::new(Database::default());
        let (lease, first) = start(&database).await;
        first.fence.cancel();
        lease.subscribe().wait_for(|now| now.incarnation != first.incarnation).await.unwrap();
        assert_eq!(database.kills.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn lease_expires_without_renewal() {
        let database = Arc::new(Database::default());
        let lease = register(&database, TERM).await.unwrap();
        sleep(LIVE - Duration::from_millis(1)).await;
        assert!(lease.is_live());
        sleep(Duration::from_millis(1)).await;
        assert!(!lease.is_live());
    }

    /// Keeps a row in a real database.
    #[derive(Debug)]
    struct RowKeeper {
        connection: LeaseConnection,
        worker: NewWorker,
    }

    impl LeaseClient for RowKeeper {
        async fn register(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
            self.connection.register(&NewWorker { incarnation, ..self.worker.clone() }).await
        }

        async fn renew(&self, incarnation: Incarnation) -> Result<Heartbeat, Error> {
            self.connection.renew(&self.worker.id, incarnation, self.worker.lease_ttl, 0).await
        }

        fn on_heartbeat(&self, _: Heartbeat, _: &WorkerLease) {}

        async fn kill_all(&self) {}
    }

    const ROW_TERM: LeaseTerm =
        LeaseTerm { ttl: Duration::from_secs(1), margin: Duration::from_millis(200) };

    async fn keep_row(keeper: RowKeeper) {
        let lease = LeaseHandle::new(keeper.worker.id.clone(), WorkerLease::none());
        register_first(&keeper, ROW_TERM, &lease).await.unwrap();
        keep(&keeper, ROW_TERM, &lease, &Progress::new(ROW_TERM)).await;
    }

    fn row_keeper(store: &Store) -> RowKeeper {
        let worker = NewWorker {
            id: "w".parse().unwrap(),
            incarnation: Incarnation::generate(),
            previous: None,
            root_id: uuid::Uuid::new_v4(),
            address: "unix:/nowhere".into(),
            modes: vec![codelia_types::Mode::Logical],
            watched_modes: vec![],
            slots: 1,
            version: "0".into(),
            lease_ttl: ROW_TERM.ttl,
        };
        RowKeeper { connection: store.lease_connection(ROW_TERM.ttl), worker }
    }

    /// Starts a keeper with `start` on a runtime, blocks the runtime, and returns whether the lease
    /// was renewed for three lease times (or expired first).
    fn is_kept_while_blocked(start: impl FnOnce(&CriticalTasks, RowKeeper)) -> bool {
        const REGISTERED: &str = "SELECT count(*) FROM workers";
        const EXPIRED: &str = "SELECT count(*) FROM workers WHERE lease_until < now()";
        const KEPT: &str = "SELECT count(*) FROM workers WHERE heartbeat_at > registered_at + interval '3 seconds'";
        let observer = Builder::new_current_thread().enable_all().build().unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (database, store) = observer.block_on(codelia_tests::Database::migrated()).unwrap();
        let tasks = CriticalTasks::default();
        {
            let _runtime = runtime.enter();
            start(&tasks, row_keeper(&store));
        }
        let holds = async |query| (database.number(query).await.ok()? > 0).then_some(());
        observer.block_on(eventually("the worker is registered", || holds(REGISTERED)));
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        runtime.spawn(async move { blocked.recv().unwrap_err() });
        let is_kept = observer.block_on(eventually("the lease is kept or expires", || async {
            match (holds(EXPIRED).await, holds(KEPT).await) {
                (Some(()), _) => Some(false),
                (None, kept) => kept.map(|()| true),
            }
        }));
        drop((release, tasks, runtime));
        observer.block_on(async {
            store.close().await;
            database.end().await.unwrap();
        });
        is_kept
    }

    #[test]
    fn blocked_runtime_loses_only_leases_kept_on_it() {
        let on_thread = |tasks: &CriticalTasks, keeper| {
            tasks.critical_thread("keeper", move || keep_row(keeper)).unwrap();
        };
        assert!(is_kept_while_blocked(on_thread), "a keeper with its own thread");
        let on_runtime = |tasks: &CriticalTasks, keeper| tasks.critical("keeper", keep_row(keeper));
        assert!(!is_kept_while_blocked(on_runtime), "the control: a keeper on the blocked runtime");
    }
}
