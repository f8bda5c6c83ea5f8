//! Where a request ends, if two readers could disagree about it.
//!
//! A proxy in front of the service may use `Content-Length` while this service uses the chunks. A part that one of them
//! treats as the body would then be the next request for the other (RFC 9112, 6.1 and 6.3). Every listener refuses such
//! a request in its own words.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use crate::http::{guard, problem::Failure};

/// Marks a request that had both a length and a transfer coding. Its headers no longer show it, because hyper removes
/// the length.
#[derive(Clone, Copy, Debug)]
pub struct TwoLengths;

/// How a request says where it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// In one way that every reader understands.
    Clear,
    /// In two ways.
    TwoLengths,
    /// With a transfer coding other than chunks. hyper decodes only chunks; any other coding would be taken for content.
    UnknownCoding,
}

/// How a request says where it ends.
pub fn of(request: &Request) -> Framing {
    if request.extensions().get::<TwoLengths>().is_some() {
        Framing::TwoLengths
    } else if !is_chunked_or_absent(request.headers()) {
        Framing::UnknownCoding
    } else {
        Framing::Clear
    }
}

fn is_chunked_or_absent(headers: &HeaderMap) -> bool {
    let mut sent = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(first) = sent.next() else { return true };
    sent.next().is_none() && first.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked")
}

/// Refuses a request whose end is ambiguous and closes its connection, because the next bytes may not be a request.
pub async fn check(request: Request, next: Next) -> Response {
    let refused = match of(&request) {
        Framing::Clear => return next.run(request).await,
        Framing::TwoLengths => {
            Failure::new(StatusCode::BAD_REQUEST, "two-lengths", "The request's length is ambiguous")
                .detail("send either Content-Length or Transfer-Encoding, not both")
        }
        Framing::UnknownCoding => {
            Failure::new(StatusCode::NOT_IMPLEMENTED, "transfer-coding", "The transfer coding is not supported")
                .detail("Transfer-Encoding must be chunked, once; compress with Content-Encoding: gzip or zstd")
        }
    };
    guard::turn_away(request);
    let mut response = refused.into_response();
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}
