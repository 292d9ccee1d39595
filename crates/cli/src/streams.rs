//! Our stdout and stderr as a command's: every byte as it came, at once.

use std::{fs::File, io, os::fd::AsFd};

use anyhow::Result;
use codelia_proto::v1::{OutputEvent, OutputStream};
use rustix::event::{PollFd, PollFlags, poll};

use crate::output::closed_or;

/// Where a command's output goes.
#[derive(Debug)]
pub(crate) struct Streams {
    stdout: File,
    stderr: File,
    /// Whether the next byte on stdout begins a line.
    at_line_start: bool,
}

impl Streams {
    /// Our own two streams, without a buffer between.
    pub(crate) fn own() -> io::Result<Self> {
        let stdout = io::stdout().as_fd().try_clone_to_owned()?.into();
        let stderr = io::stderr().as_fd().try_clone_to_owned()?.into();
        Ok(Self { stdout, stderr, at_line_start: true })
    }

    /// Writes what a command wrote. Blocks while nobody reads.
    pub(crate) fn write(&mut self, output: &OutputEvent) -> Result<()> {
        match output.stream() {
            OutputStream::Stderr => write_all(&self.stderr, &output.data).map_err(closed_or),
            OutputStream::Stdout | OutputStream::Unspecified => {
                self.at_line_start = output.data.last().map_or(self.at_line_start, |last| *last == b'\n');
                write_all(&self.stdout, &output.data).map_err(closed_or)
            }
        }
    }

    /// Writes a line of our own to stdout, on a line of its own.
    pub(crate) fn last_line(&mut self, text: &str) -> Result<()> {
        let start = if self.at_line_start { "" } else { "\n" };
        write_all(&self.stdout, format!("{start}{text}\n").as_bytes()).map_err(closed_or)
    }
}

/// Whoever shares the stream may have made it non-blocking: then wait for room.
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
    fn the_record_gets_a_line_of_its_own_and_bytes_stay_as_they_are() {
        let (mut streams, mut reader) = piped();
        streams.write(&event(b"\xff\0no newline")).unwrap();
        streams.last_line("{}").unwrap();
        drop(streams);
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"\xff\0no newline\n{}\n");
    }

    #[test]
    fn a_reader_that_left_is_told_apart() {
        let (mut streams, reader) = piped();
        drop(reader);
        let error = streams.write(&event(b"x")).unwrap_err();
        assert!(error.is::<crate::output::StdoutClosed>());
    }
}
