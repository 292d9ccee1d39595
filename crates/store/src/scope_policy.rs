//! Versions of the policies of scopes: the tables `tenant_policies` (organisations) and
//! `scope_policies` (projects and users). Each change is a new version; the highest is in effect,
//! and the last [`MAX_POLICY_VERSIONS`] are kept.

use std::time::Duration;

use codelia_policy::{NetworkPolicy, Policy, PolicyScope};
use codelia_types::{KeyId, TenantId};
use serde_json::json;
use sqlx::{PgConnection, types::Json};
use time::OffsetDateTime;

use crate::{Error, EventBody, EventKind, EventSubject, Store, row};

/// Versions that are kept of each policy.
pub const MAX_POLICY_VERSIONS: i64 = 100;
/// Projects of a tenant, and users, that have or had a policy.
pub const MAX_POLICY_NAMES: i64 = 1000;

/// Whose policy: a scope of a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScopeRef {
    /// The tenant that has the scope.
    pub tenant: TenantId,
    /// The scope.
    pub scope: PolicyScope,
    /// Of a project its name, of a user the id of the key, of an organisation empty.
    pub name: String,
}

impl ScopeRef {
    /// The scope of a whole tenant.
    #[must_use]
    pub fn organisation(tenant: &TenantId) -> Self {
        Self { tenant: tenant.clone(), scope: PolicyScope::Organisation, name: String::new() }
    }
}

/// One version of the policy of a scope.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyVersion {
    /// The version, from 1.
    pub version: i64,
    /// The policy; `None` if there is none from this version on.
    pub policy: Option<Policy>,
    /// The key that set it.
    pub key: KeyId,
    /// Why.
    pub reason: String,
    /// When.
    pub set_at: OffsetDateTime,
}

/// A version without its policy, which may be large.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyChange {
    /// The version, from 1.
    pub version: i64,
    /// Whether the policy was deleted.
    pub is_deleted: bool,
    /// The key that set it.
    pub key: KeyId,
    /// Why.
    pub reason: String,
    /// When.
    pub set_at: OffsetDateTime,
}

/// A new version of the policy of a scope.
#[derive(Debug)]
pub struct NewPolicyVersion<'a> {
    /// The policy; `None` to delete it.
    pub policy: Option<&'a Policy>,
    /// The version that must be in effect, 0 for none; `None` for any.
    pub expected: Option<i64>,
    /// The earlier version that it restores.
    pub restored: Option<i64>,
    /// Why.
    pub reason: &'a str,
    /// The key that sets it.
    pub key: KeyId,
}

/// The answer to [`Store::scope_policy_set`].
#[derive(Debug)]
pub enum ScopePolicySet {
    /// The version is in effect.
    Set(Box<PolicyVersion>),
    /// Another version is in effect than expected; 0 if there is none.
    Changed(i64),
    /// The tenant has as many projects or users with a policy as it may.
    TooMany,
    /// The tenant does not exist.
    NoTenant,
}

impl Store {
    /// Sets or deletes the policy of a scope and records an event.
    pub async fn scope_policy_set(
        &self,
        of: &ScopeRef,
        new: NewPolicyVersion<'_>,
    ) -> Result<ScopePolicySet, Error> {
        // Two changes at once take turns, and get a version each.
        let mut tx = self.tenant_lock(&of.tenant).await?;
        let current = sqlx::query_scalar!(
            r#"SELECT coalesce(max(version), 0) AS "version!" FROM policy_versions
               WHERE tenant_id = $1 AND scope = $2 AND name = $3"#,
            of.tenant.as_str(),
            of.scope.as_str(),
            of.name,
        )
        .fetch_one(&mut *tx)
        .await?;
        if new.expected.is_some_and(|expected| expected != current) {
            return Ok(ScopePolicySet::Changed(current));
        }
        if current == 0 && self.has_max_names(&mut tx, of).await? {
            return Ok(ScopePolicySet::TooMany);
        }
        let version = current + 1;
        let Some(set_at) = insert(&mut tx, of, version, &new).await? else {
            return Ok(ScopePolicySet::NoTenant);
        };
        self.record(&mut tx, of, version, &new).await?;
        tx.commit().await?;
        Ok(ScopePolicySet::Set(Box::new(PolicyVersion {
            version,
            policy: new.policy.cloned(),
            key: new.key,
            reason: new.reason.to_owned(),
            set_at,
        })))
    }

