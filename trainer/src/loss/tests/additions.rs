use super::*;

#[test]
fn divergences_hold_by_hand() {
    // d = 0.5 and -12, added to sft's -logp.
    let mut batch = Batch::new(&[&[(-1.0, 0.0, 0.0), (-13.0, 0.0, 0.0)]]);
    batch.logp_reference = Some(column([-1.5, -1.0]));
    let mut penalties = |estimator: &str| {
        let json = format!(r#"{{"objective": "reinforce", "kl_loss_coef": 2.0, "kl_loss_type": "{estimator}"}}"#);
        batch.per_token(&config(&json))
    };
    let k3 = |d: f64| (-d).exp() - 1.0 + d;
    close(&penalties("k2"), &[0.25, 144.0]);
    close(&penalties("k3"), &[2.0 * k3(0.5), 2.0 * k3(-12.0)]);
    close(&penalties("low_var_kl"), &[2.0 * k3(0.5), 20.0]);
}

#[test]
fn entropy_is_taken_off_and_differentiated() {
    let mut batch = Batch::new(&[&[(-0.5, 0.0, 1.0), (-0.25, 0.0, 1.0)]]);
    batch.entropy = Some(column([1.5, 2.0]));
    batch.tokens.loss_weight = column([1.0, 0.5]);
    let config = config(r#"{"objective": "sft", "entropy_coef": 0.1}"#);
    let found = differentiate(&config, &batch.inputs()).expect("it has every column");
    close(&numbers(found.entropy.as_ref().expect("it is a term")), &[-0.1, -0.05]);
    close(&numbers(&found.logp), &[-1.0, -0.5]);
    let statistics = found.statistics.finish();
    assert_eq!(statistics.entropy, Some(1.75));
    assert!((statistics.loss - (0.35 + 0.5 * 0.05)).abs() < 1e-12);
}

#[test]
fn a_reported_entropy_changes_nothing() {
    let mut batch = Batch::new(&[&[(-0.5, 0.0, 1.0)]]);
    batch.entropy = Some(column([1.5]));
    let found = differentiate(&config("{}"), &batch.inputs()).expect("it has every column");
    assert!(found.entropy.is_none());
    assert_eq!(found.statistics.finish().entropy, Some(1.5));
}

#[test]
fn distillation_takes_the_gap_to_the_teacher_off_the_advantage() {
    // A = 1 - 0.5 * (logp_old - logp_teacher) = 1 - 0.5 * (-1 - -0.2).
    let mut batch = Batch::new(&[&[(-1.0, -1.0, 1.0)]]);
    batch.tokens.logp_teacher = Some(column([-0.2]));
    let opd = config(r#"{"objective": "reinforce", "opd_coef": 0.5}"#);
    close(&batch.gradient(&opd), &[-1.4]);
    let frozen = column([-3.0]);
    let inputs = LossInputs { logp_teacher: Some(&frozen), ..batch.inputs() };
    close(&numbers(&differentiate(&opd, &inputs).expect("it has every column").logp), &[0.0]);
    batch.tokens.logp_teacher = None;
    assert_eq!(evaluate(&opd, &batch.inputs()).expect_err("nobody teaches"), LossError::Teacher);
}

#[test]
fn advantages_per_token_replace_those_of_the_rows() {
    let batch = Batch::new(&[&[(-1.0, -1.0, 1.0), (-1.0, -1.0, 1.0)]]);
    let advantages = column([3.0, -2.0]);
    let inputs = LossInputs { advantages: Some(&advantages), ..batch.inputs() };
    let found = differentiate(&config("{}"), &inputs).expect("it has every column");
    close(&numbers(&found.logp), &[-3.0, 2.0]);
    assert_eq!(found.statistics.finish().advantage_mean, Some(0.5));
}

#[test]
fn what_a_term_needs_and_lacks_is_named() {
    let batch = Batch::new(&[&[(-1.0, -1.0, 1.0)]]);
    let refused = |json: &str| evaluate(&config(json), &batch.inputs()).expect_err("a column is missing");
    assert_eq!(refused(r#"{"entropy_coef": 0.1}"#), LossError::Entropy);
    assert_eq!(refused(r#"{"kl_loss_coef": 0.1}"#), LossError::Reference);
    assert_eq!(refused(r#"{"correction": {"kind": "tis"}}"#), LossError::Correction);
}

#[test]
fn statistics_hold_by_hand() {
    let batch = Batch::with_ratios(&[2.0, 2.0, 0.5, 1.0], &[2.0, -2.0, 2.0, 0.0]);
    let found = batch.evaluate(&config("{}")).statistics.finish();
    assert_eq!(found.trained_tokens, 4);
    assert!((found.loss - 0.6).abs() < 1e-12);
    assert_eq!((found.clip_fraction, found.advantage_mean), (Some(0.25), Some(0.5)));
    let kl = |r: f64| r - 1.0 - r.ln();
    close(&[found.kl_rollout.expect("rows have logprobs")], &[(2.0 * kl(2.0) + kl(0.5)) / 4.0]);
    close(&[found.ratio_mean.expect("set"), found.ratio_max.expect("set")], &[5.5 / 4.0, 2.0]);
    assert_eq!((found.entropy, found.kl_reference, found.correction_mean), (None, None, None));
}
