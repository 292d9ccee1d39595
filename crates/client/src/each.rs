//! Commands with several arguments: each is tried and reported, and a failure changes the exit
//! code.

use std::process::ExitCode;

use anyhow::Result;
use serde_json::{Value, json};

use crate::{
    client::Client,
    error_report,
    output::{self, Output, StdoutClosed},
};

/// Reports the result of each argument: a line on stdout or an error on stderr as it is known, or
/// with `--json` one array at the end.
#[derive(Debug)]
pub(crate) struct Each {
    output: Output,
    results: Vec<Value>,
    failed: bool,
}

impl Each {
    pub(crate) fn new(output: Output) -> Self {
        Self { output, results: Vec::new(), failed: false }
    }

    /// Does `act` with each argument, and reports the result.
    pub(crate) async fn try_all<A: ToString>(
        &mut self,
        client: &Client,
        arguments: &[A],
        act: impl AsyncFn(&A) -> Result<(Value, String)>,
    ) -> Result<()> {
        for argument in arguments {
            let result = client.explained(act(argument).await).await;
            self.report(&argument.to_string(), result)?;
        }
        Ok(())
    }

    /// Reports a result as a record and, unless it is empty, a line.
    pub(crate) fn report(&mut self, argument: &str, result: Result<(Value, String)>) -> Result<()> {
        match result {
            Ok((json, text)) => {
                self.results.push(json);
                if self.output.is_json() || text.is_empty() {
                    Ok(())
                } else {
                    output::write_line(&text)
                }
            }
            Err(error) if error.is::<StdoutClosed>() => Err(error),
            Err(error) => {
                self.failed = true;
                error_report::print_about(argument, &error);
                self.results
                    .push(json!({ "argument": argument, "error": error_report::to_json(&error) }));
                Ok(())
            }
        }
    }

    /// Prints the JSON array. The exit code is 1 if an argument failed.
    pub(crate) fn finish(mut self) -> Result<ExitCode> {
        if self.output.is_json() {
            output::write_line(&Value::Array(std::mem::take(&mut self.results)).to_string())?;
        }
        Ok(self.exit_code())
    }

    /// Like [`Each::finish`] for one argument, whose result is not in an array.
    pub(crate) fn finish_one(mut self) -> Result<ExitCode> {
        if self.output.is_json()
            && let Some(result) = self.results.pop()
        {
            output::write_line(&result.to_string())?;
        }
        Ok(self.exit_code())
    }

    /// 1 if an argument failed.
    pub(crate) fn exit_code(&self) -> ExitCode {
        if self.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }
}
