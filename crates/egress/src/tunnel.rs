//! A connection to a destination, however the program asked for it. Checks that what the program
//! sends first names the same host.

use std::sync::Arc;

use tokio::{io::AsyncWriteExt, net::TcpStream, time::timeout};

use crate::{
    client_hello,
    exchange::copy_exchange,
    head::{Forwarded, Head},
    read::{ReadError, Replayed, read_until},
    record::Record,
    refusal::{Reason, Refusal},
    relay::{Traffic, copy_sockets},
    sandbox::{Authorized, Direction, Sandbox},
    target::{Target, parse_name},
    terminate,
};

/// Ports on which programs speak first. On others the destination may, so nothing is waited for.
const CLIENT_FIRST: [u16; 2] = [80, 443];
/// The longest line that is compared with a request line.
const MAX_LINE: usize = 8 * 1024;

/// A connection that was authorized and made.
#[derive(Debug)]
pub(crate) struct Tunnel {
    pub(crate) target: Target,
    pub(crate) destination: TcpStream,
    authorized: Authorized,
}

impl Tunnel {
    /// Decides about the target and connects to it.
    pub(crate) async fn open(
        sandbox: &Arc<Sandbox>,
        target: Target,
        record: &mut Record,
    ) -> Result<Self, Refusal> {
        record.set_target(&target);
        let authorized = sandbox.authorize(&target).await?;
        record.rule = Some(authorized.rule.clone());
        let (destination, address) =
            sandbox.proxy.connector.connect(&target, &sandbox.tenant).await?;
        record.address = Some(address);
        Ok(Self { target, destination, authorized })
    }

    /// Copies what the program sends, of which `start` was read already, and what it gets, until
    /// both sides have ended.
    pub(crate) async fn run(
        self,
        sandbox: &Sandbox,
        mut program: TcpStream,
        start: Vec<u8>,
        record: &Record,
    ) -> Result<(), Refusal> {
        let Self { target, destination, authorized } = self;
        let result = tokio::select! {
            result = forward(sandbox, &target, &mut program, start, destination, record) => result,
            reason = authorized.revoked() => Err(reason.into()),
        };
        reset_if_cut(&program, &result);
        result
    }

    /// Sends one request on.
    pub(crate) async fn exchange(
        mut self,
        sandbox: &Sandbox,
        program: &mut TcpStream,
        request: &Forwarded,
        start: &[u8],
        record: &Record,
    ) -> Result<(), Refusal> {
        let traffic = Traffic::new(sandbox, record);
        let exchange = copy_exchange(&traffic, program, &mut self.destination, request, start);
        let result = tokio::select! {
            result = traffic.limit(exchange) => result.map_err(Refusal::from),
            reason = self.authorized.revoked() => Err(reason.into()),
        };
        reset_if_cut(program, &result);
        result
    }
}

/// Has a connection that was cut off end with a reset. An ordinary end could pass for the end of
/// what the destination sent.
fn reset_if_cut(program: &TcpStream, result: &Result<(), Refusal>) {
    if matches!(result, Err(Refusal { reason: Reason::RulesChanged | Reason::ByteLimit, .. })) {
        // This fails only if the connection has ended.
        let _ = program.set_zero_linger();
    }
}

/// The protocol of the first bytes of a program.
enum Protocol {
    Tls,
    /// An HTTP/1 request, with the length of its head.
    Http(Box<Head>, usize),
    Other,
}

async fn forward(
    sandbox: &Sandbox,
    target: &Target,
    program: &mut TcpStream,
    mut start: Vec<u8>,
    mut destination: TcpStream,
    record: &Record,
) -> Result<(), Refusal> {
    let traffic = Traffic::new(sandbox, record);
    let protocol = if speaks_first(target, program, &destination, &start, sandbox).await? {
        match inspect(sandbox, target, program, &mut start).await {
            Ok(protocol) => protocol,
            Err(ReadError::Refused(refusal)) => {
                // Without it the program sees an ordinary end.
                let _ = program.set_zero_linger();
                return Err(refusal);
            }
            // Bytes that were sent before the end are of no use.
            Err(ReadError::Ended) => return Ok(()),
        }
    } else {
        Protocol::Other
    };
    match protocol {
        Protocol::Tls
            if let Some(credential) = sandbox.proxy.credential(&sandbox.rules(), target) =>
        {
            let program = Replayed { start, stream: program };
            terminate::serve(&sandbox.proxy, &traffic, target, program, destination, &credential)
                .await
        }
        Protocol::Http(head, length) => {
            let forwarded = head.forwarded(target, &head.uri, None);
            let exchange =
                copy_exchange(&traffic, program, &mut destination, &forwarded, &start[length..]);
            Ok(traffic.limit(exchange).await?)
        }
        Protocol::Tls | Protocol::Other => {
            let transfer = async {
                traffic.count(Direction::Sent, start.len())?;
                destination.write_all(&start).await?;
                drop(start);
                copy_sockets(&traffic, program, &destination).await
            };
            Ok(traffic.limit(transfer).await?)
        }
    }
}

