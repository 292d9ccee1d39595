//! The stream of a run's events: what happened so far from the store, what happens from the worker,
//! and the end from either: a worker tells it only once it is stored. One implementation for `WatchRun`
//! and `Exec`.
//!
//! The store is the truth; a worker that is gone or does not know the run is asked again later.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::{Buf, Bytes};
use codelia_proto::{
    internal::v1::{self as wire, attach_run_request, attach_run_response},
    v1::{self, run_event::Kind},
};
use codelia_store::{Run, RunState};
use codelia_telemetry::{Step, metrics};
use codelia_types::{Incarnation, RunId, TenantId};
use tokio::{
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::{context::Context, dispatch, request::Deadline, status::ApiError, to_proto};

/// Events that wait for a slow client; then the stream waits, and nobody else.
pub(crate) const EVENTS_AHEAD: usize = 16;
/// Inputs that wait for a slow worker.
const INPUTS_AHEAD: usize = 8;
/// About how much stored output is read at once.
const READ_BYTES: i64 = 1024 * 1024;
/// The most bytes of output in one event.
const EVENT_BYTES: usize = 256 * 1024;
/// How often a worker is asked for a run before the row is read again.
const ATTACH_TRIES: u32 = 4;
/// How long the last word to a slow client may wait.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Where events go.
pub(crate) type Events = mpsc::Sender<Result<v1::RunEvent, Status>>;
/// Where input for the run's command goes, while a worker listens.
pub(crate) type Ear = Option<mpsc::Sender<wire::AttachRunRequest>>;

/// Why a stream stopped before the run's end.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The client is gone.
    Left,
    /// It cannot go on.
    Failed(ApiError),
}

impl<E: Into<ApiError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

/// What came of listening to a worker.
enum Followed {
    /// To its end, which is in the store.
    Ended(Box<Run>),
    /// There was new output, then the stream broke.
    Advanced,
    /// There was nothing.
    Nothing,
}

/// Which events were sent; but for the first, of the current attempt.
#[derive(Debug, Default)]
struct Told {
    queued: bool,
    assigned: bool,
    started: bool,
    truncated: bool,
    /// This many of them; their order never changes.
    violations: usize,
}

/// Sends one client the events of one run.
#[derive(Debug)]
pub(crate) struct Watcher {
    context: Arc<Context>,
    tenant: TenantId,
    out: Events,
    /// Output before this position was sent, or is not wanted.
    cursor: i64,
    attempt: Option<i32>,
    told: Told,
    ear: watch::Sender<Ear>,
    /// Whether the run ends with the next stream that is attached.
    owner: Arc<AtomicBool>,
    /// Whom the run was just recorded for, if it is to be pushed there with the first attach.
    push: Option<Incarnation>,
    /// The offer of a session whose run was just recorded.
    offered: Option<JoinHandle<()>>,
}

impl Watcher {
    /// For a client that wants output from `position` on.
    pub(crate) fn new(context: Arc<Context>, tenant: TenantId, position: i64, out: Events) -> Self {
        Self {
            context,
            tenant,
            out,
            cursor: position,
            attempt: None,
            told: Told::default(),
            ear: watch::Sender::new(None),
            owner: Arc::default(),
            push: None,
            offered: None,
        }
    }

    /// Lets the run end with this stream.
    pub(crate) fn owning(self, owner: bool) -> Self {
        self.owner.store(owner, Ordering::Relaxed);
        self
    }

    /// The run was just recorded for this life of its worker, which does not know it yet.
    pub(crate) fn pushing(mut self, incarnation: Incarnation) -> Self {
        self.push = Some(incarnation);
        self
    }

    /// The run was just recorded, and its session offered: a worker that does not know it may soon.
    pub(crate) fn after(mut self, offered: JoinHandle<()>) -> Self {
        self.offered = Some(offered);
        self
    }

    /// Where input goes, and whether the run ends with the stream.
    pub(crate) fn line(&self) -> (watch::Receiver<Ear>, Arc<AtomicBool>) {
        (self.ear.subscribe(), self.owner.clone())
    }

    /// Sends events until the run has ended.
    pub(crate) async fn watch(mut self, mut run: Run) -> Result<(), Stop> {
        let mut pause = Pause::default();
        loop {
            self.begin(&run).await?;
            match run.state {
                RunState::Ended => return self.finish(&run).await,
                RunState::Queued if self.offered.is_some() => self.offer_settled().await,
                RunState::Queued => pause.while_queued().await,
                RunState::Running => match self.follow(&run).await? {
                    Followed::Ended(run) => return self.finish(&run).await,
                    Followed::Advanced => pause = Pause::default(),
                    Followed::Nothing => pause.before_reading().await,
                },
            }
            run = self.read(run.id).await?;
        }
    }

