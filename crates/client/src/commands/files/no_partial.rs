//! Partial downloads on systems where they cannot be told from planted files: not supported.

use std::convert::Infallible;

use anyhow::Result;

use super::download::LocalFile;
use crate::system::unsupported;

/// The part of a file that has arrived.
#[derive(Debug)]
pub(super) struct Partial {
    pub(super) length: u64,
    never: Infallible,
}

impl Partial {
    pub(super) fn open(_: &LocalFile, _: u64, _: u32, _: u64) -> Result<Self> {
        Err(unsupported("continuing downloads (--resume)").into())
    }

    pub(super) fn write(&mut self, _: &[u8]) -> Result<()> {
        match self.never {}
    }

    pub(super) fn publish(self, _: &LocalFile) -> Result<()> {
        match self.never {}
    }
}
