//! `codelia ps` and `codelia kill`.

use anyhow::{Context, Result};
use codelia_proto::v1::{CancelRunRequest, ListRunsRequest, Run, RunState};

use crate::{
    args,
    client::{Client, pages, run_name, session_name},
    exit_status,
    output::Output,
    record,
};

/// Lists runs, newest first.
pub(crate) async fn ps(client: &Client, args: &args::Ps, output: Output) -> Result<()> {
    let states: &[RunState] =
        if args.all { &[RunState::Unspecified] } else { &[RunState::Running, RunState::Queued] };
    let mut runs = Vec::new();
    for state in states {
        runs.extend(list(client, args, *state).await?);
    }
    // Ids sort by the time they were made at.
    runs.sort_by(|a, b| b.run_id.cmp(&a.run_id));
    runs.truncate(args.limit);
    output.list(
        &["RUN", "SESSION", "STATE", "OUTCOME", "MODE", "WORKER", "CREATED", "COMMAND"],
        &runs,
        record::run,
        row,
    )
}

/// Cancels runs.
pub(crate) async fn kill(client: &Client, args: &args::Kill, output: Output) -> Result<()> {
    let mut canceled = Vec::new();
    for run in &args.runs {
        let response = client.runs().cancel_run(CancelRunRequest { name: run_name(run) }).await?.into_inner();
        canceled.push(response.run.context("the server told no run")?);
    }
    output.list(&[], &canceled, record::run, |run| vec![run.run_id.clone()])
}

async fn list(client: &Client, args: &args::Ps, state: RunState) -> Result<Vec<Run>> {
    let parent = session_name(args.session.as_deref().unwrap_or("-"));
    pages(args.limit, async |page_token| {
        let request =
            ListRunsRequest { parent: parent.clone(), page_token, state: state.into(), ..Default::default() };
        let page = client.runs().list_runs(request).await?.into_inner();
        Ok((page.runs, page.next_page_token))
    })
    .await
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
        run.command.as_ref().map(|command| shortened(&command.argv.join(" "))).unwrap_or_default(),
    ]
}

fn outcome(outcome: &codelia_proto::v1::Outcome) -> String {
    format!("{} ({})", exit_status::word(outcome), exit_status::exit_code(outcome))
}

/// A command fits in its row, and cannot draw on the terminal.
fn shortened(command: &str) -> String {
    let plain: String = command.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    match plain.char_indices().nth(40) {
        Some((end, _)) => format!("{}…", &plain[..end]),
        None => plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_in_a_table_is_short_and_has_no_control_characters() {
        assert_eq!(shortened("sh -c \x1b[31m\n"), "sh -c  [31m ");
        assert_eq!(shortened(&"é".repeat(50)), format!("{}…", "é".repeat(40)));
    }
}
