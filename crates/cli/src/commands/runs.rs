//! `codelia ps` and `codelia kill`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{CancelRunRequest, ListRunsRequest, Outcome, Run, RunState},
};

use crate::{
    args,
    client::{Client, pages},
    each::Each,
    exit_status,
    output::Output,
    record, resolve,
};

/// Maximum characters of a command in the table.
const MAX_COMMAND_CHARS: usize = 40;

/// Lists runs, newest first.
pub(crate) async fn ps(client: &Client, args: &args::Ps, output: Output) -> Result<()> {
    let states: &[RunState] =
        if args.all { &[RunState::Unspecified] } else { &[RunState::Running, RunState::Queued] };
    let mut runs = Vec::new();
    for state in states {
        runs.extend(list(client, args, *state).await?);
    }
    // Ids sort by creation time.
    runs.sort_by(|a, b| b.run_id.cmp(&a.run_id));
    runs.truncate(args.limit);
    output.print_list(
        &["RUN", "SESSION", "STATE", "OUTCOME", "MODE", "WORKER", "CREATED", "COMMAND"],
        &runs,
        record::run,
        row,
    )
}

/// Cancels runs.
pub(crate) async fn kill(client: &Client, args: &args::Kill, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    for run in &args.runs {
        let canceled = client.explained(cancel(client, run, args).await).await;
        each.report(run, canceled.map(|run| (record::run(&run), run.run_id)))?;
    }
    each.finish()
}

async fn cancel(client: &Client, run: &str, args: &args::Kill) -> Result<Run> {
    let name = resolve::run(client, run).await?;
    let grace = args.grace.map(duration_to_proto);
    let request = CancelRunRequest { name, reason: args.reason.clone(), grace };
    let response = client.runs().cancel_run(request).await?;
    response.into_inner().run.context("the server sent no run")
}

async fn list(client: &Client, args: &args::Ps, state: RunState) -> Result<Vec<Run>> {
    let parent = match &args.session {
        Some(session) => resolve::session(client, session).await?,
        None => "sessions/-".to_owned(),
    };
    let listed = pages(args.limit, async |page_token| {
        let request = ListRunsRequest {
            parent: parent.clone(),
            page_token,
            state: state.into(),
            labels: args.labels.iter().cloned().collect(),
            ..Default::default()
        };
        let page = client.runs().list_runs(request).await?.into_inner();
        Ok((page.runs, page.next_page_token))
    });
    listed.await
}

fn row(run: &Run) -> Vec<String> {
    vec![
        run.run_id.clone(),
        run.session_id.clone(),
        record::run_state(run).to_owned(),
        run.outcome.as_ref().map(outcome).unwrap_or_default(),
        record::mode(run.mode()).unwrap_or_default().to_owned(),
        run.worker_id.clone(),
        record::timestamp(run.create_time.as_ref()).unwrap_or_default(),
        run.command.as_ref().map(|command| shorten(&command.argv.join(" "))).unwrap_or_default(),
    ]
}

fn outcome(outcome: &Outcome) -> String {
    format!("{} ({})", exit_status::name(outcome), exit_status::exit_code(outcome))
}

/// Shortens a command to fit its column, and removes control characters.
fn shorten(command: &str) -> String {
    let plain: String = command.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match plain.char_indices().nth(MAX_COMMAND_CHARS) {
        Some((end, _)) => format!("{}…", &plain[..end]),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_in_table_is_short_and_printable() {
        assert_eq!(shorten("sh -c \x1b[31m\n"), "sh -c  [31m ");
        assert_eq!(shorten(&"é".repeat(50)), format!("{}…", "é".repeat(40)));
    }
}
