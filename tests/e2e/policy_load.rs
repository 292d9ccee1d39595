//! Policies at the limit, by one tenant: no lease is lost, and the run of another tenant ends as if
//! nothing happened.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_policy::size::{MAX_BYTES, MAX_PATHS, MAX_PATTERNS};
use codelia_proto::v1::{
    CheckPolicyRequest, CommandPolicy, CreateSessionRequest, EnvironmentMode, EnvironmentPolicy,
    FilesystemPolicy, Policy, SandboxMode, StartRunRequest, TextList, outcome::Kind::Exited,
};
use codelia_tests::{Client, Cluster, ClusterOptions, command, eventually, refusal, shell};
use futures::future::join_all;
use prost::Message;
use rustix::process::Signal;
use tonic::{Code, Status};

use crate::isolation::is_usable;

const INCARNATIONS: &str = "SELECT count(DISTINCT incarnation) FROM workers";
const FENCED: &str = "SELECT count(*) FROM audit WHERE kind = 'WORKER_FENCED'";

/// Api and worker in one process, so that work for a caller could delay the lease keeper.
async fn all_in_one(mode: &'static str) -> Result<Option<Cluster>> {
    let settings = vec![("CODELIA_SANDBOX_MODE", mode.to_owned())];
    let shape = ClusterOptions { apis: 0, workers: 0, settings, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    if mode != "logical" && !is_usable(&cluster, mode).await? {
        cluster.end().await?;
        return Ok(None);
    }
    cluster.add_up().await?;
    Ok(Some(cluster))
}

/// The worker that registered first, if nothing registered since.
async fn incarnation(cluster: &Cluster) -> Result<i64> {
    const HASH: &str = "SELECT hashtext(incarnation::text)::bigint FROM workers";
    ensure!(cluster.database.number(INCARNATIONS).await? == 1, "one worker");
    cluster.database.number(HASH).await
}

/// A run of another tenant that lasts until its file `go` exists.
struct Neighbour {
    client: Client,
    run: String,
    session: String,
}

impl Neighbour {
    async fn start(cluster: &Cluster) -> Result<Self> {
        let client = cluster.tenant("neighbour").await?;
        let session = client.session().await?;
        let script = "echo begun; touch begun; until [ -e go ]; do sleep 0.05; done; echo done";
        let run = client.start(shell(&session.name, script)).await?;
        eventually("the neighbour's run begins", || async {
            client.get(&session.name, "begun").await.ok()
        })
        .await;
        Ok(Self { client, run: run.name, session: session.name })
    }

    async fn finish(self) -> Result<()> {
        self.client.put(&self.session, "go", "").await?;
        let seen = self.client.watch_to_end(&self.run, 0).await?;
        assert_eq!((seen.stdout_text().as_str(), seen.outcome()), ("begun\ndone\n", Exited(0)));
        Ok(())
    }
}

fn denying(denied_paths: Vec<String>) -> Policy {
    let filesystem = FilesystemPolicy { denied_paths, ..FilesystemPolicy::default() };
    Policy { filesystem: Some(filesystem), ..Policy::default() }
}

/// The same number of paths in three lists, all different, so that a comparison of all pairs would
/// find nothing until its end.
fn in_three_lists(number: usize, parents: &str) -> Policy {
    let paths = |name: &str| (0..number).map(|at| format!("/opt{parents}/{name}{at:04}")).collect();
    let list = |name| Some(TextList { values: paths(name) });
    let filesystem = FilesystemPolicy {
        read_only_paths: list("r"),
        read_write_paths: list("w"),
        denied_paths: paths("d"),
        ..FilesystemPolicy::default()
    };
    Policy { filesystem: Some(filesystem), ..Policy::default() }
}

/// As many and as long paths as a policy may have, nested as deeply as possible.
fn largest_paths() -> Policy {
    let length = MAX_BYTES / MAX_PATHS - 16;
    let parents = "/directory".repeat(length / 10);
    denying((0..MAX_PATHS).map(|number| format!("{parents}/{number:04}")).collect())
}

/// As many patterns and names as a policy may have. Mode `logical` can enforce it.
fn largest_lists() -> Policy {
    let texts =
        |name: &str, count: usize| (0..count).map(|n| format!("{name}{n:04}")).collect::<Vec<_>>();
    let blocked_patterns =
        (0..MAX_PATTERNS).map(|n| format!("^blocked{n} [a-z]{{1,50}}$")).collect();
    let names = TextList { values: texts("VARIABLE_", 1000) };
    Policy {
        command: Some(CommandPolicy { blocked_patterns, ..CommandPolicy::default() }),
        environment: Some(EnvironmentPolicy {
            mode: EnvironmentMode::Explicit.into(),
            names: Some(names),
        }),
        ..Policy::default()
    }
}

async fn check(client: &Client, policy: Policy, mode: SandboxMode) -> Result<(), Status> {
    let request = CheckPolicyRequest { policy: Some(policy), mode: mode.into() };
    client.policies().check_policy(request).await.map(drop)
}

#[tokio::test]
async fn hostile_policies_cost_no_lease() -> Result<()> {
    let Some(cluster) = all_in_one("logical").await? else { return Ok(()) };
    let neighbour = Neighbour::start(&cluster).await?;
    let hostile = cluster.tenant("hostile").await?;
    let session = hostile.session().await?;
    let before = incarnation(&cluster).await?;
    let oversized = in_three_lists(333, &"/a".repeat(1950));
    ensure!(oversized.encoded_len() > 3 << 20, "the message is large");
    let refused =
        join_all((0..3).map(|_| check(&hostile, oversized.clone(), SandboxMode::Bwrap))).await;
    assert!(refused.iter().all(Result::is_err), "{refused:?}");
    let checks = (0..3).map(|_| check(&hostile, largest_paths(), SandboxMode::Bwrap));
    let checked = join_all(checks).await;
    assert!(
        checked.iter().all(Result::is_ok),
        "the control: the largest policy is valid: {checked:?}"
    );
    // The installation opens none of these paths, which is found after they were compared.
    let conflicting = in_three_lists(MAX_PATHS / 3, &"/directory".repeat(46));
    let refused = join_all((0..3).map(|_| {
        let policy = Some(conflicting.clone());
        hostile.start(StartRunRequest { policy, ..command(&session.name, &["true"]) })
    }));
    for refused in refused.await {
        let refused = refusal(&refused.expect_err("a path that is not open"));
        assert_eq!(refused.fields, ["policy.filesystem.read_only_paths[0]"]);
    }
    let starts = (0..3).map(|_| {
        let policy = Some(largest_lists());
        hostile.start(StartRunRequest { policy, ..command(&session.name, &["true"]) })
    });
    for run in join_all(starts).await {
        assert_eq!(hostile.watch_to_end(&run?.name, 0).await?.outcome(), Exited(0));
    }
    neighbour.finish().await?;
    assert_eq!(incarnation(&cluster).await?, before);
    assert_eq!(cluster.database.number(FENCED).await?, 0);
    cluster.end().await
}

#[tokio::test]
async fn lost_lease_changes_incarnation() -> Result<()> {
    let Some(cluster) = all_in_one("logical").await? else { return Ok(()) };
    let before = incarnation(&cluster).await?;
    cluster.apis[0].process.signal(Signal::STOP)?;
    eventually("the lease expires", || async {
        let expired = "SELECT count(*) FROM workers WHERE lease_until < now()";
        (cluster.database.number(expired).await.ok()? == 1).then_some(())
    })
    .await;
    cluster.apis[0].process.signal(Signal::CONT)?;
    eventually("the control: a lost lease is seen", || async {
        let is_fenced = cluster.database.number(FENCED).await.ok()? > 0;
        (is_fenced && incarnation(&cluster).await.ok()? != before).then_some(())
    })
    .await;
    cluster.end().await
}

/// Directories of the host's runtime, which a sandbox would show.
fn runtime_directories(below: &Path, found: &mut Vec<String>) -> Result<()> {
    let mut entries = fs::read_dir(below)?.collect::<Result<Vec<_>, _>>()?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries.iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if found.len() == MAX_PATHS {
            return Ok(());
        }
        found.push(entry.path().to_str().context("a path in UTF-8")?.to_owned());
        runtime_directories(&entry.path(), found)?;
    }
    Ok(())
}

