//! A tenant that fills its quota of disk space, and a worker that keeps a reserve, while others
//! work.

use std::time::Duration;

use anyhow::{Context, Result};
use codelia_proto::v1::{
    LimitExceeded, ListSessionsRequest, ListWorkersRequest, QuotaUsage, RemoveFileRequest,
    WhoAmIRequest, WriteFileOpen, WriteFileRequest, outcome::Kind, write_file_request,
};
use codelia_store::{EventKind, Quotas};
use codelia_tests::{
    Client, Cluster, ClusterOptions, Exec, eventually, recorded_events, refusal, shell,
};
use futures::future::try_join_all;
use rustix::process::Signal;
use tonic::{Code, Status};

const MIB: i64 = 1024 * 1024;
const SESSIONS: usize = 20;
/// Grows until it is stopped.
const FILL: &str = "while :; do head -c 1048576 /dev/zero >> filler; sleep 0.05; done";

async fn usage(client: &Client) -> Result<QuotaUsage> {
    let me = client.info().who_am_i(WhoAmIRequest {}).await?.into_inner();
    me.tenant.and_then(|tenant| tenant.usage).context("usage")
}

fn assert_disk_quota<T: std::fmt::Debug>(result: Result<T, Status>) {
    let status = result.expect_err("over the quota");
    let refused = refusal(&status);
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::ResourceExhausted, "QUOTA_EXCEEDED")
    );
    assert!(refused.quotas.iter().any(|name| name == "disk_bytes"), "{refused:?}");
    assert!(status.message().contains("codelia rm"), "says what to do: {}", status.message());
}

async fn remove(client: &Client, session: &str, path: &str) -> Result<(), Status> {
    let (parent, path) = (session.to_owned(), path.to_owned());
    client.files().remove_file(RemoveFileRequest { parent, path, recursive: false }).await.map(drop)
}

/// Kind, field and percent of the tenant's events about quotas, oldest first.
async fn quota_events(cluster: &Cluster, tenant: &str) -> Result<Vec<(EventKind, i64)>> {
    let events = recorded_events(&cluster.store, &tenant.parse()?, None).await?;
    let of_quota = events.into_iter().rev().filter(|event| {
        let is_limit = matches!(event.body.kind, EventKind::LimitNear | EventKind::LimitReached);
        is_limit && event.body.field.as_deref() == Some("quotas.disk_bytes")
    });
    Ok(of_quota
        .map(|event| (event.body.kind, event.body.detail["percent"].as_i64().unwrap_or(0)))
        .collect())
}

