//! The protocol of slime's rollout buffer: single items are posted, and a trainer claims and reads everything that is
//! ready in one call.

use std::{fmt::Write as _, time::Instant};

use async_trait::async_trait;
use serde::Deserialize;
use serde_json::json;

use super::{POLL_PAUSE, Protocol, Taken, list, messages, one_each};
use crate::{
    target::Target,
    template::Template,
    workload::{Content, Group, PerBody, Rollout, Segment},
};

/// A buffer with slime's protocol.
pub(crate) struct Slime {
    target: Target,
    group_size: u32,
}

/// The beginning of a successful answer.
#[derive(Deserialize)]
struct Success {
    success: bool,
}

impl Slime {
    pub(crate) fn new(target: Target, group_size: u32) -> Self {
        Self { target, group_size }
    }
}

/// Writes the fields that slime's environments send, and for tokens the fields of its `Sample`.
fn write(template: &mut Template, index: usize, rollout: &Rollout) {
    template.text().push_str(r#"{"instance_id": ""#);
    template.gap();
    template.text().push_str(r#"", "uid": ""#);
    template.gap();
    let text = template.text();
    let _ = write!(text, r#"-{index}", "reward": {:?}, "#, rollout.reward);
    text.push_str(r#""extra_info": {"timestamp": "1767225600.0", "finish_reason": "stop"}, "#);
    match &rollout.content {
        Content::Tokens(segments) => {
            messages(text, "question", "answer");
            text.push_str(", ");
            write_sample(text, segments);
        }
        Content::Text { question, answer, .. } => messages(text, question, answer),
    }
    text.push('}');
}

/// A sample is one sequence. If a rollout has several segments, everything before the last response is context.
fn write_sample(text: &mut String, segments: &[Segment]) {
    let prompt = segments[0].tokens.len() - segments[0].loss_mask.len();
    let response_length = segments.iter().map(|segment| segment.tokens.len()).sum::<usize>() - prompt;
    list(text, "tokens", segments.iter().flat_map(|segment| &segment.tokens));
    let _ = write!(text, r#", "response_length": {response_length}, "#);
    let untrained = |segment: &Segment| segment.tokens.len() - segment.loss_mask.len();
    let mask = segments.iter().flat_map(|segment| {
        let trained = segment.loss_mask.iter().map(|&is_trained| u8::from(is_trained));
        std::iter::repeat_n(0, untrained(segment)).chain(trained)
    });
    list(text, "loss_mask", mask.skip(prompt));
    if segments.iter().all(|segment| segment.logprobs.is_some()) {
        text.push_str(", ");
        let logprobs = segments.iter().flat_map(|segment| {
            let sampled = segment.logprobs.iter().flatten().map(|&logprob| f64::from(logprob));
            std::iter::repeat_n(0.0, untrained(segment)).chain(sampled)
        });
        list(text, "rollout_log_probs", logprobs.skip(prompt));
    }
}

#[async_trait]
impl Protocol for Slime {
    async fn prepare(&mut self) -> anyhow::Result<()> {
        self.target.reach("/").await?;
        // slime's clients send numbers as text.
        let start = json!({"task_type": "bench", "num_repeat_per_sample": self.group_size.to_string()});
        self.target.call("/start_rollout", &start).await?;
        Ok(())
    }

    fn path(&self) -> &'static str {
        "/buffer/write"
    }

    fn templates(&self, group: &Group, _per_body: PerBody) -> Vec<Template> {
        one_each(group, write)
    }

    fn is_taken(&self, answer: &[u8]) -> bool {
        serde_json::from_slice::<Success>(answer).is_ok_and(|answer| answer.success)
    }

    async fn take(&self) -> anyhow::Result<Option<Taken>> {
        let asked = Instant::now();
        let read = self.target.read_answer_to("/get_rollout_data", &json!({})).await?;
        // Only the first field of the answer is looked at, because the rest may have hundreds of megabytes.
        if !read.begins_with(r#"{"success":true"#) {
            tokio::time::sleep(POLL_PAUSE).await;
            return Ok(None);
        }
        Ok(Some(Taken { bytes: read.bytes, samples: asked.elapsed(), ..Taken::default() }))
    }
}
