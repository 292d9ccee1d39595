//! `FlagService`: operators set mode flags and roll them back. `rules` keeps the rules that new
//! sessions are held to, `follow` reads them again, `request` reads a rule, `to_proto` shows one.

mod follow;
mod request;
mod rules;
mod to_proto;

use std::sync::Arc;

use codelia_policy::FlagRule;
use codelia_proto::v1::{self, flag_service_server::FlagService};
use codelia_store::{Caller, FlagRollback, MAX_FLAGS, NewFlagRevision, RolledBack, Scope};
use codelia_telemetry::metrics;
use codelia_types::{FlagId, Mode, Reason};

pub(crate) use self::{follow::follow, rules::FlagRules};
use crate::{
    admission::mode_not_allowed,
    auth,
    context::Context,
    error::ApiError,
    rpc::serve,
    wire::{paging::Page, resource_name, validate},
};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Flags {
    pub(crate) context: Arc<Context>,
}

fn flag_not_found(id: &FlagId) -> ApiError {
    ApiError::not_found("flag", id)
}

fn too_many() -> ApiError {
    let message = format!("the installation has {MAX_FLAGS} flags; use one again that is off");
    ApiError::new(Reason::TooManyFlags, message)
}

fn is_off(id: &FlagId) -> ApiError {
    let message = format!("flag {id} is off: nothing to roll back; name a revision to restore it");
    ApiError::new(Reason::FlagOff, message)
}

/// No live worker can serve the mode of a rule.
fn mode_unserved(mode: Mode) -> ApiError {
    let message = format!(
        "rule.mode: no live worker can serve {mode}; start one (`codelia doctor` says what the mode needs), \
         or set `force`"
    );
    ApiError::new(Reason::ModeUnavailable, message).with("field", "rule.mode").with("mode", mode)
}

impl Flags {
    async fn set_flag(
        &self,
        caller: &Caller,
        wire: v1::SetFlagRequest,
    ) -> Result<v1::SetFlagResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::flag("name", &wire.name)?;
        let rule = request::rule(caller, wire.rule)?;
        let reason = validate::reason(wire.reason)?;
        self.check(&rule, wire.force).await?;
        let store = &self.context.store;
        let new = NewFlagRevision { id: &id, rule: &rule, reason: &reason, key: caller.key };
        let flag = store.flag_set(new).await?.ok_or_else(too_many)?;
        self.context.flags.refresh(store).await?;
        Ok(v1::SetFlagResponse { flag: Some(to_proto::flag(flag)) })
    }

    /// Refuses a rule for an unknown tenant, and a mode that this installation does not allow or
    /// that no live worker can serve.
    async fn check(&self, rule: &FlagRule, force: bool) -> Result<(), ApiError> {
        let Context { store, options, .. } = &*self.context;
        if let Some(tenant) = &rule.tenant
            && store.tenant_get(tenant).await?.is_none()
        {
            return Err(ApiError::not_found("tenant", tenant));
        }
        let Some(mode) = rule.mode else { return Ok(()) };
        if mode == Mode::Logical && !options.allow_logical {
            return Err(mode_not_allowed(mode));
        }
        if force || store.worker_has_mode(mode).await? {
            return Ok(());
        }
        Err(mode_unserved(mode))
    }

    async fn get_flag(
        &self,
        caller: &Caller,
        wire: v1::GetFlagRequest,
    ) -> Result<v1::GetFlagResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::flag("name", &wire.name)?;
        let flag = self.context.store.flag_get(&id).await?;
        let flag = flag.ok_or_else(|| flag_not_found(&id))?;
        Ok(v1::GetFlagResponse { flag: Some(to_proto::flag(flag)) })
    }

    async fn list_flags(
        &self,
        caller: &Caller,
        wire: v1::ListFlagsRequest,
    ) -> Result<v1::ListFlagsResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let mut page = Page::<FlagId, _>::parse(&caller.tenant, &wire)?;
        while let Some(limit) = page.batch() {
            let rows = self.context.store.flag_list(page.after.as_ref(), limit).await?;
            page.add(rows, |flag| (flag.id.clone(), to_proto::flag(flag)));
        }
        let (flags, next_page_token) = page.finish();
        Ok(v1::ListFlagsResponse { flags, next_page_token })
    }

    async fn list_flag_history(
        &self,
        caller: &Caller,
        wire: v1::ListFlagHistoryRequest,
    ) -> Result<v1::ListFlagHistoryResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::flag("name", &wire.name)?;
        let mut page = Page::<i64, _>::parse(&caller.tenant, &wire)?;
        let store = &self.context.store;
        store.flag_get(&id).await?.ok_or_else(|| flag_not_found(&id))?;
        while let Some(limit) = page.batch() {
            let rows = store.flag_history(&id, page.after, limit).await?;
            page.add(rows, |flag| (flag.revision, to_proto::flag(flag)));
        }
        let (flags, next_page_token) = page.finish();
        Ok(v1::ListFlagHistoryResponse { flags, next_page_token })
    }

    async fn rollback_flag(
        &self,
        caller: &Caller,
        wire: v1::RollbackFlagRequest,
    ) -> Result<v1::RollbackFlagResponse, ApiError> {
        auth::require_scope(caller, Scope::Operator)?;
        let id = resource_name::flag("name", &wire.name)?;
        let reason = validate::reason(wire.reason)?;
        if wire.revision.is_some_and(|revision| revision < 0) {
            return Err(ApiError::invalid("revision", "must not be negative"));
        }
        let store = &self.context.store;
        let rollback =
            FlagRollback { id: &id, to: wire.revision, reason: &reason, key: caller.key };
        let flag = match store.flag_roll_back(rollback).await? {
            RolledBack::Done(flag) => flag,
            RolledBack::NotFound => return Err(flag_not_found(&id)),
            RolledBack::IsOff => return Err(is_off(&id)),
            RolledBack::NoRevision => {
                let message = "unknown; ListFlagHistory has those that are kept";
                return Err(ApiError::invalid("revision", message));
            }
        };
        metrics().flags.rolled_back(id.as_str(), "operator");
        self.context.flags.refresh(store).await?;
        Ok(v1::RollbackFlagResponse { flag: Some(to_proto::flag(*flag)) })
    }
}

serve! {
    FlagService for Flags;
    call set_flag(SetFlagRequest) -> SetFlagResponse;
    call get_flag(GetFlagRequest) -> GetFlagResponse;
    call list_flags(ListFlagsRequest) -> ListFlagsResponse;
    call list_flag_history(ListFlagHistoryRequest) -> ListFlagHistoryResponse;
    call rollback_flag(RollbackFlagRequest) -> RollbackFlagResponse;
}
