//! Connects through the installation's upstream proxy. It gets addresses that were checked, never
//! names.

use std::net::{IpAddr, SocketAddr};

use base64::{Engine, engine::general_purpose::STANDARD};
use secrecy::{ExposeSecret, SecretString};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    config::{self, UpstreamProtocol},
    refusal::Reason,
};

/// The largest answer to `CONNECT`.
const MAX_ANSWER: usize = 8 * 1024;

/// A proxy that connections leave through.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) config: config::Upstream,
    pub(crate) login: Option<Login>,
}

/// A user name and password.
#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) username: String,
    pub(crate) password: SecretString,
}

impl Login {
    /// The value of a header with basic credentials.
    pub(crate) fn basic(&self) -> SecretString {
        let pair = format!("{}:{}", self.username, self.password.expose_secret());
        format!("Basic {}", STANDARD.encode(pair)).into()
    }
}

impl Upstream {
    /// Asks the proxy for a connection. The caller limits the time.
    pub(crate) async fn connect(&self, destination: SocketAddr) -> Result<TcpStream, Reason> {
        let mut stream =
            TcpStream::connect(self.config.address).await.map_err(|_| Reason::ConnectFailed)?;
        let connected = match self.config.protocol {
            UpstreamProtocol::Socks5 => self.socks(&mut stream, destination).await,
            UpstreamProtocol::Connect => self.http(&mut stream, destination).await,
        };
        match connected {
            Ok(true) => Ok(stream),
            Ok(false) => Err(Reason::UpstreamRefused),
            Err(_) => Err(Reason::ConnectFailed),
        }
    }

    async fn socks(
        &self,
        stream: &mut TcpStream,
        destination: SocketAddr,
    ) -> std::io::Result<bool> {
        let method = if self.login.is_some() { 2 } else { 0 };
        stream.write_all(&[5, 1, method]).await?;
        let mut answer = [0; 2];
        stream.read_exact(&mut answer).await?;
        if answer != [5, method] {
            return Ok(false);
        }
        if let Some(login) = &self.login {
            let part = |text: &str| {
                [&[u8::try_from(text.len()).unwrap_or(u8::MAX)], text.as_bytes()].concat()
            };
            let username = part(&login.username);
            let password = part(login.password.expose_secret());
            stream.write_all(&[&[1][..], &username, &password].concat()).await?;
            stream.read_exact(&mut answer).await?;
            if answer != [1, 0] {
                return Ok(false);
            }
        }
        let address = match destination.ip() {
            IpAddr::V4(address) => [&[1][..], &address.octets()].concat(),
            IpAddr::V6(address) => [&[4][..], &address.octets()].concat(),
        };
        stream
            .write_all(&[&[5, 1, 0][..], &address, &destination.port().to_be_bytes()].concat())
            .await?;
        let mut head = [0; 4];
        stream.read_exact(&mut head).await?;
        // The address that the proxy connects from.
        let length = match head[3] {
            1 => 4,
            4 => 16,
            3 => usize::from(stream.read_u8().await?),
            _ => return Ok(false),
        };
        stream.read_exact(&mut vec![0; length + 2]).await?;
        Ok(head[..3] == [5, 0, 0])
    }

    async fn http(&self, stream: &mut TcpStream, destination: SocketAddr) -> std::io::Result<bool> {
        let mut request = format!("CONNECT {destination} HTTP/1.1\r\nHost: {destination}\r\n");
        if let Some(login) = &self.login {
            request
                .push_str(&format!("Proxy-Authorization: {}\r\n", login.basic().expose_secret()));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).await?;
        // Byte by byte: what follows the head belongs to the destination.
        let mut answer = Vec::new();
        while !answer.ends_with(b"\r\n\r\n") {
            if answer.len() >= MAX_ANSWER {
                return Ok(false);
            }
            answer.push(stream.read_u8().await?);
        }
        let mut headers = [httparse::EMPTY_HEADER; 64];
        let mut response = httparse::Response::new(&mut headers);
        Ok(response.parse(&answer).is_ok() && matches!(response.code, Some(200..=299)))
    }
}
