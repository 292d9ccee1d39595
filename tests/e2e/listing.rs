//! Lists: newest first, page by page, filtered.

use std::collections::HashMap;

use anyhow::Result;
use codelia_proto::v1::{
    CreateSessionRequest, GetRunRequest, ListFilesRequest, ListRunsRequest, ListSessionsRequest,
    RunState, SessionState, StartRunRequest, run_service_client::RunServiceClient,
};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, refusal, shell};
use futures::{StreamExt, TryStreamExt, stream};
use prost::Message;
use serde_json::Value;
use tonic::Code;

/// What a gRPC client accepts by default.
const CLIENT_LIMIT: usize = 4 * 1024 * 1024;
/// What a page may have at most, with some room for tags and the token.
const PAGE_LIMIT: usize = 1024 * 1024 + 64 * 1024;

/// Labels of the maximum size.
fn large_labels() -> HashMap<String, String> {
    (0..64).map(|number| (format!("{number:063}"), "x".repeat(255))).collect()
}

/// Starts this many runs, some of them concurrently.
async fn start_all(client: &Client, request: StartRunRequest, count: usize) -> Result<()> {
    let starts = stream::repeat(request).take(count).map(|request| client.start(request));
    starts.buffer_unordered(8).map_ok(drop).try_collect::<()>().await?;
    Ok(())
}

async fn run_ids(client: &Client, request: ListRunsRequest) -> Result<Vec<String>> {
    let runs = client.runs().list_runs(request).await?.into_inner().runs;
    Ok(runs.into_iter().map(|run| run.run_id).collect())
}

#[tokio::test]
async fn runs_are_paged_newest_first() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut made = Vec::new();
    for _ in 0..7 {
        made.push(client.start(shell(&session.name, "true")).await?.run_id);
    }
    made.reverse();

    let mut listed = Vec::new();
    let mut page_token = String::new();
    let mut pages = 0;
    loop {
        let request = ListRunsRequest {
            parent: "sessions/-".into(),
            page_size: 3,
            page_token,
            ..Default::default()
        };
        let page = client.runs().list_runs(request).await?.into_inner();
        listed.extend(page.runs.into_iter().map(|run| run.run_id));
        page_token = page.next_page_token;
        pages += 1;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!((listed, pages), (made, 3));
    cluster.end().await
}

#[tokio::test]
async fn runs_are_filtered_by_session_state_and_time() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let (one, two) = (client.session().await?, client.session().await?);
    let early = client.start(shell(&one.name, "true")).await?;
    client.watch_to_end(&early.name, 0).await?;
    let late = client.start(shell(&two.name, "exec sleep 100")).await?;
    let all = || ListRunsRequest { parent: "sessions/-".into(), ..Default::default() };

    let of_one = ListRunsRequest { parent: one.name.clone(), ..Default::default() };
    assert_eq!(run_ids(&client, of_one).await?, [early.run_id.as_str()]);
    let ended = ListRunsRequest { state: RunState::Ended.into(), ..all() };
    assert_eq!(run_ids(&client, ended).await?, [early.run_id.as_str()]);
    let running = ListRunsRequest { state: RunState::Running.into(), ..all() };
    assert_eq!(run_ids(&client, running).await?, [late.run_id.as_str()]);
    let after = ListRunsRequest { created_after: early.create_time, ..all() };
    assert_eq!(
        run_ids(&client, after).await?,
        [late.run_id.as_str()],
        "the time itself is left out"
    );
    let before = ListRunsRequest { created_before: late.create_time, ..all() };
    assert_eq!(run_ids(&client, before).await?, [early.run_id.as_str()]);
    cluster.end().await
}

#[tokio::test]
async fn sessions_are_listed_and_filtered_by_state() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(client.session().await?.session_id);
    }
    client.close(&format!("sessions/{}", made[0])).await?;
    let list = async |state: SessionState,
                      page_size: i32,
                      page_token: &str|
           -> Result<(Vec<String>, String)> {
        let request = ListSessionsRequest {
            page_size,
            page_token: page_token.into(),
            state: state.into(),
            ..Default::default()
        };
        let page = client.sessions().list_sessions(request).await?.into_inner();
        Ok((
            page.sessions.into_iter().map(|session| session.session_id).collect(),
            page.next_page_token,
        ))
    };
    assert_eq!(list(SessionState::Ended, 0, "").await?.0, made[..1]);
    let (first, token) = list(SessionState::Open, 3, "").await?;
    let (second, end) = list(SessionState::Open, 3, &token).await?;
    let newest_first: Vec<_> = made[1..].iter().rev().cloned().collect();
    assert_eq!([first, second].concat(), newest_first);
    assert!(end.is_empty());

    let neighbour = cluster.tenant("b").await?;
    let stolen = ListSessionsRequest { page_token: token, ..Default::default() };
    match neighbour.sessions().list_sessions(stolen).await {
        Ok(page) => {
            assert!(page.into_inner().sessions.is_empty(), "another tenant's token showed sessions")
        }
        Err(status) => assert_eq!(refusal(&status).code, Code::InvalidArgument),
    }
    cluster.end().await
}

