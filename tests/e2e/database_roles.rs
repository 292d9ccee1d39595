//! An installation whose parts use database roles with few privileges.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CancelRunRequest, Canceled, ListRunsRequest, Lost,
    outcome::Kind::{self, Exited},
};
use codelia_store::{Options, Store};
use codelia_tests::{Cluster, ClusterOptions, Database, Exec, eventually, shell};
use rustix::process::Signal;

/// The URL of a database as a role. The role of the login is superuser in tests.
fn url_as(database: &Database, role: &str) -> String {
    let url = database.url();
    let separator = if url.contains('?') { '&' } else { '?' };
    format!("{url}{separator}options[role]={role}")
}

#[tokio::test]
async fn parts_work_under_their_roles() -> Result<()> {
    let database = Database::create().await?;
    // Creates the roles, as an administrator does, in another database of the server.
    let other = Database::create().await?;
    let store = other.store().await?;
    store.migrate().await?;
    store.close().await;
    other.end().await?;
    database.execute("GRANT CREATE ON SCHEMA public TO codelia_migrator").await?;
    let migrator =
        Store::connect(Options::from_url(&url_as(&database, "codelia_migrator"))?).await?;
    migrator.migrate().await?;
    migrator.close().await;

    let none =
        ClusterOptions { apis: 0, workers: 0, shared_root: true, ..ClusterOptions::default() };
    let urls = ["codelia_api", "codelia_worker"].map(|role| url_as(&database, role));
    let mut cluster = Cluster::start_on(database, none).await?;
    for _ in 0..2 {
        cluster.add_worker_with(&[("CODELIA_DATABASE_URL", &urls[1])]).await?;
    }
    cluster.add_api_with(&[("CODELIA_DATABASE_URL", &urls[0])]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let seen = client.exec(&session.name, "echo hello").await?;
    assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("hello\n", Exited(0)));

    eventually("the worker reports what the session uses", || async {
        client.get_session(&session.name).await.ok()?.disk
    })
    .await;

    let mut waiting = Exec::start(&client, shell(&session.name, "sleep 1000")).await?;
    waiting.until_started().await?;
    let name = waiting.transcript.queued.as_ref().context("queued")?.name.clone();
    client.runs().cancel_run(CancelRunRequest { name, ..Default::default() }).await?;
    assert_eq!(waiting.finish().await?.outcome(), Kind::Canceled(Canceled::default()));

    let mut lost = Exec::start(&client, shell(&session.name, "sleep 1000")).await?;
    lost.until_started().await?;
    let name = lost.transcript.queued.as_ref().context("queued")?.name.clone();
    let dead = client.get_run(&name).await?.worker_id;
    cluster.worker(&dead).process.signal(Signal::KILL)?;
    cluster.worker(&dead).process.exited().await?;
    assert_eq!(
        client.watch_to_end(&name, 0).await?.outcome(),
        Kind::Lost(Lost { reason: "worker_lost".into() })
    );
    assert_eq!(client.exec(&session.name, "true").await?.outcome(), Exited(0));
    let list = ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };
    assert_eq!(client.runs().list_runs(list).await?.into_inner().runs.len(), 4);
    client.close(&session.name).await?;

    cluster.stop_processes().await?;
    let workers = cluster.workers.iter().map(|worker| &worker.process);
    for process in workers.chain(cluster.apis.iter().map(|api| &api.process)) {
        let log = process.read_log();
        assert!(!log.contains("permission denied"), "{log}");
    }
    cluster.end().await
}
