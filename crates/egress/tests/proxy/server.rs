//! Servers that programs reach through the proxy. They count their connections.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer},
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

/// A server and the number of connections that it accepted.
#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    accepted: Arc<AtomicUsize>,
}

impl Server {
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Serves each connection with this function.
    pub(crate) async fn start<F>(
        address: &str,
        serve: impl Fn(TcpStream) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind(address).await.unwrap();
        let server = Self { address: listener.local_addr().unwrap(), accepted: Arc::default() };
        let accepted = server.accepted.clone();
        let accept = async move {
            while let Ok((stream, _)) = listener.accept().await {
                accepted.fetch_add(1, Ordering::SeqCst);
                #[allow(clippy::disallowed_methods)]
                tokio::spawn(serve(stream));
            }
        };
        #[allow(clippy::disallowed_methods)]
        tokio::spawn(accept);
        server
    }

    /// An HTTP server that answers every request with this body and the head it got. It keeps
    /// connections open for further requests.
    pub(crate) async fn http(address: &str, body: &'static str) -> Self {
        Self::start(address, move |mut stream| async move { serve_http(&mut stream, body).await })
            .await
    }

    /// A server that sends back what it gets.
    pub(crate) async fn echo(address: &str) -> Self {
        let echo = |mut stream: TcpStream| async move {
            let (mut from, mut to) = stream.split();
            let _ = tokio::io::copy(&mut from, &mut to).await;
        };
        Self::start(address, echo).await
    }

    /// An HTTP server over TLS.
    pub(crate) async fn https(
        address: &str,
        authority: &TestAuthority,
        name: &str,
        body: &'static str,
    ) -> Self {
        let acceptor = TlsAcceptor::from(authority.server_config(name));
        let serve = move |stream| {
            let acceptor = acceptor.clone();
            async move {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    serve_http(&mut stream, body).await;
                }
            }
        };
        Self::start(address, serve).await
    }
}

async fn serve_http(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), body: &str) {
    let mut request = Vec::new();
    loop {
        while !request.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => request.push(byte),
                Err(_) => return,
            }
        }
        let body = format!("{body}\n{}", String::from_utf8_lossy(&request));
        let close = body.contains("connection: close");
        let connection = if close { "close" } else { "keep-alive" };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: {connection}\r\n\r\n",
            body.len()
        );
        if stream.write_all((head + &body).as_bytes()).await.is_err()
            || stream.flush().await.is_err()
        {
            return;
        }
        if close {
            let _ = stream.shutdown().await;
            return;
        }
        request.clear();
    }
}

/// An authority that signs the certificates of test servers.
pub(crate) struct TestAuthority(CertifiedIssuer<'static, KeyPair>);

impl TestAuthority {
    pub(crate) fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    fn server_config(&self, name: &str) -> Arc<ServerConfig> {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap();
        let config =
            config.with_no_client_auth().with_single_cert(vec![certificate.der().clone()], key);
        Arc::new(config.unwrap())
    }
}

/// The configuration of a client that trusts these authorities.
pub(crate) fn client_config(pem: &str) -> Arc<ClientConfig> {
    use rustls::pki_types::{CertificateDer, pem::PemObject};
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap();
    Arc::new(config.with_root_certificates(roots).with_no_client_auth())
}
