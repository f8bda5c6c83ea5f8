//! Groups the rows of one batch under a token budget and lays them out as tensors.
//!
//! This is separate because only this stage knows both layouts: padded `[B, S]` for the model, and flat `[N]` over
//! trained tokens for all later stages. Only the hidden states that predict a trained token go through the head, which
//! saves most of the head's cost for long prompts and masked tool results. The previous stage is [`crate::rows`], the
//! next [`crate::head`].

use tch::{Device, Kind, Tensor};

use crate::rows::Row;

/// Fills the positions after the end of a row. Causal attention never reads them.
const PADDING_ID: i64 = 0;

/// Rows that go through the model in one pass.
#[derive(Debug)]
pub struct Microbatch {
    /// Token ids `[B, S]`, i64, right-padded with 0; S is the longest row's [`Row::inputs`].
    pub inputs: Tensor,
    /// Positions in the `[B * S]` flattened hidden states that predict the flat tokens: `[N]`, i64, ascending.
    pub gather: Tensor,
    /// The columns that the losses read.
    pub flat: FlatTokens,
    rows: Vec<usize>,
    counts: Vec<i64>,
}

/// Columns over the trained tokens of a microbatch, row after row: each is `[N]`.
///
/// There is no mask column, because every token here has mask 1. The values of a token depend only on its row, so
/// results do not depend on which rows share a microbatch.
#[derive(Debug)]
pub struct FlatTokens {
    /// Ids to predict, i64.
    pub targets: Tensor,
    /// Row within the microbatch, `0..rows`, i64, ascending. Each row is one sequence.
    pub row: Tensor,
    /// Number of rows B.
    pub rows: i64,
    /// Position in the response, counting masked tokens, i64.
    pub position: Tensor,
    /// Behaviour log-probabilities, f32, 0 at tokens of rows without them; `None` if no row has them.
    pub logp_rollout: Option<Tensor>,
    /// Which tokens have behaviour log-probabilities; `None` if all have them or none has.
    pub sampled: Option<Sampled>,
    /// Teacher log-probabilities, f32; `None` unless every row has them.
    pub logp_teacher: Option<Tensor>,
    /// Advantage of each trained token, f32.
    pub advantage: Tensor,
    /// Weight in the loss, f32.
    pub loss_weight: Tensor,
    /// Divisor of the logits, f32; `None` if all are 1.
    pub temperature: Option<Tensor>,
}

/// The tokens that have behaviour log-probabilities, if some rows have none.
#[derive(Debug)]
pub struct Sampled {
    /// `[N]`, bool.
    pub mask: Tensor,
    /// Number of these tokens.
    pub count: i64,
}

/// Splits rows into microbatches whose padded size `rows * longest` is at most `tokens_max`. A longer row is a
/// microbatch of its own.
///
/// `lengths` are the lengths of [`Row::inputs`]. Every index occurs once. The longest rows come first, so that a budget
/// too large for the device fails at once. Equal lengths keep their order, so the same batch always gives the same
/// plan.
#[must_use]
pub fn plan(lengths: &[usize], tokens_max: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(lengths[index]));
    let mut plan: Vec<Vec<usize>> = Vec::new();
    for index in order {
        match plan.last_mut() {
            Some(open) if (open.len() + 1) * lengths[open[0]] <= tokens_max => open.push(index),
            _ => plan.push(vec![index]),
        }
    }
    plan
}

impl Microbatch {
    /// Lays out the rows at `indices` of `rows` on `device`.
    ///
    /// `indices` must not be empty; [`plan`] guarantees that.
    #[must_use]
    pub fn new(rows: &[Row], indices: &[usize], device: Device) -> Self {
        let members: Vec<&Row> = indices.iter().map(|&index| &rows[index]).collect();
        let longest = members.iter().map(|row| row.inputs().len()).max().unwrap_or(0);
        let mut inputs = vec![PADDING_ID; members.len() * longest];
        let mut gather = Vec::new();
        for (place, row) in members.iter().enumerate() {
            let start = place * longest;
            inputs[start..start + row.inputs().len()].copy_from_slice(row.inputs());
            let before_response = (start + row.prompt_length() - 1) as i64;
            gather.extend(row.positions().iter().map(|position| before_response + position));
        }
        let size = [members.len() as i64, longest as i64];
        Self {
            inputs: Tensor::from_slice(&inputs).view(size).to_device(device),
            gather: Tensor::from_slice(&gather).to_device(device),
            flat: FlatTokens::new(&members, device),
            rows: indices.to_vec(),
            counts: members.iter().map(|row| row.trained_length() as i64).collect(),
        }
    }

