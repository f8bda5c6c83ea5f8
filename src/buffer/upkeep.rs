//! Upkeep: rules that nothing uses any more are deleted.
//!
//! Separate from the sweep, because nobody waits for it, and because it walks past all groups: they alone know which rules
//! they have. It does so only when there are rules to delete.

use std::{collections::BTreeSet, time::Duration};

use super::{Buffer, ids::GroupPk};
use crate::store::StoreError;

/// Pause between two looks; longer than any transaction, so that a post which read the rules of its policy before they
/// were replaced has stored its group by the second look.
const UPKEEP_EVERY: Duration = Duration::from_mins(10);

/// Rules that one look considers.
const RULES_MAX: u32 = 65_536;

/// Groups that one statement reads.
const GROUPS_SLICE: u32 = 1_000;

impl Buffer {
    /// Deletes unused rules until it is dropped.
    pub async fn run_upkeep(&self) {
        let mut superseded = BTreeSet::new();
        loop {
            match self.forget_rules(&superseded).await {
                Ok(found) => superseded = found,
                Err(error) => {
                    tracing::warn!(error = %error, "unused rules could not be deleted; the next look goes on");
                }
            }
            tokio::time::sleep(UPKEEP_EVERY).await;
        }
    }

    /// Deletes those rules of `superseded`, found by an earlier look, that no group has; answers all that no policy has
    /// now. Replaced rules never become those of a policy again.
    pub async fn forget_rules(&self, superseded: &BTreeSet<i64>) -> Result<BTreeSet<i64>, StoreError> {
        let found: BTreeSet<i64> = self.store.superseded_rules(RULES_MAX).await?.into_iter().collect();
        let mut unused: BTreeSet<i64> = found.intersection(superseded).copied().collect();
        let mut after = Some(GroupPk(0));
        while let Some(group) = after.filter(|_| !unused.is_empty()) {
            let slice = self.store.rules_of_groups(group, GROUPS_SLICE).await?;
            unused.retain(|rules| !slice.rules.contains(rules));
            after = slice.last;
        }
        if !unused.is_empty() {
            let forgotten = self.store.forget_rules(unused.into_iter().collect()).await?;
            tracing::info!(rules = forgotten, "rules deleted that no policy and no group has");
        }
        Ok(found)
    }
}
