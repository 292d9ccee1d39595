//! Checks after the faults: every run's outcome against the marks it left, and leftovers.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    ops::Bound,
    os::unix::fs::FileTypeExt,
    path::Path,
};

use anyhow::{Context, Result, bail};
use codelia_sys::process_id::ProcessId;
use sqlx::{
    Connection, PgConnection, Row,
    postgres::{PgRow, types::PgRange},
};
use uuid::Uuid;

use super::{
    content::{check_output, check_watched},
    fault_log::FaultLog,
    load::{DISK_FULL_EXIT, LABEL, Observed, Output},
    system::{TENANT_NAMES, TestSystem},
};
use crate::{abandoned_cgroups, worker_containers};

/// Violations that were found.
#[derive(Debug, Default)]
pub struct Findings {
    /// Runs without an outcome, or whose outcome contradicts their marks, output or caller.
    pub lost: Vec<String>,
    /// Runs with too many marks or outcomes, or that ended or wrote without holding the lease.
    pub doubled: Vec<String>,
    /// Leftover processes, directories, mounts, control groups, sockets and rows.
    pub leftovers: Vec<String>,
    /// What a tenant could reach of another.
    pub exposed: Vec<String>,
}

impl Findings {
    /// How the finding of a run that was ended without the lease begins.
    pub const UNAUTHORIZED_END: &str = "ended without holding the lease";
    /// How the finding of a run that wrote under an old lease begins.
    pub const STALE_WRITE: &str = "wrote after a later holder";
    /// How the finding of a lost run begins whose worker's lease no fault ended.
    pub const UNEXPLAINED_LOSS: &str = "lost without a fault on its lease";
    /// How the finding of too few exits begins.
    pub const FEW_EXITS: &str = "too few runs exited";
    /// How the finding of wrong output begins.
    pub const WRONG_OUTPUT: &str = "its output is wrong";
    /// How the finding of a watcher that received something else than the run printed begins.
    pub const WRONG_WATCH: &str = "its watcher received something else";
    /// How the finding of an upload that cannot be read back begins.
    pub const WRONG_FILE: &str = "an upload is not as it was written";
    /// How the finding of a session that ended too early, too late or for a wrong reason begins.
    pub const WRONG_END: &str = "a session ended wrongly";
    /// How the finding of a call of another tenant that succeeded begins.
    pub const EXPOSED: &str = "reached by another tenant";

    /// Whether nothing was found.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        self.all().next().is_none()
    }

    /// All findings.
    pub fn all(&self) -> impl Iterator<Item = &String> {
        [&self.lost, &self.doubled, &self.leftovers, &self.exposed].into_iter().flatten()
    }

    /// Whether there is a finding that begins so.
    #[must_use]
    pub fn has(&self, begin: &str) -> bool {
        self.all().any(|what| what.starts_with(begin))
    }
}

/// A run as recorded in the database.
#[derive(Debug)]
pub(crate) struct Recorded {
    pub(crate) number: usize,
    pub(crate) session: Uuid,
    pub(crate) tenant: String,
    pub(crate) state: String,
    pub(crate) outcome: String,
    /// The reason if it was refused.
    pub(crate) reason: Option<String>,
    pub(crate) exit_code: Option<i64>,
    pub(crate) attempt: i32,
    pub(crate) epoch: Option<i64>,
    pub(crate) worker: Option<String>,
    pub(crate) incarnation: Option<Uuid>,
    pub(crate) output: Output,
    /// Number of chunks of its output that do not follow the one before.
    pub(crate) gaps: i64,
    pub(crate) ends: i64,
    pub(crate) unauthorized_ends: i64,
}

impl Recorded {
    /// A run for tests of the checks.
    #[cfg(test)]
    pub(crate) fn ended(number: usize, outcome: &str) -> Self {
        Self {
            number,
            session: Uuid::nil(),
            tenant: TENANT_NAMES[0].to_owned(),
            state: "ended".to_owned(),
            outcome: outcome.to_owned(),
            reason: None,
            exit_code: Some(0),
            attempt: 1,
            epoch: Some(1),
            worker: None,
            incarnation: None,
            output: Output::default(),
            gaps: 0,
            ends: 1,
            unauthorized_ends: 0,
        }
    }

    /// Whether its command ran to the end. One whose disk was full may have failed after its mark.
    pub(crate) fn ran_to_end(&self) -> bool {
        self.outcome == "exited" && self.exit_code != Some(DISK_FULL_EXIT)
    }
}

const SELECT_RUNS: &str = "
SELECT (r.labels ->> $1)::bigint, r.session_id, r.state, coalesce(r.outcome ->> 'kind', ''), r.exit_code::bigint,
       r.attempt, r.lease_epoch, r.incarnation, printed.data, printed.gaps,
       (SELECT count(*) FROM chaos_ends e WHERE e.run_id = r.id),
       (SELECT count(*) FROM chaos_ends e WHERE e.run_id = r.id AND NOT e.authorized),
       r.outcome -> 'detail' ->> 'reason', r.tenant_id, r.worker_id, printed.objects, printed.ranges
