//! `codelia approvals watch`: prints approvals as they change, asks for decisions on a terminal,
//! and connects again after a restart of the server.

use std::{
    collections::{HashMap, VecDeque},
    io::IsTerminal,
    time::Duration,
};

use anyhow::Result;
use codelia_proto::v1::{
    Approval, ApprovalScope, ApprovalState, WatchApprovalsRequest, WatchApprovalsResponse,
};
use codelia_telemetry::task;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    sync::mpsc,
};
use tonic::{Code, Status, Streaming};

use super::{Decision, decide, decision, reach, what};
use crate::{
    client::Client,
    error_report,
    output::{self, Output},
    units,
};

/// Between two attempts to connect again.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Decided approvals that are remembered, so that nothing is printed twice.
const MAX_PRINTED: usize = 1000;
const QUESTION: &str =
    "[a]llow once, for the [s]ession, for the [t]enant, [d]eny, or Enter to skip?";
const FILE_QUESTION: &str = "[a]llow once, all files in its [f]older once, for the [s]ession, its [u]ser, its \
                             [p]roject, the [t]enant, with capitals for all files in its folder, [d]eny, or Enter \
                             to skip?";

/// Follows approvals until the process is interrupted.
pub(super) async fn watch(client: &Client, parent: &str, output: Output) -> Result<()> {
    let is_asking =
        !output.is_json() && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
    let mut view = View { lines: is_asking.then(read_lines), ..View::new(client, output) };
    let on_loss = || output::write_note("connection lost, connecting again");
    follow(client, parent, async |stream| view.follow(stream).await, on_loss).await
}

/// Reads approvals, and connects again when the server is restarted. `read` returns why a stream
/// ended; `on_loss` is called once for each loss of the connection.
pub(crate) async fn follow(
    client: &Client,
    parent: &str,
    mut read: impl AsyncFnMut(Streaming<WatchApprovalsResponse>) -> Result<Status>,
    on_loss: impl Fn(),
) -> Result<()> {
    let mut is_connected = true;
    loop {
        let request = WatchApprovalsRequest { parent: parent.to_owned() };
        let status = match client.approvals().watch_approvals(request).await {
            Ok(stream) => {
                is_connected = true;
                read(stream.into_inner()).await?
            }
            Err(status) => status,
        };
        if !is_transient(&status) {
            return Err(status.into());
        }
        if std::mem::replace(&mut is_connected, false) {
            on_loss();
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Whether another call may succeed: the server is restarted, or the connection broke.
fn is_transient(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled | Code::Aborted)
}

/// Lines that the user types.
fn read_lines() -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel(1);
    task::background("answers", async move {
        let mut lines = BufReader::new(tokio::io::stdin()).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            if sender.send(line).await.is_err() {
                return;
            }
        }
    });
    receiver
}

/// Approvals that the user has seen and is asked about.
#[derive(Debug)]
struct View<'a> {
    client: &'a Client,
    output: Output,
    /// Answers of the user, if there is one to ask.
    lines: Option<mpsc::Receiver<String>>,
    /// The printed state of each approval that is pending or was decided since.
    printed: HashMap<String, (ApprovalState, bool)>,
    /// Approvals to ask about; the first was asked.
    pending: VecDeque<Approval>,
}

impl<'a> View<'a> {
    fn new(client: &'a Client, output: Output) -> Self {
        Self { client, output, lines: None, printed: HashMap::new(), pending: VecDeque::new() }
    }

    /// Prints and asks until the stream ends, and returns why it did.
    async fn follow(&mut self, mut stream: Streaming<WatchApprovalsResponse>) -> Result<Status> {
        // The server sends what is pending again.
        self.pending.clear();
        loop {
            tokio::select! {
                response = stream.message() => match response {
                    Ok(Some(response)) => self.show(response.approval.unwrap_or_default())?,
                    Ok(None) => return Ok(Status::unavailable("the server closed the stream")),
                    Err(status) => return Ok(status),
                },
                Some(line) = next_line(&mut self.lines), if !self.pending.is_empty() => {
                    self.answer(line.trim()).await?;
                }
            }
        }
    }

