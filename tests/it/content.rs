//! Looking at rollouts: their tokens, masks and messages, in every state, without changing anything.

use forebay_wire::Role;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, group, member, on_both_stores, rollout, text, with};

async fn look(app: &TestApp, rollout_id: &str, rest: &str) -> Answer {
    app.get(&format!("/trajectories/content?rollout_id={rollout_id}{rest}")).await
}

/// A rollout with two segments, messages, metadata and everything else that a producer can send.
fn full(rollout_id: &str) -> Value {
    with(
        rollout(rollout_id, 0.5),
        json!({
            "group_id": "g", "group_size": 2, "environment": "web", "status": "truncated",
            "reward_components": {"tests": 0.5}, "sampling": {"temperature": 0.7},
            "segments": [
                {"kind": "turn", "tokens": [5, 6], "loss_mask": [1]},
                {
                    "kind": "final", "tokens": [7, 8, 9, 10, 11], "loss_mask": [1, 0, 1], "logprobs": [-0.5, 0.0, -1.5],
                    "teacher_logprobs": [-0.25, -0.5, -1.0], "values": [0.1, 0.2, 0.3], "advantages": [1, null, -1],
                    "versions": [[0, 0, 1], [0, 1, 2]]
                },
            ],
            "messages": [{"role": "user", "content": "<b>"}, {"role": "assistant", "content": null}],
            "metadata": {"repository": "astropy", "nested": {"a": [1, 2]}},
        }),
    )
}

