//! The transport of a connection: HTTP, with or without TLS.

use std::{convert::Infallible, error::Error, fmt, future::Future, io, sync::Arc};

use futures::{StreamExt, stream};
use http::{Request, Response};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        crypto::ring,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};
use tonic::{
    body::Body,
    transport::{Server, server::Connected},
};
use tower::Service;

/// How connections are served.
#[derive(Clone)]
pub struct Transport {
    server: Server,
    tls: Option<TlsAcceptor>,
}

/// Why a certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The text is not PEM.
    #[error("not valid PEM")]
    Pem(#[source] rustls::pki_types::pem::Error),
    /// The certificate and the key cannot be used together.
    #[error("unusable certificate or key")]
    Certificate(#[source] rustls::Error),
}

impl Transport {
    /// A transport with TLS for HTTP/2 and HTTP/1.1. The TLS of tonic negotiates HTTP/2 alone.
    ///
    /// # Errors
    /// If the certificate or the key is unusable.
    pub fn with_tls(server: Server, cert_pem: &[u8], key_pem: &[u8]) -> Result<Self, TlsError> {
        let chain =
            CertificateDer::pem_slice_iter(cert_pem).collect::<Result<_, _>>().map_err(TlsError::Pem)?;
        let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(TlsError::Pem)?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
            .map_err(TlsError::Certificate)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { server, tls: Some(Arc::new(config).into()) })
    }

    /// Serves one connection until it is closed; `until` asks to close it politely.
    pub(crate) async fn serve<S, IO>(
        self,
        service: S,
        io: IO,
        until: impl Future<Output = ()>,
    ) -> Result<(), Box<dyn Error + Send + Sync>>
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
        S::Future: Send + 'static,
        IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
    {
        match self.tls {
            Some(tls) => serve_http(self.server, service, tls.accept(io).await?, until).await,
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
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
    IO: AsyncRead + AsyncWrite + Connected + Unpin + Send + 'static,
{
    // The stream must not end: its end would close the connection.
    let incoming = stream::iter([io::Result::Ok(io)]).chain(stream::pending());
    Ok(server.serve_with_incoming_shutdown(service, incoming, until).await?)
}

impl From<Server> for Transport {
    /// A transport with the TLS of the server, if it has any.
    fn from(server: Server) -> Self {
        Self { server, tls: None }
    }
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").finish_non_exhaustive()
    }
}