    async fn has_max_names(&self, tx: &mut PgConnection, of: &ScopeRef) -> Result<bool, Error> {
        let names = sqlx::query_scalar!(
            r#"SELECT count(DISTINCT name) AS "names!" FROM scope_policies WHERE tenant_id = $1 AND scope = $2"#,
            of.tenant.as_str(),
            of.scope.as_str(),
        )
        .fetch_one(tx)
        .await?;
        Ok(names >= MAX_POLICY_NAMES)
    }

    async fn record(
        &self,
        tx: &mut PgConnection,
        of: &ScopeRef,
        version: i64,
        new: &NewPolicyVersion<'_>,
    ) -> Result<(), Error> {
        let mut detail =
            json!({ "version": version, "is_cleared": new.policy.is_none(), "reason": new.reason });
        if let Some(restored) = new.restored {
            detail["restored"] = json!(restored);
        }
        let kind = match of.scope {
            PolicyScope::Organisation => EventKind::TenantPolicySet,
            PolicyScope::Project | PolicyScope::User => {
                detail["scope"] = json!(of.scope.as_str());
                detail["name"] = json!(of.name);
                EventKind::ScopePolicySet
            }
        };
        let subject = EventSubject::by(new.key, Some(&of.tenant));
        let body = EventBody { kind, field: Some("policy".to_owned()), detail };
        self.audit.insert(tx, &subject, &body).await
    }

