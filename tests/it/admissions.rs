//! Overload: room reserved before work starts, and the backlog's bounds.

use serde_json::{Value, json};

use crate::support::{Backend, TestApp, group, member, on_both_stores, rollout, text, with};

/// Room for 2 x (1 + 1) x 2 = 8 rollouts.
fn rules() -> Value {
    json!({
        "group": {"size": 2, "timeout_s": 600}, "batch": {"groups": 2}, "staleness": {"max": 1},
        "require": ["tokens", "policy_version"],
    })
}

async fn admit(app: &TestApp, rollouts: u32) -> Value {
    let answer = app.post("/admissions", json!({"rollouts": rollouts})).await;
    let granted = answer.json["granted"].as_u64().expect("an admission says what it grants");
    answer.expect(if granted > 0 { 201 } else { 200 })
}

async fn reserved(app: &TestApp) -> i64 {
    let policy = app.get("/policies/default").await.expect(200);
    policy["waiting"]["reserved_rollouts"].as_i64().expect("a count")
}

fn named(value: Value, admission: &Value) -> Value {
    with(value, json!({"admission_id": admission["admission_id"]}))
}

on_both_stores! {
    async fn no_more_is_admitted_than_stays_fresh(app: TestApp) {
        app.rules("default", rules()).await;
        let first = admit(app, 6).await;
        assert_eq!((&first["granted"], &first["policy_version"], &first["expires_in_ms"]),
            (&json!(6), &json!(0), &json!(600_000)));
        assert_eq!(admit(app, 6).await["granted"], 2, "the rest of the room");
        assert_eq!(admit(app, 1).await["granted"], 0);
        assert_eq!(reserved(app).await, 8);
        // Leased rollouts still count, because they may come back. Trained rollouts do not count.
        for index in 0..2 {
            app.accept(named(member("a", index, 1.0), &first)).await;
            app.accept(named(member("b", index, 1.0), &first)).await;
        }
        assert_eq!(reserved(app).await, 4);
        let batch = app.lease().await;
        assert_eq!(admit(app, 9).await["granted"], 0);
        app.ack(&batch, 1).await.expect(200);
        assert_eq!(admit(app, 9).await["granted"], 4);
    }

    async fn an_admission_brings_its_version_and_is_used_up(app: TestApp) {
        app.rules("default", rules()).await;
        app.publish(3).await.expect(200);
        let admission = admit(app, 1).await;
        app.publish(4).await.expect(200);
        app.post("/trajectories", member("a", 0, 1.0)).await.refused(422, "invalid");
        let receipt = app.accept(named(member("a", 0, 1.0), &admission)).await;
        assert_eq!(receipt["warnings"], json!([]));
        assert_eq!(app.story("a-0").await["policy_version"], 3);
        assert_eq!(reserved(app).await, 0);
        // A retry uses no room, whether it names the admission or not.
        let named_again = app.accept(named(member("a", 0, 1.0), &admission)).await;
        let unnamed = app.post("/trajectories", member("a", 0, 1.0)).await.expect(200);
        assert_eq!((&named_again["duplicate"], &unnamed["duplicate"]), (&json!(true), &json!(true)));
        // A rollout beyond the admission's room is accepted with a warning if it has a version of its own.
        let over = with(member("a", 1, 1.0), json!({"policy_version": 4}));
        let receipt = app.accept(named(over, &admission)).await;
        assert!(text(&receipt["warnings"][0]).contains("admission"), "{receipt}");
        assert_eq!(app.story("a-1").await["policy_version"], 4);
    }

    async fn room_that_is_not_used_expires(app: TestApp) {
        app.rules("default", rules()).await;
        let admission = admit(app, 8).await;
        app.clock.advance_s(74.0);
        assert_eq!(admit(app, 8).await["granted"], 0);
        // An admission ends when it expires, even before the sweep.
        app.clock.advance_s(526.0);
        let late = with(rollout("late", 1.0), json!({"group_id": "g", "policy_version": 0}));
        let receipt = app.accept(named(late, &admission)).await;
        assert!(text(&receipt["warnings"][0]).contains("admission"), "{receipt}");
        assert_eq!(admit(app, 8).await["granted"], 7);
        app.pass_s(601.0).await;
        assert_eq!(reserved(app).await, 0, "the sweep gives back what nobody asks for");
    }

    async fn a_bundle_uses_room_in_its_order(app: TestApp) {
        app.rules("default", rules()).await;
        let admission = admit(app, 1).await;
        let bundle = json!([
            with(named(member("a", 0, 1.0), &admission), json!({"policy_version": 0})),
            with(named(member("a", 1, 1.0), &admission), json!({"policy_version": 0})),
        ]);
        let receipts = app.accept(bundle).await;
        assert_eq!(receipts[0]["warnings"], json!([]));
        assert_eq!(receipts[1]["warnings"].as_array().map(Vec::len), Some(1));
    }

    async fn a_bundle_that_is_refused_uses_no_room(app: TestApp) {
        app.rules("default", rules()).await;
        let admission = admit(app, 2).await;
        let bundle = json!([named(member("a", 0, 1.0), &admission), member("b", 0, 1.0)]);
        app.post("/trajectories", bundle).await.refused(422, "invalid");
        assert_eq!(reserved(app).await, 2);
    }

    async fn reserved_room_is_there_over_the_backlog(app: TestApp) {
        let backlog = json!({"group": {"size": 2}, "backlog": {"max_ready_rollouts": 4}});
        app.rules("default", backlog).await;
        let admission = admit(app, 2).await;
        assert_eq!(admission["granted"], 2);
        for name in ["a", "b"] {
            app.accept(group(name, &[1.0, 0.0])).await;
        }
        app.post("/trajectories", member("c", 0, 1.0)).await.refused(429, "backlog-full");
        app.accept(named(member("c", 0, 1.0), &admission)).await;
        app.accept(member("c", 1, 1.0)).await;
        assert_eq!(admit(app, 1).await["granted"], 0);
    }

    async fn every_group_that_a_bundle_opens_needs_room_in_the_backlog(app: TestApp) {
        let rules = json!({"group": {"size": 2}, "settle": "ack", "backlog": {"max_ready_rollouts": 6}});
        app.rules("default", rules).await;
        let groups = |names: &[&str]| -> Value {
            let members = names.iter().flat_map(|name| (0..2).map(move |index| member(name, index, f64::from(index as u8))));
            members.collect()
        };
        app.accept(group("a", &[1.0, 0.0])).await;
        app.accept(member("open", 0, 1.0)).await;
        // The backlog has three rollouts: the first new group makes five, the second seven, and the third does not fit.
        app.post("/trajectories", groups(&["b", "c", "d"])).await.refused(429, "backlog-full");
        app.get("/trajectories?rollout_id=b-0").await.refused(404, "not-found");
        // Rollouts of open groups count too. If they do not fit, only their bundle is refused.
        let mut with_open = groups(&["b", "c", "d"]);
        with_open.as_array_mut().expect("a bundle").insert(0, member("open", 1, 1.0));
        app.post("/trajectories", with_open).await.refused(429, "backlog-full");
        app.accept(member("open", 1, 1.0)).await;
        app.accept(groups(&["b"])).await;
        app.post("/trajectories", member("c", 0, 1.0)).await.refused(429, "backlog-full");
        // Dropped rollouts use no room.
        for step in 1..=3 {
            app.ack(&app.lease().await, step).await.expect(200);
        }
        let mut dropped = groups(&["c", "d", "e", "f"]);
        for rollout in dropped.as_array_mut().expect("a bundle") {
            rollout.as_object_mut().expect("a rollout").remove("reward");
        }
        app.accept(dropped).await;
    }

    async fn a_line_needs_room_beside_what_the_lines_before_it_added(app: TestApp) {
        app.rules("default", json!({"backlog": {"max_ready_rollouts": 2}})).await;
        let lines: Vec<String> = (0..5).map(|index| rollout(&format!("r{index}"), 1.0).to_string()).collect();
        let request = app.http.post(format!("{}/trajectories", app.url)).header("content-type", "application/x-ndjson");
        let answer = request.body(lines.join("\n")).send().await.expect("the server answers");
        let answers = answer.text().await.expect("the answer is text");
        let statuses: Vec<Value> = answers
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).expect("every line is JSON")["status"].clone())
            .collect();
        assert_eq!(statuses, [201, 201, 429, 429, 429]);
    }

    async fn a_bundle_larger_than_the_backlog_is_refused_without_retry_after(app: TestApp) {
        app.rules("default", json!({"backlog": {"max_ready_rollouts": 2}})).await;
        let bundle = |count: usize| -> Value { (0..count).map(|index| rollout(&format!("r{index}"), 1.0)).collect() };
        let refused = app.post("/trajectories", bundle(500)).await;
        assert_eq!(refused.json["retry_after_s"], Value::Null);
        refused.refused(413, "bundle-over-backlog");
        app.accept(bundle(2)).await;
        let another = json!([rollout("s0", 1.0), rollout("s1", 1.0)]);
        app.post("/trajectories", another).await.refused(429, "backlog-full");
    }

    async fn a_full_backlog_accepts_posts_again_only_below_a_lower_mark(app: TestApp) {
        let rules = json!({"group": {"size": 2}, "settle": "ack", "backlog": {"max_ready_rollouts": 20}});
        app.rules("default", rules).await;
        for index in 0..10 {
            app.accept(group(&format!("g{index}"), &[1.0, 0.0])).await;
        }
        let refused = app.post("/trajectories", group("more", &[1.0, 0.0])).await;
        assert!(refused.json["retry_after_s"].as_u64().is_some_and(|seconds| seconds > 0), "{refused:?}");
        refused.refused(429, "backlog-full");
        // 18 of 20 is below the bound, but the backlog reopens only a tenth below it.
        app.ack(&app.lease().await, 1).await.expect(200);
        app.post("/trajectories", group("more", &[1.0, 0.0])).await.refused(429, "backlog-full");
        app.ack(&app.lease().await, 2).await.expect(200);
        app.accept(group("more", &[1.0, 0.0])).await;
        app.accept(group("again", &[1.0, 0.0])).await;
    }

    async fn a_reset_voids_what_was_admitted(app: TestApp) {
        app.rules("default", rules()).await;
        let admission = admit(app, 8).await;
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(reserved(app).await, 0);
        let first = with(member("a", 0, 1.0), json!({"policy_version": 0}));
        let receipt = app.accept(named(first, &admission)).await;
        assert!(text(&receipt["warnings"][0]).contains("admission"), "{receipt}");
    }

    async fn an_invalid_admission_id_is_refused_by_name(app: TestApp) {
        let unknown = with(rollout("a", 1.0), json!({"admission_id": "no"}));
        assert_eq!(app.post("/trajectories", unknown).await.pointers(422), ["/admission_id"]);
        assert_eq!(app.post("/admissions", json!({"rollouts": 0})).await.pointers(422), ["/rollouts"]);
        app.post("/admissions", json!({"policy": "nobody", "rollouts": 1})).await.refused(404, "unknown-policy");
    }

    async fn requests_that_race_are_not_granted_the_same_room(app: TestApp) {
        app.rules("default", rules()).await;
        let asked = (0..32).map(|_| app.post("/admissions", json!({"rollouts": 1})));
        let granted: u64 = futures::future::join_all(asked)
            .await
            .into_iter()
            .map(|answer| answer.json["granted"].as_u64().expect("a count"))
            .sum();
        assert_eq!(granted, 8);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_do_not_grant_the_same_room() {
    let app = TestApp::start(Backend::Postgres).await;
    app.rules("default", rules()).await;
    let other = app.replica().await;
    let asked = (0..16).flat_map(|_| [&app, &other]).map(|app| app.post("/admissions", json!({"rollouts": 1})));
    let answers = futures::future::join_all(asked).await;
    let granted: u64 = answers.iter().map(|answer| answer.json["granted"].as_u64().expect("a count")).sum();
    assert_eq!(granted, 8);
    other.finish().await;
    app.finish().await;
}
