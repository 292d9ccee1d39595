//! Listing runs: summaries that stay small whatever the caller sent.

use std::collections::BTreeMap;

use codelia_policy::{Limits, RunSpec};
use codelia_types::{Mode, Outcome, Receipt, RunId, TenantId, Usage, Violations};
use serde::{Deserialize, Serialize};
use sqlx::types::Json;

use super::{Run, RunFilter, RunRow, RunState, select_runs};
use crate::{Error, Store};

/// Maximum bytes of the arguments in a summary.
const MAX_ARGV: usize = 1024;

/// A run as listings show it: without environment, policy and violations, with a short command and
/// a short message if it was refused.
pub type RunSummary = Run<SpecSummary>;

/// What listings show of a spec. Stored with the run, because a spec may be large.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecSummary {
    /// The mode to execute it in.
    pub mode: Mode,
    /// The limits that the run is held to.
    pub limits: Limits,
    /// Program and arguments, as far as they fit.
    pub argv: Vec<String>,
    /// Whether some arguments are cut or missing.
    pub argv_truncated: bool,
}

impl SpecSummary {
    /// The summary of a spec.
    pub(super) fn new(spec: &RunSpec) -> Self {
        let mut left = MAX_ARGV;
        let mut argv = Vec::new();
        for argument in &spec.command.argv {
            let kept = &argument[..argument.floor_char_boundary(left)];
            argv.push(kept.to_owned());
            // An empty argument costs something too.
            left = left.saturating_sub(kept.len() + 1);
            if kept.len() < argument.len() || left == 0 {
                break;
            }
        }
        let argv_truncated = argv != spec.command.argv;
        Self { mode: spec.mode, limits: spec.limits.clone(), argv, argv_truncated }
    }
}

type SummaryRow = RunRow<SpecSummary>;

/// Reads summaries of runs by a condition and its arguments.
macro_rules! select_summaries {
    ($pool:expr, $condition:literal, $($argument:expr),* $(,)?) => {
        select_runs!(
            SummaryRow,
            // A run of an earlier version has no summary: show only its program.
            r#"coalesce(r.summary, jsonb_build_object(
                   'mode', r.spec -> 'mode', 'limits', r.spec -> 'limits',
                   'argv', jsonb_build_array(left(r.spec #>> '{command,argv,0}', 256)),
                   'argv_truncated', true)) AS "spec!: Json<SpecSummary>",
               CASE WHEN octet_length(r.outcome #>> '{detail,message}') > 1024
                    THEN jsonb_set(r.outcome, '{detail,message}', to_jsonb(left(r.outcome #>> '{detail,message}', 256) || '…'))
                    ELSE r.outcome END AS "outcome: Json<Outcome>",
               jsonb_set(r.violations, '{seen}', '[]') AS "violations: Json<Violations>""#,
            $condition,
            $($argument),*
        )
        .fetch_all($pool)
        .await?
        .into_iter()
        .map(Run::try_from)
        .collect()
    };
}

impl Store {
    /// Lists summaries of a tenant's runs, newest first.
    pub async fn run_list(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        if !filter.labels.is_empty() {
            return self.run_list_labeled(tenant, filter, limit).await;
        }
        select_summaries!(
            &self.pools.reads,
            "r.tenant_id = $1 AND ($2::uuid IS NULL OR r.session_id = $2) AND ($3::text IS NULL OR r.state = $3)
               AND ($4::timestamptz IS NULL OR r.created_at > $4) AND ($5::timestamptz IS NULL OR r.created_at < $5)
               AND ($6::uuid IS NULL OR r.id < $6)
             ORDER BY r.id DESC LIMIT $7",
            tenant.as_str(),
            filter.session.map(|id| id.0),
            filter.state.map(RunState::as_str),
            filter.created_after,
            filter.created_before,
            filter.before.map(|id| id.0),
            limit,
        )
    }

    /// Lists summaries of runs that have not ended, of all tenants or of one, newest first. For
    /// operators. Finds them by the index of active runs, however many have ended.
    pub async fn run_list_active_any_tenant(
        &self,
        tenant: Option<&TenantId>,
        before: Option<RunId>,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        select_summaries!(
            &self.pools.reads,
            "r.id = ANY (ARRAY(SELECT id FROM runs
                               WHERE active_tenant IS NOT NULL AND ($1::text IS NULL OR active_tenant = $1)))
               AND ($2::uuid IS NULL OR r.id < $2)
             ORDER BY r.id DESC LIMIT $3",
            tenant.map(TenantId::as_str),
            before.map(|id| id.0),
            limit,
        )
    }

    /// As [`Store::run_list`], with labels. A statement of its own, because Postgres plans it once
    /// for all arguments: it finds ids by the index of labels alone, then their rows, and sorts them.
    async fn run_list_labeled(
        &self,
        tenant: &TenantId,
        filter: &RunFilter,
        limit: i64,
    ) -> Result<Vec<RunSummary>, Error> {
        select_summaries!(
            &self.pools.reads,
            "r.id = ANY (ARRAY(SELECT id FROM runs
                               WHERE label_tokens(tenant_id, labels) @> label_tokens($1, $8) AND labels <> '{}'))
               -- Not by the index of tenants, which has all other runs too.
               AND r.tenant_id || '' = $1 AND ($2::uuid IS NULL OR r.session_id = $2) AND ($3::text IS NULL OR r.state = $3)
               AND ($4::timestamptz IS NULL OR r.created_at > $4) AND ($5::timestamptz IS NULL OR r.created_at < $5)
               AND ($6::uuid IS NULL OR r.id < $6)
             ORDER BY r.id DESC LIMIT $7",
            tenant.as_str(),
            filter.session.map(|id| id.0),
            filter.state.map(RunState::as_str),
            filter.created_after,
            filter.created_before,
            filter.before.map(|id| id.0),
            limit,
            Json(&filter.labels) as _,
        )
    }
}

#[cfg(test)]
mod tests {
    use codelia_policy::{LimitsRequest, Policy};
    use codelia_types::CommandSpec;

    use super::*;

    fn argv(argv: &[&str]) -> (Vec<String>, bool) {
        let summary = SpecSummary::new(&RunSpec {
            command: CommandSpec::new(argv.iter().copied()),
            mode: Mode::Logical,
            network: None,
            limits: Limits::default(),
            requested_limits: LimitsRequest::default(),
            policy: Policy::default(),
            ends_with_caller: false,
        });
        (summary.argv, summary.argv_truncated)
    }

    #[test]
    fn short_command_is_kept_whole() {
        assert_eq!(argv(&["sh", "-c", ""]), (vec!["sh".into(), "-c".into(), String::new()], false));
    }

    #[test]
    fn long_command_is_cut_and_marked() {
        let (kept, truncated) = argv(&["sh", "-c", &"é".repeat(1000), "x"]);
        assert_eq!((kept.len(), truncated), (3, true));
        assert!(kept[2].len() > 1000 && kept[2].chars().all(|c| c == 'é'), "{kept:?}");
        let (kept, truncated) = argv(&vec![""; 5000]);
        assert_eq!((kept.len(), truncated), (MAX_ARGV, true));
    }
}
