//! Exports: what they have, in which order, what they leave out, and the way back in.

mod columns;
mod command;

use std::collections::BTreeSet;

use forebay_domain::{
    ids::PolicyName,
    looking::export::{ExportCursor, ExportPage},
    policies::Policy,
};
use forebay_service::looking::export::ExportFilter;
use forebay_store::ops::{looking::export::LastRollout, policy::FindPolicy};
use serde_json::{Value, json};

use crate::support::{Backend, TestApp, group, member, on_both_stores, rollout, text, with};

/// The forms in which a service sends exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Lines,
    Columns,
}

/// The lines of an export, as text.
async fn lines(app: &TestApp, query: &str) -> String {
    let response = app.http.get(format!("{}/exports?{query}", app.url)).send().await.expect("the service answers");
    assert_eq!(response.status(), 200, "{query}");
    response.text().await.expect("the export arrives whole")
}

/// The lines of an export, and its summary.
async fn export(app: &TestApp, query: &str) -> (Vec<Value>, Value) {
    let text = lines(app, &format!("{query}&summary=true")).await;
    let mut values: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let summary = values.pop().expect("the last line is the summary")["summary"].take();
    assert_eq!(summary["rollouts"], values.len());
    (values, summary)
}

fn ids(lines: &[Value]) -> Vec<&str> {
    lines.iter().map(|line| text(&line["trajectory"]["rollout_id"])).collect()
}

/// What a full rollout names as a column, with a byte for each token of its response, and as an image.
const UPLOAD: &[u8] = b"ab";

/// Rules for everything, and the upload that it names.
async fn prepare(app: &TestApp) {
    let columns = json!({"experts": {"dtype": "u8"}});
    app.rules("default", json!({"require": [], "retention": {"dropped_s": 1_000_000}, "columns": columns})).await;
    app.post_raw("/columns", &[], UPLOAD).await.expect(201);
}

