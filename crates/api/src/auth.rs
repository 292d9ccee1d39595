//! Who calls: a key becomes a caller on every request, so that a revoked one ends at once.
//! The gate stands before every method of ours; a new method cannot be forgotten.

use std::{
    collections::HashMap,
    convert::Infallible,
    fmt,
    num::NonZeroU32,
    sync::{Arc, Mutex, PoisonError},
    task::{Context as Poller, Poll},
};

use codelia_store::{Caller, Scope, Store};
use codelia_types::TenantId;
use futures::future::BoxFuture;
use governor::{
    DefaultDirectRateLimiter, Quota, RateLimiter,
    clock::{Clock, DefaultClock},
};
use http::{HeaderMap, Request, Response, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use tonic::{Extensions, Status, body::Body};
use tower::{Layer, Service};

use crate::status::ApiError;

const PREFIX: &str = "cdl_";
const ENCODED_LEN: usize = 43;
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// Makes a key's secret and the hash under which it is stored.
#[must_use]
pub fn generate_secret() -> (String, [u8; 32]) {
    let secret = format!("{PREFIX}{}", encode(&rand::random()));
    let hash = hash_secret(&secret);
    (secret, hash)
}

/// The hash under which a secret is stored. The secret has 256 random bits, so a plain hash is enough.
#[must_use]
pub fn hash_secret(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// URL-safe base64 without padding.
fn encode(bytes: &[u8; 32]) -> String {
    let symbol = |bits: u32| char::from(ALPHABET[(bits & 63) as usize]);
    let mut text = String::with_capacity(ENCODED_LEN);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        text.extend((0..=group.len()).map(|at| symbol(bits >> (18 - 6 * at))));
    }
    text
}

/// The secret of an `authorization: Bearer …` header, if it has the form of one.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, secret) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let encoded = secret.strip_prefix(PREFIX)?;
    (scheme.eq_ignore_ascii_case("bearer") && encoded.len() == ENCODED_LEN).then_some(secret)
}

/// The caller that the gate let in.
pub(crate) fn caller(extensions: &Extensions) -> Result<Caller, ApiError> {
    extensions.get::<Caller>().cloned().ok_or(ApiError::Unauthenticated)
}

/// Whether the caller's key has the scope.
pub(crate) fn has(caller: &Caller, scope: Scope) -> bool {
    caller.scopes.contains(&scope)
}

/// Fails unless the caller's key has the scope.
pub(crate) fn require(caller: &Caller, scope: Scope) -> Result<(), ApiError> {
    if has(caller, scope) { Ok(()) } else { Err(ApiError::Denied { scope: scope.as_str() }) }
}

/// Fails unless the caller may use the service that the path names.
fn require_for_path(caller: &Caller, path: &str) -> Result<(), ApiError> {
    let is_of = |service: &str| path.strip_prefix(service).is_some_and(|rest| rest.starts_with('/'));
    if is_of("/codelia.v1.FileService") {
        return require(caller, Scope::Files);
    }
    if !is_of("/codelia.v1.AdminService") {
        return require(caller, Scope::Run);
    }
    if has(caller, Scope::Operator) { Ok(()) } else { require(caller, Scope::Admin) }
}

/// How often each tenant may call this process.
#[derive(Default)]
struct Rates {
    limiters: Mutex<HashMap<TenantId, (NonZeroU32, Arc<DefaultDirectRateLimiter>)>>,
}

impl Rates {
    fn check(&self, caller: &Caller) -> Result<(), ApiError> {
        let limiter = self.limiter(&caller.tenant, per_second(caller.quotas.requests_per_second));
        limiter.check().map_err(|until| ApiError::RateLimited {
            retry_after: until.wait_time_from(DefaultClock::default().now()),
        })
    }

    /// The tenant's limiter; a new one when its quota has changed.
    fn limiter(&self, tenant: &TenantId, rate: NonZeroU32) -> Arc<DefaultDirectRateLimiter> {
        let mut limiters = self.limiters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, limiter)) = limiters.get(tenant)
            && *known == rate
        {
            return limiter.clone();
        }
        let limiter = Arc::new(RateLimiter::direct(Quota::per_second(rate)));
        limiters.insert(tenant.clone(), (rate, limiter.clone()));
        limiter
    }
}

fn per_second(quota: i64) -> NonZeroU32 {
    let rate = u32::try_from(quota.max(1)).unwrap_or(u32::MAX);
    NonZeroU32::new(rate).unwrap_or(NonZeroU32::MIN)
}

/// Lets callers in, as a layer around all services.
#[derive(Clone)]
pub(crate) struct Gate {
    store: Store,
    rates: Arc<Rates>,
}

