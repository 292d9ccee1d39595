//! Delivers events to the client: each once, in order, output without gaps up to the output limit.

use std::{collections::HashSet, sync::Arc};

use codelia_proto::v1::{self, run_event::Kind};
use codelia_store::{MAX_OF_RUN, Run};
use codelia_types::{Reason, Resource, RunId, TenantId};

use super::{
    client::{EventSender, StreamError},
    output,
    waiting::Wait,
};
use crate::{context::Context, error::ApiError, wire::to_proto};

/// About how many bytes of stored output one query reads.
const READ_BYTES: i64 = 1024 * 1024;

/// Which events were sent; all but `queued` refer to the current attempt.
#[derive(Debug, Default)]
struct Sent {
    queued: bool,
    assigned: bool,
    started: bool,
    truncated: bool,
    /// The number of violations sent; their order never changes.
    violations: usize,
    /// The limits that were sent as near.
    near_limits: Vec<String>,
}

/// Sends the events of one run to one client.
#[derive(Debug)]
pub(crate) struct Delivery {
    context: Arc<Context>,
    tenant: TenantId,
    events: EventSender,
    /// Output before this position was sent, or the client does not want it.
    cursor: i64,
    attempt: Option<i32>,
    sent: Sent,
    /// The approvals that were sent.
    approvals: HashSet<String>,
    is_operator: bool,
}

impl Delivery {
    /// Sends output from `position` on.
    pub(crate) fn new(
        context: Arc<Context>,
        tenant: TenantId,
        position: i64,
        events: EventSender,
    ) -> Self {
        Self {
            context,
            tenant,
            events,
            cursor: position,
            attempt: None,
            sent: Sent::default(),
            approvals: HashSet::new(),
            is_operator: false,
        }
    }

    /// Sets whether the client may see what only operators see.
    pub(crate) fn set_operator(&mut self, is_operator: bool) {
        self.is_operator = is_operator;
    }

    /// The position of the next byte of output to send.
    pub(crate) fn cursor(&self) -> i64 {
        self.cursor
    }

    /// The client's channel.
    pub(crate) fn events(&self) -> &EventSender {
        &self.events
    }

    /// Reads the run's row again.
    pub(crate) async fn read_run(&self, id: RunId) -> Result<Run, StreamError> {
        let run = self.context.store.run_get(&self.tenant, id).await?;
        Ok(run.ok_or_else(|| ApiError::not_found("run", id))?)
    }

    /// Sends that the run is queued. A new attempt starts over: the previous output is discarded.
    pub(crate) async fn begin(&mut self, run: &Run) -> Result<(), StreamError> {
        if self.attempt.replace(run.attempt).is_some_and(|previous| previous != run.attempt) {
            self.cursor = 0;
            self.sent = Sent { queued: self.sent.queued, ..Sent::default() };
        }
        if self.sent.queued {
            return Ok(());
        }
        self.sent.queued = true;
        self.send(Kind::Queued(to_proto::queued(run))).await
    }

    /// Sends why a run waits for a worker, if the reason is new.
    pub(crate) async fn waiting(&self, run: &Run, wait: &mut Wait) -> Result<(), StreamError> {
        let Some(reason) = wait.changed(&self.context.store, run).await? else { return Ok(()) };
        self.send(Kind::Waiting(v1::WaitingEvent { message: reason.to_string() })).await
    }

    /// Sends the approval that a run waits for, once.
    pub(crate) async fn held(&mut self, run: &Run) -> Result<(), StreamError> {
        let Some(id) = run.approval.filter(|id| !self.approvals.contains(&id.to_string())) else {
            return Ok(());
        };
        match self.context.store.approval_get(&self.tenant, id).await? {
            Some(approval) => self.approval_needed(to_proto::approval(approval)).await,
            None => Ok(()),
        }
    }

    /// Sends an approval that the run waits for unless it was sent: a worker repeats all of them on
    /// each attach.
    async fn approval_needed(&mut self, approval: v1::Approval) -> Result<(), StreamError> {
        let is_full = i64::try_from(self.approvals.len()).is_ok_and(|count| count > MAX_OF_RUN);
        if is_full || !self.approvals.insert(approval.approval_id.clone()) {
            return Ok(());
        }
        self.send(Kind::ApprovalNeeded(v1::ApprovalNeededEvent { approval: Some(approval) })).await
    }

    /// Sends everything that is missing of an ended run, then its end.
    pub(crate) async fn finish(&mut self, run: &Run) -> Result<(), StreamError> {
        self.assigned(to_proto::assigned(run)).await?;
        self.started(run, to_proto::started(run)).await?;
        if !self.stored_output(run.id, run.output_bytes()).await? {
            let message =
                "the output of the run was deleted after its retention; `GetRun` has the result";
            return Err(ApiError::new(Reason::OutputExpired, message).into());
        }
        if let Some(result) = run.result() {
            for (index, violation) in to_proto::violations(result).enumerate() {
                self.violation(index, violation).await?;
            }
            if result.output_truncated {
                self.truncated(to_proto::truncated(run)).await?;
            }
        }
        self.send(Kind::Finished(to_proto::finished(run, self.is_operator))).await
    }

