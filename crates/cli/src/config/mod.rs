//! Configuration. Precedence: flags, environment, file, defaults. Unknown keys and variables are
//! refused.

mod keys;
mod load;
mod loaded;
#[cfg(test)]
mod reference_tests;
mod sandbox;
mod schema;
mod show;

#[cfg(test)]
pub(crate) use self::load::tests;
pub(crate) use self::{
    load::{load, state_home},
    loaded::Loaded,
    sandbox::LimitEnforcement,
    schema::{Config, Profile},
    show::show,
};
