//! `codelia-init`: waits inside a sandbox for its one command, starts it, reaps and ends with it.
//!
//! Its standard input is the control socket, or becomes it with `--connect PATH`. It has one thread and no other descriptor; when the
//! socket ends, because its backend let go of it or died, it kills every process of the sandbox.

#![forbid(unsafe_code)]

mod check;
mod child;
mod control;
mod launch;
mod loader;
mod overlay;
mod restrict;
mod setup;
mod tree;

use std::{
    io::{self, Stdin, stdin},
    os::{fd::AsFd, unix::net::UnixStream},
    process::ExitCode,
};

use codelia_init::{Failure, Report};
use codelia_sys::fd;

use child::Waiting;
use control::Control;

fn main() -> ExitCode {
    // A command that does nothing and is there in every sandbox, for the probe.
    let is_asked = |word: &str| std::env::args_os().nth(1).is_some_and(|first| first == word);
    if is_asked("--version") {
        println!("codelia-init {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    if let Err(error) = connect() {
        // Nobody else can be told.
        eprintln!("codelia-init: the control socket: {error}");
        return ExitCode::FAILURE;
    }
    let mut control = Control::new(stdin());
    let served = if is_asked("--overlays") { overlay::serve(&mut control) } else { serve(&mut control) };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If the backend cannot hear it either, the exit code is all that is left to say.
            let _ = control.send(&Report::Failed(failure), &[]);
            ExitCode::FAILURE
        }
    }
}

/// Where the control socket cannot be inherited it is connected to.
fn connect() -> io::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != "--connect") {
        return Ok(());
    }
    let path = arguments.next().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(fd::replace_input(UnixStream::connect(path)?)?)
}

fn serve(control: &mut Control<Stdin>) -> Result<(), Failure> {
    let surroundings = setup::enter(control)?;
    let Waiting { pid, launch, listener } = child::start(&surroundings)?;
    if surroundings.setup.relay_launch {
        control.send(&Report::Ready, &[])?;
        if !launch::relay(control, &launch)? {
            return Ok(());
        }
    } else {
        let descriptors: Vec<_> = [Some(&launch), listener.as_ref()].into_iter().flatten().collect();
        let descriptors: Vec<_> = descriptors.into_iter().map(AsFd::as_fd).collect();
        control.send(&Report::Ready, &descriptors)?;
    }
    // The backend alone holds the launch socket and the listener, so that their ends mean its own.
    drop((launch, listener));
    match tree::supervise(control, &surroundings.events, pid)? {
        Some(exit) => {
            control.send(&Report::Exited(exit), &[])?;
            linger(control, surroundings.setup.stay_after_exit)
        }
        None => Ok(()),
    }
}

/// With init the container's groups would go, and what they counted with them: its backend reads them
/// first and then ends the socket.
fn linger(control: &mut Control<Stdin>, linger: bool) -> Result<(), Failure> {
    while linger && control.fill()? {}
    Ok(())
}
