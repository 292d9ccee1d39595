//! Runs that end by cancel, timeout, memory limit or the end of their session.

use std::time::Duration;

use anyhow::Result;
use codelia_proto::{
    duration_to_proto,
    v1::{
        CancelRunRequest, Canceled, Limits, OutOfMemory, StartRunRequest, TimedOut, outcome::Kind,
    },
};
use codelia_tests::{Cluster, ClusterOptions, Exec, Process, available, refusal, shell};

use crate::exec::{nothing_works_in, session_root};

/// Ignores termination signals, as do its children.
const STUBBORN: &str =
    "pwd; trap '' TERM INT HUP; (setsid sleep 100 &); while :; do sleep 0.1; done";

#[tokio::test]
async fn cancel_kills_tree_that_ignores_signals() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec = Exec::start(&client, shell(&session.name, STUBBORN)).await?;
    let directory = session_root(&mut exec).await?;
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    for _ in 0..2 {
        client
            .runs()
            .cancel_run(CancelRunRequest { name: name.clone(), ..Default::default() })
            .await?;
    }
    assert_eq!(exec.finish().await?.outcome(), Kind::Canceled(Canceled::default()));
    nothing_works_in(&directory).await;

    let after = client
        .runs()
        .cancel_run(CancelRunRequest { name, ..Default::default() })
        .await?
        .into_inner();
    assert!(after.run.is_some_and(|run| run.outcome.is_some()), "canceling an ended run succeeds");
    cluster.end().await
}

#[tokio::test]
async fn cancel_reason_is_stored_and_shown() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec = Exec::start(&client, shell(&session.name, "echo up; exec sleep 100")).await?;
    exec.until_stdout("up").await?;
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    for reason in ["wrong branch", "another reason"] {
        let request = CancelRunRequest { name: name.clone(), reason: reason.into(), grace: None };
        client.runs().cancel_run(request).await?;
    }
    let seen = exec.finish().await?;
    let expected = Kind::Canceled(Canceled { reason: "wrong branch".into() });
    assert_eq!(seen.outcome(), expected, "in the stream");
    let stored = client.get_run(&name).await?;
    assert_eq!(stored.cancel_reason, "wrong branch");
    assert_eq!(stored.outcome.and_then(|outcome| outcome.kind), Some(expected), "in the record");

    let request = CancelRunRequest { name, reason: "x".repeat(1001), grace: None };
    let refused = refusal(&client.runs().cancel_run(request).await.expect_err("too long"));
    assert_eq!(refused.fields, ["reason"]);
    cluster.end().await
}

#[tokio::test]
async fn cancel_grace_decides_when_processes_die() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "trap 'sleep 3; echo clean; exit 0' TERM; echo up; while :; do sleep 0.05; done";
    let cancel = async |name: &str, seconds: i64| {
        let grace = Some(prost_types::Duration { seconds, nanos: 0 });
        let request = CancelRunRequest { name: name.to_owned(), reason: String::new(), grace };
        client.runs().cancel_run(request).await
    };
    // The command needs more than the default of 2 seconds.
    for (graces, cleans_up) in [(&[60][..], true), (&[0], false), (&[60, 0], false)] {
        let mut exec = Exec::start(&client, shell(&session.name, script)).await?;
        exec.until_stdout("up").await?;
        let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
        for seconds in graces {
            cancel(&name, *seconds).await?;
        }
        let seen = exec.finish().await?;
        assert_eq!(seen.outcome(), Kind::Canceled(Canceled::default()), "{graces:?}");
        assert_eq!(seen.stdout_text().contains("clean"), cleans_up, "{graces:?}");
    }
    for seconds in [-1, 61] {
        let refused = cancel(&format!("sessions/-/runs/{}", uuid::Uuid::nil()), seconds).await;
        assert_eq!(refusal(&refused.expect_err("out of range")).fields, ["grace"]);
    }
    cluster.end().await
}

#[tokio::test]
async fn cli_kill_takes_reason_and_grace() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.start(shell(&session.name, "exec sleep 100")).await?;
    let kill = ["kill", &run.run_id, "--reason", "not needed", "--grace", "0s"];
    assert_eq!(Process::finish(cluster.cli(&client, &kill), b"").await?.code, Some(0));
    let attached = Process::finish(cluster.cli(&client, &["attach", &run.run_id]), b"").await?;
    assert_eq!(attached.code, Some(130));
    assert!(attached.stderr.contains("canceled: not needed"), "{attached:?}");
    cluster.end().await
}

