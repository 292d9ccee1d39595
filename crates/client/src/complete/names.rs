//! Names for completion that the server or the file of contexts knows.

use anyhow::Result;
use codelia_proto::v1::{
    ApprovalFilter, FileKind, ListApprovalsRequest, ListFilesRequest, ListFlagsRequest,
    ListKeysRequest, ListProfilesRequest, ListRunsRequest, ListSessionsRequest, ListTenantsRequest,
    ListToolsRequest, ListVolumesRequest, ListWorkersRequest, SessionState,
};

use crate::{
    client::{Client, session_name},
    contexts::Contexts,
    ids,
    settings::Settings,
};

/// Names that are requested at most.
const PAGE_SIZE: i32 = 200;

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
            let (parent, filter) = ("sessions/-".to_owned(), ApprovalFilter::All.into());
            let request =
                ListApprovalsRequest { parent, filter, page_size: PAGE_SIZE, ..Default::default() };
            let approvals =
                client.approvals().list_approvals(request).await?.into_inner().approvals;
            Ok(approvals.into_iter().map(|approval| approval.approval_id).collect())
        }
        Source::Tenants => {
            let request = ListTenantsRequest { page_size: PAGE_SIZE, ..Default::default() };
            let tenants = client.admin().list_tenants(request).await?.into_inner().tenants;
            Ok(tenants.into_iter().map(|tenant| tenant.tenant_id).collect())
        }
        Source::Keys => {
            let parent = "tenants/-".to_owned();
            let request = ListKeysRequest { parent, page_size: PAGE_SIZE, ..Default::default() };
            let keys = client.admin().list_keys(request).await?.into_inner().keys;
            Ok(keys.iter().map(|key| ids::last_segment(&key.name).to_owned()).collect())
        }
        Source::Workers => {
            let request = ListWorkersRequest { page_size: PAGE_SIZE, ..Default::default() };
            let workers = client.admin().list_workers(request).await?.into_inner().workers;
            Ok(workers.into_iter().map(|worker| worker.worker_id).collect())
        }
        Source::Flags => {
            let request = ListFlagsRequest { page_size: PAGE_SIZE, ..Default::default() };
            let flags = client.flags().list_flags(request).await?.into_inner().flags;
            Ok(flags.into_iter().map(|flag| flag.flag_id).collect())
        }
        Source::Tools => {
            let parent = "tenants/-".to_owned();
            let request = ListToolsRequest { parent, page_size: PAGE_SIZE, ..Default::default() };
            let tools = client.tools().list_tools(request).await?.into_inner().tools;
            Ok(tools.into_iter().map(|tool| tool.tool_id).collect())
        }
        Source::Profiles => {
            let profiles = client
                .policies()
                .list_profiles(ListProfilesRequest {})
                .await?
                .into_inner()
                .profiles;
            Ok(profiles.into_iter().map(|profile| profile.name).collect())
        }
        Source::Volumes => {
            let request = ListVolumesRequest { page_size: PAGE_SIZE, ..Default::default() };
            let volumes = client.volumes().list_volumes(request).await?.into_inner().volumes;
            Ok(volumes.into_iter().map(|volume| volume.volume_id).collect())
        }
        Source::Contexts => Ok(Vec::new()),
    }
}

async fn runs(client: &Client) -> Result<Vec<String>> {
    let parent = "sessions/-".to_owned();
    let request = ListRunsRequest { parent, page_size: PAGE_SIZE, ..Default::default() };
    let runs = client.runs().list_runs(request).await?.into_inner().runs;
    Ok(runs.into_iter().map(|run| run.run_id).collect())
}

/// Open sessions by alias, or by id without one.
async fn sessions(client: &Client) -> Result<Vec<String>> {
    let state = SessionState::Open.into();
    let request = ListSessionsRequest { page_size: PAGE_SIZE, state, ..Default::default() };
    let sessions = client.sessions().list_sessions(request).await?.into_inner().sessions;
    let name = |session: codelia_proto::v1::Session| {
        if session.alias.is_empty() { session.session_id } else { session.alias }
    };
    Ok(sessions.into_iter().map(name).collect())
}

/// Files in the directory that `path` is in.
async fn files(client: &Client, session: &str, path: &str) -> Result<Vec<String>> {
    let directory = path.rsplit_once('/').map_or("", |(directory, _)| directory);
    let prefix = if directory.is_empty() { String::new() } else { format!("{directory}/") };
    let request = ListFilesRequest {
        parent: session_name(session),
        path: directory.to_owned(),
        page_size: PAGE_SIZE,
        ..Default::default()
    };
    let files = client.files().list_files(request).await?.into_inner().files;
    let candidate = |file: &codelia_proto::v1::File| {
        let end = if file.kind() == FileKind::Directory { "/" } else { "" };
        format!("{session}:{prefix}{}{end}", ids::last_segment(&file.path))
    };
    Ok(files.iter().map(candidate).collect())
}
