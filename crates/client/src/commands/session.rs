//! `codelia session …`.

use std::process::ExitCode;

use anyhow::Result;
use codelia_proto::{
    duration_to_proto,
    json::to_json,
    v1::{
        CloseSessionRequest, CreateSessionRequest, ExtendSessionRequest, GetSessionRequest,
        ListSessionsRequest, NetworkPolicy, ReleaseSessionRequest, Session, SessionDisk,
        SessionState, TextList, UpdateSessionRequest,
    },
};

use super::run;
use crate::{args, client::Client, each::Each, ids, output::Output, resolve, units, words::Word};

/// Executes `codelia session`.
pub(crate) async fn session(
    client: &Client,
    command: args::Session,
    output: Output,
) -> Result<ExitCode> {
    match command {
        args::Session::Create(args) => create(client, &args, output).await?,
        args::Session::List { all, labels, limit } => {
            let state = if all { SessionState::Unspecified } else { SessionState::Open };
            let labels = labels.into_iter().collect();
            let request = ListSessionsRequest { state: state.into(), labels, ..Default::default() };
            list(&client.list(request, limit).await?, output)?;
        }
        args::Session::Show { session } => show(client, &session, output).await?,
        args::Session::Extend { session, ttl } => {
            let name = resolve::session(client, &session).await?;
            let request = ExtendSessionRequest { name, ttl: Some(duration_to_proto(ttl)) };
            output.print_message(&client.call(request).await?)?;
        }
        args::Session::Update(args) => update(client, &args, output).await?,
        args::Session::Release { session, reason } => {
            let name = resolve::session(client, &session).await?;
            output.print_message(&client.call(ReleaseSessionRequest { name, reason }).await?)?;
        }
        args::Session::Close { sessions } => return close(client, &sessions, output).await,
    }
    Ok(ExitCode::SUCCESS)
}

async fn create(client: &Client, args: &args::CreateSession, output: Output) -> Result<()> {
    let request = CreateSessionRequest {
        alias: args.alias.clone().unwrap_or_default(),
        ttl: args.ttl.map(duration_to_proto),
        idle_ttl: args.idle_ttl.map(duration_to_proto),
        allow_data_loss: args.allow_data_loss,
        project: args.project.clone().unwrap_or_default(),
        profile: args.profile.clone().unwrap_or_default(),
        ..run::session_request(&args.sandbox)?
    };
    let session = client.call(request).await?;
    output.print_message_as(&session, &session.session_id)
}

async fn update(client: &Client, args: &args::UpdateSession, output: Output) -> Result<()> {
    let change = &args.change;
    let paths = [
        ("alias", change.alias.is_some() || change.no_alias),
        ("labels", !change.labels.is_empty() || change.no_labels),
        ("ttl", change.ttl.is_some()),
        ("idle_ttl", change.idle_ttl.is_some() || change.no_idle_ttl),
        ("network", !change.allow_hosts.is_empty() || change.no_hosts),
    ];
    let paths =
        paths.into_iter().filter(|(_, given)| *given).map(|(path, _)| path.to_owned()).collect();
    let request = UpdateSessionRequest {
        name: resolve::session(client, &args.session).await?,
        update_mask: Some(prost_types::FieldMask { paths }),
        alias: change.alias.clone().unwrap_or_default(),
        labels: change.labels.iter().cloned().collect(),
        ttl: change.ttl.map(duration_to_proto),
        idle_ttl: change.idle_ttl.map(duration_to_proto),
        network: network(change),
    };
    output.print_message(&client.call(request).await?)
}

/// The hosts that the session's runs may reach from now on, if they change.
fn network(change: &args::SessionChange) -> Option<NetworkPolicy> {
    if change.allow_hosts.is_empty() && !change.no_hosts {
        return None;
    }
    let allowed_hosts = Some(TextList { values: change.allow_hosts.clone() });
    Some(NetworkPolicy { allowed_hosts, ..NetworkPolicy::default() })
}

fn list(sessions: &[Session], output: Output) -> Result<()> {
    let id = ids::short(sessions.iter().map(|session| session.session_id.as_str()));
    let header = ["SESSION", "ALIAS", "STATE", "MODE", "WORKER", "DISK", "CREATED", "ENDS"];
    output.print_list(&header, sessions, |session| {
        vec![
            id(&session.session_id),
            session.alias.clone(),
            state(session),
            session.mode().word(),
            session.worker_id.clone(),
            session.disk.as_ref().map(disk_used).unwrap_or_default(),
            units::age(session.create_time.as_ref()),
            units::age(session.end_time.as_ref().or(session.expire_time.as_ref())),
        ]
    })
}

fn state(session: &Session) -> String {
    match (session.state(), &session.quarantine) {
        (SessionState::Open, Some(_)) => "quarantined".to_owned(),
        (state, _) => state.word(),
    }
}

fn disk_used(disk: &SessionDisk) -> String {
    units::bytes(u64::try_from(disk.used_bytes).unwrap_or_default())
}

async fn show(client: &Client, session: &str, output: Output) -> Result<()> {
    let request = GetSessionRequest { name: resolve::session(client, session).await? };
    output.print_message(&client.call(request).await?)
}

async fn close(client: &Client, sessions: &[String], output: Output) -> Result<ExitCode> {
    let mut each = Each::new(output);
    each.try_all(client, sessions, async |session| {
        let name = resolve::session(client, session).await?;
        let closed = client.call(CloseSessionRequest { name }).await?;
        Ok((to_json(&closed)?, closed.session_id))
    })
    .await?;
    each.finish()
}