#[tokio::test]
async fn full_tenant_leaves_others_working() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: SESSIONS + 4, ..ClusterOptions::default() })
            .await?;
    let quota = 100 * MIB;
    let filler =
        cluster.tenant_with("filler", Quotas { disk_bytes: quota, ..Quotas::default() }).await?;
    let neighbour = cluster.tenant("neighbour").await?;
    let other = neighbour.session().await?;
    let mut steady = Exec::start(
        &neighbour,
        shell(&other.name, "until [ -e done ]; do sleep 0.05; done; echo survived"),
    )
    .await?;
    steady.until_started().await?;

    let sessions = try_join_all((0..SESSIONS).map(|_| filler.session())).await?;
    let runs =
        try_join_all(sessions.iter().map(|session| filler.start(shell(&session.name, FILL))))
            .await?;
    let mut latencies = Vec::new();
    let neighbours = async {
        loop {
            let begun = tokio::time::Instant::now();
            neighbour.exec(&other.name, "echo again > file; cat file").await?;
            neighbour.put(&other.name, "put", "text").await?;
            latencies.push(begun.elapsed());
            let ended = cluster.store.tenant_usage(&"filler".parse()?).await?.concurrent_runs == 0;
            if ended {
                return Ok::<_, anyhow::Error>(());
            }
        }
    };
    codelia_tests::within("the runs of the full tenant are stopped", neighbours).await?;
    for run in &runs {
        let outcome = filler.get_run(&run.name).await?.outcome.and_then(|outcome| outcome.kind);
        assert_eq!(outcome, Some(Kind::Limit(LimitExceeded { resource: "disk_bytes".into() })));
    }
    let used = usage(&filler).await?.disk_bytes;
    let slowest = latencies.iter().max().copied().unwrap_or(Duration::ZERO);
    println!(
        "quota {} MiB, used {} MiB, neighbour: {} rounds, slowest {slowest:?}",
        quota / MIB,
        used / MIB,
        latencies.len()
    );
    assert!(used >= quota, "{used}");
    assert!(used < quota + 1024 * MIB, "stopped soon after the quota was reached: {used}");

    // Nothing more for this tenant, and everything for the other.
    let name = &sessions[0].name;
    // The api may still have the sums of a moment ago.
    let start = || async { filler.start(shell(name, "true")).await.err() };
    assert_disk_quota::<()>(Err(eventually("the api sees the quota", start).await));
    assert_disk_quota(filler.session().await);
    assert_disk_quota(filler.put(name, "more", "text").await);
    neighbour.session().await?;
    assert_eq!(neighbour.exec(&other.name, "cat put").await?.stdout_text(), "text");
    neighbour.put(&other.name, "done", "").await?;
    assert_eq!(steady.finish().await?.stdout_text(), "survived\n");
    let expected = [(EventKind::LimitNear, 80), (EventKind::LimitReached, 100)];
    assert_eq!(quota_events(&cluster, "filler").await?, expected);

    // What it removes is room again.
    for session in &sessions {
        remove(&filler, &session.name, "filler").await?;
    }
    eventually("the tenant has room", || async { filler.put(name, "more", "text").await.ok() })
        .await;
    for session in &sessions {
        filler.close(&session.name).await?;
    }
    eventually("nothing counts", || async {
        (usage(&filler).await.ok()?.disk_bytes == 0).then_some(())
    })
    .await;
    assert_eq!(quota_events(&cluster, "filler").await?, expected, "no crossing twice");
    cluster.end().await
}

#[tokio::test]
async fn upload_ends_when_the_quota_is_reached() -> Result<()> {
    let cluster = Cluster::start().await?;
    let quota = Quotas { disk_bytes: 20 * MIB, ..Quotas::default() };
    let client = cluster.tenant_with("a", quota).await?;
    let (session, other) = (client.session().await?, client.session().await?);
    let (sender, messages) = tokio::sync::mpsc::channel(1);
    let open =
        WriteFileOpen { parent: session.name.clone(), path: "file".into(), ..Default::default() };
    sender.send(WriteFileRequest { kind: Some(write_file_request::Kind::Open(open)) }).await?;
    let mut files = client.files();
    let upload = async {
        let written = files.write_file(tokio_stream::wrappers::ReceiverStream::new(messages)).await;
        written.expect_err("the quota is reached")
    };
    // The upload is open, and another session fills the quota.
    let fill = async {
        client.exec(&other.name, FILL).await?;
        loop {
            let data = write_file_request::Kind::Data(vec![0; 4096].into());
            if sender.send(WriteFileRequest { kind: Some(data) }).await.is_err() {
                return Ok::<_, anyhow::Error>(());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let (status, filled) =
        codelia_tests::within("the upload ends", async { tokio::join!(upload, fill) }).await;
    filled?;
    let refused = refusal(&status);
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::ResourceExhausted, "QUOTA_EXCEEDED")
    );
    assert_eq!(
        client.get(&session.name, "file").await.expect_err("not published").code(),
        Code::NotFound
    );
    cluster.end().await
}

#[tokio::test]
async fn session_shows_what_its_files_use() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    client.exec(&session.name, "head -c 3145728 /dev/zero > three; touch a b c").await?;
    let disk = eventually("the usage is stored", || async {
        let disk = client.get_session(&session.name).await.ok()?.disk?;
        (disk.used_bytes >= 3 * MIB).then_some(disk)
    })
    .await;
    assert!(disk.used_inodes >= 4 && disk.measure_time.is_some(), "{disk:?}");
    assert!(
        ["scan", "project_quota", "user_quota", "image"].contains(&disk.mechanism.as_str()),
        "{disk:?}"
    );
    let listed =
        client.sessions().list_sessions(ListSessionsRequest::default()).await?.into_inner();
    assert_eq!(listed.sessions[0].disk, Some(disk.clone()));
    assert_eq!(usage(&client).await?.disk_bytes, disk.used_bytes);

    let shown =
        cluster.cli(&client, &["session", "show", &session.session_id, "--json"]).output()?;
    let shown: serde_json::Value = serde_json::from_slice(&shown.stdout)?;
    assert_eq!(shown["disk"]["usedBytes"], disk.used_bytes.to_string());
    let me = cluster.cli(&client, &["whoami", "--json"]).output()?;
    let me: serde_json::Value = serde_json::from_slice(&me.stdout)?;
    assert_eq!(
        (&me["tenant"]["usage"]["diskBytes"], &me["tenant"]["quotas"]["diskBytes"]),
        (&disk.used_bytes.to_string().into(), &(100 * 1024 * MIB).to_string().into())
    );
    remove(&client, &session.name, "three").await?;
    eventually("the usage falls", || async {
        let disk = client.get_session(&session.name).await.ok()?.disk?;
        (disk.used_bytes < 3 * MIB).then_some(())
    })
    .await;
    cluster.end().await
}

