//! Makes connections to destinations: resolves once, checks every address, connects to one that was
//! checked.

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::{
    net::TcpStream,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    address::AddressRules,
    refusal::{Reason, Refusal},
    resolver::Resolver,
    target::Target,
    upstream::Upstream,
};

/// Addresses of one name that are tried.
const MAX_ATTEMPTS: usize = 4;
/// For each address but the last.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connects to targets that the rules allow.
#[derive(Debug)]
pub(crate) struct Connector {
    pub(crate) addresses: AddressRules,
    pub(crate) resolver: Resolver,
    pub(crate) upstream: Option<Upstream>,
    /// By the id of the tenant.
    pub(crate) tenant_upstreams: HashMap<String, Upstream>,
    pub(crate) timeout: Duration,
}

impl Connector {
    /// Connects for a tenant and returns the address.
    pub(crate) async fn connect(
        &self,
        target: &Target,
        tenant: &str,
    ) -> Result<(TcpStream, IpAddr), Refusal> {
        let deadline = Instant::now() + self.timeout;
        let upstream = self.tenant_upstreams.get(tenant).or(self.upstream.as_ref());
        let resolved = timeout_at(deadline, self.checked_addresses(target)).await;
        let addresses = resolved.map_err(|_| Reason::ResolveFailed)??;
        let mut last = Refusal::from(Reason::ConnectFailed);
        for &address in addresses.iter().take(MAX_ATTEMPTS) {
            let destination = SocketAddr::new(address, target.port);
            let attempt = timeout(ATTEMPT_TIMEOUT, connect_to(destination, upstream));
            match timeout_at(deadline, attempt).await {
                Ok(Ok(Ok(stream))) => return Ok((stream, address)),
                Ok(Ok(Err(reason))) => last = Refusal::at(reason, address),
                Ok(Err(_)) => last = Refusal::at(Reason::ConnectTimeout, address),
                Err(_) => return Err(Refusal::at(Reason::ConnectTimeout, address)),
            }
        }
        Err(last)
    }

    /// All addresses of the target. One that is not allowed refuses all of them: a name that leads
    /// to both is an attempt to get at the other.
    async fn checked_addresses(&self, target: &Target) -> Result<Vec<IpAddr>, Refusal> {
        let addresses = match target.address {
            Some(address) => vec![address],
            None => self.resolver.resolve(&target.host).await?,
        };
        for &address in &addresses {
            self.addresses.check(address).map_err(|reason| Refusal::at(reason, address))?;
        }
        Ok(addresses)
    }
}

async fn connect_to(
    destination: SocketAddr,
    upstream: Option<&Upstream>,
) -> Result<TcpStream, Reason> {
    let stream = match upstream {
        Some(upstream) => upstream.connect(destination).await?,
        None => TcpStream::connect(destination).await.map_err(|_| Reason::ConnectFailed)?,
    };
    stream.set_nodelay(true).map_err(|_| Reason::ConnectFailed)?;
    Ok(stream)
}
