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

/// Posts of one transaction: more gain little, and a lease waits for the transaction before it.
const POSTS_MAX: usize = 32;

/// Payload bytes of one transaction, unless a single post is larger.
const BYTES_MAX: usize = 4 << 20;

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
