//! Response headers that restrict what browsers may do with a response.

use axum::{
    http::{HeaderMap, HeaderName, HeaderValue, header},
    response::Response,
};

/// What a page may load: only files of this service. Inline styles are allowed, because Swagger UI uses them; inline
/// scripts are not. No other page may frame it.
const PAGE_POLICY: &str = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; \
     object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// What the live page may load: only scripts, styles and answers of this service. Text becomes markup only through the
/// templates of lit-html, so no other code can turn what an agent wrote into elements or scripts.
pub(crate) const CONSOLE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; \
     connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
     require-trusted-types-for 'script'; trusted-types lit-html";

/// Responses that are not pages may load nothing.
const DATA_POLICY: &str = "default-src 'none'; frame-ancestors 'none'";

/// Adds the headers that a handler has not set itself.
pub(crate) async fn secure(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let media = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_page = media.starts_with("text/html");
    // Scripts, styles and images of pages are the same for all callers, so they may be cached.
    let is_asset = ["text/css", "text/javascript", "application/javascript", "image/"].iter();
    let is_asset = is_asset.clone().any(|kind| media.starts_with(kind));
    set(headers, header::X_CONTENT_TYPE_OPTIONS, "nosniff");
    set(headers, header::CONTENT_SECURITY_POLICY, if is_page { PAGE_POLICY } else { DATA_POLICY });
    set(headers, header::X_FRAME_OPTIONS, "DENY");
    set(headers, header::REFERRER_POLICY, "no-referrer");
    if !is_page && !is_asset {
        // Responses that needed a key must not stay in a cache.
        set(headers, header::CACHE_CONTROL, "no-store");
    }
    response
}

fn set(headers: &mut HeaderMap, name: HeaderName, value: &'static str) {
    headers.entry(name).or_insert(HeaderValue::from_static(value));
}
