//! `codelia audit …`.

use std::{collections::VecDeque, time::Duration};

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{AuditEvent, ListEventsRequest, VerifyEventsRequest, VerifyEventsResponse};
use serde_json::json;
use tokio::time::sleep;

use crate::{
    args::{self, AuditCommand},
    client::{Client, pages},
    output::Output,
    record, resolve,
};

/// Between two looks for new events.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);
/// Events that one look reads. Older ones than these were missed.
const FOLLOW_EVENTS: usize = 1000;

/// Executes `codelia audit`.
pub(crate) async fn audit(client: &Client, args: args::Audit, output: Output) -> Result<()> {
    if let Some(AuditCommand::Verify) = args.command {
        return verify(client, output).await;
    }
    let parent = match &args.session {
        Some(session) => resolve::session(client, session).await?,
        None => "sessions/-".to_owned(),
    };
    let request = ListEventsRequest {
        parent,
        kind: args.kind,
        of_installation: args.installation,
        ..ListEventsRequest::default()
    };
    match args.follow {
        true => follow(client, &request, output).await,
        false => print(&list(client, &request, args.limit).await?, output),
    }
}

async fn list(client: &Client, request: &ListEventsRequest, limit: usize) -> Result<Vec<AuditEvent>> {
    pages(limit, async |page_token| {
        let page_size = i32::try_from(limit.min(1000)).unwrap_or(1000);
        let request = ListEventsRequest { page_token, page_size, ..request.clone() };
        let page = client.audit().list_events(request).await?.into_inner();
        Ok((page.events, page.next_page_token))
    })
    .await
}

fn print(events: &[AuditEvent], output: Output) -> Result<()> {
    let run = record::short_ids(events.iter().map(|event| event.run_id.as_str()));
    let session = record::short_ids(events.iter().map(|event| event.session_id.as_str()));
    let key = record::short_ids(events.iter().map(|event| event.key_id.as_str()));
    let header = ["WHEN", "KIND", "SESSION", "RUN", "KEY", "DETAIL"];
    output.print_list(&header, events, record::audit_event, |event| {
        vec![
            record::relative(event.create_time.as_ref()),
            event.kind.clone(),
            session(&event.session_id),
            run(&event.run_id),
            key(&event.key_id),
            event.detail.clone(),
        ]
    })
}

/// Prints new events until interrupted. Events of several writers may become visible out of order, so
/// those that were printed are remembered.
async fn follow(client: &Client, request: &ListEventsRequest, output: Output) -> Result<()> {
    let mut printed: VecDeque<String> =
        list(client, request, FOLLOW_EVENTS).await?.into_iter().map(|event| event.event_id).collect();
    loop {
        sleep(FOLLOW_INTERVAL).await;
        let events = list(client, request, FOLLOW_EVENTS).await?;
        for event in
            events.into_iter().rev().filter(|event| !printed.contains(&event.event_id)).collect::<Vec<_>>()
        {
            let value = record::audit_event(&event);
            let time = record::timestamp(event.create_time.as_ref()).unwrap_or_default();
            let text = format!("{time} {} {} {}", event.kind, event.run_id, event.detail);
            output.print(&value, &text)?;
            printed.push_back(event.event_id);
        }
        let excess = printed.len().saturating_sub(2 * FOLLOW_EVENTS);
        printed.drain(..excess);
    }
}

async fn verify(client: &Client, output: Output) -> Result<()> {
    let mut responses = client.audit().verify_events(VerifyEventsRequest {}).await?.into_inner();
    let mut last = VerifyEventsResponse::default();
    while let Some(response) = responses.message().await? {
        last = response;
    }
    let result = last.done.then_some(last).context("the server ended the check early; try again")?;
    let VerifyEventsResponse { writers, checkpoints, events, .. } = result;
    let value = json!({
        "writers": writers,
        "checkpoints": checkpoints,
        "events": events,
        "unlisted_events": result.unlisted_events,
        "unsigned_events": result.unsigned_events,
        "problem_count": result.problem_count,
        "problems": result.problems,
    });
    let mut text = format!("{events} events of {writers} processes, {checkpoints} checkpoints");
    for (count, meaning) in [
        (result.unlisted_events, "in no checkpoint: of the last second, or of a process that was killed"),
        (result.unsigned_events, "not signed: from before the installation had secrets.key_file"),
    ] {
        if count > 0 {
            text += &format!("\n{count} events {meaning}");
        }
    }
    for problem in &result.problems {
        text += &format!("\nproblem: {problem}");
    }
    output.print(&value, &text)?;
    match result.problem_count {
        0 => Ok(()),
        count => bail!("the audit was tampered with: {count} problems"),
    }
}
