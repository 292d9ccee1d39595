//! `SessionService`: creates, shows, extends and closes sessions.

pub(crate) mod cache;
pub(crate) mod lookup;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use codelia_policy::{FlagSubject, NetworkPolicy, Policy};
use codelia_proto::v1::{self, session_service_server::SessionService};
use codelia_store::{
    Caller, EventKind, NewSession, Session, SessionChange, SessionCreated, SessionFilter,
    SessionRef, SessionSpec, SessionState, SessionVolumes, WorkerCandidate,
};
use codelia_telemetry::task;
use codelia_types::{Reason, SessionId};
use serde_json::Value;

use crate::{
    admission::{SessionRequest, admit_policy, fingerprint, mode_unavailable, rules::Rules},
    audit,
    context::Context,
    error::ApiError,
    policy::effective::ScopePolicies,
    rpc::serve,
    volumes,
    wire::{paging::Page, resource_name, to_proto, validate, words},
};

/// How long a new session waits for a worker before it is returned without one.
const OFFER_TIMEOUT: Duration = Duration::from_secs(1);

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub(crate) context: Arc<Context>,
}

/// A session that was created by this request or an earlier one with the same idempotency key.
#[derive(Debug)]
pub(crate) struct CreatedSession {
    pub(crate) session: Session,
    pub(crate) is_new: bool,
}

/// Another open session has the alias.
fn alias_in_use() -> ApiError {
    let message = "alias: in use by another open session; choose another or close that session";
    ApiError::new(Reason::AliasInUse, message).with("field", "alias")
}

impl Sessions {
    /// Parses a request.
    pub(crate) async fn parse(
        &self,
        caller: &Caller,
        wire: v1::CreateSessionRequest,
    ) -> Result<SessionRequest, ApiError> {
        let is_large = validate::is_large_policy(wire.policy.as_ref());
        let parse = |rules: &Rules<'_>| SessionRequest::parse(wire, rules);
        self.context.with_policy(caller, is_large, parse).await
    }

    async fn create_session(
        &self,
        caller: &Caller,
        wire: v1::CreateSessionRequest,
    ) -> Result<v1::CreateSessionResponse, ApiError> {
        let parsed = self.parse(caller, wire).await?;
        let session = self.create(caller, parsed).await?.session;
        Ok(v1::CreateSessionResponse { session: Some(to_proto::session(session)) })
    }

    async fn get_session(
        &self,
        caller: &Caller,
        wire: v1::GetSessionRequest,
    ) -> Result<v1::GetSessionResponse, ApiError> {
        let name = resource_name::session("name", &wire.name)?;
        let session = lookup::find(&self.context.store, &caller.tenant, &name).await?;
        Ok(v1::GetSessionResponse { session: Some(to_proto::session(session)) })
    }

    /// Creates a session.
    pub(crate) async fn create(
        &self,
        caller: &Caller,
        request: SessionRequest,
    ) -> Result<CreatedSession, ApiError> {
        let created = self.admit(caller, request).await;
        if let Err(error) = &created {
            let store = &self.context.store;
            audit::record(store, caller, EventKind::SessionRefused, None, error).await;
        }
        created
    }

    /// Closes a session whose first run was refused.
    pub(crate) async fn close_refused(&self, caller: &Caller, id: SessionId) {
        let wire = v1::CloseSessionRequest { name: format!("sessions/{id}") };
        if let Err(error) = self.close_session(caller, wire).await {
            tracing::warn!(session = %id, %error, "cannot close the session of a refused run");
        }
    }

