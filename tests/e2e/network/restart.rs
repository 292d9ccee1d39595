//! The proxy dies: connections fail, runs do not, and nothing is left.

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};
use codelia_sys::process_id::ProcessId;
use codelia_tests::{Exec, TIMEOUT, abandoned_cgroups, eventually};
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::timeout;

use super::{ALLOWED, Place, exit_code, with_authority};

/// The process ids of the proxies of a worker.
fn proxies(worker: u32) -> Vec<u32> {
    let children = fs::read_dir(format!("/proc/{worker}/task")).into_iter().flatten().flatten();
    let children =
        children.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let all: Vec<u32> = children.flat_map(|text| pids(&text)).collect();
    all.into_iter().filter(|pid| is_proxy(*pid)).collect()
}

fn pids(text: &str) -> Vec<u32> {
    text.split_whitespace().filter_map(|word| word.parse().ok()).collect()
}

fn is_proxy(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.ends_with(b"\0egress\0"))
}

fn kill(pid: u32) -> Result<()> {
    Ok(kill_process(Pid::from_raw(pid.cast_signed()).context("a pid")?, Signal::KILL)?)
}

pub(super) async fn proxy(worker: u32) -> u32 {
    eventually("a proxy runs", || async { proxies(worker).first().copied() }).await
}

/// Gets a file again and again, and prints `ok` or `failed` each time.
fn requests() -> String {
    format!(
        "while :; do curl -fsS --max-time 5 -o /dev/null http://{ALLOWED}/hello 2>/dev/null && echo ok || echo failed; done"
    )
}

#[tokio::test]
async fn killed_proxy_is_replaced_and_runs_go_on() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let worker = place.cluster.workers[0].process.pid();
    let session = place.session(&[ALLOWED], &[]).await?;
    // A connection that is open when the proxy dies, and runs that make new ones all the time.
    let slow = format!("curl -sN http://{ALLOWED}/slow; echo ended");
    let mut slow = Exec::start(&place.client, with_authority(&session, &slow)).await?;
    slow.until_stdout("tick").await?;
    let mut busy = Vec::new();
    for _ in 0..3 {
        let mut run = Exec::start(&place.client, with_authority(&session, &requests())).await?;
        run.until_stdout("ok").await?;
        busy.push(run);
    }
    let first = proxy(worker).await;
    let incarnation = incarnation(&place).await?;
    kill(first)?;
    eventually("another proxy runs", || async {
        proxies(worker).into_iter().find(|pid| *pid != first)
    })
    .await;
    let slow = slow.finish().await?;
    ensure!(slow.stdout_text().contains("ended") && exit_code(&slow) == Some(0), "{slow:?}");
    for run in &mut busy {
        // After the death of the proxy: output so far does not count.
        let seen = run.transcript.stdout.len();
        run.until("a request succeeds again", |now| now.stdout_text()[seen..].contains("ok"))
            .await?;
    }
    ensure!(self::incarnation(&place).await? == incarnation, "the lease was lost");
    let restarts = restarts(&place).await?;
    ensure!(restarts == 1, "{restarts} events");
    drop(busy);
    place.end().await
}

/// Changes when a worker loses its lease and registers again.
async fn incarnation(place: &Place) -> Result<i64> {
    place.cluster.database.number("SELECT hashtext(incarnation::text)::bigint FROM workers").await
}

/// Events without a tenant are for operators, who read them in the database.
async fn restarts(place: &Place) -> Result<i64> {
    let query = "SELECT count(*) FROM audit WHERE kind = 'EGRESS_RESTARTED'";
    eventually("the event of the restart", || async {
        let found = place.cluster.database.number(query).await;
        (!matches!(found, Ok(0))).then_some(found)
    })
    .await
}

#[tokio::test]
async fn proxy_runs_unprivileged_in_its_own_cgroup() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let worker = place.cluster.workers[0].process.pid();
    ensure!(proxies(worker).is_empty(), "no proxy without a sandbox that needs one");
    let session = place.session(&[ALLOWED], &[]).await?;
    place.output(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    let proxy = proxy(worker).await;
    let status = fs::read_to_string(format!("/proc/{proxy}/status"))?;
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().trim()
    };
    ensure!(!field("Uid:").split_whitespace().any(|uid| uid == "0"), "{status}");
    ensure!(
        field("CapEff:") == "0000000000000000" && field("CapBnd:") == "0000000000000000",
        "{status}"
    );
    ensure!(field("NoNewPrivs:") == "1" && field("Seccomp:") == "2", "{status}");
    let group = |pid: u32| fs::read_to_string(format!("/proc/{pid}/cgroup"));
    ensure!(
        group(proxy)?.contains("-egress-") && !group(worker)?.contains("-egress-"),
        "{}",
        group(proxy)?
    );
    place.end().await
}

#[tokio::test]
async fn killed_worker_leaves_no_proxy() -> Result<()> {
    let Some(mut place) = Place::start("bwrap").await? else { return Ok(()) };
    let session = place.session(&[ALLOWED], &[]).await?;
    let mut run = Exec::start(&place.client, with_authority(&session, &requests())).await?;
    run.until_stdout("ok").await?;
    let worker = &mut place.cluster.workers[0].process;
    let (proxy, own) = (proxy(worker.pid()).await, format!("codelia-{}-", worker.pid()));
    worker.signal(Signal::KILL)?;
    worker.exited().await?;
    eventually("the proxy ends with its worker", || async { (!is_proxy(proxy)).then_some(()) })
        .await;
    drop(run);
    // The next worker removes the control groups.
    place.cluster.restart_worker(0).await?;
    let test = ProcessId::current()?;
    eventually("no control group is left", || async {
        let is_own = |path: &PathBuf| path.to_string_lossy().contains(&own);
        (!abandoned_cgroups(test).iter().any(is_own)).then_some(())
    })
    .await;
    place.end().await
}

#[tokio::test]
async fn stopped_proxy_delays_no_run() -> Result<()> {
    let Some(place) = Place::start("bwrap").await? else { return Ok(()) };
    let worker = place.cluster.workers[0].process.pid();
    let session = place.session(&[ALLOWED], &[]).await?;
    place.output(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    let proxy = Pid::from_raw(proxy(worker).await.cast_signed()).context("a pid")?;
    kill_process(proxy, Signal::STOP)?;
    // It answers nothing, and the run ends all the same.
    let done = timeout(TIMEOUT, place.run(&session, "echo done")).await??;
    ensure!(done.stdout_text() == "done\n" && exit_code(&done) == Some(0), "{done:?}");
    kill_process(proxy, Signal::KILL)?;
    place.output(&session, &format!("curl -fsS --max-time 20 http://{ALLOWED}/hello")).await?;
    place.end().await
}
