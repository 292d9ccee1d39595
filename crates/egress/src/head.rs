//! Parses the head of an HTTP/1 request, strictly: what two servers could read differently is
//! refused. Writes the head that is sent on. Reads whether the answer to it opens a WebSocket.

use crate::{refusal::Reason, target::Target};

/// The largest head in bytes.
pub(crate) const MAX_BYTES: usize = 16 * 1024;

pub(crate) const MAX_HEADERS: usize = 100;

/// Headers that belong to one connection, not to the request.
const HOP_BY_HOP: [&str; 8] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "upgrade",
    "http2-settings",
];

/// Headers that decide how a request is read. No `Connection` header can remove them.
const FRAMING: [&str; 3] = ["host", "content-length", "transfer-encoding"];

/// The head of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// As sent: an authority, an absolute URI or a path.
    pub(crate) uri: String,
    /// The minor version of HTTP/1.
    pub(crate) minor: u8,
    /// Names in lower case.
    pub(crate) headers: Vec<(String, Vec<u8>)>,
    pub(crate) body: BodyLength,
}

/// A request as it is sent on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Forwarded {
    pub(crate) head: Vec<u8>,
    pub(crate) body: BodyLength,
    /// Whether it asks for a WebSocket.
    pub(crate) asks_for_websocket: bool,
}

/// Where the body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BodyLength {
    /// After this many bytes.
    Bytes(u64),
    /// After the last chunk.
    Chunked,
}

impl Head {
    /// Parses a head and returns its length, `None` if bytes are missing.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, Reason> {
        let Some(length) = length(bytes) else {
            return if bytes.len() >= MAX_BYTES { Err(Reason::InvalidRequest) } else { Ok(None) };
        };
        let bytes = &bytes[..length];
        check_lines(bytes)?;
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        match request.parse(bytes) {
            Ok(httparse::Status::Complete(parsed)) if parsed == length => {}
            _ => return Err(Reason::InvalidRequest),
        }
        let (Some(method), Some(uri), Some(minor)) =
            (request.method, request.path, request.version)
        else {
            return Err(Reason::InvalidRequest);
        };
        // No spaces or bytes outside ASCII, which servers decode in different ways.
        if !uri.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Reason::InvalidRequest);
        }
        let headers: Vec<_> = request
            .headers
            .iter()
            .map(|header| (header.name.to_ascii_lowercase(), header.value.to_vec()))
            .collect();
        let body = body_length(&headers, minor)?;
        Ok(Some((
            Self { method: method.to_owned(), uri: uri.to_owned(), minor, headers, body },
            length,
        )))
    }

    /// Checks that the `Host` header names the target. Only HTTP/1.0 may omit it.
    pub(crate) fn check_host(&self, target: &Target) -> Result<(), Reason> {
        let mut hosts = self.values("host");
        match (hosts.next(), hosts.next()) {
            (None, _) if self.minor == 0 => Ok(()),
            (None, _) | (_, Some(_)) => Err(Reason::InvalidRequest),
            (Some(host), None) => match std::str::from_utf8(host) {
                Ok(host) if target.agrees_with_host_header(host) => Ok(()),
                _ => Err(Reason::HostMismatch),
            },
        }
    }

    pub(crate) fn has_host(&self) -> bool {
        self.values("host").next().is_some()
    }

    /// Whether the request asks for a WebSocket, and for nothing else. No other protocol can follow
    /// a request: what another one carries could name another host.
    pub(crate) fn asks_for_websocket(&self) -> bool {
        let mut upgrades = self.values("upgrade");
        let protocol = upgrades.next().filter(|_| upgrades.next().is_none());
        protocol.is_some_and(|protocol| protocol.eq_ignore_ascii_case(b"websocket"))
            && self.values("connection").any(|value| lists(value, "upgrade"))
            && self.values("sec-websocket-key").count() == 1
            && !self.is_hop_by_hop("sec-websocket-key")
            && (self.method.as_str(), self.minor, self.body) == ("GET", 1, BodyLength::Bytes(0))
    }

    pub(crate) fn values(&self, name: &str) -> impl Iterator<Item = &[u8]> {
        self.headers
            .iter()
            .filter(move |(found, _)| found == name)
            .map(|(_, value)| value.as_slice())
    }

    /// The request that the destination gets: its own path, no headers of this connection, and this
    /// header in place of the program's.
    pub(crate) fn forwarded(
        &self,
        target: &Target,
        path: &str,
        secret: Option<(&str, &str)>,
    ) -> Forwarded {
        let mut head = Vec::with_capacity(1024);
        let slash = if path.starts_with('/') || path == "*" { "" } else { "/" };
        let default_port = if secret.is_some() { 443 } else { 80 };
        head.extend_from_slice(
            format!("{} {slash}{path} HTTP/1.{}\r\n", self.method, self.minor).as_bytes(),
        );
        let host = target.url_host();
        let port =
            if target.port == default_port { String::new() } else { format!(":{}", target.port) };
        head.extend_from_slice(format!("host: {host}{port}\r\n").as_bytes());
        for (name, value) in &self.headers {
            if name != "host"
                && !self.is_hop_by_hop(name)
                && secret.is_none_or(|(secret, _)| secret != name)
            {
                head.extend_from_slice(name.as_bytes());
                head.extend_from_slice(b": ");
                head.extend_from_slice(value);
                head.extend_from_slice(b"\r\n");
            }
        }
        if let Some((name, value)) = secret {
            head.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
        }
        let asks_for_websocket = self.asks_for_websocket();
        head.extend_from_slice(match asks_for_websocket {
            true => b"connection: upgrade\r\nupgrade: websocket\r\n\r\n",
            false => b"connection: close\r\n\r\n",
        });
        Forwarded { head, body: self.body, asks_for_websocket }
    }

    fn is_hop_by_hop(&self, name: &str) -> bool {
        let is_listed = || self.values("connection").any(|value| lists(value, name));
        HOP_BY_HOP.contains(&name) || (!FRAMING.contains(&name) && is_listed())
    }
}

