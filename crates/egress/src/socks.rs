//! SOCKS5 on the proxy's listener (RFC 1928): `CONNECT` without authentication, by name or address.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use tokio::io::AsyncWriteExt;

use crate::{
    control::Via,
    read::Program,
    record::Record,
    refusal::{Reason, Refusal},
    sandbox::Sandbox,
    target::Target,
    tunnel::Tunnel,
};

/// The first byte of a client.
pub(crate) const VERSION: u8 = 5;

const NO_AUTHENTICATION: u8 = 0;
const NO_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;

/// Reply codes.
const SUCCEEDED: u8 = 0;
const GENERAL_FAILURE: u8 = 1;
const NOT_ALLOWED: u8 = 2;
const HOST_UNREACHABLE: u8 = 4;
const REFUSED: u8 = 5;
const COMMAND_NOT_SUPPORTED: u8 = 7;
pub(crate) const ADDRESS_TYPE_NOT_SUPPORTED: u8 = 8;

/// Serves one connection.
pub(crate) async fn serve(
    sandbox: &Arc<Sandbox>,
    mut program: Program,
    record: &mut Record,
) -> Result<(), Refusal> {
    record.via = Via::Socks;
    let offers_none = program.read(parse_greeting).await?;
    let method = if offers_none { NO_AUTHENTICATION } else { NO_METHOD };
    // A failure to write shows at the next read.
    let _ = program.stream.write_all(&[VERSION, method]).await;
    if !offers_none {
        return Err(Reason::InvalidRequest.into());
    }
    let request = program.read(parse_request).await?;
    let Program { mut stream, start, .. } = program;
    record.set_raw_host(&request.host);
    let opened = match request.target {
        Ok(target) => Tunnel::open(sandbox, target, record)
            .await
            .map_err(|refusal| (reply_code(refusal.reason), refusal)),
        Err((code, reason)) => Err((code, reason.into())),
    };
    match opened {
        Ok(tunnel) => {
            if stream.write_all(&reply(SUCCEEDED)).await.is_err() {
                return Ok(());
            }
            tunnel.run(sandbox, stream, start, record).await
        }
        Err((code, refusal)) => {
            // An error means that the program is gone.
            let _ = stream.write_all(&reply(code)).await;
            let _ = stream.shutdown().await;
            Err(refusal)
        }
    }
}

fn reply_code(reason: Reason) -> u8 {
    match reason {
        Reason::ResolveFailed | Reason::ConnectTimeout => HOST_UNREACHABLE,
        Reason::ConnectFailed | Reason::UpstreamRefused => REFUSED,
        Reason::InvalidTarget => GENERAL_FAILURE,
        _ => NOT_ALLOWED,
    }
}

/// A reply with no address.
fn reply(code: u8) -> [u8; 10] {
    [VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0]
}

/// Whether the client offers to go without authentication, and the length of its greeting.
pub(crate) fn parse_greeting(bytes: &[u8]) -> Result<Option<(bool, usize)>, Reason> {
    match *bytes {
        [] | [VERSION] => Ok(None),
        [VERSION, count, ref methods @ ..] => {
            let count = usize::from(count);
            Ok(methods
                .get(..count)
                .map(|methods| (methods.contains(&NO_AUTHENTICATION), 2 + count)))
        }
        _ => Err(Reason::InvalidRequest),
    }
}

/// A request for a connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// The host as sent.
    pub(crate) host: String,
    /// The target, or the reply code of a request that cannot be served.
    pub(crate) target: Result<Target, (u8, Reason)>,
}

pub(crate) fn parse_request(bytes: &[u8]) -> Result<Option<(Request, usize)>, Reason> {
    let (command, kind, rest) = match *bytes {
        [VERSION, command, 0, kind, ref rest @ ..] => (command, kind, rest),
        [VERSION, _, 0] | [VERSION, _] | [VERSION] | [] => return Ok(None),
        _ => return Err(Reason::InvalidRequest),
    };
    let (host, prefix, length) = match kind {
        1 => (rest.get(..4), 0, 4),
        4 => (rest.get(..16), 0, 16),
        3 => match *rest {
            [] => return Ok(None),
            [length, ref rest @ ..] => (rest.get(..usize::from(length)), 1, usize::from(length)),
        },
        _ => {
            let target = Err((ADDRESS_TYPE_NOT_SUPPORTED, Reason::InvalidRequest));
            return Ok(Some((Request { host: String::new(), target }, bytes.len())));
        }
    };
    let port = rest.get(prefix + length..prefix + length + 2);
    let (Some(host), Some(&[high, low])) = (host, port) else { return Ok(None) };
    let port = u16::from_be_bytes([high, low]);
    let (text, target) = parse_host(kind, host, port);
    let target = match command {
        CONNECT => target.map_err(|reason| (GENERAL_FAILURE, reason)),
        _ => Err((COMMAND_NOT_SUPPORTED, Reason::ProtocolNotSupported)),
    };
    Ok(Some((Request { host: text, target }, 4 + prefix + length + 2)))
}

