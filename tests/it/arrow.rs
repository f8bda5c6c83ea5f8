//! Arrow streams in both directions: the same rollouts, verdicts, errors and digests as JSON.

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, Float32Array, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray,
    StructArray, UInt8Array,
    cast::AsArray as _,
    types::{Float32Type, Float64Type, Int32Type, Int64Type, UInt8Type, UInt32Type},
};
use arrow_buffer::OffsetBuffer;
use arrow_ipc::{reader::StreamReader, writer::StreamWriter};
use arrow_schema::{DataType, Field, Schema};
use forebay_wire::ARROW_STREAM;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, group, on_both_stores, rollout, text, with};

pub(crate) type Columns = Vec<(&'static str, ArrayRef)>;

/// A stream of one record batch for each set of columns.
pub(crate) fn stream(batches: &[Columns]) -> Vec<u8> {
    let batch = |columns: &Columns| {
        let fields = columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true));
        let arrays = columns.iter().map(|(_, array)| Arc::clone(array)).collect();
        RecordBatch::try_new(Arc::new(Schema::new(fields.collect::<Vec<_>>())), arrays).expect("columns of one length")
    };
    let batches: Vec<RecordBatch> = batches.iter().map(batch).collect();
    let mut writer = StreamWriter::try_new(Vec::new(), batches[0].schema_ref()).expect("the schema can be streamed");
    for batch in &batches {
        writer.write(batch).expect("memory can be written");
    }
    writer.into_inner().expect("the stream ends")
}

pub(crate) fn texts(cells: impl IntoIterator<Item = Option<String>>) -> ArrayRef {
    Arc::new(cells.into_iter().collect::<StringArray>())
}

fn ids(lists: &[Option<&[i32]>]) -> ArrayRef {
    let lists = lists.iter().map(|list| list.map(|list| list.iter().copied().map(Some)));
    Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(lists))
}

fn bits(lists: &[Option<&[u8]>]) -> ArrayRef {
    let lists = lists.iter().map(|list| list.map(|list| list.iter().copied().map(Some)));
    Arc::new(ListArray::from_iter_primitive::<UInt8Type, _, _>(lists))
}

fn floats(lists: &[Option<&[f32]>]) -> ArrayRef {
    let lists = lists.iter().map(|list| list.map(|list| list.iter().copied().map(Some)));
    Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(lists))
}

fn spans(rows: &[Value]) -> ArrayRef {
    let of = |row: &Value| row["versions"].as_array().cloned().unwrap_or_default();
    let all: Vec<Value> = rows.iter().flat_map(of).collect();
    let part =
        |place: usize| -> ArrayRef { Arc::new(all.iter().map(|span| span[place].as_i64()).collect::<Int64Array>()) };
    let field = |name| Arc::new(Field::new(name, DataType::Int64, true));
    let structs =
        StructArray::from(vec![(field("version"), part(0)), (field("start"), part(1)), (field("length"), part(2))]);
    let item = Arc::new(Field::new_list_field(structs.data_type().clone(), true));
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| of(row).len()));
    let present = rows.iter().map(|row| !row["versions"].is_null()).collect();
    Arc::new(ListArray::new(item, lengths, Arc::new(structs), Some(present)))
}

fn turns(rows: &[Value]) -> ArrayRef {
    let of = |row: &Value| row["turns"].as_array().cloned().unwrap_or_default();
    let all: Vec<Value> = rows.iter().flat_map(of).collect();
    let numbers =
        |name: &str| -> ArrayRef { Arc::new(all.iter().map(|turn| turn[name].as_i64()).collect::<Int64Array>()) };
    let rewards: ArrayRef = Arc::new(all.iter().map(|turn| turn["reward"].as_f64()).collect::<Float64Array>());
    let states = texts(all.iter().map(|turn| turn["state_key"].as_str().map(str::to_owned)));
    let field = |name: &str, of: &ArrayRef| Arc::new(Field::new(name, of.data_type().clone(), true));
    let (starts, lengths) = (numbers("start"), numbers("length"));
    let columns = [("start", starts), ("length", lengths), ("reward", rewards), ("state_key", states)];
    let structs = StructArray::from(columns.map(|(name, column)| (field(name, &column), column)).to_vec());
    let item = Arc::new(Field::new_list_field(structs.data_type().clone(), true));
    let lengths = OffsetBuffer::from_lengths(rows.iter().map(|row| of(row).len()));
    let present = rows.iter().map(|row| !row["turns"].is_null()).collect();
    Arc::new(ListArray::new(item, lengths, Arc::new(structs), Some(present)))
}

