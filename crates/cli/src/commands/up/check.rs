//! The self-check: one run through the whole service, the way clients run commands.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use codelia_client::{client::Client, exit_status};
use codelia_proto::{
    duration_to_proto,
    v1::{
        CloseSessionRequest, CommandSpec, CreateSessionRequest, Run, StartRunRequest,
        WatchRunRequest, run_event::Kind,
    },
};

const TIMEOUT: Duration = Duration::from_secs(20);
const SESSION_TTL: Duration = Duration::from_secs(60);
const WORD: &str = "codelia";

/// Runs `echo codelia` and verifies its output and exit code.
pub(crate) async fn check(client: &Client) -> Result<Run> {
    let checked = tokio::time::timeout(TIMEOUT, run_echo(client)).await;
    checked
        .with_context(|| format!("no result after {TIMEOUT:?}"))
        .flatten()
        .context("self-check failed")
}

async fn run_echo(client: &Client) -> Result<Run> {
    let request =
        CreateSessionRequest { ttl: Some(duration_to_proto(SESSION_TTL)), ..Default::default() };
    let session = client.call(request).await?;
    let result = echo(client, &session.name).await;
    client.call(CloseSessionRequest { name: session.name }).await?;
    let (run, output) = result?;
    let code = run.outcome.as_ref().map(exit_status::exit_code);
    let reason = || {
        exit_status::message(&run)
            .unwrap_or_else(|| format!("exit code {}", code.unwrap_or_default()))
    };
    ensure!(code == Some(0), "`echo {WORD}` failed: {}", reason());
    let text = String::from_utf8_lossy(&output);
    ensure!(text == format!("{WORD}\n"), "`echo {WORD}` printed {text:?}");
    Ok(run)
}

async fn echo(client: &Client, session: &str) -> Result<(Run, Vec<u8>)> {
    let command = CommandSpec { argv: vec!["echo".into(), WORD.into()], ..Default::default() };
    let request = StartRunRequest {
        parent: session.to_owned(),
        command: Some(command),
        ..Default::default()
    };
    let name = client.call(request).await?.name;
    let watch = WatchRunRequest { name, ..Default::default() };
    let mut events = client.runs().watch_run(watch).await?.into_inner();
    let mut output = Vec::new();
    while let Some(response) = events.message().await? {
        match response.event.and_then(|event| event.kind) {
            Some(Kind::Output(chunk)) => output.extend_from_slice(&chunk.data),
            Some(Kind::Finished(finished)) => {
                return Ok((finished.run.context("the server sent no run record")?, output));
            }
            _ => {}
        }
    }
    anyhow::bail!("the server closed the stream before the run ended")
}
