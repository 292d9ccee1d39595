//! The table `api_keys`: who calls. Secrets are stored only as hashes.

use std::str::FromStr;

use codelia_policy::{KeyId, TenantId};
use time::OffsetDateTime;

use crate::{Error, Quotas, Store};

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Scope {
    /// Sessions and runs.
    Run,
    /// Files.
    Files,
    /// Decide approvals.
    Approve,
    /// Read the audit.
    Audit,
    /// Administer the key's own tenant.
    Admin,
    /// Administer the whole installation.
    Operator,
}

impl Scope {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Run, Self::Files, Self::Approve, Self::Audit, Self::Admin, Self::Operator];

    /// The word for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Files => "files",
            Self::Approve => "approve",
            Self::Audit => "audit",
            Self::Admin => "admin",
            Self::Operator => "operator",
        }
    }
}

impl FromStr for Scope {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::ALL.into_iter().find(|scope| scope.as_str() == text).ok_or(())
    }
}

/// A key, without its secret.
#[derive(Debug, Clone)]
pub struct Key {
    /// Its id.
    pub id: KeyId,
    /// Whose it is.
    pub tenant: TenantId,
    /// For people.
    pub display_name: String,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When it was revoked, if it was.
    pub revoked_at: Option<OffsetDateTime>,
}

/// A key to be stored.
#[derive(Debug)]
pub struct NewKey<'a> {
    /// Whose it is.
    pub tenant: &'a TenantId,
    /// For people.
    pub display_name: &'a str,
    /// SHA-256 of the secret.
    pub secret_hash: [u8; 32],
    /// What it may do.
    pub scopes: &'a [Scope],
}

/// Who calls: what a live key stands for.
#[derive(Debug, Clone)]
pub struct Caller {
    /// The key.
    pub key: KeyId,
    /// Whose it is.
    pub tenant: TenantId,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// The tenant's quotas.
    pub quotas: Quotas,
}

impl Store {
    /// Stores a key; `None` if there is no such tenant.
    pub async fn key_create(&self, key: NewKey<'_>) -> Result<Option<Key>, Error> {
        todo!()
    }

    /// Finds the caller behind a secret; `None` if no key that is not revoked has it.
    pub async fn key_caller(&self, secret_hash: &[u8; 32]) -> Result<Option<Caller>, Error> {
        todo!()
    }

    /// Lists a tenant's keys, oldest first, after `after`.
    pub async fn key_list(&self, tenant: &TenantId, after: Option<KeyId>, limit: i64) -> Result<Vec<Key>, Error> {
        todo!()
    }

    /// Revokes a key; a revoked one stays revoked as it was.
    pub async fn key_revoke(&self, tenant: &TenantId, id: KeyId) -> Result<Option<Key>, Error> {
        todo!()
    }
}
