//! The rows of rollouts and payloads: separate from [`ingest`](super::ingest), which decides what they say.

use std::sync::LazyLock;

use forebay_client::wire::Verdict;

use super::{group::LockedGroup, name_of};
use crate::{
    buffer::{
        ids::{GroupPk, PolicyPk, Run, Version},
        ingest::{NewRollout, RolloutDecision},
        seal::RolloutSeal,
        staleness::TrainedSpan,
    },
    store::{
        Ingest, StoreError,
        sql::{Arg, InsertRows, Tx, args},
    },
};

/// A rollout that waits to be inserted with its siblings: rows go in as few statements as may be.
pub(super) struct Arrived<'b> {
    new: &'b NewRollout,
    decision: RolloutDecision,
    policy_pk: PolicyPk,
    run: Run,
    group_pk: GroupPk,
    keeps_payload: bool,
}

impl<'b> Arrived<'b> {
    pub(super) fn new(group: &LockedGroup, new: &'b NewRollout, decision: &RolloutDecision) -> Self {
        let LockedGroup { policy_pk, run, group_pk, rules, .. } = group;
        let delivered = matches!(decision.verdict, Verdict::Kept | Verdict::Masked);
        Self {
            new,
            decision: decision.clone(),
            policy_pk: *policy_pk,
            run: *run,
            group_pk: *group_pk,
            keeps_payload: delivered || rules.retention.dropped_s > 0,
        }
    }

    /// Payload bytes that count as not yet trained.
    pub(super) fn live_bytes(&self) -> i64 {
        let delivered = matches!(self.decision.verdict, Verdict::Kept | Verdict::Masked);
        if delivered { self.new.payload.body.len() as i64 } else { 0 }
    }

    fn args(&self, ingest: &Ingest) -> Vec<Arg> {
        let (new, decision) = (self.new, &self.decision);
        let seal = RolloutSeal {
            rollout_id: new.rollout_id.as_str(),
            group_id: new.group().as_str(),
            verdict: decision.verdict,
            reward: new.facts.reward,
            policy_version: decision.versions.version,
            trained_spans: decision.trained_spans.as_deref(),
            payload: &new.payload.digest,
        }
        .checksum();
        let (oldest, newest): (Option<Version>, Option<Version>) = decision.trained_versions().unzip();
        args![
            self.policy_pk,
            self.run,
            new.rollout_id.key().as_bytes(),
            new.rollout_id.as_str(),
            self.group_pk,
            name_of(&decision.verdict),
            decision.reason.as_deref(),
            Some(decision.failed_filters.join(",")).filter(|names| !names.is_empty()),
            new.facts.reward,
            new.content.as_bytes(),
            decision.versions.version,
            decision.versions.assumed,
            oldest,
            newest,
            new.facts.segments,
            new.facts.trained_segments,
            new.facts.tokens,
            new.facts.trained_tokens,
            new.payload.unpacked_bytes,
            ingest.now,
            decision.trained_spans.as_ref().map(|spans| to_json(spans)),
            &seal[..],
        ]
    }
}

/// Inserts what has arrived, in order: keys ascend in the order of arrival.
pub(super) async fn insert(tx: &mut Tx<'_>, ingest: &Ingest, arrived: &mut Vec<Arrived<'_>>) -> Result<(), StoreError> {
    static INSERT_ROLLOUTS: LazyLock<InsertRows> = LazyLock::new(|| {
        InsertRows::new(
            "-- insert_rollouts
            INSERT INTO rollout (
                policy_pk, run, rollout_key, rollout_id, group_pk, verdict, reason, failed_filters, reward,
                content_digest, policy_version, version_assumed, version_min, version_max, segments,
                trained_segments, tokens, trained_tokens, unpacked_bytes, received_us, trained_spans,
                seal
            )",
            22,
            "RETURNING rollout_pk",
        )
    });
    static INSERT_PAYLOADS: LazyLock<InsertRows> = LazyLock::new(|| {
        InsertRows::new(
            "-- insert_payloads
            INSERT INTO payload (rollout_pk, codec, digest, body)",
            4,
            "RETURNING rollout_pk",
        )
    });
    let arrived = std::mem::take(arrived);
    let rows = arrived.iter().map(|row| row.args(ingest)).collect();
    let mut keys: Vec<i64> = INSERT_ROLLOUTS.run(tx, rows, "rollout_pk").await?;
    // RETURNING promises no order; the keys themselves do.
    keys.sort_unstable();
    let payload = |(row, key): (&Arrived<'_>, i64)| {
        let payload = &row.new.payload;
        row.keeps_payload
            .then(|| args![key, payload.codec.map(|codec| codec as i64), &payload.digest[..], payload.body.as_slice()])
    };
    let payloads = arrived.iter().zip(keys).filter_map(payload).collect();
    INSERT_PAYLOADS.run(tx, payloads, "rollout_pk").await.map(drop)
}

fn to_json(spans: &[TrainedSpan]) -> String {
    serde_json::to_string(spans).expect("triples of numbers always serialize")
}
