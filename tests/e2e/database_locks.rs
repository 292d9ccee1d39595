//! Slow statements and table locks: they cost neither a neighbour its runs nor a worker its lease.

use anyhow::{Context, Result};
use codelia_proto::v1::{ListKeysRequest, ListKeysResponse, outcome::Kind::Exited};
use codelia_store::LocalPostgres;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Database, Exec, Proxy, Replacement, Scratch,
    WORKER_LEASE_SECONDS, eventually, refusal, shell,
};
use futures::{
    future::{Either, join_all, select},
    pin_mut,
};
use sqlx::{Connection, PgConnection};

/// Makes lists of keys wait for an advisory lock.
const SLOW_LIST: [Replacement; 1] = [(
    "tenant_id = $1 AND ($2::uuid IS NULL OR id > $2)",
    "tenant_id=$1 AND pg_advisory_xact_lock(7)IS NULL",
)];

/// An installation where lists of keys end only when the test releases a lock.
struct SlowLists {
    cluster: Cluster,
    lock: PgConnection,
    proxy: Proxy,
    server: LocalPostgres,
    scratch: Scratch,
}

impl SlowLists {
    async fn new(settings: &[(&str, &str)]) -> Result<Self> {
        let scratch = Scratch::new()?;
        let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
        let no_api = ClusterOptions { apis: 0, ..ClusterOptions::default() };
        let mut cluster = Cluster::start_on(Database::on(&server).await?, no_api).await?;
        let proxy = Proxy::start(&scratch.join("postgres"), &SLOW_LIST)?;
        let url =
            format!("postgres://codelia@127.0.0.1:{}/{}", proxy.port(), cluster.database.name());
        let settings = [settings, &[("CODELIA_DATABASE_URL", &url)]].concat();
        cluster.add_api_with(&settings).await?;
        let lock = hold(&cluster.database, "SELECT pg_advisory_xact_lock(7)").await?;
        Ok(Self { cluster, lock, proxy, server, scratch })
    }

    async fn end(self) -> Result<()> {
        assert!(self.proxy.replaced() > 0, "the lists were slow");
        release(self.lock).await?;
        self.cluster.end().await?;
        self.server.stop().await?;
        drop(self.scratch);
        Ok(())
    }
}

async fn list(client: &Client) -> Result<ListKeysResponse, tonic::Status> {
    let request = ListKeysRequest { parent: "tenants/-".into(), ..Default::default() };
    Ok(client.admin().list_keys(request).await?.into_inner())
}

/// Takes a lock in a transaction that stays open.
async fn hold(database: &Database, lock: &'static str) -> Result<PgConnection> {
    let mut connection = database.connection().await?;
    sqlx::raw_sql("BEGIN").execute(&mut connection).await?;
    sqlx::raw_sql(lock).execute(&mut connection).await?;
    Ok(connection)
}

async fn release(mut connection: PgConnection) -> Result<()> {
    sqlx::raw_sql("ROLLBACK").execute(&mut connection).await?;
    Ok(connection.close().await?)
}

async fn lease_losses(cluster: &Cluster) -> Result<i64> {
    cluster.database.number("SELECT count(*) FROM audit WHERE kind = 'WORKER_FENCED'").await
}

#[tokio::test]
async fn slow_lists_cost_neighbour_nothing() -> Result<()> {
    const HOUR: &str = "1h";
    let patient =
        [("CODELIA_DATABASE_READ_TIMEOUT", HOUR), ("CODELIA_DATABASE_LOCK_TIMEOUT", HOUR)];
    let slow = SlowLists::new(&patient).await?;
    let cluster = &slow.cluster;
    let (lister, neighbour) = (cluster.tenant("a").await?, cluster.tenant("b").await?);
    let session = neighbour.session().await?;
    let run = async {
        eventually("all connections for lists are busy", || async {
            let waiting = "SELECT count(*) FROM pg_stat_activity
                           WHERE wait_event_type = 'Lock' AND datname = current_database()";
            (cluster.database.number(waiting).await.ok()? >= 4).then_some(())
        })
        .await;
        lease_outlives(cluster, WORKER_LEASE_SECONDS).await;
        neighbour.exec(&session.name, "echo fast").await
    };
    {
        let lists = join_all((0..20).map(|_| list(&lister)));
        pin_mut!(lists, run);
        let Either::Right((seen, _)) = select(lists, run).await else {
            panic!("the lists ended first")
        };
        assert_eq!(seen?.outcome(), Exited(0));
    }
    assert_eq!(lease_losses(cluster).await?, 0);
    slow.end().await
}

/// Waits until the worker's lease ends this many seconds after the longest lease of now.
async fn lease_outlives(cluster: &Cluster, seconds: u64) {
    let until = "SELECT max(extract(epoch FROM lease_until))::bigint FROM workers";
    let before = cluster.database.number(until).await.unwrap_or(i64::MAX);
    eventually("the lease is renewed", || async {
        (cluster.database.number(until).await.ok()? > before + seconds.cast_signed()).then_some(())
    })
    .await;
}

#[tokio::test]
async fn lock_on_runs_costs_no_lease() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "echo here; until [ -e go ]; do sleep 0.02; done; echo done";
    let mut exec = Exec::start(&client, shell(&session.name, script)).await?;
    exec.until_stdout("here").await?;
    let lock = hold(&cluster.database, "LOCK TABLE runs").await?;
    for directory in cluster.session_directories()? {
        std::fs::write(directory.join("go"), "")?;
    }
    lease_outlives(&cluster, 3 * WORKER_LEASE_SECONDS).await;
    let log = &cluster.workers[0].process;
    eventually("the commit is retried", || async {
        let lines = log.read_log();
        lines.lines().any(|line| line.contains("retrying") && line.contains("commit")).then_some(())
    })
    .await;
    let refused =
        client.start(shell(&session.name, "true")).await.err().context("the table is locked")?;
    assert_eq!(refusal(&refused).reason, "UNAVAILABLE");
    release(lock).await?;
    let seen = exec.finish().await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("here\ndone\n", Exited(0)));
    assert_eq!(lease_losses(&cluster).await?, 0);
    cluster.end().await
}

#[tokio::test]
async fn slow_list_is_cut_with_remedy() -> Result<()> {
    let slow = SlowLists::new(&[("CODELIA_DATABASE_READ_TIMEOUT", "200ms")]).await?;
    let client = slow.cluster.tenant("a").await?;
    let error = list(&client).await.err().context("the list is cut")?;
    let refusal = refusal(&error);
    assert_eq!(refusal.reason, "QUERY_TIMEOUT");
    assert!(
        refusal.retry_after.is_some() && error.message().contains("a smaller page"),
        "{error:?}"
    );
    slow.end().await
}
