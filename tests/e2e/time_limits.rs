//! Default and highest timeouts: of the installation, of a tenant, and by how a run is started.

use anyhow::Result;
use codelia_tests::{Client, Cluster, ClusterOptions, Process, ProcessOutput, Terminal};

async fn cluster(settings: &[(&'static str, &str)]) -> Result<Cluster> {
    let settings = settings.iter().map(|&(key, value)| (key, value.to_owned())).collect();
    Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await
}

async fn cli(cluster: &Cluster, client: &Client, arguments: &[&str]) -> Result<ProcessOutput> {
    Process::finish(cluster.cli(client, arguments), b"").await
}

#[tokio::test]
async fn interactive_run_outlives_default_timeout() -> Result<()> {
    let cluster = cluster(&[("CODELIA_LIMITS_TIMEOUT", "1s")]).await?;
    let client = cluster.tenant("a").await?;
    let shell = cluster.cli(&client, &["run", "-it", "--", "bash", "--norc", "--noprofile"]);
    let mut terminal = Terminal::start(&shell, 80, 24)?;
    terminal.shows("bash-").await?;
    // Twice the timeout of other runs.
    terminal.type_text("sleep 2; echo alive-$((20+1))\r")?;
    terminal.shows("alive-21").await?;
    terminal.type_text("exit 3\r")?;
    assert_eq!(terminal.exited().await?.code(), Some(3));
    // The control: a run that is neither interactive nor detached has the short timeout.
    let short = cli(&cluster, &client, &["run", "--", "sleep", "1000"]).await?;
    assert_eq!(short.code, Some(124), "{short:?}");
    cluster.end().await
}

#[tokio::test]
async fn timeout_message_says_how_to_raise_it() -> Result<()> {
    let cluster = cluster(&[("CODELIA_LIMITS_INTERACTIVE_TIMEOUT", "1s")]).await?;
    let client = cluster.tenant("a").await?;
    let mut terminal =
        Terminal::start(&cluster.cli(&client, &["run", "-t", "--", "sleep", "1000"]), 200, 24)?;
    terminal.shows("timed out after 1s (raise with --timeout").await?;
    assert_eq!(terminal.exited().await?.code(), Some(124));
    cluster.end().await
}

#[tokio::test]
async fn detached_run_outlives_default_timeout() -> Result<()> {
    let cluster = cluster(&[("CODELIA_LIMITS_TIMEOUT", "1s")]).await?;
    let client = cluster.tenant("a").await?;
    let started =
        cli(&cluster, &client, &["run", "-d", "--", "sh", "-c", "sleep 2; echo served"]).await?;
    let run = started.stdout.trim().to_owned();
    // With a terminal of its own, as a user would follow it.
    let mut terminal = Terminal::start(&cluster.cli(&client, &["attach", &run]), 80, 24)?;
    terminal.shows("served").await?;
    assert_eq!(terminal.exited().await?.code(), Some(0));
    cluster.end().await
}

#[tokio::test]
async fn operator_sets_the_highest_timeout() -> Result<()> {
    let cluster = cluster(&[("CODELIA_LIMITS_MAX_TIMEOUT", "48h")]).await?;
    let client = cluster.tenant("a").await?;
    let long = cli(&cluster, &client, &["run", "--timeout", "2days", "--", "true"]).await?;
    assert_eq!(long.code, Some(0), "{long:?}");
    let longer = cli(&cluster, &client, &["run", "--timeout", "49h", "--", "true"]).await?;
    assert_eq!(longer.code, Some(125), "{longer:?}");
    assert!(longer.stderr.contains("maximum is 2d"), "{longer:?}");
    cluster.end().await
}

#[tokio::test]
async fn tenant_has_highest_limits_of_its_own() -> Result<()> {
    let cluster = cluster(&[]).await?;
    let (a, b) = (cluster.tenant("a").await?, cluster.tenant("b").await?);
    let operator = cluster.operator().await?;
    let limits = ["tenants", "limits", "a", "--timeout", "48h", "--pids", "7"];
    let denied = cli(&cluster, &a, &limits).await?;
    assert_ne!(denied.code, Some(0), "only an operator: {denied:?}");
    let set = cli(&cluster, &operator, &limits).await?;
    assert_eq!(set.code, Some(0), "{set:?}");

    let long = ["run", "--timeout", "30h", "--", "true"];
    let allowed = cli(&cluster, &a, &long).await?;
    assert_eq!(allowed.code, Some(0), "{allowed:?}");
    let lowered = a.session().await?.limits.and_then(|limits| limits.pids);
    assert_eq!(lowered, Some(7), "the default is lowered");
    let refused = cli(&cluster, &b, &long).await?;
    assert!(refused.code == Some(125) && refused.stderr.contains("maximum is 1d"), "{refused:?}");
    let refused = cli(&cluster, &a, &["run", "--pids", "8", "--", "true"]).await?;
    assert!(refused.code == Some(125) && refused.stderr.contains("maximum is 7"), "{refused:?}");
    cluster.end().await
}
