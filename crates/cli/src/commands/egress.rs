//! `codelia egress`: the egress proxy of a worker, which speaks to it over standard input.

use std::os::fd::AsFd;

use anyhow::{Context, Result};
use codelia_telemetry::{LogOptions, OtlpOptions};

use crate::args::Egress;

/// Serves until the worker closes standard input. Reads no configuration, which has the secrets of
/// the other services. The process must have one thread.
pub(crate) fn egress(args: &Egress) -> Result<()> {
    let log = LogOptions {
        format: args.log_format.parse().context("--log-format")?,
        filter: Some(args.log_filter.clone()),
        ..LogOptions::default()
    };
    let _telemetry = codelia_telemetry::init("codelia-egress", &log, &OtlpOptions::default())?;
    let control =
        std::io::stdin().as_fd().try_clone_to_owned().context("cannot use standard input")?;
    Ok(codelia_egress::run(control)?)
}
