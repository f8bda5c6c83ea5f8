//! Scores of rollouts, and the work of those who give them.

use reqwest::Method;

use super::{Client, NOT_FOUND, Repeat, Result, absent_when, answered_each};
use crate::wire::{
    ScoreExtendRequest, ScoreExtended, ScoreItem, ScoreLeaseRequest, ScoreLeases, ScoreList, ScoreReceipt,
    ScoreRequest, ScoreRetried, ScoreRetryRequest,
};

/// Calls for scorers: judges, test runners, people.
impl Client {
    /// Gives scores in one commit: either all are stored or none. Returns one receipt for each, in the same order.
    ///
    /// After a lost answer, a repeated `failed` is refused with `lease-lost`, because the first one has ended the lease.
    pub async fn score(&self, scores: &[ScoreRequest]) -> Result<Vec<ScoreReceipt>> {
        answered_each(self.send(Method::POST, &["scores"], scores, Repeat::Always).await?, scores)
    }

    /// Returns the scores of a rollout in the current run of its policy, or `None` if the rollout is not known.
    pub async fn scores(&self, policy: &str, rollout_id: &str) -> Result<Option<ScoreList>> {
        let query = [("policy", policy), ("rollout_id", rollout_id)];
        absent_when(NOT_FOUND, self.get(&["scores"], &query).await)
    }

    /// Leases work. Returns no items if there was none within `wait_ms`.
    ///
    /// Without a `request_id`, a repeat would lease other work. So the call is then repeated only if the service certainly
    /// did not begin it.
    pub async fn lease_scores(&self, request: &ScoreLeaseRequest) -> Result<Vec<ScoreItem>> {
        let repeat = if request.request_id.is_some() { Repeat::Always } else { Repeat::UnlessBegun };
        let leased: ScoreLeases = self.send(Method::POST, &["scores", "leases"], request, repeat).await?;
        Ok(leased.items)
    }

    /// Extends leases of work. Those that are lost do not keep the others from being extended.
    pub async fn extend_scores(&self, request: &ScoreExtendRequest) -> Result<ScoreExtended> {
        self.send(Method::POST, &["scores", "leases", "extend"], request, Repeat::Always).await
    }

    /// Gives work whose attempts are used up all of them back. Returns how many items there were.
    pub async fn retry_scores(&self, policy: &str, name: &str) -> Result<u64> {
        let request = ScoreRetryRequest { policy: Some(policy.to_owned()), name: name.to_owned() };
        let retried: ScoreRetried = self.send(Method::POST, &["scores", "retry"], &request, Repeat::Always).await?;
        Ok(retried.retried)
    }
}
