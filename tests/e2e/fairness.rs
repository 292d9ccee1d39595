//! A tenant that floods the queue delays another tenant by at most one slot turn, and one that
//! lists without pause waits for its own rate.

use anyhow::{Context, Result};
use codelia_proto::v1::{ListSessionsRequest, Run};
use codelia_tests::{Client, Cluster, ClusterOptions, refusal, shell};
use futures::future::join_all;

fn nanos(time: Option<&prost_types::Timestamp>) -> Result<i128> {
    let time = time.context("a time")?;
    Ok(i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos))
}

async fn ended(client: &Client, runs: &[Run]) -> Result<Vec<Run>> {
    let mut ended = Vec::new();
    for run in runs {
        ended.extend(client.watch_to_end(&run.name, 0).await?.finished);
    }
    Ok(ended)
}

#[tokio::test]
async fn flood_delays_other_tenant_by_one_turn() -> Result<()> {
    let cluster =
        Cluster::start_with(ClusterOptions { slots: 1, ..ClusterOptions::default() }).await?;
    let flooding = cluster.tenant("flood").await?;
    let quiet = cluster.tenant("quiet").await?;
    let (many, one) = (flooding.session().await?, quiet.session().await?);
    quiet.exec(&one.name, "true").await?;

    let mut flood = Vec::new();
    for _ in 0..30 {
        flood.push(flooding.start(shell(&many.name, "sleep 0.1")).await?);
    }
    let run = quiet.start(shell(&one.name, "true")).await?;
    let run = quiet.watch_to_end(&run.name, 0).await?.finished.context("an end")?;
    let (created, started) = (nanos(run.create_time.as_ref())?, nanos(run.start_time.as_ref())?);

    let starts = ended(&flooding, &flood)
        .await?
        .iter()
        .map(|run| nanos(run.start_time.as_ref()))
        .collect::<Result<Vec<_>>>()?;
    let between = starts.iter().filter(|start| (created..started).contains(*start)).count();
    assert!(between <= 1, "{between} runs of the flood started before the quiet tenant's run");
    let after = starts.iter().filter(|start| **start > started).count();
    assert!(after > 10, "the flood ended too early: {after} runs started later");
    cluster.end().await
}

#[tokio::test]
async fn lists_of_one_tenant_have_a_rate() -> Result<()> {
    let settings = vec![("CODELIA_API_LIST_READS_PER_SECOND", "1".to_owned())];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let (flooding, quiet) = (cluster.tenant("flood").await?, cluster.tenant("quiet").await?);
    let list = async |client: &Client| {
        client.sessions().list_sessions(ListSessionsRequest::default()).await
    };
    // More than one a second for the time that a call waits.
    let flood = join_all((0..30).map(|_| list(&flooding)));
    let (listed, other) = tokio::join!(flood, list(&quiet));
    other?;
    let refused: Vec<_> =
        listed.iter().filter_map(|list| list.as_ref().err()).map(refusal).collect();
    assert!(refused.len() < listed.len(), "no list had its turn");
    assert!(refused.len() >= 10, "only {} of {} lists were refused", refused.len(), listed.len());
    assert!(refused.iter().all(|refused| refused.reason == "RATE_LIMITED"), "{refused:?}");
    cluster.end().await
}
