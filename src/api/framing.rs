//! Refuses a request if two readers could disagree about where it ends.

use axum::{
    extract::Request,
    http::{HeaderValue, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};

use super::{guard, problem::Failure};
use crate::framing::{self, Framing};

/// Refuses a request whose end is ambiguous and closes its connection, because the next bytes may not be a request.
pub(super) async fn check(request: Request, next: Next) -> Response {
    let refused = match framing::of(&request) {
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
