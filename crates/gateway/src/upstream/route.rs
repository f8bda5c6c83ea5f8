//! Which worker answers a session.

use crate::hash::{fnv1a, mix};

/// The order in which a session tries workers: rendezvous hashing. All calls of a session go to the first worker, which
/// has the prompt in its cache, and only the sessions of a worker that is removed move to others.
#[must_use]
pub fn order<S: AsRef<str>>(session: &str, urls: &[S]) -> Vec<usize> {
    let score = |url: &S| mix(fnv1a(url.as_ref().bytes().chain([0]).chain(session.bytes())));
    let mut places: Vec<usize> = (0..urls.len()).collect();
    places.sort_by_cached_key(|&place| std::cmp::Reverse(score(&urls[place])));
    places
}