    /// Returns a version of the policy of a scope, or the one in effect. `None` if it does not
    /// exist.
    pub async fn scope_policy(
        &self,
        of: &ScopeRef,
        version: Option<i64>,
    ) -> Result<Option<PolicyVersion>, Error> {
        let found = sqlx::query!(
            r#"SELECT version AS "version!", policy AS "policy: Json<Policy>", key_id AS "key_id!",
                      reason AS "reason!", created_at AS "created_at!"
               FROM policy_versions
               WHERE tenant_id = $1 AND scope = $2 AND name = $3 AND version = coalesce($4, version)
               ORDER BY version DESC LIMIT 1"#,
            of.tenant.as_str(),
            of.scope.as_str(),
            of.name,
            version,
        )
        .map(|row| PolicyVersion {
            version: row.version,
            policy: row.policy.map(|policy| policy.0),
            key: KeyId(row.key_id),
            reason: row.reason,
            set_at: row.created_at,
        });
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Lists the versions of the policy of a scope before a version, newest first.
    pub async fn scope_policy_history(
        &self,
        of: &ScopeRef,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<PolicyChange>, Error> {
        let page = sqlx::query!(
            r#"SELECT version AS "version!", policy IS NULL AS "is_deleted!", key_id AS "key_id!",
                      reason AS "reason!", created_at AS "created_at!"
               FROM policy_versions
               WHERE tenant_id = $1 AND scope = $2 AND name = $3 AND version < coalesce($4, 9223372036854775807)
               ORDER BY version DESC LIMIT $5"#,
            of.tenant.as_str(),
            of.scope.as_str(),
            of.name,
            before,
            limit,
        )
        .map(|row| PolicyChange {
            version: row.version,
            is_deleted: row.is_deleted,
            key: KeyId(row.key_id),
            reason: row.reason,
            set_at: row.created_at,
        });
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Lists the projects of a tenant that have a policy, by name, after a name.
    pub async fn project_list(
        &self,
        tenant: &TenantId,
        after: Option<&str>,
        limit: i64,
    ) -> Result<Vec<(String, PolicyChange)>, Error> {
        let page = sqlx::query!(
            r#"SELECT name AS "name!", version AS "version!", key_id AS "key_id!", reason AS "reason!",
                      created_at AS "created_at!"
               FROM (SELECT DISTINCT ON (name) name, version, policy, key_id, reason, created_at FROM scope_policies
                     WHERE tenant_id = $1 AND scope = 'project' AND name > coalesce($2, '')
                     ORDER BY name, version DESC) AS last
               WHERE policy IS NOT NULL ORDER BY name LIMIT $3"#,
            tenant.as_str(),
            after,
            limit,
        )
        .map(|row| {
            let change = PolicyChange {
                version: row.version,
                is_deleted: false,
                key: KeyId(row.key_id),
                reason: row.reason,
                set_at: row.created_at,
            };
            (row.name, change)
        });
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Returns the policies in effect of a project and of a user, those that exist.
    pub async fn scope_policies(
        &self,
        tenant: &TenantId,
        project: Option<&str>,
        user: Option<KeyId>,
    ) -> Result<(Option<Policy>, Option<Policy>), Error> {
        let row = sqlx::query!(
            r#"SELECT (SELECT policy FROM scope_policies
                       WHERE tenant_id = $1 AND scope = 'project' AND name = $2
                       ORDER BY version DESC LIMIT 1) AS "project: Json<Policy>",
                      (SELECT policy FROM scope_policies
                       WHERE tenant_id = $1 AND scope = 'user' AND name = $3
                       ORDER BY version DESC LIMIT 1) AS "user: Json<Policy>""#,
            tenant.as_str(),
            project,
            user.map(|key| key.to_string()),
        )
        .fetch_one(&self.pools.runs)
        .await?;
        Ok((row.project.map(|policy| policy.0), row.user.map(|policy| policy.0)))
    }

    /// Returns the network part of a version of a tenant's policy. For workers.
    pub async fn tenant_network(
        &self,
        id: &TenantId,
        version: i64,
    ) -> Result<NetworkPolicy, Error> {
        let network = sqlx::query_scalar!(
            r#"SELECT policy -> 'network' AS "network: Json<NetworkPolicy>" FROM tenant_policies
               WHERE tenant_id = $1 AND version = $2"#,
            id.as_str(),
            version,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let network = network.ok_or(Error::RowMissing { what: "policy of a tenant" })?;
        Ok(network.map(|network| network.0).unwrap_or_default())
    }

    /// Deletes the versions of projects and users whose policy was deleted longer than `keep` ago,
    /// and of users whose key was revoked as long ago or does not exist, at most of `limit` of
    /// them. Returns how many rows.
    pub(crate) async fn scope_policy_purge(
        &self,
        keep: Duration,
        limit: i64,
    ) -> Result<u64, Error> {
        let purged =
            sqlx::query_file!("src/sql/scope_policy_purge.sql", row::interval(keep), limit,)
                .execute(&self.pools.upkeep)
                .await?;
        Ok(purged.rows_affected())
    }
}

/// Inserts a version, deletes those that are too many, and returns when; `None` without the tenant.
async fn insert(
    tx: &mut PgConnection,
    of: &ScopeRef,
    version: i64,
    new: &NewPolicyVersion<'_>,
) -> Result<Option<OffsetDateTime>, Error> {
    let policy = new.policy.map(Json);
    let oldest = version - MAX_POLICY_VERSIONS;
    if of.scope == PolicyScope::Organisation {
        sqlx::query!(
            "DELETE FROM tenant_policies WHERE tenant_id = $1 AND version <= $2",
            of.tenant.as_str(),
            oldest,
        )
        .execute(&mut *tx)
        .await?;
        let inserted = sqlx::query_scalar!(
            "INSERT INTO tenant_policies (tenant_id, version, policy, key_id, reason)
             SELECT id, $2, $3, $4, $5 FROM tenants WHERE id = $1 AND deleted_at IS NULL
             RETURNING created_at",
            of.tenant.as_str(),
            version,
            policy as _,
            new.key.0,
            new.reason,
        );
        return Ok(inserted.fetch_optional(tx).await?);
    }
    sqlx::query!(
        "DELETE FROM scope_policies WHERE tenant_id = $1 AND scope = $2 AND name = $3 AND version <= $4",
        of.tenant.as_str(),
        of.scope.as_str(),
        of.name,
        oldest,
    )
    .execute(&mut *tx)
    .await?;
    let inserted = sqlx::query_scalar!(
        "INSERT INTO scope_policies (tenant_id, scope, name, version, policy, key_id, reason)
         SELECT id, $2, $3, $4, $5, $6, $7 FROM tenants WHERE id = $1 AND deleted_at IS NULL
         RETURNING created_at",
        of.tenant.as_str(),
        of.scope.as_str(),
        of.name,
        version,
        policy as _,
        new.key.0,
        new.reason,
    );
    Ok(inserted.fetch_optional(tx).await?)
}