/// Whether a header's value has this word, between commas.
fn lists(value: &[u8], word: &str) -> bool {
    value
        .split(|&byte| byte == b',')
        .any(|found| found.trim_ascii().eq_ignore_ascii_case(word.as_bytes()))
}

/// Whether a response opens a WebSocket. `None` if bytes of its head are missing.
pub(crate) fn opens_websocket(bytes: &[u8]) -> Option<bool> {
    let Some(length) = length(bytes) else {
        // A response that is not valid is the program's to judge.
        return (bytes.len() >= MAX_BYTES).then_some(false);
    };
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let is_complete = matches!(response.parse(&bytes[..length]), Ok(httparse::Status::Complete(_)));
    let is_websocket = |header: &httparse::Header<'_>| {
        header.name.eq_ignore_ascii_case("upgrade")
            && header.value.eq_ignore_ascii_case(b"websocket")
    };
    let opens =
        is_complete && response.code == Some(101) && response.headers.iter().any(is_websocket);
    Some(opens)
}

/// The length of a head with its empty line.
fn length(bytes: &[u8]) -> Option<usize> {
    let within = &bytes[..bytes.len().min(MAX_BYTES)];
    memchr::memmem::find(within, b"\r\n\r\n").map(|at| at + 4)
}

/// Each line ends with CR LF, has neither of them nor NUL inside, and does not continue the line
/// before.
fn check_lines(bytes: &[u8]) -> Result<(), Reason> {
    let lines = bytes.strip_suffix(b"\r\n\r\n").unwrap_or(bytes);
    let mut rest = lines;
    loop {
        if matches!(rest.first(), None | Some(b' ' | b'\t' | b'\r' | b'\n')) {
            return Err(Reason::InvalidRequest);
        }
        let end = memchr::memmem::find(rest, b"\r\n");
        let line = &rest[..end.unwrap_or(rest.len())];
        if memchr::memchr3(b'\r', b'\n', 0, line).is_some() {
            return Err(Reason::InvalidRequest);
        }
        match end {
            Some(end) => rest = &rest[end + 2..],
            None => return Ok(()),
        }
    }
}

