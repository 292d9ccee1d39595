//! The tables `live_runs`, of runs that have not ended, and `ended_runs`, their history. Ending a
//! run is one statement that moves its row. Every run gets exactly one outcome.

mod assignment;
mod commit_group;
mod held;
mod insert;
mod insert_group;
mod list;
mod queue;
mod record;
mod recorded;
mod settings;
mod summary;

use std::{collections::BTreeMap, time::Duration};

use codelia_policy::RunSpec;
use codelia_types::{Outcome, RunId, RunResult, SessionId, TenantId};
use sqlx::types::Json;
use time::OffsetDateTime;

use self::record::select_runs;
use crate::{Error, Store, audit::SignedEvent, row};

pub use self::{
    assignment::{AssignedRun, HeldSessions},
    commit_group::RunCommit,
    held::{ChangesDecision, HeldChanges},
    insert::{ActiveRuns, NewRun, RunAdmission},
    list::RunFilter,
    queue::WaitReason,
    record::{Run, RunRef, RunState},
    recorded::RecordedRun,
    summary::{RunSummary, SpecSummary},
};
pub(crate) use self::{
    commit_group::CommitCall, held::of_session as held_changes, insert_group::InsertCall,
    queue::begin_queue_end, settings::KnownSettings,
};

/// How to cancel a run.
#[derive(Debug, Clone, Default)]
pub struct Cancellation {
    /// Why.
    pub reason: Option<String>,
    /// From SIGTERM to SIGKILL; `None` takes the worker's setting.
    pub grace: Option<Duration>,
}

impl Store {
    /// Returns a tenant's run.
    pub async fn run_get(&self, tenant: &TenantId, id: RunId) -> Result<Option<Run>, Error> {
        macro_rules! select_whole {
            ($table:ident) => {
                select_runs!(
                    $table
                    r#"r.spec || coalesce((SELECT s.settings FROM run_settings s WHERE s.hash = r.settings_hash), '{}')
                           AS "spec!: Json<RunSpec>",
                       r.result || jsonb_build_object('changes', r.changes) AS "result: Json<RunResult>""#,
                    "r.tenant_id || '' = $1 AND r.id = $2",
                    tenant.as_str(),
                    id.0,
                )
                .fetch_optional(&self.pools.runs)
                .await?
            };
        }
        // A run that ends between the two statements is found by the second.
        match select_whole!(live) {
            Some(live) => Ok(Some(live)),
            None => Ok(select_whole!(ended)),
        }
    }

    /// Requests the cancellation of a run. A queued or held run ends as canceled immediately. An
    /// ended run stays as it is. A repeated request keeps the first reason and can only shorten the
    /// grace.
    pub async fn run_cancel(
        &self,
        tenant: &TenantId,
        id: RunId,
        cancellation: &Cancellation,
    ) -> Result<Option<Run>, Error> {
        // The event of its end names the session.
        let session = sqlx::query_scalar!(
            "SELECT session_id FROM live_runs WHERE tenant_id || '' = $1 AND id = $2",
            tenant.as_str(),
            id.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        if let Some(session) = session {
            let run = RunRef { id, session: SessionId(session), tenant };
            self.run_cancel_live(run, cancellation).await?;
        }
        self.run_get(tenant, id).await
    }

    async fn run_cancel_live(
        &self,
        run: RunRef<'_>,
        cancellation: &Cancellation,
    ) -> Result<(), Error> {
        let SignedEvent { event, mac } = self.audit.run_end(run, None, &Outcome::Canceled);
        let ended = sqlx::query_file!(
            "src/sql/run_cancel.sql",
            run.tenant.as_str(),
            run.id.0,
            cancellation.reason,
            cancellation.grace.map(row::interval) as _,
            event.writer,
            event.id,
            event.at,
            event.detail,
            mac,
        )
        .execute(&self.pools.runs)
        .await?;
        if ended.rows_affected() == 0 {
            self.audit.forget(event.id);
        }
        Ok(())
    }

    /// Counts the queued runs of all tenants.
    pub async fn run_queue_any_tenant(&self) -> Result<Queue, Error> {
        let queue = sqlx::query_as!(
            Queue,
            r#"SELECT count(*) AS "depth!", min(created_at) AS oldest_at FROM live_runs WHERE state = 'queued'"#
        )
        .fetch_one(&self.pools.upkeep)
        .await?;
        Ok(queue)
    }
}

/// The queued runs of all tenants.
#[derive(Debug, Clone, Copy)]
pub struct Queue {
    /// Their number.
    pub depth: i64,
    /// When the oldest was created.
    pub oldest_at: Option<OffsetDateTime>,
}
