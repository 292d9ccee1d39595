//! Creating, listing, moving, copying and removing files and directories.

use std::fs;

use anyhow::Result;
use codelia_proto::v1::*;
use codelia_tests::Cluster;
use tonic::Code;

use super::workspace::{Workspace, open, outcome, refused};

#[tokio::test]
async fn directories_can_be_managed_and_listed() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let workspace = Workspace::new(&client, &name);
    workspace.make_directory("a/b/c", true).await?;
    workspace.make_directory("a/b/c", true).await?;
    for file in ["a/3", "a/1", "a/2"] {
        client.put(&name, file, file).await?;
    }
    client.exec(&name, "ln -s 1 a/link; mkfifo a/fifo").await?;
    let pages = workspace.list("a", 2).await?;
    assert_eq!(pages, [vec!["a/1", "a/2"], vec!["a/3", "a/b"], vec!["a/fifo", "a/link"]]);
    assert_eq!(workspace.list("", 0).await?, [["a"]]);
    // Names that are not UTF-8 are listed with replacement characters, and do not break paging.
    client
        .exec(&name, "mkdir odd; cd odd; touch a \"$(printf 'b\\377')\" \"$(printf 'b\\376')\" c")
        .await?;
    let odd = workspace.list("odd", 1).await?.concat();
    assert_eq!(odd, ["odd/a", "odd/b\u{fffd}", "odd/b\u{fffd}", "odd/c"]);
    workspace.remove("odd", true).await?;
    let kept = StatFileRequest { parent: name.clone(), path: "a/link".into(), no_follow: true };
    let link = client.files().stat_file(kept).await?.into_inner().file.unwrap_or_default();
    assert_eq!((link.kind(), link.link_target.as_str()), (FileKind::Symlink, "1"));
    let followed = workspace.stat("a/link").await?;
    assert_eq!((followed.kind(), followed.path.as_str()), (FileKind::Regular, "a/1"));
    assert_eq!(workspace.stat("a/fifo").await?.kind(), FileKind::Special);
    assert_eq!(workspace.stat(".").await?.kind(), FileKind::Directory);
    workspace.rename("a/1", "moved", false).await?;
    workspace.copy("moved", "a/copy", false).await?;
    workspace.copy("a/2", "a/copy", true).await?;
    assert_eq!(
        (client.get(&name, "moved").await?, client.get(&name, "a/copy").await?),
        ("a/1".into(), "a/2".into())
    );
    workspace.remove("a/fifo", false).await?;
    // Removal includes directories without permissions, and does not follow links.
    client.exec(&name, "ln -s ../../moved a/b/out; chmod 000 a/b/c").await?;
    workspace.remove("a", true).await?;
    assert_eq!(workspace.list("/workspace", 0).await?, [["moved"]]);
    let left = cluster.workers[0].root.join("trash");
    assert_eq!(fs::read_dir(left)?.count(), 0);
    cluster.end().await
}

#[tokio::test]
async fn listing_descends_to_requested_depth() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let name = client.session().await?.name;
    let workspace = Workspace::new(&client, &name);
    let open = WriteFileOpen { create_parents: true, ..open(&name, "t/b/c/d") };
    assert_eq!(client.write_file(open.clone(), b"x").await?.path, "t/b/c/d");
    let no_parents = WriteFileOpen { create_parents: false, path: "none/x".into(), ..open.clone() };
    assert_eq!(
        outcome(client.write_file(no_parents, b"").await),
        refused(Code::NotFound, "FILE_NOT_FOUND")
    );
    let through_file = WriteFileOpen { path: "t/b/c/d/e".into(), ..open };
    assert_eq!(
        outcome(client.write_file(through_file, b"").await),
        refused(Code::AlreadyExists, "FILE_EXISTS")
    );
    client
        .exec(
            &name,
            "cd t; touch a b/x c; mkdir -p b/c/e b-; ln -s b link; ln -s / out; touch b-/y",
        )
        .await?;
    let all = ["a", "b", "b/c", "b/c/d", "b/c/e", "b/x", "b-", "b-/y", "c", "link", "out"];
    let levels = |max: usize| -> Vec<String> {
        let shown = all.iter().filter(|path| path.split('/').count() <= max);
        shown.map(|path| format!("t/{path}")).collect()
    };
    for depth in [0, 1, 2, 3, 100] {
        let expected = levels(usize::try_from(depth)?.max(1));
        for page_size in [1, 2, 3, 1000] {
            let pages = workspace.list_levels("t", page_size, depth).await?;
            assert_eq!(pages.concat(), expected, "depth {depth}, pages of {page_size}");
        }
    }
    for depth in [-1, 101] {
        let refusal = outcome(workspace.list_levels("t", 1, depth).await);
        assert_eq!(refusal, refused(Code::InvalidArgument, "INVALID_FIELD"));
    }
    // A page continues where the last one ended, although its directory is gone.
    let request = ListFilesRequest {
        parent: name.clone(),
        path: "t".into(),
        page_size: 4,
        depth: 9,
        ..Default::default()
    };
    let page = client.files().list_files(request.clone()).await?.into_inner();
    client.exec(&name, "rm -r t/b").await?;
    let next = ListFilesRequest { page_token: page.next_page_token, page_size: 100, ..request };
    let rest: Vec<_> = client
        .files()
        .list_files(next)
        .await?
        .into_inner()
        .files
        .into_iter()
        .map(|file| file.path)
        .collect();
    assert_eq!(rest, ["t/b-", "t/b-/y", "t/c", "t/link", "t/out"]);
    cluster.end().await
}
