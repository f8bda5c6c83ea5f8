//! `staleness.action = "mask"`: the remaining mask of a group is computed when the group might become part of a batch.
//! It is written when the group does, and holds for all deliveries.

use forebay_domain::{
    ids::{RolloutPk, Version},
    staleness::{MaskLeft, TrainedVersions, mask_below},
};

use super::ready::Ready;
use crate::{
    error::StoreError,
    ops::{trained_spans, trained_versions},
    sql::{Statement, Tx, args},
};

/// The changes of masking in a group.
pub(super) struct Masking {
    /// Trained tokens that were over the bound.
    pub(super) tokens: u64,
    oldest: Version,
    rollouts: Vec<(RolloutPk, MaskLeft)>,
}

/// Removes tokens of versions below `oldest` from the totals of a group.
///
/// A group in which no trained token would remain is not changed, so it is over the bound. The same holds for a group
/// whose spans were not recorded, because the policy did not mask when the group was posted.
pub(super) async fn apply(tx: &mut Tx<'_>, group: &mut Ready, oldest: Version) -> Result<(), StoreError> {
    const SELECT_SPANS: Statement = Statement::new(
        "-- select_spans
        SELECT rollout_pk, trained_segments, trained_tokens, version_min, version_max, trained_spans
        FROM rollout
        WHERE group_pk = $1 AND verdict = 'kept'
        ORDER BY rollout_pk",
    );
    let (mut samples, mut tokens) = (0, 0);
    let mut versions = None;
    let mut rollouts = Vec::new();
    for mut row in tx.fetch_all(SELECT_SPANS, args![group.group_pk]).await? {
        let before: (u32, u64) = (row.get("trained_segments")?, row.get("trained_tokens")?);
        let mut left = MaskLeft {
            trained_segments: before.0,
            trained_tokens: before.1,
            trained_versions: trained_versions(&mut row)?,
        };
        if left.trained_versions.is_some_and(|versions| versions.oldest < oldest) {
            let Some(spans) = trained_spans(&mut row)? else { return Ok(()) };
            left = mask_below(&spans, oldest);
            samples += u64::from(before.0.max(1) - left.trained_segments.max(1));
            tokens += before.1 - left.trained_tokens;
            rollouts.push((row.get("rollout_pk")?, left));
        }
        versions = TrainedVersions::of_all([versions, left.trained_versions]);
    }
    if versions.is_some() {
        group.trained_samples -= samples;
        group.trained_tokens -= tokens;
        group.versions = versions;
        group.masking = Some(Masking { tokens, oldest, rollouts });
    }
    Ok(())
}

/// Writes the masking of the groups of a new batch.
pub(super) async fn write(tx: &mut Tx<'_>, groups: &[Ready]) -> Result<(), StoreError> {
    const MASK_ROLLOUT: Statement = Statement::new(
        "-- mask_rollout
        UPDATE rollout
        SET trained_segments = $2, trained_tokens = $3, version_min = $4, version_max = $5
        WHERE rollout_pk = $1",
    );
    const MASK_GROUP: Statement = Statement::new(
        "-- mask_group
        UPDATE rollout_group
        SET trained_samples = $2, trained_tokens = $3, version_min = $4, version_max = $5, mask_below = $6
        WHERE group_pk = $1 AND state = 'ready'",
    );
    for group in groups {
        let Some(masking) = &group.masking else { continue };
        for (rollout_pk, left) in &masking.rollouts {
            let values = args![
                *rollout_pk,
                left.trained_segments,
                left.trained_tokens,
                left.trained_versions.map(|versions| versions.oldest),
                left.trained_versions.map(|versions| versions.newest),
            ];
            tx.guarded(MASK_ROLLOUT, values, 1).await?;
        }
        let values = args![
            group.group_pk,
            group.trained_samples,
            group.trained_tokens,
            group.versions.map(|versions| versions.oldest),
            group.versions.map(|versions| versions.newest),
            masking.oldest,
        ];
        tx.guarded(MASK_GROUP, values, 1).await?;
    }
    Ok(())
}
