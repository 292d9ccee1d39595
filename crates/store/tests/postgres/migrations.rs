//! Migrations while callers use the tables.

use std::{
    future::Future,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use codelia_tests::{Database, eventually};
use futures::future::{join, join_all};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

const CALLERS: usize = 3;
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// All tables of the schema that is there now. Partitions are locked with their parent.
const TABLES: &str = "SELECT relname::text FROM pg_class
                      WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition
                        AND relname <> '_sqlx_migrations'";

/// Callers that read a table, write to it and lock a row, one table after another, and wait at most
/// a second for a lock.
struct Callers {
    connections: Vec<PgConnection>,
}

impl Callers {
    async fn connect(database: &Database) -> Self {
        let mut connections = Vec::new();
        for _ in 0..CALLERS {
            let mut connection = database.connection().await.unwrap();
            sqlx::raw_sql("SET lock_timeout = '1s'").execute(&mut connection).await.unwrap();
            connections.push(connection);
        }
        Self { connections }
    }

    /// Calls until `work` has ended, and returns the tables that callers waited too long for.
    async fn call_during(&mut self, work: impl Future<Output = ()>) -> Vec<String> {
        let (is_over, calls) = (AtomicBool::new(false), AtomicUsize::new(0));
        let callers = self.connections.iter_mut().map(|connection| async {
            let mut blocked = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                blocked.extend(call_all(connection).await);
                calls.fetch_add(1, Ordering::Relaxed);
            }
            blocked
        });
        let work = async {
            eventually("the callers call", || async {
                (calls.load(Ordering::Relaxed) >= CALLERS).then_some(())
            })
            .await;
            work.await;
            is_over.store(true, Ordering::Relaxed);
        };
        let ((), blocked) = join(work, join_all(callers)).await;
        blocked.concat()
    }

    async fn end(self) {
        for connection in self.connections {
            connection.close().await.unwrap();
        }
    }
}

/// Uses every table once, and returns those whose lock did not come.
async fn call_all(connection: &mut PgConnection) -> Vec<String> {
    let tables: Vec<String> = sqlx::query_scalar(TABLES).fetch_all(&mut *connection).await.unwrap();
    let mut blocked = Vec::new();
    for table in tables {
        for call in [
            format!("SELECT FROM {table} LIMIT 1"),
            format!("DELETE FROM {table} WHERE false"),
            format!("SELECT FROM {table} LIMIT 1 FOR UPDATE"),
        ] {
            // Other errors: the table was renamed or dropped after it was listed.
            let result = sqlx::raw_sql(AssertSqlSafe(call.clone())).execute(&mut *connection).await;
            let code = result
                .err()
                .and_then(|error| Some(error.as_database_error()?.code()?.into_owned()));
            blocked.extend((code.as_deref() == Some(LOCK_NOT_AVAILABLE)).then_some(call));
        }
    }
    blocked
}

#[tokio::test]
async fn migration_gives_way_to_callers_behind_it() {
    let database = Database::create().await.unwrap();
    let store = database.store().await.unwrap();
    // The next one adds a trigger to `sessions`.
    store.migrate_to(3).await.unwrap();
    let mut writer = database.connection().await.unwrap();
    sqlx::raw_sql("BEGIN; DELETE FROM sessions WHERE false").execute(&mut writer).await.unwrap();
    let mut callers = Callers::connect(&database).await;
    let waits = || async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareRowExclusiveLock'
                       AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
        database.number(waiting).await.is_ok_and(|waiting| waiting > 0)
    };
    let release = async {
        for _ in 0..2 {
            eventually("the migration waits", || async { waits().await.then_some(()) }).await;
            eventually("the migration gives way", || async { (!waits().await).then_some(()) })
                .await;
        }
        sqlx::raw_sql("ROLLBACK").execute(&mut writer).await.unwrap();
    };
    let work = async {
        let (migrated, ()) = join(store.migrate(), release).await;
        migrated.unwrap();
    };
    assert_eq!(callers.call_during(work).await, Vec::<String>::new());
    writer.close().await.unwrap();
    callers.end().await;
    store.close().await;
    database.end().await.unwrap();
}
