//! File calls have the permissions of the session's user and policy.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    path::Path,
    time::Duration,
};

use anyhow::{Context, Result};
use codelia_policy::{FilesystemPolicy, Limits, LimitsRequest, Policy, SessionFlags};
use codelia_store::{EventKind, NewSession, Quotas, SessionSpec};
use codelia_tests::{Cluster, available, is_root, recorded_events};
use codelia_types::{KeyId, Mode, SessionId};
use tonic::Code;

use super::workspace::{Isolated, Workspace, outcome, refused};
use crate::isolation::isolating;

#[tokio::test]
async fn file_calls_act_as_session_user() -> Result<()> {
    let Some(Isolated { cluster, client, session, directory, outside }) = Isolated::start().await?
    else {
        return Ok(());
    };
    if !available("root", (!is_root()).then_some("only root can give sessions their own users")) {
        return cluster.end().await;
    }
    let name = &session.name;
    let workspace = Workspace::new(&client, name);
    workspace.make_directory("made/deep", true).await?;
    workspace.copy("inside", "copied", false).await?;
    client.put(name, "inside", "inside again").await?;
    let owner = fs::metadata(&directory)?.uid();
    assert!(owner >= 200_000, "the session has its own user, got {owner}");
    for made in ["inside", "copied", "made", "made/deep"] {
        let found = fs::metadata(directory.join(made))?;
        assert_eq!((found.uid(), found.gid()), (owner, owner), "{made}");
    }
    // A hard link to a file that only root may read, as a wrong mount could expose it.
    let secret = outside.join("f");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
    fs::hard_link(&secret, directory.join("second-name"))?;
    let denied = refused(Code::PermissionDenied, "FILE_PERMISSION");
    assert_eq!(outcome(client.get(name, "second-name").await), denied);
    let command = client.exec(name, "cat second-name || echo denied").await?;
    assert_eq!(command.stdout_text(), "denied\n", "the control: a command may not either");
    // Writing replaces the name; the linked file does not change.
    client.put(name, "second-name", "taken").await?;
    assert_eq!(fs::read_to_string(&secret)?, "outside");
    client.exec(name, "echo x > shut; chmod 000 shut; mkdir closed; chmod 000 closed").await?;
    client.exec(name, "mkdir -p fixed/sub; echo x > fixed/x; chmod 555 fixed").await?;
    for (path, recursive) in [("fixed/sub", true), ("fixed/sub", false), ("fixed/x", false)] {
        assert_eq!(outcome(workspace.remove(path, recursive).await), denied, "{path}");
    }
    assert_eq!(outcome(client.put(name, "fixed/x", "x").await), denied);
    assert_eq!(outcome(workspace.rename("fixed/x", "x", false).await), denied);
    assert_eq!(outcome(client.get(name, "shut").await), denied);
    assert_eq!(outcome(client.put(name, "closed/x", "x").await), denied);
    assert_eq!(outcome(workspace.list("closed", 0).await), denied);
    let setuid = client.exec(name, "cp /bin/sh own; chmod 4755 own; echo done").await?;
    assert_eq!(setuid.stdout_text(), "done\n");
    let copied = client.put(name, "own", "#!/bin/sh").await?;
    assert_eq!(copied.mode, 0o755, "the set-user-id bit is dropped");
    cluster.end().await
}

/// Creates a session with a policy for its workspace directly in the store, because callers cannot
/// request one yet.
pub(super) async fn with_policy(
    cluster: &Cluster,
    mode: Mode,
    filesystem: FilesystemPolicy,
    limits: Limits,
) -> Result<String> {
    let spec = SessionSpec {
        mode,
        limits,
        requested_limits: LimitsRequest::default(),
        network: None,
        policy: Policy { filesystem, ..Policy::default() },
        flags: SessionFlags::default(),
        scopes: codelia_policy::SessionScopes::default(),
        profile: None,
    };
    let id = SessionId::generate();
    let new = NewSession {
        id,
        tenant: &"a".parse()?,
        key: KeyId::generate(),
        alias: None,
        spec: &spec,
        labels: &BTreeMap::new(),
        ttl: Duration::from_secs(600),
        idle_ttl: None,
        allow_data_loss: false,
        idempotency: None,
        check_quota: true,
    };
    cluster.store.session_create(new, Quotas::default()).await?;
    Ok(format!("sessions/{id}"))
}

