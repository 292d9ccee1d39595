//! The workspace of one session, as a caller of the file service sees it.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use codelia_proto::v1::*;
use codelia_tests::{Client, Cluster, refusal, within};
use tonic::{Code, Status};

use crate::isolation::isolating;

/// File calls in one session.
#[derive(Debug, Clone, Copy)]
pub(super) struct Workspace<'a> {
    pub(super) client: &'a Client,
    pub(super) session: &'a str,
}

/// How a file gets another name.
#[derive(Debug, Clone, Copy)]
enum Transfer {
    Copy,
    Move,
}

impl<'a> Workspace<'a> {
    pub(super) fn new(client: &'a Client, session: &'a str) -> Self {
        Self { client, session }
    }

    pub(super) async fn stat(self, path: &str) -> Result<File, Status> {
        let request =
            StatFileRequest { parent: self.session.into(), path: path.into(), no_follow: false };
        Ok(self.client.files().stat_file(request).await?.into_inner().file.unwrap_or_default())
    }

    /// Lists a directory, page by page.
    pub(super) async fn list(self, path: &str, page_size: i32) -> Result<Vec<Vec<String>>, Status> {
        self.list_levels(path, page_size, 0).await
    }

    /// Lists a directory and those in it, page by page.
    pub(super) async fn list_levels(
        self,
        path: &str,
        page_size: i32,
        depth: i32,
    ) -> Result<Vec<Vec<String>>, Status> {
        let mut pages = Vec::new();
        let mut page_token = String::new();
        loop {
            let (parent, path) = (self.session.into(), path.into());
            let request = ListFilesRequest { parent, path, page_size, page_token, depth };
            let page = self.client.files().list_files(request).await?.into_inner();
            pages.push(page.files.into_iter().map(|file| file.path).collect());
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return Ok(pages);
            }
        }
    }

    pub(super) async fn make_directory(self, path: &str, parents: bool) -> Result<(), Status> {
        let request =
            MakeDirectoryRequest { parent: self.session.into(), path: path.into(), parents };
        self.client.files().make_directory(request).await.map(drop)
    }

    pub(super) async fn rename(self, from: &str, to: &str, overwrite: bool) -> Result<(), Status> {
        self.transfer(Transfer::Move, from, to, overwrite).await
    }

    pub(super) async fn copy(self, from: &str, to: &str, overwrite: bool) -> Result<(), Status> {
        self.transfer(Transfer::Copy, from, to, overwrite).await
    }

    async fn transfer(
        self,
        how: Transfer,
        from: &str,
        to: &str,
        overwrite: bool,
    ) -> Result<(), Status> {
        let (parent, source_path, destination_path) = (self.session.into(), from.into(), to.into());
        let mut files = self.client.files();
        match how {
            Transfer::Copy => {
                let request = CopyFileRequest { parent, source_path, destination_path, overwrite };
                files.copy_file(request).await.map(drop)
            }
            Transfer::Move => {
                let request = MoveFileRequest { parent, source_path, destination_path, overwrite };
                files.move_file(request).await.map(drop)
            }
        }
    }

    pub(super) async fn remove(self, path: &str, recursive: bool) -> Result<(), Status> {
        let request =
            RemoveFileRequest { parent: self.session.into(), path: path.into(), recursive };
        self.client.files().remove_file(request).await.map(drop)
    }

    /// Replaces text in the file `text`. Returns the number of replacements.
    pub(super) async fn edit(self, old: &str, new: &str, all: bool) -> Result<i64, Status> {
        let request = EditFileRequest {
            parent: self.session.into(),
            path: "text".into(),
            old_text: old.into(),
            new_text: new.into(),
            replace_all: all,
            ..Default::default()
        };
        Ok(self.client.files().edit_file(request).await?.into_inner().replacements)
    }
}

impl Workspace<'_> {
    /// Returns an archive of a directory and its summary.
    pub(super) async fn export(
        self,
        path: &str,
        format: ArchiveFormat,
    ) -> Result<(Vec<u8>, ExportSummary), Status> {
        let (parent, path) = (self.session.into(), path.into());
        let request = ExportFilesRequest { parent, path, format: format.into() };
        let mut stream = self.client.files().export_files(request).await?.into_inner();
        let mut archive = Vec::new();
        while let Some(message) = within("a piece of the archive", stream.message()).await? {
            match message.kind {
                Some(export_files_response::Kind::Data(data)) => archive.extend_from_slice(&data),
                Some(export_files_response::Kind::Summary(summary)) => {
                    return Ok((archive, summary));
                }
                None => return Err(Status::internal("empty message")),
            }
        }
        Err(Status::internal("no summary"))
    }

    /// Unpacks an archive.
    pub(super) async fn import(
        self,
        path: &str,
        archive: &[u8],
        overwrite: bool,
    ) -> Result<ImportFilesResponse, Status> {
        use import_files_request::Kind;
        let open = ImportFilesOpen { parent: self.session.into(), path: path.into(), overwrite };
        let chunks = archive.chunks(1 << 20).map(|chunk| Kind::Data(chunk.to_vec().into()));
        let messages = [Kind::Open(open)].into_iter().chain(chunks);
        let messages: Vec<_> = messages.chain([Kind::Finish(ImportFilesFinish {})]).collect();
        let messages = messages.into_iter().map(|kind| ImportFilesRequest { kind: Some(kind) });
        let mut files = self.client.files();
        Ok(within("import", files.import_files(tokio_stream::iter(messages))).await?.into_inner())
    }
}

/// Incompressible bytes, the same in every test run.
pub(super) fn bytes(count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(count).collect()
}

pub(super) fn open(session: &str, path: &str) -> WriteFileOpen {
    WriteFileOpen { parent: session.to_owned(), path: path.to_owned(), ..Default::default() }
}

pub(super) fn read(session: &str, path: &str) -> ReadFileRequest {
    ReadFileRequest { parent: session.to_owned(), path: path.to_owned(), ..Default::default() }
}

/// Returns the code and reason of an answer, to compare with [`refused`].
pub(super) fn outcome<T>(answer: Result<T, Status>) -> (Code, String) {
    match answer {
        Ok(_) => (Code::Ok, String::new()),
        Err(status) => {
            let refusal = refusal(&status);
            (refusal.code, refusal.reason)
        }
    }
}

pub(super) fn refused(code: Code, reason: &str) -> (Code, String) {
    (code, reason.to_owned())
}

/// Returns the host directory of a session's files.
pub(super) fn directory(cluster: &Cluster, session: &Session) -> Result<PathBuf> {
    let found = cluster.session_directories()?;
    let is_its =
        |path: &PathBuf| path.parent().is_some_and(|above| above.ends_with(&session.session_id));
    found.into_iter().find(is_its).context("the session's directory")
}

/// A session in mode `bwrap`, and a host directory with a secret outside of it.
pub(super) struct Isolated {
    pub(super) cluster: Cluster,
    pub(super) client: Client,
    pub(super) session: Session,
    pub(super) directory: PathBuf,
    pub(super) outside: PathBuf,
}

impl Isolated {
    /// Returns `None` if mode `bwrap` does not work here.
    pub(super) async fn start() -> Result<Option<Self>> {
        let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(None) };
        let client = cluster.tenant("a").await?;
        let session = client.session().await?;
        client.put(&session.name, "inside", "inside").await?;
        let outside = cluster.directory().join("outside");
        fs::create_dir(&outside)?;
        fs::write(outside.join("f"), "outside")?;
        let directory = directory(&cluster, &session)?;
        Ok(Some(Self { cluster, client, session, directory, outside }))
    }
}
