//! Files of sessions: their paths, sizes and whether they exist.

use anyhow::Result;
use codelia_proto::v1::{File, FileKind, StatFileRequest};
use tonic_types::StatusExt;

use crate::client::Client;

pub(super) const NO_FILE: &str = "the server sent no file";

/// The file at a path in a session; `None` if there is none. Links are followed.
pub(super) async fn find(client: &Client, parent: &str, path: &str) -> Result<Option<File>> {
    let request =
        StatFileRequest { parent: parent.to_owned(), path: path.to_owned(), no_follow: false };
    match client.call(request).await {
        Err(error) if has_reason(&error, "FILE_NOT_FOUND") => Ok(None),
        found => found.map(Some),
    }
}

/// Whether the path in the session is a directory. A missing one is not.
pub(super) async fn is_directory(client: &Client, parent: &str, path: &str) -> Result<bool> {
    let is_directory = |file: File| file.kind() == FileKind::Directory;
    Ok(path.is_empty() || find(client, parent, path).await?.is_some_and(is_directory))
}

/// Whether the server refused a call for this reason.
pub(super) fn has_reason(error: &anyhow::Error, reason: &str) -> bool {
    let details = error.downcast_ref::<tonic::Status>().and_then(StatusExt::get_details_error_info);
    details.is_some_and(|info| info.reason == reason)
}

/// Joins a path in a session and a name.
pub(super) fn join(path: &str, name: &str) -> String {
    match path.trim_end_matches('/') {
        "" if path.is_empty() => name.to_owned(),
        path => format!("{path}/{name}"),
    }
}

/// Joins a path in a session and the names below it.
pub(super) fn join_all(path: &str, names: &[String]) -> String {
    names.iter().fold(path.to_owned(), |path, name| join(&path, name))
}

/// The size of a file in bytes, as the server says.
pub(super) fn size(file: &File) -> u64 {
    u64::try_from(file.size_bytes).unwrap_or_default()
}
