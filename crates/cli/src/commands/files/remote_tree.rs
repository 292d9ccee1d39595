//! Directories of a session. Commands choose the names in them: of a listing only the last part of
//! each path is used, so that nothing outside the requested directory can be named.

use anyhow::{Result, bail};
use codelia_proto::v1::{File, FileKind, ListFilesRequest};

use super::{MAX_DEPTH, MAX_ENTRIES, join};
use crate::client::Client;

/// Files requested per page.
const PAGE_SIZE: i32 = 1000;

/// A file in a listed directory.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// Names from the listed directory to the file.
    pub(super) path: Vec<String>,
    pub(super) file: File,
}

impl Entry {
    /// Whether the file can be requested: its name is valid UTF-8 and one path component.
    pub(super) fn has_plain_name(&self) -> bool {
        self.path.last().is_some_and(|name| is_plain(name))
    }
}

fn is_plain(name: &str) -> bool {
    // The server shows bytes that are not UTF-8 as U+FFFD.
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0', '\u{fffd}'])
}

/// Lists a directory.
pub(super) async fn list(client: &Client, parent: &str, path: &str, limit: usize) -> Result<Vec<Entry>> {
    let (mut entries, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListFilesRequest {
            parent: parent.to_owned(),
            path: path.to_owned(),
            page_size: PAGE_SIZE,
            page_token,
        };
        let page = client.files().list_files(request).await?.into_inner();
        let is_last = page.next_page_token.is_empty() || page.files.is_empty();
        entries.extend(page.files.into_iter().map(|file| {
            let name = file.path.rsplit('/').next().unwrap_or_default().to_owned();
            Entry { path: vec![name], file }
        }));
        if is_last || entries.len() >= limit {
            entries.truncate(limit);
            return Ok(entries);
        }
        page_token = page.next_page_token;
    }
}

/// Lists a directory and everything below it. Directories come before their content; links are not
/// followed.
pub(super) async fn walk(client: &Client, parent: &str, root: &str) -> Result<Vec<Entry>> {
    let mut found: Vec<Entry> = Vec::new();
    let mut open: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(directory) = open.pop() {
        let path = directory.iter().fold(root.to_owned(), |path, name| join(&path, name));
        // One more shows that there are too many.
        let entries = list(client, parent, &path, MAX_ENTRIES + 1 - found.len()).await?;
        for mut entry in entries {
            entry.path.splice(..0, directory.iter().cloned());
            if entry.file.kind() == FileKind::Directory && entry.has_plain_name() {
                if entry.path.len() >= MAX_DEPTH {
                    bail!("{} is deeper than {MAX_DEPTH} directories", entry.path.join("/"));
                }
                open.push(entry.path.clone());
            }
            found.push(entry);
        }
        if found.len() > MAX_ENTRIES {
            bail!("the directory has more than {MAX_ENTRIES} entries: use a smaller one, or `tar`");
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_names_are_not_requested() {
        for hostile in ["", ".", "..", "a/b", "/etc", "a\0", "\u{fffd}"] {
            assert!(!is_plain(hostile), "{hostile:?}");
        }
        for plain in ["a", "...", "a b", "-r", "é", "\u{1b}[2J", "..a"] {
            assert!(is_plain(plain), "{plain:?}");
        }
    }
}
