//! Properties of the messages on the control socket. The entry point of the fuzz target panics if
//! one does not hold.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a panic is a finding")]

use std::fmt::Debug;

use serde::{Serialize, de::DeserializeOwned};

use crate::{
    Decoder, Egress, OverlayRequest, Report, Request, RestrictRequest, ZygoteRequest, encode,
};

/// Bytes that one side of the protocol sends, as each kind of message.
pub fn init_protocol(bytes: &[u8]) {
    check::<Request>(bytes);
    check::<Report>(bytes);
    check::<ZygoteRequest>(bytes);
    check::<OverlayRequest>(bytes);
    check::<RestrictRequest>(bytes);
    check::<Egress>(bytes);
}

/// Messages are the same however they arrive, and are what is encoded for them.
fn check<T: DeserializeOwned + Serialize + PartialEq + Debug>(bytes: &[u8]) {
    let whole = read::<T>(bytes, bytes.len().max(1));
    for size in [bytes.len() / 256 + 1, bytes.len() / 16 + 3] {
        assert_eq!(read::<T>(bytes, size), whole, "in pieces of {size}");
    }
    let (messages, _) = whole;
    assert!(messages.len() <= bytes.len() / 4, "a message has a header");
    let encoded: Vec<u8> =
        messages.iter().flat_map(|message| encode(message).expect("short")).collect();
    assert_eq!(read::<T>(&encoded, encoded.len().max(1)), (messages, None));
}

/// The messages in bytes that arrive in pieces, and the error that ends them.
fn read<T: DeserializeOwned>(bytes: &[u8], size: usize) -> (Vec<T>, Option<String>) {
    let mut decoder = Decoder::default();
    let mut messages = Vec::new();
    for piece in bytes.chunks(size) {
        decoder.push(piece);
        loop {
            match decoder.next_message() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(format!("{error:?}"))),
            }
        }
    }
    (messages, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn init_protocol_holds_for_mutations() {
        codelia_fuzz::check("init_protocol", 2000, init_protocol);
    }
}
