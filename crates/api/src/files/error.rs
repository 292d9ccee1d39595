//! What workers say of file calls that they refuse, in the words of the API.

use codelia_proto::internal::v1::{FileRefusal, FileRefusalReason as Reason};
use prost::Message;
use tonic::{Code, Status};

use crate::status::ApiError;

/// A file call that the session's worker refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused {
    reason: Reason,
    /// The field at fault.
    pub(crate) field: String,
    /// The rule of the policy, if that forbids it.
    rule: String,
}

impl Refused {
    pub(crate) fn new(reason: Reason, field: &str) -> Self {
        Self { reason, field: field.to_owned(), rule: String::new() }
    }

    /// Reads a refusal; `None` if the status is none, but a failure on the way.
    pub(crate) fn read(status: &Status) -> Option<Self> {
        let refusal = FileRefusal::decode(status.details()).ok()?;
        match refusal.reason() {
            Reason::Unspecified => None,
            reason => Some(Self { reason, field: refusal.field, rule: refusal.rule }),
        }
    }

    /// Whether the worker does not have the session: somebody else may.
    pub(crate) fn is_not_held(&self) -> bool {
        self.reason == Reason::NotHeld
    }

    /// Whether the caller should come again.
    pub(crate) fn may_be_retried(&self) -> bool {
        matches!(self.reason, Reason::NotHeld | Reason::Busy)
    }

    /// The rule or field that an event names, if what was tried is worth one.
    pub(crate) fn tried(&self) -> Option<String> {
        match self.reason {
            Reason::Policy => self.rule(),
            Reason::LeadsOut => Some(self.field.clone()),
            _ => None,
        }
    }

    /// The rule of the policy that forbids it, by its path.
    pub(crate) fn rule(&self) -> Option<String> {
        (self.reason == Reason::Policy).then(|| format!("policy.{}", self.rule))
    }

    pub(crate) fn code(&self) -> Code {
        self.words().0
    }

    pub(crate) fn word(&self) -> &'static str {
        self.words().1
    }

    pub(crate) fn text(&self) -> String {
        let text = self.words().2;
        if self.field.is_empty() { text.to_owned() } else { format!("{}: {text}", self.field) }
    }

    /// Its code, its stable word and its text.
    fn words(&self) -> (Code, &'static str, &'static str) {
        use Code::{FailedPrecondition, PermissionDenied, ResourceExhausted};
        match self.reason {
            Reason::NotHeld => (Code::Unavailable, "UNAVAILABLE", "the session changes its worker"),
            Reason::Absent => (Code::NotFound, "FILE_NOT_FOUND", "there is no such file or directory"),
            Reason::Exists => (Code::AlreadyExists, "FILE_EXISTS", "something is there already"),
            Reason::Directory => (FailedPrecondition, "IS_A_DIRECTORY", "is a directory"),
            Reason::NoDirectory => (
                FailedPrecondition,
                "NOT_A_DIRECTORY",
                "is no directory, or leads through something that is none",
            ),
            Reason::NotEmpty => {
                (FailedPrecondition, "DIRECTORY_NOT_EMPTY", "is a directory that is not empty")
            }
            Reason::Special => (FailedPrecondition, "SPECIAL_FILE", "is a FIFO, a socket or a device"),
            Reason::LeadsOut => (PermissionDenied, "PATH_LEADS_OUT", "leads out of the workspace"),
            Reason::Policy => (PermissionDenied, "PATH_DENIED", "the session's policy forbids it"),
            Reason::Permission => (PermissionDenied, "FILE_PERMISSION", "its permissions forbid it"),
            Reason::TooLarge => (ResourceExhausted, "FILE_TOO_LARGE", "is larger than a file may be here"),
            Reason::DiskFull => (ResourceExhausted, "DISK_FULL", "the worker's disk is full"),
            Reason::Changed => (FailedPrecondition, "FILE_CHANGED", "the file is another one by now"),
            Reason::TextAbsent => {
                (FailedPrecondition, "TEXT_NOT_FOUND", "the text to replace is not in the file")
            }
            Reason::TextAmbiguous => {
                (FailedPrecondition, "TEXT_AMBIGUOUS", "the text to replace is there more than once")
            }
            Reason::Impossible => {
                (Code::InvalidArgument, "INVALID_FIELD", "names no place that a file can have")
            }
            Reason::Busy => (ResourceExhausted, "TOO_MANY_FILE_CALLS", "too many file calls are open"),
            Reason::Stalled => (Code::Aborted, "STREAM_STALLED", "the stream did not go on"),
            Reason::Failed | Reason::Unspecified => (Code::Internal, "INTERNAL", "internal error"),
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        match refused.reason {
            Reason::Impossible if !refused.field.is_empty() => {
                Self::invalid(refused.field.clone(), refused.words().2)
            }
            _ => Self::File(refused),
        }
    }
}
