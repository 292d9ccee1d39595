//! Flags that exceed their limits roll themselves back.

use codelia_policy::FlagRule;
use codelia_types::FlagId;
use sqlx::types::Json;

use super::{
    Flag, FlagAction, MAX_FLAGS, add_revision, lock, present, restore, revision, select_flags,
};
use crate::{Error, Store};

/// A flag that rolled itself back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrippedFlag {
    /// The flag.
    pub id: FlagId,
    /// The limit that it exceeded.
    pub why: String,
}

impl Store {
    /// Rolls back every flag whose numbers exceed the limits of its guard.
    pub async fn flag_check_guards(&self) -> Result<Vec<TrippedFlag>, Error> {
        let guarded = select_flags!(
            "JOIN flags f ON f.id = r.flag_id AND f.revision = r.revision WHERE r.rule ? 'guard' LIMIT $1",
            MAX_FLAGS,
        )
        .fetch_all(&self.pools.upkeep)
        .await?;
        let mut tripped = Vec::new();
        for flag in guarded {
            let guard = flag.rule.as_ref().and_then(|rule| rule.guard.as_ref());
            let Some(why) = guard.and_then(|guard| guard.breach(&flag.numbers)) else { continue };
            if self.flag_trip(&flag, &why).await? {
                tripped.push(TrippedFlag { id: flag.id, why });
            }
        }
        Ok(tripped)
    }

    /// Rolls a flag back, unless it has changed since it was read.
    async fn flag_trip(&self, read: &Flag, why: &str) -> Result<bool, Error> {
        let mut tx = self.pools.upkeep.begin().await?;
        lock(&mut tx).await?;
        if present(&mut tx, &read.id).await?.is_none_or(|now| now.revision != read.revision) {
            return Ok(false);
        }
        let before = revision(&mut tx, &read.id, read.origin - 1).await?;
        let change = restore(&read.id, before.as_ref(), FlagAction::Guard, why, None);
        add_revision(&self.audit, &mut tx, read.revision, change).await?;
        tx.commit().await?;
        Ok(true)
    }
}