fn parse_host(kind: u8, host: &[u8], port: u16) -> (String, Result<Target, Reason>) {
    let address = match (kind, host) {
        (1, &[a, b, c, d]) => Some(IpAddr::V4(Ipv4Addr::new(a, b, c, d))),
        (4, octets) => {
            <[u8; 16]>::try_from(octets).ok().map(|octets| IpAddr::V6(Ipv6Addr::from(octets)))
        }
        _ => None,
    };
    match address {
        Some(address) if port != 0 => {
            (address.to_string(), Ok(Target::from_address(address, port)))
        }
        Some(address) => (address.to_string(), Err(Reason::InvalidTarget)),
        None => {
            let text = String::from_utf8_lossy(host).into_owned();
            let target = std::str::from_utf8(host).map_err(|_| Reason::InvalidTarget);
            (text, target.and_then(|host| Target::from_host(host, port)))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn target(bytes: &[u8]) -> Result<Target, (u8, Reason)> {
        let (request, length) = parse_request(bytes).unwrap().unwrap();
        assert_eq!(length, bytes.len());
        for end in 0..bytes.len() {
            assert_eq!(parse_request(&bytes[..end]), Ok(None), "cut at {end}");
        }
        request.target
    }

    #[test]
    fn requests_are_parsed() {
        let parse = |text| Target::from_authority(text, None).unwrap();
        assert_eq!(target(b"\x05\x01\0\x03\x05A.com\x01\xbb"), Ok(parse("a.com:443")));
        assert_eq!(target(b"\x05\x01\0\x01\x01\x02\x03\x04\0\x50"), Ok(parse("1.2.3.4:80")));
        let v6 = b"\x05\x01\0\x04\x26\x06\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\0\x50";
        assert_eq!(target(v6), Ok(parse("[2606::1]:80")));
        assert_eq!(
            target(b"\x05\x02\0\x03\x05a.com\x01\xbb"),
            Err((7, Reason::ProtocolNotSupported)),
            "bind"
        );
        assert_eq!(
            target(b"\x05\x03\0\x01\x01\x02\x03\x04\0\x50"),
            Err((7, Reason::ProtocolNotSupported)),
            "udp"
        );
        assert_eq!(
            target(b"\x05\x01\0\x03\x05a.com\0\0"),
            Err((1, Reason::InvalidTarget)),
            "port 0"
        );
        assert_eq!(target(b"\x05\x01\0\x03\x05a\0com\0\x50"), Err((1, Reason::InvalidTarget)));
        assert_eq!(target(b"\x05\x01\0\x03\x05127.1\0\x50"), Err((1, Reason::InvalidTarget)));
        assert_eq!(target(b"\x05\x01\0\x03\0\0\x50"), Err((1, Reason::InvalidTarget)), "empty");
        let (request, _) = parse_request(b"\x05\x01\0\x02").unwrap().unwrap();
        assert_eq!(request.target, Err((8, Reason::InvalidRequest)));
        assert_eq!(parse_request(b"\x04\x01"), Err(Reason::InvalidRequest), "SOCKS4");
    }

    #[test]
    fn greeting_must_offer_no_authentication() {
        assert_eq!(parse_greeting(b"\x05\x02\x02\0"), Ok(Some((true, 4))));
        assert_eq!(parse_greeting(b"\x05\x01\x02"), Ok(Some((false, 3))));
        assert_eq!(parse_greeting(b"\x05\x02\x02"), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_greeting(&bytes);
            let _ = parse_request(&bytes);
            let _ = parse_request(&[&[5, 1, 0][..], &bytes].concat());
        }
    }
}
