//! Traces reach a configured OTLP collector.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use codelia_tests::{Cluster, ClusterOptions, eventually};
use opentelemetry_proto::tonic::{
    collector::{
        metrics::v1::{
            ExportMetricsServiceRequest, ExportMetricsServiceResponse,
            metrics_service_server::{MetricsService, MetricsServiceServer},
        },
        trace::v1::{
            ExportTraceServiceRequest, ExportTraceServiceResponse,
            trace_service_server::{TraceService, TraceServiceServer},
        },
    },
    trace::v1::Span,
};
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport::Server};

/// Keeps the spans it receives.
#[derive(Debug, Clone, Default)]
struct Collector {
    spans: Arc<Mutex<Vec<Span>>>,
}

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let resources = request.into_inner().resource_spans;
        let spans = resources.into_iter().flat_map(|resource| resource.scope_spans);
        self.spans.lock().expect("the lock").extend(spans.flat_map(|scope| scope.spans));
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl MetricsService for Collector {
    async fn export(
        &self,
        _: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        Ok(Response::new(ExportMetricsServiceResponse::default()))
    }
}

impl Collector {
    #[allow(clippy::disallowed_methods, reason = "the server ends with the test")]
    async fn listen(&self) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let server = Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .add_service(MetricsServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::task::spawn(server);
        Ok(format!("http://{address}"))
    }

    fn has(&self, attribute: &str, value: &str) -> bool {
        let spans = self.spans.lock().expect("the lock");
        spans
            .iter()
            .flat_map(|span| &span.attributes)
            .any(|found| found.key == attribute && format!("{:?}", found.value).contains(value))
    }
}

#[tokio::test]
async fn spans_reach_the_collector() -> Result<()> {
    let collector = Collector::default();
    let endpoint = collector.listen().await?;
    let settings = vec![("CODELIA_OTLP_ENDPOINT", endpoint)];
    let cluster = Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.exec(&session.name, "exit 0").await?.finished.expect("an end");

    for (attribute, value) in
        [("run", run.run_id.as_str()), ("session", session.session_id.as_str()), ("tenant", "a")]
    {
        eventually((attribute, value), || async { collector.has(attribute, value).then_some(()) }).await;
    }
    cluster.end().await
}
