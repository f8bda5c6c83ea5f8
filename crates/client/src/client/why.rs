//! Why policies are as they are, and what became of an id.

use super::{Client, NOT_FOUND, Result, UNKNOWN_POLICY, absent_when};
use crate::wire::{IdWhy, Overview, PolicyWhy};

/// Calls for those who ask why.
impl Client {
    /// Returns a page of the policies that the key may access, the worst first. In `query`, `after` and `limit` select the
    /// page.
    pub async fn overview(&self, query: &[(&str, &str)]) -> Result<Overview> {
        self.get(&["overview"], query).await
    }

    /// Returns why a policy is as it is. Returns `None` if the policy is not known.
    pub async fn policy_why(&self, policy: &str) -> Result<Option<PolicyWhy>> {
        absent_when(UNKNOWN_POLICY, self.get(&["policies", policy, "why"], &[]).await)
    }

    /// Returns what became of a rollout, a group or a batch, in one policy or in those that the key may access. Returns
    /// `None` if nothing has the id.
    pub async fn why(&self, id: &str, policy: Option<&str>) -> Result<Option<IdWhy>> {
        let mut query = vec![("id", id)];
        query.extend(policy.map(|policy| ("policy", policy)));
        absent_when(NOT_FOUND, self.get(&["why"], &query).await)
    }
}
