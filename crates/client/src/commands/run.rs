//! `codelia run`, `exec` and `attach`: connect a run's streams, terminal and exit code to this
//! process.

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
    sync::OnceLock,
    time::Duration,
};

use anyhow::{Context, Result};
use codelia_proto::{
    duration_to_proto,
    v1::{
        CloseSessionRequest, CommandSpec, CreateSessionRequest, GetRunRequest, Limits, NetworkMode,
        RunState, StartRunRequest, TransactionMode, WatchRunRequest, exec_request,
    },
};
use tokio_util::sync::CancellationToken;

use super::policy;
use crate::{
    args,
    client::Client,
    detach_keys::{DetachKeys, KeyScanner},
    environment,
    exec_stream::{ExecStream, Followed},
    exit_status, ids,
    output::{self, Output},
    resolve::{self, RunOrSession},
    run_record::run_record,
    settings::Settings,
    signals::Signals,
    streams::Streams,
    system::{RawMode, stdin_has_data},
    terminal,
};

/// Lifetime of a session created for one run, beyond the run's timeout.
const SESSION_SLACK: Duration = Duration::from_secs(300);
/// Assumed timeout of a run without `--timeout`: the longest default.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(4 * 3600);
/// Longest lifetime that every server accepts. A session lives on while a run in it has not ended.
const MAX_SESSION_TTL: Duration = Duration::from_secs(24 * 3600);
/// Idle time after which the server ends a session created for one run that was not closed.
const SESSION_IDLE_TTL: Duration = Duration::from_secs(60);

/// Not every sandbox has the better shell.
const SHELL: &str = "if command -v bash >/dev/null; then exec bash; fi; exec sh";

/// A signal arrived before the run was recorded, or the run could not be canceled.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
struct Interrupted;

/// Runs a command and returns its exit code.
pub(crate) async fn run(
    client: &Client,
    settings: &Settings,
    args: &args::Run,
    output: Output,
) -> Result<ExitCode> {
    let options = &args.options;
    if options.detach {
        return start_detached(client, args, output).await;
    }
    let stdin = options.interactive || options.tty || !io::stdin().is_terminal();
    let request = start_request(args, stdin)?;
    let signals = Signals::catch()?;
    let give_up = CancellationToken::new();
    let request = in_session(client, args, request).await?;
    let input =
        Input { stdin, keys: options.tty.then(|| detach_keys(settings, &options.terminal)) };
    let mut streams = Streams::open(output)?;
    let progress = OnceLock::new();
    let execute = async {
        let mut stream = ExecStream::open(client, exec_request::Kind::Start(request)).await?;
        stream.forward_signals(signals, client.clone(), give_up.clone());
        progress.set(stream.progress()).ok();
        follow(client, &mut stream, &mut streams, input).await
    };
    let followed = tokio::select! {
        followed = execute => followed,
        () = give_up.cancelled() => Err(Interrupted.into()),
    };
    // A run that continues needs its session. One that was not recorded has none that is known: the
    // server closes the session of a refused run, and any other ends when it is idle.
    if !matches!(followed, Ok(Followed::Detached(_)))
        && args.session.is_none()
        && let Some(session) = progress.get().and_then(|progress| progress.session())
    {
        close_temporary_session(client, &session).await;
    }
    finish(followed, streams, output)
}

