//! `forebay export`: from the service and from the database, in every format.

use std::{path::Path, process::Output};

use forebay_wire::ARROW_STREAM;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    process::Command,
};

use super::{post_everything, prepare};
use crate::{
    snippets::python,
    support::{Backend, TestApp, eventually, group, on_both_stores, rollout, text, with, with_image},
};

async fn forebay(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    for name in ["FOREBAY_URL", "FOREBAY_KEY", "FOREBAY_DATABASE", "FOREBAY_CONFIG", "FOREBAY_CA"] {
        command.env_remove(name);
    }
    command.arg("export").args(arguments).output().await.expect("the binary starts")
}

/// Exports to standard output, and returns it.
async fn exported(arguments: &[&str]) -> String {
    let output = forebay(&[arguments, &["--output", "-"]].concat()).await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// The error of an export that fails.
async fn complaint(arguments: &[&str]) -> String {
    let output = forebay(arguments).await;
    assert_eq!(output.status.code(), Some(1), "{arguments:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn values(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn files(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("the folder can be read");
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The messages of each row of a Parquet file that is exported with this exit code, and what the command says.
async fn parquet(app: &TestApp, folder: &Path, arguments: &[&str], code: i32) -> (Vec<Value>, String) {
    let file = folder.join("rows.parquet").display().to_string();
    let fixed = ["--format", "parquet", "--url", &app.url, "--force", "--output", &file];
    let output = forebay(&[&fixed[..], arguments].concat()).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(code), "{said}");
    let print = "import json, sys, pyarrow.parquet as pq\n\
                 for messages in pq.read_table(sys.argv[1])['messages'].to_pylist(): print(json.dumps(messages))";
    let read = Command::new(python()).args(["-c", print, &file]).output().await.expect("Python starts");
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
    (values(&String::from_utf8_lossy(&read.stdout)), said)
}

/// A conversation that begins with the same question.
fn conversation(answer: &str) -> Value {
    json!([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "q"}]},
        {"role": "assistant", "content": answer, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "4", "tool_call_id": "1"}])
}

/// A group of conversations, one for each reward.
fn conversations(group_id: &str, rewards: &[f64]) -> Value {
    let mut members = group(group_id, rewards);
    for (index, member) in members.as_array_mut().expect("an array").iter_mut().enumerate() {
        member["messages"] = conversation(&format!("answer {index}"));
        member["metadata"] = json!({"tools": [{"type": "function", "function": {"name": "f"}}]});
    }
    members
}

