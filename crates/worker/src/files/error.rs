//! Errors of file calls, and how they are sent to the api.

use std::collections::HashMap;

use codelia_policy::{FileDenied, Limit};
use codelia_proto::ERROR_DOMAIN;
use codelia_sys::{Errno, resolve_beneath::ResolveError};
use codelia_types::Reason;
use tokio::task::JoinError;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::disk::{DiskFull, NoRoom};

/// Why a file call failed. [`Reason::Unavailable`] means that this worker does not hold the session
/// under the lease that the call names, and has done nothing.
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

/// How far an import got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImportProgress {
    /// The member of the archive at fault. May be empty.
    pub(crate) member: String,
    /// Number of members that remain in the workspace.
    pub(crate) entries: u64,
}

impl From<Reason> for FileError {
    fn from(reason: Reason) -> Self {
        Self { reason, field: "", rule: "", import: None, full: None }
    }
}

impl From<Errno> for FileError {
    fn from(errno: Errno) -> Self {
        let reason = match errno {
            Errno::NOENT => Reason::FileNotFound,
            Errno::EXIST => Reason::FileExists,
            Errno::ISDIR => Reason::IsADirectory,
            Errno::NOTDIR => Reason::NotADirectory,
            Errno::NOTEMPTY => Reason::DirectoryNotEmpty,
            // Also for mounts inside the workspace: commands cannot make those.
            Errno::XDEV => Reason::PathLeadsOut,
            Errno::ACCESS | Errno::PERM | Errno::ROFS => Reason::FilePermission,
            Errno::FBIG => Reason::FileTooLarge,
            Errno::NOSPC | Errno::DQUOT => Reason::DiskFull,
            Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL | Errno::BUSY => Reason::InvalidField,
            Errno::MFILE | Errno::NFILE => Reason::TooManyFileCalls,
            other => {
                tracing::error!(errno = %other, "file call failed");
                Reason::Internal
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

/// The thread that did the work panicked.
impl From<JoinError> for FileError {
    fn from(panic: JoinError) -> Self {
        tracing::error!(%panic, "file call panicked");
        Reason::Internal.into()
    }
}

impl From<ResolveError> for FileError {
    fn from(error: ResolveError) -> Self {
        match error {
            ResolveError::OutsideRoot => Reason::PathLeadsOut.into(),
            ResolveError::Os(errno) => errno.into(),
        }
    }
}

impl From<DiskFull> for FileError {
    fn from(full: DiskFull) -> Self {
        Self { full: Some(full), ..Reason::SessionDiskFull.into() }
    }
}

impl From<NoRoom> for FileError {
    fn from(error: NoRoom) -> Self {
        match error {
            NoRoom::Full(full) => full.into(),
            NoRoom::NotMeasured => Reason::TooManyFileCalls.into(),
        }
    }
}

impl From<FileDenied> for FileError {
    fn from(denied: FileDenied) -> Self {
        Self { rule: denied.rule, ..Reason::PathDenied.into() }
    }
}

impl FileError {
    /// Adds the field at fault, unless a closer one is known.
    pub(crate) fn at(field: &'static str) -> impl Fn(Self) -> Self {
        move |error| if error.field.is_empty() { Self { field, ..error } } else { error }
    }

    /// Adds how far an import got.
    pub(crate) fn after(self, import: ImportProgress) -> Self {
        Self { import: Some(import), ..self }
    }

    /// The text for the caller, with the field or the member of an archive.
    fn message(&self) -> String {
        let text = match &self.full {
            Some(full) => full_text(full),
            None => text(self.reason).to_owned(),
        };
        let member = self.import.as_ref().map_or("", |import| &import.member);
        let text = match (member, self.field) {
            ("", "") => text,
            ("", field) => format!("{field}: {text}"),
            (member, _) => format!("member {member:?}: {text}"),
        };
        match self.import.as_ref().map(|import| import.entries) {
            None => text,
            Some(0) => format!("{text}; nothing was imported"),
            Some(entries) => format!("{text}; {entries} imported entries remain"),
        }
    }

    /// Details of the error, for programs.
    fn metadata(&self) -> HashMap<String, String> {
        let mut metadata = HashMap::new();
        let mut add = |key: &str, value: String| metadata.insert(key.to_owned(), value);
        if !self.field.is_empty() {
            add("field", self.field.to_owned());
        }
        if self.reason == Reason::PathDenied {
            add("rule", format!("policy.{}", self.rule));
        }
        if self.reason == Reason::QuotaExceeded {
            add("quota", "disk_bytes".to_owned());
        }
        if let Some(DiskFull { limit, used, max }) = &self.full {
            add("limit", limit.field().to_owned());
            add("used", used.to_string());
            add("max", max.to_string());
        }
        if let Some(ImportProgress { member, entries }) = &self.import {
            add("member", member.clone());
            add("imported_entries", entries.to_string());
        }
        metadata
    }
}

/// Text that says how much a session uses of a limit, and what to do about it.
fn full_text(DiskFull { limit, used, max }: &DiskFull) -> String {
    let unit = if *limit == Limit::Inodes { "files" } else { "bytes" };
    let limit = limit.field();
    format!(
        "the session uses {used} of {max} {unit}; remove files, or create a session with a higher {limit}"
    )
}

/// The text for the caller, without the field.
fn text(reason: Reason) -> &'static str {
    match reason {
        Reason::Unavailable => "the session is moving to another worker; retry",
        Reason::FileNotFound => "no such file or directory",
        Reason::FileExists => "already exists",
        Reason::IsADirectory => "is a directory",
        Reason::NotADirectory => "not a directory, or a path component is not one",
        Reason::DirectoryNotEmpty => "the directory is not empty",
        Reason::SpecialFile => {
            "is a FIFO, socket or device; only regular files and directories are supported"
        }
        Reason::PathLeadsOut => "the path leaves the workspace",
        Reason::PathDenied => "forbidden by the session's policy",
        Reason::FilePermission => "forbidden by the file's permissions",
        Reason::FileTooLarge => {
            "larger than the maximum file size of this session (16 MiB to edit a file)"
        }
        Reason::DiskFull => {
            "the worker's disk is full, or has less free than its reserve; remove files (`codelia rm`) or close \
             sessions, or ask an operator for space"
        }
        Reason::QuotaExceeded => {
            "quota `disk_bytes` reached; remove files (`codelia rm`) or close sessions, or ask an operator to \
             raise it"
        }
        Reason::SessionDiskFull => "the session's files exceed its limit; remove some",
        Reason::FileChanged => "the file was replaced; read it again and retry",
        Reason::TextNotFound => "text to replace not found in the file",
        Reason::TextAmbiguous => {
            "text to replace occurs more than once; extend it or set `replace_all`"
        }
        Reason::InvalidField => "not a valid file path",
        Reason::TooManyFileCalls => "too many file calls are open; retry",
        Reason::SessionBusy => {
            "a transactional run is alone in the session; retry when it has ended"
        }
        Reason::SessionHoldsChanges => {
            "the session holds changes of a run; apply or discard them (codelia apply, codelia discard)"
        }
        Reason::FileCallTimeout => "timed out; split the work into smaller calls",
        Reason::ArchiveInvalid => "malformed, incomplete or unsupported archive",
        Reason::ArchiveTooLarge => {
            "exceeds a limit of archives: 200000 entries, 64 GiB, 100 levels, paths of 4095 bytes, zstd windows \
             of 8 MiB, compression by 1000"
        }
        Reason::WatchLimit => {
            "too many directories are watched: at most 4096 for a watch, 8 watches for a session, 16 for a \
             tenant, and limits of the worker"
        }
        Reason::StreamStalled => "the stream stalled; start again",
        _ => "internal error; report the x-request-id to the operator",
    }
}

/// The api passes the reason, the text and the metadata on to the caller.
impl From<FileError> for Status {
    fn from(error: FileError) -> Self {
        let reason = error.reason;
        let details =
            ErrorDetails::with_error_info(reason.as_str(), ERROR_DOMAIN, error.metadata());
        Self::with_error_details(Code::from_i32(reason.code() as i32), error.message(), details)
    }
}
