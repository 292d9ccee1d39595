//! Runs in the modes that isolate, next to raw bubblewrap: with a prepared sandbox, concurrently,
//! and in new sessions. The targets are those of the fastest mode that this host has.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context, Result};
use codelia_store::LocalPostgres;
use codelia_tests::{Client, Cluster, ClusterOptions, Database};
use codelia_types::Mode;
use futures::future::try_join_all;

use crate::{
    ROUND_TIME, ROUNDS,
    bare::exec::{Loop, bwrap_burst},
    measure::Measured,
    modes,
    report::Report,
    runs::Runs,
};

const RAW: &str = "raw `bwrap … true`, all cores";
/// Without a connection between api and worker.
const ONE_PROCESS: &str = "the same in one process, `codelia up`";
const RAW_BURST: &str = "100 raw `bwrap … echo` at once, to first byte";

/// Number of sessions in a burst.
const NEW_SESSIONS: usize = 100;
/// Pause between runs of a steady session, in which the worker prepares a sandbox, and between new
/// sessions, in which it removes the last one.
const PAUSE: Duration = Duration::from_millis(30);
/// How often all start at once. The first time is warm-up.
const BURSTS: usize = 3;

/// A mode with its sessions and the names of its rows.
struct Subject {
    mode: Mode,
    steady: Runs,
    together: Runs,
    /// Creates sessions.
    client: Client,
    /// Runs in a steady session, and those of them with a prepared sandbox.
    runs: u64,
    prepared: u64,
}

/// Measures all rows in rounds. The first round is warm-up.
pub(crate) async fn measure(server: &LocalPostgres, cores: usize) -> Result<Report> {
    let shape = ClusterOptions { slots: 8 * cores, ..ClusterOptions::default() };
    let up = ClusterOptions { apis: 0, workers: 0, ..shape.clone() };
    let cluster = Cluster::start_on(Database::on(server).await?, shape).await?;
    let mut up = Cluster::start_on(Database::on(server).await?, up).await?;
    up.add_up().await?;
    let mut report = Report::default();
    let mut subjects = Vec::new();
    for mode in modes::served(&cluster, &modes::ISOLATING, &mut report).await? {
        subjects.push(Subject::prepare(&cluster, mode, cores).await?);
    }
    let fastest = subjects.last().context("no mode was measured")?.mode;
    let in_up = Runs::prepare_in(&up, fastest, "up", 4 * cores).await?;
    for round in 0..=ROUNDS {
        let raw = Loop::of_bwrap(cores).measure(ROUND_TIME).await?;
        if round > 0 {
            report.add(RAW, raw);
        }
        for subject in &mut subjects {
            subject.turn((round > 0).then_some(&mut report)).await?;
        }
        let in_up = in_up.outcome(ROUND_TIME).await?;
        if round > 0 {
            report.add(ONE_PROCESS, in_up);
        }
    }
    for burst in 0..=BURSTS {
        let mut turn = vec![(RAW_BURST.to_owned(), bwrap_burst(NEW_SESSIONS).await?)];
        for subject in &subjects {
            turn.push((subject.burst_row(), subject.burst().await?));
        }
        turn.into_iter()
            .filter(|_| burst > 0)
            .for_each(|(name, measured)| report.add(&name, measured));
    }
    cluster.end().await?;
    up.end().await?;

    let (fastest, others) = subjects.split_last().context("no mode was measured")?;
    let other_rows = others.iter().map(|subject| (subject.mode.as_str(), subject.together_row()));
    for (name, row) in other_rows.chain([("`codelia up`", ONE_PROCESS.to_owned())]) {
        let share = report.find(&row)?.rate() / report.find(RAW)?.rate();
        report.note(&format!("{name}: {:.0} % of the raw bwrap loop", share * 100.0));
    }
    fastest.check(&mut report)?;
    Ok(report)
}

