//! Local directories on systems where links in them cannot be avoided: not supported.

use std::{
    convert::Infallible,
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::Result;

use super::{download::Target, local_entry::LocalEntry};
use crate::system::unsupported;

/// A directory that the user named.
#[derive(Debug)]
pub(super) struct LocalTree(Infallible);

impl LocalTree {
    pub(super) fn open(_: &Path) -> Result<Self> {
        Err(unsupported("copying directories (use `codelia export` and `codelia import`)").into())
    }

    pub(super) fn shown(&self, _: &[String]) -> PathBuf {
        match self.0 {}
    }

    pub(super) fn walk(&self) -> Result<Vec<LocalEntry>> {
        match self.0 {}
    }

    pub(super) fn read(&self, _: &[String]) -> Result<File> {
        match self.0 {}
    }

    pub(super) fn create_directory(&mut self, _: &[String], _: u32) -> Result<()> {
        match self.0 {}
    }

    pub(super) fn target(&self, _: &[String], _: bool) -> Result<Target> {
        match self.0 {}
    }

    pub(super) fn record_file(&mut self, _: &[String]) -> Result<()> {
        match self.0 {}
    }
}
