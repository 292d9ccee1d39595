//! Checks of what runs print and of how many exit.

use std::collections::BTreeMap;

use super::{
    Findings,
    checks::{Recorded, may_be_canceled},
    fault_log::{FaultLog, Renewals, worker_index},
    load::{Observed, expected_lines},
};

/// Checks the stored output of a run byte by byte. One that did not run to its end may have printed
/// less.
pub(crate) fn check_output(run: &Recorded, observed: &Observed, findings: &mut Findings) {
    let stored = &run.output.0;
    let word = run.output.word().len() + 1;
    let lines = stored.get(word..).unwrap_or_default();
    let differs = expected_lines(run.number, observed.lines)
        .zip(lines)
        .position(|(left, right)| left != *right);
    let length = expected_lines(0, 1).count() * observed.lines as usize;
    let is_right_size =
        if run.ran_to_end() { lines.len() == length } else { lines.len() <= length };
    if run.gaps > 0 || differs.is_some() || !is_right_size {
        let what = format!("{} gaps, differs at {differs:?}, {length} bytes expected", run.gaps);
        findings.lost.push(format!("{}: {what}: {run:?}", Findings::WRONG_OUTPUT));
    }
}

/// Checks what a watcher received against the record. It may have seen more of a run that did not
/// run to its end than was stored.
pub(crate) fn check_watched(run: &Recorded, observed: &Observed, findings: &mut Findings) {
    let Some(watched) = &observed.watched else { return };
    let (seen, stored) = (&watched.output.0, &run.output.0);
    let common = seen.len().min(stored.len());
    let is_same =
        seen[..common] == stored[..common] && (!run.ran_to_end() || seen.len() == stored.len());
    let is_ended = watched.outcome.as_deref() == Some(run.outcome.replace('_', "").as_str());
    if !is_same || !is_ended || !watched.errors.is_empty() {
        findings.lost.push(format!("{}: {watched:?}, recorded {run:?}", Findings::WRONG_WATCH));
    }
}

/// Checks that a fault on the lease of its worker explains each lost run.
pub(crate) fn check_losses(
    runs: &[Recorded],
    log: &FaultLog,
    renewals: &Renewals,
    findings: &mut Findings,
) {
    for run in runs.iter().filter(|run| run.outcome == "lost") {
        let worker = run.worker.as_deref().and_then(worker_index);
        let renewed = run.incarnation.and_then(|incarnation| renewals.get(&incarnation));
        let is_explained =
            worker.zip(renewed).is_some_and(|(worker, renewed)| log.explains(worker, *renewed));
        if !is_explained {
            findings
                .lost
                .push(format!("{} (renewed {renewed:?}): {run:?}", Findings::UNEXPLAINED_LOSS));
        }
    }
}

