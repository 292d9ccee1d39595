//! Store errors.

use crate::objects::ObjectProblem;

/// SQLSTATE of a statement that reached `statement_timeout`, or that an operator canceled.
const QUERY_CANCELED: &str = "57014";
/// SQLSTATE of a statement that reached `lock_timeout`.
pub(crate) const LOCK_NOT_AVAILABLE: &str = "55P03";

/// A failure of the store. A row that does not exist is an `Option`, not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL is not that of a Postgres database.
    #[error("invalid database URL: expected postgres://USER@HOST:PORT/DATABASE")]
    InvalidUrl,
    /// The options name no database.
    #[error("no database configured: set database.url or CODELIA_DATABASE_URL")]
    NoUrl,
    /// The database cannot be reached or cannot serve now. The same call may succeed later.
    #[error("database unavailable")]
    Unavailable(#[source] sqlx::Error),
    /// No connection became free in time. The same call may succeed later.
    #[error("no database connection became free in time (raise database.max_connections)")]
    PoolExhausted,
    /// The statement took too long and was canceled. It may succeed later, or with fewer rows.
    #[error("the statement took too long")]
    StatementTimeout(#[source] sqlx::Error),
    /// The statement waited too long for a lock. The same call may succeed later.
    #[error("waited too long for a lock")]
    LockTimeout(#[source] sqlx::Error),
    /// Fewer connections than classes of statements.
    #[error("database.max_connections: minimum is {minimum}")]
    TooFewConnections {
        /// The smallest possible number.
        minimum: u32,
    },
    /// The database rejected a statement, or a row could not be decoded: a defect.
    #[error("database rejected a statement")]
    Statement(#[source] sqlx::Error),
    /// A column holds a value that this program does not know: a defect, or a newer program wrote
    /// it.
    #[error("column {column} holds unknown value {value:?}")]
    UnknownValue {
        /// The column, as `table.column`.
        column: &'static str,
        /// The value.
        value: String,
    },
    /// A row that was just written no longer exists, because another process deleted it.
    #[error("{what} was deleted while it was being created")]
    RowMissing {
        /// A name for what the row holds.
        what: &'static str,
    },
    /// A migration failed.
    #[error("migration failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// Migrations are missing.
    #[error("database is not migrated: run `codelia migrate`")]
    NotMigrated,
    /// A pooler between this process and the server cannot keep the lock of a migration.
    #[error(
        "migrations need a direct connection: run `codelia migrate` with database.pooler = none and the \
         server's own address"
    )]
    MigrateThroughPooler,
    /// The id or alias is taken.
    #[error("{what} already exists")]
    AlreadyExists {
        /// A name for what is taken.
        what: &'static str,
    },
    /// Output outside the database could not be written, read or removed.
    #[error("output object {name:?}: {problem}")]
    Object {
        /// The object.
        name: String,
        /// Why.
        problem: ObjectProblem,
    },
    /// The store for output outside the database cannot be used.
    #[error("output.store {location}: {problem}")]
    OutputStore {
        /// The store.
        location: String,
        /// Why, and what to do.
        problem: String,
    },
    /// A run, a session or a tenant has as many approvals as it may.
    #[error("{subject} {limit} {what}, the maximum")]
    TooManyApprovals {
        /// Who has them, with the verb.
        subject: &'static str,
        /// The maximum.
        limit: i64,
        /// Which approvals.
        what: &'static str,
    },
    /// The worker's lease expired, or another incarnation or epoch holds it now.
    #[error("lease lost")]
    Fenced,
}

impl Error {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unavailable(_)
                | Self::PoolExhausted
                | Self::StatementTimeout(_)
                | Self::LockTimeout(_)
                | Self::Object { problem: ObjectProblem::Timeout | ObjectProblem::Failed(_), .. }
        )
    }
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        let error = match error {
            E::Decode(source) => match source.downcast::<Self>() {
                Ok(of_row) => return *of_row,
                Err(source) => E::Decode(source),
            },
            error => error,
        };
        match &error {
            E::PoolTimedOut => Self::PoolExhausted,
            // A connection that breaks during its handshake is a protocol error.
            E::Io(_) | E::PoolClosed | E::WorkerCrashed | E::Tls(_) | E::Protocol(_) => {
                Self::Unavailable(error)
            }
            E::Database(detail) => match detail.code().as_deref() {
                Some(QUERY_CANCELED) => Self::StatementTimeout(error),
                Some(LOCK_NOT_AVAILABLE) => Self::LockTimeout(error),
                Some(code) if is_transient(code) => Self::Unavailable(error),
                _ => Self::Statement(error),
            },
            _ => Self::Statement(error),
        }
    }
}

/// The error of a conversion of a row, on its way through sqlx.
impl From<Error> for sqlx::Error {
    fn from(error: Error) -> Self {
        Self::Decode(error.into())
    }
}

/// Whether a SQLSTATE may go away by itself: 08 (connection), 25006 (the server is a standby),
/// 25P03 (idle for too long within a transaction), 40 (deadlock or serialization failure), 53 (out
/// of resources), 57 (shutdown or start-up), 58 (disk or system failure).
fn is_transient(code: &str) -> bool {
    ["25006", "25P03"].contains(&code)
        || ["08", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
}

/// Whether a statement failed because it violates the unique `constraint`.
pub(crate) fn is_unique_violation(error: &sqlx::Error, constraint: &str) -> bool {
    matches!(error, sqlx::Error::Database(detail)
        if detail.is_unique_violation() && detail.constraint() == Some(constraint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transient_codes_are_unavailable() {
        for code in ["57P01", "57P03", "08006", "40P01", "53100", "25006", "25P03", "58030"] {
            assert!(is_transient(code), "{code}");
        }
        for code in ["23505", "42P01", "22021", "25001"] {
            assert!(!is_transient(code), "{code}");
        }
        let broken = sqlx::Error::Protocol("unexpected response from SSLRequest: 0x00".into());
        assert!(matches!(Error::from(broken), Error::Unavailable(_)));
        assert!(matches!(Error::from(sqlx::Error::RowNotFound), Error::Statement(_)));
    }
}
