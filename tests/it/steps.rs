//! Steps in requests must be steps that the trainer has acked. A wrong step would settle batches that the weights have
//! not learned from.

use serde_json::{Value, json};

use crate::support::{Answer, TestApp, on_both_stores, rollout, text};

async fn post_rollouts(app: &TestApp, count: usize) {
    app.accept((0..count).map(|index| rollout(&format!("r{index}"), index as f64)).collect()).await;
}

async fn train(app: &TestApp, step: i64) {
    let batch = app.lease().await;
    app.ack(&batch, step).await.expect(200);
}

async fn resume(app: &TestApp, body: Value) -> Answer {
    app.post("/policies/default/resume", body).await
}

async fn checkpoint(app: &TestApp, body: Value) -> Answer {
    app.post("/policies/default/checkpoints", body).await
}

#[track_caller]
fn names(problem: &Value, parts: &[&str]) {
    for part in parts {
        assert!(text(&problem["detail"]).contains(part), "`{part}` is missing: {problem}");
    }
}

on_both_stores! {
    async fn a_resume_above_the_last_acked_step_is_refused_and_changes_nothing(app: TestApp) {
        post_rollouts(app, 3).await;
        train(app, 1).await;
        let open = app.lease().await;
        let problem = resume(app, json!({"step": 1000})).await.refused(409, "step-unknown");
        names(&problem, &["1000", "the last acked step is 1", "\"force\": true"]);
        app.ack(&open, 2).await.expect(200);
        app.checkpoint(2).await;
        app.resume(Some(2)).await;
    }

    async fn a_checkpoint_above_the_last_acked_step_is_refused_and_settles_nothing(app: TestApp) {
        post_rollouts(app, 2).await;
        train(app, 1).await;
        let problem = checkpoint(app, json!({"step": 2})).await.refused(409, "step-unknown");
        names(&problem, &["step 2", "the last acked step is 1", "\"force\": true"]);
        assert_eq!(app.get("/policies/default").await.expect(200)["checkpoint_step"], Value::Null);
        train(app, 2).await;
        assert_eq!(app.checkpoint(2).await["settled_batches"], 2);
    }

    async fn force_resumes_and_settles_at_any_step_and_a_repeat_needs_no_force(app: TestApp) {
        post_rollouts(app, 3).await;
        train(app, 1).await;
        resume(app, json!({"step": 1000, "force": true})).await.expect(200);
        resume(app, json!({"step": 1000})).await.expect(200);
        let batch = app.lease().await;
        app.ack(&batch, 2).await.refused(409, "step-settled");
        app.ack(&batch, 1001).await.expect(200);
        checkpoint(app, json!({"step": 2000, "force": true})).await.expect(200);
        resume(app, json!({"step": 2000})).await.expect(200);
        resume(app, json!({"step": 2001})).await.refused(409, "step-unknown");
    }

    async fn a_policy_that_has_never_acked_starts_at_any_step(app: TestApp) {
        post_rollouts(app, 2).await;
        resume(app, json!({"step": 40})).await.expect(200);
        resume(app, json!({"step": 50})).await.expect(200);
        checkpoint(app, json!({"step": 60})).await.expect(200);
        train(app, 61).await;
        resume(app, json!({"step": 62})).await.refused(409, "step-unknown");
        app.call(reqwest::Method::POST, "/policies/default/reset", None).await.expect(200);
        resume(app, json!({"step": 7})).await.expect(200);
    }

    async fn after_a_resume_from_nothing_every_step_is_above(app: TestApp) {
        post_rollouts(app, 2).await;
        train(app, 1).await;
        app.resume(None).await;
        let problem = resume(app, json!({"step": 1})).await.refused(409, "step-unknown");
        names(&problem, &["no step was acked"]);
        train(app, 1).await;
        resume(app, json!({"step": 1})).await.expect(200);
    }

    async fn the_problem_of_a_lineage_gap_says_how_to_resume_with_force(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 10}})).await;
        post_rollouts(app, 3).await;
        train(app, 1).await;
        app.checkpoint(1).await;
        names(&resume(app, json!({"step": null})).await.refused(409, "lineage-gap"), &["\"force\": true"]);
        train(app, 2).await;
        train(app, 3).await;
        app.pass_s(11.0).await;
        let problem = resume(app, json!({"step": 1})).await.refused(409, "lineage-gap");
        names(&problem, &["2 batches", "\"force\": true"]);
        names(&resume(app, json!({"step": 2})).await.refused(409, "lineage-gap"), &["of a batch"]);
    }

    async fn a_forced_resume_over_purged_batches_is_remembered(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 10, "tombstone_s": 100}})).await;
        post_rollouts(app, 4).await;
        train(app, 1).await;
        app.checkpoint(1).await;
        let lost = app.lease().await;
        app.ack(&lost, 2).await.expect(200);
        app.pass_s(11.0).await;
        resume(app, json!({"step": 1})).await.refused(409, "lineage-gap");
        let forced = resume(app, json!({"step": 1, "force": true})).await.expect(200);
        assert_eq!((&forced["returned_batches"], &forced["undeliverable_batches"]), (&json!(0), &json!(1)));
        // The trainer restarts with the step that it has saved.
        let again = resume(app, json!({"step": 1})).await.expect(200);
        assert_eq!(again["undeliverable_batches"], 0);
        // A batch that the lineage gave up is not settled as if the new lineage had trained it.
        let batch = app.batch(&lost).await;
        assert_eq!((&batch["state"], &batch["reason"]), (&json!("discarded"), &json!("lineage-gap")));
        train(app, 2).await;
        train(app, 3).await;
        assert_eq!(app.checkpoint(3).await["settled_batches"], 2);
        let story = app.story("r1").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("discarded"), &json!("lineage-gap")));
        assert_eq!(app.get("/stats").await.expect(200)["conserved"], true);
        // Its tombstone does not wait for a checkpoint.
        app.pass_s(101.0).await;
        app.get("/trajectories?rollout_id=r1").await.refused(404, "not-found");
    }

    async fn more_versions_than_are_kept_leave_the_one_of_the_checkpoint(app: TestApp) {
        const PUBLISHED_BEFORE: &str = "
            WITH RECURSIVE published (number) AS (
                SELECT CAST(2 AS BIGINT) UNION ALL SELECT number + 1 FROM published WHERE number < 25000
            )
            INSERT INTO version (policy_pk, version, step, uri, published_us)
            SELECT p.policy_pk, n.number, n.number, NULL, 0
            FROM policy AS p
            CROSS JOIN published AS n
            WHERE p.name = 'default'";
        const COUNTED: &str = "UPDATE version SET published_us = published_us";
        post_rollouts(app, 1).await;
        train(app, 1).await;
        app.checkpoint(1).await;
        app.put("/policies/default/version", json!({"version": 1, "step": 1, "uri": "file:///v1"})).await.expect(200);
        app.tamper(PUBLISHED_BEFORE).await;
        for version in 25_001..25_004 {
            app.put("/policies/default/version", json!({"version": version, "step": version})).await.expect(200);
        }
        let kept = app.tamper(COUNTED).await;
        assert!((5_000..=10_000).contains(&kept), "{kept} versions are kept");
        for step in [24_000, 20_500] {
            let resumed = resume(app, json!({"step": step, "force": true})).await.expect(200);
            assert_eq!(resumed["version"], step, "the newer half is all there");
        }
        let thinned = resume(app, json!({"step": 2_001, "force": true})).await.expect(200)["version"].clone();
        assert!((1_995..=2_001).contains(&thinned.as_i64().expect("a number")), "{thinned} is not just before");
        let resumed = resume(app, json!({"step": 1, "force": true})).await.expect(200);
        assert_eq!(resumed["version"], 1);
        assert_eq!(app.get("/policies/default").await.expect(200)["version_uri"], "file:///v1");
    }
}
