//! The file commands: `codelia cp`, `cat`, `ls`, `rm`, `mkdir`, `mv`, `export`,
//! `import` and `watch`.

mod archive;
mod change;
mod copy;
mod download;
mod list;
mod local_tree;
mod progress;
mod remote_tree;
mod resume;
mod upload;
mod watch;

use anyhow::Result;
use codelia_proto::v1::{File, FileKind, StatFileRequest};
use serde_json::{Value, json};
use tonic_types::StatusExt;

use crate::{client::Client, record};

pub(crate) use self::{
    archive::{export, import},
    change::{mkdir, mv, rm},
    copy::{cat, cp},
    list::ls,
    watch::watch,
};

/// Neither set-user-id, nor set-group-id, nor sticky.
const MODE_MASK: u32 = 0o777;
/// Entries of a directory that is copied or listed recursively, and its depth.
const MAX_ENTRIES: usize = 100_000;
const MAX_DEPTH: usize = 100;
const NO_FILE: &str = "the server sent no file";

/// Whether the path in the session is a directory. A missing one is not.
async fn is_directory(client: &Client, parent: &str, path: &str) -> Result<bool> {
    if path.is_empty() {
        return Ok(true);
    }
    let request =
        StatFileRequest { parent: parent.to_owned(), path: path.to_owned(), ..StatFileRequest::default() };
    match client.files().stat_file(request).await {
        Ok(found) => Ok(found.into_inner().file.is_some_and(|file| file.kind() == FileKind::Directory)),
        Err(status) if has_reason(&status, "FILE_NOT_FOUND") => Ok(false),
        Err(status) => Err(status.into()),
    }
}

fn has_reason(status: &tonic::Status, reason: &str) -> bool {
    status.get_details_error_info().is_some_and(|info| info.reason == reason)
}

/// Joins a path in a session and a name.
fn join(path: &str, name: &str) -> String {
    match path.trim_end_matches('/') {
        "" if path.is_empty() => name.to_owned(),
        path => format!("{path}/{name}"),
    }
}

fn to_json(file: &File) -> Value {
    let kind = match file.kind() {
        FileKind::Regular => "regular",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Special => "special",
        FileKind::Unspecified => "unknown",
    };
    json!({
        "path": file.path,
        "kind": kind,
        "size_bytes": file.size_bytes,
        "modify_time": record::timestamp(file.modify_time.as_ref()),
        "mode": format!("{:04o}", file.mode),
        "etag": file.etag,
        "link_target": Some(&file.link_target).filter(|target| !target.is_empty()),
    })
}
