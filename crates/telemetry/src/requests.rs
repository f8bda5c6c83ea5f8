//! The ids of the requests that a span works for.
//!
//! One transaction executes several requests, but a span has only one parent. A span that works for several requests
//! therefore follows from each of their spans ([`Span::follows_from`]), and this layer records the ids of those
//! requests.

use std::{fmt, sync::Arc};

use tracing::{
    Level, Metadata, Span, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Id},
};
use tracing_subscriber::{
    Layer, Registry,
    filter::{FilterFn, LevelFilter, filter_fn},
    layer::Context,
    registry::{LookupSpan, SpanRef},
};

/// Field of the span of a request.
const REQUEST_ID: &str = "request.id";

/// The most ids in a log line. A commit has at most 64 commands, and one of them may contain 32 posts.
const NAMED_MAX: usize = 64;

/// Records which requests a span works for.
pub struct RequestIdsLayer;

impl RequestIdsLayer {
    /// The layer with its own filter, so that it records spans at every log level. It records spans of level ERROR, of
    /// which each request and each commit has one.
    pub fn filtered<S: Subscriber + for<'s> LookupSpan<'s>>() -> impl Layer<S> {
        let notes: FilterFn<fn(&Metadata<'_>) -> bool> =
            filter_fn(|metadata| metadata.is_span() && *metadata.level() == Level::ERROR);
        Self.with_filter(notes.with_max_level_hint(LevelFilter::ERROR))
    }
}

/// The ids of the requests that a span works for, without those of its parents. They are stored in the span's
/// extensions.
struct RequestIds(Vec<Arc<str>>);

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for RequestIdsLayer {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut found = FindId(None);
        attributes.record(&mut found);
        if let (Some(request), Some(span)) = (found.0, context.span(id)) {
            span.extensions_mut().insert(RequestIds(vec![request]));
        }
    }

    fn on_follows_from(&self, id: &Id, follows: &Id, context: Context<'_, S>) {
        let (Some(span), Some(before)) = (context.span(id), context.span(follows)) else { return };
        let more = ids_of(&before);
        let mut extensions = span.extensions_mut();
        match extensions.get_mut::<RequestIds>() {
            Some(RequestIds(ids)) => ids.extend(more),
            None => extensions.insert(RequestIds(more)),
        }
    }
}

/// The ids of a span, or of its nearest ancestor that has some.
fn ids_of<'s, S: LookupSpan<'s>>(span: &SpanRef<'s, S>) -> Vec<Arc<str>> {
    let noted = |span: SpanRef<'s, S>| span.extensions().get::<RequestIds>().map(|RequestIds(ids)| ids.clone());
    span.scope().find_map(noted).unwrap_or_default()
}

struct FindId(Option<Arc<str>>);

impl Visit for FindId {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == REQUEST_ID {
            self.0 = Some(format!("{value:?}").into());
        }
    }
}

/// The ids of the requests that a span works for, separated by spaces, for a log line.
pub fn request_ids(span: &Span) -> String {
    let find =
        |(id, dispatch): (&Id, &tracing::Dispatch)| Some(ids_of(&dispatch.downcast_ref::<Registry>()?.span(id)?));
    let ids = span.with_subscriber(find).flatten().unwrap_or_default();
    let named = ids.iter().take(NAMED_MAX).map(|id| &**id).collect::<Vec<_>>().join(" ");
    match ids.len().saturating_sub(NAMED_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
