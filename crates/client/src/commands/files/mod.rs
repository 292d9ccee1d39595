//! The file commands: `codelia cp`, `cat`, `ls`, `rm`, `mkdir`, `mv`, `export`,
//! `import` and `watch`.

mod archive;
mod change;
mod copy;
mod download;
mod list;
#[cfg(unix)]
mod local_tree;
#[cfg(not(unix))]
#[path = "no_local_tree.rs"]
mod local_tree;
#[cfg(not(unix))]
#[path = "no_partial.rs"]
mod partial;
#[cfg(unix)]
mod partial;
mod progress;
mod remote_tree;
mod resume;
mod upload;
mod watch;

use anyhow::Result;
use codelia_proto::v1::{FileKind, StatFileRequest};
use tonic_types::StatusExt;

use crate::client::Client;

pub(crate) use self::{
    archive::{export, import},
    change::{mkdir, mv, rm},
    copy::{cat, cp},
    list::ls,
    watch::watch,
};

/// What a local file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(not(unix), allow(dead_code, reason = "there are no local trees"))]
enum LocalKind {
    Directory,
    File,
    /// A link or a special file, which is not copied.
    Other,
}

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
    let request = StatFileRequest {
        parent: parent.to_owned(),
        path: path.to_owned(),
        ..StatFileRequest::default()
    };
    match client.files().stat_file(request).await {
        Ok(found) => {
            Ok(found.into_inner().file.is_some_and(|file| file.kind() == FileKind::Directory))
        }
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
