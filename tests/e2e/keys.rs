//! Keys that expire, and when they were last used.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use codelia_proto::v1::{CreateKeyRequest, Key, ListKeysRequest, ListSessionsRequest, Scope};
use codelia_tests::{Client, Cluster, Process, eventually, refusal};
use serde_json::Value;
use tonic::Code;

fn in_an_hour() -> Option<prost_types::Timestamp> {
    Some((SystemTime::now() + Duration::from_secs(3600)).into())
}

fn new_key(expire_time: Option<prost_types::Timestamp>) -> CreateKeyRequest {
    let scopes = vec![Scope::Run.into()];
    CreateKeyRequest { parent: "tenants/-".into(), scopes, expire_time, ..Default::default() }
}

async fn key(client: &Client, name: &str) -> Result<Key> {
    let request = ListKeysRequest { parent: "tenants/-".into(), ..Default::default() };
    let keys = client.admin().list_keys(request).await?.into_inner().keys;
    keys.into_iter().find(|key| key.name == name).context("the key")
}

#[tokio::test]
async fn expired_key_is_refused_by_reason() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let made = client.admin().create_key(new_key(in_an_hour())).await?.into_inner();
    assert!(made.key.is_some_and(|key| key.expire_time.is_some()));
    let user = client.with_secret(&made.secret)?;
    let call = async || user.sessions().list_sessions(ListSessionsRequest::default()).await;
    call().await?;
    cluster
        .database
        .execute("UPDATE api_keys SET expires_at = now() WHERE expires_at IS NOT NULL")
        .await?;
    for _ in 0..2 {
        let refused = refusal(&call().await.expect_err("the key has expired"));
        assert_eq!((refused.code, refused.reason.as_str()), (Code::Unauthenticated, "KEY_EXPIRED"));
    }
    let past = Some((SystemTime::now() - Duration::from_secs(1)).into());
    let refused = client.admin().create_key(new_key(past)).await.expect_err("a time in the past");
    assert_eq!(refusal(&refused).fields, ["expire_time"]);

    let create = ["keys", "create", "--scope", "run", "--expires-in", "1h", "--json"];
    let done = Process::finish(cluster.cli(&client, &create), b"").await?;
    let made: Value = serde_json::from_str(&done.stdout)?;
    assert!(made["key"]["expireTime"].is_string(), "{made}");
    cluster.end().await
}

#[tokio::test]
async fn last_use_is_written_once_a_minute() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let made = client.admin().create_key(new_key(None)).await?.into_inner();
    let name = made.key.context("the key")?.name;
    assert!(key(&client, &name).await?.last_use_time.is_none(), "never used");
    let user = client.with_secret(&made.secret)?;
    let call =
        async || user.sessions().list_sessions(ListSessionsRequest::default()).await.map(drop);
    call().await?;
    let first = eventually("the use is recorded", || async {
        key(&client, &name).await.ok().and_then(|key| key.last_use_time)
    })
    .await;
    for _ in 0..20 {
        call().await?;
    }
    assert_eq!(
        key(&client, &name).await?.last_use_time,
        Some(first),
        "recorded again within the minute"
    );
    let writes =
        "SELECT count(*) FROM api_keys WHERE last_used_at > created_at + interval '1 hour'";
    assert_eq!(cluster.database.number(writes).await?, 0);
    cluster.end().await
}
