//! Tokens over the staleness bound: they are delivered and not trained on with `staleness.action = "mask"`, and with `wait`
//! the rollouts are waited for that the next version would make too old.

use serde_json::{Value, json};

use crate::support::{TestApp, group, member, on_both_stores, with};

fn rules(groups: u32) -> Value {
    json!({"group": {"size": 2}, "batch": {"groups": groups}, "staleness": {"max": 1, "action": "mask"}})
}

/// A segment of four trained tokens; its two halves have different versions.
fn halves(first: i64, second: i64) -> Value {
    json!({"tokens": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1], "logprobs": [-0.1, -0.2, -0.3, -0.4],
        "versions": [[first, 0, 2], [second, 2, 2]]})
}

async fn post(app: &TestApp, group_id: &str, index: usize, segments: Value) {
    app.accept(with(member(group_id, index, index as f64), json!({"segments": segments}))).await;
}

fn masks(rows: &[Value]) -> Vec<&Value> {
    rows.iter().map(|row| &row["loss_mask"]).collect()
}

fn weights(rows: &[Value]) -> Vec<f64> {
    rows.iter().map(|row| row["loss_weight"].as_f64().expect("a number")).collect()
}

on_both_stores! {
    async fn tokens_over_the_bound_train_nothing(app: TestApp) {
        app.rules("default", rules(1)).await;
        post(app, "a", 0, json!([halves(0, 2), halves(2, 2), halves(0, 0)])).await;
        post(app, "a", 1, json!([halves(2, 1)])).await;
        app.publish(2).await.expect(200);
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        let expected = [json!([0, 0, 1, 1]), json!([1, 1, 1, 1]), json!([0, 0, 0, 0]), json!([1, 1, 1, 1])];
        assert_eq!(masks(&rows), expected.iter().collect::<Vec<_>>());
        // rollout_mean over the delivered mask: 1 / (2 rollouts * 6 tokens) and 1 / (2 * 4).
        for (found, expected) in weights(&rows).into_iter().zip([1.0 / 12.0, 1.0 / 12.0, 1.0 / 12.0, 1.0 / 8.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
        }
        assert_eq!(rows[0]["versions"], json!([[0, 0, 2], [2, 2, 2]]), "all else is as sent");
        assert_eq!((&rows[0]["policy_version"], &rows[3]["policy_version"]), (&json!(2), &json!(1)));
        assert_eq!(batch["policy_version"], json!({"current": 2, "min": 1, "max": 2}));
        assert_eq!((&batch["metrics"]["staleness/max"], &batch["metrics"]["staleness/masked-tokens"]),
            (&json!(1.0), &json!(6.0)));
    }

    async fn a_batch_that_comes_back_is_masked_as_it_was_cut(app: TestApp) {
        app.rules("default", rules(1)).await;
        post(app, "a", 0, json!([halves(0, 2)])).await;
        post(app, "a", 1, json!([halves(2, 2)])).await;
        app.publish(2).await.expect(200);
        let first = app.lease().await;
        let rows = app.samples(&first).await;
        app.nack(&first, &[]).await.expect(200);
        app.publish(9).await.expect(200);
        assert_eq!(app.samples(&app.lease().await).await, rows);
    }

    async fn a_rollout_without_a_fresh_token_still_counts(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "loss_weighting": "sample_mean",
            "staleness": {"max": 1, "action": "mask"}})).await;
        app.accept(with(member("a", 0, 1.0), json!({"policy_version": 0}))).await;
        app.accept(with(member("a", 1, 0.0), json!({"policy_version": 2}))).await;
        app.publish(2).await.expect(200);
        let rows = app.samples(&app.lease().await).await;
        assert_eq!(masks(&rows), [&json!([0, 0]), &json!([1, 1])]);
        // sample_mean: N = max(1, 0) + 1.
        assert!((weights(&rows)[1] - 0.25).abs() < 1e-12);
        assert!(rows[1]["advantage"].as_f64().expect("a number") < 0.0, "the baseline is of both votes");
    }

    async fn a_group_without_a_fresh_token_is_stale(app: TestApp) {
        app.rules("default", rules(1)).await;
        app.accept(group("old", &[1.0, 0.0])).await;
        app.publish(2).await.expect(200);
        app.accept(group("new", &[1.0, 0.0])).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["new"]);
        assert_eq!(app.story("old-0").await["state"], "stale");
    }

    async fn nothing_is_masked_before_it_is_in_a_batch(app: TestApp) {
        app.rules("default", rules(2)).await;
        post(app, "a", 0, json!([halves(0, 1)])).await;
        post(app, "a", 1, json!([halves(0, 1)])).await;
        app.put("/policies/default/version", json!({"version": 2, "step": 5})).await.expect(200);
        app.post("/batches", json!({})).await.expect(204);
        // The versions above step 0 are forgotten, so tokens that were over the bound are fresh again.
        app.resume(None).await;
        app.accept(group("b", &[1.0, 0.0])).await;
        let rows = app.samples(&app.lease().await).await;
        assert_eq!(masks(&rows)[..2], [&json!([1, 1, 1, 1]), &json!([1, 1, 1, 1])]);
    }

    async fn a_tighter_bound_holds_from_the_next_claim_on(app: TestApp) {
        for index in 0..3 {
            app.accept(with(member("g", index, 1.0), json!({"group_id": format!("g{index}"), "policy_version": index}))).await;
        }
        app.publish(2).await.expect(200);
        // The batch was cut earlier and is not tested again.
        let cut = app.lease().await;
        assert_eq!(app.group_ids(&cut).await, ["g0"]);
        app.nack(&cut, &[]).await.expect(200);
        app.rules("default", json!({"staleness": {"max": 0}})).await;
        assert_eq!(app.lease().await["batch_id"], cut["batch_id"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["g2"]);
        assert_eq!(app.story("g-1").await["state"], "stale");
    }

    async fn a_looser_bound_holds_from_the_next_claim_on(app: TestApp) {
        app.rules("default", json!({"staleness": {"max": 0}})).await;
        app.accept(with(member("old", 0, 1.0), json!({"policy_version": 0}))).await;
        app.publish(2).await.expect(200);
        app.rules("default", json!({"staleness": {"max": 2}})).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["old"]);
    }

    async fn a_group_that_was_delivered_once_never_becomes_stale(app: TestApp) {
        for order in ["fifo", "freshest"] {
            app.rules("default", json!({"batch": {"groups": 2, "order": order}, "staleness": {"max": 0}})).await;
            let version = app.get("/policies/default").await.expect(200)["version"].as_i64().expect("a version");
            for name in ["good", "bad"] {
                app.accept(with(member(order, 0, 1.0), json!({"rollout_id": format!("{order}-{name}"),
                    "group_id": format!("{order}-{name}"), "policy_version": version}))).await;
            }
            let bad = format!("{order}-bad");
            app.nack(&app.lease().await, &[&bad]).await.expect(200);
            app.publish(version + 5).await.expect(200);
            let batch = app.lease_with(json!({"partial": true})).await;
            assert_eq!(app.group_ids(&batch).await, [format!("{order}-good")]);
        }
    }

    async fn rules_that_decide_a_group_are_those_of_its_opening(app: TestApp) {
        let drops = json!([{"name": "low", "scope": "rollout", "when": "reward < 0.5", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 2}, "advantage": "reward", "require": ["logprobs"], "filter": drops}))
            .await;
        app.accept(member("before", 0, 1.0)).await;
        app.rules("default", json!({"group": {"size": 3}, "advantage": "none", "require": ["values"]})).await;
        let receipts = app.accept(Value::Array(vec![member("before", 1, 0.0), member("before", 2, 2.0)])).await;
        assert_eq!((&receipts[0]["reason"], &receipts[1]["group"]["state"]), (&json!("low"), &json!("ready")));
        let rows = app.samples(&app.lease().await).await;
        let advantages: Vec<&Value> = rows.iter().map(|row| &row["advantage"]).collect();
        assert_eq!(advantages, [&json!(1.0), &json!(2.0)]);
        app.post("/trajectories", member("after", 0, 1.0)).await.expect(422);
    }

    async fn what_was_posted_before_the_policy_masked_is_dropped_whole(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "staleness": {"max": 1}})).await;
        post(app, "a", 0, json!([halves(0, 2)])).await;
        post(app, "a", 1, json!([halves(2, 2)])).await;
        app.rules("default", rules(1)).await;
        app.publish(2).await.expect(200);
        app.post("/batches", json!({})).await.expect(204);
        assert_eq!(app.story("a-0").await["state"], "stale");
    }
}
