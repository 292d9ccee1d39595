//! What a run's events said, put together and checked as they arrive.

use codelia_proto::v1::{
    AssignedEvent, OutputStream, Run, RunEvent, StartedEvent, ViolationEvent, outcome, run_event::Kind,
};

/// The events of one run so far.
#[derive(Debug, Default)]
pub struct Transcript {
    /// The run as recorded.
    pub queued: Option<Run>,
    /// Who had it.
    pub assigned: Option<AssignedEvent>,
    /// How it was started.
    pub started: Option<StartedEvent>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Where to watch on from.
    pub position: i64,
    /// The limit that output was cut at.
    pub truncated_at: Option<i64>,
    /// What it tried against its policy.
    pub violations: Vec<ViolationEvent>,
    /// The run with its outcome.
    pub finished: Option<Run>,
    offsets: [Option<i64>; 2],
}

impl Transcript {
    /// For a watch that starts at `position`.
    #[must_use]
    pub fn from_position(position: i64) -> Self {
        // Offsets within the streams are known only for a watch from the start.
        let offset = (position == 0).then_some(0);
        Self { position, offsets: [offset, offset], ..Self::default() }
    }

    /// Takes the next event.
    ///
    /// # Panics
    /// If it may not come now: out of order, a gap or an overlap in the output, after the end.
    pub fn push(&mut self, event: RunEvent) {
        assert!(self.finished.is_none(), "after the last event: {event:?}");
        match event.kind.expect("an event of a known kind") {
            Kind::Queued(queued) => {
                assert!(self.queued.is_none() && self.started.is_none(), "queued twice or late");
                self.queued = queued.run;
            }
            Kind::Assigned(assigned) => {
                if self.assigned.replace(assigned).is_some() {
                    self.begin_anew();
                }
            }
            Kind::Started(started) => {
                assert!(self.queued.is_some(), "started before queued");
                self.started = Some(started);
            }
            Kind::Output(output) => {
                self.push_output(output.stream(), output.offset, &output.data, output.next_position)
            }
            Kind::Violation(violation) => {
                assert!(self.started.is_some(), "a violation before the start");
                self.violations.push(violation);
            }
            Kind::OutputTruncated(cut) => self.truncated_at = Some(cut.limit_bytes),
            Kind::Finished(finished) => self.finished = Some(finished.run.expect("the finished run")),
        }
    }

    /// What an earlier attempt did counts no more.
    fn begin_anew(&mut self) {
        let (queued, assigned) = (self.queued.take(), self.assigned.take());
        *self = Self { queued, assigned, ..Self::from_position(0) };
    }

    fn push_output(&mut self, stream: OutputStream, offset: i64, data: &[u8], next_position: i64) {
        assert!(!data.is_empty(), "an empty piece of output");
        let length = i64::try_from(data.len()).expect("a length");
        assert_eq!(self.position + length, next_position, "a gap or an overlap in the positions");
        let (index, kept) = match stream {
            OutputStream::Stdout => (0, &mut self.stdout),
            OutputStream::Stderr => (1, &mut self.stderr),
            OutputStream::Unspecified => panic!("output of no stream"),
        };
        assert_eq!(self.offsets[index].unwrap_or(offset), offset, "a gap or an overlap in {stream:?}");
        self.offsets[index] = Some(offset + length);
        self.position = next_position;
        kept.extend_from_slice(data);
    }

    /// The run with its outcome.
    ///
    /// # Panics
    /// If it has not ended.
    #[must_use]
    pub fn run(&self) -> &Run {
        self.finished.as_ref().expect("a finished run")
    }

    /// How it ended.
    ///
    /// # Panics
    /// If it has not.
    #[must_use]
    pub fn outcome(&self) -> outcome::Kind {
        self.run().outcome.as_ref().and_then(|outcome| outcome.kind.clone()).expect("an outcome")
    }

    /// Standard output as text.
    #[must_use]
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Standard error as text.
    #[must_use]
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }
}
