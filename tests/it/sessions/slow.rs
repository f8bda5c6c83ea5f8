//! `staleness.action = "wait"`: no batch is granted while the next version would make a rollout too old that is under way.

use forebay_wire::VersionSpan;
use serde_json::{Value, json};

use super::{A, E, S, T, U, call, finish, open, path, record, session};
use crate::support::{TestApp, group, member, on_both_stores, text, with};

fn rules(size: u32, more: Value) -> Value {
    let staleness = with(json!({"max": 1, "action": "wait", "wait_s": 600}), more);
    json!({"group": {"size": size}, "staleness": staleness, "settle": "ack"})
}

async fn finish_with_call(app: &TestApp, opened: &Value) {
    record(app, opened, call(&[S, U, A], &[11, E])).await;
    finish(app, opened, 1.0).await;
}

/// Whether a batch is granted.
async fn is_granted(app: &TestApp) -> bool {
    match app.post("/batches", json!({})).await.status.as_u16() {
        201 => true,
        204 => false,
        other => panic!("status {other}"),
    }
}

/// The first cause of what `why` says after a trainer has asked for a time.
async fn cause(app: &TestApp) -> Value {
    for _ in 0..25 {
        app.post("/batches", json!({"consumer": "trainer"})).await.expect(204);
        app.pass_s(3.0).await;
    }
    app.pass_s(2.0).await;
    let why = app.get("/policies/default/why").await.expect(200);
    assert_eq!((&why["state"], &why["causes"][0]["code"]), (&json!("starved"), &json!("slow-rollout")), "{why:#}");
    why["causes"][0].clone()
}

