//! Lists: newest first, page by page, filtered.

use anyhow::Result;
use codelia_proto::v1::{ListRunsRequest, ListSessionsRequest, RunState, SessionState};
use codelia_tests::{Client, Cluster, refusal, shell};
use tonic::Code;

async fn run_ids(client: &Client, request: ListRunsRequest) -> Result<Vec<String>> {
    let runs = client.runs().list_runs(request).await?.into_inner().runs;
    Ok(runs.into_iter().map(|run| run.run_id).collect())
}

#[tokio::test]
async fn runs_are_paged_newest_first() -> Result<()> {
    let cluster = Cluster::start().await?;
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
        let request =
            ListRunsRequest { parent: "sessions/-".into(), page_size: 3, page_token, ..Default::default() };
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
    let cluster = Cluster::start().await?;
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
    let after = ListRunsRequest { created_after: late.create_time, ..all() };
    assert_eq!(run_ids(&client, after).await?, [late.run_id.as_str()]);
    let before = ListRunsRequest { created_before: late.create_time, ..all() };
    assert_eq!(run_ids(&client, before).await?, [early.run_id.as_str()]);
    cluster.end().await
}

#[tokio::test]
async fn sessions_are_listed_and_filtered_by_state() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(client.session().await?.session_id);
    }
    client.close(&format!("sessions/{}", made[0])).await?;
    let list =
        async |state: SessionState, page_size: i32, page_token: &str| -> Result<(Vec<String>, String)> {
            let request =
                ListSessionsRequest { page_size, page_token: page_token.into(), state: state.into() };
            let page = client.sessions().list_sessions(request).await?.into_inner();
            Ok((page.sessions.into_iter().map(|session| session.session_id).collect(), page.next_page_token))
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
        Ok(page) => assert!(page.into_inner().sessions.is_empty(), "another tenant's token showed sessions"),
        Err(status) => assert_eq!(refusal(&status).code, Code::InvalidArgument),
    }
    cluster.end().await
}
