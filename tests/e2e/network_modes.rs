//! The network of runs: what decides about it, and its effect in every mode. Nothing is sent.

use std::fs;

use anyhow::{Context, Result, ensure};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, ProcessOutput};
use serde_json::Value;

use crate::isolation::{isolating, isolating_with};

/// Prints the names of the network interfaces that a command sees.
const INTERFACES: &str = "tail -n +3 /proc/net/dev | cut -d: -f1";

async fn codelia(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

/// The interfaces that a command sees, and the network in its record.
async fn seen(cluster: &Cluster, client: &Client, flags: &[&str]) -> Result<(Vec<String>, Value)> {
    let arguments = [&["run", "--json"], flags, &["--", "sh", "-c", INTERFACES]].concat();
    let done = codelia(cluster, client, &arguments).await?;
    ensure!(done.code == Some(0), "{flags:?}: {done:?}");
    let record: Value = serde_json::from_str(done.stdout.lines().last().context("a record")?)?;
    let names = done.stderr.split_whitespace().map(str::to_owned).collect();
    Ok((names, record["network"].clone()))
}

fn interfaces_of_host() -> Result<Vec<String>> {
    let table = fs::read_to_string("/proc/net/dev")?;
    let name = |line: &str| line.split(':').next().map(|name| name.trim().to_owned());
    Ok(table.lines().skip(2).filter_map(name).collect())
}

/// Adds an api for each value of `CODELIA_SANDBOX_NETWORK`, and returns a client of each.
async fn clients(cluster: &mut Cluster, values: &[&str]) -> Result<Vec<Client>> {
    let first = cluster.tenant("a").await?;
    let mut clients = Vec::new();
    for value in values {
        cluster.add_api_with(&[("CODELIA_SANDBOX_NETWORK", value)]).await?;
        clients.push(Client::connect(&cluster.endpoint(clients.len() + 1), &first.secret).await?);
    }
    clients.insert(0, first);
    Ok(clients)
}

async fn network_setting_has_effect(mode: &'static str) -> Result<()> {
    let Some(mut cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let clients = clients(&mut cluster, &["none", "proxy"]).await?;
    for (client, network) in
        clients.iter().zip(["NETWORK_MODE_NONE", "NETWORK_MODE_NONE", "NETWORK_MODE_PROXY"])
    {
        let (names, recorded) = seen(&cluster, client, &[]).await?;
        ensure!(names == ["lo"], "{network}: {names:?}");
        ensure!(recorded == network, "{recorded} instead of {network}");
        let (names, recorded) = seen(&cluster, client, &["--network", "none"]).await?;
        ensure!(
            names == ["lo"] && recorded == "NETWORK_MODE_NONE",
            "{network}: {names:?} {recorded}"
        );
        let host = codelia(&cluster, client, &["run", "--network", "host", "--", "true"]).await?;
        ensure!(host.code == Some(125) && host.stderr.contains("network: host needs"), "{host:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn network_setting_has_effect_in_mode_bwrap() -> Result<()> {
    network_setting_has_effect("bwrap").await
}

#[tokio::test]
async fn network_setting_has_effect_in_mode_nsjail() -> Result<()> {
    network_setting_has_effect("nsjail").await
}

#[tokio::test]
async fn network_setting_has_effect_in_mode_native() -> Result<()> {
    network_setting_has_effect("native").await
}

#[tokio::test]
async fn network_setting_has_effect_in_mode_container() -> Result<()> {
    network_setting_has_effect("container").await
}

/// The control of the tests above: without isolation, a command sees the interfaces of the host.
#[tokio::test]
async fn network_setting_does_not_apply_to_logical() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let clients = clients(&mut cluster, &["none", "proxy"]).await?;
    // Other tests make and remove interfaces meanwhile.
    let lasting = |mut names: Vec<String>| {
        names.retain(|name| !name.starts_with("codelia"));
        names
    };
    let host = lasting(interfaces_of_host()?);
    for client in &clients {
        let (names, recorded) = seen(&cluster, client, &["--mode", "logical"]).await?;
        let names = lasting(names);
        ensure!(names == host, "{names:?} instead of {host:?}");
        ensure!(recorded.is_null(), "{recorded}");
        for network in ["none", "proxy"] {
            let flags = ["run", "--mode", "logical", "--network", network, "--", "true"];
            let refused = codelia(&cluster, client, &flags).await?;
            ensure!(refused.code == Some(125) && refused.stderr.contains("network"), "{refused:?}");
            ensure!(
                refused.stderr.contains(
                    "--network: cannot be enforced in mode logical; use mode native, bwrap"
                ),
                "{refused:?}"
            );
        }
        let flags = ["run", "--mode", "logical", "--allow-host", "a.example", "--", "true"];
        let refused = codelia(&cluster, client, &flags).await?;
        ensure!(refused.code == Some(125) && refused.stderr.contains("network"), "{refused:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn default_network_host_needs_policy() -> Result<()> {
    let options = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let cluster = Cluster::start_with(options).await?;
    let mut api = cluster.command("api", "host")?;
    api.env("CODELIA_API_LISTEN", "127.0.0.1:0").env("CODELIA_SANDBOX_NETWORK", "host");
    let refused = Process::finish(api, b"").await?;
    ensure!(refused.code != Some(0), "{refused:?}");
    ensure!(refused.stderr.contains("sandbox.network: host needs sandbox.policy"), "{refused:?}");
    cluster.end().await
}

#[tokio::test]
async fn run_cannot_have_more_network_than_policy() -> Result<()> {
    let place = codelia_tests::Scratch::new()?;
    let policy = place.join("policy.yaml");
    fs::write(&policy, "network: {mode: proxy, allowed_hosts: ['set:pypi', 'api-*.example.com']}")?;
    let settings = vec![("CODELIA_SANDBOX_POLICY", policy.display().to_string())];
    let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    for (flags, field) in [
        (&["--network", "host"][..], "network"),
        (&["--allow-host", "evil.example"], "policy.network.allowed_hosts[0]"),
        (&["--allow-host", "pypi.org", "--allow-host", "127.1"], "policy.network.allowed_hosts[1]"),
        (&["--allow-host", "set:nothing"], "policy.network.allowed_hosts[0]"),
    ] {
        let arguments = [&["run"], flags, &["--", "true"]].concat();
        let refused = codelia(&cluster, &client, &arguments).await?;
        ensure!(
            refused.code == Some(125) && refused.stderr.contains(field),
            "{flags:?}: {refused:?}"
        );
    }
    let by_program = place.join("program.yaml");
    fs::write(&by_program, "network: {executables: [/usr/bin/git]}")?;
    let by_program = by_program.display().to_string();
    let refused =
        codelia(&cluster, &client, &["run", "--policy", &by_program, "--", "true"]).await?;
    ensure!(refused.stderr.contains("policy.network.executables"), "{refused:?}");
    ensure!(refused.stderr.contains("runs of their own"), "{refused:?}");
    // A session's own limit holds for its runs.
    let create = ["session", "create", "--alias", "cut", "--network", "none"];
    ensure!(codelia(&cluster, &client, &create).await?.code == Some(0));
    let refused =
        codelia(&cluster, &client, &["run", "-s", "cut", "--network", "proxy", "--", "true"])
            .await?;
    ensure!(refused.code == Some(125) && refused.stderr.contains("at most none"), "{refused:?}");
    let explained = ["policy", "explain", "--session", "cut", "--json"];
    let explained: Value =
        serde_json::from_str(&codelia(&cluster, &client, &explained).await?.stdout)?;
    ensure!(explained["policy"]["network"]["mode"] == "NETWORK_MODE_NONE", "{explained}");
    let hosts = explained["policy"]["network"]["allowedHosts"].to_string();
    ensure!(hosts.contains("pypi.org") && !hosts.contains("set:"), "{hosts}");
    cluster.end().await
}

#[tokio::test]
async fn failed_command_without_network_gets_a_hint() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    // Nothing is looked up: the first fails before it could, the second only mentions a program.
    let script = "exit 6 # curl";
    let hinted = codelia(&cluster, &client, &["run", "--", "sh", "-c", script]).await?;
    ensure!(hinted.code == Some(6), "{hinted:?}");
    ensure!(hinted.stderr.contains("seems to need the network"), "{hinted:?}");
    let plain = codelia(&cluster, &client, &["run", "--", "sh", "-c", "exit 6"]).await?;
    ensure!(plain.code == Some(6) && plain.stderr.is_empty(), "{plain:?}");
    let succeeds = codelia(&cluster, &client, &["run", "--", "sh", "-c", "true # curl"]).await?;
    ensure!(succeeds.code == Some(0) && succeeds.stderr.is_empty(), "{succeeds:?}");
    cluster.end().await
}

#[tokio::test]
async fn policy_sets_need_no_server() -> Result<()> {
    let options = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let cluster = Cluster::start_with(options).await?;
    let mut sets = cluster.command("policy", "sets")?;
    sets.args(["sets", "--json"]);
    let done = Process::finish(sets, b"").await?;
    let sets: Value = serde_json::from_str(&done.stdout).with_context(|| format!("{done:?}"))?;
    let sets = sets.as_array().context("a list")?;
    let set = sets.iter().find(|set| set["set"] == "registries").context("registries")?;
    ensure!(set["hosts"].to_string().contains("files.pythonhosted.org"), "{set}");
    cluster.end().await
}
