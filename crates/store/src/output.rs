//! The table `run_output`: what runs wrote, in order.

use codelia_policy::{Incarnation, LeaseEpoch, RunId, TenantId, WorkerId};

use crate::{Error, Store};

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stream {
    /// Standard output, or the terminal.
    Stdout = 1,
    /// Standard error.
    Stderr = 2,
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    /// Where it starts in both streams taken together.
    pub position: i64,
    /// Which stream.
    pub stream: Stream,
    /// Where it starts within its stream.
    pub offset: i64,
    /// The bytes.
    pub data: Vec<u8>,
}

impl Store {
    /// Stores output of a run that is running under this lease.
    ///
    /// # Errors
    /// [`Error::Fenced`] if it is not, or the lease is not live.
    pub async fn output_append(
        &self,
        run: RunId,
        worker: &WorkerId,
        incarnation: Incarnation,
        epoch: LeaseEpoch,
        chunks: &[Chunk],
    ) -> Result<(), Error> {
        todo!()
    }

    /// Reads a tenant's run's output from `position` on, in order, about `max_bytes` of it (at least one
    /// chunk, cut so that it starts at `position`).
    pub async fn output_read(
        &self,
        tenant: &TenantId,
        run: RunId,
        position: i64,
        max_bytes: i64,
    ) -> Result<Vec<Chunk>, Error> {
        todo!()
    }
}
