//! Sets up where logs, traces and metrics go: stderr, the Prometheus endpoint and, if configured,
//! OTLP.

use std::{fmt, str::FromStr};

use codelia_types::option::text;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{MetricExporter, SpanExporter, WithExportConfig};
use opentelemetry_sdk::{
    Resource,
    metrics::SdkMeterProvider,
    trace::{SdkTracer, SdkTracerProvider},
};
use prometheus::Registry;
use serde::{Deserialize, Deserializer, de::Error as _};
use tracing::{Metadata, level_filters::LevelFilter, subscriber::Interest};
use tracing_subscriber::{
    EnvFilter, Layer, Registry as Spans,
    filter::dynamic_filter_fn,
    layer::{Filter, SubscriberExt},
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use crate::trace;

const FILTER: &str = "info,opentelemetry=warn";

codelia_types::options! {
    /// Logs: the section `log` of the configuration.
    pub struct LogOptions {
        /// `human`, or `json`: one object for each line, with numbers as numbers.
        #[serde(with = "text")]
        pub format: Format = Format::Human,
        /// Which lines, such as `info,codelia_worker=debug`. Default: `info`; `warn` for `up`.
        pub filter: Option<String> = None,
        /// One line for each call to the api, at level `info`, when the call has ended.
        pub access: bool = true,
    }
}

codelia_types::options! {
    /// Traces and metrics over OTLP: the section `otlp` of the configuration.
    pub struct OtlpOptions {
        /// Endpoint that traces and metrics are sent to. Default: no export.
        pub endpoint: Option<String> = None,
        /// Share of traces that is sent, from 0 to 1.
        #[serde(deserialize_with = "share")]
        pub sample_ratio: f64 = 1.0,
    }
}

fn share<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    let share = f64::deserialize(from)?;
    let is_share = (0.0..=1.0).contains(&share);
    if is_share { Ok(share) } else { Err(D::Error::custom("must be from 0 to 1")) }
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Text for people.
    Human,
    /// One JSON object per line.
    Json,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Human => "human",
            Self::Json => "json",
        })
    }
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

/// Telemetry could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not a log format.
    #[error("unknown log format {0:?}: use human or json")]
    Format(String),
    /// The log filter is malformed.
    #[error("invalid log filter")]
    Filter(#[from] tracing_subscriber::filter::ParseError),
    /// The OTLP exporter cannot be created.
    #[error("cannot create the OTLP exporter: check the endpoint")]
    Otlp(#[from] opentelemetry_otlp::ExporterBuildError),
    /// The Prometheus exporter cannot be created.
    #[error("cannot create the Prometheus exporter")]
    Prometheus(#[from] opentelemetry_sdk::error::OTelSdkError),
    /// This process already has telemetry.
    #[error("telemetry is already set up")]
    AlreadySetUp(#[from] tracing_subscriber::util::TryInitError),
}

/// Keeps telemetry running. Dropping it sends what is still buffered.
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
            tracing::warn!(%error, "buffered telemetry not sent");
        }
    }
}

/// Sets up this process's logs (to stderr), traces and metrics, as `service`. Call it once, inside
/// the runtime, before anything is measured.
///
/// # Errors
/// An option is invalid, or telemetry is already set up.
pub fn init(service: &'static str, log: &LogOptions, otlp: &OtlpOptions) -> Result<Guard, Error> {
    let resource = Resource::builder().with_service_name(service).build();
    let filter = EnvFilter::try_new(log.filter.as_deref().unwrap_or(FILTER))?;
    let ratio = otlp.sample_ratio;
    let endpoint = otlp.endpoint.as_deref();
    let metrics = meter_provider(prometheus::default_registry(), resource.clone(), endpoint)?;
    let traces = endpoint.map(|endpoint| tracer_provider(resource, endpoint, ratio)).transpose()?;
    let tracer = traces.as_ref().map(|traces| traces.tracer("codelia"));
    let logs = log_layer(log.format).with_filter(filter);
    tracing_subscriber::registry().with(logs).with(tracer.clone().map(span_layer)).try_init()?;
    if let Some(tracer) = tracer {
        trace::enable(tracer, ratio);
    }
    opentelemetry::global::set_meter_provider(metrics.clone());
    Ok(Guard { metrics, traces })
}

fn log_layer(format: Format) -> Box<dyn Layer<Spans> + Send + Sync> {
    let layer = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    match format {
        Format::Human => layer
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .with_target(false)
            .boxed(),
        Format::Json => layer.json().flatten_event(true).with_current_span(false).boxed(),
    }
}

/// Exports the spans of a run, whatever the log filter is.
fn span_layer<S>(tracer: SdkTracer) -> impl Layer<S>
where
    S: tracing::Subscriber + for<'span> LookupSpan<'span>,
{
    tracing_opentelemetry::layer()
        .with_tracer(tracer)
        .with_location(false)
        .with_threads(false)
        .with_target(false)
        .with_tracked_inactivity(false)
        .with_filter(only_exported())
}

/// Asks for each new span. If neither this filter nor that of the logs were asked, because both
/// always agree, a new span would take over what they said about the last one on this thread.
fn only_exported<S>() -> impl Filter<S> {
    let callsite = |metadata: &'static Metadata<'static>| match trace::is_exported(metadata) {
        true => Interest::sometimes(),
        false => Interest::never(),
    };
    dynamic_filter_fn(|metadata, _| trace::is_exported(metadata))
        .with_callsite_filter(callsite)
        .with_max_level_hint(LevelFilter::INFO)
}

/// Exports metrics to `registry` and, with an endpoint, over OTLP.
pub(crate) fn meter_provider(
    registry: &Registry,
    resource: Resource,
    otlp: Option<&str>,
) -> Result<SdkMeterProvider, Error> {
    let prometheus = opentelemetry_prometheus::exporter()
        .with_registry(registry.clone())
        .scope_info_enabled(false)
        .build()?;
    let mut provider = SdkMeterProvider::builder().with_resource(resource).with_reader(prometheus);
    if let Some(endpoint) = otlp {
        let exporter = MetricExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
        provider = provider.with_periodic_exporter(exporter);
    }
    Ok(provider.build())
}

/// Sends spans from a thread of its own. Spans that do not fit in its queue are dropped.
fn tracer_provider(
    resource: Resource,
    endpoint: &str,
    ratio: f64,
) -> Result<SdkTracerProvider, Error> {
    let exporter = SpanExporter::builder().with_tonic().with_endpoint(endpoint).build()?;
    let provider =
        SdkTracerProvider::builder().with_resource(resource).with_sampler(trace::sampler(ratio));
    Ok(provider.with_batch_exporter(exporter).build())
}