    /// Indices of the rows, in the order of the microbatch.
    #[must_use]
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Number N of trained tokens.
    #[must_use]
    pub fn trained_tokens(&self) -> i64 {
        self.counts.iter().sum()
    }

    /// Selects the hidden states `[N, H]` that predict the flat tokens from `[B, S, H]`; differentiable.
    pub fn predicting(&self, hidden: &Tensor) -> Tensor {
        hidden.flatten(0, 1).index_select(0, &self.gather)
    }

    /// Makes a flat column `[N]`, f32, from one column over the trained tokens per row of the batch.
    pub fn flatten(&self, columns: &[Vec<f32>]) -> Tensor {
        let flat: Vec<f32> = self.rows.iter().flat_map(|&row| columns[row].iter().copied()).collect();
        debug_assert_eq!(flat.len() as i64, self.trained_tokens(), "a column covers the trained tokens of its row");
        Tensor::from_slice(&flat).to_device(self.gather.device())
    }

    /// The reverse of [`Microbatch::flatten`]: writes a flat column `[N]` back to the columns of its rows.
    pub fn unflatten(&self, flat: &Tensor, columns: &mut [Vec<f32>]) {
        let mut values = vec![0_f32; self.trained_tokens() as usize];
        let length = values.len();
        flat.to_device(Device::Cpu).to_kind(Kind::Float).contiguous().copy_data(&mut values, length);
        let mut rest = values.as_slice();
        for (&row, &count) in self.rows.iter().zip(&self.counts) {
            let (column, behind) = rest.split_at(count as usize);
            columns[row] = column.to_vec();
            rest = behind;
        }
    }
}

impl FlatTokens {
    fn new(members: &[&Row], device: Device) -> Self {
        let integers = |column: Vec<i64>| Tensor::from_slice(&column).to_device(device);
        let per_row = |value: fn(&Row) -> f32| {
            let column: Vec<f32> =
                members.iter().flat_map(|row| std::iter::repeat_n(value(row), row.trained_length())).collect();
            Tensor::from_slice(&column).to_device(device)
        };
        let per_token = |column: fn(&Row) -> Option<&[f32]>| {
            let columns: Option<Vec<&[f32]>> = members.iter().map(|row| column(row)).collect();
            columns.map(|columns| Tensor::from_slice(&columns.concat()).to_device(device))
        };
        let advantages: Vec<f32> = members.iter().flat_map(|row| row.advantages().iter().copied()).collect();
        let tempered = members.iter().any(|row| row.temperature().to_bits() != 1.0_f32.to_bits());
        let row = (0_i64..).zip(members).flat_map(|(place, row)| std::iter::repeat_n(place, row.trained_length()));
        Self {
            targets: integers(members.iter().flat_map(|row| row.targets().iter().copied()).collect()),
            row: integers(row.collect()),
            rows: members.len() as i64,
            position: integers(members.iter().flat_map(|row| row.positions().iter().copied()).collect()),
            logp_rollout: logp_rollout(members).map(|column| Tensor::from_slice(&column).to_device(device)),
            sampled: Sampled::of(members, device),
            logp_teacher: per_token(Row::teacher_logprobs),
            advantage: Tensor::from_slice(&advantages).to_device(device),
            loss_weight: per_row(|row| row.loss_weight() as f32),
            temperature: tempered.then(|| per_row(Row::temperature)),
        }
    }
}

impl Sampled {
    fn of(members: &[&Row], device: Device) -> Option<Self> {
        let has = |row: &&&Row| row.logprobs().is_some();
        let with = members.iter().filter(has).count();
        if with == 0 || with == members.len() {
            return None;
        }
        let mask: Vec<bool> = members
            .iter()
            .flat_map(|row| std::iter::repeat_n(row.logprobs().is_some(), row.trained_length()))
            .collect();
        let count = members.iter().filter(has).map(|row| row.trained_length() as i64).sum();
        Some(Self { mask: Tensor::from_slice(&mask).to_device(device), count })
    }
}

fn logp_rollout(members: &[&Row]) -> Option<Vec<f32>> {
    let any = members.iter().any(|row| row.logprobs().is_some());
    any.then(|| {
        let column = |row: &&Row| row.logprobs().map_or_else(|| vec![0.0; row.trained_length()], <[f32]>::to_vec);
        members.iter().flat_map(column).collect()
    })
}

