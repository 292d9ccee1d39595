//! Keeps a proxy running and brings it up to date.

use std::{collections::HashMap, sync::Arc, time::Duration};

use codelia_egress::{
    control::{Report, Request},
    packet,
};
use codelia_telemetry::{backoff::Backoff, metrics, task};
use codelia_types::RunId;
use tokio::time::{Instant, sleep, timeout};

use super::{
    Egress,
    asks::Ask,
    control::Control,
    process::{Process, StartError},
    sandbox::Sent,
};

const MIN_RESTART_DELAY: Duration = Duration::from_millis(50);
const MAX_RESTART_DELAY: Duration = Duration::from_millis(800);
/// A proxy that lived this long is restarted at once.
const HEALTHY: Duration = Duration::from_secs(5);
/// How long a proxy may take to end when it is asked to.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a proxy that closed its control socket may take to exit.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);

/// Why a proxy no longer serves.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("cannot start it")]
    Start(#[from] StartError),
    #[error("cannot speak to it")]
    Control(#[from] packet::Error),
    #[error("it {0}")]
    Died(String),
}

fn log_end(ended: &Ended) {
    let error = ended as &dyn std::error::Error;
    tracing::error!(error, "egress proxy ended, starting another one");
}

impl Egress {
    /// Serves sandboxes until the worker stops. If it is dropped before, the proxy ends.
    pub(crate) async fn run(self: Arc<Self>) {
        let stopped = self.stopped.clone().drop_guard();
        self.serve_until_stopped().await;
        drop(stopped);
        std::future::pending().await
    }

    async fn serve_until_stopped(self: &Arc<Self>) {
        if self.stop.run_until_cancelled(self.wanted()).await.is_none() {
            return;
        }
        let mut backoff = Backoff::new(MIN_RESTART_DELAY, MAX_RESTART_DELAY);
        for number in 0.. {
            let started_at = Instant::now();
            let Err(ended) = self.serve(number).await else { return };
            self.proxy_ended();
            metrics().egress.restarted();
            log_end(&ended);
            let egress = self.clone();
            let how = ended.to_string();
            task::background("record restart", async move { egress.record_restart(&how).await });
            if started_at.elapsed() >= HEALTHY {
                backoff.reset();
            } else if self.stop.run_until_cancelled(sleep(backoff.next_delay())).await.is_none() {
                return;
            }
        }
    }

    async fn wanted(&self) {
        while !self.table.lock().is_wanted {
            self.changed.notified().await;
        }
    }

    /// Runs one proxy until it dies, or until the worker stops.
    async fn serve(&self, number: u64) -> Result<(), Ended> {
        let (mut process, control) = Process::start(self.cgroup.clone(), number).await?;
        control.send(&Request::Configure(Box::new(self.config.clone())), None).await?;
        tracing::info!(pid = process.id(), "egress proxy started");
        self.proxy_started();
        let result = tokio::select! {
            biased;
            () = self.stop.cancelled() => Ok(()),
            error = self.receive(&control) => Err(error),
            error = self.send(&control) => Err(error),
        };
        if result.is_err() {
            // Usually it is dead already. The reports that it sent before can still be read.
            if timeout(EXIT_TIMEOUT, process.ended()).await.is_err() {
                process.kill();
            }
            let _ = timeout(EXIT_TIMEOUT, self.receive_rest(&control)).await;
        }
        // End of file ends it.
        drop(control);
        let how = match timeout(END_TIMEOUT, process.ended()).await {
            Ok(how) => how,
            Err(_) => {
                process.kill();
                process.ended().await
            }
        };
        match result {
            Err(Ended::Died(_)) => Err(Ended::Died(how)),
            other => other,
        }
    }

    fn proxy_started(&self) {
        let mut table = self.table.lock();
        table.is_serving = true;
        let all: Vec<RunId> = table.sandboxes.keys().copied().collect();
        table.changed.extend(all);
    }

    fn proxy_ended(&self) {
        self.table.lock().is_serving = false;
        metrics().egress.connections(0);
        self.all().iter().for_each(|sandbox| sandbox.proxy_ended());
    }

    /// Sends what has changed, as long as the proxy takes it.
    async fn send(&self, control: &Control) -> Ended {
        let mut sent = HashMap::<RunId, Sent>::new();
        loop {
            let changed = std::mem::take(&mut self.table.lock().changed);
            for run in changed {
                if let Err(error) = self.bring_up_to_date(control, run, &mut sent).await {
                    return error.into();
                }
            }
            self.changed.notified().await;
        }
    }

    async fn bring_up_to_date(
        &self,
        control: &Control,
        run: RunId,
        sent: &mut HashMap<RunId, Sent>,
    ) -> Result<(), packet::Error> {
        let Some(sandbox) = self.sandbox(run) else {
            // The run did not wait for the end.
            if sent.remove(&run).is_some_and(|sent| !sent.is_closed()) {
                control.send(&Request::Close { sandbox: run }, None).await?;
            }
            return Ok(());
        };
        let (messages, now) = sandbox.messages(sent.get(&run).copied());
        for (message, sockets) in messages {
            control.send(&message, sockets.as_deref()).await?;
        }
        if let Some(now) = now {
            sent.insert(run, now);
        }
        Ok(())
    }

    /// Handles reports until the proxy closes its end.
    async fn receive(&self, control: &Control) -> Ended {
        match self.receive_rest(control).await {
            Ok(()) => Ended::Died("closed its control socket".to_owned()),
            Err(error) => error.into(),
        }
    }

    async fn receive_rest(&self, control: &Control) -> Result<(), packet::Error> {
        while let Some(report) = control.receive().await? {
            self.handle(report);
        }
        Ok(())
    }

    fn handle(&self, report: Report) {
        match report {
            Report::Assigned { sandbox, assigned } => {
                self.sandbox(sandbox).inspect(|it| it.assign(assigned));
            }
            Report::Ask { sandbox, host, port } => {
                let Some(known) = self.sandbox(sandbox) else { return };
                let ask = Ask { subject: known.subject.clone(), host, port };
                if self.asks.try_send(ask).is_err() {
                    tracing::warn!(run = %sandbox, "too many hosts wait for a decision, one is not asked for");
                }
            }
            Report::Connection(connection) => {
                self.sandbox(connection.sandbox).inspect(|it| it.record(connection));
            }
            Report::OpenConnections { count } => metrics().egress.connections(count),
            Report::Closed { sandbox, totals } => {
                self.sandbox(sandbox).inspect(|it| it.closed(totals));
            }
        }
    }
}
