//! An approval as the table `approvals` has it.

use codelia_types::{ApprovalId, KeyId, RunId, SessionId, TenantId};
use serde_json::{Value, json};
use time::OffsetDateTime;

use crate::{EventBody, EventKind, EventSubject, words::words};

/// Selects approvals by a condition and its arguments.
macro_rules! select_approvals {
    ($condition:literal $(+ $rest:literal)*, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            r#"SELECT a.id, a.tenant_id, a.session_id, a.run_id, a.kind, a.host, a.port, a.path, a.reach,
                      a.pid, a.exe, a.cwd, a.subject, a.requested_by, a.message,
                      CASE WHEN a.state = 'pending' AND a.expires_at <= now() THEN 'expired' ELSE a.state END AS "state!",
                      a.scope, a.decided_by, a.reason, a.created_at, a.expires_at,
                      coalesce(a.decided_at, CASE WHEN a.expires_at <= now() THEN a.expires_at END) AS decided_at,
                      a.revoked_at, a.revoked_by, a.revoke_reason
               FROM approvals a WHERE "# + $condition $(+ $rest)*,
            $($argument),*
        )
        .try_map(|row| {
            Ok($crate::Approval {
                id: codelia_types::ApprovalId(row.id),
                tenant: $crate::row::parse("approvals.tenant_id", &row.tenant_id)?,
                session: codelia_types::SessionId(row.session_id),
                run: row.run_id.map(codelia_types::RunId),
                kind: $crate::row::parse("approvals.kind", &row.kind)?,
                host: row.host,
                port: $crate::approval::record::port(row.port),
                path: row.path,
                reach: $crate::row::parse_optional("approvals.reach", row.reach.as_deref())?,
                reader: $crate::Reader { pid: row.pid.unsigned_abs(), exe: row.exe, cwd: row.cwd },
                subject: row.subject,
                requested_by: codelia_types::KeyId(row.requested_by),
                message: row.message,
                state: $crate::row::parse("approvals.state", &row.state)?,
                scope: $crate::row::parse_optional("approvals.scope", row.scope.as_deref())?,
                decided_by: row.decided_by.map(codelia_types::KeyId),
                reason: row.reason,
                created_at: row.created_at,
                expires_at: row.expires_at,
                decided_at: row.decided_at,
                revoked: row.revoked_at.zip(row.revoked_by.map(codelia_types::KeyId)),
                revoke_reason: row.revoke_reason,
            })
        })
    };
}

pub(super) use select_approvals;

/// Pending approvals of one run.
pub const MAX_PENDING_OF_RUN: i64 = 16;
/// Pending approvals of one tenant.
pub const MAX_PENDING_OF_TENANT: i64 = 200;
/// All approvals that one run may request.
pub const MAX_OF_RUN: i64 = 256;
/// Grants of one session, and those to one tenant.
pub const MAX_GRANTS: i64 = 1000;
/// Bytes of a message or a reason.
pub const MAX_APPROVAL_TEXT: usize = 1000;

words! {
    /// The kind of a request.
    ApprovalKind {
        /// Network mode `proxy` for a run.
        NetworkProxy = "network_proxy",
        /// Network mode `host` for a run.
        NetworkHost = "network_host",
        /// A connection to a host and port that the policy leaves to a person.
        EgressHost = "egress_host",
        /// Less isolation for a run.
        Isolation = "isolation",
        /// Reading a file of the host.
        FileRead = "file_read",
    }
}

impl ApprovalKind {
    /// Whether each run needs a decision of its own: nothing holds for later runs.
    #[must_use]
    pub fn is_once_only(self) -> bool {
        self == Self::NetworkHost
    }

    /// The field of a policy that a decision about it widens.
    #[must_use]
    pub fn field(self) -> &'static str {
        match self {
            Self::NetworkProxy | Self::NetworkHost => "network.mode",
            Self::EgressHost => "network.allowed_hosts",
            Self::Isolation => "isolation_level",
            Self::FileRead => "filesystem.read_only_paths",
        }
    }

    /// The kinds that a run requests while it runs, not before it starts.
    pub(super) const OF_RUNNING: [Self; 2] = [Self::EgressHost, Self::FileRead];
}

words! {
    /// The state of an approval.
    ApprovalState {
        /// Nobody has decided.
        Pending = "pending",
        /// Someone allowed it.
        Allowed = "allowed",
        /// Someone denied it.
        Denied = "denied",
        /// Nobody decided in time, or its run ended before.
        Expired = "expired",
    }
}

