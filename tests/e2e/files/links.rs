//! Links that a command plants or swaps cannot lead a file call out of the workspace.

use std::fs;

use anyhow::{Context, Result, ensure};
use codelia_store::EventKind;
use codelia_tests::{Exec, recorded_events, shell};
use tonic::Code;

use super::workspace::{Isolated, Workspace, outcome, refused};

#[tokio::test]
async fn planted_links_cannot_escape_the_workspace() -> Result<()> {
    let Some(Isolated { cluster, client, session, directory, outside }) = Isolated::start().await?
    else {
        return Ok(());
    };
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    let secret = outside.join("f");
    let script = format!(
        "ln -s {secret} absolute; ln -s {outside} directory; ln -s ../../../../../../../../../{secret} up
         ln -s /proc/self/root{secret} magic; ln -s /proc/self/cwd/inside own; ln -s /proc/1/root/etc procs
         mkdir d; ln -s ../absolute d/chain; ln -s /workspace/inside good; ln -s \"$PWD\" home",
        secret = secret.display(),
        outside = outside.display(),
    );
    let made = client.exec(name, &format!("set -e; {script}; echo made")).await?;
    assert_eq!(made.stdout_text(), "made\n");
    // The control: a plain open of these names reads the secret.
    for naive in ["absolute", "directory/f", "up", "magic", "d/chain"] {
        assert_eq!(
            fs::read_to_string(directory.join(naive))?,
            "outside",
            "a plain open of {naive}"
        );
    }
    let leads_out = refused(Code::PermissionDenied, "PATH_LEADS_OUT");
    for path in ["absolute", "directory/f", "up", "magic", "own", "procs/passwd", "d/chain"] {
        assert_eq!(outcome(client.get(name, path).await), leads_out, "reading {path}");
        assert_eq!(outcome(client.put(name, path, "taken").await), leads_out, "writing {path}");
        assert_eq!(outcome(workspace.copy(path, "copy", false).await), leads_out, "copying {path}");
        assert_eq!(
            outcome(workspace.copy("inside", path, true).await),
            leads_out,
            "copying to {path}"
        );
    }
    for path in ["directory/new", "procs/new"] {
        assert_eq!(outcome(workspace.make_directory(path, true).await), leads_out, "{path}");
        assert_eq!(outcome(workspace.rename("inside", path, true).await), leads_out, "{path}");
    }
    assert_eq!(outcome(workspace.remove("directory/f", false).await), leads_out);
    assert_eq!(outcome(workspace.list("directory", 0).await), leads_out);
    assert_eq!(outcome(workspace.stat("absolute").await), leads_out);
    // Removing a link keeps its target. Links inside the workspace are followed.
    workspace.remove("directory", true).await?;
    assert_eq!(client.get(name, "good").await?, "inside");
    assert_eq!(client.get(name, "home/good").await?, "inside");
    assert_eq!(fs::read_dir(&outside)?.count(), 1);
    assert_eq!(fs::read_to_string(&secret)?, "outside");
    let events =
        recorded_events(&cluster.store, &"a".parse()?, Some(EventKind::FileRefused)).await?;
    assert!(events.len() >= 30, "each attempt is an event, got {}", events.len());
    let event = events.last().context("an event")?;
    assert_eq!(event.body.field.as_deref(), Some("path"));
    assert_eq!(event.body.detail["reason"], "PATH_LEADS_OUT");
    assert_eq!(event.subject.session.map(|id| id.to_string()), Some(session.session_id.clone()));
    cluster.end().await
}

#[tokio::test]
async fn swapped_links_cannot_fool_file_calls() -> Result<()> {
    let Some(Isolated { cluster, client, session, directory, outside }) = Isolated::start().await?
    else {
        return Ok(());
    };
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    let script = format!(
        "mkdir d; echo inside > d/f; echo swapping
         while :; do mv d real; ln -s {} d; rm d; mv real d; done",
        outside.display()
    );
    let mut swapping = Exec::start(&client, shell(name, &script)).await?;
    swapping.until("the swapping starts", |seen| seen.stdout_text().contains("swapping")).await?;
    // The control: a plain open sees the swapped link sooner or later.
    let fooled = || {
        let read = fs::read_to_string(directory.join("d/f"));
        std::future::ready(read.is_ok_and(|text| text == "outside").then_some(()))
    };
    let mut tries = 0;
    while fooled().await.is_none() {
        tries += 1;
        ensure!(tries < 1_000_000, "the control never saw a swap");
    }
    let (mut inside, mut refused) = (0, 0);
    for round in 0..100 {
        match client.get(name, "d/f").await {
            Ok(text) => {
                assert_eq!(text, "inside\n", "round {round}");
                inside += 1;
            }
            Err(status) if [Code::PermissionDenied, Code::NotFound].contains(&status.code()) => {
                refused += 1
            }
            Err(status) => panic!("round {round}: {status:?}"),
        }
        // The result depends on timing; the place of the change must not.
        for attempt in [
            client.put(name, "d/written", "x").await.map(drop),
            workspace.make_directory("d/made", false).await,
            workspace.remove("d/f2", false).await,
            workspace.copy("inside", "d/f3", true).await,
        ] {
            if let Err(status) = attempt {
                let code = status.code();
                let expected = [Code::PermissionDenied, Code::NotFound, Code::AlreadyExists];
                assert!(expected.contains(&code), "round {round}: {status:?}");
            }
        }
    }
    assert!(
        inside > 0 && refused > 0,
        "{inside} inside, {refused} refused: the race did not happen"
    );
    let left: Vec<_> = fs::read_dir(&outside)?.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["f"], "a call changed the outside directory");
    assert_eq!(fs::read_to_string(outside.join("f"))?, "outside");
    drop(swapping);
    cluster.end().await
}
