use super::*;
use crate::head::tests::scattered;
use crate::head::{Entropy, HeadInput, HeadOptions, forward};
use crate::microbatch::Microbatch;
use crate::rows::Rows;
use crate::rows::tests::{rows, sample};

/// Every objective, combined with every additional term.
const CONFIGURATIONS: [&str; 9] = [
    r#"{"eps_high": 0.3, "clip_c": 1.7, "entropy_coef": 0.01, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}"#,
    r#"{"objective": "gspo", "kl_loss_coef": 0.1, "kl_loss_type": "k2"}"#,
    r#"{"objective": "cispo", "entropy_coef": 0.02}"#,
    r#"{"objective": "reinforce", "kl_loss_coef": 0.1}"#,
    r#"{"objective": "sft", "entropy_coef": 0.02}"#,
    r#"{"objective": "reinforce_plus_plus", "correction": {"kind": "tis"}}"#,
    r#"{"objective": "gspo", "correction": {"kind": "mis", "level": "product"}}"#,
    r#"{"correction": {"kind": "mis", "level": "geometric", "outside": "zero"}}"#,
    r#"{"objective": "ppo", "correction": {"kind": "decoupled"}, "opd_coef": 0.3}"#,
];

const STEP: f64 = 1e-6;

/// Three rows that are far from every kink of the losses: ratios near 1.05, 0.6, 1.6 and 2.2, with advantages of both
/// signs.
fn batch() -> Batch {
    let row = |logs: &[f64], advantage: f64| -> Vec<(f64, f64, f64)> {
        logs.iter().map(|log| (-1.0 + log, -1.0, advantage)).collect()
    };
    let rows = [row(&[0.05, -0.5, 0.47], 1.3), row(&[0.79, 0.05], -0.7), row(&[-0.5, -0.45], -0.4)];
    let mut batch = Batch::new(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
    batch.entropy = Some(column([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]));
    batch.logp_reference = Some(column([-1.1, -1.4, -0.7, -0.9, -1.2, -2.0, -1.0]));
    batch.tokens.logp_teacher = Some(column([-0.2, -1.0, -0.4, -3.0, -1.5, -0.1, -0.8]));
    batch.tokens.loss_weight = column([0.1, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]);
    batch
}

/// With a correction, the old policy lies between the rollout's policy and the trained one.
fn old_policy(config: &ObjectiveConfig, batch: &mut Batch) {
    if config.correction.is_some() {
        batch.logp_old = Some((batch.logp.detach() - 1.0) * 0.5 - column([0.02, 0.01, 0.1, 0.05, 0.1, 0.2, 0.3]));
    }
}

#[test]
fn gradients_agree_with_finite_differences() {
    for json in CONFIGURATIONS {
        let config = config(json);
        let mut batch = batch();
        old_policy(&config, &mut batch);
        // The finite difference would include the change of cispo's ratio, which is detached. cispo has a test of its
        // own with numbers computed by hand.
        if config.objective == Objective::Cispo {
            continue;
        }
        let found = differentiate(&config, &batch.inputs()).expect("it has every column");
        let difference = |move_by: &dyn Fn(&mut Batch, f64)| {
            let at = |by: f64| {
                let mut moved = self::batch();
                old_policy(&config, &mut moved);
                move_by(&mut moved, by);
                moved.evaluate(&config).total.double_value(&[])
            };
            (at(STEP) - at(-STEP)) / (2.0 * STEP)
        };
        for (token, gradient) in (0_i64..).zip(numbers(&found.logp)) {
            let expected = difference(&|batch, by| batch.logp = nudge(&batch.logp, token, by));
            assert!((gradient - expected).abs() < 1e-7, "{json}, logp {token}: {gradient} is not {expected}");
        }
        for (token, gradient) in (0_i64..).zip(found.entropy.as_ref().map(numbers).unwrap_or_default()) {
            let expected = difference(&|batch, by| batch.entropy = batch.entropy.as_ref().map(|h| nudge(h, token, by)));
            assert!((gradient - expected).abs() < 1e-7, "{json}, entropy {token}: {gradient} is not {expected}");
        }
    }
}

fn nudge(column: &Tensor, token: i64, by: f64) -> Tensor {
    let moved = column.detach().copy();
    let _ = moved.narrow(0, token, 1).g_add_scalar_(by);
    moved
}

/// A batch of four rows with every column, whose hidden states come from a table.
struct Run {
    config: ObjectiveConfig,
    rows: Rows,
    hidden: Tensor,
    weight: Tensor,
}

/// Gradients and statistics of a whole step.
struct Step {
    weight: Tensor,
    hidden: Tensor,
    statistics: StepStatistics,
}

impl Run {
    const VOCABULARY: i64 = 40;
    const HIDDEN: i64 = 6;

    /// `garbage` is written to masked tokens: their ids, log-probabilities and teacher log-probabilities.
    fn new(json: &str, garbage: i32) -> Self {
        let samples = [(3, vec![1, 0, 1, 1, 0, 0]), (1, vec![1]), (5, vec![0, 1]), (2, vec![1, 1, 1, 1])];
        let samples = (0_i32..).zip(samples).map(|(place, (prompt, mask))| {
            let mut row = sample(&format!("r{place}"), prompt, &mask);
            // One row has an advantage for each token.
            row.advantage = (place != 0).then_some(1.5 - place as f32);
            let of_token = |(t, &bit): (usize, &u8)| if bit == 1 { 1.5 - t as f32 } else { garbage as f32 };
            row.advantages = (place == 0).then(|| mask.iter().enumerate().map(of_token).collect());
            row.loss_weight = 0.05 * f64::from(place + 1);
            row.temperature = if place == 2 { 0.6 } else { 1.0 };
            row.logprobs = Some(mask.iter().map(|_| -3.5 - 0.1 * place as f32).collect());
            row.teacher_logprobs = Some(mask.iter().map(|_| -3.0).collect());
            for (t, _) in mask.iter().enumerate().filter(|&(_, &entry)| entry == 0) {
                row.tokens.as_mut().expect("set")[prompt + t] = garbage;
                row.logprobs.as_mut().expect("set")[t] = -(garbage as f32);
                row.teacher_logprobs.as_mut().expect("set")[t] = garbage as f32;
            }
            row
        });
        Self {
            config: config(json),
            rows: rows(&samples.collect::<Vec<_>>()),
            hidden: scattered(&[64, Self::HIDDEN], 1.0),
            weight: scattered(&[Self::VOCABULARY, Self::HIDDEN], 2.0) * 0.5,
        }
    }

    /// One step over the microbatches of `plan`.
    fn step(&self, plan: &[Vec<usize>]) -> Step {
        let mut weight = self.weight.zeros_like();
        let mut hidden = self.hidden.zeros_like();
        let mut statistics = LossStatistics::empty(Device::Cpu);
        for indices in plan {
            let microbatch = Microbatch::new(self.rows.trained(), indices, Device::Cpu);
            let flat = &microbatch.flat;
            // Hidden states are looked up by row and position, so that they do not depend on the split.
            let states = indices.iter().flat_map(|&row| {
                self.rows.trained()[row].positions().iter().map(move |position| 16 * row as i64 + position)
            });
            let states = Tensor::from_slice(&states.collect::<Vec<_>>());
            let predicting = self.hidden.index_select(0, &states);
            let input = HeadInput {
                hidden: &predicting,
                weight: &self.weight,
                targets: &flat.targets,
                temperature: flat.temperature.as_ref(),
            };
            let options = HeadOptions { logits_max: 2 * Self::VOCABULARY, entropy: Entropy::Trained };
            let head = forward(&input, options);
            let reference = &head.logp * 0.9;
            let inputs = LossInputs {
                tokens: flat,
                logp: &head.logp,
                entropy: head.entropy.as_ref(),
                logp_old: if self.config.correction.is_some() { OldPolicy::Current } else { OldPolicy::Rollout },
                logp_reference: Some(&reference),
                logp_teacher: None,
                advantages: None,
            };
            let found = differentiate(&self.config, &inputs).expect("it has every column");
            let part = head.backward(&found.logp, found.entropy.as_ref(), &mut weight);
            let _ = hidden.index_add_(0, &states, &part);
            statistics = statistics.add(&found.statistics);
        }
        Step { weight, hidden, statistics: statistics.finish() }
    }
}

fn agree(found: &Step, expected: &Step, of: &str) {
    assert!(found.weight.allclose(&expected.weight, 1e-12, 1e-14, false), "{of}: gradients of the weight differ");
    assert!(found.hidden.allclose(&expected.hidden, 1e-12, 1e-14, false), "{of}: gradients of the states differ");
    let listed = |step: &Step| {
        let found = step.statistics;
        let optional = [
            found.clip_fraction,
            found.kl_rollout,
            found.kl_reference,
            found.entropy,
            found.ratio_mean,
            found.ratio_max,
            found.correction_mean,
            found.correction_zeroed,
        ];
        let mut listed = vec![found.loss, found.trained_tokens as f64, found.advantage_mean.unwrap_or(f64::MAX)];
        listed.extend(optional.map(|number| number.unwrap_or(f64::MAX)));
        listed
    };
    close(&listed(found), &listed(expected));
}

#[test]
fn any_split_into_rows_gives_the_gradient_of_the_batch() {
    for json in CONFIGURATIONS {
        let run = Run::new(json, 7);
        let whole = run.step(&[vec![0, 1, 2, 3]]);
        assert!(whole.weight.abs().max().double_value(&[]) > 1e-3, "{json}: the test trains nothing");
        for plan in
            [vec![vec![0], vec![1], vec![2], vec![3]], vec![vec![3, 1], vec![2, 0]], vec![vec![2], vec![0, 3, 1]]]
        {
            agree(&run.step(&plan), &whole, json);
        }
    }
}

#[test]
fn what_stands_at_masked_tokens_influences_nothing() {
    for json in CONFIGURATIONS {
        let plan = [vec![0, 1], vec![2, 3]];
        agree(&Run::new(json, 30).step(&plan), &Run::new(json, 7).step(&plan), json);
    }
}
