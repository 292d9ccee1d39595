//! Archives, listings and removals of a directory that a command exchanges with a link to outside,
//! many at once.

use std::{
    fs,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::Result;
use codelia_proto::v1::ArchiveFormat;
use futures::future::try_join_all;
use tonic::Code;

use super::{
    archive_bytes::Archive,
    exchange::MARKER,
    workspace::{Isolated, Workspace, outcome},
};

/// Calls of all kinds together.
const CALLS: usize = 2_000;
const KINDS: [&str; 4] = ["export", "list", "import", "removal"];
/// Calls at once. A worker admits eight archives of a tenant.
const LANES: usize = 6;
/// What the calls have met.
#[derive(Debug, Default)]
struct Counts {
    done: [AtomicUsize; 4],
    refused: [AtomicUsize; 4],
    seen_inside: AtomicUsize,
}

impl Counts {
    fn add(&self, kind: usize, code: Code) {
        let expected = [
            Code::Ok,
            Code::PermissionDenied,
            Code::NotFound,
            Code::AlreadyExists,
            Code::FailedPrecondition,
        ];
        assert!(expected.contains(&code), "{}: {code:?}", KINDS[kind]);
        let counts = if code == Code::Ok { &self.done } else { &self.refused };
        counts[kind].fetch_add(1, Ordering::Relaxed);
    }
}

/// Makes one call of each kind. `path` is the exchanged directory, or the workspace with both
/// names.
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
        assert!(
            !pages.concat().iter().any(|path| path.contains(MARKER)),
            "{path:?} lists files outside"
        );
    }
    counts.add(1, outcome(listed).0);
    counts.add(2, outcome(workspace.import("d", archive, true).await).0);
    let removed = ["d/tree", "d/imported"][counts.done[3].load(Ordering::Relaxed) % 2];
    counts.add(3, outcome(workspace.remove(removed, true).await).0);
}

#[tokio::test]
async fn exchanged_directory_never_shows_outside() -> Result<()> {
    let Some(isolated) = Isolated::start().await? else { return Ok(()) };
    let swapping = isolated.exchange("d", "link").await?;
    let Isolated { cluster, client, session, outside, .. } = isolated;
    let archive =
        Archive::default().file("tree/imported", "inside").file("imported", "inside").finish();
    let (counts, left) = (Counts::default(), AtomicUsize::new(CALLS / KINDS.len()));
    try_join_all((0..LANES).map(async |lane| {
        let workspace = Workspace::new(&client, &session.name);
        let path = if lane % 2 == 0 { "d" } else { "" };
        while left
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok()
        {
            round(workspace, path, &archive, &counts).await;
        }
        anyhow::Ok(())
    }))
    .await?;
    let sum =
        |counts: &[AtomicUsize; 4]| counts.each_ref().map(|count| count.load(Ordering::Relaxed));
    let (done, refused) = (sum(&counts.done), sum(&counts.refused));
    assert_eq!(done.iter().chain(&refused).sum::<usize>(), CALLS);
    for (kind, name) in KINDS.into_iter().enumerate() {
        assert!(done[kind] > 0, "no {name} succeeded: {done:?} done, {refused:?} refused");
    }
    assert!(refused.iter().sum::<usize>() > 100, "the race did not happen: {done:?}, {refused:?}");
    assert!(counts.seen_inside.into_inner() > 0, "no export had the content of the directory");
    let names = |path: &Path| -> Result<Vec<_>> {
        let mut names: Vec<_> =
            fs::read_dir(path)?.flatten().map(|entry| entry.file_name()).collect();
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
