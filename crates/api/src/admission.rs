//! Turns a request into what is recorded: checks it, merges it over its session and the
//! installation's defaults, and refuses modes that cannot be had.

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::{CommandSpec, LimitsRequest, Mode, NetworkMode, Policy, RunSpec};
use codelia_proto::v1;
use codelia_store::{SessionRef, SessionSpec, Store};
use serde::Serialize;
use sha2::{Digest, Sha256};

use crate::{names, options::Options, status::ApiError, validate};

/// A checked request for a run. What is serialised is what makes two requests the same.
#[derive(Debug, Serialize)]
pub(crate) struct RunRequest {
    #[serde(skip)]
    pub(crate) session: SessionRef,
    #[serde(skip)]
    pub(crate) idempotency_key: Option<String>,
    pub(crate) command: CommandSpec,
    pub(crate) limits: LimitsRequest,
    pub(crate) mode: Option<Mode>,
    pub(crate) network: Option<NetworkMode>,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) retries: i32,
    pub(crate) ends_with_caller: bool,
}

impl RunRequest {
    /// Checks a request; nothing is looked up.
    pub(crate) fn read(wire: v1::StartRunRequest, ends_with_caller: bool) -> Result<Self, ApiError> {
        Ok(Self {
            session: names::session("parent", &wire.parent)?,
            idempotency_key: validate::idempotency_key(wire.idempotency_key)?,
            command: validate::command(wire.command)?,
            limits: validate::limits(wire.limits)?,
            mode: validate::mode(wire.mode)?,
            network: validate::network(wire.network)?,
            labels: validate::labels(wire.labels)?,
            retries: validate::retries(wire.retries)?,
            ends_with_caller,
        })
    }

    /// The run's specification: what the request asks for, else the session, else the installation.
    pub(crate) fn specify(&self, session: &SessionSpec, options: &Options) -> Result<RunSpec, ApiError> {
        let mode = self.mode.unwrap_or(session.mode);
        check_allowed(mode, options)?;
        let asked = self.limits.over(&session.asked);
        Ok(RunSpec {
            command: self.command.clone(),
            mode,
            network: self.network.or(session.network).or(default_network(mode, options)),
            limits: self.limits.resolve(&session.limits, &options.ceilings)?,
            asked,
            policy: session.policy.clone(),
            ends_with_caller: self.ends_with_caller,
        })
    }
}

/// A checked request for a session. What is serialised is what makes two requests the same.
#[derive(Debug, Serialize)]
pub(crate) struct SessionRequest {
    #[serde(skip)]
    pub(crate) idempotency_key: Option<String>,
    pub(crate) alias: Option<String>,
    pub(crate) mode: Option<Mode>,
    pub(crate) limits: LimitsRequest,
    pub(crate) network: Option<NetworkMode>,
    pub(crate) ttl: Option<Duration>,
    pub(crate) idle_ttl: Option<Duration>,
    pub(crate) labels: BTreeMap<String, String>,
}

impl SessionRequest {
    /// Checks a request; nothing is looked up.
    pub(crate) fn read(wire: v1::CreateSessionRequest, options: &Options) -> Result<Self, ApiError> {
        Ok(Self {
            idempotency_key: validate::idempotency_key(wire.idempotency_key)?,
            alias: validate::alias(wire.alias)?,
            mode: validate::mode(wire.mode)?,
            limits: validate::limits(wire.limits)?,
            network: validate::network(wire.network)?,
            ttl: validate::ttl("ttl", wire.ttl, options.max_session_ttl)?,
            idle_ttl: validate::ttl("idle_ttl", wire.idle_ttl, options.max_session_ttl)?,
            labels: validate::labels(wire.labels)?,
        })
    }

    /// What the session's runs start from.
    pub(crate) fn specify(&self, options: &Options) -> Result<SessionSpec, ApiError> {
        let mode = self.mode.unwrap_or(options.default_mode);
        check_allowed(mode, options)?;
        Ok(SessionSpec {
            mode,
            limits: self.limits.resolve(&options.defaults, &options.ceilings)?,
            asked: self.limits.clone(),
            network: self.network,
            policy: Policy::default(),
        })
    }
}

/// What tells two requests with the same idempotency key apart. Maps are ordered, so it is stable.
pub(crate) fn fingerprint(request: &impl Serialize) -> Result<[u8; 32], ApiError> {
    let bytes = serde_json::to_vec(request).map_err(ApiError::internal)?;
    Ok(Sha256::digest(bytes).into())
}

/// Mode `logical` has no network of its own: a default it cannot keep is not held against it,
/// while what a caller asked for is.
fn default_network(mode: Mode, options: &Options) -> Option<NetworkMode> {
    if mode == Mode::Logical { None } else { options.default_network }
}

