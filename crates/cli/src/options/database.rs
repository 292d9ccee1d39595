//! Options of the database.

use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use codelia_store::Options;
use secrecy::ExposeSecret;

use crate::config::Config;

/// What a process uses the database for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DatabaseUse {
    /// Calls of clients.
    Calls,
    /// A worker's own runs: there are many workers, and each needs few connections.
    Worker,
}

/// Options of the configured database; `None` if none is configured.
pub(crate) fn store(config: &Config, used_for: DatabaseUse) -> Result<Option<Options>> {
    let Some(url) = &config.database.url else { return Ok(None) };
    let options = Options::from_url(url.expose_secret()).context("database.url")?;
    database(config, options, used_for).map(Some)
}

/// Adds the configured pool sizes and timeouts.
pub(crate) fn database(config: &Config, options: Options, used_for: DatabaseUse) -> Result<Options> {
    let database = &config.database;
    let pooler = database.pooler.parse().map_err(|error: &str| anyhow!("database.pooler: {error}"))?;
    let max_connections = match (database.max_connections, used_for) {
        (Some(configured), _) => configured.get(),
        (None, DatabaseUse::Calls) => 16,
        (None, DatabaseUse::Worker) => 6,
    };
    Ok(Options {
        max_connections,
        pooler,
        idle_timeout: Duration::from_secs(database.idle_timeout_seconds.get()),
        statement_timeout: Duration::from_millis(database.statement_timeout_ms.get()),
        read_timeout: Duration::from_millis(database.read_timeout_ms.get()),
        lock_timeout: Duration::from_millis(database.lock_timeout_ms.get()),
        ..options
    })
}

#[cfg(test)]
mod tests {
    use codelia_store::Pooler;

    use super::*;
    use crate::options::tests::config;

    const URL: (&str, &str) = ("CODELIA_DATABASE_URL", "postgres://u@h/d");

    #[test]
    fn worker_uses_few_connections() {
        let connections = |variables: &[(&str, &str)], used_for| {
            store(&config(variables), used_for).unwrap().unwrap().max_connections
        };
        assert_eq!(connections(&[URL], DatabaseUse::Calls), 16);
        assert_eq!(connections(&[URL], DatabaseUse::Worker), 6);
        let configured = [URL, ("CODELIA_DATABASE_MAX_CONNECTIONS", "9")];
        assert_eq!(connections(&configured, DatabaseUse::Worker), 9);
    }

    #[test]
    fn timeouts_and_pooler_are_configuration() {
        let variables = [
            URL,
            ("CODELIA_DATABASE_POOLER", "transaction"),
            ("CODELIA_DATABASE_IDLE_TIMEOUT_SECONDS", "7"),
            ("CODELIA_DATABASE_STATEMENT_TIMEOUT_MS", "4000"),
            ("CODELIA_DATABASE_READ_TIMEOUT_MS", "3000"),
            ("CODELIA_DATABASE_LOCK_TIMEOUT_MS", "2000"),
        ];
        let options = store(&config(&variables), DatabaseUse::Calls).unwrap().unwrap();
        assert_eq!(options.pooler, Pooler::Transaction);
        let seconds =
            [options.idle_timeout, options.statement_timeout, options.read_timeout, options.lock_timeout]
                .map(|time| time.as_secs());
        assert_eq!(seconds, [7, 4, 3, 2]);
        let unknown = config(&[URL, ("CODELIA_DATABASE_POOLER", "session")]);
        let error = store(&unknown, DatabaseUse::Calls).unwrap_err().to_string();
        assert_eq!(error, "database.pooler: expected none or transaction");
    }
}
