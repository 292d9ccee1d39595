//! Finds the object that an argument names: by resource name, id, alias or display name, or by the
//! start of an id if only one object has it.

use std::ops::ControlFlow;

use anyhow::{Result, bail};
use codelia_proto::v1::{
    ApprovalFilter, GetSessionRequest, Key, ListApprovalsRequest, ListKeysRequest, ListRunsRequest,
    ListSessionsRequest, Session,
};
use tonic::Code;

use crate::{
    client::{ALL_SESSIONS, Client, List, resource_name, run_name, session_name},
    ids,
};

/// Length of an id as text.
const ID_CHARS: usize = 36;
/// Shortest accepted start of an id.
const MIN_PREFIX_CHARS: usize = 4;
/// Objects that a search reads at most.
const MAX_SEARCHED: usize = 20_000;
/// Candidates that a message lists.
const MAX_LISTED: usize = 10;

/// Returns the resource name of a session given by resource name, id, alias or start of its id.
pub(crate) async fn session(client: &Client, text: &str) -> Result<String> {
    let name = session_name(text);
    if !is_prefix(text) {
        return Ok(name);
    }
    // An alias that looks like the start of an id names its session.
    match client.sessions().get_session(GetSessionRequest { name: name.clone() }).await {
        Ok(_) => return Ok(name),
        Err(status) if status.code() == Code::NotFound => {}
        Err(status) => return Err(status.into()),
    }
    let id = |session: Session| session.session_id;
    let found = search(client, "session", text, ListSessionsRequest::default(), id);
    Ok(session_name(&found.await?))
}

/// Returns the parent of what is listed: a session, or all sessions if none is given.
pub(crate) async fn parent(client: &Client, given: Option<&str>) -> Result<String> {
    match given {
        Some(text) => session(client, text).await,
        None => Ok(ALL_SESSIONS.to_owned()),
    }
}

/// Returns the resource name of a run given by resource name, id or start of its id.
pub(crate) async fn run(client: &Client, text: &str) -> Result<String> {
    if text.contains('/') || is_id(text) {
        return Ok(run_name(text));
    }
    if !is_prefix(text) {
        bail!(
            "run {text:?} not found: expected a run's id, or at least its first {MIN_PREFIX_CHARS} characters \
             (`codelia ps --all` lists runs)"
        );
    }
    let request = ListRunsRequest { parent: ALL_SESSIONS.to_owned(), ..Default::default() };
    let found = search(client, "run", text, request, |run| run.run_id);
    Ok(run_name(&found.await?))
}

/// The object that an argument names, as a resource name.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RunOrSession {
    Run(String),
    Session(String),
}

/// Finds a run by resource name, id or start of its id, or a session by resource name, id or alias.
/// An alias that looks like the start of an id names its session.
pub(crate) async fn run_or_session(client: &Client, text: &str) -> Result<RunOrSession> {
    if text.contains("/runs/") {
        return Ok(RunOrSession::Run(run_name(text)));
    }
    let session = session_name(text);
    match client.sessions().get_session(GetSessionRequest { name: session.clone() }).await {
        Ok(_) => return Ok(RunOrSession::Session(session)),
        // No alias looks like this, or no session has it.
        Err(status) if matches!(status.code(), Code::NotFound | Code::InvalidArgument) => {}
        Err(status) => return Err(status.into()),
    }
    if !is_id(text) && !is_prefix(text) {
        bail!(
            "{text:?} is neither a session nor a run (`codelia session list` and `codelia ps --all` list them)"
        );
    }
    run(client, text).await.map(RunOrSession::Run)
}

/// Returns the resource name of an approval given by resource name, id or start of its id.
pub(crate) async fn approval(client: &Client, text: &str) -> Result<String> {
    if text.contains('/') || is_id(text) {
        return Ok(resource_name("approvals", text));
    }
    if !is_prefix(text) {
        bail!(
            "approval {text:?} not found: expected its id, or at least its first {MIN_PREFIX_CHARS} characters \
             (`codelia approvals list --all` lists approvals)"
        );
    }
    let request = ListApprovalsRequest {
        parent: ALL_SESSIONS.to_owned(),
        filter: ApprovalFilter::All.into(),
        ..Default::default()
    };
    let found = search(client, "approval", text, request, |approval| approval.approval_id);
    Ok(resource_name("approvals", &found.await?))
}

