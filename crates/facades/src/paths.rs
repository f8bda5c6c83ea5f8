//! Keys and names of consumers in paths: `/k/KEY` and `/c/CONSUMER` before the path of a route, for clients whose only
//! setting is an address.

use axum::{extract::Request, http::Uri};
use forebay_api::http::guard::PathKey;
use percent_encoding::percent_decode_str;

/// The consumer that a path names, as sent.
#[derive(Clone, Debug)]
pub(crate) struct PathConsumer(pub(crate) String);

/// Takes the prefixes from the path of a request. The request then has the path of its route, and what the prefixes say
/// as extensions.
pub(crate) async fn take_prefixes(mut request: Request) -> Request {
    let path = request.uri().path().to_owned();
    let mut rest = path.as_str();
    loop {
        // A client may append its path to an address that ends with a slash.
        let trimmed = rest.trim_start_matches('/');
        let Some((kind, tail)) = trimmed.split_once('/') else { break };
        let (value, tail) = tail.split_once('/').unwrap_or((tail, ""));
        let value = percent_decode_str(value).decode_utf8_lossy().into_owned();
        match kind {
            "k" => drop(request.extensions_mut().insert(PathKey(value.into()))),
            "c" => drop(request.extensions_mut().insert(PathConsumer(value))),
            _ => break,
        }
        rest = tail;
    }
    let rest = rest.trim_start_matches('/');
    let query = request.uri().query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = format!("/{rest}{query}").parse().ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use futures::FutureExt as _;

    use super::*;

    fn taken(uri: &str) -> (String, Option<String>, Option<String>) {
        let request = Request::builder().uri(uri).body(Body::empty()).expect("the address is valid");
        let request = take_prefixes(request).now_or_never().expect("it never waits");
        let key = request.extensions().get::<PathKey>().map(|PathKey(key)| key.to_string());
        let consumer = request.extensions().get::<PathConsumer>().map(|PathConsumer(name)| name.clone());
        (request.uri().to_string(), key, consumer)
    }

    #[test]
    fn prefixes_are_taken_from_paths_and_other_paths_stay() {
        let (key, consumer) = (Some("fb_1".to_owned()), Some("a b".to_owned()));
        assert_eq!(taken("/buffer/write"), ("/buffer/write".to_owned(), None, None));
        assert_eq!(taken("/k/fb_1/buffer/write?x=1"), ("/buffer/write?x=1".to_owned(), key.clone(), None));
        assert_eq!(taken("/c/a%20b/k/fb_1//health"), ("/health".to_owned(), key.clone(), consumer));
        assert_eq!(taken("/k/fb_1"), ("/".to_owned(), key.clone(), None));
        assert_eq!(taken("/k/fb_1/"), ("/".to_owned(), key, None));
        assert_eq!(taken("//get"), ("/get".to_owned(), None, None));
        assert_eq!(taken("/"), ("/".to_owned(), None, None));
        assert_eq!(taken("/k"), ("/k".to_owned(), None, None));
    }
}
