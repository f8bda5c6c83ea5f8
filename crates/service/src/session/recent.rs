//! What is kept in memory of the sessions that were active last. It can always be made again from the stored calls.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use forebay_domain::ids::SessionId;

/// Sessions of which something is kept.
const SESSIONS_MAX: usize = 4_096;

/// One value for each of the sessions that were active last, bounded in number and in size.
#[derive(Debug)]
pub struct RecentSessions<T> {
    cached: Mutex<Cached<T>>,
    /// The size of all values together.
    size_max: usize,
}

#[derive(Debug)]
struct Cached<T> {
    sessions: HashMap<SessionId, Entry<T>>,
    size: usize,
    /// Counts uses.
    uses: u64,
}

#[derive(Debug)]
struct Entry<T> {
    value: Arc<tokio::sync::Mutex<T>>,
    size: usize,
    used: u64,
}

impl<T: Default> RecentSessions<T> {
    /// Keeps nothing yet.
    #[must_use]
    pub fn new(size_max: usize) -> Self {
        Self { cached: Mutex::new(Cached { sessions: HashMap::new(), size: 0, uses: 0 }), size_max }
    }

    /// The value of a session, of which several calls may be in flight.
    pub fn of(&self, session: SessionId) -> Arc<tokio::sync::Mutex<T>> {
        let mut cached = self.cached();
        cached.uses += 1;
        let used = cached.uses;
        let entry = cached.sessions.entry(session);
        let entry = entry.or_insert_with(|| Entry { value: Arc::default(), size: 0, used });
        entry.used = used;
        Arc::clone(&entry.value)
    }

    /// Notes how large a value is, and drops those that were used the longest time ago if they are too large together.
    pub fn note(&self, session: SessionId, size: usize) {
        let mut cached = self.cached();
        let Some(entry) = cached.sessions.get_mut(&session) else { return };
        let before = std::mem::replace(&mut entry.size, size);
        cached.size = cached.size + size - before;
        while cached.size > self.size_max || cached.sessions.len() > SESSIONS_MAX {
            let oldest = cached.sessions.iter().min_by_key(|(_, entry)| entry.used).map(|(session, _)| *session);
            let Some(dropped) = oldest.and_then(|session| cached.sessions.remove(&session)) else { return };
            cached.size -= dropped.size;
        }
    }

    /// Drops the value of a session that has ended.
    pub(super) fn forget(&self, session: SessionId) {
        let mut cached = self.cached();
        if let Some(dropped) = cached.sessions.remove(&session) {
            cached.size -= dropped.size;
        }
    }

    fn cached(&self) -> MutexGuard<'_, Cached<T>> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The numbers of the calls of a session that a value contains. Calls are recorded at the same time, so a later number
/// may be known before an earlier one.
#[derive(Debug, Default)]
pub struct KnownCalls {
    /// All calls up to this number are known.
    up_to: u32,
    /// Further calls that are.
    beyond: BTreeSet<u32>,
}

impl KnownCalls {
    /// Whether a call is known.
    #[must_use]
    pub fn has(&self, seq: u32) -> bool {
        seq <= self.up_to || self.beyond.contains(&seq)
    }

    /// Whether the first `calls` calls are known. After a restart none is, and calls that other replicas have recorded are
    /// not.
    #[must_use]
    pub fn has_all(&self, calls: u32) -> bool {
        (self.up_to + 1..=calls).all(|seq| self.beyond.contains(&seq))
    }

    /// Notes that a call is known.
    pub fn learn(&mut self, seq: u32) {
        self.beyond.insert(seq);
        while self.beyond.remove(&(self.up_to + 1)) {
            self.up_to += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_the_longest_time_ago_is_dropped_first() {
        let recent: RecentSessions<u32> = RecentSessions::new(10);
        let [one, two, three] = std::array::from_fn(|_| SessionId::mint());
        for (session, value) in [(one, 1), (two, 2), (three, 3)] {
            *recent.of(session).try_lock().expect("nobody holds it") = value;
            recent.note(session, 4);
            drop(recent.of(one));
        }
        let found = [one, two, three].map(|session| *recent.of(session).try_lock().expect("nobody holds it"));
        assert_eq!(found, [1, 0, 3]);
        recent.forget(one);
        recent.note(three, 10);
        assert_eq!(*recent.of(three).try_lock().expect("nobody holds it"), 3, "the size of what was dropped is free");
    }

    #[test]
    fn calls_are_known_in_any_order() {
        let mut known = KnownCalls::default();
        known.learn(2);
        assert!(known.has(2) && !known.has(1) && !known.has_all(2));
        known.learn(1);
        assert!(known.has_all(2) && !known.has_all(3));
    }
}