/// The columns of trajectories in JSON: one row per segment.
pub(crate) fn columns(bundle: &[Value]) -> Columns {
    let mut rows = Vec::new();
    for trajectory in bundle {
        let segments = trajectory["segments"].as_array().cloned().unwrap_or_default();
        let whole = |place: Value| with(trajectory.clone(), json!({"segment": place, "segments": null}));
        if segments.is_empty() {
            rows.push(whole(json!(0)));
        }
        rows.extend(segments.into_iter().enumerate().map(|(place, segment)| with(whole(json!(place)), segment)));
    }
    let column = |name: &'static str| -> (&'static str, ArrayRef) {
        let text = |row: &Value| match &row[name] {
            Value::Null => None,
            Value::String(text) => Some(text.clone()),
            json => Some(json.to_string()),
        };
        let numbers = |row: &Value| row[name].as_array().cloned();
        let array: ArrayRef = match name {
            "group_size" | "policy_version" | "segment" => {
                Arc::new(rows.iter().map(|row| row[name].as_i64()).collect::<Int64Array>())
            }
            "reward" => Arc::new(rows.iter().map(|row| row[name].as_f64()).collect::<Float64Array>()),
            "tokens" => Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>(rows.iter().map(|row| {
                numbers(row).map(|list| list.into_iter().map(|id| id.as_i64().map(|id| id as i32)).collect::<Vec<_>>())
            }))),
            "loss_mask" => Arc::new(ListArray::from_iter_primitive::<UInt8Type, _, _>(rows.iter().map(|row| {
                numbers(row)
                    .map(|list| list.into_iter().map(|bit| bit.as_i64().map(|bit| bit as u8)).collect::<Vec<_>>())
            }))),
            "logprobs" | "values" | "advantages" => {
                Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows.iter().map(|row| {
                    numbers(row).map(|list| list.into_iter().map(|p| p.as_f64().map(|p| p as f32)).collect::<Vec<_>>())
                })))
            }
            "versions" => spans(&rows),
            "turns" => turns(&rows),
            _ => texts(rows.iter().map(text)),
        };
        (name, array)
    };
    [
        "rollout_id",
        "group_id",
        "group_size",
        "environment",
        "execution_id",
        "purpose",
        "suite",
        "task",
        "policy_version",
        "status",
        "reward",
        "reward_components",
        "segment",
        "kind",
        "tokens",
        "loss_mask",
        "logprobs",
        "values",
        "advantages",
        "versions",
        "turns",
        "messages",
        "metadata",
    ]
    .map(column)
    .into()
}

pub(crate) async fn post(app: &TestApp, body: Vec<u8>) -> Answer {
    app.post_raw("/trajectories", &[("content-type", ARROW_STREAM)], body).await
}

/// Writes a cell as the JSON rows do.
fn cell(array: &dyn Array, row: usize) -> Value {
    if array.is_null(row) {
        return Value::Null;
    }
    match array.data_type() {
        DataType::Utf8 => json!(array.as_string::<i32>().value(row)),
        DataType::Int32 => json!(array.as_primitive::<Int32Type>().value(row)),
        DataType::Int64 => json!(array.as_primitive::<Int64Type>().value(row)),
        DataType::UInt8 => json!(array.as_primitive::<UInt8Type>().value(row)),
        // The shortest number that identifies the float32, as in the JSON rows.
        DataType::Float32 => {
            json!(array.as_primitive::<Float32Type>().value(row).to_string().parse::<f64>().expect("a number"))
        }
        DataType::Float64 => json!(array.as_primitive::<Float64Type>().value(row)),
        DataType::List(_) => {
            let items = array.as_list::<i32>().value(row);
            (0..items.len()).map(|index| cell(&items, index)).collect()
        }
        DataType::Struct(_) => array.as_struct().columns().iter().map(|column| cell(column, row)).collect(),
        other => panic!("no column is {other}"),
    }
}

/// The rows of a batch, read as Arrow and written as JSON.
async fn rows(app: &TestApp, url: &str) -> Vec<Value> {
    let answer = app.http.get(format!("{}{url}", app.url)).header("accept", ARROW_STREAM).send().await;
    let answer = answer.expect("the server answers");
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["content-type"]),
        (200, &ARROW_STREAM.parse().expect("a value"))
    );
    read(&answer.bytes().await.expect("the stream ends well"))
}

