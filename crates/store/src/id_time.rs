//! The time in ids: they begin with the milliseconds since 1970.

use time::OffsetDateTime;
use uuid::Uuid;

/// The least id that is made at a time.
pub(crate) fn first_id(time: OffsetDateTime) -> Uuid {
    let millis = u128::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0);
    Uuid::from_u128(millis.min((1 << 48) - 1) << 80)
}

/// The time when an id was made; `None` if its clock was thousands of years ahead.
pub(crate) fn made_at(id: Uuid) -> Option<OffsetDateTime> {
    let nanos = i128::try_from(id.as_u128() >> 80).ok()?.checked_mul(1_000_000)?;
    OffsetDateTime::from_unix_timestamp_nanos(nanos).ok()
}
