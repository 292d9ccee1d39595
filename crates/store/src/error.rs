//! What can go wrong with the truth.

/// A failure of the store. That something is not there is an `Option`, not an error.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The address is not one of a database.
    #[error("not a postgres:// address")]
    Url,
    /// The database cannot be reached, or answers nobody; the same call may succeed later.
    #[error("the database is unavailable")]
    Unavailable(#[source] sqlx::Error),
    /// The database refused a statement or a row could not be read: a defect.
    #[error("the database refused a statement")]
    Statement(#[source] sqlx::Error),
    /// A row holds a word that this program does not know: a defect, or a newer program wrote it.
    #[error("the column {column} holds an unknown word")]
    UnknownWord {
        /// Which column.
        column: &'static str,
    },
    /// A row that was just written is not there: somebody deleted it meanwhile.
    #[error("the {what} vanished")]
    Vanished {
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
    Exists {
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
            E::Io(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed | E::Tls(_) => {
                Self::Unavailable(error)
            }
            // 57P*: the server is stopping or starting; 08*: the connection broke; 53*: out of resources.
            E::Database(detail)
                if detail
                    .code()
                    .is_some_and(|c| c.starts_with("57P") || c.starts_with("08") || c.starts_with("53")) =>
            {
                Self::Unavailable(error)
            }
            _ => Self::Statement(error),
        }
    }
}

/// Whether a statement failed because `constraint` holds already.
pub(crate) fn is_unique_violation(error: &sqlx::Error, constraint: &str) -> bool {
    matches!(error, sqlx::Error::Database(detail)
        if detail.is_unique_violation() && detail.constraint() == Some(constraint))
}
