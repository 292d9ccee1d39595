//! An operator takes back the drain of a worker; what probes see of a process that shuts down.

use anyhow::Result;
use codelia_proto::v1::{DrainWorkerRequest, RunState, UndrainWorkerRequest, WorkerState};
use codelia_tests::{Cluster, ClusterOptions, Exec, Process, eventually, refusal, shell};
use rustix::process::Signal;
use tonic::Code;

use crate::service::{free_address, http_get};

#[tokio::test]
async fn undrained_worker_takes_sessions_again() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let name = "workers/worker-0".to_owned();
    operator.admin().drain_worker(DrainWorkerRequest { name: name.clone() }).await?;
    let session = operator.session().await?;
    assert!(session.worker_id.is_empty(), "a draining worker takes no session: {session:?}");
    for _ in 0..2 {
        let undrained =
            operator.admin().undrain_worker(UndrainWorkerRequest { name: name.clone() }).await?;
        assert_eq!(undrained.into_inner().worker.unwrap_or_default().state(), WorkerState::Ready);
    }
    operator.exec(&session.name, "true").await?;

    let drain = ["workers", "drain", "worker-0"];
    assert_eq!(Process::finish(cluster.cli(&operator, &drain), b"").await?.code, Some(0));
    let undrain = ["workers", "undrain", "worker-0", "--wait"];
    let done = Process::finish(cluster.cli(&operator, &undrain), b"").await?;
    assert!(done.code == Some(0) && done.stdout.contains("ready"), "{done:?}");
    let session = operator.session().await?;
    assert_eq!(session.worker_id, "worker-0", "it takes a session at once: {session:?}");

    let member = cluster.tenant("a").await?;
    let refused = member.admin().undrain_worker(UndrainWorkerRequest { name }).await;
    assert_eq!(refusal(&refused.expect_err("needs scope operator")).code, Code::PermissionDenied);
    let unknown = UndrainWorkerRequest { name: "workers/nobody".into() };
    let refused = operator.admin().undrain_worker(unknown).await.expect_err("no such worker");
    assert_eq!(refusal(&refused).code, Code::NotFound);
    cluster.end().await
}

#[tokio::test]
async fn undrain_wait_fails_without_heartbeat() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    operator.admin().drain_worker(DrainWorkerRequest { name: "workers/worker-0".into() }).await?;
    cluster.workers[0].process.signal(Signal::STOP)?;
    let undrain = ["workers", "undrain", "worker-0", "--wait", "--timeout", "1ms"];
    let done = Process::finish(cluster.cli(&operator, &undrain), b"").await;
    cluster.workers[0].process.signal(Signal::CONT)?;
    let done = done?;
    assert!(done.code == Some(1) && done.stderr.contains("sent no heartbeat for 1ms"), "{done:?}");
    // The control: the worker takes work again once it has sent one.
    eventually("the worker takes work", || async {
        let undrain = ["workers", "undrain", "worker-0", "--wait"];
        let done = Process::finish(cluster.cli(&operator, &undrain), b"").await.ok()?;
        (done.code == Some(0)).then_some(())
    })
    .await;
    cluster.end().await
}

#[tokio::test]
async fn process_that_shuts_down_stays_live() -> Result<()> {
    let shape = ClusterOptions { apis: 0, workers: 0, ..ClusterOptions::default() };
    let mut cluster = Cluster::start_with(shape).await?;
    let (of_api, of_worker) = (free_address().await?, free_address().await?);
    cluster.add_worker_with(&[("CODELIA_METRICS_LISTEN", &of_worker)]).await?;
    cluster.add_api_with(&[("CODELIA_METRICS_LISTEN", &of_api)]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let mut exec =
        Exec::start(&client, shell(&session.name, "echo begun; exec sleep 1000")).await?;
    exec.until_stdout("begun").await?;
    cluster.workers[0].process.signal(Signal::TERM)?;
    cluster.apis[0].process.signal(Signal::TERM)?;
    for address in [&of_api, &of_worker] {
        let not_ready =
            || async { (http_get(address, "/readyz").await.ok()?.0 == 503).then_some(()) };
        eventually(("not ready", address), not_ready).await;
        assert_eq!(http_get(address, "/healthz").await?.0, 200, "it must not be restarted");
        assert_eq!(http_get(address, "/startupz").await?.0, 200);
    }
    // Its caller leaves, so the run ends, and both processes are done.
    drop(exec);
    assert!(cluster.apis[0].process.exited().await?.success());
    assert!(cluster.workers[0].process.exited().await?.success());
    assert!(http_get(&of_worker, "/healthz").await.is_err(), "the control: it has exited");
    cluster.end().await
}

#[tokio::test]
async fn worker_that_shuts_down_cannot_be_undrained() -> Result<()> {
    let mut cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let session = operator.session().await?;
    let run = operator.start(shell(&session.name, "exec sleep 100")).await?;
    eventually("the run has started", || async {
        let run = operator.get_run(&run.name).await.ok()?;
        (run.state() == RunState::Running).then_some(())
    })
    .await;
    cluster.workers[0].process.signal(Signal::TERM)?;
    let refused = eventually("the worker drains by itself", || async {
        let request = UndrainWorkerRequest { name: "workers/worker-0".into() };
        operator.admin().undrain_worker(request).await.err()
    })
    .await;
    let refused = refusal(&refused);
    assert_eq!(
        (refused.code, refused.reason.as_str()),
        (Code::FailedPrecondition, "WORKER_DRAINS_ITSELF")
    );
    operator.close(&session.name).await?;
    cluster.workers[0].process.exited().await?;
    cluster.end().await
}
