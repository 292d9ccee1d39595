//! `kill -9` of the real worker at each step of a transactional run: all of its changes, or none.

use std::{collections::BTreeSet, fs, os::unix::process::ExitStatusExt, path::Path};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{
    ApplyChangesRequest, ChangesState, DiscardChangesRequest, Run, StartRunRequest, TransactionMode,
};
use codelia_tests::{Client, Cluster, shell};
use rustix::process::Signal;
use tonic::Status;

use crate::{
    isolation::isolating,
    transactions::{changes, nothing_is_left, run},
};

/// The steps of a run, and whether its changes are applied although the worker dies there.
const STEPS: [(&str, bool); 8] = [
    ("created", false),
    ("scanned", false),
    ("prepared", false),
    ("committed", true),
    ("apply:1", true),
    ("apply:20", true),
    ("applied", true),
    ("discarded", true),
];
/// Where workers die that find the changes of a run whose worker died at a step.
const RECOVERIES: [(&str, &[&str]); 3] = [
    ("prepared", &["recover", "recovered"]),
    ("committed", &["recover", "apply:1", "apply:20", "applied", "discarded"]),
    ("committed", &["recovered"]),
];
const DIRECTORIES: usize = 10;
const LIST: &str =
    "cat d*/file | sort -u; ls d*/only-* | sed s/.*-// | sort -u; ls d*/only-* | wc -l";

/// A session whose files all have the same number.
struct Numbered {
    cluster: Cluster,
    client: Client,
    session: String,
    number: u32,
}

impl Numbered {
    async fn start() -> Result<Option<Self>> {
        let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(None) };
        let client = cluster.tenant("a").await?;
        let session = client.session().await?.name;
        let setup = format!(
            "mkdir $(seq -f d%g {DIRECTORIES}); for i in d*; do echo 0 > $i/file; echo 0 > $i/only-0; done"
        );
        run(&client, shell(&session, &setup)).await?;
        Ok(Some(Self { cluster, client, session, number: 0 }))
    }

    /// A run that gives all files the next number.
    fn next(&self, mode: TransactionMode) -> StartRunRequest {
        let (number, next) = (self.number, self.number + 1);
        let script = format!(
            "rm d*/only-{number}; for i in d*; do echo {next} > $i/file; echo > $i/only-{next}; done"
        );
        StartRunRequest { transaction: mode.into(), ..shell(&self.session, &script) }
    }

    /// Has the next worker die at a step.
    async fn restart(&mut self, step: Option<&str>) -> Result<()> {
        let process = &mut self.cluster.workers[0].process;
        if !process.has_ended()? {
            process.signal(Signal::KILL)?;
            process.exited().await?;
        }
        let settings: Vec<_> =
            step.map(|step| ("CODELIA_TEST_KILL_AT", step)).into_iter().collect();
        self.cluster.restart_worker_with(0, &settings).await
    }

    async fn dies(&mut self, step: &str) -> Result<()> {
        let status =
            self.cluster.workers[0].process.exited().await.with_context(|| step.to_owned())?;
        ensure!(status.signal() == Some(9), "{step}: {status:?}");
        Ok(())
    }

    /// The files on the disk, with any holder of the session, or none.
    fn on_disk(&self) -> Result<usize> {
        let workspace = self.cluster.session_directories()?.pop().context("a session")?;
        numbers(&workspace)
    }

    /// A run that lists the files, by the dead worker or the next one.
    async fn list(&self) -> Result<Run> {
        let request = StartRunRequest { retries: 1, ..shell(&self.session, LIST) };
        Ok(self.client.start(request).await?)
    }

    /// Checks that all files have the number.
    async fn is_whole(&self, listing: &Run, step: &str) -> Result<()> {
        let seen = self.client.watch_to_end(&listing.name, 0).await?.stdout_text();
        let number = self.number;
        ensure!(seen == format!("{number}\n{number}\n{DIRECTORIES}\n"), "{step}: {seen}");
        Ok(())
    }

    async fn decide(&self, run: &Run, apply: bool) -> Result<Run, Status> {
        let (name, mut runs) = (run.name.clone(), self.client.runs());
        let run = if apply {
            runs.apply_changes(ApplyChangesRequest { name }).await?.into_inner().run
        } else {
            runs.discard_changes(DiscardChangesRequest { name }).await?.into_inner().run
        };
        Ok(run.unwrap_or_default())
    }

    async fn end(self) -> Result<()> {
        nothing_is_left(&self.cluster).await;
        self.cluster.end().await
    }
}

/// How many distinct numbers the files of a workspace have.
fn numbers(workspace: &Path) -> Result<usize> {
    let mut found = BTreeSet::new();
    for directory in fs::read_dir(workspace)? {
        found.insert(fs::read_to_string(directory?.path().join("file"))?);
    }
    Ok(found.len())
}

#[tokio::test]
async fn worker_killed_at_each_step_applies_all_or_nothing() -> Result<()> {
    let Some(mut files) = Numbered::start().await? else { return Ok(()) };
    for (step, is_applied) in STEPS {
        files.restart(Some(step)).await?;
        files.client.start(files.next(TransactionMode::Apply)).await?;
        files.dies(step).await?;
        // The control: a part of the changes would be seen.
        ensure!((files.on_disk()? > 1) == (step == "apply:20"), "{step}");
        files.number += u32::from(is_applied);
        let listing = files.list().await?;
        files.restart(None).await?;
        files.is_whole(&listing, step).await?;
    }
    files.end().await
}

#[tokio::test]
async fn worker_killed_while_recovering_applies_all_or_nothing() -> Result<()> {
    let Some(mut files) = Numbered::start().await? else { return Ok(()) };
    for (step, recoveries) in RECOVERIES {
        files.restart(Some(step)).await?;
        files.client.start(files.next(TransactionMode::Apply)).await?;
        files.dies(step).await?;
        files.number += u32::from(step == "committed");
        // A run that waits has each worker open the session.
        let listing = files.list().await?;
        for step in recoveries {
            files.restart(Some(step)).await?;
            files.dies(step).await?;
            ensure!((files.on_disk()? > 1) == (*step == "apply:20"), "{step}");
        }
        files.restart(None).await?;
        files.is_whole(&listing, step).await?;
    }
    files.end().await
}

#[tokio::test]
async fn worker_killed_while_deciding_applies_all_or_nothing() -> Result<()> {
    let Some(mut files) = Numbered::start().await? else { return Ok(()) };
    for (step, apply) in [
        ("decide", true),
        ("decided", true),
        ("apply:20", true),
        ("applied", true),
        ("decide", false),
        ("decided", false),
    ] {
        files.restart(Some(step)).await?;
        let held = run(&files.client, files.next(TransactionMode::Hold)).await?;
        ensure!(changes(&held)?.state() == ChangesState::Held, "{held:?}");
        ensure!(files.decide(&held, apply).await.is_err(), "{step}");
        files.dies(step).await?;
        let decided = if apply { ChangesState::Applied } else { ChangesState::Dropped };
        let stored = files.client.get_run(&held.name).await?;
        let expected = if step == "decide" { ChangesState::Held } else { decided };
        ensure!(changes(&stored)?.state() == expected, "{step}: {stored:?}");
        files.restart(None).await?;
        ensure!(changes(&files.decide(&held, apply).await?)?.state() == decided, "{step}");
        files.number += u32::from(apply);
        let listing = files.list().await?;
        files.is_whole(&listing, step).await?;
    }
    files.end().await
}
