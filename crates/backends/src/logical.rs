//! Placeholder
/// Placeholder
#[derive(Debug)]
pub struct Logical;
