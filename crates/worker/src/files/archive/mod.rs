//! `ExportFiles` and `ImportFiles`: a directory as a tar archive, in both directions.
//!
//! Both work piece by piece with flat memory: a call that waits for its caller holds no thread.

mod decompress;
mod export;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod import;
mod limits;
mod staging;
mod tar;

#[cfg(any(test, fuzzing))]
pub use self::fuzz::tar as fuzz_tar;
pub(super) use self::{export::Export, import::Import};
