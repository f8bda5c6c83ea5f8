//! Where a request ends: refused when two readers could see different ends.
//!
//! A proxy in front may go by the length of a request and this service by its chunks; what one of them takes for a body
//! the other takes for the next request (RFC 9112, 6.1 and 6.3).

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use super::{guard, problem::Failure};

/// Marks a request that came with both a length and a transfer coding. Its headers do not show it any more.
#[derive(Clone, Copy, Debug)]
pub struct TwoLengths;

/// Answers a request whose end is in doubt, and closes its connection: what follows may be no request.
pub(super) async fn check(request: Request, next: Next) -> Response {
    let refused = if request.extensions().get::<TwoLengths>().is_some() {
        Failure::new(StatusCode::BAD_REQUEST, "two-lengths", "The request's length is ambiguous")
            .detail("send either Content-Length or Transfer-Encoding, not both")
    } else if !is_taken(request.headers()) {
        Failure::new(StatusCode::NOT_IMPLEMENTED, "transfer-coding", "The transfer coding is not supported")
            .detail("Transfer-Encoding must be chunked, once; compress with Content-Encoding: gzip or zstd")
    } else {
        return next.run(request).await;
    };
    guard::turn_away(request);
    let mut response = refused.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

/// Chunks are undone; any other coding would be taken for content.
fn is_taken(headers: &HeaderMap) -> bool {
    let mut sent = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(first) = sent.next() else { return true };
    sent.next().is_none() && first.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")
}
