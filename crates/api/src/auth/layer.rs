//! Authentication: every request looks up its key, or has it checked by the statement that records
//! its run, so that a revoked key stops working immediately. The layer wraps all services, so that
//! every new method is protected.

use std::{
    convert::Infallible,
    future::ready,
    sync::Arc,
    task::{Context as Poller, Poll},
    time::{Duration, Instant},
};

use codelia_policy::IsolationLevel;
use codelia_server::{HttpService, Source, hold_until_end};
use codelia_store::{Caller, FoundKey, KeyStanding, KeyVersion, Scope, Store};
use codelia_telemetry::{metrics, task};
use codelia_types::{Reason, TenantId};
use futures::future::BoxFuture;
use http::{Request, Response};
use tokio::time::timeout;
use tonic::{Extensions, Status, body::Body};
use tower::Service;

use super::{
    guard::{KeyGuard, Lookup},
    key_secret::{bearer_secret, hash_secret},
    key_uses::KeyUses,
    known_keys::KnownKeys,
    sign_ins::SignIns,
};
use crate::{
    error::ApiError,
    options::Options,
    server::{
        access_log::CallTenant,
        body_limit::{LimitedBody, MessageRules},
        calls_in_flight::{CallPermit, CallsInFlight},
        methods::{Callers, Method, Methods},
        rate_limit::RateLimits,
        web,
    },
};

/// How long a key is looked up.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Calls that record a run. The statement that does so checks the key again, so a key that was
/// valid a moment ago is not looked up first: ADR 7 has what that saves.
const RECORDING: [&str; 2] = ["/codelia.v1.RunService/StartRun", "/codelia.v1.RunService/Exec"];

/// The caller that the layer authenticated. Fails if its key was not looked up for this call: see
/// [`admitted`].
pub(crate) fn caller(extensions: &Extensions) -> Result<Caller, ApiError> {
    let admitted = admitted(extensions)?;
    admitted
        .unchecked
        .is_none()
        .then(|| admitted.caller.clone())
        .ok_or_else(ApiError::unauthenticated)
}

/// The caller of a call that records a run. Its key must be checked with the run, or by
/// [`AdmittedCaller::check`].
pub(crate) fn admitted(extensions: &Extensions) -> Result<Arc<AdmittedCaller>, ApiError> {
    extensions.get::<Arc<AdmittedCaller>>().cloned().ok_or_else(ApiError::unauthenticated)
}

/// Whether the caller's key has the scope.
pub(crate) fn has_scope(caller: &Caller, scope: Scope) -> bool {
    caller.scopes.contains(&scope)
}

/// Fails unless the caller's key has the scope.
pub(crate) fn require_scope(caller: &Caller, scope: Scope) -> Result<(), ApiError> {
    require_any_scope(caller, &[scope])
}

/// Fails unless the caller's key has one of the scopes.
pub(crate) fn require_any_scope(caller: &Caller, scopes: &[Scope]) -> Result<(), ApiError> {
    if scopes.iter().any(|scope| has_scope(caller, *scope)) {
        return Ok(());
    }
    Err(scope_missing(scopes))
}

/// The key has none of the scopes that would do.
pub(crate) fn scope_missing(scopes: &[Scope]) -> ApiError {
    let mut any_of: Vec<_> = scopes.iter().map(|scope| scope.as_str()).collect();
    any_of.dedup();
    let message =
        format!("the API key lacks the scope `{}`; use a key that has it", any_of.join("` or `"));
    ApiError::new(Reason::ScopeMissing, message).with("scopes", any_of.join(","))
}

/// Fails unless the caller may use the method.
fn authorize(caller: &Caller, method: &Method) -> Result<(), ApiError> {
    match &method.callers {
        Callers::All => Ok(()),
        Callers::AnyOf(scopes) => require_any_scope(caller, scopes),
    }
}

fn per_second(quota: i64) -> u32 {
    u32::try_from(quota.max(1)).unwrap_or(u32::MAX)
}

