//! Runs that wait for an approval, whatever the policy of the installation says.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, bail};
use codelia_policy::RunSpec;
use codelia_proto::v1::{Session, WhoAmIRequest};
use codelia_store::{ApprovalKind, NewApproval, NewRun, Quotas, RunAdmission};
use codelia_types::{ApprovalId, CommandSpec, KeyId, RunId};

use crate::{Client, Cluster, store_values::logical_run};

/// A run that waits for an approval.
#[derive(Debug, Clone)]
pub struct HeldRun {
    /// The resource name of the run.
    pub run: String,
    /// The resource name of the approval.
    pub approval: String,
    /// The id of the approval.
    pub approval_id: String,
}

impl HeldRun {
    /// Records a run of a shell script that needs an approval to start, as the api does for
    /// `client`.
    pub async fn record(
        cluster: &Cluster,
        client: &Client,
        session: &Session,
        script: &str,
        timeout: Duration,
    ) -> Result<Self> {
        let me = client.info().who_am_i(WhoAmIRequest {}).await?.into_inner();
        let (tenant, key) =
            (me.tenant.context("tenant")?.tenant_id.parse()?, me.key.context("key")?.key_id);
        let approval = NewApproval {
            id: ApprovalId::generate(),
            kind: ApprovalKind::NetworkProxy,
            host: String::new(),
            port: 0,
            message: "\"sh\" requests the network".into(),
            requested_by: key.parse()?,
            timeout,
        };
        let spec = RunSpec { command: CommandSpec::new(["sh", "-c", script]), ..logical_run() };
        let new = NewRun {
            id: RunId::generate(),
            session: session.session_id.parse()?,
            tenant: &tenant,
            spec: &spec,
            labels: &BTreeMap::new(),
            retries: 0,
            queue_timeout: Duration::from_secs(60),
            idempotency: None,
            secret_env: None,
            check_quotas: true,
            key: KeyId::generate(),
            key_version: None,
            requested_by: None,
            traceparent: None,
            approval: Some(&approval),
        };
        match cluster.store.run_insert(new, Quotas::default()).await? {
            RunAdmission::Recorded { run, .. } => Ok(Self {
                run: format!("{}/runs/{}", session.name, run.id),
                approval: format!("approvals/{}", approval.id),
                approval_id: approval.id.to_string(),
            }),
            other => bail!("not recorded: {other:?}"),
        }
    }
}
