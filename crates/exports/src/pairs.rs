//! Pairs of preferences: the best and the worst rollout of each group, as `prompt`, `chosen` and `rejected`.
//!
//! A group gives a pair if its best reward is above its worst, and if both conversations begin with the same messages
//! and then go on differently with the assistant. Of rollouts with equal rewards, the first one that arrived counts.

use std::{io::Write, sync::Arc};

use arrow_array::{ArrayRef, Float64Array, StringArray};
use arrow_schema::{DataType, Field, Schema};
use forebay_wire::{ExportedRollout, Verdict};
use serde::Serialize;

use crate::{
    ExportError, Writer, Written,
    conversation::{Conversation, Message, Unreadable},
    parquet::{
        columns::{messages, messages_type},
        file::File,
    },
    row,
};

/// Pairs that are written to Parquet at once.
const BATCH_PAIRS: usize = 64;

#[derive(Serialize)]
struct Pair {
    prompt: Vec<Message>,
    chosen: Vec<Message>,
    rejected: Vec<Message>,
    tools: Option<String>,
    score_chosen: f64,
    score_rejected: f64,
    policy: String,
    group_id: String,
    environment: Option<String>,
}

/// One side of a pair, as far as the group was read.
struct Side {
    reward: f64,
    rollout: ExportedRollout,
}

/// A group that is being read.
struct Group {
    id: String,
    rollouts: u64,
    best: Option<Side>,
    worst: Option<Side>,
}

/// Writes pairs, as NDJSON or as Parquet.
pub struct Pairs<W: Write + Send> {
    out: Out<W>,
    group: Option<Group>,
    written: u64,
    alone: u64,
    equal: u64,
    unrelated: u64,
    unreadable: Unreadable,
}

enum Out<W: Write + Send> {
    Ndjson(W),
    Parquet { file: Box<File<W>>, pairs: Vec<Pair> },
}

impl<W: Write + Send> Pairs<W> {
    /// Writes NDJSON to `out`, which should be buffered.
    pub fn ndjson(out: W) -> Self {
        Self::new(Out::Ndjson(out))
    }

    /// Writes Parquet to `out`.
    pub fn parquet(out: W) -> Result<Self, ExportError> {
        let file = Box::new(File::new(out, schema())?);
        Ok(Self::new(Out::Parquet { file, pairs: Vec::new() }))
    }

    fn new(out: Out<W>) -> Self {
        Self { out, group: None, written: 0, alone: 0, equal: 0, unrelated: 0, unreadable: Unreadable::default() }
    }

    /// Writes the pair of the group that was read, if it has one.
    fn end_group(&mut self) -> Result<(), ExportError> {
        let Some(group) = self.group.take() else { return Ok(()) };
        let (Some(best), Some(worst)) = (group.best, group.worst) else {
            self.alone += 1;
            return Ok(());
        };
        if group.rollouts < 2 {
            self.alone += 1;
        } else if best.reward <= worst.reward {
            self.equal += 1;
        } else {
            let sides = [best, worst].map(|side| (side.conversation(), side));
            let pair = pair(&sides);
            for (conversation, side) in &sides {
                let rollout_id = side.rollout.trajectory.rollout_id.as_deref().unwrap_or_default();
                self.unreadable.add(pair.is_some().then_some(self.written), rollout_id, conversation);
            }
            match pair {
                Some(pair) => {
                    self.written += 1;
                    self.out.pair(pair)?;
                }
                None => self.unrelated += 1,
            }
        }
        Ok(())
    }
}

impl Group {
    /// Takes a rollout into account. Only rollouts that take a place are compared: what was dropped was dropped for a
    /// reason that has nothing to do with preference.
    fn read(&mut self, rollout: &ExportedRollout) {
        let takes_place = matches!(rollout.result.verdict, Verdict::Kept | Verdict::Masked);
        let Some(reward) = rollout.trajectory.reward.filter(|_| takes_place) else { return };
        if rollout.trajectory.messages.is_none() {
            return;
        }
        self.rollouts += 1;
        let side = || Some(Side { reward, rollout: without_tokens(rollout) });
        if self.best.as_ref().is_none_or(|best| reward > best.reward) {
            self.best = side();
        }
        if self.worst.as_ref().is_none_or(|worst| reward < worst.reward) {
            self.worst = side();
        }
    }
}

/// A copy of the parts of a rollout that pairs have.
fn without_tokens(rollout: &ExportedRollout) -> ExportedRollout {
    let ExportedRollout { trajectory, result } = rollout;
    let trajectory = forebay_wire::Trajectory {
        policy: trajectory.policy.clone(),
        rollout_id: trajectory.rollout_id.clone(),
        group_id: trajectory.group_id.clone(),
        environment: trajectory.environment.clone(),
        messages: trajectory.messages.clone(),
        metadata: trajectory.metadata.clone(),
        ..Default::default()
    };
    ExportedRollout { trajectory, result: result.clone() }
}