fn body_length(headers: &[(String, Vec<u8>)], minor: u8) -> Result<BodyLength, Reason> {
    let values = |name: &'static str| headers.iter().filter(move |(found, _)| found == name);
    let mut encodings = values("transfer-encoding");
    let mut lengths = values("content-length");
    match (encodings.next(), encodings.next(), lengths.next(), lengths.next()) {
        (None, _, None, _) => Ok(BodyLength::Bytes(0)),
        (None, _, Some((_, length)), None) => parse_length(length).map(BodyLength::Bytes),
        (Some((_, encoding)), None, None, _)
            if minor == 1 && encoding.eq_ignore_ascii_case(b"chunked") =>
        {
            Ok(BodyLength::Chunked)
        }
        _ => Err(Reason::InvalidRequest),
    }
}

fn parse_length(value: &[u8]) -> Result<u64, Reason> {
    let digits = std::str::from_utf8(value)
        .ok()
        .filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    digits.and_then(|digits| digits.parse().ok()).ok_or(Reason::InvalidRequest)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Option<(Head, usize)>, Reason> {
        Head::parse(text.as_bytes())
    }

    #[test]
    fn head_is_parsed_and_forwarded() {
        let text = "POST http://Example.com/a HTTP/1.1\r\nHost: example.com\r\nContent-Length: 3\r\n\
                    Proxy-Authorization: Basic eA==\r\nConnection: x-hop, content-length\r\nX-Hop: 1\r\n\
                    Upgrade: h2c\r\nAuthorization: mine\r\nAccept: */*\r\n\r\nabc";
        let (head, length) = parse(text).unwrap().unwrap();
        assert_eq!(length, text.len() - 3);
        assert_eq!(head.body, BodyLength::Bytes(3));
        let target = Target::from_authority("example.com:80", None).unwrap();
        assert_eq!(head.check_host(&target), Ok(()));
        let forwarded = String::from_utf8(head.forwarded(&target, "/a", None).head).unwrap();
        let expected = "POST /a HTTP/1.1\r\nhost: example.com\r\ncontent-length: 3\r\nauthorization: mine\r\n\
                        accept: */*\r\nconnection: close\r\n\r\n";
        assert_eq!(forwarded, expected);
        let secret = Some(("authorization", "Bearer s"));
        let forwarded = String::from_utf8(head.forwarded(&target, "", secret).head).unwrap();
        assert!(
            forwarded.starts_with("POST / HTTP/1.1\r\nhost: example.com:80\r\n"),
            "{forwarded}"
        );
        assert!(
            forwarded.contains("authorization: Bearer s\r\n") && !forwarded.contains("mine"),
            "{forwarded}"
        );
        for end in 0..length {
            assert_eq!(Head::parse(&text.as_bytes()[..end]), Ok(None));
        }
    }

    #[test]
    fn ambiguous_heads_are_refused() {
        let heads = [
            "GET / HTTP/1.1\nHost: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n\tb\r\n\r\n",
            "\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n",
            "\r\n\r\n",
            "GET / HTTP/1.1\r\nHost : a\r\n\r\n",
            "GET / HTTP/1.1\r\nHo st: a\r\n\r\n",
            "GET / HTTP/1.1\r\n: a\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: a\0\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: +1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 0x1\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length:\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            "GET / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n",
            "GET / HTTP/1.1\r\nTransfer-Encoding: \u{b}chunked\r\n\r\n",
            "GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
            "GET / HTTP/2.0\r\nHost: a\r\n\r\n",
            "PRI * HTTP/2.0\r\n\r\n",
            "GET /\r\n\r\n",
            "GET  / HTTP/1.1\r\n\r\n",
            "GET /a b HTTP/1.1\r\n\r\n",
            "GET /\u{e9} HTTP/1.1\r\n\r\n",
            "G@T / HTTP/1.1\r\n\r\n",
        ];
        for head in heads {
            assert_eq!(parse(head), Err(Reason::InvalidRequest), "{head:?}");
        }
        let control = "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n";
        assert!(parse(control).unwrap().is_some());
        assert_eq!(parse(&"x".repeat(MAX_BYTES)), Err(Reason::InvalidRequest), "no end");
    }

    #[test]
    fn host_header_must_be_one_and_agree() {
        let target = Target::from_authority("example.com:80", None).unwrap();
        let check = |headers: &str, minor: u8| {
            let text = format!("GET http://example.com/ HTTP/1.{minor}\r\n{headers}\r\n");
            parse(&text).unwrap().unwrap().0.check_host(&target)
        };
        assert_eq!(check("Host: example.com\r\n", 1), Ok(()));
        assert_eq!(check("", 0), Ok(()));
        assert_eq!(check("A: b\r\n", 1), Err(Reason::InvalidRequest));
        assert_eq!(
            check("Host: example.com\r\nHost: example.com\r\n", 1),
            Err(Reason::InvalidRequest)
        );
        for host in ["evil.com", "example.com:81", "", "example.com, evil.com", "a@example.com"] {
            assert_eq!(check(&format!("Host: {host}\r\n"), 1), Err(Reason::HostMismatch), "{host}");
        }
    }

    #[test]
    fn only_websockets_may_be_asked_for() {
        let target = Target::from_authority("a.test:80", None).unwrap();
        let forwarded = |text: &str| parse(text).unwrap().unwrap().0.forwarded(&target, "/", None);
        let key = "Sec-WebSocket-Key: eA==\r\n";
        let asks = format!(
            "GET / HTTP/1.1\r\nHost: a.test\r\nConnection: x, Upgrade\r\nX: y\r\nUpgrade: WebSocket\r\n{key}\r\n"
        );
        let control = forwarded(&asks);
        assert!(control.asks_for_websocket);
        let text = String::from_utf8(control.head).unwrap();
        assert!(text.ends_with("connection: upgrade\r\nupgrade: websocket\r\n\r\n"), "{text}");
        assert!(!text.contains("x: y"), "{text}");
        for (part, other) in [
            ("WebSocket\r\n", "h2c\r\n"),
            ("WebSocket\r\n", "websocket, h2c\r\n"),
            ("WebSocket\r\n", "websocket\r\nUpgrade: h2c\r\n"),
            ("x, Upgrade", "keep-alive"),
            ("x, Upgrade", "upgrade, sec-websocket-key"),
            ("GET", "POST"),
            ("HTTP/1.1", "HTTP/1.0"),
            (key, ""),
            (key, "Sec-WebSocket-Key: eA==\r\nContent-Length: 1\r\n"),
        ] {
            let request = forwarded(&asks.replace(part, other));
            let text = String::from_utf8(request.head).unwrap();
            assert!(!request.asks_for_websocket, "{other}");
            assert!(!text.contains("upgrade") && text.contains("connection: close"), "{text}");
        }
    }

    #[test]
    fn only_status_101_opens_a_websocket() {
        let response = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n";
        assert_eq!(opens_websocket(format!("{response}rest").as_bytes()), Some(true));
        for end in 0..response.len() {
            assert_eq!(opens_websocket(&response.as_bytes()[..end]), None);
        }
        for (part, other) in
            [("101", "200"), ("101", "426"), ("websocket", "h2c"), ("HTTP/1.1", "HTTP/1.1 ")]
        {
            let other = response.replace(part, other);
            assert_eq!(opens_websocket(other.as_bytes()), Some(false), "{other}");
        }
        assert_eq!(opens_websocket(&[b'x'; MAX_BYTES]), Some(false), "no end");
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Head::parse(&bytes);
            let _ = Head::parse(&[&bytes[..], b"\r\n\r\n"].concat());
            let _ = opens_websocket(&[b"HTTP/1.1 101 ", &bytes[..], b"\r\n\r\n"].concat());
        }

        #[test]
        fn changed_head_is_parsed_without_panic(at in 0usize..60, byte: u8) {
            let mut bytes = b"POST http://a.com/ HTTP/1.1\r\nHost: a.com\r\nContent-Length: 1\r\n\r\n".to_vec();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(Some((head, _))) = Head::parse(&bytes) {
                let target = Target::from_authority("a.com:80", None).unwrap();
                let forwarded = head.forwarded(&target, "/", None);
                prop_assert!(Head::parse(&forwarded.head).unwrap().is_some(), "what is sent on is valid");
            }
        }
    }
}
