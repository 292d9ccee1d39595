//! The size of the value of a field.

use std::{
    fmt,
    path::{Component, PathBuf},
    time::Duration,
};

use codelia_types::NetworkMode;

use super::maximum::{
    MAX_PATH_BYTES, MAX_PATH_COMPONENTS, MAX_TEXT_BYTES, SHORTEN, TooLarge, at_most,
};
use crate::{
    EnvironmentMode, FilesystemMode, IsolationLevel, LayoutDirectory, SyscallMode, VolumeMount,
};

/// The value of a field of a policy.
pub(crate) trait Value {
    /// Whether the policy sets the field.
    fn is_set(&self) -> bool {
        true
    }

    /// The number of entries, if it is a list.
    fn entries(&self) -> usize {
        0
    }

    /// Checks the length of each entry.
    fn check_entries(&self, _field: &str) -> Result<(), TooLarge> {
        Ok(())
    }

    /// The length of all entries together.
    fn bytes(&self) -> usize {
        0
    }
}

impl Value for bool {}
impl Value for u32 {}
impl Value for u64 {}
impl Value for Duration {}
impl Value for String {}
impl Value for NetworkMode {}
impl Value for IsolationLevel {}
impl Value for FilesystemMode {}
impl Value for SyscallMode {}
impl Value for EnvironmentMode {}

impl<T: Value> Value for Option<T> {
    fn is_set(&self) -> bool {
        self.is_some()
    }

    fn entries(&self) -> usize {
        self.as_ref().map_or(0, T::entries)
    }

    fn check_entries(&self, field: &str) -> Result<(), TooLarge> {
        self.as_ref().map_or(Ok(()), |value| value.check_entries(field))
    }

    fn bytes(&self) -> usize {
        self.as_ref().map_or(0, T::bytes)
    }
}

impl<E: Entry> Value for Vec<E> {
    fn is_set(&self) -> bool {
        !self.is_empty()
    }

    fn entries(&self) -> usize {
        self.len()
    }

    fn check_entries(&self, field: &str) -> Result<(), TooLarge> {
        self.iter()
            .enumerate()
            .try_for_each(|(at, entry)| entry.check(format_args!("{field}[{at}]")))
    }

    fn bytes(&self) -> usize {
        self.iter().map(E::bytes).sum()
    }
}

/// An entry of a list.
pub(crate) trait Entry {
    /// Checks its length.
    fn check(&self, _field: fmt::Arguments<'_>) -> Result<(), TooLarge> {
        Ok(())
    }

    /// The length of its texts.
    fn bytes(&self) -> usize {
        0
    }
}

impl Entry for u16 {}
impl Entry for u32 {}

impl Entry for String {
    fn check(&self, field: fmt::Arguments<'_>) -> Result<(), TooLarge> {
        at_most(field, self.len(), MAX_TEXT_BYTES, "bytes", SHORTEN)
    }

    fn bytes(&self) -> usize {
        self.len()
    }
}

impl Entry for PathBuf {
    fn check(&self, field: fmt::Arguments<'_>) -> Result<(), TooLarge> {
        at_most(field, self.as_os_str().len(), MAX_PATH_BYTES, "bytes", SHORTEN)?;
        let components =
            self.components().filter(|part| matches!(part, Component::Normal(_))).count();
        at_most(field, components, MAX_PATH_COMPONENTS, "components", SHORTEN)
    }

    fn bytes(&self) -> usize {
        self.as_os_str().len()
    }
}

impl Entry for VolumeMount {
    fn check(&self, field: fmt::Arguments<'_>) -> Result<(), TooLarge> {
        self.name.check(field)?;
        self.path.check(field)
    }

    fn bytes(&self) -> usize {
        self.name.len() + self.path.bytes()
    }
}

impl Entry for LayoutDirectory {
    fn check(&self, field: fmt::Arguments<'_>) -> Result<(), TooLarge> {
        self.path.check(field)
    }

    fn bytes(&self) -> usize {
        self.path.bytes()
    }
}
