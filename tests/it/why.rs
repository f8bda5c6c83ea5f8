//! Why: the states of policies with their causes, and what became of rollouts, groups and batches.

use forebay_wire::Role;
use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores, rollout, text, with};

const ZERO_VARIANCE: &str = "reward_std < 1e-6";

async fn rules(app: &TestApp) {
    let rules = json!({
        "group": {"size": 2}, "batch": {"groups": 2}, "retention": {"dropped_s": 3600}, "lease": {"ttl_s": 3600},
        "filter": [
            {"name": "zero-variance", "scope": "group", "when": ZERO_VARIANCE, "action": "drop"},
            {"name": "too-low", "scope": "rollout", "when": "reward < -5.0", "action": "drop"},
        ],
    });
    app.rules("default", rules).await;
}

/// The explanation of the default policy, after the second for which answers stay.
async fn why(app: &TestApp) -> Value {
    app.pass_s(2.0).await;
    app.get("/policies/default/why").await.expect(200)
}

async fn life(app: &TestApp, id: &str) -> Value {
    app.get(&format!("/why?id={id}")).await.expect(200)
}

fn codes(answer: &Value) -> Vec<&str> {
    let causes = answer["causes"].as_array().expect("a list");
    causes.iter().map(|cause| cause["code"].as_str().expect("a code")).collect()
}