    async fn read(&self, id: RunId) -> Result<Run, Stop> {
        let run = self.context.store.run_get(&self.tenant, id).await?;
        Ok(run.ok_or(ApiError::NotFound)?)
    }

    /// A new attempt starts from nothing: the output of the one before is gone.
    async fn begin(&mut self, run: &Run) -> Result<(), Stop> {
        if self.attempt.replace(run.attempt).is_some_and(|before| before != run.attempt) {
            self.cursor = 0;
            self.told = Told { queued: self.told.queued, ..Told::default() };
        }
        if self.told.queued {
            return Ok(());
        }
        self.told.queued = true;
        self.tell(Kind::Queued(to_proto::queued(run))).await
    }

    async fn finish(&mut self, run: &Run) -> Result<(), Stop> {
        self.tell_assigned(to_proto::assigned(run)).await?;
        self.tell_started(run, to_proto::started(run)).await?;
        if !self.fill(run.id, run.output_bytes).await? {
            return Err(ApiError::internal(format!("output of run {} is missing", run.id)).into());
        }
        for (index, violation) in to_proto::violations(run).enumerate() {
            self.tell_violation(index, violation).await?;
        }
        if run.output_truncated {
            self.tell_truncated(to_proto::truncated(run)).await?;
        }
        self.tell(Kind::Finished(to_proto::finished(run))).await
    }

    async fn follow(&mut self, run: &Run) -> Result<Followed, Stop> {
        let Some(mut stream) = self.attach(run).await else { return Ok(Followed::Nothing) };
        let from = self.cursor;
        let ended = self.forward(run, &mut stream).await?;
        self.ear.send_replace(None);
        Ok(match ended {
            Some(run) => Followed::Ended(Box::new(run)),
            None if self.cursor > from => Followed::Advanced,
            None => Followed::Nothing,
        })
    }

    /// Attaches to the run at its worker; `None` if the worker cannot be reached or does not know it.
    async fn attach(&mut self, run: &Run) -> Option<Streaming<wire::AttachRunResponse>> {
        let address = run.worker_address.as_deref()?;
        let mut pause = Pause::default();
        for _ in 0..ATTACH_TRIES {
            let (ear, requests) = mpsc::channel(INPUTS_AHEAD);
            let (asked, pushes) = (Instant::now(), self.push.is_some());
            ear.try_send(self.attach_request(run)?).ok()?;
            match self.context.dispatch.attach(address, ReceiverStream::new(requests)).await {
                Ok(stream) => {
                    if pushes {
                        metrics().step(Step::Dispatch, asked.elapsed());
                    }
                    self.ear.send_replace(Some(ear));
                    return Some(stream);
                }
                Err(error) if error.is_unknown_run() && self.offered.is_some() => self.offer_settled().await,
                Err(error) if error.is_unknown_run() => pause.before_reading().await,
                Err(error) => {
                    tracing::debug!(run = %run.id, address, %error, "the worker cannot be attached to");
                    return None;
                }
            }
        }
        None
    }

    /// The first one pushes a run that is to be pushed; what was not heard is left to the worker's poll.
    fn attach_request(&mut self, run: &Run) -> Option<wire::AttachRunRequest> {
        let start = self.push.take().map(|incarnation| dispatch::push_request(run, incarnation)).transpose();
        let start = start.inspect_err(|error| tracing::error!(%error, "a run cannot be pushed")).ok()?;
        let attach = wire::Attach {
            run_id: run.id.to_string(),
            position: self.cursor,
            owner: self.owner.load(Ordering::Relaxed),
            start,
        };
        Some(wire::AttachRunRequest { kind: Some(attach_run_request::Kind::Attach(attach)) })
    }

    async fn offer_settled(&mut self) {
        if let Some(offered) = self.offered.take()
            && let Err(error) = offered.await
        {
            tracing::debug!(%error, "the offer did not end well");
        }
    }

    /// Forwards what the worker says; the run with its result, if the last it said is that.
    async fn forward(
        &mut self,
        run: &Run,
        stream: &mut Streaming<wire::AttachRunResponse>,
    ) -> Result<Option<Run>, Stop> {
        let mut violations = 0..;
        loop {
            let message = match stream.message().await {
                Ok(Some(message)) => message,
                Ok(None) => return Ok(None),
                Err(status) => {
                    tracing::debug!(run = %run.id, %status, "the worker's stream broke");
                    return Ok(None);
                }
            };
            let whole = match message.kind {
                Some(attach_run_response::Kind::Event(event)) => {
                    self.forward_event(run, event, &mut violations).await?
                }
                Some(attach_run_response::Kind::StoredUntil(until)) => self.fill(run.id, until).await?,
                Some(attach_run_response::Kind::Committed(committed)) => return Ok(ended(run, &committed)),
                None => true,
            };
            if !whole {
                return Ok(None);
            }
        }
    }

