//! Transactional runs: all changes of the workspace, or none, also when the worker is killed.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    CancelRunRequest, ChangeKind, Changes, ChangesState, Run, SandboxMode, StartRunRequest,
    TransactionMode, outcome,
};
use codelia_tests::{Client, Cluster, Process, eventually, refusal, shell};
use rustix::process::{Pid, Signal, kill_process};
use tonic::Code;

use crate::{isolation::isolating, kills::started};

fn transactional(session: &str, script: &str) -> StartRunRequest {
    StartRunRequest { transaction: TransactionMode::Apply.into(), ..shell(session, script) }
}

/// Executes a run to its end.
pub(crate) async fn run(client: &Client, request: StartRunRequest) -> Result<Run> {
    let run = client.start(request).await?;
    client.watch_to_end(&run.name, 0).await?;
    Ok(client.get_run(&run.name).await?)
}

fn exit_code(run: &Run) -> Option<i32> {
    match run.outcome.as_ref()?.kind.as_ref()? {
        outcome::Kind::Exited(code) => Some(*code),
        _ => None,
    }
}

pub(crate) fn changes(run: &Run) -> Result<&Changes> {
    run.changes.as_ref().with_context(|| format!("{run:?}"))
}

/// The directories of transactions of all sessions, and what is in the trash.
fn leftovers(cluster: &Cluster) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for worker in &cluster.workers {
        for session in fs::read_dir(worker.root.join("sessions"))? {
            for entry in fs::read_dir(session?.path())? {
                found.extend(Some(entry?.path()).filter(|path| !path.ends_with("workspace")));
            }
        }
        for entry in fs::read_dir(worker.root.join("trash"))? {
            found.push(entry?.path());
        }
    }
    Ok(found)
}

pub(crate) async fn nothing_is_left(cluster: &Cluster) {
    let is_clean =
        || async { leftovers(cluster).is_ok_and(|found| found.is_empty()).then_some(()) };
    eventually("no changes are left", is_clean).await;
}

