//! The lease keeper: one heartbeat on which every session lease of this worker hangs.
//!
//! The lease is measured on the monotonic clock from before the request was sent, so it always
//! ends here before it ends in the database. What cannot be renewed in time is fenced first.

use std::{future::Future, time::Duration};

use codelia_store::{Error, Heartbeat};
use codelia_types::Incarnation;
use time::OffsetDateTime;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until, timeout_at},
};
use tokio_util::sync::CancellationToken;

/// One life of the worker, and how long it may act.
#[derive(Debug, Clone)]
pub(crate) struct Current {
    pub(crate) incarnation: Incarnation,
    valid_until: Instant,
    /// Cancelled when this life is over: everything it runs is to be killed and its results dropped.
    pub(crate) fence: CancellationToken,
    sent_at: Instant,
    database_time: OffsetDateTime,
}

impl Current {
    /// Before the first registration: nothing may be done.
    pub(crate) fn none() -> Self {
        let fence = CancellationToken::new();
        fence.cancel();
        let beat = Heartbeat { now: OffsetDateTime::UNIX_EPOCH, drain: false };
        let none = Term { ttl: Duration::ZERO, margin: Duration::ZERO };
        Self::new(Incarnation::generate(), fence, Instant::now(), beat, none)
    }

    fn new(
        incarnation: Incarnation,
        fence: CancellationToken,
        sent_at: Instant,
        beat: Heartbeat,
        term: Term,
    ) -> Self {
        Self {
            incarnation,
            valid_until: sent_at + (term.ttl - term.margin),
            fence,
            sent_at,
            database_time: beat.now,
        }
    }

    /// Whether the worker may start and commit under it.
    pub(crate) fn is_live(&self) -> bool {
        Instant::now() < self.valid_until && !self.fence.is_cancelled()
    }

    /// How long that is from now.
    pub(crate) fn left(&self) -> Duration {
        self.valid_until.saturating_duration_since(Instant::now())
    }

    /// The database's clock, late by no more than one round trip.
    pub(crate) fn database_now(&self) -> OffsetDateTime {
        self.database_time + self.sent_at.elapsed()
    }
}

/// How long leases are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Term {
    /// In the database.
    pub(crate) ttl: Duration,
    /// So much sooner they end here: what runs under them must be dead by then.
    pub(crate) margin: Duration,
}

/// Who renews, and what a loss does.
pub(crate) trait Holder: Send + Sync {
    /// Registers a new life.
    fn register(&self, incarnation: Incarnation) -> impl Future<Output = Result<Heartbeat, Error>> + Send;
    /// Renews all leases.
    fn renew(&self, incarnation: Incarnation) -> impl Future<Output = Result<Heartbeat, Error>> + Send;
    /// Takes notice of a heartbeat.
    fn beat(&self, beat: Heartbeat);
    /// Kills and forgets everything of the life that is over; the fence is cancelled already.
    fn fence(&self) -> impl Future<Output = ()> + Send;
}

/// Registers a first or further life.
pub(crate) async fn register(holder: &impl Holder, term: Term) -> Result<Current, Error> {
    let incarnation = Incarnation::generate();
    let sent_at = Instant::now();
    let beat = holder.register(incarnation).await?;
    holder.beat(beat);
    Ok(Current::new(incarnation, CancellationToken::new(), sent_at, beat, term))
}

/// Keeps the lease; lives one life after another until it is dropped.
pub(crate) async fn keep(holder: &impl Holder, term: Term, current: &watch::Sender<Current>) {
    loop {
        let why = renew_until_lost(holder, term, current).await;
        tracing::error!(reason = why, "the lease is lost: everything under it is killed");
        current.borrow().fence.cancel();
        holder.fence().await;
        current.send_replace(register_again(holder, term).await);
        tracing::info!("registered anew");
    }
}

async fn renew_until_lost(
    holder: &impl Holder,
    term: Term,
    current: &watch::Sender<Current>,
) -> &'static str {
    loop {
        let now = current.borrow().clone();
        if now.fence.run_until_cancelled(sleep_until(now.sent_at + term.ttl / 3)).await.is_none() {
            return "it was seen to be over";
        }
        match renew_once(holder, term, &now).await {
            Ok(renewed) => current.send_replace(renewed),
            Err(why) => return why,
        };
    }
}