    async fn admit(
        &self,
        caller: &Caller,
        request: SessionRequest,
    ) -> Result<CreatedSession, ApiError> {
        let Context { options, store, session_cache, session_quota, storage_quota, flags, .. } =
            &*self.context;
        storage_quota.check_files(store, caller).await?;
        let is_large = request.policy.is_large();
        let id = SessionId::generate();
        let subject = FlagSubject { session: id, tenant: &caller.tenant, labels: &request.labels };
        let choice = flags.choose(store, subject, caller.floor).await?;
        let scopes = ScopePolicies::of_new(store, caller, request.project.as_deref()).await?;
        let is_large = is_large || scopes.is_large();
        let admit = move |rules: &Rules<'_>| {
            let rules = &rules.under(scopes);
            let spec = request.to_flagged_spec(rules, &choice);
            let spec = spec.map_err(|error| (request.refused_by(rules, &choice, &error), error));
            let hash =
                request.idempotency_key.as_ref().map(|_| fingerprint(&request)).transpose()?;
            Ok((spec, hash, request))
        };
        let (spec, hash, request) = self.context.with_policy(caller, is_large, admit).await?;
        let spec = spec.map_err(|(flag, error)| {
            flags.refused(flag.as_ref());
            error
        })?;
        let new = NewSession {
            id,
            tenant: &caller.tenant,
            key: caller.key,
            alias: request.alias.as_deref(),
            spec: &spec,
            labels: &request.labels,
            ttl: request.ttl.unwrap_or(options.session_ttl),
            idle_ttl: request.idle_ttl,
            allow_data_loss: request.allow_data_loss,
            idempotency: request
                .idempotency_key
                .as_deref()
                .zip(hash.as_ref().map(<[_; 32]>::as_slice)),
            check_quota: session_quota.must_count(&caller.tenant, [caller.quotas.sessions]),
        };
        let begun = Instant::now();
        match store.session_create(new, caller.quotas).await {
            Ok(SessionCreated::New { session, open, candidates }) => {
                self.mount(caller, id, &spec, request.project.as_deref()).await?;
                if let Some(open) = open {
                    session_quota.counted(&caller.tenant, [open], begun);
                }
                flags.created(&spec);
                session_cache.insert(&caller.tenant, id, spec);
                Ok(CreatedSession { session: self.offer(*session, candidates).await, is_new: true })
            }
            Ok(SessionCreated::Existing(session)) => {
                // The earlier call may have failed in between.
                if session.state == SessionState::Open {
                    self.mount(caller, session.id, &spec, request.project.as_deref()).await?;
                }
                Ok(CreatedSession { session: *session, is_new: false })
            }
            Ok(SessionCreated::KeyReused) => Err(ApiError::idempotency_key_reused()),
            Ok(SessionCreated::ModeUnavailable) => {
                flags.refused(spec.flags.mode.as_ref());
                Err(mode_unavailable(spec.mode))
            }
            Ok(SessionCreated::OverQuota) => Err(ApiError::quota_exceeded("sessions")),
            Err(codelia_store::Error::AlreadyExists { .. }) => Err(alias_in_use()),
            Err(error) => Err(error.into()),
        }
    }

    /// Has a new session mount its volumes. If it cannot have them, it is closed.
    async fn mount(
        &self,
        caller: &Caller,
        session: SessionId,
        spec: &SessionSpec,
        project: Option<&str>,
    ) -> Result<(), ApiError> {
        let volumes = spec.policy.filesystem.mounted_volumes();
        if volumes.is_empty() {
            return Ok(());
        }
        let wanted = SessionVolumes { tenant: &caller.tenant, session, project, volumes };
        let mounted = volumes::mount(&self.context.store, wanted).await;
        if mounted.is_err() {
            self.close_refused(caller, session).await;
        }
        mounted
    }

    /// Offers a new session to a worker, so that it has a lease before its first run.
    async fn offer(&self, mut session: Session, candidates: Vec<WorkerCandidate>) -> Session {
        let context = self.context.clone();
        let id = session.id;
        // A task, so that the offer continues after the timeout.
        let offer = task::background("offer", async move {
            context.worker_calls.offer_new(id, candidates).await
        });
        if let Ok(Ok(Some((worker, epoch)))) = tokio::time::timeout(OFFER_TIMEOUT, offer).await {
            session.holder = Some(worker);
            session.lease_epoch = epoch;
        }
        session
    }

    async fn list_sessions(
        &self,
        caller: &Caller,
        wire: v1::ListSessionsRequest,
    ) -> Result<v1::ListSessionsResponse, ApiError> {
        let mut page = Page::<SessionId, _>::parse(&caller.tenant, &wire)?;
        let mut filter = SessionFilter {
            state: words::parse("state", wire.state)?,
            labels: validate::labels(wire.labels)?,
            before: None,
        };
        while let Some(limit) = page.batch() {
            self.context.list_turn(caller).await?;
            filter.before = page.after;
            let rows = self.context.store.session_list(&caller.tenant, &filter, limit).await?;
            page.add(rows, |session| (session.id, to_proto::session_summary(session)));
        }
        let (sessions, next_page_token) = page.finish();
        Ok(v1::ListSessionsResponse { sessions, next_page_token })
    }

    async fn extend_session(
        &self,
        caller: &Caller,
        wire: v1::ExtendSessionRequest,
    ) -> Result<v1::ExtendSessionResponse, ApiError> {
        let Context { options, store, .. } = &*self.context;
        let name = resource_name::session("name", &wire.name)?;
        let ttl = validate::ttl("ttl", wire.ttl, options.max_session_ttl)?;
        let ttl = ttl.ok_or_else(|| ApiError::invalid("ttl", "required"))?;
        let session = lookup::find(store, &caller.tenant, &name).await?;
        let change = SessionChange { ttl: Some(ttl), ..SessionChange::default() };
        let extended =
            store.session_update(&caller.tenant, &SessionRef::Id(session.id), &change).await?;
        let session = extended.ok_or_else(|| ApiError::session_ended(&session))?;
        Ok(v1::ExtendSessionResponse { session: Some(to_proto::session(session)) })
    }

    async fn update_session(
        &self,
        caller: &Caller,
        mut wire: v1::UpdateSessionRequest,
    ) -> Result<v1::UpdateSessionResponse, ApiError> {
        let Context { options, store, .. } = &*self.context;
        let name = resource_name::session("name", &wire.name)?;
        let network = wire.network.take();
        let mut change = session_change(wire, network.is_some(), options.max_session_ttl)?;
        if let Some(network) = network {
            change.network = Some(self.network(caller, &name, network).await?);
        }
        match store.session_update(&caller.tenant, &name, &change).await {
            Ok(Some(session)) => {
                Ok(v1::UpdateSessionResponse { session: Some(to_proto::session(session)) })
            }
            Ok(None) => {
                let session = lookup::find(store, &caller.tenant, &name).await?;
                Err(ApiError::session_ended(&session))
            }
            Err(codelia_store::Error::AlreadyExists { .. }) => Err(alias_in_use()),
            Err(error) => Err(error.into()),
        }
    }

    /// The network policy of a session after a change, within the policies of the installation and
    /// the tenant.
    async fn network(
        &self,
        caller: &Caller,
        name: &SessionRef,
        wire: v1::NetworkPolicy,
    ) -> Result<NetworkPolicy, ApiError> {
        let session = lookup::find(&self.context.store, &caller.tenant, name).await?;
        let wire = v1::Policy { network: Some(wire), ..v1::Policy::default() };
        let scopes = ScopePolicies::of_session(&self.context.store, &session).await?;
        let is_large = validate::is_large_policy(Some(&wire))
            || session.spec.policy.is_large()
            || scopes.is_large();
        let change = move |rules: &Rules<'_>| {
            let rules = rules.under(scopes);
            let requested = validate::policy(Some(wire), &rules.ceilings)?.network;
            changed_network(&session, &requested, rules.policy())
        };
        self.context.with_policy(caller, is_large, change).await
    }

    async fn close_session(
        &self,
        caller: &Caller,
        wire: v1::CloseSessionRequest,
    ) -> Result<v1::CloseSessionResponse, ApiError> {
        let name = resource_name::session("name", &wire.name)?;
        let store = &self.context.store;
        let Some(session) = store.session_close(&caller.tenant, &name).await? else {
            return Err(lookup::missing(store, &caller.tenant, &name).await);
        };
        if let Some(address) = session.holder_address.clone() {
            let context = self.context.clone();
            let id = session.id;
            task::background(
                "close",
                async move { context.worker_calls.close(&address, id).await },
            );
        }
        Ok(v1::CloseSessionResponse { session: Some(to_proto::session(session)) })
    }

    async fn release_session(
        &self,
        caller: &Caller,
        wire: v1::ReleaseSessionRequest,
    ) -> Result<v1::ReleaseSessionResponse, ApiError> {
        let name = resource_name::session("name", &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        let store = &self.context.store;
        match store.session_release(&caller.tenant, &name, caller.key, &reason).await? {
            Some(session) => {
                Ok(v1::ReleaseSessionResponse { session: Some(to_proto::session(session)) })
            }
            None => Err(lookup::missing(store, &caller.tenant, &name).await),
        }
    }
}

