//! Limits.

use codelia_policy::{Limits, LimitsRequest};

use crate::{error::InvalidField, v1, wire::Wire};

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
