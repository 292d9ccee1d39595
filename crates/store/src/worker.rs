//! The table `workers`: one heartbeat row for each worker. All its leases expire with it.

use std::time::Duration;

use codelia_types::{Incarnation, Mode, SessionId, WorkerId};
use serde::Deserialize;
use sqlx::{PgConnection, PgExecutor};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Store, row, words::words};

/// A worker as operators see it.
#[derive(Debug, Clone)]
pub struct Worker {
    /// Stays the same across restarts.
    pub id: WorkerId,
    /// Whether it takes sessions.
    pub state: WorkerState,
    /// Modes that its probe found enforceable.
    pub modes: Vec<Mode>,
    /// Of these, the modes in which it only watches limits.
    pub watched_modes: Vec<Mode>,
    /// How many runs it executes concurrently.
    pub slots: i32,
    /// Busy slots at its last heartbeat.
    pub busy_slots: i32,
    /// Number of sessions that it holds.
    pub sessions: i64,
    /// Time of its last heartbeat.
    pub heartbeat_at: OffsetDateTime,
    /// The version of its program.
    pub version: String,
    /// The address of its internal API.
    pub address: String,
    /// The disk of its sessions, once it reported it.
    pub disk: Option<DiskSpace>,
}

/// The space of the file system that has the sessions of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskSpace {
    /// Free bytes.
    pub free: u64,
    /// Bytes that the worker keeps free.
    pub reserve: u64,
    /// Whether it takes no new sessions and starts no runs because less is free.
    pub is_short: bool,
}

words! {
    /// The state of a worker.
    WorkerState {
        /// The worker acquires sessions.
        Ready = "ready",
        /// The worker acquires no sessions and starts no runs.
        Draining = "draining",
        /// The lease of the worker expired, or it left.
        Gone = "left",
    }
}

/// A worker to register.
#[derive(Debug, Clone)]
pub struct NewWorker {
    /// The id, which stays the same across restarts.
    pub id: WorkerId,
    /// The incarnation.
    pub incarnation: Incarnation,
    /// The previous incarnation of the same process. If an operator drained it, this one is
    /// draining too.
    pub previous: Option<Incarnation>,
    /// Identifies the directory tree that holds its sessions.
    pub root_id: Uuid,
    /// The address of its internal API.
    pub address: String,
    /// Modes that its probe found enforceable.
    pub modes: Vec<Mode>,
    /// Of these, the modes in which it only watches limits.
    pub watched_modes: Vec<Mode>,
    /// How many runs it executes concurrently.
    pub slots: i32,
    /// The version of its program.
    pub version: String,
    /// How long its leases live after a heartbeat.
    pub lease_ttl: Duration,
}

/// Who decided that a worker drains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainedBy {
    /// An operator, who can take it back.
    Operator,
    /// The worker: it shuts down, or a sandbox left something behind.
    Worker,
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    /// The time in the database.
    pub now: OffsetDateTime,
    /// Whether an operator requested a drain.
    pub drain: bool,
}

/// A worker that may take a session.
#[derive(Debug, Clone, Deserialize)]
pub struct WorkerCandidate {
    /// The worker to ask.
    pub id: WorkerId,
    /// The incarnation.
    pub incarnation: Incarnation,
    /// The address of its internal API.
    pub address: String,
    /// How many runs it executes concurrently.
    pub slots: i32,
    /// Busy slots at its last heartbeat.
    pub busy_slots: i32,
}

/// Selects workers by a condition and its arguments.
macro_rules! select_workers {
    ($condition:literal, $($argument:expr),*) => {
        sqlx::query!(
            r#"SELECT w.id, w.modes, w.watched_modes, w.slots, w.busy_slots, w.heartbeat_at, w.version, w.address,
                      w.disk_free_bytes, w.disk_reserve_bytes, w.disk_is_short,
                      CASE WHEN w.lease_until > now() THEN w.state ELSE 'left' END AS "state!",
                      (SELECT count(*) FROM sessions s
                       WHERE s.lease_worker = w.id AND s.lease_incarnation = w.incarnation) AS "sessions!"
               FROM workers w WHERE "# + $condition,
            $($argument),*
        )
        .try_map(|row| {
            let disk = row.disk_free_bytes.zip(row.disk_reserve_bytes);
            Ok(Worker {
                id: row::parse("workers.id", &row.id)?,
                state: row::parse("workers.state", &row.state)?,
                modes: row::parse_all("workers.modes", &row.modes)?,
                watched_modes: row::parse_all("workers.watched_modes", &row.watched_modes)?,
                slots: row.slots,
                busy_slots: row.busy_slots,
                sessions: row.sessions,
                heartbeat_at: row.heartbeat_at,
                version: row.version,
                address: row.address,
                disk: disk.map(|(free, reserve)| DiskSpace {
                    free: free.unsigned_abs(),
                    reserve: reserve.unsigned_abs(),
                    is_short: row.disk_is_short,
                }),
            })
        })
    };
}

