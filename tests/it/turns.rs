//! Rollouts that are posted as turns: which segments they become, and when they are the same content.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, rollout, text, with};

const NDJSON: (&str, &str) = ("content-type", "application/x-ndjson");

/// The ids that open the messages of the system, the user, the assistant and a tool.
const S: i64 = 1;
const U: i64 = 2;
const A: i64 = 3;
const T: i64 = 4;
/// The newline that a chat template adds behind the stop token.
const N: i64 = 8;
/// The stop token.
const E: i64 = 9;

/// A rollout of these turns. Each turn has log-probabilities of -1, -2 and so on.
fn posted(rollout_id: &str, turns: Value) -> Value {
    let Value::Array(mut turns) = turns else { panic!("turns are an array") };
    for turn in &mut turns {
        let names = ["tokens", "token_ids", "response_token_ids", "output_ids"];
        let sampled = names.iter().find_map(|name| turn[name].as_array()).map_or(0, Vec::len);
        turn["logprobs"] = (1..=sampled).map(|place| -(place as f64)).collect();
    }
    json!({"rollout_id": rollout_id, "reward": 1.0, "turns": turns})
}

/// A delivered segment: label, prompt, response and mask.
fn segment(row: &Value) -> Value {
    let tokens = row["tokens"].as_array().expect("every row has tokens");
    let response = row["loss_mask"].as_array().expect("every row has a mask").len();
    let (prompt, response) = tokens.split_at(tokens.len() - response);
    json!([row["kind"], prompt, response, row["loss_mask"]])
}

/// Posts a rollout of turns. Returns its receipt, and the rows that a trainer gets.
async fn delivered(app: &TestApp, rollout: Value) -> (Value, Vec<Value>) {
    let receipt = app.post("/trajectories", rollout).await.expect(201);
    let batch = app.lease().await;
    let rows = app.samples(&batch).await;
    app.ack(&batch, 1).await.expect(200);
    (receipt, rows)
}

/// The counts of a receipt: calls, segments, breaks, the dropped ones and the trimmed tokens.
fn counts(calls: u32, segments: u32, breaks: u32, dropped: [u32; 3], trimmed: u32) -> Value {
    let [empty, undelivered, retry] = dropped;
    let dropped = json!({"empty": empty, "undelivered": undelivered, "retry": retry});
    json!({"calls": calls, "segments": segments, "breaks": breaks, "dropped": dropped, "trimmed": trimmed})
}

