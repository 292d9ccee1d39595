//! Sandbox modes, network modes and limits.

use codelia_policy::{Limits, LimitsRequest};
use codelia_types::{Mode, NetworkMode};

use crate::{error::InvalidField, v1, wire::Wire};

impl v1::SandboxMode {
    /// The mode, or `None` if it is unspecified.
    #[must_use]
    pub fn to_mode(self) -> Option<Mode> {
        match self {
            Self::Unspecified => None,
            Self::Logical => Some(Mode::Logical),
            Self::Bwrap => Some(Mode::Bwrap),
            Self::Nsjail => Some(Mode::Nsjail),
            Self::Native => Some(Mode::Native),
            Self::Container => Some(Mode::Container),
        }
    }
}

impl From<Mode> for v1::SandboxMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Logical => Self::Logical,
            Mode::Bwrap => Self::Bwrap,
            Mode::Nsjail => Self::Nsjail,
            Mode::Native => Self::Native,
            Mode::Container => Self::Container,
        }
    }
}

impl v1::NetworkMode {
    /// The mode, or `None` if it is unspecified.
    #[must_use]
    pub fn to_mode(self) -> Option<NetworkMode> {
        match self {
            Self::Unspecified => None,
            Self::None => Some(NetworkMode::None),
            Self::Proxy => Some(NetworkMode::Proxy),
            Self::Host => Some(NetworkMode::Host),
        }
    }
}

impl From<NetworkMode> for v1::NetworkMode {
    fn from(mode: NetworkMode) -> Self {
        match mode {
            NetworkMode::None => Self::None,
            NetworkMode::Proxy => Self::Proxy,
            NetworkMode::Host => Self::Host,
        }
    }
}

macro_rules! conversions {
    ($(
        $(#[$doc:meta])+
        $limit:ident: $field:ident $type:ident $unit:ident,
            $default:expr, $ceiling:expr, [$($cap:tt)+];
    )+) => {
        impl From<&LimitsRequest> for v1::Limits {
            fn from(limits: &LimitsRequest) -> Self {
                Self { $($field: limits.$field.to_wire(),)+ }
            }
        }

        impl TryFrom<&v1::Limits> for LimitsRequest {
            type Error = InvalidField;

            fn try_from(wire: &v1::Limits) -> Result<Self, InvalidField> {
                Ok(Self { $($field: Wire::from_wire(stringify!($field), wire.$field)?,)+ })
            }
        }
    };
}

codelia_policy::limit_table!(conversions);

impl From<&Limits> for v1::Limits {
    fn from(limits: &Limits) -> Self {
        Self::from(&LimitsRequest::from(limits))
    }
}
