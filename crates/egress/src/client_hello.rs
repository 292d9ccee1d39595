//! Reads the server name of a TLS ClientHello (RFC 8446, RFC 6066) without answering it.
//!
//! With Encrypted ClientHello only the outer name is visible. Programs send the extension with
//! random content too, so its presence says nothing.

/// The largest ClientHello in bytes, with its record headers.
pub(crate) const MAX_BYTES: usize = 16 * 1024;

const RECORD_HANDSHAKE: u8 = 22;
const HANDSHAKE_CLIENT_HELLO: u8 = 1;
const EXTENSION_SERVER_NAME: u16 = 0;
const NAME_TYPE_HOST: u8 = 0;

/// Not a valid ClientHello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Whether the first byte of a connection begins a TLS handshake.
pub(crate) fn starts_with_tls(bytes: &[u8]) -> bool {
    bytes.first() == Some(&RECORD_HANDSHAKE)
}

/// Reads the server name, `Some(None)` if there is none. `None` means that bytes are missing.
pub(crate) fn server_name(bytes: &[u8]) -> Result<Option<Option<String>>, Malformed> {
    // The result does not depend on how much of it arrives at once.
    let within = &bytes[..bytes.len().min(MAX_BYTES)];
    let Some(message) = handshake_message(within)? else {
        return if bytes.len() >= MAX_BYTES { Err(Malformed) } else { Ok(None) };
    };
    parse_hello(&mut Reader(&message)).map(Some)
}

/// Joins the records that the first handshake message is in. Returns its body.
pub(crate) fn handshake_message(mut bytes: &[u8]) -> Result<Option<Vec<u8>>, Malformed> {
    let mut message = Vec::new();
    loop {
        if let [kind, a, b, c, ..] = *message {
            let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if kind != HANDSHAKE_CLIENT_HELLO || length > MAX_BYTES {
                return Err(Malformed);
            }
            if let Some(body) = message.get(4..4 + length) {
                return Ok(Some(body.to_vec()));
            }
        }
        match *bytes {
            [kind, major, ..] if kind != RECORD_HANDSHAKE || major != 3 => return Err(Malformed),
            [_, _, _, a, b, ref rest @ ..] => {
                let length = usize::from(u16::from_be_bytes([a, b]));
                // Empty records would let a message take any number of them.
                if length == 0 {
                    return Err(Malformed);
                }
                let Some(fragment) = rest.get(..length) else { return Ok(None) };
                message.extend_from_slice(fragment);
                bytes = &rest[length..];
            }
            _ => return Ok(None),
        }
    }
}

fn parse_hello(hello: &mut Reader<'_>) -> Result<Option<String>, Malformed> {
    // Version and random.
    hello.take(2 + 32)?;
    // Session id, cipher suites, compression methods.
    hello.vector(1)?;
    hello.vector(2)?;
    hello.vector(1)?;
    if hello.0.is_empty() {
        return Ok(None);
    }
    let mut extensions = Reader(hello.vector(2)?);
    if !hello.0.is_empty() {
        return Err(Malformed);
    }
    let mut name = None;
    while !extensions.0.is_empty() {
        let kind = extensions.number(2)?;
        let content = extensions.vector(2)?;
        if kind == usize::from(EXTENSION_SERVER_NAME) {
            // A second one could be the one that the server reads.
            if name.is_some() {
                return Err(Malformed);
            }
            name = Some(parse_names(content)?);
        }
    }
    Ok(name)
}