/// Returns the resource name of a key of `tenant` given by resource name, id, display name or start
/// of its id. A revoked key is not found by its name.
pub(crate) async fn key(client: &Client, tenant: &str, text: &str) -> Result<String> {
    if text.contains('/') {
        return Ok(text.to_owned());
    }
    if is_id(text) {
        return Ok(format!("{tenant}/keys/{text}"));
    }
    let request = ListKeysRequest { parent: tenant.to_owned(), ..Default::default() };
    let keys = client.list(request, MAX_SEARCHED).await?;
    let matching = |matches: &dyn Fn(&Key) -> bool| -> Vec<String> {
        keys.iter().filter(|key| matches(key)).map(|key| key.name.clone()).collect()
    };
    let mut found = matching(&|key| key.display_name == text && key.revoke_time.is_none());
    if found.is_empty() && is_prefix(text) {
        found = matching(&|key| starts_with(ids::last_segment(&key.name), text));
    }
    only("key", text, found)
}

/// Searches a list, newest first, for the only id that starts with `prefix`.
async fn search<R: List>(
    client: &Client,
    kind: &str,
    prefix: &str,
    request: R,
    id: impl Fn(R::Item) -> String,
) -> Result<String> {
    let mut search = Search { kind, prefix, found: Vec::new(), searched: 0 };
    client.each_page(request, |page| search.add(page.into_iter().map(&id).collect())).await?;
    only(kind, prefix, search.found)
}

/// A search for the ids that start with `prefix`.
#[derive(Debug)]
struct Search<'a> {
    kind: &'a str,
    prefix: &'a str,
    found: Vec<String>,
    searched: usize,
}

impl Search<'_> {
    /// Adds a page of the list. Breaks when the next ones can have no match.
    fn add(&mut self, ids: Vec<String>) -> Result<ControlFlow<()>> {
        let Self { kind, prefix, searched, .. } = self;
        if *searched >= MAX_SEARCHED {
            bail!("{kind} {prefix:?}: not found among the newest {searched}: give the whole id");
        }
        *searched += ids.len();
        // Ids sort by creation time, so those after the last match are all smaller.
        let is_past =
            ids.last().is_some_and(|id| !starts_with(id, prefix) && **id < *prefix.to_lowercase());
        self.found.extend(ids.into_iter().filter(|id| starts_with(id, prefix)));
        Ok(if is_past { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    }
}

/// Returns the only candidate.
fn only(kind: &str, text: &str, mut found: Vec<String>) -> Result<String> {
    match found.len() {
        0 => bail!("{kind} {text:?} not found"),
        1 => Ok(found.remove(0)),
        count => {
            found.truncate(MAX_LISTED);
            let more = if count > MAX_LISTED { ", …" } else { "" };
            let listed =
                found.iter().map(|name| ids::last_segment(name)).collect::<Vec<_>>().join(", ");
            bail!("{kind} {text:?} is ambiguous, {count} match: {listed}{more}")
        }
    }
}

/// Whether the text may be the start of an id, but is not a whole one.
fn is_prefix(text: &str) -> bool {
    (MIN_PREFIX_CHARS..ID_CHARS).contains(&text.len())
        && !is_id(text)
        && text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-')
}

/// Whether the text is a whole id, with or without its hyphens.
fn is_id(text: &str) -> bool {
    text.parse::<codelia_types::RunId>().is_ok()
}

fn starts_with(id: &str, prefix: &str) -> bool {
    id.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "018f4e1c-7b2a-7c3d-8e4f-5a6b7c8d9e0f";

    #[test]
    fn start_of_an_id_is_recognized() {
        for prefix in ["018f", "018F4E1C-7b2a", &ID[..35]] {
            assert!(is_prefix(prefix), "{prefix}");
            assert!(starts_with(ID, prefix), "{prefix}");
        }
        for other in [ID, &ID.replace('-', ""), "018", "work", "sessions/018f", "beta", ""] {
            assert!(!is_prefix(other), "{other}");
        }
    }

    #[test]
    fn search_reads_only_what_it_needs() {
        let mut search = Search { kind: "run", prefix: "ba", found: Vec::new(), searched: 0 };
        let mut add = |ids: &[&str]| {
            search.add(ids.iter().map(|id| (*id).to_owned()).collect()).unwrap().is_break()
        };
        assert!(!add(&["cc", "bc", "bb"]));
        assert!(add(&["ba", "a0"]));
        assert_eq!(search.found, ["ba"]);
    }

    #[test]
    fn ambiguous_prefix_lists_candidates() {
        let found = vec!["0a-2".to_owned(), "0a-1".to_owned()];
        let error = only("session", "0a", found).unwrap_err().to_string();
        assert_eq!(error, "session \"0a\" is ambiguous, 2 match: 0a-2, 0a-1");
        let error = only("session", "0b", Vec::new()).unwrap_err().to_string();
        assert_eq!(error, "session \"0b\" not found");
    }
}
