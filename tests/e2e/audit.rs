//! The audit as operators and tenants use it: listed, verified, and whole after `kill -9`.

use std::{collections::BTreeSet, fs, os::unix::fs::PermissionsExt};

use anyhow::{Context, Result};
use codelia_proto::v1::{AuditEvent, ListEventsRequest, VerifyEventsRequest, VerifyEventsResponse};
use codelia_store::{Scope, SecretKey};
use codelia_tests::{Client, Cluster, ClusterOptions, Scratch, eventually, refusal};
use futures::future::join_all;
use rustix::process::Signal;
use tonic::{Code, Status};

/// A cluster whose processes share a key.
async fn signed_cluster(scratch: &Scratch, workers: usize) -> Result<Cluster> {
    let path = scratch.join("secrets.key");
    fs::write(&path, SecretKey::generate()?)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    let settings = vec![("CODELIA_SECRETS_KEY_FILE", path.display().to_string())];
    Cluster::start_with(ClusterOptions { settings, workers, ..ClusterOptions::default() }).await
}

async fn verify(operator: &Client) -> Result<VerifyEventsResponse, Status> {
    let mut responses = operator.audit().verify_events(VerifyEventsRequest {}).await?.into_inner();
    let mut last = VerifyEventsResponse::default();
    while let Some(response) = responses.message().await? {
        last = response;
    }
    Ok(last)
}

async fn list(client: &Client, parent: &str, kind: &str) -> Result<Vec<AuditEvent>, Status> {
    let request = ListEventsRequest {
        parent: parent.to_owned(),
        kind: kind.to_owned(),
        page_size: 1000,
        ..ListEventsRequest::default()
    };
    Ok(client.audit().list_events(request).await?.into_inner().events)
}

#[tokio::test]
async fn runs_are_listed_and_verified() -> Result<()> {
    let scratch = Scratch::new()?;
    let cluster = signed_cluster(&scratch, 1).await?;
    let (client, other) = (cluster.tenant("a").await?, cluster.tenant("b").await?);
    let operator = cluster.operator().await?;
    let session = client.session().await?;
    client.exec(&session.name, "echo --password hush; exit 3").await?;

    let events = list(&client, &session.name, "").await?;
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["RUN_ENDED", "RUN_ADMITTED", "SESSION_CREATED"]);
    assert!(events[0].detail.contains(r#""exit_code":3"#), "{}", events[0].detail);
    assert!(events[1].detail.contains("command_sha256") && !events[1].key_id.is_empty(), "{:?}", events[1]);
    assert!(
        events[1].detail.contains("[redacted]") && !format!("{events:?}").contains("hush"),
        "{:?}",
        events[1]
    );
    let foreign = list(&other, &session.name, "").await.expect_err("another tenant sees nothing");
    assert_eq!(refusal(&foreign).code, Code::NotFound);
    assert!(list(&other, "sessions/-", "RUN_ENDED").await?.is_empty());

    let report = eventually("everything is in a checkpoint", || async {
        verify(&operator).await.ok().filter(|report| report.unlisted_events == 0)
    })
    .await;
    assert!(report.done && report.events >= 3, "{report:?}");
    // The tenants were made by a process without the key, before anything was signed.
    assert_eq!(report.problem_count, 0, "{report:?}");

    let run = client.with_secret(&cluster.key("a", &[Scope::Run]).await?)?;
    for denied in [list(&run, "sessions/-", "").await.map(drop), verify(&client).await.map(drop)] {
        assert_eq!(refusal(&denied.expect_err("without the scope")).code, Code::PermissionDenied);
    }
    let shown = cluster.cli(&operator, &["audit", "verify"]).output()?;
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let shown =
        String::from_utf8(cluster.cli(&client, &["audit", "--kind", "RUN_ADMITTED"]).output()?.stdout)?;
    assert!(shown.contains("RUN_ADMITTED") && !shown.contains("SESSION_CREATED"), "{shown}");

    // A change of the database is found, also by the command.
    let tamper =
        "SET session_replication_role = replica; UPDATE audit SET detail = '{}' WHERE kind = 'RUN_ENDED'";
    cluster.database.execute(tamper).await?;
    let report = verify(&operator).await?;
    assert_eq!(report.problem_count, 1, "{report:?}");
    let shown = cluster.cli(&operator, &["audit", "verify"]).output()?;
    assert_eq!(shown.status.code(), Some(1), "{shown:?}");
    assert!(String::from_utf8(shown.stdout)?.contains("was changed"), "the problem is printed");
    cluster.end().await
}

#[tokio::test]
async fn killed_processes_leave_a_valid_audit() -> Result<()> {
    let scratch = Scratch::new()?;
    let mut cluster = signed_cluster(&scratch, 2).await?;
    cluster.add_api().await?;
    let operator = cluster.operator().await?;
    let client = cluster.tenant("a").await?;
    let second = Client::connect(&cluster.endpoint(1), &client.secret).await?;
    for round in 0..3 {
        let clients = [&client, &second];
        let load = (0..40).map(|number| {
            let client = clients[number % 2];
            async move {
                let session = client.session().await?;
                client.exec(&session.name, "true").await.map(drop)
            }
        });
        // With entries that no checkpoint has yet.
        let admitted = "SELECT count(*) FROM audit WHERE kind = 'RUN_ADMITTED'";
        let before = cluster.database.number(admitted).await?;
        let (database, worker, api) =
            (&cluster.database, &mut cluster.workers[round % 2].process, &mut cluster.apis[1].process);
        let kill = async {
            eventually("runs were admitted", || async {
                (database.number(admitted).await.ok()? > before + 5).then_some(())
            })
            .await;
            worker.signal(Signal::KILL)?;
            api.signal(Signal::KILL)?;
            worker.exited().await?;
            api.exited().await
        };
        let (results, killed) = tokio::join!(join_all(load), kill);
        killed?;
        assert!(results.iter().any(|result: &Result<()>| result.is_err()), "the load met no kill");
        cluster.restart_worker(round % 2).await?;
        cluster.restart_api(1).await?;
    }
    let report = verify(&operator).await?;
    assert_eq!(report.problem_count, 0, "{report:?}");
    assert!(report.writers >= 6, "each process that was started is a writer: {report:?}");
    // Whatever is recorded as a run was audited.
    let runs: BTreeSet<String> =
        list(&client, "sessions/-", "RUN_ADMITTED").await?.into_iter().map(|event| event.run_id).collect();
    let recorded = cluster.database.number("SELECT count(*) FROM runs").await?;
    assert_eq!(i64::try_from(runs.len())?, recorded, "a run without its entry");
    cluster.end().await.context("leftovers")
}
