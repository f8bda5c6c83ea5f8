//! Protection from request smuggling: finds requests that have both `Content-Length` and `Transfer-Encoding` in the
//! bytes that are read.
//!
//! For such a request, hyper uses the chunks and removes `Content-Length` from the headers, so that no handler could
//! refuse it. This module therefore parses the heads as they arrive, and marks the request with the same number when
//! hyper passes it on. If it cannot parse the input, it leaves the request to hyper, which refuses it and closes the
//! connection.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
};

use forebay_api::http::framing::TwoLengths;
use hyper::{Request, service::Service};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The most bytes kept of a line: enough for a header's name and a length.
const LINE_BYTES_MAX: usize = 128;

/// Stands for an invalid length, or one that is too long to be kept. hyper refuses such a length unless there is a
/// transfer coding.
const NO_LENGTH: u64 = u64::MAX;

/// Wraps a stream and its service, so that the service marks requests with two lengths.
pub(super) fn watch<S, T>(stream: S, service: T) -> (Watched<S>, Marking<T>) {
    let marked = Arc::new(AtomicU64::new(0));
    let watched = Watched { stream, requests: Requests::default(), marked: Arc::clone(&marked) };
    (watched, Marking { service, served: AtomicU64::new(0), marked })
}

/// A stream whose incoming requests are parsed.
pub(super) struct Watched<S> {
    stream: S,
    requests: Requests,
    marked: Arc<AtomicU64>,
}

/// A service that marks the request that has two lengths.
pub(super) struct Marking<T> {
    service: T,
    served: AtomicU64,
    /// The number of the request to mark, counted from 1, or 0.
    marked: Arc<AtomicU64>,
}

impl<B, T: Service<Request<B>>> Service<Request<B>> for Marking<T> {
    type Response = T::Response;
    type Error = T::Error;
    type Future = T::Future;

    /// hyper calls this once for each request, in the order of their heads.
    fn call(&self, mut request: Request<B>) -> T::Future {
        let number = self.served.fetch_add(1, Ordering::Relaxed) + 1;
        if number == self.marked.load(Ordering::Acquire) {
            request.extensions_mut().insert(TwoLengths);
        }
        self.service.call(request)
    }
}

/// The position of the next byte within a connection's requests.
#[derive(Debug)]
enum Place {
    Head {
        lengths: Lengths,
        is_begun: bool,
    },
    Body {
        left: u64,
    },
    ChunkSize,
    Chunk {
        left: u64,
    },
    ChunkEnd,
    Trailers,
    /// The position is no longer known, or no longer matters.
    Lost,
}

/// What the headers read so far say about the body's length.
#[derive(Clone, Copy, Debug, Default)]
struct Lengths {
    content: Option<u64>,
    is_coded: bool,
}

#[derive(Debug)]
struct Requests {
    place: Place,
    line: Vec<u8>,
    heads: u64,
}

impl Default for Requests {
    fn default() -> Self {
        Self { place: Place::head(), line: Vec::new(), heads: 0 }
    }
}

impl Place {
    fn head() -> Self {
        Self::Head { lengths: Lengths::default(), is_begun: false }
    }

    fn body(length: u64) -> Self {
        if length == 0 { Self::head() } else { Self::Body { left: length } }
    }
}

impl Requests {
    /// Parses more bytes. Returns the number of a request with two lengths if its head ends in these bytes.
    fn follow(&mut self, mut bytes: &[u8]) -> Option<u64> {
        while !bytes.is_empty() {
            match &mut self.place {
                Place::Lost => return None,
                Place::Body { left } | Place::Chunk { left } => {
                    let passed = bytes.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                    *left -= passed as u64;
                    bytes = &bytes[passed..];
                    if *left == 0 {
                        self.place =
                            if matches!(self.place, Place::Body { .. }) { Place::head() } else { Place::ChunkEnd };
                    }
                }
                _ => {
                    let end = bytes.iter().position(|&byte| byte == b'\n');
                    let (rest, kept) = (&bytes[..end.unwrap_or(bytes.len())], LINE_BYTES_MAX - self.line.len());
                    self.line.extend_from_slice(&rest[..rest.len().min(kept)]);
                    bytes = end.map_or(&[], |end| &bytes[end + 1..]);
                    if end.is_some() {
                        let line = std::mem::take(&mut self.line);
                        if self.end_line(line.strip_suffix(b"\r").unwrap_or(&line)) {
                            return Some(self.heads);
                        }
                    }
                }
            }
        }
        None
    }