impl Store {
    /// Registers a worker. This fences an earlier incarnation with the same id. A drain that an
    /// operator requested of the same process stays in force.
    ///
    /// # Errors
    /// [`Error::Fenced`] if another incarnation registered at the same time.
    pub async fn worker_register(&self, worker: &NewWorker) -> Result<Heartbeat, Error> {
        let mut tx = self.pools.runs.begin().await?;
        let heartbeat = register(&mut tx, worker).await?;
        tx.commit().await?;
        Ok(heartbeat)
    }

    /// Renews all leases of a worker in one statement.
    ///
    /// # Errors
    /// [`Error::Fenced`] if its leases expired or another incarnation registered.
    pub async fn worker_renew(
        &self,
        id: &WorkerId,
        incarnation: Incarnation,
        lease_ttl: Duration,
        busy_slots: i32,
    ) -> Result<Heartbeat, Error> {
        renew(&self.pools.runs, id, incarnation, lease_ttl, busy_slots).await
    }

    /// Stores how much space a worker has for sessions.
    pub async fn worker_report_disk(
        &self,
        id: &WorkerId,
        incarnation: Incarnation,
        space: DiskSpace,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE workers SET disk_free_bytes = $3, disk_reserve_bytes = $4, disk_is_short = $5
             WHERE id = $1 AND incarnation = $2",
            id.as_str(),
            incarnation.0,
            row::bigint(space.free),
            row::bigint(space.reserve),
            space.is_short,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(())
    }

    /// Marks a worker as draining. Returns `None` if it is unknown or gone.
    pub async fn worker_drain(
        &self,
        id: &WorkerId,
        by: DrainedBy,
    ) -> Result<Option<Worker>, Error> {
        if !drain(&self.pools.runs, id, by).await? {
            return Ok(None);
        }
        self.worker_get(id).await
    }

    /// Takes back the drain of an operator, and not that of the worker itself: then the worker is
    /// returned as it is, draining. Returns `None` if it is unknown or gone.
    pub async fn worker_undrain(&self, id: &WorkerId) -> Result<Option<Worker>, Error> {
        sqlx::query!(
            "UPDATE workers SET state = 'ready'
             WHERE id = $1 AND state = 'draining' AND NOT drains_itself AND lease_until > now()",
            id.as_str(),
        )
        .execute(&self.pools.runs)
        .await?;
        let found = self.worker_get(id).await?;
        Ok(found.filter(|worker| worker.state != WorkerState::Gone))
    }

    /// Marks a worker as left and ends its leases.
    pub async fn worker_leave(&self, id: &WorkerId, incarnation: Incarnation) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE workers SET state = 'left', lease_until = now() WHERE id = $1 AND incarnation = $2",
            id.as_str(),
            incarnation.0,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(())
    }

    /// Lists workers in the order of their ids, after `after`. Those that are gone stay for a day.
    pub async fn worker_list(
        &self,
        after: Option<&WorkerId>,
        limit: i64,
    ) -> Result<Vec<Worker>, Error> {
        let after = after.map_or("", WorkerId::as_str);
        let page = select_workers!("w.id > $1 ORDER BY w.id LIMIT $2", after, limit);
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    async fn worker_get(&self, id: &WorkerId) -> Result<Option<Worker>, Error> {
        let found = select_workers!("w.id = $1", id.as_str());
        Ok(found.fetch_optional(&self.pools.reads).await?)
    }

    /// Deletes the rows of workers that have been gone for a day and hold no session, at most
    /// `limit`, and returns how many.
    pub async fn worker_forget_any_tenant(&self, limit: i64) -> Result<u64, Error> {
        let forgotten = sqlx::query!(
            "DELETE FROM workers WHERE id = ANY (ARRAY(
                 SELECT w.id FROM workers w
                 WHERE w.lease_until <= now() AND w.heartbeat_at < now() - interval '1 day'
                   AND NOT EXISTS (SELECT 1 FROM sessions s WHERE s.lease_worker = w.id)
                   AND NOT EXISTS (SELECT 1 FROM live_runs r WHERE r.worker_id = w.id)
                 LIMIT $1 FOR UPDATE SKIP LOCKED))",
            limit,
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(forgotten.rows_affected())
    }

    /// Returns up to two random live, ready workers that may acquire this session: they support its
    /// mode and have its files, if there are any.
    pub async fn worker_candidates(
        &self,
        session: SessionId,
        mode: Mode,
    ) -> Result<Vec<WorkerCandidate>, Error> {
        let found = sqlx::query!(
            "SELECT w.id, w.incarnation, w.address, w.slots, w.busy_slots
             FROM workers w JOIN sessions s ON s.id = $1
             WHERE w.state = 'ready' AND w.lease_until > now() AND $2 = ANY (w.modes)
               AND ((s.home_root IS NULL AND NOT w.disk_is_short) OR s.home_root = w.root_id
                    -- See lease_acquire.sql.
                    OR (s.allow_data_loss AND root_is_gone(s.home_root)))
             ORDER BY random() LIMIT 2",
            session.0,
            mode.as_str(),
        )
        .try_map(|row| {
            Ok(WorkerCandidate {
                id: row::parse("workers.id", &row.id)?,
                incarnation: Incarnation(row.incarnation),
                address: row.address,
                slots: row.slots,
                busy_slots: row.busy_slots,
            })
        });
        Ok(found.fetch_all(&self.pools.runs).await?)
    }

    /// Returns the modes that live workers, ready or draining, support.
    pub async fn worker_modes(&self) -> Result<Vec<Mode>, Error> {
        let modes = sqlx::query_scalar!(
            r#"SELECT DISTINCT mode AS "mode!" FROM workers, unnest(modes) AS mode
               WHERE lease_until > now() AND state <> 'left' ORDER BY 1"#
        )
        .fetch_all(&self.pools.runs)
        .await?;
        row::parse_all("workers.modes", &modes)
    }

    /// Whether any live worker, ready or draining, supports this mode.
    pub async fn worker_has_mode(&self, mode: Mode) -> Result<bool, Error> {
        let found = sqlx::query_scalar!(
            r#"SELECT EXISTS (SELECT 1 FROM workers
                              WHERE lease_until > now() AND state <> 'left' AND $1 = ANY (modes)) AS "found!""#,
            mode.as_str(),
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok(found)
    }
}