FROM runs r CROSS JOIN LATERAL (
    SELECT array_agg(o.data ORDER BY o.position) AS data, array_agg(o.object ORDER BY o.position) AS objects,
           array_agg(int8range(o.object_offset, o.object_offset + o.length) ORDER BY o.position) AS ranges,
           count(*) FILTER (WHERE o.position <> o.expected) AS gaps
    FROM (SELECT *, lag(position + coalesce(length, octet_length(data)), 1, 0::bigint) OVER (ORDER BY position) AS expected
          FROM run_output WHERE run_id = r.id) o
) printed
WHERE r.labels ? $1 ORDER BY 1";

/// Loads the runs, and the output that is in objects in a directory.
pub(crate) async fn load_runs(
    connection: &mut PgConnection,
    objects: &Path,
) -> Result<Vec<Recorded>> {
    let rows = sqlx::query(SELECT_RUNS).bind(LABEL).fetch_all(connection).await?;
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
                output: load_output(&row, objects)?,
                gaps: row.try_get(9)?,
                ends: row.try_get(10)?,
                unauthorized_ends: row.try_get(11)?,
                reason: row.try_get(12)?,
                tenant: row.try_get(13)?,
                worker: row.try_get(14)?,
            })
        })
        .collect()
}

/// The stored output: bytes of rows, and of objects that rows name.
fn load_output(row: &PgRow, directory: &Path) -> Result<Output> {
    let data: Option<Vec<Option<Vec<u8>>>> = row.try_get(8)?;
    let objects: Option<Vec<Option<String>>> = row.try_get(15)?;
    let ranges: Option<Vec<Option<PgRange<i64>>>> = row.try_get(16)?;
    let places = objects.unwrap_or_default().into_iter().zip(ranges.unwrap_or_default());
    let mut output = Vec::new();
    for (data, place) in data.unwrap_or_default().into_iter().zip(places) {
        match (data, place) {
            (Some(data), _) => output.extend(data),
            (
                None,
                (
                    Some(object),
                    Some(PgRange { start: Bound::Included(start), end: Bound::Excluded(end) }),
                ),
            ) => {
                let all = fs::read(directory.join(&object))
                    .with_context(|| format!("object {object}"))?;
                let part = all.get(usize::try_from(start)?..usize::try_from(end)?);
                output.extend(part.with_context(|| format!("object {object} is too short"))?);
            }
            (None, place) => bail!("a row has neither data nor an object: {place:?}"),
        }
    }
    Ok(Output(output))
}

/// A line in a session: the number of the run that wrote it, and the word if it is a mark.
type Line = (usize, Option<String>);

/// Reads all lines of a session, in the order they were written.
pub(crate) fn read_lines(roots: &BTreeSet<std::path::PathBuf>, session: Uuid) -> Vec<Line> {
    let found = roots.iter().find_map(|root| {
        let workspace = root.join("sessions").join(session.to_string()).join("workspace");
        fs::read_to_string(workspace.join("marks")).ok()
    });
    let parse = |line: &str| {
        let (number, word) = line.split_once(' ')?;
        Some((number.parse().ok()?, (!word.starts_with('-')).then(|| word.to_owned())))
    };
    found.unwrap_or_default().lines().filter_map(parse).collect()
}

/// Checks all runs against their marks and what their callers observed.
pub(crate) fn check_runs(
    observed: &[&Observed],
    runs: &[Recorded],
    lines: &BTreeMap<Uuid, Vec<Line>>,
    system: &TestSystem,
    findings: &mut Findings,
) {
    let by_number: BTreeMap<usize, &Recorded> = runs.iter().map(|run| (run.number, run)).collect();
    for observed in observed {
        match by_number.get(&observed.number) {
            None => findings
                .lost
                .push(format!("run {} was accepted but is not recorded", observed.number)),
            Some(run) => {
                check_run(run, lines.get(&run.session), findings);
                check_observed(run, observed, &system.log, findings);
                check_output(run, observed, findings);
                check_watched(run, observed, findings);
            }
        }
    }
    for lines in lines.values() {
        check_order(lines, &by_number, &system.exempt, findings);
    }
}

/// Checks a run against its marks. Those of a session that has ended are gone.
fn check_run(run: &Recorded, lines: Option<&Vec<Line>>, findings: &mut Findings) {
    let own = lines.into_iter().flatten().filter(|line| line.0 == run.number);
    let words: Vec<&str> = own.filter_map(|line| line.1.as_deref()).collect();
    let (marks, attempts) = (words.len(), usize::try_from(run.attempt).unwrap_or(0));
    let mut lost = |what: &str| findings.lost.push(format!("{what}: {run:?}, marks {words:?}"));
    if run.state != "ended" || run.ends == 0 {
        return lost("no outcome");
    }
    let is_marked = lines.is_some();
    if run.ran_to_end() && is_marked && marks == 0 {
        lost("it exited without a mark");
    }
    if run.ran_to_end() && is_marked && !words.contains(&run.output.word()) {
        lost("its output is not the word of a mark");
    }
    let mut doubled =
        |what: &str| findings.doubled.push(format!("{what}: {run:?}, marks {words:?}"));
    if marks > attempts {
        doubled("more marks than attempts");
    }
    if run.ends > 1 {
        doubled("more than one outcome");
    }
    if run.unauthorized_ends > 0 {
        doubled(Findings::UNAUTHORIZED_END);
    }
}

