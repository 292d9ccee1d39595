//! Promises of the protocol: what a response shows to whom, and what an update changes.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CreateKeyRequest, ListKeysRequest, ListRunsRequest, Quotas, Scope, UpdateQuotasRequest,
};
use codelia_tests::{Client, Cluster, refusal, shell};
use tonic::Code;
use tonic_types::StatusExt;

/// The `sandbox_root` of a run in every response that has one.
async fn shown_roots(client: &Client) -> Result<Vec<String>> {
    let session = client.session().await?;
    let started = client.start(shell(&session.name, "true")).await?;
    let watched = client.watch_to_end(&started.name, 0).await?;
    let executed = client.exec(&session.name, "true").await?;
    let request = ListRunsRequest { parent: session.name.clone(), ..Default::default() };
    let listed = client.runs().list_runs(request).await?.into_inner().runs;
    let got = client.get_run(&started.name).await?;
    let ended = [watched.run(), executed.run(), &got].into_iter().chain(&listed);
    Ok(ended.map(|run| run.sandbox_root.clone()).collect())
}

#[tokio::test]
async fn only_operator_sees_sandbox_root() -> Result<()> {
    let cluster = Cluster::start().await?;
    let roots = shown_roots(&cluster.tenant("a").await?).await?;
    assert!(roots.iter().all(String::is_empty), "{roots:?}");
    let roots = shown_roots(&cluster.operator().await?).await?;
    assert!(roots.len() == 5 && roots.iter().all(|root| root.starts_with('/')), "{roots:?}");
    cluster.end().await
}

#[tokio::test]
async fn key_has_its_id() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let request = CreateKeyRequest {
        parent: "tenants/-".into(),
        scopes: vec![Scope::Run.into()],
        ..Default::default()
    };
    let key = client.admin().create_key(request).await?.into_inner().key.context("a key")?;
    assert_eq!(key.name, format!("tenants/a/keys/{}", key.key_id));
    let request = ListKeysRequest { parent: "tenants/a".into(), ..Default::default() };
    let keys = client.admin().list_keys(request).await?.into_inner().keys;
    assert!(keys.iter().any(|listed| listed.key_id == key.key_id), "{keys:?}");
    cluster.end().await
}

#[tokio::test]
async fn update_mask_returns_quota_to_default() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let update = async |quotas: Quotas, paths: &[&str]| -> Result<Quotas> {
        let paths = paths.iter().map(ToString::to_string).collect();
        let request = UpdateQuotasRequest {
            name: "tenants/-".into(),
            quotas: Some(quotas),
            update_mask: Some(prost_types::FieldMask { paths }),
        };
        let tenant = operator.admin().update_quotas(request).await?.into_inner().tenant;
        tenant.and_then(|tenant| tenant.quotas).context("quotas")
    };
    let two = Quotas { sessions: Some(2), queued_runs: Some(3), ..Default::default() };
    let before = update(two, &["sessions"]).await?;
    assert_eq!(before.sessions, Some(2));
    assert_ne!(before.queued_runs, Some(3), "the mask does not list it");
    let after = update(Quotas::default(), &["sessions"]).await?;
    assert_eq!(after.sessions, Some(codelia_store::Quotas::default().sessions));
    let unknown = update(two, &["nosuch"]).await.expect_err("no such field");
    let refused = refusal(unknown.downcast_ref().context("a status")?);
    assert_eq!((refused.code, refused.fields), (Code::InvalidArgument, vec!["update_mask".to_owned()]));
    cluster.end().await
}

#[tokio::test]
async fn missing_object_is_named_for_programs() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let missing = client.get_session("sessions/nosuch").await.expect_err("no such session");
    assert_eq!(missing.message(), "session \"nosuch\" not found");
    let resource = missing.get_details_resource_info().context("ResourceInfo")?;
    assert_eq!(
        (resource.resource_type.as_str(), resource.resource_name.as_str()),
        ("codelia.dev/session", "nosuch")
    );
    cluster.end().await
}
