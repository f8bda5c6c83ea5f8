//! Posts that wait at the same time share a transaction, so its statements and its sync to disk are paid once.
//!
//! A post never waits for others to join: if no transaction runs, it is stored alone at once. While transactions run,
//! new posts wait, and the next transaction stores them together. The memory for request bodies bounds how many posts
//! can wait, because a request has reserved its share before it comes here.
//!
//! If a shared transaction fails, each of its posts runs alone. The number of statements does not depend on the number
//! of bundles, and a refused bundle has written nothing.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use forebay_domain::ingest::{BundleOutcome, Ingest};
use tokio::sync::{Semaphore, oneshot};
use tracing::{Instrument as _, Span};

use super::{
    dialect::{Runs as _, SqlDialect},
    ops::ingest::Posts,
};
use crate::error::StoreError;

/// The most posts of one transaction. More of them gain little.
const POSTS_MAX: usize = 32;

/// Payload bytes of one transaction, unless a single post is larger. A lease waits for the transaction before it, whose
/// duration depends on these bytes.
const BYTES_MAX: usize = 1 << 20;

type Outcome = Result<Vec<BundleOutcome>, StoreError>;

/// Posts that wait for a transaction.
pub(super) struct GroupCommit {
    waiting: Mutex<VecDeque<Waiting>>,
    /// Bounds the transactions that run at once.
    lanes: Semaphore,
}

struct Waiting {
    post: Ingest,
    /// The span of the caller.
    span: Span,
    reply: oneshot::Sender<Outcome>,
}

impl GroupCommit {
    pub(super) fn new(lanes: usize) -> Self {
        Self { waiting: Mutex::default(), lanes: Semaphore::new(lanes) }
    }

    /// Stores a post, alone or with others. It continues if the caller is dropped.
    pub(super) async fn ingest(self: &Arc<Self>, dialect: &Arc<dyn SqlDialect>, post: Ingest) -> Outcome {
        let (reply, answer) = oneshot::channel();
        self.waiting().push_back(Waiting { post, span: Span::current(), reply });
        let (group_commit, dialect) = (Arc::clone(self), Arc::clone(dialect));
        // There are as many tasks as posts, and each stores at least one waiting post, so every post is stored.
        tokio::spawn(async move { group_commit.commit_next(&*dialect).await });
        answer.await.map_err(|_| StoreError::Closed)?
    }

