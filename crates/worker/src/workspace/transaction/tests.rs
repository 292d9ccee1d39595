//! Changes as the kernel leaves them in a layer, made by hand: whiteouts, opaque directories,
//! links.

use std::{cell::Cell, collections::BTreeMap, os::unix::fs::symlink};

use codelia_types::{ChangeKind, ChangesState};
use rustix::fs::{XattrFlags, mknodat, setxattr};

use super::*;

/// A session's directory with a transaction.
struct Fixture {
    dir: tempfile::TempDir,
    transaction: Transaction,
}

impl Fixture {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["workspace", "trash"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let (workspace, trash) = (dir.path().join("workspace"), dir.path().join("trash"));
        let transaction = Transaction::new(RunId::generate(), LeaseEpoch(3), workspace, trash);
        transaction.create().unwrap();
        fs::create_dir_all(transaction.layer().join("upper")).unwrap();
        fs::create_dir_all(transaction.layer().join("work/work")).unwrap();
        Self { dir, transaction }
    }

    fn lower(&self, path: &str) -> PathBuf {
        self.dir.path().join("workspace").join(path)
    }

    fn upper(&self, path: &str) -> PathBuf {
        self.transaction.layer().join("upper").join(path)
    }

    fn whiteout(&self, path: &str) {
        mknodat(CWD, self.upper(path), FileType::CharacterDevice, Mode::empty(), 0).unwrap();
    }

    fn prepare(&self) -> Changes {
        let changes = self.transaction.scan().unwrap();
        self.transaction.prepare().unwrap();
        changes
    }

    /// Nothing but the workspace is left.
    fn assert_clean(&self) {
        self.transaction.empty_trash().unwrap();
        let left: Vec<_> = fs::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(left.len(), 2, "{left:?}");
        assert_eq!(fs::read_dir(self.dir.path().join("trash")).unwrap().count(), 0);
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn make_opaque(path: &Path) {
    setxattr(path, c"user.overlay.opaque", b"y", XattrFlags::empty()).unwrap();
}

/// Every path with its mode and content.
fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            let metadata = path.symlink_metadata().unwrap();
            let content = if metadata.is_dir() {
                left.push(path.clone());
                "directory".to_owned()
            } else if metadata.is_symlink() {
                fs::read_link(&path).unwrap().display().to_string()
            } else {
                fs::read_to_string(&path).unwrap()
            };
            let mode = metadata.mode() & 0o7777;
            found
                .insert(path.strip_prefix(root).unwrap().to_owned(), format!("{mode:o} {content}"));
        }
    }
    found
}

/// A workspace, and changes of every kind.
fn changed() -> Fixture {
    let fixture = Fixture::new();
    for path in ["kept", "removed", "changed", "merged/kept", "merged/removed", "merged/deep/kept"]
    {
        write(&fixture.lower(path), "old");
    }
    for path in ["gone/a/b", "replaced/old", "becomes-file/x", "becomes-directory", "locked/old"] {
        write(&fixture.lower(path), "old");
    }
    set_mode(&fixture.lower("locked"), 0o555);

    for path in
        ["changed", "added", "merged/added", "merged/deep/added", "replaced/new", "becomes-file"]
    {
        write(&fixture.upper(path), "new");
    }
    for path in ["becomes-directory/y", "locked/new", "new/a/b", "read-only/a/b", "read-only/c"] {
        write(&fixture.upper(path), "new");
    }
    for path in ["removed", "merged/removed", "gone"] {
        fixture.whiteout(path);
    }
    make_opaque(&fixture.upper("replaced"));
    symlink("/etc/passwd", fixture.upper("link")).unwrap();
    fs::hard_link(fixture.upper("added"), fixture.upper("hard-link")).unwrap();
    set_mode(&fixture.upper("merged"), 0o750);
    set_mode(&fixture.upper("changed"), 0o755);
    for path in ["locked", "read-only/a", "read-only"] {
        set_mode(&fixture.upper(path), 0o555);
    }
    fixture
}

#[test]
fn changes_of_every_kind_are_listed_and_applied() {
    let fixture = changed();
    let changes = fixture.prepare();
    assert_eq!(changes.state, ChangesState::Dropped, "not decided yet");
    let listed = |kind| {
        let mut paths: Vec<_> = changes
            .entries
            .iter()
            .filter(|change| change.kind == kind)
            .map(|change| &*change.path)
            .collect();
        paths.sort_unstable();
        paths
    };
    assert_eq!(listed(ChangeKind::Removed), ["gone", "merged/removed", "removed"]);
    let changed = ["becomes-directory", "becomes-file", "changed", "merged", "replaced"];
    assert_eq!(listed(ChangeKind::Changed), changed);
    assert!(listed(ChangeKind::Added).contains(&"merged/deep/added"));
    assert_eq!(changes.total(), changes.entries.len() as u64);

    fixture.transaction.apply().unwrap();
    let workspace = tree(&fixture.lower(""));
    let text =
        |path: &str| workspace.get(Path::new(path)).map(|text| text.split_once(' ').unwrap().1);
    for path in
        ["changed", "added", "replaced/new", "becomes-directory/y", "read-only/a/b", "hard-link"]
    {
        assert_eq!(text(path), Some("new"), "{path}");
    }
    for path in ["kept", "merged/kept", "merged/deep/kept", "locked/old"] {
        assert_eq!(text(path), Some("old"), "{path}");
    }
    for path in ["removed", "gone", "merged/removed", "replaced/old"] {
        assert_eq!(text(path), None, "{path}");
    }
    assert_eq!(text("link"), Some("/etc/passwd"));
    let mode = |path| fs::metadata(fixture.lower(path)).unwrap().mode() & 0o7777;
    assert_eq!(
        [mode("merged"), mode("locked"), mode("read-only"), mode("read-only/a")],
        [0o750, 0o555, 0o555, 0o555]
    );
    let inode = |path| fs::metadata(fixture.lower(path)).unwrap().ino();
    assert_eq!(inode("added"), inode("hard-link"), "hard links stay hard links");
    for path in ["replaced", "read-only"] {
        let mut names = [0; 256];
        let length = rustix::fs::listxattr(fixture.lower(path), &mut names).unwrap();
        let names = String::from_utf8_lossy(&names[..length]).into_owned();
        assert!(!names.contains("overlay") && !names.contains("codelia"), "{path}: {names}");
    }
    fixture.transaction.apply().unwrap();
    fixture.assert_clean();
}

