//! Configuration: documented keys work, invalid ones stop the start.

use anyhow::{Context, Result};
use codelia_tests::{Cluster, ClusterOptions, Process, refusal};
use serde_json::Value;
use tonic::Code;

fn nothing_started() -> ClusterOptions {
    ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() }
}

#[tokio::test]
async fn sandbox_keys_work_by_name() -> Result<()> {
    let mut cluster = Cluster::start_with(nothing_started()).await?;
    let root = cluster.directory().join("elsewhere");
    let root = root.to_str().context("a path in UTF-8")?;
    let keys = [
        ("CODELIA_SANDBOX_MODE", "logical"),
        ("CODELIA_SANDBOX_ROOT", root),
        ("CODELIA_SANDBOX_TTL_SECONDS", "77"),
        ("CODELIA_SANDBOX_NETWORK", "proxy"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "0.5"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "64"),
    ];
    cluster.add_worker_with(&keys).await?;
    cluster.add_api_with(&keys).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    assert_eq!(session.mode(), codelia_proto::v1::SandboxMode::Logical);
    let seconds =
        |time: Option<prost_types::Timestamp>| time.map(|time| time.seconds).unwrap_or_default();
    assert!(
        (76..=78).contains(&(seconds(session.expire_time) - seconds(session.create_time))),
        "{session:?}"
    );
    let seen = client.exec(&session.name, "pwd").await?;
    assert!(seen.stdout_text().starts_with(root), "{}", seen.stdout_text());
    let limits = seen.run().limits.context("limits")?;
    assert_eq!((limits.cpu_millicores, limits.memory_bytes), (Some(500), Some(64 * 1024 * 1024)));
    cluster.end().await
}

#[tokio::test]
async fn invalid_settings_stop_startup_and_are_named() -> Result<()> {
    let cluster = Cluster::start_with(nothing_started()).await?;
    for (name, value) in [
        ("CODELIA_SANDBOX_MODES", "logical"),
        ("CODELIA_SANDBOX_MODE", "jail"),
        ("CODELIA_SANDBOX_TTL_SECONDS", "soon"),
        ("CODELIA_SANDBOX_CPU_LIMIT", "-1"),
        ("CODELIA_SANDBOX_MEMORY_LIMIT_MB", "0"),
        ("CODELIA_SANDBOX_NETWORK", "maybe"),
        ("CODELIA_API_LISTEN", "nowhere"),
    ] {
        let mut command = cluster.command("api", "misspelt")?;
        command.env("CODELIA_API_LISTEN", "127.0.0.1:0").env(name, value);
        let done = Process::finish(command, b"").await?;
        let key = name.trim_start_matches("CODELIA_").to_lowercase();
        let message = done.stderr.to_lowercase().replace(['.', '-'], "_");
        assert!(
            done.code.is_some_and(|code| code != 0) && message.contains(&key),
            "{name}={value}: {done:?}"
        );
    }
    let file = cluster.directory().join("codelia.toml");
    std::fs::write(&file, "[sandbox]\nmoed = \"logical\"\n")?;
    let mut command = cluster.command("config", "file")?;
    command.arg("show").env("CODELIA_CONFIG", &file);
    let done = Process::finish(command, b"").await?;
    assert!(done.code != Some(0) && done.stderr.contains("moed"), "{done:?}");
    cluster.end().await
}

#[tokio::test]
async fn config_show_names_sources_and_hides_secrets() -> Result<()> {
    let cluster = Cluster::start_with(nothing_started()).await?;
    let file = cluster.directory().join("codelia.toml");
    std::fs::write(&file, "[sandbox]\nttl = \"55s\"\ncpu_limit = 0.5\n[worker]\nslots = 3\n")?;
    let mut command = cluster.command("config", "shown")?;
    command
        .args(["show", "--json"])
        .env("CODELIA_CONFIG", &file)
        .env("CODELIA_WORKER_SLOTS", "9")
        .env("CODELIA_DATABASE_URL", "postgres://me:open-sesame@db/codelia")
        .env("CODELIA_API_KEY", "cdl_open-sesame");
    let done = Process::finish(command, b"").await?;
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(!done.stdout.contains("open-sesame"), "{}", done.stdout);
    let shown: Value = serde_json::from_str(&done.stdout)?;
    let text = shown.to_string();
    for wanted in ["worker.slots", "CODELIA_WORKER_SLOTS", "sandbox.ttl", "codelia.toml"] {
        assert!(text.contains(wanted), "{wanted} is missing in {text}");
    }
    cluster.end().await
}

#[tokio::test]
async fn prod_profile_refuses_logical_mode() -> Result<()> {
    let mut cluster = Cluster::start_with(nothing_started()).await?;
    let mut by_default = cluster.command("api", "prod")?;
    by_default.env("CODELIA_PROFILE", "prod").env("CODELIA_SANDBOX_MODE", "logical");
    let refused = Process::finish(by_default, b"").await?;
    assert!(refused.code != Some(0) && refused.stderr.contains("logical"), "{refused:?}");

    cluster.add_worker().await?;
    cluster.add_api_with(&[("CODELIA_PROFILE", "prod"), ("CODELIA_SANDBOX_MODE", "bwrap")]).await?;
    let client = cluster.tenant("a").await?;
    let request = codelia_proto::v1::CreateSessionRequest {
        mode: codelia_proto::v1::SandboxMode::Logical.into(),
        ..Default::default()
    };
    let refused = refusal(&client.create(request).await.expect_err("prod refuses mode logical"));
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "MODE_NOT_ALLOWED")
    );
    cluster.end().await
}

#[tokio::test]
async fn unmigrated_database_is_refused() -> Result<()> {
    let cluster = Cluster::start_with(nothing_started()).await?;
    let empty = codelia_tests::Database::create().await?;
    let mut api = cluster.command("api", "early")?;
    api.env("CODELIA_DATABASE_URL", empty.url()).env("CODELIA_API_LISTEN", "127.0.0.1:0");
    let early = Process::finish(api, b"").await?;
    assert!(early.code != Some(0) && early.stderr.contains("codelia migrate"), "{early:?}");

    // Concurrent migrations wait for each other.
    let migrate = || -> Result<_> {
        let mut command = cluster.command("migrate", "migrate")?;
        command.env("CODELIA_DATABASE_URL", empty.url());
        Ok(Process::finish(command, b""))
    };
    let (first, second) = tokio::join!(migrate()?, migrate()?);
    assert_eq!((first?.code, second?.code), (Some(0), Some(0)));
    assert!(empty.row_counts().await?.iter().any(|(table, _)| table == "runs"));
    empty.end().await?;
    cluster.end().await
}
