//! One tenant attacks the service in every known way at once while another runs commands.

mod attacks;
mod victim;

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering},
};

use anyhow::{Context, Result};
use codelia_proto::v1::RunState;
use codelia_tests::{Cluster, Process, eventually};
use rustix::process::Signal;

use self::{attacks::Attacker, victim::Victim};
use crate::isolation::isolating;

/// Maximum memory of an api or worker during the attack, in MiB. The default of
/// `api.max_request_size_per_key` lets one key hold 128 of them.
const MAX_MEMORY_MIB: u64 = 384;

/// How much a second attack may add to the peak of the first, in MiB: memory does not grow with the
/// number of attacks.
const MAX_GROWTH_MIB: u64 = 64;

/// Lease time of a worker if nothing else is configured.
const DEFAULT_LEASE: &str = "15s";

/// Reads a line such as `VmHWM:  123 kB` of `/proc/PID/status`, in MiB.
fn memory_mib(process: &Process, line: &str) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", process.pid()))?;
    let value =
        status.lines().find_map(|found| found.strip_prefix(line)?.split_whitespace().next());
    Ok(value.with_context(|| format!("no {line}"))?.parse::<u64>()? / 1024)
}

/// Peak memory of the api and the worker, in MiB. Prints it with the memory in use.
fn peaks(cluster: &Cluster, when: &str) -> Result<[u64; 2]> {
    let of = |name: &str, process: &Process| {
        let (peak, now) = (memory_mib(process, "VmHWM:")?, memory_mib(process, "VmRSS:")?);
        println!("{when}: {name} {now} MiB, peak {peak} MiB");
        Ok::<_, anyhow::Error>(peak)
    };
    Ok([of("api", &cluster.apis[0].process)?, of("worker", &cluster.workers[0].process)?])
}

#[tokio::test]
async fn attacker_cannot_hurt_other_tenant() -> Result<()> {
    let Some(mut cluster) = isolating("bwrap", 0).await? else { return Ok(()) };
    cluster.add_worker_with(&[("CODELIA_WORKER_LEASE_TTL", DEFAULT_LEASE)]).await?;
    let (victim, attacker) = (Victim::new(&cluster).await?, Attacker::new(&cluster).await?);
    peaks(&cluster, "before")?;
    let over = AtomicBool::new(false);
    let attack = async {
        attacker.attack().await?;
        let first = peaks(&cluster, "first attack")?;
        attacker.attack().await?;
        over.store(true, Ordering::Relaxed);
        Ok(first)
    };
    let work = async {
        let mut runs = 0;
        while runs < 10 || !over.load(Ordering::Relaxed) {
            victim.execute(runs).await?;
            runs += 1;
        }
        Ok(runs)
    };
    let result: Result<_> = tokio::try_join!(work, attack);
    println!("{}", attacker.report());
    let second = peaks(&cluster, "second attack")?;
    let (runs, first) = result?;
    println!("{runs} runs of the victim");
    assert_eq!(victim.damage(&cluster).await?, [""; 0]);
    assert!(second.iter().all(|peak| *peak < MAX_MEMORY_MIB), "MiB of api and worker: {second:?}");
    let is_flat = first.iter().zip(second).all(|(first, second)| second <= first + MAX_GROWTH_MIB);
    assert!(is_flat, "MiB of api and worker: {first:?}, then {second:?}");
    cluster.end().await
}

#[tokio::test]
async fn lost_lease_is_seen_as_damage() -> Result<()> {
    let cluster = Cluster::start().await?;
    let victim = Victim::new(&cluster).await?;
    let worker = &cluster.workers[0].process;
    worker.signal(Signal::STOP)?;
    eventually("the run is lost", || async {
        (victim.run().await.ok()?.state() == RunState::Ended).then_some(())
    })
    .await;
    worker.signal(Signal::CONT)?;
    let damage = victim.damage(&cluster).await?.join("\n");
    for seen in [
        "the run ended with Lost",
        "epoch 2",
        "lost lease: 1",
        "incarnations of the worker: 2",
        "failed runs: 1",
    ] {
        assert!(damage.contains(seen), "{seen}: {damage}");
    }
    cluster.end().await
}
