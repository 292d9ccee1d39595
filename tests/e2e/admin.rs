//! Tenants, keys and scopes.

use anyhow::Result;
use codelia_proto::v1::{
    CreateKeyRequest, CreateTenantRequest, GetTenantRequest, IsolationLevel, ListKeysRequest,
    ListSessionsRequest, ListTenantsRequest, ListWorkersRequest, Quotas, RevokeKeyRequest, Scope,
    SetIsolationFloorRequest, UpdateQuotasRequest, WorkerState,
};
use codelia_store::{EventKind, Scope as Granted};
use codelia_tests::{Client, Cluster, ClusterOptions, Exec, recorded_events, refusal, shell};
use tonic::Code;

async fn list_sessions(client: &Client) -> Result<(), tonic::Status> {
    client.sessions().list_sessions(ListSessionsRequest::default()).await.map(drop)
}

fn key_request(parent: &str, scopes: &[Scope]) -> CreateKeyRequest {
    let scopes = scopes.iter().map(|&scope| scope.into()).collect();
    CreateKeyRequest { parent: parent.into(), display_name: "ci".into(), scopes, expire_time: None }
}

#[tokio::test]
async fn call_without_valid_key_is_refused() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    for secret in
        ["", "cdl_", "nonsense", &format!("cdl_{}", "A".repeat(43)), &client.secret.to_uppercase()]
    {
        let refused = refusal(
            &list_sessions(&client.with_secret(secret)?).await.expect_err("an invalid key"),
        );
        assert_eq!(refused.code, Code::Unauthenticated, "{secret:?}");
    }
    let mut bare =
        codelia_proto::v1::session_service_client::SessionServiceClient::new(client.channel());
    let status = bare.list_sessions(ListSessionsRequest::default()).await.expect_err("no key");
    assert_eq!(refusal(&status).code, Code::Unauthenticated);
    cluster.end().await
}

#[tokio::test]
async fn key_is_stored_hashed_and_revoked_immediately() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { apis: 2, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let made =
        client.admin().create_key(key_request("tenants/-", &[Scope::Run])).await?.into_inner();
    let key = made.key.unwrap_or_default();
    let first = client.with_secret(&made.secret)?;
    let second = Client::connect(&cluster.endpoint(1), &made.secret).await?;
    list_sessions(&first).await?;
    list_sessions(&second).await?;

    let listed = client
        .admin()
        .list_keys(ListKeysRequest { parent: "tenants/a".into(), ..Default::default() })
        .await?;
    assert!(listed.into_inner().keys.iter().any(|listed| listed.name == key.name));
    let stored = cluster
        .database
        .number("SELECT count(*) FROM api_keys WHERE api_keys::text LIKE '%cdl\\_%'")
        .await?;
    assert_eq!(stored, 0, "a secret is stored in plain text");

    for _ in 0..2 {
        client.admin().revoke_key(RevokeKeyRequest { name: key.name.clone() }).await?;
    }
    for revoked in [&first, &second] {
        let refused = refusal(&list_sessions(revoked).await.expect_err("a revoked key"));
        assert_eq!(refused.code, Code::Unauthenticated);
    }
    cluster.end().await
}

#[tokio::test]
async fn key_that_just_ran_is_revoked_immediately() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let made =
        client.admin().create_key(key_request("tenants/-", &[Scope::Run])).await?.into_inner();
    let caller = client.with_secret(&made.secret)?;
    let session = caller.session().await?.name;
    let malformed = shell("sessions/", "true");
    let code = |status: tonic::Status| refusal(&status).code;
    // The control: the key runs again and again, and mistakes are reported as such.
    for _ in 0..3 {
        caller.exec(&session, "true").await?;
        caller.start(shell(&session, "true")).await?;
    }
    assert_eq!(
        code(caller.start(malformed.clone()).await.expect_err("malformed")),
        Code::InvalidArgument
    );
    let runs = || cluster.database.number("SELECT count(*) FROM runs");
    let before = runs().await?;

    client.admin().revoke_key(RevokeKeyRequest { name: made.key.unwrap_or_default().name }).await?;
    for request in [shell(&session, "true"), malformed] {
        let refused = caller.start(request.clone()).await.expect_err("a revoked key");
        assert_eq!(code(refused), Code::Unauthenticated);
        let refused = Exec::start(&caller, request).await.expect_err("a revoked key");
        assert_eq!(code(refused), Code::Unauthenticated);
    }
    assert_eq!(runs().await?, before);
    cluster.end().await
}

