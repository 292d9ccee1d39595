//! What may be allowed to runs now. A run that was admitted waits for its decision, and meanwhile an
//! operator may withdraw what the run asks for.

use codelia_policy::IsolationLevel;
use codelia_types::{Mode, NetworkMode, TenantId};
use sqlx::{PgConnection, types::Json};

use super::ApprovalKind;
use crate::{Error, row};

/// What runs may have with an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Permitted {
    /// The widest network.
    pub network: NetworkMode,
    /// The lowest isolation.
    pub isolation: IsolationLevel,
}

/// What is permitted instead of what a run asks for.
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
    pub(super) async fn under_tenant(self, tx: &mut PgConnection, tenant: &TenantId) -> Result<Self, Error> {
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
        let mut floor: IsolationLevel = row::parse("tenants.isolation_floor", &row.isolation_floor)?;
        if let Some(ask) = &row.isolation_ask_floor {
            floor = floor.min(row::parse("tenants.isolation_ask_floor", ask)?);
        }
        let network = row.mode.and_then(|mode| mode.0).unwrap_or(NetworkMode::Host);
        Ok(Self { network: self.network.min(network), isolation: self.isolation.max(floor) })
    }

    /// What this does not permit to a run in a mode that asks for an approval of a kind.
    pub(super) fn refuses(self, kind: ApprovalKind, mode: Mode) -> Option<Withdrawn> {
        let Self { network, isolation } = self;
        let permits = match kind {
            ApprovalKind::NetworkProxy => network >= NetworkMode::Proxy,
            ApprovalKind::NetworkHost => network >= NetworkMode::Host,
            ApprovalKind::Isolation => {
                let is_below = IsolationLevel::of(mode) < isolation;
                return is_below.then_some(Withdrawn::Isolation(isolation));
            }
            // The proxy applies the present lists to each connection.
            ApprovalKind::EgressHost => true,
        };
        (!permits).then_some(Withdrawn::Network(network))
    }
}
