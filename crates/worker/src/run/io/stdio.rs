//! The standard streams of a command, and the worker's ends of them: pipes, or a terminal.

use std::{fs::File, io, os::fd::OwnedFd};

use bytes::{Bytes, BytesMut};
use codelia_backends::Stdio;
use codelia_store::OutputStream;
use codelia_sys::pty::{WindowSize, set_window_size};
use codelia_types::{CommandSpec, TerminalSize};
use rustix::io::Errno;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::unix::pipe,
};

/// Enough for a command that writes little.
const SMALL_READ: usize = 4 * 1024;
/// For a command that filled the last small read.
const LARGE_READ: usize = 64 * 1024;
/// Control-D, which ends the input of a terminal.
const END_OF_INPUT: &[u8] = &[4];

/// The worker's ends of a command's streams.
#[derive(Debug, Default)]
pub(crate) struct Ends {
    /// Writes standard input, if the command has one.
    pub(crate) stdin: Option<Writer>,
    pub(crate) outputs: Vec<(OutputStream, Reader)>,
    pub(crate) terminal: Option<Terminal>,
}

/// Opens the streams of a command. The sandbox opens a terminal itself: [`Ends::of_terminal`].
pub(crate) fn open(command: &CommandSpec) -> io::Result<(Stdio, Ends)> {
    match command.terminal {
        Some(size) => Ok((Stdio::Terminal(size), Ends::default())),
        None => open_pipes(command.stdin),
    }
}

impl Ends {
    /// The ends of a terminal, of which this is the controlling side.
    pub(crate) fn of_terminal(controller: OwnedFd, with_stdin: bool) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&controller, true)?;
        // Unchecked: it is not a pipe, but is read, written and polled like one.
        let output = pipe::Receiver::from_owned_fd_unchecked(controller.try_clone()?)?;
        let stdin = match with_stdin {
            true => Some(Writer::Terminal(pipe::Sender::from_owned_fd_unchecked(
                controller.try_clone()?,
            )?)),
            false => None,
        };
        let outputs = vec![(OutputStream::Stdout, Reader::new(output))];
        Ok(Self { stdin, outputs, terminal: Some(Terminal { controller }) })
    }
}

fn open_pipes(with_stdin: bool) -> io::Result<(Stdio, Ends)> {
    let (stdout, stdout_end) = pipe::pipe()?;
    let (stderr, stderr_end) = pipe::pipe()?;
    let (stdin, stdin_end) = if with_stdin {
        let (ours, theirs) = pipe::pipe()?;
        (theirs.into_blocking_fd()?, Some(Writer::Pipe(ours)))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let stdout = stdout.into_blocking_fd()?;
    let stderr = stderr.into_blocking_fd()?;
    let stdio = Stdio::Files { stdin, stdout, stderr };
    let outputs = vec![
        (OutputStream::Stdout, Reader::new(stdout_end)),
        (OutputStream::Stderr, Reader::new(stderr_end)),
    ];
    Ok((stdio, Ends { stdin: stdin_end, outputs, terminal: None }))
}

/// The controlling side of a terminal.
#[derive(Debug)]
pub(crate) struct Terminal {
    controller: OwnedFd,
}

impl Terminal {
    /// Changes its size and signals the command.
    pub(crate) fn resize(&self, size: TerminalSize) -> io::Result<()> {
        let size = WindowSize { columns: size.columns, rows: size.rows };
        Ok(set_window_size(&self.controller, size)?)
    }
}

/// Reads one output stream.
#[derive(Debug)]
pub(crate) struct Reader {
    source: pipe::Receiver,
    buffer: BytesMut,
    busy: bool,
}

impl Reader {
    fn new(source: pipe::Receiver) -> Self {
        Self { source, buffer: BytesMut::new(), busy: false }
    }

    /// The next bytes; empty at the end.
    pub(crate) async fn read(&mut self) -> io::Result<Bytes> {
        self.buffer.reserve(if self.busy { LARGE_READ } else { SMALL_READ });
        let count = match self.source.read_buf(&mut self.buffer).await {
            // The last process that had the terminal open has ended.
            Err(error) if error.raw_os_error() == Some(Errno::IO.raw_os_error()) => 0,
            other => other?,
        };
        self.busy = count >= SMALL_READ;
        Ok(self.buffer.split().freeze())
    }
}

/// Writes standard input.
#[derive(Debug)]
pub(crate) enum Writer {
    Pipe(pipe::Sender),
    Terminal(pipe::Sender),
}

impl Writer {
    pub(crate) async fn write_all(&mut self, data: &[u8]) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) | Self::Terminal(pipe) => pipe.write_all(data).await,
        }
    }

    /// Ends standard input.
    pub(crate) async fn finish(self) -> io::Result<()> {
        match self {
            Self::Pipe(pipe) => {
                drop(pipe);
                Ok(())
            }
            Self::Terminal(mut terminal) => terminal.write_all(END_OF_INPUT).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use codelia_sys::pty::Pty;

    use super::*;

    fn command(stdin: bool) -> CommandSpec {
        CommandSpec { stdin, ..CommandSpec::default() }
    }

    fn files(stdio: Stdio) -> [File; 3] {
        match stdio {
            Stdio::Files { stdin, stdout, stderr } => [stdin.into(), stdout.into(), stderr.into()],
            Stdio::Terminal(_) => panic!("{stdio:?}"),
        }
    }

    #[tokio::test]
    async fn pipes_carry_bytes_both_ways() {
        let (stdio, mut ends) = open(&command(true)).unwrap();
        let [mut command_stdin, command_stdout, mut command_stderr] = files(stdio);
        let mut stdin = ends.stdin.take().unwrap();
        stdin.write_all(b"in\0\xff").await.unwrap();
        stdin.finish().await.unwrap();
        let mut read = Vec::new();
        command_stdin.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"in\0\xff");

        command_stderr.write_all(b"err").unwrap();
        drop((command_stdout, command_stderr));
        assert_eq!(ends.outputs[1].1.read().await.unwrap(), "err");
        assert!(ends.outputs[1].1.read().await.unwrap().is_empty());
        assert!(ends.outputs[0].1.read().await.unwrap().is_empty());
    }

    #[tokio::test]
    async fn command_without_stdin_reads_nothing() {
        let (stdio, ends) = open(&command(false)).unwrap();
        assert!(ends.stdin.is_none());
        let [mut stdin, ..] = files(stdio);
        assert_eq!(stdin.read(&mut [0; 8]).unwrap(), 0);
    }

    #[tokio::test]
    async fn terminal_is_one_stream_that_ends() {
        let pty = Pty::open(WindowSize { columns: 80, rows: 24 }).unwrap();
        let mut ends = Ends::of_terminal(pty.controller, true).unwrap();
        File::from(pty.terminal).write_all(b"hello").unwrap();
        let (stream, reader) = &mut ends.outputs[0];
        assert_eq!(*stream, OutputStream::Stdout);
        assert_eq!(reader.read().await.unwrap(), "hello");
        assert!(reader.read().await.unwrap().is_empty());
    }
}
