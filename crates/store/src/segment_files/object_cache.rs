//! Payloads of an object store that were written or read lately, in memory.
//!
//! A trainer mostly reads rollouts that were stored a short time ago, and these need no request to the object store. What
//! is in an object never changes, so an entry never becomes wrong.

use std::{
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;
use lru::LruCache;

use super::folder::Place;

/// What an entry takes beside its payload: the key, the links and the head of an allocation.
const ENTRY_BYTES: u64 = 128;

/// Payloads by their places.
pub(super) struct ObjectCache {
    bytes_max: u64,
    kept: Mutex<Kept>,
}

struct Kept {
    /// The one that was used longest ago goes first.
    payloads: LruCache<(i64, u64), Bytes>,
    bytes: u64,
}

impl fmt::Debug for ObjectCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectCache").field("bytes_max", &self.bytes_max).finish_non_exhaustive()
    }
}

impl ObjectCache {
    /// A cache of at most so many bytes; 0 keeps nothing.
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, kept: Mutex::new(Kept { payloads: LruCache::unbounded(), bytes: 0 }) }
    }

    /// The payload at a place, if it is kept.
    pub(super) fn get(&self, place: Place) -> Option<Bytes> {
        let mut kept = self.kept();
        // A row that is damaged may name another length.
        kept.payloads.get(&(place.file, place.start)).filter(|payload| payload.len() as u64 == place.length).cloned()
    }

    /// Keeps the payload of a place. A payload that is larger than a quarter of the cache is not kept.
    pub(super) fn keep(&self, place: Place, payload: Bytes) {
        let bytes = cost(&payload);
        if bytes > self.bytes_max / 4 {
            return;
        }
        let mut kept = self.kept();
        kept.bytes += bytes;
        if let Some(before) = kept.payloads.put((place.file, place.start), payload) {
            kept.bytes -= cost(&before);
        }
        while kept.bytes > self.bytes_max
            && let Some((_, oldest)) = kept.payloads.pop_lru()
        {
            kept.bytes -= cost(&oldest);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn cost(payload: &Bytes) -> u64 {
    ENTRY_BYTES + payload.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(start: u64, length: u64) -> Place {
        Place { file: 1, start, length }
    }

    fn payload(length: u64) -> Bytes {
        vec![length as u8; length as usize].into()
    }

    #[test]
    fn what_was_used_longest_ago_goes_first() {
        let cache = ObjectCache::new(5 * (100 + ENTRY_BYTES));
        for start in 0..5 {
            cache.keep(place(start, 100), payload(100));
        }
        assert!(cache.get(place(0, 100)).is_some());
        cache.keep(place(5, 100), payload(100));
        let kept: Vec<u64> = (0..6).filter(|&start| cache.get(place(start, 100)).is_some()).collect();
        assert_eq!(kept, [0, 2, 3, 4, 5]);
        assert_eq!(cache.kept().bytes, 5 * (100 + ENTRY_BYTES));
    }

    #[test]
    fn a_payload_that_is_kept_again_counts_once() {
        let cache = ObjectCache::new(10 * (100 + ENTRY_BYTES));
        for _ in 0..3 {
            cache.keep(place(0, 100), payload(100));
        }
        assert_eq!(cache.kept().bytes, 100 + ENTRY_BYTES);
    }

    #[test]
    fn another_length_and_a_payload_that_is_too_large_are_not_found() {
        let cache = ObjectCache::new(4 * (100 + ENTRY_BYTES));
        cache.keep(place(0, 100), payload(100));
        assert_eq!(cache.get(place(0, 99)), None);
        cache.keep(place(1, 101), payload(101));
        assert_eq!(cache.get(place(1, 101)), None);
        let none = ObjectCache::new(0);
        none.keep(place(0, 0), payload(0));
        assert_eq!(none.get(place(0, 0)), None);
    }
}
