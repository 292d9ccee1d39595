//! The connection pools, one for each class of statements.

use sqlx::{PgPool, postgres::PgPoolOptions};

use crate::{Error, Options};

/// Every statement finds its rows by an index, whatever its arguments. So Postgres plans it once
/// for each connection instead of once for each run, and a plan that was made while a table was
/// small never scans that table later.
const PLANNER_SETTINGS: [(&str, &str); 3] =
    [("plan_cache_mode", "force_generic_plan"), ("enable_seqscan", "off"), ("jit", "off")];

/// One pool for each class, so that no class can take the connections of another.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// The path of a run, and calls that change or read single rows.
    pub(crate) runs: PgPool,
    /// Lists, and other reads of many rows for callers.
    pub(crate) reads: PgPool,
    /// Sweeps, purges and migrations.
    pub(crate) upkeep: PgPool,
}

impl Pools {
    pub(crate) async fn connect(options: Options) -> Result<Self, Error> {
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .connect_with(options.connect.application_name("codelia").options(PLANNER_SETTINGS))
            .await?;
        Ok(Self { runs: pool.clone(), reads: pool.clone(), upkeep: pool })
    }

    pub(crate) async fn close(&self) {
        tokio::join!(self.runs.close(), self.reads.close(), self.upkeep.close());
    }
}
