//! Policies of a caller: checked, explained and enforced.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use codelia_policy::size::{MAX_BYTES, MAX_PATHS};
use codelia_proto::v1;
use codelia_tests::{Client, Cluster, Process, ProcessOutput, command, refusal};
use serde_json::Value;

use crate::isolation::isolating;

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

fn file(cluster: &Cluster, name: &str, text: &str) -> Result<String> {
    let path: PathBuf = cluster.directory().join(name);
    fs::write(&path, text)?;
    Ok(path.to_str().context("a path in UTF-8")?.to_owned())
}

#[tokio::test]
async fn policy_check_accepts_every_format_names_bad_field() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    for (name, text) in [
        ("good.yaml", "process: {allow_fork: false}"),
        ("good.json", r#"{"process": {"allow_fork": false}}"#),
        ("good.toml", "[process]\nallow_fork = false"),
    ] {
        let path = file(&cluster, name, text)?;
        let done =
            codelia(&cluster, &client, &["policy", "check", "--mode", "bwrap", "--json", &path])
                .await?;
        assert_eq!(done.code, Some(0), "{done:?}");
        let checked: Value = serde_json::from_str(&done.stdout)?;
        assert_eq!(checked["process"]["allowFork"], false, "{checked}");
        // Mode `logical` cannot enforce it and refuses it by field.
        let done =
            codelia(&cluster, &client, &["policy", "check", "--mode", "logical", &path]).await?;
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(done.stderr.contains("policy.process.allow_fork"), "{done:?}");
    }
    for (text, field) in [
        ("filesystem: {denied: []}", "filesystem.denied"),
        ("filesystem: {denied_paths: [/a, ../b]}", "policy.filesystem.denied_paths[1]"),
        ("filesystem: {read_only_paths: [/home]}", "policy.filesystem.read_only_paths[0]"),
        ("resources: {max_memory_bytes: 9999999999999}", "policy.resources.max_memory_bytes"),
        ("isolation_level: LEVEL_0", "policy.isolation_level"),
    ] {
        let path = file(&cluster, "bad.yaml", text)?;
        let done =
            codelia(&cluster, &client, &["policy", "check", "--mode", "bwrap", &path]).await?;
        assert_eq!(done.code, Some(1), "{text}: {done:?}");
        assert!(done.stderr.contains(field), "{text}: {done:?}");
    }
    let path = file(&cluster, "bad.yaml", "filesystem: {denied_paths: [../b]}")?;
    let done = codelia(&cluster, &client, &["run", "--policy", &path, "--", "true"]).await?;
    assert_eq!(done.code, Some(125), "{done:?}");
    assert!(cluster.session_directories()?.is_empty(), "no session was created");
    cluster.end().await
}

#[tokio::test]
async fn oversized_policy_is_refused_everywhere() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let paths =
        |count: usize| (0..count).map(|number| format!("/opt/{number:04}")).collect::<Vec<_>>();
    let document = |count| format!("filesystem: {{denied_paths: [{}]}}", paths(count).join(", "));
    let largest = file(&cluster, "largest.yaml", &document(MAX_PATHS))?;
    let done =
        codelia(&cluster, &client, &["policy", "check", "--mode", "bwrap", &largest]).await?;
    assert_eq!(done.code, Some(0), "the control: the largest policy is valid: {done:?}");
    let many = file(&cluster, "many.yaml", &document(MAX_PATHS + 1))?;
    let long = file(&cluster, "long.yaml", &format!("# {}", "a".repeat(MAX_BYTES)))?;
    for (path, texts) in [
        (&many, ["policy.filesystem.denied_paths", "maximum is 500", "name directories"]),
        (&long, ["long.yaml", "maximum is 262144", "name directories"]),
    ] {
        let done =
            codelia(&cluster, &client, &["policy", "check", "--mode", "bwrap", path]).await?;
        assert_eq!(done.code, Some(1), "{done:?}");
        assert!(texts.iter().all(|text| done.stderr.contains(text)), "{texts:?}: {done:?}");
    }
    let filesystem =
        v1::FilesystemPolicy { denied_paths: paths(MAX_PATHS + 1), ..Default::default() };
    let policy = Some(v1::Policy { filesystem: Some(filesystem), ..Default::default() });
    let session = client.session().await?;
    let check = v1::CheckPolicyRequest { policy: policy.clone(), mode: 0 };
    let explain = v1::ExplainPolicyRequest { policy: policy.clone(), ..Default::default() };
    let create = v1::CreateSessionRequest { policy: policy.clone(), ..Default::default() };
    let start = v1::StartRunRequest { policy, ..command(&session.name, &["true"]) };
    for refused in [
        client.policies().check_policy(check).await.map(drop),
        client.policies().explain_policy(explain).await.map(drop),
        client.create(create).await.map(drop),
        client.start(start).await.map(drop),
    ] {
        let refused = refusal(&refused.expect_err("an oversized policy"));
        assert_eq!(refused.fields, ["policy.filesystem.denied_paths"]);
    }
    cluster.end().await
}