fn check_allowed(mode: Mode, options: &Options) -> Result<(), ApiError> {
    if mode == Mode::Logical && !options.allow_logical {
        return Err(ApiError::ModeNotAllowed { mode });
    }
    Ok(())
}

/// Refuses a mode that workers lack. Without any worker nothing is known, and the work waits.
pub(crate) async fn check_available(store: &Store, mode: Mode) -> Result<(), ApiError> {
    if store.worker_has_mode(mode).await? {
        return Ok(());
    }
    for other in Mode::ALL {
        if store.worker_has_mode(other).await? {
            return Err(ApiError::ModeUnavailable { mode });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use codelia_policy::{Ceilings, Limits};

    use super::*;

    fn options() -> Options {
        Options {
            listen: ([127, 0, 0, 1], 0).into(),
            tls: None,
            internal_tls: None,
            defaults: Limits::default(),
            ceilings: Ceilings::default(),
            default_mode: Mode::Logical,
            default_network: Some(NetworkMode::None),
            session_ttl: Duration::from_secs(60),
            max_session_ttl: Duration::from_secs(600),
            allow_logical: true,
            shutdown_grace: Duration::from_secs(1),
        }
    }

    fn wire() -> v1::StartRunRequest {
        v1::StartRunRequest {
            parent: "sessions/a".into(),
            command: Some(v1::CommandSpec { argv: vec!["true".into()], ..Default::default() }),
            ..Default::default()
        }
    }

    fn session() -> SessionSpec {
        let asked = LimitsRequest { pids: Some(7), open_files: Some(9), ..Default::default() };
        let limits = asked.or_default(&Limits::default());
        SessionSpec { mode: Mode::Logical, limits, asked, network: None, policy: Policy::default() }
    }

    #[test]
    fn a_run_takes_its_own_limits_then_the_sessions_then_the_defaults() {
        let limits = v1::Limits { pids: Some(3), ..Default::default() };
        let request =
            RunRequest::read(v1::StartRunRequest { limits: Some(limits), ..wire() }, false).unwrap();
        let spec = request.specify(&session(), &options()).unwrap();
        assert_eq!((spec.limits.pids, spec.limits.open_files), (3, 9));
        assert_eq!(spec.limits.memory_bytes, Limits::default().memory_bytes);
        assert_eq!((spec.asked.pids, spec.asked.memory_bytes), (Some(3), None));
    }

    #[test]
    fn a_limit_above_the_ceiling_is_refused_by_name() {
        let limits = v1::Limits { cpu_millis: Some(i64::MAX), ..Default::default() };
        let request =
            RunRequest::read(v1::StartRunRequest { limits: Some(limits), ..wire() }, false).unwrap();
        let error = request.specify(&session(), &options()).unwrap_err();
        assert!(matches!(error, ApiError::Invalid { field, .. } if field == "limits.cpu_millis"));
    }

    #[test]
    fn the_default_network_is_not_held_against_mode_logical() {
        let request = RunRequest::read(wire(), false).unwrap();
        assert_eq!(request.specify(&session(), &options()).unwrap().network, None);
        let isolated = SessionSpec { mode: Mode::Bwrap, ..session() };
        assert_eq!(request.specify(&isolated, &options()).unwrap().network, Some(NetworkMode::None));
    }

    #[test]
    fn mode_logical_is_refused_where_it_is_not_allowed() {
        let strict = Options { allow_logical: false, ..options() };
        let request = RunRequest::read(wire(), false).unwrap();
        let refused = ApiError::ModeNotAllowed { mode: Mode::Logical };
        assert_eq!(request.specify(&session(), &strict).unwrap_err(), refused);
        let request = SessionRequest::read(v1::CreateSessionRequest::default(), &strict).unwrap();
        assert_eq!(request.specify(&strict).unwrap_err(), refused);
    }

    #[test]
    fn the_same_request_has_the_same_fingerprint_whatever_the_order_of_its_maps() {
        let labelled = |labels: &[&str]| {
            let labels = labels.iter().map(|&key| (key.to_owned(), String::new())).collect();
            fingerprint(&RunRequest::read(v1::StartRunRequest { labels, ..wire() }, false).unwrap()).unwrap()
        };
        assert_eq!(labelled(&["a", "b", "c"]), labelled(&["c", "b", "a"]));
        assert_ne!(labelled(&["a", "b"]), labelled(&["a", "c"]));
    }

    #[test]
    fn the_name_of_the_session_and_the_key_are_not_part_of_the_fingerprint() {
        let other =
            v1::StartRunRequest { parent: "sessions/b".into(), idempotency_key: "k".into(), ..wire() };
        let of = |wire| fingerprint(&RunRequest::read(wire, false).unwrap()).unwrap();
        assert_eq!(of(wire()), of(other));
    }
}
