//! The table `workers`: one heartbeat row for each, on which all its session leases hang.

use std::time::Duration;

use codelia_policy::{Incarnation, Mode, SessionId, WorkerId};
use time::OffsetDateTime;
use uuid::Uuid;

use crate::{Error, Store};

/// A worker, as operators see it.
#[derive(Debug, Clone)]
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// What it does now.
    pub state: WorkerState,
    /// Modes it proved it can enforce.
    pub modes: Vec<Mode>,
    /// Runs it can execute at once.
    pub slots: i32,
    /// Slots in use at its last heartbeat.
    pub busy_slots: i32,
    /// Sessions it holds.
    pub sessions: i64,
    /// When its last heartbeat arrived.
    pub heartbeat_at: OffsetDateTime,
    /// Version of its program.
    pub version: String,
    /// Where an api reaches it.
    pub address: String,
}

/// What a worker does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerState {
    /// Takes sessions.
    Ready,
    /// Takes nothing new.
    Draining,
    /// Its heartbeat stopped, or it left.
    Gone,
}

/// A worker that registers.
#[derive(Debug, Clone)]
pub struct NewWorker {
    /// The same over restarts.
    pub id: WorkerId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// Names the directory tree its sessions live in.
    pub root_id: Uuid,
    /// Where an api reaches it.
    pub address: String,
    /// Modes it proved it can enforce.
    pub modes: Vec<Mode>,
    /// Runs it can execute at once.
    pub slots: i32,
    /// Version of its program.
    pub version: String,
    /// How long its leases live without a heartbeat.
    pub lease_ttl: Duration,
}

/// What a heartbeat brings back.
#[derive(Debug, Clone, Copy)]
pub struct Heartbeat {
    /// The database's clock.
    pub now: OffsetDateTime,
    /// Whether an operator asked it to drain.
    pub drain: bool,
}

/// A worker that may take a session.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Its id.
    pub id: WorkerId,
    /// This life of it.
    pub incarnation: Incarnation,
    /// Where it is reached.
    pub address: String,
    /// Runs it can execute at once.
    pub slots: i32,
    /// Slots in use at its last heartbeat.
    pub busy_slots: i32,
}

impl Store {
    /// Registers a worker. An earlier incarnation of the same id is fenced by it.
    pub async fn worker_register(&self, worker: &NewWorker) -> Result<Heartbeat, Error> {
        todo!()
    }

    /// Renews all leases of a worker in one statement.
    ///
    /// # Errors
    /// [`Error::Fenced`] if its leases ran out or another incarnation has registered.
    pub async fn worker_renew(
        &self,
        id: &WorkerId,
        incarnation: Incarnation,
        lease_ttl: Duration,
        busy_slots: i32,
    ) -> Result<Heartbeat, Error> {
        todo!()
    }

    /// Marks a worker as draining, by itself or by an operator. `None` if it is unknown or gone.
    pub async fn worker_drain(&self, id: &WorkerId) -> Result<Option<Worker>, Error> {
        todo!()
    }

    /// The worker leaves: its row says so and its leases end now.
    pub async fn worker_leave(&self, id: &WorkerId, incarnation: Incarnation) -> Result<(), Error> {
        todo!()
    }

    /// Lists workers by id, after `after`.
    pub async fn worker_list(&self, after: Option<&WorkerId>, limit: i64) -> Result<Vec<Worker>, Error> {
        todo!()
    }

    /// Up to two random live, ready workers that may take this session (they have its mode, and
    /// its files if it has any).
    pub async fn worker_candidates(&self, session: SessionId, mode: Mode) -> Result<Vec<Candidate>, Error> {
        todo!()
    }

    /// Whether any live worker, ready or draining, has this mode.
    pub async fn worker_has_mode(&self, mode: Mode) -> Result<bool, Error> {
        todo!()
    }
}
