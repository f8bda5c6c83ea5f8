//! Evaluation: suites, what they say about versions, and where the rollouts are that evaluate a policy.

use std::{collections::HashSet, num::NonZero, sync::LazyLock, time::Duration};

use forebay_domain::{
    evals::{FindEvals, FindEvaluating, FindTasks, FoundSuite, FoundTasks, IsComplete, PutSuite, Suite},
    ids::{CallerId, PolicyName, RolloutId},
    peers::Awaited,
    refusal::Refusal,
};
use forebay_store::error::StoreError;
use tokio::{sync::Semaphore, time::Instant};
use tracing::instrument;

use crate::{Buffer, error::BufferError, waiting::replicas};

impl Buffer {
    /// Says when a suite is complete. Returns whether the suite is new.
    #[instrument(level = "debug", skip_all, fields(policy.name = %policy))]
    pub async fn put_suite(&self, policy: PolicyName, suite: Suite) -> Result<bool, BufferError> {
        let put = PutSuite { policy: policy.clone(), suite, now: self.clock.now() };
        let is_new = loop {
            match self.store.write(put.clone()).await? {
                // Each round creates what is missing, or fails.
                Err(Refusal::UnknownPolicy(name)) => self.create(&name).await?,
                answer => break answer?,
            }
        };
        // With fewer tasks, it may be complete now.
        self.evaluated(&policy);
        Ok(is_new)
    }

    /// What suites say about versions, as a function makes an answer of their results. These may be a hundred thousand, so
    /// only as many requests as there are cores have theirs in memory.
    #[instrument(level = "debug", skip_all, fields(policy.name = %find.policy))]
    pub async fn evals<T: Send + 'static>(
        &self,
        find: FindEvals,
        answer: impl FnOnce(Vec<FoundSuite>) -> T + Send + 'static,
    ) -> Result<T, BufferError> {
        static READERS: LazyLock<Semaphore> =
            LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
        let place = READERS.acquire().await.map_err(|_| StoreError::Closed)?;
        let found = self.store.read(find).await??;
        let summed = tokio::task::spawn_blocking(move || {
            let _place = place;
            answer(found)
        });
        Ok(summed.await.map_err(|_| StoreError::Closed)?)
    }

    /// Waits until a suite is complete at a version, or the time is over.
    ///
    /// A request that waits takes a slot in the share of its caller. `is_still_permitted` is called before the answer,
    /// because a permission can end during the wait.
    #[instrument(level = "debug", skip_all, fields(policy.name = %is.policy))]
    pub async fn wait_complete(
        &self,
        is: IsComplete,
        wait: Duration,
        caller: Option<&CallerId>,
        is_still_permitted: impl Fn() -> bool + Send + Sync,
    ) -> Result<(), BufferError> {
        if wait.is_zero() || self.store.read(is.clone()).await?? {
            return Ok(());
        }
        let _place = self.version_waiters.enter(caller)?;
        let _count = self.metrics.waiting();
        let evaluations = is.policy.evaluations();
        let waker = self.wakers.watch(&evaluations);
        let look = || async {
            let complete = self.store.read(is.clone()).await??;
            if !is_still_permitted() {
                return Err(Refusal::PermissionEnded.into());
            }
            Ok::<_, BufferError>(complete.then_some(()))
        };
        self.wakers.until_version(&waker, Instant::now() + wait, look).await.map(|_: Option<()>| ())
    }

    /// The tasks of a suite at a version.
    #[instrument(level = "debug", skip_all, fields(policy.name = %find.policy))]
    pub async fn eval_tasks(&self, find: FindTasks) -> Result<FoundTasks, BufferError> {
        Ok(self.store.read(find).await??)
    }

    /// Wakes who waits for a suite of a policy to be complete.
    pub(crate) fn evaluated(&self, policy: &PolicyName) {
        replicas::wake(self, Awaited::Version, &policy.evaluations());
    }

    /// The policy that a rollout belongs to in the store: the named one, or its evaluations.
    pub(crate) async fn stored_under(
        &self,
        policy: PolicyName,
        rollout_id: &RolloutId,
    ) -> Result<PolicyName, BufferError> {
        let evaluating = self.evaluating(policy.clone(), vec![rollout_id.clone()]).await?;
        Ok(if evaluating.is_empty() { policy } else { policy.evaluations() })
    }

    /// Which of these rollouts evaluate a policy.
    pub(crate) async fn evaluating(
        &self,
        policy: PolicyName,
        rollouts: Vec<RolloutId>,
    ) -> Result<HashSet<RolloutId>, BufferError> {
        Ok(self.store.read(FindEvaluating { policy, rollouts }).await?)
    }
}