/// Authenticates, limits and authorizes the requests of all services, before their bodies are read.
#[derive(Debug, Clone)]
pub(crate) struct Authenticator {
    store: Store,
    requests: Arc<RateLimits>,
    unisolated_tenant: Option<TenantId>,
    keys: Arc<KeyGuard>,
    key_uses: Arc<KeyUses>,
    known_keys: Arc<KnownKeys>,
    sign_ins: Arc<SignIns>,
    calls: Arc<CallsInFlight>,
    methods: Arc<Methods>,
    message_timeout: Duration,
}

impl Authenticator {
    pub(crate) fn new(store: Store, options: &Options, methods: Arc<Methods>) -> Self {
        Self {
            store,
            requests: Arc::default(),
            unisolated_tenant: options.unisolated_tenant.clone(),
            keys: Arc::new(KeyGuard::new(options.api.failed_keys_per_minute)),
            key_uses: Arc::default(),
            known_keys: Arc::default(),
            sign_ins: Arc::default(),
            calls: CallsInFlight::new(options.api.clone()),
            methods,
            message_timeout: options.api.message_timeout,
        }
    }

    async fn admit(self, request: RequestHead) -> Result<(AdmittedCaller, CallPermit), ApiError> {
        if let Some((caller, version, permit)) = self.admit_known(&request) {
            let unchecked = Some((version, self, request));
            return Ok((AdmittedCaller { caller, unchecked }, permit));
        }
        let found = self.identify(&request).await?;
        self.requests
            .check(&found.caller.tenant, per_second(found.caller.quotas.requests_per_second))?;
        let caller = self.accept(found, &request).await?;
        let permit = self.calls.open(caller.key, request.method.stays_open)?;
        Ok((AdmittedCaller { caller, unchecked: None }, permit))
    }

    /// Admits a call that records a run if its key was valid a moment ago. If anything speaks
    /// against it, the key is looked up to say exactly what.
    fn admit_known(&self, request: &RequestHead) -> Option<(Caller, KeyVersion, CallPermit)> {
        if !RECORDING.contains(&request.path.as_str()) {
            return None;
        }
        let (caller, version) = self.known_keys.get(&request.key_hash?, Instant::now())?;
        if !self.sign_ins.is_recorded(caller.key, request.source) {
            return None;
        }
        authorize(&caller, &request.method).ok()?;
        let permit = self.calls.open(caller.key, false).ok()?;
        self.requests.check(&caller.tenant, per_second(caller.quotas.requests_per_second)).ok()?;
        request.belongs_to(&caller);
        Some((caller, version, permit))
    }

    /// Looks the key up, whether calls with it are accepted or not.
    async fn identify(&self, request: &RequestHead) -> Result<FoundKey, ApiError> {
        let mut found = self.authenticate(request).await?;
        if self.unisolated_tenant.as_ref() == Some(&found.caller.tenant) {
            found.caller.floor = IsolationLevel::None;
        }
        request.belongs_to(&found.caller);
        Ok(found)
    }

    /// Fails unless calls with the key are accepted and it may make this one.
    async fn accept(&self, found: FoundKey, request: &RequestHead) -> Result<Caller, ApiError> {
        let FoundKey { caller, standing, use_is_stale, version } = found;
        let refusal = match standing {
            KeyStanding::Valid => None,
            KeyStanding::Expired => {
                let message = "the API key has expired; create a new one";
                Some(ApiError::new(Reason::KeyExpired, message))
            }
            KeyStanding::TenantSuspended => {
                let message = "an operator suspended this tenant; ask them to resume it";
                Some(ApiError::new(Reason::TenantSuspended, message))
            }
        };
        if let Some(error) = refusal {
            self.sign_ins.refused(&self.store, Some(&caller), request.source, &error);
            return Err(error);
        }
        self.sign_ins.used(&self.store, &caller, request.source).await?;
        if use_is_stale {
            self.key_uses.record(&self.store, &caller);
        }
        authorize(&caller, &request.method)?;
        if let Some(hash) = request.key_hash {
            self.known_keys.set(hash, caller.clone(), version, Instant::now());
        }
        Ok(caller)
    }

    async fn authenticate(&self, request: &RequestHead) -> Result<FoundKey, ApiError> {
        let found = self.find_key(request).await;
        if let Err(error) = &found
            && matches!(error.reason(), Reason::KeyInvalid | Reason::TooManyFailedKeys)
        {
            self.sign_ins.refused(&self.store, None, request.source, error);
        }
        found
    }

