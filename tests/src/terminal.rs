//! A pseudo-terminal with a program attached.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, ExitStatus, Stdio},
    thread,
};

use anyhow::{Context, Result};
use rustix::{
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use tokio::sync::watch;

use crate::{eventually, within};

/// The user's side of a pseudo-terminal.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    child: Child,
    screen: watch::Receiver<String>,
}

impl Terminal {
    /// Starts a program with this as its controlling terminal.
    pub fn start(program: &Command, columns: u16, rows: u16) -> Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY)?;
        grantpt(&master)?;
        unlockpt(&master)?;
        tcsetwinsize(&master, size(columns, rows))?;
        let name = ptsname(&master, Vec::new())?.into_string()?;
        let open_slave = || File::options().read(true).write(true).open(&name);

        // setsid starts a session whose controlling terminal is its standard input.
        let mut command = Command::new("setsid");
        command.args(["--ctty", "--wait"]).arg(program.get_program()).args(program.get_args());
        command
            .env_clear()
            .envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.env("TERM", "xterm-256color");
        let child = command
            .stdin(Stdio::from(open_slave()?))
            .stdout(Stdio::from(open_slave()?))
            .stderr(Stdio::from(open_slave()?))
            .spawn()
            .context("start a program on a terminal")?;
        let master = File::from(master);
        Ok(Self { screen: read_screen(master.try_clone()?), master, child })
    }

    /// Types text.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.master.write_all(text.as_bytes()).context("write to the terminal")
    }

    /// Changes the window size.
    pub fn resize(&self, columns: u16, rows: u16) -> Result<()> {
        tcsetwinsize(&self.master, size(columns, rows)).context("resize the terminal")
    }

    /// Waits until the output since the start contains `text`, and returns all output.
    pub async fn shows(&self, text: &str) -> Result<String> {
        let mut screen = self.screen.clone();
        let seen =
            within(("the terminal shows", text), screen.wait_for(|shown| shown.contains(text)))
                .await;
        Ok(seen
            .with_context(|| {
                format!("the terminal closed; its output: {:?}", self.screen.borrow())
            })?
            .clone())
    }

    /// All output so far.
    #[must_use]
    pub fn shown(&self) -> String {
        self.screen.borrow().clone()
    }

    /// Waits until the program's side is closed, and returns all output. Call it when the program
    /// has exited.
    pub async fn closed(&self) -> String {
        let mut screen = self.screen.clone();
        // The sender is dropped then; nothing matches before.
        let _ = within("the terminal closes", screen.wait_for(|_| false)).await;
        self.shown()
    }

    /// Sends the program the signal of a terminal that goes away, and waits until it exits.
    pub async fn hang_up(&mut self) -> Result<ExitStatus> {
        let pid = Pid::from_raw(self.child.id().cast_signed()).context("invalid process id")?;
        kill_process(pid, Signal::HUP).context("hang up")?;
        self.exited().await
    }

    /// Waits until the program exits.
    pub async fn exited(&mut self) -> Result<ExitStatus> {
        let child = &mut self.child;
        Ok(eventually("the program on the terminal exits", || {
            std::future::ready(child.try_wait().transpose())
        })
        .await?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            eprintln!("---- terminal ----\n{}", self.shown());
            if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
                eprintln!("cannot kill the program on the terminal: {error}");
            }
        }
    }
}

fn size(columns: u16, rows: u16) -> Winsize {
    Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 }
}

fn read_screen(mut master: File) -> watch::Receiver<String> {
    let (sender, receiver) = watch::channel(String::new());
    thread::spawn(move || {
        let mut buffer = [0; 4096];
        // Reading fails with EIO when the program's side is closed.
        while let Ok(read @ 1..) = master.read(&mut buffer) {
            sender.send_modify(|shown| shown.push_str(&String::from_utf8_lossy(&buffer[..read])));
        }
    });
    receiver
}
