//! HTTP endpoints for operators and probes: `/metrics`, `/healthz`, `/readyz`. Each connection
//! serves one request and is closed after a short time, whatever the client does.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper::server::conn::http1;
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use prometheus::{Registry, TextEncoder};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{metrics, task};

/// Before the next attempt to accept, after one failed for lack of descriptors or memory.
const RETRY_DELAY: Duration = Duration::from_millis(50);

/// Limits of the connections to the HTTP endpoints.
#[derive(Debug, Clone, Copy)]
pub struct HttpLimits {
    /// Connections at the same time; further ones are closed at once.
    pub max_connections: usize,
    /// How long a connection may take to send its request and to read the response.
    pub request_timeout: Duration,
}

/// Serves `/metrics`, `/healthz` (200 while the process runs) and `/readyz` (200 while `ready`
/// returns `true`, otherwise 503) until `shutdown` is cancelled.
pub async fn serve_metrics<R>(
    listener: TcpListener,
    limits: HttpLimits,
    shutdown: CancellationToken,
    ready: R,
) where
    R: Fn() -> bool + Clone + Send + Sync + 'static,
{
    serve(listener, limits, shutdown, router(prometheus::default_registry().clone(), ready)).await;
}

async fn serve(listener: TcpListener, limits: HttpLimits, shutdown: CancellationToken, router: Router) {
    let permits = Arc::new(Semaphore::new(limits.max_connections));
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        match (accepted, permits.clone().try_acquire_owned()) {
            (Ok((stream, _)), Ok(permit)) => {
                task::background("metrics connection", respond(stream, router.clone(), limits, permit));
            }
            (Ok(_), Err(_)) => metrics().connection_refused("metrics.max_connections"),
            (Err(error), _) => {
                tracing::warn!(%error, "cannot accept connections for metrics, retrying");
                sleep(RETRY_DELAY).await;
            }
        }
    }
}

/// Answers one request.
async fn respond(stream: TcpStream, router: Router, limits: HttpLimits, _permit: OwnedSemaphorePermit) {
    let connection = http1::Builder::new()
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match timeout(limits.request_timeout, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "metrics connection failed"),
        Err(_) => tracing::debug!("metrics connection closed: too slow"),
    }
}

fn router<R>(registry: Registry, ready: R) -> Router
where
    R: Fn() -> bool + Clone + Send + Sync + 'static,
{
    Router::new()
        .route("/metrics", get(move || async move { render_metrics(&registry) }))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(move || async move { readiness(ready()) }))
}

fn readiness(ready: bool) -> (StatusCode, &'static str) {
    if ready { (StatusCode::OK, "ready\n") } else { (StatusCode::SERVICE_UNAVAILABLE, "not ready\n") }
}

fn render_metrics(registry: &Registry) -> Response {
    match TextEncoder::new().encode_to_string(&registry.gather()) {
        Ok(text) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use opentelemetry::metrics::MeterProvider;
    use opentelemetry_sdk::{Resource, metrics::SdkMeterProvider};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::{Metrics, Step, pipeline::meter_provider};

    /// A registry with one value of each metric. The provider must outlive its use.
    fn recorded_metrics() -> (SdkMeterProvider, Registry) {
        let registry = Registry::new();
        let provider = meter_provider(&registry, Resource::builder().build(), None).unwrap();
        let metrics = Metrics::build(&provider.meter("codelia"));
        metrics.run_ended("exited", "logical");
        metrics.step(Step::Commit, Duration::from_millis(2));
        metrics.setup("logical", true, Duration::from_millis(1));
        metrics.request("StartRun", "Ok", Duration::from_millis(3));
        metrics.refused("QUOTA");
        metrics.connections_changed(1);
        metrics.connection_refused("max_connections");
        metrics.key_lookup();
        metrics.violation("SYSCALL_BLOCKED");
        metrics.egress("connect", "host_not_allowed", 2, 3, 4);
        metrics.egress_sandboxes(1);
        metrics.egress_restart();
        metrics.worker(4, 1, 2);
        metrics.queue(3, Duration::from_secs(2));
        metrics.session_removed(10, Duration::from_millis(1));
        metrics.watchers_changed(1);
        (provider, registry)
    }

    async fn fetch(router: Router, path: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let limits = HttpLimits { max_connections: 1, request_timeout: Duration::from_secs(10) };
        let stop = CancellationToken::new();
        let server = task::background("metrics server", serve(listener, limits, stop, router));
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).await.unwrap();
        server.abort();
        response
    }

    #[tokio::test]
    async fn metrics_are_served_under_their_names() {
        let (_provider, registry) = recorded_metrics();
        let response = fetch(router(registry, || true), "/metrics").await;
        for line in [
            r#"codelia_runs_total{mode="logical",outcome="exited"} 1"#,
            r#"codelia_run_step_seconds_bucket{step="commit",le="0.002"} 1"#,
            r#"codelia_isolation_setup_seconds_count{mode="logical",prepared="true"} 1"#,
            r#"codelia_request_seconds_count{method="StartRun"} 1"#,
            r#"codelia_requests_total{code="Ok",method="StartRun"} 1"#,
            r#"codelia_refusals_total{reason="QUOTA"} 1"#,
            "codelia_connections 1",
            r#"codelia_connections_refused_total{cap="max_connections"} 1"#,
            "codelia_key_lookups_total 1",
            r#"codelia_sandboxes_total{mode="logical",prepared="true"} 1"#,
            r#"codelia_isolation_setup_p95_seconds{mode="logical"} 0.001"#,
            r#"codelia_violations_total{kind="SYSCALL_BLOCKED"} 1"#,
            r#"codelia_egress_attempts_total{outcome="host_not_allowed",via="connect"} 2"#,
            r#"codelia_egress_bytes_total{direction="received"} 4"#,
            "codelia_egress_sandboxes 1",
            "codelia_egress_restarts_total 1",
            "codelia_slots 4",
            "codelia_slots_busy 1",
            "codelia_leases 2",
            "codelia_queue_depth 3",
            "codelia_queue_age_seconds 2",
            "codelia_watchers 1",
            "codelia_session_directories_removed_total 1",
            "codelia_session_directories_removed_bytes_total 10",
        ] {
            assert!(response.lines().any(|found| found == line), "{line} is not in\n{response}");
        }
    }

    #[tokio::test]
    async fn unready_process_is_still_healthy() {
        let ready = fetch(router(Registry::new(), || false), "/readyz").await;
        let alive = fetch(router(Registry::new(), || false), "/healthz").await;
        assert!(ready.starts_with("HTTP/1.1 503"), "{ready}");
        assert!(alive.starts_with("HTTP/1.1 200"), "{alive}");
    }
}
