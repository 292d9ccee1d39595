//! The table `tenants`: who uses the service, and how much of it they may use.

use codelia_policy::TenantId;
use time::OffsetDateTime;

use crate::{Error, Store};

/// A tenant.
#[derive(Debug, Clone)]
pub struct Tenant {
    /// Its id.
    pub id: TenantId,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// What it may use.
    pub quotas: Quotas,
}

/// What a tenant may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quotas {
    /// Open sessions.
    pub sessions: i64,
    /// Runs that have not ended.
    pub concurrent_runs: i64,
    /// Runs that wait for a slot.
    pub queued_runs: i64,
    /// Requests each second, for each api process.
    pub requests_per_second: i64,
    /// Bytes of run output kept.
    pub output_bytes: i64,
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            sessions: 1_000,
            concurrent_runs: 1_000,
            queued_runs: 1_000,
            requests_per_second: 5_000,
            output_bytes: 10 * 1024 * 1024 * 1024,
        }
    }
}

/// New quotas; `None` leaves one as it is.
#[derive(Debug, Clone, Copy, Default)]
pub struct QuotasChange {
    /// See [`Quotas::sessions`].
    pub sessions: Option<i64>,
    /// See [`Quotas::concurrent_runs`].
    pub concurrent_runs: Option<i64>,
    /// See [`Quotas::queued_runs`].
    pub queued_runs: Option<i64>,
    /// See [`Quotas::requests_per_second`].
    pub requests_per_second: Option<i64>,
    /// See [`Quotas::output_bytes`].
    pub output_bytes: Option<i64>,
}

/// What a tenant uses now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Used {
    /// Open sessions.
    pub sessions: i64,
    /// Runs that have not ended.
    pub concurrent_runs: i64,
    /// Runs that wait for a slot.
    pub queued_runs: i64,
    /// Bytes of run output kept.
    pub output_bytes: i64,
}

impl Store {
    /// Creates a tenant.
    ///
    /// # Errors
    /// [`Error::Exists`] if the id is in use.
    pub async fn tenant_create(&self, id: &TenantId, quotas: Quotas) -> Result<Tenant, Error> {
        todo!()
    }

    /// Returns a tenant.
    pub async fn tenant_get(&self, id: &TenantId) -> Result<Option<Tenant>, Error> {
        todo!()
    }

    /// Lists tenants by id, after `after`. For operators.
    pub async fn tenant_list_any_tenant(&self, after: Option<&TenantId>, limit: i64) -> Result<Vec<Tenant>, Error> {
        todo!()
    }

    /// Changes a tenant's quotas. For operators.
    pub async fn tenant_set_quotas(&self, id: &TenantId, change: QuotasChange) -> Result<Option<Tenant>, Error> {
        todo!()
    }

    /// Counts what a tenant uses.
    pub async fn tenant_usage(&self, id: &TenantId) -> Result<Used, Error> {
        todo!()
    }
}
