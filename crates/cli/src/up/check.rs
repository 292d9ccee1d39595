//! The self-check: one real run, the way every client's run goes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use codelia_proto::{
    duration_to_proto,
    v1::{
        CloseSessionRequest, CommandSpec, CreateSessionRequest, Outcome, Run, StartRunRequest,
        WatchRunRequest, outcome, run_event::Kind,
    },
};

use crate::client::Client;

const PATIENCE: Duration = Duration::from_secs(20);
const SESSION_TTL: Duration = Duration::from_secs(60);
const WORD: &str = "codelia";

/// Runs `echo`, reads its output and its end.
pub(crate) async fn check(client: &Client) -> Result<Run> {
    let checked = tokio::time::timeout(PATIENCE, check_patiently(client)).await;
    checked.context("it took too long").flatten().context("the self-check failed")
}

async fn check_patiently(client: &Client) -> Result<Run> {
    let request = CreateSessionRequest { ttl: Some(duration_to_proto(SESSION_TTL)), ..Default::default() };
    let session =
        client.sessions().create_session(request).await?.into_inner().session.context("no session")?;
    let checked = echo(client, &session.name).await;
    client.sessions().close_session(CloseSessionRequest { name: session.name }).await?;
    let (run, output) = checked?;
    let succeeded = matches!(run.outcome, Some(Outcome { kind: Some(outcome::Kind::Exited(0)) }));
    ensure!(succeeded, "its run ended as {:?}", run.outcome);
    ensure!(output == format!("{WORD}\n").as_bytes(), "its run wrote {:?}", String::from_utf8_lossy(&output));
    Ok(run)
}

async fn echo(client: &Client, session: &str) -> Result<(Run, Vec<u8>)> {
    let command = CommandSpec { argv: vec!["echo".into(), WORD.into()], ..Default::default() };
    let request =
        StartRunRequest { parent: session.to_owned(), command: Some(command), ..Default::default() };
    let run = client.runs().start_run(request).await?.into_inner().run.context("no run")?;
    let mut events =
        client.runs().watch_run(WatchRunRequest { name: run.name, position: 0 }).await?.into_inner();
    let mut output = Vec::new();
    while let Some(heard) = events.message().await? {
        match heard.event.and_then(|event| event.kind) {
            Some(Kind::Output(written)) => output.extend_from_slice(&written.data),
            Some(Kind::Finished(finished)) => return Ok((finished.run.context("no outcome")?, output)),
            _ => {}
        }
    }
    anyhow::bail!("its run did not end")
}
