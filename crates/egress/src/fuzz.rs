//! Properties of what programs send to the proxy: heads and bodies of HTTP, names in TLS, queries
//! and SOCKS. The entry points of the fuzz targets panic if one does not hold.

#![allow(clippy::expect_used, clippy::missing_panics_doc, reason = "a panic is a finding")]

use std::{
    fmt::Debug,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use hickory_proto::op::{Message, MessageType};
use rustls::server::Acceptor;

use crate::{
    body::Body,
    client_hello::{self, handshake_message, server_name},
    dns::{self, MAX_QUERY, Question},
    head::{self, BodyLength, Head, MAX_HEADERS},
    refusal::Reason,
    socks::{ADDRESS_TYPE_NOT_SUPPORTED, VERSION, parse_greeting, parse_request},
    target::{Target, parse_absolute_uri, parse_name},
};

/// The largest reply that every resolver accepts in a datagram.
const MAX_DATAGRAM: usize = 512;
/// The headers that the proxy adds, and the spaces after names.
const MAX_ADDED: usize = 512;

/// Sizes of the pieces in which an input arrives. A long one comes in few, as each is parsed from
/// the start.
fn piece_sizes(length: usize) -> [usize; 3] {
    let small = if length <= 512 { 1 } else { length / 8 };
    [small, length / 16 + 3, length.max(1)]
}

/// The first result of a parser for bytes that arrive in pieces; `Ok(None)` if all are not enough.
fn read<T, E>(
    bytes: &[u8],
    size: usize,
    parse: impl Fn(&[u8]) -> Result<Option<T>, E>,
) -> Result<Option<T>, E> {
    let ends = (0..bytes.len()).step_by(size).chain([bytes.len()]);
    ends.map(|end| parse(&bytes[..end]))
        .find(|parsed| !matches!(parsed, Ok(None)))
        .unwrap_or(Ok(None))
}

/// A parser of messages with a length reads the same however they arrive, and whatever follows.
fn check_parser<T: Debug + PartialEq>(
    bytes: &[u8],
    parse: impl Fn(&[u8]) -> Result<Option<(T, usize)>, Reason>,
) -> Option<(T, usize)> {
    let whole = parse(bytes);
    for size in piece_sizes(bytes.len()) {
        assert_eq!(read(bytes, size, &parse), whole, "in pieces of {size}");
    }
    if let Ok(Some((_, length))) = &whole {
        assert_eq!(parse(&bytes[..*length]), whole, "what follows matters");
    }
    whole.ok().flatten()
}

/// The head of a request and its body, and the head of a response.
pub fn http_head(bytes: &[u8]) {
    if let Some((head, length)) = check_parser(bytes, Head::parse) {
        assert!(length <= head::MAX_BYTES);
        check_body(head.body, &bytes[length..]);
        if let Ok((target, path)) = parse_absolute_uri(&head.uri)
            && head.check_host(&target).is_ok()
        {
            check_target(&target);
            assert!(head.values("host").count() <= 1, "servers could take either");
            check_forwarded(&head, length, &target, path);
        }
    }
    let opens = head::opens_websocket(bytes);
    for size in piece_sizes(bytes.len()) {
        let found = read(bytes, size, |bytes| Ok::<_, Reason>(head::opens_websocket(bytes)));
        assert_eq!(found, Ok(opens), "in pieces of {size}");
    }
    assert!(opens != Some(true) || bytes.starts_with(b"HTTP/1."));
}

/// A request that is sent on says the same as the request, and nothing about this connection.
fn check_forwarded(head: &Head, length: usize, target: &Target, path: &str) {
    for secret in [None, Some(("authorization", "Bearer secret"))] {
        let forwarded = head.forwarded(target, path, secret);
        assert!(forwarded.head.len() <= length + MAX_ADDED);
        if forwarded.head.len() > head::MAX_BYTES || head.headers.len() + 4 > MAX_HEADERS {
            continue;
        }
        let parsed = Head::parse(&forwarded.head).expect("valid").expect("complete");
        let (again, end) = parsed;
        assert_eq!(end, forwarded.head.len());
        assert_eq!((&again.method, again.minor, again.body), (&head.method, head.minor, head.body));
        assert_eq!(again.check_host(target), Ok(()));
        assert_eq!(again.values("connection").count(), 1);
        assert_eq!(again.values("proxy-authorization").count(), 0);
        assert_eq!(again.asks_for_websocket(), forwarded.asks_for_websocket);
        match secret {
            None => assert_eq!(again.forwarded(target, &again.uri, None), forwarded),
            Some((name, value)) => {
                assert!(
                    again.values(name).eq([value.as_bytes()]),
                    "one secret, and not the program's"
                );
            }
        }
    }
}

/// The end of a body is the same however it arrives, and whatever follows.
fn check_body(length: BodyLength, bytes: &[u8]) {
    let read = |bytes: &[u8], size: usize| -> Result<(usize, bool), Reason> {
        let mut body = Body::new(length);
        let mut total = 0;
        for piece in bytes.chunks(size.max(1)) {
            total += body.read(piece)?;
        }
        Ok((total, body.is_complete()))
    };
    let whole = read(bytes, bytes.len());
    for size in piece_sizes(bytes.len()) {
        assert_eq!(read(bytes, size), whole, "in pieces of {size}");
    }
    match whole {
        Ok((total, true)) => {
            assert_eq!(read(&bytes[..total], bytes.len()), whole);
            assert!(total == 0 || read(&bytes[..total - 1], bytes.len()) == Ok((total - 1, false)));
        }
        Ok((total, false)) => assert_eq!(total, bytes.len()),
        Err(_) => {}
    }
}

/// The first bytes of a TLS client.
pub fn client_hello(bytes: &[u8]) {
    let name = server_name(bytes);
    for size in piece_sizes(bytes.len()) {
        assert_eq!(read(bytes, size, server_name), name, "in pieces of {size}");
    }
    let accepted = accepted_name(bytes);
    let Ok(Some(name)) = name else {
        // A server may take what is refused here, as it never gets that.
        return;
    };
    assert_eq!(
        server_name(&[bytes, &[22, 3, 1, 0, 0]].concat()),
        Ok(Some(name.clone())),
        "what follows"
    );
    let body = handshake_message(bytes).expect("valid").expect("complete");
    let length = u32::try_from(body.len()).expect("bounded").to_be_bytes();
    let message = [&[1], &length[1..], &body].concat();
    for size in [1, 100, 10_000] {
        let bytes = records(&message, size);
        if bytes.len() <= client_hello::MAX_BYTES {
            assert_eq!(server_name(&bytes), Ok(Some(name.clone())), "in records of {size}");
        }
    }
    // The other way round, a server may ignore a name, such as an address.
    if let Some(Some(accepted)) = accepted {
        assert_eq!(
            name.map(|name| name.to_ascii_lowercase()),
            Some(accepted),
            "a server reads another name"
        );
    }
}

/// A handshake message in records of this size.
pub(crate) fn records(message: &[u8], size: usize) -> Vec<u8> {
    let record = |part: &[u8]| {
        let length = u16::try_from(part.len()).expect("bounded").to_be_bytes();
        [&[22, 3, 1], &length[..], part].concat()
    };
    message.chunks(size).flat_map(record).collect()
}

/// The name that a server reads, if it takes the hello.
fn accepted_name(mut bytes: &[u8]) -> Option<Option<String>> {
    let mut acceptor = Acceptor::default();
    while !bytes.is_empty() {
        acceptor.read_tls(&mut bytes).ok()?;
        if let Some(accepted) = acceptor.accept().ok()? {
            return Some(accepted.client_hello().server_name().map(str::to_ascii_lowercase));
        }
    }
    None
}

/// A query of a program, and all replies to it.
pub fn dns_query(bytes: &[u8]) {
    let bytes = &bytes[..bytes.len().min(MAX_QUERY)];
    match dns::parse_query(bytes) {
        Ok(question) => check_replies(bytes, &question),
        Err(Some(reply)) => {
            let reply = check_reply(bytes, &reply);
            assert!(reply.answers.is_empty());
        }
        Err(None) => {
            assert!(bytes.len() < 12 || bytes[2] & 0x80 != 0, "only what is not a query gets none")
        }
    }
}

fn check_replies(query: &[u8], question: &Question) {
    let addresses = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
    for looked_up in [Err(()), Ok(None), Ok(Some(addresses[0])), Ok(Some(addresses[1]))] {
        let reply = dns::reply(question.clone(), looked_up).expect("a query has a reply");
        let reply = check_reply(query, &reply);
        let [asked] = reply.queries.as_slice() else { panic!("not one question: {reply:?}") };
        assert_eq!(
            (asked.name().to_ascii(), asked.query_type()),
            (question.owner.to_ascii(), question.kind)
        );
        let answers: Vec<_> = reply.answers.iter().map(|answer| answer.data.ip_addr()).collect();
        assert_eq!(answers, looked_up.ok().flatten().map(Some).into_iter().collect::<Vec<_>>());
    }
    if let Ok(name) = parse_name(&question.owner.to_ascii()) {
        assert_eq!(parse_name(&name), Ok(name));
    }
}

/// Only the question comes back, and a reply is small: it cannot be used to flood another host.
fn check_reply(query: &[u8], reply: &[u8]) -> Message {
    assert!(reply.len() <= MAX_DATAGRAM, "{} bytes", reply.len());
    assert_eq!(reply[..2], query[..2], "the id");
    let reply = Message::from_vec(reply).expect("a valid reply");
    assert_eq!(reply.metadata.message_type, MessageType::Response);
    assert!(reply.authorities.is_empty() && reply.additionals.is_empty() && reply.edns.is_none());
    reply
}

/// The greeting and the request of a SOCKS client.
pub fn socks(bytes: &[u8]) {
    let greeting = check_parser(bytes, parse_greeting);
    let rest = greeting.map_or(bytes, |(_, length)| &bytes[length..]);
    let Some((request, length)) = check_parser(rest, parse_socks_request) else { return };
    assert!(length <= 4 + 1 + 255 + 2);
    assert!(request.host.len() <= 255 * char::REPLACEMENT_CHARACTER.len_utf8());
    let Ok(target) = request.target else { return };
    check_target(&target);
    let host = target.host.as_bytes();
    let address = match target.address {
        Some(IpAddr::V4(address)) => [&[1][..], &address.octets()].concat(),
        Some(IpAddr::V6(address)) => [&[4][..], &address.octets()].concat(),
        None => [&[3, u8::try_from(host.len()).expect("bounded")], host].concat(),
    };
    let canonical = [&[VERSION, 1, 0], &address[..], &target.port.to_be_bytes()].concat();
    let (again, end) = parse_request(&canonical).expect("valid").expect("complete");
    assert_eq!((again.target, end), (Ok(target), canonical.len()));
}

/// A request whose kind of address is unknown has no end: the length is that of its start.
fn parse_socks_request(bytes: &[u8]) -> Result<Option<(crate::socks::Request, usize)>, Reason> {
    let parsed = parse_request(bytes)?;
    Ok(parsed.map(|(request, length)| match request.target {
        Err((ADDRESS_TYPE_NOT_SUPPORTED, _)) => (request, 4),
        _ => (request, length),
    }))
}

/// A target is canonical: it parses back from its own text.
fn check_target(target: &Target) {
    let text = format!("{}:{}", target.url_host(), target.port);
    assert_eq!(Target::from_authority(&text, None).as_ref(), Ok(target));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_head_holds_for_mutations() {
        codelia_fuzz::check("http_head", 2000, http_head);
    }

    #[test]
    fn client_hello_holds_for_mutations() {
        codelia_fuzz::check("client_hello", 2000, client_hello);
    }

    #[test]
    fn dns_query_holds_for_mutations() {
        codelia_fuzz::check("dns_query", 10_000, dns_query);
    }

    #[test]
    fn socks_holds_for_mutations() {
        codelia_fuzz::check("socks", 20_000, socks);
    }
}
