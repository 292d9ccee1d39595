//! Statements and log (WAL) of the database, counted by the extension `pg_stat_statements`.

use std::path::Path;

use anyhow::Result;
use codelia_store::LocalPostgres;
use codelia_tests::Database;
use sqlx::{Connection, Executor, PgConnection};

/// Starts a server that counts statements, if the extension is installed there.
pub(crate) async fn start_server(dir: &Path) -> Result<LocalPostgres> {
    let server = LocalPostgres::start(dir).await?;
    let mut connection = PgConnection::connect_with(&server.database("counts").await?).await?;
    let is_installed: bool = sqlx::query_scalar(
        "SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_stat_statements')",
    )
    .fetch_one(&mut connection)
    .await?;
    if is_installed {
        connection
            .execute("ALTER SYSTEM SET shared_preload_libraries = 'pg_stat_statements'")
            .await?;
    }
    connection.close().await?;
    if !is_installed {
        return Ok(server);
    }
    server.stop().await?;
    Ok(LocalPostgres::start(dir).await?)
}

/// A statement that was executed in a time.
#[derive(Debug, Clone, sqlx::FromRow)]
pub(crate) struct CountedStatement {
    text: String,
    calls: i64,
    exec_millis: f64,
    wal_bytes: i64,
}

/// The work of the database in a time.
#[derive(Debug)]
pub(crate) struct StatementCounts {
    /// The statements, those that took the most time first. Empty if they are not counted.
    statements: Vec<CountedStatement>,
    wal_bytes: i64,
}

/// A position in the log, from which to count.
#[derive(Debug)]
pub(crate) struct CountStart {
    wal_position: i64,
    is_counted: bool,
}

const WAL_POSITION: &str = "SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint";

impl CountStart {
    /// Counts from here.
    pub(crate) async fn now(database: &Database) -> Result<Self> {
        let mut connection = database.connection().await?;
        connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements").await.ok();
        // Fails if the server does not count them.
        let is_counted = connection.execute("SELECT pg_stat_statements_reset()").await.is_ok();
        let wal_position = sqlx::query_scalar(WAL_POSITION).fetch_one(&mut connection).await?;
        connection.close().await?;
        Ok(Self { wal_position, is_counted })
    }

    /// The work of the database since then.
    pub(crate) async fn end(self, database: &Database) -> Result<StatementCounts> {
        let mut connection = database.connection().await?;
        let wal: i64 = sqlx::query_scalar(WAL_POSITION).fetch_one(&mut connection).await?;
        let statements = if self.is_counted {
            sqlx::query_as(
                "SELECT regexp_replace(query, '^(--[^\\n]*\\n|\\s)*', '') AS text, sum(calls)::bigint AS calls,
                        sum(total_exec_time) AS exec_millis, sum(wal_bytes)::bigint AS wal_bytes
                 FROM pg_stat_statements WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
                 GROUP BY 1 ORDER BY exec_millis DESC",
            )
            .fetch_all(&mut connection)
            .await?
        } else {
            Vec::new()
        };
        connection.close().await?;
        Ok(StatementCounts { statements, wal_bytes: wal - self.wal_position })
    }
}

/// Statements with fewer calls in a unit are not shown.
const MIN_CALLS: f64 = 0.05;
const MAX_TEXT: usize = 70;

impl StatementCounts {
    /// The numbers for each of so many units (runs, seconds), as lines.
    pub(crate) fn lines(&self, units: f64) -> Vec<String> {
        let each = |count: i64| as_float(count) / units;
        let calls: i64 = self.statements.iter().map(|statement| statement.calls).sum();
        let exec: f64 = self.statements.iter().map(|statement| statement.exec_millis).sum();
        let mut lines = vec![format!("{:.0} bytes of log (WAL)", each(self.wal_bytes))];
        if self.statements.is_empty() {
            lines.push("statements are not counted: install pg_stat_statements".to_owned());
            return lines;
        }
        lines.push(format!(
            "{:.1} statements, {:.2} ms in their execution:",
            each(calls),
            exec / units
        ));
        for statement in
            self.statements.iter().filter(|statement| each(statement.calls) >= MIN_CALLS)
        {
            let words: Vec<&str> = statement.text.split_whitespace().collect();
            let text: String = words.join(" ").chars().take(MAX_TEXT).collect();
            lines.push(format!(
                "{:>7.2} × {:>6.3} ms {:>6.0} bytes  {text}",
                each(statement.calls),
                statement.exec_millis / as_float(statement.calls.max(1)),
                as_float(statement.wal_bytes) / as_float(statement.calls.max(1)),
            ));
        }
        lines
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn as_float(count: i64) -> f64 {
    count as f64
}