async fn changes_are_applied_or_dropped(mode: &'static str) -> Result<()> {
    let Some(cluster) = isolating(mode, 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let setup =
        "mkdir dir old; echo 1 > dir/file; echo 1 > old/file; echo 1 > gone; ln -s /etc out";
    ensure!(exit_code(&run(&client, shell(&session, setup)).await?) == Some(0));
    let list = "find . ! -name . -printf '%p %l %M %U ' -exec cat {} \\; 2>/dev/null | sort; id -u";
    let before = client.exec(&session, list).await?.stdout_text();

    // Inside, the command sees its changes; outside, nothing changes before its end.
    let script = "echo 2 > dir/file; rm gone; rm -r old; mkdir old; echo 2 > old/new; chmod 750 dir; \
                  rm out; mkdir out; echo 2 > out/passwd; cat dir/file old/new; exit";
    for (request, is_dropped) in [
        (transactional(&session, &format!("{script} 3")), true),
        (transactional(&session, &format!("unshare --user true; {script} 0")), true),
        (transactional(&session, &format!("{script} 0; ")), false),
    ] {
        let preview =
            StartRunRequest { transaction: TransactionMode::Preview.into(), ..request.clone() };
        for (request, is_dropped) in [(preview, true), (request, is_dropped)] {
            let ended = run(&client, request).await?;
            let changes = changes(&ended)?;
            let counts = (changes.added, changes.changed, changes.removed);
            ensure!(counts == (2, 4, 1), "{ended:?}");
            ensure!((changes.state() == ChangesState::Dropped) == is_dropped, "{ended:?}");
            let removed: Vec<_> = changes
                .entries
                .iter()
                .filter(|entry| entry.kind() == ChangeKind::Removed)
                .collect();
            ensure!(removed.len() == 1 && removed[0].path == "gone" && removed[0].size_bytes == 2);
            if is_dropped {
                ensure!(client.exec(&session, list).await?.stdout_text() == before, "{ended:?}");
            }
        }
    }
    let check =
        "cat dir/file old/new out/passwd; ls; stat -c '%a %u' dir; test ! -L out; ls old; id -u";
    let after = client.exec(&session, check).await?.stdout_text();
    ensure!(after == "2\n2\n2\ndir\nold\nout\n750 1000\nnew\n1000\n", "{after}");

    // A canceled run, and one that never starts.
    let canceled = client.start(transactional(&session, "echo 3 > dir/file; sleep 1000")).await?;
    started(&client, &canceled.name).await?;
    let refused = client.put(&session, "file", "text").await;
    let name = canceled.name.clone();
    client.runs().cancel_run(CancelRunRequest { name, ..Default::default() }).await?;
    let ended = client.watch_to_end(&canceled.name, 0).await?;
    ensure!(matches!(ended.outcome(), outcome::Kind::Canceled(_)), "{ended:?}");
    ensure!(
        refused.is_err_and(|status| status.code() == Code::Unavailable),
        "file calls keep away"
    );
    let missing = StartRunRequest {
        transaction: TransactionMode::Apply.into(),
        ..codelia_tests::command(&session, &["/no"])
    };
    ensure!(run(&client, missing).await?.changes.is_none());
    ensure!(client.exec(&session, check).await?.stdout_text() == after);
    nothing_is_left(&cluster).await;
    cluster.end().await
}

#[tokio::test]
async fn bwrap_changes_are_applied_or_dropped() -> Result<()> {
    changes_are_applied_or_dropped("bwrap").await
}

#[tokio::test]
async fn nsjail_changes_are_applied_or_dropped() -> Result<()> {
    changes_are_applied_or_dropped("nsjail").await
}

#[tokio::test]
async fn native_changes_are_applied_or_dropped() -> Result<()> {
    changes_are_applied_or_dropped("native").await
}

#[tokio::test]
async fn killed_worker_applies_all_or_nothing() -> Result<()> {
    let Some(mut cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let setup =
        "mkdir $(seq -f d%g 1000); for i in d*; do echo 0 > $i/file; echo 0 > $i/only-0; done";
    ensure!(exit_code(&run(&client, shell(&session, setup)).await?) == Some(0));
    let (mut number, mut halves) = (0, 0);
    for moment in [Moment::Prepared, Moment::Applying] {
        let next = number + 1;
        let script = format!(
            "rm d*/only-{number}; for i in d*; do echo {next} > $i/file; echo > $i/only-{next}; done"
        );
        let killed = client.start(transactional(&session, &script)).await?;
        let workspace = cluster.session_directories()?.pop().context("a session")?;
        kill_at(&mut cluster, &workspace, moment).await?;
        halves += usize::from(numbers(&workspace)?.len() > 1);
        cluster.restart_worker(0).await?;
        client.watch_to_end(&killed.name, 0).await?;
        let ended = client.get_run(&killed.name).await?;
        if ended.changes.as_ref().is_some_and(|it| it.state() == ChangesState::Applied) {
            number = next;
        } else {
            ensure!(moment == Moment::Prepared, "what is committed is applied: {ended:?}");
            ensure!(matches!(ended.outcome.and_then(|it| it.kind), Some(outcome::Kind::Lost(_))));
        }
        let list =
            "cat d*/file | sort -u; ls d*/only-* | sed s/.*-// | sort -u; ls d*/only-* | wc -l";
        let seen = client.exec(&session, list).await?.stdout_text();
        ensure!(seen == format!("{number}\n{number}\n1000\n"), "{moment:?}: {seen}");
    }
    println!("workers that were killed and left a part of the changes: {halves}");
    nothing_is_left(&cluster).await;
    cluster.end().await
}

/// When to kill the worker.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    /// The changes are prepared, and their run is not committed or just so.
    Prepared,
    /// The first changes are applied.
    Applying,
}

async fn kill_at(cluster: &mut Cluster, workspace: &Path, moment: Moment) -> Result<()> {
    let transactions = codelia_policy::transactions_dir(workspace);
    let pid = Pid::from_raw(i32::try_from(cluster.workers[0].process.pid())?).context("pid")?;
    let has_come = move |transaction: &Path| match moment {
        _ if !transaction.join("prepared").exists() => false,
        Moment::Prepared => true,
        Moment::Applying => {
            fs::read_dir(transaction.join("workspace/upper")).map_or(0, Iterator::count) < 1000
        }
    };
    let watch = move || -> Result<()> {
        let deadline = Instant::now() + codelia_tests::TIMEOUT;
        loop {
            let found = fs::read_dir(&transactions).into_iter().flatten().flatten();
            if found.map(|entry| entry.path()).any(|transaction| has_come(&transaction)) {
                return Ok(kill_process(pid, Signal::KILL)?);
            }
            ensure!(Instant::now() < deadline, "{moment:?} did not come");
        }
    };
    tokio::task::spawn_blocking(watch).await??;
    cluster.workers[0].process.exited().await?;
    Ok(())
}

/// The distinct contents of the files in a workspace.
fn numbers(workspace: &Path) -> Result<Vec<u32>> {
    let mut found = BTreeSet::new();
    for directory in fs::read_dir(workspace)? {
        found.insert(fs::read_to_string(directory?.path().join("file"))?.trim().parse()?);
    }
    Ok(found.into_iter().collect())
}

#[tokio::test]
async fn transaction_is_alone_and_refused_by_field() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    let logical =
        StartRunRequest { mode: SandboxMode::Logical.into(), ..transactional(&session, "true") };
    let status = client.start(logical).await.err().context("refused")?;
    ensure!(refusal(&status).fields == ["transaction"], "{status:?}");
    ensure!(status.message().contains("use mode native, bwrap or nsjail"), "{status:?}");

    // It waits for a run before it, and a run after it waits for it.
    let first = client.start(shell(&session, "echo 1 > file; sleep 1; echo 2 > file")).await?;
    started(&client, &first.name).await?;
    let second =
        client.start(transactional(&session, "cat file; sleep 1; echo 3 > file; cat file")).await?;
    let waits = || async {
        let listed = client.get_run(&second.name).await.ok()?;
        (!listed.worker_id.is_empty()).then_some(())
    };
    eventually("the second run is assigned", waits).await;
    let third = client.start(shell(&session, "cat file")).await?;
    for (name, expected) in [(&second.name, "2\n3\n"), (&third.name, "3\n")] {
        let ended = client.watch_to_end(name, 0).await?;
        ensure!(ended.stdout_text() == expected, "{name}: {}", ended.stdout_text());
    }
    cluster.end().await
}

