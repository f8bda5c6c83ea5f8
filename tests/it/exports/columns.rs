//! Exports as Arrow streams: the same rollouts as in lines, whole or recognizably not.

use arrow_ipc::reader::StreamReader;
use forebay_exports::batch;
use forebay_wire::{ARROW_STREAM, ExportCounts};
use serde_json::{Value, json};

use super::{Form, export, ids, post_everything};
use crate::support::{TestApp, group, on_both_stores, rollout, text, with};

/// The rollouts of an Arrow stream, and the summary that follows it.
fn read(mut bytes: &[u8]) -> (Vec<Value>, Option<ExportCounts>) {
    let mut rollouts = Vec::new();
    // A reader of a slice leaves what follows the end of its stream.
    for batch in StreamReader::try_new(&mut bytes, None).expect("a stream begins with its schema") {
        let batch = batch::conform(&batch.expect("a record batch")).expect("it has the columns");
        let found = batch::rollouts(&batch).expect("rows are rollouts");
        // As text, in which floats of 32 bits have their shortest form, like those of lines.
        let texts = found.iter().map(|rollout| serde_json::to_string(rollout).expect("JSON"));
        rollouts.extend(texts.map(|text| serde_json::from_str::<Value>(&text).expect("JSON")));
    }
    let summary = (!bytes.is_empty()).then(|| {
        let mut stream = StreamReader::try_new(&mut bytes, None).expect("a second stream");
        batch::counts(&stream.next().expect("a row").expect("a record batch")).expect("numbers")
    });
    (rollouts, summary)
}

async fn columns(app: &TestApp, query: &str) -> (Vec<Value>, Option<ExportCounts>) {
    let request = app.http.get(format!("{}/exports?{query}", app.url)).header("accept", ARROW_STREAM);
    let answer = request.send().await.expect("the service answers");
    assert_eq!((answer.status().as_u16(), text_of(&answer)), (200, ARROW_STREAM), "{query}");
    read(&answer.bytes().await.expect("the export arrives whole"))
}

fn text_of(answer: &reqwest::Response) -> &str {
    answer.headers()["content-type"].to_str().expect("the media type is text")
}

