//! The protocol of an Atropos API server: scored groups are posted, and trainers get batches with a fixed number of
//! sequences.

use std::{fmt::Write as _, time::Instant};

use async_trait::async_trait;
use serde_json::{Value, json};

use super::{POLL_PAUSE, Protocol, Taken, array, list, one_each};
use crate::{
    target::Target,
    template::Template,
    workload::{Content, Group, PerBody, Rollout, Segment},
};

/// Atropos' mask value for a token that is not trained.
const MASKED: i64 = -100;

/// Atropos' value for a token without a log-probability.
const NO_LOGPROB: f64 = 1.0;

/// Number of steps that the trainer announces, larger than in any run.
const STEPS: u32 = 1_000_000_000;

/// A server with Atropos' protocol.
pub(crate) struct Atropos {
    target: Target,
    group_size: u32,
    batch_groups: u32,
    /// The id that the server gives to this environment when it is registered.
    environment: Option<i64>,
}

impl Atropos {
    pub(crate) fn new(target: Target, group_size: u32, batch_groups: u32) -> Self {
        Self { target, group_size, batch_groups, environment: None }
    }

    /// `ScoredData`: columns over the sequences of the group.
    fn write(&self, text: &mut String, rollouts: &[Rollout]) {
        let sequences = || rollouts.iter().map(segments);
        text.push('{');
        columns(text, "tokens", sequences(), |text, segments| {
            array(text, segments.iter().flat_map(|segment| &segment.tokens));
        });
        text.push_str(", ");
        columns(text, "masks", sequences(), |text, segments| array(text, segments.iter().flat_map(masks)));
        text.push_str(", ");
        list(text, "scores", rollouts.iter().map(|rollout| rollout.reward));
        if sequences().flatten().all(|segment| segment.logprobs.is_some()) {
            text.push_str(", ");
            columns(text, "inference_logprobs", sequences(), |text, segments| {
                array(text, segments.iter().flat_map(logprobs));
            });
        }
        if let Some(environment) = self.environment {
            let _ = write!(text, r#", "env_id": {environment}"#);
        }
        text.push('}');
    }
}

fn segments(rollout: &Rollout) -> &[Segment] {
    match &rollout.content {
        Content::Tokens(segments) => segments,
        Content::Text { .. } => unreachable!("text is refused with this protocol"),
    }
}

/// Appends `"key": [[...], [...]]`.
fn columns<'g>(
    text: &mut String,
    key: &str,
    sequences: impl Iterator<Item = &'g [Segment]>,
    write: impl Fn(&mut String, &[Segment]),
) {
    let _ = write!(text, "\"{key}\": [");
    for (index, segments) in sequences.enumerate() {
        text.push_str(if index == 0 { "" } else { ", " });
        write(text, segments);
    }
    text.push(']');
}

/// Over prompt and response: the token where it is trained.
fn masks(segment: &Segment) -> impl Iterator<Item = i64> {
    let prompt = segment.tokens.len() - segment.loss_mask.len();
    let of_response = segment.tokens[prompt..].iter().zip(&segment.loss_mask);
    let of_response = of_response.map(|(&token, &is_trained)| if is_trained { i64::from(token) } else { MASKED });
    std::iter::repeat_n(MASKED, prompt).chain(of_response)
}

fn logprobs(segment: &Segment) -> impl Iterator<Item = f64> {
    let prompt = segment.tokens.len() - segment.loss_mask.len();
    let of_response = segment.logprobs.iter().flatten().zip(&segment.loss_mask);
    let of_response = of_response.map(|(&logprob, &is_trained)| if is_trained { logprob.into() } else { NO_LOGPROB });
    std::iter::repeat_n(NO_LOGPROB, prompt).chain(of_response)
}

#[async_trait]
impl Protocol for Atropos {
    /// Registers a trainer and asks for its first batch. Before that, no environment can register.
    async fn prepare(&mut self) -> anyhow::Result<()> {
        self.target.reach("/info").await?;
        let trainer = json!({
            "wandb_group": "bench", "wandb_project": "bench", "batch_size": self.batch_groups * self.group_size,
            "max_token_len": 1_048_576, "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0,
            "num_steps": STEPS,
        });
        self.target.call("/register", &trainer).await?;
        self.target.read("/batch").await?;
        let environment = json!({
            "max_token_length": 1_048_576, "desired_name": "bench", "weight": 1.0, "group_size": self.group_size,
        });
        let answer: Value = self.target.call("/register-env", &environment).await?;
        self.environment = answer["env_id"].as_i64();
        Ok(())
    }

    fn path(&self) -> &'static str {
        "/scored_data"
    }

    fn templates(&self, group: &Group, per_body: PerBody) -> Vec<Template> {
        if per_body == PerBody::Rollout {
            return one_each(group, |template, _, rollout| self.write(template.text(), std::slice::from_ref(rollout)));
        }
        let mut template = Template::new();
        self.write(template.text(), &group.rollouts);
        for rollout in &group.rollouts {
            template.count(rollout);
        }
        vec![template]
    }

    async fn take(&self) -> anyhow::Result<Option<Taken>> {
        let asked = Instant::now();
        let read = self.target.read("/batch").await?;
        if !read.begins_with(r#"{"batch":["#) {
            tokio::time::sleep(POLL_PAUSE).await;
            return Ok(None);
        }
        let (groups, group_size) = (u64::from(self.batch_groups), u64::from(self.group_size));
        Ok(Some(Taken {
            groups,
            rollouts: groups * group_size,
            bytes: read.bytes,
            samples: asked.elapsed(),
            ..Taken::default()
        }))
    }
}