impl Side {
    fn conversation(&self) -> Conversation {
        let messages = self.rollout.trajectory.messages.as_deref();
        messages.map(|messages| Conversation::read(messages.get())).unwrap_or_default()
    }
}

/// The pair of the best and the worst rollout.
fn pair([(best_said, best), (worst_said, worst)]: &[(Conversation, Side); 2]) -> Option<Pair> {
    let (mut chosen, mut rejected) = (best_said.messages.clone(), worst_said.messages.clone());
    let common = chosen.iter().zip(&rejected).take_while(|(one, other)| one == other).count();
    // What the two have in common may end within the assistant's part, if both began with the same answer. The prompt
    // ends where both go on with an answer.
    let answers = |messages: &[Message], at: usize| messages.get(at).is_some_and(|message| message.role == "assistant");
    if !(answers(&chosen, common) && answers(&rejected, common)) {
        return None;
    }
    let trajectory = &best.rollout.trajectory;
    let prompt: Vec<Message> = chosen.drain(..common).collect();
    rejected.drain(..common);
    Some(Pair {
        prompt,
        chosen,
        rejected,
        tools: trajectory
            .metadata
            .as_deref()
            .and_then(|metadata| row::tools(metadata.get()))
            .map(|tools| tools.get().to_owned()),
        score_chosen: best.reward,
        score_rejected: worst.reward,
        policy: trajectory.policy.clone().unwrap_or_default(),
        group_id: trajectory.group_id.clone().unwrap_or_default(),
        environment: trajectory.environment.clone(),
    })
}

impl<W: Write + Send> Out<W> {
    fn pair(&mut self, pair: Pair) -> Result<(), ExportError> {
        match self {
            Self::Ndjson(out) => {
                serde_json::to_writer(&mut *out, &pair)?;
                out.write_all(b"\n")?;
                Ok(())
            }
            Self::Parquet { file, pairs } => {
                pairs.push(pair);
                if pairs.len() < BATCH_PAIRS {
                    return Ok(());
                }
                file.write(columns(&std::mem::take(pairs)))
            }
        }
    }

    fn end(self) -> Result<(), ExportError> {
        match self {
            Self::Ndjson(mut out) => Ok(out.flush()?),
            Self::Parquet { mut file, pairs } => {
                if !pairs.is_empty() {
                    file.write(columns(&pairs))?;
                }
                file.close()
            }
        }
    }
}

fn schema() -> Schema {
    Schema::new(vec![
        Field::new("prompt", messages_type(), true),
        Field::new("chosen", messages_type(), true),
        Field::new("rejected", messages_type(), true),
        Field::new("tools", DataType::Utf8, true),
        Field::new("score_chosen", DataType::Float64, false),
        Field::new("score_rejected", DataType::Float64, false),
        Field::new("policy", DataType::Utf8, false),
        Field::new("group_id", DataType::Utf8, false),
        Field::new("environment", DataType::Utf8, true),
    ])
}

fn columns(pairs: &[Pair]) -> Vec<ArrayRef> {
    let conversations = |side: fn(&Pair) -> &Vec<Message>| {
        messages(&pairs.iter().map(|pair| Some(side(pair).clone())).collect::<Vec<_>>())
    };
    let texts = |text: &dyn for<'p> Fn(&'p Pair) -> Option<&'p str>| -> ArrayRef {
        Arc::new(pairs.iter().map(text).collect::<StringArray>())
    };
    let scores =
        |score: fn(&Pair) -> f64| -> ArrayRef { Arc::new(Float64Array::from_iter_values(pairs.iter().map(score))) };
    vec![
        conversations(|pair| &pair.prompt),
        conversations(|pair| &pair.chosen),
        conversations(|pair| &pair.rejected),
        texts(&|pair| pair.tools.as_deref()),
        scores(|pair| pair.score_chosen),
        scores(|pair| pair.score_rejected),
        texts(&|pair| Some(&pair.policy)),
        texts(&|pair| Some(&pair.group_id)),
        texts(&|pair| pair.environment.as_deref()),
    ]
}

impl<W: Write + Send> Writer for Pairs<W> {
    fn write(&mut self, rollouts: &[ExportedRollout]) -> Result<(), ExportError> {
        for rollout in rollouts {
            let id = rollout.trajectory.group_id.as_deref().unwrap_or_default();
            if self.group.as_ref().is_none_or(|group| group.id != id) {
                self.end_group()?;
                self.group = Some(Group { id: id.to_owned(), rollouts: 0, best: None, worst: None });
            }
            if let Some(group) = &mut self.group {
                group.read(rollout);
            }
        }
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<Written, ExportError> {
        self.end_group()?;
        self.out.end()?;
        let left_out = vec![
            (self.alone, "groups without two rollouts that have a reward and messages"),
            (self.equal, "groups with equal rewards"),
            (self.unrelated, "groups whose best and worst conversation have no common prompt"),
        ];
        Ok(Written { rows: self.written, left_out, unreadable: self.unreadable })
    }
}
