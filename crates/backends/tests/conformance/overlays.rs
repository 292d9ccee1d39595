//! Overlays: directories of the host that a command may change as it likes, for its session alone.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use codelia_policy::{Format, Policy};
use codelia_sys::process;
use codelia_types::Outcome;
use tempfile::TempDir;

use crate::harness::{Kind, Place, Session, in_every_mode};

const FIELD: &str = "policy.filesystem.overlay_paths";

/// A directory of the host that everybody may read and only its owner may change.
fn tools() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(dir.path().join("bin")).unwrap();
    for name in ["readme", "old", "bin/tool"] {
        fs::write(dir.path().join(name), format!("{name} of the host\n")).unwrap();
    }
    dir
}

/// All that is in it.
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

/// Whether the kind has overlays. One that has none refuses them by their field, which is all there is to see then.
fn has_overlays(place: &mut Place, dir: &Path) -> bool {
    place.policy.filesystem.overlay_paths = Some(vec![dir.to_owned()]);
    if matches!(place.kind, Kind::Bwrap | Kind::Nsjail) {
        assert!(place.host.enforceable.overlays, "this host mounts overlays");
        return true;
    }
    assert_eq!(place.try_plan(&place.session()).unwrap_err().field, FIELD);
    false
}

/// Processes that mount overlays for this session's user.
fn mounters(session: &Session) -> usize {
    let read = |path: std::path::PathBuf| fs::read_to_string(path).unwrap_or_default();
    let uid = session.ids.uid.to_string();
    let is_one = |process: &Path| {
        read(process.join("cmdline")).contains("--overlays")
            && read(process.join("uid_map")).split_whitespace().nth(1) == Some(uid.as_str())
    };
    let processes = fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    processes.filter(|process| is_one(process)).count()
}

async fn says(place: &Place, session: &Session, script: &str) -> String {
    let finished = place.sh(session, script).await;
    assert_eq!(finished.outcome, Outcome::Exited(0), "{finished:?}");
    finished.stdout
}

const CHANGE: &str = "echo more >> readme && echo new > bin/new && echo x > bin/tool && rm old && mkdir -p a/b && \
                      echo deep > a/b/c && chmod 700 bin";

async fn an_overlay_is_changed_for_its_session_alone(mut place: Place) {
    let dir = tools();
    let (path, before) = (dir.path().display(), content(dir.path()));
    if !has_overlays(&mut place, dir.path()) {
        return;
    }
    let (session, other) = (place.session(), place.session());
    let look = format!("cd {path} && cat readme bin/tool bin/new a/b/c; ls");
    says(&place, &session, &format!("cd {path} && {CHANGE}")).await;
    let changed = "readme of the host\nmore\nx\nnew\ndeep\na\nbin\nreadme\n";
    assert_eq!(says(&place, &session, &look).await, changed, "another run of the session sees it");
    let unchanged = "readme of the host\nbin/tool of the host\nbin\nold\nreadme\n";
    assert_eq!(says(&place, &other, &look).await, unchanged, "another session does not");
    assert_eq!(content(dir.path()), before, "nor does the host");
    assert_eq!(mounters(&session), 0, "who mounted it is gone");
    // The control: what is only readable is not changed, by the same commands.
    place.policy.filesystem.overlay_paths = None;
    place.policy.filesystem.read_only_paths = Some(vec![dir.path().to_owned()]);
    let finished = place.sh(&place.session(), &format!("cd {path} && {CHANGE}")).await;
    assert_ne!(finished.outcome, Outcome::Exited(0));
}

async fn sandboxes_of_a_session_see_each_others_changes_at_once(mut place: Place) {
    let (dir, second) = (tools(), tools());
    let path = dir.path().display();
    if !has_overlays(&mut place, dir.path()) {
        return;
    }
    let session = place.session();
    let script = format!("cd {path}; cat bin/new; ls bin; echo ready; read line; cat bin/new readme");
    let mut first = place.start(&session, &script).await;
    assert_eq!([first.line(), first.line()], ["tool", "ready"]);
    // One that has an overlay more is in the same namespace.
    place.policy.filesystem.overlay_paths = Some(vec![second.path().to_owned(), dir.path().to_owned()]);
    let change = format!("cd {path} && {CHANGE} && echo x > {}/readme", second.path().display());
    says(&place, &session, &change).await;
    let finished = first.finish_with("go on\n").await;
    assert_eq!(finished.stdout, "new\nreadme of the host\nmore\n", "{finished:?}");
}