#[tokio::test]
async fn diff_lists_changes_of_run() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let codelia = |arguments: &[&str]| Process::finish(cluster.cli(&client, arguments), b"");
    ensure!(codelia(&["session", "create", "--alias", "work"]).await?.code == Some(0));
    let script = "for i in $(seq 1100); do : > file-$i; done; printf '\\033[31m' > \"$(printf 'a\\033[31m')\"";
    let done =
        codelia(&["run", "--json", "-s", "work", "--transactional", "--", "sh", "-c", script])
            .await?;
    let record: serde_json::Value = serde_json::from_str(&done.stdout)?;
    ensure!(
        record["transaction"] == "TRANSACTION_MODE_APPLY" && record["changes"]["added"] == "1101",
        "{record}"
    );
    ensure!(
        record["changes"]["entries"].as_array().is_some_and(|list| list.len() == 1000),
        "the list is bounded"
    );
    let id = record["runId"].as_str().context("runId")?;
    let diff = codelia(&["diff", id]).await?;
    ensure!(
        diff.code == Some(0) && diff.stdout.contains("added") && diff.stdout.contains("file-"),
        "{diff:?}"
    );
    ensure!(
        diff.stderr.contains("applied: 1101 added, 0 changed, 0 removed (101 not listed)"),
        "{diff:?}"
    );
    let done = codelia(&["run", "--json", "-s", "work", "--preview", "--", "rm", "file-1"]).await?;
    let record: serde_json::Value = serde_json::from_str(&done.stdout)?;
    let diff = codelia(&["diff", "--json", record["runId"].as_str().context("runId")?]).await?;
    let listed: serde_json::Value = serde_json::from_str(&diff.stdout)?;
    ensure!(
        listed["state"] == "CHANGES_STATE_DROPPED" && listed["entries"][0]["path"] == "file-1",
        "{listed}"
    );
    let done = codelia(&["run", "--json", "-s", "work", "--", "cat", "file-1"]).await?;
    ensure!(done.code == Some(0), "the file is still there: {done:?}");
    let record: serde_json::Value = serde_json::from_str(&done.stdout)?;
    let diff = codelia(&["diff", record["runId"].as_str().context("runId")?]).await?;
    ensure!(diff.code == Some(1) && diff.stderr.contains("--transactional"), "{diff:?}");
    cluster.end().await
}

/// Prints what a transactional run costs next to a plain one. `CODELIA_TEST_FILES` sets the number
/// of files.
#[tokio::test]
async fn cost_of_changes_is_printed() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let most = std::env::var("CODELIA_TEST_FILES").map_or(Ok(10), |text| text.parse())?;
    for files in BTreeSet::from([10, most]) {
        let session = client.session().await?.name;
        let script =
            |name: &str| format!("mkdir {name}; cd {name}; seq {files} | split -a 5 -l 1 - f");
        for (name, transaction) in [
            ("plain", TransactionMode::Unspecified),
            ("apply", TransactionMode::Apply),
            ("drop", TransactionMode::Preview),
        ] {
            let request = StartRunRequest {
                transaction: transaction.into(),
                ..shell(&session, &script(name))
            };
            let began = Instant::now();
            let ended = run(&client, request).await?;
            ensure!(exit_code(&ended) == Some(0), "{ended:?}");
            let command = ended.usage.and_then(|usage| usage.wall_time).unwrap_or_default();
            let command =
                f64::from(command.nanos) / 1e9 + f64::from(i32::try_from(command.seconds)?);
            println!(
                "{files} files, {name}: {:.3} s, command {command:.3} s",
                began.elapsed().as_secs_f64()
            );
        }
        client.close(&session).await?;
    }
    // Removing many files takes a while.
    nothing_is_left(&cluster).await;
    cluster.end().await
}
