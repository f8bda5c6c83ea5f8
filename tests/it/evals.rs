//! Evaluation beside training: rollouts that are results of suites, and never trained.

use serde_json::{Value, json};

use crate::{
    arrow::{columns, post, stream},
    score_work::{NEVER_POLL, woken},
    support::{TestApp, member, on_both_stores, rollout, text, with},
};

/// A rollout that evaluates `default` at a version.
fn eval(suite: &str, task: &str, version: i64, reward: f64) -> Value {
    json!({"purpose": "eval", "suite": suite, "task": task, "policy_version": version, "reward": reward})
}

async fn evals(app: &TestApp, query: &str) -> Value {
    app.get(&format!("/policies/default/evals{query}")).await.expect(200)["suites"].clone()
}

#[track_caller]
fn close(found: &Value, expected: f64) {
    let found = found.as_f64().expect("a number");
    assert!((found - expected).abs() < 1e-9, "{found} is not {expected}");
}

/// Two versions of a suite with two tasks of four rollouts each.
async fn evaluated(app: &TestApp) {
    app.put("/policies/default/suites/aime24", json!({"tasks": 2, "repeats": 4})).await.expect(201);
    let mut rollouts = Vec::new();
    for (version, passing) in [(3, [2, 0]), (7, [1, 3])] {
        for (task, passing) in ["a", "b"].into_iter().zip(passing) {
            for index in 0..4 {
                rollouts.push(eval("aime24", task, version, f64::from(u8::from(index < passing))));
            }
        }
    }
    app.accept(rollouts.into()).await;
}

