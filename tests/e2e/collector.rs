//! Traces reach a configured OTLP collector: one trace from the call of a client to the outcome of
//! its run.

use std::sync::{Arc, Mutex};

use anyhow::Result;
use codelia_proto::v1::outcome::Kind;
use codelia_tests::{Client, Cluster, ClusterOptions, eventually, shell};
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

    fn all(&self) -> Vec<Span> {
        self.spans.lock().expect("the lock").clone()
    }

    fn has(&self, attribute: &str, value: &str) -> bool {
        self.all().iter().any(|span| has(span, attribute, value))
    }

    /// Returns the spans of the trace of a run once all of these are there.
    async fn trace_of(&self, run: &str, names: &[&str]) -> Vec<Span> {
        eventually(("the trace of run", run), || async {
            let spans = self.all();
            let own = spans.iter().find(|span| span.name == "run" && has(span, "run", run))?;
            let trace: Vec<Span> =
                spans.iter().filter(|span| span.trace_id == own.trace_id).cloned().collect();
            names.iter().all(|name| trace.iter().any(|span| span.name == *name)).then_some(trace)
        })
        .await
    }
}

fn has(span: &Span, attribute: &str, value: &str) -> bool {
    let mut attributes = span.attributes.iter();
    attributes.any(|found| found.key == attribute && format!("{:?}", found.value).contains(value))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The only span of this name.
fn one<'a>(trace: &'a [Span], name: &str) -> &'a Span {
    let found: Vec<_> = trace.iter().filter(|span| span.name == name).collect();
    assert_eq!(
        found.len(),
        1,
        "spans {name}: {:?}",
        trace.iter().map(|span| &span.name).collect::<Vec<_>>()
    );
    found[0]
}