/// The rows of a stream, as JSON.
fn read(body: &[u8]) -> Vec<Value> {
    let batches = StreamReader::try_new(body, None).expect("a stream begins with its schema");
    let mut rows = Vec::new();
    for batch in batches {
        let batch = batch.expect("the stream is whole");
        rows.extend((0..batch.num_rows()).map(|row| {
            let field = |(field, array): (&Arc<Field>, &ArrayRef)| {
                let value = cell(array, row);
                let is_json = matches!(field.name().as_str(), "messages" | "metadata" | "media") && !value.is_null();
                let value = if is_json { serde_json::from_str(text(&value)).expect("JSON as sent") } else { value };
                (field.name().clone(), value)
            };
            // Rows of JSON do not have this field where no medium stands.
            let is_there = |(name, value): &(String, Value)| name != "media" || !value.is_null();
            let fields = batch.schema_ref().fields().iter().zip(batch.columns()).map(field);
            fields.filter(is_there).collect::<Value>()
        }));
    }
    rows
}

/// Rollouts that use every column.
fn bundle() -> Vec<Value> {
    let second = json!({"kind": "final", "tokens": [4, 5, 6, 7], "loss_mask": [0, 1], "logprobs": [-1e-7, -0.7],
        "values": [0.5, 0.25], "versions": [[3, 0, 1], [4, 1, 1]]});
    let mut all: Vec<Value> = group("g", &[1.0, 0.0]).as_array().cloned().unwrap_or_default();
    all[0] = with(
        all[0].clone(),
        json!({"environment": "e", "execution_id": "x", "reward_components": {"tests": 1.0},
        "messages": [{"role": "user", "content": "hä"}], "metadata": {"b": 1, "a": [null, "x"]}}),
    );
    all[0]["segments"].as_array_mut().expect("segments are an array").push(second);
    all[1]["policy_version"] = json!(2);
    all.push(json!({"rollout_id": "lone", "status": "aborted", "reward": 0.5}));
    all
}

/// Rollouts of more than a megabyte together. They differ in the number of their segments, and these in their lengths
/// and columns.
fn large() -> Vec<Value> {
    let segment = |index: usize| {
        let response = 1 + index * 379 % 2_000;
        let floats =
            |of: usize| (0..response).map(|at| -((at * 31 + index + of) as f64 % 97.0) / 8.0).collect::<Vec<_>>();
        let mut segment = json!({
            "tokens": (0..=response + index % 5).map(|at| at * 7_919 % 150_000).collect::<Vec<_>>(),
            "loss_mask": (0..response).map(|at| usize::from(!(at + index).is_multiple_of(3))).collect::<Vec<_>>(),
        });
        for (name, is_there) in [
            ("logprobs", !index.is_multiple_of(4)),
            ("teacher_logprobs", index.is_multiple_of(3)),
            ("values", index.is_multiple_of(5)),
            ("advantages", true),
        ] {
            if is_there {
                segment[name] = json!(floats(name.len()));
            }
        }
        segment
    };
    let rollout = |index: usize| {
        json!({
            "rollout_id": format!("r{index:02}"), "reward": 1.0,
            "status": if index.is_multiple_of(4) { "failed" } else { "completed" },
            "segments": (0..index % 4).map(|at| segment(4 * index + at)).collect::<Vec<_>>(),
        })
    };
    (0..80).map(rollout).collect()
}