on_both_stores! {
    async fn the_service_and_its_database_give_the_same_export(app: TestApp) {
        post_everything(app).await;
        for format in ["forebay", "ndjson"] {
            let from_service = exported(&["--format", format, "--url", &app.url]).await;
            assert_eq!(exported(&["--format", format, "--database", &app.database]).await, from_service);
            assert_eq!(from_service.lines().count(), if format == "forebay" { 6 } else { 8 });
        }
        app.stop().await;
        assert_eq!(exported(&["--format", "forebay", "--database", &app.database]).await.lines().count(), 6);
        let refused = complaint(&["--format", "forebay", "--url", &app.url, "--output", "-"]).await;
        assert!(refused.contains("nothing listens at"), "{refused}");
        app.restart().await;
    }

    async fn an_export_and_its_import_have_the_images(app: TestApp) {
        // Data URLs that are shorter than an address stay in the messages.
        let images = [b"\x89PNG one".repeat(20), b"two".repeat(40)];
        for (index, image) in images.iter().enumerate() {
            app.accept(with(rollout(&format!("r{index}"), 1.0), with_image(image))).await;
            app.accept(with(rollout(&format!("again{index}"), 1.0), with_image(image))).await;
        }
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        let path = |name: &str| folder.path().join(name).display().to_string();
        for (place, of) in [("--url", &app.url), ("--database", &app.database)] {
            let media = path(place);
            let lines = exported(&["--format", "forebay", place, of, "--media", &media]).await;
            std::fs::write(path("all.jsonl"), lines).expect("the folder can be written");
            let digests: Vec<String> = images.iter().map(|image| blake3::hash(image).to_hex().to_string()).collect();
            let mut sorted = digests.clone();
            sorted.sort();
            assert_eq!(files(Path::new(&media)), sorted);
            let other = TestApp::start(Backend::Sqlite).await;
            let lines = path("all.jsonl");
            let import = async |more: &[&str]| {
                let arguments = [&["import", "--format", "forebay", "--url", &other.url, &lines][..], more];
                let program = Command::new(env!("CARGO_BIN_EXE_forebay")).args(arguments.concat()).output().await;
                program.expect("the binary starts")
            };
            let without = import(&[]).await;
            let said = String::from_utf8_lossy(&without.stdout).into_owned();
            assert!(!without.status.success() && said.contains("which is not here"), "{said}");
            let with = import(&["--media", &media]).await;
            assert!(with.status.success(), "{}", String::from_utf8_lossy(&with.stderr));
            for (image, digest) in images.iter().zip(&digests) {
                let got = other.http.get(format!("{}/media/{digest}", other.url)).send().await.expect("the server answers");
                let expected = if image.starts_with(b"\x89") { "image/png" } else { "application/octet-stream" };
                assert_eq!(got.headers()["content-type"], expected);
                assert_eq!(&got.bytes().await.expect("it is whole")[..], image);
            }
            other.finish().await;
        }
    }

    async fn rows_are_segments_and_their_floats_are_those_that_were_posted(app: TestApp) {
        post_everything(app).await;
        let rows = values(&exported(&["--format", "ndjson", "--url", &app.url, "--verdict", "kept"]).await);
        let names: Vec<(&str, &Value, &Value)> =
            rows.iter().map(|row| (text(&row["rollout_id"]), &row["segment"], &row["segments"])).collect();
        let (zero, one, two) = (json!(0), json!(1), json!(2));
        assert_eq!(names, [
            ("full-0", &zero, &two), ("full-0", &one, &two), ("full-1", &zero, &two), ("full-1", &one, &two),
            ("alone", &zero, &one), ("failed", &zero, &one),
        ]);
        assert_eq!(rows[1]["logprobs"], json!([0.0, -1e-7]));
        assert_eq!((&rows[0]["reward"], &rows[0]["messages"][0]["role"], &rows[1]["messages"]), (&json!(0.1), &json!("user"), &Value::Null));
        assert_eq!(rows[0]["versions"], json!([[3, 0, 1], [4, 1, 1]]));
        assert_eq!((&rows[5]["tokens"], &rows[5]["response_length"]), (&Value::Null, &zero));
        let texts = values(&exported(&["--format", "ndjson", "--url", &app.url, "--require", "messages"]).await);
        assert_eq!(texts.len(), 2);
    }

    async fn a_parquet_file_has_the_columns_and_values_of_the_rows(app: TestApp) {
        post_everything(app).await;
        app.accept(conversations("talk", &[0.0, 1.0])).await;
        let folder = tempfile::tempdir().expect("a folder can be made");
        let file = folder.path().join("rows.parquet").display().to_string();
        let output = forebay(&["--format", "parquet", "--url", &app.url, "--output", &file]).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stderr).contains("exported 8 rollouts: 10 rows, "));
        assert_eq!(files(folder.path()), ["rows.parquet"]);
        let rows = exported(&["--format", "ndjson", "--url", &app.url]).await;
        std::fs::write(folder.path().join("rows.ndjson"), &rows).expect("the file can be written");
        let mut check = Command::new(python());
        check.arg("-c").arg(include_str!("compare.py")).arg(folder.path());
        let output = check.output().await.expect("Python starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "10 rows agree");
    }

    async fn pairs_are_the_best_and_the_worst_of_groups_that_differ(app: TestApp) {
        app.accept(conversations("differ", &[0.5, 1.0, -1.0, 1.0])).await;
        app.accept(conversations("equal", &[0.5, 0.5])).await;
        app.accept(conversations("one", &[1.0])).await;
        let mut unrelated = conversations("unrelated", &[0.0, 1.0]);
        unrelated[1]["messages"] = json!([{"role": "user", "content": "another question"}, {"role": "assistant", "content": "a"}]);
        app.accept(unrelated).await;
        let arguments = ["--format", "pairs", "--url", &app.url, "--output", "-"];
        let output = forebay(&arguments).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let pairs = values(&String::from_utf8(output.stdout).expect("text"));
        assert_eq!(pairs.len(), 1, "{said}");
        let roles = |side: &str| -> Vec<String> {
            let messages = pairs[0][side].as_array().expect("messages");
            messages.iter().map(|message| format!("{} {}", text(&message["role"]), text(&message["content"]))).collect()
        };
        assert_eq!(roles("prompt"), ["system s", "user q"]);
        assert_eq!(roles("chosen"), ["assistant answer 1", "tool 4"]);
        assert_eq!(roles("rejected"), ["assistant answer 2", "tool 4"]);
        assert_eq!((&pairs[0]["score_chosen"], &pairs[0]["score_rejected"]), (&json!(1.0), &json!(-1.0)));
        for left_out in ["1 groups without two", "1 groups with equal", "1 groups whose best and worst"] {
            assert!(said.contains(left_out), "{said}");
        }
    }

    async fn traces_are_one_file_for_each_conversation(app: TestApp) {
        app.accept(conversations("talk/1", &[0.5, 1.0])).await;
        app.accept(rollout("silent", 1.0)).await;
        let folder = tempfile::tempdir().expect("a folder can be made");
        let traces = folder.path().join("traces");
        let arguments = ["--format", "sts", "--url", &app.url, "--harness", "mine", "--output", &traces.display().to_string()];
        let output = forebay(&arguments).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert!(String::from_utf8_lossy(&output.stderr).contains("2 rows, 1 rollouts without messages"));
        assert_eq!(files(&traces), ["00000"]);
        assert_eq!(files(&traces.join("00000")), ["0000000-talk%2F1-0.jsonl", "0000001-talk%2F1-1.jsonl"]);
        let trace = std::fs::read_to_string(traces.join("00000/0000001-talk%2F1-1.jsonl")).expect("a file");
        let trace = values(&trace);
        assert_eq!((&trace[0]["type"], &trace[0]["harness"], &trace[0]["reward"]), (&json!("session"), &json!("mine"), &json!(1.0)));
        let answer = &trace[3]["message"];
        assert_eq!((&answer["role"], &answer["content"], &answer["toolCalls"][0]["id"]), (&json!("assistant"), &json!("answer 1"), &json!("1")));
        assert_eq!(trace[4], json!({"type": "message", "message": {"role": "tool", "content": "4", "toolCallId": "1"}}));
        assert!(complaint(&arguments).await.contains("already exists"));
    }

    async fn reasoning_under_both_of_its_names_is_one_text_in_every_format(app: TestApp) {
        let mut members = conversations("both", &[0.0, 1.0]);
        for member in members.as_array_mut().expect("an array") {
            member["messages"][2]["reasoning"] = json!("I think");
            member["messages"][2]["reasoning_content"] = json!("I think");
        }
        app.accept(members).await;
        let folder = tempfile::tempdir().expect("a folder can be made");
        let rows = parquet(app, folder.path(), &["--require", "messages"], 0).await.0;
        assert_eq!((rows.len(), &rows[0][2]["reasoning_content"]), (2, &json!("I think")));
        let pairs = values(&exported(&["--format", "pairs", "--url", &app.url]).await);
        assert_eq!(pairs[0]["chosen"][0]["reasoning_content"], "I think");
        let traces = folder.path().join("traces").display().to_string();
        let output = forebay(&["--format", "sts", "--url", &app.url, "--output", &traces]).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let trace = std::fs::read_to_string(Path::new(&traces).join("00000/0000000-both-0.jsonl")).expect("a file");
        assert_eq!(values(&trace)[3]["message"]["reasoningContent"], "I think");
    }

    async fn an_unreadable_message_is_reported_with_its_row_and_the_rest_stays(app: TestApp) {
        app.rules("default", json!({"require": []})).await;
        app.accept(rollout("tokens-only", 0.0)).await;
        let mut members = conversations("talk", &[0.0, 1.0, 0.5]);
        members[1]["messages"][3] = json!({"content": "without a role"});
        members[2]["messages"] = json!([1, {"role": 7}]);
        app.accept(members).await;
        let folder = tempfile::tempdir().expect("a folder can be made");

        let (rows, said) = parquet(app, folder.path(), &[], 3).await;
        let lengths: Vec<usize> = rows.iter().map(|messages| messages.as_array().map_or(0, Vec::len)).collect();
        assert_eq!(lengths, [0, 4, 3, 0]);
        assert!(rows[3].is_null(), "a row without a readable message has none: {rows:?}");
        for line in [
            "row 2 (rollout talk-1) /messages/3: has no role",
            "row 3 (rollout talk-2) /messages/0: is not an object",
            "row 3 (rollout talk-2) /messages/1: has a role that is not a text",
            "the export is written without 3 messages that cannot be read",
        ] {
            assert!(said.contains(line), "{said}");
        }
        let (rows, said) = parquet(app, folder.path(), &["--require", "messages"], 3).await;
        assert!(rows.len() == 2 && said.contains("2 rows, 2 rows without what --require names"), "{said}");
        assert!(said.contains("row 1 (rollout talk-1) /messages/3") && said.contains("no row (rollout talk-2)"), "{said}");
        // What is asked for is complete without the rows that lack it.
        let readable = ["--require", "messages", "--where", "reward < 0.5"];
        assert_eq!(parquet(app, folder.path(), &readable, 0).await.0.len(), 1);

        let output = forebay(&["--format", "pairs", "--url", &app.url, "--output", "-"]).await;
        assert_eq!(output.status.code(), Some(3));
        let pairs = values(&String::from_utf8(output.stdout).expect("text"));
        assert_eq!(pairs[0]["chosen"].as_array().map(Vec::len), Some(1));
        let traces = folder.path().join("traces").display().to_string();
        let output = forebay(&["--format", "sts", "--url", &app.url, "--output", &traces]).await;
        assert_eq!(output.status.code(), Some(3));
        assert_eq!(files(&Path::new(&traces).join("00000")), ["0000000-talk-0.jsonl", "0000001-talk-1.jsonl"]);
        // Rows of JSON have messages as they were posted.
        let rows = values(&exported(&["--format", "ndjson", "--url", &app.url]).await);
        assert_eq!(rows[3]["messages"], json!([1, {"role": 7}]));
    }

    async fn a_file_is_replaced_only_with_force_and_never_left_incomplete(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let folder = tempfile::tempdir().expect("a folder can be made");
        let file = folder.path().join("out.ndjson").display().to_string();
        std::fs::write(&file, "mine").expect("the file can be written");
        let arguments = ["--format", "ndjson", "--url", &app.url, "--output", &file];
        assert!(complaint(&arguments).await.contains("already exists; --force replaces it"));
        let wrong = [&arguments[..], &["--force", "--where", "rewrd > 1"]].concat();
        assert!(complaint(&wrong).await.contains("where"));
        let wrong = [&arguments[..], &["--force", "--policy", "nobody"]].concat();
        assert!(complaint(&wrong).await.contains("nobody"));
        assert_eq!(std::fs::read_to_string(&file).expect("a file"), "mine");
        let output = forebay(&[&arguments[..], &["--force"]].concat()).await;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(values(&std::fs::read_to_string(&file).expect("a file")).len(), 1);
        assert_eq!(files(folder.path()), ["out.ndjson"]);
        let nowhere = folder.path().join("no/where").display().to_string();
        assert!(complaint(&["--format", "ndjson", "--url", &app.url, "-o", &nowhere]).await.contains("cannot write to the folder"));
    }

    async fn an_export_without_its_damaged_rollouts_has_an_exit_code_of_its_own(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        app.accept(with(rollout("b", 1.0), json!({"environment": "e"}))).await;
        assert_eq!(app.damage("UPDATE rollout SET reward = 100.0 WHERE rollout_id = 'b'").await, 1);
        for place in [["--url", &app.url], ["--database", &app.database]] {
            let output = forebay(&[&place[..], &["--format", "forebay", "-o", "-"]].concat()).await;
            assert_eq!(output.status.code(), Some(3));
            assert_eq!(values(&String::from_utf8(output.stdout).expect("text")).len(), 1);
            assert!(String::from_utf8_lossy(&output.stderr).contains("without 1 rollouts whose stored data is damaged"));
        }
    }
}

