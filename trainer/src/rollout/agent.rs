//! Plays problems with a model: many rollouts at once, turn by turn, until each has its reward.
//!
//! Trajectories contain exactly the tokens that the model read and drew. Tokens are never decoded and encoded again,
//! which could change them. This is separate from the worker, so that it can be tested without a service.

use std::collections::BTreeMap;

use forebay_client::wire::{self, Segment, Status, Trajectory, VersionSpan};

use super::{
    RolloutError,
    task::{Outcome, Problem, Reply, Turn},
    tokenizer::Tokenizer,
};
use crate::{
    generate::{Completion, Finish, Sampling, Session},
    model::Decoder,
};

/// A model that plays.
#[derive(Clone, Copy, Debug)]
pub struct Agent<'model> {
    /// Its weights.
    pub decoder: &'model Decoder,
    /// Version of the weights.
    pub version: i64,
    /// Its tokenizer.
    pub tokenizer: &'model Tokenizer,
    /// Divisor of the logits. It is a 32-bit float as on the wire, so that the trainer divides by the same number.
    pub temperature: f32,
    /// Maximum number of tokens of a turn, including the token that ends it.
    pub turn_tokens_max: usize,
}

/// One finished rollout.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// Number of tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt and response.
    pub tokens: Vec<i64>,
    /// For each token of the response: 1 if the model drew it, 0 if it is part of a tool's answer.
    pub loss_mask: Vec<u8>,
    /// For each token of the response: its log-probability at the temperature, 0 if it is part of a tool's answer.
    pub logprobs: Vec<f32>,
    /// Whether the model ended its last turn itself.
    pub ended: bool,
    /// The reward and its components.
    pub outcome: Outcome,
}

/// A rollout that is being played.
struct Running<'problem> {
    problem: &'problem dyn Problem,
    prompt_tokens: usize,
    turns: Vec<Turn>,
    loss_mask: Vec<u8>,
    logprobs: Vec<f32>,
    outcome: Option<Outcome>,
}

impl Agent<'_> {
    /// Plays one rollout of each of `problems`, in which a problem may occur more than once. Equal seeds, problems and
    /// weights give equal rollouts.
    pub fn play(&self, problems: &[&dyn Problem], seed: u64) -> Result<Vec<Played>, RolloutError> {
        let mut prompts = Vec::with_capacity(problems.len());
        for problem in problems {
            prompts.push(self.tokenizer.encode_prompt(&problem.prompt())?);
        }
        let mut session = Session::new(self.decoder, &prompts, seed)?;
        let mut rollouts: Vec<Running<'_>> =
            problems.iter().zip(&prompts).map(|(problem, prompt)| Running::new(*problem, prompt.len())).collect();
        let mut rows: Vec<usize> = (0..rollouts.len()).collect();
        while !rows.is_empty() {
            let completions = session.generate(&rows, &self.sampling())?;
            rows.clear();
            for completion in &completions {
                let rollout = &mut rollouts[completion.row];
                if let Some(answer) = rollout.take_turn(completion, self.tokenizer) {
                    let answer = self.tokenizer.encode(&answer)?;
                    session.append(completion.row, &answer)?;
                    rollout.hear(answer.len());
                    rows.push(completion.row);
                }
            }
        }
        Ok(rollouts.into_iter().enumerate().map(|(row, rollout)| rollout.finish(session.tokens(row))).collect())
    }

    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: f64::from(self.temperature),
            stop_tokens: vec![self.tokenizer.eos()],
            new_tokens_max: self.turn_tokens_max,
            ..Sampling::default()
        }
    }

    /// Converts a rollout to a trajectory with one segment, whose tokens are all from this agent's version.
    #[must_use]
    pub fn trajectory(&self, played: &Played) -> Trajectory {
        let response_tokens = played.loss_mask.len();
        let segment = Segment {
            tokens: played.tokens.iter().map(|&token| token as i32).collect(),
            loss_mask: played.loss_mask.clone(),
            response_length: Some(response_tokens as u32),
            logprobs: Some(played.logprobs.clone()),
            versions: Some(vec![VersionSpan(self.version, 0, response_tokens as i64)]),
            ..Segment::default()
        };
        Trajectory {
            status: if played.ended { Status::Completed } else { Status::Truncated },
            reward: Some(played.outcome.reward),
            reward_components: BTreeMap::clone(&played.outcome.components),
            sampling: wire::Sampling { temperature: self.temperature, ..wire::Sampling::default() },
            segments: vec![segment],
            ..Trajectory::default()
        }
    }
}

impl<'problem> Running<'problem> {
    fn new(problem: &'problem dyn Problem, prompt_tokens: usize) -> Self {
        Self { problem, prompt_tokens, turns: Vec::new(), loss_mask: Vec::new(), logprobs: Vec::new(), outcome: None }
    }

    /// Adds a turn of the model. Returns the tool's answer, or `None` if the rollout has ended.
    fn take_turn(&mut self, completion: &Completion, tokenizer: &Tokenizer) -> Option<String> {
        self.loss_mask.extend(std::iter::repeat_n(1, completion.tokens.len()));
        self.logprobs.extend_from_slice(&completion.logprobs);
        let ended = completion.finish == Finish::Stop;
        // The token that ended the turn is not part of its text.
        let words = &completion.tokens[..completion.tokens.len() - usize::from(ended)];
        self.turns.push(Turn { text: tokenizer.decode(words), ended });
        match self.problem.reply(&self.turns) {
            Reply::Tool(answer) => Some(answer),
            Reply::End(outcome) => {
                self.outcome = Some(outcome);
                None
            }
        }
    }

    /// Adds a tool's answer of `tokens` tokens, which are masked.
    fn hear(&mut self, tokens: usize) {
        self.loss_mask.extend(std::iter::repeat_n(0, tokens));
        self.logprobs.extend(std::iter::repeat_n(0.0, tokens));
    }

    fn finish(self, tokens: &[i64]) -> Played {
        Played {
            prompt_tokens: self.prompt_tokens,
            tokens: tokens.to_vec(),
            loss_mask: self.loss_mask,
            logprobs: self.logprobs,
            ended: self.turns.last().is_some_and(|turn| turn.ended),
            outcome: self.outcome.expect("a rollout runs until its task ends it"),
        }
    }
}
