//! Validation of file requests, field by field. Pure.

use std::{
    fmt,
    path::{Component, Path},
    str::FromStr,
};

use codelia_policy::WORKSPACE;
use codelia_proto::v1;

use crate::error::ApiError;

/// The kernel's limit for a path.
const MAX_PATH: usize = 4095;
/// The kernel's limit for a path component.
const MAX_COMPONENT: usize = 255;
const MAX_MODE: i32 = 0o777;
const MAX_ETAG: usize = 128;
/// Levels of a listing.
const MAX_DEPTH: i32 = 100;
/// Maximum bytes of one chunk of a file, or of a text to replace.
pub(crate) const MAX_DATA: usize = 1024 * 1024;

type Checked<T> = Result<T, ApiError>;

/// A request about files of a session.
pub(crate) trait FileRequest: Sized {
    /// The session, as the caller named it.
    fn parent(&self) -> &str;

    /// The paths that it names.
    fn paths(&self) -> Vec<&str>;

    /// Validates the request and normalizes its paths.
    fn checked(self) -> Checked<Self>;
}

macro_rules! file_requests {
    ($($request:ident($($path:ident),+) $check:expr;)+) => {$(
        impl FileRequest for v1::$request {
            fn parent(&self) -> &str {
                &self.parent
            }

            fn paths(&self) -> Vec<&str> {
                vec![$(&self.$path),+]
            }

            fn checked(self) -> Checked<Self> {
                $check(self)
            }
        }
    )+};
}

file_requests! {
    WriteFileOpen(path) open;
    ImportFilesOpen(path) import;
    ReadFileRequest(path) read;
    ExportFilesRequest(path) export;
    EditFileRequest(path) edit;
    StatFileRequest(path) |request: Self| Ok(Self { path: path("path", &request.path)?, ..request });
    MakeDirectoryRequest(path) |request: Self| Ok(Self { path: path("path", &request.path)?, ..request });
    RemoveFileRequest(path) |request: Self| Ok(Self { path: path("path", &request.path)?, ..request });
    WatchFilesRequest(path) |request: Self| Ok(Self { path: directory("path", &request.path)?, ..request });
    ListFilesRequest(path) |request: Self| {
        let depth = depth(request.depth)?;
        Ok(Self { path: directory("path", &request.path)?, depth, ..request })
    };
    MoveFileRequest(source_path, destination_path) |request: Self| Ok(Self {
        source_path: path("source_path", &request.source_path)?,
        destination_path: path("destination_path", &request.destination_path)?,
        ..request
    });
    CopyFileRequest(source_path, destination_path) |request: Self| Ok(Self {
        source_path: path("source_path", &request.source_path)?,
        destination_path: path("destination_path", &request.destination_path)?,
        ..request
    });
}

/// Validates a path in the workspace; returns it relative and normalized.
fn path(field: &str, text: &str) -> Checked<String> {
    if text.is_empty() {
        return Err(ApiError::invalid(field, "must not be empty"));
    }
    directory(field, text)
}

/// Like [`path`]; empty means the workspace itself.
fn directory(field: &str, text: &str) -> Checked<String> {
    let invalid = |message: String| Err(ApiError::invalid(field, message));
    if text.len() > MAX_PATH {
        return invalid(format!("maximum is {MAX_PATH} bytes"));
    }
    if text.contains('\0') {
        return invalid("must not contain NUL bytes".to_owned());
    }
    let relative = match Path::new(text).strip_prefix(WORKSPACE) {
        Ok(relative) => relative,
        Err(_) if text.starts_with('/') => {
            return invalid(format!("must be relative or start with {WORKSPACE}"));
        }
        Err(_) => Path::new(text),
    };
    let mut names = Vec::new();
    for component in relative.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(name) if name.len() > MAX_COMPONENT => {
                return invalid(format!("maximum is {MAX_COMPONENT} bytes per path component"));
            }
            Component::Normal(name) => names.push(name.to_string_lossy()),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return invalid("must not contain `..`".to_owned());
            }
        }
    }
    Ok(names.join("/"))
}

/// Whether a path leaves the workspace by its text alone: it is absolute and elsewhere, or has more
/// `..` than directories before them.
pub(crate) fn leaves_workspace(text: &str) -> bool {
    let path = Path::new(text);
    let relative = path.strip_prefix(WORKSPACE).unwrap_or(path);
    let mut depth = 0_usize;
    for component in relative.components() {
        match component {
            Component::CurDir => {}
            Component::Normal(_) => depth += 1,
            Component::ParentDir if depth > 0 => depth -= 1,
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => return true,
        }
    }
    false
}

fn etag(text: &str) -> Checked<()> {
    if text.len() <= MAX_ETAG && text.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(())
    } else {
        Err(ApiError::invalid("etag", "not an etag of a previous response"))
    }
}

fn check_size(field: &str, bytes: &[u8]) -> Checked<()> {
    if bytes.len() > MAX_DATA {
        return Err(ApiError::invalid(field, format!("maximum is {MAX_DATA} bytes")));
    }
    Ok(())
}

/// Validates the first message of a write; the paths of its fields start with `open`.
fn open(mut wire: v1::WriteFileOpen) -> Checked<v1::WriteFileOpen> {
    wire.path = path("path", &wire.path)?;
    etag(&wire.etag)?;
    if wire.mode.is_some_and(|mode| !(1..=MAX_MODE).contains(&mode)) {
        return Err(ApiError::invalid("mode", "must be 1 to 0o777"));
    }
    Ok(wire)
}

