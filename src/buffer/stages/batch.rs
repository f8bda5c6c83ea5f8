//! Stage 4, batch: selects the ready groups of the next batch.
//!
//! The stage before is [`finalize`](crate::buffer::finalize), the next [`lease`](crate::buffer::lease).

use forebay_client::wire::BatchRules;

/// How many of the ready groups the next batch takes, given their tokens in the order of delivery.
///
/// A batch has exactly `groups` groups. It has fewer only if the next group would exceed `max_tokens`; a group above
/// `max_tokens` forms a batch by itself. With `partial`, the groups that are ready form a batch. None while the batch
/// is not full.
#[must_use]
pub fn cut(rules: &BatchRules, ready_tokens: &[u64], partial: bool) -> Option<usize> {
    let wanted = rules.groups as usize;
    let max_tokens = rules.max_tokens.unwrap_or(u64::MAX);
    let mut tokens = 0_u64;
    for (taken, &group) in ready_tokens.iter().take(wanted).enumerate() {
        tokens = tokens.saturating_add(group);
        if tokens > max_tokens {
            return Some(taken.max(1));
        }
    }
    let there = ready_tokens.len().min(wanted);
    (there == wanted || (partial && there > 0)).then_some(there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(groups: u32, max_tokens: Option<u64>) -> BatchRules {
        BatchRules { groups, max_tokens, ..BatchRules::default() }
    }

    #[test]
    fn a_batch_is_exactly_full() {
        assert_eq!(cut(&rules(3, None), &[1, 1], false), None);
        assert_eq!(cut(&rules(3, None), &[1, 1, 1, 1], false), Some(3));
    }

    #[test]
    fn the_group_that_would_pass_the_token_bound_waits_for_the_next_batch() {
        assert_eq!(cut(&rules(3, Some(10)), &[4, 6, 1], false), Some(2));
        assert_eq!(cut(&rules(3, Some(10)), &[4, 5], false), None, "a third group may still fit");
    }

    #[test]
    fn an_oversize_group_goes_alone() {
        assert_eq!(cut(&rules(3, Some(10)), &[11], false), Some(1));
        assert_eq!(cut(&rules(3, Some(10)), &[2, 11], false), Some(1));
    }

    #[test]
    fn a_partial_batch_takes_what_is_there() {
        assert_eq!(cut(&rules(3, None), &[1, 1], true), Some(2));
        assert_eq!(cut(&rules(3, None), &[], true), None);
    }
}
