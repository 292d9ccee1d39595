//! `codelia ps` and `codelia kill`, of runs and sessions.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use codelia_proto::{
    duration_to_proto,
    json::to_json,
    v1::{
        CancelRunRequest, CancelTenantRunRequest, CloseSessionRequest, GetRunRequest,
        GetRunResponse, ListRunsRequest, ListTenantRunsRequest, LiveUsage, Run, RunState,
        SignalRunRequest, TenantRun,
    },
};
use serde_json::Value;

use crate::{
    args,
    client::Client,
    each::Each,
    exit_status, ids,
    output::{Output, fitting_table, json_array, write_line, write_note},
    resolve::{self, RunOrSession},
    units,
    words::Word,
};

/// Lists runs, newest first.
pub(crate) async fn ps(client: &Client, args: &args::Ps, output: Output) -> Result<()> {
    if let Some(target) = &args.target {
        return print_processes(client, args, target, output).await;
    }
    if args.all_tenants || args.tenant.is_some() {
        return ps_of_tenants(client, args, output).await;
    }
    let states: &[RunState] =
        if args.all { &[RunState::Unspecified] } else { &[RunState::Running, RunState::Queued] };
    let parent = resolve::parent(client, args.session.as_deref()).await?;
    let mut runs = Vec::new();
    for state in states {
        runs.extend(list(client, args, parent.clone(), *state).await?);
    }
    // Ids sort by creation time.
    runs.sort_by(|a, b| b.run_id.cmp(&a.run_id));
    runs.truncate(args.limit);
    if args.usage {
        return print_usage(client, &runs, output).await;
    }
    let run_id = ids::short(runs.iter().map(|run| run.run_id.as_str()));
    let session_id = ids::short(runs.iter().map(|run| run.session_id.as_str()));
    let header = ["RUN", "SESSION", "STATUS", "MODE", "CREATED", "COMMAND"];
    output.print_list(&header, &runs, |run| {
        vec![
            run_id(&run.run_id),
            session_id(&run.session_id),
            status(run),
            run.mode().word(),
            units::age(run.create_time.as_ref()),
            command(run),
        ]
    })
}

/// Lists runs with what those that are running use now.
async fn print_usage(client: &Client, runs: &[Run], output: Output) -> Result<()> {
    let short = ids::short(runs.iter().map(|run| run.run_id.as_str()));
    let mut rows = Vec::new();
    for run in runs {
        rows.push(usage(client, run).await?);
    }
    let run_of = |row: &GetRunResponse| row.run.clone().unwrap_or_default();
    let header = ["RUN", "STATUS", "CPU", "MEMORY", "PROCESSES", "OUTPUT", "COMMAND"];
    output.print_list(&header, &rows, |row| {
        let run = run_of(row);
        let [cpu, memory, processes, written] = usage_cells(row.live_usage.as_ref());
        vec![short(&run.run_id), status(&run), cpu, memory, processes, written, command(&run)]
    })?;
    for row in rows.iter().filter(|row| row.run.as_ref().map(Run::state) == Some(RunState::Running))
    {
        if !row.live_usage_unavailable.is_empty() && !output.is_json() {
            let id = short(&run_of(row).run_id);
            write_note(&format!("{id}: {}", row.live_usage_unavailable));
        }
    }
    Ok(())
}

/// Only a running run is read again.
async fn usage(client: &Client, run: &Run) -> Result<GetRunResponse> {
    if run.state() != RunState::Running {
        return Ok(GetRunResponse { run: Some(run.clone()), ..Default::default() });
    }
    let request =
        GetRunRequest { name: run.name.clone(), include_usage: true, ..Default::default() };
    Ok(client.runs().get_run(request).await?.into_inner())
}

/// CPU time, memory, processes and output. What is not known is empty.
fn usage_cells(usage: Option<&LiveUsage>) -> [String; 4] {
    let Some(usage) = usage else { return Default::default() };
    let size = |bytes: i64| units::bytes(bytes.unsigned_abs());
    let cpu =
        units::millis(usage.cpu_time.as_ref()).map(|millis| format!("{:.1}s", millis / 1000.0));
    let without_cache = |all: i64| size(all.saturating_sub(usage.page_cache_bytes()));
    let processes = usage.processes.map(|count| count.to_string());
    [
        cpu.unwrap_or_default(),
        usage.memory_bytes.map(without_cache).unwrap_or_default(),
        processes.unwrap_or_default(),
        size(usage.output_bytes),
    ]
}

