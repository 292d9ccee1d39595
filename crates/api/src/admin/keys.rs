//! API keys: creating, listing and revoking them.

use codelia_proto::v1;
use codelia_store::{Caller, EventKind, NewKey, Scope};
use codelia_types::KeyId;
use serde_json::json;
use time::OffsetDateTime;

use super::{Admin, Change, administered_tenant, tenant_not_found};
use crate::{
    auth::{self, key_secret},
    error::ApiError,
    wire::{paging::Page, resource_name, to_proto, validate},
};

impl Admin {
    pub(super) async fn create_key(
        &self,
        caller: &Caller,
        wire: v1::CreateKeyRequest,
    ) -> Result<v1::CreateKeyResponse, ApiError> {
        let tenant = administered_tenant(caller, resource_name::tenant("parent", &wire.parent)?)?;
        let display_name = validate::display_name(wire.display_name)?;
        let scopes = scopes(&wire.scopes)?;
        check_grant(caller, &scopes)?;
        let expires_at = expiry(wire.expire_time)?;
        let (secret, secret_hash) = key_secret::generate_secret();
        let names: Vec<_> = scopes.iter().map(|scope| scope.as_str()).collect();
        let detail = json!({ "display_name": display_name, "scopes": names });
        let change = Change { kind: EventKind::KeyCreated, tenant: Some(&tenant), detail };
        let new = NewKey {
            tenant: &tenant,
            display_name: &display_name,
            secret_hash,
            scopes: &scopes,
            expires_at,
        };
        let key = self.audited(caller, change, async {
            self.context.store.key_create(new).await?.ok_or_else(|| tenant_not_found(&tenant))
        });
        Ok(v1::CreateKeyResponse { key: Some(to_proto::key(key.await?)), secret })
    }

    pub(super) async fn list_keys(
        &self,
        caller: &Caller,
        wire: v1::ListKeysRequest,
    ) -> Result<v1::ListKeysResponse, ApiError> {
        let tenant = administered_tenant(caller, resource_name::tenant("parent", &wire.parent)?)?;
        let mut page = Page::<KeyId, _>::parse(&caller.tenant, &wire)?;
        let store = &self.context.store;
        store.tenant_get(&tenant).await?.ok_or_else(|| tenant_not_found(&tenant))?;
        while let Some(limit) = page.batch() {
            let rows = store.key_list(&tenant, page.after, limit).await?;
            page.add(rows, |key| (key.id, to_proto::key(key)));
        }
        let (keys, next_page_token) = page.finish();
        Ok(v1::ListKeysResponse { keys, next_page_token })
    }

    pub(super) async fn revoke_key(
        &self,
        caller: &Caller,
        wire: v1::RevokeKeyRequest,
    ) -> Result<v1::RevokeKeyResponse, ApiError> {
        let (tenant, id) = resource_name::key("name", &wire.name)?;
        let tenant = administered_tenant(caller, tenant)?;
        let change = Change {
            kind: EventKind::KeyRevoked,
            tenant: Some(&tenant),
            detail: json!({ "key": id }),
        };
        let key = self.audited(caller, change, async {
            let key = self.context.store.key_revoke(&tenant, id).await?;
            key.ok_or_else(|| ApiError::not_found("key", id))
        });
        Ok(v1::RevokeKeyResponse { key: Some(to_proto::key(key.await?)) })
    }
}

/// The scopes of a new key, sorted and without duplicates; at least one.
fn scopes(numbers: &[i32]) -> Result<Vec<Scope>, ApiError> {
    let mut scopes =
        numbers.iter().map(|&number| validate::scope(number)).collect::<Result<Vec<_>, _>>()?;
    scopes.sort_unstable();
    scopes.dedup();
    if scopes.is_empty() {
        Err(ApiError::invalid("scopes", "must not be empty"))
    } else {
        Ok(scopes)
    }
}

/// When a new key expires; `None` for never.
fn expiry(wire: Option<prost_types::Timestamp>) -> Result<Option<OffsetDateTime>, ApiError> {
    match validate::time("expire_time", wire)? {
        Some(time) if time <= OffsetDateTime::now_utc() => {
            Err(ApiError::invalid("expire_time", "must be in the future"))
        }
        time => Ok(time),
    }
}

/// Callers can only grant scopes that they have; operators can grant all.
fn check_grant(caller: &Caller, scopes: &[Scope]) -> Result<(), ApiError> {
    scopes.iter().try_for_each(|&scope| auth::require_any_scope(caller, &[scope, Scope::Operator]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::tests::caller_with;

    #[test]
    fn only_operator_grants_scopes_it_lacks() {
        let admin = caller_with(&[Scope::Admin, Scope::Run]);
        assert!(check_grant(&admin, &[Scope::Run]).is_ok());
        assert_eq!(
            check_grant(&admin, &[Scope::Files]),
            Err(auth::layer::scope_missing(&[Scope::Files, Scope::Operator]))
        );
        assert!(check_grant(&caller_with(&[Scope::Operator]), &[Scope::Audit]).is_ok());
    }

    #[test]
    fn scopes_are_known_and_not_empty() {
        for bad in [&[][..], &[0], &[99], &[1, -1]] {
            assert!(scopes(bad).is_err_and(|error| error.invalid_field() == Some("scopes")));
        }
        assert_eq!(scopes(&[5, 1, 5]), Ok(vec![Scope::Run, Scope::Admin]));
    }
}