on_both_stores! {
    async fn columns_have_the_same_rollouts_as_lines(app: TestApp) {
        post_everything(app).await;
        for query in ["", "verdict=kept&min_reward=0", "state=trained"] {
            let (lines, summary) = export(app, query).await;
            let (rollouts, counts) = columns(app, &format!("{query}&summary=true")).await;
            assert_eq!(rollouts, lines, "{query}");
            assert_eq!(serde_json::to_value(counts.expect("a summary")).expect("JSON"), summary, "{query}");
        }
        let (rollouts, counts) = columns(app, "").await;
        assert_eq!((rollouts.len(), counts), (6, None));
    }

    async fn pages_of_columns_join_without_gaps(app: TestApp) {
        app.accept(group("large", &vec![0.5; 1_500])).await;
        app.accept(group("small", &[0.0, 1.0, 2.0])).await;
        let (rollouts, counts) = columns(app, "summary=true").await;
        let expected: Vec<String> =
            (0..1_500).map(|index| format!("large-{index}")).chain((0..3).map(|index| format!("small-{index}"))).collect();
        assert_eq!(ids(&rollouts), expected);
        assert_eq!(counts.expect("a summary").rollouts, 1_503);
    }

    async fn an_export_names_the_formats_that_there_are(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        for (accept, expected) in [
            ("*/*", "application/x-ndjson"),
            ("application/x-ndjson;q=0.5, application/vnd.apache.arrow.stream", ARROW_STREAM),
            ("application/vnd.apache.arrow.stream;q=0.5, application/x-ndjson", "application/x-ndjson"),
        ] {
            let answer = app.http.get(format!("{}/exports", app.url)).header("accept", accept).send().await;
            assert_eq!(text_of(&answer.expect("the service answers")), expected, "{accept}");
        }
        let answer = app.http.get(format!("{}/exports", app.url)).header("accept", "application/json").send().await;
        let problem: Value = answer.expect("the service answers").json().await.expect("a problem");
        assert!(text(&problem["detail"]).contains(ARROW_STREAM), "{problem}");
    }

    async fn what_is_purged_during_an_export_is_left_out_and_counted(app: TestApp) {
        const ROLLOUTS: usize = 48;
        let retention = json!({"trained_s": 1_000, "settled_s": 100, "tombstone_s": 1_000_000});
        app.rules("default", json!({"batch": {"groups": ROLLOUTS}, "retention": retention})).await;
        // More than the buffers of sockets hold, so that the export is still being written when payloads are purged.
        let messages = json!([{"role": "user", "content": "x".repeat(1 << 20)}]);
        for index in 0..ROLLOUTS {
            app.accept(with(rollout(&format!("r{index}"), 1.0), json!({"messages": messages}))).await;
        }
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        let mut begun = Vec::new();
        for form in [Form::Lines, Form::Columns] {
            begun.push(form.begin(app, "summary=true").await);
        }
        app.pass_s(200.0).await;
        for export in begun {
            let (rollouts, counts) = export.finish().await;
            assert!(!rollouts.is_empty() && rollouts.len() < ROLLOUTS, "{} rollouts", rollouts.len());
            assert_eq!((counts.rollouts, counts.purged), (rollouts.len() as u64, (ROLLOUTS - rollouts.len()) as u64));
        }
    }

    async fn what_arrives_during_an_export_is_not_in_it(app: TestApp) {
        const ROLLOUTS: usize = 24;
        // More than the buffers of sockets hold, so that the export is still being written when more arrives.
        let messages = json!([{"role": "user", "content": "x".repeat(1 << 20)}]);
        let large = |rollout_id: String| with(rollout(&rollout_id, 1.0), json!({"messages": messages}));
        app.rules("default", json!({"group": {"size": 2, "min_size": 1}})).await;
        for index in 0..ROLLOUTS {
            app.accept(with(large(format!("r{index}")), json!({"group_id": format!("g{index}")}))).await;
        }
        let mut begun = Vec::new();
        for form in [Form::Lines, Form::Columns] {
            begun.push(form.begin(app, "summary=true").await);
        }
        // New groups, and the second rollouts of groups that are still to be read.
        for index in 0..3 {
            app.accept(with(large(format!("new{index}")), json!({"group_id": format!("h{index}")}))).await;
            let group_id = format!("g{}", ROLLOUTS - 1 - index);
            app.accept(with(large(format!("second{index}")), json!({"group_id": group_id}))).await;
        }
        let expected: Vec<String> = (0..ROLLOUTS).map(|index| format!("r{index}")).collect();
        for export in begun {
            let (rollouts, counts) = export.finish().await;
            assert_eq!(ids(&rollouts), expected);
            assert_eq!(counts.rollouts, ROLLOUTS as u64);
        }
        assert_eq!(export(app, "").await.0.len(), ROLLOUTS + 6);
    }
}

/// An export that has begun to arrive.
pub(super) struct Begun {
    form: Form,
    answer: reqwest::Response,
    bytes: Vec<u8>,
}

impl Form {
    async fn begin(self, app: &TestApp, query: &str) -> Begun {
        let accept = if self == Self::Columns { ARROW_STREAM } else { "application/x-ndjson" };
        let request = app.http.get(format!("{}/exports?{query}", app.url)).header("accept", accept);
        let mut answer = request.send().await.expect("the service answers");
        let first = answer.chunk().await.expect("the export begins").expect("it is not empty");
        Begun { form: self, answer, bytes: first.to_vec() }
    }
}

impl Begun {
    /// Reads the rest. Returns the rollouts and the summary.
    async fn finish(mut self) -> (Vec<Value>, ExportCounts) {
        while let Some(chunk) = self.answer.chunk().await.expect("the export arrives whole") {
            self.bytes.extend_from_slice(&chunk);
        }
        if self.form == Form::Columns {
            let (rollouts, counts) = read(&self.bytes);
            return (rollouts, counts.expect("a summary"));
        }
        let lines = self.bytes.split(|&byte| byte == b'\n').filter(|line| !line.is_empty());
        let mut lines: Vec<Value> = lines.map(|line| serde_json::from_slice(line).expect("JSON")).collect();
        let summary = lines.pop().expect("a summary")["summary"].take();
        (lines, serde_json::from_value(summary).expect("numbers"))
    }
}