/// Checks that enough of the runs exited that nobody may have canceled.
pub(crate) fn check_exits(
    observed: &[Observed],
    runs: &[Recorded],
    min_share: f64,
    log: &FaultLog,
    findings: &mut Findings,
) {
    let kept: BTreeMap<usize, &Observed> =
        observed.iter().filter(|run| !run.may_be_canceled).map(|run| (run.number, run)).collect();
    let (exited, others): (Vec<_>, Vec<_>) = runs
        .iter()
        .filter(|run| kept.contains_key(&run.number))
        .partition(|run| run.outcome == "exited");
    let is_cut = |run: &&&Recorded| {
        run.outcome == "canceled" && may_be_canceled(run, kept[&run.number], log)
    };
    let cut = others.iter().filter(is_cut);
    let kept = kept.len() - cut.count();
    if (exited.len() as f64) < min_share * kept as f64 {
        let exited = exited.len();
        findings.lost.push(format!("{}: {exited} of {kept}, not {others:?}", Findings::FEW_EXITS));
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::chaos::{
        Fault, fault_log::FaultRecord, load::Output, plan::FaultEvent, watcher::Watched,
    };

    fn run(outcome: &str, output: &str) -> Recorded {
        let output = Output(output.as_bytes().to_vec());
        Recorded { output, ..Recorded::ended(7, outcome) }
    }

    fn printed(lines: u32) -> String {
        format!("word\n{}", String::from_utf8_lossy(&expected_lines(7, lines).collect::<Vec<_>>()))
    }

    fn found(check: impl FnOnce(&mut Findings)) -> usize {
        let mut findings = Findings::default();
        check(&mut findings);
        findings.lost.len()
    }

    #[test]
    fn wrong_output_is_found() {
        let observed = Observed { number: 7, lines: 3, ..Observed::default() };
        let check = |run: &Recorded| found(|findings| check_output(run, &observed, findings));
        assert_eq!(check(&run("exited", &printed(3))), 0);
        assert_eq!(check(&run("exited", &printed(2))), 1, "too short");
        assert_eq!(check(&run("exited", &printed(4))), 1, "too long");
        assert_eq!(check(&run("exited", &printed(3).replace("02\n", "03\n"))), 1, "changed");
        assert_eq!(check(&Recorded { gaps: 1, ..run("exited", &printed(3)) }), 1, "a gap");
        assert_eq!(check(&run("lost", &printed(2))), 0);
        assert_eq!(check(&run("lost", &printed(4))), 1);
    }

    #[test]
    fn wrong_watches_are_found() {
        let check = |run: &Recorded, output: &str, outcome: Option<&str>, errors: &[&str]| {
            let watched = Watched {
                output: Output(output.as_bytes().to_vec()),
                outcome: outcome.map(ToOwned::to_owned),
                errors: errors.iter().map(|&error| error.to_owned()).collect(),
                ..Watched::default()
            };
            let observed = Observed { watched: Some(watched), ..Observed::default() };
            found(|findings| check_watched(run, &observed, findings))
        };
        assert_eq!(check(&run("exited", "word\n"), "word\n", Some("exited"), &[]), 0);
        assert_eq!(check(&run("exited", "word\n"), "wor", Some("exited"), &[]), 1, "missing bytes");
        assert_eq!(
            check(&run("exited", "word\n"), "word\n\n", Some("exited"), &[]),
            1,
            "repeated bytes"
        );
        assert_eq!(check(&run("exited", "word\n"), "word\n", None, &[]), 1, "no end");
        assert_eq!(
            check(&run("lost", "word\n"), "word\n", Some("exited"), &[]),
            1,
            "another outcome"
        );
        assert_eq!(check(&run("exited", "word\n"), "word\n", Some("exited"), &["overlap"]), 1);
        assert_eq!(check(&run("lost", "wo"), "word\n", Some("lost"), &[]), 0);
    }

    #[test]
    fn losses_without_fault_and_few_exits_are_found() {
        let incarnation = Uuid::from_u128(1);
        let lost = Recorded {
            worker: Some("worker-1".into()),
            incarnation: Some(incarnation),
            ..run("lost", "")
        };
        let renewals = Renewals::from([(incarnation, 100.0)]);
        let log = FaultLog::default();
        assert_eq!(found(|findings| check_losses(&[lost], &log, &renewals, findings)), 1);
        let observed = [Observed { number: 7, ..Observed::default() }];
        let exits = |outcome| {
            found(|findings| check_exits(&observed, &[run(outcome, "")], 1.0, &log, findings))
        };
        assert_eq!((exits("exited"), exits("lost"), exits("canceled")), (0, 1, 1));
        let event = FaultEvent { fault: Fault::HalfOpen, target: 1 };
        let log = FaultLog { records: vec![FaultRecord { event, began: 0.0, ended: 1.0 }], ..log };
        let observed = [Observed { number: 7, is_attached: true, ..Observed::default() }];
        let exits = |outcome| {
            let run = Recorded { worker: Some("worker-1".into()), ..run(outcome, "") };
            found(|findings| check_exits(&observed, &[run], 1.0, &log, findings))
        };
        assert_eq!((exits("canceled"), exits("lost")), (0, 1), "its caller was cut off");
    }
}