/// Tries until it succeeds or the lease has run out here.
async fn renew_once(holder: &impl Holder, term: Term, now: &Current) -> Result<Current, &'static str> {
    loop {
        let sent_at = Instant::now();
        match timeout_at(now.valid_until, holder.renew(now.incarnation)).await {
            // An answer may be read late, after a pause: what it says may be out of date.
            Ok(Ok(_)) if !now.is_live() => return Err("answered too late"),
            Ok(Ok(beat)) => {
                holder.beat(beat);
                return Ok(Current::new(now.incarnation, now.fence.clone(), sent_at, beat, term));
            }
            Ok(Err(Error::Fenced)) => return Err("another incarnation has it, or it ran out"),
            Err(_) => return Err("no answer in time"),
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be renewed; trying again"),
        }
        if timeout_at(now.valid_until, sleep(term.ttl / 20)).await.is_err() {
            return Err("not renewed in time");
        }
    }
}

async fn register_again(holder: &impl Holder, term: Term) -> Current {
    loop {
        match register(holder, term).await {
            Ok(current) => return current,
            Err(error) => tracing::warn!(%error, "cannot register; trying again"),
        }
        sleep(term.ttl / 20).await;
    }
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

    use codelia_telemetry::task::background;

    use super::*;

    const TTL: Duration = Duration::from_secs(15);
    const LIVE: Duration = Duration::from_secs(11);
    const TERM: Term = Term { ttl: TTL, margin: Duration::from_secs(4) };

    #[derive(Debug, Default)]
    struct Database {
        hangs: AtomicBool,
        fails: AtomicBool,
        fences: AtomicBool,
        /// Answers exactly when the lease is over.
        is_late: AtomicBool,
        lives: AtomicUsize,
        fenced: AtomicUsize,
    }

    fn beat() -> Heartbeat {
        Heartbeat { now: OffsetDateTime::UNIX_EPOCH, drain: false }
    }

    impl Holder for Arc<Database> {
        async fn register(&self, _: Incarnation) -> Result<Heartbeat, Error> {
            self.lives.fetch_add(1, Ordering::SeqCst);
            Ok(beat())
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
            if self.hangs.load(Ordering::SeqCst) { pending().await } else { Ok(beat()) }
        }

        fn beat(&self, _: Heartbeat) {}

        async fn fence(&self) {
            self.fenced.fetch_add(1, Ordering::SeqCst);
        }
    }

    async fn start(database: &Arc<Database>) -> (watch::Receiver<Current>, Current) {
        let first = register(database, TERM).await.unwrap();
        let (sender, receiver) = watch::channel(first.clone());
        let holder = database.clone();
        background("keeper", async move { keep(&holder, TERM, &sender).await });
        (receiver, first)
    }

    async fn lost_after(database: &Arc<Database>) -> Duration {
        let (mut watch, first) = start(database).await;
        let began = Instant::now();
        first.fence.cancelled().await;
        let took = began.elapsed();
        watch.wait_for(|now| now.incarnation != first.incarnation).await.unwrap();
        assert_eq!(database.fenced.load(Ordering::SeqCst), 1, "fenced before it registered anew");
        assert_eq!(database.lives.load(Ordering::SeqCst), 2);
        took
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewed_lease_lives_on() {
        let database = Arc::new(Database::default());
        let (watch, first) = start(&database).await;
        sleep(TTL * 20).await;
        let now = watch.borrow().clone();
        assert_eq!(now.incarnation, first.incarnation);
        assert!(now.is_live() && !first.fence.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_is_lost_before_its_end_when_the_database_does_not_answer() {
        let database = Arc::new(Database { hangs: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    #[tokio::test(start_paused = true)]
    async fn the_lease_is_lost_before_its_end_when_every_renewal_fails() {
        let database = Arc::new(Database { fails: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_fenced_worker_stops_at_its_next_heartbeat() {
        let database = Arc::new(Database { fences: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, TTL / 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_read_when_the_lease_is_over_does_not_renew_it() {
        let database = Arc::new(Database { is_late: true.into(), ..Default::default() });
        assert_eq!(lost_after(&database).await, LIVE);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_somebody_saw_to_be_over_is_not_kept() {
        let database = Arc::new(Database::default());
        let (mut watch, first) = start(&database).await;
        first.fence.cancel();
        watch.wait_for(|now| now.incarnation != first.incarnation).await.unwrap();
        assert_eq!(database.fenced.load(Ordering::SeqCst), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_ends_on_the_clock_alone() {
        let database = Arc::new(Database::default());
        let current = register(&database, TERM).await.unwrap();
        sleep(LIVE - Duration::from_millis(1)).await;
        assert!(current.is_live());
        sleep(Duration::from_millis(1)).await;
        assert!(!current.is_live());
    }
}