#[tokio::test]
async fn session_policy_applies_to_file_calls() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let policy = FilesystemPolicy {
        read_only_paths: Some(vec!["/workspace/fixed".into()]),
        denied_paths: vec!["/workspace/a/secret".into()],
        ..FilesystemPolicy::default()
    };
    let limits = Limits { file_bytes: 1000, ..Limits::default() };
    let name = with_policy(&cluster, Mode::Logical, policy, limits).await?;
    let workspace = Workspace::new(&client, &name);
    workspace.make_directory("a", false).await?;
    let files = cluster.session_directories()?.into_iter().next().context("a directory")?;
    fs::create_dir(files.join("fixed"))?;
    fs::write(files.join("fixed/file"), "fixed")?;
    fs::write(files.join("a/secret"), "secret")?;
    symlink("secret", files.join("a/alias"))?;
    symlink("/workspace/fixed", files.join("other"))?;
    let denied = refused(Code::PermissionDenied, "PATH_DENIED");
    for path in ["a/secret", "a/alias"] {
        assert_eq!(outcome(client.get(&name, path).await), denied, "{path}");
        assert_eq!(outcome(client.put(&name, path, "x").await), denied, "{path}");
        assert_eq!(outcome(workspace.stat(path).await), denied, "{path}");
    }
    assert_eq!(outcome(workspace.remove("a/secret", false).await), denied);
    assert_eq!(outcome(workspace.remove("a", true).await), denied);
    assert_eq!(outcome(workspace.rename("a", "b", false).await), denied);
    assert_eq!(workspace.list("a", 0).await?, [["a/alias"]], "denied paths are not listed");
    for path in ["fixed/file", "other/file"] {
        assert_eq!(client.get(&name, path).await?, "fixed");
        assert_eq!(outcome(client.put(&name, path, "x").await), denied, "{path}");
        assert_eq!(outcome(workspace.remove(path, false).await), denied, "{path}");
    }
    assert_eq!(outcome(workspace.make_directory("fixed/new", false).await), denied);
    assert_eq!(outcome(workspace.rename("a/alias", "fixed/x", false).await), denied);
    // The control: other paths may be changed.
    client.put(&name, "free", "x").await?;
    workspace.rename("free", "a/free", false).await?;
    workspace.remove("a/alias", false).await?;
    let too_large = refused(Code::ResourceExhausted, "FILE_TOO_LARGE");
    client.put(&name, "exact", &"x".repeat(1000)).await?;
    assert_eq!(outcome(client.put(&name, "more", &"x".repeat(1001)).await), too_large);
    assert_eq!(outcome(workspace.stat("more").await).0, Code::NotFound);
    let events =
        recorded_events(&cluster.store, &"a".parse()?, Some(EventKind::FileRefused)).await?;
    let rules: Vec<_> = events.iter().filter_map(|event| event.body.field.as_deref()).collect();
    for rule in ["policy.filesystem.denied_paths", "policy.filesystem.read_only_paths"] {
        assert!(rules.contains(&rule), "{rules:?}");
    }
    cluster.end().await
}

/// Creates files and links in a workspace before its first sandbox hides what is denied there.
fn plant(files: &Path) -> Result<()> {
    for directory in ["a", "closed"] {
        fs::create_dir_all(files.join(directory))?;
    }
    for file in ["a/free", "a/secret", "closed/inner"] {
        fs::write(files.join(file), "text")?;
    }
    symlink("secret", files.join("a/alias"))?;
    symlink("../closed", files.join("a/through"))?;
    symlink("/workspace/closed", files.join("a/absolute"))?;
    Ok(())
}

/// Gives what was planted to the owner of the workspace.
fn give_to_owner(files: &Path) -> Result<()> {
    let owner = fs::metadata(files)?;
    for path in ["a", "closed", "a/free", "a/secret", "closed/inner"] {
        chown(files.join(path), Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(())
}

#[tokio::test]
async fn commands_and_file_calls_get_same_answers() -> Result<()> {
    let Some(cluster) = isolating("bwrap", 1).await? else { return Ok(()) };
    let client = cluster.tenant("a").await?;
    let denied_paths =
        ["a/secret", "closed", "absent"].map(|path| Path::new("/workspace").join(path));
    let policy =
        FilesystemPolicy { denied_paths: denied_paths.to_vec(), ..FilesystemPolicy::default() };
    let name = &with_policy(&cluster, Mode::Bwrap, policy, Limits::default()).await?;
    let workspace = Workspace::new(&client, name);
    let files = cluster.workers[0].root.join(name).join("workspace");
    plant(&files)?;
    client.put(name, "first", "makes the worker take the session").await?;
    give_to_owner(&files)?;
    let command = async |script: String| -> Result<bool> {
        let done = client
            .exec(name, &format!("({script}) >/dev/null 2>&1 && echo yes || echo no"))
            .await?;
        Ok(done.stdout_text() == "yes\n")
    };
    for (path, allowed) in [
        ("a/free", true),
        ("a/secret", false),
        ("a/alias", false),
        ("closed/inner", false),
        ("a/through/inner", false),
        ("a/absolute/inner", false),
        ("absent/inner", false),
    ] {
        let call = client.get(name, path).await.is_ok();
        assert_eq!(
            (call, command(format!("cat {path}")).await?),
            (allowed, allowed),
            "read {path}"
        );
        let call = client.put(name, path, "new").await.is_ok();
        assert_eq!(
            (call, command(format!("echo new > {path}")).await?),
            (allowed, allowed),
            "write {path}"
        );
    }
    for (path, allowed) in [("a", true), ("closed", false), ("a/through", false)] {
        let call = workspace.list(path, 0).await.is_ok();
        assert_eq!(
            (call, command(format!("ls {path}/")).await?),
            (allowed, allowed),
            "list {path}"
        );
    }
    for path in ["a/secret", "closed/inner", "closed"] {
        let call = workspace.remove(path, true).await.is_ok();
        assert_eq!(
            (call, command(format!("rm -r {path}")).await?),
            (false, false),
            "remove {path}"
        );
    }
    assert!(workspace.remove("a/free", false).await.is_ok(), "the control: others can be removed");
    cluster.end().await
}