#[tokio::test]
async fn explain_names_the_source_of_each_value() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = file(&cluster, "session.yaml", "resources: {max_memory_bytes: 100000000}")?;
    let created =
        codelia(&cluster, &client, &["session", "create", "--alias", "work", "--policy", &session])
            .await?;
    assert_eq!(created.code, Some(0), "{created:?}");
    let run =
        file(&cluster, "run.yaml", "resources: {max_memory_bytes: 200000000, max_open_files: 10}")?;
    let explain = ["policy", "explain", "--session", "work", "--policy", &run, "--json"];
    let done = codelia(&cluster, &client, &explain).await?;
    let explained: Value =
        serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))?;
    assert_eq!(explained["limits"]["memoryBytes"], "100000000", "{explained}");
    assert_eq!(explained["limits"]["openFiles"], "10", "{explained}");
    let decided = |name: &str| {
        let fields = explained["fields"].as_array().into_iter().flatten();
        fields.filter(|field| field["field"] == name).map(|field| field["source"].clone()).next()
    };
    assert_eq!(decided("resources.max_memory_bytes"), Some("POLICY_SOURCE_SESSION".into()));
    assert_eq!(decided("resources.max_open_files"), Some("POLICY_SOURCE_RUN".into()));
    assert_eq!(decided("process.debug"), Some("POLICY_SOURCE_DEFAULT".into()));
    cluster.end().await
}

#[tokio::test]
async fn command_pattern_refusal_is_not_recorded() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let policy = file(
        &cluster,
        "make.yaml",
        "command: {allowed_patterns: ['^echo '], blocked_patterns: [no]}",
    )?;
    let session = ["session", "create", "--alias", "work", "--policy", &policy];
    assert_eq!(codelia(&cluster, &client, &session).await?.code, Some(0));
    let done = codelia(&cluster, &client, &["run", "-s", "work", "--", "echo", "yes"]).await?;
    assert_eq!((done.stdout.as_str(), done.code), ("yes\n", Some(0)));
    for arguments in
        [["run", "-s", "work", "--", "echo", "no"], ["run", "-s", "work", "--", "ls", "x"]]
    {
        let done = codelia(&cluster, &client, &arguments).await?;
        assert_eq!(done.code, Some(125), "{done:?}");
        assert!(done.stderr.contains("policy.command."), "{done:?}");
    }
    let listed = codelia(&cluster, &client, &["ps", "--all", "--json"]).await?;
    let listed: Value = serde_json::from_str(&listed.stdout)?;
    assert_eq!(
        listed.as_array().map(Vec::len),
        Some(1),
        "only the allowed run is recorded: {listed}"
    );
    cluster.end().await
}

#[tokio::test]
async fn policy_is_enforced_in_mode_bwrap() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let shown = ["run", "--network", "none", "--", "ls", "/usr/share"];
    let shown = codelia(&cluster, &client, &shown).await?;
    assert_eq!(shown.code, Some(0), "{shown:?}");
    assert!(!shown.stdout.is_empty());
    let policy = "isolation_level: LEVEL_2\nfilesystem: {denied_paths: [/usr/share]}\nprocess: {allow_fork: false}";
    let policy = file(&cluster, "strict.yaml", policy)?;
    let hidden =
        codelia(&cluster, &client, &["run", "--policy", &policy, "--", "ls", "/usr/share"]).await?;
    assert_eq!(hidden.stdout, "", "{hidden:?}");
    let script = "(echo forked); echo after";
    let forks =
        codelia(&cluster, &client, &["run", "--policy", &policy, "--", "sh", "-c", script]).await?;
    assert!(!forks.stdout.contains("forked"), "{forks:?}");
    let host = codelia(&cluster, &client, &["run", "--network", "host", "--", "true"]).await?;
    assert_eq!(host.code, Some(125), "{host:?}");
    assert!(host.stderr.contains("network"), "{host:?}");
    cluster.end().await
}

#[tokio::test]
async fn no_debug_flag_denies_tracing() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let policy = file(&cluster, "debug.yaml", "process: {debug: true}")?;
    let session = ["session", "create", "--alias", "debug", "--policy", &policy];
    assert_eq!(codelia(&cluster, &client, &session).await?.code, Some(0));
    let trace = ["--", "perl", "-e", "print syscall(101, 0, 0, 0, 0)"];
    for place in [["--policy", &policy], ["--session", "debug"]] {
        let arguments = |flags: &[&'static str]| {
            ["run"].iter().chain(&place).chain(flags).chain(&trace).copied().collect::<Vec<_>>()
        };
        let traced = codelia(&cluster, &client, &arguments(&[])).await?;
        assert_eq!(traced.stdout, "0", "the control: the policy allows it, {traced:?}");
        let refused = codelia(&cluster, &client, &arguments(&["--no-debug"])).await?;
        assert_eq!(refused.stdout, "-1", "{refused:?}");
    }
    cluster.end().await
}