on_both_stores! {
    /// The table of docs/semantics.md.
    async fn turns_become_the_segments_of_the_worked_examples(app: TestApp) {
        let examples = [
            ("extension", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [11, 12, E], "versions": [[5, 0, 3]]},
                {"after": "c1", "prompt_tokens": [N, T, A], "tokens": [13, E], "versions": [[6, 0, 2]]},
            ]), json!([["final", [S, U, A], [11, 12, E, N, T, A, 13, E], [1, 1, 1, 0, 0, 0, 1, 1]]]),
                counts(2, 1, 0, [0, 0, 0], 0)),
            ("drift", json!([
                {"prompt_tokens": [S, U, A], "tokens": [11, 12, E]},
                {"prompt_tokens": [S, U, A, 17, E, N, T, A], "tokens": [13, E]},
            ]), json!([
                ["turn", [S, U, A], [11, 12, E], [1, 1, 1]],
                ["final", [S, U, A, 17, E, N, T, A], [13, E], [1, 1]],
            ]), counts(2, 2, 0, [0, 0, 0], 0)),
            ("reasoning", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [70, 71, 11, E]},
                {"after": "c1", "prompt_tokens": [N, T, A], "tokens": [72, 13, E]},
                {"prompt_tokens": [S, U, A, 11, E, N, T, A, 13, E, N, U, A], "tokens": [73, 14, E]},
            ]), json!([
                ["compaction", [S, U, A], [70, 71, 11, E, N, T, A, 72, 13, E], [1, 1, 1, 1, 0, 0, 0, 1, 1, 1]],
                ["final", [S, U, A, 11, E, N, T, A, 13, E, N, U, A], [73, 14, E], [1, 1, 1]],
            ]), counts(3, 2, 0, [0, 0, 0], 0)),
            ("sub-agent", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [11, E], "agent": "main"},
                {"id": "c2", "prompt_tokens": [S, 40, U, A], "tokens": [21, E], "agent": "search"},
                {"after": "c2", "prompt_tokens": [N, T, A], "tokens": [22, E], "agent": "search"},
                {"after": "c1", "prompt_tokens": [N, T, A], "tokens": [12, E], "agent": "main"},
            ]), json!([
                ["subagent", [S, 40, U, A], [21, E, N, T, A, 22, E], [1, 1, 0, 0, 0, 1, 1]],
                ["final", [S, U, A], [11, E, N, T, A, 12, E], [1, 1, 0, 0, 0, 1, 1]],
            ]), counts(4, 2, 0, [0, 0, 0], 0)),
            ("compaction", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [11, E]},
                {"id": "c2", "after": "c1", "prompt_tokens": [N, T, A], "tokens": [12, E]},
                {"after": "c2", "prompt_tokens": [N, U, A], "tokens": [30, 31, E]},
                {"prompt_tokens": [S, U, 30, 31, A], "tokens": [13, E]},
            ]), json!([
                ["compaction", [S, U, A], [11, E, N, T, A, 12, E, N, U, A, 30, 31, E],
                 [1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]],
                ["final", [S, U, 30, 31, A], [13, E], [1, 1]],
            ]), counts(4, 2, 0, [0, 0, 0], 0)),
            ("lost reply", json!([
                {"prompt_tokens": [S, U, A], "tokens": [10, E], "delivered": false},
                {"id": "c2", "prompt_tokens": [S, U, A], "tokens": [11, E]},
                {"after": "c2", "prompt_tokens": [N, T, A], "tokens": [12, E]},
                {"prompt_tokens": [S, U, A], "tokens": []},
            ]), json!([["final", [S, U, A], [11, E, N, T, A, 12, E], [1, 1, 0, 0, 0, 1, 1]]]),
                counts(4, 1, 0, [1, 1, 0], 0)),
            ("asked twice", json!([
                {"prompt_tokens": [S, U, A], "tokens": [10, E]},
                {"prompt_tokens": [S, U, A], "tokens": [11, E]},
            ]), json!([["turn", [S, U, A], [10, E], [1, 1]], ["final", [S, U, A], [11, E], [1, 1]]]),
                counts(2, 2, 0, [0, 0, 0], 0)),
            ("repeated", json!([
                {"prompt_tokens": [S, U, A], "tokens": [10, E]},
                {"prompt_tokens": [S, U, A], "tokens": [11, E], "retry_count": 1},
            ]), json!([["final", [S, U, A], [11, E], [1, 1]]]), counts(2, 1, 0, [0, 0, 1], 0)),
            ("fork", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [11, E]},
                {"after": "c1", "prompt_tokens": [N, T, 50, A], "tokens": [12, E]},
                {"after": "c1", "prompt_tokens": [N, T, 51, A], "tokens": [13, E]},
            ]), json!([
                ["compaction", [S, U, A], [11, E, N, T, 50, A, 12, E], [1, 1, 0, 0, 0, 0, 1, 1]],
                ["final", [S, U, A, 11, E, N, T, 51, A], [13, E], [1, 1]],
            ]), counts(3, 2, 0, [0, 0, 0], 0)),
            ("cut by length", json!([
                {"id": "c1", "prompt_tokens": [S, U, A], "tokens": [11, 12], "finish_reason": "length"},
                {"after": "c1", "prompt_tokens": [E, N, U, A], "tokens": [13, E], "finish_reason": "stop"},
            ]), json!([["final", [S, U, A], [11, 12, E, N, U, A, 13, E], [1, 1, 0, 0, 0, 0, 1, 1]]]),
                counts(2, 1, 0, [0, 0, 0], 0)),
            ("stop is the next opener", json!([
                {"prompt_tokens": [S, U, A], "tokens": [11, U], "stopped_on_token": true},
                {"prompt_tokens": [S, U, A, 11, T, 50, A], "tokens": [13, U], "stopped_on_token": true},
            ]), json!([["final", [S, U, A], [11, T, 50, A, 13, U], [1, 0, 0, 0, 1, 1]]]),
                counts(2, 1, 0, [0, 0, 0], 1)),
        ];
        for (name, turns, segments, assembly) in examples {
            let (receipt, rows) = delivered(app, posted(name, turns)).await;
            assert_eq!(rows.iter().map(segment).collect::<Value>(), segments, "{name}");
            assert_eq!(receipt["assembly"], assembly, "{name}");
            if name == "extension" {
                assert_eq!(rows[0]["versions"], json!([[5, 0, 3], [6, 3, 5]]));
                assert_eq!(rows[0]["logprobs"], json!([-1.0, -2.0, -3.0, 0.0, 0.0, 0.0, -1.0, -2.0]));
            }
        }
    }

    async fn the_same_turns_are_the_same_content_in_any_order_and_spelling(app: TestApp) {
        let first = json!({"id": "c1", "prompt_tokens": [1, 2], "tokens": [3, 4], "logprobs": [-0.5, -0.25]});
        let second = json!({"after": "c1", "prompt_tokens": [5], "tokens": [6], "logprobs": [-1.0]});
        let with_turns = |turns: Value| json!({"rollout_id": "a", "reward": 1.0, "turns": turns});
        let sent = with_turns(json!([first, second]));
        let receipt = app.post("/trajectories", sent.clone()).await.expect(201);
        assert_eq!(receipt["assembly"], counts(2, 1, 0, [0, 0, 0], 0));
        let spelled = json!({"id": "c1", "prompt_token_ids": [1, 2], "output_ids": [3, 4], "log_probs": [-0.5, -0.25],
            "stopped_on_token": false, "delivered": true, "agent": null});
        for same in [sent, with_turns(json!([second, first])), with_turns(json!([spelled, second]))] {
            let again = app.post("/trajectories", same).await.expect(200);
            assert_eq!((&again["duplicate"], &again["assembly"]), (&json!(true), &receipt["assembly"]));
        }
        for (field, value) in [
            ("id", json!("c2")),
            ("prompt_tokens", json!([1])),
            ("tokens", json!([3, 5])),
            ("logprobs", json!([-0.5, -0.5])),
            ("finish_reason", json!("stop")),
            ("stopped_on_token", json!(true)),
            ("agent", json!("main")),
            ("delivered", json!(false)),
        ] {
            let (mut changed, mut next) = (first.clone(), second.clone());
            changed[field] = value;
            next["after"] = changed["id"].clone();
            let answer = app.post("/trajectories", with_turns(json!([changed, next]))).await;
            answer.refused(409, "rollout-conflict");
        }
        // The segments that they became are other content.
        let segments = json!([{"kind": "final", "tokens": [1, 2, 3, 4, 5, 6], "loss_mask": [1, 1, 0, 1],
            "logprobs": [-0.5, -0.25, 0.0, -1.0]}]);
        let as_segments = json!({"rollout_id": "a", "reward": 1.0, "segments": segments});
        app.post("/trajectories", as_segments).await.refused(409, "rollout-conflict");
        // A rollout of segments has no assembly.
        let receipt = app.accept(rollout("b", 1.0)).await;
        assert_eq!(receipt.get("assembly"), None);
    }

    async fn the_rules_of_the_group_decide_whether_repeated_calls_are_trained(app: TestApp) {
        let rules = |retries: &str| json!({
            "group": {"size": 2},
            "sessions": {"retries": retries},
            "filter": [{"name": "many", "scope": "rollout", "when": "segments > 1", "action": "mask"}],
        });
        let candidates = json!([
            {"prompt_tokens": [1, 2], "tokens": [3]},
            {"prompt_tokens": [1, 2], "tokens": [4]},
            {"prompt_tokens": [1, 2], "tokens": [5], "delivered": false},
        ]);
        let (dropping, keeping) = (counts(3, 1, 0, [0, 1, 1], 0), counts(3, 2, 0, [0, 1, 0], 0));
        let member = |group: &str, index: u32| {
            with(posted(&format!("{group}-{index}"), candidates.clone()), json!({"group_id": group}))
        };
        app.rules("default", rules("keep")).await;
        let kept = app.accept(member("kept", 0)).await;
        assert_eq!((&kept["assembly"], &kept["verdict"]), (&keeping, &json!("masked")));
        // A group keeps the rules under which it was opened, also for what is recognised.
        app.rules("default", rules("drop")).await;
        let again = app.post("/trajectories", member("kept", 0)).await.expect(200);
        assert_eq!((&again["assembly"], &again["verdict"]), (&keeping, &json!("masked")));
        assert_eq!(app.accept(member("kept", 1)).await["assembly"], keeping);
        let bundle = json!([member("dropped", 0), member("kept", 0), member("dropped", 0), member("dropped", 1)]);
        let receipts = app.accept(bundle).await;
        let found: Vec<&Value> = receipts.as_array().expect("a bundle has receipts").iter().map(|one| &one["assembly"]).collect();
        assert_eq!(found, [&dropping, &keeping, &dropping, &dropping]);
        assert_eq!(receipts[0]["verdict"], "kept");
        let patch = json!({"sessions": {"retries": "keep"}});
        app.call(reqwest::Method::PATCH, "/policies/default", Some(patch)).await.expect(200);
        assert_eq!(app.get("/policies/default").await.expect(200)["rules"]["sessions"], json!({"retries": "keep"}));
        let again = app.post("/trajectories", member("dropped", 1)).await.expect(200);
        assert_eq!(again["assembly"], dropping);
        assert_eq!(app.story("dropped-0").await["segments"], 1);
        let rows = app.samples(&app.lease().await).await;
        assert_eq!(rows.iter().map(segment).collect::<Value>(), json!([["final", [1, 2], [4], [1]], ["final", [1, 2], [4], [1]]]));
        let unknown = app.put("/policies/default", json!({"sessions": {"retries": "often"}})).await;
        assert_eq!(unknown.pointers(422), ["/sessions/retries"]);
    }

    async fn a_turn_is_dropped_if_its_client_repeated_it_or_the_rules_say_so(app: TestApp) {
        let turns = json!([
            {"prompt_tokens": [1, 2], "tokens": [3]},
            {"prompt_tokens": [1, 2], "tokens": [4], "retry_count": 1},
            {"prompt_tokens": [5, 6], "tokens": [7]},
            {"prompt_tokens": [5, 6], "tokens": [8]},
        ]);
        for (retries, segments, dropped) in [("transport", 3, 1), ("last", 2, 2), ("keep", 4, 0)] {
            app.rules("default", json!({"sessions": {"retries": retries}})).await;
            let receipt = app.accept(posted(retries, turns.clone())).await;
            assert_eq!(receipt["assembly"], counts(4, segments, 0, [0, 0, dropped], 0), "{retries}");
            let warnings: Vec<&str> = receipt["warnings"].as_array().expect("a list").iter().map(text).collect();
            let is_named = |warning: &&str| {
                warning.starts_with("delivered-dropped: ") && warning.contains(&format!("({dropped})"))
            };
            let is_warned = warnings.iter().any(is_named);
            assert_eq!(is_warned, dropped > 0, "{warnings:?}");
        }
        let mut first = turns;
        first[1].as_object_mut().expect("a turn").remove("retry_count");
        app.post("/trajectories", posted("keep", first)).await.refused(409, "rollout-conflict");
    }

    async fn invalid_turns_are_refused_by_the_name_of_the_field(app: TestApp) {
        let turn = json!({"id": "c1", "prompt_tokens": [1, 2], "tokens": [3, 4], "logprobs": [-0.5, -0.25]});
        let wrong = |fields: Value| with(turn.clone(), fields);
        let other = |fields: Value| json!([turn, with(with(turn.clone(), json!({"id": "c2"})), fields)]);
        for (turns, pointers) in [
            (json!([wrong(json!({"prompt_tokens": []}))]), vec!["/turns/0/prompt_tokens"]),
            (json!([wrong(json!({"prompt_tokens": null}))]), vec!["/turns/0/prompt_tokens"]),
            (json!([wrong(json!({"prompt_tokens": [-1], "tokens": [3, -4]}))]),
             vec!["/turns/0/prompt_tokens/0", "/turns/0/tokens/1"]),
            (json!([wrong(json!({"logprobs": [-0.5]}))]), vec!["/turns/0/logprobs"]),
            (json!([wrong(json!({"logprobs": [-0.5, 0.5]}))]), vec!["/turns/0/logprobs/1"]),
            (json!([wrong(json!({"versions": [[5, 0, 1]]}))]), vec!["/turns/0/versions"]),
            (json!([wrong(json!({"versions": [[-5, 0, 2]]}))]), vec!["/turns/0/versions/0/0"]),
            (json!([wrong(json!({"id": "", "agent": "a\n", "finish_reason": ""}))]),
             vec!["/turns/0/id", "/turns/0/finish_reason", "/turns/0/agent"]),
            (other(json!({"id": "c1"})), vec!["/turns/1/id"]),
            (other(json!({"after": "c3"})), vec!["/turns/1/after"]),
            (other(json!({"after": "c2"})), vec!["/turns/1/after"]),
            (json!([wrong(json!({"after": "c2"})), wrong(json!({"id": "c2", "after": "c1"}))]),
             vec!["/turns/0/after", "/turns/1/after"]),
            (other(json!({"logprobs": null})), vec!["/turns/1/logprobs"]),
            (other(json!({"versions": [[5, 0, 2]]})), vec!["/turns/0/versions"]),
            (json!([wrong(json!({"loss_mask": [1]}))]), vec!["/turns/0/loss_mask"]),
            (json!([wrong(json!({"token_ids": [1]}))]), vec!["/turns/0/tokens"]),
            (json!([{"prompt_tokens": [1]}]), vec!["/turns/0/tokens"]),
            (json!([wrong(json!({"tokens": "3 4"}))]), vec!["/turns/0/tokens"]),
            (json!("turns"), vec!["/turns"]),
        ] {
            let answer = app.post("/trajectories", json!({"rollout_id": "a", "turns": turns})).await;
            assert_eq!(answer.pointers(422), pointers, "{turns}");
        }
        let both = with(rollout("a", 1.0), json!({"turns": [turn]}));
        let problem = app.post("/trajectories", both).await.expect(422);
        assert_eq!(problem["errors"][0]["pointer"], "/turns");
        assert!(text(&problem["errors"][0]["detail"]).contains("`segments`"), "{problem}");
        // In a bundle, pointers begin with the index.
        let bundle = json!([rollout("b", 1.0), {"turns": [wrong(json!({"prompt_tokens": []}))]}]);
        assert_eq!(app.post("/trajectories", bundle).await.pointers(422), ["/1/turns/0/prompt_tokens"]);
        // What the policy requires is asked of the turns.
        app.rules("strict", json!({"require": ["tokens", "logprobs", "policy_version"]})).await;
        let lost = json!({"policy": "strict", "turns": [{"prompt_tokens": [1], "tokens": [2], "delivered": false}]});
        let pointers = app.post("/trajectories", lost).await.pointers(422);
        assert_eq!(pointers, ["/turns", "/turns", "/policy_version"]);
        app.get("/trajectories?rollout_id=a").await.refused(404, "not-found");
    }

    async fn turns_without_versions_have_that_of_the_trajectory(app: TestApp) {
        let turns = json!([
            {"id": "c1", "prompt_tokens": [1], "tokens": [2, 3], "versions": [[5, 0, 1], [6, 1, 1]]},
            {"after": "c1", "prompt_tokens": [4], "tokens": [5]},
        ]);
        let (_, rows) = delivered(app, with(posted("a", turns), json!({"policy_version": 3}))).await;
        assert_eq!(rows[0]["versions"], json!([[5, 0, 1], [6, 1, 1], [3, 2, 2]]));
        assert_eq!(app.story("a").await["policy_version"], 3);
        let turns = json!([{"prompt_tokens": [1], "tokens": [2, 3]}]);
        let (_, rows) = delivered(app, with(posted("b", turns), json!({"policy_version": 4}))).await;
        assert_eq!((&rows[0]["versions"], &rows[0]["policy_version"]), (&Value::Null, &json!(4)));
    }

    async fn every_line_of_a_bulk_post_may_have_turns(app: TestApp) {
        let good = |id: &str| posted(id, json!([{"prompt_tokens": [1], "tokens": [2]}])).to_string();
        let bad = json!({"rollout_id": "b", "turns": [{"prompt_tokens": [], "tokens": [2]}]}).to_string();
        let body = [good("a"), bad, rollout("c", 1.0).to_string(), good("a")].join("\n");
        let request = app.http.post(format!("{}/trajectories", app.url)).header(NDJSON.0, NDJSON.1).body(body);
        let answer = request.send().await.expect("the server answers").text().await.expect("the answer is text");
        let lines: Vec<Value> = answer.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect();
        assert_eq!(lines.iter().map(|line| &line["status"]).collect::<Vec<_>>(), [201, 422, 201, 200]);
        assert_eq!(lines[1]["problem"]["errors"][0]["pointer"], "/turns/0/prompt_tokens");
        for line in [&lines[0], &lines[3]] {
            assert_eq!(line["receipt"]["assembly"], counts(1, 1, 0, [0, 0, 0], 0));
        }
    }

    /// A session of many turns costs what is new in each turn, in the body and in what is stored.
    async fn long_sessions_are_linear_in_their_turns(app: TestApp) {
        const TURNS: i64 = 1_000;
        let session = |count: i64| {
            let turn = |number: i64| {
                let prompt: Vec<i64> = (0..20).map(|place| 100 + number % 50 + place).collect();
                let mut turn = json!({"id": number.to_string(), "prompt_tokens": prompt, "tokens": [7, number % 900, 9]});
                if number > 0 {
                    turn["after"] = (number - 1).to_string().into();
                }
                turn
            };
            posted(&format!("turns-{count}"), (0..count).map(turn).collect())
        };
        let (half, whole) = (session(TURNS / 2), session(TURNS));
        assert!(whole.to_string().len() < 2 * half.to_string().len() + TURNS as usize);
        let (receipt, rows) = delivered(app, whole.clone()).await;
        assert_eq!(receipt["assembly"], counts(TURNS as u32, 1, 0, [0, 0, 0], 0));
        let row = &rows[0];
        assert_eq!(row["tokens"].as_array().map(Vec::len), Some(23 * TURNS as usize));
        let trained = row["loss_mask"].as_array().expect("a row has a mask").iter().filter(|bit| **bit == 1).count();
        assert_eq!(trained, 3 * TURNS as usize);
        assert_eq!(app.post("/trajectories", whole).await.expect(200)["duplicate"], true);
    }
}

