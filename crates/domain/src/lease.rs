//! Stage 5, lease: batches are cut and delivered under leases.
//!
//! The stage before is [`batch`](crate::batch); [`samples`](crate::samples) is what a batch consists of.

use std::collections::BTreeMap;

use crate::{
    batch::BatchSize,
    clock::Timestamp,
    ids::{
        BatchId, BatchPk, CallerId, ConsumerName, Epoch, GroupId, LeaseToken, PolicyName, PolicyPk, RequestId, Step,
        Version,
    },
    pages::Cursor,
    staleness::TrainedVersions,
    states::BatchState,
    weights::BatchWeights,
};

/// A request for a batch.
#[derive(Clone, Debug)]
pub struct Claim {
    pub policy: PolicyName,
    /// The consumer that asks.
    pub consumer: Option<ConsumerName>,
    /// Makes the claim repeatable.
    pub request_id: Option<RequestId>,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// How large a new batch is.
    pub size: BatchSize,
    /// Whether a batch with fewer groups is accepted.
    pub partial: bool,
    /// Seconds of the lease; those of the policy's rules if absent.
    pub ttl_s: Option<u64>,
    /// The id of the batch, if a new one is cut.
    pub batch_id: BatchId,
    /// The token of the lease, if one is granted.
    pub lease: LeaseToken,
    /// Since when its consumer has asked this process for a batch.
    pub asking_since: Timestamp,
    /// The time of the request.
    pub now: Timestamp,
}

impl Claim {
    pub fn ttl_s(&self, policy: &crate::policies::Policy) -> u64 {
        self.ttl_s.unwrap_or(policy.rules.lease.ttl_s)
    }

    pub fn expires_at(&self, policy: &crate::policies::Policy) -> Timestamp {
        self.now.plus_seconds(self.ttl_s(policy))
    }

    /// The samples of a batch that came back must be this many; 0 if any number will do.
    pub fn exact_samples(&self) -> u32 {
        match &self.size {
            BatchSize::Samples(packing) => packing.samples,
            BatchSize::Rules | BatchSize::Groups { .. } | BatchSize::Rollouts { .. } => 0,
        }
    }

    pub fn consumer(&self) -> &str {
        self.consumer.as_ref().map_or("", ConsumerName::as_str)
    }

    pub fn request_id(&self) -> Option<&str> {
        self.request_id.as_ref().map(RequestId::as_str)
    }
}

/// The answer to a claim, and what the claim changed besides.
#[derive(Clone, Debug)]
pub struct ClaimAnswer {
    /// The batch, if there is one.
    pub claimed: Claimed,
    /// Leases of the policy that the claim found expired.
    pub expired: u64,
    /// Ready groups that the claim found over the staleness bound.
    pub stale: u64,
    /// Whether there is no batch because a rollout is waited for that would be too old for the one after it.
    pub waits: bool,
}

/// The result of a claim.
#[derive(Clone, Debug)]
pub enum Claimed {
    /// The same request holds this batch already; its lease is renewed.
    Held(Box<Batch>),
    /// A batch that is new or came back.
    Granted(Box<Batch>),
    /// There is no batch to give yet.
    Nothing,
}

/// Proof that the caller holds a lease.
#[derive(Clone, Debug)]
pub struct LeaseProof {
    pub batch_id: BatchId,
    pub lease: LeaseToken,
    /// Epoch of the caller.
    pub epoch: Option<Epoch>,
    /// The time of the call.
    pub now: Timestamp,
}

/// A request to extend a lease.
#[derive(Clone, Debug)]
pub struct Extend {
    /// The holder of the lease.
    pub proof: LeaseProof,
    /// Seconds from now to the new end of the lease.
    pub ttl_s: u64,
}

/// A report that a step consumed a batch.
#[derive(Clone, Debug)]
pub struct Ack {
    /// The holder of the lease.
    pub proof: LeaseProof,
    pub step: Step,
}

/// A request to give a batch back.
#[derive(Clone, Debug)]
pub struct Nack {
    /// The holder of the lease.
    pub proof: LeaseProof,
    /// The reason that the caller gave.
    pub reason: Option<String>,
    /// Groups that cannot be trained.
    pub groups: Vec<GroupId>,
}

/// Leases of a policy that one sweep found expired.
#[derive(Clone, Debug)]
pub struct ExpiredLeases {
    pub policy: PolicyName,
    /// The number of leases.
    pub leases: u64,
}

/// A batch's row.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Key of the row.
    pub batch_pk: BatchPk,
    pub batch_id: BatchId,
    pub policy: PolicyName,
    /// Key of the policy's row.
    pub policy_pk: PolicyPk,
    pub state: BatchState,
    /// Why it was given back or quarantined.
    pub reason: Option<String>,
    /// Token of the last lease.
    pub lease: Option<LeaseToken>,
    /// Consumer of the last lease.
    pub consumer: String,
    /// Epoch of the last lease.
    pub epoch: Epoch,
    /// End of the lease.
    pub expires_at: Option<Timestamp>,
    /// Number of the last delivery.
    pub attempt: u32,
    /// Deliveries that expired or were given back.
    pub failed_deliveries: u32,
    /// Leases that a resume ended.
    pub resumes: u32,
    /// Step that consumed it.
    pub step: Option<Step>,
    /// The number of its groups, which are whole.
    pub groups: u32,
    /// The number of kept and masked rollouts.
    pub rollouts: u32,
    /// The number of rows of its samples.
    pub samples: u32,
    /// The number of prompt and response tokens.
    pub tokens: u64,
    /// The normalisation of its loss.
    pub weights: BatchWeights,
    /// The policy's version at the cut.
    pub version_current: Version,
    /// Versions of its trained tokens.
    pub trained_versions: Option<TrainedVersions>,
    /// Numbers for the trainer's log, JSON.
    pub metrics: BTreeMap<String, f64>,
    /// The number of payload bytes.
    pub live_bytes: i64,
    /// The time when it was cut.
    pub created_at: Timestamp,
    /// The time when its last lease began.
    pub granted_at: Timestamp,
    /// How long the consumer of its last lease had asked for a batch.
    pub waited_us: i64,
    /// The time when it was acked.
    pub acked_at: Option<Timestamp>,
}

impl Batch {
    /// How long its last lease lasted until `now`.
    #[must_use]
    pub fn held_us(&self, now: Timestamp) -> i64 {
        now.micros_since(self.granted_at).max(0)
    }
}

/// Which batches to list.
#[derive(Clone, Debug, Default)]
pub struct BatchFilter {
    pub policy: PolicyName,
    /// Only batches in this state.
    pub state: Option<BatchState>,
    /// Where the page begins.
    pub from: Cursor,
    /// The most entries of a page.
    pub limit: u32,
}

/// A request to deliver a quarantined batch again.
#[derive(Clone, Debug)]
pub struct Readmit {
    pub batch_id: BatchId,
    /// Who readmits it.
    pub by: Option<CallerId>,
    /// The time of the request.
    pub now: Timestamp,
}
