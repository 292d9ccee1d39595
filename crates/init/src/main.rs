//! `codelia-init`: waits inside a sandbox for its one command, starts it, reaps and ends with it.
//!
//! Its standard input is the control socket. It has one thread and no other descriptor; when the
//! socket ends, because its backend let go of it or died, it kills every process of the sandbox.

#![forbid(unsafe_code)]

mod control;
mod launch;
mod setup;
mod tree;

use std::process::ExitCode;

use codelia_init::{Failure, Report};

use control::Control;

fn main() -> ExitCode {
    // A command that does nothing and is there in every sandbox, for the probe.
    if std::env::args_os().nth(1).is_some_and(|word| word == "--version") {
        println!("codelia-init {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let mut control = Control::default();
    match serve(&mut control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If the backend cannot hear it either, the exit code is all that is left to say.
            let _ = control.send(&Report::Failed(failure));
            ExitCode::FAILURE
        }
    }
}

fn serve(control: &mut Control) -> Result<(), Failure> {
    let surroundings = setup::enter(control)?;
    control.send(&Report::Ready)?;
    let Some(order) = launch::receive(control)? else { return Ok(()) };
    let main = launch::start(&surroundings.process, order)?;
    match tree::supervise(control, &surroundings.events, main)? {
        Some(exit) => control.send(&Report::Exited(exit)),
        None => Ok(()),
    }
}
