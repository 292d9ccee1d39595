//! `codelia-init`: waits in a sandbox for its one command, starts it, reaps processes and exits
//! with it.
//!
//! Stdin is the control socket, or becomes it with `--connect PATH`. Init has one thread and, next
//! to the socket, only descriptors of counters of its network. When the backend closes the socket
//! or dies, init kills every process of the sandbox.

#![forbid(unsafe_code)]

mod check;
mod child;
mod control;
mod failure;
mod launch;
mod layout;
mod mount_flags;
mod network;
mod no_route;
mod overlay;
mod process_tree;
mod restrict;
mod setup;
mod view;
mod zygote;

use std::{
    io::{self, Stdin, stdin},
    os::{fd::AsFd, unix::net::UnixStream},
    process::ExitCode,
};

use codelia_init::{Exit, Failure, Report};
use codelia_sys::fd;

use child::CommandProcess;
use control::Control;
use setup::Inherited;

fn main() -> ExitCode {
    let argument = std::env::args_os().nth(1).unwrap_or_default();
    // The probe runs this as a command that does nothing and exists in every sandbox.
    if argument == "--version" {
        println!("codelia-init {}", env!("CARGO_PKG_VERSION"));
        return ExitCode::SUCCESS;
    }
    if let Err(error) = connect() {
        // Without a control socket, stderr is the only place to report this.
        eprintln!("codelia-init: cannot connect to the control socket: {error}");
        return ExitCode::FAILURE;
    }
    let mut control = Control::new(stdin());
    let result = match argument.as_encoded_bytes() {
        b"--overlays" => overlay::serve(&mut control),
        b"--restrict-mounts" => mount_flags::serve(&mut control),
        b"--egress" => network::serve(&mut control),
        b"--zygote" => zygote::serve(&mut control),
        _ => serve(&mut control, None),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            // If the backend does not get this, it sees the exit code.
            let _ = control.send(&Report::Failed(failure), &[]);
            ExitCode::FAILURE
        }
    }
}

/// Connects stdin to the control socket if it could not be inherited.
fn connect() -> io::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_none_or(|word| word != "--connect") {
        return Ok(());
    }
    let path = arguments.next().ok_or(io::ErrorKind::InvalidInput)?;
    Ok(fd::replace_stdin(UnixStream::connect(path)?)?)
}

fn serve(control: &mut Control<Stdin>, inherited: Option<Inherited<'_>>) -> Result<(), Failure> {
    let state = setup::run(control, inherited)?;
    let CommandProcess { pid, launch, listener } = child::start(&state)?;
    // Init starts no other process, so no process inherits its filter.
    restrict::supervision(&state.setup)?;
    if state.setup.relay_launch {
        control.send(&Report::Ready, &[])?;
        if !launch::relay(control, &launch)? {
            return Ok(());
        }
    } else {
        let descriptors: Vec<_> = [&launch].into_iter().chain(&listener).map(AsFd::as_fd).collect();
        control.send(&Report::Ready, &descriptors)?;
    }
    // Only the backend may hold these, so that end of file means that it is gone.
    drop((launch, listener));
    if let Some(exit) = process_tree::supervise(control, &state.events, pid)? {
        let exit = Exit { unreachable_attempts: state.no_routes.count(), ..exit };
        control.send(&Report::Exited(exit), &[])?;
        // The cgroups of a container are removed when init exits, with their counters. So init
        // waits until its backend has read them and closes the socket.
        while state.setup.stay_after_exit && control.fill()? {}
    }
    Ok(())
}
