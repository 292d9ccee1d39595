//! Names for completion that the server or the file of contexts knows.

use anyhow::Result;
use codelia_proto::v1::{
    ApprovalFilter, File, FileKind, ListApprovalsRequest, ListFilesRequest, ListFlagsRequest,
    ListKeysRequest, ListProfilesRequest, ListRunsRequest, ListSessionsRequest, ListTenantsRequest,
    ListToolsRequest, ListVolumesRequest, ListWorkersRequest, Session, SessionState,
};

use crate::{
    client::{ALL_SESSIONS, Client, List, session_name},
    contexts::Contexts,
    ids,
    settings::Settings,
};

/// Names that are requested at most.
const MAX_NAMES: usize = 200;
/// The tenant of the caller.
const OWN_TENANT: &str = "tenants/-";

/// Where the names of an argument are.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source {
    Sessions,
    Runs,
    RunsAndSessions,
    /// `SESSION:PATH`.
    Files,
    Approvals,
    Tenants,
    Keys,
    Workers,
    Flags,
    Tools,
    Profiles,
    Volumes,
    Contexts,
}

/// Finds names. `load` returns the configuration that says which server is asked.
pub(super) async fn find(
    source: Source,
    current: &str,
    load: impl FnOnce() -> Result<Settings>,
) -> Result<Vec<String>> {
    if matches!(source, Source::Contexts) {
        return Ok(Contexts::read()?.contexts.into_keys().collect());
    }
    let client = Client::connect(&load()?).await?;
    match source {
        Source::Sessions => sessions(&client).await,
        Source::Runs => runs(&client).await,
        Source::RunsAndSessions => Ok([sessions(&client).await?, runs(&client).await?].concat()),
        Source::Files => match current.split_once(':') {
            Some((session, path)) => files(&client, session, path).await,
            None => {
                Ok(sessions(&client).await?.into_iter().map(|name| format!("{name}:")).collect())
            }
        },
        Source::Approvals => {
            let request = ListApprovalsRequest {
                parent: ALL_SESSIONS.to_owned(),
                filter: ApprovalFilter::All.into(),
                ..Default::default()
            };
            list(&client, request, |approval| approval.approval_id).await
        }
        Source::Tenants => {
            list(&client, ListTenantsRequest::default(), |tenant| tenant.tenant_id).await
        }
        Source::Keys => {
            let request = ListKeysRequest { parent: OWN_TENANT.to_owned(), ..Default::default() };
            list(&client, request, |key| ids::last_segment(&key.name).to_owned()).await
        }
        Source::Workers => {
            list(&client, ListWorkersRequest::default(), |worker| worker.worker_id).await
        }
        Source::Flags => list(&client, ListFlagsRequest::default(), |flag| flag.flag_id).await,
        Source::Tools => {
            let request = ListToolsRequest { parent: OWN_TENANT.to_owned(), ..Default::default() };
            list(&client, request, |tool| tool.tool_id).await
        }
        Source::Profiles => {
            let listed = client.policies().list_profiles(ListProfilesRequest {}).await?;
            let profiles = listed.into_inner().profiles;
            Ok(profiles.into_iter().map(|profile| profile.name).collect())
        }
        Source::Volumes => {
            list(&client, ListVolumesRequest::default(), |volume| volume.volume_id).await
        }
        Source::Contexts => Ok(Vec::new()),
    }
}

/// The names in a list.
async fn list<R: List>(
    client: &Client,
    request: R,
    name: impl Fn(R::Item) -> String,
) -> Result<Vec<String>> {
    Ok(client.list(request, MAX_NAMES).await?.into_iter().map(name).collect())
}

async fn runs(client: &Client) -> Result<Vec<String>> {
    let request = ListRunsRequest { parent: ALL_SESSIONS.to_owned(), ..Default::default() };
    list(client, request, |run| run.run_id).await
}

/// Open sessions by alias, or by id without one.
async fn sessions(client: &Client) -> Result<Vec<String>> {
    let request = ListSessionsRequest { state: SessionState::Open.into(), ..Default::default() };
    let name = |session: Session| {
        if session.alias.is_empty() { session.session_id } else { session.alias }
    };
    list(client, request, name).await
}

/// Files in the directory that `path` is in.
async fn files(client: &Client, session: &str, path: &str) -> Result<Vec<String>> {
    let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
    let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    let request = ListFilesRequest {
        parent: session_name(session),
        path: directory.to_owned(),
        ..Default::default()
    };
    let candidate = |file: File| {
        let end = if file.kind() == FileKind::Directory { "/" } else { "" };
        format!("{session}:{prefix}{}{end}", ids::last_segment(&file.path))
    };
    list(client, request, candidate).await
}
