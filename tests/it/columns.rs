//! Columns that segments name: what rules declare is checked, comes out as it went in, whole or in slices, and goes when its
//! retention says.

use std::ops::Range;

use arrow_array::{Array as _, RecordBatch, cast::AsArray as _, types::Int32Type};
use arrow_buffer::Buffer;
use arrow_ipc::reader::StreamDecoder;
use serde_json::{Value, json};

use crate::{
    media::bytes,
    support::{Answer, Backend, TestApp, http, member, on_both_stores, rollout, text, with},
};

const ARROW: &str = "application/vnd.apache.arrow.stream";

/// A ragged column with these rows.
fn ragged(rows: &[&[i32]]) -> Vec<u8> {
    let mut end = 0;
    let ends = rows.iter().map(|row| {
        end += row.len() as u32;
        end
    });
    let mut bytes: Vec<u8> = std::iter::once(0).chain(ends).flat_map(u32::to_le_bytes).collect();
    bytes.extend(rows.concat().into_iter().flat_map(i32::to_le_bytes));
    bytes
}

/// Uploads a column, and returns how a segment names it.
async fn upload(app: &TestApp, column: &[u8]) -> Value {
    let digest = blake3::hash(column).to_hex().to_string();
    let put = http().put(format!("{}/columns/{digest}", app.url)).body(column.to_vec());
    let status = put.send().await.expect("the server answers").status().as_u16();
    assert!([200, 201].contains(&status), "{status}");
    json!({"digest": digest, "bytes": column.len()})
}

/// A member of group `g` with one segment of so many tokens, all but the first of the response.
fn with_columns(index: usize, tokens: usize, columns: &Value) -> Value {
    let segment = json!({"tokens": vec![1; tokens], "loss_mask": vec![1; tokens - 1], "columns": columns});
    with(member("g", index, index as f64), json!({"segments": [segment]}))
}

async fn read(app: &TestApp, batch: &Value, query: &str, accept: &str) -> reqwest::Response {
    let url = format!("{}{}?{query}", app.url, text(&batch["samples_url"]));
    http().get(url).header("accept", accept).send().await.expect("the server answers")
}

async fn refused(app: &TestApp, batch: &Value, query: &str, accept: &str) -> Answer {
    let response = read(app, batch, query, accept).await;
    Answer { status: response.status(), json: response.json().await.expect("a problem is JSON") }
}

/// The record batches of the samples with these columns.
async fn record_batches(app: &TestApp, batch: &Value, query: &str) -> Vec<RecordBatch> {
    let response = read(app, batch, query, ARROW).await;
    assert_eq!(response.status(), 200);
    let mut stream = Buffer::from(response.bytes().await.expect("the stream ends well"));
    let mut decoder = StreamDecoder::new();
    let mut batches = Vec::new();
    while let Some(batch) = decoder.decode(&mut stream).expect("it is a stream of Arrow") {
        batch.columns().iter().for_each(|column| column.to_data().validate_full().expect("the arrays are valid"));
        batches.push(batch);
    }
    decoder.finish().expect("it is whole");
    batches
}

/// The bytes of a column in each row.
fn cells(batches: &[RecordBatch], name: &str) -> Vec<Option<Vec<u8>>> {
    let of_batch = |batch: &RecordBatch| {
        let lists = batch.column_by_name(name).expect("it was asked for").as_list::<i32>().clone();
        let cell = |list: Option<arrow_array::ArrayRef>| {
            list.map(|rows| rows.as_fixed_size_binary().iter().flatten().flatten().copied().collect())
        };
        lists.iter().map(cell).collect::<Vec<_>>()
    };
    batches.iter().flat_map(of_batch).collect()
}

/// The rows of a ragged column of `i32` in each row.
fn lists(batches: &[RecordBatch], name: &str) -> Vec<Option<Vec<Vec<i32>>>> {
    let of_list = |numbers: arrow_array::ArrayRef| {
        let numbers = numbers.as_fixed_size_binary().iter().flatten().map(|number| number.try_into().expect("4 bytes"));
        numbers.map(i32::from_le_bytes).collect::<Vec<_>>()
    };
    let of_batch = |batch: &RecordBatch| {
        let cells = batch.column_by_name(name).expect("it was asked for").as_list::<i32>().clone();
        let of_cell = |rows: arrow_array::ArrayRef| rows.as_list::<i32>().iter().flatten().map(of_list).collect();
        cells.iter().map(|cell| cell.map(of_cell)).collect::<Vec<_>>()
    };
    batches.iter().flat_map(of_batch).collect()
}

