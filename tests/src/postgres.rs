//! A database for each test, on the server that `with-postgres` started for the whole test run, or
//! on a private one.

use anyhow::{Context, Result};
use codelia_store::{LocalPostgres, Options, Store};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection, postgres::PgConnectOptions};
use uuid::Uuid;

use crate::Scratch;

/// Environment variable with the URL of the test run's server.
pub const POSTGRES_URL: &str = "CODELIA_TEST_POSTGRES";

/// A migrated database on the test run's server. Copying it takes less time than migrating.
const TEMPLATE: &str = "codelia_template";

/// A database of one test. Call [`Database::end`] at the end.
#[derive(Debug)]
pub struct Database {
    connect: PgConnectOptions,
    name: String,
    server: Option<(LocalPostgres, Scratch)>,
}

impl Database {
    /// Creates an empty database.
    pub async fn create() -> Result<Self> {
        Self::create_from("template1").await
    }

    /// Creates a migrated database.
    pub async fn migrated() -> Result<(Self, Store)> {
        if let Ok(url) = std::env::var(POSTGRES_URL) {
            create_template(&url.parse().context(POSTGRES_URL)?).await?;
        }
        let database = Self::create_from(TEMPLATE).await?;
        let store = database.store().await?;
        // A private server has no template.
        if store.check_migrated().await.is_err() {
            store.migrate().await?;
        }
        Ok((database, store))
    }

    async fn create_from(template: &str) -> Result<Self> {
        let name = format!("test_{}", Uuid::new_v4().simple());
        if let Ok(url) = std::env::var(POSTGRES_URL) {
            let admin: PgConnectOptions = url.parse().context(POSTGRES_URL)?;
            execute(&admin, &format!("CREATE DATABASE {name} TEMPLATE {template}")).await?;
            return Ok(Self { connect: admin.database(&name), name, server: None });
        }
        let scratch = Scratch::new()?;
        let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
        let connect = server.database(&name).await?;
        Ok(Self { connect, name, server: Some((server, scratch)) })
    }

    /// Creates an empty database on this server.
    pub async fn on(server: &LocalPostgres) -> Result<Self> {
        let name = format!("test_{}", Uuid::new_v4().simple());
        Ok(Self { connect: server.database(&name).await?, name, server: None })
    }

    /// An existing database on another server.
    #[must_use]
    pub(crate) fn existing(connect: PgConnectOptions, name: String) -> Self {
        Self { connect, name, server: None }
    }

    /// Its URL.
    #[must_use]
    pub fn url(&self) -> String {
        self.connect.to_url_lossy().to_string()
    }

    /// Its name on the server.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Executes statements without results.
    pub async fn execute(&self, statements: &str) -> Result<()> {
        let mut connection = self.connection().await?;
        sqlx::raw_sql(AssertSqlSafe(statements.to_owned())).execute(&mut connection).await?;
        connection.close().await?;
        Ok(())
    }

    /// Opens a separate connection.
    pub async fn connection(&self) -> Result<PgConnection> {
        Ok(PgConnection::connect_with(&self.connect).await?)
    }

    /// Opens the database as a store.
    pub async fn store(&self) -> Result<Store> {
        let mut options = Options::from_url(&self.url())?;
        options.max_connections = std::num::NonZeroU32::new(8);
        Ok(Store::connect(options).await?)
    }

    /// Counts the rows of every table in the catalogue. Those of partitions count for their table.
    pub async fn row_counts(&self) -> Result<Vec<(String, i64)>> {
        let mut connection = PgConnection::connect_with(&self.connect).await?;
        let mut counts = Vec::new();
        for table in tables(&mut connection).await? {
            let count = AssertSqlSafe(format!("SELECT count(*) FROM {table}"));
            counts.push((table, sqlx::query_scalar(count).fetch_one(&mut connection).await?));
        }
        connection.close().await?;
        Ok(counts)
    }

    /// Returns every row of every table as text. Values of type `bytea` are hexadecimal.
    pub async fn dump(&self) -> Result<String> {
        let mut connection = PgConnection::connect_with(&self.connect).await?;
        let mut rows: Vec<String> = Vec::new();
        for table in tables(&mut connection).await? {
            let all = AssertSqlSafe(format!("SELECT t::text FROM {table} t"));
            rows.extend(sqlx::query_scalar(all).fetch_all(&mut connection).await?);
        }
        connection.close().await?;
        Ok(rows.join("\n"))
    }

    /// Runs a query that returns one number.
    pub async fn number(&self, query: &'static str) -> Result<i64> {
        let mut connection = PgConnection::connect_with(&self.connect).await?;
        let number = sqlx::query_scalar(query).fetch_one(&mut connection).await?;
        connection.close().await?;
        Ok(number)
    }

    /// Drops the database.
    pub async fn end(self) -> Result<()> {
        match self.server {
            Some((server, scratch)) => {
                server.stop().await?;
                drop(scratch);
            }
            None => {
                let admin = self.connect.database("postgres");
                execute(&admin, &format!("DROP DATABASE {} WITH (FORCE)", self.name)).await?;
            }
        }
        Ok(())
    }
}

/// Creates the database that [`Database::migrated`] copies, unless another test has.
async fn create_template(admin: &PgConnectOptions) -> Result<()> {
    const READY: &str =
        "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1 AND datistemplate)";
    let mut connection = PgConnection::connect_with(admin).await?;
    let mut ready: bool =
        sqlx::query_scalar(READY).bind(TEMPLATE).fetch_one(&mut connection).await?;
    if !ready {
        // The end of the connection releases the lock.
        sqlx::query("SELECT pg_advisory_lock(1)").execute(&mut connection).await?;
        ready = sqlx::query_scalar(READY).bind(TEMPLATE).fetch_one(&mut connection).await?;
    }
    if !ready {
        // A test that was killed may have left it without all migrations.
        execute(admin, &format!("DROP DATABASE IF EXISTS {TEMPLATE} WITH (FORCE)")).await?;
        execute(admin, &format!("CREATE DATABASE {TEMPLATE}")).await?;
        let template = Database::existing(admin.clone().database(TEMPLATE), TEMPLATE.to_owned());
        let store = template.store().await?;
        store.migrate().await?;
        store.close().await;
        execute(admin, &format!("ALTER DATABASE {TEMPLATE} IS_TEMPLATE true")).await?;
    }
    connection.close().await?;
    Ok(())
}

async fn tables(connection: &mut PgConnection) -> Result<Vec<String>> {
    // Not partitions: upkeep makes some at any time.
    let names =
        "SELECT c.relname::text FROM pg_class c WHERE c.relnamespace = 'public'::regnamespace
             AND c.relkind IN ('r', 'p', 'v') AND NOT c.relispartition ORDER BY 1";
    Ok(sqlx::query_scalar(names).fetch_all(connection).await?)
}

async fn execute(options: &PgConnectOptions, statement: &str) -> Result<()> {
    let mut connection = PgConnection::connect_with(options).await?;
    sqlx::query(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await?;
    connection.close().await?;
    Ok(())
}
