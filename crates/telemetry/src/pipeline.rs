//! Where logs, traces and metrics go: stderr, the Prometheus page and, if configured, OTLP.

use std::str::FromStr;

use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{Resource, metrics::SdkMeterProvider, trace::SdkTracerProvider};
use prometheus::Registry;
use tracing_subscriber::{
    EnvFilter, Layer, Registry as Spans, layer::SubscriberExt, util::SubscriberInitExt,
};

/// What a process tells about itself.
#[derive(Debug, Clone)]
pub struct Options {
    /// How log lines look.
    pub format: Format,
    /// Which ones are written, such as `info,codelia_worker=debug`.
    pub filter: String,
    /// Where traces and metrics are sent over OTLP (gRPC), if anywhere.
    pub otlp_endpoint: Option<String>,
    /// The name of this process in traces and metrics.
    pub service: &'static str,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// For people.
    Human,
    /// One JSON object a line.
    Json,
}

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        match text {
            "human" => Ok(Self::Human),
            "json" => Ok(Self::Json),
            other => Err(Error::Format(other.to_owned())),
        }
    }
}

/// Telemetry cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The word is no log format.
    #[error("{0:?} is none of human, json")]
    Format(String),
    /// The log filter cannot be read.
    #[error("the log filter cannot be read: {0}")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// The OTLP exporter cannot be made.
    #[error("the OTLP exporter cannot be made: {0}")]
    Otlp(#[from] opentelemetry_otlp::ExporterBuildError),
    /// The metrics page cannot be made.
    #[error("the metrics page cannot be made: {0}")]
    Page(#[from] opentelemetry_sdk::error::OTelSdkError),
    /// This process has telemetry already.
    #[error("telemetry was set up before")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
}

/// Keeps telemetry going. Dropped, it sends what is still to be sent.
#[derive(Debug)]
#[must_use = "telemetry ends when its guard is dropped"]
pub struct Guard {
    metrics: SdkMeterProvider,
    traces: Option<SdkTracerProvider>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        let traces = self.traces.as_ref().map_or(Ok(()), SdkTracerProvider::shutdown);
        for error in [traces.err(), self.metrics.shutdown().err()].into_iter().flatten() {
            tracing::warn!(%error, "the last telemetry was not sent");
        }
    }
}

/// Sets up this process's logs (to stderr), traces and metrics. Call it once, inside the runtime,
/// before anything is measured.
///
/// # Errors
/// If an option is wrong, or it was called before.
pub fn init(options: Options) -> Result<Guard, Error> {
    let resource = Resource::builder().with_service_name(options.service).build();
    let otlp = options.otlp_endpoint.as_deref();
    let filter = EnvFilter::try_new(&options.filter)?;
    let metrics = meter_provider(prometheus::default_registry(), resource.clone(), otlp)?;
    let traces = otlp.map(|endpoint| tracer_provider(resource, endpoint)).transpose()?;
    let spans = traces.as_ref().map(|t| tracing_opentelemetry::layer().with_tracer(t.tracer("codelia")));
    tracing_subscriber::registry().with(logs(options.format)).with(filter).with(spans).try_init()?;
    opentelemetry::global::set_meter_provider(metrics.clone());
    Ok(Guard { metrics, traces })
}

fn logs(format: Format) -> Box<dyn Layer<Spans> + Send + Sync> {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        Format::Human => {
            layer.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).with_target(false).boxed()
        }
        Format::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
    }
}

/// The instruments' readers: the page in `registry` and, if there is an endpoint, OTLP.
pub(crate) fn meter_provider(
    registry: &Registry,
    resource: Resource,
    otlp: Option<&str>,
) -> Result<SdkMeterProvider, Error> {
    let page = opentelemetry_prometheus::exporter()
        .with_registry(registry.clone())
        .scope_info_enabled(false)
        .build()?;
    let mut provider = SdkMeterProvider::builder().with_resource(resource).with_reader(page);
    if let Some(endpoint) = otlp {
        let exporter = MetricExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        provider = provider.with_periodic_exporter(exporter);
    }
    Ok(provider.build())
}

fn tracer_provider(resource: Resource, endpoint: &str) -> Result<SdkTracerProvider, Error> {
    let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
    Ok(SdkTracerProvider::builder().with_resource(resource).with_batch_exporter(exporter).build())
}