/// Follows a run to its end and returns its exit code.
pub(crate) async fn attach(
    client: &Client,
    settings: &Settings,
    args: &args::Attach,
    output: Output,
) -> Result<ExitCode> {
    let name = match resolve::run_or_session(client, &args.target).await? {
        RunOrSession::Run(name) => name,
        RunOrSession::Session(name) => {
            return open_shell(client, settings, args, name, output).await;
        }
    };
    let mut signals = Signals::catch()?;
    let stdin = args.interactive || args.tty;
    if stdin {
        check_input(client, args, &name).await?;
    }
    let input = Input { stdin, keys: args.tty.then(|| detach_keys(settings, &args.terminal)) };
    let mut streams = Streams::open(output)?;
    let watch = WatchRunRequest { name: name.clone(), position: 0, ..Default::default() };
    let mut stream = ExecStream::open(client, exec_request::Kind::Attach(watch)).await?;
    let followed = tokio::select! {
        followed = follow(client, &mut stream, &mut streams, input) => followed,
        _ = signals.next() => Err(Interrupted.into()),
    };
    if followed.as_ref().is_err_and(|error| error.is::<Interrupted>()) {
        output::write_note(&still_running(&name, args.tty));
    }
    finish(followed, streams, output)
}

/// Runs a shell in a session: with a terminal if this process has one.
async fn open_shell(
    client: &Client,
    settings: &Settings,
    args: &args::Attach,
    session: String,
    output: Output,
) -> Result<ExitCode> {
    let terminal = args::TerminalArgs { detach_keys: args.terminal.detach_keys.clone() };
    let tty = args.tty || (io::stdin().is_terminal() && io::stdout().is_terminal());
    let options =
        args::RunOptions { interactive: true, tty, terminal, ..args::RunOptions::default() };
    let command = ["sh", "-c", SHELL].map(str::to_owned).into();
    run(
        client,
        settings,
        &args::Run { session: Some(session), project: None, profile: None, command, options },
        output,
    )
    .await
}

/// Input to forward to a run.
#[derive(Debug)]
struct Input {
    stdin: bool,
    /// The keys that detach, if the run has a terminal.
    keys: Option<DetachKeys>,
}

/// The keys of the option, or else of the configuration.
fn detach_keys(settings: &Settings, args: &args::TerminalArgs) -> DetachKeys {
    args.detach_keys.clone().unwrap_or_else(|| settings.options.detach_keys.clone())
}

/// Connects our stdin and terminal to a run until it ends or the user detaches.
async fn follow(
    client: &Client,
    stream: &mut ExecStream,
    streams: &mut Streams,
    input: Input,
) -> Result<Followed> {
    // Restores the terminal before the last message is written.
    let mut _raw_mode = None;
    if input.keys.is_some() {
        stream.forward_terminal_size()?;
        _raw_mode = RawMode::enter().context("cannot put the terminal in raw mode")?;
    }
    match (input.keys, &_raw_mode) {
        (Some(keys), Some(_)) => stream.forward_terminal(KeyScanner::new(&keys)),
        _ if input.stdin => stream.forward_stdin(),
        _ => {}
    }
    stream.follow(streams, client).await
}

/// Refuses input for a run that cannot receive it.
async fn check_input(client: &Client, args: &args::Attach, name: &str) -> Result<()> {
    let run = client.call(GetRunRequest { name: name.to_owned(), ..Default::default() }).await?;
    let command = run.command.clone().unwrap_or_default();
    let id = &run.run_id;
    if run.state() == RunState::Ended {
        return Ok(());
    }
    if args.tty && command.terminal.is_none() {
        anyhow::bail!(
            "run {id} has no terminal: attach without -t, or start it with `codelia run -dt`"
        );
    }
    if !command.stdin {
        anyhow::bail!(
            "run {id} has no stdin: attach without -i, or start it with `codelia run -di`"
        );
    }
    Ok(())
}

async fn start_detached(client: &Client, args: &args::Run, output: Output) -> Result<ExitCode> {
    let options = &args.options;
    if stdin_has_data().context("cannot check stdin")? {
        let how =
            if options.interactive || options.tty { "with" } else { "start with -di, then use" };
        output::write_note(&format!(
            "warning: a detached run does not read stdin; {how} `codelia attach -i`, or redirect </dev/null"
        ));
    }
    let request = start_request(args, options.interactive || options.tty)?;
    let request = in_session(client, args, request).await?;
    let run = client.call(request).await?;
    output.print(&run_record(&run)?, &run.run_id)?;
    Ok(ExitCode::SUCCESS)
}