#[tokio::test]
async fn suspended_tenant_cannot_run_immediately() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    for _ in 0..2 {
        client.exec(&session, "true").await?;
    }
    cluster
        .database
        .execute("UPDATE tenants SET suspended_at = now(), suspend_reason = 'x' WHERE id = 'a'")
        .await?;
    let refused =
        refusal(&client.start(shell(&session, "true")).await.expect_err("a suspended tenant"));
    assert_eq!(refused.reason, "TENANT_SUSPENDED");
    cluster.end().await
}

#[tokio::test]
async fn key_is_limited_to_its_scopes() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let denied = |status: tonic::Status| {
        assert_eq!(refusal(&status).code, Code::PermissionDenied, "{status:?}")
    };

    let files_only = client.with_secret(&cluster.key("a", &[Granted::Files]).await?)?;
    denied(list_sessions(&files_only).await.expect_err("needs scope run"));
    denied(files_only.start(shell("sessions/x", "true")).await.expect_err("needs scope run"));

    let run_only = client.with_secret(&cluster.key("a", &[Granted::Run]).await?)?;
    list_sessions(&run_only).await?;
    denied(
        run_only
            .admin()
            .create_key(key_request("tenants/-", &[Scope::Run]))
            .await
            .expect_err("needs scope admin"),
    );

    denied(
        client
            .admin()
            .create_key(key_request("tenants/-", &[Scope::Operator]))
            .await
            .expect_err("the caller lacks the scope itself"),
    );
    denied(
        client
            .admin()
            .list_workers(ListWorkersRequest::default())
            .await
            .expect_err("needs scope operator"),
    );
    let create = CreateTenantRequest { tenant_id: "mine".into(), quotas: None };
    denied(client.admin().create_tenant(create).await.expect_err("needs scope operator"));
    cluster.end().await
}

fn floor_request(level: IsolationLevel, reason: &str) -> SetIsolationFloorRequest {
    SetIsolationFloorRequest {
        name: "tenants/team-7".into(),
        level: level.into(),
        reason: reason.into(),
        ask_level: 0,
    }
}

#[tokio::test]
async fn logical_mode_needs_operator_decision_and_reason() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    operator
        .admin()
        .create_tenant(CreateTenantRequest { tenant_id: "team-7".into(), quotas: None })
        .await?;
    let scopes = [Scope::Run, Scope::Admin];
    let key =
        operator.admin().create_key(key_request("tenants/team-7", &scopes)).await?.into_inner();
    let member = operator.with_secret(&key.secret)?;
    let below = refusal(&member.session().await.expect_err("mode logical is below the floor"));
    assert_eq!((below.code, below.reason.as_str()), (Code::FailedPrecondition, "ISOLATION_FLOOR"));

    let own = member
        .admin()
        .set_isolation_floor(floor_request(IsolationLevel::IsolationLevel0, "I may"))
        .await;
    assert_eq!(
        refusal(&own.expect_err("a tenant cannot lower its own floor")).code,
        Code::PermissionDenied
    );
    let silent = operator
        .admin()
        .set_isolation_floor(floor_request(IsolationLevel::IsolationLevel0, " "))
        .await;
    assert_eq!(refusal(&silent.expect_err("no reason given")).fields, ["reason"]);
    member.session().await.expect_err("the floor is unchanged");

    let decided = operator
        .admin()
        .set_isolation_floor(floor_request(IsolationLevel::IsolationLevel0, "trusted"))
        .await?;
    let floor = decided.into_inner().tenant.unwrap_or_default().isolation_floor.unwrap_or_default();
    assert_eq!(
        (floor.level(), floor.reason.as_str()),
        (IsolationLevel::IsolationLevel0, "trusted")
    );
    assert!(floor.set_time.is_some() && !floor.key_id.is_empty(), "{floor:?}");
    let session = member.session().await?;
    member.exec(&session.name, "true").await?;

    // A raised floor applies to existing sessions.
    operator
        .admin()
        .set_isolation_floor(floor_request(IsolationLevel::IsolationLevel2, "no longer"))
        .await?;
    let refused = member.exec(&session.name, "true").await.expect_err("the floor rose");
    assert!(format!("{refused:#}").contains("LEVEL_2"), "{refused:#}");
    let events = recorded_events(&cluster.store, &"team-7".parse()?, None).await?;
    let decided = [EventKind::SessionRefused, EventKind::IsolationFloorSet, EventKind::RunRefused];
    let kinds: Vec<_> = events.into_iter().rev().map(|event| event.body.kind).collect();
    let kinds: Vec<_> = kinds.into_iter().filter(|kind| decided.contains(kind)).collect();
    assert_eq!(
        kinds,
        [
            EventKind::SessionRefused,
            EventKind::SessionRefused,
            EventKind::IsolationFloorSet,
            EventKind::IsolationFloorSet,
            EventKind::RunRefused,
        ]
    );
    cluster.end().await
}

