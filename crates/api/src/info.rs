//! `InfoService`: what the server offers, and what the caller may do. For every valid key.

use std::sync::Arc;

use codelia_policy::Limits;
use codelia_proto::{
    duration_to_proto,
    v1::{self, info_service_server::InfoService},
};
use codelia_store::Caller;
use codelia_types::Mode;

use crate::{
    admission::rules::Rules, context::Context, error::ApiError, options::Options, rpc::serve,
    wire::to_proto,
};

/// Answers the calls of the service, with the state that all of them share.
#[derive(Debug)]
pub(crate) struct Info {
    pub(crate) context: Arc<Context>,
}

/// What a server offers with these options if its workers serve these modes.
fn server_info(options: &Options, modes: &[Mode]) -> v1::ServerInfo {
    let is_allowed = |mode: &&Mode| options.allow_logical || **mode != Mode::Logical;
    let limits = |limits: &Limits| Some(limits.into());
    v1::ServerInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        modes: modes
            .iter()
            .filter(is_allowed)
            .map(|mode| v1::SandboxMode::from(*mode).into())
            .collect(),
        default_mode: v1::SandboxMode::from(options.default_mode).into(),
        default_limits: limits(&options.limits.defaults),
        max_limits: limits(&options.limits.ceilings.0),
        default_session_ttl: Some(duration_to_proto(options.session_ttl)),
        max_session_ttl: Some(duration_to_proto(options.max_session_ttl)),
        features: options.secret_key.iter().map(|_| "secret_env".to_owned()).collect(),
    }
}

impl Info {
    async fn get_server_info(
        &self,
        caller: &Caller,
        _: v1::GetServerInfoRequest,
    ) -> Result<v1::GetServerInfoResponse, ApiError> {
        let modes = self.context.store.worker_modes().await?;
        let rules = Rules::new(caller, &self.context.options, None);
        let max_limits = Some((&rules.ceilings.0).into());
        let server_info = v1::ServerInfo { max_limits, ..server_info(rules.options, &modes) };
        Ok(v1::GetServerInfoResponse { server_info: Some(server_info) })
    }

    async fn who_am_i(
        &self,
        caller: &Caller,
        _: v1::WhoAmIRequest,
    ) -> Result<v1::WhoAmIResponse, ApiError> {
        let store = &self.context.store;
        // The key or tenant may have been deleted since authentication.
        let key = store
            .key_get(&caller.tenant, caller.key)
            .await?
            .ok_or_else(ApiError::unauthenticated)?;
        let tenant =
            store.tenant_get(&caller.tenant).await?.ok_or_else(ApiError::unauthenticated)?;
        let usage = store.tenant_usage(&caller.tenant).await?;
        // Why an operator chose the level is for administrators.
        let isolation_floor = v1::IsolationFloor {
            level: v1::IsolationLevel::from(Some(caller.floor)).into(),
            ask_level: v1::IsolationLevel::from(caller.ask_floor).into(),
            ..v1::IsolationFloor::default()
        };
        let tenant = v1::Tenant {
            isolation_floor: Some(isolation_floor),
            ..to_proto::tenant(&tenant, Some(usage))
        };
        Ok(v1::WhoAmIResponse { tenant: Some(tenant), key: Some(to_proto::key(key)) })
    }
}

serve! {
    InfoService for Info;
    call get_server_info(GetServerInfoRequest) -> GetServerInfoResponse;
    call who_am_i(WhoAmIRequest) -> WhoAmIResponse;
}
