//! Rollouts as producers write them: truth values and floats where numbers are expected, missing log-probabilities,
//! columns of other widths, and answers of which nothing was sampled.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BooleanArray, Float64Array, Int64Array, ListArray, StringViewArray,
    builder::StringViewBuilder,
    cast::AsArray as _,
    types::{Float32Type, Float64Type, Int32Type, Int64Type, UInt8Type},
};
use forebay_wire::ARROW_STREAM;
use serde_json::{Value, json};

use crate::{
    arrow::{Columns, columns, stream},
    support::{Answer, Backend, TestApp, member, on_both_stores, rollout, text, with},
};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn post_arrow(app: &TestApp, columns: Columns) -> Answer {
    app.post_raw("/trajectories", &[("content-type", ARROW_STREAM)], stream(&[columns])).await
}

/// A rollout with one segment.
fn of_segment(rollout_id: &str, segment: &Value) -> Value {
    with(rollout(rollout_id, 1.0), json!({"segments": [segment]}))
}

fn list<T: arrow_array::ArrowPrimitiveType>(items: Vec<Option<T::Native>>) -> ArrayRef {
    Arc::new(ListArray::from_iter_primitive::<T, _, _>([Some(items)]))
}

/// The columns of a rollout with one segment, some of which are replaced.
fn replaced(rollout: &Value, others: Columns) -> Columns {
    let mut found = columns(std::slice::from_ref(rollout));
    found.retain(|(name, _)| others.iter().all(|(other, _)| other != name));
    found.into_iter().chain(others).collect()
}

/// Columns with the same values in other types: 64-bit numbers, floats in the mask, and views of texts.
fn widened(columns: Columns) -> Columns {
    let wide = |(name, array): (&'static str, ArrayRef)| -> (&'static str, ArrayRef) {
        let lists = |wide: &dyn Fn(&ArrayRef) -> Vec<f64>| {
            let lists = array.as_list::<i32>();
            lists.iter().map(|items| items.map(|items| wide(&items))).collect::<Vec<_>>()
        };
        let array: ArrayRef = match name {
            "tokens" => {
                let wide =
                    |items: &ArrayRef| items.as_primitive::<Int32Type>().values().iter().map(|&id| id.into()).collect();
                let ids = lists(&wide).into_iter().map(|ids| ids.map(|ids| ids.into_iter().map(|id| Some(id as i64))));
                Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(ids))
            }
            "loss_mask" => {
                let wide = |items: &ArrayRef| {
                    items.as_primitive::<UInt8Type>().values().iter().map(|&bit| bit.into()).collect()
                };
                let bits = lists(&wide).into_iter().map(|bits| bits.map(|bits| bits.into_iter().map(Some)));
                Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(bits))
            }
            "logprobs" | "values" | "advantages" => {
                let wide = |items: &ArrayRef| {
                    items.as_primitive::<Float32Type>().values().iter().map(|&one| one.into()).collect()
                };
                let floats = lists(&wide).into_iter().map(|floats| floats.map(|floats| floats.into_iter().map(Some)));
                Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(floats))
            }
            "reward" => {
                let rewards = array.as_primitive::<Float64Type>().iter();
                Arc::new(rewards.map(|reward| reward.map(|reward| reward as i64)).collect::<Int64Array>())
            }
            _ => match array.as_string_opt::<i32>() {
                Some(texts) => Arc::new(texts.iter().collect::<StringViewArray>()),
                None => array,
            },
        };
        (name, array)
    };
    columns.into_iter().map(wide).collect()
}

