//! Which posts are retries. Atropos' clients repeat a post that was not answered, and send nothing that identifies it.
//!
//! The same body may be sent twice on purpose, for example by an environment without randomness. So a body is a retry
//! of its last post only if that post was not answered: its client disconnected before, or the process ended. The rollouts
//! are named by the digest of the body and the number of the post, so the ledger recognises a retry after a restart or
//! at another replica as well; there, nothing is known about the answer, and a post of the last [`RETRY_WINDOW_S`] counts
//! as not answered.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

/// How many posts are remembered. They take about 10 MiB.
const POSTS_MAX: usize = 65_536;

/// How long after a post a retry may come: longer than the retries of Atropos' environments take with their timeouts.
pub(super) const RETRY_WINDOW_S: i64 = 1_200;

/// Names the body of a post.
pub(super) type BodyDigest = [u8; 16];

pub(super) fn digest(body: &[u8]) -> BodyDigest {
    let mut digest = [0; 16];
    digest.copy_from_slice(&blake3::hash(body).as_bytes()[..16]);
    digest
}

/// The ids of the groups of a post: its body, the number of the post with this body, and the place in the body.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupIds {
    digest: BodyDigest,
    number: u64,
}

impl GroupIds {
    /// Those of another post with the same body.
    pub(super) fn of(self, number: u64) -> Self {
        Self { number, ..self }
    }

    /// The id of the group at a place.
    pub(super) fn group_id(self, place: usize) -> String {
        format!("atropos-{:032x}-{}-{place}", u128::from_be_bytes(self.digest), self.number)
    }
}

/// The last post with a body.
#[derive(Clone, Copy, Debug)]
struct LastPost {
    number: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its handler still runs, or its answer is being written.
    Running,
    Answered,
    /// Its client disconnected before it was answered, or it was refused.
    Unanswered,
    /// The same of the first post with its body in this process. What earlier processes have stored is not known.
    Unknown,
}

/// The posts of this process.
#[derive(Clone, Default)]
pub(super) struct Posts(Arc<Mutex<Remembered>>);

#[derive(Default)]
struct Remembered {
    last: HashMap<BodyDigest, LastPost>,
    /// The bodies in the order in which they were first posted, so that the oldest are forgotten first.
    order: VecDeque<BodyDigest>,
}

impl Posts {
    /// Begins a post. It has the number of the last post with this body if that was not answered, else the next number.
    pub(super) fn begin(&self, digest: BodyDigest) -> Post {
        let mut remembered = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = remembered.last.get(&digest).copied().filter(|last| last.state != State::Unknown);
        let is_retry = last.is_some_and(|last| last.state == State::Unanswered);
        let number = last.map_or(0, |last| last.number + u64::from(!is_retry));
        remembered.set(digest, LastPost { number, state: State::Running });
        Post { posts: self.clone(), digest, number, is_retry, is_first: last.is_none() }
    }
}

impl Remembered {
    fn set(&mut self, digest: BodyDigest, last: LastPost) {
        if self.last.insert(digest, last).is_none() {
            self.order.push_back(digest);
            if self.order.len() > POSTS_MAX
                && let Some(oldest) = self.order.pop_front()
            {
                self.last.remove(&oldest);
            }
        }
    }
}

/// A post that is not yet answered. If it is dropped before, the next post with its body is its retry.
pub(super) struct Post {
    posts: Posts,
    digest: BodyDigest,
    number: u64,
    is_retry: bool,
    is_first: bool,
}

impl Post {
    /// The number among the posts with this body.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether an earlier post with this body was not answered.
    pub(super) fn is_retry(&self) -> bool {
        self.is_retry
    }

    /// Whether this process knows no earlier post with this body. Then the ledger may know some.
    pub(super) fn is_first(&self) -> bool {
        self.is_first
    }

    pub(super) fn names(&self) -> GroupIds {
        GroupIds { digest: self.digest, number: self.number }
    }

    /// Gives the post another number, because earlier processes have used those up to it.
    pub(super) fn renumber(&mut self, number: u64) {
        self.number = number;
        self.set(State::Running);
    }

    /// The answer was handed to the connection.
    pub(super) fn answered(&self) {
        self.set(State::Answered);
    }

    fn set(&self, state: State) {
        let mut remembered = self.posts.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A later post with the same body may have begun.
        if remembered.last.get(&self.digest).is_none_or(|last| last.number <= self.number) {
            remembered.set(self.digest, LastPost { number: self.number, state });
        }
    }
}

impl Drop for Post {
    fn drop(&mut self) {
        let remembered = self.posts.0.lock().unwrap_or_else(PoisonError::into_inner);
        let last = remembered.last.get(&self.digest);
        let is_running = last.is_some_and(|last| last.number == self.number && last.state == State::Running);
        drop(remembered);
        if is_running {
            self.set(if self.is_first { State::Unknown } else { State::Unanswered });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_is_a_retry_if_the_last_one_with_its_body_was_not_answered() {
        let posts = Posts::default();
        let begin = || {
            let post = posts.begin(digest(b"{}"));
            (post.number(), post.is_retry(), post.is_first(), post)
        };
        assert!(matches!(begin(), (0, false, true, _)));
        let (number, is_retry, is_first, post) = begin();
        assert_eq!((number, is_retry, is_first), (0, false, true), "the ledger says what the first post was");
        post.answered();
        drop(post);
        assert!(matches!(begin(), (1, false, false, _)), "the post before was answered");
        let (number, is_retry, _, running) = begin();
        assert_eq!((number, is_retry), (1, true), "the post before was not answered");
        let (number, is_retry, _, mut second) = begin();
        assert_eq!((number, is_retry), (2, false), "the post before is still running");
        second.renumber(7);
        drop(running);
        drop(second);
        assert!(matches!(begin(), (7, true, false, _)));
    }

    #[test]
    fn the_oldest_posts_are_forgotten() {
        let posts = Posts::default();
        let begin = |index: usize| posts.begin(digest(&index.to_le_bytes()));
        for index in 0..=POSTS_MAX {
            begin(index).answered();
        }
        assert!(!begin(POSTS_MAX).is_first());
        assert!(begin(0).is_first());
        assert_eq!(posts.0.lock().map(|remembered| remembered.last.len()).unwrap_or_default(), POSTS_MAX);
    }

    /// Stored ids must stay recognisable to later versions.
    #[test]
    fn ids_of_groups_are_pinned() {
        let ids = GroupIds { digest: digest(b"{}"), number: 3 };
        assert_eq!(ids.group_id(1), "atropos-6e46dd10defc9b56c29a6ec56b508c21-3-1");
    }
}
