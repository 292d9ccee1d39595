//! The connection pools: one for each class of statements, with the timeouts of that class.

mod pool;
mod recent;

use std::{
    fmt,
    num::NonZeroU32,
    str::FromStr,
    time::{Duration, Instant},
};

use codelia_types::{
    duration,
    option::{self, optional_text},
};
use serde::{Deserialize, Serialize};
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::time::sleep;

pub(crate) use self::pool::{Pool, read_in_order};
use crate::Error;

/// Every statement finds its rows by an index, whatever its arguments. So Postgres plans it once
/// for each connection instead of once for each run, and a plan that was made while a table was
/// small never scans that table later.
const PLANNER_SETTINGS: [(&str, &str); 3] =
    [("plan_cache_mode", "force_generic_plan"), ("enable_seqscan", "off"), ("jit", "off")];
/// Upkeep gives up after this and tries again at its next pass: it must not queue in front of runs.
const UPKEEP_LOCK_TIMEOUT: Duration = Duration::from_millis(500);
/// A process that stops within a transaction holds its locks for no longer.
const IDLE_IN_TRANSACTION_TIMEOUT: Duration = Duration::from_secs(10);
/// Between two attempts to make the first connection.
const CONNECT_RETRY_DELAY: Duration = Duration::from_millis(200);
/// At least one connection for each class.
const MIN_CONNECTIONS: u32 = 3;
/// Maximum number of connections in all pools together, unless one is configured. A worker's lease
/// has one more.
const MAX_CONNECTIONS: u32 = 16;
const WORKER_CONNECTIONS: u32 = 6;

codelia_types::options! {
    /// How to connect to the database: the section `database` of the configuration.
    pub struct Options {
        /// `postgres://USER:PASSWORD@HOST/DATABASE`. Default: `up` starts a private one.
        #[serde(serialize_with = "option::masked", deserialize_with = "optional_text::deserialize")]
        pub url: Option<DatabaseUrl> = None,
        /// Connections of all classes of a process, at least 3. Default: 16; 6 for a worker.
        pub max_connections: Option<NonZeroU32> = None,
        /// What is between this process and the server: `none`, or `transaction` behind PgBouncer
        /// with `pool_mode = transaction`.
        pub pooler: Pooler = Pooler::None,
        /// How long a call waits for a free connection.
        #[serde(skip)]
        pub acquire_timeout: Duration = Duration::from_secs(5),
        /// A connection is closed after it was idle for so long.
        #[serde(with = "duration")]
        pub idle_timeout: Duration = Duration::from_secs(60),
        /// Maximum time of a statement, lists excepted.
        #[serde(with = "duration")]
        pub statement_timeout: Duration = Duration::from_secs(30),
        /// Maximum time of a list; then it fails with `QUERY_TIMEOUT`.
        #[serde(with = "duration")]
        pub read_timeout: Duration = Duration::from_secs(5),
        /// How long a statement waits for a lock; upkeep: 500 ms.
        #[serde(with = "duration")]
        pub lock_timeout: Duration = Duration::from_secs(3),
    }
}

impl Options {
    /// The default options for the database with this URL.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`] if it is malformed.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        Ok(Self { url: Some(url.parse()?), ..Self::default() })
    }

    /// The options of a worker: there are many workers, and each needs few connections.
    #[must_use]
    pub fn of_worker(mut self) -> Self {
        self.max_connections = self.max_connections.or(NonZeroU32::new(WORKER_CONNECTIONS));
        self
    }
}

/// Address, user and database.
#[derive(Clone)]
pub struct DatabaseUrl(PgConnectOptions);

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DatabaseUrl").finish_non_exhaustive()
    }
}

impl FromStr for DatabaseUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        text.parse().map(Self).map_err(|_| Error::InvalidUrl)
    }
}

impl From<PgConnectOptions> for DatabaseUrl {
    fn from(options: PgConnectOptions) -> Self {
        Self(options)
    }
}

/// The part between this process and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pooler {
    /// Nothing, or a pooler that keeps a server connection for each client connection.
    None,
    /// A pooler that may give each transaction another server connection, such as PgBouncer with
    /// `pool_mode = transaction`.
    Transaction,
}

/// One pool for each class, so that no class can take the connections of another.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// The path of a run, and calls that change or read single rows.
    pub(crate) runs: Pool,
    /// Lists, and other reads of many rows for callers.
    pub(crate) reads: Pool,
    /// Upkeep: ends what is overdue and deletes what is old.
    pub(crate) upkeep: Pool,
    /// How to open a connection that belongs to no pool.
    pub(crate) connect: PgConnectOptions,
    pub(crate) pooler: Pooler,
}

