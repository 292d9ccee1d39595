//! The maximum size of a policy. It is checked before anything else looks at the policy, so that
//! the cost of any policy is bounded.

mod check;
mod maximum;
mod value;

pub use self::maximum::{
    MAX_BYTES, MAX_COMPILED_BYTES, MAX_ENTRIES, MAX_HOST_GLOBS, MAX_LAYOUT_PATHS, MAX_PATH_BYTES,
    MAX_PATH_COMPONENTS, MAX_PATHS, MAX_PATTERNS, MAX_TEXT_BYTES, MAX_VOLUMES, TooLarge,
    check_bytes,
};
pub(crate) use self::value::Value;
