//! What can go wrong with the truth.

/// A failure of the store. That something is not there is an `Option`, not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is not one of a database.
    #[error("not a postgres:// address")]
    InvalidUrl,
    /// The database cannot be reached, or answers nobody; the same call may succeed later.
    #[error("the database is unavailable")]
    Unavailable(#[source] sqlx::Error),
    /// The database refused a statement or a row could not be read: a defect.
    #[error("the database refused a statement")]
    Statement(#[source] sqlx::Error),
    /// A row holds a word that this program does not know: a defect, or a newer program wrote it.
    #[error("the column {column} holds an unknown word")]
    UnknownValue {
        /// Which column.
        column: &'static str,
    },
    /// A row that was just written is not there: somebody deleted it meanwhile.
    #[error("the {what} vanished")]
    RowMissing {
        /// What vanished.
        what: &'static str,
    },
    /// A migration failed.
    #[error("a migration failed")]
    Migrate(#[source] sqlx::migrate::MigrateError),
    /// Migrations are missing.
    #[error("the database is not migrated: run `codelia migrate`")]
    NotMigrated,
    /// The id or alias is in use.
    #[error("{what} is in use")]
    AlreadyExists {
        /// What is in use.
        what: &'static str,
    },
    /// The worker no longer has the right to do this: another incarnation or epoch has it.
    #[error("the lease is lost")]
    Fenced,
}

impl From<sqlx::Error> for Error {
    fn from(error: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &error {
            // A connection that breaks while it is made ends in the middle of a message.
            E::Io(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Tls(_) | E::Protocol(_) => {
                Self::Unavailable(error)
            }
            E::Database(detail) if detail.code().is_some_and(|code| passes(&code)) => {
                Self::Unavailable(error)
            }
            _ => Self::Statement(error),
        }
    }
}

/// Whether a server that says this may say something else soon: 08: the connection broke; 25006: it is a
/// standby; 40: it chose this statement to give way; 53: out of resources; 57: it is stopping, starting, or
/// was told to end the statement; 58: its disk or system failed.
fn passes(code: &str) -> bool {
    code == "25006" || ["08", "40", "53", "57", "58"].iter().any(|class| code.starts_with(class))
}

/// Whether a statement failed because `constraint` holds already.
pub(crate) fn is_unique_violation(error: &sqlx::Error, constraint: &str) -> bool {
    matches!(error, sqlx::Error::Database(detail)
        if detail.is_unique_violation() && detail.constraint() == Some(constraint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passes_is_told_apart_from_what_is_refused() {
        for code in ["57P01", "57P03", "57014", "08006", "40P01", "53100", "25006", "58030"] {
            assert!(passes(code), "{code}");
        }
        for code in ["23505", "42P01", "22021", "25001"] {
            assert!(!passes(code), "{code}");
        }
        let broken = sqlx::Error::Protocol("unexpected response from SSLRequest: 0x00".into());
        assert!(matches!(Error::from(broken), Error::Unavailable(_)));
        assert!(matches!(Error::from(sqlx::Error::RowNotFound), Error::Statement(_)));
    }
}
