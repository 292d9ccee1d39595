//! Archives, listings and removals of a directory that a command exchanges with a link to outside, many at
//! once. The exchange is one system call, so the name always leads somewhere.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::{Result, ensure};
use codelia_proto::v1::ArchiveFormat;
use codelia_tests::{Exec, shell};
use futures::future::try_join_all;
use tonic::Code;

use super::{
    archive_bytes::Archive,
    workspace::{Isolated, Workspace, outcome},
};

/// Calls of all kinds together.
const CALLS: usize = 2_000;
const KINDS: [&str; 4] = ["export", "list", "import", "removal"];
/// Calls at once. A worker admits eight archives of a tenant.
const LANES: usize = 6;
/// The name and the content of the files outside.
const MARKER: &str = "only-outside";

/// Exchanges `d` and the link next to it until it is killed. 316 is `renameat2`, 2 is `RENAME_EXCHANGE`.
const EXCHANGE: &str = "
import ctypes, os, sys
os.makedirs('d/tree')
for path in ('d/f', 'd/tree/f'):
    open(path, 'w').write('inside')
os.symlink(sys.argv[1], 'link')
call = ctypes.CDLL(None, use_errno=True).syscall
exchange = lambda: call(316, -100, b'd', -100, b'link', 2)
assert exchange() == 0, ctypes.get_errno()
print('swapping', flush=True)
while True:
    exchange()
";

/// What the calls have met.
#[derive(Debug, Default)]
struct Counts {
    done: [AtomicUsize; 4],
    refused: [AtomicUsize; 4],
    seen_inside: AtomicUsize,
}

impl Counts {
    fn add(&self, kind: usize, code: Code) {
        let expected =
            [Code::Ok, Code::PermissionDenied, Code::NotFound, Code::AlreadyExists, Code::FailedPrecondition];
        assert!(expected.contains(&code), "{}: {code:?}", KINDS[kind]);
        let counts = if code == Code::Ok { &self.done } else { &self.refused };
        counts[kind].fetch_add(1, Ordering::Relaxed);
    }
}

/// Makes one call of each kind. `path` is the exchanged directory, or the workspace with both names.
async fn round(workspace: Workspace<'_>, path: &str, archive: &[u8], counts: &Counts) {
    let exported = workspace.export(path, ArchiveFormat::Tar).await;
    if let Ok((bytes, _)) = &exported {
        let has = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!has(MARKER), "an export of {path:?} has content from outside");
        counts.seen_inside.fetch_add(usize::from(has("inside")), Ordering::Relaxed);
    }
    counts.add(0, outcome(exported).0);
    let listed = workspace.list_levels(path, 1000, 3).await;
    if let Ok(pages) = &listed {
        assert!(!pages.concat().iter().any(|path| path.contains(MARKER)), "{path:?} lists files outside");
    }
    counts.add(1, outcome(listed).0);
    counts.add(2, outcome(workspace.import("d", archive, true).await).0);
    let removed = ["d/tree", "d/imported"][counts.done[3].load(Ordering::Relaxed) % 2];
    counts.add(3, outcome(workspace.remove(removed, true).await).0);
}

#[tokio::test]
async fn exchanged_directory_never_shows_outside() -> Result<()> {
    let Some(Isolated { cluster, client, session, directory, outside }) = Isolated::start().await? else {
        return Ok(());
    };
    // Everyone may write there, so that only the guard prevents it.
    fs::create_dir(outside.join("tree"))?;
    for open in [&outside, &outside.join("tree")] {
        fs::write(open.join(MARKER), MARKER)?;
        fs::set_permissions(open, PermissionsExt::from_mode(0o777))?;
    }
    client.put(&session.name, "exchange.py", EXCHANGE).await?;
    let script = format!("exec /usr/bin/python3 exchange.py {}", outside.display());
    let mut swapping = Exec::start(&client, shell(&session.name, &script)).await?;
    swapping.until("the swapping starts", |seen| seen.stdout_text().contains("swapping")).await?;
    // The control: a plain read of the same name reaches both.
    let meets = |path: &str| fs::read_to_string(directory.join(path)).is_ok();
    for naive in ["d/f", &format!("d/{MARKER}")] {
        ensure!((0..1_000_000).any(|_| meets(naive)), "the control never saw {naive}");
    }
    let archive = Archive::default().file("tree/imported", "inside").file("imported", "inside").finish();
    let (counts, left) = (Counts::default(), AtomicUsize::new(CALLS / KINDS.len()));
    try_join_all((0..LANES).map(async |lane| {
        let workspace = Workspace::new(&client, &session.name);
        let path = if lane % 2 == 0 { "d" } else { "" };
        while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok() {
            round(workspace, path, &archive, &counts).await;
        }
        anyhow::Ok(())
    }))
    .await?;
    let sum = |counts: &[AtomicUsize; 4]| counts.each_ref().map(|count| count.load(Ordering::Relaxed));
    let (done, refused) = (sum(&counts.done), sum(&counts.refused));
    assert_eq!(done.iter().chain(&refused).sum::<usize>(), CALLS);
    for (kind, name) in KINDS.into_iter().enumerate() {
        assert!(done[kind] > 0, "no {name} succeeded: {done:?} done, {refused:?} refused");
    }
    assert!(refused.iter().sum::<usize>() > 100, "the race did not happen: {done:?}, {refused:?}");
    assert!(counts.seen_inside.into_inner() > 0, "no export had the content of the directory");
    let names = |path: &Path| -> Result<Vec<_>> {
        let mut names: Vec<_> = fs::read_dir(path)?.flatten().map(|entry| entry.file_name()).collect();
        names.sort();
        Ok(names)
    };
    assert_eq!(names(&outside)?, ["f", MARKER, "tree"], "a call changed the outside directory");
    assert_eq!(names(&outside.join("tree"))?, [MARKER]);
    for open in [&outside, &outside.join("tree")] {
        assert_eq!(fs::read_to_string(open.join(MARKER))?, MARKER);
    }
    drop(swapping);
    cluster.end().await
}