/// The present network policy of a session with the fields that a request sets, within `upper`.
fn changed_network(
    session: &Session,
    requested: &NetworkPolicy,
    upper: &Policy,
) -> Result<NetworkPolicy, ApiError> {
    if requested.mode.is_some() {
        return Err(ApiError::invalid("network.mode", "cannot change; create another session"));
    }
    let present = session.network.as_ref().unwrap_or(&session.spec.policy.network);
    let mut fields = serde_json::to_value(present).map_err(ApiError::internal)?;
    let set = serde_json::to_value(requested).map_err(ApiError::internal)?;
    if let (Value::Object(fields), Value::Object(set)) = (&mut fields, set) {
        fields.extend(set);
    }
    let network = serde_json::from_value(fields).map_err(ApiError::internal)?;
    let changed = Policy { network, ..Policy::default() };
    Ok(admit_policy(&changed, upper, session.spec.mode)?.network)
}

/// Reads the fields that the mask names. A field that is set and not named is refused: its value
/// would be lost.
fn session_change(
    wire: v1::UpdateSessionRequest,
    has_network: bool,
    max_ttl: Duration,
) -> Result<SessionChange, ApiError> {
    let v1::UpdateSessionRequest { name: _, update_mask, alias, labels, ttl, idle_ttl, network: _ } =
        wire;
    let paths = update_mask.unwrap_or_default().paths;
    let fields = [
        ("alias", !alias.is_empty()),
        ("labels", !labels.is_empty()),
        ("ttl", ttl.is_some()),
        ("idle_ttl", idle_ttl.is_some()),
        ("network", has_network),
    ];
    if !paths.iter().all(|path| fields.iter().any(|(field, _)| field == path)) {
        return Err(ApiError::invalid(
            "update_mask",
            "only `alias`, `labels`, `ttl`, `idle_ttl` and `network` can change",
        ));
    }
    if paths.is_empty() {
        return Err(ApiError::invalid("update_mask", "must name at least one field to change"));
    }
    let is_named = |field: &str| paths.iter().any(|path| path == field);
    if let Some((field, _)) = fields.into_iter().find(|(field, is_set)| *is_set && !is_named(field))
    {
        return Err(ApiError::invalid(field, "is set but not in update_mask; add it or clear it"));
    }
    let alias = validate::alias(alias)?;
    let labels = validate::labels(labels)?;
    let ttl = validate::ttl("ttl", ttl, max_ttl)?;
    if is_named("ttl") && ttl.is_none() {
        return Err(ApiError::invalid("ttl", "cannot be cleared; set a duration"));
    }
    if is_named("network") && !has_network {
        return Err(ApiError::invalid("network", "cannot be cleared; set the lists to change"));
    }
    let idle_ttl = validate::ttl("idle_ttl", idle_ttl, max_ttl)?;
    Ok(SessionChange {
        alias: is_named("alias").then_some(alias),
        labels: is_named("labels").then_some(labels),
        ttl,
        idle_ttl: is_named("idle_ttl").then_some(idle_ttl),
        network: None,
    })
}