    async fn find_key(&self, request: &RequestHead) -> Result<FoundKey, ApiError> {
        let hash = request.key_hash.ok_or_else(ApiError::unauthenticated)?;
        // Until it is found to be valid again.
        self.known_keys.remove(&hash);
        let lock =
            timeout(LOOKUP_TIMEOUT, self.keys.lock_lookup(hash)).await.map_err(|_| unanswered())?;
        let lookup = self.keys.begin(hash, request.source, Instant::now())?;
        if !lookup.is_paid() {
            drop(lock);
            return self.look_up(hash, lookup).await;
        }
        // In a task: the token of a caller that gives up would be lost, although its key may be
        // valid.
        let this = self.clone();
        let looked_up = async move {
            let found = this.look_up(hash, lookup).await;
            drop(lock);
            found
        };
        let looked_up = task::background("key lookup", looked_up).await;
        looked_up.map_err(ApiError::internal).flatten()
    }

    async fn look_up(&self, hash: [u8; 32], lookup: Lookup) -> Result<FoundKey, ApiError> {
        metrics().key_lookup();
        match timeout(LOOKUP_TIMEOUT, self.store.key_authenticate(&hash)).await {
            Ok(Ok(found)) => {
                self.keys.end(lookup, found.is_some(), Instant::now());
                found.ok_or_else(ApiError::unauthenticated)
            }
            Ok(Err(error)) => {
                self.keys.undo(&lookup, Instant::now());
                Err(error.into())
            }
            Err(_) => {
                self.keys.undo(&lookup, Instant::now());
                Err(unanswered())
            }
        }
    }
}

fn unanswered() -> ApiError {
    ApiError::unavailable("the database does not answer")
}

/// A caller that a layer admitted.
#[derive(Debug, Clone)]
pub(crate) struct AdmittedCaller {
    /// The caller, as it was when its key was last looked up.
    pub(crate) caller: Caller,
    /// Set if the key was not looked up for this call.
    unchecked: Option<(KeyVersion, Authenticator, RequestHead)>,
}

impl AdmittedCaller {
    /// What the statement that records a run must find unchanged; `None` if the key was looked up
    /// for this call.
    pub(crate) fn unchecked_version(&self) -> Option<KeyVersion> {
        self.unchecked.as_ref().map(|(version, ..)| *version)
    }

    /// Looks the key up, if that was not done for this call.
    pub(crate) async fn check(&self) -> Result<Caller, ApiError> {
        let Some((_, auth, request)) = &self.unchecked else { return Ok(self.caller.clone()) };
        let found = auth.identify(request).await?;
        auth.accept(found, request).await
    }
}

/// What authentication needs of a request.
#[derive(Debug, Clone)]
struct RequestHead {
    /// `None` if the key is missing or malformed.
    key_hash: Option<[u8; 32]>,
    source: Source,
    path: String,
    method: Arc<Method>,
    tenant: CallTenant,
}

impl RequestHead {
    fn new(request: &Request<Body>, method: Arc<Method>) -> Self {
        Self {
            key_hash: bearer_secret(request.headers()).map(hash_secret),
            source: request.extensions().get().copied().unwrap_or(Source(None)),
            path: request.uri().path().to_owned(),
            method,
            tenant: request.extensions().get().cloned().unwrap_or_default(),
        }
    }

    /// Names the tenant in the trace and the log.
    fn belongs_to(&self, caller: &Caller) {
        tracing::Span::current().record("tenant", caller.tenant.as_str());
        self.tenant.set(&caller.tenant);
    }
}

/// A service that only authenticated requests reach.
#[derive(Debug, Clone)]
pub(crate) struct AuthService<S> {
    pub(crate) auth: Authenticator,
    pub(crate) inner: S,
}

