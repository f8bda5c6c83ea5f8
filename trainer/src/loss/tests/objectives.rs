use super::*;
use crate::microbatch::Sampled;

#[test]
fn the_clipped_surrogate_holds_by_hand() {
    let mut batch = Batch::with_ratios(&[2.0, 2.0, 0.5], &[2.0, -2.0, 2.0]);
    close(&batch.per_token(&config(r#"{"clip_c": 1.5}"#)), &[-2.4, 3.0, -1.0]);
    close(&batch.per_token(&config("{}")), &[-2.4, 4.0, -1.0]);
    close(&batch.per_token(&config(r#"{"objective": "ppo", "eps_high": 0.28}"#)), &[-2.56, 4.0, -1.0]);
    close(&batch.per_token(&config(r#"{"objective": "reinforce_plus_plus"}"#)), &[-2.4, 4.0, -1.0]);
}

#[test]
fn only_tokens_within_the_clip_have_a_gradient() {
    // d(-rA)/dlogp = -rA where the ratio itself decides.
    let batch = Batch::with_ratios(&[2.0, 2.0, 0.5], &[2.0, -2.0, 2.0]);
    close(&batch.gradient(&config("{}")), &[0.0, 4.0, -1.0]);
    close(&batch.gradient(&config(r#"{"clip_c": 1.5}"#)), &[0.0, 0.0, -1.0]);
    let low = Batch::with_ratios(&[0.5], &[-2.0]);
    close(&low.gradient(&config("{}")), &[0.0]);
}

#[test]
fn the_current_policy_as_the_old_one_is_the_plain_policy_gradient() {
    let batch = Batch::with_ratios(&[2.0, 0.5], &[2.0, -3.0]);
    let inputs = LossInputs { logp_old: OldPolicy::Current, ..batch.inputs() };
    let found = differentiate(&config("{}"), &inputs).expect("it has every column");
    close(&numbers(&found.logp), &[-2.0, 3.0]);
    let statistics = found.statistics.finish();
    assert_eq!((statistics.ratio_mean, statistics.clip_fraction), (Some(1.0), Some(0.0)));
}

#[test]
fn gspo_clips_the_geometric_mean_of_a_sequence() {
    // Sequence 0: log-ratios ln 2 and ln 0.5 cancel. Sequence 1: one ratio of 2, clipped where A > 0.
    let ln2 = std::f64::consts::LN_2;
    let mut batch = Batch::new(&[&[(ln2, 0.0, 1.0), (-ln2, 0.0, -1.0)], &[(ln2, 0.0, 3.0)]]);
    let gspo = config(r#"{"objective": "gspo"}"#);
    close(&batch.per_token(&gspo), &[-1.0, 1.0, -3.6]);
    // Each token of sequence 0 moves the ratio of both by a half: (-1 + 1) / 2 = 0.
    close(&batch.gradient(&gspo), &[0.0, 0.0, 0.0]);
    let mut same = Batch::new(&[&[(0.4, 0.0, 2.0), (-0.2, 0.0, 2.0)]]);
    let ratio = 0.1_f64.exp();
    close(&same.per_token(&gspo), &[-2.0 * ratio, -2.0 * ratio]);
    close(&same.gradient(&gspo), &[-2.0 * ratio, -2.0 * ratio]);
}

#[test]
fn cispo_weighs_the_gradient_by_the_clipped_ratio() {
    let batch = &mut Batch::with_ratios(&[2.0, 0.5, 1.0], &[2.0, -2.0, 1.0]);
    let cispo = config(r#"{"objective": "cispo", "eps_low": 0.1, "eps_high": 0.3}"#);
    let logp = numbers(&batch.logp);
    close(&batch.per_token(&cispo), &[-2.6 * logp[0], 1.8 * logp[1], -logp[2]]);
    close(&batch.gradient(&cispo), &[-2.6, 1.8, -1.0]);
    let fraction = batch.evaluate(&cispo).statistics.finish().clip_fraction;
    assert_eq!(fraction, Some(2.0 / 3.0));
}

#[test]
fn reinforce_and_sft_hold_by_hand() {
    let batch = &mut Batch::new(&[&[(-0.5, 0.0, 2.0), (-1.5, 0.0, -1.0)]]);
    close(&batch.per_token(&config(r#"{"objective": "reinforce"}"#)), &[1.0, -1.5]);
    close(&batch.gradient(&config(r#"{"objective": "reinforce"}"#)), &[-2.0, 1.0]);
    close(&batch.per_token(&config(r#"{"objective": "sft"}"#)), &[0.5, 1.5]);
    close(&batch.gradient(&config(r#"{"objective": "sft"}"#)), &[-1.0, -1.0]);
}

#[test]
fn without_logprobs_the_ratio_is_one() {
    let mut batch = Batch::new(&[&[(-0.5, 0.0, 2.0)]]);
    batch.tokens.logp_rollout = None;
    for objective in ["reinforce", "sft", "grpo", "gspo", "cispo"] {
        let statistics = batch.evaluate(&config(&format!(r#"{{"objective": "{objective}"}}"#))).statistics.finish();
        assert_eq!((statistics.ratio_mean, statistics.ratio_max, statistics.kl_rollout), (Some(1.0), Some(1.0), None));
    }
    close(&batch.gradient(&config("{}")), &[-2.0]);
}

#[test]
fn rows_without_logprobs_change_nothing_for_rows_with_them() {
    let (with, without) = ([(-0.5, -0.9, 2.0), (-0.4, -0.3, 2.0)], [(-1.5, 0.0, -1.0)]);
    let mut mixed = Batch::new(&[&with, &without]);
    mixed.tokens.sampled = Some(Sampled { mask: Tensor::from_slice(&[true, true, false]), count: 2 });
    let alone = Batch::new(&[&with]);
    let mut bare = Batch::new(&[&without]);
    bare.tokens.logp_rollout = None;
    for objective in ["grpo", "gspo", "cispo", "reinforce"] {
        let config = config(&format!(r#"{{"objective": "{objective}"}}"#));
        let together = mixed.evaluate(&config).statistics;
        let added = alone.evaluate(&config).statistics.add(&bare.evaluate(&config).statistics);
        assert_eq!(together.finish(), added.finish(), "{objective}");
        let apart = [alone.gradient(&config), bare.gradient(&config)].concat();
        close(&mixed.gradient(&config), &apart);
    }
}

#[test]
fn ratios_beyond_all_bounds_stay_finite() {
    let batch = Batch::new(&[&[(0.0, -5_000.0, 1.0), (-5_000.0, 0.0, -1.0)]]);
    for objective in ["grpo", "gspo", "cispo"] {
        let gradient = batch.gradient(&config(&format!(r#"{{"objective": "{objective}"}}"#)));
        assert!(gradient.iter().all(|number| number.is_finite()), "{objective}: {gradient:?}");
    }
}
