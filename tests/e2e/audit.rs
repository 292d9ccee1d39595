//! The audit as operators and tenants use it: listed, verified, and whole after `kill -9`.

use std::{
    collections::BTreeSet,
    env, fs,
    os::unix::fs::PermissionsExt,
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use codelia_proto::v1::{
    AuditEvent, CloseSessionRequest, CreateTenantRequest, ListEventsRequest, Quotas,
    UpdateQuotasRequest, VerifyEventsRequest, VerifyEventsResponse,
};
use codelia_store::{Scope, SecretKey};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, Scratch, eventually, refusal};
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
    assert!(
        events[1].detail.contains("command_sha256") && !events[1].key_id.is_empty(),
        "{:?}",
        events[1]
    );
    assert!(
        events[1].detail.contains("[redacted]") && !format!("{events:?}").contains("hush"),
        "{:?}",
        events[1]
    );
    let foreign = list(&other, &session.name, "").await.expect_err("another tenant sees nothing");
    assert_eq!(refusal(&foreign).code, Code::NotFound);
    assert!(list(&other, "sessions/-", "RUN_ENDED").await?.is_empty());

    // What gets into a checkpoint while it is verified is counted by the next one.
    let report = eventually("everything is in a checkpoint", || async {
        verify(&operator)
            .await
            .ok()
            .filter(|report| report.unlisted_events == 0 && report.events >= 3)
    })
    .await;
    assert!(report.done, "{report:?}");
    // The tenants were made by a process without the key, before anything was signed.
    assert_eq!(report.problem_count, 0, "{report:?}");

    let run = client.with_secret(&cluster.key("a", &[Scope::Run]).await?)?;
    for denied in [list(&run, "sessions/-", "").await.map(drop), verify(&client).await.map(drop)] {
        assert_eq!(refusal(&denied.expect_err("without the scope")).code, Code::PermissionDenied);
    }
    let shown = cluster.cli(&operator, &["audit", "verify"]).output()?;
    assert!(shown.status.success(), "{}", String::from_utf8_lossy(&shown.stderr));
    let shown = String::from_utf8(
        cluster.cli(&client, &["audit", "--kind", "RUN_ADMITTED"]).output()?.stdout,
    )?;
    assert!(shown.contains("RUN_ADMITTED") && !shown.contains("SESSION_CREATED"), "{shown}");

    // A change of the database is found, also by the command.
    let tamper = "SET session_replication_role = replica; UPDATE audit SET detail = '{}' WHERE kind = 'RUN_ENDED'";
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
        // With events that no checkpoint has yet.
        let admitted = "SELECT count(*) FROM audit WHERE kind = 'RUN_ADMITTED'";
        let before = cluster.database.number(admitted).await?;
        let (database, worker, api) = (
            &cluster.database,
            &mut cluster.workers[round % 2].process,
            &mut cluster.apis[1].process,
        );
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
    let runs: BTreeSet<String> = list(&client, "sessions/-", "RUN_ADMITTED")
        .await?
        .into_iter()
        .map(|event| event.run_id)
        .collect();
    let recorded = cluster.database.number("SELECT count(*) FROM runs").await?;
    assert_eq!(i64::try_from(runs.len())?, recorded, "a run without its event");
    cluster.end().await.context("leftovers")
}

