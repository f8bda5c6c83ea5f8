//! Forebay's protocol: bundles of whole groups, and trainers that follow the rule in `docs/trainers.md`.

use std::{
    fmt::Write as _,
    sync::atomic::{AtomicI64, Ordering},
    time::{Duration, Instant},
};

use anyhow::Context as _;
use async_trait::async_trait;
use forebay_client::{
    Client,
    wire::{
        ARROW_STREAM, AckRequest, BacklogRules, BatchDescriptor, BatchRequest, BatchRules, GroupRules, PolicyRules,
        Requirement, ResetRequest, ResumeRequest, Settle,
    },
};

use super::{Format, Protocol, Taken, arrow, list, messages, one_each};
use crate::{
    target::Target,
    template::Template,
    workload::{Content, Group, PerBody, Rollout, Segment},
};

/// How long a trainer waits for a batch before it checks whether the run has ended.
const WAIT: Duration = Duration::from_secs(1);

/// A backlog that no run reaches, because refused posts would change the measurement.
const BACKLOG: BacklogRules = BacklogRules { max_ready_rollouts: 1_000_000_000, max_bytes: 1_000_000_000_000 };

/// A Forebay service and the policy that is loaded.
pub(crate) struct Forebay {
    target: Target,
    client: Client,
    policy: String,
    rules: PolicyRules,
    is_fresh: bool,
    format: Format,
    epoch: i64,
    next_step: AtomicI64,
}

impl Forebay {
    pub(crate) fn new(target: Target, policy: String, group_size: u32, batch_groups: u32) -> anyhow::Result<Self> {
        let client = target.client()?;
        let rules = PolicyRules {
            group: GroupRules { size: group_size, ..GroupRules::default() },
            batch: BatchRules { groups: batch_groups, ..BatchRules::default() },
            backlog: BACKLOG,
            settle: Settle::Ack,
            ..PolicyRules::default()
        };
        Ok(Self {
            target,
            client,
            policy,
            rules,
            is_fresh: false,
            format: Format::Json,
            epoch: 0,
            next_step: AtomicI64::new(1),
        })
    }

    /// Requires no tokens, for runs that post only chat messages.
    pub(crate) fn of_text(mut self) -> Self {
        self.rules.require = Vec::<Requirement>::new();
        self
    }

    /// First discards the contents of the policy.
    pub(crate) fn fresh(mut self) -> Self {
        self.is_fresh = true;
        self
    }

    /// Uses this format.
    pub(crate) fn in_format(self, format: Format) -> Self {
        Self { format, ..self }
    }

    /// Leases the next batch. Returns it with the time when its descriptor arrived.
    pub(crate) async fn lease(&self, wait: Duration) -> anyhow::Result<Option<(BatchDescriptor, Instant)>> {
        let request = BatchRequest {
            policy: Some(self.policy.clone()),
            consumer: Some("bench".to_owned()),
            wait_ms: Some(wait.as_millis() as u64),
            epoch: Some(self.epoch),
            ..BatchRequest::default()
        };
        let batch = self.client.lease(&request).await.context("a batch cannot be leased")?;
        Ok(batch.map(|batch| (batch, Instant::now())))
    }

    /// Acks a batch with the next step.
    pub(crate) async fn ack(&self, batch: &BatchDescriptor) -> anyhow::Result<()> {
        let lease = batch.lease.clone().context("a leased batch has its lease")?;
        let step = self.next_step.fetch_add(1, Ordering::Relaxed);
        let ack = AckRequest { lease, step, epoch: Some(self.epoch) };
        self.client.ack(&batch.batch_id, &ack).await.context("a batch cannot be acked")?;
        Ok(())
    }

    fn write(&self, template: &mut Template, index: usize, rollout: &Rollout) {
        template.text().push_str(r#"{"rollout_id": ""#);
        template.gap();
        let _ = write!(template.text(), r#"-{index}", "group_id": ""#);
        template.gap();
        let text = template.text();
        let _ = write!(
            text,
            r#"", "policy": "{}", "group_size": {}, "status": "completed", "reward": {:?}, "#,
            self.policy, self.rules.group.size, rollout.reward
        );
        match &rollout.content {
            Content::Tokens(segments) => {
                text.push_str(r#""segments": ["#);
                for (place, segment) in segments.iter().enumerate() {
                    text.push_str(if place == 0 { "{" } else { ", {" });
                    write_segment(text, segment);
                    text.push('}');
                }
                text.push_str("]}");
            }
            Content::Text { question, answer, .. } => {
                messages(text, question, answer);
                text.push('}');
            }
        }
    }
}

impl Forebay {
    fn samples_media(&self) -> &'static str {
        match self.format {
            Format::Json => "application/x-ndjson",
            Format::Arrow => ARROW_STREAM,
        }
    }
}

fn write_segment(text: &mut String, segment: &Segment) {
    list(text, "tokens", &segment.tokens);
    text.push_str(", ");
    list(text, "loss_mask", segment.loss_mask.iter().map(|&is_trained| u8::from(is_trained)));
    if let Some(logprobs) = &segment.logprobs {
        text.push_str(", ");
        list(text, "logprobs", logprobs.iter().map(|&logprob| f64::from(logprob)));
    }
}

#[async_trait]
impl Protocol for Forebay {
    async fn prepare(&mut self) -> anyhow::Result<()> {
        self.target.reach("/healthz").await?;
        let policy = &self.policy;
        self.client.put_policy(policy, &self.rules).await.context("the policy cannot be written")?;
        if self.is_fresh {
            self.client.reset(policy, &ResetRequest::default()).await.context("the policy cannot be reset")?;
        }
        let resumed = self.client.resume(policy, &ResumeRequest::default()).await;
        self.epoch = resumed.context("the trainer cannot start")?.epoch;
        Ok(())
    }

    fn path(&self) -> &'static str {
        "/trajectories"
    }

    fn media(&self) -> &'static str {
        match self.format {
            Format::Json => "application/json",
            Format::Arrow => ARROW_STREAM,
        }
    }

    fn templates(&self, group: &Group, per_body: PerBody) -> Vec<Template> {
        if self.format == Format::Arrow {
            return vec![arrow::template(group, &self.policy)];
        }
        if per_body == PerBody::Rollout {
            return one_each(group, |template, index, rollout| self.write(template, index, rollout));
        }
        let mut bundle = Template::new();
        for (index, rollout) in group.rollouts.iter().enumerate() {
            bundle.text().push_str(if index == 0 { "[" } else { ", " });
            self.write(&mut bundle, index, rollout);
            bundle.count(rollout);
        }
        bundle.text().push(']');
        vec![bundle]
    }

    async fn take(&self) -> anyhow::Result<Option<Taken>> {
        let asked = Instant::now();
        let Some((batch, leased)) = self.lease(WAIT).await? else { return Ok(None) };
        let bytes = self.target.read_as(&batch.samples_url, self.samples_media()).await?.bytes;
        let read = Instant::now();
        self.ack(&batch).await?;
        Ok(Some(Taken {
            groups: u64::from(batch.groups),
            rollouts: u64::from(batch.rollouts),
            tokens: batch.tokens,
            bytes,
            lease: Some(leased - asked),
            samples: read - leased,
            ack: Some(read.elapsed()),
        }))
    }
}
