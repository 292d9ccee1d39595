//! Why a server cannot be used: what answers at its address instead of a Codelia API, or why it
//! rejects the key.

use std::{io, time::Duration};

use anyhow::anyhow;
use secrecy::ExposeSecret;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tonic::{Code, Status, transport::Uri};
use tonic_types::StatusExt;

use super::Server;

const TIMEOUT: Duration = Duration::from_secs(2);
/// The first bytes of an HTTP/2 client: the preface and empty settings.
const HTTP2_START: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Type of a SETTINGS frame, the first that an HTTP/2 server sends.
const SETTINGS_FRAME: u8 = 4;
/// Start and length of a secret key.
const KEY_PREFIX: &str = "cdl_";
const KEY_BYTES: usize = 47;

/// The server rejected the key. Replaces the message of the server.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct KeyRejected(String);

/// Adds what was expected and found to an error of the connection or the key. Returns others as
/// they are.
pub(super) async fn explain(server: &Server, error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref::<Status>() {
        Some(status) if status.code() == Code::Unauthenticated => {
            return error.context(KeyRejected(rejected_key(server)));
        }
        Some(status) if is_typed(status) => return error,
        Some(_) => {}
        None if error.is::<tonic::transport::Error>() => {}
        None => return error,
    }
    let unimplemented =
        error.downcast_ref::<Status>().filter(|status| status.code() == Code::Unimplemented);
    let problem = match (unimplemented, server.uri()) {
        (Some(status), _) => Some(format!(
            "it answers, but not as a Codelia API of this version: {}",
            status.message()
        )),
        (None, Ok(uri)) => problem(&uri).await,
        (None, Err(_)) => None,
    };
    let Server { endpoint, endpoint_source, .. } = server;
    match problem {
        Some(problem) => anyhow!("cannot use {endpoint} ({endpoint_source}): {problem}"),
        None if error.is::<Status>() => error,
        None => error.context(format!("cannot use {endpoint} ({endpoint_source})")),
    }
}

/// Whether Codelia sent the status, and not the transport or another server.
fn is_typed(status: &Status) -> bool {
    status.get_details_error_info().is_some()
}

fn rejected_key(server: &Server) -> String {
    let Server { endpoint, key_source, .. } = server;
    let key = server.key.expose_secret();
    if !key.starts_with(KEY_PREFIX) || key.len() != KEY_BYTES {
        return format!(
            "API key rejected: expected {KEY_PREFIX} and {} characters, found something else in {key_source}",
            KEY_BYTES - KEY_PREFIX.len()
        );
    }
    format!(
        "API key rejected: expected a key of the installation at {endpoint}, but it does not know the one \
         from {key_source}, or it was revoked (create one there with `codelia keys create`)"
    )
}

/// The kind of server at an address.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Http1,
    Http2,
    Tls,
    Unknown,
}

/// Returns what is wrong with a server that cannot be called; `None` if that is not known.
async fn problem(uri: &Uri) -> Option<String> {
    let is_tls = uri.scheme_str() == Some("https");
    let host = uri.host()?.trim_start_matches('[').trim_end_matches(']');
    let port = uri.port_u16().unwrap_or(if is_tls { 443 } else { 80 });
    let hint = match uri.port_u16() {
        Some(_) => String::new(),
        None => format!(" (no port given: {port} is the default)"),
    };
    let authority = uri.authority()?;
    Some(match probe(host, port).await {
        Err(error) => format!(
            "nothing accepts connections on {host}:{port}{hint}: {}; expected a Codelia API \
             (start one with `codelia up`)",
            reason(&error)
        ),
        Ok(Found::Http1) => format!(
            "expected a Codelia API (gRPC), found a server on port {port}{hint} that speaks only HTTP/1.1"
        ),
        Ok(Found::Tls) if !is_tls => {
            format!("expected a server without TLS, found one with TLS: use https://{authority}")
        }
        Ok(Found::Http2) if is_tls => {
            format!("expected a server with TLS, found one without: use http://{authority}")
        }
        Ok(Found::Unknown) => format!(
            "expected a Codelia API (gRPC), found a server on port {port}{hint} that speaks neither \
             HTTP/2 nor TLS"
        ),
        Ok(Found::Tls | Found::Http2) => return None,
    })
}

fn reason(error: &io::Error) -> String {
    if error.raw_os_error().is_some() { error.kind().to_string() } else { error.to_string() }
}

/// Connects and finds out which protocol the server speaks.
async fn probe(host: &str, port: u16) -> io::Result<Found> {
    let answer = exchange(host, port, HTTP2_START).await?;
    if answer.starts_with(b"HTTP/") {
        return Ok(Found::Http1);
    }
    if answer.get(3) == Some(&SETTINGS_FRAME) && answer[0] == 0 {
        return Ok(Found::Http2);
    }
    let answer = exchange(host, port, &client_hello()).await?;
    // An alert or a handshake record.
    Ok(if matches!(answer[..], [0x15 | 0x16, 3, ..]) { Found::Tls } else { Found::Unknown })
}

/// Sends bytes on a new connection and returns the first bytes of the answer: none if the server
/// closes the connection or does not answer in time.
async fn exchange(host: &str, port: u16, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = timeout(TIMEOUT, TcpStream::connect((host, port)))
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "timed out"))??;
    let mut answer = vec![0; 16];
    let exchanged = timeout(TIMEOUT, async {
        stream.write_all(bytes).await?;
        let mut count = 0;
        while count < 5 {
            match stream.read(&mut answer[count..]).await? {
                0 => break,
                read => count += read,
            }
        }
        Ok::<_, io::Error>(count)
    });
    let count = exchanged.await.unwrap_or(Ok(0)).unwrap_or(0);
    answer.truncate(count);
    Ok(answer)
}

/// A minimal TLS 1.2 ClientHello. A TLS server answers with a handshake record or an alert.
fn client_hello() -> Vec<u8> {
    const BODY: [u8; 41] = {
        let mut body = [0; 41];
        // Version; 32 random bytes and an empty session id follow.
        body[0] = 3;
        body[1] = 3;
        // One cipher suite, ECDHE_RSA_WITH_AES_128_GCM_SHA256, and no compression.
        body[36] = 2;
        body[37] = 0xc0;
        body[38] = 0x2f;
        body[39] = 1;
        body
    };
    let length = BODY.len() as u8;
    let record = [0x16, 3, 1, 0, length + 4, 1, 0, 0, length];
    [&record[..], &BODY].concat()
}
