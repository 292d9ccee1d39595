//! Callers that watch a run through api restarts: they resume at their position and must receive
//! every byte once, and the end.

use std::time::Duration;

use codelia_proto::v1::{RunEvent, run_event::Kind};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use super::load::{Callers, Output, RETRY_DELAY, RUN_TIMEOUT, is_retryable};
use crate::Client;

/// How long a watch may be silent. A watcher cannot see that the connection behind its api is dead.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(20);

/// What a watcher of a run received.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    pub(crate) output: Output,
    /// The kind of the outcome.
    pub(crate) outcome: Option<String>,
    /// How often it watched again.
    pub(crate) resumed: usize,
    /// Gaps, overlaps, and refusals.
    pub(crate) errors: Vec<String>,
}

impl Callers {
    /// Watches a run to its end.
    pub(crate) async fn watch(&self, run: &str, first: usize) -> Watched {
        let mut watched = Watched::default();
        let deadline = Instant::now() + RUN_TIMEOUT;
        for attempt in first.. {
            let client = &self.clients[attempt % self.clients.len()];
            match watched.follow(client, run, self.watch_overlap).await {
                Ok(()) if watched.outcome.is_some() => break,
                Ok(()) => {}
                Err(status) if is_retryable(&status).unwrap_or(false) => {}
                Err(status) => {
                    watched.errors.push(format!("refused: {status:?}"));
                    break;
                }
            }
            if Instant::now() > deadline {
                watched.errors.push("no end".to_owned());
                break;
            }
            watched.resumed += 1;
            sleep(RETRY_DELAY).await;
        }
        watched
    }
}

impl Watched {
    /// Follows a run from the current position until the stream ends. With an overlap, a planted
    /// defect, it stops after the first output and then resumes too early.
    async fn follow(&mut self, client: &Client, run: &str, overlap: i64) -> Result<(), Status> {
        let position = i64::try_from(self.output.0.len()).unwrap_or(i64::MAX);
        let silent = |_| Status::unavailable("silent");
        let opened = timeout(SILENCE_TIMEOUT, client.watch(run, (position - overlap).max(0))).await;
        let mut stream = opened.map_err(silent)??;
        let stops_early = overlap > 0 && self.resumed == 0;
        while let Some(response) =
            timeout(SILENCE_TIMEOUT, stream.message()).await.map_err(silent)??
        {
            self.push(response.event.unwrap_or_default());
            if stops_early && !self.output.0.is_empty() {
                break;
            }
        }
        Ok(())
    }

    fn push(&mut self, event: RunEvent) {
        match event.kind {
            Some(Kind::Output(output)) => {
                let start = output.next_position - i64::try_from(output.data.len()).unwrap_or(0);
                if i64::try_from(self.output.0.len()) != Ok(start) {
                    self.errors.push(format!(
                        "expected position {}, received {start}",
                        self.output.0.len()
                    ));
                }
                self.output.0.extend_from_slice(&output.data);
            }
            Some(Kind::Finished(finished)) => {
                let kind = finished.run.and_then(|run| run.outcome?.kind);
                let name = format!("{kind:?}").replace("Some(", "");
                let end = name.find('(').unwrap_or(name.len());
                self.outcome = Some(name[..end].to_lowercase());
            }
            _ => {}
        }
    }
}
