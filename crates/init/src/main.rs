//! `codelia-init`: waits inside a sandbox for its one command, starts it, reaps and ends with it.
//!
//! Its standard input is the control socket. It has one thread and no other descriptor; when the
//! socket ends, because its backend let go of it or died, it kills every process of the sandbox.

#![forbid(unsafe_code)]

mod check;
mod control;
mod launch;
mod loader;
mod restrict;
mod setup;
mod tree;
mod waiting;

use std::{
    io::{Stdin, stdin},
    os::fd::AsFd,
    process::ExitCode,
};

use codelia_init::{Failure, Report};

use control::Control;

fn main() -> ExitCode {
    // A command that does nothing and is there in every sandbox, for the probe.
    if std::env::args_os().nth(1).is_some_and(|word| word == "--version") {
        println!("codelia-init {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    let mut control = Control::new(stdin());
    match serve(&mut control) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If the backend cannot hear it either, the exit code is all that is left to say.
            let _ = control.send(&Report::Failed(failure), &[]);
            ExitCode::FAILURE
        }
    }
}

fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let surroundings = setup::enter(control)?;
    let command = waiting::start(&surroundings)?;
    let descriptors: Vec<_> = command.descriptors.iter().map(AsFd::as_fd).collect();
    control.send(&Report::Ready, &descriptors)?;
    // The backend alone holds the launch socket and the listener, so that their ends mean its own.
    drop(command.descriptors);
    match tree::supervise(control, &surroundings.events, command.pid)? {
        Some(exit) => control.send(&Report::Exited(exit), &[]),
        None => Ok(()),
    }
}