    async fn commit_next(&self, dialect: &dyn SqlDialect) {
        let Ok(_lane) = self.lanes.acquire().await else { return };
        let taken = self.take();
        if taken.is_empty() {
            return;
        }
        let span = tracing::error_span!(parent: None, "group_commit", posts = taken.len() as i64);
        for waiting in &taken {
            span.follows_from(&waiting.span);
        }
        let (posts, replies): (Vec<_>, Vec<_>) =
            taken.into_iter().map(|waiting| ((waiting.post, waiting.span), waiting.reply)).unzip();
        let together = posts.iter().map(|(post, _)| post.clone()).collect();
        let outcomes = match dialect.write(Posts(together)).instrument(span).await {
            Ok(outcomes) => outcomes.into_iter().map(Ok).collect(),
            // One of the posts made the transaction fail. Stored one by one, only that post gets the error.
            Err(error) if posts.len() > 1 && !matches!(error, StoreError::Closed) => one_by_one(dialect, posts).await,
            Err(error) => vec![Err(error); posts.len()],
        };
        for (reply, outcome) in replies.into_iter().zip(outcomes) {
            // If the caller has gone, the outcome is the same.
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

async fn one_by_one(dialect: &dyn SqlDialect, posts: Vec<(Ingest, Span)>) -> Vec<Outcome> {
    let mut outcomes = Vec::with_capacity(posts.len());
    for (post, span) in posts {
        let outcome = dialect.write(Posts(vec![post])).instrument(span).await;
        outcomes.push(outcome.and_then(|mut outcomes| outcomes.pop().ok_or(StoreError::Closed)));
    }
    outcomes
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use tokio::sync::Notify;
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;
    use crate::{
        dialect::sqlite::Sqlite,
        health::HealthReporter,
        op::{AnyOp, AnyOutput},
        open::options::PayloadOptions,
        peers::Peers,
    };
    use forebay_domain::clock::Timestamp;
    use forebay_telemetry::metrics::Metrics;
    use forebay_telemetry::requests::{RequestIdsLayer, request_ids};

    /// A store whose first write waits and whose second write fails.
    struct Second {
        store: Sqlite,
        writes: AtomicUsize,
        first: Notify,
        /// The requests of each write.
        requests: Mutex<Vec<String>>,
    }

    #[async_trait]
    impl SqlDialect for Second {
        fn ingests(&self) -> usize {
            1
        }

        async fn write_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
            self.requests.lock().expect("no write panics").push(request_ids(&Span::current()));
            match self.writes.fetch_add(1, Ordering::Relaxed) {
                0 => self.first.notified().await,
                1 => return Err(StoreError::Corrupt("a row of another post".to_owned())),
                _ => {}
            }
            self.store.write_any(op).await
        }

        async fn read_any(&self, op: Box<dyn AnyOp>) -> Result<AnyOutput, StoreError> {
            self.store.read_any(op).await
        }

        fn peers(&self) -> Option<Arc<dyn Peers>> {
            None
        }

        fn health_reporter(&self) -> &HealthReporter {
            self.store.health_reporter()
        }

        async fn close(&self) {
            self.store.close().await;
        }
    }

    fn empty_post() -> Ingest {
        Ingest { bundles: Arc::default(), gates: Arc::default(), now: Timestamp::from_micros(0) }
    }

    #[tokio::test]
    async fn posts_that_wait_go_together_and_fail_alone() {
        let _log = tracing::subscriber::set_default(tracing_subscriber::registry().with(RequestIdsLayer::filtered()));
        let store = Sqlite::open_temporary(PayloadOptions::default(), Metrics::new().store())
            .await
            .expect("a temporary store opens");
        let dialect = Arc::new(Second {
            store,
            writes: AtomicUsize::default(),
            first: Notify::new(),
            requests: Mutex::default(),
        });
        let group_commit = Arc::new(GroupCommit::new(dialect.ingests()));
        let post = |id: &str| {
            let (group_commit, dialect) = (Arc::clone(&group_commit), Arc::clone(&dialect) as Arc<dyn SqlDialect>);
            let request = tracing::error_span!("request", request.id = %id);
            tokio::spawn(async move { group_commit.ingest(&dialect, empty_post()).await }.instrument(request))
        };
        let wait_for = async |writes: usize, waiting: usize| {
            while dialect.writes.load(Ordering::Relaxed) < writes || group_commit.waiting().len() < waiting {
                tokio::task::yield_now().await;
            }
        };
        let first = post("a");
        wait_for(1, 0).await;
        let others = [post("b"), post("c")];
        wait_for(1, 2).await;
        dialect.first.notify_one();
        for outcome in [first].into_iter().chain(others) {
            let outcome = outcome.await.expect("a post does not panic");
            assert!(outcome.is_ok_and(|bundles| bundles.is_empty()), "each has the outcome that it would have alone");
        }
        assert_eq!(dialect.writes.load(Ordering::Relaxed), 4, "one alone, two together, and then these one by one");
        assert_eq!(*dialect.requests.lock().expect("no write panics"), ["a", "b c", "b", "c"]);
        dialect.close().await;
    }

    #[tokio::test]
    async fn a_transaction_takes_no_more_than_it_may() {
        let group_commit = GroupCommit::new(1);
        for _ in 0..=POSTS_MAX {
            group_commit.waiting().push_back(Waiting {
                post: empty_post(),
                span: Span::none(),
                reply: oneshot::channel().0,
            });
        }
        assert_eq!(
            [group_commit.take().len(), group_commit.take().len(), group_commit.take().len()],
            [POSTS_MAX, 1, 0]
        );
    }
}