/// See [`Store::worker_register`]. The statement replaces only the incarnation that was seen
/// before: the database may execute it late, after the worker gave up on it and registered again.
pub(crate) async fn register(
    connection: &mut PgConnection,
    worker: &NewWorker,
) -> Result<Heartbeat, Error> {
    let replaced =
        sqlx::query_scalar!("SELECT incarnation FROM workers WHERE id = $1", worker.id.as_str())
            .fetch_optional(&mut *connection)
            .await?;
    let texts =
        |modes: &[Mode]| modes.iter().map(|mode| mode.as_str().to_owned()).collect::<Vec<_>>();
    let modes = texts(&worker.modes);
    let watched_modes = texts(&worker.watched_modes);
    let row = sqlx::query!(
        r#"INSERT INTO workers (id, incarnation, root_id, address, modes, slots, version, state, lease_until, watched_modes)
               VALUES ($1, $2, $3, $4, $5, $6, $7, 'ready', now() + $8, $10)
               ON CONFLICT (id) DO UPDATE SET
                   incarnation = excluded.incarnation, root_id = excluded.root_id, address = excluded.address,
                   modes = excluded.modes, watched_modes = excluded.watched_modes, slots = excluded.slots, busy_slots = 0, version = excluded.version,
                   state = CASE WHEN workers.incarnation = $9 AND workers.state = 'draining' THEN 'draining' ELSE 'ready' END,
                   drains_itself = workers.drains_itself AND workers.incarnation = $9,
                   registered_at = now(), heartbeat_at = now(), lease_until = excluded.lease_until
               WHERE workers.incarnation = $11
               RETURNING now() AS "now!", state = 'draining' AS "drain!""#,
        worker.id.as_str(),
        worker.incarnation.0,
        worker.root_id,
        worker.address,
        &modes,
        worker.slots,
        worker.version,
        row::interval(worker.lease_ttl),
        worker.previous.map(|incarnation| incarnation.0),
        &watched_modes,
        replaced,
    )
    .fetch_optional(connection)
    .await?
    .ok_or(Error::Fenced)?;
    Ok(Heartbeat { now: row.now, drain: row.drain })
}

/// See [`Store::worker_renew`].
pub(crate) async fn renew(
    executor: impl PgExecutor<'_>,
    id: &WorkerId,
    incarnation: Incarnation,
    lease_ttl: Duration,
    busy_slots: i32,
) -> Result<Heartbeat, Error> {
    // An expired lease is never renewed: another worker may hold its sessions.
    sqlx::query_as!(
        Heartbeat,
        r#"UPDATE workers SET heartbeat_at = now(), lease_until = now() + $3, busy_slots = $4
               WHERE id = $1 AND incarnation = $2 AND state <> 'left' AND lease_until > now()
               RETURNING now() AS "now!", state = 'draining' AS "drain!""#,
        id.as_str(),
        incarnation.0,
        row::interval(lease_ttl),
        busy_slots,
    )
    .fetch_optional(executor)
    .await?
    .ok_or(Error::Fenced)
}

/// Marks a worker as draining; `false` if it is unknown or gone.
pub(crate) async fn drain(
    executor: impl PgExecutor<'_>,
    id: &WorkerId,
    by: DrainedBy,
) -> Result<bool, Error> {
    let updated = sqlx::query!(
        "UPDATE workers SET state = 'draining', drains_itself = drains_itself OR $2
         WHERE id = $1 AND state <> 'left' AND lease_until > now()",
        id.as_str(),
        by == DrainedBy::Worker,
    )
    .execute(executor)
    .await?;
    Ok(updated.rows_affected() > 0)
}
