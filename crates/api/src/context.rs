//! State that all services of the server share.

use std::sync::Arc;

use codelia_store::{Caller, Store};
use codelia_telemetry::TenantPool;
use codelia_types::SessionId;
use tokio_util::sync::CancellationToken;

use crate::{
    admission::{
        quota::{RunQuota, SessionQuota, StorageQuota},
        rules::Rules,
    },
    cache::Recently,
    error::ApiError,
    flags::FlagRules,
    options::Options,
    policy::cache::TenantPolicies,
    server::rate_limit::RateLimits,
    sessions::cache::SessionCache,
    tools::ToolCache,
    workers::WorkerCalls,
};

/// State that all services of the server share.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) options: Options,
    pub(crate) store: Store,
    pub(crate) worker_calls: WorkerCalls,
    pub(crate) session_cache: SessionCache,
    /// The rules of mode flags.
    pub(crate) flags: FlagRules,
    pub(crate) tenant_policies: TenantPolicies,
    /// Sessions with recorded file calls that left their workspace.
    pub(crate) traversals: Recently<SessionId>,
    /// Tools that runs named lately.
    pub(crate) tools: ToolCache,
    pub(crate) storage_quota: StorageQuota,
    pub(crate) run_quota: RunQuota,
    /// How fast each tenant may read lists.
    pub(crate) list_reads: RateLimits,
    pub(crate) session_quota: SessionQuota,
    /// Checks large policies, few at a time for each tenant.
    pub(crate) policy_checks: Arc<TenantPool>,
    /// Cancelled when open streams must end because the shutdown grace is over.
    pub(crate) stop_streams: CancellationToken,
}

impl Context {
    /// Waits until the caller's tenant may read some rows of a list.
    pub(crate) async fn list_turn(&self, caller: &Caller) -> Result<(), ApiError> {
        self.list_reads.wait(&caller.tenant, self.options.api.list_reads_per_second.get()).await
    }

    /// Does work on a policy: off the async runtime and under the tenant's limit if it is large.
    pub(crate) async fn with_policy<T: Send + 'static>(
        self: &Arc<Self>,
        caller: &Caller,
        is_large: bool,
        work: impl FnOnce(&Rules<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let tenant = self
            .tenant_policies
            .get(&self.store, &self.policy_checks, &self.options.policy, caller)
            .await?;
        if !is_large && tenant.as_ref().is_none_or(|tenant| !tenant.is_large) {
            return work(&Rules::new(caller, &self.options, tenant.as_deref()));
        }
        let context = self.clone();
        let owned = caller.clone();
        let check = move || work(&Rules::new(&owned, &context.options, tenant.as_deref()));
        self.policy_checks.run(caller.tenant.as_str(), check).await?
    }
}
