//! What the load looks like: groups of rollouts with the lengths of real ones, the same for the same seed.
//!
//! Separate from the protocols, which write the same groups down in different ways. Next: [`crate::template`].

use std::f64::consts::TAU;

use clap::{Args, ValueEnum};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde::Serialize;

/// Ids are drawn below this: the size of a common vocabulary. Drawn evenly, which compresses worst.
const VOCABULARY: u32 = 128_000;

/// Tokens of the longest rollout, however unlucky the draw: what the service is made to take.
const TOKENS_MAX: f64 = 1_048_576.0;

/// Tokens in a row with the same mask: a tool's output comes in one piece.
const MASK_RUN: usize = 64;

/// Share of such pieces that nothing is learned from.
const MASKED_SHARE: f64 = 1.0 / 7.0;

/// The least log-probability that is drawn.
const LOGPROB_MIN: f32 = -2.5;

/// Words of texts; common ones, because the length is what matters.
const WORDS: [&str; 16] = [
    "the", "value", "of", "this", "function", "is", "not", "what", "test", "expects", "so", "we", "look", "at", "line",
    "again",
];

/// What rollouts look like.
#[derive(Args, Clone, Debug, Serialize)]
#[command(next_help_heading = "What rollouts look like")]
pub(crate) struct WorkloadArgs {
    /// Tokens of a rollout, prompt and response: the median of a log-normal distribution
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(2..=1_048_576), value_name = "MEDIAN")]
    pub(crate) tokens: u32,
    /// Spread of the lengths: the standard deviation of their logarithm; 0 makes all equal
    #[arg(long, default_value_t = 0.7, value_parser = number(0.0, 4.0), value_name = "S")]
    pub(crate) sigma: f64,
    /// Share of the tokens that is prompt; at least one token is
    #[arg(long, default_value_t = 0.1, value_parser = number(0.0, 0.99), value_name = "SHARE")]
    pub(crate) prompt: f64,
    /// Segments of a rollout, each with a prompt of its own; slime and atropos get them as one
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_024), value_name = "N")]
    pub(crate) segments: u32,
    /// Rollouts of a group
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_024), value_name = "N")]
    pub(crate) group_size: u32,
    /// Send no behaviour log-probabilities
    #[arg(long)]
    pub(crate) no_logprobs: bool,
    /// Send chat messages of so many words (the median again) instead of tokens; slime's environments do
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=1_048_576), value_name = "WORDS")]
    pub(crate) text: Option<u32>,
    /// What a body holds; slime always gets single rollouts
    #[arg(long, value_enum, default_value_t = PerBody::Group)]
    pub(crate) per_body: PerBody,
    /// The same seed makes the same lengths, ids and rewards
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// What one post holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PerBody {
    /// A whole group
    Group,
    /// One rollout; the posts of a group follow each other
    Rollout,
}

/// The rollouts of one task, decided together.
pub(crate) struct Group {
    pub(crate) rollouts: Vec<Rollout>,
}

/// What one agent has done.
pub(crate) struct Rollout {
    pub(crate) reward: f64,
    pub(crate) content: Content,
}

/// What a rollout consists of.
pub(crate) enum Content {
    /// Token ids, as a token-level trainer needs them.
    Tokens(Vec<Segment>),
    /// A question and its answer.
    Text { question: String, answer: String, words: u64 },
}

/// A prompt and the response to it.
pub(crate) struct Segment {
    /// Prompt and response.
    pub(crate) tokens: Vec<u32>,
    /// One entry per response token: whether it is trained.
    pub(crate) loss_mask: Vec<bool>,
    /// One entry per response token, where they are sent.
    pub(crate) logprobs: Option<Vec<f32>>,
}

impl Rollout {
    /// Tokens, or words where it is text.
    pub(crate) fn length(&self) -> u64 {
        match &self.content {
            Content::Tokens(segments) => segments.iter().map(|segment| segment.tokens.len() as u64).sum(),
            Content::Text { words, .. } => *words,
        }
    }
}

/// Draws groups, one after the other.
pub(crate) struct Workload {
    args: WorkloadArgs,
    random: StdRng,
}

impl Workload {
    pub(crate) fn new(args: WorkloadArgs) -> Self {
        let random = StdRng::seed_from_u64(args.seed);
        Self { args, random }
    }

    pub(crate) fn group(&mut self) -> Group {
        let rollouts = (0..self.args.group_size).map(|index| self.rollout(index)).collect();
        Group { rollouts }
    }

    fn rollout(&mut self, index: u32) -> Rollout {
        let content = match self.args.text {
            Some(median) => self.text(median),
            None => self.tokens(),
        };
        // Both outcomes in every group, so that no advantage is zero throughout.
        Rollout { reward: f64::from(index % 2), content }
    }

    fn tokens(&mut self) -> Content {
        let segments = self.args.segments as usize;
        // Every segment has at least one prompt and one response token.
        let tokens = self.length(self.args.tokens).max(2 * segments);
        let share = |index: usize| tokens / segments + usize::from(index < tokens % segments);
        Content::Tokens((0..segments).map(|index| self.segment(share(index))).collect())
    }

    fn segment(&mut self, tokens: usize) -> Segment {
        let prompt = ((tokens as f64 * self.args.prompt) as usize).clamp(1, tokens - 1);
        let response = tokens - prompt;
        let random = &mut self.random;
        let ids = (0..tokens).map(|_| random.random_range(0..VOCABULARY)).collect();
        let mut loss_mask = Vec::with_capacity(response + MASK_RUN);
        while loss_mask.len() < response {
            let is_trained = loss_mask.is_empty() || !random.random_bool(MASKED_SHARE);
            loss_mask.resize(loss_mask.len() + MASK_RUN, is_trained);
        }
        loss_mask.truncate(response);
        let logprobs =
            (!self.args.no_logprobs).then(|| (0..response).map(|_| random.random_range(LOGPROB_MIN..0.0)).collect());
        Segment { tokens: ids, loss_mask, logprobs }
    }

    fn text(&mut self, median: u32) -> Content {
        let words = self.length(median).max(2);
        let asked = ((words as f64 * self.args.prompt) as usize).clamp(1, words - 1);
        let (question, answer) = (self.words(asked), self.words(words - asked));
        Content::Text { question, answer, words: words as u64 }
    }

    fn words(&mut self, count: usize) -> String {
        let words: Vec<&str> = (0..count).map(|_| WORDS[self.random.random_range(0..WORDS.len())]).collect();
        words.join(" ")
    }

    /// A length with this median: `median * exp(sigma * z)` with `z` standard normal (Box and Muller, 1958).
    fn length(&mut self, median: u32) -> usize {
        // 1 - u, because the logarithm of 0 is not a number.
        let (u, v): (f64, f64) = (1.0 - self.random.random::<f64>(), self.random.random());
        let normal = (-2.0 * u.ln()).sqrt() * (TAU * v).cos();
        let length = f64::from(median) * (self.args.sigma * normal).exp();
        length.clamp(2.0, TOKENS_MAX).round() as usize
    }
}

/// A parser of finite numbers within bounds.
pub(crate) fn number(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| {
        let parsed = text.parse().ok().filter(|number| (least..=most).contains(number));
        parsed.ok_or_else(|| format!("must be a number from {least} to {most}"))
    }
}