#[tokio::test]
async fn timeout_kills_the_run() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let limits = Limits {
        timeout: Some(duration_to_proto(Duration::from_millis(300))),
        ..Limits::default()
    };
    let request = StartRunRequest { limits: Some(limits), ..shell(&session.name, STUBBORN) };
    let mut exec = Exec::start(&client, request).await?;
    let directory = session_root(&mut exec).await?;
    assert_eq!(exec.finish().await?.outcome(), Kind::TimedOut(TimedOut {}));
    nothing_works_in(&directory).await;
    cluster.end().await
}

#[tokio::test]
async fn canceled_command_may_clean_up() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = "trap 'echo clean; exit 0' TERM; echo up; while :; do sleep 0.05; done";
    let mut exec = Exec::start(&client, shell(&session.name, script)).await?;
    exec.until_stdout("up").await?;
    let name = exec.transcript.queued.as_ref().map(|run| run.name.clone()).unwrap_or_default();
    client.runs().cancel_run(CancelRunRequest { name, ..Default::default() }).await?;
    let seen = exec.finish().await?;
    assert!(seen.stdout_text().contains("clean"));
    assert_eq!(
        seen.outcome(),
        Kind::Canceled(Canceled::default()),
        "canceled, whatever its exit status"
    );
    cluster.end().await
}

#[tokio::test]
async fn closing_session_ends_its_runs() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec = Exec::start(&client, shell(&session.name, "pwd; exec sleep 100")).await?;
    let directory = session_root(&mut exec).await?;
    client.close(&session.name).await?;
    assert_eq!(exec.finish().await?.outcome(), Kind::Canceled(Canceled::default()));
    nothing_works_in(&directory).await;
    cluster.end().await
}

/// Finds the command's own CPU cgroup, in cgroup v1 or v2.
const FIND_GROUP: &str = "group=$(sed -n 's/^[0-9]*:\\(cpu\\|.*,cpu\\)\\(,[^:]*\\)\\?:/cpu/p; s/^0:://p' /proc/self/cgroup | head -n 1)";

#[tokio::test]
async fn long_running_command_gets_lower_cpu_weight() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    // The command exits when its group has an eighth of the default weight.
    let script = format!(
        "{FIND_GROUP}; for weight in /sys/fs/cgroup/$group/cpu.shares /sys/fs/cgroup/$group/cpu.weight; do
            if [ -e $weight ]; then until grep -qx -e 128 -e 12 $weight; do sleep 0.01; done; echo $weight; fi
        done"
    );
    let seen = Exec::start(&client, shell(&session.name, &script)).await?.finish().await?;
    let unlimited = seen.stdout.is_empty().then_some("no cgroup with a CPU weight");
    if available("cgroup", unlimited) {
        assert_eq!(seen.outcome(), Kind::Exited(0), "{seen:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn cpu_idle_setting_applies_to_commands() -> Result<()> {
    let settings = vec![("CODELIA_SANDBOX_CPU_IDLE", "true".to_owned())];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let script = format!("{FIND_GROUP}; cat /sys/fs/cgroup/$group/../cpu.idle");
    let seen = Exec::start(&client, shell(&session.name, &script)).await?.finish().await?;
    let unlimited = seen.stdout.is_empty().then_some("no cgroup with cpu.idle");
    if available("cgroup", unlimited) {
        assert_eq!(seen.stdout, b"1\n", "{seen:?}");
    }
    cluster.end().await
}

#[tokio::test]
async fn run_over_memory_limit_ends_as_oom() -> Result<()> {
    let cluster = Cluster::shared().await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let limits = Limits { memory_bytes: Some(64 << 20), ..Limits::default() };
    // `tail` keeps an endless line in memory.
    let request = StartRunRequest {
        limits: Some(limits),
        ..shell(&session.name, "head -c 500000000 /dev/zero | tail")
    };
    let seen = Exec::start(&client, request).await?.finish().await?;
    let refused = match seen.outcome() {
        Kind::Refused(refused) => Some(refused.message),
        _ => None,
    };
    if available("cgroup", refused.as_deref()) {
        assert_eq!(seen.outcome(), Kind::Oom(OutOfMemory {}));
    }
    cluster.end().await
}
