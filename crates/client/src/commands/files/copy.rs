//! `codelia cp` and `codelia cat`: which file goes where.

use std::{path::Path, process::ExitCode};

use anyhow::{Context, Result, bail, ensure};
use codelia_proto::{
    json::to_json,
    v1::{File, FileKind, MakeDirectoryRequest, ReadFileRequest},
};
use indicatif::ProgressBar;
use serde_json::Value;

use super::{
    download::{Target, download},
    interrupt::or_signal,
    limits::MODE_MASK,
    local_entry::{LocalEntry, LocalKind},
    local_tree::LocalTree,
    progress,
    remote_file::{has_reason, is_directory, join, join_all, size},
    remote_tree, resume,
    upload::{Source, upload},
};
use crate::{
    args::{self, CopyPath, SessionPath},
    client::Client,
    each::Each,
    error_report::AboutFile,
    output::{self, Output},
    resolve,
};

/// Copies files and directories to or from a session.
pub(crate) async fn cp(client: &Client, args: &args::Cp, output: Output) -> Result<ExitCode> {
    use CopyPath::{Local, Session, Stdio};
    let is_remote = |path: &CopyPath| matches!(path, Session(_));
    let to_session = is_remote(&args.destination);
    if args.sources.iter().any(|source| is_remote(source) == to_session) {
        bail!("exactly one of source and destination must be SESSION:PATH");
    }
    ensure!(
        args.sources.len() == 1 || args.destination != Stdio,
        "several files cannot be copied to stdout: use `codelia cat`"
    );
    ensure!(
        !args.resume || args.destination != Stdio && !args.sources.contains(&Stdio),
        "--resume needs files: stdin and stdout cannot be continued"
    );
    let mut copy = Copy { client, args, each: Each::new(output), bar: progress::bar(Some(0)) };
    let on_signal = if args.resume {
        "interrupted; repeat the command to continue"
    } else {
        "interrupted; incomplete files were removed"
    };
    // Without a temporary file a signal may end the program at once, also while stdout is blocked.
    let copied = match &args.destination {
        Local(_) => or_signal(copy.all(), on_signal).await,
        Session(_) | Stdio => copy.all().await,
    };
    copy.bar.finish_and_clear();
    copied?;
    // A single file is one object in JSON, and stdout holds only its content.
    match (args.sources.len() == 1 && !args.recursive, &args.destination) {
        (true, Stdio) => Ok(copy.each.exit_code()),
        (true, _) => copy.each.finish_one(),
        (false, _) => copy.each.finish(),
    }
}

/// Writes files of sessions to stdout.
pub(crate) async fn cat(client: &Client, args: &args::Cat, output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    each.try_all(client, &args.paths, async |path| {
        let parent = resolve::session(client, &path.session).await?;
        let request = read_request(&parent, &path.path);
        let file = download(client, request, Target::Stdout, None, &ProgressBar::hidden()).await;
        Ok((to_json(&file.about_file(path)?)?, String::new()))
    })
    .await?;
    Ok(each.exit_code())
}

struct Copy<'a> {
    client: &'a Client,
    args: &'a args::Cp,
    each: Each,
    bar: ProgressBar,
}

