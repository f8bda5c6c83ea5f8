use super::*;

/// Rows whose weights w are `weights`, with the old policy in training and A = 1: the loss per token is -factor.
fn batch(weights: &[&[f64]]) -> Batch {
    let rows: Vec<Vec<(f64, f64, f64)>> =
        weights.iter().map(|row| row.iter().map(|w| (-1.0, -1.0 - w.ln(), 1.0)).collect()).collect();
    let mut batch = Batch::new(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
    batch.logp_old = Some(batch.logp.detach());
    batch
}

fn factors(weights: &[&[f64]], correction: &str) -> Vec<f64> {
    let json = format!(r#"{{"correction": {correction}}}"#);
    batch(weights).per_token(&config(&json)).iter().map(|loss| -loss).collect()
}

#[test]
fn tis_clamps_the_weight_of_a_token() {
    close(&factors(&[&[0.25, 1.5, 7.0]], r#"{"kind": "tis"}"#), &[0.25, 1.5, 2.0]);
    close(&factors(&[&[0.25, 1.5, 7.0]], r#"{"kind": "tis", "low": 0.5, "high": 1.0}"#), &[0.5, 1.0, 1.0]);
}

#[test]
fn decoupled_drops_tokens_above_the_cap() {
    close(&factors(&[&[0.25, 4.0, 7.0]], r#"{"kind": "decoupled"}"#), &[0.25, 4.0, 0.0]);
}

#[test]
fn mis_clips_or_drops_at_each_level() {
    let weights: &[&[f64]] = &[&[0.25, 1.5, 4.0], &[3.0]];
    let mis = |level: &str, outside: &str| {
        factors(weights, &format!(r#"{{"kind": "mis", "level": "{level}", "outside": "{outside}"}}"#))
    };
    close(&mis("token", "clip"), &[0.5, 1.5, 2.0, 2.0]);
    close(&mis("token", "zero"), &[0.0, 1.5, 0.0, 0.0]);
    close(&mis("product", "clip"), &[1.5, 1.5, 1.5, 2.0]);
    let mean = 1.5_f64.cbrt();
    close(&mis("geometric", "zero"), &[mean, mean, mean, 0.0]);
}

#[test]
fn a_product_stays_finite() {
    let found = factors(&[&[1e5, 1e5, 1e5]], r#"{"kind": "mis", "level": "product", "high": 1e12}"#);
    close(&found, &[20.0_f64.exp(); 3]);
}

#[test]
fn an_impossible_token_vetoes_its_sequence_alone() {
    let weights: &[&[f64]] = &[&[1.0, 0.9e-4], &[1.0, 1.1e-4]];
    close(&factors(weights, r#"{"kind": "mis"}"#), &[0.0, 0.0, 1.0, 0.5]);
    close(&factors(weights, r#"{"kind": "mis", "veto": 0.0}"#), &[1.0, 0.5, 1.0, 0.5]);
}

#[test]
fn corrections_leave_the_added_terms_alone() {
    let mut batch = batch(&[&[7.0]]);
    batch.entropy = Some(column([1.5]));
    batch.logp_reference = Some(column([-2.0]));
    let json =
        r#"{"correction": {"kind": "decoupled"}, "entropy_coef": 0.1, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}"#;
    close(&batch.per_token(&config(json)), &[-0.15 + 0.25]);
}

#[test]
fn corrections_have_no_gradient_of_their_own() {
    let batch = batch(&[&[0.25, 1.5]]);
    close(&batch.gradient(&config(r#"{"correction": {"kind": "tis"}}"#)), &[-0.25, -1.5]);
}

#[test]
fn corrections_are_counted() {
    let batch = batch(&[&[0.25, 4.0, 7.0, 1.0]]);
    let found = batch.evaluate(&config(r#"{"correction": {"kind": "decoupled"}}"#)).statistics.finish();
    close(&[found.correction_mean.expect("set"), found.correction_zeroed.expect("set")], &[5.25 / 4.0, 0.25]);
}