/// Waits until one side speaks. Returns whether it is the program.
async fn speaks_first(
    target: &Target,
    program: &TcpStream,
    destination: &TcpStream,
    start: &[u8],
    sandbox: &Sandbox,
) -> Result<bool, Refusal> {
    if !start.is_empty() {
        return Ok(true);
    }
    let idle = sandbox.limits().idle_timeout;
    let mut program_byte = [0];
    let mut destination_byte = [0];
    let first = async {
        tokio::select! {
            biased;
            _ = program.peek(&mut program_byte) => true,
            _ = destination.peek(&mut destination_byte), if !CLIENT_FIRST.contains(&target.port) => false,
        }
    };
    timeout(idle, first).await.map_err(|_| Reason::HeaderTimeout.into())
}

/// Reads the first bytes of the program and checks the host that they name.
async fn inspect(
    sandbox: &Sandbox,
    target: &Target,
    program: &mut TcpStream,
    start: &mut Vec<u8>,
) -> Result<Protocol, ReadError> {
    let limit = sandbox.proxy.config.options.header_timeout;
    read_until(program, start, limit, |bytes| {
        if bytes.is_empty() {
            return Ok(None);
        }
        if client_hello::starts_with_tls(bytes) {
            return match client_hello::server_name(bytes) {
                Ok(Some(name)) => {
                    check_server_name(target, name.as_deref()).map(|()| Some(Protocol::Tls))
                }
                Ok(None) => Ok(None),
                Err(client_hello::Malformed) => Err(Reason::InvalidRequest),
            };
        }
        match is_http(bytes) {
            None if bytes.len() > MAX_LINE => Err(Reason::ProtocolNotSupported),
            None => Ok(None),
            Some(true) => match Head::parse(bytes)? {
                None => Ok(None),
                Some((head, length)) => {
                    check_plain_request(&head, target)?;
                    Ok(Some(Protocol::Http(Box::new(head), length)))
                }
            },
            // On the port of HTTP nothing else is served, so that nothing can pass for something
            // else.
            Some(false) if target.port == 80 => Err(Reason::ProtocolNotSupported),
            Some(false) => Ok(Some(Protocol::Other)),
        }
    })
    .await
}

/// A request to the destination itself, not to a proxy there.
fn check_plain_request(head: &Head, target: &Target) -> Result<(), Reason> {
    if head.method.eq_ignore_ascii_case("CONNECT")
        || !(head.uri.starts_with('/') || head.uri == "*")
    {
        return Err(Reason::InvalidRequest);
    }
    head.check_host(target)
}

/// A name must be sent and be that of the target. Programs send none for addresses.
fn check_server_name(target: &Target, name: Option<&str>) -> Result<(), Reason> {
    match (name, target.address) {
        (None, Some(_)) => Ok(()),
        (None, None) => Err(Reason::SniMissing),
        (Some(name), None) if parse_name(name).is_ok_and(|name| name == target.host) => Ok(()),
        (Some(_), _) => Err(Reason::SniMismatch),
    }
}

/// Whether the first line ends like a request line of HTTP. `None` if it has no end yet. Empty
/// lines before it do not count, since servers skip them; the request is refused later.
fn is_http(bytes: &[u8]) -> Option<bool> {
    let text = bytes.trim_ascii_start();
    let end = text.iter().position(|byte| !matches!(byte, b'\t' | b' '..=b'~' | 0x80..));
    match end {
        None => None,
        Some(end) => {
            let line = text[..end].trim_ascii_end();
            let version = line.len().checked_sub(8).map(|at| &line[at..]);
            Some(version.is_some_and(|version| version.starts_with(b"HTTP/")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_is_recognized_by_its_first_line() {
        let http: [&[u8]; 6] = [
            b"GET / HTTP/1.1\r\n",
            b"\r\n\r\nGET / HTTP/1.1\r\n",
            b"GET / HTTP/1.0\n",
            b"PRI * HTTP/2.0\r\n",
            b"x y HTTP/1.1\0",
            b"GET /\xff HTTP/1.1 \r\n",
        ];
        for bytes in http {
            assert_eq!(is_http(bytes), Some(true), "{bytes:?}");
        }
        let other: [&[u8]; 5] = [
            b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
            b"EHLO a\r\n",
            b"AMQP\0\0\x09\x01",
            b"\0\0\0\x08",
            b"a\n",
        ];
        for bytes in other {
            assert_eq!(is_http(bytes), Some(false), "{bytes:?}");
        }
        assert_eq!(is_http(b"GET / HTT"), None);
    }

    #[test]
    fn server_name_must_be_the_target() {
        let name = Target::from_authority("a.example.com:443", None).unwrap();
        let address = Target::from_authority("1.1.1.1:443", None).unwrap();
        assert_eq!(check_server_name(&name, Some("a.example.com")), Ok(()));
        assert_eq!(check_server_name(&name, Some("A.Example.com")), Ok(()));
        assert_eq!(check_server_name(&name, Some("b.example.com")), Err(Reason::SniMismatch));
        assert_eq!(check_server_name(&name, Some("")), Err(Reason::SniMismatch));
        assert_eq!(check_server_name(&name, None), Err(Reason::SniMissing));
        assert_eq!(check_server_name(&address, None), Ok(()));
        assert_eq!(check_server_name(&address, Some("a.example.com")), Err(Reason::SniMismatch));
    }
}