impl<S: HttpService> Service<Request<Body>> for AuthService<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, poller: &mut Poller<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(poller)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        // Only the polled service is ready, so the call takes it and leaves the clone.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let framing = web::framing(&request);
        let path = request.uri().path();
        // Health and reflection need no key.
        if !path.starts_with("/codelia.") {
            let rules = MessageRules::without_key(path, framing, self.auth.message_timeout);
            return Box::pin(inner.call(limited(request, rules, None)));
        }
        let Some(method) = self.auth.methods.get(path) else {
            return Box::pin(ready(Ok(Status::unimplemented("no such method").into_http())));
        };
        let rules = MessageRules::new(method, framing, self.auth.message_timeout);
        let head = RequestHead::new(&request, method.clone());
        let auth = self.auth.clone();
        Box::pin(async move {
            match auth.admit(head).await {
                Ok((admitted, permit)) => {
                    request.extensions_mut().insert(Arc::new(admitted));
                    let permit = Arc::new(permit);
                    let response =
                        inner.call(limited(request, rules, Some(permit.clone()))).await?;
                    Ok(hold_until_end(response, permit))
                }
                Err(error) => Ok(Status::from(error).into_http()),
            }
        })
    }
}

fn limited(
    request: Request<Body>,
    rules: MessageRules,
    permit: Option<Arc<CallPermit>>,
) -> Request<Body> {
    request.map(|body| Body::new(LimitedBody::new(body, rules, permit)))
}

#[cfg(test)]
pub(crate) mod tests {
    use codelia_store::Quotas;
    use codelia_types::KeyId;

    use super::*;

    pub(crate) fn caller_with(scopes: &[Scope]) -> Caller {
        Caller {
            key: KeyId::generate(),
            tenant: "a".parse().unwrap(),
            scopes: scopes.to_vec(),
            quotas: Quotas::default(),
            max_limits: codelia_policy::LimitsRequest::default(),
            floor: IsolationLevel::Full,
            ask_floor: None,
            policy_version: None,
            tools_version: 0,
        }
    }

    #[test]
    fn each_service_needs_its_scope() {
        let methods = Methods::load().unwrap();
        let authorize = |caller: &Caller, path: &str| authorize(caller, methods.get(path).unwrap());
        let run = caller_with(&[Scope::Run]);
        let operator = caller_with(&[Scope::Operator]);
        assert!(authorize(&run, "/codelia.v1.RunService/GetRun").is_ok());
        for caller in [&run, &operator] {
            assert!(authorize(caller, "/codelia.v1.InfoService/WhoAmI").is_ok());
        }
        assert_eq!(
            authorize(&run, "/codelia.v1.AdminService/GetTenant"),
            Err(scope_missing(&[Scope::Admin, Scope::Operator]))
        );
        assert_eq!(
            authorize(&run, "/codelia.v1.AdminService/DrainWorker"),
            Err(scope_missing(&[Scope::Operator]))
        );
        assert!(authorize(&operator, "/codelia.v1.AdminService/GetTenant").is_ok());
        assert_eq!(
            authorize(&run, "/codelia.v1.FileService/StatFile"),
            Err(scope_missing(&[Scope::Files]))
        );
        assert!(
            authorize(&caller_with(&[Scope::Files]), "/codelia.v1.FileService/StatFile").is_ok()
        );
        for method in ["DecideApproval", "RevokeApproval"] {
            let path = format!("/codelia.v1.ApprovalService/{method}");
            assert_eq!(authorize(&run, &path), Err(scope_missing(&[Scope::Approve])));
            assert!(authorize(&caller_with(&[Scope::Approve]), &path).is_ok());
        }
        for scope in [Scope::Run, Scope::Approve, Scope::Audit] {
            assert!(
                authorize(&caller_with(&[scope]), "/codelia.v1.ApprovalService/ListApprovals")
                    .is_ok()
            );
        }
        assert!(authorize(&operator, "/codelia.v1.ApprovalService/ListApprovals").is_err());
        for path in
            ["AdminService/SuspendTenant", "FlagService/SetFlag", "ToolService/ApproveToolLevel"]
        {
            let path = format!("/codelia.v1.{path}");
            let refused = authorize(&caller_with(&[Scope::Run, Scope::Admin]), &path);
            assert_eq!(refused, Err(scope_missing(&[Scope::Operator])));
        }
        assert_eq!(
            authorize(&operator, "/codelia.v1.RunService/GetRun"),
            Err(scope_missing(&[Scope::Run]))
        );
    }
}