on_both_stores! {
    async fn rollouts_that_evaluate_are_never_trained(app: TestApp) {
        let filter = json!([{"name": "no", "scope": "rollout", "when": "true", "action": "drop"}]);
        let batch = json!({"groups": 1});
        app.rules("default", json!({"group": {"size": 2}, "batch": batch, "filter": filter, "require": ["logprobs"]})).await;
        // No filter drops it, it waits for no group, and a reward is all that it needs.
        let ids = json!({"rollout_id": "e", "execution_id": "x"});
        let sent = app.accept(with(eval("aime24", "p3", 0, 1.0), ids)).await;
        assert_eq!((&sent["policy"], &sent["verdict"], &sent["reason"]), (&json!("default"), &json!("kept"), &Value::Null));
        assert_eq!((&sent["group"]["state"], &sent["group"]["reason"]), (&json!("discarded"), &json!("evaluated")));
        app.rules("default", json!({"group": {"size": 1}, "batch": {"groups": 1}})).await;
        app.accept(with(eval("aime24", "p4", 0, 0.0), json!({"segments": [{"tokens": [1, 2], "loss_mask": [1]}]}))).await;
        app.post("/batches", json!({})).await.expect(204);
        // It counts nowhere in what is trained.
        let stats = app.get("/stats").await.expect(200);
        assert_eq!(stats["policies"].as_object().expect("policies").keys().collect::<Vec<_>>(), ["default"]);
        let of_policy = &stats["policies"]["default"];
        assert!(of_policy["rollouts"].as_object().expect("counts").values().all(|count| count == 0), "{of_policy}");
        assert_eq!(of_policy["live_bytes"], 0);
        assert_eq!(app.get("/policies").await.expect(200)["policies"].as_array().map(Vec::len), Some(1));
        let policy = app.get("/policies/default").await.expect(200);
        assert_eq!(policy["waiting"]["open_groups"], 0, "{policy}");
        app.get("/policies/default@eval").await.refused(422, "invalid");
        let metrics = app.metrics().await;
        let trained = metrics.lines().find(|line| line.contains("policy=\"default\"") && line.contains("verdict=\"kept\""));
        assert_eq!(trained, None, "no rollout of what is trained was received");
        // It is shown like others, by its id, and listed where it is asked for.
        assert_eq!(app.story("e").await["policy"], "default");
        let listed = app.get("/trajectories?purpose=eval").await.expect(200);
        assert_eq!(listed["trajectories"].as_array().map(Vec::len), Some(2));
        assert_eq!(app.get("/trajectories").await.expect(200)["trajectories"], json!([]));
        assert_eq!(app.get("/trajectories/content?rollout_id=e").await.expect(200)["story"]["policy"], "default");
        let why = app.get("/why?policy=default&id=e").await.expect(200);
        assert_eq!(why, app.get("/why?id=e").await.expect(200));
        assert!(text(&why["headline"]).starts_with("Evaluated"), "{why}");
        let exported = |query: &str| app.http.get(format!("{}/exports{query}", app.url)).send();
        let lines = exported("?results=false&purpose=eval").await.expect("an answer").text().await.expect("it arrives");
        let first: Value = serde_json::from_str(lines.lines().next().expect("a line")).expect("JSON");
        assert!(first["suite"].is_string(), "{lines}");
        assert_eq!((&first["purpose"], &first["suite"], &first["task"]), (&json!("eval"), &json!("aime24"), &json!("p3")));
        assert_eq!(exported("?results=false").await.expect("an answer").text().await.expect("it arrives"), "");
        // What was exported can be posted, and is known.
        assert_eq!(app.post("/trajectories", first.clone()).await.expect(200)["duplicate"], true);
        let other = with(first, json!({"task": "p5"}));
        app.post("/trajectories", other).await.refused(409, "rollout-conflict");
        let key = app.key(forebay_wire::Role::Read, &["default"]).await;
        app.get_as(&key, "/trajectories?rollout_id=e").await.expect(200);
        app.get_as(&key, "/why?id=e").await.expect(200);
        let key = app.key(forebay_wire::Role::Read, &["other"]).await;
        app.get_as(&key, "/why?id=e").await.refused(404, "not-found");
    }

    async fn results_of_suites_are_those_of_the_worked_example(app: TestApp) {
        evaluated(app).await;
        let suites = evals(app, "").await;
        let suite = &suites[0];
        assert_eq!((&suite["suite"], &suite["tasks"], &suite["repeats"]), (&json!("aime24"), &json!(2), &json!(4)));
        assert_eq!((suites.as_array().map(Vec::len), &suite["more"]), (Some(1), &json!(false)));
        let versions: Vec<_> = suite["versions"].as_array().expect("versions").iter().map(|at| at["version"].clone()).collect();
        assert_eq!(versions, [7, 3]);
        let now = &suite["versions"][0];
        assert_eq!((&now["n"], &now["tasks"], &now["complete"]), (&json!(8), &json!(2), &json!(true)));
        close(&now["mean"], 0.5);
        close(&now["standard_error"], 0.25);
        for (place, expected) in [0.5, 0.75, 0.875, 1.0].into_iter().enumerate() {
            assert_eq!(now["pass_at"][place]["k"], place + 1);
            close(&now["pass_at"][place]["estimate"], expected);
        }
        let difference = &now["difference"];
        assert_eq!((&difference["version"], &difference["won"], &difference["lost"]), (&json!(3), &json!(1), &json!(1)));
        close(&difference["mean"], 0.25);
        close(&difference["low"], 0.25 - 1.96 * 0.5);
        assert_eq!(suite["versions"][1]["difference"], Value::Null);
        // In pages, each version is still compared with the one before.
        let page = evals(app, "?suite=aime24&limit=1").await;
        assert_eq!((&page[0]["versions"][0], &page[0]["versions"][1], &page[0]["more"]), (now, &Value::Null, &json!(true)));
        let older = evals(app, "?suite=aime24&before=7").await;
        assert_eq!(older[0]["versions"], json!([suite["versions"][1]]));
        assert_eq!(evals(app, "?suite=other").await, json!([]));
        // The tasks, beside those of the version before.
        let tasks = app.get("/policies/default/suites/aime24/tasks").await.expect(200);
        assert_eq!((&tasks["version"], &tasks["before"], &tasks["next"]), (&json!(7), &json!(3), &Value::Null));
        let means = |task: &Value| [task["now"]["mean"].clone(), task["before"]["mean"].clone()];
        let found: Vec<_> = tasks["tasks"].as_array().expect("tasks").iter().map(means).collect();
        assert_eq!(found, [[json!(0.25), json!(0.5)], [json!(0.75), json!(0.0)]]);
        assert_eq!(tasks["tasks"][0]["now"]["rollouts"].as_array().map(Vec::len), Some(4));
        let first = app.get("/policies/default/suites/aime24/tasks?limit=1").await.expect(200);
        assert_eq!((&first["tasks"], &first["next"]), (&json!([tasks["tasks"][0]]), &json!("a")));
        let rest = app.get("/policies/default/suites/aime24/tasks?after=a&version=7").await.expect(200);
        assert_eq!(rest["tasks"], json!([tasks["tasks"][1]]));
        let before = app.get("/policies/default/suites/aime24/tasks?version=3").await.expect(200);
        assert_eq!((&before["before"], &before["tasks"][0]["before"]), (&Value::Null, &Value::Null));
        let none = app.get("/policies/default/suites/aime24/tasks?version=5").await.expect(200);
        assert_eq!((&none["before"], &none["tasks"][0]["now"]), (&json!(3), &Value::Null));
        app.get("/policies/default/suites/other/tasks").await.refused(404, "not-found");
    }

    async fn columns_say_what_rollouts_evaluate(app: TestApp) {
        let rollout = with(eval("s", "t", 1, 1.0), json!({"rollout_id": "e", "segments": [{"tokens": [1, 2], "loss_mask": [1]}]}));
        post(app, stream(&[columns(std::slice::from_ref(&rollout))])).await.expect(201);
        assert_eq!(app.post("/trajectories", rollout).await.expect(200)["duplicate"], true);
        assert_eq!(evals(app, "").await[0]["versions"][0]["n"], 1);
        let wrong = json!({"rollout_id": "f", "suite": "s", "segments": [{"tokens": [1, 2], "loss_mask": [1]}]});
        assert_eq!(post(app, stream(&[columns(&[wrong])])).await.pointers(422), ["/0/suite"]);
    }

    async fn what_names_no_suite_or_a_group_is_refused(app: TestApp) {
        for (fields, pointer) in [
            (json!({"suite": null}), "/suite"),
            (json!({"suite": "a b"}), "/suite"),
            (json!({"task": ""}), "/task"),
            (json!({"group_id": "g"}), "/group_id"),
            (json!({"group_size": 2}), "/group_size"),
            (json!({"purpose": "train"}), "/suite"),
            (json!({"purpose": "play"}), "/purpose"),
        ] {
            let found = app.post("/trajectories", with(eval("s", "t", 1, 1.0), fields.clone())).await.pointers(422);
            assert_eq!(found[0], pointer, "{fields}");
        }
        // One of two with the same id could not be looked up.
        app.rules("default", json!({"group": {"size": 1}})).await;
        app.accept(with(member("g", 0, 1.0), json!({"rollout_id": "trained"}))).await;
        let taken = with(eval("s", "t", 1, 1.0), json!({"rollout_id": "trained"}));
        app.post("/trajectories", taken).await.refused(409, "rollout-conflict");
        let opens = json!({"purpose": "eval", "suite": "s", "rollout_id": "trained"});
        app.post("/sessions", opens).await.refused(409, "rollout-conflict");
        for (body, pointer) in [
            (json!({"tasks": 0}), "/tasks"),
            (json!({"tasks": 1, "repeats": 257}), "/repeats"),
        ] {
            assert_eq!(app.put("/policies/default/suites/s", body).await.pointers(422), [pointer]);
        }
        assert_eq!(app.put("/policies/default/suites/a%20b", json!({"tasks": 1})).await.pointers(422), ["suite"]);
        for (query, pointer) in [
            ("wait_complete=s", "wait_complete"), ("wait_complete=s@x", "wait_complete"), ("limit=0", "limit"),
            ("wait_complete=s@1&suite=s", "suite"), ("wait_complete=s@1&before=2", "before"), ("wait_ms=60001", "wait_ms"),
        ] {
            assert_eq!(app.get(&format!("/policies/default/evals?{query}")).await.pointers(422), [pointer]);
        }
        assert_eq!(app.post("/admissions", json!({"rollouts": 1, "suite": "s"})).await.pointers(422), ["/purpose"]);
        app.get("/policies/other/evals").await.refused(404, "unknown-policy");
        // Nothing has evaluated this policy yet.
        app.rules("fresh", json!({})).await;
        assert_eq!(app.get("/trajectories?policy=fresh&purpose=eval").await.expect(200)["trajectories"], json!([]));
        assert_eq!(app.get("/sessions?policy=fresh&purpose=eval").await.expect(200)["sessions"], json!([]));
        app.get("/exports?policy=fresh&purpose=eval").await;
        app.get("/exports?policy=other&purpose=eval").await.refused(404, "unknown-policy");
    }

    async fn evaluation_has_room_of_its_own(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 1}, "backlog": {"max_ready_rollouts": 1}, "admissions": {"eval": 3},
            "scores": {"required": ["judge"]},
        })).await;
        app.accept(member("f", 0, 1.0)).await;
        app.accept(member("g", 0, 1.0)).await;
        // Training is full, and evaluation is not.
        let asked = json!({"rollouts": 8, "purpose": "eval", "suite": "s"});
        app.post("/trajectories", member("h", 0, 1.0)).await.refused(429, "backlog-full");
        let admission = app.post("/admissions", asked.clone()).await.expect(201);
        assert_eq!(admission["granted"], 3);
        let reason = app.post("/admissions", asked.clone()).await.expect(200);
        assert_eq!(reason["granted"], 0);
        assert!(text(&reason["reason"]).contains("admissions.eval"), "{reason}");
        for index in 0..3 {
            let fields = json!({"rollout_id": format!("e{index}"), "admission_id": admission["admission_id"]});
            assert_eq!(app.accept(with(eval("s", "t", 1, 1.0), fields)).await["scoring"], json!(["judge"]));
        }
        // Those that wait for scores take room, of evaluation alone.
        let full = app.post("/trajectories", eval("s", "t", 1, 1.0)).await;
        assert!(full.json.to_string().contains("admissions.eval"), "{}", full.json);
        full.refused(429, "backlog-full");
        app.post("/scores", json!({"rollout_id": "e0", "name": "judge", "value": 1.0})).await.expect(201);
        assert_eq!(app.post("/admissions", asked).await.expect(201)["granted"], 1);
    }

    async fn rollouts_that_evaluate_are_scored_like_others(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "scores": {"required": ["judge"], "reward": "scores.judge", "work": {"judge": {"per": "group"}}},
        })).await;
        app.accept(with(eval("s", "t", 1, 0.0), json!({"rollout_id": "e"}))).await;
        assert_eq!(evals(app, "").await[0]["versions"], json!([]), "nothing is decided");
        // A rollout is a whole group here, so nobody waits for others.
        let leased = app.post("/scores/leases", json!({"names": ["judge"], "request_id": "r"})).await.expect(200);
        let item = &leased["items"][0];
        assert_eq!((&item["policy"], &item["rollouts"][0]["rollout_id"]), (&json!("default"), &json!("e")));
        let again = app.post("/scores/leases", json!({"names": ["judge"], "request_id": "r"})).await.expect(200);
        assert_eq!(again["items"][0]["lease"], item["lease"]);
        let extended = app.post("/scores/leases/extend", json!({"leases": [item["lease"]]})).await.expect(200);
        assert_eq!(extended["lost"], json!([]));
        let score = json!({"rollout_id": "e", "name": "judge", "value": 1.0, "lease": item["lease"]});
        let receipt = app.post("/scores", score.clone()).await.expect(201);
        assert_eq!((&receipt["policy"], &receipt["applied"]), (&json!("default"), &json!(true)));
        assert_eq!(app.post("/scores", score).await.expect(200)["duplicate"], true);
        let version = &evals(app, "").await[0]["versions"][0];
        assert_eq!((&version["n"], &version["mean"]), (&json!(1), &json!(1.0)));
        assert_eq!(app.get("/scores?rollout_id=e").await.expect(200)["scores"][0]["name"], "judge");
        // Attempts that are used up are given back.
        app.accept(with(eval("s", "t", 1, 0.0), json!({"rollout_id": "f"}))).await;
        for _ in 0..5 {
            let leased = app.post("/scores/leases", json!({"names": ["judge"]})).await.expect(200);
            let lease = &leased["items"][0]["lease"];
            app.post("/scores", json!({"rollout_id": "f", "name": "judge", "failed": "no", "lease": lease})).await.expect(200);
        }
        assert_eq!(app.post("/scores/retry", json!({"name": "judge"})).await.expect(200)["retried"], 1);
    }

    async fn a_suite_is_waited_for(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        app.put("/policies/default/suites/s", json!({"tasks": 1, "repeats": 2})).await.expect(201);
        let waits = app.get("/policies/default/evals?wait_complete=s@1&wait_ms=60000");
        let plays = async {
            app.accept(eval("s", "t", 1, 1.0)).await;
            app.accept(eval("s", "t", 2, 1.0)).await;
            // What is of several versions does not count.
            let segment = json!({"tokens": [1, 2, 3], "loss_mask": [1, 1], "versions": [[1, 0, 1], [2, 1, 1]]});
            let mixed = with(eval("s", "t", 1, 1.0), json!({"policy_version": null, "segments": [segment]}));
            // The receipt of a repeated post says it as well.
            for status in [201, 200] {
                let receipt = app.post("/trajectories", with(rollout("mixed", 0.0), mixed.clone())).await.expect(status);
                assert!(receipt["warnings"].to_string().contains("mixed-versions"), "{receipt}");
            }
            assert_eq!(evals(app, "?suite=s&before=2").await[0]["versions"][0]["complete"], false);
            app.accept(eval("s", "t", 1, 0.0)).await;
        };
        let (waited, ()) = woken(waits, plays).await;
        let suite = &waited.expect(200)["suites"][0];
        let versions = suite["versions"].as_array().expect("versions");
        assert_eq!((versions.len(), &versions[0]["version"], &versions[0]["complete"]), (1, &json!(1), &json!(true)));
        assert_eq!((&versions[0]["n"], &versions[0]["mixed_versions"]), (&json!(2), &json!(1)));
        // In vain, the answer comes at the end of the wait.
        let in_vain = app.get("/policies/default/evals?wait_complete=s@2&wait_ms=1").await.expect(200);
        assert_eq!(in_vain["suites"][0]["versions"][0]["complete"], false);
        // So does the last score, and a suite that is to have less.
        app.rules("default", json!({"scores": {"required": ["judge"]}})).await;
        app.put("/policies/default/suites/scored", json!({"tasks": 1})).await.expect(201);
        app.accept(with(eval("scored", "t", 1, 1.0), json!({"rollout_id": "e"}))).await;
        let waits = app.get("/policies/default/evals?wait_complete=scored@1&wait_ms=60000");
        let scores = async {
            app.post("/scores", json!({"rollout_id": "e", "name": "judge", "value": 1.0})).await.expect(201);
        };
        woken(waits, scores).await;
        let waits = app.get("/policies/default/evals?wait_complete=s@2&wait_ms=60000");
        let less = async {
            app.put("/policies/default/suites/s", json!({"tasks": 1})).await.expect(200);
        };
        woken(waits, less).await;
        // Fewer tasks or repeats are complete at once.
        app.put("/policies/default/suites/s", json!({"tasks": 1})).await.expect(200);
        let complete = app.get("/policies/default/evals?wait_complete=s@2&wait_ms=30000").await.expect(200);
        assert_eq!(complete["suites"][0]["versions"][0]["complete"], true);
    }

    async fn results_stay_when_rollouts_are_gone(app: TestApp) {
        let retention = json!({"evaluated_s": 10, "tombstone_s": 10});
        app.rules("default", json!({"group": {"size": 1}, "retention": retention})).await;
        app.accept(with(eval("s", "t", 1, 1.0), json!({"rollout_id": "e"}))).await;
        app.get("/trajectories/content?rollout_id=e").await.expect(200);
        app.pass_s(11.0).await;
        app.get("/trajectories/content?rollout_id=e").await.refused(410, "purged");
        app.pass_s(11.0).await;
        app.get("/trajectories?rollout_id=e").await.refused(404, "not-found");
        assert_eq!(app.read_value("SELECT CAST(COUNT(*) AS BIGINT) FROM eval_rollout".to_owned()).await, 0);
        assert_eq!(evals(app, "").await[0]["versions"][0]["n"], 1);
        let task = &app.get("/policies/default/suites/s/tasks").await.expect(200)["tasks"][0];
        assert_eq!((&task["now"]["n"], &task["now"]["rollouts"]), (&json!(1), &json!([])));
    }

    async fn evaluations_follow_their_policy(app: TestApp) {
        app.rules("default", json!({"group": {"size": 1}})).await;
        app.accept(with(eval("s", "t", 0, 1.0), json!({"rollout_id": "e"}))).await;
        // A rollout without a version has the one that is published.
        app.put("/policies/default/version", json!({"version": 4, "step": 2})).await.expect(200);
        app.accept(json!({"purpose": "eval", "suite": "s", "reward": 1.0})).await;
        let newest = evals(app, "").await[0]["versions"][0].clone();
        assert_eq!((&newest["version"], &newest["step"]), (&json!(4), &json!(2)));
        // New rules count for rollouts that come after them.
        app.rules("default", json!({"group": {"size": 1}, "scores": {"required": ["judge"]}})).await;
        assert_eq!(app.accept(eval("s", "t", 4, 1.0)).await["scoring"], json!(["judge"]));
        // A reset begins a new curve, in which ids are free again.
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(evals(app, "").await[0]["versions"], json!([]));
        app.rules("default", json!({"group": {"size": 1}})).await;
        app.accept(with(eval("s", "t", 0, 0.5), json!({"rollout_id": "e"}))).await;
        close(&evals(app, "").await[0]["versions"][0]["mean"], 0.5);
        // What a resume undoes is forgotten with its numbers, and what was not published stays.
        app.accept(eval("s", "t", 9, 1.0)).await;
        app.post("/policies/default/resume", json!({})).await.expect(200);
        assert_eq!(evals(app, "").await[0]["versions"][0]["version"], 9);
        app.put("/policies/default/version", json!({"version": 9, "step": 3})).await.expect(200);
        app.post("/policies/default/resume", json!({"force": true})).await.expect(200);
        assert_eq!(evals(app, "").await[0]["versions"][0]["version"], 0);
        // A rollout without a reward is no result.
        let dropped = app.accept(json!({"purpose": "eval", "suite": "s", "status": "aborted"})).await;
        assert_eq!((&dropped["verdict"], &dropped["reason"]), (&json!("dropped"), &json!("no-reward")));
        assert_eq!(evals(app, "").await[0]["versions"][0]["n"], 1);
    }

    async fn sessions_evaluate(app: TestApp) {
        app.rules("default", json!({"group": {"size": 8}, "batch": {"groups": 1}})).await;
        let request = json!({"purpose": "eval", "suite": "s", "task": "t", "rollout_id": "e"});
        let opened = app.post("/sessions", request.clone()).await.expect(201);
        assert_eq!(app.post("/sessions", request.clone()).await.expect(200)["duplicate"], true);
        app.post("/sessions", with(request, json!({"task": "u"}))).await.refused(409, "session-conflict");
        assert_eq!(app.post("/sessions", json!({"purpose": "eval"})).await.pointers(422), ["/suite"]);
        let path = format!("/sessions/{}", text(&opened["session_id"]));
        let seen = app.get(&path).await.expect(200);
        assert_eq!(seen["policies"][0]["policy"], "default", "{seen}");
        let ended = app.post(&format!("{path}/finish"), json!({"status": "failed", "rewards": {"default": 1.0}})).await.expect(200);
        assert_eq!(ended["receipts"][0]["policy"], "default");
        let version = &evals(app, "").await[0]["versions"][0];
        assert_eq!((&version["n"], &version["mean"]), (&json!(1), &json!(1.0)));
        assert_eq!(app.get("/sessions?policy=default").await.expect(200)["sessions"], json!([]));
        let listed = app.get("/sessions?purpose=eval&rollout_id=e").await.expect(200);
        assert_eq!(listed["sessions"].as_array().map(Vec::len), Some(1));
    }

    async fn quotas_count_what_teams_have_and_no_lanes(app: TestApp) {
        let quota = "[[quota]]\npolicies = ['default']\nmax_policies = 1\nmax_sessions = 1\nmax_backlog_bytes = 1073741824";
        app.reconfigure(quota).await;
        let backlog = |bytes: u64| json!({"group": {"size": 1}, "backlog": {"max_bytes": bytes}});
        app.put("/policies/default", backlog(1 << 29)).await.expect(200);
        app.accept(eval("s", "t", 1, 1.0)).await;
        app.put("/policies/default", backlog(1 << 30)).await.expect(200);
        let opened = app.post("/sessions", json!({"purpose": "eval", "suite": "s"})).await.expect(201);
        app.post("/sessions", json!({})).await.refused(429, "no-room");
        app.post("/sessions", json!({"purpose": "eval", "suite": "s"})).await.refused(429, "no-room");
        app.post(&format!("/sessions/{}/abort", text(&opened["session_id"])), json!({"reason": "test"})).await.expect(200);
        app.post("/sessions", json!({})).await.expect(201);
    }

    async fn an_unknown_policy_keeps_no_other_from_being_evaluated(app: TestApp) {
        let lines = [with(eval("s", "t", 1, 1.0), json!({"policy": "typo"})), member("g", 0, 1.0), eval("s", "t", 1, 1.0)];
        let lines = [with(lines[1].clone(), json!({"policy": "typo"})), lines[0].clone(), lines[2].clone()];
        let body = lines.map(|line| line.to_string()).join("\n");
        let answers = app.http.post(format!("{}/trajectories", app.url)).header("content-type", "application/x-ndjson");
        let answers = answers.body(body).send().await.expect("an answer").text().await.expect("it arrives");
        let statuses: Vec<Value> =
            answers.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["status"].clone()).collect();
        assert_eq!(statuses, [404, 404, 201], "{answers}");
        assert_eq!(evals(app, "").await[0]["versions"][0]["n"], 1);
    }

    async fn a_reset_gives_the_room_of_evaluation_back(app: TestApp) {
        app.rules("default", json!({"group": {"size": 1}, "admissions": {"eval": 2}, "scores": {"required": ["judge"]}})).await;
        let asked = json!({"rollouts": 1, "purpose": "eval"});
        assert_eq!(app.post("/admissions", asked.clone()).await.expect(201)["granted"], 1);
        app.accept(eval("s", "t", 1, 1.0)).await;
        assert_eq!(app.post("/admissions", asked.clone()).await.expect(200)["granted"], 0);
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(app.post("/admissions", json!({"rollouts": 2, "purpose": "eval"})).await.expect(201)["granted"], 2);
    }

    async fn too_many_suites_are_refused(app: TestApp) {
        let all: Vec<Value> = (0..256).map(|index| eval(&format!("s{index}"), "t", 1, 1.0)).collect();
        app.accept(all.into()).await;
        assert_eq!(app.post("/trajectories", eval("more", "t", 1, 1.0)).await.pointers(422), ["/suite"]);
        assert_eq!(app.put("/policies/default/suites/more", json!({"tasks": 1})).await.pointers(422), ["suite"]);
        app.accept(eval("s7", "u", 1, 1.0)).await;
        app.put("/policies/default/suites/s7", json!({"tasks": 1})).await.expect(200);
    }
}
