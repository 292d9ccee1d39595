//! The maximums of limits that a policy sets.

use crate::{
    Ceilings, Limit, LimitsRequest, Policy, PolicyError,
    limits::{LimitValue, check},
};

/// Defines what is done to each maximum.
macro_rules! define {
    ($(
        $(#[$doc:meta])+
        $limit:ident: $field:ident $type:ident $unit:ident,
            $default:expr, $ceiling:expr, [$($group:ident.$cap:ident),+];
    )+) => {
        impl Policy {
            /// The resource maximums of this policy, as limits.
            #[must_use]
            pub fn caps(&self) -> LimitsRequest {
                LimitsRequest {
                    $($field: [$(self.$group.$cap),+].into_iter().flatten().min(),)+
                }
            }

            /// Each field that caps a limit, with its amount.
            pub(crate) fn cap_fields(&self) -> Vec<(&'static str, Limit, Option<u128>)> {
                vec![$($(
                    (
                        concat!(stringify!($group), ".", stringify!($cap)),
                        Limit::$limit,
                        self.$group.$cap.map(LimitValue::amount),
                    ),
                )+)+]
            }

            /// Checks that no maximum is zero or above its ceiling.
            pub(crate) fn check_caps(&self, ceilings: &Ceilings) -> Result<(), PolicyError> {
                $($(
                    let field = concat!(stringify!($group), ".", stringify!($cap));
                    check_cap(field, Limit::$limit, self.$group.$cap, ceilings.0.$field)?;
                )+)+
                Ok(())
            }
        }
    };
}

crate::limit_table!(define);

fn check_cap<T: LimitValue>(
    field: &str,
    limit: Limit,
    cap: Option<T>,
    max: T,
) -> Result<(), PolicyError> {
    match cap.map(|cap| check(limit, cap, max)) {
        Some(Err(error)) => {
            Err(PolicyError { field: field.to_owned(), message: error.to_string() })
        }
        Some(Ok(_)) | None => Ok(()),
    }
}
