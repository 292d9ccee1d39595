//! The pool of one class. Statements are executed on it as on any sqlx pool.

use std::{io, sync::Arc};

use futures::{
    FutureExt, StreamExt, TryStreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use sqlx::{
    AssertSqlSafe, Either, Execute, Executor, PgPool, Postgres, SqlStr, Transaction,
    postgres::{PgQueryResult, PgRow, PgStatement, PgTypeInfo},
};

/// Connections of one class.
#[derive(Debug, Clone)]
pub(crate) struct Pool {
    connections: PgPool,
    /// What every transaction begins with, if server connections change between transactions. Then
    /// each statement needs a transaction: sqlx prepares and executes it in separate messages.
    begin: Option<Arc<str>>,
}

impl Pool {
    pub(super) fn new(connections: PgPool, begin: Option<String>) -> Self {
        Self { connections, begin: begin.map(Into::into) }
    }

    /// Begins a transaction.
    pub(crate) async fn begin(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let begin = match &self.begin {
            None => self.connections.begin().await,
            Some(begin) => self.connections.begin_with(AssertSqlSafe(Arc::clone(begin))).await,
        };
        begin.map_err(|error| self.explain(error))
    }

    /// A pool that has not reached its size is not exhausted: the server accepts no connection.
    fn explain(&self, error: sqlx::Error) -> sqlx::Error {
        let is_full = self.connections.size() >= self.connections.options().get_max_connections();
        match error {
            sqlx::Error::PoolTimedOut if !is_full => io::Error::from(io::ErrorKind::TimedOut).into(),
            error => error,
        }
    }

    pub(super) async fn close(&self) {
        self.connections.close().await;
    }
}

impl<'c> Executor<'c> for &'c Pool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, sqlx::Result<Either<PgQueryResult, PgRow>>>
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
                let results = self.connections.fetch_many(query).try_collect();
                results.await.map_err(|error| self.explain(error))?
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
                return self.connections.fetch_optional(query).await.map_err(|error| self.explain(error));
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
