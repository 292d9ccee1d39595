//! What became of it all: every run's outcome beside the marks it left, and what is left of the rest.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    fs,
    os::unix::fs::FileTypeExt,
    path::Path,
};

use anyhow::Result;
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

use super::load::{LABEL, NO_ROOM, Seen};
use crate::{abandoned_cgroups, worker_containers};

/// What was found wrong, by its kind.
#[derive(Debug, Default)]
pub struct Findings {
    /// Runs without an outcome, or with one that their marks, their output or their callers do not bear out.
    pub lost: Vec<String>,
    /// Runs with too many marks or outcomes, ended by somebody who had no right to, or beside a later holder.
    pub doubled: Vec<String>,
    /// Processes, directories, mounts, control groups, sockets, rows.
    pub leftovers: Vec<String>,
}

impl Findings {
    /// Whether there is nothing.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.lost.is_empty() && self.doubled.is_empty() && self.leftovers.is_empty()
    }
}

/// A run as the database tells it.
#[derive(Debug)]
pub(crate) struct Recorded {
    number: usize,
    session: Uuid,
    state: String,
    outcome: String,
    /// Why it was refused.
    reason: Option<String>,
    exit_code: Option<i64>,
    attempt: i32,
    epoch: Option<i64>,
    incarnation: Option<Uuid>,
    output: String,
    endings: i64,
    unlawful: i64,
}

impl Recorded {
    /// Whether it came to its end. A command that had no room may have left its mark and failed later, and says so.
    fn has_its_say(&self) -> bool {
        self.outcome == "exited" && self.exit_code != Some(NO_ROOM)
    }
}

const RUNS: &str = "
SELECT (r.labels ->> $1)::bigint, r.session_id, r.state, coalesce(r.outcome ->> 'kind', ''), r.exit_code::bigint,
       r.attempt, r.lease_epoch, r.incarnation,
       coalesce((SELECT convert_from(string_agg(o.data, '' ORDER BY o.position), 'UTF8') FROM run_output o
                 WHERE o.run_id = r.id), ''),
       (SELECT count(*) FROM chaos_endings e WHERE e.run_id = r.id),
       (SELECT count(*) FROM chaos_endings e WHERE e.run_id = r.id AND NOT e.lawful),
       r.outcome -> 'detail' ->> 'reason'
FROM runs r ORDER BY 1";

pub(crate) async fn recorded(connection: &mut PgConnection) -> Result<Vec<Recorded>> {
    let rows = sqlx::query(RUNS).bind(LABEL).fetch_all(connection).await?;
    rows.into_iter()
        .map(|row| {
            Ok(Recorded {
                number: usize::try_from(row.try_get::<i64, _>(0)?)?,
                session: row.try_get(1)?,
                state: row.try_get(2)?,
                outcome: row.try_get(3)?,
                exit_code: row.try_get(4)?,
                attempt: row.try_get(5)?,
                epoch: row.try_get(6)?,
                incarnation: row.try_get(7)?,
                output: row.try_get(8)?,
                endings: row.try_get(9)?,
                unlawful: row.try_get(10)?,
                reason: row.try_get(11)?,
            })
        })
        .collect()
}

/// One line in a session: which run wrote it, and its word if it is the run's mark.
type Line = (usize, Option<String>);

/// All lines of a session, in the order they were written.
pub(crate) fn lines(roots: &BTreeSet<std::path::PathBuf>, session: Uuid) -> Vec<Line> {
    let found = roots.iter().find_map(|root| {
        fs::read_to_string(root.join("sessions").join(session.to_string()).join("marks")).ok()
    });
    let parse = |line: &str| {
        let (number, word) = line.split_once(' ')?;
        Some((number.parse().ok()?, (!word.starts_with('-')).then(|| word.to_owned())))
    };
    found.unwrap_or_default().lines().filter_map(parse).collect()
}

/// Judges the runs by their marks.
pub(crate) fn judge(
    seen: &[Seen],
    runs: &[Recorded],
    lines: &BTreeMap<Uuid, Vec<Line>>,
    paused: &BTreeSet<Uuid>,
    findings: &mut Findings,
) {
    let by_number: BTreeMap<usize, &Recorded> = runs.iter().map(|run| (run.number, run)).collect();
    for seen in seen {
        match by_number.get(&seen.number) {
            None => findings.lost.push(format!("run {} was accepted and is not recorded", seen.number)),
            Some(run) => {
                judge_run(run, &lines[&run.session], findings);
                judge_told(run, seen, findings);
            }
        }
    }
    for lines in lines.values() {
        judge_order(lines, &by_number, paused, findings);
    }
}

