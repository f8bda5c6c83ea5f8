//! The worked numbers of the semantics, through the public API: advantages and loss weights.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, with};

fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }
}

async fn advantages(app: &TestApp, estimator: &str, rewards: &[f64]) -> Vec<f64> {
    let policy = format!("{estimator}.{}", rewards.len());
    app.rules(&policy, json!({"group": {"size": rewards.len()}, "advantage": estimator})).await;
    let members = rewards.iter().enumerate().map(|(index, reward)| {
        let fields = json!({"policy": policy, "group_id": "g"});
        with(crate::support::rollout(&format!("r{index}"), *reward), fields)
    });
    app.accept(members.collect()).await;
    let batch = app.lease_with(json!({"policy": policy})).await;
    let rows = app.samples(&batch).await;
    rows.iter().map(|row| row["advantage"].as_f64().expect("a number")).collect()
}

/// A rollout with samples of these many trained tokens each.
fn shaped(policy: &str, rollout_id: &str, lengths: &[usize]) -> Value {
    let segment = |&length: &usize| json!({"tokens": vec![1; length + 1], "loss_mask": vec![1; length]});
    json!({"policy": policy, "rollout_id": rollout_id, "group_id": "g", "status": "completed", "reward": 1,
        "segments": lengths.iter().map(segment).collect::<Vec<_>>()})
}

/// The loss of a batch of rollouts A and B: tokens of A's samples, then of B's.
async fn loss(app: &TestApp, weighting: &str, shape: &str, a: &[&[f64]], b: &[&[f64]]) -> f64 {
    let policy = format!("{weighting}.{shape}");
    let mut rules = json!({"group": {"size": 2}, "loss_weighting": weighting});
    if weighting == "constant" {
        rules["loss_constant"] = json!(10.0);
    }
    app.rules(&policy, rules).await;
    let lengths = |samples: &[&[f64]]| samples.iter().map(|sample| sample.len()).collect::<Vec<_>>();
    app.accept(json!([shaped(&policy, "a", &lengths(a)), shaped(&policy, "b", &lengths(b))])).await;
    let rows = app.samples(&app.lease_with(json!({"policy": policy})).await).await;
    let samples: Vec<&&[f64]> = a.iter().chain(b).collect();
    assert_eq!(rows.len(), samples.len());
    let weight = |row: &Value| row["loss_weight"].as_f64().expect("a number");
    rows.iter().zip(samples).map(|(row, losses)| weight(row) * losses.iter().sum::<f64>()).sum()
}

on_both_stores! {
    async fn advantages_are_those_of_the_worked_group(app: TestApp) {
        let rewards = [1.0, 0.0, 0.0, 0.5];
        close(&advantages(app, "grpo", &rewards).await, &[1.305_579_7, -0.783_347_8, -0.783_347_8, 0.261_115_9]);
        close(&advantages(app, "grpo_mean", &rewards).await, &[0.625, -0.375, -0.375, 0.125]);
        close(&advantages(app, "rloo", &rewards).await, &[0.833_333_3, -0.5, -0.5, 0.166_666_7]);
        close(&advantages(app, "reward", &rewards).await, &rewards);
        close(&advantages(app, "none", &rewards).await, &[0.0; 4]);
        close(&advantages(app, "grpo", &[1.0, 0.0]).await, &[0.707_105_8, -0.707_105_8]);
        close(&advantages(app, "grpo", &[1.0]).await, &[0.0]);
        close(&advantages(app, "rloo", &[1.0]).await, &[0.0]);
    }

    async fn a_rollout_is_one_vote_however_many_segments_it_has(app: TestApp) {
        app.rules("votes", json!({"group": {"size": 2}, "advantage": "grpo_mean"})).await;
        let a = shaped("votes", "a", &[1, 1, 1]);
        let b = with(shaped("votes", "b", &[1]), json!({"reward": 0}));
        app.accept(json!([a, b])).await;
        let rows = app.samples(&app.lease_with(json!({"policy": "votes"})).await).await;
        let advantages: Vec<_> = rows.iter().map(|row| row["advantage"].as_f64()).collect();
        assert_eq!(advantages, [0.5, 0.5, 0.5, -0.5].map(Some));
    }

    async fn losses_are_those_of_the_worked_batch_with_equal_lengths(app: TestApp) {
        let a: &[&[f64]] = &[&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0], &[7.0, 8.0, 9.0]];
        let b: &[&[f64]] = &[&[10.0, 11.0, 12.0]];
        for (weighting, expected) in
            [("rollout_mean", 8.0), ("turn_mean", 8.0), ("sample_mean", 6.5), ("token_mean", 6.5)]
        {
            close(&[loss(app, weighting, "equal", a, b).await], &[expected]);
        }
    }

    async fn losses_are_those_of_the_worked_batch_with_unequal_lengths(app: TestApp) {
        let a: &[&[f64]] = &[&[1.0], &[2.0, 3.0, 4.0]];
        let b: &[&[f64]] = &[&[5.0, 6.0]];
        for (weighting, expected) in [
            ("rollout_mean", 4.0),
            ("turn_mean", 3.75),
            ("sample_mean", 9.5 / 3.0),
            ("token_mean", 3.5),
            ("constant", 1.05),
        ] {
            close(&[loss(app, weighting, "unequal", a, b).await], &[expected]);
        }
    }

    async fn weights_span_all_groups_of_a_batch(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 2}})).await;
        app.accept(crate::support::rollout("a", 1.0)).await;
        app.accept(crate::support::rollout("b", 1.0)).await;
        let rows = app.samples(&app.lease().await).await;
        // G = 2 rollouts of 2 trained tokens each.
        assert_eq!((&rows[0]["loss_weight"], &rows[1]["loss_weight"]), (&json!(0.25), &json!(0.25)));
    }
}
