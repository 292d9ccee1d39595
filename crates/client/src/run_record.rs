//! What the command line says about a run beyond the API.
//!
//! `--json` prints messages of the API in the API's own JSON ([`codelia_proto::json`]). Results
//! that the API does not have are built where they are printed, and are named in the same style:
//! this record, failed arguments, removed objects, contexts, and what commands on the machine of
//! the server print.

use codelia_proto::{
    json::{JsonError, to_json},
    v1::{Run, SandboxMode},
};
use serde::Serialize;
use serde_json::Value;

use crate::{exit_status, words::Word};

/// The record of `run`, `exec` and `attach`: the API's `Run` and two fields more.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct RunRecord {
    #[serde(flatten)]
    run: Value,
    /// The exit code that the outcome has in a shell. Missing until the run has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<u8>,
    /// `none` in mode `logical`, which provides no isolation; else the mode. Missing until a worker
    /// has chosen one.
    #[serde(skip_serializing_if = "Option::is_none")]
    isolation: Option<String>,
}

/// Returns the record of a run.
///
/// # Errors
/// The run has a value that JSON cannot express.
pub fn run_record(run: &Run) -> Result<Value, JsonError> {
    let isolation = match run.mode() {
        SandboxMode::Unspecified => None,
        SandboxMode::Logical => Some("none".to_owned()),
        mode => Some(mode.word()),
    };
    let exit_code = run.outcome.as_ref().map(exit_status::exit_code);
    Ok(serde_json::to_value(RunRecord { run: to_json(run)?, exit_code, isolation })?)
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
