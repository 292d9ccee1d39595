//! A worker whose runtime is stuck: it keeps its lease, and a lost lease still kills its commands.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    time::Duration,
};

use codelia_backends::{Backend, Logical, LogicalOptions};
use codelia_tests::{Database, available, eventually};
use codelia_types::{LostReason, Outcome, RunId, SessionId};
use tokio::runtime::{Builder, Runtime};

use crate::fixture::{Fixture, Settings, shell};

const THREADS: usize = 2;
const LEASE_TTL: Duration = Duration::from_secs(1);
/// Renewed three lease times after the runtime was blocked, without another registration.
const KEPT: &str = "SELECT count(*) FROM workers, blocked
                    WHERE registered_at < since AND heartbeat_at > since + interval '3 seconds'";

/// A worker with real sandboxes, on a runtime that the test can block. The test itself runs on
/// another one.
struct Stuck {
    fixture: Fixture,
    session: SessionId,
    run: RunId,
    runtime: Runtime,
    observer: Runtime,
}

impl Stuck {
    /// Starts a worker and a command that waits for the file `go`; `None` without `codelia-init`.
    fn new() -> Option<Self> {
        let Some(init) = std::env::var_os("CODELIA_INIT").map(PathBuf::from) else {
            available("logical", Some("CODELIA_INIT is not set to the path of codelia-init"));
            return None;
        };
        let backend =
            Logical::new(LogicalOptions { init, cgroup_parent: Default::default() }).unwrap();
        let runtime =
            Builder::new_multi_thread().worker_threads(THREADS).enable_all().build().unwrap();
        let observer = Builder::new_current_thread().enable_all().build().unwrap();
        let settings = Settings { lease_ttl: LEASE_TTL, ..Settings::default() };
        let (fixture, session, run) = runtime.block_on(async {
            let fixture =
                Fixture::with(settings, vec![Arc::new(backend) as Arc<dyn Backend>]).await;
            let session = fixture.held_session().await;
            let script = "echo $$ > pid; echo begun; until [ -e go ]; do sleep 0.05; done";
            let run = fixture.start(session, &shell(script)).await;
            // The worker has seen that the command started.
            fixture.attach(run, false).await.until("begun").await;
            (fixture, session, run)
        });
        Some(Self { fixture, session, run, runtime, observer })
    }

    /// The directory of the command's process.
    fn process(&self) -> PathBuf {
        let file = self.fixture.directory(self.session).join("pid");
        let pid = self.observer.block_on(eventually("the command runs", || async {
            std::fs::read_to_string(&file).ok()?.trim().parse::<u32>().ok()
        }));
        Path::new("/proc").join(pid.to_string())
    }

    /// Blocks every thread of the worker's runtime until the result is dropped.
    fn block(&self) -> Vec<mpsc::Sender<()>> {
        let (started, all_started) = mpsc::channel();
        let release = (0..THREADS).map(|_| {
            let (release, blocked) = mpsc::channel::<()>();
            let started = started.clone();
            self.runtime.spawn(async move {
                started.send(()).unwrap();
                blocked.recv().unwrap_err();
            });
            release
        });
        let release = release.collect();
        (0..THREADS).for_each(|_| all_started.recv().unwrap());
        self.observer
            .block_on(self.database().execute("CREATE TABLE blocked AS SELECT now() AS since"))
            .unwrap();
        release
    }

    fn database(&self) -> &Database {
        &self.fixture.database
    }

    fn end(self, outcome: Outcome) {
        std::fs::write(self.fixture.directory(self.session).join("go"), "").unwrap();
        self.runtime.block_on(async {
            assert_eq!(self.fixture.ended(self.run).await.outcome(), Some(&outcome));
            self.fixture.end().await;
        });
    }
}

#[test]
fn blocked_runtime_costs_no_lease_and_no_run() {
    let Some(stuck) = Stuck::new() else { return };
    let process = stuck.process();
    let release = stuck.block();
    stuck.observer.block_on(eventually("the lease is renewed", || async {
        (stuck.database().number(KEPT).await.ok()? == 1).then_some(())
    }));
    assert!(process.exists(), "codelia-init learns of the renewals and lets the command run");
    drop(release);
    stuck.end(Outcome::Exited(0));
}

#[test]
fn lost_lease_kills_commands_of_blocked_runtime() {
    let Some(stuck) = Stuck::new() else { return };
    let process = stuck.process();
    let release = stuck.block();
    assert!(process.exists(), "the control: the command runs");
    stuck.observer.block_on(async {
        let store = stuck.database().store().await.unwrap();
        store.worker_register(&stuck.fixture.successor()).await.unwrap();
        store.close().await;
        eventually("the command is dead", || async { (!process.exists()).then_some(()) }).await;
    });
    drop(release);
    stuck.end(Outcome::Lost(LostReason::WorkerLost));
}
