//! Watches of commands that flood them, swap directories for links, or exceed the limits.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::FileEventKind as Kind;
use codelia_tests::{Cluster, eventually, within};
use tokio::time::timeout;
use tonic::Code;

use super::{
    content::peak_memory,
    exchange::MARKER,
    watch::Watch,
    workspace::{Isolated, directory, outcome, refused},
};

#[tokio::test]
async fn flood_of_events_is_an_overflow() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let top = directory(&cluster, &session)?;
    fs::create_dir_all(top.join("d/sub"))?;
    let mut watch = Watch::begin(&client, &session.name, "d", true).await?;
    let pids = [cluster.workers[0].process.pid(), cluster.apis[0].process.pid()];
    let before = pids.map(peak_memory);
    let used_before = processor_seconds(pids[0])?;
    // Long names, so that the queue of the kernel is as large as it can be. Nobody reads meanwhile.
    let begun = Instant::now();
    let name = "n".repeat(240);
    for number in 0..60_000 {
        let path = top.join("d").join(format!("{name}{}", number % 500));
        fs::write(&path, "x")?;
        fs::remove_file(&path)?;
    }
    let lasted = begun.elapsed().as_secs_f64();
    let used = processor_seconds(pids[0])? - used_before;
    ensure!(used < lasted / 2.0, "the worker used {used:.1} s of processor time in {lasted:.1} s");
    let seen = watch.until(|event| event.kind() == Kind::Overflow).await?;
    assert!(seen.len() < 150_000, "{} events", seen.len());
    for (pid, before) in pids.into_iter().zip(before) {
        let grown = peak_memory(pid) - before;
        assert!(grown < 32 << 10, "process {pid} grew by {grown} kB");
    }
    // The watch continues, also in directories whose events were lost.
    let settled = async {
        for probe in 0.. {
            let probe = format!("d/probe{probe}");
            fs::write(top.join(&probe), "x")?;
            let created = watch.until_created(&probe);
            if let Ok(seen) = timeout(Duration::from_secs(2), created).await {
                return seen.map(drop);
            }
        }
        Ok(())
    };
    within("the watch continues", settled).await?;
    fs::create_dir(top.join("d/after"))?;
    fs::write(top.join("d/after/file"), "x")?;
    fs::write(top.join("d/sub/file"), "x")?;
    fs::write(top.join("d/end"), "x")?;
    let seen = watch.until_created("d/end").await?;
    for path in ["d/after/file", "d/sub/file"] {
        assert!(seen.iter().any(|event| event.path == path), "{path} is missing");
    }
    cluster.end().await
}

/// The processor time of a process and its threads.
fn processor_seconds(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<&str> = stat.rsplit(')').next().context("stat")?.split_whitespace().collect();
    let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
    Ok(ticks / 100.0)
}

#[tokio::test]
async fn swapped_directory_is_never_watched_outside() -> Result<()> {
    let Some(isolated) = Isolated::start().await? else { return Ok(()) };
    let swapping = isolated.exchange("t/d", "t/link").await?;
    let Isolated { cluster, client, session, outside, .. } = isolated;
    let mut seen = 0;
    for round in 0..30 {
        // A new watch looks for directories while they are swapped.
        let path = if round % 3 == 2 { "t/d" } else { "t" };
        let mut watch = match Watch::begin(&client, &session.name, path, true).await {
            Ok(watch) => watch,
            Err(status) if [Code::PermissionDenied, Code::NotFound].contains(&status.code()) => {
                continue;
            }
            Err(status) => panic!("{status:?}"),
        };
        for number in 0..20 {
            for directory in [&outside, &outside.join("tree")] {
                let file = directory.join(format!("{MARKER}-{round}-{number}"));
                fs::write(&file, "x")?;
                fs::remove_file(file)?;
            }
        }
        let events = match watch.next().await {
            Ok(events) => events.unwrap_or_default(),
            Err(status) => {
                assert_eq!(outcome::<()>(Err(status)).1, "FILE_CHANGED");
                continue;
            }
        };
        seen += events.len();
        let outside = events.iter().find(|event| event.path.contains(MARKER));
        assert!(outside.is_none(), "round {round}: {outside:?}");
    }
    assert!(seen > 0, "no swap was reported");
    drop(swapping);
    cluster.end().await
}

#[tokio::test]
async fn watches_and_directories_are_limited() -> Result<()> {
    let cluster = Cluster::start().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let limit = refused(Code::ResourceExhausted, "WATCH_LIMIT");
    let mut watches = Vec::new();
    for _ in 0..8 {
        watches.push(Watch::begin(&client, &session.name, "", false).await?);
    }
    assert_eq!(outcome(Watch::begin(&client, &session.name, "", false).await), limit);
    // Another session has its own, and a watch that ends makes room.
    let other = client.session().await?;
    Watch::begin(&client, &other.name, "", false).await?;
    watches.pop();
    let again = || async { Watch::begin(&client, &session.name, "", false).await.ok() };
    watches.push(eventually("room for a watch", again).await);
    watches.clear();

    // 4096 directories with the top itself.
    let top = directory(&cluster, &session)?;
    let make = |path: &Path, count: usize| {
        (0..count).try_for_each(|n| fs::create_dir_all(path.join(n.to_string())))
    };
    make(&top.join("d"), 4_094)?;
    let mut watch = Watch::begin(&client, &session.name, "", true).await?;
    fs::write(top.join("d/4000/file"), "x")?;
    watch.until_created("d/4000/file").await?;
    make(&top.join("e"), 1)?;
    let end = loop {
        match watch.next().await {
            Ok(Some(_)) => {}
            ended => break outcome(ended),
        }
    };
    assert_eq!(end, limit, "the watch says that it cannot continue");
    assert_eq!(outcome(Watch::begin(&client, &session.name, "", true).await), limit);
    assert_eq!(outcome(Watch::begin(&client, &session.name, "", false).await).0, Code::Ok);
    cluster.end().await
}
