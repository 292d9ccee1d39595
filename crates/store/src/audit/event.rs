//! Events: what happened, to whom, and the hashes over it.

use codelia_types::{KeyId, RunId, SessionId, TenantId, WorkerId};
use ring::{
    digest::{self, Digest, SHA256},
    hmac,
    signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey},
};
use serde_json::Value;
use time::OffsetDateTime;
use uuid::Uuid;

use super::kind::EventKind;
use crate::{
    run::RunRef,
    secret::{SecretError, SecretKey},
};

/// Bytes of a hash, and of a MAC.
pub(super) const HASH_LEN: usize = 32;

/// A hash.
pub(super) type Hash = [u8; HASH_LEN];

/// The keys that sign events and checkpoints, derived from the installation's key.
#[derive(Debug)]
pub(super) struct AuditKeys {
    mac: hmac::Key,
    pair: Ed25519KeyPair,
}

impl AuditKeys {
    pub(super) fn derive(key: &SecretKey) -> Result<Self, SecretError> {
        let mac = hmac::Key::new(hmac::HMAC_SHA256, &key.derive("codelia audit mac")?);
        let seed = key.derive("codelia audit signature")?;
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|_| SecretError::Cipher)?;
        Ok(Self { mac, pair })
    }

    pub(super) fn mac(&self, content: &Hash) -> Vec<u8> {
        hmac::sign(&self.mac, content).as_ref().to_vec()
    }

    pub(super) fn is_mac(&self, content: &Hash, mac: &[u8]) -> bool {
        hmac::verify(&self.mac, content, mac).is_ok()
    }

    pub(super) fn sign(&self, hash: &Hash) -> Vec<u8> {
        self.pair.sign(hash).as_ref().to_vec()
    }

    pub(super) fn is_signature(&self, hash: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, self.pair.public_key()).verify(hash, signature).is_ok()
    }
}

/// The content of an event: what happened.
#[derive(Debug, Clone, PartialEq)]
pub struct EventBody {
    /// Decides what `detail` has.
    pub kind: EventKind,
    /// The field of the request or policy at fault.
    pub field: Option<String>,
    /// Details that depend on the kind.
    pub detail: Value,
}

impl EventBody {
    /// A content with details and without a field at fault.
    pub(crate) fn new(kind: EventKind, detail: Value) -> Self {
        Self { kind, field: None, detail }
    }
}

/// Who or what an event is about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EventSubject {
    /// The tenant that may read the event; `None` for operators alone.
    pub tenant: Option<TenantId>,
    /// The session. Requires `tenant`.
    pub session: Option<SessionId>,
    /// The run. Requires `session`.
    pub run: Option<RunId>,
    /// The key that made the call.
    pub key: Option<KeyId>,
    /// The worker that took part.
    pub worker: Option<WorkerId>,
}

impl EventSubject {
    /// A call with this key about a tenant.
    pub(crate) fn by(key: KeyId, tenant: Option<&TenantId>) -> Self {
        Self { key: Some(key), tenant: tenant.cloned(), ..Self::default() }
    }

    /// A run, and the worker that it is assigned to.
    pub(crate) fn of_run(run: RunRef<'_>, worker: Option<&WorkerId>) -> Self {
        Self {
            tenant: Some(run.tenant.clone()),
            session: Some(run.session),
            run: Some(run.id),
            key: None,
            worker: worker.cloned(),
        }
    }
}

/// An event of the audit: who did what, when, and what was decided.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditEvent {
    /// The process that wrote it.
    pub writer: Uuid,
    /// The id. Later events of a writer have greater ids.
    pub id: Uuid,
    /// When it was written, by the clock of the writer.
    pub at: OffsetDateTime,
    /// The kind of what happened, such as `RUN_ADMITTED`.
    pub kind: String,
    /// Who or what it is about.
    pub subject: EventSubject,
    /// The field of the request or policy that decided.
    pub field: Option<String>,
    /// Details that depend on the kind, as JSON.
    pub detail: String,
}

impl AuditEvent {
    pub(super) fn new(writer: Uuid, subject: &EventSubject, body: &EventBody) -> Self {
        let now = OffsetDateTime::now_utc();
        Self {
            writer,
            id: Uuid::now_v7(),
            // As precise as the database stores it.
            at: now.replace_nanosecond(now.microsecond() * 1000).unwrap_or(now),
            kind: body.kind.as_str().to_owned(),
            subject: subject.clone(),
            field: body.field.clone(),
            detail: body.detail.to_string(),
        }
    }

    /// A hash of every column.
    pub(super) fn content(&self) -> Hash {
        let EventSubject { tenant, session, run, key, worker } = &self.subject;
        let mut hash = Hasher::new("codelia audit entry 1");
        hash.bytes(self.writer.as_bytes());
        hash.bytes(self.id.as_bytes());
        hash.bytes(&micros(self.at).to_be_bytes());
        hash.bytes(self.kind.as_bytes());
        hash.optional(tenant.as_ref().map(|id| id.as_str().as_bytes()));
        hash.optional(session.as_ref().map(|id| id.0.as_bytes().as_slice()));
        hash.optional(run.as_ref().map(|id| id.0.as_bytes().as_slice()));
        hash.optional(key.as_ref().map(|id| id.0.as_bytes().as_slice()));
        hash.optional(worker.as_ref().map(|id| id.as_str().as_bytes()));
        hash.optional(self.field.as_ref().map(|field| field.as_bytes()));
        hash.bytes(self.detail.as_bytes());
        hash.finish()
    }
}

/// Microseconds since 1970.
pub(super) fn micros(at: OffsetDateTime) -> i64 {
    i64::try_from(at.unix_timestamp_nanos() / 1000).unwrap_or(i64::MAX)
}

/// Hashes fields so that no two lists of fields give the same bytes.
pub(super) struct Hasher(digest::Context);

impl Hasher {
    /// `purpose` keeps the hashes of different things apart.
    pub(super) fn new(purpose: &str) -> Self {
        let mut hasher = Self(digest::Context::new(&SHA256));
        hasher.bytes(purpose.as_bytes());
        hasher
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_be_bytes());
        self.0.update(bytes);
    }

    fn optional(&mut self, bytes: Option<&[u8]>) {
        self.0.update(&[u8::from(bytes.is_some())]);
        self.bytes(bytes.unwrap_or_default());
    }

    pub(super) fn finish(self) -> Hash {
        let digest: Digest = self.0.finish();
        let mut hash = [0; HASH_LEN];
        hash.copy_from_slice(digest.as_ref());
        hash
    }
}
