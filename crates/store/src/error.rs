//! Store errors.

/// A failure of the store. A row that does not exist is an `Option`, not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The URL is not that of a Postgres database.
    #[error("invalid database URL: expected postgres://USER@HOST:PORT/DATABASE")]
    InvalidUrl,
    /// The database cannot be reached or cannot serve now. The same call may succeed later.
    #[error("database unavailable")]
    Unavailable(#[source] sqlx::Error),
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
        /// What the row holds.
        what: &'static str,
    },
    /// A migration failed.
    #[error("migration failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// Migrations are missing.
    #[error("database is not migrated: run `codelia migrate`")]
    NotMigrated,
    /// The id or alias is taken.
    #[error("{what} already exists")]
    AlreadyExists {
        /// What is taken.
        what: &'static str,
    },
    /// The worker's lease expired, or another incarnation or epoch holds it now.
    #[error("lease lost")]
    Fenced,
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            // A connection that breaks during its handshake is a protocol error.
            E::Io(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Tls(_) | E::Protocol(_) => {
                Self::Unavailable(error)
            }
            E::Database(detail) if detail.code().is_some_and(|code| is_transient(&code)) => {
                Self::Unavailable(error)
            }
            _ => Self::Statement(error),
        }
    }
}

/// Whether a SQLSTATE may go away by itself: 08 (connection), 25006 (the server is a standby),
/// 40 (deadlock or serialization failure), 53 (out of resources), 57 (shutdown, start-up or a
/// canceled statement), 58 (disk or system failure).
fn is_transient(code: &str) -> bool {
    code == "25006" || ["08", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
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
        for code in ["57P01", "57P03", "57014", "08006", "40P01", "53100", "25006", "58030"] {
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
