//! Scores that come after their rollouts: a rollout waits for those that its rules require, and its group for it.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, member, on_both_stores, text, with};

/// A rollout without a reward.
fn unscored(group_id: &str, index: usize) -> Value {
    with(member(group_id, index, 0.0), json!({"reward": null}))
}

fn score(rollout_id: &str, name: &str, value: f64) -> Value {
    json!({"rollout_id": rollout_id, "name": name, "value": value})
}

async fn put(app: &TestApp, rollout_id: &str, name: &str, value: f64) -> Value {
    app.post("/scores", score(rollout_id, name, value)).await.expect(201)
}

async fn rules(app: &TestApp, size: usize, scores: Value) {
    app.rules("default", json!({"group": {"size": size}, "batch": {"groups": 1}, "scores": scores})).await;
}

async fn counts(app: &TestApp, states: &[&str]) -> Vec<i64> {
    let found = app.get("/stats").await.expect(200);
    let rollouts = &found["policies"]["default"]["rollouts"];
    states.iter().map(|state| rollouts[state].as_i64().unwrap_or(0)).collect()
}

fn close(found: &Value, expected: f64) {
    let found = found.as_f64().expect("a number");
    assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
}

/// The scores of a rollout that is judged are among its reward components: for people who look, and in exports.
async fn components(app: &TestApp, rollout_id: &str, expected: Value) {
    let content = app.get(&format!("/trajectories/content?rollout_id={rollout_id}")).await.expect(200);
    let or_none = |found: &Value| if found.is_null() { json!({}) } else { found.clone() };
    assert_eq!(or_none(&content["reward_components"]), expected);
    let exports = app.http.get(format!("{}/exports?policy=default", app.url)).send().await.expect("an answer");
    let exports = exports.text().await.expect("it arrives whole");
    let mut rollouts = exports.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let exported = rollouts.find(|line| line["trajectory"]["rollout_id"] == rollout_id).expect("it is exported");
    assert_eq!(or_none(&exported["trajectory"]["reward_components"]), expected);
}

async fn nothing_ready(app: &TestApp) {
    app.post("/batches", json!({})).await.expect(204);
}

