//! Policies of organisations, projects and users: merged, versioned, and tried on recorded runs.

use std::{fs, time::Instant};

use anyhow::{Context, Result, ensure};
use codelia_store::{EventKind, Scope};
use codelia_tests::{Client, Cluster, Process, ProcessOutput, recorded_events, refusal, shell};
use serde_json::Value;
use sqlx::Connection as _;

/// Executes `codelia policy` with a file of this content, if there is one.
async fn policy(
    cluster: &Cluster,
    client: &Client,
    arguments: &str,
    text: Option<&str>,
) -> Result<ProcessOutput> {
    let file = cluster.directory().join("policy.yaml");
    let mut words: Vec<&str> = arguments.split(' ').collect();
    if let Some(text) = text {
        fs::write(&file, text)?;
        words.insert(1, file.to_str().context("a path in UTF-8")?);
    }
    words.insert(0, "policy");
    Process::finish(cluster.cli(client, &words), b"").await
}

async fn done(
    cluster: &Cluster,
    client: &Client,
    arguments: &str,
    text: Option<&str>,
) -> Result<String> {
    let done = policy(cluster, client, arguments, text).await?;
    ensure!(done.code == Some(0), "{arguments}: {done:?}");
    Ok(done.stdout)
}

async fn json(
    cluster: &Cluster,
    client: &Client,
    arguments: &str,
    text: Option<&str>,
) -> Result<Value> {
    Ok(serde_json::from_str(&done(cluster, client, &format!("{arguments} --json"), text).await?)?)
}

/// The value and the source of a field.
async fn explained(
    cluster: &Cluster,
    client: &Client,
    arguments: &str,
    field: &str,
) -> Result<(String, String)> {
    let explained = json(cluster, client, &format!("explain {arguments}"), None).await?;
    let found =
        explained["fields"].as_array().context("fields")?.iter().find(|one| one["field"] == field);
    let found = found.context("no such field")?;
    let text = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
    let source = text("source").trim_start_matches("POLICY_SOURCE_").to_lowercase();
    Ok((text("value"), source))
}

#[tokio::test]
async fn lower_scope_tightens_unless_delegated() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (client, operator) = (cluster.tenant("a").await?, cluster.operator().await?);
    let organisation = "resources: {max_memory_bytes: 268435456, max_open_files: 500}";
    let delegating = format!("{organisation}\ndelegate: [resources.max_memory_bytes]");
    let set = "import --scope organisation --name a --reason less";
    done(&cluster, &operator, set, Some(&delegating)).await?;
    let project =
        "resources: {max_memory_bytes: 536870912, max_open_files: 900, max_output_bytes: 1024}";
    done(&cluster, &client, "import --scope project --name web --reason more", Some(project))
        .await?;
    let user = "command: {blocked_patterns: [forbidden]}";
    done(&cluster, &client, "import --scope user --reason mine", Some(user)).await?;

    let words = ["session", "create", "--alias", "work", "--project", "web"];
    let created = Process::finish(cluster.cli(&client, &words), b"").await?;
    ensure!(created.code == Some(0), "{created:?}");
    let of =
        async |arguments: &str, field: &str| explained(&cluster, &client, arguments, field).await;
    let pair = |value: &str, source: &str| (value.to_owned(), source.to_owned());
    for arguments in ["--session work", "--project web"] {
        // Delegated: the project has more. Not delegated: it has what its organisation has.
        ensure!(of(arguments, "resources.max_memory_bytes").await? == pair("536870912", "project"));
        ensure!(of(arguments, "resources.max_open_files").await? == pair("500", "tenant"));
        ensure!(of(arguments, "resources.max_output_bytes").await? == pair("1024", "project"));
        ensure!(
            of(arguments, "command.blocked_patterns").await? == pair("[\"forbidden\"]", "user")
        );
    }
    let none = of("--mode logical", "resources.max_memory_bytes").await?;
    ensure!(none == pair("268435456", "tenant"), "the control: without the project: {none:?}");
    let status =
        client.start(shell("sessions/work", "echo forbidden")).await.err().context("started")?;
    ensure!(refusal(&status).reason == "COMMAND_NOT_ALLOWED", "{status:?}");
    client.start(shell("sessions/work", "echo allowed")).await.context("the control")?;

    // Without the delegation, the session has at once what its organisation allows.
    done(&cluster, &operator, set, Some(organisation)).await?;
    let revoked = of("--session work", "resources.max_memory_bytes").await?;
    ensure!(revoked == pair("268435456", "tenant"), "{revoked:?}");
    cluster.end().await
}

