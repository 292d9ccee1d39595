//! `codelia ls`.

use std::path::Path;

use anyhow::{Result, bail, ensure};
use codelia_proto::v1::{File, FileKind, StatFileRequest};

use super::{
    limits::{MAX_DEPTH, MAX_ENTRIES},
    remote_file::has_reason,
    remote_tree::{self, Entry},
};
use crate::{
    args::{self, SessionPath},
    client::Client,
    error_report::AboutFile,
    output::{Output, json_array, table, write_line},
    resolve, units,
};

/// [`MAX_DEPTH`], as a request has it.
const MAX_LEVELS: i32 = 100;

/// Lists a directory of a session, or shows one file.
pub(crate) async fn ls(client: &Client, args: &args::Ls, output: Output) -> Result<()> {
    let SessionPath { session, path } = &args.path;
    let parent = resolve::session(client, session).await?;
    let listed = if args.recursive {
        // One more shows that there are too many.
        let limit = args.limit.min(MAX_ENTRIES + 1);
        let depth = args.depth.unwrap_or(MAX_LEVELS);
        let tree = remote_tree::list(client, &parent, path, limit, depth).await;
        tree.and_then(|tree| check_size(tree, args.depth))
    } else {
        remote_tree::list(client, &parent, path, args.limit, 1).await
    };
    let mut entries = match listed {
        Err(error) if has_reason(&error, "NOT_A_DIRECTORY") => {
            let request = StatFileRequest { parent, path: path.clone(), no_follow: false };
            vec![Entry::alone(client.call(request).await.about_file(&args.path)?)]
        }
        listed => listed.about_file(&args.path)?,
    };
    entries.truncate(args.limit);
    match output {
        Output::Json => output.print(&json_array(entries.iter().map(|entry| &entry.file))?, ""),
        Output::Text => {
            write_line(&table(&["MODE", "SIZE", "MODIFIED", "NAME"], entries.iter().map(row)))
        }
    }
}

/// Fails if the listing is not complete.
fn check_size(tree: Vec<Entry>, depth: Option<i32>) -> Result<Vec<Entry>> {
    ensure!(
        tree.len() <= MAX_ENTRIES,
        "the directory has more than {MAX_ENTRIES} entries: use a smaller one"
    );
    let is_cut =
        |entry: &&Entry| entry.path.len() >= MAX_DEPTH && entry.file.kind() == FileKind::Directory;
    match tree.iter().find(is_cut) {
        Some(entry) if depth.is_none() => {
            bail!("{} is deeper than {MAX_DEPTH} directories", entry.path.join("/"))
        }
        _ => Ok(tree),
    }
}

impl Entry {
    /// A file that is listed by itself.
    fn alone(file: File) -> Self {
        let name =
            Path::new(&file.path).file_name().unwrap_or_default().to_string_lossy().into_owned();
        Self { path: vec![name], file }
    }
}

fn row(entry: &Entry) -> Vec<String> {
    let name = entry.path.join("/");
    let file = &entry.file;
    let name = match file.kind() {
        FileKind::Directory => format!("{name}/"),
        FileKind::Symlink => format!("{name} -> {}", file.link_target),
        FileKind::Regular | FileKind::Special | FileKind::Unspecified => name,
    };
    vec![
        format!("{:04o}", file.mode),
        file.size_bytes.to_string(),
        units::age(file.modify_time.as_ref()),
        name,
    ]
}