/// The request with the session to run in. If none was given, the server creates one for the run.
async fn in_session(
    client: &Client,
    args: &args::Run,
    request: StartRunRequest,
) -> Result<StartRunRequest> {
    if let Some(session) = &args.session {
        return Ok(StartRunRequest { parent: resolve::session(client, session).await?, ..request });
    }
    let sandbox = &args.options.sandbox;
    let lifetime = sandbox.timeout.unwrap_or(DEFAULT_TIMEOUT) + SESSION_SLACK;
    let queue_timeout = args.options.queue_timeout.unwrap_or_default();
    let lifetime = lifetime.saturating_add(queue_timeout).min(MAX_SESSION_TTL);
    let session = CreateSessionRequest {
        ttl: Some(duration_to_proto(lifetime)),
        idle_ttl: Some(duration_to_proto(SESSION_IDLE_TTL)),
        project: args.project.clone().unwrap_or_default(),
        profile: args.profile.clone().unwrap_or_default(),
        ..session_request(sandbox)?
    };
    Ok(StartRunRequest { new_session: Some(session), ..request })
}

/// The request for a session with this sandbox.
pub(crate) fn session_request(sandbox: &args::SandboxArgs) -> Result<CreateSessionRequest> {
    Ok(CreateSessionRequest {
        mode: policy::mode_to_proto(sandbox.mode),
        limits: Some(limits(sandbox)),
        network: network(sandbox),
        labels: sandbox.labels.iter().cloned().collect(),
        idempotency_key: sandbox.idempotency_key.clone().unwrap_or_default(),
        policy: policy::requested(sandbox)?,
        ..Default::default()
    })
}

/// Closes the session that was created for this run. A failure does not change the run's result.
async fn close_temporary_session(client: &Client, session: &str) {
    let request = CloseSessionRequest { name: session.to_owned() };
    if let Err(error) = client.sessions().close_session(request).await {
        let problem = error.message();
        output::write_note(&format!("cannot close {session}, it will expire: {problem}"));
    }
}

/// The request for a run, without its session: what is wrong with it is reported before one is
/// created.
fn start_request(args: &args::Run, stdin: bool) -> Result<StartRunRequest> {
    let sandbox = &args.options.sandbox;
    if args.options.hold && args.session.is_none() {
        anyhow::bail!(
            "--hold needs --session: a session of its own ends with the run, and its changes with it"
        );
    }
    if args.session.is_some() {
        let of_session = [("--disk", sandbox.disk_bytes), ("--inodes", sandbox.inodes)];
        if let Some((option, _)) = of_session.iter().find(|(_, value)| value.is_some()) {
            anyhow::bail!(
                "{option} needs a new session: leave --session out, or set it with `codelia session create {option}`"
            );
        }
    }
    // A session created for this run already has the policy.
    let policy = if args.session.is_some() { policy::requested(sandbox)? } else { None };
    Ok(StartRunRequest {
        parent: String::new(),
        command: Some(command(args, stdin)?),
        // Limits of the session's files are the session's.
        limits: Some(Limits { disk_bytes: None, inodes: None, ..limits(sandbox) }),
        mode: policy::mode_to_proto(sandbox.mode),
        network: network(sandbox),
        labels: sandbox.labels.iter().cloned().collect(),
        retries: args.options.retries,
        queue_timeout: args.options.queue_timeout.map(duration_to_proto),
        idempotency_key: sandbox.idempotency_key.clone().unwrap_or_default(),
        policy,
        tool: args.options.tool.clone().unwrap_or_default(),
        transaction: transaction(&args.options).into(),
        hold_timeout: args.options.hold_timeout.map(duration_to_proto),
        new_session: None,
    })
}

