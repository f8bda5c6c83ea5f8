//! Imports over HTTP and by the command: what the hand-made files of `imports/` become, refusals, repeats and limits.

mod command;

use std::{fs, path::PathBuf};

use forebay_wire::Role;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, on_both_stores, text};

const NDJSON: (&str, &str) = ("content-type", "application/x-ndjson");
const JSON: (&str, &str) = ("content-type", "application/json");

/// A hand-made file.
fn path(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/it/imports").join(name)
}

fn file(name: &str) -> String {
    fs::read_to_string(path(name)).expect("the file is there")
}

/// Imports a body. `target` is the format with its query.
async fn import(app: &TestApp, target: &str, body: impl Into<Vec<u8>>) -> Value {
    import_raw(app, target, NDJSON, body).await.expect(200)
}

async fn import_raw(app: &TestApp, target: &str, media: (&str, &str), body: impl Into<Vec<u8>>) -> Answer {
    app.post_raw(&format!("/imports/{target}"), &[media], body).await
}

/// What a rollout has.
async fn content(app: &TestApp, rollout_id: &str) -> Value {
    app.get(&format!("/trajectories/content?rollout_id={rollout_id}")).await.expect(200)
}

/// Line, type and pointer of each refusal.
fn refusals(report: &Value) -> Vec<(u64, String, String)> {
    let refusals = report["refusals"].as_array().expect("a report lists refusals");
    let refusal = |refusal: &Value| {
        let line = refusal["line"].as_u64().expect("a number");
        (line, text(&refusal["type"]).to_owned(), text(&refusal["pointer"]).to_owned())
    };
    refusals.iter().map(refusal).collect()
}

/// Numbers of documents, rollouts, stored ones, duplicates and refusals.
fn counts(report: &Value) -> [u64; 5] {
    ["documents", "rollouts", "stored", "duplicates", "refused"].map(|name| report[name].as_u64().expect("a number"))
}

/// Prompt, response, mask and label of the rows of the next batch.
async fn rows(app: &TestApp) -> Vec<Value> {
    let batch = app.lease_with(json!({"partial": true, "wait_ms": 0})).await;
    let segment = |row: &Value| {
        let tokens = row["tokens"].as_array().expect("every row has tokens");
        let response = row["loss_mask"].as_array().expect("every row has a mask").len();
        let (prompt, response) = tokens.split_at(tokens.len() - response);
        json!([row["rollout_id"], row["kind"], prompt, response, row["loss_mask"]])
    };
    app.samples(&batch).await.iter().map(segment).collect()
}

