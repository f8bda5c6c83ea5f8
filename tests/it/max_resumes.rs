//! `lease.max_resumes`: a batch that ends every trainer is not leased again and again.

use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores, rollout, text};

async fn rules(app: &TestApp, max_resumes: u32) {
    app.rules("default", json!({"lease": {"max_deliveries": 2, "max_resumes": max_resumes}})).await;
}

/// A trainer leases a batch and ends, and the next trainer resumes.
async fn crash(app: &TestApp) -> Value {
    app.lease().await;
    app.resume(None).await
}

on_both_stores! {
    async fn a_batch_that_ends_every_trainer_is_quarantined(app: TestApp) {
        rules(app, 3).await;
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.resume(None).await;
        assert_eq!(crash(app).await["returned_batches"], 1);
        let last = crash(app).await;
        assert_eq!((&last["returned_batches"], &last["quarantined_batches"]), (&json!(0), &json!(1)));
        let quarantined = app.batch(&batch).await;
        assert_eq!((&quarantined["state"], &quarantined["reason"]), (&json!("quarantined"), &json!("max-resumes")));
        assert_eq!(app.story("a").await["state"], "quarantined");
        app.post("/batches", json!({})).await.expect(204);
        // The count starts again at zero.
        app.post(&format!("/batches/{}/readmit", text(&batch["batch_id"])), json!({})).await.expect(200);
        for _ in 0..2 {
            assert_eq!(crash(app).await["returned_batches"], 1);
        }
        assert_eq!(app.lease().await["batch_id"], batch["batch_id"]);
    }

    async fn resumes_count_as_no_failed_delivery_and_not_at_all_for_acked_batches(app: TestApp) {
        rules(app, 2).await;
        app.accept(rollout("a", 1.0)).await;
        for _ in 0..4 {
            let batch = app.lease().await;
            app.ack(&batch, 1).await.expect(200);
            assert_eq!(app.resume(None).await["returned_batches"], 1);
        }
        assert_eq!(crash(app).await["returned_batches"], 1);
        // One of two permitted failed deliveries, after one of two permitted resumes.
        let batch = app.lease().await;
        app.nack(&batch, &[]).await.expect(200);
        assert_eq!(app.batch(&batch).await["state"], "returned");
    }

    async fn without_a_bound_a_batch_comes_back_every_time(app: TestApp) {
        rules(app, 0).await;
        app.accept(rollout("a", 1.0)).await;
        for _ in 0..25 {
            assert_eq!(crash(app).await["returned_batches"], 1);
        }
    }

    async fn twenty_resumes_are_the_default(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        for _ in 0..19 {
            assert_eq!(crash(app).await["returned_batches"], 1);
        }
        assert_eq!(crash(app).await["quarantined_batches"], 1);
        let rules = &app.get("/policies/default").await.expect(200)["rules"];
        assert_eq!(rules["lease"]["max_resumes"], 20);
    }

    async fn groups_of_a_split_batch_keep_the_count(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 2}, "lease": {"max_resumes": 2}})).await;
        for name in ["good", "bad", "other"] {
            app.accept(group(name, &[1.0, 0.0])).await;
        }
        crash(app).await;
        let batch = app.lease().await;
        app.nack(&batch, &["bad"]).await.expect(200);
        let again = app.lease().await;
        assert_eq!(app.group_ids(&again).await, ["good", "other"]);
        assert_eq!(app.resume(None).await["quarantined_batches"], 1);
        assert_eq!(app.batch(&again).await["state"], "quarantined");
    }

    async fn a_bound_that_is_out_of_range_is_refused_by_name(app: TestApp) {
        let answer = app.put("/policies/default", json!({"lease": {"max_resumes": 1001}})).await;
        assert_eq!(answer.pointers(422), ["/lease/max_resumes"]);
    }
}
