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

use crate::buffer::Buffer;

/// Pause between two checks. It is longer than any transaction, so a post that read the rules of its policy before they
/// were replaced has stored its group before the second check.
const DELETE_INTERVAL: Duration = Duration::from_mins(10);

/// Rules that one check considers.
const RULES_MAX: u32 = 65_536;

/// Groups that one statement reads.
const GROUPS_SLICE: u32 = 1_000;

/// Rules that one transaction deletes. For each of them the database reads all policies.
const DELETED_SLICE: usize = 500;

pub(in crate::buffer) async fn run_rules_cleanup(buffer: &Buffer) {
    let mut superseded = BTreeSet::new();
    loop {
        match forget_rules(buffer, &superseded).await {
            Ok(found) => superseded = found,
            Err(error) => {
                tracing::warn!(error = %error, "unused rules could not be deleted; the next check tries again");
            }
        }
        tokio::time::sleep(DELETE_INTERVAL).await;
    }
}

pub(in crate::buffer) async fn forget_rules(
    buffer: &Buffer,
    superseded: &BTreeSet<i64>,
) -> Result<BTreeSet<i64>, StoreError> {
    let found: BTreeSet<i64> = buffer.store.read(SupersededRules { limit: RULES_MAX }).await?.into_iter().collect();
    let mut unused: BTreeSet<i64> = found.intersection(superseded).copied().collect();
    let mut after = Some(GroupPk(0));
    while let Some(group) = after.filter(|_| !unused.is_empty()) {
        let slice = buffer.store.read(FindRulesOfGroups { after: group, limit: GROUPS_SLICE }).await?;
        unused.retain(|rules| !slice.rules.contains(rules));
        after = slice.last;
    }
    let unused: Vec<i64> = unused.into_iter().collect();
    let mut forgotten = 0;
    for slice in unused.chunks(DELETED_SLICE) {
        forgotten += buffer.store.write(ForgetRules(slice.to_vec())).await?;
    }
    if forgotten > 0 {
        tracing::info!(rules = forgotten, "unused rules were deleted");
    }
    Ok(found)
}
