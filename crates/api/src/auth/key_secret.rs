//! The secrets of keys: how they are made, recognized and hashed.

use http::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};

const PREFIX: &str = "cdl_";
const ENCODED_LEN: usize = 43;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Generates the secret of a key and the hash that the store keeps.
#[must_use]
pub fn generate_secret() -> (String, [u8; 32]) {
    let secret = format!("{PREFIX}{}", encode(&rand::random()));
    let hash = hash_secret(&secret);
    (secret, hash)
}

/// Whether the text has the form of a generated secret.
#[must_use]
pub fn is_secret(text: &str) -> bool {
    let is_encoded =
        |text: &str| text.len() == ENCODED_LEN && text.bytes().all(|byte| ALPHABET.contains(&byte));
    text.strip_prefix(PREFIX).is_some_and(is_encoded)
}

/// The hash that the store keeps. The secret has 256 random bits, so a plain hash is enough.
#[must_use]
pub fn hash_secret(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// URL-safe base64 without padding.
fn encode(bytes: &[u8; 32]) -> String {
    let symbol = |bits: u32| char::from(ALPHABET[(bits & 63) as usize]);
    let mut text = String::with_capacity(ENCODED_LEN);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte))
            << (8 * (3 - group.len()));
        text.extend((0..=group.len()).map(|at| symbol(bits >> (18 - 6 * at))));
    }
    text
}

/// The secret of an `authorization: Bearer …` header; `None` if it is malformed.
pub(crate) fn bearer_secret(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let encoded = secret.strip_prefix(PREFIX)?;
    (scheme.eq_ignore_ascii_case("bearer") && encoded.len() == ENCODED_LEN).then_some(secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn generated_secret_is_accepted_and_unique() {
        let (secret, hash) = generate_secret();
        assert_eq!(bearer_secret(&headers(&format!("Bearer {secret}"))), Some(secret.as_str()));
        assert_eq!(hash_secret(&secret), hash);
        assert_ne!(generate_secret().0, secret);
    }

    #[test]
    fn encoding_is_url_safe_base64() {
        assert_eq!(encode(&[0; 32]), "A".repeat(43));
        assert_eq!(encode(&[0xff; 32]), format!("{}8", "_".repeat(42)));
        assert_eq!(
            encode(b"abcdefghijklmnopqrstuvwxyz012345"),
            "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXowMTIzNDU"
        );
    }

    #[test]
    fn malformed_key_is_not_looked_up() {
        for bad in
            ["", "Bearer", "Bearer x", "Basic cdl_", &format!("Basic cdl_{}", "A".repeat(43))]
        {
            assert_eq!(bearer_secret(&headers(bad)), None, "{bad}");
        }
    }
}
