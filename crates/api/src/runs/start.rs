//! Parses and records a run, in a session that exists or a new one.

use std::time::Instant;

use codelia_policy::{IsolationLevel, Limit, Policy, RunSpec};
use codelia_proto::v1;
use codelia_store::{
    Caller, EventKind, Grant, KeyVersion, NewApproval, NewRun, Quotas, Run, RunAdmission,
    SessionRef,
};
use codelia_telemetry::{Step, metrics, trace};
use codelia_types::{ApprovalId, RunId, SessionId};

use super::Runs;
use crate::{
    admission::{
        RunRequest,
        approval::{approval_needed, may_ask},
        check_available,
        rules::Rules,
    },
    audit,
    auth::AdmittedCaller,
    context::Context,
    error::ApiError,
    sessions::{CreatedSession, Sessions, lookup},
    wire::validate,
    workers::Push,
};

/// A run that was recorded by this request or an earlier one with the same idempotency key.
pub(super) struct RecordedRun {
    pub(super) run: Run,
    pub(super) next: NextStep,
}

/// A request for a run, and what it becomes in its session.
struct Specified {
    session: SessionId,
    spec: RunSpec,
    request: RunRequest,
}

/// How a recorded run reaches a worker. It is only faster: a worker's poll finds the run as well.
pub(super) enum NextStep {
    /// An earlier request took care of it, or it waits for an approval.
    Nothing,
    /// Push it to the worker that it is recorded for.
    Push(Push),
    /// Offer its session to a worker.
    Offer,
}

impl Runs {
    async fn parse(
        &self,
        caller: &Caller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<RunRequest, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let parse = move |rules: &Rules<'_>| RunRequest::parse(wire, ends_with_caller, rules);
        self.context.with_policy(caller, is_large, parse).await
    }

