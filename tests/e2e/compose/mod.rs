//! `deploy/compose.yaml` on a real engine: the containers are created as the file says, without the
//! program `docker compose`. The programs are those of this build, and Postgres is the host's.

mod project;

use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CreateSessionRequest, ListWorkersRequest, Run, SandboxMode, StartRunRequest, Worker,
    WorkerState, outcome,
};
use codelia_tests::{Client, ENGINE_SOCKET, available, eventually, shell};
use futures::future::try_join_all;
use tonic::{
    Code, Status,
    transport::{Certificate, ClientTlsConfig},
};

use project::{Project, Service};

const APIS: [&str; 2] = ["api-1", "api-2"];
const WORKERS: [&str; 2] = ["worker-1", "worker-2"];
/// Sessions that run commands at the same time.
const CALLERS: usize = 6;
/// Longer than the usual one: other containers start meanwhile, and a session has to move.
const RUN_TIMEOUT: Duration = Duration::from_secs(120);

/// A reader of the file sees at once if something gains privileges.
#[test]
fn services_have_no_privileges() -> Result<()> {
    let project = Project::read()?;
    for (name, service) in &project.services {
        ensure!(service.cap_drop == ["ALL"], "{name} drops all capabilities");
        ensure!(
            service.security_opt.iter().any(|option| option == "no-new-privileges:true"),
            "{name}"
        );
        let unconfined =
            |option: &&String| option.contains("seccomp") && option.contains("unconfined");
        ensure!(!service.security_opt.iter().any(|option| unconfined(&option)), "{name}");
        let added: &[&str] = if name == "setup" { &["CHOWN"] } else { &[] };
        ensure!(service.cap_add == added, "{name}: {:?}", service.cap_add);
        let is_root = service.user.starts_with('0');
        ensure!(is_root == (name == "setup"), "{name} runs as {}", service.user);
    }
    Ok(())
}

/// The calls of the profile of workers that Docker's default denies are those of the table in the
/// page.
#[test]
fn seccomp_profile_adds_only_documented_calls() -> Result<()> {
    let read =
        |path: &str| std::fs::read_to_string(deploy().join(path)).with_context(|| path.to_owned());
    let profile: serde_json::Value = serde_json::from_str(&read("codelia-worker-seccomp.json")?)?;
    let (page, calls) = (read("../docs/compose.md")?, read("../docs/syscalls.md")?);
    let documented = page.split("and in\naddition:").nth(1).context("the table")?;
    let documented = documented.split("\n\n").nth(1).context("its rows")?;
    // | Codelia | Docker | in gVisor | calls |
    let denied = calls
        .lines()
        .filter(|line| line.split('|').nth(2).is_some_and(|cell| cell.trim() == "denied"));
    let denied: String = denied.collect();
    let is_named = |text: &str, call: &str| text.contains(&format!("`{call}`"));
    let mut added = 0;
    for rule in profile["syscalls"].as_array().context("rules")? {
        let is_added =
            rule["comment"].as_str().is_some_and(|comment| comment.starts_with("In addition"));
        let names =
            rule["names"].as_array().into_iter().flatten().filter_map(serde_json::Value::as_str);
        for name in names.filter(|_| rule["action"] == "SCMP_ACT_ALLOW") {
            ensure!(!is_added || is_named(documented, name), "{name} is not in the table");
            ensure!(is_added || !is_named(&denied, name), "Docker denies {name}");
            added += usize::from(is_named(&denied, name));
        }
    }
    ensure!(added > 10, "the control: {added} calls are known to be denied by Docker");
    Ok(())
}

/// A caller with both apis. Repeats a call at the other one if an api does not answer.
struct Caller {
    clients: Vec<Client>,
    /// The api that answered last.
    usable: AtomicUsize,
}

