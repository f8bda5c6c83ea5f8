//! Deletes rules that are no longer used.
//!
//! Separate from the sweep, because no request waits for it, and because it reads all groups: only the groups show
//! which rules they use. It reads them only if there are rules to delete.

use std::{collections::BTreeSet, time::Duration};

use forebay_domain::ids::GroupPk;
use forebay_store::{
    error::StoreError,
    ops::unused_rules::{FindRulesOfGroups, ForgetRules, SupersededRules},
};

use crate::Buffer;

/// Pause between two checks. It is longer than any transaction, so a post that read the rules of its policy before they
/// were replaced has stored its group before the second check.
const DELETE_INTERVAL: Duration = Duration::from_mins(10);

/// Rules that one check considers.
const RULES_MAX: u32 = 65_536;

/// Groups that one statement reads.
const GROUPS_SLICE: u32 = 1_000;

/// Rules that one transaction deletes. For each of them the database reads all policies.
const DELETED_SLICE: usize = 500;

impl Buffer {
    /// Deletes unused rules until the future is dropped.
    pub async fn run_rules_cleanup(&self) {
        let mut superseded = BTreeSet::new();
        loop {
            match self.forget_rules(&superseded).await {
                Ok(found) => superseded = found,
                Err(error) => {
                    tracing::warn!(error = %error, "unused rules could not be deleted; the next check tries again");
                }
            }
            tokio::time::sleep(DELETE_INTERVAL).await;
        }
    }

    /// Deletes those rules of `superseded`, found by an earlier check, that no group uses. Returns all rules that no
    /// policy uses now. Replaced rules never become those of a policy again.
    pub async fn forget_rules(&self, superseded: &BTreeSet<i64>) -> Result<BTreeSet<i64>, StoreError> {
        let found: BTreeSet<i64> = self.store.read(SupersededRules { limit: RULES_MAX }).await?.into_iter().collect();
        let mut unused: BTreeSet<i64> = found.intersection(superseded).copied().collect();
        let mut after = Some(GroupPk(0));
        while let Some(group) = after.filter(|_| !unused.is_empty()) {
            let slice = self.store.read(FindRulesOfGroups { after: group, limit: GROUPS_SLICE }).await?;
            unused.retain(|rules| !slice.rules.contains(rules));
            after = slice.last;
        }
        let unused: Vec<i64> = unused.into_iter().collect();
        let mut forgotten = 0;
        for slice in unused.chunks(DELETED_SLICE) {
            forgotten += self.store.write(ForgetRules(slice.to_vec())).await?;
        }
        if forgotten > 0 {
            tracing::info!(rules = forgotten, "unused rules were deleted");
        }
        Ok(found)
    }
}
