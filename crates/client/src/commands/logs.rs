//! `codelia logs`: the output of a run.

use anyhow::{Result, bail};
use codelia_proto::v1::{WatchRunRequest, run_event::Kind};

use crate::{args, client::Client, exit_status, output::Output, resolve, streams::Streams};

/// Prints the output that is stored, and with `--follow` what comes until the run has ended.
pub(crate) async fn logs(client: &Client, args: &args::Logs, output: Output) -> Result<()> {
    if output.is_json() {
        bail!("`logs` prints the bytes of the command: use it without --json");
    }
    let name = resolve::run(client, &args.run).await?;
    let watch = WatchRunRequest { name, position: 0, stored_only: !args.follow };
    let mut events = client.runs().watch_run(watch).await?.into_inner();
    let mut streams = Streams::open(output)?;
    while let Some(response) = events.message().await? {
        match response.event.and_then(|event| event.kind) {
            Some(Kind::Assigned(_)) => streams.begin_attempt(),
            Some(Kind::Output(output)) => streams.write(&output)?,
            Some(Kind::Finished(finished)) => {
                let run = finished.run.unwrap_or_default();
                if !streams.is_complete(&run) {
                    streams.write_note(&exit_status::incomplete_message(&run))?;
                }
                return Ok(());
            }
            _ => {}
        }
    }
    if args.follow { bail!("the server closed the stream before the run ended") } else { Ok(()) }
}