impl Caller {
    async fn call<T>(&self, call: impl AsyncFn(Client) -> Result<T, Status>) -> Result<T> {
        let first = self.usable.load(Ordering::Relaxed);
        for api in (first..first + 40).map(|number| number % APIS.len()) {
            let called = call(self.clients[api].clone());
            match tokio::time::timeout(Duration::from_secs(5), called).await {
                Ok(Ok(answer)) => {
                    self.usable.store(api, Ordering::Relaxed);
                    return Ok(answer);
                }
                Ok(Err(status)) if !is_retryable(&status) => return Err(status.into()),
                Ok(Err(_)) | Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
        anyhow::bail!("no api answered")
    }

    async fn session(&self) -> Result<String> {
        let idempotency_key = uuid::Uuid::new_v4().to_string();
        let request = CreateSessionRequest { idempotency_key, ..CreateSessionRequest::default() };
        Ok(self.call(async |client| client.create(request.clone()).await).await?.name)
    }

    /// Runs a script to its end.
    async fn run(&self, session: &str, script: &str) -> Result<Run> {
        let idempotency_key = uuid::Uuid::new_v4().to_string();
        let request = StartRunRequest { idempotency_key, retries: 3, ..shell(session, script) };
        let run = self.call(async |client| client.start(request.clone()).await).await?.name;
        let deadline = Instant::now() + RUN_TIMEOUT;
        loop {
            let found = self.call(async |client| client.get_run(&run).await).await?;
            if found.outcome.is_some() {
                return Ok(found);
            }
            // An error, not a panic: it is shown with the logs of the services.
            ensure!(Instant::now() < deadline, "the run does not end: {found:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What an ordinary retry policy of gRPC repeats, and a connection that broke.
fn is_retryable(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Unknown | Code::Cancelled)
}

fn has_succeeded(run: &Run) -> bool {
    matches!(
        run.outcome.as_ref().and_then(|outcome| outcome.kind.as_ref()),
        Some(outcome::Kind::Exited(0))
    )
}

#[tokio::test]
async fn compose_serves_runs_through_deaths() -> Result<()> {
    let missing = std::env::var_os(ENGINE_SOCKET).is_none().then_some("no container engine");
    if !available("container", missing) {
        return Ok(());
    }
    let project = Project::read()?.start().await?;
    let result = serve_runs_through_deaths(&project).await;
    result.with_context(|| project.logs())?;
    project.remove()
}

async fn serve_runs_through_deaths(project: &project::Started) -> Result<()> {
    let caller = connect(project).await?;
    let session = caller.session().await?;
    let run = caller.run(&session, ISOLATED).await?;
    ensure!(has_succeeded(&run), "{run:?}");
    ensure!(run.mode() == SandboxMode::Native, "{run:?}");
    // The control: the worker itself sees what its sandbox must not see.
    project
        .exec("worker-1", &["sh", "-c", "test -e /setup/codelia && test -e /var/lib/codelia"])?;

    let (runs, is_killed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let used = Mutex::new(WORKERS[0]);
    let callers =
        try_join_all((0..CALLERS).map(|_| use_session(&caller, &runs, &used, &is_killed)));
    let kill = async {
        let run_often = || async { (runs.load(Ordering::Relaxed) > 2 * CALLERS).then_some(()) };
        eventually("every session runs", run_often).await;
        project.kill(APIS[0])?;
        // One that has sessions: the other may have none.
        let worker = *used.lock().unwrap_or_else(PoisonError::into_inner);
        project.kill(worker)?;
        is_killed.store(true, Ordering::Relaxed);
        anyhow::Ok(())
    };
    let (workers, ()) = tokio::try_join!(callers, kill)?;
    let on = |id: &str| workers.iter().flatten().any(|worker| worker.ends_with(id));
    ensure!(on(WORKERS[0]) && on(WORKERS[1]), "both workers had runs: {workers:?}");
    Ok(())
}

/// Succeeds only in a sandbox: it has its own user, processes and files.
const ISOLATED: &str = "test $(id -u) = 1000 && test ! -e /setup && test ! -e /var/lib/codelia &&
    test $(ls /proc | grep -c ^[0-9]) -le 9 && ! echo x > /usr/x && echo fine > file && cat file";

/// Runs commands until some have run after the death of the worker. Returns the workers.
async fn use_session(
    caller: &Caller,
    runs: &AtomicUsize,
    used: &Mutex<&str>,
    is_killed: &AtomicBool,
) -> Result<Vec<String>> {
    let session = caller.session().await?;
    let (mut workers, mut after) = (Vec::new(), 0);
    while after < 3 {
        after += usize::from(is_killed.load(Ordering::Relaxed));
        let run = caller.run(&session, "echo started; sleep 0.3; echo done >> file").await?;
        ensure!(has_succeeded(&run), "a run was lost: {run:?}");
        runs.fetch_add(1, Ordering::Relaxed);
        let worker =
            WORKERS.into_iter().find(|id| run.worker_id.ends_with(id)).context("worker")?;
        *used.lock().unwrap_or_else(PoisonError::into_inner) = worker;
        workers.push(run.worker_id);
    }
    Ok(workers)
}

async fn connect(project: &project::Started) -> Result<Caller> {
    let read = |path: &str| project.exec(APIS[0], &["cat", path]);
    let (authority, key) = (read("/setup/codelia/ca.pem")?, read("/setup/operator/operator.key")?);
    let mut clients = Vec::new();
    for api in APIS {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&authority))
            .domain_name(api);
        let endpoint = format!("https://{}:7300", project.address(api, "public")?);
        let connected =
            || async { Client::connect_tls(&endpoint, key.trim(), tls.clone()).await.ok() };
        clients.push(eventually("the api answers", connected).await);
    }
    wait_for_workers(&clients[0]).await?;
    Ok(Caller { clients, usable: AtomicUsize::new(0) })
}

/// They start as long as their checks of the host take.
async fn wait_for_workers(client: &Client) -> Result<()> {
    let deadline = Instant::now() + RUN_TIMEOUT;
    loop {
        let listed =
            client.admin().list_workers(ListWorkersRequest::default()).await?.into_inner().workers;
        let is_ready = |worker: &&Worker| worker.state() == WorkerState::Ready;
        if listed.iter().filter(is_ready).count() == WORKERS.len() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "the workers are not ready: {listed:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// The directory of the file, to which its paths are relative.
fn deploy() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../deploy"))
}

/// Whether a service is one of ours, which runs the image of this build.
fn is_own(service: &Service) -> bool {
    service.image == "${CODELIA_IMAGE:-codelia}"
}
