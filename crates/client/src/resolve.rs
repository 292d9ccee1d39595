//! Finds the object that an argument names: by resource name, id, alias or display name, or by the
//! start of an id if only one object has it.

use anyhow::{Result, bail};
use codelia_proto::v1::{
    ApprovalFilter, GetSessionRequest, Key, ListApprovalsRequest, ListKeysRequest, ListRunsRequest,
    ListSessionsRequest,
};
use tonic::{Code, Status};

use crate::{
    client::{Client, approval_name, pages, run_name, session_name},
    ids,
};

/// Length of an id as text.
const ID_CHARS: usize = 36;
/// Shortest accepted start of an id.
const MIN_PREFIX_CHARS: usize = 4;
/// Objects that a search reads at most.
const MAX_SEARCHED: usize = 20_000;
const PAGE_SIZE: i32 = 1000;
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
    let found = search("session", text, async |page_token| {
        let request =
            ListSessionsRequest { page_size: PAGE_SIZE, page_token, ..Default::default() };
        let page = client.sessions().list_sessions(request).await?.into_inner();
        Ok((
            page.sessions.into_iter().map(|session| session.session_id).collect(),
            page.next_page_token,
        ))
    });
    Ok(session_name(&found.await?))
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
    let found = search("run", text, async |page_token| {
        let parent = "sessions/-".to_owned();
        let request =
            ListRunsRequest { parent, page_size: PAGE_SIZE, page_token, ..Default::default() };
        let page = client.runs().list_runs(request).await?.into_inner();
        Ok((page.runs.into_iter().map(|run| run.run_id).collect(), page.next_page_token))
    });
    Ok(run_name(&found.await?))
}

/// What an argument names, as a resource name.
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
        return Ok(approval_name(text));
    }
    if !is_prefix(text) {
        bail!(
            "approval {text:?} not found: expected its id, or at least its first {MIN_PREFIX_CHARS} characters \
             (`codelia approvals list --all` lists approvals)"
        );
    }
    let found = search("approval", text, async |page_token| {
        let (parent, filter) = ("sessions/-".to_owned(), ApprovalFilter::All.into());
        let request = ListApprovalsRequest { parent, filter, page_size: PAGE_SIZE, page_token };
        let page = client.approvals().list_approvals(request).await?.into_inner();
        let ids = page.approvals.into_iter().map(|approval| approval.approval_id);
        Ok((ids.collect(), page.next_page_token))
    });
    Ok(approval_name(&found.await?))
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
    let keys = pages(MAX_SEARCHED, async |page_token| {
        let request =
            ListKeysRequest { parent: tenant.to_owned(), page_size: PAGE_SIZE, page_token };
        let page = client.admin().list_keys(request).await?.into_inner();
        Ok((page.keys, page.next_page_token))
    })
    .await?;
    let matching = |matches: &dyn Fn(&Key) -> bool| -> Vec<String> {
        keys.iter().filter(|key| matches(key)).map(|key| key.name.clone()).collect()
    };
    let mut found = matching(&|key| key.display_name == text && key.revoke_time.is_none());
    if found.is_empty() && is_prefix(text) {
        found = matching(&|key| starts_with(ids::last_segment(&key.name), text));
    }
    only("key", text, found)
}

/// Searches a listing, newest first, for the only id that starts with `prefix`.
async fn search(
    kind: &str,
    prefix: &str,
    mut fetch: impl AsyncFnMut(String) -> Result<(Vec<String>, String), Status>,
) -> Result<String> {
    let (mut found, mut searched, mut token) = (Vec::new(), 0, String::new());
    loop {
        let (ids, next_token) = fetch(token).await?;
        searched += ids.len();
        // Ids sort by creation time, so those after the last match are all smaller.
        let past =
            ids.last().is_some_and(|id| !starts_with(id, prefix) && **id < *prefix.to_lowercase());
        found.extend(ids.into_iter().filter(|id| starts_with(id, prefix)));
        if past || next_token.is_empty() {
            return only(kind, prefix, found);
        }
        if searched >= MAX_SEARCHED {
            bail!("{kind} {prefix:?}: not found among the newest {searched}: give the whole id");
        }
        token = next_token;
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

    #[tokio::test]
    async fn search_reads_only_what_it_needs() {
        let pages = [vec!["cc", "bc", "bb"], vec!["ba", "a0"], vec!["unread"]];
        let mut read = 0;
        let found = search("run", "ba", async |_| {
            read += 1;
            Ok((pages[read - 1].iter().map(|id| (*id).to_owned()).collect(), "more".to_owned()))
        });
        assert_eq!(found.await.unwrap(), "ba");
        assert_eq!(read, 2);
    }

    #[tokio::test]
    async fn ambiguous_prefix_lists_candidates() {
        let page = async |_| Ok((vec!["0a-2".to_owned(), "0a-1".to_owned()], String::new()));
        let error = search("session", "0a", page).await.unwrap_err().to_string();
        assert_eq!(error, "session \"0a\" is ambiguous, 2 match: 0a-2, 0a-1");
        let error = search("session", "0b", page).await.unwrap_err().to_string();
        assert_eq!(error, "session \"0b\" not found");
    }
}
