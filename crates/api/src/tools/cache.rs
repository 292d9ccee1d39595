//! Copies of tools. Each call learns the version of its tenant's tools with its key, so a copy is
//! never older than the call, and a run that names a tool needs no query of its own.

use std::sync::Arc;

use codelia_store::{Caller, Store, Tool};
use codelia_types::{TenantId, ToolId};

use crate::{cache::Cache, error::ApiError};

/// Tools to remember.
const CAPACITY: usize = 1024;

type Key = (TenantId, ToolId);
/// The version of the tenant's tools that the copy was read at, or after.
type Entry = (i64, Arc<Tool>);

/// Tools that runs named lately.
#[derive(Debug, Default)]
pub(crate) struct ToolCache(Cache<Key, Entry, CAPACITY>);

impl ToolCache {
    /// The tool that a run of the caller names.
    pub(crate) async fn get(
        &self,
        store: &Store,
        caller: &Caller,
        id: &ToolId,
    ) -> Result<Arc<Tool>, ApiError> {
        let key = (caller.tenant.clone(), id.clone());
        if let Some((version, tool)) = self.0.get(&key)
            && version == caller.tools_version
        {
            return Ok(tool);
        }
        let found = store.tool_get(&caller.tenant, id).await?;
        let tool = Arc::new(found.ok_or_else(|| ApiError::not_found("tool", id))?);
        self.0.insert(key, (caller.tools_version, tool.clone()));
        Ok(tool)
    }
}