/// Small bodies whose segments are large take from the same budget as large bodies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn segments_that_are_larger_than_their_body_are_bounded() {
    let limits =
        "[limits]\nbody_bytes = 65536\ninflight_bytes = 1048576\nsamples_bytes = 4194304\ntrajectory_tokens = 40000";
    let app = TestApp::start_with(crate::support::Backend::Sqlite, limits).await;
    // Each branch repeats the thousand ids that it shares with the others.
    let wide = |id: String, branches: usize| {
        let mut turns = vec![json!({"id": "trunk", "prompt_tokens": vec![1; 999], "tokens": [2]})];
        let branch = |number: usize| json!({"after": "trunk", "prompt_tokens": vec![3; number + 1], "tokens": [4]});
        turns.extend((0..branches).map(branch));
        posted(&id, turns.into())
    };
    let answer = app.post("/trajectories", wide("too-wide".to_owned(), 40)).await;
    assert_eq!(answer.pointers(422), ["/turns"]);
    let alone = app.post("/trajectories", wide("alone".to_owned(), 30)).await.expect(201);
    assert_eq!(alone["assembly"]["segments"], 30);
    // Two of them do not fit in the budget together: as a bundle they are refused, and in bulk they follow each other.
    let pair = [wide("a".to_owned(), 30), wide("b".to_owned(), 30)];
    app.post("/trajectories", json!(pair)).await.refused(503, "overloaded");
    let body = pair.map(|rollout| rollout.to_string()).join("\n");
    let request = app.http.post(format!("{}/trajectories", app.url)).header(NDJSON.0, NDJSON.1).body(body);
    let answer = request.send().await.expect("the server answers").text().await.expect("the answer is text");
    let statuses: Vec<Value> = answer
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("a line is JSON")["status"].clone())
        .collect();
    assert_eq!(statuses, [201, 201]);
    app.finish().await;
}
