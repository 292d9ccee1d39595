//! The tables `flags` and `flag_revisions`: mode flags with their history. A change adds a
//! revision; a revision never changes, except for what is counted under it.

mod count;
mod guard;

use codelia_policy::{FlagNumbers, FlagRef, FlagRule, Flags};
use codelia_types::{FlagId, KeyId};
use serde_json::json;
use sqlx::{PgConnection, types::Json};
use time::OffsetDateTime;

pub use self::{count::FlagTally, guard::TrippedFlag};
use crate::{Error, EventBody, EventKind, EventSubject, Store, audit::AuditLog, row, words::words};

/// Flags of an installation, those that are off included.
pub const MAX_FLAGS: i64 = 100;
/// Revisions that are kept of each flag.
const MAX_REVISIONS: i64 = 1000;

/// A revision of a flag.
#[derive(Debug, Clone)]
pub struct Flag {
    /// The name, by which operators and rules refer to the flag.
    pub id: FlagId,
    /// The revision, from 1.
    pub revision: i64,
    /// The revision that introduced its rule. 0 if the flag is off.
    pub origin: i64,
    /// The rule. `None` if the flag is off.
    pub rule: Option<FlagRule>,
    /// How it came about.
    pub action: FlagAction,
    /// Why.
    pub reason: String,
    /// The operator's key. `None` if the guard rolled back.
    pub key: Option<KeyId>,
    /// When.
    pub created_at: OffsetDateTime,
    /// Counts of what happened under it.
    pub numbers: FlagNumbers,
}

words! {
    /// How a revision of a flag came about.
    FlagAction {
        /// An operator set the rule.
        Set = "set",
        /// An operator rolled back.
        Rollback = "rollback",
        /// The flag exceeded its limits and rolled itself back.
        Guard = "guard",
    }
}

impl FlagAction {
    fn event(self) -> EventKind {
        match self {
            Self::Set => EventKind::FlagSet,
            Self::Rollback => EventKind::FlagRolledBack,
            Self::Guard => EventKind::FlagGuardTripped,
        }
    }
}

/// A rule that an operator sets.
#[derive(Debug)]
pub struct NewFlagRevision<'a> {
    /// The flag.
    pub id: &'a FlagId,
    /// The rule.
    pub rule: &'a FlagRule,
    /// Why.
    pub reason: &'a str,
    /// The operator's key.
    pub key: KeyId,
}

/// A rollback that an operator requests.
#[derive(Debug)]
pub struct FlagRollback<'a> {
    /// The flag.
    pub id: &'a FlagId,
    /// The revision whose rule to restore; 0 turns the flag off. `None` for the rule before the
    /// present one.
    pub to: Option<i64>,
    /// Why.
    pub reason: &'a str,
    /// The operator's key.
    pub key: KeyId,
}

/// The answer to a rollback.
#[derive(Debug)]
pub enum RolledBack {
    /// The flag has this revision now.
    Done(Box<Flag>),
    /// The flag does not exist.
    NotFound,
    /// The flag has no such revision.
    NoRevision,
    /// The flag is off, and no revision was named.
    IsOff,
}

/// A revision to add.
struct Change<'a> {
    id: &'a FlagId,
    origin: i64,
    rule: Option<&'a FlagRule>,
    action: FlagAction,
    reason: &'a str,
    key: Option<KeyId>,
}

/// Selects revisions by a condition and its arguments.
macro_rules! select_flags {
    ($condition:literal, $($argument:expr),* $(,)?) => {
        sqlx::query!(
            r#"SELECT r.flag_id, r.revision, r.origin, r.rule AS "rule: Json<FlagRule>", r.action, r.reason, r.key_id,
                      r.created_at, r.sessions, r.refused_sessions, r.runs, r.refused_runs, r.failed_runs, r.setups
               FROM flag_revisions r "# + $condition,
            $($argument),*
        )
        .try_map(|row| {
            Ok($crate::flag::Flag {
                id: $crate::row::parse("flags.id", &row.flag_id)?,
                revision: row.revision,
                origin: row.origin,
                rule: row.rule.map(|json| json.0),
                action: $crate::row::parse("flag_revisions.action", &row.action)?,
                reason: row.reason,
                key: row.key_id.map(codelia_types::KeyId),
                created_at: row.created_at,
                numbers: codelia_policy::FlagNumbers {
                    sessions: row.sessions.unsigned_abs(),
                    refused_sessions: row.refused_sessions.unsigned_abs(),
                    runs: row.runs.unsigned_abs(),
                    refused_runs: row.refused_runs.unsigned_abs(),
                    failed_runs: row.failed_runs.unsigned_abs(),
                    setups: row.setups.into_iter().map(i64::unsigned_abs).collect(),
                },
            })
        })
    };
}