/// Appends events until `done`: an operator's changes and runs, through one api. Calls fail while
/// that api is dead.
async fn append(operator: Client, client: Client, done: &AtomicBool) {
    let changes = async {
        while !done.load(Ordering::Relaxed) {
            let quotas = Some(Quotas { sessions: Some(1000), ..Default::default() });
            let request =
                UpdateQuotasRequest { name: "tenants/a".into(), quotas, update_mask: None };
            if operator.admin().update_quotas(request).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let runs = async {
        while !done.load(Ordering::Relaxed) {
            let Ok(session) = client.session().await else {
                tokio::time::sleep(Duration::from_millis(20)).await;
                continue;
            };
            let _ = client.exec(&session.name, "true").await;
            let _ =
                client.sessions().close_session(CloseSessionRequest { name: session.name }).await;
        }
    };
    tokio::join!(changes, runs);
}

/// Two apis and two workers append events while one after the other is killed.
/// `CODELIA_AUDIT_EVENTS` is how many.
#[tokio::test]
async fn audit_is_valid_after_many_kills() -> Result<()> {
    let wanted: i64 = env::var("CODELIA_AUDIT_EVENTS").ok().map_or(Ok(600), |text| text.parse())?;
    let scratch = Scratch::new()?;
    let mut cluster = signed_cluster(&scratch, 2).await?;
    // Restarted ones listen on the same ports.
    cluster.add_api_with(&[]).await?;
    cluster.add_api_with(&[]).await?;
    let (operator, client) = (cluster.operator().await?, cluster.tenant("a").await?);
    let mut clients = Vec::new();
    for number in [1, 2, 1, 2, 1, 2] {
        let endpoint = cluster.endpoint(number);
        let operator = Client::connect(&endpoint, &operator.secret).await?;
        clients.push((operator, Client::connect(&endpoint, &client.secret).await?));
    }
    let (done, started) = (AtomicBool::new(false), Instant::now());
    let load =
        join_all(clients.into_iter().map(|(operator, client)| append(operator, client, &done)));
    let kills = async {
        for kill in 1..=8 {
            let database = &cluster.database;
            while database.number("SELECT count(*) FROM audit").await? < wanted * kill / 8 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            let number = usize::try_from(kill / 2 % 2)?;
            let is_api = kill % 2 == 0;
            let process = match is_api {
                true => &mut cluster.apis[number + 1].process,
                false => &mut cluster.workers[number].process,
            };
            process.signal(Signal::KILL)?;
            process.exited().await?;
            match is_api {
                true => cluster.restart_api(number + 1).await?,
                false => cluster.restart_worker(number).await?,
            }
        }
        done.store(true, Ordering::Relaxed);
        anyhow::Ok(())
    };
    let (_, killed) = tokio::join!(load, kills);
    killed?;
    let (appended, started) = (started.elapsed(), Instant::now());
    let report = verify(&operator).await?;
    println!(
        "{} events in {appended:?}, verified in {:?}: {report:?}",
        report.events,
        started.elapsed()
    );
    assert_eq!(report.problem_count, 0, "{report:?}");
    assert!(report.events >= wanted && report.writers >= 8, "{report:?}");
    let ended = "SELECT count(*) FROM ended_runs r
                 LEFT JOIN (SELECT run_id, count(*) FROM audit WHERE kind = 'RUN_ENDED' GROUP BY run_id) a ON a.run_id = r.id
                 WHERE a.count IS DISTINCT FROM 1";
    assert_eq!(cluster.database.number(ended).await?, 0, "ends of runs without exactly one event");
    cluster.end().await.context("leftovers")
}

/// Inserts events at once, with times within the last second.
async fn burst(cluster: &Cluster, count: usize) -> Result<()> {
    let insert = format!(
        "INSERT INTO audit (writer, id, at, kind, tenant_id, detail)
         SELECT gen_random_uuid(), (left(run_id_at(t)::text, 14) || right(gen_random_uuid()::text, 22))::uuid, t, 'FILE_REFUSED', 'a', '{{}}'
         FROM (SELECT clock_timestamp() + number * interval '100 us' AS t FROM generate_series(1, {count}) AS number) AS times"
    );
    cluster.database.execute(&insert).await
}

#[tokio::test]
async fn follow_and_export_miss_nothing() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let mut follow = cluster
        .cli(&client, &["audit", "--follow", "--since", "1m", "--kind", "FILE_REFUSED", "--json"]);
    follow.env("NO_COLOR", "1");
    let mut follow = Process::start("follow", follow, cluster.directory())?;
    let ids = |text: &str| -> Result<Vec<String>> {
        let ids = text.lines().map(|line| -> Result<String> {
            let event: serde_json::Value = serde_json::from_str(line)?;
            Ok(event["eventId"].as_str().context("an id")?.to_owned())
        });
        ids.collect()
    };
    burst(&cluster, 2500).await?;
    burst(&cluster, 2500).await?;
    eventually("all are printed", || async {
        (follow.printed().lines().count() >= 5000).then_some(())
    })
    .await;
    let followed = ids(&follow.printed())?;
    assert_eq!(followed.len(), 5000, "each is printed once");
    assert_eq!(followed.iter().collect::<BTreeSet<_>>().len(), 5000);
    follow.signal(Signal::KILL)?;
    follow.exited().await?;

    let export = async |arguments: &[&str]| -> Result<Vec<String>> {
        let arguments = [&["audit", "--kind", "FILE_REFUSED", "--json"], arguments].concat();
        ids(&Process::finish(cluster.cli(&client, &arguments), b"").await?.stdout)
    };
    let exported = export(&["--since", "1h"]).await?;
    assert_eq!(exported.iter().collect::<BTreeSet<_>>(), followed.iter().collect());
    assert!(exported.is_sorted(), "oldest first");
    assert!(export(&["--until", "1h"]).await?.is_empty());
    assert!(
        export(&["--since", "2020-01-01T00:00:00Z", "--until", "2020-01-02T00:00:00Z"])
            .await?
            .is_empty()
    );
    cluster.end().await
}

#[tokio::test]
async fn use_and_refusal_of_keys_are_recorded() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let operator = cluster.operator().await?;
    client.session().await?;
    client.session().await?;
    let used = list(&client, "sessions/-", "KEY_USED").await?;
    assert_eq!(used.len(), 1, "once an hour: {used:?}");
    assert!(used[0].detail.contains("127.0.0.1") && !used[0].key_id.is_empty(), "{used:?}");

    let wrong = client.with_secret(&format!("cdl_{}", "A".repeat(43)))?;
    for _ in 0..50 {
        wrong.session().await.expect_err("the key is wrong");
    }
    let request = ListEventsRequest {
        parent: "sessions/-".into(),
        kind: "KEY_REFUSED".into(),
        of_installation: true,
        ..ListEventsRequest::default()
    };
    let refused = eventually("a refusal is recorded", || async {
        let events = operator.audit().list_events(request.clone()).await.ok()?.into_inner().events;
        (!events.is_empty()).then_some(events)
    })
    .await;
    assert_eq!(refused.len(), 1, "once a minute for each address: {refused:?}");
    assert!(!format!("{refused:?}").contains("cdl_"), "{refused:?}");

    // What became of a change is recorded, too.
    let create =
        || CreateTenantRequest { tenant_id: "fresh".into(), ..CreateTenantRequest::default() };
    operator.admin().create_tenant(create()).await?;
    operator.admin().create_tenant(create()).await.expect_err("it exists");
    let results = "SELECT count(*) FROM (
                       SELECT string_agg(detail::json ->> 'result', ' ' ORDER BY id) AS listed
                       FROM audit WHERE kind = 'TENANT_CREATED' AND tenant_id = 'fresh'
                   ) AS results WHERE listed = 'begun done begun TENANT_EXISTS'";
    assert_eq!(cluster.database.number(results).await?, 1);
    cluster.end().await
}
