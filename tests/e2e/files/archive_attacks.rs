//! Archives that attack.

use std::{fs, process::Command};

use anyhow::{Context, Result, ensure};
use codelia_policy::{FilesystemPolicy, Limits};
use codelia_proto::v1::*;
use codelia_tests::Cluster;
use codelia_types::Mode;
use tonic::Code;

use super::{
    archive_bytes::{Archive, zstd},
    permissions::with_policy,
    workspace::{Isolated, Workspace, directory, outcome, refused},
};

#[tokio::test]
async fn hostile_members_are_refused() -> Result<()> {
    let Some(Isolated { cluster, client, session, directory, outside }) = Isolated::start().await?
    else {
        return Ok(());
    };
    let workspace = Workspace::new(&client, &session.name);
    let outside_path = outside.to_str().context("a path in UTF-8")?;
    let new = || Archive::default().file("first", "1");
    let absolute = new().file(&format!("{outside_path}/evil"), "x").finish();
    // The control: a program that trusts names writes outside.
    let control = cluster.directory().join("control");
    fs::create_dir(&control)?;
    fs::write(control.join("a.tar"), &absolute)?;
    let done =
        Command::new("tar").args(["-x", "-P", "-f", "a.tar"]).current_dir(&control).output()?;
    ensure!(
        done.status.success() && outside.join("evil").exists(),
        "the control wrote nothing: {done:?}"
    );
    fs::remove_file(outside.join("evil"))?;

    let leads_out = "PATH_LEADS_OUT";
    let up = "../".repeat(20);
    for (what, archive, reason) in [
        ("absolute name", absolute, leads_out),
        ("parent", new().file("../evil", "x").finish(), leads_out),
        ("parent below", new().file("a/../../evil", "x").finish(), leads_out),
        ("nothing but a parent", new().member(b'5', b"..", b"", b"").finish(), leads_out),
        ("link to outside", new().symlink("l", outside_path).finish(), leads_out),
        ("link up", new().symlink("l", &format!("{up}etc")).finish(), leads_out),
        ("below a link", new().symlink("l", ".").file("l/x", "x").finish(), leads_out),
        (
            "directory over a link",
            new().symlink("l", ".").member(b'5', b"l", b"", b"").finish(),
            leads_out,
        ),
        ("hard link up", new().hard_link("h", &format!("{up}etc/passwd")).finish(), leads_out),
        (
            "hard link to outside",
            new().hard_link("h", &format!("{outside_path}/f")).finish(),
            leads_out,
        ),
        (
            "hard link to a link",
            new().symlink("l", "first").hard_link("h", "l").finish(),
            leads_out,
        ),
        (
            "hard link through a link",
            new().symlink("l", ".").hard_link("h", "l/first").finish(),
            leads_out,
        ),
        ("hard link to nothing", new().hard_link("h", "absent").finish(), "FILE_NOT_FOUND"),
        ("character device", new().member(b'3', b"d", b"", b"").finish(), "SPECIAL_FILE"),
        ("block device", new().member(b'4', b"d", b"", b"").finish(), "SPECIAL_FILE"),
        ("FIFO", new().member(b'6', b"d", b"", b"").finish(), "SPECIAL_FILE"),
        ("sparse file", new().member(b'S', b"s", b"", b"").finish(), "ARCHIVE_INVALID"),
        ("file over a directory", new().file("d/x", "x").file("d", "x").finish(), "IS_A_DIRECTORY"),
        ("below a file", new().file("first/x", "x").finish(), "NOT_A_DIRECTORY"),
    ] {
        assert_eq!(outcome(workspace.import("new", &archive, true).await).1, reason, "{what}");
        assert_eq!(outcome(workspace.stat("new").await).0, Code::NotFound, "{what} left something");
    }
    // Links that a command planted before.
    let plant =
        format!("mkdir t; ln -s {outside_path} t/out; ln -s {outside_path}/f t/file; echo planted");
    assert_eq!(client.exec(&session.name, &plant).await?.stdout_text(), "planted\n");
    for (what, archive) in [
        ("below a planted link", Archive::default().file("out/evil", "x").finish()),
        ("directory below it", Archive::default().member(b'5', b"out/evil", b"", b"").finish()),
        ("hard link through it", Archive::default().hard_link("h", "out/f").finish()),
        ("hard link to it", Archive::default().hard_link("h", "file").finish()),
    ] {
        assert_eq!(outcome(workspace.import("t", &archive, true).await).1, leads_out, "{what}");
    }
    // A file in place of a planted link replaces the link.
    workspace.import("t", &Archive::default().file("file", "mine").finish(), true).await?;
    assert_eq!(fs::read_to_string(directory.join("t/file"))?, "mine");
    assert_eq!(
        outcome(workspace.import("t/out", &Archive::default().finish(), true).await).1,
        leads_out
    );
    let left: Vec<_> = fs::read_dir(&outside)?.flatten().map(|entry| entry.file_name()).collect();
    assert_eq!(left, ["f"]);
    assert_eq!(fs::read_to_string(outside.join("f"))?, "outside");
    cluster.end().await
}

