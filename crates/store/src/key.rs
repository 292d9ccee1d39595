//! The table `api_keys`. Secrets are stored only as hashes.

use codelia_policy::{IsolationLevel, LimitsRequest};
use codelia_types::{KeyId, TenantId};
use sqlx::{PgExecutor, types::Json};
use time::OffsetDateTime;

use crate::{Error, Quotas, Store, row, tenant::tenant_insert_if_absent, words::words};

words! {
    /// A permission of a key.
    Scope {
        /// Use sessions and runs.
        Run = "run",
        /// Use files.
        Files = "files",
        /// Decide approvals.
        Approve = "approve",
        /// Read audit events.
        Audit = "audit",
        /// Administer the key's own tenant.
        Admin = "admin",
        /// Administer the whole installation.
        Operator = "operator",
    }
}

/// A key without its secret.
#[derive(Debug, Clone)]
pub struct Key {
    /// Identifies the key; no secret.
    pub id: KeyId,
    /// The tenant that its calls act for.
    pub tenant: TenantId,
    /// The display name.
    pub display_name: String,
    /// The permissions of calls with it.
    pub scopes: Vec<Scope>,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When it was revoked, if it was.
    pub revoked_at: Option<OffsetDateTime>,
    /// When it expires, if it does.
    pub expires_at: Option<OffsetDateTime>,
    /// When it was last used, to the minute.
    pub last_used_at: Option<OffsetDateTime>,
}

/// A key to create.
#[derive(Debug)]
pub struct NewKey<'a> {
    /// The tenant that its calls will act for.
    pub tenant: &'a TenantId,
    /// The display name.
    pub display_name: &'a str,
    /// SHA-256 of the secret.
    pub secret_hash: [u8; 32],
    /// The permissions of calls with it.
    pub scopes: &'a [Scope],
    /// When it expires; `None` for never.
    pub expires_at: Option<OffsetDateTime>,
}

/// Whether calls with a key are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeyStanding {
    /// They are.
    Valid,
    /// The key has expired.
    Expired,
    /// An operator suspended the tenant.
    TenantSuspended,
}

/// A key that is known and not revoked.
#[derive(Debug, Clone)]
pub struct FoundKey {
    /// The caller behind it.
    pub caller: Caller,
    /// Whether calls with it are accepted.
    pub standing: KeyStanding,
    /// Whether its last use was recorded longer than a minute ago, or never.
    pub use_is_stale: bool,
    /// The version of what was found.
    pub version: KeyVersion,
}

/// The version of everything that [`Store::key_authenticate`] reads. While it is the same, a key
/// that was valid is valid, unless it has expired.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyVersion {
    /// The transaction that wrote the row of the key.
    pub key: i64,
    /// The transaction that wrote the row of the tenant.
    pub tenant: i64,
    /// The version of the tenant's policy.
    pub policy: Option<i64>,
}

/// The authenticated caller behind a key.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The key that the call came with.
    pub key: KeyId,
    /// The tenant that the call acts for.
    pub tenant: TenantId,
    /// The permissions of the call.
    pub scopes: Vec<Scope>,
    /// The tenant's quotas.
    pub quotas: Quotas,
    /// The highest limits of the tenant, where they differ from the installation's.
    pub max_limits: LimitsRequest,
    /// The minimum isolation of the tenant's sessions and runs.
    pub floor: IsolationLevel,
    /// The lowest isolation that a run may request with an approval, if it is below `floor`.
    pub ask_floor: Option<IsolationLevel>,
    /// The version of the tenant's policy, if it ever had one.
    pub policy_version: Option<i64>,
    /// The version of all tools of the tenant.
    pub tools_version: i64,
}

/// The result of [`Store::operator_bootstrap`].
#[derive(Debug, Clone)]
pub enum OperatorBootstrap {
    /// The key was created.
    Created(Key),
    /// A key with this secret exists and is an operator's. Nothing was changed.
    Unchanged(Key),
    /// Another live key of an operator exists. Nothing was changed.
    Refused(Key),
}

