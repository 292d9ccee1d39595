//! The table `tools`: tools of tenants, with the approval of their level and their quarantine.
//! Every change raises `tenants.tools_version`, by which copies are recognized as outdated.

use codelia_policy::{IsolationLevel, RunTool, ToolDeclaration};
use codelia_types::{KeyId, RunId, TenantId, ToolId};
use serde_json::{Value, json};
use sqlx::{PgConnection, PgExecutor, types::Json};
use time::OffsetDateTime;

use crate::{AssignedRun, Error, EventBody, EventKind, EventSubject, Store, row};

/// Tools of a tenant.
pub const MAX_TOOLS: i64 = 1000;

/// A tool of a tenant.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The tenant that registered it.
    pub tenant: TenantId,
    /// The name by which runs refer to it.
    pub id: ToolId,
    /// The version of the declaration, from 1.
    pub version: i64,
    /// The declaration.
    pub declaration: ToolDeclaration,
    /// The key that registered this version.
    pub key: KeyId,
    /// When it was created.
    pub created_at: OffsetDateTime,
    /// When this version was registered.
    pub updated_at: OffsetDateTime,
    /// The approval of this version's level.
    pub approval: Option<ToolApproval>,
    /// Why runs that name it are refused.
    pub quarantine: Option<ToolQuarantine>,
}

impl Tool {
    /// Whether its level may be used: it is the highest, or an operator approved this version.
    #[must_use]
    pub fn is_approved(&self) -> bool {
        self.declaration.level() == IsolationLevel::Full || self.approval.is_some()
    }
}

/// An operator's approval of the level of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolApproval {
    /// Why.
    pub reason: String,
    /// The operator's key.
    pub key: KeyId,
    /// When.
    pub at: OffsetDateTime,
}

/// Why a tool may not be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolQuarantine {
    /// Why.
    pub reason: String,
    /// The key that did it; `None` if Codelia did.
    pub key: Option<KeyId>,
    /// The run because of which Codelia did.
    pub run: Option<RunId>,
    /// When.
    pub at: OffsetDateTime,
}

/// Names a tool, and the key that changes it.
#[derive(Debug, Clone, Copy)]
pub struct ToolChange<'a> {
    /// The tenant that has the tool.
    pub tenant: &'a TenantId,
    /// The tool.
    pub id: &'a ToolId,
    /// The key that changes it.
    pub key: KeyId,
}

/// Why a tool was not changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolNotChanged {
    /// The tenant has no such tool, or the tenant does not exist.
    NotFound,
    /// The tool has this version, and not the expected one. 0 if it does not exist.
    Version(i64),
    /// The tenant has as many tools as it may.
    TooMany,
    /// The tool is quarantined, for this reason.
    Quarantined(String),
    /// The tool declares this level, and not the one to approve.
    Level(IsolationLevel),
}

/// A change that takes its tool from a run that waited.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolWithdrawn {
    /// The tool was quarantined, for this reason.
    Quarantined(String),
    /// The tool has another version now, or was deleted.
    Changed,
    /// The approval of its level was withdrawn.
    NotApproved,
}

/// The answer to a change: the tool as it is now.
pub type ToolChanged = Result<Tool, ToolNotChanged>;

/// Selects tools by a condition and its arguments.
macro_rules! select_tools {
    ($condition:literal, $($argument:expr),*) => {
        sqlx::query!(
            r#"SELECT tenant_id, id, version, declaration AS "declaration: Json<ToolDeclaration>", key_id, created_at,
                      updated_at, approved_reason, approved_key, approved_at, quarantined_at, quarantine_reason,
                      quarantine_key, quarantine_run
               FROM tools WHERE "# + $condition,
            $($argument),*
        )
        .try_map(|row| {
            let approval = row.approved_reason.zip(row.approved_key).zip(row.approved_at);
            let quarantine = row.quarantine_reason.zip(row.quarantined_at);
            Ok(Tool {
                tenant: row::parse("tools.tenant_id", &row.tenant_id)?,
                id: row::parse("tools.id", &row.id)?,
                version: row.version,
                declaration: row.declaration.0,
                key: KeyId(row.key_id),
                created_at: row.created_at,
                updated_at: row.updated_at,
                approval: approval.map(|((reason, key), at)| ToolApproval { reason, key: KeyId(key), at }),
                quarantine: quarantine.map(|(reason, at)| ToolQuarantine {
                    reason,
                    key: row.quarantine_key.map(KeyId),
                    run: row.quarantine_run.map(RunId),
                    at,
                }),
            })
        })
    };
}

impl Store {
    /// Returns a tool.
    pub async fn tool_get(&self, tenant: &TenantId, id: &ToolId) -> Result<Option<Tool>, Error> {
        get(&self.pools.runs, tenant, id).await
    }

