//! Declares structs of metrics, and registers them.
//!
//! Separate from the metrics, so that each of them is one entry: the doc comment, which is the help, the field, the
//! kind, the name, and labels and buckets if the kind has them.

use prometheus::{
    GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    Result, core::Collector,
};

/// Declares a struct whose fields are metrics, and its function `register`.
macro_rules! declare {
    (
        $(#[$attribute:meta])*
        $visibility:vis struct $Struct:ident {$(
            $(#[doc = $help:literal])+
            $access:vis $field:ident: $Kind:ident = $name:literal $([$($label:literal),+])? $(in $buckets:ident)?,
        )+}
    ) => {
        $(#[$attribute])*
        $visibility struct $Struct {$(
            $(#[doc = $help])+
            $access $field: $Kind,
        )+}

        impl $Struct {
            /// The names of these metrics.
            #[cfg(test)]
            const NAMES: &'static [&'static str] = &[$($name),+];

            fn register(registry: &prometheus::Registry) -> Self {
                use $crate::metrics::declare::Declared;
                Self {$(
                    $field: Declared::new($name, concat!($($help),+).trim_start())
                        $(.labels(&[$($label),+]))?
                        $(.buckets($buckets))?
                        .register(registry),
                )+}
            }
        }
    };
}
pub(super) use declare;

/// A metric as it is declared.
pub(super) struct Declared {
    name: &'static str,
    help: &'static str,
    labels: &'static [&'static str],
    buckets: &'static [f64],
}

impl Declared {
    pub(super) fn new(name: &'static str, help: &'static str) -> Self {
        Self { name, help, labels: &[], buckets: &[] }
    }

    pub(super) fn labels(self, labels: &'static [&'static str]) -> Self {
        Self { labels, ..self }
    }

    pub(super) fn buckets(self, buckets: &'static [f64]) -> Self {
        Self { buckets, ..self }
    }

    pub(super) fn register<K: Kind>(&self, registry: &Registry) -> K {
        let metric = K::build(self).expect("names, labels and buckets are constants and valid");
        registry.register(Box::new(metric.clone())).expect("every name is registered once");
        metric
    }

    /// The help without the backticks of a doc comment, because Prometheus shows plain text.
    fn plain_help(&self) -> String {
        self.help.replace('`', "")
    }

    fn opts(&self) -> Opts {
        Opts::new(self.name, self.plain_help())
    }

    fn histogram_opts(&self) -> HistogramOpts {
        HistogramOpts::new(self.name, self.plain_help()).buckets(self.buckets.to_vec())
    }
}

/// A kind of metric.
pub(super) trait Kind: Collector + Clone + 'static {
    fn build(declared: &Declared) -> Result<Self>;
}

impl Kind for IntCounter {
    fn build(declared: &Declared) -> Result<Self> {
        Self::with_opts(declared.opts())
    }
}

impl Kind for IntCounterVec {
    fn build(declared: &Declared) -> Result<Self> {
        Self::new(declared.opts(), declared.labels)
    }
}

impl Kind for IntGauge {
    fn build(declared: &Declared) -> Result<Self> {
        Self::with_opts(declared.opts())
    }
}

impl Kind for IntGaugeVec {
    fn build(declared: &Declared) -> Result<Self> {
        Self::new(declared.opts(), declared.labels)
    }
}

impl Kind for GaugeVec {
    fn build(declared: &Declared) -> Result<Self> {
        Self::new(declared.opts(), declared.labels)
    }
}

impl Kind for Histogram {
    fn build(declared: &Declared) -> Result<Self> {
        Self::with_opts(declared.histogram_opts())
    }
}

impl Kind for HistogramVec {
    fn build(declared: &Declared) -> Result<Self> {
        Self::new(declared.histogram_opts(), declared.labels)
    }
}
