//! Credit by turn: worked numbers of `turn_return` and `gigpo`, and where turns come from.

use serde_json::{Value, json};

use crate::{
    arrow::{columns, post, stream},
    support::{TestApp, member, on_both_stores, text, with},
};

/// The trained advantages of a row, of which each must be there and 0 where the mask is 0.
fn trained(row: &Value) -> Vec<f64> {
    assert_eq!(row["advantage"], Value::Null, "tokens have advantages of their own");
    let (mask, advantages) = (row["loss_mask"].as_array().expect("a mask"), row["advantages"].as_array());
    let advantages = advantages.expect("the row has advantages");
    assert_eq!(mask.len(), advantages.len());
    let tokens = mask.iter().zip(advantages).map(|(bit, advantage)| (bit, advantage.as_f64().expect("a number")));
    assert!(tokens.clone().all(|(bit, advantage)| *bit == json!(1) || advantage.abs() == 0.0));
    tokens.filter(|(bit, _)| **bit == json!(1)).map(|(_, advantage)| advantage).collect()
}

#[track_caller]
fn close(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{found:?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
    }
}

/// A segment whose response has this mask, with these turns.
fn segment(mask: &[u8], turns: Value) -> Value {
    let mut segment = json!({"tokens": vec![1; mask.len() + 1], "loss_mask": mask});
    if !turns.is_null() {
        segment["turns"] = turns;
    }
    segment
}

/// The worked example of `turn_return`: two turns with a token between them, and three in two segments.
fn worked_returns(policy: &str) -> [Value; 2] {
    let turns = json!([{"start": 0, "length": 2, "reward": 0.5}, {"start": 3, "length": 1}]);
    let first = json!({"policy": policy, "segments": [segment(&[1, 1, 0, 1], turns)]});
    let last = json!([{"start": 0, "length": 1, "reward": 0.25, "state_key": "s"}]);
    let segments = json!([segment(&[1, 0, 1], Value::Null), segment(&[1, 0], last)]);
    let second = json!({"policy": policy, "segments": segments});
    [with(member("g", 0, 1.0), first), with(member("g", 1, 0.0), second)]
}

async fn rules(app: &TestApp, policy: &str, size: usize, advantage: Value) {
    app.rules(policy, json!({"group": {"size": size}, "batch": {"groups": 1}, "advantage": advantage})).await;
}

async fn rows(app: &TestApp, policy: &str) -> Vec<Value> {
    app.samples(&app.lease_with(json!({"policy": policy})).await).await
}

#[track_caller]
fn worked_returns_hold(rows: &[Value]) {
    close(&trained(&rows[0]), &[1.420_544, 1.420_544, 0.696_238_6]);
    close(&trained(&rows[1]), &[-0.747_845_4, -0.707_103_2]);
    close(&trained(&rows[2]), &[-0.661_834_1]);
}