on_both_stores! {
    async fn a_policy_is_idle_then_fed_then_starved_by_its_filter(app: TestApp) {
        rules(app).await;
        let answer = why(app).await;
        assert_eq!((&answer["state"], &answer["causes"]), (&json!("idle"), &json!([])), "{answer}");
        app.accept(group("good", &[0.0, 1.0])).await;
        let answer = why(app).await;
        assert_eq!((&answer["state"], &answer["headline"]),
            (&json!("idle"), &json!("No trainer has asked yet; 1 of 2 groups is ready")));
        for number in 0..20 {
            app.accept(group(&format!("flat-{number}"), &[1.0, 1.0])).await;
        }
        // The trainer asks, and asks again.
        for _ in 0..25 {
            app.post("/batches", json!({"consumer": "trainer-0"})).await.expect(204);
            app.pass_s(3.0).await;
        }
        let answer = why(app).await;
        assert_eq!((&answer["state"], codes(&answer)[0]), (&json!("starved"), "filter-discards"), "{answer:#}");
        let headline = answer["headline"].as_str().expect("a sentence");
        assert!(headline.ends_with("1 of 2 groups is ready. zero-variance discards 95% of groups"), "{headline}");
        let cause = &answer["causes"][0];
        assert_eq!((&cause["filter"], &cause["numbers"]["discarded"]), (&json!("zero-variance"), &json!(20)));
        let see = cause["see"].as_str().expect("a call").trim_start_matches('.').to_owned();
        let listed = app.get(&see).await.expect(200);
        assert_eq!(listed["groups"].as_array().map(Vec::len), Some(20), "the call lists what the cause counts");
        assert!(codes(&json!({"causes": answer["ruled_out"]})).contains(&"backlog-full"), "{answer:#}");
        // The state ends when its condition ends.
        app.accept(group("better", &[0.0, 1.0])).await;
        let batch = app.lease_with(json!({"consumer": "trainer-0"})).await;
        assert_ne!(why(app).await["state"], "starved");
        app.ack(&batch, 1).await.expect(200);
    }

    async fn a_trainer_that_never_comes_leaves_groups_untaken(app: TestApp) {
        rules(app).await;
        app.accept(group("a", &[0.0, 1.0])).await;
        app.accept(group("b", &[0.0, 1.0])).await;
        let answer = why(app).await;
        assert_eq!((&answer["state"], &answer["headline"]),
            (&json!("idle"), &json!("No trainer has asked yet; the next batch is ready")), "not yet");
        app.pass_s(1_200.0).await;
        let answer = why(app).await;
        assert_eq!((&answer["state"], codes(&answer)[0]), (&json!("untaken"), "nobody-asks"), "{answer:#}");
        let batch = app.lease_with(json!({"consumer": "t"})).await;
        assert_eq!(why(app).await["state"], "fed");
        app.pass_s(1_500.0).await;
        let answer = why(app).await;
        assert_eq!((&answer["state"], codes(&answer)[0]), (&json!("stuck"), "lease-overdue"), "{answer:#}");
        app.ack(&batch, 1).await.expect(200);
        assert_eq!(why(app).await["state"], "fed");
    }

    async fn answers_stay_for_a_second(app: TestApp) {
        let before = app.get("/policies/default/why").await.expect(200);
        app.accept(rollout("a", 1.0)).await;
        assert_eq!(app.get("/policies/default/why").await.expect(200), before);
        assert_ne!(why(app).await["headline"], before["headline"]);
        app.get("/policies/nobody/why").await.refused(404, "unknown-policy");
    }

    async fn the_overview_has_the_worst_first_in_pages_and_only_what_the_key_may_see(app: TestApp) {
        for policy in ["a.fine", "b.full", "c.fine"] {
            app.rules(policy, json!({"backlog": {"max_ready_rollouts": 2}})).await;
            app.accept(with(rollout("r", 1.0), json!({"policy": policy}))).await;
        }
        app.accept(with(rollout("r-2", 1.0), json!({"policy": "b.full"}))).await;
        app.pass_s(2.0).await;
        let all = app.get("/overview").await.expect(200);
        let names = |page: &Value| -> Vec<String> {
            let policies = page["policies"].as_array().expect("a list").iter();
            policies.map(|each| format!("{} {}", text(&each["policy"]), text(&each["state"]))).collect()
        };
        assert_eq!(names(&all), ["b.full held-back", "a.fine idle", "c.fine idle", "default idle"]);
        let full = &all["policies"][0];
        assert_eq!((&full["ready_groups"], &full["needed_groups"], &full["lost_last_hour"]), (&json!(2), &json!(1), &json!(0)));
        assert!(full["received_per_min"].as_f64().expect("a rate") > 0.0, "{full}");
        let first = app.get("/overview?limit=3").await.expect(200);
        let next = first["next"].as_str().expect("another page");
        let second = app.get(&format!("/overview?limit=3&after={next}")).await.expect(200);
        assert_eq!((names(&first).len(), names(&second), &second["next"]), (3, names(&all)[3..].to_vec(), &Value::Null));
        app.get("/overview?limit=201").await.refused(422, "invalid");
        app.get("/overview?after=x").await.refused(422, "invalid");
        let key = app.key(Role::Produce, &["c.*"]).await;
        assert_eq!(names(&app.get_as(&key, "/overview").await.expect(200)), ["c.fine idle"]);
    }

    async fn the_life_of_a_trained_rollout_is_told_from_its_arrival_to_its_checkpoint(app: TestApp) {
        rules(app).await;
        app.accept(json!([group("a", &[0.0, 1.0])[0]])).await;
        let open = life(app, "a-0").await;
        assert_eq!((&open["kind"], &open["state"], codes(&open)), (&json!("rollout"), &json!("open"), vec!["received", "open"]));
        assert!(text(&open["headline"]).starts_with("Waits: group a has 1 of 2 rollouts"), "{open}");
        app.accept(json!([group("a", &[0.0, 1.0])[1]])).await;
        app.accept(group("b", &[0.0, 1.0])).await;
        let ready = life(app, "b-0").await;
        let expected = "Ready to be trained: 1 group is before group b, so no other batch goes out before its batch";
        assert_eq!(ready["headline"], expected);
        let batch = app.lease_with(json!({"consumer": "trainer-0"})).await;
        app.clock.advance_s(5.0);
        let leased = life(app, "a-0").await;
        assert!(text(&leased["headline"]).starts_with("In training: trainer-0 has held its batch for 5 s"), "{leased}");
        app.ack(&batch, 3).await.expect(200);
        let trained = life(app, "a-0").await;
        assert_eq!(codes(&trained), ["received", "complete", "batched", "trained"], "{trained:#}");
        assert!(text(&trained["headline"]).starts_with("Trained by step 3"), "{trained}");
        app.checkpoint(3).await;
        let of_batch = life(app, text(&batch["batch_id"])).await;
        assert_eq!((&of_batch["kind"], &of_batch["state"]), (&json!("batch"), &json!("checkpointed")));
        assert!(text(&of_batch["headline"]).ends_with("and a checkpoint covers it"), "{of_batch}");
        assert_eq!(life(app, "a").await["kind"], "group");
    }

    async fn what_is_not_trained_is_told_with_the_rule_of_its_time(app: TestApp) {
        rules(app).await;
        app.accept(group("flat", &[1.0, 1.0])).await;
        app.accept(group("good", &[0.0, 1.0])).await;
        app.accept(json!([with(group("good", &[0.0, 1.0])[0].clone(), json!({"rollout_id": "too-late"}))])).await;
        app.accept(json!([group("low", &[-9.0, 1.0])[0]])).await;
        // Later rules do not change what is told.
        app.rules("default", json!({"group": {"size": 2}})).await;
        let flat = life(app, "flat-1").await;
        assert_eq!(flat["headline"], "Not trained: the filter zero-variance discarded group flat; all rewards were 1");
        assert_eq!(flat["causes"][1]["rule"], format!("zero-variance: drop when {ZERO_VARIANCE}"));
        let late = life(app, "too-late").await;
        let expected = "Not trained: its group good was decided 0 s before; good-1 took its last place";
        assert_eq!((&late["state"], &late["headline"]), (&json!("late"), &json!(expected)));
        let low = life(app, "low-0").await;
        assert_eq!(low["headline"], "Not trained: the filter too-low dropped it at its arrival");
        assert_eq!(low["causes"][1]["rule"], "too-low: drop when reward < -5.0");
    }

    async fn an_id_is_looked_for_where_the_key_may_look(app: TestApp) {
        for policy in ["a", "b"] {
            app.rules(policy, json!({"group": {"size": 1}})).await;
            app.accept(with(rollout("same", 1.0), json!({"policy": policy}))).await;
        }
        let found = life(app, "same").await;
        assert_eq!((&found["policy"], &found["also"][0]), (&json!("a"), &json!({"kind": "rollout", "policy": "b"})));
        assert_eq!(app.get("/why?id=same&policy=b").await.expect(200)["policy"], "b");
        let unknown = app.get("/why?id=nobody").await.refused(404, "not-found");
        assert!(text(&unknown["detail"]).contains("never posted here, or it was forgotten"), "{unknown}");
        app.get("/why?id=same&policy=c").await.refused(404, "unknown-policy");
        app.get("/why").await.refused(422, "invalid");
        let batch = app.lease_with(json!({"policy": "a"})).await;
        let batch_id = text(&batch["batch_id"]);
        let (train, produce) = (app.key(Role::Train, &["a"]).await, app.key(Role::Produce, &["b"]).await);
        app.get_as(&train, "/why?id=same").await.refused(404, "not-found");
        assert_eq!(app.get_as(&train, &format!("/why?id={batch_id}")).await.expect(200)["kind"], "batch");
        assert_eq!(app.get_as(&produce, "/why?id=same").await.expect(200)["policy"], "b");
        app.get_as(&produce, &format!("/why?id={batch_id}")).await.refused(404, "not-found");
    }
}
