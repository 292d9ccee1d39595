//! Enums that messages and Rust share.

use codelia_policy::{
    EnvironmentMode, FilesystemMode, IsolationLevel, Source, SyscallMode, VolumeMode,
};
use codelia_types::{ChangeKind, ChangedFile, ChangesState, Mode, NetworkMode};

use crate::{
    error::{InvalidField, enum_value},
    v1,
    wire::Wire,
};

/// Converts enums whose values have the same names in both, except that one of a message can be
/// unspecified.
macro_rules! same_values {
    ($($wire:ident = $own:ident: $($value:ident)+;)+) => {$(
        impl From<$own> for v1::$wire {
            fn from(own: $own) -> Self {
                match own {
                    $($own::$value => Self::$value,)+
                }
            }
        }

        impl From<v1::$wire> for Option<$own> {
            fn from(wire: v1::$wire) -> Self {
                match wire {
                    v1::$wire::Unspecified => None,
                    $(v1::$wire::$value => Some($own::$value),)+
                }
            }
        }

        impl Wire<i32> for Option<$own> {
            fn from_wire(field: &str, wire: i32) -> Result<Self, InvalidField> {
                Ok(enum_value::<v1::$wire>(field, wire)?.into())
            }

            fn to_wire(&self) -> i32 {
                self.map_or(v1::$wire::Unspecified, Into::into).into()
            }
        }
    )+};
}

same_values! {
    ChangeKind = ChangeKind: Added Changed Removed;
    ChangesState = ChangesState: Applied Dropped Held;
    EnvironmentMode = EnvironmentMode: Inherit Clean Explicit;
    FileKind = ChangedFile: Regular Directory Symlink Special;
    FilesystemMode = FilesystemMode: Static Dynamic;
    NetworkMode = NetworkMode: None Proxy Host;
    PolicySource = Source: Default Tenant Project User Session Run;
    SandboxMode = Mode: Logical Bwrap Nsjail Native Container;
    SyscallMode = SyscallMode: Allow Deny;
    VolumeMode = VolumeMode: ReadOnly Copy Exclusive;
}

impl v1::IsolationLevel {
    /// The level, or `None` if it is unspecified.
    #[must_use]
    pub fn to_level(self) -> Option<IsolationLevel> {
        match self {
            Self::Unspecified => None,
            Self::IsolationLevel0 => Some(IsolationLevel::None),
            Self::IsolationLevel1 => Some(IsolationLevel::Process),
            Self::IsolationLevel2 => Some(IsolationLevel::Full),
        }
    }
}

impl From<Option<IsolationLevel>> for v1::IsolationLevel {
    fn from(level: Option<IsolationLevel>) -> Self {
        match level {
            None => Self::Unspecified,
            Some(IsolationLevel::None) => Self::IsolationLevel0,
            Some(IsolationLevel::Process) => Self::IsolationLevel1,
            Some(IsolationLevel::Full) => Self::IsolationLevel2,
        }
    }
}

impl Wire<i32> for Option<IsolationLevel> {
    fn from_wire(field: &str, wire: i32) -> Result<Self, InvalidField> {
        Ok(enum_value::<v1::IsolationLevel>(field, wire)?.to_level())
    }

    fn to_wire(&self) -> i32 {
        v1::IsolationLevel::from(*self).into()
    }
}