#[tokio::test]
async fn operator_creates_tenants_and_changes_quotas() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let quotas = Some(Quotas { sessions: Some(1), ..Default::default() });
    let create = CreateTenantRequest { tenant_id: "team-7".into(), quotas };
    operator.admin().create_tenant(create.clone()).await?;
    let again =
        refusal(&operator.admin().create_tenant(create).await.expect_err("the id is taken"));
    assert_eq!((again.code, again.reason.as_str()), (Code::AlreadyExists, "TENANT_EXISTS"));

    let key = operator
        .admin()
        .create_key(key_request("tenants/team-7", &[Scope::Run]))
        .await?
        .into_inner();
    let member = operator.with_secret(&key.secret)?;
    operator
        .admin()
        .set_isolation_floor(floor_request(IsolationLevel::IsolationLevel0, "a test"))
        .await?;
    member.session().await?;
    assert_eq!(
        refusal(&member.session().await.expect_err("the quota is one session")).code,
        Code::ResourceExhausted
    );
    let change = UpdateQuotasRequest {
        name: "tenants/team-7".into(),
        quotas: Some(Quotas { sessions: Some(2), ..Default::default() }),
        update_mask: None,
    };
    operator.admin().update_quotas(change).await?;
    member.session().await?;

    let shown = operator
        .admin()
        .get_tenant(GetTenantRequest { name: "tenants/team-7".into() })
        .await?
        .into_inner();
    let shown = shown.tenant.unwrap_or_default();
    assert_eq!(shown.quotas.unwrap_or_default().sessions, Some(2));
    assert_eq!(shown.usage.unwrap_or_default().sessions, 2);
    let all =
        operator.admin().list_tenants(ListTenantsRequest::default()).await?.into_inner().tenants;
    assert_eq!(
        all.iter().map(|tenant| tenant.tenant_id.as_str()).collect::<Vec<_>>(),
        ["operators", "team-7"]
    );
    cluster.end().await
}

#[tokio::test]
async fn operator_lists_workers() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { workers: 2, slots: 3, ..ClusterOptions::default() })
            .await?;
    let operator = cluster.operator().await?;
    let workers =
        operator.admin().list_workers(ListWorkersRequest::default()).await?.into_inner().workers;
    assert_eq!(
        workers.iter().map(|worker| worker.worker_id.as_str()).collect::<Vec<_>>(),
        ["worker-0", "worker-1"]
    );
    assert!(workers.iter().all(|worker| worker.state() == WorkerState::Ready && worker.slots == 3));
    assert!(workers.iter().all(|worker| !worker.modes.is_empty() && !worker.version.is_empty()));
    cluster.end().await
}
