//! Content: what one rollout consists of, for people who look at it.
//!
//! Not a stage that rollouts pass; it reads them in whichever state they are, as long as their payload is stored. Unlike
//! [`samples`](crate::samples), it shows the mask as sent beside the mask as delivered, and it changes nothing: a damaged
//! rollout is reported and not quarantined. An answer is bounded by a window of tokens and a page of messages.
//!
//! At most two rollouts are unpacked at a time for people who look. Their bytes are taken from the budget of samples
//! until the answer is written, and the work goes on if the reader leaves, so that the bytes stay counted. Tokenizer
//! files are only those of the configuration: no request names a path, and the `uri` of a version, which trainers
//! write, is never opened.

use forebay_domain::{
    ids::{PolicyName, RolloutId},
    lease::Batch,
    looking::{
        content::{Content, Part, look},
        ledger::Story,
    },
    refusal::Refusal,
    samples::{BatchMember, FindContent, StoredContent},
    scores::{self, Score},
    states::GroupState,
};
use forebay_store::error::StoreError;
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

/// Bytes of an answer besides what is copied out of the rollout: its window as text, its map and its segments.
const ANSWER_BYTES: u64 = 4 << 20;

/// A rollout whose payload can be read.
pub struct ContentReader {
    buffer: Buffer,
    /// What happened to it.
    pub story: Story,
    member: BatchMember,
    /// The batch that contains it.
    pub batch: Option<Batch>,
    /// The scores that its judgement counted.
    scores: Vec<Score>,
}

impl Buffer {
    /// A rollout of the current run, whose payload can then be read.
    #[instrument(level = "debug", skip_all)]
    pub async fn content(&self, policy: PolicyName, rollout_id: RolloutId) -> Result<ContentReader, BufferError> {
        policies::existing_policy(self, &policy).await?;
        let (named, id) = (policy.clone(), rollout_id.to_string());
        let policy = self.stored_under(policy, &rollout_id).await?;
        let found = self.store.read(FindContent { policy, rollout_id }).await?;
        let found = found.ok_or(Refusal::UnknownInPolicy { what: "rollout", id, policy: named })?;
        let StoredContent { story, member, batch, has_payload, scores } = found;
        if !has_payload {
            return Err(purged(&story).into());
        }
        Ok(ContentReader { buffer: self.clone(), story, member, batch, scores })
    }
}

/// Names the rule by which a rollout has no payload any more.
fn purged(story: &Story) -> Refusal {
    let is_left_out =
        !story.verdict.takes_place() || matches!(story.group.state, GroupState::Discarded | GroupState::Stale);
    let rule = if is_left_out { "`retention.dropped_s`" } else { "`retention.trained_s` and `retention.settled_s`" };
    Refusal::ContentPurged { rollout_id: story.rollout_id.clone(), rule }
}

impl ContentReader {
    /// The bytes that reading takes at most, with the answer.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        // As stored, decompressed, unpacked, and copied into the answer.
        self.member.row.unpacked_bytes.saturating_mul(4).saturating_add(ANSWER_BYTES)
    }

    /// Reads, checks and unpacks the rollout, and makes an answer of a part of it.
    pub async fn read<T: Send + 'static>(
        self,
        part: Part,
        answer: impl FnOnce(Self, Content) -> T + Send + 'static,
    ) -> Result<T, BufferError> {
        let stored = self.buffer.store.payloads(vec![self.member.row.rollout_pk]).await?.pop();
        let stored = stored.ok_or_else(|| purged(&self.story))?;
        let look = move || {
            let content = look(self.member.clone(), &stored.payload, self.batch.as_ref(), part);
            drop(stored);
            content.map(|mut content| {
                if !self.scores.is_empty() {
                    let sent = content.reward_components;
                    content.reward_components = scores::components(&sent, scores::all(&sent, None, &self.scores));
                }
                answer(self, content)
            })
        };
        tokio::task::spawn_blocking(look).await.map_err(|_| StoreError::Closed)?.map_err(BufferError::from)
    }
}