#[tokio::test]
async fn session_crosses_its_limit_once() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let limits = codelia_proto::v1::Limits { disk_bytes: Some(50 * MIB), ..Default::default() };
    let request =
        codelia_proto::v1::CreateSessionRequest { limits: Some(limits), ..Default::default() };
    let session = client.create(request).await?;
    let filled = client.exec(&session.name, FILL).await?;
    assert_eq!(filled.outcome(), Kind::Limit(LimitExceeded { resource: "disk_bytes".into() }));
    let events = eventually("both events are recorded", || async {
        let events = recorded_events(&cluster.store, &"a".parse().ok()?, None).await.ok()?;
        let of_limit: Vec<_> = events
            .iter()
            .rev()
            .filter(|event| event.body.field.as_deref() == Some("limits.disk_bytes"))
            .map(|event| (event.body.kind, event.subject.session.map(|id| id.to_string())))
            .collect();
        (of_limit.len() >= 2).then_some(of_limit)
    })
    .await;
    let id = Some(session.session_id.clone());
    assert_eq!(events, [(EventKind::LimitNear, id.clone()), (EventKind::LimitReached, id)]);
    cluster.end().await
}

#[tokio::test]
async fn reserve_of_worker_bites() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let operator = cluster.operator().await?;
    let session = client.session().await?;
    client.exec(&session.name, "echo kept > file").await?;
    let first = &mut cluster.workers[0].process;
    first.signal(Signal::TERM)?;
    first.exited().await?;
    // More than any disk has.
    cluster.restart_worker_with(0, &[("CODELIA_WORKER_DISK_RESERVE", "1000000 TiB")]).await?;
    eventually("the worker reports that it is short", || async {
        let workers =
            operator.admin().list_workers(ListWorkersRequest::default()).await.ok()?.into_inner();
        let disk = workers.workers.first()?.disk?;
        (disk.short && disk.free_bytes < disk.reserve_bytes).then_some(())
    })
    .await;
    let refused = client.exec(&session.name, "true").await?.outcome();
    assert!(matches!(&refused, Kind::Refused(it) if it.reason == "DISK_FULL"), "{refused:?}");
    assert!(
        matches!(&refused, Kind::Refused(it) if it.message.contains("disk_reserve")),
        "{refused:?}"
    );
    let put = refusal(&client.put(&session.name, "more", "text").await.expect_err("no space"));
    assert_eq!((put.code, put.reason.as_str()), (Code::ResourceExhausted, "DISK_FULL"));
    assert_eq!(client.get(&session.name, "file").await?, "kept\n");
    remove(&client, &session.name, "file").await?;

    // Another worker takes new sessions.
    cluster.add_worker().await?;
    for _ in 0..4 {
        let other = client.session().await?;
        assert_eq!(client.exec(&other.name, "echo there").await?.stdout_text(), "there\n");
        assert_eq!(client.get_session(&other.name).await?.worker_id, "worker-1");
    }
    let shown = cluster.cli(&operator, &["workers", "list"]).output()?;
    let shown = String::from_utf8(shown.stdout)?;
    assert!(shown.lines().any(|line| line.contains("worker-0") && line.contains('!')), "{shown}");
    cluster.end().await
}
