//! The response to a bulk post. Its lines are sent while later lines of the body are still being stored.
//!
//! It is separate from the handler because storing must not depend on whether the client reads the response.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    body::Body,
    http::header,
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use forebay_bounds::budget::{Share, paid};
use forebay_wire::BulkLine;
use futures::stream;
use tokio::sync::mpsc;

/// The size at which lines are passed to the connection.
const FRAME_BYTES: usize = 64 << 10;

/// The most bytes of a response that are produced and not yet sent: the lines of one slice, one frame in the queue, and
/// one that is being sent. They are taken from the budget before anything is stored, so that a response never waits for
/// the budget.
#[must_use]
pub(crate) fn window_bytes(slice_lines: usize) -> usize {
    const LINE_BYTES: usize = 8 << 10;
    slice_lines * LINE_BYTES
}

/// Creates the two ends of a response: one writes lines, the other passes them to the connection. `patience` is the
/// total time that the writer waits for a slow client.
pub(crate) fn answer(window: Share, patience: Duration) -> (LineWriter, Lines) {
    let (sender, receiver) = mpsc::channel(1);
    let writer = LineWriter { sender: Some(sender), patience, text: Vec::new(), window: Arc::new(window) };
    (writer, Lines(receiver))
}

enum Part {
    Frame(Bytes),
    /// The end of a complete response. Without it, the response was cut off.
    End,
}

/// Writes lines while the client reads them.
pub(crate) struct LineWriter {
    /// `None` after the client has disconnected or was too slow.
    sender: Option<mpsc::Sender<Part>>,
    patience: Duration,
    text: Vec<u8>,
    window: Arc<Share>,
}

impl LineWriter {
    /// Writes a line.
    pub(crate) async fn line(&mut self, line: &BulkLine) {
        if self.sender.is_none() {
            return;
        }
        serde_json::to_writer(&mut self.text, line).expect("receipts and problems are plain data");
        self.text.push(b'\n');
        if self.text.len() >= FRAME_BYTES {
            self.flush().await;
        }
    }

    /// Passes the written lines to the connection.
    pub(crate) async fn flush(&mut self) {
        if !self.text.is_empty() {
            let frame = paid(std::mem::take(&mut self.text).into(), Arc::clone(&self.window));
            self.send(Part::Frame(frame)).await;
        }
    }

    /// Ends the response.
    pub(crate) async fn end(mut self) {
        self.flush().await;
        self.send(Part::End).await;
    }

    async fn send(&mut self, part: Part) {
        let Some(sender) = &self.sender else { return };
        let started = Instant::now();
        match tokio::time::timeout(self.patience, sender.send(part)).await {
            Ok(Ok(())) => self.patience = self.patience.saturating_sub(started.elapsed()),
            // Stored lines stay stored. If the client repeats the post, it gets the same receipts.
            _ => self.sender = None,
        }
    }
}

/// The lines of a response, for the connection.
pub(crate) struct Lines(mpsc::Receiver<Part>);

impl Lines {
    /// Waits for the first lines and returns the response, or nothing if the writer is dropped before them.
    pub(crate) async fn into_response(mut self) -> Option<Response> {
        let first = self.0.recv().await?;
        let parts = stream::try_unfold((Some(first), self.0), |(first, mut receiver)| async move {
            let part = match first {
                Some(part) => Some(part),
                None => receiver.recv().await,
            };
            match part {
                Some(Part::Frame(frame)) => Ok(Some((frame, (None, receiver)))),
                Some(Part::End) => Ok(None),
                None => Err(std::io::Error::other("the response was cut off")),
            }
        });
        Some(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(parts)).into_response())
    }
}
