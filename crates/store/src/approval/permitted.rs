//! Limits of what may be allowed to runs now. A run that was admitted waits for its decision and
//! then for a worker, and meanwhile an operator may withdraw what the run asks for.

use codelia_policy::IsolationLevel;
use codelia_types::{Mode, NetworkMode, TenantId};
use sqlx::{PgConnection, types::Json};

use super::record::ApprovalKind;
use crate::{AssignedRun, Error, Store, row};

/// The most that runs may have with an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permitted {
    /// The widest network.
    pub network: NetworkMode,
    /// The lowest isolation.
    pub isolation: IsolationLevel,
}

/// The limit that a run exceeds now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Withdrawn {
    /// The widest network.
    Network(NetworkMode),
    /// The lowest isolation.
    Isolation(IsolationLevel),
}

impl Permitted {
    /// This, tightened by the policy and the isolation floor of a tenant. They cannot change before
    /// the transaction ends: it holds the lock of the tenant, under which policies change.
    pub(super) async fn under_tenant(
        self,
        tx: &mut PgConnection,
        tenant: &TenantId,
    ) -> Result<Self, Error> {
        let row = sqlx::query!(
            r#"SELECT t.isolation_floor, t.isolation_ask_floor, p.mode AS "mode: Json<Option<NetworkMode>>"
               FROM tenants t
               LEFT JOIN LATERAL (
                   SELECT policy -> 'network' -> 'mode' AS mode FROM tenant_policies
                   WHERE tenant_id = t.id ORDER BY version DESC LIMIT 1
               ) AS p ON true
               WHERE t.id = $1 FOR SHARE OF t"#,
            tenant.as_str(),
        )
        .fetch_one(tx)
        .await?;
        let mut floor: IsolationLevel =
            row::parse("tenants.isolation_floor", &row.isolation_floor)?;
        if let Some(ask) = &row.isolation_ask_floor {
            floor = floor.min(row::parse("tenants.isolation_ask_floor", ask)?);
        }
        let network = row.mode.and_then(|mode| mode.0).unwrap_or(NetworkMode::Host);
        Ok(Self { network: self.network.min(network), isolation: self.isolation.max(floor) })
    }

    /// The limit that keeps a run in a mode from an approval of a kind.
    pub(super) fn refuses(self, kind: ApprovalKind, mode: Mode) -> Option<Withdrawn> {
        let network = self.network;
        let permits = match kind {
            ApprovalKind::NetworkProxy => network >= NetworkMode::Proxy,
            ApprovalKind::NetworkHost => network >= NetworkMode::Host,
            ApprovalKind::Isolation => return self.refuses_mode(mode),
            // The proxy applies the present lists to each connection. A file that a run can ask for
            // was opened to it when it was admitted.
            ApprovalKind::EgressHost | ApprovalKind::FileRead => true,
        };
        (!permits).then_some(Withdrawn::Network(network))
    }

    fn refuses_mode(self, mode: Mode) -> Option<Withdrawn> {
        let is_below = IsolationLevel::from_mode(mode) < self.isolation;
        is_below.then_some(Withdrawn::Isolation(self.isolation))
    }
}

impl Store {
    /// The limit that a run exceeds although a person allowed it: the policy or the isolation floor
    /// of its tenant does not permit any more.
    pub async fn run_withdrawn(&self, run: &AssignedRun) -> Result<Option<Withdrawn>, Error> {
        let row = sqlx::query!(
            r#"SELECT lowest_isolation($1) AS isolation,
                      (SELECT policy -> 'network' -> 'mode' FROM tenant_policies
                       WHERE tenant_id = $1 ORDER BY version DESC LIMIT 1) AS "mode: Json<Option<NetworkMode>>"
               WHERE EXISTS (SELECT 1 FROM approvals WHERE run_id = $2 AND state = 'allowed')"#,
            run.tenant.as_str(),
            run.id.0,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        // A run that needed no approval was checked when it was admitted.
        let Some(row) = row else { return Ok(None) };
        let isolation = row.isolation.ok_or(Error::RowMissing { what: "tenant" })?;
        let permitted = Permitted {
            network: row.mode.and_then(|mode| mode.0).unwrap_or(NetworkMode::Host),
            isolation: row::parse("tenants.isolation_floor", &isolation)?,
        };
        let has_more = run.spec.network.is_some_and(|network| network > permitted.network);
        let network = has_more.then_some(Withdrawn::Network(permitted.network));
        Ok(network.or_else(|| permitted.refuses_mode(run.spec.mode)))
    }
}
