//! One pass through the model: pieces of prompts are read and scored, and every sequence whose tokens are all in its
//! cache draws one more.

use std::{collections::BTreeMap, sync::Arc};

use tch::{Kind, Tensor};

use super::{
    request::{Ending, Token},
    runner::Weights,
    sequence::Sequence,
};
use crate::{
    generate::{Sampling, sample::sample},
    model::Piece,
};

/// What a pass led to.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Places of the sequences that ended, ascending.
    pub(super) ended: Vec<(usize, Ending)>,
    /// Number of tokens that were drawn.
    pub(super) drawn: usize,
}

/// Takes `counts[i]` tokens of each sequence through the model; none of a sequence whose count is 0.
pub(super) fn run(weights: &Weights, sequences: &mut [Sequence], counts: &[usize]) -> Outcome {
    let mut pieces = Vec::new();
    for (sequence, &count) in sequences.iter_mut().zip(counts).filter(|&(_, &count)| count > 0) {
        let start = sequence.cache.length();
        let most = sequence.tokens_max();
        sequence.cache.reserve(start + count, most);
        pieces.push(Piece { tokens: &sequence.tokens[start..start + count], cache: &mut sequence.cache });
    }
    if pieces.is_empty() {
        return Outcome::default();
    }
    let hidden = weights.model.advance(&mut pieces);
    let mut outcome = Outcome::default();
    let mut drawing = Vec::new();
    let mut row = 0;
    for (index, (sequence, &count)) in
        sequences.iter_mut().zip(counts).enumerate().filter(|(_, (_, count))| **count > 0)
    {
        score(weights, sequence, &hidden.narrow(0, row, count as i64));
        row += count as i64;
        if sequence.lacking() > 0 {
            continue;
        }
        if !sequence.report_read(&weights.version) {
            outcome.ended.push((index, Ending::Abort("the client has disconnected")));
        } else if sequence.request().sampling.new_tokens_max == 0 {
            outcome.ended.push((index, Ending::Length));
        } else {
            drawing.push((index, row - 1));
        }
    }
    outcome.drawn = drawing.len();
    outcome.ended.extend(draw(weights, sequences, &drawing, &hidden));
    outcome.ended.sort_unstable_by_key(|(index, _)| *index);
    outcome
}

/// Scores the tokens of the prompt that the states (`[count, H]`) of its newest piece predict.
fn score(weights: &Weights, sequence: &mut Sequence, hidden: &Tensor) {
    let count = hidden.size()[0] as usize;
    let (first, targets) = sequence.targets(sequence.cache.length() - count, count);
    if !targets.is_empty() {
        let states = hidden.narrow(0, first as i64, targets.len() as i64);
        let scores = weights.model.score(&states, targets, sequence.request().sampling.temperature);
        sequence.add_scores(scores);
    }
}

/// Draws a token for each of the sequences, given with the row of `hidden` that predicts it. Returns those that ended.
fn draw(
    weights: &Weights,
    sequences: &mut [Sequence],
    drawing: &[(usize, i64)],
    hidden: &Tensor,
) -> Vec<(usize, Ending)> {
    if drawing.is_empty() {
        return Vec::new();
    }
    let rows: Vec<i64> = drawing.iter().map(|&(_, row)| row).collect();
    let logits = weights.model.logits(&select(hidden, &rows));
    let mut endings = Vec::new();
    for places in by_sampling(sequences, drawing) {
        let sampling = sequences[drawing[places[0] as usize].0].request().sampling.clone();
        let uniforms: Vec<f64> = places.iter().map(|&place| sequences[drawing[place as usize].0].uniform()).collect();
        let logits = if places.len() == drawing.len() { logits.shallow_clone() } else { select(&logits, &places) };
        let (ids, logprobs) = sample(&logits, &sampling, &uniforms);
        for (row, place) in places.into_iter().enumerate() {
            let index = drawing[place as usize].0;
            let sequence = &mut sequences[index];
            let alternatives = alternatives(&logits.get(row as i64), sequence);
            let version = Arc::clone(&weights.version);
            let token = Token { id: ids[row], logprob: logprobs[row], alternatives, version };
            endings.extend(sequence.push(token).map(|ending| (index, ending)));
        }
    }
    endings
}

fn select(tensor: &Tensor, rows: &[i64]) -> Tensor {
    tensor.index_select(0, &Tensor::from_slice(rows).to_device(tensor.device()))
}

/// Groups the places in `drawing` by how their tokens are drawn.
fn by_sampling(sequences: &[Sequence], drawing: &[(usize, i64)]) -> Vec<Vec<i64>> {
    let mut groups: BTreeMap<_, Vec<i64>> = BTreeMap::new();
    for (place, &(index, _)) in drawing.iter().enumerate() {
        let Sampling { temperature, top_k, top_p, .. } = sequences[index].request().sampling;
        groups.entry((temperature.to_bits(), top_k, top_p.map(f64::to_bits))).or_default().push(place as i64);
    }
    groups.into_values().collect()
}

/// The most probable tokens at logits `[V]`, if the request asks for them, with their log-probabilities at the
/// temperature.
fn alternatives(logits: &Tensor, sequence: &Sequence) -> Vec<(i64, f32)> {
    let request = sequence.request();
    if request.alternatives == 0 {
        return Vec::new();
    }
    let _guard = tch::no_grad_guard();
    let logprobs = (logits / request.sampling.temperature).log_softmax(-1, Kind::Float);
    let count = (request.alternatives as i64).min(logprobs.size()[0]);
    let (logprobs, ids) = logprobs.topk(count, -1, true, true);
    let ids: Vec<i64> = ids.try_into().expect("indices are one vector of integers");
    let logprobs: Vec<f32> = logprobs.try_into().expect("log-probabilities are one vector of 32-bit floats");
    ids.into_iter().zip(logprobs).collect()
}
