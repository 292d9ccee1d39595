//! `WatchFiles` and `codelia watch`: what is reported, and when a watch ends.

use std::{collections::HashMap, fs, path::Path};

use anyhow::{Context, Result};
use codelia_policy::{FilesystemPolicy, Limits};
use codelia_proto::v1::{FileEventKind as Kind, *};
use codelia_tests::{Client, Cluster, ClusterOptions, Process, eventually, within};
use codelia_types::Mode;
use tonic::{Code, Status, Streaming};

use super::{
    permissions::with_policy,
    workspace::{Workspace, directory, outcome, refused},
};

/// A watch whose first message has arrived.
pub(super) struct Watch(Streaming<WatchFilesResponse>);

impl Watch {
    pub(super) async fn begin(
        client: &Client,
        session: &str,
        path: &str,
        recursive: bool,
    ) -> Result<Self, Status> {
        let request = WatchFilesRequest { parent: session.into(), path: path.into(), recursive };
        let mut stream = client.files().watch_files(request).await?.into_inner();
        let first = within("the first message", stream.message()).await?;
        let first = first.ok_or_else(|| Status::internal("the watch ended"))?;
        assert_eq!(first.events, [], "the first message says that the watch is active");
        Ok(Self(stream))
    }

    /// The events of the next message; `None` after the last one.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<FileEvent>>, Status> {
        let message = within("events", self.0.message()).await?;
        Ok(message.map(|message| message.events))
    }

    /// All events up to and with the first that this is true for.
    pub(super) async fn until(
        &mut self,
        is_last: impl Fn(&FileEvent) -> bool,
    ) -> Result<Vec<FileEvent>> {
        let mut seen = Vec::new();
        loop {
            let events =
                self.next().await?.with_context(|| format!("the watch ended after {seen:?}"))?;
            seen.extend(events);
            if seen.iter().any(&is_last) {
                return Ok(seen);
            }
        }
    }

    /// All events until a file with this name is created.
    pub(super) async fn until_created(&mut self, path: &str) -> Result<Vec<FileEvent>> {
        self.until(|event| event.kind() == Kind::Created && event.path == path).await
    }
}

fn shown(events: &[FileEvent]) -> Vec<(Kind, &str, &str)> {
    let shown = events
        .iter()
        .map(|event| (event.kind(), event.path.as_str(), event.previous_path.as_str()));
    // What else happens to a file depends on the program that writes it.
    shown.filter(|(kind, ..)| *kind != Kind::Modified).collect()
}

#[tokio::test]
async fn changes_are_reported_in_order() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    client.exec(&name, "mkdir -p d/sub other; echo 1 > d/f; echo 1 > d/sub/f").await?;
    let mut flat = Watch::begin(&client, &name, "d", false).await?;
    let mut deep = Watch::begin(&client, &name, "/workspace/d", true).await?;
    let script =
        "cd d; echo 2 >> f; mv f g; mv g sub/g; mv sub/g ../other; rm sub/f; mkdir new; echo x > new/x
        mv new sub/moved; echo y > sub/moved/y; mv sub/moved ../other; echo z > ../other/moved/z; touch end";
    client.exec(&name, script).await?;
    use Kind::{Created, Removed, Renamed};
    let seen = deep.until_created("d/end").await?;
    assert!(
        seen.iter().any(|event| event.kind() == Kind::Modified && event.path == "d/f"),
        "{seen:?}"
    );
    assert!(seen.iter().all(|event| event.time.is_some_and(|time| time.seconds > 1_700_000_000)));
    let expected = [
        (Renamed, "d/g", "d/f"),
        (Renamed, "d/sub/g", "d/g"),
        (Removed, "d/sub/g", ""),
        (Removed, "d/sub/f", ""),
        (Created, "d/new", ""),
        (Renamed, "d/sub/moved", "d/new"),
        (Removed, "d/sub/moved", ""),
        (Created, "d/end", ""),
    ];
    // Files in a directory that is gone when the worker looks may be left out.
    let is_inside = |path: &str| path.starts_with("d/new/") || path.starts_with("d/sub/moved/");
    let mut rest = shown(&seen);
    rest.retain(|(_, path, _)| !is_inside(path));
    assert_eq!(rest, expected);
    assert!(!shown(&seen).iter().any(|(_, path, _)| path.contains("other")), "{seen:?}");
    let seen = flat.until_created("d/end").await?;
    assert!(!shown(&seen).iter().any(|(_, path, _)| path.starts_with("d/sub/")), "{seen:?}");
    assert!(shown(&seen).contains(&(Removed, "d/g", "")), "{seen:?}");
    cluster.end().await
}