    /// `false` if something that comes before the event was not sent: output that is not stored
    /// (yet), or the start of a run that was over before its worker was asked. The row knows then.
    async fn forward_event(
        &mut self,
        run: &Run,
        event: v1::RunEvent,
        violations: &mut std::ops::RangeFrom<usize>,
    ) -> Result<bool, Stop> {
        match event.kind {
            Some(Kind::Assigned(assigned)) => self.tell_assigned(Some(assigned)).await?,
            Some(Kind::Started(started)) => {
                self.tell_assigned(to_proto::assigned(run)).await?;
                self.tell_started(run, Some(started)).await?;
            }
            Some(Kind::Output(_) | Kind::OutputTruncated(_) | Kind::Violation(_)) if !self.told.started => {
                return Ok(false);
            }
            Some(Kind::Violation(violation)) => {
                let index = violations.next().unwrap_or(usize::MAX);
                self.tell_violation(index, violation).await?;
            }
            Some(Kind::Output(output)) => return self.forward_output(run.id, output).await,
            Some(Kind::OutputTruncated(truncated)) => self.tell_truncated(truncated).await?,
            // The first is told by the row, the last by the outcome.
            Some(Kind::Queued(_) | Kind::Finished(_)) | None => {}
        }
        Ok(true)
    }

    async fn forward_output(&mut self, run: RunId, output: v1::OutputEvent) -> Result<bool, Stop> {
        if !self.fill(run, start_of(&output)).await? {
            return Ok(false);
        }
        self.tell_output(output).await?;
        Ok(true)
    }