serve! {
    SessionService for Sessions;
    call create_session(CreateSessionRequest) -> CreateSessionResponse;
    call get_session(GetSessionRequest) -> GetSessionResponse;
    call list_sessions(ListSessionsRequest) -> ListSessionsResponse;
    call extend_session(ExtendSessionRequest) -> ExtendSessionResponse;
    call update_session(UpdateSessionRequest) -> UpdateSessionResponse;
    call close_session(CloseSessionRequest) -> CloseSessionResponse;
    call release_session(ReleaseSessionRequest) -> ReleaseSessionResponse;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(paths: &[&str], set: v1::UpdateSessionRequest) -> Result<SessionChange, ApiError> {
        let paths = paths.iter().map(|&path| path.to_owned()).collect();
        let update_mask = Some(prost_types::FieldMask { paths });
        session_change(
            v1::UpdateSessionRequest { update_mask, ..set },
            false,
            Duration::from_secs(60),
        )
    }

    #[test]
    fn mask_names_the_fields_to_change() {
        let named = v1::UpdateSessionRequest { alias: "new".into(), ..Default::default() };
        let changed = change(&["alias", "idle_ttl"], named.clone()).unwrap();
        assert_eq!(changed.alias, Some(Some("new".to_owned())));
        assert_eq!((changed.idle_ttl, changed.labels, changed.ttl), (Some(None), None, None));
        let none = v1::UpdateSessionRequest::default();
        for (paths, set, field) in [
            (&[][..], none.clone(), "update_mask"),
            (&["*"], none.clone(), "update_mask"),
            (&["mode"], none.clone(), "update_mask"),
            (&["network"], none.clone(), "network"),
            (&["ttl"], none, "ttl"),
            (&["labels"], named, "alias"),
        ] {
            let refused = change(paths, set).unwrap_err();
            assert!(refused.invalid_field() == Some(field), "{refused:?}");
        }
    }
}
