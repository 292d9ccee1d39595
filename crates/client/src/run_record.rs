//! The record of a run: the API's `Run`, and beyond the API the exit code and the isolation.
//!
//! `--json` prints messages of the API in the API's own JSON ([`codelia_proto::json`]). Results
//! that the API does not have are built where they are printed, and are named in the same style:
//! this record, failed arguments, removed objects, contexts, and what commands on the machine of
//! the server print.

use codelia_proto::{
    json::{JsonError, to_json},
    v1::{Run, SandboxMode},
};
use serde_json::Value;

use crate::{exit_status, words::Word};

/// Returns the record of `run`, `exec` and `attach`: the API's `Run`, with the exit code that the
/// outcome has in a shell once the run has ended, and with its isolation once a worker has chosen
/// the mode: `none` in mode `logical`, which provides no isolation; else the mode.
///
/// # Errors
/// The run has a value that JSON cannot express.
pub fn run_record(run: &Run) -> Result<Value, JsonError> {
    let mut record = to_json(run)?;
    if let Some(outcome) = &run.outcome {
        record["exitCode"] = exit_status::exit_code(outcome).into();
    }
    match run.mode() {
        SandboxMode::Unspecified => {}
        SandboxMode::Logical => record["isolation"] = "none".into(),
        mode => record["isolation"] = mode.word().into(),
    }
    Ok(record)
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::{Outcome, outcome::Kind};
    use serde_json::json;

    use super::*;

    #[test]
    fn logical_run_reports_no_isolation() {
        let run = Run {
            run_id: "x".into(),
            mode: SandboxMode::Logical.into(),
            outcome: Some(Outcome { kind: Some(Kind::Signaled(9)) }),
            ..Default::default()
        };
        let expected = json!({
            "runId": "x",
            "mode": "SANDBOX_MODE_LOGICAL",
            "outcome": { "signaled": 9 },
            "exitCode": 137,
            "isolation": "none",
        });
        assert_eq!(run_record(&run).unwrap(), expected);
        assert_eq!(run_record(&Run::default()).unwrap(), json!({}));
    }
}
