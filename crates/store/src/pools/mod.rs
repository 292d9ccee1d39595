//! The connection pools: one for each class of statements, with the timeouts of that class.

mod pool;
mod recent;

use std::{
    str::FromStr,
    time::{Duration, Instant},
};

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use tokio::time::sleep;

pub(crate) use self::pool::Pool;
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

/// How to connect to the database.
#[derive(Debug, Clone)]
pub struct Options {
    /// Address, user and database.
    pub connect: PgConnectOptions,
    /// Maximum number of connections in all pools together, at least 3. A worker's lease has one
    /// more.
    pub max_connections: u32,
    /// How long a call waits for a free connection.
    pub acquire_timeout: Duration,
    /// A connection is closed after it was idle for this long.
    pub idle_timeout: Duration,
    /// Maximum time of a statement, lists excepted.
    pub statement_timeout: Duration,
    /// Maximum time of a list.
    pub read_timeout: Duration,
    /// How long a statement waits for a lock.
    pub lock_timeout: Duration,
    /// What is between this process and the server.
    pub pooler: Pooler,
}

impl Options {
    /// The default options for this server.
    #[must_use]
    pub fn new(connect: PgConnectOptions) -> Self {
        Self {
            connect,
            max_connections: 16,
            acquire_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(60),
            statement_timeout: Duration::from_secs(30),
            read_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_secs(3),
            pooler: Pooler::None,
        }
    }

    /// Parses a `postgres://` URL.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`] if it is malformed.
    pub fn from_url(url: &str) -> Result<Self, Error> {
        Ok(Self::new(url.parse().map_err(|_| Error::InvalidUrl)?))
    }
}

/// What is between this process and the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooler {
    /// Nothing, or a pooler that keeps a server connection for each client connection.
    None,
    /// A pooler that may give each transaction another server connection, such as PgBouncer with
    /// `pool_mode = transaction`.
    Transaction,
}

impl FromStr for Pooler {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            "transaction" => Ok(Self::Transaction),
            _ => Err("expected none or transaction"),
        }
    }
}

/// One pool for each class, so that no class can take the connections of another.
#[derive(Debug, Clone)]
pub(crate) struct Pools {
    /// The path of a run, and calls that change or read single rows.
    pub(crate) runs: Pool,
    /// Lists, and other reads of many rows for callers.
    pub(crate) reads: Pool,
    /// Sweeps and purges.
    pub(crate) upkeep: Pool,
    /// How to open a connection that belongs to no pool.
    pub(crate) connect: PgConnectOptions,
    pub(crate) pooler: Pooler,
}

impl Pools {
    /// Opens the pool of runs. The others open connections when they need them.
    pub(crate) async fn connect(options: Options) -> Result<Self, Error> {
        let sizes = Sizes::divide(options.max_connections)?;
        let connect = session_options(options.connect.clone(), options.pooler);
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

    /// Makes the first connection. A server that starts, and a pooler in front of one, answer that they
    /// cannot serve yet.
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
        let (reads, upkeep) = ((total / 4).max(1), (total / 8).max(1));
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

    /// What each transaction must begin with; `None` if the connection holds the settings. It also
    /// removes the prepared statements of the transaction that used the server connection before.
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
        for part in ["BEGIN;", "statement_timeout = 5000;", "lock_timeout = 3000;", "enable_seqscan = off;"] {
            assert!(begin.contains(part), "{begin}");
        }
    }
}
