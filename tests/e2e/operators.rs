//! What operators do to tenants and their runs.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CancelTenantRunRequest, Canceled, CreateTenantRequest, DeleteTenantRequest, GetTenantRequest,
    ListSessionsRequest, ListTenantRunsRequest, ResumeTenantRequest, RunState,
    SuspendTenantRequest, WhoAmIRequest, outcome::Kind,
};
use codelia_store::EventKind;
use codelia_tests::{
    Client, Cluster, ClusterOptions, Exec, Process, eventually, recorded_events, refusal, shell,
};
use serde_json::Value;
use tonic::{Code, Status};

async fn tenant_runs(operator: &Client, tenant: &str) -> Result<Vec<(String, String)>, Status> {
    let request = ListTenantRunsRequest { tenant: tenant.into(), ..Default::default() };
    let runs = operator.admin().list_tenant_runs(request).await?.into_inner().tenant_runs;
    Ok(runs
        .into_iter()
        .map(|found| (found.tenant_id, found.run.unwrap_or_default().run_id))
        .collect())
}

async fn kinds(cluster: &Cluster, tenant: &str) -> Result<Vec<EventKind>> {
    let events = recorded_events(&cluster.store, &tenant.parse()?, None).await?;
    let kinds = events.into_iter().rev().map(|event| event.body.kind);
    let of_operators = [
        EventKind::RunsListedByOperator,
        EventKind::RunCanceledByOperator,
        EventKind::TenantSuspended,
        EventKind::TenantResumed,
    ];
    Ok(kinds.filter(|kind| of_operators.contains(kind)).collect())
}

#[tokio::test]
async fn operator_lists_and_cancels_runs_of_tenants() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let (one, two) = (cluster.tenant("one").await?, cluster.tenant("two").await?);
    let session = one.session().await?;
    one.exec(&session.name, "true").await?;
    let mut exec = Exec::start(&one, shell(&session.name, "echo up; exec sleep 100")).await?;
    exec.until_stdout("up").await?;
    let first = exec.transcript.queued.as_ref().map(|run| run.run_id.clone()).unwrap_or_default();
    let second = two.start(shell(&two.session().await?.name, "exec sleep 100")).await?.run_id;

    let both = [("two".to_owned(), second.clone()), ("one".to_owned(), first.clone())];
    assert_eq!(tenant_runs(&operator, "").await?, both, "newest first, without ended ones");
    assert_eq!(tenant_runs(&operator, "tenants/one").await?, both[1..]);
    let unknown = tenant_runs(&operator, "tenants/nobody").await.expect_err("no such tenant");
    assert_eq!(refusal(&unknown).code, Code::NotFound);
    let denied = tenant_runs(&one, "tenants/one").await.expect_err("needs scope operator");
    assert_eq!(refusal(&denied).code, Code::PermissionDenied);

    let request = |reason: &str| CancelTenantRunRequest {
        name: format!("tenants/one/runs/{first}"),
        reason: reason.into(),
        grace: None,
    };
    let silent = operator.admin().cancel_tenant_run(request("")).await.expect_err("no reason");
    assert_eq!(refusal(&silent).fields, ["reason"]);
    operator.admin().cancel_tenant_run(request("host maintenance")).await?;
    let expected = Kind::Canceled(Canceled { reason: "host maintenance".into() });
    assert_eq!(exec.finish().await?.outcome(), expected);
    let foreign = CancelTenantRunRequest {
        name: format!("tenants/one/runs/{second}"),
        ..request("wrong tenant")
    };
    let foreign =
        operator.admin().cancel_tenant_run(foreign).await.expect_err("a run of another tenant");
    assert_eq!(refusal(&foreign).code, Code::NotFound);
    assert_eq!(
        kinds(&cluster, "one").await?,
        [EventKind::RunsListedByOperator, EventKind::RunCanceledByOperator]
    );

    let cli =
        async |arguments: &[&str]| Process::finish(cluster.cli(&operator, arguments), b"").await;
    let listed: Value =
        serde_json::from_str(&cli(&["ps", "--all-tenants", "--json"]).await?.stdout)?;
    assert_eq!(
        (&listed[0]["tenantId"], &listed[0]["run"]["runId"]),
        (&"two".into(), &second.as_str().into())
    );
    let killed =
        cli(&["kill", "--tenant", "two", "--reason", "over", "--grace", "0s", &second]).await?;
    assert_eq!(killed.code, Some(0), "{killed:?}");
    let ended = two.watch_to_end(&format!("sessions/-/runs/{second}"), 0).await?;
    assert_eq!(ended.outcome(), Kind::Canceled(Canceled { reason: "over".into() }));
    cluster.end().await
}

fn suspend(tenant: &str, reason: &str) -> SuspendTenantRequest {
    SuspendTenantRequest { name: format!("tenants/{tenant}"), reason: reason.into() }
}

