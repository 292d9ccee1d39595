//! Output of a run on our stdout and stderr: every byte unchanged and unbuffered.

use std::{fs::File, io, os::fd::AsFd};

use anyhow::Result;
use codelia_proto::v1::{OutputEvent, OutputStream};
use rustix::event::{PollFd, PollFlags, poll};

use crate::output::stdout_error;

/// Destination of a run's output.
#[derive(Debug)]
pub(crate) struct Streams {
    stdout: File,
    stderr: File,
    /// Whether the last byte on stdout ended a line.
    at_line_start: bool,
}

impl Streams {
    /// Opens stdout and stderr of this process, without buffers.
    pub(crate) fn open() -> io::Result<Self> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?.into();
        let stderr = io::stderr().as_fd().try_clone_to_owned()?.into();
        Ok(Self { stdout, stderr, at_line_start: true })
    }

    /// Writes output of the run. Blocks while the reader does not read.
    pub(crate) fn write(&mut self, output: &OutputEvent) -> Result<()> {
        match output.stream() {
            OutputStream::Stderr => write_all(&self.stderr, &output.data).map_err(stdout_error),
            OutputStream::Stdout | OutputStream::Unspecified => {
                self.at_line_start = output.data.last().map_or(self.at_line_start, |last| *last == b'\n');
                write_all(&self.stdout, &output.data).map_err(stdout_error)
            }
        }
    }

    /// Writes a separate line to stdout, after the run's output.
    pub(crate) fn write_line(&mut self, text: &str) -> Result<()> {
        let start = if self.at_line_start { "" } else { "\n" };
        write_all(&self.stdout, format!("{start}{text}\n").as_bytes()).map_err(stdout_error)
    }
}

/// Writes all bytes. The descriptor may be non-blocking, because another process shares it and made
/// it so; then wait until it is writable.
fn write_all(mut to: &File, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match io::Write::write(&mut to, bytes) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                poll(&mut [PollFd::new(&to, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::fd::OwnedFd};

    use super::*;

    fn piped() -> (Streams, File) {
        let (reader, writer): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
        let stdout: File = writer.into();
        let stderr = stdout.try_clone().unwrap();
        (Streams { stdout, stderr, at_line_start: true }, reader.into())
    }

    fn event(data: &[u8]) -> OutputEvent {
        OutputEvent { stream: OutputStream::Stdout.into(), data: data.to_vec().into(), ..Default::default() }
    }

    #[test]
    fn record_is_on_its_own_line() {
        let (mut streams, mut reader) = piped();
        streams.write(&event(b"\xff\0no newline")).unwrap();
        streams.write_line("{}").unwrap();
        drop(streams);
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"\xff\0no newline\n{}\n");
    }

    #[test]
    fn closed_stdout_is_a_distinct_error() {
        let (mut streams, reader) = piped();
        drop(reader);
        let error = streams.write(&event(b"x")).unwrap_err();
        assert!(error.is::<crate::output::StdoutClosed>());
    }
}
