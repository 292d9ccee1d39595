//! Output of a run on our stdout and stderr: every byte unchanged and unbuffered. Our own lines
//! pass through [`safe_text`].

use std::{
    fs::File,
    io::{self, IsTerminal},
};

use anyhow::Result;
use codelia_proto::v1::{OutputEvent, OutputStream, Run};

use crate::{
    output::{Output, stdout_error},
    safe_text, system,
};

/// Destination of a run's output and of our messages about it.
#[derive(Debug)]
pub(crate) struct Streams {
    stdout: Sink,
    stderr: Sink,
    /// Whether stdout is only for our record, and all output of the run goes to stderr.
    separate_record: bool,
    /// The position after the last output of the run.
    position: i64,
    /// Whether all output before it arrived.
    is_gapless: bool,
}

/// One stream, and whether the last byte on it ended a line.
#[derive(Debug)]
struct Sink {
    file: File,
    at_line_start: bool,
}

impl Streams {
    /// Opens stdout and stderr of this process, without buffers. With JSON, stdout is only for the
    /// record.
    pub(crate) fn open(output: Output) -> io::Result<Self> {
        let (stdout, stderr) = system::output_files()?;
        Ok(Self {
            separate_record: output.is_json(),
            ..Self::new(Sink::new(stdout), Sink::new(stderr))
        })
    }

    fn new(stdout: Sink, stderr: Sink) -> Self {
        Self { stdout, stderr, separate_record: false, position: 0, is_gapless: true }
    }

    /// The output of a new attempt follows.
    pub(crate) fn begin_attempt(&mut self) {
        self.position = 0;
        self.is_gapless = true;
    }

    /// Whether all output of an ended run was written. What the server stored always is.
    pub(crate) fn is_complete(&self, run: &Run) -> bool {
        !run.output_truncated || (self.is_gapless && run.output_total_bytes == Some(self.position))
    }

    /// Whether a file or a program, not a person, reads the output.
    pub(crate) fn is_redirected(&self) -> bool {
        !self.stdout.file.is_terminal() || !self.stderr.file.is_terminal()
    }

    /// Writes output of the run. Blocks while the reader does not read.
    pub(crate) fn write(&mut self, output: &OutputEvent) -> Result<()> {
        let length = i64::try_from(output.data.len()).unwrap_or(i64::MAX);
        self.is_gapless &= output.next_position - length == self.position;
        self.position = output.next_position;
        match output.stream() {
            OutputStream::Stderr => self.stderr.write(&output.data),
            _ if self.separate_record => self.stderr.write(&output.data),
            OutputStream::Stdout | OutputStream::Unspecified => self.stdout.write(&output.data),
        }
    }

    /// Writes the record of the run to stdout.
    pub(crate) fn write_record(&mut self, text: &str) -> Result<()> {
        self.stdout.write_line(text)
    }

    /// Writes a note of this program to stderr, on a separate line.
    pub(crate) fn write_note(&mut self, text: &str) -> Result<()> {
        self.write_message(&format!("codelia: {text}"))
    }

    /// Writes a message about the run to stderr, on a separate line.
    pub(crate) fn write_message(&mut self, text: &str) -> Result<()> {
        self.stderr.write_line(text)
    }
}

impl Sink {
    fn new(file: File) -> Self {
        Self { file, at_line_start: true }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.at_line_start = bytes.last().map_or(self.at_line_start, |last| *last == b'\n');
        write_all(&self.file, bytes).map_err(stdout_error)
    }

    fn write_line(&mut self, text: &str) -> Result<()> {
        // A terminal in raw mode does not return to the first column by itself.
        let newline = if self.file.is_terminal() { "\r\n" } else { "\n" };
        let start = if self.at_line_start { "" } else { newline };
        let line = format!("{start}{}{newline}", safe_text::line(text, &self.file));
        self.write(line.as_bytes())
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
                system::wait_until_writable(to)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::{io::Read, os::fd::OwnedFd};

    use super::*;

    fn piped() -> (Streams, File) {
        let (reader, writer): (OwnedFd, OwnedFd) = rustix::pipe::pipe().unwrap();
        let stderr = writer.try_clone().unwrap();
        (Streams::new(Sink::new(writer.into()), Sink::new(stderr.into())), reader.into())
    }

    fn event(data: &[u8]) -> OutputEvent {
        OutputEvent {
            stream: OutputStream::Stdout.into(),
            data: data.to_vec().into(),
            ..Default::default()
        }
    }

    #[test]
    fn record_is_alone_on_stdout() {
        let [(stdout, out), (stderr, err)] = [(); 2].map(|()| rustix::pipe::pipe().unwrap());
        let stdout = (File::from(stdout), out);
        let stderr = (File::from(stderr), err);
        let mut streams = Streams {
            separate_record: true,
            ..Streams::new(Sink::new(stdout.1.into()), Sink::new(stderr.1.into()))
        };
        streams.write(&event(b"\xff\0no newline")).unwrap();
        streams.write_message("codelia: note").unwrap();
        streams.write_record("{}").unwrap();
        drop(streams);
        let read = |mut file: File| {
            let mut got = Vec::new();
            file.read_to_end(&mut got).unwrap();
            got
        };
        assert_eq!(read(stdout.0), b"{}\n");
        assert_eq!(read(stderr.0), b"\xff\0no newline\ncodelia: note\n");
    }

    #[test]
    fn message_starts_a_new_line() {
        let (mut streams, mut reader) = piped();
        let partial = OutputEvent { stream: OutputStream::Stderr.into(), ..event(b"unshare: ") };
        streams.write(&partial).unwrap();
        streams.write_message("codelia: blocked").unwrap();
        streams.write_message("codelia: again").unwrap();
        drop(streams);
        let mut got = Vec::new();
        reader.read_to_end(&mut got).unwrap();
        assert_eq!(got, b"unshare: \ncodelia: blocked\ncodelia: again\n");
    }

    #[test]
    fn missing_output_is_noticed() {
        let (mut streams, _reader) = piped();
        let run =
            |total| Run { output_truncated: true, output_total_bytes: total, ..Run::default() };
        let output = |position: i64| OutputEvent { next_position: position, ..event(b"abc") };
        streams.write(&output(3)).unwrap();
        assert!(streams.is_complete(&run(Some(3))) && streams.is_complete(&Run::default()));
        assert!(!streams.is_complete(&run(Some(4))) && !streams.is_complete(&run(None)));
        streams.write(&output(7)).unwrap();
        assert!(!streams.is_complete(&run(Some(7))), "one byte is missing");
        streams.begin_attempt();
        streams.write(&output(3)).unwrap();
        assert!(streams.is_complete(&run(Some(3))));
    }

    #[test]
    fn closed_stdout_is_a_distinct_error() {
        let (mut streams, reader) = piped();
        drop(reader);
        let error = streams.write(&event(b"x")).unwrap_err();
        assert!(error.is::<crate::output::StdoutClosed>());
    }
}