on_both_stores! {
    async fn a_reward_may_be_a_truth_value_in_every_form(app: TestApp) {
        let spelled = |reward: &str, fields: &str| {
            format!(r#"{{"rollout_id":"a","reward":{reward},"reward_components":{{"tests":{reward}}},{fields}
                "segments":[{{"tokens":[1,2],"loss_mask":[1]}}]}}"#)
        };
        app.post_raw("/trajectories", &[JSON], spelled("1.0", "")).await.expect(201);
        app.post_raw("/trajectories", &[JSON], spelled("true", "")).await.expect(200);
        // A name with an escape is left to the general parser.
        app.post_raw("/trajectories", &[JSON], spelled("true", r#""stat\u0075s":"completed","#)).await.expect(200);
        let sent = with(of_segment("a", &json!({"tokens": [1, 2], "loss_mask": [1]})), json!({"reward_components": {"tests": true}}));
        let reward: ArrayRef = Arc::new(BooleanArray::from(vec![true]));
        post_arrow(app, replaced(&sent, vec![("reward", reward)])).await.expect(200);
        let row = app.samples(&app.lease().await).await.remove(0);
        assert_eq!(row["reward"], json!(1.0));
        let text = app.post("/trajectories", with(rollout("b", 1.0), json!({"reward": "1"}))).await;
        assert_eq!(text.pointers(422), ["/reward"]);
    }

    async fn log_probabilities_are_ignored_where_the_mask_is_0(app: TestApp) {
        let with_logprobs = |logprobs: Value| of_segment("a", &json!({
            "tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 0], "logprobs": logprobs, "teacher_logprobs": logprobs}));
        app.post("/trajectories", with_logprobs(json!([null, -0.5, -9999.0]))).await.expect(201);
        app.post("/trajectories", with_logprobs(json!([0.0, -0.5, -9999.0]))).await.expect(200);
        let plain = with_logprobs(json!([0.0, -0.5, -9999.0]));
        for missing in [None, Some(f32::NEG_INFINITY), Some(f32::NAN)] {
            let logprobs = || list::<Float32Type>(vec![missing, Some(-0.5), Some(-9999.0)]);
            let others = vec![("logprobs", logprobs()), ("teacher_logprobs", logprobs())];
            post_arrow(app, replaced(&plain, others)).await.expect(200);
        }
        let trained = list::<Float32Type>(vec![Some(0.0), None, Some(-0.5)]);
        assert_eq!(post_arrow(app, replaced(&plain, vec![("logprobs", trained)])).await.pointers(422), ["/0/segments/0/logprobs/1"]);
        let row = app.samples(&app.lease().await).await.remove(0);
        assert_eq!((&row["logprobs"], &row["teacher_logprobs"]), (&json!([0.0, -0.5, -9999.0]), &json!([0.0, -0.5, -9999.0])));
    }

    async fn a_mask_may_be_floats(app: TestApp) {
        let with_mask = |mask: Value| of_segment("a", &json!({"tokens": [1, 2, 3], "loss_mask": mask}));
        app.post("/trajectories", with_mask(json!([1, 0]))).await.expect(201);
        app.post("/trajectories", with_mask(json!([1.0, 0.0]))).await.expect(200);
        let plain = with_mask(json!([1, 0]));
        let mask = |other: f32| vec![("loss_mask", list::<Float32Type>(vec![Some(1.0), Some(other)]))];
        post_arrow(app, replaced(&plain, mask(0.0))).await.expect(200);
        assert_eq!(post_arrow(app, replaced(&plain, mask(0.5))).await.pointers(422), ["/0/loss_mask"]);
        let trained = app.samples(&app.lease().await).await.remove(0);
        assert_eq!(trained["loss_mask"], json!([1, 0]));
    }

    async fn arrow_columns_may_be_wider_and_views(app: TestApp) {
        let long = "a text that is too long to be in its view";
        let sent = json!([
            with(member("g", 0, 1.0), json!({"metadata": {"k": long}, "execution_id": long, "segments": [
                {"kind": "turn", "tokens": [1, 2, 3], "loss_mask": [0, 1], "logprobs": [-0.1, -0.25], "values": [0.1, 1.5],
                 "advantages": [0.0, 0.1]},
                {"kind": long, "tokens": [4, 5], "loss_mask": [1], "logprobs": [-0.7], "values": [2.0], "advantages": [-0.3]},
            ]})),
            with(member("g", 1, 0.0), json!({"execution_id": long})),
        ]);
        let rollouts = sent.as_array().expect("a bundle").clone();
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.post("/trajectories", sent).await.expect(201);
        let receipts = post_arrow(app, widened(columns(&rollouts))).await.expect(200);
        assert!(receipts.as_array().expect("receipts").iter().all(|receipt| receipt["duplicate"] == true), "{receipts}");
        let plain = with(rollouts[1].clone(), json!({"rollout_id": "other", "group_id": "other"}));
        let ids = list::<Int64Type>(vec![Some(1), Some(1 << 31), Some(2)]);
        let refused = post_arrow(app, replaced(&plain, vec![("tokens", ids)])).await.expect(422);
        assert!(text(&refused["detail"]).starts_with("/0/tokens: contains 2147483648, which is out of range"), "{refused}");
        let whole = Float64Array::from(vec![1.0]);
        assert_eq!(post_arrow(app, replaced(&plain, vec![("top_k", Arc::new(whole))])).await.pointers(422), ["/top_k"]);
    }

    async fn views_of_the_same_bytes_do_not_multiply_them(app: TestApp) {
        let mut texts = StringViewBuilder::new();
        let json = format!(r#"{{"k":"{}"}}"#, "x".repeat(10_000));
        let block = texts.append_block(json.clone().into_bytes().into());
        for _ in 0..100 {
            texts.try_append_view(block, 0, json.len() as u32).expect("it is in the block");
        }
        let texts: ArrayRef = Arc::new(texts.finish());
        let refused = post_arrow(app, vec![("metadata", texts)]).await;
        assert_eq!(refused.pointers(422), ["/metadata"]);
    }

    async fn an_empty_response_votes_and_trains_nothing(app: TestApp) {
        app.rules("default", json!({"require": ["tokens", "logprobs"], "group": {"size": 4}})).await;
        let empty = |index: usize, fields: Value| with(with(member("g", index, 0.0), json!({"segments": null})), fields);
        let segment = json!({"tokens": [1, 2, 3], "loss_mask": []});
        let mut one = member("g", 0, 1.0);
        one["segments"][0]["logprobs"] = json!([-0.5, -0.5]);
        app.accept(one).await;
        let receipt = app.accept(empty(1, json!({"segments": [segment], "status": "truncated"}))).await;
        assert_eq!((&receipt["verdict"], receipt["warnings"].as_array().map(Vec::len)), (&json!("kept"), Some(1)), "{receipt}");
        let again = empty(1, json!({"segments": [with(segment.clone(), json!({"logprobs": []}))], "status": "truncated"}));
        app.post("/trajectories", again).await.refused(409, "rollout-conflict");
        let same = empty(1, json!({"segments": [with(segment, json!({"response_length": 0}))], "status": "truncated"}));
        post_arrow(app, columns(&[same])).await.expect(200);
        // The calls of an agent may all be empty, too.
        let turns = json!([{"prompt_tokens": [1, 2], "tokens": [], "finish_reason": "stop"}]);
        let receipt = app.accept(empty(2, json!({"turns": turns}))).await;
        assert_eq!((&receipt["verdict"], &receipt["assembly"]["dropped"]["empty"]), (&json!("kept"), &json!(1)), "{receipt}");
        let messages = empty(3, json!({"messages": []}));
        assert_eq!(app.post("/trajectories", messages).await.pointers(422), ["/segments", "/segments"]);
        let last = with(member("g", 3, 0.0), json!({"segments": [{"tokens": [1, 2], "loss_mask": [1], "logprobs": [-1]}]}));
        app.accept(last).await;

        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        let advantage = |row: &Value| row["advantage"].as_f64().expect("a number");
        // The mean of all four rewards is 1/4, and their standard deviation 1/2.
        for (row, expected) in rows.iter().zip([1.5, -0.5, -0.5, -0.5]) {
            assert!((advantage(row) - expected).abs() < 1e-4, "{row}");
        }
        let shapes: Vec<Value> = rows.iter().map(|row| json!([row["tokens"], row["response_length"], row["loss_mask"]])).collect();
        assert_eq!(shapes[1..3], [json!([[1, 2, 3], 0, []]), json!([null, 0, null])]);
        let weight = |row: &Value| row["loss_weight"].as_f64().expect("a number");
        assert_eq!((weight(&rows[0]), weight(&rows[3])), (1.0 / 8.0, 1.0 / 4.0), "all four rollouts count");
        assert_eq!((&batch["samples"], &rows[1]["verdict"]), (&json!(4), &json!("kept")));
        let shards = app.get(&format!("/batches/{}?shards=4", text(&batch["batch_id"]))).await.expect(200);
        assert!(shards["shards"].as_array().expect("shards").iter().all(|shard| shard["samples"] == 1), "{shards}");
        let exported = app.http.get(format!("{}/exports?policy=default", app.url)).send().await.expect("the service answers");
        let exported = exported.text().await.expect("the export ends well");
        assert!(exported.contains(r#""loss_mask":[]"#), "{exported}");
        app.ack(&batch, 1).await.expect(200);
    }

    async fn half_a_surrogate_pair_is_replaced_with_a_warning(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        let replaced_in = |receipt: &Value| {
            let warnings = receipt["warnings"].as_array().expect("a receipt has warnings");
            warnings.iter().map(|warning| text(warning).split(" contained").next().expect("a text").to_owned()).collect::<Vec<_>>()
        };
        for (rollout_id, field, named) in [
            ("a", r#""messages":[{"role":"user"},{"role":"tool","content":"caf\udce9"}]"#, "messages"),
            ("b", r#""metadata":{"k":"caf\udce9"}"#, "metadata"),
            ("c", r#""metadata":{"\ud83d":1},"messages":[{"content":"\ud83d"}]"#, "messages and metadata"),
        ] {
            let sent = with_half(rollout_id, field);
            let receipt = app.post_raw("/trajectories", &[JSON], sent.clone()).await.expect(201);
            assert_eq!(replaced_in(&receipt), [format!("lone-surrogates: {named}")], "{receipt}");
            // The digest is of what is stored.
            app.post_raw("/trajectories", &[JSON], sent.clone()).await.expect(200);
            let whole = sent.replace("\\udce9", "\u{fffd}").replace("\\ud83d", "\\uFFFD");
            let receipt = app.post_raw("/trajectories", &[JSON], whole).await.expect(200);
            assert_eq!(replaced_in(&receipt), [""; 0], "{receipt}");
        }
        let messages: ArrayRef = crate::arrow::texts([Some(r#"[{"content":"caf\udce9"}]"#.to_owned())]);
        let receipts = post_arrow(app, replaced(&rollout("d", 1.0), vec![("messages", messages)])).await.expect(201);
        assert_eq!(replaced_in(&receipts[0]), ["lone-surrogates: messages"]);
        let whole = with_half("e", r#""messages":[{"content":"\ud83d\ude00"}]"#);
        assert_eq!(replaced_in(&app.post_raw("/trajectories", &[JSON], whole).await.expect(201)), [""; 0]);
        let id = with_half("f\\ud83d", r#""metadata":{}"#);
        assert_eq!(app.post_raw("/trajectories", &[JSON], id).await.pointers(400), ["/rollout_id"], "an id is no text");
    }
}

/// A rollout with a field in which there may be half of a surrogate pair.
fn with_half(rollout_id: &str, field: &str) -> String {
    format!(r#"{{"rollout_id":"{rollout_id}","reward":1,{field},"segments":[{{"tokens":[1,2],"loss_mask":[1]}}]}}"#)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_a_surrogate_pair_is_refused_by_name_if_the_configuration_says_so() {
    let app = TestApp::start_with(Backend::Sqlite, "[text]\nlone_surrogates = \"refuse\"\n").await;
    for (field, pointer, shown) in [
        (r#""messages":[{"role":"user"},{"role":"tool","content":"caf\udce9"}]"#, "/messages", r"caf\udce9"),
        (r#""messages":[{"content":"\ud83d"}]"#, "/messages", r"\ud83d"),
        (r#""metadata":{"k":"caf\udce9"}"#, "/metadata", r"caf\udce9"),
    ] {
        let answer = app.post_raw("/trajectories", &[JSON], with_half("a", field)).await;
        let detail = text(&answer.json["errors"][0]["detail"]).to_owned();
        assert!(detail.contains("half of a surrogate pair") && detail.contains(shown), "{detail}");
        assert_eq!(answer.pointers(422), [pointer]);
    }
    let messages: ArrayRef = crate::arrow::texts([Some(r#"[{"content":"caf\udce9"}]"#.to_owned())]);
    let refused = post_arrow(&app, replaced(&rollout("a", 1.0), vec![("messages", messages)])).await;
    assert_eq!(refused.pointers(422), ["/0/messages"]);
    app.finish().await;
}