/// Lists the processes of a run, or of the running runs of a session.
async fn print_processes(
    client: &Client,
    args: &args::Ps,
    target: &str,
    output: Output,
) -> Result<()> {
    let runs = match resolve::run_or_session(client, target).await? {
        RunOrSession::Run(name) => vec![name],
        RunOrSession::Session(name) => {
            let runs = list(client, args, name, RunState::Running).await?;
            runs.into_iter().map(|run| run.name).collect()
        }
    };
    let mut found = Vec::new();
    for name in runs {
        let request = GetRunRequest { name, include_processes: true, ..Default::default() };
        found.push(client.runs().get_run(request).await?.into_inner());
    }
    if output.is_json() {
        return output.print(&json_array(&found)?, "");
    }
    let mut rows = Vec::new();
    let mut notes = Vec::new();
    for found in found {
        let run = found.run.context("the server sent no run")?.run_id;
        if !found.processes_unavailable.is_empty() {
            notes.push((run.clone(), found.processes_unavailable));
        }
        rows.extend(found.processes.into_iter().map(|process| (run.clone(), process)));
    }
    let short = ids::short(rows.iter().map(|(run, _)| run.as_str()));
    let header = ["RUN", "PID", "PARENT", "STATE", "CPU", "MEMORY", "COMMAND"];
    let rows = rows.iter().map(|(run, process)| {
        let cpu = units::millis(process.cpu_time.as_ref()).unwrap_or_default();
        vec![
            short(run),
            process.pid.to_string(),
            process.parent_pid.to_string(),
            process.state.clone(),
            format!("{:.1}s", cpu / 1000.0),
            units::bytes(process.memory_bytes.unsigned_abs()),
            plain(&process.command),
        ]
    });
    write_line(&fitting_table(&header, rows))?;
    for (run, why) in notes {
        write_note(&format!("{run}: {why}"));
    }
    Ok(())
}

/// Lists the runs of all tenants, or of one, that have not ended.
async fn ps_of_tenants(client: &Client, args: &args::Ps, output: Output) -> Result<()> {
    let tenant = args.tenant.as_ref().map(|tenant| format!("tenants/{tenant}")).unwrap_or_default();
    let request = ListTenantRunsRequest { tenant, ..Default::default() };
    let runs = client.list(request, args.limit).await?;
    // With whole ids: `kill --tenant` does not search for the start of one.
    let header = ["TENANT", "RUN", "STATUS", "CREATED", "COMMAND"];
    output.print_list(&header, &runs, |TenantRun { tenant_id, run }| {
        let run = run.clone().unwrap_or_default();
        let created = units::age(run.create_time.as_ref());
        vec![tenant_id.clone(), run.run_id.clone(), status(&run), created, command(&run)]
    })
}

fn command(run: &Run) -> String {
    run.command.as_ref().map(|command| plain(&command.argv.join(" "))).unwrap_or_default()
}

/// Cancels or signals runs.
pub(crate) async fn kill(client: &Client, args: &args::Kill, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    let targets = &args.targets;
    each.try_all(client, targets, async |target| kill_one(client, target, args).await).await?;
    each.finish()
}

/// Returns the record of what was killed, and its id.
async fn kill_one(client: &Client, target: &str, args: &args::Kill) -> Result<(Value, String)> {
    let grace = args.grace.map(duration_to_proto);
    let reason = args.reason.clone();
    let run = match &args.tenant {
        Some(tenant) => {
            let name = format!("tenants/{tenant}/runs/{target}");
            client.call(CancelTenantRunRequest { name, reason, grace }).await?
        }
        None => match (resolve::run_or_session(client, target).await?, args.signal) {
            (RunOrSession::Run(name), Some(signal)) => {
                client.call(SignalRunRequest { name, signal }).await?
            }
            (RunOrSession::Run(name), None) => {
                client.call(CancelRunRequest { name, reason, grace }).await?
            }
            (RunOrSession::Session(name), None) if reason.is_empty() && grace.is_none() => {
                let session = client.call(CloseSessionRequest { name }).await?;
                return Ok((to_json(&session)?, session.session_id));
            }
            (RunOrSession::Session(_), _) => {
                bail!(
                    "--signal, --reason and --grace are for runs (`codelia ps -s {target}` lists them)"
                )
            }
        },
    };
    Ok((to_json(&run)?, run.run_id))
}

async fn list(
    client: &Client,
    args: &args::Ps,
    parent: String,
    state: RunState,
) -> Result<Vec<Run>> {
    let request = ListRunsRequest {
        parent,
        state: state.into(),
        labels: args.labels.iter().cloned().collect(),
        ..Default::default()
    };
    client.list(request, args.limit).await
}

/// The state of a run that has not ended, or its outcome.
fn status(run: &Run) -> String {
    match &run.outcome {
        Some(outcome) => {
            format!("{} ({})", exit_status::name(outcome), exit_status::exit_code(outcome))
        }
        None if !run.waiting_for_approval.is_empty() => "needs approval".to_owned(),
        None => run.state().word(),
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
    fn memory_is_shown_without_cached_files() {
        let usage = LiveUsage {
            cpu_time: Some(duration_to_proto(std::time::Duration::from_millis(1260))),
            memory_bytes: Some(50 << 20),
            page_cache_bytes: Some(40 << 20),
            output_bytes: 2048,
            ..LiveUsage::default()
        };
        assert_eq!(usage_cells(Some(&usage)), ["1.3s", "10 MiB", "", "2 KiB"]);
    }

    #[test]
    fn command_in_table_is_printable() {
        assert_eq!(plain("sh -c \x1b[31m\n"), "sh -c  [31m ");
    }
}