impl Gate {
    pub(crate) fn new(store: Store) -> Self {
        Self { store, rates: Arc::default() }
    }

    async fn admit(&self, headers: &HeaderMap, path: &str) -> Result<Caller, ApiError> {
        let secret = bearer(headers).ok_or(ApiError::Unauthenticated)?;
        let caller = self.store.key_caller(&hash_secret(secret)).await?.ok_or(ApiError::Unauthenticated)?;
        tracing::Span::current().record("tenant", caller.tenant.as_str());
        self.rates.check(&caller)?;
        require_for_path(&caller, path)?;
        Ok(caller)
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").finish_non_exhaustive()
    }
}

impl<S> Layer<S> for Gate {
    type Service = Gated<S>;

    fn layer(&self, inner: S) -> Gated<S> {
        Gated { gate: self.clone(), inner }
    }
}

/// A service behind the gate.
#[derive(Debug, Clone)]
pub(crate) struct Gated<S> {
    gate: Gate,
    inner: S,
}

impl<S> Service<Request<Body>> for Gated<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, poller: &mut Poller<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(poller)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        // The clone is not ready; the one that was polled is.
        let ready = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, ready);
        // Health and reflection are open.
        if !request.uri().path().starts_with("/codelia.") {
            return Box::pin(inner.call(request));
        }
        let gate = self.gate.clone();
        Box::pin(async move {
            match gate.admit(request.headers(), request.uri().path()).await {
                Ok(caller) => {
                    request.extensions_mut().insert(caller);
                    inner.call(request).await
                }
                Err(error) => Ok(Status::from(error).into_http()),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use codelia_store::Quotas;
    use codelia_types::KeyId;

    use super::*;

    fn caller_with(scopes: &[Scope], requests_per_second: i64) -> Caller {
        Caller {
            key: KeyId::generate(),
            tenant: "a".parse().unwrap(),
            scopes: scopes.to_vec(),
            quotas: Quotas { requests_per_second, ..Quotas::default() },
            floor: codelia_policy::IsolationLevel::Full,
        }
    }

    fn headers(value: &str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, value.parse().unwrap())])
    }

    #[test]
    fn a_secret_has_the_form_that_is_accepted_and_none_is_made_twice() {
        let (secret, hash) = generate_secret();
        assert_eq!(bearer(&headers(&format!("Bearer {secret}"))), Some(secret.as_str()));
        assert_eq!(hash_secret(&secret), hash);
        assert_ne!(generate_secret().0, secret);
    }

    #[test]
    fn encoding_is_url_safe_base64() {
        assert_eq!(encode(&[0; 32]), "A".repeat(43));
        assert_eq!(encode(&[0xff; 32]), format!("{}8", "_".repeat(42)));
        assert_eq!(
            encode(b"abcdefghijklmnopqrstuvwxyz012345"),
            "YWJjZGVmZ2hpamtsbW5vcHFyc3R1dnd4eXowMTIzNDU"
        );
    }

    #[test]
    fn what_is_not_a_key_is_not_looked_up() {
        for bad in ["", "Bearer", "Bearer x", "Basic cdl_", &format!("Basic cdl_{}", "A".repeat(43))] {
            assert_eq!(bearer(&headers(bad)), None, "{bad}");
        }
    }

    #[test]
    fn each_service_needs_its_scope() {
        let run = caller_with(&[Scope::Run], 1);
        let operator = caller_with(&[Scope::Operator], 1);
        assert!(require_for_path(&run, "/codelia.v1.RunService/GetRun").is_ok());
        assert_eq!(
            require_for_path(&run, "/codelia.v1.AdminService/GetTenant"),
            Err(ApiError::Denied { scope: "admin" })
        );
        assert!(require_for_path(&operator, "/codelia.v1.AdminService/GetTenant").is_ok());
        assert_eq!(
            require_for_path(&run, "/codelia.v1.FileService/StatFile"),
            Err(ApiError::Denied { scope: "files" })
        );
        assert!(
            require_for_path(&caller_with(&[Scope::Files], 1), "/codelia.v1.FileService/StatFile").is_ok()
        );
        assert_eq!(
            require_for_path(&operator, "/codelia.v1.RunService/GetRun"),
            Err(ApiError::Denied { scope: "run" })
        );
    }

    #[test]
    fn a_tenant_over_its_rate_is_told_when_to_come_back_and_a_new_quota_holds_at_once() {
        let rates = Rates::default();
        let slow = caller_with(&[], 1);
        assert!(rates.check(&slow).is_ok());
        assert!(
            matches!(rates.check(&slow), Err(ApiError::RateLimited { retry_after }) if !retry_after.is_zero())
        );
        assert!(rates.check(&caller_with(&[], 100)).is_ok());
    }
}