#[tokio::test]
async fn suspended_tenant_is_refused_and_stopped() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, ..ClusterOptions::default() }).await?;
    let operator = cluster.operator().await?;
    let member = cluster.tenant("team").await?;
    let session = member.session().await?;
    let running = member.start(shell(&session.name, "exec sleep 100")).await?;
    let queued = member.start(shell(&session.name, "echo started > file")).await?;

    let suspended = operator.admin().suspend_tenant(suspend("team", "unpaid")).await?.into_inner();
    let suspended = suspended.tenant.unwrap_or_default();
    assert_eq!(
        (suspended.suspend_time.is_some(), suspended.suspend_reason.as_str()),
        (true, "unpaid")
    );
    operator.admin().suspend_tenant(suspend("team", "again")).await?;
    for refused in [
        member.sessions().list_sessions(ListSessionsRequest::default()).await.map(drop),
        member.info().who_am_i(WhoAmIRequest {}).await.map(drop),
    ] {
        let refused = refusal(&refused.expect_err("the tenant is suspended"));
        assert_eq!(
            (refused.code, refused.reason.as_str()),
            (Code::PermissionDenied, "TENANT_SUSPENDED")
        );
    }
    eventually("all its runs have ended", || async {
        tenant_runs(&operator, "tenants/team").await.ok().filter(Vec::is_empty)
    })
    .await;

    let resume = ResumeTenantRequest { name: "tenants/team".into() };
    for _ in 0..2 {
        let resumed = operator.admin().resume_tenant(resume.clone()).await?.into_inner();
        assert!(resumed.tenant.is_some_and(|tenant| tenant.suspend_time.is_none()));
    }
    for run in [running, queued] {
        let run = member.get_run(&run.name).await?;
        assert_eq!(run.state(), RunState::Ended);
        assert_eq!(run.cancel_reason, "the tenant is suspended");
        assert!(matches!(run.outcome.and_then(|outcome| outcome.kind), Some(Kind::Canceled(_))));
    }
    member.get(&session.name, "file").await.expect_err("the queued run did not start");
    member.exec(&session.name, "true").await?;
    let own = operator.admin().suspend_tenant(suspend("operators", "oops")).await;
    assert_eq!(refusal(&own.expect_err("the operator's own tenant")).fields, ["name"]);
    let mut found = kinds(&cluster, "team").await?;
    found.retain(|kind| *kind != EventKind::RunsListedByOperator);
    assert_eq!(found, [EventKind::TenantSuspended, EventKind::TenantResumed]);
    cluster.end().await
}

#[tokio::test]
async fn deleted_tenant_leaves_nothing_behind() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let member = cluster.tenant("team").await?;
    let session = member.session().await?;
    member.exec(&session.name, "echo text; echo text > file").await?;
    member.start(shell(&session.name, "exec sleep 100")).await?;
    let delete =
        |force| DeleteTenantRequest { name: "tenants/team".into(), force, allow_missing: false };

    let refused =
        refusal(&operator.admin().delete_tenant(delete(false)).await.expect_err("open sessions"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "TENANT_NOT_EMPTY")
    );
    member.exec(&session.name, "true").await?;
    let begun = operator.admin().delete_tenant(delete(true)).await?.into_inner();
    assert!(begun.tenant.is_some_and(|tenant| tenant.delete_time.is_some()));
    member.exec(&session.name, "true").await.expect_err("the tenant is deleted");
    let gone = eventually("the tenant is gone", || async {
        let get = GetTenantRequest { name: "tenants/team".into() };
        operator.admin().get_tenant(get).await.err()
    })
    .await;
    assert_eq!(refusal(&gone).code, Code::NotFound);

    // The audit outlives tenants, until its own retention.
    let deleted =
        "SELECT count(*) FROM audit WHERE kind = 'TENANT_DELETED' AND detail LIKE '%team%'";
    assert_eq!(cluster.database.number(deleted).await?, 1);
    cluster.database.execute("SET session_replication_role = replica; TRUNCATE audit").await?;
    let dump = cluster.database.dump().await?;
    let rows: Vec<_> = dump.lines().filter(|row| row.contains("team")).collect();
    assert_eq!(rows, Vec::<&str>::new(), "nothing else is left");
    assert_eq!(cluster.session_directories()?, Vec::<std::path::PathBuf>::new());
    let again = operator.admin().delete_tenant(delete(true)).await.expect_err("no such tenant");
    assert_eq!(refusal(&again).code, Code::NotFound);
    let missing = DeleteTenantRequest { allow_missing: true, ..delete(false) };
    assert!(operator.admin().delete_tenant(missing).await?.into_inner().tenant.is_none());

    let create = CreateTenantRequest { tenant_id: "team".into(), quotas: None };
    operator.admin().create_tenant(create).await.context("the id is free again")?;
    let cli =
        async |arguments: &[&str]| Process::finish(cluster.cli(&operator, arguments), b"").await;
    let done = cli(&["tenants", "suspend", "team", "--reason", "unpaid"]).await?;
    assert!(done.code == Some(0) && done.stdout.contains("unpaid"), "{done:?}");
    assert_eq!(cli(&["tenants", "resume", "team"]).await?.code, Some(0));
    assert_eq!(cli(&["tenants", "delete", "team"]).await?.code, Some(0));
    cluster.end().await
}