impl Pools {
    /// Opens the pool of runs. The others open connections when they need them.
    pub(crate) async fn connect(options: Options) -> Result<Self, Error> {
        let sizes =
            Sizes::divide(options.max_connections.map_or(MAX_CONNECTIONS, NonZeroU32::get))?;
        let DatabaseUrl(connect) = options.url.ok_or(Error::NoUrl)?;
        let connect = session_options(connect, options.pooler);
        let pool = |size, statement_timeout, lock_timeout| {
            let settings = Settings { statement_timeout, lock_timeout, pooler: options.pooler };
            let pool = PgPoolOptions::new()
                .max_connections(size)
                .acquire_timeout(options.acquire_timeout)
                .idle_timeout(options.idle_timeout)
                .connect_lazy_with(settings.connect(connect.clone()));
            Pool::new(pool, settings.begin())
        };
        let pools = Self {
            runs: pool(sizes.runs, options.statement_timeout, options.lock_timeout),
            reads: pool(sizes.reads, options.read_timeout, options.lock_timeout),
            upkeep: pool(sizes.upkeep, options.statement_timeout, UPKEEP_LOCK_TIMEOUT),
            connect,
            pooler: options.pooler,
        };
        pools.wait_until_answered(options.acquire_timeout).await?;
        Ok(pools)
    }

    /// Makes the first connection. A server that starts, and a pooler in front of one, answer that
    /// they cannot serve yet.
    async fn wait_until_answered(&self, timeout: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + timeout;
        loop {
            let error = match self.runs.begin().await {
                Ok(transaction) => return Ok(transaction.rollback().await?),
                Err(error) => error,
            };
            let is_answer = matches!(error, sqlx::Error::Database(_));
            let error = Error::from(error);
            if !is_answer || !error.is_transient() || Instant::now() >= deadline {
                return Err(error);
            }
            sleep(CONNECT_RETRY_DELAY).await;
        }
    }

    pub(crate) async fn close(&self) {
        tokio::join!(self.runs.close(), self.reads.close(), self.upkeep.close());
    }
}

/// The number of connections of each class.
#[derive(Debug, PartialEq, Eq)]
struct Sizes {
    runs: u32,
    reads: u32,
    upkeep: u32,
}

impl Sizes {
    fn divide(total: u32) -> Result<Self, Error> {
        if total < MIN_CONNECTIONS {
            return Err(Error::TooFewConnections { minimum: MIN_CONNECTIONS });
        }
        let reads = (total / 4).max(1);
        let upkeep = (total / 8).max(1);
        Ok(Self { runs: total - reads - upkeep, reads, upkeep })
    }
}

/// Parameters that a pooler accepts, too.
fn session_options(connect: PgConnectOptions, pooler: Pooler) -> PgConnectOptions {
    let connect = connect.application_name("codelia");
    match pooler {
        Pooler::None => connect,
        // A statement that was prepared in one transaction does not exist in the next.
        Pooler::Transaction => connect.extra_float_digits(None).statement_cache_capacity(0),
    }
}

/// The settings of a connection, or of each transaction if the connection has no state of its own.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Settings {
    pub(crate) statement_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) pooler: Pooler,
}

impl Settings {
    fn all(self) -> impl Iterator<Item = (&'static str, String)> {
        let timeouts = [
            ("statement_timeout", self.statement_timeout),
            ("lock_timeout", self.lock_timeout),
            ("idle_in_transaction_session_timeout", IDLE_IN_TRANSACTION_TIMEOUT),
        ];
        let timeouts = timeouts.map(|(name, time)| (name, time.as_millis().max(1).to_string()));
        PLANNER_SETTINGS.map(|(name, value)| (name, value.to_owned())).into_iter().chain(timeouts)
    }

    /// Adds the settings, if the connection can hold them.
    pub(crate) fn connect(self, connect: PgConnectOptions) -> PgConnectOptions {
        match self.pooler {
            Pooler::None => connect.options(self.all()),
            Pooler::Transaction => connect,
        }
    }

    /// The start of each transaction; `None` if the connection holds the settings. It also removes
    /// the prepared statements of the transaction that used the server connection before.
    pub(crate) fn begin(self) -> Option<String> {
        let set = |(name, value)| format!("SET LOCAL {name} = {value};");
        (self.pooler == Pooler::Transaction)
            .then(|| format!("BEGIN; DEALLOCATE ALL; {}", self.all().map(set).collect::<String>()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_connections() {
        let sizes = |total| Sizes::divide(total).unwrap();
        assert_eq!(sizes(16), Sizes { runs: 10, reads: 4, upkeep: 2 });
        assert_eq!(sizes(6), Sizes { runs: 4, reads: 1, upkeep: 1 });
        assert_eq!(sizes(3), Sizes { runs: 1, reads: 1, upkeep: 1 });
        assert!(matches!(Sizes::divide(2), Err(Error::TooFewConnections { minimum: 3 })));
    }

    #[test]
    fn pooled_transactions_set_what_connections_cannot() {
        let settings = |pooler| Settings {
            statement_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(3),
            pooler,
        };
        assert_eq!(settings(Pooler::None).begin(), None);
        let begin = settings(Pooler::Transaction).begin().unwrap();
        for part in
            ["BEGIN;", "statement_timeout = 5000;", "lock_timeout = 3000;", "enable_seqscan = off;"]
        {
            assert!(begin.contains(part), "{begin}");
        }
    }
}
