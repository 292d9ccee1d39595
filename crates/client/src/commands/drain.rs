//! `codelia workers drain --wait` and `undrain --wait`: wait until a worker is empty, or takes work
//! again.

use std::time::Duration;

use anyhow::{Result, bail};
use codelia_proto::v1::{ListWorkersRequest, Worker, WorkerState};
use tokio::time::{Instant, sleep};

use crate::{client::Client, output, units};

/// Between two looks at the worker.
const INTERVAL: Duration = Duration::from_millis(500);

/// Waits until a draining worker holds no session and executes no run, or is gone. Says on stderr
/// how much is left.
pub(crate) async fn wait_until_empty(
    client: &Client,
    worker: Worker,
    timeout: Duration,
) -> Result<Worker> {
    let deadline = Instant::now() + timeout;
    let mut last = worker;
    let mut shown = None;
    loop {
        let id = &last.worker_id;
        match last.state() {
            WorkerState::Ready => bail!("worker {id} was undrained while this command waited"),
            WorkerState::Gone => return Ok(last),
            _ if last.sessions == 0 && last.busy_slots == 0 => return Ok(last),
            _ => {}
        }
        let left = (last.sessions, last.busy_slots);
        if Instant::now() >= deadline {
            bail!(
                "worker {id} still has {} sessions and {} runs after {}; it continues to drain (wait longer with --timeout)",
                left.0,
                left.1,
                units::duration(timeout)
            );
        }
        if shown.replace(left) != Some(left) {
            output::write_note(&format!("{id} drains: {} sessions, {} runs left", left.0, left.1));
        }
        sleep(INTERVAL).await;
        last = match find(client, id).await? {
            Some(found) => found,
            None => return Ok(last),
        };
    }
}

/// Waits until a worker has sent a heartbeat since its drain was taken back. Its answer is how a
/// worker learns of that.
pub(crate) async fn wait_until_working(
    client: &Client,
    worker: Worker,
    timeout: Duration,
) -> Result<Worker> {
    let deadline = Instant::now() + timeout;
    let id = worker.worker_id;
    let before = worker.heartbeat_time;
    loop {
        let Some(found) = find(client, &id).await? else { bail!("worker {id} is gone") };
        match found.state() {
            WorkerState::Ready if found.heartbeat_time != before => return Ok(found),
            WorkerState::Ready => {}
            WorkerState::Gone => bail!("worker {id} is gone: its lease expired, or it shut down"),
            _ => bail!("worker {id} was drained again while this command waited"),
        }
        if Instant::now() >= deadline {
            bail!(
                "worker {id} sent no heartbeat for {} (wait longer with --timeout)",
                units::duration(timeout)
            );
        }
        sleep(INTERVAL).await;
    }
}

async fn find(client: &Client, id: &str) -> Result<Option<Worker>> {
    let workers = client.list(ListWorkersRequest::default(), usize::MAX).await?;
    Ok(workers.into_iter().find(|worker| worker.worker_id == id))
}