impl Subject {
    async fn prepare(cluster: &Cluster, mode: Mode, cores: usize) -> Result<Self> {
        let tenant = |what: &str| format!("{what}-{}", mode.as_str());
        Ok(Self {
            mode,
            steady: Runs::prepare_in(cluster, mode, &tenant("steady"), 1).await?,
            together: Runs::prepare_in(cluster, mode, &tenant("together"), 4 * cores).await?,
            client: Runs::client(cluster, &tenant("new")).await?,
            runs: 0,
            prepared: 0,
        })
    }

    /// One turn of each row, added to a report unless it is warm-up.
    async fn turn(&mut self, report: Option<&mut Report>) -> Result<()> {
        let (first_byte, prepared) = self.steady.steady(ROUND_TIME, PAUSE).await?;
        let together = self.together.outcome(ROUND_TIME).await?;
        let new_session = Measured::repeat(1, ROUND_TIME, async |_| {
            tokio::time::sleep(PAUSE).await;
            Runs::first_byte_then_close(&self.client, self.mode).await
        });
        let new_session = new_session.await?;
        let Some(report) = report else { return Ok(()) };
        self.runs += first_byte.count();
        self.prepared += prepared;
        report.add(&self.steady_row(), first_byte);
        report.add(&self.together_row(), together);
        report.add(&self.new_session_row(), new_session);
        Ok(())
    }

    /// Measures the first byte in sessions that are created at the same time, and closes all of
    /// them afterwards.
    async fn burst(&self) -> Result<Measured> {
        let sessions = Mutex::new(Vec::new());
        let measured = Measured::each(NEW_SESSIONS, async |_| {
            let (latency, session) =
                Runs::first_byte_in_new_session(&self.client, self.mode).await?;
            sessions.lock().unwrap_or_else(PoisonError::into_inner).push(session);
            Ok(latency)
        });
        let measured = measured.await?;
        let sessions = sessions.into_inner().unwrap_or_else(PoisonError::into_inner);
        try_join_all(sessions.iter().map(|session| self.client.close(session))).await?;
        Ok(measured)
    }

    fn check(&self, report: &mut Report) -> Result<()> {
        let mode = self.mode.as_str();
        let millis = Duration::from_millis;
        let share = report.find(&self.together_row())?.rate() / report.find(RAW)?.rate();
        report.check_ratio(
            &format!("{mode}: runs of `true` relative to the raw bwrap loop"),
            share,
            1.2,
        );
        report.check_percentile(&self.steady_row(), 50.0, Duration::from_micros(2500))?;
        report.check_percentile(&self.steady_row(), 95.0, millis(5))?;
        report.check_percentile(&self.new_session_row(), 95.0, millis(15))?;
        report.check_percentile(&self.burst_row(), 95.0, millis(300))?;
        let p95 = |name: &str| anyhow::Ok(report.find(name)?.percentile(95.0).as_secs_f64());
        let factor = p95(&self.burst_row())? / p95(RAW_BURST)?;
        report.check_factor(&format!("{mode}: p95 of a burst relative to raw bwraps"), factor, 1.0);
        let hits = ratio(self.prepared, self.runs);
        report.check_ratio(
            &format!("{mode}: runs with a prepared sandbox in a steady session"),
            hits,
            0.9,
        );
        Ok(())
    }

    fn steady_row(&self) -> String {
        format!("{}: `echo` to first byte, steady session", self.mode.as_str())
    }

    fn together_row(&self) -> String {
        format!("{}: `true`, concurrent", self.mode.as_str())
    }

    fn new_session_row(&self) -> String {
        format!("{}: new session to first byte, alone", self.mode.as_str())
    }

    fn burst_row(&self) -> String {
        format!("{}: 100 new sessions at once, to first byte", self.mode.as_str())
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts stay far below 2^53")]
fn ratio(part: u64, whole: u64) -> f64 {
    part as f64 / whole as f64
}
