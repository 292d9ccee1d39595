//! Traces: continues the trace of a caller, carries it to another process, and records the steps of
//! a run as spans. Does nothing unless traces are exported.
//!
//! A span carries ids, a mode and an outcome: no command, argument, variable or path.

use std::{
    sync::OnceLock,
    time::{Duration, SystemTime},
};

use futures::future::Either;
use opentelemetry::{
    Context, KeyValue,
    context::FutureExt as _,
    trace::{
        Span as _, SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState,
        Tracer as _,
    },
};
use opentelemetry_sdk::trace::{Sampler, SdkTracer};
use rand::Rng;
use tracing::{Metadata, Span};
use tracing_opentelemetry::OpenTelemetrySpanExt;

/// The header that names the caller's span, as in W3C Trace Context.
pub const TRACEPARENT: &str = "traceparent";
/// The length of a `traceparent` of version 00, the only one that is read.
const LENGTH: usize = 55;
/// The spans that are exported. Events are not: they may contain paths.
const EXPORTED: [&str; 3] = ["request", "lease", "run"];

static TRACING: OnceLock<Tracing> = OnceLock::new();

/// Where spans go, and how many.
#[derive(Debug)]
struct Tracing {
    tracer: SdkTracer,
    ratio: f64,
}

/// Exports spans from now on.
pub(crate) fn enable(tracer: SdkTracer, ratio: f64) {
    // `init` succeeds once in a process.
    let _ = TRACING.set(Tracing { tracer, ratio });
}

/// Follows the decision about the parent. A trace that begins here is exported with this
/// probability.
pub(crate) fn sampler(ratio: f64) -> Sampler {
    Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(ratio)))
}

pub(crate) fn is_exported(metadata: &Metadata<'_>) -> bool {
    metadata.is_span()
        && metadata.target().starts_with("codelia_")
        && EXPORTED.contains(&metadata.name())
}

/// Makes a new span the child of a caller's. The caller chooses neither whether the trace is
/// exported nor, by its id, how probable that is. A malformed header is ignored.
pub fn continue_from_caller(span: &Span, traceparent: Option<&[u8]>) {
    let Some(Tracing { ratio, .. }) = TRACING.get() else { return };
    let Some((trace, parent, _)) = traceparent.and_then(parse) else { return };
    let flags = TraceFlags::default().with_sampled(rand::rng().random_bool(*ratio));
    set_parent(span, SpanContext::new(trace, parent, flags, true, TraceState::default()));
}

/// Makes a new span the child of one of our own, in this process or another one.
pub fn continue_from(span: &Span, traceparent: Option<&str>) {
    if TRACING.get().is_none() {
        return;
    }
    let Some((trace, parent, flags)) = traceparent.and_then(|text| parse(text.as_bytes())) else {
        return;
    };
    set_parent(span, SpanContext::new(trace, parent, flags, true, TraceState::default()));
}

fn set_parent(span: &Span, parent: SpanContext) {
    if let Err(error) = span.set_parent(Context::new().with_remote_span_context(parent)) {
        tracing::debug!(%error, "span not continued");
    }
}

/// The `traceparent` of the current span, for another process. `None` unless traces are exported.
#[must_use]
pub fn current() -> Option<String> {
    TRACING.get()?;
    let context = Context::current();
    let span = context.span();
    let span = span.span_context();
    span.is_valid().then(|| {
        format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), u8::from(span.is_sampled()))
    })
}

/// Makes the current span the one of a future that continues in another task. The span of that task
/// is for logs alone.
pub(crate) fn carried<F: Future>(future: F) -> impl Future<Output = F::Output> {
    match TRACING.get() {
        Some(_) => Either::Left(future.with_current_context()),
        None => Either::Right(future),
    }
}

/// Records a step of the current span that has just ended.
pub fn step(name: &'static str, latency: Duration) {
    let Some(Tracing { tracer, .. }) = TRACING.get() else { return };
    let parent = Context::current();
    if !parent.span().span_context().is_sampled() {
        return;
    }
    let end = SystemTime::now();
    let start = end.checked_sub(latency).unwrap_or(end);
    let builder = tracer.span_builder(name).with_start_time(start);
    tracer.build_with_context(builder, &parent).end_with_timestamp(end);
}

/// Adds an attribute to a span. Log lines do not show it.
pub fn attribute(span: &Span, name: &'static str, value: &'static str) {
    if TRACING.get().is_some() {
        span.set_attribute(name, value);
    }
}

/// Ends the current span with a result. Else it would end with the last task that was started in
/// it, such as one that prepares the next sandbox.
pub fn end(name: &'static str, value: &'static str) {
    if TRACING.get().is_some() {
        let context = Context::current();
        context.span().set_attribute(KeyValue::new(name, value));
        context.span().end();
    }
}

/// Parses a `traceparent` of version 00.
fn parse(text: &[u8]) -> Option<(TraceId, SpanId, TraceFlags)> {
    if text.len() != LENGTH || text[..3] != *b"00-" || text[35] != b'-' || text[52] != b'-' {
        return None;
    }
    let hex = |from: usize, to: usize| {
        let part = &text[from..to];
        let is_hex = part.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        std::str::from_utf8(part).ok().filter(|_| is_hex)
    };
    let trace = TraceId::from_hex(hex(3, 35)?).ok().filter(|id| *id != TraceId::INVALID)?;
    let span = SpanId::from_hex(hex(36, 52)?).ok().filter(|id| *id != SpanId::INVALID)?;
    let flags = u8::from_str_radix(hex(53, 55)?, 16).ok()?;
    Some((trace, span, TraceFlags::new(flags) & TraceFlags::SAMPLED))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn traceparent_of_version_00_is_read() {
        let (trace, span, flags) = parse(VALID.as_bytes()).unwrap();
        assert_eq!(trace.to_string(), &VALID[3..35]);
        assert_eq!(span.to_string(), &VALID[36..52]);
        assert!(flags.is_sampled());
    }

    #[test]
    fn malformed_traceparent_is_ignored() {
        let long = "0".repeat(1 << 20);
        let changed = |from: &str, to: &str| VALID.replace(from, to);
        for text in [
            String::new(),
            long,
            changed("00-0af", "01-0af"),
            changed("00-0af", "ff-0af"),
            changed("0af7", "0AF7"),
            changed("0af7", "0ag7"),
            changed("0af7", "+af7"),
            changed("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            changed("b7ad6b7169203331", &"0".repeat(16)),
            changed("-01", "-zz"),
            format!("{VALID}-more"),
            changed("0af", "é0"),
        ] {
            assert!(parse(text.as_bytes()).is_none(), "{:.80}", text);
        }
    }

    #[test]
    fn nothing_is_carried_without_export() {
        assert_eq!(current(), None);
        step("admit", Duration::from_millis(1));
    }
}
