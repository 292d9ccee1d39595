//! The two writes a run costs, an insert and an update, each its own
//! transaction, on the same server and as many at once as we have.

use std::time::{Duration, Instant};

use anyhow::Result;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use uuid::Uuid;

use crate::measure::Measured;

/// A loop of nothing but writes.
#[derive(Debug)]
pub(crate) struct BarePostgres {
    pool: PgPool,
    lanes: usize,
}

impl BarePostgres {
    /// Makes a table with nothing that could be left out.
    pub(crate) async fn prepare(connect: PgConnectOptions, lanes: usize) -> Result<Self> {
        let connections = u32::try_from(lanes)?;
        let pool = PgPoolOptions::new()
            .min_connections(connections)
            .max_connections(connections)
            .connect_with(connect)
            .await?;
        sqlx::query("CREATE TABLE bare (id uuid PRIMARY KEY, state text NOT NULL) WITH (fillfactor = 80)")
            .execute(&pool)
            .await?;
        Ok(Self { pool, lanes })
    }

    /// Inserts and updates, for `time`.
    pub(crate) async fn measure(&self, time: Duration) -> Result<Measured> {
        Measured::of(self.lanes, time, |_| self.insert_and_update()).await
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

    /// Closes its connections.
    pub(crate) async fn end(self) -> Result<()> {
        self.pool.close().await;
        Ok(())
    }
}
