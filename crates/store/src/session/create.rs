//! Creating sessions within the tenant's quota.

use std::{collections::BTreeMap, time::Duration};

use codelia_types::{KeyId, LeaseEpoch, SessionId, TenantId};
use serde_json::json;
use sqlx::{PgExecutor, types::Json};
use time::OffsetDateTime;

use super::{
    record::{Session, SessionRef, SessionSpec, SessionState},
    update::alias_error,
};
use crate::{
    Error, EventBody, EventKind, EventSubject, Quotas, Store, WorkerCandidate, audit::SignedEvent,
    row, tenant::QUOTA_MARGIN,
};

/// A session to create.
#[derive(Debug)]
pub struct NewSession<'a> {
    /// Identifies the session; the caller chooses it.
    pub id: SessionId,
    /// The tenant that owns it and whose quota counts it.
    pub tenant: &'a TenantId,
    /// The key that creates it.
    pub key: KeyId,
    /// A display name, unique among the tenant's open sessions.
    pub alias: Option<&'a str>,
    /// The settings that its runs inherit.
    pub spec: &'a SessionSpec,
    /// Free-form labels.
    pub labels: &'a BTreeMap<String, String>,
    /// Time to live.
    pub ttl: Duration,
    /// How long it may be idle before it ends.
    pub idle_ttl: Option<Duration>,
    /// Whether it may start again empty if its files are lost.
    pub allow_data_loss: bool,
    /// Idempotency key and hash of the request.
    pub idempotency: Option<(&'a str, &'a [u8])>,
    /// Whether to count the tenant's sessions. Without it the caller knows that the tenant is far
    /// from its quota.
    pub check_quota: bool,
}

/// The answer to [`Store::session_create`].
#[derive(Debug)]
pub enum SessionCreated {
    /// The session was created.
    New {
        /// The session as it was stored.
        session: Box<Session>,
        /// The tenant's other open sessions, if they were counted.
        open: Option<i64>,
        /// Two random workers that may take the session, if there are two.
        candidates: Vec<WorkerCandidate>,
    },
    /// The idempotency key was used before with the same request. This is the session of that
    /// request.
    Existing(Box<Session>),
    /// The idempotency key was used before with a different request.
    KeyReused,
    /// The tenant reached its quota of open sessions.
    OverQuota,
    /// Workers are alive, and none of them has the mode of the session.
    ModeUnavailable,
}

/// The answer to one attempt to insert a session.
enum Insertion {
    Created(SessionCreated),
    ModeUnavailable,
    /// The quota was reached or the idempotency key was used before.
    Refused,
}

impl Store {
    /// Creates a session within the tenant's quota.
    ///
    /// # Errors
    /// [`Error::AlreadyExists`] if an open session of the tenant has the alias.
    pub async fn session_create(
        &self,
        new: NewSession<'_>,
        quotas: Quotas,
    ) -> Result<SessionCreated, Error> {
        let within = |margin| if new.check_quota { quotas.sessions - margin } else { i64::MAX };
        match self.session_insert(&self.pools.runs, &new, within(QUOTA_MARGIN)).await? {
            Insertion::Created(created) => return Ok(created),
            Insertion::ModeUnavailable => return Ok(SessionCreated::ModeUnavailable),
            Insertion::Refused => {}
        }
        if let Some(existing) = self.session_existing(&new).await? {
            return Ok(existing);
        }
        // Near the quota, inserts of a tenant are serialized so that they cannot exceed it
        // together.
        let mut tx = self.tenant_lock(new.tenant).await?;
        let inserted = self.session_insert(&mut *tx, &new, within(0)).await?;
        tx.commit().await?;
        match inserted {
            Insertion::Created(created) => Ok(created),
            Insertion::ModeUnavailable => Ok(SessionCreated::ModeUnavailable),
            Insertion::Refused => {
                Ok(self.session_existing(&new).await?.unwrap_or(SessionCreated::OverQuota))
            }
        }
    }

    /// Inserts a session, unless the tenant has as many already.
    async fn session_insert(
        &self,
        executor: impl PgExecutor<'_>,
        new: &NewSession<'_>,
        max_open: i64,
    ) -> Result<Insertion, Error> {
        let subject =
            EventSubject { session: Some(new.id), ..EventSubject::by(new.key, Some(new.tenant)) };
        let detail = json!({ "mode": new.spec.mode.as_str(), "alias": new.alias });
        let body = EventBody::new(EventKind::SessionCreated, detail);
        let SignedEvent { event, mac } = self.audit.event(&subject, &body);
        let created = sqlx::query_file!(
            "src/sql/session_create.sql",
            new.id.0,
            new.tenant.as_str(),
            new.alias,
            Json(new.spec) as _,
            Json(new.labels) as _,
            row::interval(new.ttl),
            new.idle_ttl.map(row::interval),
            new.idempotency.map(|(key, _)| key),
            new.idempotency.map(|(_, hash)| hash),
            max_open,
            new.allow_data_loss,
            new.check_quota,
            event.writer,
            event.id,
            event.at,
            new.key.0,
            event.detail,
            mac,
            new.spec.mode.as_str(),
        )
        .fetch_one(executor)
        .await
        .map_err(alias_error)?;
        let (Some(created_at), Some(expires_at)) = (created.created_at, created.expires_at) else {
            self.audit.forget(event.id);
            let is_refused = created.has_mode;
            return Ok(if is_refused { Insertion::Refused } else { Insertion::ModeUnavailable });
        };
        Ok(Insertion::Created(SessionCreated::New {
            session: Box::new(Session::created(new, created_at, expires_at)),
            open: new.check_quota.then_some(created.open),
            candidates: created.candidates.0,
        }))
    }

    /// Returns the session that was created earlier with the same idempotency key.
    async fn session_existing(
        &self,
        new: &NewSession<'_>,
    ) -> Result<Option<SessionCreated>, Error> {
        let Some((key, hash)) = new.idempotency else { return Ok(None) };
        let found = sqlx::query!(
            "SELECT id, request_hash FROM sessions WHERE tenant_id = $1 AND idempotency_key = $2",
            new.tenant.as_str(),
            key,
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        let Some(found) = found else { return Ok(None) };
        if found.request_hash.as_deref() != Some(hash) {
            return Ok(Some(SessionCreated::KeyReused));
        }
        let session = self.session_get(new.tenant, &SessionRef::Id(SessionId(found.id))).await?;
        Ok(session.map(|session| SessionCreated::Existing(Box::new(session))))
    }
}

impl Session {
    /// A session that was just inserted.
    fn created(
        new: &NewSession<'_>,
        created_at: OffsetDateTime,
        expires_at: OffsetDateTime,
    ) -> Self {
        Self {
            quarantine: None,
            id: new.id,
            tenant: new.tenant.clone(),
            created_by: Some(new.key),
            alias: new.alias.map(str::to_owned),
            spec: new.spec.clone(),
            network: None,
            labels: new.labels.clone(),
            state: SessionState::Open,
            end_reason: None,
            created_at,
            expires_at,
            idle_ttl: new.idle_ttl,
            allow_data_loss: new.allow_data_loss,
            ended_at: None,
            holder: None,
            lease_epoch: LeaseEpoch(0),
            holder_address: None,
            disk: None,
        }
    }
}