    /// Processes the end of a line. Returns true if the line ends the head of a request with two lengths.
    fn end_line(&mut self, line: &[u8]) -> bool {
        let place = std::mem::replace(&mut self.place, Place::Lost);
        self.place = match place {
            Place::Head { is_begun: false, lengths } => Place::Head { is_begun: !line.is_empty(), lengths },
            Place::Head { lengths, .. } if line.is_empty() => {
                self.heads += 1;
                match lengths {
                    Lengths { content: Some(_), is_coded: true } => return true,
                    Lengths { is_coded: true, .. } => Place::ChunkSize,
                    Lengths { content, .. } => Place::body(content.unwrap_or(0)),
                }
            }
            Place::Head { lengths, .. } => Place::Head { lengths: lengths.and(line), is_begun: true },
            Place::ChunkSize => match chunk_size(line) {
                Some(0) => Place::Trailers,
                Some(left) => Place::Chunk { left },
                None => Place::Lost,
            },
            Place::ChunkEnd if line.is_empty() => Place::ChunkSize,
            Place::Trailers if line.is_empty() => Place::head(),
            Place::Trailers => Place::Trailers,
            Place::ChunkEnd | Place::Body { .. } | Place::Chunk { .. } | Place::Lost => Place::Lost,
        };
        false
    }
}

impl Lengths {
    /// Adds one more header.
    fn and(mut self, line: &[u8]) -> Self {
        let mut parts = line.splitn(2, |&byte| byte == b':');
        let (name, value) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
        if name.eq_ignore_ascii_case(b"transfer-encoding") {
            self.is_coded = true;
        } else if name.eq_ignore_ascii_case(b"content-length") {
            let length = std::str::from_utf8(value.trim_ascii()).ok().and_then(|text| text.parse().ok());
            self.content = Some(length.unwrap_or(NO_LENGTH));
        }
        self
    }
}

/// Parses a chunk's size and ignores its extensions.
fn chunk_size(line: &[u8]) -> Option<u64> {
    let size = line.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    u64::from_str_radix(std::str::from_utf8(size).ok()?, 16).ok()
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let outcome = Pin::new(&mut this.stream).poll_read(cx, buf);
        if let Some(number) = this.requests.follow(&buf.filled()[before..]) {
            this.marked.store(number, Ordering::Release);
        }
        outcome
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Requests of all common forms, followed by one with two lengths.
    const STREAM: &str = "GET /a HTTP/1.1\r\nhost: x\r\n\r\n\r\n\
        POST /b HTTP/1.1\r\nContent-Length: 35\r\n\r\nPOST /no HTTP/1.1\r\ncontent-length:\r\
        POST /c HTTP/1.1\ncontent-length: 0\n\n\
        POST /d HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1A;x=y\r\ncontent-length: 1\r\n12345\r\r\r\n\
        3\r\n\r\n\r\r\n0\r\ncontent-length: 7\r\n\r\n\
        POST /e HTTP/1.1\r\nTRANSFER-ENCODING: chunked\r\nCONTENT-LENGTH: 5\r\n\r\n0\r\n\r\n";

    #[test]
    fn the_request_with_two_lengths_is_found_wherever_reads_end() {
        for step in [1, 2, 3, 7, 64, STREAM.len()] {
            let mut requests = Requests::default();
            let found: Vec<u64> = STREAM.as_bytes().chunks(step).filter_map(|part| requests.follow(part)).collect();
            assert_eq!(found, [5], "{step} bytes at a time");
        }
    }

    #[test]
    fn a_length_that_is_none_is_one_too_many_beside_a_coding() {
        let long = format!("content-length: {}5", " ".repeat(10_000));
        for length in ["content-length: -1", "content-length: 5, 5", "content-length:", &long] {
            let stream = format!("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n{length}\r\n\r\n");
            assert_eq!(Requests::default().follow(stream.as_bytes()), Some(1), "{length:.40}");
        }
    }

    #[test]
    fn what_cannot_be_followed_marks_nothing_and_keeps_little() {
        for head in ["content-length: -1", "transfer-encoding: chunked\r\n\r\nzz"] {
            let mut requests = Requests::default();
            let stream = format!("POST / HTTP/1.1\r\n{head}\r\n\r\n{STREAM}");
            assert_eq!(requests.follow(stream.as_bytes()), None);
        }
        let mut requests = Requests::default();
        assert_eq!(requests.follow(&vec![b'x'; 1 << 20]), None);
        assert!(requests.line.len() <= LINE_BYTES_MAX);
    }
}
