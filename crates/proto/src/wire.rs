//! Values whose type in a message differs from the one in Rust.

use std::time::Duration;

use crate::{
    duration_to_proto,
    error::{InvalidField, integer},
    time::read_duration,
};

/// A value of a policy or of limits that is sent as a `W`.
pub(crate) trait Wire<W>: Sized {
    /// Converts a received value. An error names `field`.
    fn from_wire(field: &str, wire: W) -> Result<Self, InvalidField>;
    /// Converts the value to send it.
    fn to_wire(&self) -> W;
}

impl Wire<Option<i64>> for Option<u64> {
    fn from_wire(field: &str, wire: Option<i64>) -> Result<Self, InvalidField> {
        let amount = |wire| {
            u64::try_from(wire).map_err(|_| InvalidField::new(field, "must not be negative"))
        };
        wire.map(amount).transpose()
    }

    /// An amount above `i64::MAX` arrives as a negative number and is refused there.
    fn to_wire(&self) -> Option<i64> {
        self.map(u64::cast_signed)
    }
}

impl Wire<Option<i32>> for Option<u32> {
    fn from_wire(field: &str, wire: Option<i32>) -> Result<Self, InvalidField> {
        wire.map(|wire| integer(field, wire)).transpose()
    }

    fn to_wire(&self) -> Option<i32> {
        self.map(u32::cast_signed)
    }
}

impl Wire<Option<prost_types::Duration>> for Option<Duration> {
    fn from_wire(field: &str, wire: Option<prost_types::Duration>) -> Result<Self, InvalidField> {
        wire.map(|wire| read_duration(field, &wire)).transpose()
    }

    fn to_wire(&self) -> Option<prost_types::Duration> {
        self.map(duration_to_proto)
    }
}
