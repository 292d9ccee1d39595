//! The keys that detach from a run's terminal, such as `ctrl-p,ctrl-q`.

use std::{fmt, str::FromStr};

/// `ctrl-p,ctrl-q`.
const DEFAULT: [u8; 2] = [16, 17];

/// The bytes that the keys send. Empty if no keys detach.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DetachKeys(Vec<u8>);

impl Default for DetachKeys {
    fn default() -> Self {
        Self(DEFAULT.to_vec())
    }
}

impl FromStr for DetachKeys {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let keys = text.split(',').map(str::trim).filter(|_| !text.trim().is_empty());
        keys.map(key).collect::<Result<_, _>>().map(Self)
    }
}

impl fmt::Display for DetachKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, byte) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            match byte {
                0..0x20 => {
                    write!(f, "{comma}ctrl-{}", char::from(byte + b'@').to_ascii_lowercase())?
                }
                _ => write!(f, "{comma}{}", char::from(*byte))?,
            }
        }
        Ok(())
    }
}

/// The byte of one key: a character, or `ctrl-` with a letter or one of `@[\]^_`.
fn key(name: &str) -> Result<u8, String> {
    let control = name.strip_prefix("ctrl-").map(str::as_bytes);
    match (control, name.as_bytes()) {
        (Some([letter @ (b'a'..=b'z' | b'@' | b'['..=b'_')]), _) => {
            Ok(letter.to_ascii_uppercase() - b'@')
        }
        (None, [character]) if character.is_ascii_graphic() => Ok(*character),
        _ => Err(format!("{name:?} is not a key (use keys such as ctrl-p,ctrl-q or ctrl-a,d)")),
    }
}

/// Looks for the keys in what a user types.
#[derive(Debug)]
pub(crate) struct KeyScanner {
    keys: Vec<u8>,
    /// Typed bytes that may be the start of the keys.
    pending: Vec<u8>,
}

impl KeyScanner {
    pub(crate) fn new(keys: &DetachKeys) -> Self {
        Self { keys: keys.0.clone(), pending: Vec::new() }
    }

    /// Returns the input for the command, and whether the keys were typed. What follows them is
    /// dropped.
    pub(crate) fn scan(&mut self, typed: &[u8]) -> (Vec<u8>, bool) {
        let mut input = Vec::with_capacity(typed.len());
        for byte in typed {
            self.pending.push(*byte);
            while !self.keys.starts_with(&self.pending) {
                input.push(self.pending.remove(0));
            }
            if !self.keys.is_empty() && self.pending.len() == self.keys.len() {
                self.pending.clear();
                return (input, true);
            }
        }
        (input, false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(text: &str) -> DetachKeys {
        text.parse().unwrap()
    }

    #[test]
    fn keys_are_named_like_in_docker() {
        assert_eq!(keys("ctrl-p,ctrl-q").0, [16, 17]);
        assert_eq!(keys("ctrl-a, d").0, [1, b'd']);
        assert_eq!(keys("ctrl-@,ctrl-[,ctrl-_").0, [0, 27, 31]);
        assert!(keys("").0.is_empty());
        assert_eq!(DetachKeys::default(), keys("ctrl-p,ctrl-q"));
        for text in ["ctrl-p,ctrl-q", "ctrl-a,d", "ctrl-@,ctrl-[,ctrl-_", ""] {
            assert_eq!(keys(text).to_string(), text);
        }
        for wrong in ["ctrl-", "ctrl-1", "ctrl-P", "pq", "ctrl-p,,q", "ctrl-p ctrl-q", "é"] {
            assert!(wrong.parse::<DetachKeys>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn keys_are_found_across_reads() {
        let mut scanner = KeyScanner::new(&keys("a,a,b"));
        assert_eq!(scanner.scan(b"xa"), (b"x".to_vec(), false));
        assert_eq!(scanner.scan(b"a"), (Vec::new(), false));
        assert_eq!(scanner.scan(b"ay"), (b"aaay".to_vec(), false));
        assert_eq!(scanner.scan(b"aaabz"), (b"a".to_vec(), true));
    }

    #[test]
    fn no_keys_pass_everything() {
        let mut scanner = KeyScanner::new(&keys(""));
        assert_eq!(scanner.scan(b"\x10\x11q"), (b"\x10\x11q".to_vec(), false));
    }
}
