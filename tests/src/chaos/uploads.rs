//! Files that callers upload during the faults and read back afterwards.

use std::{collections::BTreeSet, fs::File, os::unix::fs::FileExt, path::PathBuf};

use anyhow::Result;
use codelia_proto::v1::{ReadFileRequest, Session, WriteFileOpen};
use tokio::{sync::watch, time::sleep};
use tonic::Status;
use tonic_types::StatusExt;

use super::{Findings, load::Callers, plan::Upload};

/// Bytes of an upload; it takes several messages.
const SIZE: usize = 150_000;

/// A file that an api has accepted.
#[derive(Debug, Clone)]
pub(crate) struct Uploaded {
    pub(crate) number: usize,
    /// The index of its session.
    pub(crate) session: usize,
}

/// The path of an upload in its session.
pub(crate) fn path(number: usize) -> String {
    format!("upload-{number}")
}

fn content(number: usize) -> Vec<u8> {
    (0..SIZE).map(|position| ((position / 7 + number * 31) % 251) as u8).collect()
}

impl Callers {
    /// Uploads a file in its round. Returns `None` if the disk is full until the end.
    pub(crate) async fn upload(
        &self,
        upload: Upload,
        session: &str,
        mut round: watch::Receiver<usize>,
    ) -> Result<Option<Uploaded>> {
        round.wait_for(|now| *now > upload.round).await?;
        sleep(upload.delay).await;
        let bytes = content(upload.number);
        let written = self.retry_until("upload a file", upload.number, |client| {
            let path = path(upload.number);
            let open = WriteFileOpen { parent: session.to_owned(), path, ..Default::default() };
            let bytes = &bytes;
            async move { client.write_file(open, bytes).await }
        });
        match written.await? {
            Ok(_) => Ok(Some(Uploaded { number: upload.number, session: upload.session })),
            Err(status) if is_disk_full(&status) => Ok(None),
            Err(status) => anyhow::bail!("upload a file: {status:?}"),
        }
    }

    /// Reads an upload back.
    pub(crate) async fn check_upload(
        &self,
        uploaded: &Uploaded,
        session: &str,
        findings: &mut Findings,
    ) -> Result<()> {
        let read = self.retry_until("read a file", uploaded.number, |client| {
            let path = path(uploaded.number);
            let request =
                ReadFileRequest { parent: session.to_owned(), path, ..Default::default() };
            async move { client.read_file(request).await }
        });
        let found = read.await?.map(|(_, bytes)| bytes);
        check_content(uploaded, found, findings);
        Ok(())
    }
}

/// Changes the first byte of every upload on the disk: a planted defect.
pub(crate) fn change_files(
    roots: &BTreeSet<PathBuf>,
    sessions: &[Session],
    uploads: &[Uploaded],
) -> Result<()> {
    for upload in uploads {
        for root in roots {
            let workspace =
                root.join("sessions").join(&sessions[upload.session].session_id).join("workspace");
            if let Ok(file) = File::options().write(true).open(workspace.join(path(upload.number)))
            {
                file.write_all_at(b"!", 0)?;
            }
        }
    }
    Ok(())
}

fn check_content(uploaded: &Uploaded, found: Result<Vec<u8>, Status>, findings: &mut Findings) {
    let expected = content(uploaded.number);
    let what = match found {
        Ok(found) if found == expected => return,
        Ok(found) => {
            let same =
                found.iter().zip(&expected).take_while(|(left, right)| left == right).count();
            format!("{} bytes that differ from position {same} on", found.len())
        }
        Err(status) => format!("{status:?}"),
    };
    findings.lost.push(format!("{}: {uploaded:?}: {what}", Findings::WRONG_FILE));
}

fn is_disk_full(status: &Status) -> bool {
    status.get_error_details().error_info().is_some_and(|info| info.reason == "DISK_FULL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_and_missing_files_are_found() {
        let uploaded = Uploaded { number: 5, session: 0 };
        let found = |read| {
            let mut findings = Findings::default();
            check_content(&uploaded, read, &mut findings);
            findings.lost.len()
        };
        assert_eq!(found(Ok(content(5))), 0);
        assert_eq!(found(Ok(content(6))), 1);
        assert_eq!(found(Ok(content(5)[1..].to_vec())), 1);
        assert_eq!(found(Err(Status::not_found("gone"))), 1);
    }
}
