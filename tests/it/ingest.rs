//! `POST /trajectories`: which posts are stored, recognised or refused.

use std::io::Write as _;

use serde_json::{Value, json};

use crate::support::{Answer, TestApp, group, member, on_both_stores, rollout, text, with};

const JSON: (&str, &str) = ("content-type", "application/json");
const NDJSON: (&str, &str) = ("content-type", "application/x-ndjson");

/// Posts a bulk body and returns its answers by line.
async fn bulk(app: &TestApp, lines: &[String]) -> Vec<Value> {
    let request = app.http.post(format!("{}/trajectories", app.url)).header(NDJSON.0, NDJSON.1).body(lines.join("\n"));
    let response = request.send().await.expect("the server answers");
    assert_eq!(response.status(), 200);
    let body = response.text().await.expect("the answer is text");
    body.lines().map(|line| serde_json::from_str(line).expect("every line is JSON")).collect()
}

on_both_stores! {
    async fn a_rollout_is_stored_once_and_recognised_after(app: TestApp) {
        let first = app.post("/trajectories", rollout("a", 1.0)).await.expect(201);
        assert_eq!((&first["verdict"], &first["duplicate"]), (&json!("kept"), &json!(false)));
        assert_eq!(first["group"], json!({"state": "ready", "arrived": 1, "size": 1}));
        let again = app.post("/trajectories", rollout("a", 1.0)).await.expect(200);
        assert_eq!(again["duplicate"], true);
        assert_eq!(app.story("a").await["state"], "ready");
    }

    async fn a_retry_may_spell_its_content_differently(app: TestApp) {
        let sent = r#"{"rollout_id":"a","status":"completed","reward":1.0,"metadata":{"x":1,"y":[0.5]},
            "segments":[{"tokens":[1,2],"loss_mask":[1],"logprobs":[-0.5]}]}"#;
        let again = r#"{"metadata":{"y":[5e-1],"x":1},"policy_name":"default","group_id":"a","group_size":1,
            "sampling":{"temperature":1},"segments":[{"rollout_log_probs":[-0.50],"loss_mask":[1],"response_length":1,
            "tokens":[1,2]}],"reward":1,"status":"completed","rollout_id":"a"}"#;
        app.post_raw("/trajectories", &[JSON], sent).await.expect(201);
        app.post_raw("/trajectories", &[JSON], again).await.expect(200);
    }

    async fn null_and_absent_fields_mean_their_defaults(app: TestApp) {
        let segments = r#""segments":[{"tokens":[1,2],"loss_mask":[1]}]"#;
        let absent = format!(r#"{{"rollout_id":"a","reward":1,{segments}}}"#);
        app.post_raw("/trajectories", &[JSON], absent).await.expect(201);
        for others in [
            r#""status":"completed","reward_components":{},"sampling":{"temperature":1,"top_p":1,"top_k":-1}"#,
            r#""status":null,"reward_components":null,"sampling":null"#,
            r#""sampling":{"temperature":null,"top_p":null,"top_k":null},"metadata":null,"messages":null"#,
        ] {
            let same = format!(r#"{{"rollout_id":"a","reward":1,{segments},{others}}}"#);
            let again = app.post_raw("/trajectories", &[JSON], same).await.expect(200);
            assert_eq!(again["duplicate"], true, "{others}");
        }
        let row = app.samples(&app.lease().await).await.remove(0);
        assert_eq!((&row["status"], &row["temperature"]), (&json!("completed"), &json!(1.0)));
        let aborted = r#"{"rollout_id":"b","status":"aborted","segments":null}"#;
        app.post_raw("/trajectories", &[JSON], aborted).await.expect(201);
        app.post_raw("/trajectories", &[JSON], aborted.replace(r#","segments":null"#, "")).await.expect(200);
        // A completed rollout must have segments.
        assert_eq!(app.post("/trajectories", json!({})).await.pointers(422), ["/segments"]);
    }

    async fn integers_of_any_length_in_metadata_are_compared_exactly(app: TestApp) {
        let with_number = |number: &str| {
            format!(r#"{{"rollout_id":"a","status":"aborted","metadata":{{"seed":{number},"other":1}}}}"#)
        };
        app.post_raw("/trajectories", &[JSON], with_number("18446744073709551617")).await.expect(201);
        app.post_raw("/trajectories", &[JSON], with_number(" 18446744073709551617 ")).await.expect(200);
        for other in ["18446744073709551616", "18446744073709551618", "1.8446744073709551617e19"] {
            let answer = app.post_raw("/trajectories", &[JSON], with_number(other)).await;
            answer.refused(409, "rollout-conflict");
        }
    }

    async fn other_content_under_a_known_name_is_a_conflict_and_changes_nothing(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        for other in [
            rollout("a", 0.5),
            with(rollout("a", 1.0), json!({"group_id": "g", "group_size": 1})),
            with(rollout("a", 1.0), json!({"metadata": {}})),
            with(rollout("a", 1.0), json!({"policy_version": 0})),
        ] {
            let problem = app.post("/trajectories", other).await.refused(409, "rollout-conflict");
            assert_eq!(problem["verdict"], "kept");
        }
        assert_eq!(app.story("a").await["reward"], 1.0);
        assert_eq!(app.get("/groups").await.expect(200)["groups"].as_array().map(Vec::len), Some(1));
    }

    async fn a_rollout_without_a_name_gets_one(app: TestApp) {
        let mut nameless = rollout("x", 1.0);
        nameless.as_object_mut().expect("a rollout is an object").remove("rollout_id");
        let first = app.accept(nameless.clone()).await;
        let second = app.accept(nameless).await;
        assert_ne!(first["rollout_id"], second["rollout_id"]);
        assert_eq!(first["group_id"], first["rollout_id"]);
    }

    async fn concurrent_identical_posts_are_stored_once(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let posts = (0..24).map(|_| app.post("/trajectories", member("g", 0, 1.0)));
        let answers = futures::future::join_all(posts).await;
        let created = answers.iter().filter(|answer| answer.status == 201).count();
        let repeated = answers.iter().filter(|answer| answer.status == 200).count();
        assert_eq!((created, repeated), (1, 23));
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["received"], 1);
    }

    async fn a_bundle_is_all_or_nothing_across_policies(app: TestApp) {
        app.rules("solver", json!({})).await;
        app.rules("judge", json!({})).await;
        let solver = with(rollout("a", 1.0), json!({"policy": "solver"}));
        let judge = with(rollout("a", 0.0), json!({"policy": "judge"}));
        let bad = with(rollout("b", 0.0), json!({"policy": "judge", "segments": [{"tokens": [1], "loss_mask": [2]}]}));
        let answer = app.post("/trajectories", json!([solver, judge, bad])).await;
        assert_eq!(answer.pointers(422), ["/2/segments/0/tokens", "/2/segments/0/loss_mask/0"]);
        let unknown = with(rollout("c", 0.0), json!({"policy": "nobody"}));
        app.post("/trajectories", json!([solver, unknown])).await.refused(404, "unknown-policy");
        app.get("/trajectories?policy=solver&rollout_id=a").await.refused(404, "not-found");
        let receipts = app.post("/trajectories", json!([solver, judge])).await.expect(201);
        assert_eq!((&receipts[0]["policy"], &receipts[1]["policy"]), (&json!("solver"), &json!("judge")));
        app.post("/trajectories", json!([solver, judge])).await.expect(200);
        // One conflict refuses the whole bundle.
        let fresh = with(rollout("d", 1.0), json!({"policy": "solver"}));
        let conflict = with(rollout("a", 0.7), json!({"policy": "judge"}));
        let answer = app.post("/trajectories", json!([fresh, conflict])).await;
        assert_eq!(answer.pointers(409), ["/1"]);
        app.get("/trajectories?policy=solver&rollout_id=d").await.refused(404, "not-found");
    }

    async fn a_bundle_with_one_new_rollout_is_created_and_repeats_inside_it_are_recognised(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let receipts = app.post("/trajectories", json!([rollout("a", 1.0), rollout("b", 1.0), rollout("b", 1.0)])).await;
        let receipts = receipts.expect(201);
        let duplicates: Vec<_> = receipts.as_array().expect("a bundle").iter().map(|r| r["duplicate"].clone()).collect();
        assert_eq!(duplicates, [true, false, true]);
        app.post("/trajectories", json!([rollout("c", 1.0), rollout("c", 0.0)])).await.refused(409, "rollout-conflict");
        app.get("/trajectories?rollout_id=c").await.refused(404, "not-found");
    }

    async fn bulk_lines_stand_alone_and_are_answered_in_order(app: TestApp) {
        let lines: Vec<String> = vec![
            rollout("a", 1.0).to_string(),
            "{\"rollout_id\": 1}".to_owned(),
            String::new(),
            rollout("a", 1.0).to_string(),
            with(rollout("b", 1.0), json!({"policy": "nobody"})).to_string(),
            rollout("a", 0.5).to_string(),
            "{".to_owned(),
            rollout("c", 1.0).to_string(),
        ];
        let answers = bulk(app, &lines).await;
        let seen: Vec<_> = answers.iter().map(|a| (a["line"].as_i64(), a["status"].as_i64())).collect();
        let expected = [(1, 201), (2, 422), (4, 200), (5, 404), (6, 409), (7, 400), (8, 201)];
        assert_eq!(seen, expected.map(|(line, status)| (Some(line), Some(status))));
        assert_eq!(answers[1]["problem"]["errors"][0]["pointer"], "/rollout_id");
        assert_eq!(answers[4]["problem"]["type"], "rollout-conflict");
        assert_eq!(answers[6]["receipt"]["rollout_id"], "c");
    }

    async fn array_order_decides_who_takes_the_last_place(app: TestApp) {
        let mut bundle = group("g", &[1.0, 0.0]);
        let extra = with(member("g", 2, 1.0), json!({"group_size": 2}));
        bundle.as_array_mut().expect("a group is an array").push(extra);
        let receipts = app.accept(bundle).await;
        assert_eq!(receipts[1]["group"]["state"], "ready");
        assert_eq!((text(&receipts[2]["verdict"]), text(&receipts[2]["reason"])), ("late", "group-decided"));
        let lines: Vec<String> = (0..3).map(|i| with(member("h", i, 1.0), json!({"group_size": 2})).to_string()).collect();
        let answers = bulk(app, &lines).await;
        let verdicts: Vec<_> = answers.iter().map(|a| text(&a["receipt"]["verdict"]).to_owned()).collect();
        assert_eq!(verdicts, ["kept", "kept", "late"]);
    }

    async fn compressed_bodies_are_taken(app: TestApp) {
        let body = rollout("z", 1.0).to_string();
        let zstd = zstd::encode_all(body.as_bytes(), 1).expect("memory compresses");
        app.post_raw("/trajectories", &[JSON, ("content-encoding", "zstd")], zstd).await.expect(201);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(body.as_bytes()).expect("memory compresses");
        let gzip = gzip.finish().expect("memory compresses");
        app.post_raw("/trajectories", &[JSON, ("content-encoding", "gzip")], gzip).await.expect(200);
        app.post_raw("/trajectories", &[JSON, ("content-encoding", "br")], body).await.refused(415, "unsupported-media-type");
        let broken = b"not gzip".to_vec();
        app.post_raw("/trajectories", &[JSON, ("content-encoding", "gzip")], broken).await.refused(400, "malformed");
    }

    async fn samples_contain_everything_that_was_sent(app: TestApp) {
        let sent = json!({
            "rollout_id": "r", "group_id": "g", "group_size": 1, "environment": "env \u{1F30A}", "status": "truncated",
            "reward": 0.1, "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
            "segments": [
                {"kind": "turn", "tokens": [0, 2_147_483_647, 7, 8], "loss_mask": [0, 1], "logprobs": [0.0, -1e-30],
                 "versions": [[3, 0, 1], [5, 1, 1]]},
                {"tokens": [1, 2], "loss_mask": [1], "teacher_logprobs": [-0.1], "values": [1.5],
                 "versions": [[4, 0, 1]]},
            ],
            "messages": [{"role": "user", "content": "\u{0} \u{7f} \u{1F600}"}, {"n": 1e2}],
            "metadata": {"b": 1.10, "a": {"nested": [null, true, "\""]}},
        });
        app.post_raw("/trajectories", &[JSON], sent.to_string()).await.expect(201);
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        assert_eq!(rows.len(), 2);
        for (row, segment) in rows.iter().zip(sent["segments"].as_array().expect("two segments")) {
            for (name, value) in segment.as_object().expect("a segment is an object") {
                if name == "logprobs" || name == "teacher_logprobs" || name == "values" {
                    let near = |v: &Value| -> Vec<f32> {
                        v.as_array().expect("an array").iter().map(|x| x.as_f64().expect("a number") as f32).collect()
                    };
                    assert_eq!(near(&row[name]), near(value), "{name}");
                } else {
                    assert_eq!(&row[name], value, "{name}");
                }
            }
            assert_eq!((&row["status"], &row["reward"]), (&sent["status"], &sent["reward"]));
            assert_eq!(row["environment"], sent["environment"]);
            assert_eq!(row["temperature"].as_f64().map(|t| t as f32), Some(0.7_f32));
            assert_eq!((row["top_p"].as_f64().map(|p| p as f32), &row["top_k"]), (Some(0.9_f32), &json!(50)));
            assert_eq!(row["policy_version"], 4, "the oldest span with a trained token");
        }
        assert_eq!((&rows[0]["messages"], &rows[0]["metadata"]), (&sent["messages"], &sent["metadata"]));
        assert_eq!((&rows[1]["messages"], &rows[1]["metadata"]), (&Value::Null, &Value::Null));
        assert_eq!((&rows[1]["segment"], &rows[1]["segments"]), (&json!(1), &json!(2)));
        assert_eq!(rows[1]["logprobs"], Value::Null);
        // The text is identical byte for byte, not only equal in value.
        let url = format!("{}{}", app.url, text(&batch["samples_url"]));
        let raw = app.http.get(url).send().await.expect("the server answers").text().await.expect("text");
        assert!(raw.contains(&format!("\"metadata\":{}", sent["metadata"])), "{raw}");
    }

    async fn messages_on_many_lines_stay_on_one_line_of_the_samples(app: TestApp) {
        let sent = json!({"rollout_id": "r", "status": "aborted", "reward": 0.5,
            "messages": [{"role": "user", "content": "two\nlines"}], "metadata": {"a": [1, {"b": null}]}});
        let pretty = serde_json::to_string_pretty(&sent).expect("a value is JSON").replace('\n', "\r\n");
        app.post_raw("/trajectories", &[JSON], pretty).await.expect(201);
        let rows = app.samples(&app.lease().await).await;
        assert_eq!((rows.len(), &rows[0]["messages"], &rows[0]["metadata"]), (1, &sent["messages"], &sent["metadata"]));
        app.post("/trajectories", sent).await.expect(200);
    }

    async fn a_long_rollout_is_delivered_row_by_row(app: TestApp) {
        let segment = json!({"tokens": [1, 2], "loss_mask": [1]});
        let messages = json!([{"role": "user", "content": "x".repeat(100_000)}]);
        let fields = json!({"segments": vec![segment; 200], "messages": messages});
        app.accept(with(rollout("long", 1.0), fields)).await;
        let rows = app.samples(&app.lease().await).await;
        assert_eq!((rows.len(), rows[199]["segment"].as_i64()), (200, Some(199)));
        assert_eq!((&rows[0]["messages"], &rows[199]["messages"]), (&messages, &Value::Null));
    }

    async fn a_rollout_that_never_generated_has_one_row_without_tokens(app: TestApp) {
        let text_only = json!({"rollout_id": "t", "status": "aborted", "reward": 0.0, "messages": [{"role": "user"}]});
        app.post("/trajectories", with(text_only.clone(), json!({"status": "completed"}))).await.expect(422);
        app.accept(text_only).await;
        let batch = app.lease().await;
        assert_eq!((&batch["samples"], &batch["tokens"]), (&json!(1), &json!(0)));
        let rows = app.samples(&batch).await;
        assert_eq!((&rows[0]["tokens"], &rows[0]["response_length"]), (&Value::Null, &json!(0)));
        assert_eq!(rows[0]["messages"], json!([{"role": "user"}]));
    }

    async fn a_policy_may_take_text_alone_or_insist_on_columns(app: TestApp) {
        app.rules("text", json!({"require": []})).await;
        app.accept(json!({"policy": "text", "rollout_id": "t", "status": "completed", "reward": 1})).await;
        app.rules("strict", json!({"require": ["tokens", "logprobs", "policy_version", "values"]})).await;
        let answer = app.post("/trajectories", with(rollout("s", 1.0), json!({"policy": "strict"}))).await;
        assert_eq!(answer.pointers(422), ["/policy_version", "/segments"]);
        let bundle = json!([with(rollout("s", 1.0), json!({"policy": "strict"}))]);
        assert_eq!(app.post("/trajectories", bundle).await.pointers(422), ["/0/policy_version", "/0/segments"]);
        let whole = json!({"policy": "strict", "rollout_id": "s", "status": "completed", "reward": 1, "policy_version": 0,
            "segments": [{"tokens": [1, 2], "loss_mask": [1], "logprobs": [0], "values": [0]}]});
        app.accept(whole).await;
    }

    async fn violations_are_named_by_pointer_and_nothing_is_stored(app: TestApp) {
        let segment = |fields: Value| {
            json!({"rollout_id": "x", "status": "completed", "reward": 1, "segments": [with(
                json!({"tokens": [1, 2, 3], "loss_mask": [1, 1]}), fields)]})
        };
        let cases = [
            (segment(json!({"loss_mask": [1, 2]})), "/segments/0/loss_mask/1"),
            (segment(json!({"loss_mask": [], "tokens": []})), "/segments/0/tokens"),
            (segment(json!({"loss_mask": [1, 0.5]})), "/segments/0/loss_mask/1"),
            (segment(json!({"logprobs": [null, -0.5]})), "/segments/0/logprobs/0"),
            (segment(json!({"logprobs": [-9999.0, -0.5]})), "/segments/0/logprobs/0"),
            (segment(json!({"loss_mask": [0, 1], "values": [null, 0.5]})), "/segments/0/values/0"),
            (segment(json!({"tokens": [1, 2]})), "/segments/0/tokens"),
            (segment(json!({"tokens": [1, -2, 3]})), "/segments/0/tokens/1"),
            (segment(json!({"tokens": [1, 2_147_483_648_u64, 3]})), "/segments/0/tokens/1"),
            (segment(json!({"tokens": [1, 2.5, 3]})), "/segments/0/tokens/1"),
            (segment(json!({"logprobs": [0.5]})), "/segments/0/logprobs"),
            (segment(json!({"logprobs": [0.5, 1e39]})), "/segments/0/logprobs/1"),
            (segment(json!({"teacher_logprobs": [0.5]})), "/segments/0/teacher_logprobs"),
            (segment(json!({"values": [0.5, 0.5, 0.5]})), "/segments/0/values"),
            (segment(json!({"advantages": [0.5, 0.5, 0.5]})), "/segments/0/advantages"),
            (segment(json!({"loss_mask": [0, 1], "advantages": [0.5, null]})), "/segments/0/advantages/1"),
            (segment(json!({"response_length": 3})), "/segments/0/response_length"),
            (segment(json!({"versions": [[1, 0, 1]]})), "/segments/0/versions"),
            (segment(json!({"versions": [[1, 0, 1], [2, 2, 1]]})), "/segments/0/versions/1/1"),
            (segment(json!({"versions": [[-1, 0, 2]]})), "/segments/0/versions/0/0"),
            (segment(json!({"versions": [[1, 0, 2], [1, 2, 0]]})), "/segments/0/versions/1/2"),
            (segment(json!({"kind": ""})), "/segments/0/kind"),
            (segment(json!({"unknown": 1})), "/segments/0/unknown"),
            (with(rollout("", 1.0), json!({})), "/rollout_id"),
            (with(rollout("x", 1.0), json!({"group_id": "a\u{1}b"})), "/group_id"),
            (with(rollout("x", 1.0), json!({"policy": "a/b"})), "/policy"),
            (with(rollout("x", 1.0), json!({"group_size": 0, "group_id": "g"})), "/group_size"),
            (with(rollout("x", 1.0), json!({"group_size": 2})), "/group_size"),
            (with(rollout("x", 1.0), json!({"policy_version": -1})), "/policy_version"),
            (with(rollout("x", 1.0), json!({"sampling": {"temperature": 0}})), "/sampling/temperature"),
            (with(rollout("x", 1.0), json!({"sampling": {"top_p": 1.5}})), "/sampling/top_p"),
            (with(rollout("x", 1.0), json!({"sampling": {"top_k": 0}})), "/sampling/top_k"),
            (with(rollout("x", 1.0), json!({"status": "done"})), "/status"),
            (with(rollout("x", 1.0), json!({"messages": {}})), "/messages"),
            (with(rollout("x", 1.0), json!({"metadata": []})), "/metadata"),
            (with(rollout("x", 1.0), json!({"reward_components": {"a/b": "x"}})), "/reward_components/a~1b"),
        ];
        for (body, pointer) in cases {
            let answer = app.post("/trajectories", body.clone()).await;
            assert_eq!(answer.pointers(422), [pointer], "{body}");
        }
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["received"], 0);
    }
}

/// One store is enough for requests that never reach it.
async fn refusals() -> TestApp {
    let config = "[limits]\nbody_bytes = 65536\ninflight_bytes = 262144\nmetadata_bytes = 1024\ntrajectory_tokens = 50";
    TestApp::start_with(crate::support::Backend::Sqlite, config).await
}

async fn post(app: &TestApp, body: &str) -> Answer {
    app.post_raw("/trajectories", &[JSON], body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_that_are_not_finite_are_named_by_their_field() {
    let app = refusals().await;
    for (token, status) in [("NaN", 400), ("Infinity", 400), ("-Infinity", 400), ("1e400", 422)] {
        let body = format!(
            r#"{{"rollout_id":"x","status":"completed","segments":[{{"tokens":[1,2,3],"loss_mask":[1,1],"logprobs":[0,{token}]}}]}}"#
        );
        let problem = post(&app, &body).await.expect(status);
        assert_eq!(problem["errors"][0]["pointer"], "/segments/0/logprobs/1", "{token}");
        let detail = text(&problem["detail"]);
        assert!(detail.contains(token) || token == "1e400", "{token}: {detail}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicate_keys_are_refused_wherever_they_stand() {
    let app = refusals().await;
    let top = r#"{"rollout_id":"x","rollout_id":"x","status":"completed"}"#;
    let alias = r#"{"rollout_id":"x","status":"completed","segments":[{"tokens":[1,2],"loss_mask":[1],"logprobs":[0],"log_probs":[0]}]}"#;
    let free = r#"{"rollout_id":"x","status":"aborted","metadata":{"a":{"k":1,"k":2}}}"#;
    let named = r#"{"rollout_id":"x","status":"aborted","reward_components":{"a/b":1,"c":2,"a/b":1}}"#;
    for (body, pointer) in
        [(top, "/rollout_id"), (alias, "/segments/0/logprobs"), (free, "/metadata"), (named, "/reward_components/a~1b")]
    {
        let problem = post(&app, body).await.expect(422);
        assert_eq!(problem["errors"][0]["pointer"], pointer, "{problem}");
        assert!(text(&problem["detail"]).contains("duplicate"), "{problem}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_that_are_too_large_or_too_deep_are_refused() {
    let app = refusals().await;
    let deep = format!(r#"{{"status":"aborted","metadata":{{"x":{}{}}}}}"#, "[".repeat(100), "]".repeat(100));
    assert_eq!(post(&app, &deep).await.pointers(422), ["/metadata"]);
    let abyss = format!(r#"{{"status":"aborted","metadata":{{"x":{}"#, "[".repeat(30_000));
    post(&app, &abyss).await.refused(400, "malformed");
    let large = json!({"status": "aborted", "metadata": {"x": "y".repeat(2_000)}});
    assert_eq!(app.post("/trajectories", large).await.pointers(422), ["/metadata"]);
    let long = json!({"status": "completed", "segments": [{"tokens": vec![1; 51], "loss_mask": [1]}]});
    assert_eq!(app.post("/trajectories", long).await.pointers(422), ["/segments"]);
    let huge = json!({"status": "aborted", "messages": ["y".repeat(70_000)]}).to_string();
    post(&app, &huge).await.refused(413, "too-large");
    let bomb = zstd::encode_all(vec![b' '; 1 << 20].as_slice(), 3).expect("memory compresses");
    assert!(bomb.len() < 1_000);
    app.post_raw("/trajectories", &[JSON, ("content-encoding", "zstd")], bomb).await.refused(413, "too-large");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bundles_and_bulk_bodies_are_bounded_in_number() {
    let app = TestApp::start(crate::support::Backend::Sqlite).await;
    let many = format!("[{}]", vec!["{\"status\":\"aborted\"}"; 4_097].join(","));
    let problem = post(&app, &many).await.expect(422);
    assert!(text(&problem["detail"]).contains("1 to 4096"), "{problem}");
    let lines = "{}\n".repeat(16_385);
    let problem = app.post_raw("/trajectories", &[NDJSON], lines).await.expect(422);
    assert!(text(&problem["detail"]).contains("at most 16384 lines"), "{problem}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_most_a_hundred_violations_are_reported() {
    let app = TestApp::start(crate::support::Backend::Sqlite).await;
    let body = json!({"status": "completed", "segments": [{"tokens": vec![-1; 300], "loss_mask": [1]}]});
    let answer = app.post("/trajectories", body).await;
    let detail = answer.json["detail"].as_str().expect("a detail");
    assert!(detail.starts_with("/segments/0/") && detail.ends_with("; 99 more in `errors`"), "{detail}");
    assert_eq!(answer.pointers(422).len(), 100);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_needs_a_supported_content_type() {
    let app = refusals().await;
    let body = rollout("x", 1.0).to_string();
    for headers in [&[][..], &[("content-type", "text/plain")][..]] {
        app.post_raw("/trajectories", headers, body.clone()).await.refused(415, "unsupported-media-type");
    }
    app.post_raw("/batches", &[("content-type", "text/plain")], "{}").await.refused(415, "unsupported-media-type");
    let form =
        app.post_raw("/trajectories", &[("content-type", "application/x-www-form-urlencoded")], body.clone()).await;
    let detail = form.json["detail"].as_str().expect("a detail").to_owned();
    assert!(detail.contains("-H 'content-type: application/json'"), "{detail}");
    app.post_raw("/trajectories", &[("content-type", "Application/JSON; charset=utf-8")], body).await.expect(201);
    post(&app, "").await.refused(400, "malformed");
    post(&app, "[]").await.refused(422, "invalid");
    post(&app, "{} {}").await.refused(400, "malformed");
    app.finish().await;
}
