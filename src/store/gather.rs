//! Posts that wait at the same time share a transaction: its statements and its sync to disk are paid once.
//!
//! Nobody waits in order to be joined: a post that comes alone goes alone. While transactions run, those that come
//! meanwhile gather, and the next transaction takes them along. Waiting posts are bounded by what holds them: a request
//! has taken its share of memory before it comes here.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::{Semaphore, oneshot};

use super::{BundleOutcome, Ingest, StoreError, dialect::Dialect, ops::ingest::Posts};

/// Posts of one transaction: more gain little.
const POSTS_MAX: usize = 32;

/// Payload bytes of one transaction, unless a single post is larger. A lease waits for the transaction before it, and
/// how long that takes depends on these.
const BYTES_MAX: usize = 1 << 20;

type Outcome = Result<Vec<BundleOutcome>, StoreError>;

/// Posts that wait for a transaction.
pub(super) struct Gather {
    waiting: Mutex<VecDeque<Waiting>>,
    /// Transactions that may run at once.
    lanes: Semaphore,
}

struct Waiting {
    post: Ingest,
    reply: oneshot::Sender<Outcome>,
}

impl Gather {
    pub(super) fn new(lanes: usize) -> Self {
        Self { waiting: Mutex::default(), lanes: Semaphore::new(lanes) }
    }

    /// Stores a post, alone or with others. It goes on when the caller is dropped.
    pub(super) async fn ingest<D: Dialect>(self: &Arc<Self>, dialect: &Arc<D>, post: Ingest) -> Outcome {
        let (reply, answer) = oneshot::channel();
        self.waiting().push_back(Waiting { post, reply });
        let (gather, dialect) = (Arc::clone(self), Arc::clone(dialect));
        // As many turns as posts, and each takes at least one that waits: so every post is taken.
        tokio::spawn(async move { gather.turn(&*dialect).await });
        answer.await.map_err(|_| StoreError::Closed)?
    }

    async fn turn<D: Dialect>(&self, dialect: &D) {
        let Ok(_lane) = self.lanes.acquire().await else { return };
        let (posts, replies): (Vec<Ingest>, Vec<_>) =
            self.take().into_iter().map(|waiting| (waiting.post, waiting.reply)).unzip();
        if posts.is_empty() {
            return;
        }
        let outcomes = match dialect.write(Posts(posts.clone())).await {
            Ok(outcomes) => outcomes.into_iter().map(Ok).collect(),
            // One of them is why it failed, and only that one has to be told so.
            Err(error) if posts.len() > 1 && !matches!(error, StoreError::Closed) => one_by_one(dialect, posts).await,
            Err(error) => vec![Err(error); posts.len()],
        };
        for (reply, outcome) in replies.into_iter().zip(outcomes) {
            // A caller that went away does not change what happened.
            let _ = reply.send(outcome);
        }
    }

    fn take(&self) -> Vec<Waiting> {
        let mut waiting = self.waiting();
        let mut bytes = 0;
        let fits = |next: &&Waiting| {
            let is_first = bytes == 0;
            bytes += next.post.bytes().max(1);
            is_first || bytes <= BYTES_MAX
        };
        let count = waiting.iter().take(POSTS_MAX).take_while(fits).count();
        waiting.drain(..count).collect()
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn one_by_one<D: Dialect>(dialect: &D, posts: Vec<Ingest>) -> Vec<Outcome> {
    let mut outcomes = Vec::with_capacity(posts.len());
    for post in posts {
        let outcome = dialect.write(Posts(vec![post])).await;
        outcomes.push(outcome.and_then(|mut outcomes| outcomes.pop().ok_or(StoreError::Closed)));
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;
    use crate::{
        buffer::{Decisions, payload::Codec},
        clock::Timestamp,
        metrics::Metrics,
        store::{
            Peers,
            dialect::{Op, Sqlite},
            health::Vitals,
        },
    };

    /// A store whose first write waits, and whose second fails.
    struct Second {
        store: Sqlite,
        writes: AtomicUsize,
        first: Notify,
    }

    #[async_trait::async_trait]
    impl Dialect for Second {
        const PAYLOADS: Codec = Sqlite::PAYLOADS;
        const INGESTS: usize = 1;

        async fn write<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
            match self.writes.fetch_add(1, Ordering::Relaxed) {
                0 => self.first.notified().await,
                1 => return Err(StoreError::Corrupt("a row of another post".to_owned())),
                _ => {}
            }
            self.store.write(op).await
        }

        async fn read<O: Op>(&self, op: O) -> Result<O::Output, StoreError> {
            self.store.read(op).await
        }

        fn peers(&self) -> Option<Arc<dyn Peers>> {
            None
        }

        fn vitals(&self) -> &Vitals {
            self.store.vitals()
        }

        async fn close(&self) {
            self.store.close().await;
        }
    }

    fn empty_post() -> Ingest {
        Ingest { bundles: Arc::default(), decide: Arc::new(Decisions::default()), now: Timestamp::from_micros(0) }
    }

    #[tokio::test]
    async fn posts_that_wait_go_together_and_fail_alone() {
        let store = Sqlite::open_temporary(Metrics::new().store()).await.expect("a temporary store opens");
        let dialect = Arc::new(Second { store, writes: AtomicUsize::default(), first: Notify::new() });
        let gather = Arc::new(Gather::new(Second::INGESTS));
        let post = || {
            let (gather, dialect) = (Arc::clone(&gather), Arc::clone(&dialect));
            tokio::spawn(async move { gather.ingest(&dialect, empty_post()).await })
        };
        let wait_for = async |writes: usize, waiting: usize| {
            while dialect.writes.load(Ordering::Relaxed) < writes || gather.waiting().len() < waiting {
                tokio::task::yield_now().await;
            }
        };
        let first = post();
        wait_for(1, 0).await;
        let others = [post(), post()];
        wait_for(1, 2).await;
        dialect.first.notify_one();
        for outcome in [first].into_iter().chain(others) {
            let outcome = outcome.await.expect("a post does not panic");
            assert!(outcome.is_ok_and(|bundles| bundles.is_empty()), "each is as if it had come alone");
        }
        assert_eq!(dialect.writes.load(Ordering::Relaxed), 4, "alone, together, and then one by one");
        dialect.close().await;
    }

    #[tokio::test]
    async fn a_transaction_takes_no_more_than_it_may() {
        let gather = Gather::new(1);
        for _ in 0..=POSTS_MAX {
            gather.waiting().push_back(Waiting { post: empty_post(), reply: oneshot::channel().0 });
        }
        assert_eq!([gather.take().len(), gather.take().len(), gather.take().len()], [POSTS_MAX, 1, 0]);
    }
}