/// Starts an import, kills it when the service has received something, and imports again.
async fn import_with_a_crash(app: &TestApp, file: &str) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["import", "--format", "forebay", "--url", &app.url, file]).kill_on_drop(true);
    let mut first = command.spawn().expect("the binary starts");
    eventually("the first rollouts", || async {
        app.get("/stats").await.json["policies"]["default"]["received"].as_i64().is_some_and(|received| received > 0)
    })
    .await;
    first.kill().await.expect("it can be killed");
    let output = command.output().await.expect("the binary starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_export_that_is_imported_elsewhere_is_exported_again_to_the_same_bytes() {
    let app = TestApp::start(Backend::Sqlite).await;
    post_everything(&app).await;
    // More than one request of an import.
    let text = json!([{"role": "user", "content": "x".repeat(300_000)}]);
    for index in 0..60 {
        app.accept(with(rollout(&format!("r{index}"), f64::from(index) / 7.0), json!({"messages": text}))).await;
    }
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("out.ndjson").display().to_string();
    let output = forebay(&["--format", "forebay", "--url", &app.url, "--output", &file]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let other = TestApp::start(Backend::Postgres).await;
    prepare(&other).await;
    import_with_a_crash(&other, &file).await;
    assert_eq!(other.get("/stats").await.json["policies"]["default"]["received"], 66);
    let again = exported(&["--format", "forebay", "--url", &other.url]).await;
    assert!(again == std::fs::read_to_string(&file).expect("a file"), "the second export differs");
    other.finish().await;
    app.finish().await;
}

/// A service that answers every request with these chunks, and then ends the body or not.
async fn answering(media: &'static str, chunks: Vec<Vec<u8>>, ends: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("a listener has an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let head = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{media}\r\n");
            let mut answer = head.into_bytes();
            for chunk in &chunks {
                answer.extend([format!("{:x}\r\n", chunk.len()).as_bytes(), chunk.as_slice(), b"\r\n"].concat());
            }
            if ends {
                answer.extend(b"0\r\n\r\n");
            }
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(&answer).await;
        }
    });
    format!("http://{address}")
}