impl Copy<'_> {
    async fn all(&mut self) -> Result<()> {
        match &self.args.destination {
            CopyPath::Session(to) => self.upload_all(to).await,
            CopyPath::Local(to) => self.download_all(Some(to)).await,
            CopyPath::Stdio => self.download_all(None).await,
        }
    }

    async fn upload_all(&mut self, to: &SessionPath) -> Result<()> {
        let parent = resolve::session(self.client, &to.session).await?;
        let named = to.path.is_empty() || to.path.ends_with('/');
        let several = self.args.sources.len() > 1;
        let into = named
            || (several || self.args.recursive)
                && is_directory(self.client, &parent, &to.path).await.about_file(to)?;
        ensure!(into || !several, "{to} is not a directory, and there are several sources");
        for source in &self.args.sources {
            let uploaded = match source {
                CopyPath::Local(path) if path.is_dir() && self.args.recursive => {
                    let name = path.file_name().and_then(|name| name.to_str());
                    let there = match name {
                        Some(name) if into => to.with_path(join(&to.path, name)),
                        _ => to.clone(),
                    };
                    self.upload_tree(path, &parent, &there).await.map(|()| None)
                }
                source => self.upload_file(source, &parent, to, into).await.map(Some),
            };
            self.report(&source.to_string(), uploaded).await?;
        }
        Ok(())
    }

    async fn upload_file(
        &self,
        from: &CopyPath,
        parent: &str,
        to: &SessionPath,
        into: bool,
    ) -> Result<File> {
        let (source, name) = match from {
            CopyPath::Local(path) => {
                (Source::open(path).await?, path.file_name().and_then(|name| name.to_str()))
            }
            _ => (Source::stdin(), None),
        };
        let path = if into {
            join(
                &to.path,
                name.context("the source has no name to keep: give one, such as work:notes.txt")?,
            )
        } else {
            to.path.clone()
        };
        self.bar.inc_length(source.size.unwrap_or_default());
        self.upload(source, parent, &path).await.about_file(&to.with_path(path))
    }

    /// Uploads a file, unless it is complete and the copy continues another one.
    async fn upload(&self, source: Source, parent: &str, path: &str) -> Result<File> {
        if self.args.resume
            && let Some(file) = resume::uploaded(self.client, parent, path, &source).await?
        {
            self.bar.inc(size(&file));
            return Ok(file);
        }
        upload(self.client, source, parent.to_owned(), path.to_owned(), &self.bar).await
    }

    async fn upload_tree(&mut self, from: &Path, parent: &str, to: &SessionPath) -> Result<()> {
        let tree = LocalTree::open(from)?;
        let entries = tree.walk()?;
        let files = entries.iter().filter(|entry| entry.kind == LocalKind::File);
        self.bar.inc_length(files.map(|entry| entry.size).sum());
        self.make_directory(parent, to).await?;
        for entry in &entries {
            let shown = tree.shown(&entry.path).display().to_string();
            let there = to.with_path(join_all(&to.path, &entry.path));
            let uploaded = match entry.kind {
                LocalKind::Directory => self.make_directory(parent, &there).await,
                LocalKind::File => self.upload_entry(&tree, entry, parent, &there).await,
                LocalKind::Other => {
                    self.skip(&shown);
                    continue;
                }
            };
            self.report(&shown, uploaded.map(Some)).await?;
        }
        Ok(())
    }

    async fn upload_entry(
        &self,
        tree: &LocalTree,
        entry: &LocalEntry,
        parent: &str,
        to: &SessionPath,
    ) -> Result<File> {
        let source = Source::from_file(tree.read(&entry.path)?)?;
        self.upload(source, parent, &to.path).await.about_file(to)
    }

    /// Creates a directory in the session, or accepts the one that exists.
    async fn make_directory(&self, parent: &str, to: &SessionPath) -> Result<File> {
        if to.path.is_empty() {
            return Ok(File { kind: FileKind::Directory.into(), ..File::default() });
        }
        let request = MakeDirectoryRequest {
            parent: parent.to_owned(),
            path: to.path.clone(),
            parents: true,
        };
        self.client.call(request).await.about_file(to)
    }

    async fn download_all(&mut self, to: Option<&Path>) -> Result<()> {
        let several = self.args.sources.len() > 1;
        if let Some(to) = to {
            ensure!(
                !several || to.is_dir(),
                "{} is not a directory, and there are several sources",
                to.display()
            );
        }
        for source in &self.args.sources {
            let CopyPath::Session(from) = source else { continue };
            let downloaded = self.download_one(from, to).await;
            self.report(&source.to_string(), downloaded).await?;
        }
        Ok(())
    }

    async fn download_one(
        &mut self,
        from: &SessionPath,
        to: Option<&Path>,
    ) -> Result<Option<File>> {
        let parent = resolve::session(self.client, &from.session).await?;
        if self.args.recursive
            && is_directory(self.client, &parent, &from.path).await.about_file(from)?
        {
            let to = to.context("a directory cannot be copied to stdout")?;
            return self.download_tree(from, &parent, to).await.map(|()| None);
        }
        let target = match to {
            Some(to) => Target::new(to, &from.path, self.args.force)?,
            None => Target::Stdout,
        };
        let file = self.download(read_request(&parent, &from.path), target, None).await;
        file.about_file(from).map(Some)
    }

    async fn download(
        &self,
        request: ReadFileRequest,
        target: Target,
        limit: Option<u64>,
    ) -> Result<File> {
        match target {
            Target::File(file) if self.args.resume => {
                resume::download(self.client, request, file, limit, &self.bar).await
            }
            target => download(self.client, request, target, limit, &self.bar).await,
        }
    }

    async fn download_tree(&mut self, from: &SessionPath, parent: &str, to: &Path) -> Result<()> {
        let entries = remote_tree::walk(self.client, parent, &from.path).await;
        let entries = entries.about_file(from)?;
        let (mut tree, root) = open_destination(to, &from.path)?;
        tree.create_directory(&root, MODE_MASK)?;
        let sizes = entries
            .iter()
            .filter(|entry| entry.file.kind() == FileKind::Regular)
            .map(|entry| size(&entry.file));
        self.bar.inc_length(sizes.sum());
        for entry in &entries {
            let remote = from.with_path(join_all(&from.path, &entry.path));
            let shown = remote.to_string();
            let local = [root.as_slice(), &entry.path].concat();
            let copied = match entry.file.kind() {
                _ if !entry.has_plain_name() => Err(anyhow::anyhow!("the file name is not valid")),
                FileKind::Directory => tree
                    .create_directory(&local, entry.file.mode.cast_unsigned() & MODE_MASK)
                    .map(|()| entry.file.clone()),
                FileKind::Regular => {
                    let limit = size(&entry.file);
                    self.download_entry(&mut tree, &local, parent, &remote, limit).await
                }
                FileKind::Symlink | FileKind::Special | FileKind::Unspecified => {
                    self.skip(&shown);
                    continue;
                }
            };
            self.report(&shown, copied.map(Some)).await?;
        }
        Ok(())
    }

    async fn download_entry(
        &self,
        tree: &mut LocalTree,
        local: &[String],
        parent: &str,
        remote: &SessionPath,
        limit: u64,
    ) -> Result<File> {
        let target = tree.target(local, self.args.force)?;
        let file = self.download(read_request(parent, &remote.path), target, Some(limit)).await;
        let file = file.about_file(remote)?;
        tree.record_file(local)?;
        Ok(file)
    }

    fn skip(&self, name: &str) {
        self.bar.suspend(|| output::write_note(&format!("skipped {name}: a link or special file")));
    }

    /// Reports a copied file. `None` stands for a directory, whose files are reported by
    /// themselves.
    async fn report(&mut self, argument: &str, copied: Result<Option<File>>) -> Result<()> {
        let copied = match copied {
            Ok(None) => return Ok(()),
            copied => self.client.explained(copied).await.map_err(with_hint),
        };
        let json = |file: Option<File>| file.as_ref().map_or(Ok(Value::Null), to_json);
        let copied = copied.and_then(|file| Ok((json(file)?, String::new())));
        self.bar.suspend(|| self.each.report(argument, copied))
    }
}

/// Adds the remedy to the refusal to read a directory as a file.
fn with_hint(error: anyhow::Error) -> anyhow::Error {
    let is_directory = has_reason(&error, "IS_A_DIRECTORY");
    if is_directory { anyhow::anyhow!("it is a directory (copy it with -r)") } else { error }
}

/// Opens the local directory for a copy of the directory `requested`, and returns the names from
/// there to the copy: below an existing directory the name that the user wrote, else the new name.
fn open_destination(to: &Path, requested: &str) -> Result<(LocalTree, Vec<String>)> {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
    if to.is_dir() {
        let root = name(Path::new(requested)).into_iter().collect();
        return Ok((LocalTree::open(to)?, root));
    }
    let parent =
        to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let root = name(to).with_context(|| format!("cannot create {}", to.display()))?;
    Ok((LocalTree::open(parent)?, vec![root]))
}

fn read_request(parent: &str, path: &str) -> ReadFileRequest {
    ReadFileRequest {
        parent: parent.to_owned(),
        path: path.to_owned(),
        ..ReadFileRequest::default()
    }
}
