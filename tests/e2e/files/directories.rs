//! Creating, listing, moving, copying and removing files and directories.

use std::fs;

use anyhow::Result;
use codelia_proto::v1::*;
use codelia_tests::Cluster;

use super::workspace::Workspace;

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
    client.exec(&name, "mkdir odd; cd odd; touch a \"$(printf 'b\\377')\" \"$(printf 'b\\376')\" c").await?;
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
