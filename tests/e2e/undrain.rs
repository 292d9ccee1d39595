//! An operator takes back the drain of a worker.

use anyhow::Result;
use codelia_proto::v1::{DrainWorkerRequest, RunState, UndrainWorkerRequest, WorkerState};
use codelia_tests::{Cluster, Process, eventually, refusal, shell};
use rustix::process::Signal;
use tonic::Code;

#[tokio::test]
async fn undrained_worker_takes_sessions_again() -> Result<()> {
    let cluster = Cluster::start().await?;
    let operator = cluster.operator().await?;
    let name = "workers/worker-0".to_owned();
    operator.admin().drain_worker(DrainWorkerRequest { name: name.clone() }).await?;
    let session = operator.session().await?;
    assert!(session.worker_id.is_empty(), "a draining worker takes no session: {session:?}");
    for _ in 0..2 {
        let undrained = operator.admin().undrain_worker(UndrainWorkerRequest { name: name.clone() }).await?;
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
    assert_eq!((refused.code, refused.reason.as_str()), (Code::FailedPrecondition, "WORKER_DRAINS_ITSELF"));
    operator.close(&session.name).await?;
    cluster.workers[0].process.exited().await?;
    cluster.end().await
}