on_both_stores! {
    async fn a_group_is_decided_with_the_last_score_of_its_last_rollout(app: TestApp) {
        let reward = "0.8 * scores.tests + 0.2 * scores.judge";
        rules(app, 2, json!({"required": ["tests", "judge"], "reward": reward})).await;
        let sent = app.accept(with(unscored("g", 0), json!({"reward_components": {"tests": 1.0}}))).await;
        assert_eq!((&sent["verdict"], &sent["scoring"]), (&json!("kept"), &json!(["judge"])));
        let sent = app.accept(unscored("g", 1)).await;
        assert_eq!(sent["scoring"], json!(["tests", "judge"]));
        assert_eq!(sent["group"], json!({"state": "open", "arrived": 2, "size": 2}));
        assert_eq!(counts(app, &["scoring", "open"]).await, [2, 0]);
        let story = app.story("g-1").await;
        assert_eq!((&story["state"], &story["scoring"]), (&json!("scoring"), &json!(["tests", "judge"])));
        // A retry of the post says the same.
        let again = app.post("/trajectories", unscored("g", 1)).await.expect(200);
        assert_eq!(again["scoring"], json!(["tests", "judge"]));

        let first = put(app, "g-0", "judge", 0.5).await;
        assert_eq!((&first["scoring"], &first["applied"]), (&json!([]), &json!(true)));
        assert_eq!(first["group"]["state"], "open");
        assert_eq!(put(app, "g-1", "judge", 0.0).await["scoring"], json!(["tests"]));
        nothing_ready(app).await;
        assert_eq!(counts(app, &["scoring", "open"]).await, [1, 1]);
        let found = app.get("/trajectories?state=scoring").await.expect(200);
        assert_eq!(found["trajectories"].as_array().map(Vec::len), Some(1));
        let last = put(app, "g-1", "tests", 0.0).await;
        assert_eq!((&last["scoring"], &last["group"]["state"]), (&json!([]), &json!("ready")));
        assert_eq!(counts(app, &["scoring", "open", "ready"]).await, [0, 0, 2]);

        let rows = app.samples(&app.lease().await).await;
        close(&rows[0]["reward"], 0.9);
        close(&rows[1]["reward"], 0.0);
        components(app, "g-0", json!({"judge": 0.5, "tests": 1.0})).await;
        components(app, "g-1", json!({"judge": 0.0, "tests": 0.0})).await;
        assert!(rows[0]["advantage"].as_f64().expect("a number") > 0.7);
    }

    async fn without_an_expression_the_score_reward_is_the_reward(app: TestApp) {
        rules(app, 1, json!({"required": ["reward"]})).await;
        assert!(app.accept(member("posted", 0, 0.25)).await.get("scoring").is_none(), "its producer gave the score");
        app.accept(unscored("late", 0)).await;
        put(app, "late-0", "reward", 0.75).await;
        let rewards: Vec<Value> = [app.lease().await, app.lease().await].iter().map(|batch| batch["batch_id"].clone()).collect();
        assert_eq!(rewards.len(), 2);
        close(&app.story("posted-0").await["reward"], 0.25);
        close(&app.story("late-0").await["reward"], 0.75);
    }

    async fn several_scorers_are_averaged_and_the_producer_is_one_of_them(app: TestApp) {
        rules(app, 1, json!({"required": ["done"], "reward": "scores.judge + scores.reward"})).await;
        app.accept(with(member("g", 0, 0.5), json!({"reward_components": {"judge": 1.0, "other": 3.0}}))).await;
        for (scorer, value) in [("a", 0.5), ("b", 0.0)] {
            let score = with(score("g-0", "judge", value), json!({"scorer": scorer, "rationale": "because"}));
            app.post("/scores", score).await.expect(201);
        }
        app.post("/scores", with(score("g-0", "reward", 1.5), json!({"scorer": "a"}))).await.expect(201);
        put(app, "g-0", "done", 1.0).await;
        close(&app.story("g-0").await["reward"], 0.5 + 1.0);
        components(app, "g-0", json!({"done": 1.0, "judge": 0.5, "other": 3.0})).await;
        let list = app.get("/scores?rollout_id=g-0").await.expect(200);
        let found: Vec<_> = list["scores"].as_array().expect("a list").iter()
            .map(|score| (text(&score["name"]), score["scorer"].as_str(), score["value"].as_f64().expect("a number")))
            .collect();
        assert_eq!(found, [
            ("done", Some("anonymous"), 1.0),
            ("judge", None, 1.0),
            ("judge", Some("a"), 0.5),
            ("judge", Some("b"), 0.0),
            ("other", None, 3.0),
            ("reward", None, 0.5),
            ("reward", Some("a"), 1.5),
        ]);
        assert_eq!(list["scores"][2]["rationale"], "because");
    }

    async fn filters_see_scores_and_those_that_need_none_decide_at_arrival(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "batch": {"groups": 1},
            "scores": {"required": ["judge"], "reward": "scores.judge * double(metadata.weight)"},
            "retention": {"dropped_s": 0},
            "filter": [
                {"name": "aborted", "scope": "rollout", "when": "status == 'aborted'", "action": "drop"},
                {"name": "rude", "scope": "rollout", "when": "scores.judge < 0.1", "action": "drop"},
                {"name": "weak", "scope": "rollout", "when": "reward < 0.5", "action": "mask"},
                {"name": "late-look", "scope": "rollout", "when": "tokens > 1000", "action": "drop"},
            ],
        })).await;
        let weighed = |rollout: Value| with(rollout, json!({"metadata": {"weight": 2}}));
        let sent = app.accept(with(weighed(unscored("g", 0)), json!({"status": "aborted"}))).await;
        assert_eq!((&sent["verdict"], &sent["reason"]), (&json!("dropped"), &json!("aborted")));
        assert!(sent.get("scoring").is_none());
        for index in 1..3 {
            app.accept(weighed(unscored("g", index))).await;
        }
        let live = app.get("/stats").await.expect(200)["policies"]["default"]["live_bytes"].as_i64();
        // The judge drops it, so its place is free again.
        let sent = put(app, "g-1", "judge", 0.0).await;
        assert_eq!((&sent["verdict"], &sent["reason"]), (&json!("dropped"), &json!("rude")));
        assert_eq!(sent["group"]["arrived"], 1);
        assert_eq!(counts(app, &["scoring", "open", "dropped"]).await, [1, 0, 2]);
        let left = app.get("/stats").await.expect(200)["policies"]["default"]["live_bytes"].as_i64();
        assert!(left < live, "its payload does not wait to be trained any more");
        app.get("/trajectories/content?rollout_id=g-1").await.refused(410, "purged");
        app.accept(weighed(unscored("g", 3))).await;
        assert_eq!(put(app, "g-2", "judge", 0.2).await["verdict"], "masked");
        let last = put(app, "g-3", "judge", 0.4).await;
        assert_eq!((&last["verdict"], &last["group"]["state"]), (&json!("kept"), &json!("ready")));
        close(&app.story("g-3").await["reward"], 0.8);
        close(&app.story("g-2").await["reward"], 0.4);
    }

    async fn an_expression_that_fails_leaves_no_reward(app: TestApp) {
        rules(app, 1, json!({"required": ["a"], "reward": "scores.missing + 1.0"})).await;
        app.accept(member("g", 0, 1.0)).await;
        let sent = put(app, "g-0", "a", 1.0).await;
        assert_eq!((&sent["verdict"], &sent["reason"]), (&json!("dropped"), &json!("no-reward")));
        assert_eq!(app.story("g-0").await["failed_filters"], json!(["scores.reward"]));
        // Where nothing is required, it is evaluated at arrival.
        rules(app, 1, json!({"reward": "scores.x * 2.0"})).await;
        app.accept(with(unscored("h", 0), json!({"reward_components": {"x": 0.25}}))).await;
        close(&app.story("h-0").await["reward"], 0.5);
        assert_eq!(app.accept(unscored("i", 0)).await["reason"], "no-reward");
    }

    async fn a_rollout_without_its_scores_is_dropped_at_its_time(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2, "min_size": 1, "timeout_s": 10}, "batch": {"groups": 1},
            "scores": {"required": ["judge"], "timeout_s": 30},
        })).await;
        app.accept(member("g", 0, 1.0)).await;
        app.pass_s(8.0).await;
        app.accept(member("g", 1, 0.0)).await;
        put(app, "g-1", "judge", 1.0).await;
        // The group would time out, and waits for its rollouts' scores.
        app.pass_s(4.0).await;
        assert_eq!(app.story("g-0").await["group"]["state"], "open");
        app.pass_s(20.0).await;
        let story = app.story("g-0").await;
        assert_eq!((&story["verdict"], &story["reason"]), (&json!("dropped"), &json!("unscored")));
        assert_eq!((&story["reward"], &story["state"]), (&json!(null), &json!("dropped")));
        // Nothing is left to wait for: the group's own time was over long ago.
        assert_eq!(app.story("g-1").await["group"]["state"], "ready");
        let sent = put(app, "g-0", "judge", 1.0).await;
        assert_eq!((&sent["applied"], &sent["verdict"]), (&json!(false), &json!("dropped")));
        assert!(app.metrics().await.contains("forebay_dropped_total{policy=\"default\",reason=\"unscored\"} 1"));
    }

    async fn what_was_scored_in_part_and_never_judged_is_not_damaged(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "batch": {"groups": 1}, "retention": {"dropped_s": 1_000},
            "scores": {"required": ["acc", "judge"], "timeout_s": 30},
            "advantage": {"kind": "gdpo", "components": {"acc": 1.0}},
        })).await;
        for group in ["discarded", "closed", "late", "reset"] {
            app.accept(json!([member(group, 0, 1.0), member(group, 1, 0.0)])).await;
            put(app, &format!("{group}-0"), "acc", 0.5).await;
        }
        app.post("/groups/discard", json!({"group_id": "discarded", "reason": "test"})).await.expect(200);
        app.post("/groups/close", json!({"group_id": "closed"})).await.expect(200);
        app.pass_s(31.0).await;
        for group in ["discarded", "closed", "late"] {
            let rollout = format!("{group}-0");
            components(app, &rollout, json!({})).await;
            let list = app.get(&format!("/scores?rollout_id={rollout}")).await.expect(200);
            let acc = list["scores"].as_array().expect("a list").iter().find(|score| score["name"] == "acc");
            assert_eq!(acc.map(|score| &score["applied"]), Some(&json!(false)), "{group}");
        }
        app.post("/policies/default/reset", json!({})).await.expect(200);
    }

    async fn a_group_that_takes_no_more_has_no_room(app: TestApp) {
        let group = json!({"size": 4, "on_drop": "shrink", "min_size": 1});
        let filter = json!([{"name": "no", "scope": "rollout", "when": "status == 'aborted'", "action": "drop"}]);
        app.rules("default", json!({"group": group, "scores": {"required": ["judge"]}, "filter": filter})).await;
        app.accept(with(member("g", 0, 0.0), json!({"status": "aborted"}))).await;
        for index in 1..4 {
            app.accept(member("g", index, 1.0)).await;
        }
        // Three places are taken and one was used up.
        let answer = app.post("/admissions", json!({"rollouts": 1, "group_id": "g"})).await.expect(200);
        assert!(answer["granted"] == 0 && text(&answer["reason"]).contains("wait for scores"), "{answer}");
        assert_eq!(app.accept(member("g", 4, 1.0)).await["reason"], "group-full");
    }

    async fn a_component_named_reward_is_not_the_reward(app: TestApp) {
        rules(app, 1, json!({"required": ["reward"]})).await;
        let sent = app.accept(with(unscored("g", 0), json!({"reward_components": {"reward": 0.25}}))).await;
        assert_eq!(sent["scoring"], json!(["reward"]));
        let list = app.get("/scores?rollout_id=g-0").await.expect(200);
        assert_eq!(list["scores"], json!([]), "{list}");
        put(app, "g-0", "reward", 0.75).await;
        close(&app.story("g-0").await["reward"], 0.75);
        components(app, "g-0", json!({"reward": 0.25})).await;
    }

    async fn the_producers_own_scores_are_always_shown(app: TestApp) {
        rules(app, 1, json!({})).await;
        app.accept(member("plain", 0, 1.0)).await;
        assert_eq!(put(app, "plain-0", "reward", 0.25).await["applied"], false);
        rules(app, 1, json!({"required": ["done"]})).await;
        app.accept(with(member("waits", 0, 1.0), json!({"reward_components": {"judge": 1.0}}))).await;
        put(app, "waits-0", "judge", 0.5).await;
        for (rollout, name, expected) in [("plain-0", "reward", [1.0, 0.25]), ("waits-0", "judge", [1.0, 0.5])] {
            let list = app.get(&format!("/scores?rollout_id={rollout}")).await.expect(200);
            let found = list["scores"].as_array().expect("a list").iter().filter(|score| score["name"] == name);
            assert_eq!(found.map(|score| score["value"].as_f64().expect("a number")).collect::<Vec<_>>(), expected);
        }
    }

    async fn a_full_group_that_waits_for_scores_takes_no_others(app: TestApp) {
        rules(app, 1, json!({"required": ["judge"]})).await;
        app.accept(member("g", 0, 1.0)).await;
        let sent = app.accept(member("g", 1, 1.0)).await;
        assert_eq!((&sent["verdict"], &sent["reason"]), (&json!("late"), &json!("group-full")));
        assert!(text(&sent["warnings"][0]).starts_with("group-full: "));
        put(app, "g-0", "judge", 1.0).await;
        assert_eq!(app.story("g-0").await["group"]["state"], "ready");
        assert_eq!(app.lease().await["rollouts"], 1);
    }

    async fn closing_drops_what_lacks_scores_and_discarding_and_reset_forget_it(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2, "min_size": 1}, "batch": {"groups": 1}, "scores": {"required": ["judge"]},
        })).await;
        for group in ["closed", "discarded", "reset"] {
            app.accept(json!([member(group, 0, 1.0), member(group, 1, 0.0)])).await;
        }
        put(app, "closed-0", "judge", 1.0).await;
        let closed = app.post("/groups/close", json!({"group_id": "closed"})).await.expect(200);
        assert_eq!((&closed["state"], &closed["kept"], &closed["dropped"]), (&json!("ready"), &json!(1), &json!(1)));
        assert_eq!((&closed["scoring"], &app.story("closed-1").await["reason"]), (&json!(0), &json!("unscored")));
        app.post("/groups/discard", json!({"group_id": "discarded", "reason": "bad task"})).await.expect(200);
        let story = app.story("discarded-0").await;
        assert_eq!((&story["state"], story.get("scoring")), (&json!("discarded"), None));
        let page = app.get("/groups?group_id=discarded").await.expect(200);
        assert_eq!(page["groups"][0]["scoring"], 0, "{page}");
        assert_eq!(put(app, "discarded-0", "judge", 1.0).await["applied"], false);
        assert_eq!(counts(app, &["scoring", "discarded", "ready", "dropped"]).await, [2, 2, 1, 1]);
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(counts(app, &["scoring", "discarded"]).await, [0, 5]);
        app.post("/scores", score("reset-0", "judge", 1.0)).await.refused(404, "not-found");
    }

    async fn a_score_is_given_once_and_changed_only_on_demand_before_the_decision(app: TestApp) {
        rules(app, 1, json!({"required": ["tests", "judge"], "reward": "scores.judge"})).await;
        app.accept(member("g", 0, 1.0)).await;
        put(app, "g-0", "judge", 0.5).await;
        let again = app.post("/scores", score("g-0", "judge", 0.5)).await.expect(200);
        assert_eq!((&again["duplicate"], &again["applied"]), (&json!(true), &json!(true)));
        let other = app.post("/scores", score("g-0", "judge", 0.75)).await;
        let problem = other.refused(409, "score-conflict");
        assert_eq!(problem["errors"][0]["pointer"], "/value");
        app.post("/scores", with(score("g-0", "judge", 0.75), json!({"replace": true}))).await.expect(201);
        // Nothing of an array is stored if one of it is refused.
        let array = json!([score("g-0", "tests", 1.0), score("g-0", "judge", 0.1)]);
        let problem = app.post("/scores", array).await.refused(409, "score-conflict");
        assert_eq!(problem["errors"][0]["pointer"], "/1/value");
        assert_eq!(app.get("/scores?rollout_id=g-0").await.expect(200)["scoring"], json!(["tests"]));
        app.post("/scores", json!([score("g-0", "tests", 1.0), score("g-0", "tests", 1.0)])).await.expect(201);
        close(&app.story("g-0").await["reward"], 0.75);
        // After the decision, everything is stored beside what was counted.
        assert_eq!(app.post("/scores", score("g-0", "judge", 0.75)).await.expect(200)["applied"], true);
        assert_eq!(put(app, "g-0", "judge", 0.1).await["applied"], false);
        assert_eq!(put(app, "g-0", "judge", 0.2).await["applied"], false);
        let list = app.get("/scores?rollout_id=g-0").await.expect(200);
        let judged = list["scores"].as_array().expect("a list").iter().filter(|score| score["name"] == "judge");
        let judged: Vec<_> = judged.map(|score| (score["value"].as_f64(), score["applied"].as_bool())).collect();
        assert_eq!(judged, [(Some(0.2), Some(false)), (Some(0.75), Some(true))]);
        close(&app.samples(&app.lease().await).await[0]["reward"], 0.75);
    }

    async fn bad_scores_are_refused_and_change_nothing(app: TestApp) {
        rules(app, 1, json!({"required": ["judge"]})).await;
        app.accept(member("g", 0, 1.0)).await;
        app.post("/scores", score("nobody", "judge", 1.0)).await.refused(404, "not-found");
        app.post("/scores", with(score("g-0", "judge", 1.0), json!({"policy": "other"}))).await.refused(404, "unknown-policy");
        for (fields, pointer) in [
            (json!({"value": null}), "/value"),
            (json!({"name": ""}), "/name"),
            (json!({"scorer": ""}), "/scorer"),
            (json!({"rationale": "x".repeat((16 << 10) + 1)}), "/rationale"),
            (json!({"rollout_id": ""}), "/rollout_id"),
        ] {
            let answer = app.post("/scores", with(score("g-0", "judge", 1.0), fields)).await;
            assert_eq!(answer.pointers(422), [pointer]);
        }
        let infinite = r#"[{"rollout_id": "g-0", "name": "judge", "value": 1e999}]"#;
        let answer = app.post_raw("/scores", &[("content-type", "application/json")], infinite).await;
        assert!(answer.status.is_client_error(), "{}", answer.json);
        app.post("/scores", with(score("g-0", "judge", 1.0), json!({"grade": 1}))).await.refused(422, "invalid");
        let components: serde_json::Map<String, Value> = (0..64).map(|index| (format!("c{index}"), json!(0.5))).collect();
        app.accept(with(member("full", 0, 1.0), json!({"reward_components": components}))).await;
        assert_eq!(app.post("/scores", score("full-0", "judge", 1.0)).await.pointers(422), ["/name"]);
        app.post("/scores", score("full-0", "c7", 1.0)).await.expect(201);
        let many: Value = (0..64).map(|index| with(score("g-0", "other", 0.0), json!({"scorer": format!("s{index}")}))).collect();
        app.post("/scores", many).await.expect(201);
        assert_eq!(app.post("/scores", score("g-0", "judge", 1.0)).await.pointers(422), ["/name"]);
        assert_eq!(app.get("/scores?rollout_id=g-0").await.expect(200)["scoring"], json!(["judge"]));
    }

    async fn lines_are_stored_or_refused_on_their_own(app: TestApp) {
        rules(app, 1, json!({"required": ["judge"]})).await;
        app.accept(json!([member("a", 0, 1.0), member("b", 0, 1.0)])).await;
        let lines = format!("{}\n\nnot json\n{}\n{}\n", score("a-0", "judge", 1.0), score("c-0", "judge", 1.0), score("b-0", "judge", 0.0));
        let request = app.http.post(format!("{}/scores", app.url)).header("content-type", "application/x-ndjson");
        let answer = request.body(lines).send().await.expect("an answer").text().await.expect("it arrives whole");
        let lines: Vec<Value> = answer.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        let found: Vec<_> = lines.iter().map(|line| (line["line"].as_u64(), line["status"].as_u64())).collect();
        let expected = [(1, 201), (3, 400), (4, 404), (5, 201)];
        assert_eq!(found, expected.map(|(line, status)| (Some(line), Some(status))));
        assert_eq!(lines[3]["receipt"]["group"]["state"], "ready");
    }

    async fn rules_about_scores_are_checked(app: TestApp) {
        let refused = async |scores: Value| -> Vec<String> {
            let answer: Answer = app.put("/policies/default", json!({"scores": scores})).await;
            answer.pointers(422)
        };
        assert_eq!(refused(json!({"required": ["a", "a"]})).await, ["/scores/required/1"]);
        assert_eq!(refused(json!({"required": [""]})).await, ["/scores/required/0"]);
        assert_eq!(refused(json!({"required": (0..17).map(|index| index.to_string()).collect::<Vec<_>>()})).await, ["/scores/required"]);
        assert_eq!(refused(json!({"timeout_s": 0})).await, ["/scores/timeout_s"]);
        for reward in ["scores.a +", "scores.a > 1.0", "status", "rewards[0]", "scores.a + 1"] {
            let answer = app.put("/policies/default", json!({"scores": {"reward": reward}})).await;
            let problem = answer.refused(422, "invalid");
            assert_eq!(problem["errors"][0]["pointer"], "/scores/reward", "{reward}");
            assert!(text(&problem["errors"][0]["detail"]).contains("line 1, column "), "{problem}");
        }
        for (rules, warned) in [
            (json!({"required": ["a"]}), true),
            (json!({"required": ["a", "reward"]}), false),
            (json!({"required": ["a"], "reward": "scores.a > 1.0 ? 1.0 : reward"}), false),
        ] {
            let written = app.call(Method::PATCH, "/policies/default", Some(json!({"scores": rules}))).await;
            let found = written.json["warnings"].as_array().map_or(0, Vec::len);
            assert_eq!((written.status.as_u16(), found > 0), (200, warned), "{}", written.json);
        }
    }

    async fn advantages_by_component_and_group_filters_read_scores(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "batch": {"groups": 1},
            "scores": {"required": ["acc"], "reward": "scores.acc"},
            "advantage": {"kind": "gdpo", "components": {"acc": 1.0, "fmt": 0.5}, "whiten": "none"},
            "filter": [{"name": "flat", "scope": "group", "when": "components.acc.std < 1e-6", "action": "drop"}],
        })).await;
        let of = |group: &str, index: usize| with(unscored(group, index), json!({"reward_components": {"fmt": 1.0}}));
        for group in ["g", "h"] {
            app.accept(json!([of(group, 0), of(group, 1)])).await;
        }
        app.post("/scores", json!([score("g-0", "acc", 1.0), score("g-1", "acc", 0.0), score("h-0", "acc", 1.0)])).await.expect(201);
        let flat = put(app, "h-1", "acc", 1.0).await;
        assert_eq!((&flat["group"]["state"], &flat["group"]["reason"]), (&json!("discarded"), &json!("flat")));
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        close(&rows[0]["advantage"], 0.707_105_8);
        components(app, "g-0", json!({"acc": 1.0, "fmt": 1.0})).await;
        let metrics = &app.batch(&batch).await["metrics"];
        close(&metrics["components/acc/mean"], 0.5);
        let exported = app.get("/exports?policy=default&where=scores.acc%20%3E%200.5%20%26%26%20state%20%3D%3D%20%27x%27").await;
        assert_eq!(exported.status, 422, "an expression with an unknown name");
        let answer = app.post("/policies/default/filters/try", json!({"filter": [
            {"name": "low", "scope": "rollout", "when": "scores.acc < 0.5", "action": "drop"}]})).await.expect(200);
        assert_eq!(answer["rollouts"]["draft"]["dropped"], json!({"low": 1}), "{answer}");
    }

    async fn scores_go_with_their_rollout(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 1}, "scores": {"required": ["judge"]}, "retention": {"dropped_s": 0, "tombstone_s": 1},
            "filter": [{"name": "no", "scope": "rollout", "when": "scores.judge < 0.5", "action": "drop"}],
        })).await;
        app.accept(member("g", 0, 1.0)).await;
        put(app, "g-0", "judge", 0.0).await;
        app.post("/groups/discard", json!({"group_id": "g", "reason": "test"})).await.expect(200);
        app.pass_s(1.0).await;
        app.pass_s(2.0).await;
        assert_eq!(app.read_value("SELECT CAST(COUNT(*) AS BIGINT) FROM score".to_owned()).await, 0);
    }

    async fn a_scorer_may_score_and_look_at_what_it_scores(app: TestApp) {
        rules(app, 1, json!({"required": ["judge"]})).await;
        app.accept(member("g", 0, 1.0)).await;
        let admin = app.key(Role::Admin, &["*"]).await;
        let request = json!({"name": "judge", "role": "score", "policies": ["default"]});
        let key = app.post_as(&admin, "/keys", request).await.expect(201);
        let (key, key_id) = (text(&key["key"]), text(&key["info"]["key_id"]));
        app.get_as(key, "/trajectories?rollout_id=g-0").await.expect(200);
        app.get_as(key, "/trajectories/content?rollout_id=g-0").await.expect(200);
        app.post_as(key, "/trajectories", member("h", 0, 1.0)).await.refused(403, "forbidden");
        app.call_as(key, Method::POST, "/batches", Some(json!({}))).await.refused(403, "forbidden");
        let sent = app.post_as(key, "/scores", score("g-0", "judge", 1.0)).await.expect(201);
        assert_eq!(sent["scorer"], key_id);
        app.post_as(key, "/scores", with(score("g-0", "judge", 1.0), json!({"policy": "hidden"}))).await.refused(404, "unknown-policy");
    }

    async fn scores_of_many_at_once_decide_a_group_once(app: TestApp) {
        rules(app, 8, json!({"required": ["a", "b"], "reward": "scores.a + scores.b"})).await;
        app.accept((0..8).map(|index| unscored("g", index)).collect()).await;
        let scores = (0..8).flat_map(|index| ["a", "b"].map(|name| score(&format!("g-{index}"), name, f64::from(index))));
        let posts: Vec<_> = scores.map(|score| app.post("/scores", score)).collect();
        let answers = futures::future::join_all(posts).await;
        let decided = answers.iter().filter(|answer| answer.json["group"]["state"] == "ready").count();
        assert!(decided >= 1, "at least the last one sees the decision");
        assert!(answers.iter().all(|answer| answer.status.as_u16() == 201 && answer.json["applied"] == true));
        assert_eq!(app.lease().await["rollouts"], 8);
        nothing_ready(app).await;
    }
}
