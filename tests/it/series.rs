//! Series: what happened to a policy over time, from the ledger, the same at every replica.

use std::path::Path;

use serde_json::{Value, json};

use crate::support::{Backend, TestApp, eventually, group, member, on_both_stores, rollout, with};

/// The minute at which every test begins.
const START: i64 = 1_767_225_600 / 60;

/// A time some seconds after the begin of a test.
fn at(seconds: i64) -> String {
    let (minutes, seconds) = (seconds / 60, seconds % 60);
    format!("2026-01-{:02}T{:02}:{:02}:{seconds:02}Z", 1 + minutes / 1440, minutes / 60 % 24, minutes % 60)
}

/// Metrics in a window of minutes from the begin of a test.
async fn window(app: &TestApp, from: i64, to: i64, step_s: i64, metrics: &str) -> Value {
    let (from, to) = (at(from * 60), at(to * 60));
    let path = format!("/policies/default/series?from={from}&to={to}&step_s={step_s}&metrics={metrics}");
    app.get(&path).await.expect(200)
}

async fn column(app: &TestApp, (from, to): (i64, i64), metric: &str) -> Value {
    window(app, from, to, 60, metric).await["metrics"][metric].clone()
}

/// The next minute begins, and what the minutes before had is in the history.
async fn next_minute(app: &TestApp) {
    app.pass_s(60.0).await;
}

/// The rows of the history of a policy that are not the one of what was before.
async fn rows(app: &TestApp) -> i64 {
    app.read_value("SELECT COUNT(*) FROM history WHERE minute > 0".to_owned()).await
}

