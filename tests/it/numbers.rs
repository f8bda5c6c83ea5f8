//! The worked examples of the semantics, through the public API: advantages and loss weights.

use serde_json::{Value, json};

use crate::support::{TestApp, member, on_both_stores, rollout, with};

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

/// A rollout whose samples have these numbers of trained tokens.
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

/// Floats of every exponent and both signs, subnormal ones included, with mantissas that look random; then the extremes.
fn floats_of_every_exponent() -> Vec<f64> {
    let mut floats = vec![0.0, -0.0, f64::MIN_POSITIVE, f64::MAX, f64::MIN, 5e-324, -5e-324, 1e-100, 0.1, 1e22, 1e23];
    for exponent in 0..2047_u64 {
        // Multiplication with an odd constant spreads the exponents over all bits of the mantissa.
        let mantissa = (exponent + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 12;
        let sign = exponent & 1;
        floats.push(f64::from_bits(sign << 63 | exponent << 52 | mantissa));
    }
    floats
}

/// The bits of a float as it is delivered: the sign of a zero is not kept.
fn bits(float: f64) -> u64 {
    (float + 0.0).to_bits()
}

on_both_stores! {
    async fn rewards_and_advantages_keep_their_bits(app: TestApp) {
        let floats = floats_of_every_exponent();
        app.rules("default", json!({"group": {"size": 343}, "advantage": "reward"})).await;
        for (number, rewards) in floats.chunks(343).enumerate() {
            let name = format!("g{number}");
            let mut members: Vec<Value> =
                rewards.iter().enumerate().map(|(index, &reward)| member(&name, index, reward)).collect();
            assert_eq!(members.len(), 343, "the floats fill whole groups");
            // The advantages of the other rollouts are written when the last one arrives; its own is written when it is
            // inserted.
            let last = members.pop().expect("the group has members");
            app.accept(members.into()).await;
            app.accept(last).await;
            let rows = app.samples(&app.lease().await).await;
            let found: Vec<u64> = rows.iter().map(|row| row["reward"].as_f64().expect("a number").to_bits()).collect();
            assert_eq!(found, rewards.iter().copied().map(bits).collect::<Vec<_>>());
            let page = app.get(&format!("/trajectories?group_id={name}&limit=1000")).await.expect(200);
            let stories = page["trajectories"].as_array().expect("a page has stories");
            let advantage = |story: &Value| story["advantage"].as_f64().expect("a number").to_bits();
            let fit = |reward: f64| bits(reward.clamp(f32::MIN.into(), f32::MAX.into()));
            assert_eq!(
                stories.iter().map(advantage).collect::<Vec<_>>(),
                rewards.iter().copied().map(fit).collect::<Vec<_>>()
            );
        }
    }

    async fn a_sum_of_one_reward_keeps_its_bits(app: TestApp) {
        let small = floats_of_every_exponent().into_iter().filter(|float| float.abs() < 1e15 && *float != 0.0);
        for (index, reward) in small.step_by(41).enumerate() {
            let policy = format!("p{index}");
            app.rules(&policy, json!({})).await;
            app.accept(with(rollout("r", reward), json!({"policy": policy}))).await;
            let batch = app.lease_with(json!({"policy": policy})).await;
            for name in ["reward/all", "reward/trained"] {
                let mean = batch["metrics"][name].as_f64().expect("a number");
                assert_eq!(mean.to_bits(), bits(reward), "{name} of {reward:e}");
            }
        }
    }

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

    async fn advantages_by_component_are_those_of_the_worked_batch(app: TestApp) {
        let components = json!({"acc": 1.0, "fmt": 0.5});
        let gdpo = json!({"kind": "gdpo", "components": components});
        app.rules("whitened", json!({"group": {"size": 4}, "batch": {"groups": 2}, "advantage": gdpo})).await;
        let gdpo = with(gdpo, json!({"whiten": "none"}));
        app.rules("plain", json!({"group": {"size": 4}, "batch": {"groups": 2}, "advantage": gdpo})).await;
        let groups = [
            ("a", [(1.0, Some(1.0)), (1.0, Some(0.0)), (0.0, Some(1.0)), (0.0, Some(0.0))]),
            ("b", [(1.0, Some(1.0)), (0.0, Some(1.0)), (0.0, Some(1.0)), (0.0, None)]),
        ];
        for policy in ["whitened", "plain"] {
            for (group_id, rollouts) in groups {
                let of = |(index, &(acc, fmt)): (usize, &(f64, Option<f64>))| {
                    let mut components = json!({"acc": acc, "length": index});
                    if let Some(fmt) = fmt {
                        components["fmt"] = json!(fmt);
                    }
                    let sum = acc + fmt.unwrap_or(0.0);
                    let fields = json!({"policy": policy, "group_id": group_id, "reward_components": components});
                    with(rollout(&format!("{group_id}{index}"), sum), fields)
                };
                let mut members: Vec<Value> = rollouts.iter().enumerate().map(of).collect();
                // Components of stored rollouts are read from their rows, those of the last ones from the bundle.
                let last = members.split_off(2);
                app.accept(members.into()).await;
                app.accept(last.into()).await;
            }
        }
        let plain = [1.299_035_9, 0.433_012, -0.433_012, -1.299_035_9, 1.499_997, -0.499_999, -0.499_999, -0.499_999];
        let whitened =
            [1.322_874_5, 0.440_958_2, -0.440_958_2, -1.322_874_5, 1.527_523_4, -0.509_174_5, -0.509_174_5, -0.509_174_5];
        let number = |row: &Value| row["advantage"].as_f64().expect("a number");
        for (policy, expected) in [("plain", plain), ("whitened", whitened)] {
            let batch = app.lease_with(json!({"policy": policy})).await;
            close(&app.samples(&batch).await.iter().map(number).collect::<Vec<_>>(), &expected);
            let stories = app.get(&format!("/trajectories?policy={policy}&limit=8")).await.expect(200);
            let stories = stories["trajectories"].as_array().expect("a page has stories");
            close(&stories.iter().map(number).collect::<Vec<_>>(), &plain);
        }
    }

    async fn advantages_of_tokens_are_delivered_as_they_were_posted(app: TestApp) {
        let masked = json!([{"name": "long", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"}]);
        let rules = json!({"group": {"size": 3}, "require": [], "advantage": "posted", "filter": masked});
        app.rules("default", rules).await;
        let segment = |mask: Value, advantages: Value| {
            let tokens = vec![1; mask.as_array().expect("a mask is an array").len() + 1];
            json!({"tokens": tokens, "loss_mask": mask, "advantages": advantages})
        };
        let nothing = json!({"tokens": [1], "loss_mask": []});
        let segments = json!([segment(json!([1, 0, 1]), json!([0.5, null, -1e30])), nothing, segment(json!([1]), json!([2]))]);
        let a = with(member("g", 0, 1.0), json!({"segments": segments}));
        let b = with(member("g", 1, 0.0), json!({"status": "truncated", "segments": [segment(json!([1]), json!([7]))]}));
        let without = with(member("g", 2, 0.0), json!({"segments": [{"tokens": [1, 2], "loss_mask": [1]}]}));
        assert_eq!(app.post("/trajectories", without.clone()).await.pointers(422), ["/segments"]);
        app.accept(json!([a, b])).await;
        // Other advantages are another rollout.
        let other = json!({"segments": [segment(json!([1]), json!([8]))]});
        app.post("/trajectories", with(b, other)).await.refused(409, "rollout-conflict");
        app.accept(with(member("g", 2, 0.0), json!({"status": "failed", "segments": null}))).await;
        let rows = app.samples(&app.lease().await).await;
        let found: Vec<_> = rows.iter().map(|row| (&row["advantage"], &row["advantages"])).collect();
        let none = Value::Null;
        let expected = [json!([0.5, 0.0, -1e30]), none.clone(), json!([2.0]), json!([0.0]), none.clone()];
        assert_eq!(found[0].1[2].as_f64().map(|advantage| advantage as f32), Some(-1e30_f32));
        assert_eq!(found[1..], expected[1..].iter().map(|advantages| (&none, advantages)).collect::<Vec<_>>());
        assert_eq!((found[0].0, &found[0].1[0], &found[0].1[1]), (&none, &json!(0.5), &json!(0.0)));
        // Under another rule they are kept for exports, and not delivered.
        app.rules("other", json!({"advantage": "reward"})).await;
        let sent = json!({"policy": "other", "segments": [segment(json!([1]), json!([8]))]});
        app.accept(with(rollout("x", 0.25), sent)).await;
        let rows = app.samples(&app.lease_with(json!({"policy": "other"})).await).await;
        assert_eq!((&rows[0]["advantage"], &rows[0]["advantages"]), (&json!(0.25), &none));
    }

    async fn a_batch_that_is_cut_again_is_whitened_again(app: TestApp) {
        let gdpo = json!({"kind": "gdpo", "components": {"acc": 1.0}});
        let rules = json!({"group": {"size": 2}, "batch": {"groups": 2}, "advantage": gdpo});
        app.rules("default", rules).await;
        // The standardized rewards of both groups are 1/sqrt(2) and its negative, and those of four are 0.866.
        for group_id in ["a", "b"] {
            let of = |index: usize| {
                with(member(group_id, index, index as f64), json!({"reward_components": {"acc": index}}))
            };
            app.accept(json!([of(0), of(1)])).await;
        }
        let number = |row: &Value| row["advantage"].as_f64().expect("a number");
        let batch = app.lease().await;
        let found: Vec<f64> = app.samples(&batch).await.iter().map(number).collect();
        close(&found, &[-0.866_024, 0.866_024, -0.866_024, 0.866_024]);
        app.nack(&batch, &["a"]).await.expect(200);
        let rest = app.lease_with(json!({"partial": true})).await;
        assert_eq!(app.group_ids(&rest).await, ["b"]);
        close(&app.samples(&rest).await.iter().map(number).collect::<Vec<_>>(), &[-0.707_105_8, 0.707_105_8]);
    }

    async fn a_group_filter_looks_at_components(app: TestApp) {
        let filter = json!([{"name": "flat-accuracy", "scope": "group", "when": "components.acc.std < 1e-6", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 4}, "filter": filter})).await;
        // Four wrong answers that differ by a length penalty are no signal.
        for (group_id, correct) in [("wrong", 0.0), ("mixed", 1.0)] {
            for index in 0..4 {
                let (acc, length) = (if index == 0 { correct } else { 0.0 }, -0.1 * f64::from(index));
                let fields = json!({"reward_components": {"acc": acc, "length": length}});
                app.accept(with(member(group_id, index as usize, acc + length), fields)).await;
            }
        }
        let story = app.story("wrong-0").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("discarded"), &json!("flat-accuracy")));
        assert_eq!(app.story("mixed-0").await["state"], "ready");
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
            [("rollout_mean", 8.0), ("turn_mean", 8.0), ("sample_mean", 6.5), ("token_mean", 6.5), ("prompt_mean", 6.5)]
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
            ("prompt_mean", 3.5),
            ("constant", 1.05),
        ] {
            close(&[loss(app, weighting, "unequal", a, b).await], &[expected]);
        }
    }

    async fn with_prompt_mean_every_group_counts_the_same(app: TestApp) {
        let rules = json!({"group": {"size": 2}, "batch": {"groups": 2}, "loss_weighting": "prompt_mean",
            "staleness": {"max": 0, "action": "mask"}});
        app.rules("default", rules).await;
        app.put("/policies/default/version", json!({"version": 1})).await.expect(200);
        let of_group = |group: &str, version: i64, lengths: &[usize]| {
            let named = json!({"rollout_id": format!("{group}-{version}"), "group_id": group, "policy_version": version});
            with(shaped("default", "r", lengths), named)
        };
        app.accept(json!([of_group("a", 1, &[1, 3]), with(of_group("a", 1, &[2]), json!({"rollout_id": "a-2"}))])).await;
        // The tokens of version 0 are too old, so the four of version 1 are all that the second group trains.
        app.accept(json!([of_group("b", 1, &[4]), of_group("b", 0, &[5])])).await;
        let rows = app.samples(&app.lease().await).await;
        let weights: Vec<f64> = rows.iter().map(|row| row["loss_weight"].as_f64().expect("a number")).collect();
        close(&weights, &[1.0 / 12.0, 1.0 / 12.0, 1.0 / 12.0, 1.0 / 8.0, 1.0 / 8.0]);
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
