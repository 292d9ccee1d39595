//! Errors of file calls, and how they are sent to the api.

use codelia_policy::FileDenied;
use codelia_proto::internal::v1::{ExceededLimit, FileRefusal, FileRefusalReason as Reason, ImportProgress};
use codelia_sys::{Errno, resolve_beneath::ResolveError};
use prost::Message;
use tonic::{Code, Status};

use crate::disk::{DiskFull, NoRoom};

/// Why a file call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FileError {
    pub(crate) reason: Reason,
    /// The field of the request at fault.
    field: &'static str,
    /// The rule of the policy that forbids it.
    rule: &'static str,
    /// How far an import got.
    import: Option<ImportProgress>,
    /// The limit of the session that would be exceeded.
    full: Option<DiskFull>,
}

impl From<Reason> for FileError {
    fn from(reason: Reason) -> Self {
        Self { reason, field: "", rule: "", import: None, full: None }
    }
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        let reason = match errno {
            Errno::NOENT => Reason::Absent,
            Errno::EXIST => Reason::Exists,
            Errno::ISDIR => Reason::Directory,
            Errno::NOTDIR => Reason::NoDirectory,
            Errno::NOTEMPTY => Reason::NotEmpty,
            // Also for mounts inside the workspace: commands cannot make those.
            Errno::XDEV => Reason::LeadsOut,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Reason::Permission,
            Errno::FBIG => Reason::TooLarge,
            Errno::NOSPC | Errno::DQUOT => Reason::DiskFull,
            Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL | Errno::BUSY => Reason::Impossible,
            Errno::MFILE | Errno::NFILE => Reason::Busy,
            other => {
                tracing::error!(errno = %other, "file call failed");
                Reason::Failed
            }
        };
        reason.into()
    }
}

impl From<std::io::Error> for FileError {
    fn from(error: std::io::Error) -> Self {
        Errno::from_io_error(&error).unwrap_or(Errno::IO).into()
    }
}

impl From<ResolveError> for FileError {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::OutsideRoot => Reason::LeadsOut.into(),
            ResolveError::Os(errno) => errno.into(),
        }
    }
}

impl From<DiskFull> for FileError {
    fn from(full: DiskFull) -> Self {
        Self { full: Some(full), ..Reason::SessionFull.into() }
    }
}

impl From<NoRoom> for FileError {
    fn from(error: NoRoom) -> Self {
        match error {
            NoRoom::Full(full) => full.into(),
            NoRoom::NotMeasured => Reason::Busy.into(),
        }
    }
}

impl From<FileDenied> for FileError {
    fn from(denied: FileDenied) -> Self {
        Self { rule: denied.rule, ..Reason::Policy.into() }
    }
}

impl FileError {
    /// Adds the field at fault.
    pub(crate) fn at(field: &'static str) -> impl Fn(Self) -> Self {
        move |error| Self { field, ..error }
    }

    /// Adds how far an import got.
    pub(crate) fn after(self, import: ImportProgress) -> Self {
        Self { import: Some(import), ..self }
    }
}

impl From<FileError> for Status {
    fn from(error: FileError) -> Self {
        let FileError { reason, field, rule, import, full } = error;
        let (field, rule) = (field.to_owned(), rule.to_owned());
        let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        let exceeded = full.map(|full| ExceededLimit {
            limit: full.limit.field().to_owned(),
            used: number(full.used),
            max: number(full.max),
        });
        let details = FileRefusal { reason: reason.into(), field, rule, import, exceeded };
        Status::with_details(Code::FailedPrecondition, reason.as_str_name(), details.encode_to_vec().into())
    }
}