on_both_stores! {
    async fn buckets_have_what_happened_in_their_minutes(app: TestApp) {
        next_minute(app).await;
        app.accept(rollout("a", 1.0)).await;
        app.accept(rollout("b", 1.0)).await;
        next_minute(app).await;
        next_minute(app).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.publish(7).await.expect(200);
        next_minute(app).await;
        app.accept(rollout("c", 1.0)).await;
        let metrics = "received,tokens_received,kept,acked_batches,acked_rollouts,acked_tokens,ready_groups,version";
        let found = window(app, 0, 5, 60, metrics).await;
        assert_eq!((&found["from"], &found["to"]), (&json!("2026-01-01T00:00:00.000000Z"), &json!("2026-01-01T00:05:00.000000Z")));
        assert_eq!(found["step_s"], 60);
        assert_eq!(found["at"], json!([0, 60, 120, 180, 240].map(|second| START * 60 + second)));
        assert_eq!(found["metrics"], json!({
            "received": [0.0, 2.0, 0.0, 0.0, 1.0],
            "tokens_received": [0.0, 6.0, 0.0, 0.0, 3.0],
            "kept": [0.0, 2.0, 0.0, 0.0, 1.0],
            "acked_batches": [0.0, 0.0, 0.0, 1.0, 0.0],
            "acked_rollouts": [0.0, 0.0, 0.0, 1.0, 0.0],
            "acked_tokens": [0.0, 0.0, 0.0, 3.0, 0.0],
            "ready_groups": [0.0, 2.0, 2.0, 1.0, 2.0],
            "version": [0.0, 0.0, 0.0, 7.0, 7.0],
        }));
        let wide = window(app, 0, 5, 600, "received,ready_groups").await;
        assert_eq!(wide["metrics"], json!({"received": [3.0], "ready_groups": [2.0]}));
        // Without times: the last hour.
        let hour = app.get("/policies/default/series?metrics=received").await.expect(200);
        assert_eq!(hour["at"].as_array().map(Vec::len), Some(60));
        assert_eq!(hour["metrics"]["received"][59], 1.0);
    }

    async fn rollouts_are_counted_by_their_verdicts_and_losses_by_their_rules(app: TestApp) {
        let filters = json!([
            {"name": "short", "scope": "rollout", "when": "reward < 0.0", "action": "drop"},
            {"name": "doubtful", "scope": "rollout", "when": "reward > 5.0", "action": "mask"},
            {"name": "zero-variance", "scope": "group", "when": "reward_std == 0.0", "action": "drop"},
        ]);
        app.rules("default", json!({"filter": filters, "group": {"size": 4, "min_size": 2, "on_drop": "shrink"}})).await;
        next_minute(app).await;
        // Two are kept, one is masked, one is dropped, and the next one is late.
        app.accept(group("g", &[1.0, 0.5, 6.0, -1.0])).await;
        app.accept(member("g", 4, 1.0)).await;
        app.accept(group("flat", &[1.0, 1.0, 1.0, 1.0])).await;
        let names = "received,kept,masked,dropped,late,decided_ready,dropped.*,discarded.*";
        let found = window(app, 1, 2, 60, names).await["metrics"].clone();
        assert_eq!(found, json!({
            "received": [9.0], "kept": [6.0], "masked": [1.0], "dropped": [1.0], "late": [1.0], "decided_ready": [1.0],
            // Groups are not added to rollouts: the group that was discarded had four.
            "dropped.short": [1.0], "dropped.zero-variance": [4.0], "discarded.zero-variance": [1.0],
        }));
        assert_eq!(column(app, (1, 2), "dropped.short").await, json!([1.0]));
        assert_eq!(column(app, (1, 2), "discarded.zero-variance").await, json!([1.0]));
        assert_eq!(column(app, (1, 2), "discarded.unknown").await, json!([0.0]));
        // After the row is written, nothing changes.
        next_minute(app).await;
        next_minute(app).await;
        assert_eq!(window(app, 1, 2, 60, names).await["metrics"], found);
        let sums = window(app, 0, 3, 180, names).await["metrics"].clone();
        assert_eq!(sums, found);
    }

    async fn there_is_a_row_for_each_minute_in_which_totals_changed(app: TestApp) {
        next_minute(app).await;
        for minute in 0..3 {
            app.accept(rollout(&format!("r{minute}"), 1.0)).await;
            next_minute(app).await;
        }
        assert_eq!(rows(app).await, 3);
        for _ in 0..5 {
            next_minute(app).await;
        }
        assert_eq!(rows(app).await, 3);
    }

    async fn thinning_changes_no_sum(app: TestApp) {
        next_minute(app).await;
        let mut posted = 0;
        for minute in 1..130 {
            if minute % 7 < 4 {
                app.accept(rollout(&format!("r{minute}"), 1.0)).await;
                posted += 1;
            }
            next_minute(app).await;
        }
        let before = window(app, 0, 130, 600, "received,ready_groups").await;
        let hours_before = window(app, 0, 130, 3600, "received,ready_groups").await;
        let total: f64 = before["metrics"]["received"].as_array().expect("a list").iter().filter_map(Value::as_f64).sum();
        assert_eq!(Some(total), Some(f64::from(posted)));
        let all = rows(app).await;
        app.pass_s(26.0 * 3600.0).await;
        app.accept(rollout("later", 1.0)).await;
        next_minute(app).await;
        let tens = rows(app).await;
        assert!(tens < all / 4, "{tens} of {all} rows are left");
        // Minutes are not kept any more, so the answer has wider buckets.
        let after = window(app, 0, 130, 60, "received,ready_groups").await;
        assert_eq!(after, before);
        app.pass_s(15.0 * 86_400.0).await;
        app.accept(rollout("even-later", 1.0)).await;
        next_minute(app).await;
        assert!(rows(app).await < tens);
        let hours = window(app, 0, 130, 600, "received,ready_groups").await;
        assert_eq!(hours, hours_before);
        // Half a year later, nothing is known of these hours, and what they had is not counted again.
        app.pass_s(182.0 * 86_400.0).await;
        app.accept(rollout("last", 1.0)).await;
        next_minute(app).await;
        let now = 60 * 26 + 15 * 1440 + 182 * 1440 + 133;
        let year = "from=2026-01-01T00:00:00Z&to=2027-01-01T00:00:00Z&step_s=86400";
        let found = app.get(&format!("/policies/default/series?{year}&metrics=received")).await.expect(200);
        let received = found["metrics"]["received"].as_array().expect("a list");
        assert_eq!(received.len(), now / 1440 + 1);
        assert_eq!(received[0], Value::Null);
        let total: f64 = received.iter().filter_map(Value::as_f64).sum();
        assert_eq!(Some(total), Some(1.0));
    }

    async fn the_time_in_which_the_service_was_not_running_is_a_gap(app: TestApp) {
        next_minute(app).await;
        app.accept(rollout("before", 1.0)).await;
        next_minute(app).await;
        app.accept(rollout("unrecorded", 1.0)).await;
        app.stop().await;
        app.clock.advance_s(300.0);
        app.restart().await;
        app.buffer.sweep().await.expect("the store can be swept");
        app.accept(rollout("after", 1.0)).await;
        next_minute(app).await;
        assert_eq!(column(app, (1, 9), "received").await, json!([1.0, 1.0, null, null, null, null, 1.0, 0.0]));
        assert_eq!(column(app, (1, 9), "ready_groups").await, json!([1.0, 2.0, null, null, null, null, 3.0, 3.0]));
        assert_eq!(window(app, 0, 10, 600, "received").await["metrics"]["received"], json!([3.0]));
    }

    async fn a_policy_has_nothing_of_other_policies(app: TestApp) {
        app.rules("other", json!({})).await;
        next_minute(app).await;
        app.accept(with(rollout("a", 1.0), json!({"policy": "other"}))).await;
        next_minute(app).await;
        assert_eq!(column(app, (0, 3), "received").await, json!([0.0, 0.0, 0.0]));
        let other = app.get(&format!("/policies/other/series?from={}&metrics=received", at(0))).await.expect(200);
        assert_eq!(other["metrics"]["received"], json!([0.0, 1.0, 0.0]));
        app.get("/policies/none/series?metrics=received").await.refused(404, "unknown-policy");
    }

    async fn what_cannot_be_shown_is_refused_with_the_name_of_the_parameter(app: TestApp) {
        let refused = async |query: &str, parameter: &str| {
            let answer = app.get(&format!("/policies/default/series?{query}")).await;
            assert_eq!(answer.pointers(422), [parameter], "{query}");
        };
        refused("metrics=received,nothing", "metrics").await;
        refused("metrics=dropped.", "metrics").await;
        let many = ["received"; 17].join(",");
        refused(&format!("metrics={many}"), "metrics").await;
        for step in ["0", "59", "90", "15552060"] {
            refused(&format!("metrics=received&step_s={step}"), "step_s").await;
        }
        refused("metrics=received&from=yesterday", "from").await;
        refused("metrics=received&to=1", "to").await;
        refused("metrics=received&from=2026-01-01T01:00:00Z", "from").await;
        refused("metrics=received&from=2025-12-31T12:00:00Z&to=2025-12-31T11:00:00Z", "from").await;
        refused("metrics=received&from=2025-12-17T03:00:00Z&step_s=60", "step_s").await;
        app.get("/policies/default/series").await.expect(422);
    }
}