/// What became of an export of such an answer: its exit, and the files that there are.
async fn exported_from(url: &str, format: &str) -> (bool, Vec<String>, String) {
    let folder = tempfile::tempdir().expect("a folder can be made");
    let file = folder.path().join("out").display().to_string();
    let output = forebay(&["--format", format, "--url", url, "--output", &file]).await;
    (output.status.success(), files(folder.path()), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// An Arrow stream of one record batch, its end, and the stream of its summary.
async fn arrow_export() -> [Vec<u8>; 3] {
    let app = TestApp::start(Backend::Sqlite).await;
    app.accept(rollout("a", 1.0)).await;
    let get = async |query: &str| {
        let request = app.http.get(format!("{}/exports?{query}", app.url)).header("accept", ARROW_STREAM);
        request.send().await.expect("the service answers").bytes().await.expect("it arrives whole").to_vec()
    };
    let (whole, rows) = (get("summary=true").await, get("").await);
    app.finish().await;
    let end = rows.len() - 8;
    [rows[..end].to_vec(), rows[end..].to_vec(), whole[rows.len()..].to_vec()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_export_that_breaks_off_leaves_no_file() {
    let [rows, end, summary] = arrow_export().await;
    assert_eq!(end, [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0], "the marker of the end of an Arrow stream");
    let cut = rows[..rows.len() - 9].to_vec();
    let cases = [
        (vec![rows.clone(), end.clone(), summary.clone()], true, true),
        // Chunks end anywhere.
        (rows.iter().chain(&end).chain(&summary).map(|&byte| vec![byte]).collect(), true, true),
        (vec![rows.clone(), end.clone(), summary.clone()], false, false),
        (vec![rows.clone(), end.clone()], true, false),
        (vec![rows.clone(), end.clone(), summary[..summary.len() / 2].to_vec()], true, false),
        (vec![rows.clone()], true, false),
        (vec![cut.clone()], true, false),
        (vec![cut, end, summary], true, false),
        (vec![], true, false),
    ];
    let media = "content-type: application/vnd.apache.arrow.stream\r\n";
    for (index, (chunks, ends, is_whole)) in cases.into_iter().enumerate() {
        let url = answering(media, chunks, ends).await;
        for format in ["parquet", "forebay"] {
            let (succeeded, files, said) = exported_from(&url, format).await;
            assert_eq!((succeeded, files.is_empty()), (is_whole, !is_whole), "case {index}, {format}: {said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_export_to_standard_output_that_breaks_off_is_no_complete_file() {
    let [rows, end, summary] = arrow_export().await;
    let media = "content-type: application/vnd.apache.arrow.stream\r\n";
    let mut written = Vec::new();
    for chunks in [vec![rows.clone(), end.clone(), summary], vec![rows, end]] {
        let url = answering(media, chunks, true).await;
        let output = forebay(&["--format", "parquet", "--url", &url, "--output", "-"]).await;
        written.push((output.status.success(), output.stdout));
    }
    assert!(written[0].0 && written[0].1.ends_with(b"PAR1"), "a Parquet file ends with its metadata");
    assert!(!written[1].0 && written[1].1.len() < written[0].1.len(), "the metadata is not written");
}
