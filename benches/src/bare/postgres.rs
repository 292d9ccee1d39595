//! The two writes of a run, an insert and an update, in separate transactions on the same server.

use std::time::{Duration, Instant};

use anyhow::Result;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use uuid::Uuid;

use crate::measure::Measured;

/// A loop that only writes.
#[derive(Debug)]
pub(crate) struct BarePostgres {
    pool: PgPool,
    lanes: usize,
}

impl BarePostgres {
    /// Creates a minimal table.
    pub(crate) async fn prepare(connect: PgConnectOptions, lanes: usize) -> Result<Self> {
        let connections = u32::try_from(lanes)?;
        let pool = PgPoolOptions::new()
            .min_connections(connections)
            .max_connections(connections)
            .connect_with(connect)
            .await?;
        sqlx::query(
            "CREATE TABLE bare (id uuid PRIMARY KEY, state text NOT NULL) WITH (fillfactor = 80)",
        )
        .execute(&pool)
        .await?;
        Ok(Self { pool, lanes })
    }

    /// Runs the loop for `time`.
    pub(crate) async fn measure(&self, time: Duration) -> Result<Measured> {
        Measured::repeat(self.lanes, time, |_| self.insert_and_update()).await
    }

    async fn insert_and_update(&self) -> Result<Duration> {
        let begin = Instant::now();
        let id = Uuid::now_v7();
        sqlx::query("INSERT INTO bare (id, state) VALUES ($1, 'running')")
            .bind(id)
            .execute(&self.pool)
            .await?;
        sqlx::query("UPDATE bare SET state = 'ended' WHERE id = $1 AND state = 'running'")
            .bind(id)
            .execute(&self.pool)
            .await?;
        Ok(begin.elapsed())
    }

    /// Closes the connections.
    pub(crate) async fn end(self) -> Result<()> {
        self.pool.close().await;
        Ok(())
    }
}