fn transaction(options: &args::RunOptions) -> TransactionMode {
    match options {
        args::RunOptions { hold: true, .. } => TransactionMode::Hold,
        args::RunOptions { preview: true, .. } => TransactionMode::Preview,
        args::RunOptions { transactional: true, .. } => TransactionMode::Apply,
        _ => TransactionMode::Unspecified,
    }
}

fn command(args: &args::Run, stdin: bool) -> Result<CommandSpec> {
    let options = &args.options;
    let mut env = environment::plain(&options.env)?;
    if options.tty {
        // The command draws on our terminal: it needs the terminal's type.
        env.entry("TERM".to_owned())
            .or_insert_with(|| std::env::var("TERM").unwrap_or_else(|_| "xterm".to_owned()));
    }
    Ok(CommandSpec {
        argv: args.command.clone(),
        env,
        secret_env: environment::secret(&options.env)?,
        working_directory: working_directory(&options.workdir).to_owned(),
        terminal: options.tty.then(terminal::size),
        stdin,
        ..CommandSpec::default()
    })
}

/// The working directory as the server wants it: relative to the workspace. Commands see that as
/// `/workspace`.
fn working_directory(path: &str) -> &str {
    match path.strip_prefix("/workspace") {
        Some(below) if below.is_empty() || below.starts_with('/') => below.trim_start_matches('/'),
        _ => path,
    }
}

/// Returns the requested limits.
fn limits(args: &args::SandboxArgs) -> Limits {
    Limits {
        timeout: args.timeout.map(duration_to_proto),
        memory_bytes: args.memory_bytes,
        cpu_millicores: args.cpu_millicores,
        pids: args.pids,
        output_bytes: args.output_bytes,
        disk_bytes: args.disk_bytes,
        inodes: args.inodes,
        ..Limits::default()
    }
}

/// Returns the requested network mode.
fn network(args: &args::SandboxArgs) -> i32 {
    args.network.requested_mode().map_or(NetworkMode::Unspecified, NetworkMode::from).into()
}

/// How to return to a run, and how to end it.
fn still_running(name: &str, tty: bool) -> String {
    let id = ids::last_segment(name);
    let tty = if tty { "-t " } else { "" };
    format!(
        "still running; reattach with `codelia attach {tty}{id}`, stop with `codelia kill {id}`"
    )
}

/// Prints how the run ended and returns its exit code.
fn finish(followed: Result<Followed>, mut streams: Streams, output: Output) -> Result<ExitCode> {
    let run = match followed {
        Ok(Followed::Finished(run)) => run,
        Ok(Followed::Detached(name)) => {
            streams.write_note(&format!("detached, {}", still_running(&name, true)))?;
            return Ok(ExitCode::SUCCESS);
        }
        Err(error) if error.is::<Interrupted>() => {
            return Ok(ExitCode::from(exit_status::CANCELED));
        }
        Err(error) => return Err(error),
    };
    let mut code = exit_status::exit_code(&run.outcome.clone().unwrap_or_default());
    if !streams.is_complete(&run) {
        streams.write_note(&exit_status::incomplete_message(&run))?;
        if code == 0 && streams.is_redirected() {
            code = exit_status::INCOMPLETE;
        }
    }
    if let Some(hint) = exit_status::network_hint(&run) {
        streams.write_note(hint)?;
    }
    if let Some(message) = exit_status::message(&run) {
        let prefix = if exit_status::is_failure(code) { "error" } else { "codelia" };
        streams.write_message(&format!("{prefix}: {message}"))?;
    }
    if output.is_json() {
        streams.write_record(&run_record(&run)?.to_string())?;
    }
    Ok(ExitCode::from(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn working_directory_may_start_at_the_workspace() {
        for (given, sent) in [
            ("src", "src"),
            ("/workspace", ""),
            ("/workspace/src", "src"),
            ("/workspaces", "/workspaces"),
        ] {
            assert_eq!(working_directory(given), sent, "{given}");
        }
    }
}
