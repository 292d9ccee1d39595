//! How long rows are kept, and what a caller sees of rows that are gone.

use anyhow::Result;
use codelia_proto::v1::{
    GetRunRequest, GetTenantRequest, Retention, SetRetentionRequest, WatchRunRequest,
};
use codelia_store::EventKind;
use codelia_tests::{Cluster, recorded_events, refusal};
use prost_types::Duration;
use tonic::Code;

fn hours(hours: i64) -> Option<Duration> {
    Some(Duration { seconds: hours * 3600, nanos: 0 })
}

fn request(retention: Retention) -> SetRetentionRequest {
    SetRetentionRequest { name: "tenants/a".into(), retention: Some(retention) }
}

#[tokio::test]
async fn operator_sets_retention_of_tenant() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (operator, tenant) = (cluster.operator().await?, cluster.tenant("a").await?);
    let wanted = Retention { runs: hours(48), output: hours(1), ..Retention::default() };
    let own =
        tenant.admin().set_retention(request(wanted)).await.expect_err("needs scope operator");
    assert_eq!(refusal(&own).code, Code::PermissionDenied);
    for (bad, field) in [
        (Retention { runs: hours(0), ..wanted }, "retention.runs"),
        (Retention { output: hours(49), ..wanted }, "retention.output"),
        (Retention { audit: hours(1), ..wanted }, "retention.audit"),
    ] {
        let refused = operator.admin().set_retention(request(bad)).await.expect_err("impossible");
        assert_eq!(refusal(&refused).fields, [field]);
    }
    operator.admin().set_retention(request(wanted)).await?;
    let shown = tenant.admin().get_tenant(GetTenantRequest { name: "tenants/-".into() }).await?;
    assert_eq!(shown.into_inner().tenant.unwrap_or_default().retention, Some(wanted));
    let events =
        recorded_events(&cluster.store, &"a".parse()?, Some(EventKind::RetentionSet)).await?;
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].body.detail["output_seconds"], 3600);
    cluster.end().await
}

#[tokio::test]
async fn deleted_output_is_refused_by_reason() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.exec(&session.name, "echo kept").await?;
    let name = run.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    cluster.database.execute("DELETE FROM run_output").await?;
    let mut stream = client
        .runs()
        .watch_run(WatchRunRequest { name: name.clone(), ..Default::default() })
        .await?
        .into_inner();
    let status = loop {
        match stream.message().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the stream ended without an error"),
            Err(status) => break refusal(&status),
        }
    };
    assert_eq!((status.code, status.reason.as_str()), (Code::FailedPrecondition, "OUTPUT_EXPIRED"));
    let record = client
        .runs()
        .get_run(GetRunRequest { name, ..Default::default() })
        .await?
        .into_inner()
        .run
        .unwrap_or_default();
    assert_eq!(record.output_bytes, 5, "the record is kept");
    cluster.end().await
}
