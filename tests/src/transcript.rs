//! The events of a run, checked and collected as they arrive.

use codelia_proto::v1::{
    Approval, AssignedEvent, NearLimitEvent, OutputStream, Run, RunEvent, StartedEvent,
    ViolationEvent, outcome, run_event::Kind,
};

/// The events of one run so far.
#[derive(Debug, Default)]
pub struct Transcript {
    /// The run when it was queued.
    pub queued: Option<Run>,
    /// Why it waited for a worker, each time the reason changed.
    pub waiting: Vec<String>,
    /// Approvals that it waited for.
    pub approvals: Vec<Approval>,
    /// The last assignment.
    pub assigned: Option<AssignedEvent>,
    /// The start of the command.
    pub started: Option<StartedEvent>,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// The position after the last output.
    pub position: i64,
    /// The limit at which output was truncated.
    pub truncated_at: Option<i64>,
    /// Violations of its policy.
    pub violations: Vec<ViolationEvent>,
    /// Limits that it got near to.
    pub near_limits: Vec<NearLimitEvent>,
    /// The run with its outcome.
    pub finished: Option<Run>,
    offsets: [Option<i64>; 2],
}

impl Transcript {
    /// A transcript of a watch that starts at `position`.
    #[must_use]
    pub fn from_position(position: i64) -> Self {
        // The offsets of the streams are known only if the watch starts at 0.
        let offset = (position == 0).then_some(0);
        Self { position, offsets: [offset, offset], ..Self::default() }
    }

    /// Adds the next event.
    ///
    /// # Panics
    /// If it is out of order, follows the last event, or leaves a gap or overlap in the output.
    pub fn push(&mut self, event: RunEvent) {
        assert!(self.finished.is_none(), "event after the last one: {event:?}");
        match event.kind.expect("unknown kind of event") {
            Kind::Queued(queued) => {
                assert!(
                    self.queued.is_none() && self.started.is_none(),
                    "queued event is repeated or late"
                );
                self.queued = queued.run;
            }
            // A run that is retried waits again.
            Kind::Waiting(waiting) => self.waiting.push(waiting.message),
            Kind::ApprovalNeeded(needed) => self.approvals.extend(needed.approval),
            Kind::Assigned(assigned) => {
                if self.assigned.replace(assigned).is_some() {
                    self.restart();
                }
            }
            Kind::Started(started) => {
                assert!(self.queued.is_some(), "started event before queued event");
                self.started = Some(started);
            }
            Kind::Output(output) => {
                self.push_output(output.stream(), output.offset, &output.data, output.next_position)
            }
            Kind::Violation(violation) => {
                assert!(self.started.is_some(), "violation before the start");
                self.violations.push(violation);
            }
            Kind::NearLimit(near) => {
                assert!(self.started.is_some(), "near limit before the start");
                self.near_limits.push(near);
            }
            Kind::OutputTruncated(truncated) => self.truncated_at = Some(truncated.limit_bytes),
            Kind::Finished(finished) => {
                self.finished = Some(finished.run.expect("finished event without a run"))
            }
        }
    }

    /// Forgets the events of an earlier attempt.
    fn restart(&mut self) {
        let (queued, assigned) = (self.queued.take(), self.assigned.take());
        *self = Self { queued, assigned, ..Self::from_position(0) };
    }

    fn push_output(&mut self, stream: OutputStream, offset: i64, data: &[u8], next_position: i64) {
        assert!(!data.is_empty(), "empty output event");
        let length = i64::try_from(data.len()).expect("length fits i64");
        // After the output limit, what a watcher misses is not stored.
        let may_skip = self.truncated_at.is_some();
        let follows = |expected: i64, found: i64| expected == found || may_skip && expected < found;
        assert!(
            follows(self.position + length, next_position),
            "gap or overlap in the positions: {} and {length} bytes, then {next_position}",
            self.position
        );
        let (index, kept) = match stream {
            OutputStream::Stdout => (0, &mut self.stdout),
            OutputStream::Stderr => (1, &mut self.stderr),
            OutputStream::Unspecified => panic!("output without a stream"),
        };
        assert!(
            follows(self.offsets[index].unwrap_or(offset), offset),
            "gap or overlap in {stream:?}"
        );
        self.offsets[index] = Some(offset + length);
        self.position = next_position;
        kept.extend_from_slice(data);
    }

    /// The finished run.
    ///
    /// # Panics
    /// If it has not finished.
    #[must_use]
    pub fn run(&self) -> &Run {
        self.finished.as_ref().expect("the run has not finished")
    }

    /// The outcome of the finished run.
    ///
    /// # Panics
    /// If it has not finished.
    #[must_use]
    pub fn outcome(&self) -> outcome::Kind {
        self.run()
            .outcome
            .as_ref()
            .and_then(|outcome| outcome.kind.clone())
            .expect("finished run without an outcome")
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
