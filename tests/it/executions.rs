//! Executions: rollouts of several policies that belong together are looked up together.

use forebay_wire::Role;
use serde_json::{Value, json};

use crate::support::{TestApp, member, on_both_stores, rollout, text, with};

/// A rollout of a policy.
fn of(policy: &str, rollout_id: &str) -> Value {
    with(rollout(rollout_id, 1.0), json!({"policy": policy}))
}

/// A rollout that names its execution.
fn within(execution: &str, rollout: Value) -> Value {
    with(rollout, json!({"execution_id": execution}))
}

/// The policies and rollouts of a list.
fn found(page: &Value) -> Vec<(&str, &str)> {
    let stories = page["trajectories"].as_array().expect("a page");
    stories.iter().map(|story| (text(&story["policy"]), text(&story["rollout_id"]))).collect()
}

async fn list(app: &TestApp, query: &str) -> Value {
    app.get(&format!("/trajectories?{query}")).await.expect(200)
}

on_both_stores! {
    async fn every_role_of_an_execution_is_listed(app: TestApp) {
        for policy in ["solver", "critic"] {
            app.rules(policy, json!({})).await;
        }
        let receipts = app.accept(json!([within("x", of("solver", "s")), within("x", of("critic", "c"))])).await;
        assert_eq!((&receipts[0]["execution_id"], &receipts[1]["execution_id"]), (&json!("x"), &json!("x")));
        app.accept(within("y", of("solver", "other"))).await;
        // Rollouts of an execution need not be posted together.
        app.accept(within("x", of("critic", "later"))).await;
        let page = list(app, "execution_id=x").await;
        assert_eq!(found(&page), [("solver", "s"), ("critic", "c"), ("critic", "later")]);
        assert_eq!((&page["trajectories"][0]["execution_id"], &page["next"]), (&json!("x"), &Value::Null));
        assert_eq!(found(&list(app, "execution_id=x&policy=critic").await), [("critic", "c"), ("critic", "later")]);
        assert_eq!(found(&list(app, "execution_id=x&group_id=c").await), [("critic", "c")]);
        assert_eq!(found(&list(app, "execution_id=x&verdict=late").await), []);
        assert_eq!(found(&list(app, "execution_id=z").await), []);
        let first = list(app, "execution_id=x&limit=2").await;
        assert_eq!(found(&first).len(), 2);
        let rest = list(app, &format!("execution_id=x&limit=2&after={}", text(&first["next"]))).await;
        assert_eq!(found(&rest), [("critic", "later")]);
        app.get("/trajectories?execution_id=x&policy=nobody").await.refused(404, "unknown-policy");
        // The rollouts of all runs are listed.
        app.post("/policies/critic/reset", json!({})).await.expect(200);
        let page = list(app, "execution_id=x").await;
        assert_eq!(found(&page).len(), 3);
        assert_eq!((&page["trajectories"][0]["run"], &page["trajectories"][1]["run"]), (&json!(1), &json!(1)));
    }

    async fn an_execution_without_an_id_gets_one_per_bundle(app: TestApp) {
        let bundle = json!([rollout("a", 1.0), within("mine", rollout("b", 1.0)), rollout("c", 1.0)]);
        let first = app.accept(bundle.clone()).await;
        let minted = text(&first[0]["execution_id"]);
        assert_eq!((minted.len(), text(&first[1]["execution_id"]), text(&first[2]["execution_id"])), (36, "mine", minted));
        assert_eq!(found(&list(app, &format!("execution_id={minted}")).await), [("default", "a"), ("default", "c")]);
        assert_eq!(app.story("c").await["execution_id"], *minted);
        // A repeat is recognised although the service would give it another id, and is told the first one.
        let again = app.post("/trajectories", bundle).await.expect(200);
        assert_eq!((&again[0]["duplicate"], &again[0]["execution_id"]), (&json!(true), &json!(minted)));
        // Rollouts that are posted alone, and the lines of a bulk body, have executions of their own.
        let lines = format!("{}\n{}\n", rollout("d", 1.0), rollout("e", 1.0));
        let request = app.http.post(format!("{}/trajectories", app.url)).body(lines);
        let answer = request.header("content-type", "application/x-ndjson").send().await.expect("the server answers");
        let answer = answer.text().await.expect("text");
        let mut seen = vec![text(&app.accept(rollout("f", 1.0)).await["execution_id"]).to_owned(), minted.to_owned()];
        for line in answer.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            seen.push(text(&line["receipt"]["execution_id"]).to_owned());
        }
        assert_eq!(seen.len(), 4);
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 4, "{seen:?}");
    }

    async fn an_execution_that_the_producer_names_is_part_of_the_content(app: TestApp) {
        let posted = within("x", member("g", 0, 1.0));
        app.accept(posted.clone()).await;
        let again = app.post("/trajectories", posted.clone()).await.expect(200);
        assert_eq!(again["execution_id"], "x");
        app.post("/trajectories", within("y", posted.clone())).await.refused(409, "rollout-conflict");
        app.post("/trajectories", member("g", 0, 1.0)).await.refused(409, "rollout-conflict");
        for unfit in [json!(""), json!("a\nb"), json!("x".repeat(257))] {
            let answer = app.post("/trajectories", with(posted.clone(), json!({"execution_id": unfit}))).await;
            assert_eq!(answer.pointers(422), ["/execution_id"]);
        }
        // Null means the same as absent.
        app.accept(rollout("a", 1.0)).await;
        app.post("/trajectories", with(rollout("a", 1.0), json!({"execution_id": null}))).await.expect(200);
    }

    async fn a_key_sees_only_the_roles_of_its_policies(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let solver = app.key(Role::Produce, &["solver"]).await;
        for policy in ["solver", "critic"] {
            app.call_as(&admin, reqwest::Method::PUT, &format!("/policies/{policy}"), Some(json!({}))).await.expect(201);
        }
        let hidden: Vec<Value> = (0..150).map(|index| within("x", of("critic", &format!("c{index}")))).collect();
        app.post_as(&admin, "/trajectories", Value::Array(hidden)).await.expect(201);
        let page = app.get_as(&solver, "/trajectories?execution_id=x&limit=1").await.expect(200);
        assert_eq!((found(&page), &page["next"]), (vec![], &Value::Null), "as if the execution did not exist");
        for rollout_id in ["s1", "s2"] {
            app.post_as(&solver, "/trajectories", within("x", of("solver", rollout_id))).await.expect(201);
        }
        let page = app.get_as(&solver, "/trajectories?execution_id=x&limit=1").await.expect(200);
        assert_eq!(found(&page), [("solver", "s1")]);
        let next = format!("/trajectories?execution_id=x&limit=1&after={}", text(&page["next"]));
        let page = app.get_as(&solver, &next).await.expect(200);
        assert_eq!((found(&page), &page["next"]), (vec![("solver", "s2")], &Value::Null));
        app.get_as(&solver, "/trajectories?execution_id=x&policy=critic").await.refused(404, "unknown-policy");
        let all = app.get_as(&admin, "/trajectories?execution_id=x&limit=1000").await.expect(200);
        assert_eq!(found(&all).len(), 152);
    }

    async fn executions_are_forgotten_with_their_rollouts(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 1000, "settled_s": 100, "tombstone_s": 500}})).await;
        app.accept(within("x", rollout("a", 1.0))).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        app.pass_s(101.0).await;
        assert_eq!(found(&list(app, "execution_id=x").await), [("default", "a")], "only the payload is purged");
        app.pass_s(501.0).await;
        assert_eq!(found(&list(app, "execution_id=x").await), []);
    }
}
