//! What every key may ask: what the server offers, and what the key may do.

use anyhow::{Context, Result};
use codelia_proto::v1::{GetServerInfoRequest, SandboxMode, Scope, WhoAmIRequest};
use codelia_store::{QuotasChange, Scope as Granted};
use codelia_tests::{Cluster, Process};
use serde_json::Value;

#[tokio::test]
async fn every_scope_may_ask_about_itself() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    client.session().await?;
    let change = QuotasChange { sessions: Some(7), ..QuotasChange::default() };
    cluster.store.tenant_set_quotas(&"a".parse()?, change).await?;
    let scopes = [Granted::Run, Granted::Files, Granted::Approve, Granted::Audit, Granted::Admin];
    for granted in scopes {
        let caller = client.with_secret(&cluster.key("a", &[granted]).await?)?;
        let answer = caller.info().who_am_i(WhoAmIRequest {}).await?.into_inner();
        let (tenant, key) = (answer.tenant.context("tenant")?, answer.key.context("key")?);
        assert_eq!((tenant.tenant_id.as_str(), key.display_name.as_str()), ("a", "test"));
        assert_eq!(key.scopes().count(), 1);
        assert_ne!(key.scopes().next(), Some(Scope::Unspecified));
        assert_eq!(tenant.quotas.unwrap_or_default().sessions, Some(7));
        assert_eq!(tenant.usage.unwrap_or_default().sessions, 1);
        let floor = tenant.isolation_floor.context("floor")?;
        assert!(
            floor.reason.is_empty() && floor.key_id.is_empty(),
            "the decision is for administrators"
        );
        caller.info().get_server_info(GetServerInfoRequest {}).await?;
    }
    let stranger = client.with_secret(&format!("cdl_{}", "A".repeat(43)))?;
    stranger.info().who_am_i(WhoAmIRequest {}).await.expect_err("an unknown key");
    cluster.end().await
}

#[tokio::test]
async fn server_info_shows_limits_and_live_modes() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let ask = async || -> Result<_> {
        let answer = client.info().get_server_info(GetServerInfoRequest {}).await?.into_inner();
        answer.server_info.context("server_info")
    };
    let info = ask().await?;
    assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
    assert!(info.modes().any(|mode| mode == SandboxMode::Logical), "{info:?}");
    let (defaults, max) =
        (info.default_limits.context("defaults")?, info.max_limits.context("max")?);
    assert!(
        defaults.memory_bytes > Some(0) && defaults.memory_bytes <= max.memory_bytes,
        "{info:?}"
    );
    assert!(info.default_session_ttl.is_some() && info.max_session_ttl.is_some(), "{info:?}");

    cluster.workers[0].process.terminate().await?;
    assert_eq!(ask().await?.modes, Vec::<i32>::new(), "no live worker serves a mode");
    cluster.end().await
}

#[tokio::test]
async fn cli_shows_server_and_caller() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let files_only = client.with_secret(&cluster.key("a", &[Granted::Files]).await?)?;
    let json = async |arguments: &[&str]| -> Result<Value> {
        let done = Process::finish(cluster.cli(&files_only, arguments), b"").await?;
        assert_eq!(done.code, Some(0), "{done:?}");
        Ok(serde_json::from_str(&done.stdout)?)
    };
    let info = json(&["info", "--json"]).await?;
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert!(info["maxLimits"]["timeout"].is_string(), "{info}");
    let caller = json(&["whoami", "--json"]).await?;
    assert_eq!(
        (&caller["tenant"]["tenantId"], &caller["key"]["scopes"]),
        (&"a".into(), &serde_json::json!(["SCOPE_FILES"]))
    );
    let tenant = &caller["tenant"];
    assert!(tenant["quotas"]["sessions"].is_string() && tenant["usage"].is_object(), "{caller}");
    let text = Process::finish(cluster.cli(&files_only, &["whoami"]), b"").await?;
    assert!(
        text.stdout.lines().any(|line| line.starts_with("tenant.tenantId") && line.ends_with('a')),
        "{text:?}"
    );
    cluster.end().await
}
