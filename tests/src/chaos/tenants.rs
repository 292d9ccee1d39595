//! The other tenant: it must not reach anything of the first.

use std::{collections::BTreeSet, future::Future, time::Duration};

use anyhow::Result;
use codelia_proto::v1::{CancelRunRequest, ListRunsRequest, ListSessionsRequest};
use tokio::time::timeout;
use tonic::{Code, Status};

use super::{Findings, load::Callers};
use crate::{Client, shell};

/// The tenant of a session: every fourth belongs to the second.
pub(crate) fn tenant_of(session: usize) -> usize {
    usize::from(session % 4 == 3)
}

const PROBE_TIMEOUT: Duration = Duration::from_secs(8);

impl Callers {
    /// Calls a run and its session with the key of the other tenant. Returns what it reached.
    pub(crate) async fn probe(&self, run: &str, session: &str) -> Vec<String> {
        let mut exposed = Vec::new();
        for client in &self.others {
            let mut calls = client.runs();
            let cancel = CancelRunRequest { name: run.to_owned(), ..Default::default() };
            let reached = [
                ("GetRun", is_reached(client.get_run(run)).await),
                ("WatchRun", is_reached(client.watch(run, 0)).await),
                ("GetSession", is_reached(client.get_session(session)).await),
                (
                    "StartRun",
                    is_reached(client.start(shell(session, "echo intruder >> marks"))).await,
                ),
                ("ReadFile", is_reached(client.get(session, "marks")).await),
                ("WriteFile", is_reached(client.put(session, "intruder", "")).await),
                ("CancelRun", is_reached(calls.cancel_run(cancel)).await),
            ];
            let reached = reached.into_iter().filter(|(_, is_reached)| *is_reached);
            exposed
                .extend(reached.map(|(call, _)| format!("{}: {call} of {run}", Findings::EXPOSED)));
        }
        exposed
    }

    /// Lists everything with the key of the other tenant. Nothing of `sessions` may be in it.
    pub(crate) async fn check_lists(
        &self,
        sessions: &BTreeSet<String>,
        findings: &mut Findings,
    ) -> Result<()> {
        let client = self.others.first().cloned();
        for name in list_all(&client.ok_or_else(|| anyhow::anyhow!("no client"))?).await? {
            if sessions.iter().any(|session| name.starts_with(session.as_str())) {
                findings.exposed.push(format!("{}: list of {name}", Findings::EXPOSED));
            }
        }
        Ok(())
    }
}

/// Whether a call did anything else than fail. Only `NOT_FOUND` and faults are failures.
async fn is_reached<T>(call: impl Future<Output = Result<T, Status>>) -> bool {
    match timeout(PROBE_TIMEOUT, call).await {
        Ok(Err(status)) => match status.code() {
            Code::NotFound
            | Code::Unavailable
            | Code::Unknown
            | Code::Cancelled
            | Code::DeadlineExceeded => false,
            // The connection broke.
            Code::Internal => !status.details().is_empty(),
            _ => true,
        },
        Ok(Ok(_)) => true,
        Err(_) => false,
    }
}

/// The names of all sessions and runs that a client can list.
async fn list_all(client: &Client) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let mut page_token = String::new();
    loop {
        let request = ListSessionsRequest { page_token, page_size: 200, ..Default::default() };
        let page = client.sessions().list_sessions(request).await?.into_inner();
        names.extend(page.sessions.into_iter().map(|session| session.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    loop {
        let parent = "sessions/-".to_owned();
        let request = ListRunsRequest { parent, page_token, page_size: 200, ..Default::default() };
        let page = client.runs().list_runs(request).await?.into_inner();
        names.extend(page.runs.into_iter().map(|run| run.name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            return Ok(names);
        }
    }
}