on_both_stores! {
    async fn an_atif_trajectory_and_its_sub_agents_are_one_rollout(app: TestApp) {
        let report = import_raw(app, "atif", JSON, file("atif-1.8.json")).await.expect(200);
        assert_eq!(counts(&report), [1, 1, 1, 0, 0], "{report}");
        let story = app.story("main-8").await;
        assert_eq!((&story["reward"], text(&story["group"]["group_id"])), (&json!(0.0), "files"));
        assert_eq!(rows(app).await, [
            json!(["main-8", "subagent", [7, 8], [9], [1]]),
            json!(["main-8", "final", [1, 2, 3], [11, 12, 13, 14], [1, 1, 0, 1]]),
        ]);
    }

    async fn every_version_of_atif_is_imported(app: TestApp) {
        app.rules("default", json!({"require": [], "group": {"size": 1}})).await;
        for minor in 0..=8 {
            let target = format!("atif?prefix={minor}/");
            let report = import_raw(app, &target, JSON, file(&format!("atif-1.{minor}.json"))).await.expect(200);
            assert_eq!(counts(&report), [1, 1, 1, 0, 0], "1.{minor}: {report}");
            let without_prompt = u64::from(minor == 3);
            assert_eq!(report["notes"]["call-without-prompt"].as_u64().unwrap_or(0), without_prompt, "1.{minor}");
        }
    }

    async fn a_refused_document_is_reported_with_its_line_and_path(app: TestApp) {
        let cases: Vec<Value> = file("atif-refused.jsonl").lines().map(|line| line.parse().expect("JSON")).collect();
        let good: Value = file("atif-1.7.json").parse().expect("JSON");
        let mut lines: Vec<String> = cases.iter().map(|case| case["document"].to_string()).collect();
        lines.push(good.to_string());
        lines.push("{torn".to_owned());
        let report = import(app, "atif", lines.join("\n")).await;
        let mut expected: Vec<_> = (1..).zip(&cases)
            .map(|(line, case)| (line, "invalid-document".to_owned(), text(&case["pointer"]).to_owned()))
            .collect();
        expected.push((lines.len() as u64, "invalid-document".to_owned(), String::new()));
        assert_eq!(refusals(&report), expected);
        assert_eq!(counts(&report), [lines.len() as u64, 1, 1, 0, cases.len() as u64 + 1]);
    }

    async fn branches_of_verifiers_are_segments_and_train_what_they_share_once(app: TestApp) {
        let report = import(app, "verifiers?group_size=2", file("verifiers.jsonl")).await;
        assert_eq!(counts(&report), [3, 3, 3, 0, 0], "{report}");
        assert_eq!(report["notes"], json!({"not-trainable": 2}));
        let story = app.story("trace-1").await;
        assert_eq!((text(&story["group"]["group_id"]), text(&story["execution_id"])), ("g0", "episode-1"));
        assert_eq!(rows(app).await[..2], [
            json!(["trace-0", "branch", [1, 2, 3], [4, 5, 6, 7], [1, 1, 0, 1]]),
            json!(["trace-0", "final", [1, 2, 3, 4, 5, 8], [9, 10], [1, 1]]),
        ]);
    }

    async fn indices_of_nemo_gym_are_groups_and_rollouts(app: TestApp) {
        let report = import(app, "nemo-gym?group_size=2&prefix=day1/", file("nemo-gym.jsonl")).await;
        assert_eq!(counts(&report), [4, 4, 4, 0, 0], "{report}");
        assert_eq!(text(&app.story("day1/0-1").await["group"]["group_id"]), "day1/0");
        assert_eq!(text(&app.story("day1/1-1-a1").await["group"]["state"]), "ready");
        let rows = rows(app).await;
        assert_eq!(rows[0], json!(["day1/0-0", "final", [1, 2, 3], [11, 12, 13, 14], [1, 1, 0, 1]]));
        let masked = self::rows(app).await;
        assert_eq!(masked[0], json!(["day1/1-0", null, [1, 2, 3, 11, 12, 13], [14], [0]]), "mask_sample trains nothing");
    }

    async fn a_half_of_a_surrogate_pair_takes_no_messages_away(app: TestApp) {
        app.rules("default", json!({"group": {"size": 1}})).await;
        for format in ["nemo-gym", "chat"] {
            let lines = file(&format!("{format}.jsonl"));
            let body = lines.lines().next().expect("it has lines").replace("\"a.txt\"", r#""caf\udce9""#);
            let report = import(app, format, body).await;
            assert_eq!((&report["refused"], &report["notes"]["surrogate-replaced"]), (&json!(0), &json!(1)), "{report}");
        }
        let mut atif: Value = file("atif-1.7.json").parse().expect("JSON");
        (atif["trajectory_id"], atif["steps"][0]["message"]) = (json!("atif-0"), json!("caf HALF"));
        let report = import(app, "atif", atif.to_string().replace(" HALF", "\\udce9")).await;
        assert_eq!((&report["refused"], &report["notes"]["surrogate-replaced"]), (&json!(0), &json!(1)), "{report}");
        for id in ["0-0", "chat-0"] {
            let content = content(app, id).await;
            let messages = content["messages"]["items"].to_string();
            assert!(messages.contains("caf\u{fffd}") && messages.contains("assistant"), "{messages}");
        }
    }

    async fn definitions_of_tools_come_with_every_format_that_has_them(app: TestApp) {
        app.rules("default", json!({"require": [], "group": {"size": 1}})).await;
        let function = json!({"name": "sh", "description": "runs", "parameters": {"type": "object"}});
        let chat = json!([{"type": "function", "function": function}]);
        let of = |name: &str| -> Value { file(name).lines().next().expect("it has lines").parse().expect("JSON") };
        let mut atif: Value = file("atif-1.7.json").parse().expect("JSON");
        atif["trajectory_id"] = json!("of-atif");
        atif["agent"]["tool_definitions"] = chat.clone();
        let mut request = of("chat.jsonl");
        request["rollout_id"] = json!("of-chat");
        request["group_id"] = json!("of-chat");
        request["request"]["tools"] = chat.clone();
        let mut text = json!({"rollout_id": "of-text", "reward": 1, "messages": [], "metadata": {"a": 1}});
        text["tools"] = chat.clone();
        let mut gym = of("nemo-gym.jsonl");
        gym["_ng_rollout_id"] = json!("of-gym");
        gym["responses_create_params"]["tools"] =
            json!([{"type": "function", "name": "sh", "description": "runs", "parameters": {"type": "object"}}]);
        let documents = [("atif", atif, "of-atif"), ("chat", request, "of-chat"), ("chat", text, "of-text"), ("nemo-gym", gym, "of-gym")];
        for (format, document, id) in documents {
            let report = import(app, format, document.to_string()).await;
            assert_eq!(report["refused"], 0, "{report}");
            let metadata = &content(app, id).await["metadata"];
            assert_eq!(metadata["tools"], chat, "{id}");
            assert!(id != "of-text" || metadata["a"] == 1, "its own metadata stays: {metadata}");
        }
    }

    async fn a_group_size_that_a_file_exceeds_is_refused_before_anything_is_stored(app: TestApp) {
        let body = file("nemo-gym.jsonl");
        let refused = import_raw(app, "nemo-gym?group_size=1", NDJSON, body.clone()).await;
        assert_eq!(refused.pointers(422), ["group_size"]);
        assert_eq!(app.get("/stats").await.json["policies"]["default"]["received"].as_i64().unwrap_or(0), 0);
        let report = import(app, "nemo-gym?group_size=1&allow_late=true", body.clone()).await;
        assert_eq!(report["verdicts"]["late"], 2, "{report}");
        let report = import(app, "nemo-gym?group_size=2&prefix=b/", body).await;
        assert_eq!(report["verdicts"]["late"], 0, "{report}");
    }

    async fn a_sample_that_must_not_be_trained_says_so_in_its_metadata(app: TestApp) {
        import(app, "nemo-gym?group_size=2", file("nemo-gym.jsonl")).await;
        assert_eq!(content(app, "1-0").await["metadata"]["record"]["mask_sample"], true);
    }

    async fn answers_of_engines_are_imported_with_their_ids(app: TestApp) {
        let report = import(app, "chat?group_size=2", file("chat.jsonl")).await;
        assert_eq!(counts(&report), [3, 3, 2, 0, 1], "{report}");
        assert_eq!(refusals(&report), [(3, "invalid".to_owned(), "/group_size".to_owned())], "it names no group");
        assert_eq!(rows(app).await, [
            json!(["chat-0", "final", [1, 2, 3], [11, 12], [1, 1]]),
            json!(["chat-1", "final", [1, 2, 3], [11, 13], [1, 1]]),
        ]);
    }

    async fn a_second_import_stores_nothing_and_another_content_conflicts(app: TestApp) {
        for format in ["chat", "nemo-gym", "verifiers"] {
            let body = file(&format!("{format}.jsonl"));
            let target = format!("{format}?prefix={format}/");
            let first = import(app, &target, body.clone()).await;
            assert_eq!(first["refused"], 0, "{first}");
            let second = import(app, &target, body).await;
            assert_eq!((&second["stored"], &second["duplicates"]), (&json!(0), &first["rollouts"]), "{format}");
        }
        let other = file("nemo-gym.jsonl").replace("\"reward\": 1.0", "\"reward\": 0.5");
        let report = import(app, "nemo-gym?prefix=nemo-gym/", other).await;
        assert_eq!(counts(&report), [4, 4, 0, 2, 2]);
        assert!(refusals(&report).iter().all(|(_, kind, _)| kind == "rollout-conflict"), "{report}");
        assert_eq!(report["refusals"][0]["rollout_id"], "nemo-gym/0-1");
    }

    async fn verdicts_and_reasons_are_counted(app: TestApp) {
        let late = import(app, "nemo-gym", file("nemo-gym.jsonl")).await;
        assert_eq!(late["verdicts"], json!({"kept": 2, "masked": 0, "dropped": 0, "late": 2}), "groups have one place");
        assert_eq!(late["reasons"], json!({"group-decided": 2}));
        let unrewarded = file("chat.jsonl").replace("\"reward\"", "\"score\"");
        let dropped = import(app, "chat?prefix=b/", unrewarded.clone()).await;
        assert_eq!((&dropped["verdicts"]["dropped"], &dropped["reasons"]), (&json!(3), &json!({"no-reward": 3})));
        let found = import(app, "chat?prefix=c/&reward_at=/score&policy=default", unrewarded).await;
        assert_eq!(found["verdicts"]["dropped"], 0, "{found}");
    }

    async fn a_body_may_be_compressed_and_long(app: TestApp) {
        let line: Value = file("chat.jsonl").lines().next().expect("it has lines").parse().expect("JSON");
        let record = |index: usize| {
            let mut line = line.clone();
            line["rollout_id"] = json!(format!("many-{index}"));
            line["group_id"] = json!(format!("many-{index}"));
            line.to_string()
        };
        let body: Vec<String> = (0..300).map(record).collect();
        let packed = zstd::encode_all(body.join("\n").as_bytes(), 1).expect("it can be compressed");
        let headers = [NDJSON, ("content-encoding", "zstd")];
        let report = app.post_raw("/imports/chat", &headers, packed).await.expect(200);
        assert_eq!(counts(&report), [300, 300, 300, 0, 0]);
    }

    async fn wrong_requests_are_refused_before_anything_is_stored(app: TestApp) {
        app.post("/imports/parquet", json!({})).await.refused(404, "not-found");
        app.post("/imports/chat?group=1", json!({})).await.refused(422, "invalid");
        assert_eq!(app.post("/imports/chat?reward_at=score", json!({})).await.pointers(422), ["reward_at"]);
        let arrow = ("content-type", "application/vnd.apache.arrow.stream");
        import_raw(app, "chat", arrow, "").await.refused(415, "unsupported-media-type");
        let read = app.key(Role::Read, &["*"]).await;
        app.post_as(&read, "/imports/chat", json!({})).await.refused(403, "forbidden");
        let other = app.key(Role::Produce, &["math.*"]).await;
        let body: Value = file("chat.jsonl").lines().next().expect("it has lines").parse().expect("JSON");
        let report = app.post_as(&other, "/imports/chat", body).await.expect(200);
        assert_eq!(refusals(&report)[0].1, "unknown-policy", "the key does not see the policy `default`");
    }

    async fn the_values_of_a_document_take_bytes_from_the_budget(app: TestApp) {
        app.reconfigure("[limits]\nbody_bytes = 65536\ninflight_bytes = 262144\n").await;
        let record = |name: &str, list: &str| {
            format!(r#"{{"rollout_id":"{name}","reward":1,"prompt_token_ids":[1],"token_ids":[1],"messages":[{list}]}}"#)
        };
        let objects = record("objects", &vec!["{}"; 4_000].join(","));
        let refused = import_raw(app, "chat", NDJSON, objects.clone()).await.refused(413, "too-large");
        assert!(text(&refused["detail"]).contains("limits.inflight_bytes"), "{refused}");
        // As many bytes in one text, as numbers, or in documents that are read one after the other.
        let numbers = vec!["0"; 6_000].join(",");
        let texts = record("text", &format!("\"{}\"", "x".repeat(objects.len() - 200)));
        let columns = format!(r#"{{"rollout_id":"ids","reward":1,"prompt_token_ids":[1],"token_ids":[{numbers}]}}"#);
        let list = vec!["{}"; 40].join(",");
        let small: Vec<_> = (0..100).map(|index| record(&format!("small-{index}"), &list)).collect();
        for (body, rollouts) in [(texts, 1), (columns, 1), (small.join("\n"), 100)] {
            assert_eq!(counts(&import(app, "chat", body).await), [rollouts, rollouts, rollouts, 0, 0]);
        }
    }
}
