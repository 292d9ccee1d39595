//! The transport of a connection: HTTP, with or without TLS.

use std::{error::Error, future::Future, io, sync::Arc};

use futures::{StreamExt, stream};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::transport::{Server, server::Connected};

use crate::{HttpService, TlsIdentity};

/// How connections are served.
#[derive(Debug, Clone)]
pub struct Transport {
    server: Server,
    tls: Option<Arc<TlsIdentity>>,
}

impl Transport {
    /// A transport with TLS. The TLS of tonic negotiates HTTP/2 alone, and never another
    /// certificate.
    #[must_use]
    pub fn with_tls(server: Server, identity: Arc<TlsIdentity>) -> Self {
        Self { server, tls: Some(identity) }
    }

    /// Serves one connection until it is closed; `until` asks to close it politely.
    pub(crate) async fn serve<S, IO>(
        self,
        service: S,
        io: IO,
        until: impl Future<Output = ()>,
    ) -> Result<(), Box<dyn Error + Send + Sync>>
    where
        S: HttpService,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        match self.tls {
            Some(tls) => {
                serve_http(self.server, service, tls.acceptor().accept(io).await?, until).await
            }
            None => serve_http(self.server, service, io, until).await,
        }
    }
}

async fn serve_http<S, IO>(
    server: Server,
    service: S,
    io: IO,
    until: impl Future<Output = ()>,
) -> Result<(), Box<dyn Error + Send + Sync>>
where
    S: HttpService,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    // The stream must not end: its end would close the connection.
    let incoming = stream::iter([io::Result::Ok(io)]).chain(stream::pending());
    Ok(server.serve_with_incoming_shutdown(service, incoming, until).await?)
}

impl From<Server> for Transport {
    /// A transport without TLS.
    fn from(server: Server) -> Self {
        Self { server, tls: None }
    }
}
