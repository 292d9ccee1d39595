//! `codelia run` and `codelia attach`: connect a run's streams, terminal and exit code to this
//! process.

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

use super::policy;
use crate::{
    args,
    client::Client,
    environment,
    exec_stream::ExecStream,
    exit_status,
    output::{self, Output},
    record, resolve,
    signals::Signals,
    streams::Streams,
    terminal::{self, RawMode},
};

/// Lifetime of a session created for one run, beyond the run's timeout.
const SESSION_SLACK: Duration = Duration::from_secs(300);
/// Assumed timeout of a run without `--timeout`: the server's maximum.
const MAX_TIMEOUT: Duration = Duration::from_secs(600);
/// Idle time after which the server ends a session created for one run that was not closed.
const SESSION_IDLE_TTL: Duration = Duration::from_secs(60);

/// A signal arrived before the run was recorded, or the run could not be canceled.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

/// Runs a command and returns its exit code.
pub(crate) async fn run(client: &Client, args: &args::Run, output: Output) -> Result<ExitCode> {
    if args.detach {
        return start_detached(client, args, output).await;
    }
    let stdin = args.interactive || args.tty || !std::io::stdin().is_terminal();
    let request = start_request(args, stdin)?;
    let signals = Signals::catch()?;
    let give_up = CancellationToken::new();
    let session = session_for(client, args).await?;
    let request = StartRunRequest { parent: session.clone(), ..request };
    let result = tokio::select! {
        result = execute(client, args, request, signals, give_up.clone()) => result,
        () = give_up.cancelled() => Err(Interrupted.into()),
    };
    close_temporary_session(client, args, &session).await;
    finish(result, output)
}

/// Follows a run to its end and returns its exit code.
pub(crate) async fn attach(client: &Client, args: &args::Attach, output: Output) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let watch = WatchRunRequest { name: resolve::run(client, &args.run).await?, position: 0 };
    let mut stream = ExecStream::open(client, exec_request::Kind::Attach(watch)).await?;
    let raw_mode = use_terminal(&mut stream, args.tty)?;
    if args.interactive || args.tty {
        stream.forward_stdin();
    }
    let mut streams = Streams::open()?;
    let result = tokio::select! {
        result = stream.follow(&mut streams) => result.map(|run| (run, streams)),
        _ = signals.next() => Err(Interrupted.into()),
    };
    drop(raw_mode);
    if result.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
        output::write_message(&format!(
            "codelia: still running; reattach with `codelia attach {0}`, stop with `codelia kill {0}`",
            args.run
        ));
    }
    finish(result, output)
}

async fn start_detached(client: &Client, args: &args::Run, output: Output) -> Result<ExitCode> {
    let request = start_request(args, args.interactive)?;
    let request = StartRunRequest { parent: session_for(client, args).await?, ..request };
    let started = client.runs().start_run(request).await?;
    let run = started.into_inner().run.context("the server sent no run")?;
    output.print(&record::run(&run), &run.run_id)?;
    Ok(ExitCode::SUCCESS)
}

async fn execute(
    client: &Client,
    args: &args::Run,
    request: StartRunRequest,
    signals: Signals,
    give_up: CancellationToken,
) -> Result<(Run, Streams)> {
    let stdin = request.command.as_ref().is_some_and(|command| command.stdin);
    let mut stream = ExecStream::open(client, exec_request::Kind::Start(request)).await?;
    stream.forward_signals(signals, client.clone(), give_up);
    let _raw_mode = use_terminal(&mut stream, args.tty)?;
    if stdin {
        stream.forward_stdin();
    }
    let mut streams = Streams::open()?;
    let run = stream.follow(&mut streams).await?;
    Ok((run, streams))
}

fn use_terminal(stream: &mut ExecStream, tty: bool) -> Result<Option<RawMode>> {
    if !tty {
        return Ok(None);
    }
    stream.forward_terminal_size()?;
    RawMode::enter().context("cannot put the terminal in raw mode")
}

