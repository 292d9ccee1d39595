//! `codelia audit …`.

use std::{collections::HashMap, ops::ControlFlow, time::Duration};

use anyhow::{Context, Result, bail};
use codelia_proto::{
    timestamp_to_proto,
    v1::{AuditEvent, ListEventsRequest, VerifyEventsRequest, VerifyEventsResponse},
};
use time::OffsetDateTime;
use tokio::time::sleep;

use crate::{
    args::{self, AuditCommand},
    client::Client,
    ids,
    output::Output,
    resolve, units,
};

/// Between two looks for new events.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(1);
/// Each look also reads this much of the time before: an event is stored a moment after its time,
/// and the clocks of several writers differ.
const FOLLOW_OVERLAP: Duration = Duration::from_secs(5);

/// Executes `codelia audit`.
pub(crate) async fn audit(client: &Client, args: args::Audit, output: Output) -> Result<()> {
    if let Some(AuditCommand::Verify) = args.command {
        return verify(client, output).await;
    }
    let parent = resolve::parent(client, args.session.as_deref()).await?;
    let request = ListEventsRequest {
        parent,
        kind: args.kind,
        of_installation: args.installation,
        ..ListEventsRequest::default()
    };
    let since = args.since.map(timestamp_to_proto);
    match (args.follow, args.since.or(args.until)) {
        (true, _) => {
            follow(client, ListEventsRequest { start_time: since, ..request }, output).await
        }
        (false, Some(_)) => {
            let end_time = args.until.map(timestamp_to_proto);
            let request =
                ListEventsRequest { start_time: since, end_time, oldest_first: true, ..request };
            each(client, request, |event| print_line(&event, output)).await
        }
        (false, None) => print(&client.list(request, args.limit).await?, output),
    }
}

/// Calls `action` with each event, a page at a time.
async fn each(
    client: &Client,
    request: ListEventsRequest,
    mut action: impl FnMut(AuditEvent) -> Result<()>,
) -> Result<()> {
    let take = |page: Vec<AuditEvent>| {
        page.into_iter().try_for_each(&mut action).map(ControlFlow::Continue)
    };
    client.each_page(request, take).await
}

fn print_line(event: &AuditEvent, output: Output) -> Result<()> {
    let time = units::timestamp(event.create_time.as_ref()).unwrap_or_default();
    let text = format!("{time} {} {} {}", event.kind, event.run_id, event.detail);
    output.print_message_as(event, &text)
}

fn print(events: &[AuditEvent], output: Output) -> Result<()> {
    let run = ids::short(events.iter().map(|event| event.run_id.as_str()));
    let session = ids::short(events.iter().map(|event| event.session_id.as_str()));
    let key = ids::short(events.iter().map(|event| event.key_id.as_str()));
    let header = ["WHEN", "KIND", "SESSION", "RUN", "KEY", "DETAIL"];
    output.print_list(&header, events, |event| {
        vec![
            units::age(event.create_time.as_ref()),
            event.kind.clone(),
            session(&event.session_id),
            run(&event.run_id),
            key(&event.key_id),
            event.detail.clone(),
        ]
    })
}

/// Prints new events until interrupted, those from `request.start_time` on or from now on. Events
/// of several writers may become visible out of order, so those that were printed lately are
/// remembered.
async fn follow(client: &Client, mut request: ListEventsRequest, output: Output) -> Result<()> {
    request.oldest_first = true;
    let begin = OffsetDateTime::now_utc();
    let first = *request.start_time.get_or_insert_with(|| timestamp_to_proto(begin));
    // The times of the events that were printed, and of the newest one.
    let mut printed: HashMap<String, prost_types::Timestamp> = HashMap::new();
    let mut newest = first;
    loop {
        each(client, request.clone(), |event| {
            let time = event.create_time.unwrap_or_default();
            if later(&time, &newest) {
                newest = time;
            }
            match printed.insert(event.event_id.clone(), time) {
                Some(_) => Ok(()),
                None => print_line(&event, output),
            }
        })
        .await?;
        let overlap = i64::try_from(FOLLOW_OVERLAP.as_secs()).unwrap_or(i64::MAX);
        let again = prost_types::Timestamp { seconds: newest.seconds - overlap, nanos: 0 };
        printed.retain(|_, time| !later(&again, time));
        request.start_time = Some(if later(&again, &first) { again } else { first });
        sleep(FOLLOW_INTERVAL).await;
    }
}

fn later(one: &prost_types::Timestamp, other: &prost_types::Timestamp) -> bool {
    (one.seconds, one.nanos) > (other.seconds, other.nanos)
}

async fn verify(client: &Client, output: Output) -> Result<()> {
    let mut responses = client.audit().verify_events(VerifyEventsRequest {}).await?.into_inner();
    let mut last = VerifyEventsResponse::default();
    while let Some(response) = responses.message().await? {
        last = response;
    }
    let result =
        last.done.then_some(last).context("the server ended the check early; try again")?;
    let VerifyEventsResponse { writers, checkpoints, events, .. } = result;
    let mut text = format!("{events} events of {writers} processes, {checkpoints} checkpoints");
    for (count, meaning) in [
        (
            result.unlisted_events,
            "in no checkpoint: of the last second, or of a process that was killed",
        ),
        (result.unsigned_events, "not signed: from before the installation had secrets.key_file"),
    ] {
        if count > 0 {
            text += &format!("\n{count} events {meaning}");
        }
    }
    for problem in &result.problems {
        text += &format!("\nproblem: {problem}");
    }
    output.print_message_as(&result, &text)?;
    match result.problem_count {
        0 => Ok(()),
        count => bail!("the audit was tampered with: {count} problems"),
    }
}