on_both_stores! {
    async fn returns_of_turns_are_those_of_the_worked_group(app: TestApp) {
        let advantage = json!({"kind": "turn_return", "gamma": 0.9});
        for policy in ["apart", "together", "default"] {
            rules(app, policy, 2, advantage.clone()).await;
        }
        // The turns of a stored rollout are read from its row, those of the last one from the bundle.
        for rollout in worked_returns("apart") {
            app.accept(rollout).await;
        }
        app.accept(worked_returns("together").to_vec().into()).await;
        // The columns of the helper have no policy, which is then the default one.
        post(app, stream(&[columns(&worked_returns("default"))])).await.expect(201);
        for policy in ["apart", "together", "default"] {
            worked_returns_hold(&rows(app, policy).await);
            // In JSON it is the same rollout.
            let again = with(worked_returns(policy)[1].clone(), json!({}));
            assert_eq!(app.post("/trajectories", again.clone()).await.expect(200)["duplicate"], true, "{policy}");
            let other = json!({"segments": [again["segments"][0], segment(&[1, 0], json!([{"start": 0, "length": 1}]))]});
            app.post("/trajectories", with(again, other)).await.refused(409, "rollout-conflict");
        }
        // Without the outcome, the returns are 0.5, 0, and 0.2025, 0.225, 0.25.
        rules(app, "apart", 2, with(advantage, json!({"outcome": false}))).await;
        let again = worked_returns("apart").map(|rollout| {
            with(rollout.clone(), json!({"rollout_id": format!("{}x", text(&rollout["rollout_id"])), "group_id": "h"}))
        });
        app.accept(again.to_vec().into()).await;
        let found = rows(app, "apart").await;
        close(&trained(&found[0]), &[1.485_395_9, 1.485_395_9, -1.322_535_6]);
    }

    async fn turns_of_equal_states_are_those_of_the_worked_group(app: TestApp) {
        let expected = [
            ("std", [1.861_804_1, 0.707_105_8, -1.284_454_9, -1.284_454_9, -0.707_105_8], 0.707_105_8),
            ("none", [1.1, 0.5, -0.8, -0.8, -0.5], 0.5),
        ];
        for (norm, expected, of_rollout) in expected {
            rules(app, norm, 2, json!({"kind": "gigpo", "gamma": 0.9, "norm": norm})).await;
            // As calls: each begins with the whole prompt and the answer of the one before it.
            let call = |number: i32, state: &str| {
                let prompt: Vec<i32> = (0..=2 * number).collect();
                json!({"prompt_tokens": prompt, "tokens": [1 + 2 * number], "state_key": state})
            };
            let calls = |states: &[&str]| -> Value { states.iter().zip(0..).map(|(state, number)| call(number, state)).collect() };
            for (place, reward, states) in [(0, 1.0, &["s0", "s1"][..]), (1, 0.0, &["s0", "s0", "s2"])] {
                let fields = json!({"policy": norm, "segments": null, "turns": calls(states)});
                app.accept(with(member("g", place, reward), fields)).await;
            }
            let found = rows(app, norm).await;
            close(&found.iter().flat_map(trained).collect::<Vec<_>>(), &expected);
            // The ledger has the advantage of the whole rollout, which is A_E.
            let story = app.get(&format!("/trajectories?policy={norm}&rollout_id=g-0")).await.expect(200);
            close(&[story["advantage"].as_f64().expect("a number")], &[of_rollout]);
        }
    }

    async fn a_trained_token_outside_of_all_turns_has_the_advantage_of_its_rollout(app: TestApp) {
        let of = |place: usize, reward: f64| {
            let turns = json!([{"start": 1, "length": 2, "state_key": "s"}]);
            with(member("g", place, reward), json!({"segments": [segment(&[1, 1, 0, 1], turns)]}))
        };
        rules(app, "default", 2, json!({"kind": "gigpo", "norm": "none"})).await;
        app.accept(json!([of(0, 1.0), of(1, 0.0)])).await;
        let found = rows(app, "default").await;
        close(&trained(&found[0]), &[0.5, 1.0, 0.5]);
        close(&trained(&found[1]), &[-0.5, -1.0, -0.5]);
    }

    async fn a_masked_rollout_is_compared_and_one_without_a_reward_is_not(app: TestApp) {
        let filter = json!([{"name": "long", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"}]);
        let advantage = json!({"kind": "turn_return"});
        app.rules("default", json!({"group": {"size": 3}, "advantage": advantage, "filter": filter})).await;
        let of = |place: usize, fields: Value| {
            let turns = json!({"segments": [segment(&[1, 0, 1], Value::Null)]});
            with(with(member("g", place, 1.0), turns), fields)
        };
        let masked = of(1, json!({"reward": 0.0, "status": "truncated"}));
        let absent = of(2, json!({"reward": null, "status": "truncated"}));
        app.accept(json!([of(0, json!({})), masked, absent])).await;
        let found = rows(app, "default").await;
        assert_eq!(found.len(), 3);
        // The returns are 1, 1, 0, 0, whose deviation is 0.57735.
        close(&trained(&found[0]), &[0.866_023_9, 0.866_023_9]);
        for row in &found[1..] {
            assert_eq!((&row["advantages"], &row["advantage"]), (&json!([0.0, 0.0, 0.0]), &Value::Null));
        }
    }

    async fn stale_tokens_are_masked_and_their_turns_stay_turns(app: TestApp) {
        let advantage = json!({"kind": "turn_return"});
        let staleness = json!({"max": 0, "action": "mask"});
        app.rules("default", json!({"group": {"size": 2}, "advantage": advantage, "staleness": staleness})).await;
        let of = |place: usize, reward: f64| {
            let mut segment = segment(&[1, 1, 0, 1], Value::Null);
            segment["versions"] = json!([[0, 0, 1], [1, 1, 3]]);
            with(member("g", place, reward), json!({"segments": [segment]}))
        };
        app.publish(1).await.expect(200);
        app.accept(json!([of(0, 1.0), of(1, 0.0)])).await;
        let found = rows(app, "default").await;
        assert_eq!(found[0]["loss_mask"], json!([0, 1, 0, 1]));
        close(&trained(&found[0]), &[0.866_023_9, 0.866_023_9]);
    }

    async fn turns_that_say_nothing_are_refused(app: TestApp) {
        let pointers = async |turns: Value| {
            let rollout = with(member("g", 0, 1.0), json!({"segments": [segment(&[1, 0, 0, 1], turns)]}));
            app.post("/trajectories", rollout).await.pointers(422)
        };
        for (turns, at) in [
            (json!([{"start": -1, "length": 1}]), "0/start"),
            (json!([{"start": 0, "length": 0}]), "0/length"),
            (json!([{"start": 3, "length": 2}]), "0/length"),
            (json!([{"start": 0, "length": i64::MAX}]), "0/length"),
            (json!([{"start": 1, "length": 2}]), "0"),
            (json!([{"start": 0, "length": 2}, {"start": 1, "length": 3}]), "1/start"),
            (json!([{"start": 3, "length": 1}, {"start": 0, "length": 1}]), "1/start"),
            (json!([{"start": 0, "length": 1, "state_key": ""}]), "0/state_key"),
        ] {
            assert_eq!(pointers(turns.clone()).await, [format!("/segments/0/turns/{at}")], "{turns}");
        }
        let calls = |fields: Value| {
            let call = with(json!({"prompt_tokens": [1], "tokens": [2]}), fields);
            with(member("g", 0, 1.0), json!({"segments": null, "turns": [call]}))
        };
        for (fields, at) in [
            (json!({"tokens": [], "reward": 1}), "reward"),
            (json!({"tokens": [], "state_key": "s"}), "state_key"),
            (json!({"state_key": "x".repeat(257)}), "state_key"),
        ] {
            assert_eq!(app.post("/trajectories", calls(fields)).await.pointers(422), [format!("/turns/0/{at}")]);
        }
        let body = calls(json!({"reward": 7})).to_string().replace("\"reward\":7", "\"reward\":1e999");
        let answer = app.post_raw("/trajectories", &[("content-type", "application/json")], body.into_bytes()).await;
        assert_eq!(answer.pointers(422), ["/turns/0/reward"]);
        // Nothing was stored, and a row of Arrow is held to the same.
        let wrong = with(member("g", 0, 1.0), json!({"segments": [segment(&[1], json!([{"start": 0, "length": 2}]))]}));
        assert_eq!(post(app, stream(&[columns(&[wrong])])).await.pointers(422), ["/0/segments/0/turns/0/length"]);
        app.get("/trajectories?rollout_id=g-0").await.refused(404, "not-found");
    }

    async fn turns_are_bounded_where_they_are_compared(app: TestApp) {
        rules(app, "default", 2, json!({"kind": "turn_return"})).await;
        rules(app, "other", 2, json!("grpo")).await;
        let mask: Vec<u8> = (0..2 * 4_097_u32).map(|token| u8::from(token % 2 == 0)).collect();
        let of = |policy: &str, mask: &[u8]| {
            with(member("g", 0, 1.0), json!({"policy": policy, "segments": [segment(mask, Value::Null)]}))
        };
        assert_eq!(app.post("/trajectories", of("default", &mask)).await.pointers(422), ["/segments"]);
        app.accept(of("default", &mask[2..])).await;
        app.accept(of("other", &mask)).await;
        // In a large group, fewer turns fit.
        let large = json!({"group_id": "large", "group_size": 65_536});
        let of_large = |turns: usize| with(with(of("default", &mask[..2 * turns]), json!({"rollout_id": "l"})), large.clone());
        assert_eq!(app.post("/trajectories", of_large(17)).await.pointers(422), ["/segments"]);
        app.accept(of_large(16)).await;
        let named: Value = (0..4_097).map(|turn| json!({"start": 2 * turn, "length": 1})).collect();
        let rollout = with(member("h", 0, 1.0), json!({"policy": "other", "segments": [segment(&mask, named)]}));
        app.accept(rollout.clone()).await;
        let rollout = with(rollout, json!({"policy": "default"}));
        assert_eq!(app.post("/trajectories", rollout).await.pointers(422), ["/segments"]);
    }

    async fn turns_that_changed_are_not_delivered(app: TestApp) {
        let changes = [
            "UPDATE rollout SET turns = (SELECT turns FROM rollout WHERE rollout_pk = $) WHERE rollout_pk = #",
            "UPDATE rollout SET turns = NULL WHERE rollout_pk = #",
            "UPDATE rollout SET turn_advantages = NULL WHERE rollout_pk = #",
            "UPDATE rollout SET turn_advantages = turns WHERE rollout_pk = #",
            "UPDATE rollout SET turn_advantages = execution WHERE rollout_pk = #",
        ];
        rules(app, "default", 2, json!({"kind": "turn_return"})).await;
        for (index, change) in changes.into_iter().enumerate() {
            let group = format!("g{index}");
            let of = |place: usize| {
                let turns = json!([{"start": 0, "length": 1, "reward": place}, {"start": 2, "length": 1}]);
                with(member(&group, place, 1.0), json!({"segments": [segment(&[1, 0, 1], turns)]}))
            };
            app.accept(json!([of(0), of(1)])).await;
            let batch = app.lease().await;
            let keys = [2 * index + 1, 2 * index + 2].map(|key| key.to_string());
            let change = change.replace('#', &keys[0]).replace('$', &keys[1]);
            assert_eq!(app.damage(Box::leak(change.clone().into_boxed_str())).await, 1);
            app.get(text(&batch["samples_url"])).await.refused(500, "damaged");
            assert_eq!(app.story(&format!("{group}-0")).await["state"], "quarantined", "{change}");
        }
    }

    async fn turns_that_are_lost_do_not_keep_a_group_from_its_decision(app: TestApp) {
        rules(app, "default", 3, json!({"kind": "turn_return"})).await;
        let of = |place: usize| with(member("g", place, place as f64), json!({"segments": [segment(&[1, 0, 1], Value::Null)]}));
        app.accept(json!([of(0), of(1)])).await;
        assert_eq!(app.damage("UPDATE rollout SET turns = NULL WHERE rollout_pk = 1").await, 1);
        assert_eq!(app.damage("UPDATE rollout SET turns = execution WHERE rollout_pk = 2").await, 1);
        app.accept(of(2)).await;
        let batch = app.lease().await;
        app.get(text(&batch["samples_url"])).await.refused(500, "damaged");
        assert_eq!(app.story("g-2").await["state"], "quarantined");
    }

    async fn a_rollout_that_takes_no_place_can_be_looked_at(app: TestApp) {
        let filter = json!([{"name": "long", "scope": "rollout", "when": "status == \"truncated\"", "action": "drop"}]);
        let retention = json!({"dropped_s": 1_000});
        let advantage = json!({"kind": "turn_return"});
        app.rules("default", json!({"group": {"size": 2}, "advantage": advantage, "filter": filter, "retention": retention})).await;
        app.accept(with(member("g", 0, 1.0), json!({"status": "truncated"}))).await;
        app.accept(json!([member("g", 1, 1.0), member("g", 2, 0.0)])).await;
        app.accept(member("g", 3, 0.0)).await;
        for (rollout, verdict) in [("g-0", "dropped"), ("g-1", "kept"), ("g-3", "late")] {
            let found = app.get(&format!("/trajectories/content?rollout_id={rollout}")).await.expect(200);
            assert_eq!(found["story"]["verdict"], verdict);
        }
    }

    async fn an_empty_list_of_turns_says_the_same_as_none(app: TestApp) {
        rules(app, "default", 2, json!({"kind": "turn_return"})).await;
        let of = |place: usize, turns: Value| with(member("g", place, place as f64), json!({"segments": [segment(&[1, 0, 1], turns)]}));
        app.accept(json!([of(0, json!([])), of(1, Value::Null)])).await;
        for turns in [json!([]), Value::Null] {
            assert_eq!(app.post("/trajectories", of(0, turns)).await.expect(200)["duplicate"], true);
        }
        close(&trained(&rows(app, "default").await[1]), &[0.866_023_9, 0.866_023_9]);
    }

    async fn equal_rewards_are_not_flat_where_turns_are_compared(app: TestApp) {
        for (policy, advantage, flat) in [("whole", json!("grpo"), 1), ("turns", json!({"kind": "turn_return"}), 0)] {
            rules(app, policy, 2, advantage).await;
            let of = |place: usize| {
                let turns = json!([{"start": 0, "length": 1, "reward": place}]);
                with(member("g", place, 0.0), json!({"policy": policy, "segments": [segment(&[1], turns)]}))
            };
            app.accept(json!([of(0), of(1)])).await;
            let batch = app.lease_with(json!({"policy": policy})).await;
            app.ack(&batch, 1).await.expect(200);
            let steps = app.get(&format!("/policies/{policy}/steps")).await.expect(200);
            assert_eq!(steps["steps"][0]["flat_groups"], flat, "{policy}");
        }
    }

    async fn turns_are_rewarded_later(app: TestApp) {
        let rules = json!({
            "group": {"size": 2}, "batch": {"groups": 1}, "advantage": {"kind": "turn_return", "gamma": 0.9},
            "scores": {"required": ["reward"]},
        });
        // What came with a turn gives way. Several scorers are their mean, in whatever order they come.
        let rewards = [("g-0", 0, "a", 0.25), ("g-1", 2, "b", 0.75), ("g-0", 0, "b", 0.75), ("g-1", 2, "a", -0.25)];
        for (policy, last_in_one) in [("apart", false), ("together", true)] {
            app.rules(policy, rules.clone()).await;
            let [mut first, mut second] = worked_returns(policy);
            first["segments"][0]["turns"][0]["reward"] = json!(9.0);
            (first["reward"], second["reward"]) = (Value::Null, Value::Null);
            let posted = app.accept(json!([first, second])).await;
            assert_eq!(posted[0]["scoring"], json!(["reward"]));
            let of = |(rollout, turn, scorer, value): (&str, i32, &str, f64)| {
                json!({"policy": policy, "rollout_id": rollout, "name": "reward", "turn": turn, "value": value, "scorer": scorer})
            };
            let outcomes = [("g-0", 1.0), ("g-1", 0.0)].map(|(rollout, value)| {
                json!({"policy": policy, "rollout_id": rollout, "name": "reward", "value": value, "scorer": "a"})
            });
            let scores: Vec<Value> = rewards.into_iter().map(of).chain(outcomes).collect();
            if last_in_one {
                app.post("/scores", scores.clone().into()).await.expect(201);
            } else {
                for score in &scores {
                    let receipt = app.post("/scores", score.clone()).await.expect(201);
                    assert_eq!((&receipt["turn"], &receipt["applied"]), (&score["turn"], &json!(true)));
                }
            }
            worked_returns_hold(&rows(app, policy).await);
            // As a retry, and as what comes too late.
            let again = app.post("/scores", scores[0].clone()).await.expect(200);
            assert_eq!((&again["duplicate"], &again["applied"]), (&json!(true), &json!(true)));
            let late = app.post("/scores", with(scores[0].clone(), json!({"value": 0.5}))).await.expect(201);
            assert_eq!(late["applied"], false);
            let list = app.get(&format!("/scores?policy={policy}&rollout_id=g-0")).await.expect(200);
            let of_turns: Vec<_> = list["scores"].as_array().expect("a list").iter().filter(|score| score["turn"] == 0).collect();
            let told = |score: &&Value| (score["scorer"].clone(), score["value"].clone(), score["applied"].clone());
            let expected = [("a", 0.5, false), ("a", 0.25, true), ("b", 0.75, true)];
            let expected = expected.map(|(scorer, value, applied)| (json!(scorer), json!(value), json!(applied)));
            assert_eq!(of_turns.iter().map(told).collect::<Vec<_>>(), expected);
            let why = app.get(&format!("/why?policy={policy}&id=g-0")).await.expect(200).to_string();
            assert!(why.contains("the score reward 0.25 for turn 0"), "{why}");
        }
    }

    async fn turns_are_named_by_their_calls(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 1}, "batch": {"groups": 1}, "advantage": {"kind": "turn_return", "outcome": false},
            "scores": {"required": ["reward"]},
        })).await;
        let call = |id: &str, prompt: &[i32], token: i32| json!({"id": id, "prompt_tokens": prompt, "tokens": [token]});
        // The second call continues the first one, and the third is a branch of its own. The last has no id.
        let calls = json!([call("a-1", &[1], 2), call("b", &[1, 2, 3], 4), call("c", &[9], 5), {"prompt_tokens": [8], "tokens": [6]}]);
        app.accept(with(member("g", 0, 0.0), json!({"reward": null, "segments": null, "turns": calls}))).await;
        let of = |turn: Value| json!({"rollout_id": "g-0", "name": "reward", "turn": turn, "value": 1.0});
        for (call, number) in [("a-1", 0), ("b", 1), ("c", 2)] {
            assert_eq!(app.post("/scores", of(json!(call))).await.expect(201)["turn"], number);
            assert_eq!(app.post("/scores", of(json!(number))).await.expect(200)["duplicate"], true);
        }
        for unknown in [json!("1"), json!("d"), json!(4), json!(-1), json!(4_096), json!("")] {
            assert_eq!(app.post("/scores", of(unknown.clone())).await.pointers(422), ["/turn"], "{unknown}");
        }
        assert_eq!(app.post("/scores", of(json!(1.5))).await.pointers(422), ["/turn"]);
        assert_eq!(app.post("/scores", with(of(json!(3)), json!({"name": "judge"}))).await.pointers(422), ["/name"]);
        assert_eq!(app.post("/scores", with(of(json!(3)), json!({"lease": "x"}))).await.pointers(422), ["/lease"]);
        assert_eq!(app.post("/scores", with(of(json!(3)), json!({"value": 2.0}))).await.expect(201)["turn"], 3);
        app.post("/scores", with(of(json!(3)), json!({"value": 3.0}))).await.refused(409, "score-conflict");
        app.post("/scores", with(of(json!(3)), json!({"value": 3.0, "replace": true}))).await.expect(201);
        // A rollout whose rules compare no turns has none that could be rewarded.
        app.rules("plain", json!({"group": {"size": 1}})).await;
        app.accept(with(member("g", 1, 0.0), json!({"policy": "plain"}))).await;
        let plain = with(of(json!(0)), json!({"policy": "plain", "rollout_id": "g-1"}));
        assert_eq!(app.post("/scores", plain).await.pointers(422), ["/turn"]);
    }

    async fn rewards_of_turns_that_are_lost_are_found(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 1}, "batch": {"groups": 1}, "advantage": {"kind": "turn_return"},
            "scores": {"required": ["reward"]},
        })).await;
        app.accept(with(member("g", 0, 0.0), json!({"reward": null}))).await;
        let turn = json!({"rollout_id": "g-0", "name": "reward", "value": 1.0, "turn": 0});
        app.post("/scores", json!([turn, {"rollout_id": "g-0", "name": "reward", "value": 1.0}])).await.expect(201);
        let batch = app.lease().await;
        assert_eq!(app.damage("UPDATE turn_score SET value = 0.5").await, 1);
        app.get(text(&batch["samples_url"])).await.refused(500, "damaged");
        assert_eq!(app.story("g-0").await["state"], "quarantined");
    }

    async fn rewards_of_turns_go_with_their_rollout(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 1}, "advantage": {"kind": "turn_return"}, "scores": {"required": ["reward"], "timeout_s": 5},
            "retention": {"dropped_s": 0, "tombstone_s": 10},
        })).await;
        let withdrawn = async |rollout: &str| {
            let list = app.get(&format!("/scores?rollout_id={rollout}")).await.expect(200);
            assert_eq!((&list["scores"][0]["turn"], &list["scores"][0]["applied"]), (&json!(0), &json!(false)));
        };
        for group in ["unscored", "discarded"] {
            app.accept(with(member(group, 0, 0.0), json!({"reward": null}))).await;
            let score = json!({"rollout_id": format!("{group}-0"), "name": "reward", "value": 1.0, "turn": 0});
            app.post("/scores", score).await.expect(201);
        }
        app.post("/groups/discard", json!({"group_id": "discarded", "reason": "test"})).await.expect(200);
        withdrawn("discarded-0").await;
        app.pass_s(6.0).await;
        withdrawn("unscored-0").await;
        app.post("/groups/discard", json!({"group_id": "unscored", "reason": "test"})).await.expect(200);
        app.pass_s(11.0).await;
        app.pass_s(11.0).await;
        assert_eq!(app.read_value("SELECT CAST(COUNT(*) AS BIGINT) FROM turn_score".to_owned()).await, 0);
    }

    async fn shards_have_the_advantages_of_their_rows(app: TestApp) {
        rules(app, "default", 2, json!({"kind": "turn_return", "gamma": 0.9})).await;
        app.accept(worked_returns("default").to_vec().into()).await;
        let batch = app.lease().await;
        let mut found = Vec::new();
        for shard in 0..3 {
            let url = format!("{}?shard={shard}&shards=3", text(&batch["samples_url"]));
            found.extend(app.samples(&json!({"samples_url": url})).await);
        }
        found.sort_by_key(|row| (text(&row["rollout_id"]).to_owned(), row["segment"].as_i64()));
        worked_returns_hold(&found);
    }
}
