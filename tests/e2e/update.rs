//! Changing a session: alias, labels, lifetimes.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{CreateSessionRequest, Session, UpdateSessionRequest},
};
use codelia_tests::{Client, Cluster, Process, refusal};
use serde_json::Value;
use tonic::{Code, Status};

fn mask(paths: &[&str]) -> Option<prost_types::FieldMask> {
    Some(prost_types::FieldMask { paths: paths.iter().map(|&path| path.to_owned()).collect() })
}

async fn update(client: &Client, request: UpdateSessionRequest) -> Result<Session, Status> {
    let updated = client.sessions().update_session(request).await?.into_inner();
    updated.session.ok_or_else(|| Status::internal("no session"))
}

#[tokio::test]
async fn update_changes_only_masked_fields() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let labels = HashMap::from([("k".to_owned(), "v".to_owned())]);
    let idle_ttl = Some(duration_to_proto(Duration::from_secs(600)));
    let create = CreateSessionRequest {
        alias: "old".into(),
        labels: labels.clone(),
        idle_ttl,
        ..Default::default()
    };
    let created = client.create(create).await?;
    let name = created.name.clone();

    let request = UpdateSessionRequest {
        name: "sessions/old".into(),
        update_mask: mask(&["alias", "ttl"]),
        alias: "new".into(),
        ttl: Some(duration_to_proto(Duration::from_secs(2 * 3600))),
        ..Default::default()
    };
    let changed = update(&client, request).await?;
    assert_eq!(
        (changed.alias.as_str(), &changed.labels, changed.idle_ttl),
        ("new", &labels, idle_ttl)
    );
    let seconds = |session: &Session| session.expire_time.map(|time| time.seconds);
    assert!(seconds(&changed) > seconds(&created), "{changed:?}");
    client.exec("sessions/new", "true").await?;
    client.exec("sessions/old", "true").await.expect_err("the old alias");

    let update_mask = mask(&["alias", "labels", "idle_ttl"]);
    let cleared = update(
        &client,
        UpdateSessionRequest { name: name.clone(), update_mask, ..Default::default() },
    )
    .await?;
    assert!(cleared.alias.is_empty() && cleared.labels.is_empty() && cleared.idle_ttl.is_none());
    assert_eq!(cleared.expire_time, changed.expire_time);
    cluster.end().await
}

#[tokio::test]
async fn impossible_update_changes_nothing() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let taken =
        client.create(CreateSessionRequest { alias: "taken".into(), ..Default::default() }).await?;
    let name = client.session().await?.name;
    let request = |paths: &[&str]| UpdateSessionRequest {
        name: name.clone(),
        update_mask: mask(paths),
        ..Default::default()
    };
    let alias = |paths: &[&str]| UpdateSessionRequest { alias: "taken".into(), ..request(paths) };
    let in_use = update(&client, alias(&["alias"])).await.expect_err("the alias is in use");
    assert_eq!(refusal(&in_use).reason, "ALIAS_IN_USE");
    for (request, field) in [
        (request(&[]), "update_mask"),
        (request(&["*"]), "update_mask"),
        (request(&["mode"]), "update_mask"),
        (request(&["ttl"]), "ttl"),
        (alias(&["labels"]), "alias"),
    ] {
        let refused = refusal(&update(&client, request).await.expect_err(field));
        assert_eq!(
            (refused.code, refused.fields.as_slice()),
            (Code::InvalidArgument, &[field.into()][..])
        );
    }
    client.close(&taken.name).await?;
    update(&client, alias(&["alias"])).await?;
    client.close(&name).await?;
    let ended = update(&client, alias(&["alias"])).await.expect_err("the session has ended");
    assert_eq!(refusal(&ended).reason, "SESSION_ENDED");
    cluster.end().await
}

#[tokio::test]
async fn cli_updates_a_session() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let id = client.session().await?.session_id;
    let run = async |arguments: &[&str]| -> Result<_> {
        Process::finish(
            cluster.cli(&client, &[&["session", "update", &id], arguments].concat()),
            b"",
        )
        .await
    };
    let done = run(&["--alias", "work", "-l", "a=b", "--idle-ttl", "5m", "--json"]).await?;
    let session: Value = serde_json::from_str(&done.stdout).context("the session")?;
    assert_eq!((&session["alias"], &session["labels"]["a"]), (&"work".into(), &"b".into()));
    let done = run(&["--no-alias", "--no-labels", "--no-idle-ttl", "--json"]).await?;
    let session: Value = serde_json::from_str(&done.stdout).context("the session")?;
    assert!(session["alias"].is_null() && session["idleTtl"].is_null(), "{session}");
    assert_eq!(run(&[]).await?.code, Some(2), "nothing to change");
    cluster.end().await
}