use select_flags;

impl Store {
    /// Sets the rule of a flag. Returns `None` if the installation has [`MAX_FLAGS`] others.
    pub async fn flag_set(&self, new: NewFlagRevision<'_>) -> Result<Option<Flag>, Error> {
        let NewFlagRevision { id, rule, reason, key } = new;
        let mut tx = self.pools.runs.begin().await?;
        lock(&mut tx).await?;
        let others = sqlx::query_scalar!(
            r#"SELECT count(*) AS "count!" FROM flags WHERE id <> $1"#,
            id.as_str()
        )
        .fetch_one(&mut *tx)
        .await?;
        if others >= MAX_FLAGS {
            return Ok(None);
        }
        let last = last_revision(&mut tx, id).await?;
        let change = Change {
            id,
            origin: last + 1,
            rule: Some(rule),
            action: FlagAction::Set,
            reason,
            key: Some(key),
        };
        let flag = add_revision(&self.audit, &mut tx, last, change).await?;
        tx.commit().await?;
        Ok(Some(flag))
    }

    /// Restores an earlier rule of a flag, as a new revision.
    pub async fn flag_roll_back(&self, rollback: FlagRollback<'_>) -> Result<RolledBack, Error> {
        let FlagRollback { id, to, reason, key } = rollback;
        let mut tx = self.pools.runs.begin().await?;
        lock(&mut tx).await?;
        let Some(present) = present(&mut tx, id).await? else { return Ok(RolledBack::NotFound) };
        let target = match to {
            None if present.origin == 0 => return Ok(RolledBack::IsOff),
            None => present.origin - 1,
            Some(to) => to,
        };
        let restored = revision(&mut tx, id, target).await?;
        if to.is_some_and(|to| to > 0) && restored.is_none() {
            return Ok(RolledBack::NoRevision);
        }
        let action = FlagAction::Rollback;
        let change = restore(id, restored.as_ref(), action, reason, Some(key));
        let flag = add_revision(&self.audit, &mut tx, present.revision, change).await?;
        tx.commit().await?;
        Ok(RolledBack::Done(Box::new(flag)))
    }

    /// Returns the latest revision of a flag.
    pub async fn flag_get(&self, id: &FlagId) -> Result<Option<Flag>, Error> {
        let found = select_flags!(
            "JOIN flags f ON f.id = r.flag_id AND f.revision = r.revision WHERE f.id = $1",
            id.as_str()
        );
        Ok(found.fetch_optional(&self.pools.reads).await?)
    }