/// Validates the size of a chunk.
pub(crate) fn data(bytes: &[u8]) -> Checked<()> {
    check_size("data", bytes)
}

/// Validates a request to read a file.
fn read(mut wire: v1::ReadFileRequest) -> Checked<v1::ReadFileRequest> {
    wire.path = path("path", &wire.path)?;
    if wire.offset < 0 {
        return Err(ApiError::invalid("offset", "must not be negative"));
    }
    if wire.length.is_some_and(|length| length <= 0) {
        return Err(ApiError::invalid("length", "must be more than zero"));
    }
    Ok(wire)
}

/// Validates the number of levels of a listing.
fn depth(depth: i32) -> Checked<i32> {
    if (0..=MAX_DEPTH).contains(&depth) {
        Ok(depth.max(1))
    } else {
        Err(ApiError::invalid("depth", format!("must be 0 to {MAX_DEPTH}")))
    }
}

/// Validates a request to export a directory.
fn export(mut wire: v1::ExportFilesRequest) -> Checked<v1::ExportFilesRequest> {
    wire.path = directory("path", &wire.path)?;
    let format = v1::ArchiveFormat::try_from(wire.format);
    format.map_err(|_| ApiError::invalid("format", "unknown format"))?;
    Ok(wire)
}

/// Validates the first message of an import; the paths of its fields start with `open`.
fn import(mut wire: v1::ImportFilesOpen) -> Checked<v1::ImportFilesOpen> {
    wire.path = directory("path", &wire.path)?;
    Ok(wire)
}

/// Validates a request to edit a file.
fn edit(mut wire: v1::EditFileRequest) -> Checked<v1::EditFileRequest> {
    wire.path = path("path", &wire.path)?;
    etag(&wire.etag)?;
    if wire.old_text.is_empty() {
        return Err(ApiError::invalid("old_text", "must not be empty"));
    }
    check_size("old_text", &wire.old_text)?;
    check_size("new_text", &wire.new_text)?;
    Ok(wire)
}

/// The path in the listed directory where a page ends: bytes that need not be UTF-8.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NameCursor(pub(crate) Vec<u8>);

impl fmt::Display for NameCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl FromStr for NameCursor {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        // The worker enters no directory with a longer path.
        if text.len() > 2 * (MAX_PATH + 1 + MAX_COMPONENT) {
            return Err(());
        }
        hex::decode(text).map(Self).map_err(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_become_relative_to_workspace() {
        for (given, expected) in [
            ("a/b", "a/b"),
            ("./a//b/", "a/b"),
            ("/workspace/a", "a"),
            ("/workspace", ""),
            ("/workspace/", ""),
            (".", ""),
            ("workspace", "workspace"),
            ("a..b/...", "a..b/..."),
        ] {
            assert_eq!(path("path", given).as_deref(), Ok(expected), "{given}");
        }
        assert_eq!(directory("path", "").as_deref(), Ok(""));
    }

    #[test]
    fn invalid_paths_are_rejected_by_field() {
        let (long, deep) = ("x".repeat(256), "a/".repeat(2048));
        for bad in [
            "",
            "/",
            "/etc/passwd",
            "/workspacex",
            "..",
            "a/../b",
            "/workspace/../etc",
            "a\0",
            &long,
            &deep,
        ] {
            assert!(
                path("target", bad).is_err_and(|error| error.invalid_field() == Some("target")),
                "{bad}"
            );
        }
    }

    #[test]
    fn only_paths_that_lead_out_leave_the_workspace() {
        for out in
            ["..", "../x", "a/../../b", "/etc/passwd", "/workspacex", "/workspace/../etc", "/"]
        {
            assert!(leaves_workspace(out), "{out}");
        }
        for inside in
            ["", ".", "a", "a/../b", "/workspace", "/workspace/a", "...", "a..b", "missing\0"]
        {
            assert!(!leaves_workspace(inside), "{inside}");
        }
    }

    #[test]
    fn cursor_holds_any_name() {
        for name in [&b"a"[..], b"\xff\x00x", b""] {
            let cursor = NameCursor(name.to_vec());
            assert_eq!(cursor.to_string().parse(), Ok(cursor));
        }
        for bad in ["x", "0", "zz", "é", &"00".repeat(MAX_PATH + MAX_COMPONENT + 2)] {
            assert!(bad.parse::<NameCursor>().is_err(), "{bad}");
        }
    }

    #[test]
    fn values_out_of_range_are_rejected_by_field() {
        let field = |error: ApiError| error.invalid_field().unwrap().to_owned();
        let write =
            |mode| v1::WriteFileOpen { path: "a".into(), mode: Some(mode), ..Default::default() };
        assert_eq!(field(open(write(0)).unwrap_err()), "mode");
        assert_eq!(field(open(write(0o1000)).unwrap_err()), "mode");
        assert_eq!(field(open(write(-1)).unwrap_err()), "mode");
        let read_at = |offset, length| v1::ReadFileRequest {
            path: "a".into(),
            offset,
            length,
            ..Default::default()
        };
        assert_eq!(field(read(read_at(-1, None)).unwrap_err()), "offset");
        assert_eq!(field(read(read_at(0, Some(0))).unwrap_err()), "length");
        let nothing = v1::EditFileRequest { path: "a".into(), ..Default::default() };
        assert_eq!(field(edit(nothing).unwrap_err()), "old_text");
        assert_eq!(field(data(&vec![0; MAX_DATA + 1]).unwrap_err()), "data");
    }
}