    /// Lists the tools of a tenant in the order of their ids, after `after`.
    pub async fn tool_list(
        &self,
        tenant: &TenantId,
        after: Option<&ToolId>,
        limit: i64,
    ) -> Result<Vec<Tool>, Error> {
        let page = select_tools!(
            "tenant_id = $1 AND id > $2 ORDER BY id LIMIT $3",
            tenant.as_str(),
            after.map_or("", ToolId::as_str),
            limit
        );
        Ok(page.fetch_all(&self.pools.reads).await?)
    }

    /// Creates a tool or replaces its declaration, if it has the expected version. A changed
    /// declaration has no approval. The same one changes nothing.
    pub async fn tool_register(
        &self,
        change: ToolChange<'_>,
        declaration: &ToolDeclaration,
        expected: Option<i64>,
    ) -> Result<ToolChanged, Error> {
        let mut tx = self.tenant_lock(change.tenant).await?;
        let present = get(&mut *tx, change.tenant, change.id).await?;
        let version = present.as_ref().map_or(0, |tool| tool.version);
        if expected.is_some_and(|expected| expected != version) {
            return Ok(Err(ToolNotChanged::Version(version)));
        }
        match present {
            Some(tool) if tool.declaration == *declaration => return Ok(Ok(tool)),
            Some(_) => {}
            None if count(&mut tx, change.tenant).await? >= MAX_TOOLS => {
                return Ok(Err(ToolNotChanged::TooMany));
            }
            None => {}
        }
        let stored = sqlx::query_scalar!(
            "INSERT INTO tools (tenant_id, id, version, declaration, level, key_id)
             SELECT id, $2, $3, $4, $5, $6 FROM tenants WHERE id = $1 AND deleted_at IS NULL
             ON CONFLICT (tenant_id, id) DO UPDATE
             SET version = excluded.version, declaration = excluded.declaration, level = excluded.level,
                 key_id = excluded.key_id, updated_at = now(),
                 approved_version = NULL, approved_reason = NULL, approved_key = NULL, approved_at = NULL
             RETURNING version",
            change.tenant.as_str(),
            change.id.as_str(),
            version + 1,
            Json(declaration) as _,
            declaration.level().as_str(),
            change.key.0,
        )
        .fetch_optional(&mut *tx)
        .await?;
        let Some(version) = stored else { return Ok(Err(ToolNotChanged::NotFound)) };
        let detail = json!({ "version": version, "level": declaration.level().as_str(), "owner": declaration.owner });
        self.tool_finish(tx, change, EventKind::ToolRegistered, detail).await
    }

    /// Deletes a tool that is not quarantined.
    pub async fn tool_delete(
        &self,
        change: ToolChange<'_>,
    ) -> Result<Result<(), ToolNotChanged>, Error> {
        let mut tx = self.tenant_lock(change.tenant).await?;
        let Some(tool) = get(&mut *tx, change.tenant, change.id).await? else {
            return Ok(Err(ToolNotChanged::NotFound));
        };
        if let Some(quarantine) = tool.quarantine {
            return Ok(Err(ToolNotChanged::Quarantined(quarantine.reason)));
        }
        sqlx::query!(
            "DELETE FROM tools WHERE tenant_id = $1 AND id = $2",
            change.tenant.as_str(),
            change.id.as_str()
        )
        .execute(&mut *tx)
        .await?;
        raise_version(&mut tx, change.tenant).await?;
        let body = EventBody::new(
            EventKind::ToolDeleted,
            json!({ "tool": change.id.as_str(), "version": tool.version }),
        );
        self.audit.commit(tx, &subject(change), &body).await?;
        Ok(Ok(()))
    }

    /// Approves the level of a version, or withdraws the approval if the level is the highest. For
    /// operators.
    pub async fn tool_approve(
        &self,
        change: ToolChange<'_>,
        version: i64,
        level: IsolationLevel,
        reason: &str,
    ) -> Result<ToolChanged, Error> {
        let mut tx = self.tenant_lock(change.tenant).await?;
        let Some(tool) = get(&mut *tx, change.tenant, change.id).await? else {
            return Ok(Err(ToolNotChanged::NotFound));
        };
        if tool.version != version {
            return Ok(Err(ToolNotChanged::Version(tool.version)));
        }
        let declared = tool.declaration.level();
        if ![declared, IsolationLevel::Full].contains(&level) {
            return Ok(Err(ToolNotChanged::Level(declared)));
        }
        let is_approved = level < IsolationLevel::Full;
        sqlx::query!(
            "UPDATE tools SET approved_version = CASE WHEN $4 THEN version END,
                              approved_reason = CASE WHEN $4 THEN $5 END,
                              approved_key = CASE WHEN $4 THEN $6::uuid END,
                              approved_at = CASE WHEN $4 THEN now() END
             WHERE tenant_id = $1 AND id = $2 AND version = $3",
            change.tenant.as_str(),
            change.id.as_str(),
            version,
            is_approved,
            reason,
            change.key.0,
        )
        .execute(&mut *tx)
        .await?;
        let detail = json!({ "version": version, "level": level.as_str(), "reason": reason });
        self.tool_finish(tx, change, EventKind::ToolLevelApproved, detail).await
    }

