//! `codelia diff|apply|discard`: what a transactional run changed in its workspace, and what
//! becomes of it.

use anyhow::{Context, Result, bail};
use codelia_proto::v1::{
    ApplyChangesRequest, Change, Changes, DiscardChangesRequest, FileKind, GetRunRequest, Run,
    RunState,
};

use crate::{
    args,
    client::Client,
    output::{Output, table, write_line, write_message},
    resolve, units,
    words::Word,
};

pub(crate) async fn diff(client: &Client, args: &args::RunName, output: Output) -> Result<()> {
    let name = resolve::run(client, &args.run).await?;
    let run = client.call(GetRunRequest { name, ..Default::default() }).await?;
    let Some(changes) = &run.changes else {
        let id = &run.run_id;
        if run.state() != RunState::Ended {
            bail!("run {id} has not ended: its changes are listed when it has");
        }
        bail!(
            "run {id} has no list of changes: start it with `codelia run --transactional` or `--preview`"
        );
    };
    print(changes, output)
}

/// Applies changes that wait for a decision.
pub(crate) async fn apply(client: &Client, args: &args::RunName, output: Output) -> Result<()> {
    let request = ApplyChangesRequest { name: resolve::run(client, &args.run).await? };
    print_decided(client.call(request).await?, output)
}

/// Drops changes that wait for a decision.
pub(crate) async fn discard(client: &Client, args: &args::RunName, output: Output) -> Result<()> {
    let request = DiscardChangesRequest { name: resolve::run(client, &args.run).await? };
    print_decided(client.call(request).await?, output)
}

fn print_decided(run: Run, output: Output) -> Result<()> {
    let changes = run.changes.context("the server sent no changes")?;
    if output.is_json() {
        return output.print_json(&changes);
    }
    write_message(&summary(&changes));
    Ok(())
}

fn print(changes: &Changes, output: Output) -> Result<()> {
    if output.is_json() {
        return output.print_json(changes);
    }
    write_line(&table(&["CHANGE", "TYPE", "SIZE", "PATH"], changes.entries.iter().map(row)))?;
    write_message(&summary(changes));
    Ok(())
}

fn row(change: &Change) -> Vec<String> {
    let is_file = change.file_kind() == FileKind::Regular;
    vec![
        change.kind().word(),
        if is_file { "file".to_owned() } else { change.file_kind().word() },
        if is_file { units::bytes(change.size_bytes.unsigned_abs()) } else { String::new() },
        change.path.clone(),
    ]
}

fn summary(changes: &Changes) -> String {
    let Changes { added, changed, removed, .. } = changes;
    let listed = i64::try_from(changes.entries.len()).unwrap_or(i64::MAX);
    let more = added.saturating_add(*changed).saturating_add(*removed).saturating_sub(listed);
    let left_out = if more > 0 { format!(" ({more} not listed)") } else { String::new() };
    let state = changes.state().word();
    format!("{state}: {added} added, {changed} changed, {removed} removed{left_out}")
}
