//! Shares of environments in batches: exact over batches, replicas and restarts, and visible when one is short.

use std::collections::BTreeMap;

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

/// Posts groups of many environments.
async fn fill_all(app: &TestApp, labels: &[String], groups: std::ops::Range<usize>) {
    for labels in labels.chunks(100) {
        let one =
            |label: &String, at: usize| with(rollout(&format!("{label}{at}"), 1.0), json!({"environment": label}));
        let body = labels.iter().flat_map(|label| groups.clone().map(move |at| one(label, at)));
        app.accept(Value::Array(body.collect())).await;
    }
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

    async fn of_more_environments_than_a_batch_considers_each_gets_its_turn(app: TestApp) {
        let labels: Vec<String> = (0..600).map(|at| format!("e{at:03}x")).collect();
        share(app, 50, json!({"swe": {"min_share": 0.1}, "math": {"weight": 64}})).await;
        fill_all(app, &labels, 0..3).await;
        fill(app, "swe", 0..250).await;
        fill(app, "math", 0..400).await;
        let mut turns: BTreeMap<String, usize> = BTreeMap::new();
        let (mut of_swe, mut of_math, mut others) = (0, 0, 0);
        while turns.len() < labels.len() || others < 2 * labels.len() {
            let batch = app.lease().await;
            assert_eq!(batch["groups"], 50);
            let swe = count(app, &batch, "swe").await;
            assert!(swe >= 5, "its minimum");
            (of_swe, of_math) = (of_swe + swe, of_math + count(app, &batch, "math").await);
            for group in app.group_ids(&batch).await.into_iter().filter(|group| group.starts_with('e')) {
                others += 1;
                *turns.entry(group[..5].to_owned()).or_default() += 1;
            }
            let (most, least) = (turns.values().max(), turns.values().min());
            let least = if turns.len() < labels.len() { 0 } else { *least.expect("labels") };
            assert!(most <= Some(&(least + 1)), "nobody gets a turn more than the others: {turns:?}");
        }
        // 64 of 321 (256 others, swe and math) of what the minimum leaves.
        let all = f64::from(of_swe as u32 + of_math as u32 + others as u32);
        let share = 0.9 * 64.0 / 321.0;
        assert!((of_math as f64 - all * share).abs() < 1.0, "{of_math} of {all}");
        // What is kept is bounded.
        let kept = app.read_value("SELECT CAST(LENGTH(shares) AS BIGINT) FROM policy WHERE name = 'default'".to_owned()).await;
        assert!(kept < 1_000, "{kept} bytes");
    }

    async fn a_batch_of_more_groups_than_the_considered_environments_have_is_not_held_up(app: TestApp) {
        let labels: Vec<String> = (0..300).map(|at| format!("e{at:03}x")).collect();
        share(app, 290, json!({"swe": {"min_share": 0.01}})).await;
        fill_all(app, &labels, 0..1).await;
        none(app).await;
        fill(app, "swe", 0..1).await;
        none(app).await;
        fill(app, "swe", 1..2).await;
        let batch = app.lease().await;
        assert_eq!((&batch["groups"], count(app, &batch, "swe").await), (&json!(290), 2));
        let partial = app.lease_with(json!({"partial": true})).await;
        assert_eq!(partial["groups"], 12, "all that are left");
        // A partial batch has more than the environments that it considers, too.
        fill_all(app, &labels, 1..2).await;
        assert_eq!(app.lease_with(json!({"partial": true})).await["groups"], 290);
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
