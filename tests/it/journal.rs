//! The journal: what operators and time did to a policy, and who.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Backend, TestApp, member, on_both_stores, rollout, text};

async fn journal(app: &TestApp) -> Vec<Value> {
    let page = app.get("/policies/default/journal").await.expect(200);
    page["entries"].as_array().expect("a list").clone()
}

async fn last(app: &TestApp) -> Value {
    app.get("/policies/default/journal?order=newest&limit=1").await.expect(200)["entries"][0].clone()
}

async fn kinds(app: &TestApp) -> Vec<String> {
    journal(app).await.iter().map(|entry| text(&entry["kind"]).to_owned()).collect()
}

fn filter(name: &str, when: &str) -> Value {
    json!({"name": name, "scope": "rollout", "when": when, "action": "drop"})
}

/// More entries than are kept.
const MANY: &str = "
    WITH RECURSIVE entries (number) AS (
        SELECT CAST(1 AS BIGINT) UNION ALL SELECT number + 1 FROM entries WHERE number < 2100
    )
    INSERT INTO journal (policy_pk, at_us, kind, key_id, body)
    SELECT p.policy_pk, 0, 'reset', NULL, '{\"run\":1}'
    FROM policy AS p
    CROSS JOIN entries AS e
    WHERE p.name = 'default'";