/// The bytes of a database's files.
fn contents(database: &str) -> Vec<Vec<u8>> {
    let file = database.strip_prefix("sqlite:").expect("it is a file");
    ["", "-wal"].iter().map(|suffix| std::fs::read(Path::new(&format!("{file}{suffix}"))).unwrap_or_default()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_service_writes_nothing() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.accept(rollout("a", 1.0)).await;
    // The snapshot of what was posted, and one that finds no difference.
    for _ in 0..3 {
        next_minute(&app).await;
    }
    app.buffer.check_clock().await.expect("the clock can be marked");
    let before = contents(&app.database);
    for _ in 0..10 {
        next_minute(&app).await;
        app.get("/policies/default/series?metrics=received").await.expect(200);
    }
    app.buffer.check_clock().await.expect("the clock can be marked");
    assert!(contents(&app.database) == before, "the files have changed");
    app.accept(rollout("b", 1.0)).await;
    next_minute(&app).await;
    assert_eq!(rows(&app).await, 2);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_write_one_row_a_minute_and_answer_the_same() {
    let app = TestApp::start(Backend::Postgres).await;
    let mut other = app.replica().await;
    // The first snapshot after a start is taken at once, even in the middle of a minute.
    other.buffer.sweep().await.expect("the store can be swept");
    next_minute(&app).await;
    for minute in 0..4 {
        app.accept(rollout(&format!("a{minute}"), 1.0)).await;
        other.accept(rollout(&format!("b{minute}"), 1.0)).await;
        app.clock.advance_s(60.0);
        let (one, two) = tokio::join!(app.buffer.sweep(), other.buffer.sweep());
        one.and(two).expect("the store can be swept");
        let mark = || app.read_value("SELECT minute FROM history_mark".to_owned());
        eventually("a snapshot", || async { mark().await == START + 2 + minute }).await;
    }
    assert_eq!(rows(&app).await, 4);
    let expected = json!([0.0, 2.0, 2.0, 2.0, 2.0]);
    assert_eq!(column(&app, (0, 5), "received").await, expected);
    assert_eq!(column(&other, (0, 5), "received").await, expected);
    // One of them ends, and the other one goes on.
    other.stop().await;
    app.accept(rollout("last", 1.0)).await;
    next_minute(&app).await;
    assert_eq!(column(&app, (0, 7), "received").await, json!([0.0, 2.0, 2.0, 2.0, 2.0, 1.0, 0.0]));
    app.finish().await;
}
