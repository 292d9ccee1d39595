//! `codelia ps` and `codelia kill`.

use std::process::ExitCode;

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{CancelRunRequest, ListRunsRequest, Run, RunState},
};

use crate::{
    args,
    client::{Client, pages},
    each::Each,
    exit_status,
    output::Output,
    record, resolve,
};

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
    let run_id = record::short_ids(runs.iter().map(|run| run.run_id.as_str()));
    let session_id = record::short_ids(runs.iter().map(|run| run.session_id.as_str()));
    let header = ["RUN", "SESSION", "STATUS", "MODE", "CREATED", "COMMAND"];
    output.print_list(&header, &runs, record::run, |run| {
        vec![
            run_id(&run.run_id),
            session_id(&run.session_id),
            status(run),
            record::mode(run.mode()).unwrap_or_default().to_owned(),
            record::relative(run.create_time.as_ref()),
            run.command.as_ref().map(|command| plain(&command.argv.join(" "))).unwrap_or_default(),
        ]
    })
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

/// The state of a run that has not ended, or its outcome.
fn status(run: &Run) -> String {
    match &run.outcome {
        Some(outcome) => format!("{} ({})", exit_status::name(outcome), exit_status::exit_code(outcome)),
        None => record::run_state(run).to_owned(),
    }
}

/// Removes control characters from a command.
fn plain(command: &str) -> String {
    command.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_in_table_is_printable() {
        assert_eq!(plain("sh -c \x1b[31m\n"), "sh -c  [31m ");
    }
}