    /// Sends an event of the worker. `violations` counts the violations of this attachment.
    ///
    /// Returns `false` if something before the event was not sent: output that is not stored yet,
    /// or the start of a run that ended before the api attached. Then the row must be read again.
    pub(crate) async fn worker_event(
        &mut self,
        run: &Run,
        event: v1::RunEvent,
        violations: &mut std::ops::RangeFrom<usize>,
    ) -> Result<bool, StreamError> {
        match event.kind {
            Some(Kind::Assigned(assigned)) => self.assigned(Some(assigned)).await?,
            Some(Kind::Started(started)) => {
                self.assigned(to_proto::assigned(run)).await?;
                self.started(run, Some(started)).await?;
            }
            Some(
                Kind::Output(_)
                | Kind::OutputTruncated(_)
                | Kind::Violation(_)
                | Kind::NearLimit(_),
            ) if !self.sent.started => {
                return Ok(false);
            }
            Some(Kind::Violation(violation)) => {
                let index = violations.next().unwrap_or(usize::MAX);
                self.violation(index, violation).await?;
            }
            Some(Kind::NearLimit(near)) => self.near_limit(near).await?,
            Some(Kind::Output(output)) => return self.worker_output(run, output).await,
            Some(Kind::OutputTruncated(truncated)) => self.truncated(truncated).await?,
            Some(Kind::ApprovalNeeded(v1::ApprovalNeededEvent { approval: Some(approval) })) => {
                self.approval_needed(approval).await?;
            }
            // `begin` and `finish` send these.
            Some(
                Kind::Queued(_) | Kind::Waiting(_) | Kind::ApprovalNeeded(_) | Kind::Finished(_),
            )
            | None => {}
        }
        Ok(true)
    }

    /// Sends stored output up to `end`; returns `false` if the store does not have all of it.
    pub(crate) async fn stored_output(
        &mut self,
        run: RunId,
        end: i64,
    ) -> Result<bool, StreamError> {
        while self.cursor < end {
            let start = self.cursor;
            for chunk in
                self.context.store.output_read(&self.tenant, run, start, READ_BYTES).await?
            {
                self.output(to_proto::output(chunk)).await?;
            }
            if self.cursor == start {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sends output of the worker, after the stored output before it.
    async fn worker_output(
        &mut self,
        run: &Run,
        output: v1::OutputEvent,
    ) -> Result<bool, StreamError> {
        let start = output::start_position(&output);
        let limit = i64::try_from(run.spec.limits.output_bytes).unwrap_or(i64::MAX);
        if !self.stored_output(run.id, start.min(limit)).await? {
            return Ok(false);
        }
        // What this client missed after the limit is lost.
        self.cursor = self.cursor.max(start);
        self.output(output).await?;
        Ok(true)
    }

    /// Sends the part of the output that the client does not have.
    async fn output(&mut self, output: v1::OutputEvent) -> Result<(), StreamError> {
        let Some(rest) = output::after_cursor(output, self.cursor) else { return Ok(()) };
        for event in output::split(rest) {
            self.cursor = event.next_position;
            self.send(Kind::Output(event)).await?;
        }
        Ok(())
    }

    async fn assigned(&mut self, event: Option<v1::AssignedEvent>) -> Result<(), StreamError> {
        match event {
            Some(event) if !std::mem::replace(&mut self.sent.assigned, true) => {
                self.send(Kind::Assigned(event)).await
            }
            _ => Ok(()),
        }
    }

    async fn started(
        &mut self,
        run: &Run,
        event: Option<v1::StartedEvent>,
    ) -> Result<(), StreamError> {
        match event {
            Some(event) if !std::mem::replace(&mut self.sent.started, true) => {
                tracing::debug!(run = %run.id, "run started");
                self.send(Kind::Started(event)).await
            }
            _ => Ok(()),
        }
    }

    async fn truncated(&mut self, event: v1::OutputTruncatedEvent) -> Result<(), StreamError> {
        if std::mem::replace(&mut self.sent.truncated, true) {
            return Ok(());
        }
        self.send(Kind::OutputTruncated(event)).await
    }

    /// Sends a violation unless it was sent: a worker repeats all of them on each attach.
    async fn violation(
        &mut self,
        index: usize,
        event: v1::ViolationEvent,
    ) -> Result<(), StreamError> {
        if index < self.sent.violations {
            return Ok(());
        }
        self.sent.violations = index.saturating_add(1);
        self.send(Kind::Violation(event)).await
    }

    /// Sends that a limit is near, once: a worker repeats it on each attach.
    async fn near_limit(&mut self, event: v1::NearLimitEvent) -> Result<(), StreamError> {
        let sent = &mut self.sent.near_limits;
        if sent.contains(&event.resource) || sent.len() >= Resource::ALL.len() {
            return Ok(());
        }
        sent.push(event.resource.clone());
        self.send(Kind::NearLimit(event)).await
    }

    async fn send(&self, kind: Kind) -> Result<(), StreamError> {
        self.events
            .send(Ok(v1::RunEvent { kind: Some(kind) }))
            .await
            .map_err(|_| StreamError::ClientGone)
    }
}
