//! A tenant that lists, filters and watches as fast as it may, next to one that runs.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use codelia_proto::v1::{ListRunsRequest, ListSessionsRequest, RunState};
use codelia_store::LocalPostgres;
use codelia_tests::{Client, Cluster, ClusterOptions, Database};
use futures::future::{Either, join_all, select};

use super::fill;
use crate::{measure::Measured, report::Report, runs::Runs};

const ALONE: &str = "first byte, alone";
const NEXT_TO_LISTS: &str = "… next to a tenant that lists, filters and watches";
/// Ended runs of the tenant that lists.
const RUNS: u64 = 1_000_000;
/// Calls of the lists at the same time.
const LANES: usize = 20;
const ROUNDS: usize = 4;
const ROUND_TIME: Duration = Duration::from_secs(10);

/// Measures both rows in rounds. Fails if a run was lost.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let shape = ClusterOptions { slots: 4 * cores, ..ClusterOptions::default() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let lister = Runs::client(&cluster, "load").await?;
    let session = lister.session().await?;
    lister.exec(&session.name, "true").await?;
    fill::ended_runs(&cluster.database, session.session_id.parse()?, RUNS).await?;
    let quiet = Runs::prepare(&cluster, "quiet", 1).await?;
    let mut report = Report::default();
    for _ in 0..ROUNDS {
        report.add(ALONE, quiet.first_byte(ROUND_TIME).await?);
        report.add(NEXT_TO_LISTS, next_to_lists(&quiet, &lister, &session.name).await?);
    }
    let lost = "SELECT count(*) FROM runs WHERE outcome ->> 'kind' = 'lost'";
    let lost = cluster.database.number(lost).await?;
    ensure!(lost == 0, "{lost} runs were lost");
    let [alone, next] =
        [ALONE, NEXT_TO_LISTS].map(|name| report.find(name).map(|row| row.percentile(95.0)));
    report.check_factor(
        "p95 of the first byte next to lists",
        next?.as_secs_f64() / alone?.as_secs_f64(),
        2.0,
    );
    cluster.end().await?;
    Ok(report)
}

async fn next_to_lists(quiet: &Runs, lister: &Client, session: &str) -> Result<Measured> {
    let lists = join_all((0..LANES).map(|lane| list(lister, session, lane)));
    match select(std::pin::pin!(quiet.first_byte(ROUND_TIME)), std::pin::pin!(lists)).await {
        Either::Left((measured, _)) => measured,
        Either::Right((ended, _)) => bail!("the lists ended: {ended:?}"),
    }
}

/// Calls one kind of list after another. A call that is refused for its rate or time is repeated.
async fn list(client: &Client, session: &str, lane: usize) -> Result<()> {
    let mut page_token = String::new();
    let mut watched = String::new();
    for number in lane.. {
        let request = ListRunsRequest {
            parent: "sessions/-".to_owned(),
            page_size: 1000,
            ..Default::default()
        };
        let request = match number % 5 {
            0 => request,
            1 => ListRunsRequest { parent: session.to_owned(), ..request },
            2 => ListRunsRequest { state: RunState::Running.into(), ..request },
            3 => ListRunsRequest {
                labels: [("number".to_owned(), number.to_string())].into(),
                ..request
            },
            _ => ListRunsRequest { page_token: page_token.clone(), ..request },
        };
        if let Ok(response) = client.runs().list_runs(request).await {
            let response = response.into_inner();
            page_token = response.next_page_token;
            watched = response.runs.into_iter().next().map_or(watched, |run| run.name);
        }
        let sessions = ListSessionsRequest { page_size: 1000, ..Default::default() };
        // The answer does not matter here, only its cost.
        let _ = client.sessions().list_sessions(sessions).await;
        let _ = client.watch_to_end(&watched, 0).await;
    }
    Ok(())
}