    /// Lists the latest revisions of flags in the order of their ids, after `after`.
    pub async fn flag_list(&self, after: Option<&FlagId>, limit: i64) -> Result<Vec<Flag>, Error> {
        let page = select_flags!(
            "JOIN flags f ON f.id = r.flag_id AND f.revision = r.revision WHERE f.id > $1 ORDER BY f.id LIMIT $2",
            after.map_or("", FlagId::as_str),
            limit,
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Lists the revisions of a flag below `before`, newest first.
    pub async fn flag_history(
        &self,
        id: &FlagId,
        before: Option<i64>,
        limit: i64,
    ) -> Result<Vec<Flag>, Error> {
        let page = select_flags!(
            "WHERE r.flag_id = $1 AND r.revision < $2 ORDER BY r.revision DESC LIMIT $3",
            id.as_str(),
            before.unwrap_or(i64::MAX),
            limit,
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Reads the rules in force and their version, unless that is still `known`.
    pub async fn flag_rules(&self, known: Option<i64>) -> Result<Option<(i64, Flags)>, Error> {
        let version = sqlx::query_scalar!("SELECT version FROM flag_version")
            .fetch_one(&self.pools.runs)
            .await?;
        if known == Some(version) {
            return Ok(None);
        }
        // At least as new as the version: a change in between is read again at the next call.
        let rows = sqlx::query!(
            r#"SELECT r.flag_id, r.revision, r.rule AS "rule!: Json<FlagRule>"
               FROM flags f JOIN flag_revisions r ON r.flag_id = f.id AND r.revision = f.revision
               WHERE r.rule IS NOT NULL"#
        )
        .fetch_all(&self.pools.runs)
        .await?;
        let rules = rows
            .into_iter()
            .map(|row| {
                let id = row::parse("flags.id", &row.flag_id)?;
                Ok((FlagRef { id, revision: row.revision }, row.rule.0))
            })
            .collect::<Result<_, Error>>()?;
        Ok(Some((version, Flags::new(rules))))
    }

    /// Deletes flags that have been off for longer than `keep`, and returns how many.
    pub(crate) async fn flag_purge(&self, keep: std::time::Duration) -> Result<u64, Error> {
        let purged = sqlx::query!(
            "DELETE FROM flags f USING flag_revisions r
             WHERE r.flag_id = f.id AND r.revision = f.revision AND r.rule IS NULL AND r.created_at < now() - $1::interval",
            row::interval(keep),
        )
        .execute(&self.pools.upkeep)
        .await?;
        Ok(purged.rows_affected())
    }
}

/// Makes changes of flags take their turn, and all processes read the rules again after this one.
async fn lock(tx: &mut PgConnection) -> Result<(), Error> {
    sqlx::query!("UPDATE flag_version SET version = version + 1").execute(tx).await?;
    Ok(())
}

/// The latest revision of a flag; 0 if the flag does not exist.
async fn last_revision(tx: &mut PgConnection, id: &FlagId) -> Result<i64, Error> {
    let found = sqlx::query_scalar!("SELECT revision FROM flags WHERE id = $1", id.as_str());
    Ok(found.fetch_optional(tx).await?.unwrap_or(0))
}

async fn present(tx: &mut PgConnection, id: &FlagId) -> Result<Option<Flag>, Error> {
    let last = last_revision(tx, id).await?;
    revision(tx, id, last).await
}

async fn revision(
    tx: &mut PgConnection,
    id: &FlagId,
    revision: i64,
) -> Result<Option<Flag>, Error> {
    let found = select_flags!("WHERE r.flag_id = $1 AND r.revision = $2", id.as_str(), revision);
    Ok(found.fetch_optional(tx).await?)
}

/// The change that restores the rule of a revision, or turns the flag off if there is none.
fn restore<'a>(
    id: &'a FlagId,
    restored: Option<&'a Flag>,
    action: FlagAction,
    reason: &'a str,
    key: Option<KeyId>,
) -> Change<'a> {
    let origin = restored.map_or(0, |flag| flag.origin);
    Change { id, origin, rule: restored.and_then(|flag| flag.rule.as_ref()), action, reason, key }
}

/// Adds a revision after `last`, and records an event.
async fn add_revision(
    log: &AuditLog,
    tx: &mut PgConnection,
    last: i64,
    change: Change<'_>,
) -> Result<Flag, Error> {
    let Change { id, origin, rule, action, reason, key } = change;
    let next = last + 1;
    sqlx::query!(
        "INSERT INTO flags (id, revision) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET revision = excluded.revision",
        id.as_str(),
        next,
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "INSERT INTO flag_revisions (flag_id, revision, origin, rule, action, reason, key_id)
         VALUES ($1, $2, $3, $4, $5, $6, $7)",
        id.as_str(),
        next,
        origin,
        rule.map(Json) as _,
        action.as_str(),
        reason,
        key.map(|key| key.0),
    )
    .execute(&mut *tx)
    .await?;
    sqlx::query!(
        "DELETE FROM flag_revisions WHERE flag_id = $1 AND revision <= $2",
        id.as_str(),
        next - MAX_REVISIONS,
    )
    .execute(&mut *tx)
    .await?;
    let detail =
        json!({ "flag": id, "revision": next, "origin": origin, "rule": rule, "reason": reason });
    let subject = EventSubject { key, ..EventSubject::default() };
    log.insert(&mut *tx, &subject, &EventBody::new(action.event(), detail)).await?;
    revision(tx, id, next).await?.ok_or(Error::RowMissing { what: "flag" })
}
