//! Promises of the protocol: what a response shows to whom, and what an update changes.

use anyhow::{Context, Result};
use codelia_proto::v1::{
    CreateKeyRequest, CreateSessionRequest, DrainWorkerRequest, GetTenantRequest, ListKeysRequest,
    ListRunsRequest, Quotas, Scope, StatFileRequest, UpdateQuotasRequest,
};
use codelia_store::Scope as KeyScope;
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
    assert_eq!(
        (refused.code, refused.fields),
        (Code::InvalidArgument, vec!["update_mask".to_owned()])
    );
    cluster.end().await
}

#[tokio::test]
async fn missing_object_is_named_for_programs() -> Result<()> {
    let cluster = Cluster::shared().await?;
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

#[tokio::test]
async fn ended_session_answers_when_and_why() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "dev".into(), ..Default::default() }).await?;
    let closed = client.close(&session.name).await?;
    let at = closed.end_time.context("an end")?.to_string();
    for name in [session.name.as_str(), "sessions/dev"] {
        let stat = StatFileRequest { parent: name.into(), path: ".".into(), ..Default::default() };
        for refused in [
            client.start(shell(name, "true")).await.expect_err("ended"),
            client.files().stat_file(stat).await.expect_err("ended"),
        ] {
            let info = refused.get_details_error_info().context("ErrorInfo")?;
            assert_eq!(
                (refused.code(), info.reason.as_str()),
                (Code::FailedPrecondition, "SESSION_ENDED")
            );
            assert_eq!(
                (info.metadata["end_reason"].as_str(), &info.metadata["end_time"]),
                ("closed", &at)
            );
            assert!(
                refused
                    .message()
                    .starts_with(&format!("session \"dev\" ended at {at}: it was closed"))
            );
        }
    }
    let never = client.start(shell("sessions/nosuch", "true")).await.expect_err("no such session");
    assert_eq!((never.code(), never.message()), (Code::NotFound, "session \"nosuch\" not found"));
    let other = cluster.tenant("b").await?;
    let hidden = other.start(shell("sessions/dev", "true")).await.expect_err("another tenant's");
    assert_eq!(hidden.code(), Code::NotFound);
    cluster.end().await
}

#[tokio::test]
async fn id_alone_names_the_object() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let session = operator.session().await?;
    let run = operator.start(shell(&session.session_id, "true")).await?;
    assert_eq!(operator.get_run(&run.run_id).await?.name, run.name);
    assert_eq!(operator.get_session(&session.session_id).await?.name, session.name);
    let tenant = operator.admin().get_tenant(GetTenantRequest { name: "operators".into() }).await?;
    assert_eq!(tenant.into_inner().tenant.context("a tenant")?.name, "tenants/operators");
    let drained =
        operator.admin().drain_worker(DrainWorkerRequest { name: "worker-0".into() }).await?;
    assert_eq!(drained.into_inner().worker.context("a worker")?.name, "workers/worker-0");
    cluster.end().await
}

#[tokio::test]
async fn page_token_of_another_list_is_refused() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let (one, two) = (client.session().await?, client.session().await?);
    for _ in 0..2 {
        client.start(shell(&one.name, "true")).await?;
    }
    let list = async |parent: &str, page_size: i32, page_token: &str| {
        let (parent, page_token) = (parent.to_owned(), page_token.to_owned());
        let request = ListRunsRequest { parent, page_size, page_token, ..Default::default() };
        client.runs().list_runs(request).await.map(tonic::Response::into_inner)
    };
    let token = list(&one.name, 1, "").await?.next_page_token;
    assert_eq!(list(&one.name, 1, &token).await?.runs.len(), 1);
    for parent in [two.name.as_str(), "sessions/-"] {
        let refused = refusal(&list(parent, 1, &token).await.expect_err("another list"));
        assert_eq!(
            (refused.code, refused.fields),
            (Code::InvalidArgument, vec!["page_token".to_owned()])
        );
    }
    assert_eq!(
        list(&one.name, i32::MAX, "").await?.runs.len(),
        2,
        "a large page_size is not an error"
    );
    cluster.end().await
}

#[tokio::test]
async fn scope_error_names_every_scope() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let client = client.with_secret(&cluster.key("a", &[KeyScope::Run]).await?)?;
    let refused = client.admin().list_keys(ListKeysRequest::default()).await.expect_err("no scope");
    assert_eq!(
        refused.message(),
        "the API key lacks the scope `admin` or `operator`; use a key that has it"
    );
    let info = refused.get_details_error_info().context("ErrorInfo")?;
    assert_eq!(
        (info.reason.as_str(), info.metadata["scopes"].as_str()),
        ("SCOPE_MISSING", "admin,operator")
    );
    let refused =
        client.admin().drain_worker(DrainWorkerRequest::default()).await.expect_err("no scope");
    assert_eq!(refused.message(), "the API key lacks the scope `operator`; use a key that has it");
    cluster.end().await
}