fn judge_run(run: &Recorded, lines: &[Line], findings: &mut Findings) {
    let words: Vec<&str> =
        lines.iter().filter(|line| line.0 == run.number).filter_map(|line| line.1.as_deref()).collect();
    let (marks, attempts) = (words.len(), usize::try_from(run.attempt).unwrap_or(0));
    let mut lost = |what: &str| findings.lost.push(format!("{what}: {run:?}, marks {words:?}"));
    if run.state != "ended" || run.endings == 0 {
        return lost("no outcome");
    }
    if run.has_its_say() && marks == 0 {
        lost("it exited and left no mark");
    }
    if run.has_its_say() && !words.contains(&run.output.trim()) {
        lost("its output is not what it printed");
    }
    let mut doubled = |what: &str| findings.doubled.push(format!("{what}: {run:?}, marks {words:?}"));
    if marks > attempts {
        doubled("more marks than attempts");
    }
    if run.endings > 1 {
        doubled("more than one outcome");
    }
    if run.unlawful > 0 {
        doubled("ended by somebody without the lease");
    }
}

/// Beside what its caller knows.
fn judge_told(run: &Recorded, seen: &Seen, findings: &mut Findings) {
    if run.outcome == "canceled" && !seen.may_be_canceled {
        findings.lost.push(format!("nobody asked for its end: {run:?}"));
    }
    if run.has_its_say() && seen.printed.as_ref().is_some_and(|printed| *printed != run.output) {
        findings.lost.push(format!("its caller read something else: {run:?}, {seen:?}"));
    }
}

/// Once a later holder's run wrote a line, no run of an earlier one may, unless its worker was stopped, which may have been
/// in the moment when it began and was not told yet how long it may go on.
fn judge_order(
    lines: &[Line],
    runs: &BTreeMap<usize, &Recorded>,
    paused: &BTreeSet<Uuid>,
    findings: &mut Findings,
) {
    let mut latest = 0;
    for run in lines.iter().filter_map(|line| runs.get(&line.0)).filter(|run| run.attempt == 1) {
        let (Some(epoch), Some(life)) = (run.epoch, run.incarnation) else { continue };
        if epoch < latest && !paused.contains(&life) {
            findings.doubled.push(format!("it wrote beside a later holder (epoch {latest}): {run:?}"));
            return;
        }
        latest = latest.max(epoch);
    }
}

/// How many runs ended in which way.
pub(crate) fn outcomes(runs: &[Recorded]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for run in runs {
        let why = run.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        *counts.entry(format!("{}{why}", run.outcome)).or_default() += 1;
    }
    counts
}

/// Rows that should not be there when everything has ended.
pub(crate) async fn rows_left(connection: &mut PgConnection, findings: &mut Findings) -> Result<()> {
    let counts = [
        ("runs that have not ended", "SELECT count(*) FROM runs WHERE state <> 'ended'"),
        ("sessions that are not removed", "SELECT count(*) FROM sessions WHERE removed_at IS NULL"),
        ("sessions that are held", "SELECT count(*) FROM sessions WHERE lease_worker IS NOT NULL"),
        (
            "receipts that are not zero",
            "SELECT count(*) FROM runs, jsonb_each_text(receipt) AS left_behind WHERE left_behind.value <> '0'",
        ),
    ];
    for (what, query) in counts {
        let count: i64 = sqlx::query_scalar(query).fetch_one(&mut *connection).await?;
        if count > 0 {
            findings.leftovers.push(format!("{count} {what}"));
        }
    }
    Ok(())
}

/// Files that a worker's root should not hold when every session has ended.
pub(crate) fn files_left(root: &Path, findings: &mut Findings) {
    for place in ["sessions", "trash", "ids"] {
        let entries = fs::read_dir(root.join(place)).into_iter().flatten().flatten();
        findings.leftovers.extend(entries.map(|entry| entry.path().display().to_string()));
    }
}

/// Control groups and containers of workers that have ended.
pub(crate) fn sandboxes_left(pids: &BTreeSet<u32>) -> Result<Vec<String>> {
    let is_ours = |name: &String| pids.iter().any(|pid| name.contains(&format!("codelia-{pid}-")));
    let groups = abandoned_cgroups().into_iter().map(|path| path.display().to_string()).filter(is_ours);
    let ended: Vec<_> = pids.iter().copied().filter(|pid| !is_process(*pid)).collect();
    let containers = worker_containers(&ended)?.into_iter().map(|container| format!("container {container}"));
    Ok(groups.chain(containers).collect())
}

fn is_process(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Mounts and sockets under a directory.
pub(crate) fn mounts_and_sockets_left(directory: &Path, findings: &mut Findings) -> Result<()> {
    let name = directory.display().to_string();
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let is_ours = |line: &&str| line.contains(&name) && !line.contains(&format!("{name}/small "));
    findings.leftovers.extend(mounts.lines().filter(is_ours).map(ToOwned::to_owned));
    let mut open = vec![directory.to_owned()];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let kind = entry.file_type()?;
            if kind.is_dir() {
                open.push(entry.path());
            } else if kind.is_socket() {
                findings.leftovers.push(entry.path().display().to_string());
            }
        }
    }
    Ok(())
}

/// Closes a connection; that it is broken already is as good.
pub(crate) async fn done(connection: PgConnection) {
    let report = |error: &dyn Display| eprintln!("while closing a connection: {error}");
    if let Err(error) = connection.close().await {
        report(&error);
    }
}