    /// Quarantines a tool. A tool that is quarantined already keeps its first reason.
    pub async fn tool_quarantine(
        &self,
        change: ToolChange<'_>,
        reason: &str,
    ) -> Result<ToolChanged, Error> {
        let mut tx = self.tenant_lock(change.tenant).await?;
        let is_new = sqlx::query_scalar!(
            "SELECT quarantine_tool($1, $2, $3, $4, NULL)",
            change.tenant.as_str(),
            change.id.as_str(),
            reason,
            change.key.0,
        )
        .fetch_one(&mut *tx)
        .await?;
        match is_new {
            None => return Ok(Err(ToolNotChanged::NotFound)),
            Some(false) => {
                return Ok(get(&mut *tx, change.tenant, change.id)
                    .await?
                    .ok_or(ToolNotChanged::NotFound));
            }
            Some(true) => {}
        }
        self.tool_finish(tx, change, EventKind::ToolQuarantined, json!({ "reason": reason })).await
    }

    /// Ends the quarantine of a tool.
    pub async fn tool_release(
        &self,
        change: ToolChange<'_>,
        reason: &str,
    ) -> Result<ToolChanged, Error> {
        let mut tx = self.tenant_lock(change.tenant).await?;
        let released = sqlx::query!(
            "UPDATE tools SET quarantined_at = NULL, quarantine_reason = NULL, quarantine_key = NULL, quarantine_run = NULL
             WHERE tenant_id = $1 AND id = $2 AND quarantined_at IS NOT NULL",
            change.tenant.as_str(),
            change.id.as_str(),
        )
        .execute(&mut *tx)
        .await?;
        if released.rows_affected() == 0 {
            return Ok(get(&mut *tx, change.tenant, change.id)
                .await?
                .ok_or(ToolNotChanged::NotFound));
        }
        self.tool_finish(tx, change, EventKind::ToolReleased, json!({ "reason": reason })).await
    }

    /// Why a run that waited may not use its tool any more. For workers.
    pub async fn tool_withdrawn(
        &self,
        run: &AssignedRun,
        tool: &RunTool,
    ) -> Result<Option<ToolWithdrawn>, Error> {
        let found = sqlx::query!(
            r#"SELECT version, quarantine_reason, approved_version IS NOT NULL AS "is_approved!"
               FROM tools WHERE tenant_id = $1 AND id = $2"#,
            run.tenant.as_str(),
            tool.id.as_str(),
        )
        .fetch_optional(&self.pools.runs)
        .await?;
        Ok(match found {
            Some(row) => match row.quarantine_reason {
                Some(reason) => Some(ToolWithdrawn::Quarantined(reason)),
                None if row.version != tool.version => Some(ToolWithdrawn::Changed),
                None if tool.level < IsolationLevel::Full && !row.is_approved => {
                    Some(ToolWithdrawn::NotApproved)
                }
                None => None,
            },
            None => Some(ToolWithdrawn::Changed),
        })
    }

    /// Records a change and commits it.
    async fn tool_finish(
        &self,
        mut tx: sqlx::Transaction<'static, sqlx::Postgres>,
        change: ToolChange<'_>,
        kind: EventKind,
        mut detail: Value,
    ) -> Result<ToolChanged, Error> {
        if kind != EventKind::ToolQuarantined {
            raise_version(&mut tx, change.tenant).await?;
        }
        detail["tool"] = json!(change.id.as_str());
        let body = EventBody::new(kind, detail);
        self.audit.insert(&mut *tx, &subject(change), &body).await?;
        let tool = get(&mut *tx, change.tenant, change.id).await?;
        tx.commit().await?;
        Ok(tool.ok_or(ToolNotChanged::NotFound))
    }
}

fn subject(change: ToolChange<'_>) -> EventSubject {
    EventSubject::by(change.key, Some(change.tenant))
}

/// Reads a tool, also inside a transaction.
async fn get(
    executor: impl PgExecutor<'_>,
    tenant: &TenantId,
    id: &ToolId,
) -> Result<Option<Tool>, Error> {
    let found = select_tools!("tenant_id = $1 AND id = $2", tenant.as_str(), id.as_str());
    Ok(found.fetch_optional(executor).await?)
}

async fn count(tx: &mut PgConnection, tenant: &TenantId) -> Result<i64, Error> {
    let count = sqlx::query_scalar!(
        r#"SELECT count(*) AS "count!" FROM tools WHERE tenant_id = $1"#,
        tenant.as_str()
    );
    Ok(count.fetch_one(tx).await?)
}

/// Makes copies of the tenant's tools outdated.
async fn raise_version(tx: &mut PgConnection, tenant: &TenantId) -> Result<(), Error> {
    sqlx::query!(
        "UPDATE tenants SET tools_version = tools_version + 1 WHERE id = $1",
        tenant.as_str()
    )
    .execute(tx)
    .await?;
    Ok(())
}
