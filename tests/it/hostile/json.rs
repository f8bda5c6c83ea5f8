//! JSON that is deep, endless, ambiguous or invalid.

use serde_json::json;

use super::unharmed;
use crate::support::{Answer, Backend, TestApp, on_both_stores, text};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn post(app: &TestApp, body: impl Into<Vec<u8>>) -> Answer {
    app.post_raw("/trajectories", &[JSON], body).await
}

/// A rollout whose fields are written as they are.
fn with_field(field: &str, raw: &str) -> String {
    format!(r#"{{"rollout_id":"x","status":"aborted","{field}":{raw}}}"#)
}

/// A rollout with one segment whose columns are written as they are.
fn with_columns(columns: &str) -> String {
    format!(r#"{{"rollout_id":"x","status":"completed","reward":1,"segments":[{{{columns}}}]}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_thousand_brackets_are_refused_wherever_they_stand() {
    let app = TestApp::start(Backend::Sqlite).await;
    let (open, close) = ("[".repeat(100_000), "]".repeat(100_000));
    let objects = format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
    let fields =
        ["messages", "metadata", "segments", "reward_components", "sampling", "reward", "rollout_id", "unknown"];
    for field in fields {
        for deep in [format!("{open}{close}"), open.clone(), objects.clone()] {
            let answer = post(&app, with_field(field, &deep)).await;
            assert!(matches!(answer.status.as_u16(), 400 | 422), "{field}: {}", answer.json);
        }
    }
    for body in [format!("{open}{close}"), open.clone(), objects.clone(), with_columns(&format!("\"tokens\":{open}"))] {
        assert!(matches!(post(&app, body).await.status.as_u16(), 400 | 422));
    }
    for (path, body) in
        [("/batches", objects.clone()), ("/groups/close", open.clone()), ("/policies/default/resume", open)]
    {
        let answer = app.post_raw(path, &[JSON], body).await;
        assert!(matches!(answer.status.as_u16(), 400 | 413 | 422), "{path}: {}", answer.json);
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_filter_of_brackets_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    for when in
        ["(".repeat(100_000), "!".repeat(4_000), "(".repeat(4_000), "[".repeat(4_000), "1+".repeat(2_000) + "1 == 1"]
    {
        let rules = json!({"filter": [{"name": "deep", "scope": "rollout", "when": when, "action": "drop"}]});
        app.put("/policies/default", rules).await.refused(422, "invalid");
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_that_no_field_holds_are_refused_by_pointer() {
    let app = TestApp::start(Backend::Sqlite).await;
    let columns = |name: &str, value: &str| {
        let plain = [("tokens", "[1,2,3]"), ("loss_mask", "[1,1]")].into_iter().filter(|(plain, _)| *plain != name);
        let plain: Vec<String> = plain.map(|(plain, value)| format!("\"{plain}\":{value}")).collect();
        with_columns(&format!("{},\"{name}\":{value}", plain.join(",")))
    };
    let cases = [
        (with_field("policy_version", "9223372036854775808"), 422, "/policy_version"),
        (with_field("policy_version", "3.0"), 422, "/policy_version"),
        (with_field("policy_version", "1e3"), 422, "/policy_version"),
        (with_field("policy_version", "-0"), 422, "/policy_version"),
        (with_field("policy_version", "\"3\""), 422, "/policy_version"),
        (with_field("policy_version", "true"), 422, "/policy_version"),
        (with_field("group_size", "4294967296"), 422, "/group_size"),
        (with_field("reward", "1e400"), 422, "/reward"),
        (with_field("reward", "-1e400"), 422, "/reward"),
        (with_field("reward", "NaN"), 400, "/reward"),
        (with_field("reward", "-Infinity"), 400, "/reward"),
        (with_field("reward", "01"), 400, ""),
        (with_field("reward", "1."), 400, ""),
        (with_field("reward", ".5"), 400, ""),
        (with_field("reward", "+1"), 400, ""),
        (with_field("reward", "0x10"), 400, ""),
        (with_field("reward", "{\"$serde_json::private::RawValue\":\"1\"}"), 422, "/reward"),
        (with_field("reward_components", "{\"a\":1e400}"), 422, "/reward_components/a"),
        (with_field("metadata", "{\"a\":1e400}"), 422, "/metadata"),
        (with_field("metadata", "{\"a\":NaN}"), 400, ""),
        (with_field("sampling", "{\"temperature\":1e39}"), 422, "/sampling/temperature"),
        (with_field("sampling", "{\"top_k\":2147483648}"), 422, "/sampling/top_k"),
        (columns("tokens", "[1,2,3.0]"), 422, "/segments/0/tokens/2"),
        (columns("tokens", "[1,2,9223372036854775808]"), 422, "/segments/0/tokens/2"),
        (columns("tokens", "[1,2,-0]"), 422, "/segments/0/tokens/2"),
        (columns("loss_mask", "[1,256]"), 422, "/segments/0/loss_mask/1"),
        (columns("loss_mask", "[1,true]"), 422, "/segments/0/loss_mask/1"),
        (columns("logprobs", "[0,1e39]"), 422, "/segments/0/logprobs/1"),
        (columns("logprobs", "[0,-3.5e38]"), 422, "/segments/0/logprobs/1"),
        (columns("logprobs", "[0,null]"), 422, "/segments/0/logprobs/1"),
        (columns("versions", "[[0,0,9223372036854775807],[0,9223372036854775807,1]]"), 422, "/segments/0/versions"),
        (columns("versions", "[[9223372036854775808,0,2]]"), 422, "/segments/0/versions/0/0"),
        (columns("response_length", "4294967295"), 422, "/segments/0/response_length"),
    ];
    for (body, status, pointer) in cases {
        let answer = post(&app, body.clone()).await;
        assert_eq!(
            (answer.status.as_u16(), answer.clone().pointers(status)[0].starts_with(pointer)),
            (status, true),
            "{body}: {}",
            answer.json
        );
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_at_the_edge_of_their_fields_come_back_as_they_were() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = r#"{"rollout_id":"edge","status":"completed","reward":-0.0,"policy_version":9223372036854775807,
        "reward_components":{"a":1.7976931348623157e308,"b":5e-324},"sampling":{"temperature":3.4e38,"top_k":2147483647},
        "metadata":{"a":18446744073709551615,"b":-9223372036854775808,"c":-0,"d":1e-400,"e":123456789012345678901234567890},
        "segments":[{"tokens":[2147483647,0],"loss_mask":[0],"logprobs":[-3.4028234e38],"values":[1e-46]}]}"#;
    post(&app, body).await.expect(201);
    post(&app, body).await.expect(200);
    let rows = app.samples(&app.lease().await).await;
    assert_eq!(rows[0]["policy_version"], json!(9_223_372_036_854_775_807_i64));
    assert_eq!(rows[0]["tokens"], json!([2_147_483_647, 0]));
    assert_eq!(rows[0]["logprobs"][0].as_f64().map(|value| value as f32), Some(f32::MIN));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_versions_and_epochs_may_be_as_large_as_a_number() {
    let app = TestApp::start(Backend::Sqlite).await;
    for number in [i64::MIN, -1, i64::MAX] {
        let calls = [
            app.put("/policies/default/version", json!({"version": number, "step": number, "force": true})).await,
            app.post("/policies/default/checkpoints", json!({"step": number})).await,
            app.post("/policies/default/checkpoints", json!({"step": 0, "epoch": number})).await,
            app.post("/policies/default/resume", json!({"step": number})).await,
            app.post("/batches", json!({"epoch": number})).await,
            app.get(&format!("/policies/default?wait_version_above={number}")).await,
            app.get(&format!("/trajectories?after={number}&step={number}")).await,
            app.get(&format!("/groups?after={number}")).await,
        ];
        for answer in calls {
            assert!(answer.status.as_u16() < 500, "{number}: {}", answer.json);
        }
    }
    app.post("/policies/default/reset", json!({})).await.expect(200);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_that_is_not_unicode_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    for field in ["rollout_id", "environment", "group_id", "policy"] {
        for raw in [r#""\ud800""#, r#""\udc00\ud800""#, r#""\ud800\u0041""#, r#""\x41""#, "\"\u{1}\"", "\"a\nb\""] {
            let body = format!(r#"{{"status":"aborted","{field}":{raw}}}"#);
            let answer = post(&app, body).await;
            assert!(matches!(answer.status.as_u16(), 400 | 422), "{field} {raw:?}: {}", answer.json);
        }
    }
    let mut bytes = with_field("messages", "[\"#\"]").into_bytes();
    let at = bytes.iter().position(|byte| *byte == b'#').expect("the mark is there");
    for wrong in [&b"\xff"[..], b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\xe2\x82"] {
        let mut body = bytes.clone();
        body.splice(at..=at, wrong.iter().copied());
        post(&app, body).await.refused(400, "malformed");
    }
    bytes.splice(0..0, *b"\xef\xbb\xbf");
    post(&app, bytes).await.refused(400, "malformed");
    let utf_16: Vec<u8> = with_field("reward", "1").encode_utf16().flat_map(u16::to_le_bytes).collect();
    post(&app, utf_16).await.refused(400, "malformed");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trailing_text_and_truncated_values_are_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = with_field("reward", "1");
    for cut in 1..body.len() {
        post(&app, &body.as_bytes()[..cut]).await.refused(400, "malformed");
    }
    for tail in ["{}", ",", "]", "\u{0}", "//", "/* */", "\u{feff}"] {
        let answer = post(&app, format!("{body}{tail}")).await;
        assert!(matches!(answer.status.as_u16(), 400 | 422), "{tail:?}: {}", answer.json);
    }
    for body in ["null", "1", "\"x\"", "[null]", "[[]]", "[1]", "{", "[", "\u{0}", "{\"\":1}", "[{},]"] {
        let answer = post(&app, body).await;
        assert!(matches!(answer.status.as_u16(), 400 | 422), "{body:?}: {}", answer.json);
    }
    app.get("/trajectories?rollout_id=x").await.refused(404, "not-found");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn numbers_over_the_token_limit_are_refused_before_they_are_held() {
    let config = "[limits]\nbody_bytes = 16777216\ninflight_bytes = 67108864\ntrajectory_tokens = 1000";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    let zeros = format!("[{}0]", "0,".repeat(4_000_000));
    // The rest is not JSON, so a parser that reads it has not stopped at the limit.
    for column in ["tokens", "loss_mask", "logprobs", "teacher_log_probs", "values"] {
        let body = format!("{},\u{0}", with_columns(&format!("\"{column}\":{zeros}")).trim_end_matches("}]}"));
        let problem = post(&app, body).await.refused(422, "invalid");
        assert!(text(&problem["detail"]).contains("at most 1000 tokens"), "{column}: {problem}");
    }
    let spans = format!(
        "{},\u{0}",
        with_columns(&format!("\"versions\":[{}", "[0,0,0],".repeat(1_000_000))).trim_end_matches("}]}")
    );
    let problem = post(&app, spans).await.refused(422, "invalid");
    assert!(text(&problem["detail"]).contains("at most 1000 tokens"), "{problem}");
    let segments = r#"{"tokens":[],"loss_mask":[]},"#.repeat(500_000);
    let problem = post(&app, format!(r#"{{"status":"completed","segments":[{segments}"#)).await.refused(422, "invalid");
    assert!(text(&problem["detail"]).contains("at most 4096 segments"), "{problem}");
    // In a bundle, the limits apply to each trajectory; the pointer names the one that exceeds them.
    let bundle = format!("[{{\"status\":\"aborted\"}},{}", with_columns(&format!("\"tokens\":{zeros}")));
    assert_eq!(post(&app, bundle).await.pointers(422), ["/1/segments"]);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_with_a_million_keys_are_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let keys = (0..1_000_000).map(|index| format!("\"{index}\":0,")).collect::<Vec<_>>().concat();
    let object = format!("{{{keys}\"end\":0}}");
    let problem = post(&app, with_field("messages", &format!("[{object}]"))).await.refused(422, "invalid");
    assert_eq!(problem["errors"][0]["pointer"], "/messages");
    let problem = post(&app, with_field("reward_components", &object)).await.refused(422, "invalid");
    assert_eq!(problem["errors"][0]["pointer"], "/reward_components");
    post(&app, with_field("metadata", &object)).await.refused(422, "invalid");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_in_place_of_an_object_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    for (path, body) in [
        ("/policies/default/reset", "[]"),
        ("/policies/default/resume", "[null]"),
        ("/policies/default/checkpoints", "[1]"),
        ("/batches", "[]"),
        ("/groups/close", r#"["default","g"]"#),
        ("/trajectories", r#"[["default","r","g",1,"e",0,null,"aborted"]]"#),
        ("/trajectories", r#"{"status":"aborted","segments":[["final",[1,2],[1]]]}"#),
    ] {
        app.post_raw(path, &[JSON], body).await.refused(422, "invalid");
    }
    for body in ["", "null", "{}"] {
        app.post_raw("/policies/default/reset", &[JSON], body).await.expect(200);
    }
    unharmed(app).await;
}

on_both_stores! {
    async fn zeros_in_text_come_back_and_are_kept_from_columns(app: TestApp) {
        let body = r#"{"rollout_id":"nul","status":"aborted","reward":1,"messages":["\u0000","a\u0000b"],"metadata":{"\u0000":"\u0000"}}"#;
        post(app, body).await.expect(201);
        let rows = app.samples(&app.lease().await).await;
        assert_eq!((&rows[0]["messages"], &rows[0]["metadata"]), (&json!(["\0", "a\0b"]), &json!({"\0": "\0"})));
        for field in ["rollout_id", "group_id", "policy", "environment", "execution_id", "admission_id"] {
            assert_eq!(post(app, format!(r#"{{"status":"aborted","{field}":"\u0000"}}"#)).await.pointers(422)[0], format!("/{field}"));
        }
        let component = r#"{"status":"aborted","reward_components":{"\u0000":1}}"#;
        post(app, component).await.refused(422, "invalid");
        let when = json!({"filter": [{"name": "zero", "scope": "rollout", "when": "environment == '\u{0}'", "action": "drop"}]});
        assert!(app.put("/policies/default", when).await.status.as_u16() < 500);
        for (path, body) in [
            ("/batches", json!({"consumer": "\0"})),
            ("/batches", json!({"request_id": "\0"})),
            ("/batches", json!({"policy": "\0"})),
            ("/groups/close", json!({"policy": "default", "group_id": "\0"})),
            ("/groups/discard", json!({"policy": "default", "group_id": "a", "reason": "\0"})),
        ] {
            app.post(path, body.clone()).await.refused(422, "invalid");
        }
        app.put("/policies/default/version", json!({"version": 1, "uri": "\0"})).await.refused(422, "invalid");
    }
}
