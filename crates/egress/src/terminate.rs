//! Terminates the TLS of a host with credentials: reads one request, adds the secret, and sends it
//! on over a connection that is verified.

use rustls::pki_types::ServerName;
use secrecy::ExposeSecret;
use tokio::{io::AsyncWriteExt, net::TcpStream, time::timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::{
    answer::answer,
    credentials::Credential,
    exchange::copy_exchange,
    head::Head,
    proxy::Proxy,
    read::{ReadError, Replayed, read_until},
    refusal::{Reason, Refusal},
    relay::Traffic,
    target::Target,
};

/// Serves one request of a program that began a TLS handshake.
pub(crate) async fn serve(
    proxy: &Proxy,
    traffic: &Traffic<'_>,
    target: &Target,
    program: Replayed<'_>,
    destination: TcpStream,
    credential: &Credential,
) -> Result<(), Refusal> {
    let Some(tls) = &proxy.tls else { return Err(Reason::TlsFailed.into()) };
    let limit = proxy.config.options.header_timeout;
    let server_config = tls.authority.server_config(&target.host).map_err(|error| {
        tracing::error!(host = target.host, %error, "cannot make a certificate");
        Reason::TlsFailed
    })?;
    let handshakes = async {
        let name = ServerName::try_from(target.host.clone()).map_err(|_| Reason::InvalidTarget)?;
        // The destination first: the program learns nothing if it is not the right one.
        let destination = TlsConnector::from(tls.client.clone()).connect(name, destination).await;
        let destination = destination.map_err(|_| Reason::TlsFailed)?;
        let program = TlsAcceptor::from(server_config).accept(program).await;
        Ok::<_, Reason>((program.map_err(|_| Reason::TlsFailed)?, destination))
    };
    let (mut program, mut destination) =
        timeout(limit, handshakes).await.map_err(|_| Reason::HeaderTimeout)??;
    let mut start = Vec::new();
    let parse = |bytes: &[u8]| match Head::parse(bytes)? {
        None => Ok(None),
        Some((head, _)) if !(head.uri.starts_with('/') || head.uri == "*") => {
            Err(Reason::InvalidRequest)
        }
        Some((head, length)) => head.check_host(target).map(|()| Some((head, length))),
    };
    let (head, length) = match read_until(&mut program, &mut start, limit, parse).await {
        Ok(request) => request,
        Err(ReadError::Ended) => return Ok(()),
        Err(ReadError::Refused(refusal)) => {
            // An error means that the program is gone.
            let _ = program.write_all(&answer(refusal.reason, Some(target))).await;
            let _ = program.shutdown().await;
            return Err(refusal);
        }
    };
    let secret = Some((credential.header.as_str(), credential.value.expose_secret()));
    let forwarded = head.forwarded(target, &head.uri, secret);
    let exchange =
        copy_exchange(traffic, &mut program, &mut destination, &forwarded, &start[length..]);
    Ok(traffic.limit(exchange).await?)
}