#[tokio::test]
async fn hostile_names_arrive_as_they_are() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let workspace = Workspace::new(&client, &session.name);
    let names: [&[u8]; 8] = [
        b"new\nline",
        b"\x1b]0;owned\x07",
        b"\xff\xfe not UTF-8",
        b"-rf",
        b"...",
        b" ",
        b"back\\slash",
        "\u{202e}right to left".as_bytes(),
    ];
    let archive = names
        .iter()
        .fold(Archive::default(), |archive, name| archive.member(b'0', name, b"", b"x"));
    assert_eq!(workspace.import("d", &archive.finish(), false).await?.entries, 8);
    let directory = directory(&cluster, &session)?.join("d");
    let mut found: Vec<_> = fs::read_dir(&directory)?
        .flatten()
        .map(|entry| entry.file_name().into_encoded_bytes())
        .collect();
    found.sort();
    let mut expected = names.map(<[u8]>::to_vec);
    expected.sort();
    assert_eq!(found, expected);
    // The name ends at the NUL byte, so the rest of it is not a way up.
    let cut = Archive::default().member(b'0', b"cut\0/../../evil", b"", b"x").finish();
    workspace.import("e", &cut, false).await?;
    assert_eq!(workspace.list("e", 0).await?, [["e/cut"]]);
    for (what, name) in [("no name", &b""[..]), ("the root", b"/"), ("only a parent", b"a/..")] {
        let archive = Archive::default().member(b'0', name, b"", b"x").finish();
        let code = outcome(workspace.import("f", &archive, false).await).0;
        assert_ne!(code, Code::Ok, "{what}");
        assert_eq!(outcome(workspace.stat("f").await).0, Code::NotFound, "{what} left something");
    }
    cluster.end().await
}

#[tokio::test]
async fn archive_bombs_are_refused() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let workspace = Workspace::new(&client, &session.name);
    let too_large = refused(Code::ResourceExhausted, "ARCHIVE_TOO_LARGE");
    let zeros = String::from_utf8(vec![0; 80 << 20])?;
    let large = Archive::default().file("zeros", &zeros).finish();
    let bomb = zstd(&large, 20)?;
    assert!(bomb.len() < 100_000, "{} bytes", bomb.len());
    let small = zstd(&Archive::default().file("zeros", &zeros[..10 << 20]).finish(), 20)?;
    let wide = zstd(&Archive::default().file("zeros", &zeros[..10 << 20]).finish(), 24)?;
    let component = |length: usize| vec![b'n'; length];
    let levels = |count: usize| "d/".repeat(count) + "f";
    let long_path = vec![component(200); 20].join(&b"/"[..]);
    let extension = Archive::default().member(b'x', b"p", b"", &vec![b'x'; 1 << 20]).finish();
    for (what, archive) in [
        ("compression", &bomb),
        ("window", &wide),
        ("name of 256 bytes", &Archive::default().long_name(&component(256)).finish()),
        ("101 levels", &Archive::default().long_name(levels(100).as_bytes()).finish()),
        (
            "path of more than 4095 bytes",
            &Archive::default().long_name(&[&long_path[..], &[b'x'; 80]].concat()).finish(),
        ),
        ("extended header", &extension),
    ] {
        assert_eq!(outcome(workspace.import("new", archive, true).await), too_large, "{what}");
    }
    // The controls: just below each limit.
    let long_path = &long_path[..long_path.len() - 50];
    for (what, archive) in [
        ("compression", &small),
        ("name", &Archive::default().long_name(&component(255)).finish()),
        ("levels", &Archive::default().long_name(levels(99).as_bytes()).finish()),
        ("path", &Archive::default().long_name(long_path).finish()),
    ] {
        assert_eq!(outcome(workspace.import("new", archive, true).await).0, Code::Ok, "{what}");
        workspace.remove("new", true).await?;
    }
    let corrupt = [&small[..small.len() / 2], &[0xff; 64]].concat();
    assert_eq!(outcome(workspace.import("new", &corrupt, true).await).1, "ARCHIVE_INVALID");
    assert_eq!(outcome(workspace.stat("new").await).0, Code::NotFound);
    cluster.end().await
}

