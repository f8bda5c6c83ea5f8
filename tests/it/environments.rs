//! Shares of environments in batches: exact over batches, replicas and restarts, and visible when one is short.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, rollout, with};

/// Posts groups of one rollout each, named after their environment.
async fn fill(app: &TestApp, environment: &str, groups: std::ops::Range<usize>) {
    let label = if environment.is_empty() { Value::Null } else { json!(environment) };
    let body = groups.map(|at| with(rollout(&format!("{environment}{at}"), 1.0), json!({"environment": label})));
    app.accept(Value::Array(body.collect())).await;
}

async fn share(app: &TestApp, groups: u32, environments: Value) {
    app.rules("default", json!({"batch": {"groups": groups, "environments": environments}})).await;
}

/// How many groups of the environment a batch has.
async fn count(app: &TestApp, batch: &Value, environment: &str) -> usize {
    app.group_ids(batch).await.iter().filter(|group| group.starts_with(environment)).count()
}

async fn none(app: &TestApp) {
    app.post("/batches", json!({})).await.expect(204);
}

/// What the policy says that it is waiting for: label, ready, needed and open groups.
async fn waiting(app: &TestApp) -> Value {
    app.get("/policies/default").await.expect(200)["waiting"]["environments"].clone()
}

on_both_stores! {
    async fn a_quarter_of_ten_groups_is_two_and_three_in_turn(app: TestApp) {
        share(app, 10, json!({"swe": {"weight": 1}, "math": {"weight": 3}})).await;
        fill(app, "math", 0..60).await;
        fill(app, "swe", 0..60).await;
        let mut counts = Vec::new();
        for _ in 0..2 {
            counts.push(count(app, &app.lease().await, "swe").await);
        }
        // Neither a restart nor another replica begins anew.
        app.restart().await;
        counts.push(count(app, &app.lease().await, "swe").await);
        counts.push(count(app, &app.lease().await, "swe").await);
        assert_eq!(counts, [2, 3, 2, 3]);
    }

    async fn the_groups_of_an_environment_are_taken_in_order_and_share_a_batch_evenly(app: TestApp) {
        share(app, 4, json!({"swe": {}})).await;
        fill(app, "swe", 0..4).await;
        fill(app, "math", 0..4).await;
        let first = app.lease().await;
        assert_eq!(app.group_ids(&first).await, ["math0", "swe0", "math1", "swe1"]);
        assert_eq!(first["metrics"]["environments/swe/groups"], 2.0);
        app.nack(&first, &[]).await.expect(200);
        let again = app.lease().await;
        assert_eq!(again["batch_id"], first["batch_id"], "what came back goes first, as it was cut");
        assert_eq!(app.group_ids(&app.lease().await).await, ["math2", "swe2", "math3", "swe3"]);
    }

    async fn a_batch_waits_for_the_minimum_of_an_environment(app: TestApp) {
        share(app, 4, json!({"swe": {"min_share": 0.25}})).await;
        fill(app, "math", 0..20).await;
        none(app).await;
        let member = with(crate::support::member("swe-open", 0, 1.0), json!({"environment": "swe", "group_size": 2}));
        app.accept(member).await;
        none(app).await;
        let short = json!([{"environment": "swe", "ready_groups": 0, "needed_groups": 1, "open_groups": 1}]);
        assert_eq!(waiting(app).await, short);
        let metrics = app.metrics().await;
        assert!(metrics.contains(r#"forebay_environment_ready_groups{environment="swe",policy="default"} 0"#), "{metrics}");
        assert!(metrics.contains(r#"forebay_environment_needed_groups{environment="swe",policy="default"} 1"#));
        fill(app, "swe", 0..1).await;
        let batch = app.lease().await;
        assert_eq!(count(app, &batch, "swe").await, 1, "its minimum, though its share is more");
        assert_eq!(batch["groups"], 4);
        none(app).await;
        let partial = app.lease_with(json!({"partial": true})).await;
        assert_eq!((count(app, &partial, "math").await, &partial["groups"]), (4, &json!(4)), "partial takes what is there");
        share(app, 4, json!({})).await;
        assert_eq!(app.lease().await["groups"], 4, "without the rule, no batch waits for an environment");
        assert_eq!(waiting(app).await, Value::Null);
        assert!(!app.metrics().await.contains("forebay_environment_ready_groups{"), "the gauges are gone");
    }

    async fn weights_divide_what_the_minimums_leave_among_environments_with_groups(app: TestApp) {
        share(app, 16, json!({"swe": {"min_share": 0.25}})).await;
        fill(app, "math", 0..40).await;
        fill(app, "swe", 0..40).await;
        assert_eq!(count(app, &app.lease().await, "swe").await, 10, "0.25 + 0.75 / 2");
        fill(app, "", 0..40).await;
        let three = app.lease().await;
        assert_eq!((count(app, &three, "swe").await, count(app, &three, "math").await), (8, 4), "0.25 + 0.75 / 3");
    }

    async fn an_environment_far_behind_in_the_line_gets_its_share(app: TestApp) {
        share(app, 2, json!({"swe": {}})).await;
        for hundred in 0..8 {
            fill(app, "math", hundred * 100..(hundred + 1) * 100).await;
        }
        fill(app, "swe", 0..1).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["math0", "swe0"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["math1", "math2"], "nothing is kept for those without groups");
    }

    async fn the_freshest_groups_of_each_environment_are_taken(app: TestApp) {
        let batch = json!({"groups": 2, "order": "freshest", "environments": {"swe": {}}});
        app.rules("default", json!({"batch": batch, "staleness": {"max": 1}})).await;
        for (name, version) in [("math-old", 0), ("math-new", 3), ("swe-old", 0), ("swe-2", 2), ("swe-3", 3), ("math-2", 2)] {
            let environment = name.split('-').next();
            let label = json!({"environment": environment, "policy_version": version});
            app.accept(with(rollout(name, 1.0), label)).await;
        }
        app.publish(3).await.expect(200);
        assert_eq!(app.group_ids(&app.lease().await).await, ["math-new", "swe-3"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["math-2", "swe-2"]);
        assert_eq!((&app.story("swe-old").await["state"], &app.story("math-old").await["state"]), (&json!("stale"), &json!("stale")));
    }

    async fn a_reset_begins_with_nothing_carried(app: TestApp) {
        share(app, 10, json!({"swe": {"weight": 1}, "math": {"weight": 3}})).await;
        for name in ["math", "swe"] {
            fill(app, name, 0..20).await;
        }
        assert_eq!(count(app, &app.lease().await, "swe").await, 2);
        app.post("/policies/default/reset", json!({})).await.expect(200);
        for name in ["math", "swe"] {
            fill(app, name, 0..20).await;
        }
        assert_eq!(count(app, &app.lease().await, "swe").await, 2);
    }

    async fn wrong_shares_are_refused_and_change_nothing(app: TestApp) {
        share(app, 4, json!({"swe": {"weight": 2}})).await;
        for (environments, pointer) in [
            (json!({"swe": {"min_share": 0.6}, "math": {"min_share": 0.5}}), "/batch/environments"),
            (json!({"a/b": {"weight": 0}}), "/batch/environments/a~1b/weight"),
            (json!({"": {"weight": 1}}), "/batch/environments/"),
            (json!({"swe": {"share": 1}}), "/batch/environments/swe/share"),
            (json!({"swe": [1, 0.5]}), "/batch/environments/swe"),
        ] {
            let refused = app.put("/policies/default", json!({"batch": {"environments": environments}})).await;
            assert_eq!(refused.pointers(422), [pointer]);
        }
        let rules = app.get("/policies/default").await.expect(200)["rules"]["batch"]["environments"].clone();
        assert_eq!(rules, json!({"swe": {"weight": 2.0, "min_share": 0.0}}));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_share_what_is_carried() {
    let app = TestApp::start(crate::support::Backend::Postgres).await;
    share(&app, 10, json!({"swe": {"weight": 1}, "math": {"weight": 3}})).await;
    for name in ["math", "swe"] {
        fill(&app, name, 0..40).await;
    }
    let other = app.replica().await;
    let mut counts = Vec::new();
    for app in [&app, &other, &app, &other] {
        counts.push(count(app, &app.lease().await, "swe").await);
    }
    assert_eq!(counts, [2, 3, 2, 3]);
    other.finish().await;
    app.finish().await;
}
