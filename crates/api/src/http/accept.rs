//! What a client accepts and what it has: lists of media types and content codings with quality values (RFC 9110, section
//! 12.5), and tags of earlier answers (section 13.1.2).

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

/// The entries of all headers with a name, in lower case and without parameters, with their quality values from 0 to 1.
pub fn accepted(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = (String, f32)> {
    let lists = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    lists.flat_map(|list| list.split(',')).filter(|entry| !entry.trim().is_empty()).map(|entry| {
        let mut parts = entry.split(';').map(str::trim);
        let value = parts.next().unwrap_or_default().to_ascii_lowercase();
        let quality = parts.find_map(|part| part.strip_prefix(['q', 'Q'])?.strip_prefix('=')?.parse().ok());
        (value, quality.unwrap_or(1.0))
    })
}

/// The preferred one of the accepted formats: `known` names those that there are, and `default` is taken if the caller
/// has no preference. None if it accepts none of them.
pub fn preferred<F>(headers: &HeaderMap, default: F, known: impl Fn(&str) -> Option<F>) -> Option<F> {
    let mut entries = accepted(headers, header::ACCEPT).peekable();
    if entries.peek().is_none() {
        return Some(default);
    }
    let found = entries.filter_map(|(media, quality)| Some((known(&media)?, quality)).filter(|_| quality > 0.0));
    // If quality values are equal, the format named first wins.
    found.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(format, _)| format)
}

/// Whether the response should be compressed with zstd. It should if the caller names zstd, or if it refuses `identity`
/// and accepts any coding. `*` alone is not such a request.
pub fn asks_for_zstd(headers: &HeaderMap) -> bool {
    let quality = |coding| {
        let entry = accepted(headers, header::ACCEPT_ENCODING).find(|(value, _)| value == coding);
        entry.map(|(_, quality)| quality)
    };
    let identity = quality("identity");
    let unnamed = || quality("*").filter(|_| identity == Some(0.0));
    let zstd = quality("zstd").or_else(unnamed).unwrap_or(0.0);
    zstd > 0.0 && zstd >= identity.unwrap_or(0.0)
}

/// Whether the client accepts gzip. It must name it.
pub fn accepts_gzip(headers: &HeaderMap) -> bool {
    accepted(headers, header::ACCEPT_ENCODING).any(|(coding, quality)| coding == "gzip" && quality > 0.0)
}

/// Whether the client has the answer with this tag. Tags are compared as weak ones: an answer with gzip and one without
/// have the same tag.
pub fn knows(headers: &HeaderMap, tag: &HeaderValue) -> bool {
    let known = headers.get_all(header::IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let tag = without_strength(tag.to_str().unwrap_or_default());
    known.flat_map(|tags| tags.split(',')).map(str::trim).any(|known| known == "*" || without_strength(known) == tag)
}

fn without_strength(tag: &str) -> &str {
    tag.strip_prefix("W/").unwrap_or(tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gzip_is_accepted_by_name() {
        let accepts = |value: &'static str| {
            accepts_gzip(&HeaderMap::from_iter([(header::ACCEPT_ENCODING, HeaderValue::from_static(value))]))
        };
        for value in ["gzip", "gzip, deflate", "br, GZIP;q=0.5", "deflate,gzip; q=1"] {
            assert!(accepts(value), "{value}");
        }
        for value in ["", "identity", "br", "gzip;q=0", "gzip; q=0.0", "xgzip"] {
            assert!(!accepts(value), "{value}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    #[test]
    fn tags_are_compared_without_their_strength() {
        let knows = |sent: &'static str, tag: &'static str| {
            let headers = HeaderMap::from_iter([(header::IF_NONE_MATCH, HeaderValue::from_static(sent))]);
            knows(&headers, &HeaderValue::from_static(tag))
        };
        for sent in ["W/\"a\"", "\"a\"", "\"b\", W/\"a\"", "*"] {
            assert!(knows(sent, "W/\"a\"") && knows(sent, "\"a\""), "{sent}");
        }
        for sent in ["\"b\"", "", "W/a", "a"] {
            assert!(!knows(sent, "W/\"a\""), "{sent}");
        }
    }

    #[test]
    fn zstd_is_asked_for_by_name() {
        let asks = |lists: &[&str]| {
            let value = |list: &&str| (header::ACCEPT_ENCODING, list.parse().expect("a value"));
            asks_for_zstd(&lists.iter().map(value).collect())
        };
        for lists in [
            &["zstd"][..],
            &["gzip, ZSTD;q=0.1"],
            &["gzip", "br, zstd"],
            &["identity;q=0.5, zstd; Q=0.5"],
            &["identity;q=0, *"],
        ] {
            assert!(asks(lists), "{lists:?}");
        }
        for lists in [
            &[][..],
            &[""],
            &["*"],
            &["gzip, br"],
            &["zstd;q=0"],
            &["*, zstd;Q=0"],
            &["zstd;q=0.5, identity"],
            &["identity;q=0, zstd;q=0, *"],
            &["xzstd"],
        ] {
            assert!(!asks(lists), "{lists:?}");
        }
    }
}