    fn show(&mut self, approval: Approval) -> Result<()> {
        let now = (approval.state(), approval.revoke_time.is_some());
        let is_pending = approval.state() == ApprovalState::Pending;
        let is_new = self.printed.insert(approval.approval_id.clone(), now) != Some(now);
        if is_new {
            self.output.print_message_as(&approval, &line(&approval))?;
        }
        if self.printed.len() > MAX_PRINTED {
            self.printed.retain(|_, (state, _)| *state == ApprovalState::Pending);
        }
        if self.lines.is_none() {
            return Ok(());
        }
        if is_pending {
            self.pending.push_back(approval);
            if self.pending.len() == 1 {
                self.ask();
            }
        } else {
            self.remove(&approval.approval_id);
        }
        Ok(())
    }

    /// Forgets an approval that was decided elsewhere, and asks about the next one if it was asked.
    fn remove(&mut self, id: &str) {
        let was_asked = self.pending.front().is_some_and(|first| first.approval_id == id);
        self.pending.retain(|approval| approval.approval_id != id);
        if was_asked {
            self.ask();
        }
    }

    fn ask(&self) {
        if let Some(approval) = self.pending.front() {
            let question = if approval.path.is_empty() { QUESTION } else { FILE_QUESTION };
            output::write_message(&format!("{}: {question}", approval.approval_id));
        }
    }

    async fn answer(&mut self, line: &str) -> Result<()> {
        let Some(answer) = Answer::parse(line) else {
            self.ask();
            return Ok(());
        };
        let Some(approval) = self.pending.pop_front() else { return Ok(()) };
        let Answer::Decide(decision) = answer else {
            self.ask();
            return Ok(());
        };
        match decide(self.client, approval.name, decision, String::new()).await {
            Ok(decided) => self.show(decided)?,
            Err(error) => error_report::print_about(&approval.approval_id, &error),
        }
        self.ask();
        Ok(())
    }
}

async fn next_line(lines: &mut Option<mpsc::Receiver<String>>) -> Option<String> {
    match lines {
        Some(lines) => lines.recv().await,
        None => std::future::pending().await,
    }
}

/// A line that the user typed.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Decide(Decision),
    Skip,
}

impl Answer {
    fn parse(line: &str) -> Option<Self> {
        let allow = match line {
            "" => return Some(Self::Skip),
            "d" => None,
            "a" | "f" => Some(ApprovalScope::Once),
            "s" | "S" => Some(ApprovalScope::Session),
            "u" | "U" => Some(ApprovalScope::User),
            "p" | "P" => Some(ApprovalScope::Project),
            "t" | "T" => Some(ApprovalScope::Tenant),
            _ => return None,
        };
        // All files of the folder.
        let is_folder = matches!(line, "f" | "S" | "U" | "P" | "T");
        Some(Self::Decide(Decision { allow, reach: reach(is_folder) }))
    }
}

/// One line about an approval.
fn line(approval: &Approval) -> String {
    if approval.state() != ApprovalState::Pending {
        return decision(approval);
    }
    let Approval { approval_id, message, run_id, requested_by, .. } = approval;
    let expires = units::age(approval.expire_time.as_ref());
    let run = if run_id.is_empty() { String::new() } else { format!(", run {run_id}") };
    format!(
        "approval {approval_id} pending: {message} ({}{run}, by key {requested_by}, expires {expires})",
        what(approval)
    )
}

#[cfg(test)]
mod tests {
    use codelia_proto::v1::ApprovalReach;

    use super::*;

    #[test]
    fn only_known_letters_decide() {
        let decided = |allow, reach| Some(Answer::Decide(Decision { allow, reach }));
        let allowed = |scope| decided(Some(scope), ApprovalReach::Unspecified);
        assert_eq!(Answer::parse("a"), allowed(ApprovalScope::Once));
        assert_eq!(Answer::parse("t"), allowed(ApprovalScope::Tenant));
        assert_eq!(Answer::parse("p"), allowed(ApprovalScope::Project));
        let folder = decided(Some(ApprovalScope::User), ApprovalReach::Directory);
        assert_eq!(Answer::parse("U"), folder);
        assert_eq!(Answer::parse("d"), decided(None, ApprovalReach::Unspecified));
        assert_eq!(Answer::parse(""), Some(Answer::Skip));
        for unknown in ["A", "y", "yes", "allow", "as"] {
            assert_eq!(Answer::parse(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn restarts_are_survived_and_refusals_are_not() {
        assert!(is_transient(&Status::unavailable("")));
        assert!(!is_transient(&Status::permission_denied("")));
        assert!(!is_transient(&Status::not_found("")));
    }
}
