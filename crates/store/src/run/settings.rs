//! The table `run_settings`: what runs have in common. A spec is a command and settings; settings
//! that are used again are stored once, and runs refer to them by their hash.
//!
//! Settings that this process sees for the first time stay in the row of their run. So a caller
//! whose settings are different for each run adds no row here.

use std::sync::{Mutex, PoisonError};

use codelia_policy::RunSpec;
use codelia_types::RunId;
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use super::summary::SpecSummary;
use crate::{error::Error, pools::Pool, recent_map::RecentMap};

/// Settings that a process remembers.
const MAX_KNOWN: usize = 4096;
/// Lists read a spec of at most this many bytes; else they need a summary. Its arguments are
/// shorter than a summary may be.
const MAX_LISTED_SPEC: usize = 1000;
const MILLIS_PER_DAY: u128 = 24 * 3600 * 1000;

/// SHA-256 of settings.
type Hash = [u8; 32];

/// The knowledge of a process about settings that it has seen.
#[derive(Debug, Clone, Copy)]
enum Known {
    /// A run has them in its own row.
    Seen,
    /// They are stored for runs up to this day.
    Stored { day: u128 },
}

/// Settings that this process has seen.
#[derive(Debug)]
pub(crate) struct KnownSettings(Mutex<RecentMap<Hash, Known>>);

impl Default for KnownSettings {
    fn default() -> Self {
        Self(Mutex::new(RecentMap::new(MAX_KNOWN)))
    }
}

impl KnownSettings {
    fn get(&self, hash: &Hash) -> Option<Known> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(hash).copied()
    }

    fn set(&self, hash: Hash, known: Known) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(hash, known);
    }

    /// How to store the spec of a new run. Stores its settings if they were seen before and are not
    /// known to be stored.
    pub(super) async fn columns(
        &self,
        pool: &Pool,
        run: RunId,
        spec: &RunSpec,
    ) -> Result<SpecColumns, Error> {
        let mut settings = to_json(spec)?;
        if let Some(fields) = settings.as_object_mut() {
            fields.remove("command");
        }
        let hash = hash(&settings)?;
        let day = (run.0.as_u128() >> 80) / MILLIS_PER_DAY;
        let is_stored = match self.get(&hash) {
            Some(Known::Stored { day: last }) if day <= last => true,
            Some(_) => store(pool, run, &hash, &settings).await?,
            None => false,
        };
        self.set(hash, if is_stored { Known::Stored { day } } else { Known::Seen });
        if is_stored { Ok(SpecColumns::command(spec, hash)) } else { SpecColumns::whole(spec) }
    }

    /// Returns the columns of a spec whose settings were deleted meanwhile.
    pub(super) fn columns_again(
        &self,
        spec: &RunSpec,
        old: &SpecColumns,
    ) -> Result<SpecColumns, Error> {
        if let Some(hash) = old.settings {
            self.set(hash, Known::Seen);
        }
        SpecColumns::whole(spec)
    }
}

/// The columns of a spec.
#[derive(Debug)]
pub(super) struct SpecColumns {
    /// The whole spec, or only the command if it refers to settings.
    pub(super) spec: Value,
    pub(super) summary: Option<Value>,
    pub(super) settings: Option<Hash>,
}

impl SpecColumns {
    /// A spec that refers to nothing.
    fn whole(spec: &RunSpec) -> Result<Self, Error> {
        Ok(Self {
            spec: to_json(spec)?,
            summary: Some(to_json(&SpecSummary::new(spec))?),
            settings: None,
        })
    }

    /// The command of a spec, which refers to its settings.
    fn command(spec: &RunSpec, settings: Hash) -> Self {
        let command = json!({ "command": spec.command });
        let summary = (command.to_string().len() > MAX_LISTED_SPEC).then(|| {
            let SpecSummary { argv, argv_truncated, .. } = SpecSummary::new(spec);
            json!({ "argv": argv, "argv_truncated": argv_truncated })
        });
        Self { spec: command, summary, settings: Some(settings) }
    }
}

/// Stores settings for runs up to the day of this one. Returns `false` if other settings have the
/// hash, or another process is storing them.
async fn store(pool: &Pool, run: RunId, hash: &Hash, settings: &Value) -> Result<bool, Error> {
    let is_same = sqlx::query_file_scalar!(
        "src/sql/run_settings_store.sql",
        hash.as_slice(),
        settings,
        run.0,
    )
    .fetch_optional(pool)
    .await?;
    Ok(is_same.unwrap_or(false))
}

/// The hash of all fields, which are in a fixed order.
fn hash(settings: &Value) -> Result<Hash, Error> {
    let mut hash = Hash::default();
    hash.copy_from_slice(
        digest(&SHA256, &serde_json::to_vec(settings).map_err(unencodable)?).as_ref(),
    );
    Ok(hash)
}

fn to_json(value: &impl serde::Serialize) -> Result<Value, Error> {
    serde_json::to_value(value).map_err(unencodable)
}

fn unencodable(error: serde_json::Error) -> Error {
    Error::Statement(sqlx::Error::Encode(error.into()))
}