#[tokio::test]
async fn directory_that_is_filled_at_once_loses_no_file() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut watch = Watch::begin(&client, &session.name, "", true).await?;
    let top = directory(&cluster, &session)?;
    // Ready-made trees that appear with one rename, and trees that grow while the worker looks.
    let made = cluster.directory().join("made");
    let mut expected = Vec::new();
    for tree in 0..20 {
        let root = if tree % 2 == 0 {
            made.join(format!("t{tree}"))
        } else {
            top.join(format!("t{tree}"))
        };
        for depth in 0..4 {
            let inner = "d/".repeat(depth);
            fs::create_dir_all(root.join(&inner))?;
            for file in 0..5 {
                fs::write(root.join(&inner).join(format!("f{file}")), "x")?;
                expected.push(format!("t{tree}/{inner}f{file}"));
            }
        }
        if tree % 2 == 0 {
            fs::rename(&root, top.join(format!("t{tree}")))?;
        }
    }
    let mut created: HashMap<String, usize> = HashMap::new();
    while expected.iter().any(|path| !created.contains_key(path)) {
        for event in watch.next().await?.context("the watch ended")? {
            assert_ne!(event.kind(), Kind::Overflow);
            *created.entry(event.path).or_default() += 1;
        }
    }
    // What happens in them later is reported, too.
    fs::write(top.join("t0/d/d/d/late"), "x")?;
    watch.until_created("t0/d/d/d/late").await?;
    cluster.end().await
}