#[tokio::test]
async fn largest_denied_paths_cost_no_lease_in_bwrap() -> Result<()> {
    let Some(cluster) = all_in_one("bwrap").await? else { return Ok(()) };
    let neighbour = Neighbour::start(&cluster).await?;
    let hostile = cluster.tenant("hostile").await?;
    let before = incarnation(&cluster).await?;
    let mut denied = Vec::new();
    runtime_directories(Path::new("/usr/share"), &mut denied)?;
    ensure!(
        denied.len() == MAX_PATHS,
        "the host has {} directories below /usr/share",
        denied.len()
    );
    let request =
        CreateSessionRequest { policy: Some(denying(denied.clone())), ..Default::default() };
    let session = hostile.create(request).await?;
    let list = ["ls", "-A", denied[0].as_str()];
    let runs = join_all((0..3).map(|_| hostile.start(command(&session.name, &list)))).await;
    for run in runs {
        let seen = hostile.watch_to_end(&run?.name, 0).await?;
        assert_eq!(seen.stdout_text(), "", "the path is hidden");
        assert_eq!(seen.outcome(), Exited(2), "{:?}", seen.stderr_text());
    }
    neighbour.finish().await?;
    assert_eq!(incarnation(&cluster).await?, before);
    assert_eq!(cluster.database.number(FENCED).await?, 0);
    cluster.end().await
}

#[tokio::test]
async fn flood_of_large_policies_is_refused() -> Result<()> {
    let cluster = Cluster::start().await?;
    let (hostile, other) = (cluster.tenant("hostile").await?, cluster.tenant("other").await?);
    let flood = join_all((0..400).map(|_| check(&hostile, largest_lists(), SandboxMode::Logical)));
    let (checked, others) =
        futures::future::join(flood, check(&other, largest_lists(), SandboxMode::Logical)).await;
    others?;
    let refused: Vec<_> = checked.iter().filter_map(|result| result.as_ref().err()).collect();
    assert!(refused.len() < checked.len(), "the control: some are checked");
    let refused = refusal(refused.first().context("some are refused")?);
    assert_eq!((refused.code, refused.reason.as_str()), (Code::ResourceExhausted, "RATE_LIMITED"));
    assert!(refused.quotas.contains(&"policy_checks".to_owned()) && refused.retry_after.is_some());
    cluster.end().await
}
