//! `codelia admin bootstrap`: the first key of an operator.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::ListTenantsRequest;
use codelia_tests::{Client, Cluster, ClusterOptions, Process, ProcessOutput};
use serde_json::Value;

const LIVE_KEYS: &str = "SELECT count(*) FROM api_keys WHERE revoked_at IS NULL";

/// An installation that has a migrated database and nothing else.
async fn empty() -> Result<Cluster> {
    Cluster::start_with(ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() }).await
}

async fn bootstrap(cluster: &Cluster, arguments: &[&str]) -> Result<ProcessOutput> {
    let mut command = cluster.command("admin", "bootstrap")?;
    command.args(["bootstrap", "--json"]).args(arguments);
    Process::finish(command, b"").await
}

fn secret(done: &ProcessOutput) -> Result<String> {
    ensure!(done.code == Some(0), "{done:?}");
    let printed: Value = serde_json::from_str(&done.stdout)?;
    Ok(printed["secret"].as_str().context("secret")?.to_owned())
}

/// Requires that the key is an operator's.
async fn use_as_operator(cluster: &Cluster, secret: &str) -> Result<()> {
    let operator = Client::connect(&cluster.endpoint(0), secret).await?;
    operator.admin().list_tenants(ListTenantsRequest::default()).await?;
    Ok(())
}

#[tokio::test]
async fn bootstrap_creates_one_operator_key() -> Result<()> {
    let mut cluster = empty().await?;
    // Several at once: one creates the key, the others are refused.
    let attempts = futures::future::try_join_all((0..4).map(|_| bootstrap(&cluster, &[]))).await?;
    let (created, refused): (Vec<_>, Vec<_>) =
        attempts.iter().partition(|done| done.code == Some(0));
    ensure!(created.len() == 1, "{attempts:?}");
    for done in refused {
        ensure!(done.code == Some(1) && done.stderr.contains("an operator key exists"), "{done:?}");
        ensure!(
            done.stderr.contains("of tenant operators") && done.stderr.contains("--force"),
            "{done:?}"
        );
    }
    ensure!(cluster.database.number(LIVE_KEYS).await? == 1);
    let first = secret(created[0])?;
    let forced = secret(&bootstrap(&cluster, &["--force", "--tenant", "people"]).await?)?;
    cluster.add_api().await?;
    use_as_operator(&cluster, &first).await?;
    use_as_operator(&cluster, &forced).await?;
    // Keys that are not live do not count.
    cluster
        .database
        .execute("UPDATE api_keys SET revoked_at = now() WHERE tenant_id = 'people'")
        .await?;
    cluster
        .database
        .execute("UPDATE api_keys SET expires_at = now() WHERE tenant_id <> 'people'")
        .await?;
    secret(&bootstrap(&cluster, &[]).await?)?;
    // A suspended tenant could not use its key.
    cluster
        .database
        .execute("UPDATE tenants SET suspended_at = now(), suspend_reason = 'x'")
        .await?;
    let done = bootstrap(&cluster, &[]).await?;
    ensure!(done.code == Some(1) && done.stderr.contains("suspended"), "{done:?}");
    secret(&bootstrap(&cluster, &["--tenant", "others"]).await?)?;
    cluster.end().await
}

fn read_key(path: &Path) -> Result<String> {
    ensure!(path.metadata()?.permissions().mode() & 0o777 == 0o600, "others may read it");
    Ok(fs::read_to_string(path)?.trim_end().to_owned())
}

#[tokio::test]
async fn bootstrap_with_key_file_can_be_repeated() -> Result<()> {
    let mut cluster = empty().await?;
    let path = cluster.directory().join("operator.key");
    let file = path.display().to_string();
    let arguments = ["--key-file", &file];
    let attempts =
        futures::future::try_join_all((0..4).map(|_| bootstrap(&cluster, &arguments))).await?;
    ensure!(attempts.iter().all(|done| done.code == Some(0)), "{attempts:?}");
    let key = read_key(&path)?;
    ensure!(
        !attempts.iter().any(|done| done.stdout.contains(&key)),
        "the key is printed: {attempts:?}"
    );
    ensure!(cluster.database.number(LIVE_KEYS).await? == 1);

    // Another file is refused, and is not left.
    let other = cluster.directory().join("other.key");
    let done = bootstrap(&cluster, &["--key-file", &other.display().to_string()]).await?;
    ensure!(done.code == Some(1) && done.stderr.contains("an operator key exists"), "{done:?}");
    ensure!(!other.exists());

    // A call that was killed before it reached the database is completed by the next one.
    cluster.database.execute("DELETE FROM api_keys").await?;
    let done = bootstrap(&cluster, &["--key-file", &file]).await?;
    ensure!(done.code == Some(0) && read_key(&path)? == key, "{done:?}");
    cluster.add_api().await?;
    use_as_operator(&cluster, &key).await?;

    // A revoked key is not created again.
    cluster.database.execute("UPDATE api_keys SET revoked_at = now()").await?;
    let done = bootstrap(&cluster, &["--key-file", &file]).await?;
    ensure!(done.code == Some(1) && done.stderr.contains("remove the file"), "{done:?}");
    cluster.end().await
}

#[tokio::test]
async fn bootstrap_needs_migrated_database() -> Result<()> {
    let cluster = empty().await?;
    let mut command = cluster.command("admin", "bootstrap")?;
    command.args(["bootstrap"]).env_remove("CODELIA_DATABASE_URL");
    let done = Process::finish(command, b"").await?;
    ensure!(done.code == Some(1) && done.stderr.contains("CODELIA_DATABASE_URL"), "{done:?}");
    cluster.database.execute("DROP TABLE _sqlx_migrations").await?;
    let done = bootstrap(&cluster, &[]).await?;
    ensure!(done.code == Some(1) && done.stderr.contains("codelia migrate"), "{done:?}");
    cluster.end().await
}
