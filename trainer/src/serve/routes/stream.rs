//! Answers that arrive piece by piece, as server-sent events.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::Body,
    http::header,
    response::{IntoResponse, Response},
};
use futures::StreamExt as _;
use serde_json::{Value, json};

use super::{
    super::{output::Output, request::Ticket},
    Refusal,
};

/// A comment is sent after this time without an event, so that nothing on the way closes a connection whose request is
/// paused.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams an answer. `frames` returns what to send after the output has grown; the last call is that in which the output
/// has an ending.
pub(super) fn respond(
    ticket: Ticket,
    output: Output,
    frames: impl FnMut(&Output) -> Vec<Value> + Send + 'static,
) -> Response {
    struct State<F> {
        ticket: Ticket,
        output: Output,
        frames: F,
        has_ended: bool,
    }

    let state = State { ticket, output, frames, has_ended: false };
    let body = futures::stream::unfold(state, async |mut state| {
        if state.has_ended {
            return None;
        }
        let Ok(event) = tokio::time::timeout(KEEP_ALIVE, state.ticket.next()).await else {
            return Some((": keep-alive\n\n".to_owned(), state));
        };
        let mut text = String::new();
        if let Some(event) = event {
            state.output.push(event);
            // A client that reads slowly gets several tokens at once.
            while state.output.ending.is_none() {
                let Some(event) = state.ticket.next_at_once() else { break };
                state.output.push(event);
            }
            for value in (state.frames)(&state.output) {
                text.push_str(&data(&value));
            }
            state.has_ended = state.output.ending.is_some();
        } else {
            text.push_str(&data(&json!({"error": Refusal::Failed.error()})));
            state.has_ended = true;
        }
        if state.has_ended {
            text.push_str("data: [DONE]\n\n");
        }
        Some((text, state))
    });
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
        // Proxies must not collect the events.
        (header::HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(body.map(Ok::<_, Infallible>))).into_response()
}

fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Waits for the whole answer.
pub(super) async fn collect(mut ticket: Ticket, mut output: Output) -> Result<Output, Refusal> {
    while output.ending.is_none() {
        output.push(ticket.next().await.ok_or(Refusal::Failed)?);
    }
    Ok(output)
}
