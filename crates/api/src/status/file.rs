//! [`FileError`]: why a worker rejects a file call.

use codelia_policy::Limit;
use codelia_proto::internal::v1::{ExceededLimit, FileRefusal, FileRefusalReason as Cause, ImportProgress};
use codelia_types::Reason;
use tonic::Code;

/// A file call that the session's worker rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileError {
    cause: Cause,
    /// The field of the request that names the file; may be empty.
    pub(crate) field: String,
    /// The policy rule that forbids the call, if one does.
    rule: String,
    /// How far an import got.
    import: Option<ImportProgress>,
    /// The limit of the session that would be exceeded.
    // Boxed: errors are returned by value everywhere.
    exceeded: Option<Box<ExceededLimit>>,
}

impl FileError {
    /// An error about a field, for a cause other than the policy.
    pub(crate) fn new(cause: Cause, field: &str) -> Self {
        Self { cause, field: field.to_owned(), rule: String::new(), import: None, exceeded: None }
    }

    /// The error that a worker reported; `None` if it gave no cause.
    pub(crate) fn from_worker(refusal: FileRefusal) -> Option<Self> {
        match refusal.reason() {
            Cause::Unspecified => None,
            cause => {
                let FileRefusal { field, rule, import, exceeded, .. } = refusal;
                Some(Self { cause, field, rule, import, exceeded: exceeded.map(Box::new) })
            }
        }
    }

    /// Whether the field itself is invalid.
    pub(crate) fn is_invalid_field(&self) -> bool {
        self.cause == Cause::Impossible && !self.field.is_empty()
    }

    /// Whether the worker does not hold the session; another worker may.
    pub(crate) fn is_not_held(&self) -> bool {
        self.cause == Cause::NotHeld
    }

    /// Whether the path leaves the workspace.
    pub(crate) fn leads_out(&self) -> bool {
        self.cause == Cause::LeadsOut
    }

    /// Whether the same call may succeed later.
    pub(crate) fn is_retryable(&self) -> bool {
        matches!(self.cause, Cause::NotHeld | Cause::Busy | Cause::SessionBusy)
    }

    /// The rule or field to record in the audit log; `None` if the error is not a denied access.
    pub(crate) fn denied_by(&self) -> Option<String> {
        match self.cause {
            Cause::Policy => self.rule(),
            Cause::LeadsOut => Some(self.field.clone()),
            _ => None,
        }
    }

    /// The path of the policy rule that forbids the call.
    pub(crate) fn rule(&self) -> Option<String> {
        (self.cause == Cause::Policy).then(|| format!("policy.{}", self.rule))
    }

    /// The text for the caller, with the field.
    pub(crate) fn text(&self) -> String {
        let message = match &self.exceeded {
            Some(exceeded) => exceeded_text(exceeded),
            None => self.message().to_owned(),
        };
        let text = match (self.import(), self.field.is_empty()) {
            (Some((member, _)), _) if !member.is_empty() => format!("member {member:?}: {message}"),
            (_, true) => message,
            (_, false) => format!("{}: {message}", self.field),
        };
        match self.import() {
            None => text,
            Some((_, 0)) => format!("{text}; nothing was imported"),
            Some((_, entries)) => format!("{text}; {entries} imported entries remain"),
        }
    }

    /// The member of an archive at fault, and how many entries of it remain.
    pub(crate) fn import(&self) -> Option<(&str, i64)> {
        self.import.as_ref().map(|import| (import.member.as_str(), import.entries))
    }

    /// The limit of the session that would be exceeded, what it uses, and the maximum.
    pub(crate) fn exceeded(&self) -> Option<(&str, i64, i64)> {
        self.exceeded.as_ref().map(|exceeded| (exceeded.limit.as_str(), exceeded.used, exceeded.max))
    }

