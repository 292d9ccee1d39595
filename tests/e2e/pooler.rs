//! An installation whose database connections go through PgBouncer in transaction mode.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CancelRunRequest, Canceled, ListRunsRequest, ListSessionsRequest, Lost,
    outcome::Kind::{self, Exited},
};
use codelia_store::{AuditFilter, Error, LocalPostgres, Pooler};
use codelia_tests::{
    Cluster, ClusterOptions, Database, Exec, PgBouncer, Scratch, eventually, shell,
};
use futures::future::try_join_all;
use rustix::process::Signal;

#[tokio::test]
async fn runs_cancels_lists_and_takeover_through_pgbouncer() -> Result<()> {
    if !PgBouncer::is_available() {
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let none =
        ClusterOptions { apis: 0, workers: 0, shared_root: true, slots: 2, ..Default::default() };
    let mut cluster = Cluster::start_on(Database::on(&server).await?, none).await?;
    let bouncer = PgBouncer::start(&scratch.join("postgres"), &scratch.join("bouncer"))?;
    let url = bouncer.url(cluster.database.name());
    let settings =
        [("CODELIA_DATABASE_URL", url.as_str()), ("CODELIA_DATABASE_POOLER", "transaction")];
    for _ in 0..2 {
        cluster.add_worker_with(&settings).await?;
        cluster.add_api_with(&settings).await?;
    }
    let client = cluster.tenant("a").await?;

    // More sessions and calls at the same time than server connections.
    let runs = (0..12).map(|number| {
        let client = &client;
        async move {
            let session = client.session().await?;
            let seen = client.exec(&session.name, &format!("echo {number}; exit {number}")).await?;
            assert_eq!(
                (seen.stdout_text(), seen.outcome()),
                (format!("{number}\n"), Exited(number))
            );
            anyhow::Ok(session)
        }
    });
    let sessions = try_join_all(runs).await?;
    let listed = client
        .runs()
        .list_runs(ListRunsRequest { parent: "sessions/-".into(), ..Default::default() })
        .await?
        .into_inner();
    assert_eq!(listed.runs.len(), 12);
    let listed =
        client.sessions().list_sessions(ListSessionsRequest::default()).await?.into_inner();
    assert_eq!(listed.sessions.len(), 12);

    let session = &sessions[0].name;
    let mut waiting = Exec::start(&client, shell(session, "sleep 1000")).await?;
    waiting.until_started().await?;
    let name = waiting.transcript.queued.as_ref().context("queued")?.name.clone();
    client.runs().cancel_run(CancelRunRequest { name, ..Default::default() }).await?;
    assert_eq!(waiting.finish().await?.outcome(), Kind::Canceled(Canceled::default()));

    let mut lost = Exec::start(&client, shell(session, "echo here; sleep 1000")).await?;
    lost.until_stdout("here").await?;
    let name = lost.transcript.queued.as_ref().context("queued")?.name.clone();
    let dead = client.get_run(&name).await?.worker_id;
    cluster.worker(&dead).process.signal(Signal::KILL)?;
    cluster.worker(&dead).process.exited().await?;
    assert_eq!(
        client.watch_to_end(&name, 0).await?.outcome(),
        Kind::Lost(Lost { reason: "worker_lost".into() })
    );
    let next = client.exec(session, "echo again").await?;
    assert_eq!((next.outcome(), next.run().worker_id == dead), (Exited(0), false));

    cluster.end().await?;
    bouncer.stop().await?;
    server.stop().await?;
    drop(scratch);
    Ok(())
}

#[tokio::test]
async fn pooler_keeps_timeouts_and_refuses_migrations() -> Result<()> {
    if !PgBouncer::is_available() {
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let server = LocalPostgres::start_throwaway(&scratch.join("postgres")).await?;
    let database = Database::on(&server).await?;
    let bouncer = PgBouncer::start(&scratch.join("postgres"), &scratch.join("bouncer"))?;
    let store = eventually("PgBouncer answers", || async {
        bouncer.store(database.name(), Pooler::Transaction).await.ok()
    })
    .await;
    assert!(
        bouncer.store(database.name(), Pooler::None).await.is_err(),
        "the control: it keeps no state"
    );
    assert!(matches!(store.migrate().await, Err(Error::MigrateThroughPooler)));
    let direct = database.store().await?;
    direct.migrate().await?;
    assert_eq!(store.migrate().await?, 0, "nothing is missing");

    let mut blocker = database.connection().await?;
    sqlx::raw_sql("BEGIN; LOCK TABLE audit").execute(&mut blocker).await?;
    let tenant = "a".parse()?;
    let list = store.audit_list(Some(&tenant), &AuditFilter::default(), 10).await;
    assert!(matches!(list, Err(Error::LockTimeout(_))), "{list:?}");
    sqlx::raw_sql("ROLLBACK").execute(&mut blocker).await?;
    assert_eq!(store.audit_list(Some(&tenant), &AuditFilter::default(), 10).await?.len(), 0);
    sqlx::Connection::close(blocker).await?;

    store.close().await;
    direct.close().await;
    bouncer.stop().await?;
    server.stop().await?;
    drop(scratch);
    Ok(())
}
