//! Merging of policies: the result allows what both allow.
//!
//! Merging only tightens and is associative. An absent field has no effect.
//! [`policy_table`](crate::policy_table) says which function merges which field.

mod policy;
pub(crate) mod values;