async fn secrets_in_an_overlay_are_not_there(mut place: Place) {
    let dir = tools();
    for name in [".ssh", ".config/gcloud"] {
        fs::create_dir_all(dir.path().join(name)).unwrap();
        fs::write(dir.path().join(name).join("key"), "secret\n").unwrap();
    }
    fs::write(dir.path().join(".config/settings"), "settings\n").unwrap();
    fs::write(dir.path().join(".netrc"), "secret\n").unwrap();
    if !has_overlays(&mut place, dir.path()) {
        return;
    }
    let script = format!(
        "cd {}; cat .config/settings .ssh/key .config/gcloud/key .netrc; mkdir -p .config/gcloud .ssh; ls .config/gcloud .ssh; \
         echo own > .netrc; cat .netrc",
        dir.path().display()
    );
    place.host.runtime.homes = vec![dir.path().to_owned()];
    let hidden = "settings\n.config/gcloud:\n\n.ssh:\nown\n";
    assert_eq!(says(&place, &place.session(), &script).await, hidden);
    // The control: with nobody's home known the same script reads them all.
    place.host.runtime.homes.clear();
    let shown = says(&place, &place.session(), &script).await;
    assert!(shown.starts_with("settings\nsecret\nsecret\nsecret\n"), "{shown}");
}

async fn the_layers_of_a_session_are_reached_by_no_other_path(mut place: Place) {
    let dir = tools();
    if !has_overlays(&mut place, dir.path()) || process::own_user() != 0 {
        return;
    }
    let session = place.session();
    let layers = codelia_policy::overlays_of(&session.dir);
    place.policy.filesystem.read_only_paths = Some(vec![session.dir.parent().unwrap().to_owned()]);
    let script = format!(
        "cd {} && echo x > new; ls {layers} && echo reached; for way in {layers}/*/ {layers}/*/upper/new; do \
         cat $way 2>&1; done; echo held",
        dir.path().display(),
        layers = layers.display()
    );
    let said = says(&place, &session, &script).await;
    assert!(said.ends_with("held\n") && !said.contains("reached"), "{said}");
    // The control: they are there.
    let layer = fs::read_dir(&layers).unwrap().map(|entry| entry.unwrap().path().join("upper/new"));
    assert_eq!(layer.filter(|path| path.exists()).count(), 1);
}

async fn an_overlay_of_what_is_no_directory_is_refused_by_its_field(mut place: Place) {
    let dir = tools();
    if !has_overlays(&mut place, dir.path()) {
        return;
    }
    for name in ["readme", "absent"] {
        place.policy.filesystem.overlay_paths = Some(vec![dir.path().join(name)]);
        let prepared = place.backend.prepare(&place.plan(&place.session())).await;
        assert!(
            matches!(&prepared, Err(codelia_backends::Error::Unenforceable { field }) if *field == FIELD),
            "{prepared:?}"
        );
    }
}

/// As a file says it: a view that is only read, with what is denied in it, and overlays.
async fn mode_static_changes_nothing_but_overlays(mut place: Place) {
    let (open, dir) = (tools(), tools());
    if !has_overlays(&mut place, dir.path()) {
        return;
    }
    let (read, changed) = (open.path().display(), dir.path().display());
    let text = format!(
        "filesystem: {{mode: static, read_only_paths: [{read}], overlay_paths: [{changed}], denied_paths: [{read}/bin]}}"
    );
    place.policy = Policy::parse(&text, Format::Yaml).unwrap();
    let script = format!(
        "cat {read}/readme; echo x > {read}/new && echo written; cat {read}/bin/tool && echo reached
         cd {changed} && {CHANGE} && cat bin/tool"
    );
    let finished = place.sh(&place.session(), &script).await;
    assert_eq!(finished.stdout, "readme of the host\nx\n", "{finished:?}");
    // The control: without it the installation's writable path is written, with it the same path is shut.
    let session = place.session();
    session.give(open.path());
    let mut upper = Policy::default();
    upper.filesystem.read_write_paths = Some(vec![open.path().to_owned()]);
    place.policy = upper.clone();
    let write = format!("echo x > {read}/new && echo written; true");
    assert_eq!(says(&place, &session, &write).await, "written\n");
    place.policy = upper.merge(&Policy::parse("filesystem: {mode: static}", Format::Yaml).unwrap());
    assert_eq!(says(&place, &session, &write).await, "");
}

in_every_mode!(
    mode_static_changes_nothing_but_overlays,
    an_overlay_is_changed_for_its_session_alone,
    sandboxes_of_a_session_see_each_others_changes_at_once,
    secrets_in_an_overlay_are_not_there,
    the_layers_of_a_session_are_reached_by_no_other_path,
    an_overlay_of_what_is_no_directory_is_refused_by_its_field,
);