/// A rollout with everything that a producer can send and an export returns.
fn full(rollout_id: &str) -> Value {
    json!({
        "rollout_id": rollout_id, "group_id": "full", "group_size": 2, "environment": "lab", "execution_id": "x",
        "status": "truncated", "reward": 0.1, "reward_components": {"tests": 1.0, "cost": -0.1},
        "sampling": {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        "segments": [
            {"kind": "turn", "tokens": [1, 2, 151_000], "loss_mask": [1, 0], "logprobs": [-0.1, 0.0],
             "teacher_logprobs": [-0.2, 0.0], "values": [0.1, 0.2], "advantages": [0.3, 0.0],
             "versions": [[3, 0, 1], [4, 1, 1]],
             "turns": [{"start": 0, "length": 1, "reward": 0.1, "state_key": "s"}],
             "columns": {"experts": {"digest": blake3::hash(UPLOAD).to_string(), "bytes": UPLOAD.len()}},
             "media": [[0, 1, blake3::hash(UPLOAD).to_string(), "image"]]},
            {"tokens": [1, 2, 3], "loss_mask": [0, 1], "logprobs": [0.0, -1e-7], "versions": [[4, 0, 2]]},
        ],
        "messages": [{"role": "user", "content": "line\nbreak \u{1f600}"}],
        "metadata": {"b": 1.50, "a": [1e2, {"deep": null}]},
    })
}

/// Posts rollouts of many kinds: with and without groups, text, versions, rewards.
async fn post_everything(app: &TestApp) {
    prepare(app).await;
    app.accept(full("full-0")).await;
    app.accept(rollout("alone", 1.0)).await;
    app.accept(with(full("full-1"), json!({"reward": -3.5, "sampling": null, "metadata": null}))).await;
    app.accept(json!({"rollout_id": "failed", "status": "failed", "reward": 0.0})).await;
    app.accept(json!({"rollout_id": "unrewarded", "status": "aborted", "policy_version": 0})).await;
    app.accept(with(rollout("late", 1.0), json!({"group_id": "full"}))).await;
}

/// The tests below find what is lost between a post and an export, but only in fields that this rollout has.
#[test]
fn a_full_rollout_has_every_field() {
    let document: Value = serde_json::from_str(&forebay_api::openapi()).expect("the document is JSON");
    let keys =
        |object: &Value| -> BTreeSet<String> { object.as_object().expect("an object").keys().cloned().collect() };
    // An export returns some fields in another form, and these are sent in tests of their own.
    let elsewhere = |schema: &str| -> &[&str] {
        match schema {
            "Trajectory" => &["policy", "policy_version", "admission_id", "turns", "purpose", "suite", "task"],
            "Segment" => &["response_length"],
            _ => &[],
        }
    };
    let full = full("full");
    for (schema, sent) in [("Trajectory", &full), ("Segment", &full["segments"][0]), ("Sampling", &full["sampling"])] {
        let mut known = keys(sent);
        known.extend(elsewhere(schema).iter().map(|field| (*field).to_owned()));
        assert_eq!(known, keys(&document["components"]["schemas"][schema]["properties"]), "{schema}");
    }
}

on_both_stores! {
    async fn an_export_has_every_rollout_as_posted_and_what_became_of_it(app: TestApp) {
        post_everything(app).await;
        // `alone` was ready first.
        app.lease().await;
        let batch = app.lease().await;
        app.ack(&batch, 7).await.expect(200);
        let (lines, summary) = export(app, "policy=default").await;
        assert_eq!(ids(&lines), ["full-0", "full-1", "late", "alone", "failed", "unrewarded"]);
        assert_eq!((&summary["filtered"], &summary["purged"], &summary["damaged"]), (&json!(0), &json!(0), &json!(0)));
        let (posted, first) = (full("full-0"), &lines[0]);
        for (field, value) in posted.as_object().expect("an object") {
            assert_eq!(first["trajectory"][field], *value, "{field}");
        }
        assert_eq!(first["trajectory"]["policy"], "default");
        assert_eq!(first["trajectory"].get("policy_version"), None, "the spans say it");
        let result = json!({
            "run": 1, "verdict": "kept", "reason": null, "state": "trained", "step": 7, "policy_version": 3,
            "policy_version_assumed": false, "received_at": "2026-01-01T00:00:00.000000Z",
            "advantage": first["result"]["advantage"],
        });
        assert_eq!(first["result"], result);
        assert!(first["result"]["advantage"].as_f64().expect("a number") > 0.5);
        assert_eq!(lines[2]["result"]["state"], "late");
        assert_eq!((&lines[2]["result"]["advantage"], &lines[2]["result"]["step"]), (&Value::Null, &Value::Null));
        assert_eq!(lines[3]["trajectory"]["group_id"], "alone");
        assert_eq!((&lines[3]["trajectory"]["group_size"], &lines[3]["trajectory"]["policy_version"]), (&json!(1), &json!(0)));
        assert_eq!(lines[3]["result"]["policy_version_assumed"], true);
        assert_eq!(lines[4]["trajectory"].get("segments"), None);
        assert_eq!(lines[5]["result"]["reason"], "no-reward");
    }

    async fn an_export_of_trajectories_can_be_posted_again_and_exports_to_the_same_bytes(app: TestApp) {
        post_everything(app).await;
        let exported = lines(app, "results=false").await;
        let other = TestApp::start(Backend::Sqlite).await;
        prepare(&other).await;
        let ndjson = [("content-type", "application/x-ndjson")];
        for status in ["201", "200"] {
            let request = other.http.post(format!("{}/trajectories", other.url)).header(ndjson[0].0, ndjson[0].1);
            let answer = request.body(exported.clone()).send().await.expect("the service answers");
            let answer = answer.text().await.expect("the answer arrives whole");
            assert_eq!(answer.lines().count(), 6);
            assert!(answer.lines().all(|line| line.contains(&format!("\"status\":{status}"))), "{answer}");
        }
        assert_eq!(lines(&other, "results=false").await, exported);
        other.finish().await;
    }

    async fn an_export_keeps_what_its_filters_admit_and_counts_the_rest(app: TestApp) {
        post_everything(app).await;
        let cases: [(&str, &[&str], [u64; 2]); 8] = [
            ("verdict=late,dropped", &["late", "unrewarded"], [4, 0]),
            ("state=ready&verdict=kept", &["full-0", "full-1", "alone", "failed"], [2, 0]),
            ("min_reward=0.5", &["late", "alone"], [4, 0]),
            ("where=reward%20%3E%200.5", &["late", "alone"], [4, 1]),
            ("where=environment%20%3D%3D%20%22lab%22", &["full-0", "full-1"], [4, 0]),
            ("where=reward_components.tests%20%3E%200.5", &["full-0", "full-1"], [4, 4]),
            ("where=tokens%20%3E%203%20%26%26%20max_segment_tokens%20%3D%3D%203", &["full-0", "full-1"], [4, 0]),
            ("run=2", &[], [0, 0]),
        ];
        for (query, expected, [filtered, unevaluated]) in cases {
            let (lines, summary) = export(app, query).await;
            assert_eq!(ids(&lines), expected, "{query}");
            assert_eq!((&summary["filtered"], &summary["unevaluated"]), (&json!(filtered), &json!(unevaluated)), "{query}");
        }
    }

    async fn an_export_that_cannot_be_made_is_refused_with_its_reason(app: TestApp) {
        for (query, pointer) in [
            ("where=rewrd%20%3E%201", "where"),
            ("where=1%20%2B%201", "where"),
            ("state=open,shut", "state"),
            ("verdict=good", "verdict"),
            ("min_reward=NaN", "min_reward"),
            ("limit=3", ""),
            ("policy=%20", "policy"),
        ] {
            let found = app.get(&format!("/exports?{query}")).await.pointers(422);
            assert!(found[0].contains(pointer), "{query}: {found:?}");
        }
        app.get("/exports?policy=nobody").await.refused(404, "unknown-policy");
        let refused = app.http.get(format!("{}/exports", app.url)).header("accept", "text/csv").send().await;
        assert_eq!(refused.expect("the service answers").status(), 406);
    }

    async fn pages_join_without_gaps_however_large_groups_are(app: TestApp) {
        const LARGE: usize = 1_500;
        app.rules("default", json!({"group": {"size": 1}})).await;
        let mut expected = Vec::new();
        let mut bulk = String::new();
        for index in 0..700 {
            expected.push(format!("a{index}"));
            bulk.extend([rollout(&format!("a{index}"), 1.0).to_string(), "\n".to_owned()]);
        }
        app.post_raw("/trajectories", &[("content-type", "application/x-ndjson")], bulk).await;
        app.accept(group("large", &vec![0.5; LARGE])).await;
        expected.extend((0..LARGE).map(|index| format!("large-{index}")));
        app.accept(group("small", &[0.0, 1.0, 2.0])).await;
        expected.extend((0..3).map(|index| format!("small-{index}")));
        let (lines, summary) = export(app, "").await;
        assert_eq!(ids(&lines), expected);
        assert_eq!(summary["filtered"], 0);
    }

    async fn purged_rollouts_are_left_out_and_counted(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 1_000, "settled_s": 100, "tombstone_s": 100_000}})).await;
        app.accept(rollout("old", 1.0)).await;
        app.accept(json!({"rollout_id": "dropped", "status": "aborted"})).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        app.pass_s(200.0).await;
        app.accept(rollout("new", 1.0)).await;
        let (lines, summary) = export(app, "").await;
        assert_eq!(ids(&lines), ["new"]);
        assert_eq!(summary["purged"], 2);
    }

    async fn damaged_rollouts_are_left_out_and_counted(app: TestApp) {
        for rollout_id in ["a", "b", "c"] {
            app.accept(rollout(rollout_id, 1.0)).await;
        }
        assert_eq!(app.damage("UPDATE rollout SET reward = 100.0 WHERE rollout_id = 'b'").await, 1);
        assert_eq!(app.damage("UPDATE payload SET body = digest, file = NULL WHERE rollout_pk = 3").await, 1);
        let (lines, summary) = export(app, "").await;
        assert_eq!(ids(&lines), ["a"]);
        assert_eq!(summary["damaged"], 2);
    }

    async fn a_payload_in_the_place_of_another_is_left_out_and_counted(app: TestApp) {
        for index in 1..=3 {
            app.accept(with(rollout(&format!("r{index}"), 1.0), json!({"metadata": {"index": index}}))).await;
        }
        // Each payload can be unpacked. The second one differs from its digest, and the third one's digest from the seal.
        let only_body = "UPDATE payload SET body = (SELECT body FROM payload WHERE rollout_pk = 1),
            file = (SELECT file FROM payload WHERE rollout_pk = 1),
            start = (SELECT start FROM payload WHERE rollout_pk = 1),
            length = (SELECT length FROM payload WHERE rollout_pk = 1) WHERE rollout_pk = 2";
        assert_eq!(app.damage(only_body).await, 1);
        let with_digest = "UPDATE payload SET body = (SELECT body FROM payload WHERE rollout_pk = 1),
            file = (SELECT file FROM payload WHERE rollout_pk = 1),
            start = (SELECT start FROM payload WHERE rollout_pk = 1),
            length = (SELECT length FROM payload WHERE rollout_pk = 1),
            digest = (SELECT digest FROM payload WHERE rollout_pk = 1) WHERE rollout_pk = 3";
        assert_eq!(app.damage(with_digest).await, 1);
        let (lines, summary) = export(app, "").await;
        assert_eq!(ids(&lines), ["r1"]);
        assert_eq!(summary["damaged"], 2);
    }

    async fn purged_groups_are_passed_over_without_reading_their_rollouts(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 1_000, "settled_s": 100, "tombstone_s": 100_000}})).await;
        app.accept(group("old", &[1.0, 0.0])).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        app.pass_s(200.0).await;
        app.accept(rollout("new", 1.0)).await;
        let store = app.buffer.store();
        let policy = PolicyName::parse("default").expect("it is a name");
        let Policy { policy_pk, run, .. } = store.read(FindPolicy(policy)).await.expect("answered").expect("it is there");
        let last = store.read(LastRollout).await.expect("answered");
        let page = ExportPage { policy_pk, run, evaluates: false, last, from: ExportCursor::START };
        let read = store.read(page).await.expect("answered");
        let members: Vec<&str> = read.members.iter().map(|member| member.row.rollout_id.as_str()).collect();
        assert_eq!((members, read.purged), (vec!["new"], 2));
    }

    async fn what_arrives_after_an_export_has_begun_is_not_in_it(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.accept(member("a", 0, 1.0)).await;
        let policy = PolicyName::parse("default").expect("it is a name");
        let mut reader = app.buffer.export(policy, None, ExportFilter::default()).await.expect("answered");
        // The second rollout of a group that is still to be read, and another group.
        app.accept(member("a", 1, 0.0)).await;
        app.accept(group("b", &[1.0, 0.0])).await;
        let mut found = Vec::new();
        while let Some(page) = reader.next_page().await.expect("answered") {
            found.extend(page.into_iter().filter_map(|rollout| rollout.trajectory.rollout_id));
        }
        assert_eq!((found, reader.counts().rollouts), (vec!["a-0".to_owned()], 1));
        assert_eq!(export(app, "").await.0.len(), 4);
    }

    async fn a_new_run_is_exported_without_the_earlier_one(app: TestApp) {
        app.rules("default", json!({"retention": {"dropped_s": 1_000_000}})).await;
        app.accept(member("g", 0, 1.0)).await;
        app.post("/policies/default/reset", json!({})).await.expect(200);
        app.accept(member("g", 0, 2.0)).await;
        for (query, run, reward) in [("", 2, 2.0), ("run=2", 2, 2.0), ("run=1", 1, 1.0)] {
            let (lines, _) = export(app, query).await;
            assert_eq!(ids(&lines), ["g-0"], "{query}");
            assert_eq!((&lines[0]["result"]["run"], &lines[0]["trajectory"]["reward"]), (&json!(run), &json!(reward)));
        }
    }
}