#[tokio::test]
async fn only_owner_of_scope_may_change_it() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (client, other) = (cluster.tenant("a").await?, cluster.tenant("b").await?);
    let secret = cluster.key("a", &[Scope::Run]).await?;
    let plain = Client::connect(&cluster.endpoint(0), &secret).await?;
    let text = Some("process: {max_processes: 5}");
    for (caller, arguments, expected) in [
        (&client, "import --scope organisation --reason x", "operator"),
        (&other, "import --scope organisation --name a --reason x", "not found"),
        (&plain, "import --scope project --name web --reason x", "admin"),
        (
            &plain,
            "import --scope user --name 018f0000-0000-7000-8000-000000000000 --reason x",
            "only its own",
        ),
        (&client, "import --scope project --reason x", "name"),
    ] {
        let refused = policy(&cluster, caller, arguments, text).await?;
        ensure!(
            refused.code == Some(1) && refused.stderr.contains(expected),
            "{arguments}: {refused:?}"
        );
    }
    for (text, field) in [
        ("delegate: [network.mode]", "policy.delegate[0]"),
        ("filesystem: {read_only_paths: [/home]}", "policy.filesystem.read_only_paths[0]"),
        ("process: {debug: true}", "policy.process.debug"),
    ] {
        let import = "import --scope project --name web --reason x";
        let refused = policy(&cluster, &client, import, Some(text)).await?;
        ensure!(refused.code == Some(1) && refused.stderr.contains(field), "{text}: {refused:?}");
    }
    let refused = policy(
        &cluster,
        &plain,
        "import --scope user --reason x",
        Some("delegate: [process.debug]"),
    );
    ensure!(refused.await?.stderr.contains("policy.delegate"));
    done(&cluster, &plain, "import --scope user --reason x", text).await.context("the control")?;
    done(&cluster, &client, "import --scope project --name web --reason x", text).await?;
    // A project of another tenant does not exist, and a session needs one that does.
    ensure!(
        json(&cluster, &other, "history --scope project --name web", None).await?
            == Value::Array(vec![])
    );
    let words = ["session", "create", "--project", "web"];
    let refused = Process::finish(cluster.cli(&other, &words), b"").await?;
    ensure!(refused.code == Some(1) && refused.stderr.contains("has no policy"), "{refused:?}");
    cluster.end().await
}

