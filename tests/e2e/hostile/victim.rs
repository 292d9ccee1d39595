//! The tenant that works during an attack, and what the attack did to it.

use anyhow::{Context, Result, ensure};
use codelia_proto::v1::{Run, outcome::Kind::Exited};
use codelia_tests::{Client, Cluster, shell};

/// A tenant with a run that lasts until [`Victim::damage`] ends it.
pub(super) struct Victim {
    client: Client,
    session: String,
    run: Run,
}

impl Victim {
    pub(super) async fn new(cluster: &Cluster) -> Result<Self> {
        let client = cluster.tenant("victim").await?;
        let session = client.session().await?.name;
        client.exec(&session, "true").await?;
        let run = client
            .start(shell(&session, "until [ -e stop ]; do sleep 0.05; done; echo end"))
            .await?;
        Ok(Self { client, session, run })
    }

    /// Executes one command and checks its result.
    pub(super) async fn execute(&self, number: usize) -> Result<()> {
        let seen = self.client.exec(&self.session, &format!("echo {number}")).await?;
        ensure!(
            seen.outcome() == Exited(0) && seen.stdout_text() == format!("{number}\n"),
            "{seen:?}"
        );
        Ok(())
    }

    /// The state of the run that lasts.
    pub(super) async fn run(&self) -> Result<Run> {
        Ok(self.client.get_run(&self.run.name).await?)
    }

    /// Ends the run that lasts and returns what happened to it and to the lease.
    pub(super) async fn damage(&self, cluster: &Cluster) -> Result<Vec<String>> {
        let mut damage = Vec::new();
        self.client.exec(&self.session, "touch stop").await?;
        let seen = self.client.watch_to_end(&self.run.name, 0).await?;
        if seen.outcome() != Exited(0) || seen.stdout_text() != "end\n" {
            damage.push(format!("the run ended with {:?}", seen.outcome()));
        }
        let epoch = self.client.get_session(&self.session).await?.lease_epoch;
        if epoch != 1 {
            damage.push(format!("the lease of the session has epoch {epoch}"));
        }
        let counts = [
            (
                "events of a lost lease",
                "SELECT count(*) FROM audit WHERE kind = 'WORKER_FENCED'",
                0,
            ),
            (
                "events of a worker out of rotation",
                "SELECT count(*) FROM audit WHERE kind = 'WORKER_OUT_OF_ROTATION'",
                0,
            ),
            (
                "incarnations of the worker",
                "SELECT count(DISTINCT incarnation) FROM runs WHERE tenant_id = 'victim'",
                1,
            ),
            (
                "failed runs",
                "SELECT count(*) FROM runs WHERE tenant_id = 'victim' AND outcome->>'kind' <> 'exited'",
                0,
            ),
        ];
        for (what, query, expected) in counts {
            let count = cluster.database.number(query).await.with_context(|| query)?;
            if count != expected {
                damage.push(format!("{what}: {count}"));
            }
        }
        Ok(damage)
    }
}