/// Whether the caller of a run, or a fault that cut it off from an attached run, may have canceled
/// it.
pub(crate) fn may_be_canceled(run: &Recorded, observed: &Observed, log: &FaultLog) -> bool {
    let is_cut = || run.worker.as_ref().is_some_and(|worker| log.broke_link(worker));
    observed.may_be_canceled || (observed.is_attached && is_cut())
}

/// Checks a run against what its caller observed.
fn check_observed(run: &Recorded, observed: &Observed, log: &FaultLog, findings: &mut Findings) {
    if run.outcome == "canceled" && !may_be_canceled(run, observed, log) {
        findings.lost.push(format!("canceled without a request: {run:?}"));
    }
    if run.ran_to_end() && observed.printed.as_ref().is_some_and(|printed| *printed != run.output) {
        findings.lost.push(format!("its caller read different output: {run:?}, {observed:?}"));
    }
    if run.tenant != TENANT_NAMES[observed.tenant] {
        findings.exposed.push(format!("{}: recorded for it: {run:?}", Findings::EXPOSED));
    }
    findings.exposed.extend(observed.exposed.iter().cloned());
}

/// Checks that no run of an earlier holder writes after a run of a later holder. Exempts workers
/// that were paused (perhaps right after they started a command, before its deadline was set), and
/// those whose lease ended early because the clock of the database jumped.
fn check_order(
    lines: &[Line],
    runs: &BTreeMap<usize, &Recorded>,
    exempt: &BTreeSet<Uuid>,
    findings: &mut Findings,
) {
    let mut latest = 0;
    for run in lines.iter().filter_map(|line| runs.get(&line.0)).filter(|run| run.attempt == 1) {
        let (Some(epoch), Some(incarnation)) = (run.epoch, run.incarnation) else { continue };
        if epoch < latest && !exempt.contains(&incarnation) {
            findings.doubled.push(format!("{} (epoch {latest}): {run:?}", Findings::STALE_WRITE));
            return;
        }
        latest = latest.max(epoch);
    }
}

/// Counts the runs by outcome.
pub(crate) fn count_outcomes(runs: &[Recorded]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for run in runs {
        let reason = run.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        *counts.entry(format!("{}{reason}", run.outcome)).or_default() += 1;
    }
    counts
}

/// Finds rows that must not exist after everything has ended.
pub(crate) async fn find_rows(
    connection: &mut PgConnection,
    findings: &mut Findings,
) -> Result<()> {
    let counts = [
        ("unfinished runs", "SELECT count(*) FROM runs WHERE state <> 'ended'"),
        ("sessions with files", "SELECT count(*) FROM sessions WHERE removed_at IS NULL"),
        ("sessions that count as disk usage", "SELECT count(*) FROM session_disk"),
        ("leased sessions", "SELECT count(*) FROM sessions WHERE lease_worker IS NOT NULL"),
        (
            "unclean receipts",
            "SELECT count(*) FROM runs, jsonb_each_text(result -> 'receipt') AS left_behind WHERE left_behind.value <> '0'",
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

/// Finds files that must not exist in a worker's root after every session has ended.
pub(crate) fn find_files(root: &Path, findings: &mut Findings) {
    for directory in ["sessions", "trash", "ids"] {
        let entries = fs::read_dir(root.join(directory)).into_iter().flatten().flatten();
        findings.leftovers.extend(entries.map(|entry| entry.path().display().to_string()));
    }
}

/// Finds control groups and containers of workers that have exited.
pub(crate) fn find_sandboxes(pids: &BTreeSet<u32>) -> Result<Vec<String>> {
    let is_ours = |name: &String| pids.iter().any(|pid| name.contains(&format!("codelia-{pid}-")));
    let groups = abandoned_cgroups(ProcessId::current()?)
        .into_iter()
        .map(|path| path.display().to_string())
        .filter(is_ours);
    let exited: Vec<_> = pids.iter().copied().filter(|pid| !is_process(*pid)).collect();
    let containers =
        worker_containers(&exited)?.into_iter().map(|container| format!("container {container}"));
    Ok(groups.chain(containers).collect())
}

fn is_process(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Finds mounts and sockets below a directory.
pub(crate) fn find_mounts_and_sockets(directory: &Path, findings: &mut Findings) -> Result<()> {
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

/// Closes a connection that may already be broken.
pub(crate) async fn close(connection: PgConnection) {
    if let Err(error) = connection.close().await {
        eprintln!("cannot close a connection: {error}");
    }
}
