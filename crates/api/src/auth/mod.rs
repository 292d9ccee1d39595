//! Who calls: keys, their scopes, and the record of sign-ins.

pub(crate) mod guard;
pub(crate) mod key_secret;
pub(crate) mod key_uses;
pub(crate) mod known_keys;
pub(crate) mod layer;
pub(crate) mod sign_ins;

pub(crate) use layer::{
    AdmittedCaller, AuthService, Authenticator, admitted, caller, has_scope, require_any_scope,
    require_scope,
};
