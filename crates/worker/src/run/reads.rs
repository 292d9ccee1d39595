//! Reads of runs that wait for a person's decision, in `filesystem.mode` dynamic: requests an
//! approval for each, and hands the decision to the sandbox.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};

use codelia_backends::{AskedReads, ReadDecision, ReadRequest, Reader};
use codelia_store::{
    Approval, ApprovalKind, ApprovalReach, ApprovalRequest, ApprovalState, Error, ReadGrant, Store,
};
use codelia_telemetry::task;
use codelia_types::ApprovalId;
use tokio::{
    task::AbortHandle,
    time::{Instant, sleep, timeout},
};

use crate::egress::Subject;

/// How often pending approvals are looked up.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// How long the last statement may take.
const WITHDRAW_TIMEOUT: Duration = Duration::from_secs(10);

/// Has people decide about the reads of a run, as long as this lives.
#[derive(Debug)]
pub(crate) struct DecidedReads(Option<AbortHandle>);

impl DecidedReads {
    /// Lets it end by itself. Call it when the sandbox is gone.
    pub(crate) fn detach(mut self) {
        self.0 = None;
    }
}

impl Drop for DecidedReads {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}

/// Starts to have people decide. `grants` is what was decided before.
pub(crate) fn start(
    store: &Store,
    subject: Subject,
    reads: AskedReads,
    grants: Vec<ReadGrant>,
    wait: Duration,
) -> DecidedReads {
    for grant in grants {
        reads.decide(decision(&grant.path, grant.reach, true));
    }
    let deciding = Deciding { store: store.clone(), subject, reads, wait, pending: HashMap::new() };
    DecidedReads(Some(task::background("read approvals", deciding.run()).abort_handle()))
}

/// The files whose decisions a run waits for.
struct Deciding {
    store: Store,
    subject: Subject,
    reads: AskedReads,
    /// How long a read waits.
    wait: Duration,
    /// The files of pending approvals, and until when to wait if the store cannot be read.
    pending: HashMap<ApprovalId, (PathBuf, Instant)>,
}

impl Deciding {
    /// Runs until the sandbox is gone, then withdraws what nobody decided about.
    async fn run(mut self) {
        loop {
            tokio::select! {
                asked = self.reads.next() => match asked {
                    Some(asked) => self.ask(asked).await,
                    None => break,
                },
                () = sleep(POLL_INTERVAL), if !self.pending.is_empty() => self.poll().await,
            }
        }
        let run = self.subject.run;
        if self.pending.is_empty() {
            return;
        }
        match timeout(WITHDRAW_TIMEOUT, self.store.approval_withdraw(run)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, %run, "cannot withdraw approvals, they expire")
            }
            Err(_) => tracing::warn!(%run, "approvals were not withdrawn in time, they expire"),
        }
    }

    /// Requests an approval. What cannot be asked for is denied.
    async fn ask(&mut self, asked: ReadRequest) {
        let ReadRequest { path, reader } = asked;
        match self.request(&path, reader).await {
            Ok(Some(approval)) => self.settle(&path, &approval),
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, run = %self.subject.run, "cannot request an approval, read denied");
                self.deny(&path);
            }
        }
    }

    /// Requests an approval, unless another run was granted it meanwhile.
    async fn request(&self, path: &Path, reader: Reader) -> Result<Option<Approval>, Error> {
        let Subject { tenant, session, run } = &self.subject;
        let grants = self.store.approval_read_grants(tenant, *session).await?;
        let granted = grants.iter().map(|grant| decision(&grant.path, grant.reach, true));
        let mut granted = granted.filter(|decision| path.starts_with(&decision.path));
        if let Some(decision) = granted.next() {
            self.reads.decide(decision);
            return Ok(None);
        }
        // The sandbox asks only for paths that are text.
        let text = path.to_string_lossy().into_owned();
        let directory = path.parent().unwrap_or(path).display();
        let request = ApprovalRequest {
            tenant: tenant.clone(),
            session: *session,
            run: *run,
            kind: ApprovalKind::FileRead,
            host: String::new(),
            port: 0,
            message: format!("read {text} (directory {directory})"),
            path: text,
            reader: codelia_store::Reader { pid: reader.pid, exe: reader.exe, cwd: reader.cwd },
            timeout: self.wait,
        };
        self.store.approval_request(&request).await.map(Some)
    }

    async fn poll(&mut self) {
        let ids: Vec<ApprovalId> = self.pending.keys().copied().collect();
        match self.store.approvals_decided(&ids).await {
            Ok(decided) => {
                for approval in decided {
                    if let Some((path, _)) = self.pending.remove(&approval.id) {
                        self.settle(&path, &approval);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "cannot read approvals, retrying"),
        }
        let now = Instant::now();
        let late: Vec<_> = self.pending.extract_if(|_, (_, until)| *until < now).collect();
        late.iter().for_each(|(_, (path, _))| self.deny(path));
    }

    /// Hands a decision over, or remembers that there is none yet. What is allowed once is allowed
    /// to the run, and so to its sandbox.
    fn settle(&mut self, path: &Path, approval: &Approval) {
        let reach = approval.reach.unwrap_or(ApprovalReach::File);
        match approval.state {
            ApprovalState::Pending => {
                let until = Instant::now() + self.wait + POLL_INTERVAL * 2;
                self.pending.insert(approval.id, (path.to_owned(), until));
            }
            ApprovalState::Allowed => self.reads.decide(decision(&approval.path, reach, true)),
            ApprovalState::Denied => self.reads.decide(decision(&approval.path, reach, false)),
            ApprovalState::Expired => self.deny(path),
        }
    }

    fn deny(&self, path: &Path) {
        let path = path.to_owned();
        self.reads.decide(ReadDecision { path, is_directory: false, allow: false });
    }
}

/// A decision about a file, or about its directory.
fn decision(path: &str, reach: ApprovalReach, allow: bool) -> ReadDecision {
    let path = Path::new(path);
    match reach {
        ApprovalReach::File => ReadDecision { path: path.to_owned(), is_directory: false, allow },
        ApprovalReach::Directory => {
            let path = path.parent().unwrap_or(path).to_owned();
            ReadDecision { path, is_directory: true, allow }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reach_chooses_file_or_directory() {
        let path = |reach| decision("/opt/a/file", reach, true);
        let file = ReadDecision { path: "/opt/a/file".into(), is_directory: false, allow: true };
        assert_eq!(path(ApprovalReach::File), file);
        let directory = ReadDecision { path: "/opt/a".into(), is_directory: true, allow: true };
        assert_eq!(path(ApprovalReach::Directory), directory);
    }
}
