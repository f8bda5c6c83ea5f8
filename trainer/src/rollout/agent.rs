//! Plays problems with a model: many rollouts at once, turn by turn, until each has its reward.
//!
//! The trajectories hold exactly the tokens that the model saw and drew: nothing is decoded and encoded again on the
//! way. Apart from the worker, so that it needs no service.

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
    /// Divisor of the logits. Single, as it is on the wire: the trainer divides by the same number.
    pub temperature: f32,
    /// Tokens that it may draw in a turn, the one that ends it included.
    pub turn_tokens_max: usize,
}

/// One rollout, played to its end.
#[derive(Clone, Debug, PartialEq)]
pub struct Played {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt and response.
    pub tokens: Vec<i64>,
    /// Per token of the response: 1 where the model drew it, 0 where a tool said it.
    pub loss_mask: Vec<u8>,
    /// Per token of the response: its log-probability at the temperature, 0 where a tool said it.
    pub logprobs: Vec<f32>,
    /// Whether the model ended its last turn itself.
    pub ended: bool,
    /// What the task made of it.
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

    /// A rollout as the service takes it: one segment, all of it drawn from this agent's version.
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

    /// Notes what the model drew; returns what a tool answers, unless the rollout is over.
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

    /// Notes that a tool said `tokens` tokens.
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