on_both_stores! {
    async fn a_rollout_is_shown_as_it_was_sent(app: TestApp) {
        app.accept(full("a")).await;
        let found = look(app, "a", "&segment=1").await.expect(200);
        let story = app.story("a").await;
        assert_eq!(found["story"], story);
        assert_eq!((&story["trained_tokens"], &story["versions"]), (&json!(3), &json!({"min": 0, "max": 0})));
        assert_eq!((&found["environment"], &found["status"]), (&json!("web"), &json!("truncated")));
        assert_eq!(found["reward_components"], json!({"tests": 0.5}));
        assert_eq!(found["sampling"]["top_k"], -1);
        assert_eq!(found["delivered"], Value::Null);
        assert_eq!(found["segments_total"], 2);
        assert_eq!(found["segments"], json!([
            {"kind": "turn", "tokens": 2, "response_length": 1, "masked_in": 1, "trained": 1, "versions": null, "has": []},
            {"kind": "final", "tokens": 5, "response_length": 3, "masked_in": 2, "trained": 2,
             "versions": {"min": 0, "max": 0, "spans": 2}, "has": ["logprobs", "teacher_logprobs", "values", "advantages"]},
        ]));
        assert_eq!(found["window"], json!({
            "segment": 1, "from": 0, "to": 5, "prompt_tokens": 2, "tokens": [7, 8, 9, 10, 11],
            "loss_mask": [null, null, 1, 0, 1], "trained_mask": [null, null, 1, 0, 1],
            "logprobs": [null, null, -0.5, 0.0, -1.5], "teacher_logprobs": [null, null, -0.25, -0.5, -1.0],
            "values": [null, null, 0.1, 0.2, 0.3], "advantages": [null, null, 1.0, 0.0, -1.0], "versions": [[0, 0, 1], [0, 1, 2]],
        }));
        assert_eq!((&found["map"]["buckets"], &found["map"]["trained"]), (&json!(5), &json!([0.0, 0.0, 1.0, 0.0, 1.0])));
        assert_eq!(found["messages"]["items"][0], json!({"index": 0, "bytes": 31, "message": {"role": "user", "content": "<b>"}}));
        assert_eq!((&found["messages"]["count"], &found["messages"]["next"]), (&json!(2), &Value::Null));
        assert_eq!(found["metadata"], json!({"repository": "astropy", "nested": {"a": [1, 2]}}));
        assert_eq!(found["at"], "2026-01-01T00:00:00.000000Z");
        // Other parts of it.
        let found = look(app, "a", "&segment=1&from=3&limit=1&messages_from=1&messages_limit=1").await.expect(200);
        assert_eq!((&found["window"]["from"], &found["window"]["tokens"]), (&json!(3), &json!([10])));
        assert_eq!(found["window"]["versions"], json!([[0, 1, 2]]));
        assert_eq!(found["messages"]["items"][0]["index"], 1);
        let found = look(app, "a", "&limit=0&messages_limit=0").await.expect(200);
        assert_eq!((&found["window"]["segment"], &found["window"]["tokens"]), (&json!(0), &json!([])));
        assert_eq!((&found["window"]["logprobs"], &found["map"]["value_mean"]), (&Value::Null, &Value::Null));
        assert_eq!((&found["messages"]["items"], &found["messages"]["next"]), (&json!([]), &json!(0)));
        for rest in ["&segment=2", "&limit=16385", "&messages_limit=1001", "&from=-1", "&colour=red"] {
            look(app, "a", rest).await.refused(422, "invalid");
        }
        look(app, "b", "").await.refused(404, "not-found");
        look(app, "a", "&policy=nobody").await.refused(404, "unknown-policy");
        app.get("/trajectories/content").await.refused(422, "invalid");
    }

    async fn the_mask_as_delivered_is_shown_beside_the_mask_as_sent(app: TestApp) {
        let filter = json!([{"name": "short", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"}]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filter, "staleness": {"max": 1, "action": "mask"}})).await;
        app.publish(1).await;
        app.publish(2).await;
        let segments = json!([{"tokens": [1, 2, 3, 4], "loss_mask": [1, 1, 1], "logprobs": [-1.0, -1.0, -1.0],
            "versions": [[0, 0, 1], [2, 1, 2]]}]);
        app.accept(with(member("g", 0, 1.0), json!({"segments": segments}))).await;
        app.accept(with(member("g", 1, 0.0), json!({"segments": segments, "status": "truncated"}))).await;
        let masks = |found: &Value| (found["window"]["loss_mask"].clone(), found["window"]["trained_mask"].clone());
        // Nothing is stale before the group is in a batch.
        let ready = look(app, "g-0", "").await.expect(200);
        assert_eq!(masks(&ready), (json!([null, 1, 1, 1]), json!([null, 1, 1, 1])));
        assert_eq!((&ready["story"]["state"], &ready["delivered"]), (&json!("ready"), &Value::Null));
        let masked = look(app, "g-1", "").await.expect(200);
        assert_eq!(masks(&masked), (json!([null, 1, 1, 1]), json!([null, 0, 0, 0])));
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        for (index, row) in rows.iter().enumerate() {
            let found = look(app, text(&row["rollout_id"]), "").await.expect(200);
            let trained = found["window"]["trained_mask"].as_array().expect("a mask")[1..].to_vec();
            assert_eq!(Value::Array(trained), row["loss_mask"], "{index}");
            assert_eq!(found["delivered"]["loss_weights"], json!([row["loss_weight"]]));
            assert_eq!(found["delivered"]["batch_id"], batch["batch_id"]);
            assert_eq!((&found["delivered"]["state"], &found["delivered"]["step"]), (&json!("leased"), &Value::Null));
        }
        assert_eq!(rows[0]["loss_mask"], json!([0, 1, 1]), "the token of version 0 is stale");
        app.ack(&batch, 7).await.expect(200);
        let found = look(app, "g-0", "").await.expect(200);
        assert_eq!((&found["delivered"]["state"], &found["delivered"]["step"]), (&json!("trained"), &json!(7)));
    }

    async fn rollouts_in_every_state_are_shown_as_long_as_their_payload_is_stored(app: TestApp) {
        let filter = json!([
            {"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"},
            {"name": "flat", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"},
        ]);
        let rules = |dropped_s: u64| json!({"group": {"size": 2}, "filter": filter, "staleness": {"max": 1},
            "retention": {"dropped_s": dropped_s, "trained_s": 50}});
        app.rules("default", rules(0)).await;
        app.accept(member("lost", 0, -1.0)).await;
        let problem = look(app, "lost-0", "").await.refused(410, "purged");
        assert!(text(&problem["detail"]).contains("retention.dropped_s"), "{problem}");
        app.rules("default", rules(100)).await;
        app.accept(member("open", 0, 1.0)).await;
        app.accept(member("open", 1, -1.0)).await;
        app.accept(group("flat", &[1.0, 1.0])).await;
        app.accept(group("trained", &[1.0, 0.0])).await;
        app.accept(member("trained", 9, 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.accept(group("stale", &[1.0, 0.0])).await;
        app.publish(1).await;
        app.publish(2).await;
        app.accept(group("ready", &[1.0, 0.0])).await;
        app.lease().await;
        app.accept(group("waiting", &[1.0, 0.0])).await;
        for (rollout, state) in [("open-0", "open"), ("open-1", "dropped"), ("flat-0", "discarded"), ("trained-9", "late"),
            ("trained-0", "trained"), ("stale-0", "stale"), ("ready-0", "leased"), ("waiting-0", "ready")] {
            let found = look(app, rollout, "").await.expect(200);
            assert_eq!(found["story"]["state"], state, "{rollout}");
            let trains = matches!(state, "open" | "discarded" | "trained" | "stale" | "leased" | "ready");
            let expected = if trains { json!([null, 1, 1]) } else { json!([null, 0, 0]) };
            assert_eq!(found["window"]["trained_mask"], expected, "{rollout}");
            assert_eq!(found["delivered"].is_null(), !matches!(state, "trained" | "leased"), "{rollout}");
        }
        app.pass_s(101.0).await;
        for (rollout, rule) in [("flat-0", "retention.dropped_s"), ("trained-0", "retention.trained_s")] {
            let problem = look(app, rollout, "").await.refused(410, "purged");
            assert!(text(&problem["detail"]).contains(rule), "{problem}");
        }
        look(app, "waiting-0", "").await.expect(200);
    }

    async fn tokens_of_turns_are_shown_with_their_advantages(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "advantage": {"kind": "gigpo", "norm": "none"}})).await;
        let of = |place: usize| {
            let turn = json!({"start": 1, "length": 2, "state_key": "s"});
            let posted = json!([7.0, 7.0, 7.0]);
            let segments = json!([
                {"tokens": [1, 2], "loss_mask": [1]},
                {"tokens": [1, 2, 3, 4], "loss_mask": [1, 0, 1], "turns": [turn], "advantages": posted},
            ]);
            with(member("g", place, place as f64), json!({"segments": segments}))
        };
        app.accept(of(0)).await;
        let window = async |rollout: &str| look(app, rollout, "&segment=1").await.expect(200)["window"]["advantages"].clone();
        assert_eq!(window("g-0").await, Value::Null, "its group is not decided");
        app.accept(of(1)).await;
        // A_E and A_S are 0.5. The first token is in no turn, and the second one is masked.
        assert_eq!(window("g-1").await, json!([null, 0.5, 0.0, 1.0]));
    }

    async fn a_damaged_rollout_is_reported_and_left_as_it_is(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for name in ["a", "b"] {
            let segments = json!([{"tokens": [1, if name == "a" { 2 } else { 3 }], "loss_mask": [1]}]);
            for index in 0..2 {
                app.accept(with(member(name, index, index as f64), json!({"segments": segments}))).await;
            }
        }
        let damage = "UPDATE payload SET digest = (SELECT content_digest FROM rollout WHERE rollout_pk = 1) WHERE rollout_pk = 1";
        assert_eq!(app.damage(damage).await, 1);
        assert_eq!(app.damage("UPDATE rollout SET reward = 0.75 WHERE rollout_pk = 4").await, 1);
        for rollout in ["a-0", "b-1"] {
            look(app, rollout, "").await.refused(500, "damaged");
            assert_eq!(app.story(rollout).await["state"], "ready", "looking changes nothing");
        }
        look(app, "a-1", "").await.expect(200);
    }

    async fn a_rollout_of_a_hidden_policy_does_not_exist_for_a_reader(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let reader = app.key(Role::Read, &["math.*"]).await;
        app.post_as(&admin, "/trajectories", rollout("a", 1.0)).await.expect(201);
        app.get_as(&reader, "/trajectories/content?rollout_id=a").await.refused(404, "unknown-policy");
        app.get_as(&admin, "/trajectories/content?rollout_id=a").await.expect(200);
        app.get_as(&reader, "/policies/default/tokenizer").await.refused(404, "unknown-policy");
    }

    async fn a_rollout_without_segments_has_no_window(app: TestApp) {
        let sent = json!({"rollout_id": "a", "status": "failed", "reward": 0.0, "messages": [{"content": "x".repeat(300_000)}]});
        app.accept(sent).await;
        let found = look(app, "a", "").await.expect(200);
        for part in ["window", "map", "metadata"] {
            assert_eq!(found[part], Value::Null, "{part}");
        }
        assert_eq!((&found["segments_total"], &found["segments"]), (&json!(0), &json!([])));
        assert_eq!(found["messages"]["items"][0], json!({"index": 0, "bytes": 300_014, "message": null}));
        look(app, "a", "&segment=1").await.refused(422, "invalid");
    }
}
