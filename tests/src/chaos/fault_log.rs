//! When each fault began and ended, and whether it can have cost a worker its lease. Times are
//! seconds since boot: no clock that jumps.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::plan::{Fault, FaultEvent, WORKERS};
use crate::WORKER_LEASE_SECONDS;

/// Records the last renewal of each incarnation.
pub(crate) const RENEWAL_OBSERVER: &str = "
CREATE TABLE chaos_renewals (incarnation uuid PRIMARY KEY, renewed double precision NOT NULL);
CREATE FUNCTION chaos_renewal() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    INSERT INTO chaos_renewals VALUES (NEW.incarnation, split_part(pg_read_file('/proc/uptime'), ' ', 1)::double precision)
    ON CONFLICT (incarnation) DO UPDATE SET renewed = excluded.renewed;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_renewals AFTER INSERT OR UPDATE ON workers
FOR EACH ROW WHEN (NEW.lease_until > now()) EXECUTE FUNCTION chaos_renewal();
";

/// An outage that is shorter than this cannot cost a lease: the worker renews it after a third and
/// gives it up a fifth before its end. Less a little for the accuracy of the times.
const MIN_OUTAGE: f64 = WORKER_LEASE_SECONDS as f64 * (0.8 - 1.0 / 3.0) - 0.3;

/// The last renewal of each incarnation.
pub(crate) type Renewals = BTreeMap<Uuid, f64>;

pub(crate) async fn load_renewals(connection: &mut PgConnection) -> Result<Renewals> {
    let rows = sqlx::query("SELECT incarnation, renewed FROM chaos_renewals")
        .fetch_all(connection)
        .await?;
    rows.into_iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

pub(crate) fn uptime() -> Result<f64> {
    let text = fs::read_to_string("/proc/uptime")?;
    text.split(' ').next().and_then(|word| word.parse().ok()).context("/proc/uptime")
}

/// One fault that happened.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultRecord {
    pub(crate) event: FaultEvent,
    pub(crate) began: f64,
    pub(crate) ended: f64,
}

/// All faults that happened.
#[derive(Debug, Default)]
pub(crate) struct FaultLog {
    pub(crate) records: Vec<FaultRecord>,
    /// How long after a fault of the server a pooler does not connect to it, in seconds.
    pub(crate) pooler_retry: f64,
}

impl FaultLog {
    pub(crate) fn begin(&mut self, event: FaultEvent) -> Result<()> {
        self.records.push(FaultRecord { event, began: uptime()?, ended: f64::INFINITY });
        Ok(())
    }

    pub(crate) fn end(&mut self, event: FaultEvent) -> Result<()> {
        let ended = uptime()?;
        let is_open =
            |record: &&mut FaultRecord| record.event == event && record.ended.is_infinite();
        self.records.iter_mut().filter(is_open).for_each(|record| record.ended = ended);
        Ok(())
    }

    /// Whether faults explain that an incarnation of a worker lost its lease after it was last
    /// renewed at `renewed`. The worker may not have received the answer to its last renewals.
    pub(crate) fn explains(&self, worker: usize, renewed: f64) -> bool {
        let lease = WORKER_LEASE_SECONDS as f64;
        let (from, until) = (renewed - lease, renewed + lease);
        let strikes = |at: f64| from <= at && at <= until;
        let mut outage = 0.0;
        for FaultRecord { event: FaultEvent { fault, target }, began, ended } in &self.records {
            let lasts_longer = match fault.scope() {
                Scope::Worker if *target == worker => 0.0,
                Scope::AllWorkers => self.pooler_retry,
                Scope::Nothing | Scope::Worker => continue,
            };
            let is_sudden = match fault {
                Fault::KillWorker | Fault::Failover => strikes(*began),
                Fault::ClockForward | Fault::ClockBackward => strikes(*began) || strikes(*ended),
                _ => false,
            };
            if is_sudden {
                return true;
            }
            outage += ((ended + lasts_longer).min(until) - began.max(from)).max(0.0);
        }
        outage >= MIN_OUTAGE
    }
}

impl FaultLog {
    /// Whether connections of apis to this worker broke.
    pub(crate) fn broke_link(&self, worker: &str) -> bool {
        let worker = worker_index(worker);
        self.records.iter().any(|FaultRecord { event, .. }| {
            matches!(event.fault, Fault::CutWorker | Fault::StallWorker | Fault::HalfOpen)
                && worker == Some(event.target % WORKERS)
        })
    }
}

/// Whose leases a fault can end.
enum Scope {
    Nothing,
    Worker,
    AllWorkers,
}

impl Fault {
    fn scope(self) -> Scope {
        match self {
            Self::KillWorker | Self::PauseWorker | Self::Partition | Self::Stall => Scope::Worker,
            Self::StopPostgres
            | Self::CrashPostgres
            | Self::KillBackend
            | Self::FullDatabaseDisk
            | Self::ClockForward
            | Self::ClockBackward
            | Self::Failover => Scope::AllWorkers,
            Self::KillApi
            | Self::RestartApi
            | Self::Cut
            | Self::FullDisk
            | Self::CutWorker
            | Self::StallWorker
            | Self::HalfOpen
            | Self::Drain
            | Self::RollingRestart => Scope::Nothing,
        }
    }
}

/// The index of a worker with this id.
pub(crate) fn worker_index(id: &str) -> Option<usize> {
    (0..WORKERS).find(|number| id == format!("worker-{number}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(fault: Fault, target: usize, began: f64, ended: f64) -> FaultLog {
        let records = vec![FaultRecord { event: FaultEvent { fault, target }, began, ended }];
        FaultLog { records, pooler_retry: 0.0 }
    }

    #[test]
    fn only_faults_on_the_lease_explain_its_loss() {
        assert!(log(Fault::KillWorker, 1, 100.5, 101.0).explains(1, 100.0));
        assert!(log(Fault::Partition, 1, 99.0, 103.0).explains(1, 100.0));
        assert!(log(Fault::CrashPostgres, 0, 99.0, 101.5).explains(1, 100.0));
        assert!(!log(Fault::KillWorker, 2, 100.5, 101.0).explains(1, 100.0), "another worker");
        assert!(!log(Fault::KillWorker, 1, 50.0, 51.0).explains(1, 100.0), "another time");
        assert!(!log(Fault::Stall, 1, 100.0, 100.5).explains(1, 100.0), "too short");
        let short = log(Fault::CrashPostgres, 0, 100.0, 100.5);
        assert!(!short.explains(1, 100.0), "too short");
        assert!(
            FaultLog { pooler_retry: 1.0, ..short }.explains(1, 100.0),
            "a pooler connects late"
        );
        for fault in [
            Fault::Drain,
            Fault::RollingRestart,
            Fault::KillApi,
            Fault::HalfOpen,
            Fault::StallWorker,
        ] {
            assert!(!log(fault, 1, 90.0, 110.0).explains(1, 100.0), "{fault:?}");
        }
    }
}
