//! One attached caller: receives the run's events at its own pace and sends input.
//!
//! An attachment holds a position. Nothing is buffered for it. The run waits only for the caller
//! that it ends with, and only after the output limit.

use std::sync::Arc;

use codelia_proto::{
    duration_to_proto,
    internal::v1::{
        AttachRunRequest, AttachRunResponse, Committed, attach_run_request::Kind as Input,
        attach_run_response::Kind as Answer,
    },
    v1::{
        AssignedEvent, OutputEvent, OutputStream, OutputTruncatedEvent, RunEvent, SandboxMode,
        StartedEvent, run_event::Kind as Event,
    },
};
use codelia_store::OutputStream as Which;
use codelia_types::{NearLimit, TerminalSize, Violations};
use futures::{Stream, StreamExt, stream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::{Status, Streaming};

use super::{
    active::{ActiveRun, Control, Phase, Started},
    io::{
        buffer::{Found, Piece},
        output::Follower,
    },
};

/// A caller that the run ends with; dropping it means that the caller left.
#[derive(Debug)]
pub(crate) struct OwnerGuard(Arc<ActiveRun>);

impl OwnerGuard {
    pub(crate) fn new(run: Arc<ActiveRun>) -> Self {
        run.owner_attached();
        Self(run)
    }
}

impl Drop for OwnerGuard {
    fn drop(&mut self) {
        self.0.owner_left();
    }
}

#[derive(Debug)]
enum Stage {
    Assigned,
    Starting,
    Output,
    Ending,
    Over,
}

/// A caller's position in the events of a run.
#[derive(Debug)]
pub(crate) struct RunAttachment {
    run: Arc<ActiveRun>,
    worker: String,
    stage: Stage,
    position: i64,
    truncation_sent: bool,
    violations_sent: usize,
    near_limits_sent: usize,
    phase: watch::Receiver<Phase>,
    output: watch::Receiver<()>,
    violations: watch::Receiver<Violations>,
    near_limits: watch::Receiver<Vec<NearLimit>>,
    follower: Option<Follower>,
    _owner: Option<OwnerGuard>,
    _detached: DropGuard,
}

impl RunAttachment {
    /// `detached` is cancelled when the attachment is dropped.
    pub(crate) fn new(
        run: Arc<ActiveRun>,
        worker: String,
        position: i64,
        owner: bool,
        detached: CancellationToken,
    ) -> Self {
        Self {
            worker,
            stage: Stage::Assigned,
            position,
            truncation_sent: false,
            violations_sent: 0,
            near_limits_sent: 0,
            phase: run.phase.subscribe(),
            output: run.output.subscribe(),
            violations: run.violations.subscribe(),
            near_limits: run.near_limits.subscribe(),
            follower: owner.then(|| run.output.follow(position)),
            _owner: owner.then(|| OwnerGuard::new(run.clone())),
            _detached: detached.drop_guard(),
            run,
        }
    }

    /// The events from the position on.
    pub(crate) fn into_stream(
        self,
    ) -> impl Stream<Item = Result<AttachRunResponse, Status>> + Send {
        stream::unfold(self, |mut attachment| async move {
            let answer = attachment.next().await?;
            Some((Ok(AttachRunResponse { kind: Some(answer) }), attachment))
        })
    }

    async fn next(&mut self) -> Option<Answer> {
        loop {
            let answer = match self.stage {
                Stage::Assigned => {
                    self.stage = Stage::Starting;
                    Some(event(Event::Assigned(AssignedEvent {
                        worker_id: self.worker.clone(),
                        lease_epoch: self.run.assigned.epoch.0,
                    })))
                }
                Stage::Starting => self.starting().await,
                Stage::Output => self.output().await,
                Stage::Ending => self.ending().await,
                Stage::Over => return None,
            };
            if answer.is_some() {
                return answer;
            }
        }
    }

    async fn starting(&mut self) -> Option<Answer> {
        let phase = phase_when(&mut self.phase, |phase| !matches!(phase, Phase::Assigned)).await;
        // If the run has already ended, the api reads its start from the store.
        self.stage = Stage::Output;
        match phase {
            Phase::Started(started) => Some(event(Event::Started(self.started(started)))),
            Phase::Assigned | Phase::Committed(_) | Phase::Dropped => None,
        }
    }

    async fn output(&mut self) -> Option<Answer> {
        self.output.mark_unchanged();
        self.violations.mark_unchanged();
        self.near_limits.mark_unchanged();
        if let Some(follower) = &self.follower {
            // The caller asks for more, so it has taken what it got.
            follower.advance(self.position);
        }
        if let Some(violation) = self.run.violations.get(self.violations_sent) {
            self.violations_sent += 1;
            return Some(event(Event::Violation((&violation).into())));
        }
        if let Some(near) = self.run.near_limits.get(self.near_limits_sent) {
            self.near_limits_sent += 1;
            return Some(event(Event::NearLimit(near.into())));
        }
        let limit = self.run.assigned.spec.limits.output_bytes.cast_signed();
        match self.run.output.read(self.position) {
            Found::Piece(piece) if piece.position >= limit && !self.truncation_sent => {
                Some(self.truncation(limit))
            }
            Found::Piece(piece) => {
                self.position = piece.end();
                Some(event(Event::Output(output(piece))))
            }
            Found::Stored(until) => {
                self.position = until;
                Some(Answer::StoredUntil(until))
            }
            Found::Lost(until) => {
                self.position = until;
                None
            }
            Found::End { truncated: true, .. } if !self.truncation_sent => {
                Some(self.truncation(limit))
            }
            Found::End { closed: true, .. } => {
                self.stage = Stage::Ending;
                None
            }
            Found::End { .. } => {
                // The senders live as long as `self.run`.
                tokio::select! {
                    _ = self.output.changed() => {}
                    _ = self.violations.changed() => {}
                    _ = self.near_limits.changed() => {}
                }
                None
            }
        }
    }

    async fn ending(&mut self) -> Option<Answer> {
        let over = |phase: &Phase| matches!(phase, Phase::Committed(_) | Phase::Dropped);
        let phase = phase_when(&mut self.phase, over).await;
        self.stage = Stage::Over;
        let Phase::Committed(committed) = phase else { return None };
        // Without it, the api reads the run from the store.
        Some(Answer::Committed(Committed {
            ended: serde_json::to_vec(&*committed).unwrap_or_default(),
        }))
    }

    fn truncation(&mut self, limit_bytes: i64) -> Answer {
        self.truncation_sent = true;
        event(Event::OutputTruncated(OutputTruncatedEvent { limit_bytes }))
    }

    fn started(&self, started: Started) -> StartedEvent {
        StartedEvent {
            mode: SandboxMode::from(self.run.assigned.spec.mode).into(),
            worker_id: self.worker.clone(),
            setup_time: Some(duration_to_proto(started.setup_time)),
            prepared: started.prepared,
            unenforced: started.unenforced,
            watched: started.watched,
        }
    }
}

async fn phase_when(
    phase: &mut watch::Receiver<Phase>,
    wanted: impl FnMut(&Phase) -> bool,
) -> Phase {
    // Fails only if the sender is dropped, which lives as long as the run.
    phase.wait_for(wanted).await.map_or(Phase::Dropped, |phase| phase.clone())
}

fn event(kind: Event) -> Answer {
    Answer::Event(RunEvent { kind: Some(kind) })
}

fn output(piece: Piece) -> OutputEvent {
    let stream = match piece.stream {
        Which::Stdout => OutputStream::Stdout,
        Which::Stderr => OutputStream::Stderr,
    };
    OutputEvent {
        stream: stream.into(),
        offset: piece.offset,
        next_position: piece.end(),
        data: piece.data,
    }
}

/// Passes a caller's input to the run until the input ends or the caller detaches.
pub(crate) async fn pass_input(
    run: Arc<ActiveRun>,
    mut input: Streaming<AttachRunRequest>,
    detached: CancellationToken,
) {
    let pass = async {
        while let Some(Ok(message)) = input.next().await {
            match message.kind {
                Some(kind) => pass_one(&run, kind).await,
                None => tracing::warn!(run = %run.id(), "empty input message ignored"),
            }
        }
    };
    // `None` means that the caller detached.
    let _ = detached.run_until_cancelled(pass).await;
}

/// Input for a command that has ended is dropped.
async fn pass_one(run: &ActiveRun, kind: Input) {
    match kind {
        Input::Stdin(data) => {
            if let Some(stdin) = run.stdin() {
                let _ = stdin.send(data.into()).await;
            }
        }
        Input::CloseStdin(_) => run.close_stdin(),
        Input::Detach(_) => run.detach(),
        Input::Signal(signal) if (1..=64).contains(&signal) => {
            let _ = run.control.send(Control::Signal(signal)).await;
        }
        Input::Resize(size) => match (u16::try_from(size.columns), u16::try_from(size.rows)) {
            (Ok(columns), Ok(rows)) => {
                let _ = run.control.send(Control::Resize(TerminalSize { columns, rows })).await;
            }
            _ => tracing::warn!(run = %run.id(), "invalid terminal size ignored"),
        },
        Input::Signal(signal) => tracing::warn!(run = %run.id(), signal, "invalid signal ignored"),
        Input::Attach(_) => tracing::warn!(run = %run.id(), "second attach message ignored"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use bytes::Bytes;
    use codelia_types::{CommittedRun, EndedRun, Incarnation, Outcome, Resource};
    use futures::FutureExt;

    use super::*;
    use crate::run::active::tests::{activate, active, assigned};

    fn run(ends_with_caller: bool) -> Arc<ActiveRun> {
        active(ends_with_caller, Incarnation::generate())
    }

    fn attach(run: &Arc<ActiveRun>, position: i64, owner: bool) -> RunAttachment {
        RunAttachment::new(run.clone(), "w".into(), position, owner, CancellationToken::new())
    }

    fn started() -> Phase {
        let (unenforced, watched) = (vec![], vec![]);
        Phase::Started(Started {
            setup_time: Duration::from_millis(1),
            prepared: true,
            unenforced,
            watched,
        })
    }

    fn committed() -> Phase {
        let ended_at = time::OffsetDateTime::UNIX_EPOCH;
        let end = EndedRun { started_at: None, ended_at, result: Outcome::Exited(0).into() };
        Phase::Committed(Arc::new(CommittedRun { attempt: 1, cancel_reason: None, end }))
    }

    fn describe(answer: &Answer) -> String {
        match answer {
            Answer::StoredUntil(until) => format!("stored {until}"),
            Answer::Committed(_) => "committed".into(),
            Answer::Event(event) => match event.kind.as_ref().unwrap() {
                Event::Queued(_) => "queued".into(),
                Event::Waiting(_) => "waiting".into(),
                Event::ApprovalNeeded(_) => "approval needed".into(),
                Event::Assigned(_) => "assigned".into(),
                Event::Started(_) => "started".into(),
                Event::Output(output) => {
                    format!("{}@{}", String::from_utf8_lossy(&output.data), output.next_position)
                }
                Event::OutputTruncated(_) => "truncated".into(),
                Event::Violation(violation) => violation.syscall.clone(),
                Event::NearLimit(near) => {
                    format!("{} {} of {}", near.resource, near.used, near.limit)
                }
                Event::Finished(_) => "finished".into(),
            },
        }
    }

    async fn all(mut attachment: RunAttachment) -> Vec<String> {
        let mut answers = Vec::new();
        while let Some(answer) = attachment.next().await {
            answers.push(describe(&answer));
        }
        answers
    }

    #[tokio::test]
    async fn events_arrive_in_order_with_commit_last() {
        let run = run(false);
        let watching = codelia_telemetry::task::background("watch", all(attach(&run, 0, false)));
        run.phase.send_replace(started());
        run.output.append(Which::Stdout, Bytes::from_static(b"out"));
        run.output.append(Which::Stderr, Bytes::from_static(b"err"));
        run.output.close();
        run.phase.send_replace(committed());
        let seen = watching.await.unwrap();
        assert_eq!(seen.first().unwrap(), "assigned");
        assert_eq!(seen[seen.len() - 3..], ["out@3", "err@6", "committed"]);
    }

    #[tokio::test]
    async fn attachment_resumes_from_position() {
        let run = run(false);
        run.phase.send_replace(started());
        run.output.append(Which::Stdout, Bytes::from_static(b"abcdef"));
        run.output.close();
        run.phase.send_replace(committed());
        assert_eq!(all(attach(&run, 4, false)).await, ["assigned", "ef@6", "committed"]);
    }

    #[tokio::test]
    async fn truncation_is_reported_once_at_the_limit() {
        let mut limited = assigned(false);
        limited.spec.limits.output_bytes = 2;
        let run = activate(limited, Incarnation::generate());
        run.phase.send_replace(started());
        run.output.append(Which::Stdout, Bytes::from_static(b"abc"));
        run.output.close();
        let mut attachment = attach(&run, 0, false);
        for expected in ["assigned", "started", "ab@2", "truncated", "c@3"] {
            assert_eq!(describe(&attachment.next().await.unwrap()), expected);
        }
        assert!(attachment.next().now_or_never().is_none(), "not committed yet");
        run.phase.send_replace(committed());
        assert_eq!(describe(&attachment.next().await.unwrap()), "committed");
    }

    #[tokio::test]
    async fn each_attachment_gets_near_limits_unless_paced() {
        let near = |run: &ActiveRun| {
            run.near_limits.check(Resource::Pids, 7, 10);
            run.near_limits.check(Resource::Pids, 8, 10);
            run.near_limits.check(Resource::Pids, 9, 10);
            run.output.close();
            run.phase.send_replace(committed());
        };
        let run = run(false);
        near(&run);
        for _ in 0..2 {
            assert_eq!(
                all(attach(&run, 0, false)).await,
                ["assigned", "pids 8 of 10", "committed"]
            );
        }
        let mut paced = assigned(false);
        paced.spec.policy.resources.release_interval = Some(Duration::from_secs(1));
        let paced = activate(paced, Incarnation::generate());
        near(&paced);
        assert_eq!(all(attach(&paced, 0, false)).await, ["assigned", "committed"]);
        assert_eq!(paced.near_limits.all().len(), 1, "it is recorded");
    }

    #[tokio::test]
    async fn lost_lease_ends_stream_without_commit() {
        let run = run(false);
        run.output.close();
        run.phase.send_replace(Phase::Dropped);
        assert_eq!(all(attach(&run, 0, false)).await, ["assigned"]);
    }

    #[tokio::test]
    async fn run_ends_with_owner_only() {
        let run = run(true);
        let owner = attach(&run, 0, true);
        drop(attach(&run, 0, false));
        assert!(!run.cancel.is_cancelled());
        drop(owner);
        assert!(run.cancel.is_cancelled());
    }
}