/// A statement that returns keys: its text up to the columns, the text after them, and its
/// arguments.
macro_rules! keys {
    ($before:literal, $after:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            $before
                + " id, tenant_id, display_name, scopes, created_at, revoked_at, expires_at, last_used_at "
                + $after,
            $($argument),*
        )
        .try_map(|row| {
            Ok(Key {
                id: KeyId(row.id),
                tenant: row::parse("api_keys.tenant_id", &row.tenant_id)?,
                display_name: row.display_name,
                scopes: row::parse_all("api_keys.scopes", &row.scopes)?,
                created_at: row.created_at,
                revoked_at: row.revoked_at,
                expires_at: row.expires_at,
                last_used_at: row.last_used_at,
            })
        })
    };
}

impl Store {
    /// Creates the first key of an operator, and its tenant if it does not exist. Unless `force` is
    /// set, creates none while a live one exists. Of several calls at once, one creates a key.
    /// Returns `None` if the tenant is suspended or deleted.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if the secret is that of a key that is not an operator's or not
    /// live.
    pub async fn operator_bootstrap(
        &self,
        new: NewKey<'_>,
        force: bool,
    ) -> Result<Option<OperatorBootstrap>, Error> {
        let mut tx = self.pools.runs.begin().await?;
        sqlx::query!("SELECT pg_advisory_xact_lock(hashtextextended('codelia operator', 0))")
            .execute(&mut *tx)
            .await?;
        let live = keys!(
            "SELECT",
            "FROM api_keys
             WHERE 'operator' = ANY (scopes) AND revoked_at IS NULL AND coalesce(expires_at > now(), true)
               AND EXISTS (SELECT 1 FROM tenants t
                           WHERE t.id = tenant_id AND t.suspended_at IS NULL AND t.deleted_at IS NULL)
             -- The key with this secret first.
             ORDER BY secret_hash = $1 DESC, id LIMIT 1",
            &new.secret_hash,
        )
        .fetch_optional(&mut *tx)
        .await?;
        let same =
            sqlx::query_scalar!("SELECT id FROM api_keys WHERE secret_hash = $1", &new.secret_hash)
                .fetch_optional(&mut *tx)
                .await?;
        match (live, same) {
            (Some(live), Some(same)) if live.id.0 == same => {
                return Ok(Some(OperatorBootstrap::Unchanged(live)));
            }
            (_, Some(_)) => return Err(Error::AlreadyExists { what: "a key with this secret" }),
            (Some(live), None) if !force => {
                return Ok(Some(OperatorBootstrap::Refused(live)));
            }
            (_, None) => {}
        }
        if !tenant_insert_if_absent(&mut tx, new.tenant).await? {
            return Ok(None);
        }
        let created = key_insert(&mut *tx, new).await?;
        tx.commit().await?;
        Ok(created.map(OperatorBootstrap::Created))
    }

    /// Creates a key. Returns `None` if the tenant does not exist.
    pub async fn key_create(&self, key: NewKey<'_>) -> Result<Option<Key>, Error> {
        key_insert(&self.pools.runs, key).await
    }

