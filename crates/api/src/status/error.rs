//! [`ApiError`]: why a call fails, and the text that the caller reads.

use std::{fmt, time::Duration};

use codelia_policy::IsolationLevel;
use codelia_proto::timestamp_to_proto;
use codelia_store::{MAX_POLICY_NAMES, Session, SessionEndReason};
use codelia_types::{ChangesState, Mode, SessionId};
use time::OffsetDateTime;

use super::{
    approval::ApprovalError, file::FileError, flag::FlagError, tool::ToolError, volume::VolumeError,
};

const NO_SECRET_KEY: &str = "command.secret_env: this installation has no key for secrets; ask an operator \
     to set `secrets.key_file` for every api and worker";

const AUDIT_UNSIGNED: &str = "the audit of this installation is not signed; set `secrets.key_file` for every api \
     and worker";

const MIB: i64 = 1024 * 1024;

/// Why a call fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ApiError {
    /// A field of the request is invalid.
    InvalidField { field: String, message: String },
    /// The resource does not exist or belongs to another tenant: the response is the same.
    NotFound { kind: &'static str, name: String },
    /// The request has no valid key.
    Unauthenticated,
    /// The key has expired.
    KeyExpired,
    /// An operator suspended the caller's tenant.
    TenantSuspended,
    /// The key has none of the scopes that would do.
    ScopeMissing { any_of: Vec<&'static str> },
    /// The tenant has reached a quota.
    QuotaExceeded { quota: &'static str },
    /// The files of the tenant use as much as its quota allows.
    DiskQuotaExceeded { used: i64, quota: i64 },
    /// The tenant calls too often.
    RateLimited { retry_after: Duration },
    /// The address sent too many wrong keys.
    TooManyFailedKeys { retry_after: Duration },
    /// The key has too many open calls, watches or bytes of requests.
    TooManyCalls { limit: &'static str, max: usize },
    /// The caller took too long to send its request.
    RequestStalled,
    /// Too many checks of large policies of the tenant wait already.
    TooManyPolicyChecks { max_waiting: usize },
    /// The idempotency key belongs to a different request.
    IdempotencyKeyReused,
    /// Another open session has the alias.
    AliasInUse,
    /// The tenant has open sessions and its deletion was not forced.
    TenantNotEmpty { sessions: i64 },
    /// The tenant is being deleted.
    TenantDeleted,
    /// The tenant id is taken.
    TenantExists,
    /// The session accepts no more runs.
    SessionEnded { id: SessionId, alias: Option<String>, reason: SessionEndReason, at: OffsetDateTime },
    /// The run has no command that runs.
    RunNotRunning,
    /// The run has no changes that wait for a decision, but these.
    ChangesNotHeld { state: Option<ChangesState> },
    /// The worker that holds the session cannot do what the run needs.
    WorkerOutdated,
    /// The session's files are lost.
    SessionDataLost,
    /// The session is quarantined.
    SessionQuarantined { id: SessionId, reason: String },
    /// The output of the run is deleted.
    OutputExpired,
    /// An object with output of the run is missing or too short.
    OutputDataLost { object: String, problem: String },
    /// The installation does not allow the mode.
    ModeNotAllowed { mode: Mode },
    /// The mode isolates less than the tenant's isolation floor.
    BelowFloor { mode: Mode, floor: IsolationLevel },
    /// No live worker supports the mode.
    ModeUnavailable { mode: Mode },
    /// The policy rejects the command.
    CommandNotAllowed { rule: String, message: String },
    /// An approval is not requested, decided or revoked.
    Approval(ApprovalError),
    /// A mode flag is not set or rolled back.
    Flag(FlagError),
    /// A tool may not be used or changed.
    Tool(ToolError),
    /// A volume is not created, mounted or deleted.
    Volume(VolumeError),
    /// Another version of a policy is in effect than expected; 0 for none.
    PolicyChanged { version: i64 },
    /// The tenant has as many projects or users with a policy as it may.
    TooManyPolicies,
    /// The request has secret variables and the installation has no key for them.
    NoSecretKey,
    /// The audit cannot be checked, since the installation has no key.
    AuditUnsigned,
    /// The worker drains by itself, so an operator cannot take that back.
    WorkerDrainsItself,
    /// The session's worker rejected a file call.
    File(FileError),
    /// The caller's deadline passed.
    DeadlineExceeded,
    /// The database took too long for what the caller asked.
    QueryTimeout,
    /// This server is stopping; another may answer.
    ShuttingDown,
    /// A dependency does not answer.
    Unavailable { detail: String },
    /// A bug.
    Internal { detail: String },
}

fn disk_quota_text(used: i64, quota: i64) -> String {
    format!(
        "quota `disk_bytes` reached: the files of the tenant's sessions use {} MiB of {} MiB; remove files \
         (RemoveFile, `codelia rm`) or close sessions, or ask an operator to raise it",
        used / MIB,
        quota / MIB,
    )
}

impl ApiError {
    /// An invalid field; `field` is its path in the request.
    pub(crate) fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidField { field: field.into(), message: message.into() }
    }

    /// A missing resource; `kind` is `session`, `run` and so on, `name` is how the caller named it.
    pub(crate) fn not_found(kind: &'static str, name: impl fmt::Display) -> Self {
        Self::NotFound { kind, name: name.to_string() }
    }

    /// A session that has ended, or is about to because it has expired.
    pub(crate) fn session_ended(session: &Session) -> Self {
        Self::SessionEnded {
            id: session.id,
            alias: session.alias.clone(),
            reason: session.end_reason.unwrap_or(SessionEndReason::Expired),
            at: session.ended_at.unwrap_or(session.expires_at),
        }
    }

    /// A dependency that does not answer, with the detail for the log.
    pub(crate) fn unavailable(detail: impl fmt::Display) -> Self {
        Self::Unavailable { detail: detail.to_string() }
    }

    /// A bug, with the detail for the log.
    pub(crate) fn internal(detail: impl fmt::Display) -> Self {
        Self::Internal { detail: detail.to_string() }
    }

    /// Prefixes the path of the invalid field, if there is one, with `parent`.
    pub(crate) fn within(self, parent: &str) -> Self {
        match self {
            Self::InvalidField { field, message } => {
                Self::InvalidField { field: format!("{parent}.{field}"), message }
            }
            other => other,
        }
    }

    /// Whether the call was refused and changed nothing. Another error may come after a change was stored.
    pub(crate) fn is_refusal(&self) -> bool {
        !matches!(
            self,
            Self::Unavailable { .. }
                | Self::Internal { .. }
                | Self::QueryTimeout
                | Self::DeadlineExceeded
                | Self::ShuttingDown
        )
    }

    /// The text for the caller, without internal detail.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::InvalidField { field, message } => format!("{field}: {message}"),
            Self::NotFound { kind, name } => format!("{kind} {name:?} not found"),
            Self::Unauthenticated => "API key missing or invalid: send `authorization: Bearer <key>`".into(),
            Self::KeyExpired => "the API key has expired; create a new one".into(),
            Self::TenantSuspended => "an operator suspended this tenant; ask them to resume it".into(),
            Self::WorkerDrainsItself => WORKER_DRAINS_ITSELF.into(),
            Self::ScopeMissing { any_of } => {
                format!("the API key lacks the scope `{}`; use a key that has it", any_of.join("` or `"))
            }
            Self::DiskQuotaExceeded { used, quota } => disk_quota_text(*used, *quota),
            Self::QuotaExceeded { quota } => {
                format!("quota `{quota}` reached; reduce usage or ask an operator to raise it")
            }
            Self::RateLimited { retry_after } => {
                format!("quota `requests_per_second` reached; retry in {} ms", retry_after.as_millis().max(1))
            }
            Self::TooManyFailedKeys { retry_after } => {
                let seconds = retry_after.as_secs().max(1);
                format!("too many invalid API keys from this address; check the key, retry in {seconds} s")
            }
            Self::TooManyCalls { limit, max } => format!(
                "the API key has too many open calls: `{limit}` is {max}; finish some, or ask an operator to \
                 raise api.{limit}"
            ),
            Self::RequestStalled => "the request took too long to arrive; send it again".into(),
            Self::TooManyPolicyChecks { max_waiting } => format!(
                "too many policies at once: {max_waiting} calls with a large policy are waiting already; \
                 retry, or use smaller policies"
            ),
            Self::IdempotencyKeyReused => {
                "idempotency_key: already used for a different request; use a new key".into()
            }
            Self::AliasInUse => {
                "alias: in use by another open session; choose another or close that session".into()
            }
            Self::TenantNotEmpty { sessions } => tenant_not_empty(*sessions),
            Self::TenantDeleted => "the tenant is being deleted; that cannot be undone".into(),
            Self::TenantExists => "tenant_id: already exists; choose another".into(),
            Self::SessionEnded { id, alias, reason, at } => {
                let name = alias.clone().unwrap_or_else(|| id.to_string());
                let (at, why) = (timestamp_to_proto(*at), end_text(*reason));
                format!("session {name:?} ended at {at}: {why}; create a new one")
            }
            Self::RunNotRunning => "the run is not running: it is queued or has ended".into(),
            Self::ChangesNotHeld { state } => changes_not_held(*state).into(),
            Self::WorkerOutdated => WORKER_OUTDATED.into(),
            Self::SessionDataLost => SESSION_DATA_LOST.into(),
            Self::SessionQuarantined { id, reason } => session_quarantined(*id, reason),
            Self::OutputExpired => OUTPUT_EXPIRED.into(),
            Self::OutputDataLost { object, problem } => lost_output(object, problem),
            Self::ModeNotAllowed { mode } => {
                format!("mode: {mode} is not allowed on this installation; choose another")
            }
            Self::BelowFloor { mode, floor } => format!(
                "mode: {mode} provides {}, this tenant requires at least {floor}; choose a stronger mode or \
                 ask an operator to lower the floor (codelia tenants floor)",
                IsolationLevel::of(*mode)
            ),
            Self::ModeUnavailable { mode } => format!(
                "mode: no worker supports {mode}; choose another, or see with `codelia doctor` on a worker's host \
                 what the mode needs"
            ),
            Self::Approval(error) => error.text(),
            Self::Flag(error) => error.text(),
            Self::Tool(error) => error.text(),
            Self::Volume(error) => error.text(),
            Self::PolicyChanged { version } => policy_changed(*version),
            Self::TooManyPolicies => too_many_policies(),
            Self::NoSecretKey => NO_SECRET_KEY.into(),
            Self::AuditUnsigned => AUDIT_UNSIGNED.into(),
            Self::CommandNotAllowed { rule, message } => format!("policy.{rule}: {message}"),
            Self::File(error) => error.text(),
            Self::DeadlineExceeded => "deadline exceeded; retry with a longer one".into(),
            Self::QueryTimeout => QUERY_TIMEOUT.into(),
            Self::ShuttingDown => "the server is shutting down; retry".into(),
            Self::Unavailable { .. } => "temporarily unavailable; retry".into(),
            Self::Internal { .. } => "internal error; report the x-request-id to the operator".into(),
        }
    }
}

