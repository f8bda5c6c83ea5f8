//! The answer to a bulk post: lines that are sent while later lines of the body are still stored.
//!
//! Separate from the handler because storing must not depend on whether anybody reads the answer.

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
use forebay_client::wire::BulkLine;
use futures::stream;
use tokio::sync::mpsc;

use super::budget::{Share, paid};

/// Bytes at which lines are handed to the connection.
const FRAME_BYTES: usize = 64 << 10;

/// Bytes of an answer that may be made and not yet read: the lines of one slice, one frame that waits, and one that is
/// being sent. They are paid for before anything is stored, so that an answer never waits for the budget.
#[must_use]
pub(super) fn window_bytes(slice_lines: usize) -> usize {
    const LINE_BYTES: usize = 8 << 10;
    slice_lines * LINE_BYTES
}

/// An answer's two ends: where lines are written, and where the connection takes them. `patience` is the time that the
/// writer waits for a slow reader in all.
pub(super) fn answer(window: Share, patience: Duration) -> (LineWriter, Lines) {
    let (sender, receiver) = mpsc::channel(1);
    let writer = LineWriter { sender: Some(sender), patience, text: Vec::new(), window: Arc::new(window) };
    (writer, Lines(receiver))
}

enum Part {
    Frame(Bytes),
    /// Tells a whole answer from one that broke off.
    End,
}

/// Writes lines as long as somebody reads them.
pub(super) struct LineWriter {
    /// None once the client hung up or was too slow.
    sender: Option<mpsc::Sender<Part>>,
    patience: Duration,
    text: Vec<u8>,
    window: Arc<Share>,
}

impl LineWriter {
    /// Writes a line.
    pub(super) async fn line(&mut self, line: &BulkLine) {
        if self.sender.is_none() {
            return;
        }
        serde_json::to_writer(&mut self.text, line).expect("receipts and problems are plain data");
        self.text.push(b'\n');
        if self.text.len() >= FRAME_BYTES {
            self.flush().await;
        }
    }

    /// Hands over what was written.
    pub(super) async fn flush(&mut self) {
        if !self.text.is_empty() {
            let frame = paid(std::mem::take(&mut self.text).into(), Arc::clone(&self.window));
            self.send(Part::Frame(frame)).await;
        }
    }

    /// Ends the answer.
    pub(super) async fn end(mut self) {
        self.flush().await;
        self.send(Part::End).await;
    }

    async fn send(&mut self, part: Part) {
        let Some(sender) = &self.sender else { return };
        let started = Instant::now();
        match tokio::time::timeout(self.patience, sender.send(part)).await {
            Ok(Ok(())) => self.patience = self.patience.saturating_sub(started.elapsed()),
            // What is stored stays stored; a repeat of the post is answered with the same receipts.
            _ => self.sender = None,
        }
    }
}

/// The lines of an answer as a connection takes them.
pub(super) struct Lines(mpsc::Receiver<Part>);

impl Lines {
    /// The answer, once its first lines are there; none if it breaks off before them.
    pub(super) async fn into_response(mut self) -> Option<Response> {
        let first = self.0.recv().await?;
        let parts = stream::try_unfold((Some(first), self.0), |(first, mut receiver)| async move {
            let part = match first {
                Some(part) => Some(part),
                None => receiver.recv().await,
            };
            match part {
                Some(Part::Frame(frame)) => Ok(Some((frame, (None, receiver)))),
                Some(Part::End) => Ok(None),
                None => Err(std::io::Error::other("the answer broke off")),
            }
        });
        Some(([(header::CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(parts)).into_response())
    }
}