    /// Sends stored output up to `until`; `false` if the store does not have it all.
    async fn fill(&mut self, run: RunId, until: i64) -> Result<bool, Stop> {
        while self.cursor < until {
            let from = self.cursor;
            for chunk in self.context.store.output_read(&self.tenant, run, from, READ_BYTES).await? {
                self.tell_output(to_proto::output(chunk)).await?;
            }
            if self.cursor == from {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends the part of the output that the client does not have, in pieces of bounded size.
    async fn tell_output(&mut self, output: v1::OutputEvent) -> Result<(), Stop> {
        let Some(rest) = beyond(output, self.cursor) else { return Ok(()) };
        for piece in pieces(rest) {
            self.cursor = piece.next_position;
            self.tell(Kind::Output(piece)).await?;
        }
        Ok(())
    }

    async fn tell_assigned(&mut self, event: Option<v1::AssignedEvent>) -> Result<(), Stop> {
        match event {
            Some(event) if !std::mem::replace(&mut self.told.assigned, true) => {
                self.tell(Kind::Assigned(event)).await
            }
            _ => Ok(()),
        }
    }

    async fn tell_started(&mut self, run: &Run, event: Option<v1::StartedEvent>) -> Result<(), Stop> {
        match event {
            Some(event) if !std::mem::replace(&mut self.told.started, true) => {
                tracing::debug!(run = %run.id, "started");
                self.tell(Kind::Started(event)).await
            }
            _ => Ok(()),
        }
    }

    async fn tell_truncated(&mut self, event: v1::OutputTruncatedEvent) -> Result<(), Stop> {
        if std::mem::replace(&mut self.told.truncated, true) {
            return Ok(());
        }
        self.tell(Kind::OutputTruncated(event)).await
    }

    /// A worker tells them from the first on whenever it is attached to.
    async fn tell_violation(&mut self, index: usize, event: v1::ViolationEvent) -> Result<(), Stop> {
        if index < self.told.violations {
            return Ok(());
        }
        self.told.violations = index.saturating_add(1);
        self.tell(Kind::Violation(event)).await
    }

    async fn tell(&self, kind: Kind) -> Result<(), Stop> {
        self.out.send(Ok(v1::RunEvent { kind: Some(kind) })).await.map_err(|_| Stop::Left)
    }
}

/// Watches a run until it has ended, the client is gone, its time is over or the server stops.
pub(crate) async fn serve(watcher: Watcher, run: Run, deadline: Deadline) {
    let _open = Open::count();
    let (context, out) = (watcher.context.clone(), watcher.out.clone());
    let end = tokio::select! {
        end = watcher.watch(run) => end,
        stop = stopped(&context, &out, deadline) => Err(stop),
    };
    if let Err(stop) = end {
        last_word(&out, stop).await;
    }
}

/// Waits for a reason to stop that has nothing to do with the run.
pub(crate) async fn stopped(context: &Context, out: &Events, deadline: Deadline) -> Stop {
    tokio::select! {
        () = out.closed() => Stop::Left,
        () = deadline.passed() => Stop::Failed(ApiError::DeadlineExceeded),
        () = context.cut.cancelled() => Stop::Failed(ApiError::ShuttingDown),
    }
}

/// Tells the client why the stream ends.
pub(crate) async fn last_word(out: &Events, stop: Stop) {
    if let Stop::Failed(error) = stop
        && out.send_timeout(Err(error.into()), LAST_WORD).await.is_err()
    {
        tracing::debug!("the client did not take the last word");
    }
}

/// Counts an open stream for as long as it lives.
#[derive(Debug)]
pub(crate) struct Open;

impl Open {
    pub(crate) fn count() -> Self {
        metrics().watchers_changed(1);
        Self
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        metrics().watchers_changed(-1);
    }
}

/// How long to wait between looks at what has not changed.
#[derive(Debug, Default)]
struct Pause {
    reads: u32,
    queued: u32,
}

impl Pause {
    /// None the first time, then 2 ms to 100 ms.
    async fn before_reading(&mut self) {
        let delay = if self.reads == 0 { Duration::ZERO } else { doubled(2, self.reads - 1, 100) };
        self.reads = self.reads.saturating_add(1);
        tokio::time::sleep(delay).await;
    }

    /// 10 ms to 500 ms.
    async fn while_queued(&mut self) {
        let delay = doubled(10, self.queued, 500);
        self.queued = self.queued.saturating_add(1);
        tokio::time::sleep(delay).await;
    }
}

fn doubled(first: u64, times: u32, most: u64) -> Duration {
    Duration::from_millis((first << times.min(16)).min(most))
}

/// The run with the result that its worker stored; `None` if only the store can tell.
fn ended(run: &Run, committed: &wire::Committed) -> Option<Run> {
    let ended = serde_json::from_str(&committed.ended_json);
    ended
        .inspect_err(|error| tracing::warn!(%error, "a result cannot be read"))
        .ok()
        .and_then(|it| run.ended(it))
}

fn len_of(bytes: &Bytes) -> i64 {
    i64::try_from(bytes.len()).unwrap_or(i64::MAX)
}

fn start_of(output: &v1::OutputEvent) -> i64 {
    output.next_position - len_of(&output.data)
}

/// What of the output lies at or after `cursor`.
fn beyond(mut output: v1::OutputEvent, cursor: i64) -> Option<v1::OutputEvent> {
    let known = (cursor - start_of(&output)).max(0);
    if known >= len_of(&output.data) {
        return None;
    }
    output.data.advance(usize::try_from(known).ok()?);
    output.offset += known;
    Some(output)
}

/// The output in events of bounded size.
fn pieces(output: v1::OutputEvent) -> impl Iterator<Item = v1::OutputEvent> {
    let (mut rest, mut offset, mut position) = (output.data.clone(), output.offset, start_of(&output));
    std::iter::from_fn(move || {
        let data = rest.split_to(rest.len().min(EVENT_BYTES));
        let (len, at) = (len_of(&data), offset);
        offset += len;
        position += len;
        (len > 0).then_some(v1::OutputEvent {
            stream: output.stream,
            offset: at,
            data,
            next_position: position,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn output(offset: i64, data: &'static [u8], next_position: i64) -> v1::OutputEvent {
        v1::OutputEvent { stream: 1, offset, data: Bytes::from_static(data), next_position }
    }

    #[test]
    fn output_that_was_sent_is_not_sent_again() {
        assert_eq!(beyond(output(0, b"abc", 3), 3), None);
        assert_eq!(beyond(output(4, b"abc", 10), 8), Some(output(5, b"bc", 10)));
        assert_eq!(beyond(output(4, b"abc", 10), 2), Some(output(4, b"abc", 10)));
    }

    #[test]
    fn large_output_is_cut_into_pieces_that_join_to_the_whole() {
        let data: Vec<u8> = (0..EVENT_BYTES * 2 + 7).map(|n| n as u8).collect();
        let next_position = 100 + i64::try_from(data.len()).unwrap();
        let whole = v1::OutputEvent { stream: 2, offset: 5, data: data.clone().into(), next_position };
        let pieces: Vec<_> = pieces(whole).collect();
        assert_eq!(pieces.len(), 3);
        assert_eq!(pieces.iter().flat_map(|piece| piece.data.to_vec()).collect::<Vec<_>>(), data);
        assert_eq!(pieces[1].offset, 5 + i64::try_from(EVENT_BYTES).unwrap());
        assert_eq!(pieces[2].next_position, next_position);
    }

    #[test]
    fn pauses_grow_to_their_bound() {
        assert_eq!(doubled(2, 0, 100), Duration::from_millis(2));
        assert_eq!(doubled(2, 5, 100), Duration::from_millis(64));
        assert_eq!(doubled(2, u32::MAX, 100), Duration::from_millis(100));
    }
}