words! {
    /// The runs that an allowed approval holds for.
    ApprovalScope {
        /// The run that it was requested for.
        Once = "once",
        /// All runs of its session.
        Session = "session",
        /// All sessions that the same key created.
        User = "user",
        /// All sessions of the same project.
        Project = "project",
        /// All sessions of the tenant.
        Tenant = "tenant",
    }
}

words! {
    /// Which files a decision about a file holds for.
    ApprovalReach {
        /// The file.
        File = "file",
        /// All files below its directory.
        Directory = "directory",
    }
}

/// A request that a person decides about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Approval {
    /// Identifies the request; begins with its time.
    pub id: ApprovalId,
    /// The tenant whose keys decide.
    pub tenant: TenantId,
    /// The session that it was requested for.
    pub session: SessionId,
    /// The run that it was requested for.
    pub run: Option<RunId>,
    /// The kind of what is requested.
    pub kind: ApprovalKind,
    /// The host that it is about; empty if the kind has none.
    pub host: String,
    /// The port that it is about; 0 if the kind has none.
    pub port: u16,
    /// The file that it is about; empty if the kind has none.
    pub path: String,
    /// Which files it is decided for, if it is decided and has a path.
    pub reach: Option<ApprovalReach>,
    /// The process that asks for the file. It may lie about itself.
    pub reader: Reader,
    /// The key that started the run.
    pub requested_by: KeyId,
    /// For the person who decides.
    pub message: String,
    /// The state, by the clock of the database.
    pub state: ApprovalState,
    /// The scope that it holds for, if it is allowed.
    pub scope: Option<ApprovalScope>,
    /// The project or key that it holds for, if that is its scope.
    pub subject: Option<String>,
    /// The key that decided, if one did.
    pub decided_by: Option<KeyId>,
    /// Why, if the decider said so, or why it expired early.
    pub reason: Option<String>,
    /// When it was requested.
    pub created_at: OffsetDateTime,
    /// When it expires if nobody decides.
    pub expires_at: OffsetDateTime,
    /// When it stopped being pending.
    pub decided_at: Option<OffsetDateTime>,
    /// When and by which key it was revoked, if it was.
    pub revoked: Option<(OffsetDateTime, KeyId)>,
    /// Why it was revoked, if the key said so.
    pub revoke_reason: Option<String>,
}

/// The process that asks for a file, as it is seen in its sandbox. Unknown parts are 0 or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reader {
    /// The number of the process.
    pub pid: u32,
    /// The program, at most 1024 bytes.
    pub exe: String,
    /// The working directory, at most 1024 bytes.
    pub cwd: String,
}

/// A decision that holds for later runs, too.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The kind of what is allowed.
    pub kind: ApprovalKind,
    /// The host; empty if the kind has none.
    pub host: String,
    /// The port; 0 if the kind has none.
    pub port: u16,
}

impl Approval {
    /// Whom an event about it is about.
    pub(super) fn event_subject(&self, key: Option<KeyId>) -> EventSubject {
        EventSubject {
            tenant: Some(self.tenant.clone()),
            session: Some(self.session),
            run: self.run,
            key,
            worker: None,
        }
    }

    /// An event about it.
    pub(super) fn event(&self, kind: EventKind, reason: Option<&str>) -> EventBody {
        let mut detail = json!({
            "approval": self.id, "kind": self.kind.as_str(), "host": self.host, "port": self.port,
            "requested_by": self.requested_by, "message": self.message,
        });
        if let Value::Object(fields) = &mut detail {
            if !self.path.is_empty() {
                fields.insert("path".to_owned(), self.path.as_str().into());
            }
            fields.extend(self.reach.map(|reach| ("reach".to_owned(), reach.as_str().into())));
            fields.extend(self.scope.map(|scope| ("scope".to_owned(), scope.as_str().into())));
            fields.extend(self.subject.as_deref().map(|name| ("subject".to_owned(), name.into())));
            if !self.reader.exe.is_empty() {
                fields.insert("exe".to_owned(), self.reader.exe.as_str().into());
            }
            fields.extend(reason.map(|reason| ("reason".to_owned(), reason.into())));
        }
        EventBody { kind, field: None, detail }
    }
}

/// The database checks the range.
pub(super) fn port(column: i32) -> u16 {
    u16::try_from(column).unwrap_or(0)
}

/// Cuts a text to the size that the database accepts.
pub(super) fn shortened(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_APPROVAL_TEXT)]
}
