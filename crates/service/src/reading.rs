//! Stage 5 for protocols without acks: a consumer reads batches, and its next read acks them.
//!
//! Separate from [`lease`](crate::lease), whose callers prove that they hold a lease. Here the consumer's name alone
//! finds its leases, so that any replica can answer, and nothing is kept in memory between two reads.
//!
//! While a read is being sent, its leases belong to a name of their own (`Reader::reading`) and last as long as the
//! policy says. A response that does not arrive is therefore not acked by the next read. Once the whole response is
//! sent, the leases get the consumer's name and last [`READ_LEASE_S`].

use forebay_domain::{
    batch::BatchSize,
    ids::{ConsumerName, InvalidId, PolicyName},
    lease::{Batch, LeaseProof},
    peers::Awaited,
    reads::{AckReads, GiveBackReads, MarkRead, ReleaseRead},
};
use tracing::instrument;

use crate::{
    Buffer,
    error::BufferError,
    lease::{Holder, LeaseRequest},
    waiting::replicas,
};

/// How long a consumer keeps what it has read if it never reads again: a day, longer than any step of training.
pub const READ_LEASE_S: u64 = 86_400;

/// A consumer whose reads ack its previous ones.
#[derive(Clone, Debug)]
pub struct Reader {
    pub policy: PolicyName,
    /// The holder of what was read.
    consumer: ConsumerName,
    /// The holder of what is being sent.
    reading: ConsumerName,
}

impl Reader {
    /// The reader with this name. Its leases have names that no other consumer should use.
    pub fn new(policy: PolicyName, name: &str) -> Result<Self, InvalidId> {
        let consumer = ConsumerName::parse(&format!("facade:{name}"))?;
        let reading = ConsumerName::parse(&format!("reading:{}", consumer.as_str()))?;
        Ok(Self { policy, consumer, reading })
    }

    /// The request for the next batch of a read: what is ready now.
    #[must_use]
    pub fn request(&self, size: BatchSize) -> LeaseRequest {
        LeaseRequest {
            consumer: Some(self.reading.clone()),
            size,
            partial: true,
            ..LeaseRequest::of(self.policy.clone())
        }
    }
}

impl Buffer {
    /// Acks and settles everything that a reader has read, with a step of its own. Returns the number of batches.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn ack_reads(&self, reader: &Reader) -> Result<usize, BufferError> {
        let ack = AckReads { policy: reader.policy.clone(), consumer: reader.consumer.clone(), now: self.clock.now() };
        let acked: Vec<Batch> = self.store.write(ack).await??;
        for batch in &acked {
            self.metrics.lease(batch.policy.as_str(), "acked", 1);
            self.metrics.acked(batch.policy.as_str(), self.clock.now().micros_since(batch.created_at) as f64 / 1e6);
        }
        Ok(acked.len())
    }

    /// Records that the whole response of a read was sent. Refused if a lease of the read was lost meanwhile.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn mark_read(&self, reader: &Reader, read: Vec<Holder>) -> Result<(), BufferError> {
        let now = self.clock.now();
        let proof = |Holder { batch_id, lease, epoch }| LeaseProof { batch_id, lease, epoch, now };
        let mark = MarkRead {
            policy: reader.policy.clone(),
            consumer: reader.consumer.clone(),
            proofs: read.into_iter().map(proof).collect(),
            expires_at: now.plus_seconds(READ_LEASE_S),
        };
        Ok(self.store.write(mark).await??)
    }

    /// Gives back a batch that was not sent to a reader. It counts as no delivery.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn release_read(&self, reader: &Reader, holder: Holder) -> Result<(), BufferError> {
        let Holder { batch_id, lease, epoch } = holder;
        let proof = LeaseProof { batch_id, lease, epoch, now: self.clock.now() };
        self.store.write(ReleaseRead { policy: reader.policy.clone(), proof }).await??;
        replicas::wake(self, Awaited::Batch, &reader.policy);
        Ok(())
    }

    /// Gives back everything that a reader holds. Returns the number of batches.
    #[instrument(level = "debug", skip_all, fields(policy.name = %reader.policy))]
    pub async fn give_back_reads(&self, reader: &Reader) -> Result<u64, BufferError> {
        let give_back = GiveBackReads {
            policy: reader.policy.clone(),
            consumers: [reader.consumer.clone(), reader.reading.clone()],
            now: self.clock.now(),
        };
        let returned = self.store.write(give_back).await??;
        if returned > 0 {
            replicas::wake(self, Awaited::Batch, &reader.policy);
        }
        Ok(returned)
    }
}
