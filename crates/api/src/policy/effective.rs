//! The policies of the project and the user of a session, and what it is held to under them.

use codelia_policy::{Policy, Scopes};
use codelia_store::{Caller, Session, Store};

use crate::error::ApiError;

/// The policies of a project and a user that exist.
#[derive(Debug, Default)]
pub(crate) struct ScopePolicies {
    project: Option<Policy>,
    user: Option<Policy>,
}

/// Policies of scopes, merged with those above.
#[derive(Debug)]
pub(crate) struct ScopeRules {
    pub(crate) own: ScopePolicies,
    /// The installation's, tightened by those of all scopes.
    pub(crate) effective: Policy,
}

impl ScopePolicies {
    /// Those of a session that a caller creates. A project without a policy does not exist.
    pub(crate) async fn of_new(
        store: &Store,
        caller: &Caller,
        project: Option<&str>,
    ) -> Result<Self, ApiError> {
        let (found, user) = store.scope_policies(&caller.tenant, project, Some(caller.key)).await?;
        match project {
            Some(name) if found.is_none() => Err(ApiError::invalid(
                "project",
                format!("project {name:?} has no policy; set one first, or leave the project out"),
            )),
            _ => Ok(Self { project: found, user }),
        }
    }

    /// Those in effect now for a session that exists.
    pub(crate) async fn of_session(store: &Store, session: &Session) -> Result<Self, ApiError> {
        let project = session.spec.scopes.project.as_deref();
        let (project, user) =
            store.scope_policies(&session.tenant, project, session.created_by).await?;
        Ok(Self { project, user })
    }

    /// Whether neither the project nor the user has a policy.
    pub(crate) fn is_empty(&self) -> bool {
        self.project.is_none() && self.user.is_none()
    }

    /// Whether to merge them off the async runtime.
    pub(crate) fn is_large(&self) -> bool {
        [&self.project, &self.user].into_iter().flatten().any(Policy::is_large)
    }

    /// These policies, with that of the tenant above them.
    pub(crate) fn scopes<'a>(&'a self, organisation: Option<&'a Policy>) -> Scopes<'a> {
        Scopes { organisation, project: self.project.as_ref(), user: self.user.as_ref() }
    }
}
