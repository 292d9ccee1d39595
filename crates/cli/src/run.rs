//! `codelia run` and `codelia attach`: a command's streams, terminal and exit code become ours.

use std::{io::IsTerminal, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{
        CloseSessionRequest, CommandSpec, CreateSessionRequest, Limits, NetworkMode, Run, SandboxMode,
        StartRunRequest, WatchRunRequest, exec_request,
    },
};
use tokio_util::sync::CancellationToken;

use crate::{
    args,
    client::{Client, run_name, session_name},
    exec_stream::Conversation,
    exit_status,
    output::Output,
    policies, record,
    signals::Signals,
    streams::Streams,
    terminal::{self, RawMode},
};

/// A session made for one run lives for the run's time and this.
const SESSION_SLACK: Duration = Duration::from_secs(300);
/// A run that names no time gets at most the ceiling of the installation.
const LONGEST_RUN: Duration = Duration::from_secs(600);
/// Ends a session made for one run if we could not.
const SESSION_IDLE: Duration = Duration::from_secs(60);

/// We were told to end before the run was recorded, or could not cancel it.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

/// Runs a command and ends like it.
pub(crate) async fn run(client: &Client, args: &args::Run, output: Output) -> Result<ExitCode> {
    if args.detach {
        return detach(client, args, output).await;
    }
    let signals = Signals::catch()?;
    let give_up = CancellationToken::new();
    let session = session_for(client, args).await?;
    let ended = tokio::select! {
        ended = converse(client, args, &session, signals, give_up.clone()) => ended,
        () = give_up.cancelled() => Err(Interrupted.into()),
    };
    close_own(client, args, &session).await;
    finish(ended, output)
}

/// Watches a run to its end and ends like it.
pub(crate) async fn attach(client: &Client, args: &args::Attach, output: Output) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let watch = WatchRunRequest { name: run_name(&args.run), position: 0 };
    let mut conversation = Conversation::open(client, exec_request::Kind::Attach(watch)).await?;
    let raw = use_terminal(&mut conversation, args.tty)?;
    if args.interactive || args.tty {
        conversation.pass_stdin();
    }
    let mut streams = Streams::own()?;
    let ended = tokio::select! {
        ended = conversation.follow(&mut streams) => ended.map(|run| (run, streams)),
        _ = signals.next() => Err(Interrupted.into()),
    };
    drop(raw);
    if ended.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
        eprintln!(
            "codelia: the run goes on; `codelia attach {0}` comes back, `codelia kill {0}` ends it",
            args.run
        );
    }
    finish(ended, output)
}

async fn detach(client: &Client, args: &args::Run, output: Output) -> Result<ExitCode> {
    let session = session_for(client, args).await?;
    let request = start_request(args, &session, args.interactive)?;
    let run = client.runs().start_run(request).await?.into_inner().run.context("the server told no run")?;
    output.one(&record::run(&run), &run.run_id)?;
    Ok(ExitCode::SUCCESS)
}

async fn converse(
    client: &Client,
    args: &args::Run,
    session: &str,
    signals: Signals,
    give_up: CancellationToken,
) -> Result<(Run, Streams)> {
    let stdin = args.interactive || args.tty || !std::io::stdin().is_terminal();
    let start = exec_request::Kind::Start(start_request(args, session, stdin)?);
    let mut conversation = Conversation::open(client, start).await?;
    conversation.pass_signals(signals, client.clone(), give_up);
    let _raw = use_terminal(&mut conversation, args.tty)?;
    if stdin {
        conversation.pass_stdin();
    }
    let mut streams = Streams::own()?;
    let run = conversation.follow(&mut streams).await?;
    Ok((run, streams))
}

fn use_terminal(conversation: &mut Conversation, wanted: bool) -> Result<Option<RawMode>> {
    if !wanted {
        return Ok(None);
    }
    conversation.pass_size()?;
    RawMode::enter().context("cannot put the terminal in raw mode")
}

