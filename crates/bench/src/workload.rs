//! The workload: groups of rollouts with realistic lengths. The same seed gives the same groups.
//!
//! This is separate from the protocols, which write the same groups in different ways. The next module is
//! [`crate::template`].

use std::f64::consts::TAU;

use clap::{Args, ValueEnum};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde::Serialize;

/// Ids are drawn below this number, the size of a common vocabulary. The distribution is uniform, because uniform ids
/// compress worst.
const VOCABULARY: u32 = 128_000;

/// Maximum number of tokens of a rollout, so that a rare long draw stays below the service's limit.
const TOKENS_MAX: f64 = 1_048_576.0;

/// Number of consecutive tokens with the same mask, because a tool's output is one piece.
const MASK_RUN: usize = 64;

/// Share of such pieces that are masked.
const MASKED_SHARE: f64 = 1.0 / 7.0;

/// Share of the tokens of which the engine was certain, so that their log-probability is 0.
const CERTAIN_SHARE: f64 = 0.18;

/// Share of the log-probabilities that are not rounded to the nearest float, because the logarithm of a GPU is less exact.
const INEXACT_SHARE: f64 = 1.0 / 32.0;

/// Words of texts. Only their lengths matter.
const WORDS: [&str; 16] = [
    "the", "value", "of", "this", "function", "is", "not", "what", "test", "expects", "so", "we", "look", "at", "line",
    "again",
];

/// The shape of rollouts.
#[derive(Args, Clone, Debug, Serialize)]
#[command(next_help_heading = "Rollouts")]
pub(crate) struct WorkloadArgs {
    /// Number of tokens of a rollout, prompt and response: the median of a log-normal distribution
    #[arg(long, default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(2..=1_048_576), value_name = "MEDIAN")]
    pub(crate) tokens: u32,
    /// Spread of the lengths: the standard deviation of their logarithm; 0 makes all lengths equal
    #[arg(long, default_value_t = 0.7, value_parser = number(0.0, 4.0), value_name = "S")]
    pub(crate) sigma: f64,
    /// Share of the tokens that are the prompt, which has at least one token
    #[arg(long, default_value_t = 0.1, value_parser = number(0.0, 0.99), value_name = "SHARE")]
    pub(crate) prompt: f64,
    /// Number of segments of a rollout, each with its own prompt; slime and atropos get them as one segment
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1_024), value_name = "N")]
    pub(crate) segments: u32,
    /// Number of rollouts of a group
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1_024), value_name = "N")]
    pub(crate) group_size: u32,
    /// Send no behaviour log-probabilities
    #[arg(long)]
    pub(crate) no_logprobs: bool,
    /// Send chat messages with this median number of words instead of tokens, as slime's environments do
    #[arg(long, value_parser = clap::value_parser!(u32).range(2..=1_048_576), value_name = "WORDS")]
    pub(crate) text: Option<u32>,
    /// Contents of a body; slime always gets single rollouts
    #[arg(long, value_enum, default_value_t = PerBody::Group)]
    pub(crate) per_body: PerBody,
    /// Seed of all random numbers: the same seed gives the same lengths, ids and rewards
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// The contents of one post.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum PerBody {
    /// A whole group
    Group,
    /// One rollout; the rollouts of a group are posted one after the other
    Rollout,
}

/// The rollouts of one task, decided together.
pub(crate) struct Group {
    pub(crate) rollouts: Vec<Rollout>,
}

pub(crate) struct Rollout {
    pub(crate) reward: f64,
    pub(crate) content: Content,
}

/// The contents of a rollout.
pub(crate) enum Content {
    /// Token ids, as a token-level trainer needs them.
    Tokens(Vec<Segment>),
    Text {
        question: String,
        answer: String,
        words: u64,
    },
}

/// A prompt and the response to it.
pub(crate) struct Segment {
    /// Prompt and response.
    pub(crate) tokens: Vec<u32>,
    /// For each response token, whether it is trained.
    pub(crate) loss_mask: Vec<bool>,
    /// The log-probability of each response token, if log-probabilities are sent.
    pub(crate) logprobs: Option<Vec<f32>>,
}

impl Rollout {
    /// Number of tokens, or of words of texts.
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
        // Every group has both outcomes, so that its advantages are not all zero.
        Rollout { reward: f64::from(index % 2), content }
    }

    fn tokens(&mut self) -> Content {
        let segments = self.args.segments as usize;
        // Every segment has at least one prompt token and one response token.
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
        let logprobs = (!self.args.no_logprobs).then(|| (0..response).map(|_| logprob(random)).collect());
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

    /// Draws a length with this median: `median * exp(sigma * z)` with `z` standard normal (Box and Muller, 1958).
    fn length(&mut self, median: u32) -> usize {
        // 1 - u, because the logarithm of 0 is not a number.
        let (u, v): (f64, f64) = (1.0 - self.random.random::<f64>(), self.random.random());
        let normal = (-2.0 * u.ln()).sqrt() * (TAU * v).cos();
        let length = f64::from(median) * (self.args.sigma * normal).exp();
        length.clamp(2.0, TOKENS_MAX).round() as usize
    }
}

/// A log-probability as `log_softmax` makes it: minus the logarithm of a sum of exponentials of which the largest is 1.
///
/// The others are drawn so that log-probabilities are spread like those of recorded rollouts of a chat model: half of them
/// are above -0.01, a fourth below -0.2, and a tenth below -0.6.
fn logprob(random: &mut StdRng) -> f32 {
    let drawn: f64 = random.random();
    if drawn < CERTAIN_SHARE {
        return 0.0;
    }
    let others = 10_f64.powf(7.6 * ((drawn - CERTAIN_SHARE) / (1.0 - CERTAIN_SHARE)).sqrt() - 7.0);
    let logprob = 0.0 - f64::from((1.0 + others) as f32).ln() as f32;
    let inexact = random.random_bool(INEXACT_SHARE);
    if inexact && logprob < -0.1 { f32::from_bits(logprob.to_bits() + 1) } else { logprob }
}

/// A parser of finite numbers within bounds.
pub(crate) fn number(least: f64, most: f64) -> impl Fn(&str) -> Result<f64, String> + Clone {
    move |text| {
        let parsed = text.parse().ok().filter(|number| (least..=most).contains(number));
        parsed.ok_or_else(|| format!("must be a number from {least} to {most}"))
    }
}
