//! Images on loop devices of this host.

use std::os::unix::fs::FileExt;

use codelia_policy::Ids;
use codelia_types::Mode;

use super::*;

const LIMITS: DiskLimits = DiskLimits { bytes: 8 << 20, inodes: 500 };

struct Root {
    dir: tempfile::TempDir,
    images: Images,
}

impl Root {
    fn new() -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let images = Images::new(dir.path());
        let missing = images.as_ref().err().map(ToString::to_string);
        codelia_tests::available("loop", missing.as_deref());
        fs::create_dir(dir.path().join("sessions")).unwrap();
        Some(Self { dir, images: images.ok()? })
    }

    fn target(&self) -> Target {
        let session = SessionId::generate();
        let directory = self.dir.path().join("sessions").join(session.to_string());
        Target { session, directory, mode: Mode::Bwrap, ids: Ids { uid: 0, gid: 0 } }
    }

    fn open(&self, target: &Target) {
        self.images.open(target.session, &target.directory, LIMITS).unwrap();
    }

    fn remove(&self, target: &Target) {
        assert!(self.images.remove(target.session, &target.directory).unwrap() > 0);
        assert_eq!(
            self.images.remove(target.session, &target.directory).unwrap(),
            0,
            "a second time"
        );
        fs::remove_dir(&target.directory).unwrap();
        assert!(
            !self.images.image(target.session).exists()
                && !self.images.users(target.session).exists()
        );
    }
}

/// Writes until the file system is full, and returns how much fit.
fn fill(path: &Path) -> u64 {
    let (file, block) = (File::create(path).unwrap(), [1; 4096]);
    let mut at = 0;
    loop {
        match file.write_all_at(&block, at) {
            Ok(()) => at += 4096,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::StorageFull);
                return at;
            }
        }
    }
}

#[test]
fn bytes_and_inodes_end_with_the_image() {
    let Some(root) = Root::new() else { return };
    let target = root.target();
    root.open(&target);
    assert!(root.images.covers(&target));
    let written = fill(&target.directory.join("file"));
    assert!((LIMITS.bytes..LIMITS.bytes + (1 << 20)).contains(&(written + 32768)), "{written}");
    let usage = root.images.usage(&target).unwrap();
    assert_eq!(usage.bytes, LIMITS.bytes, "it is full");
    fs::remove_file(target.directory.join("file")).unwrap();
    let full = (0..2000).find(|n| File::create_new(target.directory.join(n.to_string())).is_err());
    let full = full.expect("the inodes end");
    assert!((500..550).contains(&full), "{full}");
    assert_eq!(root.images.usage(&target).unwrap().inodes, 500);
    root.remove(&target);
}

#[test]
fn image_outlives_its_worker() {
    let Some(root) = Root::new() else { return };
    let target = root.target();
    root.open(&target);
    fs::write(target.directory.join("file"), "kept").unwrap();
    // A killed worker leaves the mount; only its locks are gone.
    drop(root.images.mounts.lock().held.remove(&target.session));
    let next = Images::new(root.dir.path()).unwrap();
    next.open(target.session, &target.directory, LIMITS).unwrap();
    assert_eq!(fs::read_to_string(target.directory.join("file")).unwrap(), "kept");
    // Two workers hold it: the first one that gives it up leaves the mount to the other.
    root.open(&target);
    next.forget(&target);
    next.close(false);
    assert!(is_mount_point(&target.directory).unwrap());
    root.images.close(true);
    assert!(!is_mount_point(&target.directory).unwrap());
    root.open(&target);
    assert_eq!(fs::read_to_string(target.directory.join("file")).unwrap(), "kept");
    root.remove(&target);
}

#[test]
fn session_with_files_keeps_its_directory() {
    let Some(root) = Root::new() else { return };
    let target = root.target();
    fs::create_dir_all(target.directory.join("workspace")).unwrap();
    root.open(&target);
    assert!(!root.images.covers(&target) && !is_mount_point(&target.directory).unwrap());
}

#[test]
fn open_file_keeps_image_mounted() {
    let Some(root) = Root::new() else { return };
    let target = root.target();
    root.open(&target);
    let open = File::create(target.directory.join("file")).unwrap();
    assert!(root.images.remove(target.session, &target.directory).is_err());
    drop(open);
    root.remove(&target);
}