/// The list must have one name, as no other kind than host names exists.
fn parse_names(content: &[u8]) -> Result<String, Malformed> {
    let mut content = Reader(content);
    let mut list = Reader(content.vector(2)?);
    let kind = list.number(1)?;
    let name = list.vector(2)?;
    if kind != usize::from(NAME_TYPE_HOST) || !list.0.is_empty() || !content.0.is_empty() {
        return Err(Malformed);
    }
    String::from_utf8(name.to_vec()).map_err(|_| Malformed)
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed)?;
        self.0 = rest;
        Ok(taken)
    }

    /// A big-endian number of this many bytes.
    fn number(&mut self, bytes: usize) -> Result<usize, Malformed> {
        Ok(self.take(bytes)?.iter().fold(0, |number, &byte| number << 8 | usize::from(byte)))
    }

    /// Bytes after their number, which itself has `bytes` bytes.
    fn vector(&mut self, bytes: usize) -> Result<&'a [u8], Malformed> {
        let length = self.number(bytes)?;
        self.take(length)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use rustls::{ClientConfig, ClientConnection, RootCertStore, pki_types::ServerName};

    use super::*;
    use crate::fuzz::records;

    /// The first flight of a real client.
    pub(crate) fn hello(name: &'static str) -> Vec<u8> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let mut client =
            ClientConnection::new(Arc::new(config), ServerName::try_from(name).unwrap()).unwrap();
        let mut bytes = Vec::new();
        client.write_tls(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn server_name_is_read() {
        let bytes = hello("files.example.com");
        assert_eq!(server_name(&bytes), Ok(Some(Some("files.example.com".to_owned()))));
        assert_eq!(server_name(&hello("192.0.2.1")), Ok(Some(None)), "no name for an address");
        for size in [1, 7, 100] {
            let bytes = records(&bytes[5..], size);
            assert_eq!(
                server_name(&bytes),
                Ok(Some(Some("files.example.com".to_owned()))),
                "records of {size}"
            );
        }
        for end in 0..bytes.len() {
            assert_eq!(server_name(&bytes[..end]), Ok(None), "cut at {end}");
        }
    }

    #[test]
    fn malformed_hello_is_refused() {
        let bytes = hello("files.example.com");
        let mut other_message = bytes.clone();
        other_message[5] = 2;
        assert_eq!(server_name(&other_message), Err(Malformed));
        assert_eq!(server_name(&[22, 3, 1, 0, 0]), Err(Malformed), "empty record");
        assert_eq!(server_name(&[22, 2, 1]), Err(Malformed), "SSL 2");
        let at = bytes.windows(5).position(|window| window == b"files").unwrap();
        let mut invalid_text = bytes;
        invalid_text[at] = 0xff;
        assert_eq!(server_name(&invalid_text), Err(Malformed));
    }

    /// A message with these extensions.
    fn message(extensions: &[(u16, &[u8])]) -> Vec<u8> {
        let number = |length: usize| u16::try_from(length).unwrap().to_be_bytes();
        let extension = |(kind, content): &(u16, &[u8])| {
            [&kind.to_be_bytes()[..], &number(content.len()), content].concat()
        };
        let extensions: Vec<u8> = extensions.iter().flat_map(extension).collect();
        let body =
            [&[3; 34][..], &[0, 0, 2, 0x13, 1, 1, 0], &number(extensions.len()), &extensions]
                .concat();
        [&[HANDSHAKE_CLIENT_HELLO, 0], &number(body.len())[..], &body].concat()
    }

    #[test]
    fn second_server_name_is_refused() {
        let name: &[u8] = b"\0\x04\0\0\x01a";
        let read = |extensions: &[(u16, &[u8])]| server_name(&records(&message(extensions), 1000));
        assert_eq!(
            read(&[(21, b""), (EXTENSION_SERVER_NAME, name)]),
            Ok(Some(Some("a".to_owned())))
        );
        let twice = [(EXTENSION_SERVER_NAME, name), (EXTENSION_SERVER_NAME, name)];
        assert_eq!(read(&twice), Err(Malformed));
        let list: &[u8] = b"\0\x08\0\0\x01a\0\0\x01b";
        assert_eq!(read(&[(EXTENSION_SERVER_NAME, list)]), Err(Malformed));
    }

    #[test]
    fn limit_is_same_however_much_arrives_at_once() {
        let message = message(&[(21, &[0; MAX_BYTES - 1000])]);
        assert_eq!(server_name(&records(&message, 100)), Ok(Some(None)), "control");
        let bytes = records(&message, 50);
        assert!(bytes.len() > MAX_BYTES);
        assert_eq!(server_name(&bytes[..MAX_BYTES]), Err(Malformed));
        assert_eq!(server_name(&bytes), Err(Malformed), "all at once");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _ = server_name(&bytes);
            let _ = server_name(&[&[22, 3, 1, 1, 0, 1, 0, 0, 252][..], &bytes].concat());
        }

        #[test]
        fn changed_hello_is_parsed_without_panic(at in 0usize..200, byte: u8) {
            let mut bytes = hello("files.example.com");
            let at = at % bytes.len();
            bytes[at] = byte;
            let _ = server_name(&bytes);
        }
    }
}
