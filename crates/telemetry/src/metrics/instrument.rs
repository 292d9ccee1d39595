//! The kinds of instruments, and the macro that declares them as a table.

use std::time::Duration;

use opentelemetry::{
    KeyValue, Value,
    metrics::{Counter, Gauge, Histogram, Meter, UpDownCounter},
};

/// Bucket bounds of every latency histogram: 100 µs to 100 s.
const BUCKETS: [f64; 19] = [
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 5.0, 10.0, 30.0, 100.0,
];

/// Declares a struct of instruments. A row has the field and its kind, the names of its labels, the
/// name of the metric and its meaning. Groups are structs of instruments in it.
macro_rules! instruments {
    (
        $(#[$meta:meta])+
        pub struct $name:ident {
            $($field:ident: $kind:ty $([$($label:literal),+])? = $metric:literal, $help:literal;)+
        }
        $(groups {$(
            $(#[$group_meta:meta])+
            $group:ident: $Group:ty,
        )+})?
    ) => {
        $(#[$meta])+
        #[derive(Debug)]
        pub struct $name {
            $(
                pub(crate) $field: $crate::metrics::instrument::Labeled<
                    $kind,
                    { <[&str]>::len(&[$($($label),+)?]) },
                >,
            )+
            $($($(#[$group_meta])+ pub $group: $Group,)+)?
        }

        impl $name {
            /// The names of all metrics, without the suffixes that Prometheus gets.
            #[cfg(test)]
            pub(crate) fn names() -> Vec<&'static str> {
                [vec![$($metric),+], $($(<$Group>::names(),)+)?].concat()
            }

            pub(crate) fn build(meter: &::opentelemetry::metrics::Meter) -> Self {
                use $crate::metrics::instrument::Labeled;
                Self {
                    $($field: Labeled::build(meter, $metric, $help, [$($($label),+)?]),)+
                    $($($group: <$Group>::build(meter),)+)?
                }
            }
        }
    };
}

pub(super) use instruments;

/// A kind of instrument.
pub(crate) trait Instrument {
    /// The value that is recorded.
    type Amount;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self;
    /// Adds to a counter, sets a gauge, or adds a latency to a histogram.
    fn record(&self, amount: Self::Amount, labels: &[KeyValue]);
}

/// An instrument and the names of its labels.
#[derive(Debug)]
pub(crate) struct Labeled<I, const N: usize> {
    pub(super) instrument: I,
    labels: [&'static str; N],
}

impl<I: Instrument, const N: usize> Labeled<I, N> {
    pub(super) fn build(
        meter: &Meter,
        name: &'static str,
        help: &'static str,
        labels: [&'static str; N],
    ) -> Self {
        Self { instrument: I::build(meter, name, help), labels }
    }

    /// Records an amount in the series with these values of the labels.
    pub(crate) fn record(&self, amount: I::Amount, values: [Value; N]) {
        let mut names = self.labels.into_iter();
        let labels = values.map(|value| KeyValue::new(names.next().unwrap_or_default(), value));
        self.instrument.record(amount, &labels);
    }
}

/// Counts events or bytes.
impl Instrument for Counter<u64> {
    type Amount = u64;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        meter.u64_counter(name).with_description(help).build()
    }

    fn record(&self, amount: u64, labels: &[KeyValue]) {
        self.add(amount, labels);
    }
}

/// Adds up times.
impl Instrument for Counter<f64> {
    type Amount = Duration;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        meter.f64_counter(name).with_unit("s").with_description(help).build()
    }

    fn record(&self, amount: Duration, labels: &[KeyValue]) {
        self.add(amount.as_secs_f64(), labels);
    }
}

/// Counts what is open: adds what is opened or closed.
impl Instrument for UpDownCounter<i64> {
    type Amount = i64;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        meter.i64_up_down_counter(name).with_description(help).build()
    }

    fn record(&self, amount: i64, labels: &[KeyValue]) {
        self.add(amount, labels);
    }
}

/// Shows a number.
impl Instrument for Gauge<i64> {
    type Amount = i64;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        meter.i64_gauge(name).with_description(help).build()
    }

    fn record(&self, amount: i64, labels: &[KeyValue]) {
        self.record(amount, labels);
    }
}

/// Shows a time.
impl Instrument for Gauge<f64> {
    type Amount = Duration;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        meter.f64_gauge(name).with_unit("s").with_description(help).build()
    }

    fn record(&self, amount: Duration, labels: &[KeyValue]) {
        self.record(amount.as_secs_f64(), labels);
    }
}

/// Distributes latencies over buckets.
impl Instrument for Histogram<f64> {
    type Amount = Duration;

    fn build(meter: &Meter, name: &'static str, help: &'static str) -> Self {
        let histogram = meter.f64_histogram(name).with_description(help).with_unit("s");
        histogram.with_boundaries(BUCKETS.to_vec()).build()
    }

    fn record(&self, amount: Duration, labels: &[KeyValue]) {
        self.record(amount.as_secs_f64(), labels);
    }
}