    /// Returns the key with this secret, or `None` if it is unknown or revoked.
    pub async fn key_authenticate(
        &self,
        secret_hash: &[u8; 32],
    ) -> Result<Option<FoundKey>, Error> {
        let row = sqlx::query!(
            r#"SELECT k.id, k.tenant_id, k.scopes, t.quota_sessions, t.quota_concurrent_runs, t.quota_queued_runs,
                      t.quota_requests_per_second, t.quota_output_bytes, t.quota_disk_bytes, t.isolation_floor,
                      t.isolation_ask_floor, t.tools_version,
                      (SELECT p.version FROM tenant_policies p WHERE p.tenant_id = t.id
                       ORDER BY p.version DESC LIMIT 1) AS policy_version,
                      t.max_limits AS "max_limits: Json<LimitsRequest>",
                      k.xmin::text::bigint AS "key_version!", t.xmin::text::bigint AS "tenant_version!",
                      coalesce(k.expires_at <= now(), false) AS "expired!",
                      t.suspended_at IS NOT NULL AS "suspended!",
                      coalesce(k.last_used_at < now() - interval '1 minute', true) AS "use_is_stale!"
               FROM api_keys k JOIN tenants t ON t.id = k.tenant_id
               WHERE k.secret_hash = $1 AND k.revoked_at IS NULL"#,
            secret_hash,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let Some(row) = row else { return Ok(None) };
        let standing = match (row.suspended, row.expired) {
            (true, _) => KeyStanding::TenantSuspended,
            (false, true) => KeyStanding::Expired,
            (false, false) => KeyStanding::Valid,
        };
        let caller = Caller {
            key: KeyId(row.id),
            tenant: row::parse("api_keys.tenant_id", &row.tenant_id)?,
            scopes: row::parse_all("api_keys.scopes", &row.scopes)?,
            quotas: Quotas {
                sessions: row.quota_sessions,
                concurrent_runs: row.quota_concurrent_runs,
                queued_runs: row.quota_queued_runs,
                requests_per_second: row.quota_requests_per_second,
                output_bytes: row.quota_output_bytes,
                disk_bytes: row.quota_disk_bytes,
            },
            max_limits: row.max_limits.0,
            floor: row::parse("tenants.isolation_floor", &row.isolation_floor)?,
            ask_floor: row::parse_optional(
                "tenants.isolation_ask_floor",
                row.isolation_ask_floor.as_deref(),
            )?,
            policy_version: row.policy_version,
            tools_version: row.tools_version,
        };
        let version = KeyVersion {
            key: row.key_version,
            tenant: row.tenant_version,
            policy: row.policy_version,
        };
        Ok(Some(FoundKey { caller, standing, use_is_stale: row.use_is_stale, version }))
    }

    /// Records that a key is used now, unless that was recorded within the last minute.
    pub async fn key_touch(&self, tenant: &TenantId, id: KeyId) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE api_keys SET last_used_at = now()
             WHERE tenant_id = $1 AND id = $2
               AND coalesce(last_used_at < now() - interval '1 minute', true)",
            tenant.as_str(),
            id.0,
        )
        .execute(&self.pools.runs)
        .await?;
        Ok(())
    }

    /// Returns a tenant's key.
    pub async fn key_get(&self, tenant: &TenantId, id: KeyId) -> Result<Option<Key>, Error> {
        let found = keys!(
            "SELECT",
            "FROM api_keys WHERE tenant_id = $1 AND id = $2",
            tenant.as_str(),
            id.0,
        );
        Ok(found.fetch_optional(&self.pools.runs).await?)
    }

    /// Lists a tenant's keys newer than `after`, oldest first.
    pub async fn key_list(
        &self,
        tenant: &TenantId,
        after: Option<KeyId>,
        limit: i64,
    ) -> Result<Vec<Key>, Error> {
        let page = keys!(
            "SELECT",
            "FROM api_keys WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id > $2) ORDER BY id LIMIT $3",
            tenant.as_str(),
            after.map(|id| id.0),
            limit,
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Revokes a key. Revoking it again keeps the first time.
    pub async fn key_revoke(&self, tenant: &TenantId, id: KeyId) -> Result<Option<Key>, Error> {
        let revoked = keys!(
            "UPDATE api_keys SET revoked_at = coalesce(revoked_at, now())
             WHERE tenant_id = $1 AND id = $2
             RETURNING",
            "",
            tenant.as_str(),
            id.0,
        );
        Ok(revoked.fetch_optional(&self.pools.runs).await?)
    }
}

async fn key_insert(
    connection: impl PgExecutor<'_>,
    key: NewKey<'_>,
) -> Result<Option<Key>, Error> {
    let scopes: Vec<String> = key.scopes.iter().map(|scope| scope.as_str().to_owned()).collect();
    let inserted = keys!(
        "INSERT INTO api_keys (id, tenant_id, display_name, secret_hash, scopes, expires_at)
         SELECT $1, id, $3, $4, $5, $6 FROM tenants WHERE id = $2 AND deleted_at IS NULL
         RETURNING",
        "",
        KeyId::generate().0,
        key.tenant.as_str(),
        key.display_name,
        &key.secret_hash,
        &scopes,
        key.expires_at,
    );
    Ok(inserted.fetch_optional(connection).await?)
}
