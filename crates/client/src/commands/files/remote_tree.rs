//! Directories of a session. Commands choose the names in them: of a listing only the last part of
//! each path is used, so that nothing outside the requested directory can be named.

use anyhow::{Result, bail};
use codelia_proto::v1::{File, FileKind, ListFilesRequest};

use super::{
    limits::{MAX_DEPTH, MAX_ENTRIES},
    remote_file::join_all,
};
use crate::client::Client;

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

/// Lists `depth` levels of a directory. Directories come before their content.
pub(super) async fn list(
    client: &Client,
    parent: &str,
    path: &str,
    limit: usize,
    depth: i32,
) -> Result<Vec<Entry>> {
    let request = ListFilesRequest {
        parent: parent.to_owned(),
        path: path.to_owned(),
        depth,
        ..Default::default()
    };
    let files = client.list(request, limit).await?;
    // The first file is in the listed directory itself, whose path may have links.
    let first = files.first().map(|file| file.path.clone()).unwrap_or_default();
    let top = first.rsplit_once('/').map_or("", |(top, _)| top);
    let entry = |file: File| Entry { path: names_below(top, &file.path), file };
    Ok(files.into_iter().map(entry).collect())
}

/// The names from a directory to a file; the last name alone if the file is not below it.
fn names_below(directory: &str, path: &str) -> Vec<String> {
    let below = match directory {
        "" => Some(path),
        directory => path.strip_prefix(directory).and_then(|below| below.strip_prefix('/')),
    };
    match below.map(|below| below.split('/').map(str::to_owned).collect::<Vec<_>>()) {
        Some(names) if names.iter().all(|name| !matches!(name.as_str(), "" | "." | "..")) => names,
        _ => vec![path.rsplit('/').next().unwrap_or_default().to_owned()],
    }
}

/// Lists a directory and everything below it. Directories come before their content; links are not
/// followed.
pub(super) async fn walk(client: &Client, parent: &str, root: &str) -> Result<Vec<Entry>> {
    let mut found: Vec<Entry> = Vec::new();
    let mut open: Vec<Vec<String>> = vec![Vec::new()];
    while let Some(directory) = open.pop() {
        let path = join_all(root, &directory);
        // One more shows that there are too many.
        let entries = list(client, parent, &path, MAX_ENTRIES + 1 - found.len(), 1).await?;
        for mut entry in entries {
            entry.path.drain(..entry.path.len() - 1);
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
    fn names_below_a_directory_stay_there() {
        for (directory, path, names) in [
            ("", "a/b", vec!["a", "b"]),
            ("t", "t/a/b", vec!["a", "b"]),
            ("t", "tx/a", vec!["a"]),
            ("t", "t/../a", vec!["a"]),
            ("t", "/etc/passwd", vec!["passwd"]),
            ("", "/etc/passwd", vec!["passwd"]),
        ] {
            assert_eq!(names_below(directory, path), names, "{directory} {path}");
        }
    }

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
