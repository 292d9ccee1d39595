//! Overlays: host directories that a command may change, visible only to its session.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use codelia_policy::{Format, Policy};
use codelia_types::Outcome;
use tempfile::TempDir;

use crate::harness::{Fixture, Kind, Session, in_every_mode, is_root};

const FIELD: &str = "policy.filesystem.overlay_paths";

/// Creates a host directory that everyone may read and only its owner may change.
fn tools() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.path().join("bin")).unwrap();
    for name in ["readme", "old", "bin/tool"] {
        fs::write(dir.path().join(name), format!("{name} of the host\n")).unwrap();
    }
    dir
}

/// Returns the paths and contents of all its files.
fn content(dir: &Path) -> Vec<(String, String)> {
    let mut found: Vec<_> = ["", "bin"]
        .iter()
        .flat_map(|name| fs::read_dir(dir.join(name)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| (path.display().to_string(), fs::read_to_string(path).unwrap()))
        .collect();
    found.sort();
    found
}

/// Adds an overlay to the policy. A kind without overlays must refuse it by field.
fn has_overlays(fixture: &mut Fixture, dir: &Path) -> bool {
    fixture.policy.filesystem.overlay_paths = Some(vec![dir.to_owned()]);
    if matches!(fixture.kind, Kind::Bwrap | Kind::Nsjail | Kind::Native) {
        assert!(fixture.host.enforceable.overlays, "this host can mount overlays");
        return true;
    }
    assert_eq!(fixture.try_plan(&fixture.session()).unwrap_err().field, FIELD);
    false
}

/// Counts processes that mount overlays for this session's user.
fn overlay_mounters(session: &Session) -> usize {
    let read = |path: std::path::PathBuf| fs::read_to_string(path).unwrap_or_default();
    let uid = session.ids.uid.to_string();
    let is_one = |process: &Path| {
        read(process.join("cmdline")).contains("--overlays")
            && read(process.join("uid_map")).split_whitespace().nth(1) == Some(uid.as_str())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.filter(|process| is_one(process)).count()
}

async fn stdout_of(fixture: &Fixture, session: &Session, script: &str) -> String {
    let finished = fixture.sh(session, script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished.stdout
}

const CHANGE: &str = "echo more >> readme && echo new > bin/new && echo x > bin/tool && rm old && mkdir -p a/b && \
                      echo deep > a/b/c && chmod 700 bin";

async fn overlay_changes_stay_in_session(mut fixture: Fixture) {
    let dir = tools();
    let (path, before) = (dir.path().display(), content(dir.path()));
    if !has_overlays(&mut fixture, dir.path()) {
        return;
    }
    let (session, other) = (fixture.session(), fixture.session());
    let look = format!("cd {path} && cat readme bin/tool bin/new a/b/c; ls");
    stdout_of(&fixture, &session, &format!("cd {path} && {CHANGE}")).await;
    let changed = "readme of the host\nmore\nx\nnew\ndeep\na\nbin\nreadme\n";
    assert_eq!(
        stdout_of(&fixture, &session, &look).await,
        changed,
        "another run of the session sees the changes"
    );
    let unchanged = "readme of the host\nbin/tool of the host\nbin\nold\nreadme\n";
    assert_eq!(stdout_of(&fixture, &other, &look).await, unchanged, "another session does not");
    assert_eq!(content(dir.path()), before, "the host does not");
    assert_eq!(overlay_mounters(&session), 0, "the mounting process has ended");
    // The control: the same commands cannot change a read-only path.
    fixture.policy.filesystem.overlay_paths = None;
    fixture.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    let finished = fixture.sh(&fixture.session(), &format!("cd {path} && {CHANGE}")).await;
    assert_ne!(finished.outcome, Outcome::Exited(0));
}

async fn overlay_changes_are_visible_across_running_sandboxes(mut fixture: Fixture) {
    let (dir, second) = (tools(), tools());
    let path = dir.path().display();
    if !has_overlays(&mut fixture, dir.path()) {
        return;
    }
    let session = fixture.session();
    let script =
        format!("cd {path}; cat bin/new; ls bin; echo ready; read line; cat bin/new readme");
    let mut first = fixture.start(&session, &script).await;
    assert_eq!([first.line(), first.line()], ["tool", "ready"]);
    // A sandbox with one more overlay joins the same namespace.
    fixture.policy.filesystem.overlay_paths =
        Some(vec![second.path().to_owned(), dir.path().to_owned()]);
    let change = format!("cd {path} && {CHANGE} && echo x > {}/readme", second.path().display());
    stdout_of(&fixture, &session, &change).await;
    let finished = first.finish_with("continue\n").await;
    assert_eq!(finished.stdout, "new\nreadme of the host\nmore\n", "{finished:?}");
}

async fn secrets_in_overlay_are_hidden(mut fixture: Fixture) {
    let dir = tools();
    for name in [".ssh", ".config/gcloud"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("key"), "secret\n").unwrap();
    }
    fs::write(dir.path().join(".config/settings"), "settings\n").unwrap();
    fs::write(dir.path().join(".netrc"), "secret\n").unwrap();
    if !has_overlays(&mut fixture, dir.path()) {
        return;
    }
    let script = format!(
        "cd {}; cat .config/settings .ssh/key .config/gcloud/key .netrc; mkdir -p .config/gcloud .ssh; ls .config/gcloud .ssh; \
         echo own > .netrc; cat .netrc",
        dir.path().display()
    );
    fixture.host.runtime.homes = vec![dir.path().to_owned()];
    let hidden = "settings\n.config/gcloud:\n\n.ssh:\nown\n";
    assert_eq!(stdout_of(&fixture, &fixture.session(), &script).await, hidden);
    // The control: without known homes the same script reads the secrets.
    fixture.host.runtime.homes.clear();
    let shown = stdout_of(&fixture, &fixture.session(), &script).await;
    assert!(shown.starts_with("settings\nsecret\nsecret\nsecret\n"), "{shown}");
}

async fn overlay_layers_are_unreachable_by_other_paths(mut fixture: Fixture) {
    let dir = tools();
    if !has_overlays(&mut fixture, dir.path())
        || !is_root("without root, layers have the session's user")
    {
        return;
    }
    let session = fixture.session();
    let layers = codelia_policy::overlays_dir(&session.dir);
    fixture.policy.filesystem.read_only_paths =
        Some(vec![session.dir.parent().unwrap().to_owned()]);
    let script = format!(
        "cd {} && echo x > new; ls {layers} && echo reached; for way in {layers}/*/ {layers}/*/upper/new; do \
         cat $way 2>&1; done; echo held",
        dir.path().display(),
        layers = layers.display()
    );
    let stdout = stdout_of(&fixture, &session, &script).await;
    assert!(stdout.ends_with("held\n") && !stdout.contains("reached"), "{stdout}");
    // The control: the layer exists.
    let layer = fs::read_dir(&layers).unwrap().map(|entry| entry.unwrap().path().join("upper/new"));
    assert_eq!(layer.filter(|path| path.exists()).count(), 1);
}

async fn overlay_of_non_directory_is_refused(mut fixture: Fixture) {
    let dir = tools();
    if !has_overlays(&mut fixture, dir.path()) {
        return;
    }
    for name in ["readme", "absent"] {
        fixture.policy.filesystem.overlay_paths = Some(vec![dir.path().join(name)]);
        let prepared = fixture.backend.prepare(&fixture.plan(&fixture.session())).await;
        assert!(
            matches!(&prepared, Err(codelia_backends::Error::Unenforceable { field }) if *field == FIELD),
            "{prepared:?}"
        );
    }
}

/// Parses the policy from YAML: read-only paths, denied paths and overlays in mode `static`.
async fn static_mode_writes_only_to_overlays(mut fixture: Fixture) {
    let (open, dir) = (tools(), tools());
    if !has_overlays(&mut fixture, dir.path()) {
        return;
    }
    let (read, changed) = (open.path().display(), dir.path().display());
    let text = format!(
        "filesystem: {{mode: static, read_only_paths: [{read}], overlay_paths: [{changed}], denied_paths: [{read}/bin]}}"
    );
    fixture.policy = Policy::parse(&text, Format::Yaml).unwrap();
    let script = format!(
        "cat {read}/readme; echo x > {read}/new && echo written; cat {read}/bin/tool && echo reached
         cd {changed} && {CHANGE} && cat bin/tool"
    );
    let finished = fixture.sh(&fixture.session(), &script).await;
    assert_eq!(finished.stdout, "readme of the host\nx\n", "{finished:?}");
    // The control: the installation's writable path can be written without `static` and not with
    // it.
    let session = fixture.session();
    session.chown(open.path());
    let mut upper = Policy::default();
    upper.filesystem.read_write_paths = Some(vec![open.path().to_owned()]);
    fixture.policy = upper.clone();
    let write = format!("echo x > {read}/new && echo written; true");
    assert_eq!(stdout_of(&fixture, &session, &write).await, "written\n");
    fixture.policy =
        upper.merge(&Policy::parse("filesystem: {mode: static}", Format::Yaml).unwrap());
    assert_eq!(stdout_of(&fixture, &session, &write).await, "");
}

/// The installation opens the runtime itself, or a part of it.
async fn runtime_can_be_an_overlay(mut fixture: Fixture) {
    if !has_overlays(&mut fixture, Path::new("/usr")) {
        return;
    }
    assert_eq!(stdout_of(&fixture, &fixture.session(), "expr 1 + 1").await, "2\n");
    if !is_root("without root, the host's directories keep their owner") {
        return;
    }
    let change = |path: &str| {
        format!("echo x > {path}/new && cat {path}/new; touch /usr/other && echo written")
    };
    let changed = fixture.sh(&fixture.session(), &change("/usr/bin")).await;
    assert_eq!(changed.stdout, "x\nwritten\n", "{changed:?}");
    fixture.policy.filesystem.overlay_paths = Some(vec!["/usr/local".into()]);
    let changed = fixture.sh(&fixture.session(), &change("/usr/local")).await;
    assert_eq!(changed.stdout, "x\n", "{changed:?}");
}

in_every_mode!(
    runtime_can_be_an_overlay,
    static_mode_writes_only_to_overlays,
    overlay_changes_stay_in_session,
    overlay_changes_are_visible_across_running_sandboxes,
    secrets_in_overlay_are_hidden,
    overlay_layers_are_unreachable_by_other_paths,
    overlay_of_non_directory_is_refused,
);