on_both_stores! {
    async fn a_large_page_has_every_column_as_it_was_sent(app: TestApp) {
        app.rules("default", json!({"require": [], "batch": {"groups": 80}, "advantage": "posted"})).await;
        app.accept(large().into()).await;
        let advantages = |segment: &Value| {
            let (Some(sent), Some(mask)) = (segment["advantages"].as_array(), segment["loss_mask"].as_array()) else {
                return Value::Null;
            };
            let of_token = |(sent, bit): (&Value, &Value)| if *bit == json!(1) { sent.clone() } else { json!(0.0) };
            sent.iter().zip(mask).map(of_token).collect()
        };
        let batch = app.lease().await;
        let url = text(&batch["samples_url"]);
        let expected: Vec<Value> = large().iter().flat_map(|rollout| {
            let segments = rollout["segments"].as_array().expect("segments are an array");
            let absent = [json!({})];
            let segments = if segments.is_empty() { &absent } else { &segments[..] };
            let row = |segment: &Value| json!([rollout["rollout_id"], segment["tokens"], segment["loss_mask"],
                segment["logprobs"], segment["teacher_logprobs"], segment["values"], advantages(segment)]);
            segments.iter().map(row).collect::<Vec<_>>()
        }).collect();
        for rows in [rows(app, url).await, app.samples(&batch).await] {
            let row = |row: &Value| json!([row["rollout_id"], row["tokens"], row["loss_mask"],
                row["logprobs"], row["teacher_logprobs"], row["values"], row["advantages"]]);
            assert_eq!(rows.len(), expected.len());
            for (found, expected) in rows.iter().map(row).zip(&expected) {
                assert!(found == *expected, "{} differs", found[0]);
            }
        }
        let (_, stream) = app.samples_as(&batch, &[("accept", ARROW_STREAM)]).await;
        let batches = StreamReader::try_new(stream.as_slice(), None).expect("a stream begins with its schema").count();
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(batches, processors.min(4), "a record batch for each block");
    }

    async fn a_rollout_is_the_same_in_either_form(app: TestApp) {
        app.rules("default", json!({"require": [], "group": {"size": 1}, "batch": {"groups": 2}})).await;
        let answer = post(app, stream(&[columns(&bundle())])).await.expect(201);
        let receipts = answer.as_array().expect("a bundle has receipts");
        assert_eq!(receipts.iter().map(|receipt| text(&receipt["rollout_id"])).collect::<Vec<_>>(), ["g-0", "g-1", "lone"]);
        // A retry in the other format is recognised, whichever came first, and different content is a conflict.
        let again = app.post("/trajectories", Value::Array(bundle())).await.expect(200);
        assert!(again.as_array().expect("receipts").iter().all(|receipt| receipt["duplicate"] == true), "{again}");
        let other = with(rollout("later", 1.0), json!({"metadata": {"a": 1}}));
        app.post("/trajectories", other.clone()).await.expect(201);
        post(app, stream(&[columns(std::slice::from_ref(&other))])).await.expect(200);
        // An absent status means `completed` in both formats.
        let without_status = with(other.clone(), json!({"status": null}));
        post(app, stream(&[columns(std::slice::from_ref(&without_status))])).await.expect(200);
        app.post("/trajectories", without_status).await.expect(200);
        let changed = with(other, json!({"metadata": {"a": 2}}));
        post(app, stream(&[columns(&[changed])])).await.refused(409, "rollout-conflict");

        let batch = app.lease().await;
        let url = text(&batch["samples_url"]);
        let expected = app.samples(&batch).await;
        assert_eq!(expected.len(), 4, "two segments, one, and a rollout without any");
        assert_eq!(rows(app, url).await, expected);
        let shards = [rows(app, &format!("{url}?shard=0&shards=2")).await, rows(app, &format!("{url}?shard=1&shards=2")).await];
        assert_eq!(shards.concat().len(), 4);
    }

    /// Without a column, a field cannot be sent as Arrow, and its reader finds nothing instead of failing.
    async fn every_field_of_a_trajectory_has_a_column(app: TestApp) {
        let document: Value = serde_json::from_str(&forebay_api::openapi()).expect("the document is JSON");
        for schema in ["Trajectory", "Segment", "Sampling"] {
            let fields = document["components"]["schemas"][schema]["properties"].as_object().expect("an object");
            // A row is a segment, and has the fields of `sampling` as columns. Turns are only sent as JSON.
            for name in fields.keys().filter(|name| !["segments", "sampling", "turns"].contains(&name.as_str())) {
                let answer = post(app, stream(&[vec![(name.clone().leak(), texts([None]))]])).await;
                assert!(!answer.json.to_string().contains("is not a supported column"), "{name}");
            }
        }
    }

    async fn messages_and_metadata_are_on_the_first_row_of_their_rollout_in_every_form(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 2}})).await;
        let segment = json!({"tokens": [1, 2], "loss_mask": [1]});
        let long = |id: &str| with(rollout(id, 1.0), json!({
            "segments": vec![segment.clone(); 3], "messages": [{"role": "user", "content": id}], "metadata": {"of": id}
        }));
        app.accept(json!([long("a"), long("b")])).await;
        let batch = app.lease().await;
        let (_, array) = app.samples_as(&batch, &[("accept", "application/json")]).await;
        let array: Vec<Value> = serde_json::from_slice(&array).expect("an array of rows");
        for rows in [app.samples(&batch).await, array, rows(app, text(&batch["samples_url"])).await] {
            let found: Vec<_> = rows.iter().map(|row| (&row["segment"], &row["messages"][0]["content"], &row["metadata"]["of"])).collect();
            let null = &Value::Null;
            let of = |id| [(&json!(0), id, id), (&json!(1), null, null), (&json!(2), null, null)].map(|(n, m, o)| (n.clone(), m, o));
            let (a, b) = (json!("a"), json!("b"));
            let expected: Vec<_> = of(&a).into_iter().chain(of(&b)).collect();
            assert_eq!(found.iter().map(|(n, m, o)| ((*n).clone(), *m, *o)).collect::<Vec<_>>(), expected);
            assert_eq!((&rows[1]["messages"], &rows[2]["metadata"]), (null, null));
        }
        let mut without = batch.clone();
        without["samples_url"] = format!("{}?messages=false", text(&batch["samples_url"])).into();
        for found in [app.samples(&without).await, rows(app, text(&without["samples_url"])).await] {
            assert!(found.iter().all(|row| row["messages"].is_null()), "{found:?}");
            assert_eq!((found.len(), &found[3]["metadata"]["of"]), (6, &json!("b")));
        }
    }

    async fn a_rollouts_json_may_be_on_its_first_row_alone(app: TestApp) {
        let segment = json!({"tokens": [1, 2], "loss_mask": [1]});
        let sent = with(rollout("a", 1.0), json!({
            "segments": vec![segment; 2], "messages": [{"role": "user"}], "metadata": {"k": 1}
        }));
        app.accept(sent.clone()).await;
        let mut once = columns(&[sent]);
        once.retain(|(name, _)| !matches!(*name, "messages" | "metadata"));
        once.push(("messages", texts([Some(r#"[{"role":"user"}]"#.to_owned()), None])));
        once.push(("metadata", texts([Some(r#"{"k":1}"#.to_owned()), None])));
        post(app, stream(&[once.clone()])).await.expect(200);
        once.pop();
        once.push(("metadata", texts([None, Some(r#"{"k":1}"#.to_owned())])));
        assert_eq!(post(app, stream(&[once])).await.pointers(422), ["/0/metadata"]);
    }

    async fn an_empty_shard_is_a_stream_without_rows(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        let shards = [0, 1].map(|shard| format!("{}?shard={shard}&shards=2", text(&batch["samples_url"])));
        let counts = [rows(app, &shards[0]).await.len(), rows(app, &shards[1]).await.len()];
        assert_eq!(counts.iter().sum::<usize>(), 1);
    }

    async fn pages_have_record_batches_and_bodies_may_have_many(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 700}})).await;
        let slices: Vec<Columns> = (0..7)
            .map(|slice| columns(&(0..100).map(|index| rollout(&format!("r{slice}{index:02}"), 1.0)).collect::<Vec<_>>()))
            .collect();
        let receipts = post(app, stream(&slices)).await.expect(201);
        assert_eq!(receipts.as_array().map(Vec::len), Some(700));
        let batch = app.lease().await;
        assert_eq!(rows(app, text(&batch["samples_url"])).await, app.samples(&batch).await);
    }

    async fn a_compressed_stream_has_the_same_rows(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 700}})).await;
        let rollouts: Vec<Value> = (0..700).map(|index| rollout(&format!("r{index:03}"), 1.0)).collect();
        app.accept(rollouts.into()).await;
        let batch = app.lease().await;
        let headers = [("accept", ARROW_STREAM), ("accept-encoding", "zstd")];
        let (coding, sent) = app.samples_as(&batch, &headers).await;
        let body = zstd::decode_all(sent.as_slice()).expect("a zstd frame");
        assert!(coding == "zstd" && sent.len() < body.len() / 2, "{coding}: {} of {} bytes", sent.len(), body.len());
        assert_eq!(read(&body), app.samples(&batch).await);
    }

    async fn a_bad_cell_is_named_and_nothing_is_stored(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        let base = || columns(&bundle());
        let replaced = |name: &'static str, array: ArrayRef| {
            let mut columns = base();
            columns.retain(|(column, _)| *column != name);
            columns.push((name, array));
            columns
        };
        let text_of = |cells: [&str; 4]| texts(cells.map(|cell| Some(cell.to_owned())));
        let (three, four): (&[i32], &[i32]) = (&[1, 2, 3], &[4, 5, 6, 7]);
        for (columns, pointer) in [
            (replaced("status", text_of(["completed", "completed", "completed", "done"])), "/2/status"),
            (replaced("status", text_of(["completed", "failed", "completed", "aborted"])), "/0/status"),
            (replaced("reward", Arc::new(Float64Array::from(vec![1.0, 0.5, 0.0, 0.5]))), "/0/reward"),
            (replaced("reward", Arc::new(Float64Array::from(vec![1.0, 1.0, f64::NAN, 0.5]))), "/1/reward"),
            (replaced("execution_id", text_of(["x", "y", "x", "x"])), "/0/execution_id"),
            (replaced("segment", Arc::new(Int32Array::from(vec![0, 2, 0, 0]))), "/0/segment"),
            (replaced("segment", Arc::new(Int32Array::from(vec![1, 1, 0, 0]))), "/0/segment"),
            (replaced("group_size", Arc::new(Int64Array::from(vec![1 << 40; 4]))), "/0/group_size"),
            (replaced("metadata", text_of(["{}", "{}", "{", "{}"])), "/1/metadata"),
            (replaced("tokens", ids(&[Some(three), Some(four), Some(&[1, -2, 3]), None])), "/1/segments/0/tokens/1"),
            (replaced("loss_mask", bits(&[Some(&[1, 1]), Some(&[0, 2]), Some(&[1, 1]), None])), "/0/segments/1/loss_mask/1"),
            (replaced("reward_components", text_of(["{}", "{}", r#"{"a":1,"a":2}"#, "{}"])), "/1/reward_components"),
            (replaced("kind", text_of(["a", "b", "c", "d"])), "/2/kind"),
            (replaced("logprobs", floats(&[Some(&[-0.5, -0.5]), Some(&[-1.0, -1.0]), Some(&[0.0, 0.0]), Some(&[-0.5])])), "/2/logprobs"),
            (replaced("response_length", Arc::new(Int32Array::from(vec![2, 2, 2, 2]))), "/2/response_length"),
            (replaced("loss_mask", Arc::new(UInt8Array::from(vec![1; 4]))), "/loss_mask"),
            (replaced("tokens", Arc::new(Int64Array::from(vec![1; 4]))), "/tokens"),
            (replaced("advantage", Arc::new(Float32Array::from(vec![1.0; 4]))), "/advantage"),
        ] {
            assert_eq!(post(app, stream(&[columns])).await.pointers(422)[0], pointer);
        }
        let null = ListArray::from_iter_primitive::<Int32Type, _, _>(vec![Some(vec![Some(1), None, Some(3)]); 4]);
        assert_eq!(post(app, stream(&[replaced("tokens", Arc::new(null))])).await.pointers(422), ["/0/tokens"]);
        assert_eq!(app.get("/trajectories").await.expect(200)["trajectories"], json!([]));
    }

    async fn a_row_without_tokens_that_says_anything_of_a_segment_is_refused_by_column(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        let last = || floats(&[None, None, None, Some(&[-0.5])]);
        let no_spans = || json!({});
        for (name, array) in [
            ("kind", texts([None, None, None, Some("turn".to_owned())])),
            ("logprobs", last()),
            ("teacher_logprobs", last()),
            ("values", last()),
            ("advantages", last()),
            ("versions", spans(&[no_spans(), no_spans(), no_spans(), json!({"versions": [[1, 0, 1]]})])),
            ("response_length", Arc::new(Int32Array::from(vec![None, None, None, Some(1)]))),
        ] {
            let mut columns = columns(&bundle());
            columns.retain(|(column, _)| *column != name);
            columns.push((name, array));
            assert_eq!(post(app, stream(&[columns])).await.pointers(422), [format!("/2/{name}")]);
        }
        assert_eq!(app.get("/trajectories").await.expect(200)["trajectories"], json!([]));
    }

    async fn a_broken_stream_is_refused_wherever_it_breaks(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        let whole = stream(&[columns(&bundle())]);
        for end in (0..whole.len() - 8).step_by(37) {
            let answer = post(app, whole[..end].to_vec()).await;
            assert!(matches!(answer.status.as_u16(), 400 | 422), "cut at {end}: {} {}", answer.status, answer.json);
        }
        for at in (0..whole.len()).step_by(11) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            let answer = post(app, damaged).await;
            assert!(answer.status.as_u16() < 500, "flipped at {at}: {} {}", answer.status, answer.json);
            let said = answer.json.to_string();
            for word in ["Ipc error", "Invalid argument", "Parser error", "Range [", "Arrow error", "Utf8", "DataType"] {
                assert!(!said.contains(word), "flipped at {at}: {said}");
            }
        }
        post(app, b"[]".to_vec()).await.refused(400, "malformed");
    }

    async fn errors_of_a_stream_are_explained_in_terms_of_arrow(app: TestApp) {
        let base = || columns(&bundle());
        let replaced = |name: &'static str, array: ArrayRef| {
            let mut columns = base();
            columns.retain(|(column, _)| *column != name);
            columns.push((name, array));
            stream(&[columns])
        };
        let text_of = |cells: [&str; 4]| texts(cells.map(|cell| Some(cell.to_owned())));
        let nested = ListArray::from_iter_primitive::<UInt32Type, _, _>(vec![Some(vec![Some(1)]); 4]);
        for (body, detail) in [
            (replaced("status", text_of(["completed", "completed", "completed", "done"])), "/2/status: `done` is not one of the allowed values: `completed`, "),
            (replaced("metadata", text_of(["{}", "{}", "{\"a\": ", "{}"])), "/1/metadata: the text ends before the value is complete (line 1, column "),
            (replaced("messages", text_of(["[]", "[]", "5", "[]"])), "/1/messages: must be an array"),
            (replaced("reward_components", text_of(["{}", "{}", "{\"a\": \"high\"}", "{}"])), "/1/reward_components: must be a number, not the text \"high\" (line 1, column "),
            (replaced("loss_mask", Arc::new(nested)), "/loss_mask: must be a list of uint8, int8, int32, int64, float32 or float64, not list<uint32>"),
            (replaced("reward", Arc::new(UInt8Array::from(vec![1; 4]))), "/reward: must be float64, float32, int64, int32 or bool, not uint8"),
            (replaced("policy", Arc::new(UInt8Array::from(vec![1; 4]))), "/policy: must be utf8, not uint8"),
        ] {
            let problem = post(app, body).await.expect(422);
            assert!(text(&problem["detail"]).starts_with(detail), "{problem}");
        }
        let whole = stream(&[base(), base()]);
        let cut = &whole[..whole.len() - 30];
        let followed = [&whole[..], &whole[..]].concat();
        let mut damaged = whole.clone();
        damaged[16..64].fill(0xff);
        let no_schema = "the schema at its beginning cannot be read: it is damaged, or the body is not an Arrow stream";
        for (body, detail) in [
            (b"ARROW1\0\0".to_vec(), "it is an Arrow file: write a stream (in Python, pyarrow.ipc.new_stream)"),
            (b"PAR1, or anything else".to_vec(), "it ends in the middle of a message"),
            (cut.to_vec(), "it ends in the middle of a message"),
            (followed, "there is extra data after its end"),
            (damaged, no_schema),
        ] {
            let problem = post(app, body).await.refused(400, "malformed");
            assert_eq!(problem["detail"], detail, "{problem}");
        }
    }

    async fn bodies_are_compressed_whole_and_not_inside(app: TestApp) {
        let whole = stream(&[columns(&[rollout("a", 1.0)])]);
        let zstd = zstd::encode_all(whole.as_slice(), 1).expect("memory compresses");
        let headers = [("content-type", ARROW_STREAM), ("content-encoding", "zstd")];
        app.post_raw("/trajectories", &headers, zstd).await.expect(201);
        post(app, whole).await.expect(200);
        // Made with pyarrow: 64 zeros of int8 in a column, with `IpcWriteOptions(compression="zstd")` and `"lz4"`.
        for inside in [&include_bytes!("arrow/zstd-buffers.arrows")[..], include_bytes!("arrow/lz4-buffers.arrows")] {
            let problem = post(app, inside.to_vec()).await.refused(415, "unsupported-media-type");
            assert!(text(&problem["detail"]).contains("Content-Encoding: zstd"), "{problem}");
        }
    }
}
