//! Lineage: checkpoints, resume, reset, and the rule for trainers.

use serde_json::{Value, json};

use crate::support::{TestApp, member, on_both_stores, rollout, text, with};

async fn post_rollouts(app: &TestApp, range: std::ops::Range<usize>) {
    let rollouts = range.map(|index| rollout(&format!("r{index:03}"), index as f64));
    app.accept(rollouts.collect()).await;
}

/// Leases the next batch and acks it.
async fn train(app: &TestApp, step: i64) -> Value {
    let batch = app.lease().await;
    app.ack(&batch, step).await.expect(200);
    batch
}

async fn resume_with(app: &TestApp, body: Value) -> crate::support::Answer {
    app.post("/policies/default/resume", body).await
}

on_both_stores! {
    async fn resume_revokes_leases_and_brings_back_what_was_acked_after_the_step(app: TestApp) {
        post_rollouts(app, 0..5).await;
        let mut batches = Vec::new();
        for step in 1..=3 {
            batches.push(train(app, step).await);
        }
        app.checkpoint(1).await;
        let leased = app.lease().await;
        let resumed = app.resume(Some(1)).await;
        assert_eq!((&resumed["epoch"], &resumed["returned_batches"]), (&json!(1), &json!(3)));
        app.ack(&leased, 4).await.refused(409, "lease-lost");
        // First the returned batches in the order of the step at which they were last acked, then the other returned
        // batches in the order of their cut, then new ones.
        let mut again = Vec::new();
        for _ in 0..4 {
            again.push(app.lease().await["batch_id"].clone());
        }
        assert_eq!(again[..3], [batches[1]["batch_id"].clone(), batches[2]["batch_id"].clone(), leased["batch_id"].clone()]);
        assert_eq!(app.batch(&batches[0]).await["state"], "checkpointed");
    }

    async fn an_expired_lease_has_failed_whether_the_sweep_or_a_resume_comes_first(app: TestApp) {
        app.rules("default", json!({"lease": {"ttl_s": 10, "max_deliveries": 1}})).await;
        post_rollouts(app, 0..1).await;
        let batch = app.lease().await;
        app.clock.advance_s(10.0);
        assert_eq!(app.resume(None).await["returned_batches"], 0);
        assert_eq!(app.batch(&batch).await["state"], "quarantined");
    }

    async fn a_version_rises_by_at_most_2_to_the_41_unless_that_is_forced(app: TestApp) {
        let rise = 1_i64 << 41;
        assert_eq!(app.publish(i64::MAX).await.pointers(422), ["/version"]);
        let refused = app.publish(rise + 1).await.expect(422);
        let detail = text(&refused["errors"][0]["detail"]);
        assert!(detail.contains(&rise.to_string()) && detail.contains("\"force\": true"), "{detail}");
        app.publish(rise).await.expect(200);
        app.publish(2 * rise).await.expect(200);
        app.publish(2 * rise).await.expect(200);
        let forced = json!({"version": i64::MAX, "force": true});
        let status = app.put("/policies/default/version", forced).await.expect(200);
        assert_eq!(status["version"], i64::MAX);
        // A resume or a reset goes back.
        app.post("/policies/default/reset", json!({})).await.expect(200);
        app.publish(1).await.expect(200);
    }

    async fn a_superseded_trainer_can_neither_lease_nor_publish(app: TestApp) {
        post_rollouts(app, 0..3).await;
        let old = app.resume(None).await["epoch"].clone();
        let batch = app.lease().await;
        let current = app.resume(None).await["epoch"].clone();
        app.post("/batches", json!({"epoch": old})).await.refused(409, "superseded");
        app.put("/policies/default/version", json!({"version": 1, "epoch": old})).await.refused(409, "superseded");
        app.post("/policies/default/checkpoints", json!({"step": 1, "epoch": old})).await.refused(409, "superseded");
        app.post("/policies/default/reset", json!({"epoch": old})).await.refused(409, "superseded");
        resume_with(app, json!({"step": null, "epoch": old})).await.refused(409, "superseded");
        let again = app.lease_with(json!({"epoch": current})).await;
        assert_eq!(again["batch_id"], batch["batch_id"]);
        for call in ["ack", "extend", "nack"] {
            let body = match call {
                "ack" => json!({"step": 1}),
                "extend" => json!({"ttl_s": 5}),
                _ => json!({}),
            };
            let body = with(body, json!({"lease": again["lease"], "epoch": old}));
            let path = format!("/batches/{}/{call}", text(&again["batch_id"]));
            app.post(&path, body).await.refused(409, "superseded");
        }
        app.put("/policies/default/version", json!({"version": 1, "epoch": current})).await.expect(200);
    }

    async fn the_version_goes_back_to_the_newest_at_or_before_the_step(app: TestApp) {
        post_rollouts(app, 0..4).await;
        app.put("/policies/default/version", json!({"version": 1})).await.expect(200);
        train(app, 10).await;
        app.put("/policies/default/version", json!({"version": 2, "step": 10, "uri": "file:///v2"})).await.expect(200);
        train(app, 20).await;
        // A version without a step counts as published at the last acked step, 20.
        app.put("/policies/default/version", json!({"version": 3})).await.expect(200);
        let policy = app.get("/policies/default").await.expect(200);
        assert_eq!((&policy["version"], &policy["version_step"]), (&json!(3), &json!(20)));
        assert_eq!(app.resume(Some(19)).await["version"], 2);
        let policy = app.get("/policies/default").await.expect(200);
        assert_eq!((&policy["version_step"], &policy["version_uri"]), (&json!(10), &json!("file:///v2")));
        // The forgotten version may be published again.
        app.put("/policies/default/version", json!({"version": 3, "step": 21})).await.expect(200);
        resume_with(app, json!({"step": 9})).await.refused(409, "lineage-gap");
    }

    async fn a_version_from_before_any_ack_belongs_to_every_lineage(app: TestApp) {
        app.publish(7).await.expect(200);
        assert_eq!(app.resume(None).await["version"], 7);
    }

    async fn only_force_resumes_below_the_last_settled_step(app: TestApp) {
        app.rules("default", json!({"retention": {"settled_s": 100}})).await;
        post_rollouts(app, 0..3).await;
        let first = train(app, 1).await;
        app.checkpoint(1).await;
        app.pass_s(101.0).await;
        let second = train(app, 2).await;
        app.checkpoint(2).await;
        resume_with(app, json!({"step": 1})).await.refused(409, "lineage-gap");
        resume_with(app, json!({"step": null})).await.refused(409, "lineage-gap");
        let resumed = resume_with(app, json!({"step": null, "force": true})).await.expect(200);
        assert_eq!((&resumed["returned_batches"], &resumed["undeliverable_batches"]), (&json!(1), &json!(1)));
        assert_eq!(app.lease().await["batch_id"], second["batch_id"]);
        assert_eq!(app.batch(&first).await["state"], "checkpointed");
        assert_eq!(app.get(text(&first["samples_url"])).await.refused(410, "purged")["status"], 410);
    }

    async fn a_purged_batch_that_is_not_settled_is_a_gap_too(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 10}})).await;
        post_rollouts(app, 0..1).await;
        train(app, 1).await;
        app.pass_s(11.0).await;
        resume_with(app, json!({"step": 0})).await.refused(409, "lineage-gap");
        app.resume(Some(1)).await;
    }

    async fn the_tombstone_of_what_is_not_settled_stays(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 10, "tombstone_s": 10}})).await;
        post_rollouts(app, 0..1).await;
        train(app, 1).await;
        app.pass_s(11.0).await;
        app.pass_s(1_000.0).await;
        resume_with(app, json!({"step": 0})).await.refused(409, "lineage-gap");
        app.checkpoint(1).await;
        app.pass_s(11.0).await;
        app.get("/trajectories?rollout_id=r000").await.refused(404, "not-found");
    }

    async fn trainers_that_never_save_settle_by_their_acks(app: TestApp) {
        app.rules("default", json!({"settle": "ack"})).await;
        post_rollouts(app, 0..2).await;
        let first = train(app, 1).await;
        assert_eq!(app.batch(&first).await["state"], "checkpointed");
        let open = app.lease().await;
        let resumed = app.resume(None).await;
        assert_eq!(resumed["returned_batches"], 1);
        assert_eq!(app.lease().await["batch_id"], open["batch_id"]);
    }

    async fn a_checkpoint_settles_what_was_acked_at_or_before_it(app: TestApp) {
        post_rollouts(app, 0..3).await;
        for step in 1..=3 {
            train(app, step).await;
        }
        let answer = app.checkpoint(2).await;
        assert_eq!(answer, json!({"checkpoint_step": 2, "settled_batches": 2}));
        assert_eq!(app.checkpoint(1).await, json!({"checkpoint_step": 2, "settled_batches": 0}));
        let states: Vec<Value> = app.get("/batches").await.expect(200)["batches"].as_array().expect("a page").iter()
            .map(|batch| batch["state"].clone()).collect();
        assert_eq!(states, ["checkpointed", "checkpointed", "trained"]);
    }

    async fn a_reset_is_a_fresh_start_under_the_same_name(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for name in ["trained", "leased", "ready"] {
            app.accept(crate::support::group(name, &[1.0, 0.0])).await;
        }
        train(app, 4).await;
        let leased = app.lease().await;
        app.accept(member("open", 0, 1.0)).await;
        app.publish(3).await.expect(200);
        let epoch = app.resume(Some(4)).await["epoch"].as_i64();
        let again = app.lease().await;
        assert_eq!(again["batch_id"], leased["batch_id"]);
        let reset = app.call(reqwest::Method::POST, "/policies/default/reset", None).await.expect(200);
        assert_eq!((&reset["run"], &reset["discarded_groups"]), (&json!(2), &json!(3)));
        assert_eq!(reset["epoch"].as_i64(), epoch.map(|epoch| epoch + 1), "the epoch goes on counting");
        app.ack(&again, 5).await.refused(409, "lease-lost");
        let policy = app.get("/policies/default").await.expect(200);
        assert_eq!((&policy["version"], &policy["checkpoint_step"]), (&json!(0), &Value::Null));
        app.post("/batches", json!({})).await.expect(204);
        // Ids of different runs are independent of each other.
        app.get("/trajectories?rollout_id=ready-0").await.refused(404, "not-found");
        let receipts = app.accept(crate::support::group("ready", &[0.0, 1.0])).await;
        assert_eq!(receipts[0]["duplicate"], false);
        let batch = app.lease().await;
        app.ack(&batch, 0).await.expect(200);
        let page = app.get("/trajectories?state=discarded").await.expect(200);
        assert_eq!(page["trajectories"].as_array().map(Vec::len), Some(5));
    }
}