on_both_stores! {
    async fn a_change_of_rules_names_what_it_changed(app: TestApp) {
        let rules = json!({"filter": [filter("a", "reward < 0.0"), filter("b", "reward < 1.0")], "group": {"size": 2}});
        app.rules("default", rules.clone()).await;
        app.rules("default", rules).await;
        assert_eq!(kinds(app).await, ["rules-changed"], "the second call changed nothing");
        app.clock.advance_s(1.0);
        let rules = json!({"filter": [filter("b", "reward < 2.0"), filter("c", "reward < 3.0")], "lease": {"ttl_s": 60}});
        app.rules("default", rules).await;
        let default_size = app.get("/policies/default").await.expect(200)["rules"]["group"]["size"].clone();
        assert_ne!(default_size, 2);
        assert_eq!(last(app).await, json!({
            "at": "2026-01-01T00:00:01.000000Z", "kind": "rules-changed", "key_id": null,
            "detail": {
                "filters_added": ["c"], "filters_removed": ["a"], "filters_changed": ["b"],
                "settings_changed": ["group.size", "lease.ttl_s"],
            },
        }));
        // A policy that is created has no entry.
        app.rules("other", json!({"group": {"size": 3}})).await;
        assert_eq!(app.get("/policies/other/journal").await.expect(200)["entries"], json!([]));
    }

    async fn what_trainers_and_operators_do_is_noted(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.resume(None).await;
        assert_eq!(last(app).await["detail"], json!({"step": null, "returned": 1}));
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.accept(member("closed", 0, 1.0)).await;
        app.accept(member("discarded", 0, 1.0)).await;
        app.post("/groups/close", json!({"group_id": "closed"})).await.expect(200);
        assert_eq!(last(app).await["detail"], json!({"group_id": "closed"}));
        app.post("/groups/discard", json!({"group_id": "discarded", "reason": "bad"})).await.expect(200);
        assert_eq!(last(app).await["detail"], json!({"group_id": "discarded", "reason": "bad"}));
        app.call(Method::POST, "/policies/default/reset", None).await.expect(200);
        assert_eq!(last(app).await["detail"], json!({"run": 2}));
        assert_eq!(kinds(app).await, ["resumed", "rules-changed", "group-closed", "group-discarded", "reset"]);
    }

    async fn leases_that_expire_and_batches_that_are_quarantined_are_noted(app: TestApp) {
        app.rules("default", json!({"lease": {"ttl_s": 10, "max_deliveries": 2}})).await;
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.pass_s(11.0).await;
        assert_eq!((&last(app).await["kind"], &last(app).await["detail"]), (&json!("leases-expired"), &json!({"count": 1})));
        let again = app.lease().await;
        app.nack(&again, &[]).await.expect(200);
        let entry = last(app).await;
        assert_eq!(entry["kind"], "batch-quarantined");
        assert_eq!((&entry["detail"]["batch_id"], &entry["detail"]["failed_deliveries"]), (&batch["batch_id"], &json!(2)));
        app.post(&format!("/batches/{}/readmit", text(&batch["batch_id"])), json!({})).await.expect(200);
        assert_eq!(last(app).await["detail"], json!({"batch_id": batch["batch_id"]}));
        let bad = app.lease().await;
        app.nack(&bad, &["a"]).await.expect(200);
        let entry = last(app).await;
        assert_eq!((&entry["kind"], &entry["detail"]["count"]), (&json!("groups-quarantined"), &json!(1)));
    }

    async fn a_backlog_that_is_full_and_has_room_again_is_noted_once(app: TestApp) {
        app.rules("default", json!({"backlog": {"max_ready_rollouts": 2}})).await;
        app.accept(rollout("a", 1.0)).await;
        app.accept(rollout("b", 1.0)).await;
        for _ in 0..3 {
            app.post("/trajectories", rollout("c", 1.0)).await.refused(429, "backlog-full");
            app.pass_s(1.0).await;
        }
        assert_eq!(kinds(app).await, ["rules-changed", "backlog-full"]);
        for step in [1, 2] {
            let batch = app.lease().await;
            app.ack(&batch, step).await.expect(200);
        }
        app.accept(rollout("c", 1.0)).await;
        app.pass_s(1.0).await;
        app.pass_s(1.0).await;
        assert_eq!(kinds(app).await, ["rules-changed", "backlog-full", "backlog-freed"]);
    }

    async fn a_filter_that_begins_to_fail_is_noted_once_for_its_rules(app: TestApp) {
        let failing = |size: u64| json!({"filter": [filter("keyed", "reward_components[\"tests\"] < 0.5")], "batch": {"groups": size}});
        app.rules("default", failing(1)).await;
        for index in 0..3 {
            app.accept(rollout(&format!("r{index}"), 1.0)).await;
            app.pass_s(1.0).await;
        }
        assert_eq!(kinds(app).await, ["rules-changed", "filter-fails"]);
        assert_eq!(last(app).await["detail"], json!({"filter": "keyed"}));
        app.rules("default", failing(2)).await;
        app.accept(rollout("later", 1.0)).await;
        app.pass_s(1.0).await;
        assert_eq!(kinds(app).await, ["rules-changed", "filter-fails", "rules-changed", "filter-fails"]);
    }

    async fn entries_are_listed_in_both_orders_and_bounded(app: TestApp) {
        for size in 2..7 {
            app.rules("default", json!({"group": {"size": size}})).await;
        }
        for order in ["oldest", "newest"] {
            let mut pages = Vec::new();
            let mut query = format!("order={order}&limit=2");
            loop {
                let page = app.get(&format!("/policies/default/journal?{query}")).await.expect(200);
                pages.push(page["entries"].as_array().map_or(0, Vec::len));
                let Some(next) = page["next"].as_str() else { break };
                query = format!("after={next}&limit=2");
            }
            assert_eq!(pages, [2, 2, 1], "{order}");
        }
        app.tamper(MANY).await;
        app.rules("default", json!({"group": {"size": 9}})).await;
        assert_eq!(app.read_value("SELECT COUNT(*) FROM journal".to_owned()).await, 2_000);
        assert_eq!(last(app).await["kind"], "rules-changed");
        app.get("/policies/none/journal").await.refused(404, "unknown-policy");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_journal_names_the_key_of_who_did_it() {
    let app = TestApp::start_with(Backend::Sqlite, "").await;
    let admin = app.key(Role::Admin, &["*"]).await;
    let trainer = app.key(Role::Train, &["default"]).await;
    let id_of = async |key: &str| app.get_as(key, "/whoami").await.expect(200)["key_id"].clone();
    let (operator, trains) = (id_of(&admin).await, id_of(&trainer).await);
    let rules = json!({"group": {"size": 2}});
    app.call_as(&admin, Method::PUT, "/policies/default", Some(rules)).await.expect(200);
    let patch = json!({"group": {"size": 3}});
    app.call_as(&admin, Method::PATCH, "/policies/default", Some(patch)).await.expect(200);
    app.post_as(&trainer, "/policies/default/resume", json!({"step": null})).await.expect(200);
    let entries = app.get_as(&trainer, "/policies/default/journal").await.expect(200)["entries"].clone();
    let keys: Vec<&Value> = entries.as_array().expect("a list").iter().map(|entry| &entry["key_id"]).collect();
    assert_eq!(keys, [&operator, &operator, &trains]);
    app.finish().await;
}