#[tokio::test]
async fn more_than_200000_entries_are_refused() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let workspace = Workspace::new(&client, &session.name);
    let too_large = refused(Code::ResourceExhausted, "ARCHIVE_TOO_LARGE");
    // The directory itself costs no time, but is an entry.
    let one = Archive::default().member(b'5', b"./", b"", b"").unfinished();
    let end = Archive::default().file("last", "x").finish();
    let many = [one.repeat(199_999), end.clone()].concat();
    assert_eq!(workspace.import("d", &many, false).await?.entries, 200_000);
    assert_eq!(client.get(&session.name, "d/last").await?, "x");
    let more = [one.repeat(200_000), end].concat();
    assert_eq!(outcome(workspace.import("e", &more, false).await), too_large);
    assert_eq!(outcome(workspace.stat("e").await).0, Code::NotFound);
    cluster.end().await
}

#[tokio::test]
async fn policy_and_limits_apply_to_archives() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let policy = FilesystemPolicy {
        read_only_paths: Some(vec!["/workspace/t/fixed".into()]),
        denied_paths: vec!["/workspace/t/secret".into()],
        ..FilesystemPolicy::default()
    };
    let limits = Limits { file_bytes: 1000, ..Limits::default() };
    let name = with_policy(&cluster, Mode::Logical, policy, limits).await?;
    let workspace = Workspace::new(&client, &name);
    workspace.make_directory("t", false).await?;
    let files = cluster.session_directories()?.into_iter().next().context("a directory")?;
    fs::create_dir(files.join("t/fixed"))?;
    fs::write(files.join("t/fixed/file"), "fixed")?;
    fs::write(files.join("t/secret"), "secret")?;
    let new = || Archive::default().file("first", "1");
    for (what, archive) in [
        ("denied file", new().file("secret", "x").finish()),
        ("file in a read-only directory", new().file("fixed/x", "x").finish()),
        ("link in a read-only directory", new().symlink("fixed/l", "file").finish()),
        ("hard link to a denied file", new().hard_link("h", "secret").finish()),
        ("hard link to a read-only file", new().hard_link("h", "fixed/file").finish()),
    ] {
        let denied = refused(Code::PermissionDenied, "PATH_DENIED");
        assert_eq!(outcome(workspace.import("t", &archive, true).await), denied, "{what}");
    }
    let large = new().file("large", &"x".repeat(1001)).finish();
    let too_large = refused(Code::ResourceExhausted, "FILE_TOO_LARGE");
    assert_eq!(outcome(workspace.import("t", &large, true).await), too_large);
    // The control: links to other files, and a file of the largest size.
    let allowed = new().hard_link("h", "first").file("exact", &"x".repeat(1000)).finish();
    workspace.import("t", &allowed, true).await?;
    let (archive, summary) = workspace.export("t", ArchiveFormat::Tar).await?;
    assert!(!archive.windows(6).any(|bytes| bytes == b"secret"), "denied files are not exported");
    assert_eq!(summary.entries, 5, "{summary:?}");
    cluster.end().await
}