    /// The text without the field.
    pub(crate) fn message(&self) -> &'static str {
        match self.cause {
            Cause::NotHeld => "the session is moving to another worker; retry",
            Cause::Absent => "no such file or directory",
            Cause::Exists => "already exists",
            Cause::Directory => "is a directory",
            Cause::NoDirectory => "not a directory, or a path component is not one",
            Cause::NotEmpty => "the directory is not empty",
            Cause::Special => "is a FIFO, socket or device; only regular files and directories are supported",
            Cause::LeadsOut => "the path leaves the workspace",
            Cause::Policy => "forbidden by the session's policy",
            Cause::Permission => "forbidden by the file's permissions",
            Cause::TooLarge => "larger than the maximum file size of this session (16 MiB to edit a file)",
            Cause::DiskFull => "the worker's disk is full",
            Cause::SessionFull => "the session's files exceed its limit; remove some",
            Cause::Changed => "the file was replaced; read it again and retry",
            Cause::TextAbsent => "text to replace not found in the file",
            Cause::TextAmbiguous => "text to replace occurs more than once; extend it or set `replace_all`",
            Cause::Impossible => "not a valid file path",
            Cause::Busy => "too many file calls are open; retry",
            Cause::SessionBusy => "a transactional run is alone in the session; retry when it has ended",
            Cause::HoldsChanges => {
                "the session holds changes of a run; apply or discard them (codelia apply, codelia discard)"
            }
            Cause::TimedOut => "timed out; split the work into smaller calls",
            Cause::ArchiveInvalid => "malformed, incomplete or unsupported archive",
            Cause::ArchiveTooLarge => {
                "exceeds a limit of archives: 200000 entries, 64 GiB, 100 levels, paths of \
                                       4095 bytes, zstd windows of 8 MiB, compression by 1000"
            }
            Cause::Stalled => "the stream stalled; start again",
            Cause::Failed | Cause::Unspecified => "internal error; report the x-request-id to the operator",
        }
    }

    /// The gRPC code and the stable reason.
    pub(super) fn code_and_reason(&self) -> (Code, Reason) {
        match self.cause {
            Cause::NotHeld => (Code::Unavailable, Reason::Unavailable),
            Cause::Absent => (Code::NotFound, Reason::FileNotFound),
            Cause::Exists => (Code::AlreadyExists, Reason::FileExists),
            Cause::Directory => (Code::FailedPrecondition, Reason::IsADirectory),
            Cause::NoDirectory => (Code::FailedPrecondition, Reason::NotADirectory),
            Cause::NotEmpty => (Code::FailedPrecondition, Reason::DirectoryNotEmpty),
            Cause::Special => (Code::FailedPrecondition, Reason::SpecialFile),
            Cause::LeadsOut => (Code::PermissionDenied, Reason::PathLeadsOut),
            Cause::Policy => (Code::PermissionDenied, Reason::PathDenied),
            Cause::Permission => (Code::PermissionDenied, Reason::FilePermission),
            Cause::TooLarge => (Code::ResourceExhausted, Reason::FileTooLarge),
            Cause::DiskFull => (Code::ResourceExhausted, Reason::DiskFull),
            Cause::SessionFull => (Code::ResourceExhausted, Reason::SessionDiskFull),
            Cause::Changed => (Code::FailedPrecondition, Reason::FileChanged),
            Cause::TextAbsent => (Code::FailedPrecondition, Reason::TextNotFound),
            Cause::TextAmbiguous => (Code::FailedPrecondition, Reason::TextAmbiguous),
            Cause::Impossible => (Code::InvalidArgument, Reason::InvalidField),
            Cause::Busy => (Code::ResourceExhausted, Reason::TooManyFileCalls),
            Cause::SessionBusy => (Code::Unavailable, Reason::SessionBusy),
            Cause::HoldsChanges => (Code::FailedPrecondition, Reason::SessionHoldsChanges),
            Cause::TimedOut => (Code::DeadlineExceeded, Reason::FileCallTimeout),
            Cause::ArchiveInvalid => (Code::InvalidArgument, Reason::ArchiveInvalid),
            Cause::ArchiveTooLarge => (Code::ResourceExhausted, Reason::ArchiveTooLarge),
            Cause::Stalled => (Code::Aborted, Reason::StreamStalled),
            Cause::Failed | Cause::Unspecified => (Code::Internal, Reason::Internal),
        }
    }
}

/// What a session uses of a limit, and what to do about it.
fn exceeded_text(exceeded: &ExceededLimit) -> String {
    let ExceededLimit { limit, used, max } = exceeded;
    let unit = if limit == Limit::Inodes.field() { "files" } else { "bytes" };
    format!(
        "the session uses {used} of {max} {unit}; remove files, or create a session with a higher {limit}"
    )
}
