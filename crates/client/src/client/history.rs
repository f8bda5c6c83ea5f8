//! What happened to a policy over time, for people who look at it.

use super::{Client, Result};
use crate::wire::{JournalPage, PolicySeries, PolicySteps};

/// Calls for those who watch a policy. A policy that does not exist is an error.
impl Client {
    /// Returns what happened to a policy in the buckets of a window, from at most 16 `metrics` such as `received` or
    /// `dropped.*`.
    ///
    /// `query` selects the window by `from`, `to` and `step_s`; without them, it is the last hour in minutes.
    pub async fn series(&self, policy: &str, metrics: &[&str], query: &[(&str, &str)]) -> Result<PolicySeries> {
        let metrics = metrics.join(",");
        let query = [&[("metrics", metrics.as_str())], query].concat();
        self.get(&["policies", policy, "series"], &query).await
    }

    /// Returns a page of the steps of a policy's current run, the oldest first, or with `order=newest` the newest first. In
    /// `query`, `after` and `limit` select the page.
    ///
    /// With `from` and `to`, the answer has the steps of this range in at most `points` buckets instead.
    pub async fn steps(&self, policy: &str, query: &[(&str, &str)]) -> Result<PolicySteps> {
        self.get(&["policies", policy, "steps"], query).await
    }

    /// Returns a page of what operators and time did to a policy, the oldest first, or with `order=newest` the newest
    /// first. In `query`, `after` and `limit` select the page.
    pub async fn journal(&self, policy: &str, query: &[(&str, &str)]) -> Result<JournalPage> {
        self.get(&["policies", policy, "journal"], query).await
    }
}