    /// Parses and records a run: without a look at the caller's key if that is enough, else after
    /// one.
    pub(super) async fn start_admitted(
        &self,
        admitted: &AdmittedCaller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<(Caller, RecordedRun), ApiError> {
        if wire.new_session.is_some() {
            // In a box, so that other calls do not carry its size.
            return Box::pin(self.start_in_new_session(admitted, wire, ends_with_caller)).await;
        }
        if let Some(recorded) = self.start_unchecked(admitted, &wire, ends_with_caller).await? {
            return Ok((admitted.caller.clone(), recorded));
        }
        let caller = admitted.check().await?;
        let request = self.parse(&caller, wire, ends_with_caller).await?;
        let recorded = self.start(&caller, request).await?;
        Ok((caller, recorded))
    }

    /// Records a run of a caller whose key was not looked up: the statement that does so checks it.
    /// Returns `None` if the key was looked up, or if anything is refused: a refusal is only for the
    /// owner of a valid key, so the key is looked up then and the run admitted as if it were new.
    async fn start_unchecked(
        &self,
        admitted: &AdmittedCaller,
        wire: &v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<Option<RecordedRun>, ApiError> {
        let Some(version) = admitted.unchecked_version() else { return Ok(None) };
        let caller = &admitted.caller;
        let recorded = match self.parse(caller, wire.clone(), ends_with_caller).await {
            Ok(request) => self.admit(caller, request, Some(version)).await,
            Err(error) => Err(error),
        };
        match recorded {
            Ok(recorded) => Ok(Some(recorded)),
            Err(error) if error.is_refusal() => Ok(None),
            // The run may have been recorded.
            Err(error) => Err(error),
        }
    }

    /// Creates a session and records a run in it. The session is closed if the run is refused.
    async fn start_in_new_session(
        &self,
        admitted: &AdmittedCaller,
        wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<(Caller, RecordedRun), ApiError> {
        let caller = admitted.check().await?;
        let (created, request) = self.create_session(&caller, wire, ends_with_caller).await?;
        let recorded = self.start(&caller, request).await;
        if created.is_new && recorded.as_ref().is_err_and(ApiError::is_refusal) {
            self.sessions().close_refused(&caller, created.session.id).await;
        }
        Ok((caller, recorded?))
    }

    /// Parses the requests for a session and a run in it, and creates the session.
    async fn create_session(
        &self,
        caller: &Caller,
        mut wire: v1::StartRunRequest,
        ends_with_caller: bool,
    ) -> Result<(CreatedSession, RunRequest), ApiError> {
        let sessions = self.sessions();
        let within = |error: ApiError| error.within("new_session");
        let mut new_session = wire.new_session.take().unwrap_or_default();
        move_disk_limits(&mut wire, &mut new_session)?;
        let mut session = sessions.parse(caller, new_session).await.map_err(within)?;
        if !wire.parent.is_empty() {
            return Err(ApiError::invalid(
                "parent",
                "must be empty with new_session; leave one of them out",
            ));
        }
        // Any name, until the session has one.
        wire.parent = format!("sessions/{}", SessionId::generate());
        let mut request = self.parse(caller, wire, ends_with_caller).await?;
        if session.idempotency_key.is_none() {
            session.idempotency_key.clone_from(&request.idempotency_key);
        }
        let created = sessions.create(caller, session).await.map_err(within)?;
        request.session = SessionRef::Id(created.session.id);
        Ok((created, request))
    }

    fn sessions(&self) -> Sessions {
        Sessions { context: self.context.clone() }
    }

    async fn start(&self, caller: &Caller, request: RunRequest) -> Result<RecordedRun, ApiError> {
        let session = request.session.clone();
        let recorded = self.admit(caller, request, None).await;
        if let Err(error) = &recorded {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::RunRefused, Some(&session), error).await;
        }
        recorded
    }

    async fn admit(
        &self,
        caller: &Caller,
        request: RunRequest,
        key_version: Option<KeyVersion>,
    ) -> Result<RecordedRun, ApiError> {
        let Context { options, store, storage_quota, run_quota, .. } = &*self.context;
        let begun = Instant::now();
        let Specified { session, spec, request } = self.specify(caller, request).await?;
        storage_quota.check_run(store, caller).await?;
        let id = RunId::generate();
        let secret_key = request.secret_key(options)?;
        let key = request.idempotency_key.as_deref();
        let hash = key.map(|_| request.fingerprint(&caller.tenant, secret_key)).transpose()?;
        let secret_env = secret_key.map(|key| key.seal(id, &request.secret_env)).transpose();
        let secret_env = secret_env.map_err(ApiError::internal)?;
        // An operator decided about the level of an approved tool.
        let floor = request.approved_level().map_or(caller.floor, |level| level.min(caller.floor));
        let approval = self.approval(caller, session, &spec, floor).await?;
        let admitted = Instant::now();
        metrics().step(Step::Admit, admitted - begun);
        let Quotas { concurrent_runs, queued_runs, .. } = caller.quotas;
        let traceparent = trace::current();
        let new = NewRun {
            id,
            session,
            tenant: &caller.tenant,
            spec: &spec,
            labels: &request.labels,
            retries: request.retries,
            queue_timeout: request.queue_timeout.unwrap_or(options.limits.timeouts.queue),
            idempotency: key.zip(hash.as_ref().map(<[_; 32]>::as_slice)),
            secret_env: secret_env.as_ref(),
            check_quotas: run_quota.must_count(&caller.tenant, [concurrent_runs, queued_runs]),
            key: caller.key,
            key_version,
            requested_by: may_ask(&spec).then_some(caller.key),
            traceparent: traceparent.as_deref(),
            approval: approval.as_ref(),
        };
        let admission = store.run_insert(new, caller.quotas).await?;
        metrics().step(Step::Record, admitted.elapsed());
        match admission {
            RunAdmission::Recorded { run, incarnation, counted } => {
                if let Some(counted) = counted {
                    run_quota.counted(&caller.tenant, [counted.active, counted.queued], admitted);
                }
                let push =
                    |incarnation| NextStep::Push(Push { incarnation, secret_env, traceparent });
                let next = match run.approval {
                    Some(_) => NextStep::Nothing,
                    None => incarnation.map_or(NextStep::Offer, push),
                };
                Ok(RecordedRun { run: *run, next })
            }
            RunAdmission::Existing(run) => Ok(RecordedRun { run: *run, next: NextStep::Nothing }),
            RunAdmission::KeyReused => Err(ApiError::idempotency_key_reused()),
            RunAdmission::KeyChanged => Err(ApiError::unauthenticated()),
            RunAdmission::NoSession => {
                Err(lookup::missing(store, &caller.tenant, &request.session).await)
            }
            RunAdmission::SessionEnded => Err(lookup::ended(store, &caller.tenant, session).await),
            RunAdmission::SessionDataLost => Err(ApiError::session_data_lost()),
            RunAdmission::SessionQuarantined(reason) => {
                Err(ApiError::session_quarantined(session, &reason))
            }
            RunAdmission::OverQuota(quota) => Err(ApiError::quota_exceeded(quota)),
        }
    }

    /// Finds the session and the tool of a run, and combines the request with them.
    async fn specify(
        &self,
        caller: &Caller,
        mut request: RunRequest,
    ) -> Result<Specified, ApiError> {
        let Context { store, session_cache, tools, .. } = &*self.context;
        let Some((session, upper)) =
            session_cache.get(store, &caller.tenant, &request.session).await?
        else {
            return Err(lookup::missing(store, &caller.tenant, &request.session).await);
        };
        if let Some(tool) = &request.tool {
            request.declared = Some(tools.get(store, caller, tool).await?);
        }
        let of_tool = request.declared.as_ref().map(|tool| &tool.declaration.policy);
        let policies = [Some(&request.policy), Some(&upper.policy), of_tool];
        let is_large = policies.into_iter().flatten().any(Policy::is_large);
        let mode = upper.mode;
        let combine = move |rules: &Rules<'_>| {
            let spec = request.to_spec(&upper, rules)?;
            Ok(Specified { session, spec, request })
        };
        let specified = self.context.with_policy(caller, is_large, combine).await?;
        if specified.spec.mode != mode {
            check_available(store, specified.spec.mode).await?;
        }
        Ok(specified)
    }

    /// The approval that a run needs before it may start, unless it is granted to its session.
    async fn approval(
        &self,
        caller: &Caller,
        session: SessionId,
        spec: &RunSpec,
        floor: IsolationLevel,
    ) -> Result<Option<NewApproval>, ApiError> {
        let Context { options, store, .. } = &*self.context;
        let Some(need) = approval_needed(spec, options, floor) else { return Ok(None) };
        let Grant { kind, host, port } = &need.grant;
        let may_be_granted = !kind.is_once_only();
        if may_be_granted
            && store.approval_granted(&caller.tenant, session, &need.grant).await?.is_some()
        {
            return Ok(None);
        }
        Ok(Some(NewApproval {
            id: ApprovalId::generate(),
            kind: *kind,
            host: host.clone(),
            port: *port,
            message: need.message,
            requested_by: caller.key,
            timeout: options.limits.timeouts.approval,
        }))
    }
}

/// The limits of the session's files, where the request for a run in a new session has them: they
/// are the new session's.
fn move_disk_limits(
    run: &mut v1::StartRunRequest,
    session: &mut v1::CreateSessionRequest,
) -> Result<(), ApiError> {
    let Some(limits) = &mut run.limits else { return Ok(()) };
    let of_session = session.limits.get_or_insert_default();
    let moved = [
        (Limit::DiskBytes, limits.disk_bytes.take(), &mut of_session.disk_bytes),
        (Limit::Inodes, limits.inodes.take(), &mut of_session.inodes),
    ];
    for (limit, of_run, of_session) in moved {
        let Some(requested) = of_run else { continue };
        if *of_session.get_or_insert(requested) != requested {
            let message = "differs from that of new_session; set it there only";
            return Err(ApiError::invalid(limit.field(), message));
        }
    }
    Ok(())
}