on_both_stores! {
    async fn a_batch_waits_for_a_session_that_the_next_version_would_make_too_old(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        let slow_one = open(app, json!({"rollout_id": "slow"})).await;
        record(app, &slow_one, call(&[S, U, A], &[11, E])).await;
        assert_eq!(session(app, &slow_one).await["stale_after_versions"], 2);
        app.accept(group("a", &[1.0])).await;
        let batch = app.lease().await;
        assert_eq!(app.group_ids(&batch).await, ["a"], "the next version does not make it too old");
        app.ack(&batch, 1).await.expect(200);
        app.publish(1).await.expect(200);
        assert_eq!(session(app, &slow_one).await["stale_after_versions"], 1);
        app.accept(group("b", &[1.0])).await;
        assert!(!is_granted(app).await);
        record(app, &slow_one, call(&[S, U, A, 11, E, T, A], &[12, E])).await;
        assert!(!is_granted(app).await);
        finish(app, &slow_one, 1.0).await;
        // What would be too old comes first.
        assert_eq!(app.group_ids(&app.lease().await).await, ["slow"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["b"]);
    }

    async fn the_wait_ends_and_what_was_waited_for_in_vain_is_stale(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        let slow_one = open(app, json!({"rollout_id": "slow", "idle_s": 86_400, "ttl_s": 86_400})).await;
        record(app, &slow_one, call(&[S, U, A], &[11, E])).await;
        app.publish(1).await.expect(200);
        app.accept(group("a", &[1.0])).await;
        // Time before the first claim that waits does not count.
        app.pass_s(900.0).await;
        assert!(!is_granted(app).await);
        app.pass_s(595.0).await;
        assert!(!is_granted(app).await);
        app.pass_s(6.0).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["a"]);
        app.accept(group("c", &[1.0])).await;
        assert!(is_granted(app).await, "it is not waited for twice");
        app.publish(2).await.expect(200);
        assert_eq!(session(app, &slow_one).await["stale_after_versions"], 0);
        app.accept(group("b", &[1.0])).await;
        assert!(is_granted(app).await, "what is too old already is not waited for");
        finish(app, &slow_one, 1.0).await;
        assert!(!is_granted(app).await);
        assert_eq!(app.story("slow").await["state"], "stale");
    }

    async fn a_batch_that_is_leased_ahead_waits_one_version_earlier(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        let slow_one = open(app, json!({"rollout_id": "slow"})).await;
        for name in ["a", "b", "c"] {
            app.accept(group(name, &[1.0])).await;
        }
        let lease = |consumer: &str| json!({"consumer": consumer});
        app.lease_with(lease("one")).await;
        // Its version would be the one after the next.
        app.post("/batches", lease("one")).await.expect(204);
        app.lease_with(lease("two")).await;
        finish_with_call(app, &slow_one).await;
        app.lease_with(lease("one")).await;
    }

    async fn a_trainer_that_need_not_wait_does_not_prolong_the_wait_of_another_one(app: TestApp) {
        app.rules("default", with(rules(1, json!({})), json!({"lease": {"ttl_s": 86_400}}))).await;
        let slow_one = open(app, json!({"rollout_id": "slow", "idle_s": 86_400, "ttl_s": 86_400})).await;
        record(app, &slow_one, call(&[S, U, A], &[11, E])).await;
        for name in ["a", "b"] {
            app.accept(group(name, &[1.0])).await;
        }
        let ask = |consumer: &str| json!({"consumer": consumer});
        app.lease_with(ask("ahead")).await;
        app.post("/batches", ask("ahead")).await.expect(204);
        app.pass_s(590.0).await;
        app.lease_with(ask("other")).await;
        app.post("/batches", ask("other")).await.expect(204);
        app.accept(group("c", &[1.0])).await;
        app.post("/batches", ask("ahead")).await.expect(204);
        app.pass_s(9.0).await;
        app.lease_with(ask("third")).await;
        app.accept(group("d", &[1.0])).await;
        app.post("/batches", ask("ahead")).await.expect(204);
        app.pass_s(2.0).await;
        assert_eq!(app.group_ids(&app.lease_with(ask("ahead")).await).await, ["d"]);
    }

    async fn a_session_is_as_old_as_its_calls(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        let late = open(app, json!({"rollout_id": "late"})).await;
        app.publish(1).await.expect(200);
        app.accept(group("a", &[1.0])).await;
        assert!(!is_granted(app).await, "its first call may be under way");
        assert_eq!(session(app, &late).await["stale_after_versions"], 2);
        let mut first = call(&[S, U, A], &[11, E]);
        first.versions = vec![VersionSpan(1, 0, 2)];
        record(app, &late, first).await;
        assert!(is_granted(app).await);
        assert_eq!(session(app, &late).await["stale_after_versions"], 2);
        record(app, &late, call(&[S, U, A, 11, E, T, A], &[12, E])).await;
        assert_eq!(session(app, &late).await["stale_after_versions"], 1, "an engine may be behind");
    }

    async fn what_was_waited_for_in_vain_can_be_masked(app: TestApp) {
        app.rules("default", rules(1, json!({"after_wait": "mask"}))).await;
        let halves = json!({"tokens": [1, 2, 3, 4, 5], "loss_mask": [1, 1, 1, 1], "logprobs": [-0.1, -0.2, -0.3, -0.4],
            "versions": [[0, 0, 2], [2, 2, 2]]});
        app.publish(2).await.expect(200);
        app.accept(with(member("g", 0, 1.0), json!({"segments": [halves]}))).await;
        let rows = app.samples(&app.lease().await).await;
        assert_eq!(rows[0]["loss_mask"], json!([0, 0, 1, 1]));
    }

    async fn rollouts_of_an_open_group_are_as_old_as_its_oldest(app: TestApp) {
        app.rules("default", rules(2, json!({}))).await;
        app.accept(with(member("g", 0, 1.0), json!({"policy_version": 0}))).await;
        app.publish(1).await.expect(200);
        app.accept(group("a", &[1.0, 0.0])).await;
        assert!(is_granted(app).await, "nobody is at work for the missing place");
        app.accept(group("b", &[1.0, 0.0])).await;
        let fresh = open(app, json!({"rollout_id": "g-1", "group_id": "g"})).await;
        assert!(!is_granted(app).await, "with its group, it would be too old");
        record(app, &fresh, call(&[S, U, A], &[11, E])).await;
        finish(app, &fresh, 0.0).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["g"]);
    }

    async fn admissions_and_rollouts_without_scores_are_waited_for_and_named(app: TestApp) {
        let scores = json!({"scores": {"required": ["judge"], "timeout_s": 86_400}});
        app.rules("default", with(rules(1, json!({})), scores)).await;
        let admission = app.post("/admissions", json!({"rollouts": 2})).await.expect(201);
        app.publish(1).await.expect(200);
        app.accept(with(group("a", &[1.0])[0].clone(), json!({"reward_components": {"judge": 1.0}}))).await;
        let found = cause(app).await;
        assert_eq!((&found["numbers"]["rollouts"], &found["see"]), (&json!(2), &json!("./policies/default")));
        // A rollout that takes the room is of the version of the admission.
        for id in ["s-0", "s-1"] {
            let mut rollout = member(id, 0, 1.0);
            rollout["rollout_id"] = id.into();
            app.accept(with(rollout, json!({"admission_id": admission["admission_id"]}))).await;
        }
        let found = cause(app).await;
        assert!(text(&found["text"]).contains("the scores of rollout s-0, which arrived"), "{found}");
        for id in ["s-0", "s-1"] {
            assert!(!is_granted(app).await);
            app.post("/scores", json!({"rollout_id": id, "name": "judge", "value": 1.0})).await.expect(201);
        }
        assert_eq!(app.group_ids(&app.lease().await).await, ["s-0"]);
    }

    async fn nobody_waits_for_what_nobody_works_at(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        let parked = open(app, json!({"rollout_id": "parked", "idle_s": 60})).await;
        let lapsed = app.post("/admissions", json!({"rollouts": 1})).await.expect(201);
        app.publish(1).await.expect(200);
        app.accept(group("a", &[1.0])).await;
        assert!(!is_granted(app).await);
        app.pass_s(61.0).await;
        assert_eq!(session(app, &parked).await["state"], "parked");
        assert!(!is_granted(app).await, "room is reserved");
        app.accept(with(member("late", 0, 1.0), json!({"admission_id": lapsed["admission_id"]}))).await;
        assert!(!is_granted(app).await, "somebody may start its agent again");
        app.pass_s(300.0).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["late"]);
        // With an agent again, it is waited for again.
        app.post(&path(&parked, "/resume"), json!({})).await.expect(200);
        assert!(!is_granted(app).await);
    }

    async fn a_trained_batch_takes_its_room_until_its_version_is_published(app: TestApp) {
        app.rules("default", rules(1, json!({}))).await;
        app.accept(group("a", &[1.0])).await;
        app.accept(group("b", &[1.0])).await;
        let granted = async || app.post("/admissions", json!({"rollouts": 1})).await.json["granted"].as_u64();
        assert_eq!(granted().await, Some(0));
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        assert_eq!(granted().await, Some(0));
        app.put("/policies/default/version", json!({"version": 1, "step": 1})).await.expect(200);
        assert_eq!(granted().await, Some(1));
    }

    async fn rules_that_contradict_each_other_are_refused(app: TestApp) {
        let wrong = with(rules(1, json!({})), json!({"batch": {"order": "freshest"}}));
        let answer = app.put("/policies/default", wrong).await.expect(422);
        assert_eq!(answer["errors"][0]["pointer"], "/batch/order", "{answer}");
    }
}