#[tokio::test]
async fn rollback_restores_a_version() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let web = "--scope project --name web";
    let of = |processes: u32| format!("process: {{max_processes: {processes}}}");
    done(
        &cluster,
        &client,
        &format!("import {web} --reason first --expect-version 0"),
        Some(&of(9)),
    )
    .await?;
    done(
        &cluster,
        &client,
        &format!("import {web} --reason second --expect-version 1"),
        Some(&of(5)),
    )
    .await?;
    let late = format!("import {web} --reason late --expect-version 1");
    let refused = policy(&cluster, &client, &late, Some(&of(7))).await?;
    ensure!(
        refused.code == Some(1) && refused.stderr.contains("version 2 is in effect"),
        "{refused:?}"
    );

    let difference = json(&cluster, &client, &format!("diff --version 1 {web}"), None).await?;
    let expected =
        serde_json::json!([{ "field": "process.max_processes", "present": 5, "other": 9 }]);
    ensure!(difference == expected, "{difference}");
    let same = done(&cluster, &client, &format!("diff {web}"), Some(&of(5))).await?;
    ensure!(same.trim() == "no difference", "{same}");

    done(&cluster, &client, &format!("rollback {web} --version 1 --reason slow"), None).await?;
    for format in ["json", "yaml", "toml"] {
        let text =
            done(&cluster, &client, &format!("export {web} --format {format}"), None).await?;
        ensure!(text.contains("max_processes") && text.contains('9'), "{format}: {text}");
    }
    done(&cluster, &client, &format!("delete {web} --reason unused"), None).await?;
    let missing = policy(&cluster, &client, &format!("export {web}"), None).await?;
    ensure!(missing.code == Some(1) && missing.stderr.contains("has no policy"), "{missing:?}");
    let missing =
        policy(&cluster, &client, &format!("rollback {web} --version 9 --reason x"), None).await?;
    ensure!(missing.code == Some(1) && missing.stderr.contains("not found"), "{missing:?}");
    done(&cluster, &client, &format!("rollback {web} --version 2 --reason needed"), None).await?;

    let versions = json(&cluster, &client, &format!("history {web}"), None).await?;
    let versions = versions.as_array().context("versions")?;
    let reasons: Vec<_> =
        versions.iter().filter_map(|version| version["reason"].as_str()).collect();
    ensure!(reasons == ["needed", "unused", "slow", "second", "first"], "{versions:?}");
    let events =
        recorded_events(&cluster.store, &"a".parse()?, Some(EventKind::ScopePolicySet)).await?;
    ensure!(
        events.len() == 5 && events.iter().all(|event| event.subject.key.is_some()),
        "{events:?}"
    );
    ensure!(
        events[0].body.detail["restored"] == 2 && events[0].body.detail["name"] == "web",
        "{events:?}"
    );
    cluster.end().await
}

/// Copies a run, of which every tenth has another command.
const COPY: &str = r#"
INSERT INTO ended_runs (id, tenant_id, session_id, spec, settings_hash, summary, labels, attempt, created_at, ended_at, result)
SELECT run_id_at(now() - number * interval '1 second'), tenant_id, session_id,
       CASE WHEN number % 10 = 0 THEN jsonb_set(spec, '{command,argv}', '["echo", "forbidden"]') ELSE spec END,
       settings_hash, summary, labels, attempt, now() - number * interval '1 second', now(), result
FROM ended_runs, generate_series(1, 998) AS number
WHERE id = (SELECT id FROM ended_runs ORDER BY id DESC LIMIT 1)"#;

#[tokio::test]
async fn dry_run_names_what_1000_runs_would_lose() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    for _ in 0..2 {
        // The settings of the second are stored apart from it.
        client.exec(&session, "echo hello").await?;
    }
    let mut connection = cluster.database.connection().await?;
    sqlx::raw_sql(COPY).execute(&mut connection).await?;
    connection.close().await?;

    let text = "command: {blocked_patterns: [forbidden]}\nresources: {max_memory_bytes: 1048576}";
    let begun = Instant::now();
    let result =
        json(&cluster, &client, "dry-run --scope organisation --since 24h", Some(text)).await?;
    println!("dry run on 1000 runs: {:?}", begun.elapsed());
    ensure!(
        (&result["runs"], &result["refused"], &result["changed"])
            == (&1000.into(), &99.into(), &901.into())
    );
    ensure!(
        result["fields"]["command.blocked_patterns"] == serde_json::json!([99, 0]),
        "{}",
        result["fields"]
    );
    ensure!(
        result["fields"]["resources.max_memory_bytes"] == serde_json::json!([0, 901]),
        "{}",
        result["fields"]
    );
    let shown = done(&cluster, &client, "dry-run --scope user -n 5", Some(text)).await?;
    ensure!(shown.starts_with("5 runs: 0 refused, 5 changed"), "{shown}");
    for (arguments, runs) in
        [("dry-run --scope user", 1000), ("dry-run --scope project --name web", 0)]
    {
        let harmless =
            json(&cluster, &client, arguments, Some("command: {max_length: 1000}")).await?;
        ensure!(
            harmless["runs"] == runs && harmless["refused"] == 0 && harmless["changed"] == 0,
            "{harmless}"
        );
    }
    let none = json(&cluster, &client, "history --scope organisation", None).await?;
    ensure!(none == Value::Array(vec![]), "nothing is stored: {none}");
    cluster.end().await
}