#[tokio::test]
async fn runs_with_large_environment_are_listed_as_summaries() -> Result<()> {
    const RUNS: usize = 100;
    // Without a worker the runs stay queued.
    let cluster = Cluster::start_with(ClusterOptions { workers: 0, ..Default::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut large = shell(&session.name, "exit 0");
    if let Some(command) = &mut large.command {
        command.env = (0..10).map(|number| (format!("V{number}"), "x".repeat(100_000))).collect();
    }
    start_all(&client, large.clone(), RUNS).await?;
    let mut long = large.clone();
    if let Some(command) = &mut long.command {
        command.env.clear();
        command.argv.extend((0..8).map(|_| "y".repeat(100_000)));
    }
    let long = client.start(long).await?;

    let request =
        ListRunsRequest { parent: "sessions/-".into(), page_size: 1000, ..Default::default() };
    let page = RunServiceClient::new(client.authorized()).list_runs(request).await?.into_inner();
    assert_eq!((page.runs.len(), page.next_page_token.as_str()), (RUNS + 1, ""));
    assert!(page.encoded_len() < RUNS * 1024, "{} bytes", page.encoded_len());
    let commands: Vec<_> = page.runs.iter().filter_map(|run| run.command.clone()).collect();
    assert_eq!(commands[0].argv[..3], ["sh", "-c", "exit 0"]);
    assert!(commands[0].argv_truncated && commands[0].encoded_len() < 2048);
    assert!(commands[1..].iter().all(|command| command.argv.len() == 3 && !command.argv_truncated));

    let get =
        GetRunRequest { name: page.runs[1].name.clone(), include_env: true, ..Default::default() };
    let whole = client.runs().get_run(get).await?.into_inner();
    assert_eq!(whole.run.clone().unwrap_or_default().command.unwrap_or_default().env.len(), 10);
    assert!(whole.encoded_len() * RUNS > CLIENT_LIMIT, "control: whole runs would not fit");
    let whole = client.get_run(&long.name).await?.command.unwrap_or_default();
    assert_eq!((whole.argv.len(), whole.argv_truncated), (11, false));

    let listed =
        Process::finish(cluster.cli(&client, &["ps", "--json", "--limit", "1000"]), b"").await?;
    assert_eq!(listed.code, Some(0), "{}", listed.stderr);
    let listed: Vec<Value> = serde_json::from_str(&listed.stdout)?;
    assert_eq!(listed.len(), RUNS + 1);
    assert_eq!(listed[0]["command"]["argvTruncated"], true);
    cluster.end().await
}

#[tokio::test]
async fn pages_end_at_a_number_of_bytes() -> Result<()> {
    const ROWS: usize = 60;
    const LINKS: usize = 300;
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    start_all(
        &client,
        StartRunRequest { labels: large_labels(), ..shell(&session.name, "true") },
        ROWS,
    )
    .await?;
    let create = CreateSessionRequest { labels: large_labels(), ..Default::default() };
    for _ in 0..ROWS {
        client.create(create.clone()).await?;
    }
    let target = "t/".repeat(2000);
    let script = format!("i=0; while [ $i -lt {LINKS} ]; do ln -s {target} l$i; i=$((i+1)); done");
    client.exec(&session.name, &script).await?;

    let bytes = read_pages(ROWS + 1, async |page_token| {
        let parent = "sessions/-".to_owned();
        let request = ListRunsRequest { parent, page_size: 1000, page_token, ..Default::default() };
        let page = client.runs().list_runs(request).await?.into_inner();
        Ok((page.encoded_len(), page.runs.len(), page.next_page_token))
    });
    check_pages(&bytes.await?);
    let bytes = read_pages(ROWS + 1, async |page_token| {
        let request = ListSessionsRequest { page_size: 1000, page_token, ..Default::default() };
        let page = client.sessions().list_sessions(request).await?.into_inner();
        assert!(page.sessions.iter().all(|session| session.policy.is_none()));
        Ok((page.encoded_len(), page.sessions.len(), page.next_page_token))
    });
    check_pages(&bytes.await?);
    assert!(client.get_session(&session.name).await?.policy.is_some());
    let bytes = read_pages(LINKS, async |page_token| {
        let parent = session.name.clone();
        let request =
            ListFilesRequest { parent, page_size: 1000, page_token, ..Default::default() };
        let page = client.files().list_files(request).await?.into_inner();
        Ok((page.encoded_len(), page.files.len(), page.next_page_token))
    });
    check_pages(&bytes.await?);
    cluster.end().await
}

/// Reads all pages, which must have this many rows together, and returns the bytes of each. `read`
/// returns the bytes, the rows and the next token of a page.
async fn read_pages(
    expected: usize,
    mut read: impl AsyncFnMut(String) -> Result<(usize, usize, String)>,
) -> Result<Vec<usize>> {
    let (mut pages, mut found, mut token) = (Vec::new(), 0, String::new());
    loop {
        let (bytes, rows, next) = read(token).await?;
        pages.push(bytes);
        found += rows;
        token = next;
        if token.is_empty() {
            assert_eq!(found, expected);
            return Ok(pages);
        }
    }
}

/// The rows needed several pages, and none of them is large.
fn check_pages(bytes: &[usize]) {
    assert!(bytes.len() > 1 && bytes.iter().sum::<usize>() > PAGE_LIMIT, "{bytes:?}");
    assert!(bytes.iter().all(|&bytes| bytes < PAGE_LIMIT), "{bytes:?}");
}
