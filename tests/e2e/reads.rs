//! Reads that a person decides about while the command waits (`filesystem.mode: dynamic`).

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    Approval, ApprovalDecision, ApprovalFilter, ApprovalKind, ApprovalReach, ApprovalScope,
    ApprovalState, CancelRunRequest, CreateSessionRequest, DecideApprovalRequest, FilesystemMode,
    FilesystemPolicy, GetApprovalRequest, ListApprovalsRequest, Policy, PolicyScope,
    RevokeApprovalRequest, Run, SandboxMode, SetScopePolicyRequest, TextList, outcome::Kind,
};
use codelia_store::Scope;
use codelia_tests::{
    Client, Cluster, Process, Scratch, Transcript, available, eventually, is_root, refusal, shell,
};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::isolation::isolating_with;

/// An installation that opens a directory of the host, a caller and a person who decides.
struct Place {
    cluster: Cluster,
    caller: Client,
    decider: Client,
    /// The directory, with the files `one` and `two`.
    files: PathBuf,
    _host: TempDir,
    /// Holds the policy, which a restarted process reads again.
    _scratch: Scratch,
}

impl Place {
    async fn start(mut settings: Vec<(&'static str, String)>) -> Result<Option<Self>> {
        // Not in /tmp, of which a sandbox has its own.
        if !available("root", (!is_root()).then_some("only root can write to /srv")) {
            return Ok(None);
        }
        let (scratch, host) = (Scratch::new()?, tempfile::tempdir_in("/srv")?);
        let files = host.path().to_owned();
        fs::set_permissions(&files, fs::Permissions::from_mode(0o755))?;
        for name in ["one", "two"] {
            fs::write(files.join(name), format!("content of {name}\n"))?;
        }
        let policy = scratch.join("policy.yaml");
        fs::write(&policy, format!("filesystem: {{read_only_paths: [{}]}}", files.display()))?;
        settings.push(("CODELIA_SANDBOX_POLICY", policy.display().to_string()));
        let Some(cluster) = isolating_with("bwrap", 1, settings).await? else { return Ok(None) };
        let caller = cluster.tenant("a").await?;
        let decider = caller.with_secret(&cluster.key("a", &[Scope::Approve]).await?)?;
        Ok(Some(Self { cluster, caller, decider, files, _host: host, _scratch: scratch }))
    }

    /// A session whose reads wait.
    async fn session(&self) -> Result<String> {
        Ok(self.caller.create(self.asking(SandboxMode::Unspecified)).await?.name)
    }

    fn asking(&self, mode: SandboxMode) -> CreateSessionRequest {
        let filesystem = FilesystemPolicy {
            mode: FilesystemMode::Dynamic.into(),
            read_only_paths: Some(TextList { values: vec![self.files.display().to_string()] }),
            ..FilesystemPolicy::default()
        };
        let policy = Some(Policy { filesystem: Some(filesystem), ..Policy::default() });
        CreateSessionRequest { policy, mode: mode.into(), ..CreateSessionRequest::default() }
    }

    /// Starts to read files.
    async fn read(&self, session: &str, names: &str) -> Result<Run> {
        let script = format!("cd {}; cat {names} 2>&1; echo over", self.files.display());
        Ok(self.caller.start(shell(session, &script)).await?)
    }

    async fn result(&self, run: &Run) -> Result<Transcript> {
        Ok(self.caller.watch_to_end(&run.name, 0).await?)
    }

    /// What a run reads, without asking.
    async fn reads(&self, session: &str, names: &str) -> Result<String> {
        let run = self.read(session, names).await?;
        Ok(self.result(&run).await?.stdout_text())
    }

    /// Waits for the request of a run.
    async fn pending(&self, run: &Run) -> Approval {
        eventually("a read waits", || async {
            let request = ListApprovalsRequest {
                parent: "sessions/-".into(),
                filter: ApprovalFilter::Pending.into(),
                ..ListApprovalsRequest::default()
            };
            let listed = self.decider.approvals().list_approvals(request).await.ok()?.into_inner();
            listed.approvals.into_iter().find(|approval| approval.run_id == run.run_id)
        })
        .await
    }

    async fn state(&self, approval: &Approval) -> Result<Approval> {
        let request = GetApprovalRequest { name: approval.name.clone() };
        let found = self.decider.approvals().get_approval(request).await?.into_inner();
        found.approval.context("an approval")
    }

    async fn decide(
        &self,
        approval: &Approval,
        decision: ApprovalDecision,
        (scope, reach): (ApprovalScope, ApprovalReach),
    ) -> Result<Approval, tonic::Status> {
        let request = DecideApprovalRequest {
            name: approval.name.clone(),
            decision: decision.into(),
            scope: scope.into(),
            reach: reach.into(),
            reason: "checked".into(),
        };
        let decided = self.decider.approvals().decide_approval(request).await?.into_inner();
        decided.approval.ok_or_else(|| tonic::Status::internal("no approval"))
    }

    async fn allow(
        &self,
        run: &Run,
        scope: ApprovalScope,
        reach: ApprovalReach,
    ) -> Result<Approval> {
        let approval = self.pending(run).await;
        Ok(self.decide(&approval, ApprovalDecision::Allow, (scope, reach)).await?)
    }
}

#[tokio::test]
async fn allowed_read_continues_and_is_remembered() -> Result<()> {
    let Some(place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let session = place.session().await?;
    let run = place.read(&session, "one two one").await?;
    let asked = place.pending(&run).await;
    ensure!(asked.kind() == ApprovalKind::FileRead, "{asked:?}");
    ensure!(asked.path == place.files.join("one").display().to_string(), "{asked:?}");
    let allowed = place.allow(&run, ApprovalScope::Once, ApprovalReach::Unspecified).await?;
    ensure!(allowed.reach() == ApprovalReach::File, "{allowed:?}");
    // The other file of the directory is asked for on its own.
    place.allow(&run, ApprovalScope::Session, ApprovalReach::Directory).await?;
    let done = place.result(&run).await?;
    let (one, two) = ("content of one\n", "content of two\n");
    ensure!(done.stdout_text() == format!("{one}{two}{one}over\n"), "{done:?}");
    // The directory is granted to the session, and to no other one.
    ensure!(place.reads(&session, "one two").await? == format!("{one}{two}over\n"));
    let other = place.session().await?;
    let run = place.read(&other, "two").await?;
    let granted = place.allow(&run, ApprovalScope::Tenant, ApprovalReach::File).await?;
    ensure!(place.result(&run).await?.stdout_text() == format!("{two}over\n"));
    // The file is granted to the tenant, until that is revoked.
    let third = place.session().await?;
    ensure!(place.reads(&third, "two").await? == format!("{two}over\n"));
    let revoke = RevokeApprovalRequest { name: granted.name, reason: String::new() };
    place.decider.approvals().revoke_approval(revoke).await?;
    let run = place.read(&third, "two").await?;
    let asked = place.pending(&run).await;
    place
        .decide(&asked, ApprovalDecision::Deny, (ApprovalScope::Unspecified, ApprovalReach::File))
        .await?;
    let text = place.result(&run).await?.stdout_text();
    ensure!(text.contains("Permission denied") && !text.contains("content"), "{text}");
    place.cluster.end().await
}

#[tokio::test]
async fn one_of_two_deciders_counts() -> Result<()> {
    let Some(place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let session = place.session().await?;
    for _ in 0..3 {
        let run = place.read(&session, "one").await?;
        let asked = place.pending(&run).await;
        let (once, denied) = (
            (ApprovalScope::Once, ApprovalReach::File),
            (ApprovalScope::Unspecified, ApprovalReach::Directory),
        );
        let (allow, deny) = tokio::join!(
            place.decide(&asked, ApprovalDecision::Allow, once),
            place.decide(&asked, ApprovalDecision::Deny, denied),
        );
        ensure!(allow.is_ok() != deny.is_ok(), "{allow:?} {deny:?}");
        let is_allowed = allow.is_ok();
        let late = allow.and(deny).expect_err("the second one");
        ensure!(refusal(&late).reason == "APPROVAL_DECIDED", "{late:?}");
        let text = place.result(&run).await?.stdout_text();
        ensure!(text.contains("content of one") == is_allowed, "{text}");
    }
    place.cluster.end().await
}

#[tokio::test]
async fn read_that_nobody_decides_about_is_denied() -> Result<()> {
    let settings = vec![("CODELIA_SANDBOX_READ_TIMEOUT", "1s".to_owned())];
    let Some(place) = Place::start(settings).await? else { return Ok(()) };
    let session = place.session().await?;
    let run = place.read(&session, "one").await?;
    let asked = place.pending(&run).await;
    let text = place.result(&run).await?.stdout_text();
    ensure!(text.contains("Permission denied") && !text.contains("content"), "{text}");
    ensure!(place.state(&asked).await?.state() == ApprovalState::Expired);
    // A mode that cannot have reads wait refuses the session or its runs by field.
    let logical =
        place.caller.create(place.asking(SandboxMode::Logical)).await.expect_err("cannot enforce");
    ensure!(!refusal(&logical).fields.is_empty(), "{logical:?}");
    place.cluster.end().await
}

#[tokio::test]
async fn waiting_read_ends_with_its_run() -> Result<()> {
    let Some(place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let session = place.session().await?;
    let run = place.read(&session, "one").await?;
    let asked = place.pending(&run).await;
    let cancel = CancelRunRequest { name: run.name.clone(), ..CancelRunRequest::default() };
    place.caller.runs().cancel_run(cancel).await?;
    let done = place.result(&run).await?;
    ensure!(
        matches!(done.outcome(), Kind::Canceled(_)) && done.stdout_text().is_empty(),
        "{done:?}"
    );
    eventually("the request is withdrawn", || async {
        let now = place.state(&asked).await.ok()?;
        (now.state() == ApprovalState::Expired && now.reason == "the run ended").then_some(())
    })
    .await;
    place.cluster.end().await
}

#[tokio::test]
async fn waiting_read_survives_api_and_dies_with_worker() -> Result<()> {
    let Some(mut place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let session = place.session().await?;
    let run = place.read(&session, "one").await?;
    place.pending(&run).await;
    place.cluster.apis[0].process.signal(Signal::KILL)?;
    place.cluster.apis[0].process.exited().await?;
    place.cluster.restart_api(0).await?;
    let endpoint = place.cluster.endpoint(0);
    place.caller = Client::connect(&endpoint, &place.caller.secret).await?;
    place.decider = Client::connect(&endpoint, &place.decider.secret).await?;
    place.allow(&run, ApprovalScope::Once, ApprovalReach::File).await?;
    let done = place.result(&run).await?;
    ensure!(done.stdout_text() == "content of one\nover\n", "{done:?}");

    let run = place.read(&session, "one two").await?;
    let asked = place.pending(&run).await;
    place.cluster.workers[0].process.signal(Signal::KILL)?;
    place.cluster.workers[0].process.exited().await?;
    // Nobody is left to read it.
    place
        .decide(&asked, ApprovalDecision::Allow, (ApprovalScope::Once, ApprovalReach::Directory))
        .await?;
    place.cluster.restart_worker(0).await?;
    let done = place.result(&run).await?;
    ensure!(matches!(done.outcome(), Kind::Lost(_)), "{done:?}");
    ensure!(!done.stdout_text().contains("content"), "{done:?}");
    place.cluster.end().await
}

/// A session of another key of the tenant, or of a project.
impl Place {
    async fn session_of(&self, client: &Client, project: &str) -> Result<String> {
        let project = project.to_owned();
        let request = CreateSessionRequest { project, ..self.asking(SandboxMode::Unspecified) };
        Ok(client.create(request).await?.name)
    }

    async fn set_policy(
        &self,
        client: &Client,
        scope: PolicyScope,
        name: &str,
        fields: &[&str],
    ) -> Result<()> {
        let delegate = fields.iter().map(|field| (*field).to_owned()).collect();
        let request = SetScopePolicyRequest {
            scope: scope.into(),
            name: name.into(),
            policy: Some(Policy { delegate, ..Policy::default() }),
            reason: "tests".into(),
            expected_version: None,
        };
        client.policies().set_scope_policy(request).await?;
        Ok(())
    }

    /// Whether a run of the session reads a file without a new decision. What waits is denied.
    async fn is_granted(&self, session: &str, name: &str) -> Result<bool> {
        let run = self.read(session, name).await?;
        let done = async { self.result(&run).await.map(Some) };
        let asked = async {
            let asked = self.pending(&run).await;
            let nothing = (ApprovalScope::Unspecified, ApprovalReach::File);
            self.decide(&asked, ApprovalDecision::Deny, nothing).await?;
            anyhow::Ok(None)
        };
        let granted = tokio::select! { done = done => done, asked = asked => asked }?;
        Ok(granted.is_some_and(|done| done.stdout_text().contains("content")))
    }
}

#[tokio::test]
async fn decision_is_kept_for_user_or_project() -> Result<()> {
    const FIELD: &str = "filesystem.read_only_paths";
    let Some(place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let operator = place.cluster.operator().await?;
    let other = place.caller.with_secret(&place.cluster.key("a", &[Scope::Run]).await?)?;
    let caller = &place.caller;
    for project in ["web", "shop"] {
        place.set_policy(caller, PolicyScope::Project, project, &[]).await?;
    }
    let (own, web) = (place.session().await?, place.session_of(&other, "web").await?);

    // Nothing is delegated: refused with the field, and the read still waits.
    let run = place.read(&web, "one").await?;
    let asked = place.pending(&run).await;
    for scope in [ApprovalScope::User, ApprovalScope::Project] {
        let allow = (scope, ApprovalReach::File);
        let refused =
            place.decide(&asked, ApprovalDecision::Allow, allow).await.expect_err("not delegated");
        ensure!(refused.message().contains(FIELD), "{refused:?}");
        ensure!(refusal(&refused).fields == ["scope"], "{refused:?}");
        ensure!(place.state(&asked).await?.state() == ApprovalState::Pending);
    }
    place.set_policy(&operator, PolicyScope::Organisation, "a", &[FIELD]).await?;
    let allow = (ApprovalScope::User, ApprovalReach::File);
    let refused =
        place.decide(&asked, ApprovalDecision::Allow, allow).await.expect_err("by the project");
    ensure!(refused.message().contains("project"), "{refused:?}");
    let decided = place.allow(&run, ApprovalScope::Project, ApprovalReach::File).await?;
    ensure!((decided.scope(), &*decided.subject) == (ApprovalScope::Project, "web"), "{decided:?}");
    ensure!(place.result(&run).await?.stdout_text().contains("content of one"));

    // It holds for all sessions of the project, and for nothing else.
    ensure!(place.is_granted(&place.session_of(caller, "web").await?, "one").await?);
    ensure!(!place.is_granted(&place.session_of(caller, "shop").await?, "one").await?);
    ensure!(!place.is_granted(&own, "one").await?);

    // A user: all sessions that the same key creates.
    let run = place.read(&own, "two").await?;
    let asked = place.pending(&run).await;
    let project = (ApprovalScope::Project, ApprovalReach::File);
    let refused =
        place.decide(&asked, ApprovalDecision::Allow, project).await.expect_err("has no project");
    ensure!(refused.message().contains("no project"), "{refused:?}");
    place.allow(&run, ApprovalScope::User, ApprovalReach::File).await?;
    place.result(&run).await?;
    ensure!(place.is_granted(&place.session().await?, "two").await?);
    ensure!(!place.is_granted(&place.session_of(&other, "").await?, "two").await?);
    ensure!(
        !place.is_granted(&place.session_of(caller, "shop").await?, "two").await?,
        "shop delegates nothing"
    );

    // As long as the organisation delegates the field.
    place.set_policy(&operator, PolicyScope::Organisation, "a", &[]).await?;
    ensure!(!place.is_granted(&place.session().await?, "two").await?);
    place.cluster.end().await
}

/// The example knows nothing but the protocol.
#[tokio::test]
async fn supervisor_shows_who_reads() -> Result<()> {
    let missing =
        (!Path::new("/usr/bin/python3").exists()).then_some("/usr/bin/python3 is missing");
    if !available("python", missing) {
        return Ok(());
    }
    let Some(place) = Place::start(Vec::new()).await? else { return Ok(()) };
    let operator = place.cluster.operator().await?;
    place
        .set_policy(&operator, PolicyScope::Organisation, "a", &["filesystem.read_only_paths"])
        .await?;
    let socket = place.cluster.directory().join("supervisor.sock");
    let path = socket.to_str().context("the path is text")?;
    let command = place.cluster.cli(&place.decider, &["supervisor", "--socket", path]);
    let mut supervisor = Process::start("supervisor", command, place.cluster.directory())?;
    eventually("it listens", || async { tokio::net::UnixStream::connect(&socket).await.ok() })
        .await;
    let run = place.read(&place.session().await?, "one").await?;
    let mut example = Command::new("/usr/bin/python3");
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/supervisor.py");
    example.arg(program).arg(&socket).args([
        "--approve",
        "file_read",
        "--save",
        "user",
        "--count",
        "1",
    ]);
    let example = Process::finish(example, b"").await?;
    ensure!(example.code == Some(0), "{example:?}");
    let events: Vec<Value> =
        example.stdout.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
    let (request, decision) = (&events[0], &events[1]);
    ensure!(request["path"] == place.files.join("one").display().to_string(), "{request}");
    ensure!(request["cwd"] == place.files.display().to_string(), "{request}");
    ensure!(request["exe"].as_str().is_some_and(|exe| exe.contains("/bin/")), "{request}");
    ensure!(
        request["pid"].as_u64().is_some_and(|pid| (2..1000).contains(&pid)),
        "in the sandbox: {request}"
    );
    ensure!(
        (&decision["decision"], &decision["scope"]) == (&"approve".into(), &"user".into()),
        "{decision}"
    );
    ensure!(place.result(&run).await?.stdout_text() == "content of one\nover\n");
    ensure!(
        place.is_granted(&place.session().await?, "one").await?,
        "for the next session of the user"
    );
    ensure!(supervisor.terminate().await?.success());
    place.cluster.end().await
}
