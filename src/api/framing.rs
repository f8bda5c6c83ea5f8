//! Refuses a request if two readers could disagree about where it ends.
//!
//! A proxy in front of the service may use `Content-Length` while this service uses the chunks. A part that one of them
//! treats as the body would then be the next request for the other (RFC 9112, 6.1 and 6.3).

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use super::{guard, problem::Failure};

/// Marks a request that had both a length and a transfer coding. Its headers no longer show it, because hyper removes
/// the length.
#[derive(Clone, Copy, Debug)]
pub struct TwoLengths;

/// Refuses a request whose end is ambiguous and closes its connection, because the next bytes may not be a request.
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

/// Whether the transfer coding is supported. hyper decodes only chunks; any other coding would be taken for content.
fn is_taken(headers: &HeaderMap) -> bool {
    let mut sent = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(first) = sent.next() else { return true };
    sent.next().is_none() && first.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")
}
