//! The pool of one class. Statements are executed on it as on any sqlx pool.

use std::{io, sync::Arc};

use futures::{
    FutureExt, StreamExt, TryStreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use sqlx::{
    AssertSqlSafe, Either, Execute, Executor, PgConnection, PgPool, Postgres, SqlStr, Transaction,
    pool::PoolConnection,
    postgres::{PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

use super::recent::RecentConnections;

/// Connections of one class.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    connections: PgPool,
    /// Connections that were used a moment ago.
    recent: Arc<RecentConnections>,
    /// The start of every transaction, if server connections change between transactions. Then each
    /// statement needs a transaction: sqlx prepares and executes it in separate messages.
    begin: Option<Arc<str>>,
}

impl Pool {
    pub(super) fn new(connections: PgPool, begin: Option<String>) -> Self {
        Self { connections, recent: Arc::default(), begin: begin.map(Into::into) }
    }

    /// Begins a transaction.
    pub(crate) async fn begin(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let _waiting = self.recent.wait();
        let begin = match &self.begin {
            None => self.connections.begin().await,
            Some(begin) => self.connections.begin_with(AssertSqlSafe(Arc::clone(begin))).await,
        };
        begin.map_err(|error| self.explain(error))
    }

    /// Begins a transaction whose statements read rows in the order of an index. To read all rows
    /// of a tenant and sort them is never better, but the planner may believe that while a table is
    /// small, and plans each statement only once.
    pub(crate) async fn begin_in_order(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let mut tx = self.begin().await?;
        read_in_order(&mut tx).await?;
        Ok(tx)
    }

    /// Executes a statement on a connection of the pool.
    async fn execute_on<T>(
        &self,
        execute: impl AsyncFnOnce(&mut PgConnection) -> sqlx::Result<T>,
    ) -> sqlx::Result<T> {
        let mut connection = self.connection().await?;
        let result = execute(&mut connection).await;
        match result {
            Ok(_) => self.recent.keep(connection),
            // The server may have ended it, and with it the others.
            Err(_) => self.recent.clear(),
        }
        result
    }

    async fn connection(&self) -> sqlx::Result<PoolConnection<Postgres>> {
        if let Some(connection) = self.recent.take() {
            return Ok(connection);
        }
        let _waiting = self.recent.wait();
        self.connections.acquire().await.map_err(|error| self.explain(error))
    }

    /// A pool that has not reached its size is not exhausted: the server accepts no connection.
    fn explain(&self, error: sqlx::Error) -> sqlx::Error {
        let is_full = self.connections.size() >= self.connections.options().get_max_connections();
        match error {
            sqlx::Error::PoolTimedOut if !is_full => {
                io::Error::from(io::ErrorKind::TimedOut).into()
            }
            error => error,
        }
    }

    pub(super) async fn close(&self) {
        self.recent.close();
        self.connections.close().await;
    }
}

/// Makes a transaction one of [`Pool::begin_in_order`].
pub(crate) async fn read_in_order(tx: &mut PgConnection) -> sqlx::Result<()> {
    sqlx::raw_sql("SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off")
        .execute(tx)
        .await?;
    Ok(())
}

impl<'c> Executor<'c> for &'c Pool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxStream<'e, sqlx::Result<Either<PgQueryResult, PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let results = async move {
            let results: Vec<_> = if self.begin.is_some() {
                let mut tx = self.begin().await?;
                let results = tx.fetch_many(query).try_collect().await?;
                tx.commit().await?;
                results
            } else {
                self.execute_on(async |connection| connection.fetch_many(query).try_collect().await)
                    .await?
            };
            Ok::<_, sqlx::Error>(stream::iter(results).map(Ok))
        };
        results.into_stream().try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let row = async move {
            if self.begin.is_none() {
                return self
                    .execute_on(async |connection| connection.fetch_optional(query).await)
                    .await;
            }
            let mut tx = self.begin().await?;
            let row = tx.fetch_optional(query).await?;
            tx.commit().await?;
            Ok(row)
        };
        row.boxed()
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        self.connections.prepare_with(sql, parameters)
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<sqlx::Describe<Postgres>>>
    where
        'c: 'e,
    {
        self.connections.describe(sql)
    }
}
