//! Lists of runs and sessions that have certain labels.

use anyhow::Result;
use codelia_proto::v1::{
    CreateSessionRequest, ListRunsRequest, ListSessionsRequest, RunState, StartRunRequest,
};
use codelia_tests::{Client, Cluster, Process, eventually, refusal, shell};
use serde_json::Value;

fn labels<Map: FromIterator<(String, String)>>(pairs: &[(&str, &str)]) -> Map {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

async fn start(client: &Client, session: &str, pairs: &[(&str, &str)]) -> Result<String> {
    let request = StartRunRequest { labels: labels(pairs), ..shell(session, "true") };
    Ok(client.start(request).await?.run_id)
}

async fn runs(client: &Client, pairs: &[(&str, &str)]) -> Result<Vec<String>> {
    let request = ListRunsRequest {
        parent: "sessions/-".into(),
        labels: labels(pairs),
        ..Default::default()
    };
    let runs = client.runs().list_runs(request).await?.into_inner().runs;
    Ok(runs.into_iter().map(|run| run.run_id).collect())
}

#[tokio::test]
async fn runs_are_filtered_by_all_labels() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let web = start(&client, &session, &[("app", "web"), ("tier", "x=y")]).await?;
    let api = start(&client, &session, &[("app", "api"), ("tier", "x=y")]).await?;
    start(&client, &session, &[]).await?;
    let neighbour = cluster.tenant("b").await?;
    let other = neighbour.session().await?.name;
    start(&neighbour, &other, &[("app", "web")]).await?;

    assert_eq!(runs(&client, &[("app", "web")]).await?, [web.as_str()]);
    assert_eq!(
        runs(&client, &[("tier", "x=y")]).await?,
        [api.as_str(), web.as_str()],
        "newest first"
    );
    assert_eq!(runs(&client, &[("tier", "x=y"), ("app", "web")]).await?, [web.as_str()]);
    let nothing = Vec::<String>::new();
    assert_eq!(runs(&client, &[("app", "web"), ("tier", "z")]).await?, nothing);
    assert_eq!(runs(&client, &[("app", "we")]).await?, nothing, "values are compared whole");
    assert_eq!(runs(&client, &[("tierx", "=y")]).await?, nothing, "keys are compared whole");

    client.watch_to_end(&format!("sessions/-/runs/{web}"), 0).await?;
    let request = ListRunsRequest {
        parent: session,
        state: RunState::Ended.into(),
        labels: labels(&[("app", "web")]),
        ..Default::default()
    };
    assert_eq!(
        client.runs().list_runs(request).await?.into_inner().runs.len(),
        1,
        "with other filters"
    );
    let request = ListRunsRequest {
        parent: "sessions/-".into(),
        labels: labels(&[("", "x")]),
        ..Default::default()
    };
    let refused = client.runs().list_runs(request).await.expect_err("an empty key");
    assert_eq!(refusal(&refused).fields, ["labels"]);
    cluster.end().await
}

#[tokio::test]
async fn labeled_pages_hold_only_matches() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let mut made = Vec::new();
    for number in 0..6 {
        let even = if number % 2 == 0 { "yes" } else { "no" };
        let pairs = [("even", even), ("a", "1"), ("b", "2"), ("c", "3")];
        let id = start(&client, &session, &pairs).await?;
        if number % 2 == 0 {
            made.insert(0, id);
        }
    }
    let page = |page_token: String| ListRunsRequest {
        parent: "sessions/-".into(),
        page_size: 2,
        page_token,
        labels: labels(&[("c", "3"), ("even", "yes"), ("a", "1"), ("b", "2")]),
        ..Default::default()
    };
    let first = client.runs().list_runs(page(String::new())).await?.into_inner();
    let second = client.runs().list_runs(page(first.next_page_token.clone())).await?.into_inner();
    let listed: Vec<_> = first.runs.into_iter().chain(second.runs).map(|run| run.run_id).collect();
    assert_eq!((listed, second.next_page_token.as_str()), (made, ""));
    cluster.end().await
}

#[tokio::test]
async fn sessions_are_filtered_by_labels() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let request = CreateSessionRequest { labels: labels(&[("owner", "me")]), ..Default::default() };
    let mine = client.create(request).await?.session_id;
    client.session().await?;
    let request = ListSessionsRequest { labels: labels(&[("owner", "me")]), ..Default::default() };
    let listed = client.sessions().list_sessions(request).await?.into_inner().sessions;
    assert_eq!(
        listed.iter().map(|session| session.session_id.as_str()).collect::<Vec<_>>(),
        [mine.as_str()]
    );

    let list = async |arguments: &[&str]| -> Result<Value> {
        let done = Process::finish(cluster.cli(&client, arguments), b"").await?;
        Ok(serde_json::from_str(&done.stdout)?)
    };
    let sessions = list(&["session", "list", "-l", "owner=me", "--json"]).await?;
    assert_eq!(
        (sessions.as_array().map(Vec::len), &sessions[0]["sessionId"]),
        (Some(1), &mine.into())
    );
    start(
        &client,
        &format!("sessions/{}", sessions[0]["sessionId"].as_str().unwrap_or("")),
        &[("n", "1")],
    )
    .await?;
    let runs = list(&["ps", "--all", "-l", "n=1", "--json"]).await?;
    assert_eq!((runs.as_array().map(Vec::len), &runs[0]["labels"]["n"]), (Some(1), &"1".into()));
    assert_eq!(list(&["ps", "--all", "-l", "n=2", "--json"]).await?, Value::Array(Vec::new()));
    cluster.end().await
}

#[tokio::test]
async fn labeled_lists_use_the_label_index() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    // The migrations scan them a few times.
    let scans = "SELECT count(*) FROM pg_stat_user_indexes
                 WHERE indexrelname IN ('run_labels_default_pkey', 'sessions_by_label') AND idx_scan > 20";
    assert_eq!(cluster.database.number(scans).await?, 0);
    // Postgres publishes its counters with a delay, when a connection is used again.
    eventually("both lists used their index", || async {
        runs(&client, &[("a", "b")]).await.ok()?;
        let request = ListSessionsRequest { labels: labels(&[("a", "b")]), ..Default::default() };
        client.sessions().list_sessions(request).await.ok()?;
        (cluster.database.number(scans).await.ok()? == 2).then_some(())
    })
    .await;
    cluster.end().await
}
