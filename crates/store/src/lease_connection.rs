//! The connection that keeps a worker's lease. It belongs to no pool, so that nothing else can hold
//! it, and it is opened by the runtime that uses it.

use std::{
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use codelia_types::{Incarnation, WorkerId};
use sqlx::{AssertSqlSafe, Connection, PgConnection, postgres::PgConnectOptions};
use tokio::time::timeout;

use crate::{
    DrainedBy, Error, EventBody, EventSubject, Heartbeat, NewWorker, Store, audit::AuditLog,
    pools::Settings, worker,
};

/// A connection for the heartbeat of one worker. Every call opens it if needed, and after a failed
/// call the next one opens another.
#[derive(Debug)]
pub struct LeaseConnection {
    connect: PgConnectOptions,
    /// The first statement of each transaction, if the connection goes through a pooler.
    begin: Option<String>,
    timeout: Duration,
    idle: Mutex<Option<PgConnection>>,
    audit: Arc<AuditLog>,
}

impl Store {
    /// A separate connection to the same database. A call fails after `timeout`, here and in
    /// the database.
    #[must_use]
    pub fn lease_connection(&self, timeout: Duration) -> LeaseConnection {
        let settings = Settings {
            statement_timeout: timeout,
            lock_timeout: timeout,
            pooler: self.pools.pooler,
        };
        let connect =
            settings.connect(self.pools.connect.clone()).application_name("codelia lease");
        LeaseConnection {
            connect,
            begin: settings.begin(),
            timeout,
            idle: Mutex::default(),
            audit: self.audit.clone(),
        }
    }
}

impl LeaseConnection {
    /// As [`Store::worker_register`].
    pub async fn register(&self, worker: &NewWorker) -> Result<Heartbeat, Error> {
        self.call(async |connection| worker::register(connection, worker).await).await
    }

    /// As [`Store::worker_renew`].
    pub async fn renew(
        &self,
        id: &WorkerId,
        incarnation: Incarnation,
        lease_ttl: Duration,
        busy_slots: i32,
    ) -> Result<Heartbeat, Error> {
        self.call(async |connection| {
            worker::renew(connection, id, incarnation, lease_ttl, busy_slots).await
        })
        .await
    }

    /// Marks a worker as draining by itself.
    pub async fn drain(&self, id: &WorkerId) -> Result<(), Error> {
        self.call(async |connection| {
            worker::drain(connection, id, DrainedBy::Worker).await.map(drop)
        })
        .await
    }

    /// As [`Store::audit_insert`].
    pub async fn audit_insert(
        &self,
        subject: &EventSubject,
        body: &EventBody,
    ) -> Result<(), Error> {
        self.call(async |connection| self.audit.insert(connection, subject, body).await).await
    }

    /// Calls the database within the timeout.
    async fn call<T>(
        &self,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let call = async {
            let mut connection = self.take().await?;
            let result = match &self.begin {
                None => work(&mut connection).await?,
                Some(begin) => {
                    let mut tx = connection.begin_with(AssertSqlSafe(begin.clone())).await?;
                    let result = work(&mut tx).await?;
                    tx.commit().await?;
                    result
                }
            };
            self.put_back(connection);
            Ok(result)
        };
        let timed_out = |_| sqlx::Error::Io(io::ErrorKind::TimedOut.into());
        timeout(self.timeout, call).await.map_err(timed_out)?
    }

    /// Takes the connection. A call that fails or is dropped does not put it back: it may be
    /// broken, or still busy with the statement.
    async fn take(&self) -> Result<PgConnection, Error> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        match idle {
            Some(connection) => Ok(connection),
            None => Ok(PgConnection::connect_with(&self.connect).await?),
        }
    }

    fn put_back(&self, connection: PgConnection) {
        *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
    }
}
