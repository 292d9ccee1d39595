//! Between messages and values: validation, names, pages.

pub(crate) mod paging;
pub(crate) mod resource_name;
pub(crate) mod to_proto;
pub(crate) mod validate;
pub(crate) mod words;
