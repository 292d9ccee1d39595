//! The database as its rows grow and under load next to it.

pub(crate) mod backlog;
pub(crate) mod capacity;
pub(crate) mod cells;
pub(crate) mod fill;
pub(crate) mod growth;
pub(crate) mod lists;
pub(crate) mod retention;
pub(crate) mod snapshot;
pub(crate) mod statement_counts;
mod store_load;

use anyhow::Result;
use codelia_store::{Options, Store};
use codelia_tests::Database;

/// Opens a database as a migrated store.
async fn open(database: &Database) -> Result<Store> {
    let store = Store::connect(Options::from_url(&database.url())?).await?;
    store.migrate().await?;
    Ok(store)
}