#[test]
fn apply_stopped_at_any_step_is_finished_later() {
    let (before, after) = {
        let fixture = changed();
        let before = tree(&fixture.lower(""));
        fixture.transaction.scan().unwrap();
        fixture.transaction.apply().unwrap();
        (before, tree(&fixture.lower("")))
    };
    let mut halves = 0;
    for stop in 0.. {
        let fixture = changed();
        fixture.transaction.scan().unwrap();
        let steps = Cell::new(0);
        let stopped = fixture.transaction.apply_while(&|| {
            steps.set(steps.get() + 1);
            steps.get() <= stop
        });
        let found = tree(&fixture.lower(""));
        if stopped.is_ok() {
            assert_eq!(found, after);
            break;
        }
        // The control: without the second half, later runs would see a part of the changes.
        halves += usize::from(found != before && found != after);
        fixture.transaction.apply().unwrap();
        assert_eq!(tree(&fixture.lower("")), after, "stopped before step {stop}");
        fixture.assert_clean();
    }
    assert!(halves > 20, "{halves} half-applied trees were seen");
}

#[test]
fn dropped_changes_leave_nothing() {
    let fixture = changed();
    let before = tree(&fixture.lower(""));
    fixture.transaction.scan().unwrap();
    assert!(!fixture.transaction.is_prepared().unwrap());
    fixture.transaction.discard().unwrap();
    assert_eq!(tree(&fixture.lower("")), before);
    fixture.assert_clean();
    fixture.transaction.discard().unwrap();
    fixture.transaction.apply().unwrap();
    assert_eq!(tree(&fixture.lower("")), before, "nothing is applied a second time");
}

#[test]
fn links_out_of_the_workspace_are_not_followed() {
    let outside = tempfile::tempdir().unwrap();
    write(&outside.path().join("kept"), "kept");
    let fixture = Fixture::new();
    for name in ["replaced", "removed-below", "control"] {
        symlink(outside.path(), fixture.lower(name)).unwrap();
    }
    write(&fixture.upper("replaced/kept"), "attack");
    fs::create_dir(fixture.upper("removed-below")).unwrap();
    fixture.whiteout("removed-below/kept");
    symlink(outside.path(), fixture.upper("new-link")).unwrap();
    fixture.prepare();
    fixture.transaction.apply().unwrap();
    assert_eq!(fs::read_to_string(outside.path().join("kept")).unwrap(), "kept");
    assert_eq!(fs::read_to_string(fixture.lower("replaced/kept")).unwrap(), "attack");
    assert!(fixture.lower("new-link").is_symlink());
    // The control: a path through such a link leads out.
    fs::write(fixture.lower("control/kept"), "seen").unwrap();
    assert_eq!(fs::read_to_string(outside.path().join("kept")).unwrap(), "seen");
}

#[test]
fn device_and_depth_are_refused() {
    let fixture = Fixture::new();
    let made = mknodat(
        CWD,
        fixture.upper("zero"),
        FileType::CharacterDevice,
        Mode::RWXU,
        rustix::fs::makedev(1, 5),
    );
    let missing = made.is_err().then_some("only root can create devices");
    if codelia_tests::available("root", missing) {
        assert!(matches!(fixture.transaction.scan(), Err(ScanError::Device)));
    }
    let fixture = Fixture::new();
    fs::create_dir_all(fixture.upper(&vec!["d"; MAX_DEPTH].join("/"))).unwrap();
    fixture.transaction.scan().unwrap();
    fs::create_dir_all(fixture.upper(&vec!["d"; MAX_DEPTH + 1].join("/"))).unwrap();
    assert!(matches!(fixture.transaction.scan(), Err(ScanError::TooDeep)));
}

#[test]
fn only_one_worker_applies_at_a_time() {
    let fixture = changed();
    fixture.prepare();
    let other = open_directory(&fixture.transaction.path()).unwrap();
    flock(&other, FlockOperation::LockExclusive).unwrap();
    let error = fixture.transaction.apply().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
    drop(other);
    fixture.transaction.apply().unwrap();
    fixture.assert_clean();
}

#[test]
fn transactions_of_a_session_are_found() {
    let fixture = changed();
    let workspace = fixture.dir.path().join("workspace");
    let found = Transaction::find(&workspace, &fixture.dir.path().join("trash")).unwrap();
    assert_eq!(
        found.iter().map(|one| (one.run, one.epoch)).collect::<Vec<_>>(),
        [(fixture.transaction.run, LeaseEpoch(3))]
    );
    fixture.transaction.discard().unwrap();
    assert!(Transaction::find(&workspace, &fixture.dir.path().join("trash")).unwrap().is_empty());
}