/// Starts a run with this header and returns its id when it has ended.
async fn run_with(client: &Client, session: &str, traceparent: Option<&str>) -> Result<String> {
    let mut request = Request::new(shell(session, "echo secret-word; exit 3"));
    if let Some(traceparent) = traceparent {
        request.metadata_mut().insert("traceparent", traceparent.parse()?);
    }
    let run = client.runs().start_run(request).await?.into_inner().run.expect("a run");
    client.watch_to_end(&run.name, 0).await?;
    Ok(run.run_id)
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";
/// The steps of a run in the api and in the worker.
const API_STEPS: [&str; 3] = ["admit", "record", "dispatch"];
const WORKER_STEPS: [&str; 5] = ["check lease", "launch", "execute", "clean up", "commit"];

async fn traced_cluster(
    collector: &Collector,
    settings: &[(&'static str, &str)],
) -> Result<Cluster> {
    let mut all = vec![("CODELIA_OTLP_ENDPOINT", collector.listen().await?)];
    all.extend(settings.iter().map(|&(name, value)| (name, value.to_owned())));
    Cluster::start_with(ClusterOptions { settings: all, ..ClusterOptions::default() }).await
}

#[tokio::test]
async fn run_continues_the_trace_of_its_caller() -> Result<()> {
    let collector = Collector::default();
    // Traces do not depend on what is logged.
    let cluster = traced_cluster(&collector, &[("CODELIA_LOG_FILTER", "warn")]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    // From here on a worker holds the session, so runs are pushed.
    let first = run_with(&client, &session, None).await?;

    // Not sampled, says the caller: the ratio of the operator decides.
    let run = run_with(&client, &session, Some(&format!("00-{TRACE}-{PARENT}-00"))).await?;
    let trace =
        collector.trace_of(&run, &[&API_STEPS[..], &WORKER_STEPS, &["request"]].concat()).await;
    assert_eq!(hex(&trace[0].trace_id), TRACE);
    let (request, own) = (one(&trace, "request"), one(&trace, "run"));
    assert_eq!(hex(&request.parent_span_id), PARENT);
    assert_eq!(own.parent_span_id, request.span_id);
    for (parent, steps) in [(request, &API_STEPS[..]), (own, &WORKER_STEPS)] {
        for step in steps {
            assert_eq!(one(&trace, step).parent_span_id, parent.span_id, "{step}");
        }
    }
    let sandboxes = ["prepare", "take prepared"]
        .map(|name| trace.iter().filter(|span| span.name == name).count());
    assert_eq!(sandboxes.iter().sum::<usize>(), 1, "{sandboxes:?}");
    assert!(has(own, "outcome", "exited") && has(own, "mode", "logical"), "{own:?}");
    assert!(has(request, "code", "OK"), "{request:?}");
    assert!(!format!("{trace:?}").contains("secret-word"), "a span has text of the command");

    // Controls: without a header and with a malformed one, a run has a trace of its own.
    let malformed = run_with(&client, &session, Some(&format!("00-{TRACE}-{PARENT}-0x"))).await?;
    for run in [first, malformed] {
        let trace = collector.trace_of(&run, &["request", "commit"]).await;
        assert_ne!(hex(&trace[0].trace_id), TRACE);
        assert!(one(&trace, "request").parent_span_id.is_empty());
    }
    cluster.end().await
}

#[tokio::test]
async fn queued_run_continues_the_trace_of_its_caller() -> Result<()> {
    let collector = Collector::default();
    let mut cluster = traced_cluster(&collector, &[]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    run_with(&client, &session, None).await?;
    let stopped = cluster.workers[0].process.terminate().await?;
    assert!(stopped.success());

    let mut request = Request::new(shell(&session, "true"));
    request.metadata_mut().insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse()?);
    let run = client.runs().start_run(request).await?.into_inner().run.expect("a run");
    cluster.restart_worker(0).await?;
    client.watch_to_end(&run.name, 0).await?;
    let trace = collector.trace_of(&run.run_id, &["request", "queue", "commit"]).await;
    assert_eq!(hex(&trace[0].trace_id), TRACE);
    assert_eq!(one(&trace, "run").parent_span_id, one(&trace, "request").span_id);
    assert_eq!(one(&trace, "queue").parent_span_id, one(&trace, "run").span_id);
    cluster.end().await
}

#[tokio::test]
async fn caller_cannot_force_the_export_of_traces() -> Result<()> {
    let collector = Collector::default();
    let cluster = traced_cluster(&collector, &[("CODELIA_OTLP_SAMPLE_RATIO", "0")]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    // Neither by the flag nor by an id that a ratio by id would export.
    for trace in [TRACE, &format!("{:032x}", 1)] {
        run_with(&client, &session, Some(&format!("00-{trace}-{PARENT}-01"))).await?;
    }
    // Processes send all spans before they end.
    cluster.end().await?;
    assert!(collector.all().is_empty(), "{:?}", collector.all());

    // Control: with the default the same call is exported.
    let cluster = traced_cluster(&collector, &[]).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    run_with(&client, &session, Some(&format!("00-{TRACE}-{PARENT}-01"))).await?;
    cluster.end().await?;
    assert!(collector.all().iter().any(|span| hex(&span.trace_id) == TRACE));
    Ok(())
}

#[tokio::test]
async fn collector_that_hangs_stops_no_run() -> Result<()> {
    // The kernel accepts connections, and nobody answers.
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let settings = vec![("CODELIA_OTLP_ENDPOINT", format!("http://{}", listener.local_addr()?))];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?.name;
    for _ in 0..20 {
        assert_eq!(client.exec(&session, "true").await?.outcome(), Kind::Exited(0));
    }
    // Nor does it keep the processes from ending.
    cluster.end().await?;
    drop(listener);
    Ok(())
}

#[tokio::test]
async fn spans_reach_the_collector() -> Result<()> {
    let collector = Collector::default();
    let endpoint = collector.listen().await?;
    let settings = vec![("CODELIA_OTLP_ENDPOINT", endpoint)];
    let cluster =
        Cluster::start_with(ClusterOptions { settings, ..ClusterOptions::default() }).await?;
    let client = cluster.tenant("a").await?;
    let session = client.session().await?;
    let run = client.exec(&session.name, "exit 0").await?.finished.expect("an end");

    for (attribute, value) in
        [("run", run.run_id.as_str()), ("session", session.session_id.as_str()), ("tenant", "a")]
    {
        eventually((attribute, value), || async { collector.has(attribute, value).then_some(()) })
            .await;
    }
    cluster.end().await
}