#[tokio::test]
async fn watch_ends_with_the_session_the_directory_or_the_lease() -> Result<()> {
    let mut cluster =
        Cluster::start_with(ClusterOptions { workers: 1, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    client.exec(&name, "mkdir -p a/b c").await?;
    let changed = refused(Code::FailedPrecondition, "FILE_CHANGED");
    for (path, script) in [("a/b", "mv a/b a/moved"), ("a", "mv a elsewhere"), ("c", "rmdir c")] {
        let mut watch = Watch::begin(&client, &name, path, true).await?;
        client.exec(&name, script).await?;
        let end = loop {
            match watch.next().await {
                Ok(Some(_)) => {}
                Ok(None) => panic!("{script}: no error"),
                Err(status) => break outcome::<()>(Err(status)),
            }
        };
        assert_eq!(end, changed, "{script}");
    }
    let mut ended = Watch::begin(&client, &name, "", true).await?;
    client.close(&name).await?;
    while ended.next().await?.is_some() {}
    let absent = outcome(Watch::begin(&client, &name, "", true).await);
    assert_eq!(absent, refused(Code::FailedPrecondition, "SESSION_ENDED"));

    let name = client.session().await?.name;
    let mut lost = Watch::begin(&client, &name, "", false).await?;
    cluster.workers[0].process.signal(rustix::process::Signal::KILL)?;
    let end = outcome(lost.next().await);
    assert_eq!(end, refused(Code::Unavailable, "UNAVAILABLE"));
    cluster.workers[0].process.exited().await?;
    cluster.restart_worker(0).await?;
    eventually("a watch at the next worker", || async {
        Watch::begin(&client, &name, "", false).await.ok().map(drop)
    })
    .await;
    cluster.end().await
}

#[tokio::test]
async fn policy_and_paths_apply_to_watches() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let policy = FilesystemPolicy {
        denied_paths: vec!["/workspace/t/secret".into(), "/workspace/t/hidden".into()],
        ..FilesystemPolicy::default()
    };
    let name = with_policy(&cluster, Mode::Logical, policy, Limits::default()).await?;
    let workspace = Workspace::new(&client, &name);
    workspace.make_directory("t/open", true).await?;
    client.put(&name, "file", "x").await?;
    for (path, code, reason) in [
        ("absent", Code::NotFound, "FILE_NOT_FOUND"),
        ("file", Code::FailedPrecondition, "NOT_A_DIRECTORY"),
        ("../up", Code::InvalidArgument, "INVALID_FIELD"),
        ("t/hidden", Code::PermissionDenied, "PATH_DENIED"),
    ] {
        let found = outcome(Watch::begin(&client, &name, path, true).await);
        assert_eq!(found, refused(code, reason), "{path}");
    }
    let files = cluster.session_directories()?.into_iter().next().context("a directory")?;
    let mut watch = Watch::begin(&client, &name, "t", true).await?;
    let write = |path: &str| fs::write(files.join(path), "x");
    fs::create_dir(files.join("t/hidden"))?;
    for path in ["t/secret", "t/hidden/file", "t/open/file"] {
        write(path)?;
    }
    fs::rename(files.join("t/open/file"), files.join("t/hidden/moved"))?;
    fs::rename(files.join("t/secret"), files.join("t/open/public"))?;
    write("t/end")?;
    let seen = watch.until_created("t/end").await?;
    let expected = [
        (Kind::Created, "t/open/file", ""),
        (Kind::Removed, "t/open/file", ""),
        (Kind::Created, "t/open/public", ""),
        (Kind::Created, "t/end", ""),
    ];
    assert_eq!(shown(&seen), expected);
    cluster.end().await
}

#[tokio::test]
async fn cli_prints_changes() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session =
        client.create(CreateSessionRequest { alias: "work".into(), ..Default::default() }).await?;
    client.exec(&session.name, "mkdir -p src").await?;
    let logs = cluster.directory().join("logs");
    fs::create_dir_all(&logs)?;
    let start = |name: &str, arguments: &[&str]| {
        Process::start(name, cluster.cli(&client, arguments), Path::new(&logs))
    };
    let mut text = start("text", &["watch", "-r", "work"])?;
    let mut json = start("json", &["watch", "--json", "work:src"])?;
    // A command has no way to say that its watch is active, so the change is repeated.
    let (client, name) = (&client, &session.name);
    let repeat = async {
        for number in 0.. {
            client.exec(name, &format!("echo x > src/n{number}; mv src/n{number} src/new")).await?;
        }
        anyhow::Ok(())
    };
    let seen = async {
        let renamed = text.line_starting("renamed").await?;
        let object = json.line_starting("{\"kind\":\"FILE_EVENT_KIND_RENAMED\"").await?;
        anyhow::Ok((renamed, object))
    };
    let (renamed, object) = tokio::select! {
        seen = seen => seen?,
        ended = repeat => anyhow::bail!("{ended:?}"),
    };
    assert!(renamed.ends_with(" -> src/new"), "{renamed}");
    let object: serde_json::Value = serde_json::from_str(&object)?;
    assert_eq!(object["path"], "src/new");
    assert!(object["previousPath"].is_string(), "{object}");
    client.close(name).await?;
    for mut process in [text, json] {
        assert_eq!(process.exited().await?.code(), Some(0));
    }
    let arguments = ["watch", "work:none"];
    let refused = Process::finish(cluster.cli(client, &arguments), b"").await?;
    assert_eq!(refused.code, Some(1), "{refused:?}");
    cluster.end().await
}
