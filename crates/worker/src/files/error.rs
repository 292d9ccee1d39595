//! Why a file call is refused, and how that is told to the api.

use codelia_policy::FileDenied;
use codelia_proto::internal::v1::{FileRefusal, FileRefusalReason as Reason};
use codelia_sys::{Errno, resolve_beneath::ResolveError};
use prost::Message;
use tonic::{Code, Status};

/// Why a file call is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// The field of the request at fault.
    field: &'static str,
    /// The rule of the policy that forbids it.
    rule: &'static str,
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Self {
        Self { reason, field: "", rule: "" }
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Self {
        let reason = match errno {
            Errno::NOENT => Reason::Absent,
            Errno::EXIST => Reason::Exists,
            Errno::ISDIR => Reason::Directory,
            Errno::NOTDIR => Reason::NoDirectory,
            Errno::NOTEMPTY => Reason::NotEmpty,
            // Also for what is mounted in the workspace: nothing that a command could have made is.
            Errno::XDEV => Reason::LeadsOut,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Reason::Permission,
            Errno::FBIG => Reason::TooLarge,
            Errno::NOSPC | Errno::DQUOT => Reason::DiskFull,
            Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL | Errno::BUSY => Reason::Impossible,
            Errno::MFILE | Errno::NFILE => Reason::Busy,
            other => {
                tracing::error!(errno = %other, "a file call failed");
                Reason::Failed
            }
        };
        reason.into()
    }
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Self {
        Errno::from_io_error(&error).unwrap_or(Errno::IO).into()
    }
}

impl From<ResolveError> for Refusal {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::OutsideRoot => Reason::LeadsOut.into(),
            ResolveError::Os(errno) => errno.into(),
        }
    }
}

impl From<FileDenied> for Refusal {
    fn from(denied: FileDenied) -> Self {
        Self { rule: denied.rule, ..Reason::Policy.into() }
    }
}

impl Refusal {
    /// The same, with the field at fault.
    pub(crate) fn at(field: &'static str) -> impl Fn(Self) -> Self {
        move |refusal| Self { field, ..refusal }
    }
}

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let Refusal { reason, field, rule } = refusal;
        let details = FileRefusal { reason: reason.into(), field: field.to_owned(), rule: rule.to_owned() };
        Status::with_details(Code::FailedPrecondition, reason.as_str_name(), details.encode_to_vec().into())
    }
}
