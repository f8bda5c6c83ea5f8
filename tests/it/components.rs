//! Means of reward components in the metrics of batches.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, rollout, with};

/// A rollout of a group of two, with components.
fn part(group_id: &str, number: usize, reward: f64, components: &Value) -> Value {
    let of = json!({"group_id": group_id, "group_size": 2, "reward_components": components});
    with(rollout(&format!("{group_id}-{number}"), reward), of)
}

async fn rules(app: &TestApp, filters: Value) {
    app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 2}, "filter": filters})).await;
}

fn components(batch: &Value) -> Vec<(&str, f64)> {
    let metrics = batch["metrics"].as_object().expect("an object").iter();
    metrics
        .filter_map(|(name, mean)| Some((name.strip_prefix("components/")?, mean.as_f64().expect("a number"))))
        .collect()
}

on_both_stores! {
    async fn a_batch_has_the_mean_of_each_component_over_the_kept_rollouts_that_have_it(app: TestApp) {
        rules(app, json!([
            {"name": "unfinished", "scope": "rollout", "when": "status == 'truncated'", "action": "mask"},
        ])).await;
        app.accept(part("a", 0, 1.0, &json!({"gold": 1.0, "cost": -0.5}))).await;
        app.accept(part("a", 1, 0.0, &json!({"gold": 0.0}))).await;
        app.accept(part("b", 0, 1.0, &json!({"gold": 1, "a\"b/c ü": 0.25}))).await;
        let masked = with(part("b", 1, 9.0, &json!({"gold": 100.0})), json!({"status": "truncated"}));
        assert_eq!(app.accept(masked).await["verdict"], "masked");
        // Not in the batch.
        app.accept(part("c", 0, 1.0, &json!({"gold": 50.0}))).await;
        let batch = app.lease().await;
        let expected = [("a\"b/c ü/mean", 0.25), ("cost/mean", -0.5), ("gold/mean", 2.0 / 3.0)];
        let found = components(&batch);
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for ((name, mean), (expected_name, expected_mean)) in found.into_iter().zip(expected) {
            assert_eq!(name, expected_name);
            assert!((mean - expected_mean).abs() < 1e-12, "{name}: {mean}");
        }
        // A delivery again has the same metrics.
        let id = batch["batch_id"].as_str().expect("an id").to_owned();
        assert_eq!(app.get(&format!("/batches/{id}")).await.expect(200)["metrics"], batch["metrics"]);
    }

    async fn the_gauges_are_those_of_the_newest_batch(app: TestApp) {
        rules(app, json!([])).await;
        assert!(!app.metrics().await.contains("forebay_batch_reward_mean{"));
        for (group_id, gold) in [("a", 1.0), ("b", 0.0)] {
            for number in 0..2 {
                app.accept(part(group_id, number, 0.5, &json!({"gold": gold}))).await;
            }
        }
        let batch = app.lease().await;
        let metrics = app.metrics().await;
        assert!(metrics.contains(r#"forebay_batch_reward_mean{policy="default"} 0.5"#), "{metrics}");
        assert!(metrics.contains(r#"forebay_batch_component_mean{component="gold",policy="default"} 0.5"#), "{metrics}");
        app.ack(&batch, 1).await.expect(200);
        for group_id in ["c", "d"] {
            for number in 0..2 {
                app.accept(part(group_id, number, 2.0, &json!({"tests": 1e308}))).await;
            }
        }
        let batch = app.lease().await;
        let metrics = app.metrics().await;
        assert!(metrics.contains(r#"forebay_batch_reward_mean{policy="default"} 2"#), "{metrics}");
        assert!(!metrics.contains(r#"component="gold""#), "{metrics}");
        // Four numbers whose sum is not finite do not keep a batch from being cut.
        app.ack(&batch, 2).await.expect(200);
    }

    async fn only_the_components_of_the_most_rollouts_have_metrics(app: TestApp) {
        rules(app, json!([])).await;
        for group in 0..2 {
            for number in 0..2 {
                let mut components = json!({"common": 1.0});
                for index in 0..30 {
                    components[format!("c{group}-{number}-{index:02}")] = json!(0.0);
                }
                app.accept(part(&format!("g{group}"), number, 1.0, &components)).await;
            }
        }
        let batch = app.lease().await;
        let found = components(&batch);
        assert_eq!(found.len(), 64);
        assert!(found.contains(&("common/mean", 1.0)), "{found:?}");
        let gauges = app.metrics().await.matches("forebay_batch_component_mean{").count();
        assert_eq!(gauges, 16);
    }
}