#[cfg(test)]
mod tests {
    use forebay_client::wire::Sample;

    use super::*;
    use crate::rows::tests::{rows, sample};

    fn integers(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor).expect("it is a vector of i64")
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        Vec::try_from(tensor).expect("it is a vector of f32")
    }

    fn batch() -> Vec<Sample> {
        let mut tempered = sample("b", 1, &[0, 1]);
        tempered.temperature = 0.5;
        vec![sample("a", 3, &[1, 0, 1, 0]), tempered, sample("c", 2, &[1, 1, 1])]
    }

    #[test]
    fn padded_size_stays_within_the_budget() {
        let lengths = [3, 9, 4, 4, 1, 20, 2, 4];
        let found = plan(&lengths, 12);
        assert_eq!(found, [vec![5], vec![1], vec![2, 3, 7], vec![0, 6, 4]]);
        assert_eq!(plan(&lengths, 1).len(), lengths.len(), "a row is never split");
        assert!(plan(&[], 12).is_empty());
    }

    #[test]
    fn gathered_positions_predict_the_targets() {
        let rows = rows(&batch());
        let microbatch = Microbatch::new(rows.trained(), &[0, 1, 2], Device::Cpu);
        assert_eq!(microbatch.inputs.size(), [3, 5]);
        assert_eq!(integers(&microbatch.inputs.flatten(0, 1)), [1, 2, 3, 4, 5, 1, 2, 0, 0, 0, 1, 2, 3, 4, 0]);
        assert_eq!(integers(&microbatch.gather), [2, 4, 6, 11, 12, 13]);
        assert_eq!(integers(&microbatch.flat.targets), [4, 6, 3, 3, 4, 5]);
        // Ids count up, so the id at each predicting place is its target less one.
        let predicting = microbatch.predicting(&microbatch.inputs.unsqueeze(2)).flatten(0, 1);
        assert_eq!(integers(&(predicting + 1)), integers(&microbatch.flat.targets));
        assert_eq!(integers(&microbatch.flat.row), [0, 0, 1, 2, 2, 2]);
        assert_eq!(integers(&microbatch.flat.position), [0, 2, 1, 0, 1, 2]);
        let temperature = microbatch.flat.temperature.as_ref().expect("one row has its own");
        assert_eq!(floats(temperature), [1.0, 1.0, 0.5, 1.0, 1.0, 1.0]);
        let logp_rollout = microbatch.flat.logp_rollout.as_ref().expect("all rows have them");
        let delivered: Vec<f32> =
            [0, 1, 2].iter().flat_map(|&row| rows.trained()[row].logprobs().expect("set")).copied().collect();
        assert_eq!(floats(logp_rollout), delivered);
    }

    #[test]
    fn a_row_without_logprobs_does_not_hide_those_of_the_others() {
        let mut batch = batch();
        batch[2].logprobs = None;
        let rows = rows(&batch);
        let mixed = Microbatch::new(rows.trained(), &[0, 2], Device::Cpu).flat;
        let delivered = rows.trained()[0].logprobs().expect("set");
        let column = floats(mixed.logp_rollout.as_ref().expect("one row has them"));
        assert_eq!((&column[..2], &column[2..]), (delivered, &[0.0; 3][..]));
        let sampled = mixed.sampled.expect("one row has none");
        assert_eq!((integers(&sampled.mask.to_kind(Kind::Int64)), sampled.count), (vec![1, 1, 0, 0, 0], 2));
        let others = Microbatch::new(rows.trained(), &[0], Device::Cpu);
        assert!(others.flat.logp_rollout.is_some() && others.flat.sampled.is_none());
        assert!(others.flat.temperature.is_none(), "a temperature of 1 costs nothing");
        assert!(Microbatch::new(rows.trained(), &[2], Device::Cpu).flat.logp_rollout.is_none());
    }

    #[test]
    fn columns_of_the_batch_survive_the_round_trip() {
        let rows = rows(&batch());
        let microbatch = Microbatch::new(rows.trained(), &[2, 0], Device::Cpu);
        let columns = vec![vec![1.0, 2.0], vec![9.0], vec![3.0, 4.0, 5.0]];
        let flat = microbatch.flatten(&columns);
        assert_eq!(floats(&flat), [3.0, 4.0, 5.0, 1.0, 2.0]);
        let mut back = vec![Vec::new(); 3];
        microbatch.unflatten(&flat, &mut back);
        assert_eq!(back, [vec![1.0, 2.0], vec![], vec![3.0, 4.0, 5.0]]);
    }
}