/// The name of the session to run in; a new one if none was given.
async fn session_for(client: &Client, args: &args::Run) -> Result<String> {
    if let Some(given) = &args.session {
        return Ok(session_name(given));
    }
    let policy = &args.policy;
    let request = CreateSessionRequest {
        mode: mode(policy),
        limits: Some(limits(policy)),
        network: network(policy),
        ttl: Some(duration_to_proto(policy.timeout.unwrap_or(LONGEST_RUN) + SESSION_SLACK)),
        idle_ttl: Some(duration_to_proto(SESSION_IDLE)),
        labels: policy.labels.iter().cloned().collect(),
        idempotency_key: policy.idempotency_key.clone().unwrap_or_default(),
        policy: policies::asked(policy)?,
        ..Default::default()
    };
    let created = client.sessions().create_session(request).await?.into_inner();
    Ok(created.session.context("the server told no session")?.name)
}

/// The run is over: that its session could not be closed changes nothing about it.
async fn close_own(client: &Client, args: &args::Run, session: &str) {
    if args.session.is_some() {
        return;
    }
    let request = CloseSessionRequest { name: session.to_owned() };
    if let Err(error) = client.sessions().close_session(request).await {
        eprintln!("codelia: {session} was not closed and ends by itself: {}", error.message());
    }
}

fn start_request(args: &args::Run, session: &str, stdin: bool) -> Result<StartRunRequest> {
    let policy = &args.policy;
    // A session that was made for this run has the policy already.
    let own = args.session.as_ref().map(|_| policies::asked(policy)).transpose()?.flatten();
    Ok(StartRunRequest {
        parent: session.to_owned(),
        command: Some(command(args, stdin)),
        limits: Some(limits(policy)),
        mode: mode(policy),
        network: network(policy),
        labels: policy.labels.iter().cloned().collect(),
        retries: args.retries,
        idempotency_key: policy.idempotency_key.clone().unwrap_or_default(),
        policy: own,
    })
}

fn command(args: &args::Run, stdin: bool) -> CommandSpec {
    let mut env: std::collections::HashMap<_, _> = args.env.iter().cloned().collect();
    if args.tty {
        // Colours and keys are those of the terminal that shows them.
        env.entry("TERM".to_owned())
            .or_insert_with(|| std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned()));
    }
    CommandSpec {
        argv: args.command.clone(),
        env,
        working_directory: args.workdir.clone(),
        terminal: args.tty.then(terminal::size),
        stdin,
    }
}

/// The limits that were asked for.
pub(crate) fn limits(policy: &args::Policy) -> Limits {
    Limits {
        timeout: policy.timeout.map(duration_to_proto),
        memory_bytes: policy.memory_mb,
        cpu_millis: policy.cpus,
        pids: policy.pids,
        ..Limits::default()
    }
}

/// The mode that was asked for.
pub(crate) fn mode(policy: &args::Policy) -> i32 {
    policy.mode.map_or(SandboxMode::Unspecified, SandboxMode::from).into()
}

/// The network that was asked for.
pub(crate) fn network(policy: &args::Policy) -> i32 {
    policy.network.map_or(NetworkMode::Unspecified, NetworkMode::from).into()
}

fn finish(ended: Result<(Run, Streams)>, output: Output) -> Result<ExitCode> {
    let (run, mut streams) = match ended {
        Ok(ended) => ended,
        Err(error) if error.is::<Interrupted>() => return Ok(ExitCode::from(exit_status::CANCELED)),
        Err(error) => return Err(error),
    };
    let outcome = run.outcome.clone().unwrap_or_default();
    if run.output_truncated {
        eprintln!("codelia: the output was cut after {} bytes", run.output_bytes);
    }
    if let Some(note) = exit_status::note(&outcome) {
        let kind =
            if exit_status::exit_code(&outcome) == exit_status::OUR_FAILURE { "error" } else { "codelia" };
        eprintln!("{kind}: {note}");
    }
    if output.is_json() {
        streams.last_line(&record::run(&run).to_string())?;
    }
    Ok(ExitCode::from(exit_status::exit_code(&outcome)))
}