fn slices(column: &[u8], row: usize, slice: Range<usize>) -> Vec<u8> {
    column.chunks(row).flat_map(|row| row[slice.clone()].to_vec()).collect()
}

on_both_stores! {
    async fn columns_come_out_as_they_went_in(app: TestApp) {
        const ROW: usize = 6 * 4;
        // The first has three pieces, and each upload is of rows that pieces and parts divide.
        const TOKENS: [usize; 3] = [130_000, 9, 70_000];
        app.rules("default", json!({
            "group": {"size": 4},
            "columns": {
                "experts": {"dtype": "u8", "shape": [6, 4], "rows": "sequence-1", "required": false},
                "entropy": {"dtype": "f16"},
                "kept": {"dtype": "i32", "ragged": true},
            },
        })).await;
        let mut experts = Vec::new();
        for (index, tokens) in TOKENS.into_iter().enumerate() {
            let column = bytes(index as u32, ROW * (tokens - 1));
            let mut columns = json!({"experts": upload(app, &column).await});
            if index == 1 {
                columns["kept"] = upload(app, &ragged(&[&[1, 2], &[], &[3], &[-4], &[], &[], &[5], &[6, 7]])).await;
                columns["entropy"] = upload(app, &bytes(7, 16)).await;
            }
            app.accept(with_columns(index, tokens, &columns)).await;
            experts.push(Some(column));
        }
        let kept = upload(app, &ragged(&[&[8], &[9, 10]])).await;
        app.accept(with_columns(3, 3, &json!({"kept": kept}))).await;
        experts.push(None);

        let batch = app.lease().await;
        let read = record_batches(app, &batch, "columns=experts,kept,entropy&messages=false").await;
        assert_eq!(cells(&read, "column.experts"), experts);
        let first = vec![vec![1, 2], vec![], vec![3], vec![-4], vec![], vec![], vec![5], vec![6, 7]];
        let expected = [None, Some(first), None, Some(vec![vec![8], vec![9, 10]])];
        assert_eq!(lists(&read, "column.kept"), expected);
        assert_eq!(cells(&read, "column.entropy"), [None, Some(bytes(7, 16)), None, None]);
        let tokens = |batch: &RecordBatch| {
            let lists = batch.column_by_name("tokens").expect("samples have tokens").as_list::<i32>().clone();
            lists.iter().flatten().map(|tokens| tokens.as_primitive::<Int32Type>().len()).collect::<Vec<_>>()
        };
        assert_eq!(read.iter().flat_map(tokens).collect::<Vec<_>>(), [130_000, 9, 70_000, 3]);
        let schema = read[0].schema();
        let field = schema.field_with_name("column.experts").expect("it was asked for");
        assert_eq!((field.metadata()["dtype"].as_str(), field.metadata()["shape"].as_str()), ("u8", "[6,4]"));

        let of_slice = |column: &Vec<u8>| slices(column, ROW, 8..20);
        let expected: Vec<_> = experts.iter().map(|column| column.as_ref().map(of_slice)).collect();
        let read = record_batches(app, &batch, "columns=experts&inner=2:5").await;
        assert_eq!(cells(&read, "column.experts"), expected);
        assert_eq!(read[0].schema().field_with_name("column.experts").expect("it was asked for").metadata()["shape"], "[3,4]");

        // Shards have the columns of their rows, and some have no rows.
        let mut of_shards = Vec::new();
        for shard in 0..6 {
            let read = record_batches(app, &batch, &format!("columns=experts&shard={shard}&shards=6")).await;
            of_shards.extend(cells(&read, "column.experts"));
        }
        of_shards.sort();
        let mut sorted = experts.clone();
        sorted.sort();
        assert_eq!(of_shards, sorted);

        // Without the parameter there are none, and text names uploads.
        assert!(app.samples(&batch).await.iter().all(|row| row.get("columns").is_none()));
        let text = self::read(app, &batch, "columns=kept", "application/x-ndjson").await.text().await.expect("it ends well");
        let named: Vec<Value> = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")["columns"].clone()).collect();
        assert_eq!(named[3], json!({"kept": kept}));
        assert_eq!((&named[0], named[1]["experts"].is_null()), (&Value::Null, true));

        for (query, pointer) in [
            ("columns=other", "columns"),
            ("columns=experts&inner=2:7", "inner"),
            ("columns=entropy&inner=0:1", "inner"),
            ("columns=kept&inner=0:1", "inner"),
        ] {
            let problem = refused(app, &batch, query, ARROW).await.refused(422, "invalid");
            assert_eq!(problem["errors"][0]["pointer"], pointer, "{query}: {problem}");
        }
        refused(app, &batch, "columns=experts&inner=0:1", "application/json").await.refused(422, "invalid");
    }

    async fn columns_that_are_not_as_declared_are_refused(app: TestApp) {
        app.rules("default", json!({
            "columns": {
                "experts": {"dtype": "u16", "shape": [2], "rows": "sequence", "required": true},
                "kept": {"dtype": "i32", "ragged": true},
            },
        })).await;
        let experts = upload(app, &bytes(1, 12)).await;
        let post = async |columns: Value| {
            let segment = json!({"tokens": [1, 2, 3], "loss_mask": [1, 1], "columns": columns});
            app.post("/trajectories", json!({"rollout_id": "r", "status": "completed", "reward": 1.0, "segments": [segment]})).await
        };
        for (columns, pointer, detail) in [
            (json!({}), "experts", "is required, with 12 bytes: 3 rows (`sequence`) of 4 bytes, for shape [2] of `u16`"),
            (json!({"experts": {"digest": experts["digest"], "bytes": 8}}), "experts", "has 8 bytes, but must have 12 bytes"),
            (json!({"experts": experts, "kept": experts, "more": experts}), "more", "is not declared"),
            (json!({"experts": experts, "kept": {"digest": "0".repeat(64), "bytes": 16}}), "kept", "which is not here"),
            (json!({"experts": experts, "kept": {"digest": experts["digest"], "bytes": 16}}), "kept", "has 12"),
            (json!({"experts": {"digest": "xyz", "bytes": 12}}), "experts/digest", "BLAKE3"),
        ] {
            let problem = post(columns).await.refused(422, "invalid");
            let error = &problem["errors"][0];
            assert_eq!(error["pointer"], format!("/segments/0/columns/{pointer}"), "{problem}");
            assert!(text(&error["detail"]).contains(detail), "{problem}");
        }
        post(json!({"experts": experts})).await.expect(201);
        assert_eq!(post(json!({"experts": experts})).await.expect(200)["duplicate"], true);
        let evaluated = json!({"rollout_id": "e", "purpose": "eval", "suite": "s"});
        app.accept(with(rollout("e", 1.0), evaluated)).await;
        let other = upload(app, &bytes(2, 12)).await;
        post(json!({"experts": other})).await.refused(409, "rollout-conflict");
        let rules = json!({"columns": {"experts": {"dtype": "u8", "shape": [1_024, 1_024]}}});
        let problem = app.put("/policies/default", rules).await.refused(422, "invalid");
        assert_eq!(problem["errors"][0]["pointer"], "/columns/experts/shape");
    }

    async fn columns_of_dropped_rollouts_go_at_once(app: TestApp) {
        app.rules("default", json!({
            "columns": {"a": {"dtype": "u8"}},
            "filter": [{"name": "low", "scope": "rollout", "when": "reward < 0.5", "action": "drop"}],
        })).await;
        let columns = [bytes(1, 2), bytes(2, 2)];
        for (column, reward) in columns.iter().zip([0.0, 1.0]) {
            let upload = upload(app, column).await;
            let segment = json!({"tokens": [1, 2, 3], "loss_mask": [1, 1], "columns": {"a": upload}});
            app.accept(json!({"status": "completed", "reward": reward, "segments": [segment]})).await;
        }
        app.pass_s(1.0).await;
        assert_eq!(app.read_value("SELECT COUNT(*) FROM blob".to_owned()).await, 1);
        let batch = app.lease().await;
        assert_eq!(cells(&record_batches(app, &batch, "columns=a").await, "column.a"), [Some(columns[1].clone())]);
    }

    async fn a_body_that_lacks_everything_has_a_bounded_answer(app: TestApp) {
        let columns: Value = (0..32).map(|name| (name.to_string(), json!({"dtype": "u8", "required": true}))).collect();
        app.rules("default", json!({"columns": columns})).await;
        let segments = vec![json!({"tokens": [1, 2], "loss_mask": [1]}); 100];
        let problem = app.post("/trajectories", json!({"status": "completed", "reward": 1.0, "segments": segments})).await;
        assert_eq!(problem.refused(422, "invalid")["errors"].as_array().map(Vec::len), Some(100));
    }

    async fn columns_go_when_their_retention_says(app: TestApp) {
        let rule = |retention: &str| json!({"dtype": "u8", "retention": retention});
        app.rules("default", json!({
            "columns": {"a": rule("ack"), "c": rule("checkpoint"), "r": rule("rollout")},
            "retention": {"settled_s": 3_600},
        })).await;
        let mut columns = json!({});
        for (seed, name) in ["a", "c", "r"].into_iter().enumerate() {
            columns[name] = upload(app, &bytes(seed as u32, 2)).await;
        }
        app.accept(json!({"rollout_id": "r", "status": "completed", "reward": 1.0, "segments": [
            {"tokens": [1, 2, 3], "loss_mask": [1, 1], "columns": columns},
        ]})).await;
        let mut batch = app.lease().await;
        let counts = async |expected: usize| {
            app.pass_s(1.0).await;
            app.check_books().await;
            assert_eq!(app.read_value("SELECT COUNT(*) FROM blob".to_owned()).await, expected as i64);
        };
        record_batches(app, &batch, "columns=a,c,r").await;
        counts(3).await;
        app.ack(&batch, 1).await.expect(200);
        counts(2).await;
        refused(app, &batch, "columns=c,a", ARROW).await.refused(410, "column-expired");
        assert_eq!(cells(&record_batches(app, &batch, "columns=c,r").await, "column.c"), [Some(bytes(1, 2))]);

        // A trainer that goes back gets the batch without it, and the books agree.
        app.post("/policies/default/resume", json!({"step": 0})).await.expect(200);
        batch = app.lease().await;
        counts(2).await;
        app.ack(&batch, 1).await.expect(200);
        app.post("/policies/default/checkpoints", json!({"step": 1})).await.expect(200);
        counts(1).await;
        refused(app, &batch, "columns=c", ARROW).await.refused(410, "column-expired");
        assert_eq!(cells(&record_batches(app, &batch, "columns=r").await, "column.r"), [Some(bytes(2, 2))]);
        app.pass_s(2.0 * 86_400.0).await;
        counts(0).await;
        refused(app, &batch, "columns=r", ARROW).await.refused(410, "purged");
    }
}

/// A reader that holds a page must not wait for bytes that another one waits for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_columns_do_not_wait_for_each_other() {
    let app = TestApp::start_with(Backend::Sqlite, "[limits]\nbody_bytes = 1048576\nsamples_bytes = 4194304").await;
    app.rules(
        "default",
        json!({
            "group": {"size": 3}, "columns": {"wide": {"dtype": "u8", "shape": [1_024, 64]}},
        }),
    )
    .await;
    // Each is so long that two of them do not share a record batch.
    let column = bytes(1, 300 << 16);
    let upload = upload(&app, &column).await;
    for index in 0..3 {
        // A page of them takes all that readers may have.
        let messages = json!({"messages": [{"role": "user", "content": "x".repeat(400_000)}]});
        app.accept(with(with_columns(index, 301, &json!({"wide": upload})), messages)).await;
    }
    let batch = app.lease().await;
    let readers = (0..3).map(|_| record_batches(&app, &batch, "columns=wide"));
    for read in futures::future::join_all(readers).await {
        assert_eq!(read.len(), 3);
        assert!(cells(&read, "column.wide").iter().all(|cell| cell.as_ref() == Some(&column)));
    }
    app.finish().await;
}