const WORKER_DRAINS_ITSELF: &str = "the worker shuts down, or a sandbox left something behind; restart it";
const QUERY_TIMEOUT: &str =
    "the database took too long; retry, or ask for less: a smaller page, one session, a filter";
const WORKER_OUTDATED: &str = "transaction: the worker that holds the session has an earlier version, which cannot do \
     this; leave it out, use another session, or retry when the worker was replaced";
const SESSION_DATA_LOST: &str =
    "the session's files are lost or their worker is unavailable; create a new session";
const OUTPUT_EXPIRED: &str = "the output of the run was deleted after its retention; `GetRun` has the result";

fn session_quarantined(id: SessionId, reason: &str) -> String {
    format!(
        "session: {id} is quarantined: {reason}; an administrator releases it with `codelia session release {id}`"
    )
}

fn tenant_not_empty(sessions: i64) -> String {
    format!("the tenant has {sessions} open sessions; close them, or set `force`")
}

fn changes_not_held(state: Option<ChangesState>) -> &'static str {
    match state {
        None => {
            "the run has no list of changes: it has not ended, or was not started with `codelia run --hold`"
        }
        Some(ChangesState::Applied) => "the changes of the run are applied already",
        Some(ChangesState::Dropped) => {
            "the changes of the run are dropped: it failed, they were discarded, or they waited too long"
        }
        Some(ChangesState::Held) => {
            "the session does not hold the changes of the run any more; start it again"
        }
    }
}

fn policy_changed(version: i64) -> String {
    match version {
        0 => "expected_version: the scope has no policy; leave the field out".into(),
        _ => format!("expected_version: version {version} is in effect; read it and repeat the change"),
    }
}

fn too_many_policies() -> String {
    format!("the tenant has {MAX_POLICY_NAMES} of them; use a name again")
}

fn lost_output(object: &str, problem: &str) -> String {
    format!("output of the run is lost: object {object:?}: {problem}; `GetRun` has the result")
}

/// Why a session ended.
fn end_text(reason: SessionEndReason) -> &'static str {
    match reason {
        SessionEndReason::Closed => "it was closed",
        SessionEndReason::Expired => "it reached its expire_time",
        SessionEndReason::Idle => "it was idle for its idle_ttl",
        SessionEndReason::DataLost => "its files were lost",
    }
}

/// For the log: the text with internal detail.
impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable { detail } | Self::Internal { detail } => f.write_str(detail),
            other => f.write_str(&other.text()),
        }
    }
}