/// Returns the resource name of the session to run in. Creates one if none was given.
async fn session_for(client: &Client, args: &args::Run) -> Result<String> {
    if let Some(session) = &args.session {
        return resolve::session(client, session).await;
    }
    let sandbox = &args.sandbox;
    let request = CreateSessionRequest {
        mode: mode(sandbox),
        limits: Some(limits(sandbox)),
        network: network(sandbox),
        ttl: Some(duration_to_proto(sandbox.timeout.unwrap_or(MAX_TIMEOUT) + SESSION_SLACK)),
        idle_ttl: Some(duration_to_proto(SESSION_IDLE_TTL)),
        labels: sandbox.labels.iter().cloned().collect(),
        idempotency_key: sandbox.idempotency_key.clone().unwrap_or_default(),
        policy: policy::requested(sandbox)?,
        ..Default::default()
    };
    let created = client.sessions().create_session(request).await?.into_inner();
    Ok(created.session.context("the server sent no session")?.name)
}

/// Closes the session that was created for this run. A failure does not change the run's result.
async fn close_temporary_session(client: &Client, args: &args::Run, session: &str) {
    if args.session.is_some() {
        return;
    }
    let request = CloseSessionRequest { name: session.to_owned() };
    if let Err(error) = client.sessions().close_session(request).await {
        let problem = error.message();
        output::write_message(&format!("codelia: cannot close {session}, it will expire: {problem}"));
    }
}

/// The request for a run, without its session: what is wrong with it is reported before one is created.
fn start_request(args: &args::Run, stdin: bool) -> Result<StartRunRequest> {
    let sandbox = &args.sandbox;
    // A session created for this run already has the policy.
    let policy = if args.session.is_some() { policy::requested(sandbox)? } else { None };
    Ok(StartRunRequest {
        parent: String::new(),
        command: Some(command(args, stdin)?),
        limits: Some(limits(sandbox)),
        mode: mode(sandbox),
        network: network(sandbox),
        labels: sandbox.labels.iter().cloned().collect(),
        retries: args.retries,
        idempotency_key: sandbox.idempotency_key.clone().unwrap_or_default(),
        policy,
    })
}

fn command(args: &args::Run, stdin: bool) -> Result<CommandSpec> {
    let mut env = environment::plain(&args.env)?;
    if args.tty {
        // The command draws on our terminal: it needs the terminal's type.
        env.entry("TERM".to_owned())
            .or_insert_with(|| std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned()));
    }
    Ok(CommandSpec {
        argv: args.command.clone(),
        env,
        secret_env: environment::secret(&args.env)?,
        working_directory: args.workdir.clone(),
        terminal: args.tty.then(terminal::size),
        stdin,
        ..CommandSpec::default()
    })
}

/// Returns the requested limits.
pub(crate) fn limits(args: &args::SandboxArgs) -> Limits {
    Limits {
        timeout: args.timeout.map(duration_to_proto),
        memory_bytes: args.memory_bytes,
        cpu_millicores: args.cpu_millicores,
        pids: args.pids,
        ..Limits::default()
    }
}

/// Returns the requested sandbox mode.
pub(crate) fn mode(args: &args::SandboxArgs) -> i32 {
    args.mode.map_or(SandboxMode::Unspecified, SandboxMode::from).into()
}

/// Returns the requested network mode.
pub(crate) fn network(args: &args::SandboxArgs) -> i32 {
    args.network.map_or(NetworkMode::Unspecified, NetworkMode::from).into()
}

/// Prints how the run ended and returns its exit code.
fn finish(result: Result<(Run, Streams)>, output: Output) -> Result<ExitCode> {
    let (run, mut streams) = match result {
        Ok(finished) => finished,
        Err(error) if error.is::<Interrupted>() => return Ok(ExitCode::from(exit_status::CANCELED)),
        Err(error) => return Err(error),
    };
    let code = exit_status::exit_code(&run.outcome.clone().unwrap_or_default());
    if run.output_truncated {
        streams.write_message(&format!("codelia: {}", exit_status::truncation_message(&run)))?;
    }
    if let Some(message) = exit_status::message(&run) {
        let prefix = if code == exit_status::FAILURE { "error" } else { "codelia" };
        streams.write_message(&format!("{prefix}: {message}"))?;
    }
    if output.is_json() {
        streams.write_line(&record::run(&run).to_string())?;
    }
    Ok(ExitCode::from(code))
}
