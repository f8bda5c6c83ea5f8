//! The Rust client against the real service: an agent and a trainer, from the first post to the settled step.

use std::time::Duration;

use forebay_client::{
    Heartbeat,
    wire::{
        AckRequest, BatchRequest, BatchState, CheckpointRequest, NackRequest, PolicyRules, ResumeRequest, RolloutState,
        Segment, Status, Trajectory, Verdict, VersionRequest,
    },
};

use crate::support::on_both_stores;

/// A filter whose cost grows with the length of the rollout.
const WIDE: &str = "metadata.tags.exists(t, t == 2 || t == 3)";

fn trajectory(group: &str, index: usize, reward: f64) -> Trajectory {
    Trajectory {
        rollout_id: Some(format!("{group}-{index}")),
        group_id: Some(group.to_owned()),
        group_size: Some(2),
        status: Status::Completed,
        reward: Some(reward),
        segments: vec![Segment {
            tokens: vec![1, 2, 3],
            loss_mask: vec![1, 1],
            logprobs: Some(vec![-0.5, -0.25]),
            ..Segment::default()
        }],
        ..Trajectory::default()
    }
}

on_both_stores! {
    async fn an_agent_and_a_trainer_in_rust_do_their_work(app: TestApp) {
        let client = app.client();
        client.put_policy("default", &PolicyRules::default()).await.expect("rules are written");
        let epoch = client.resume("default", &ResumeRequest::default()).await.expect("a resume").epoch;

        // The agent posts in each of the three ways.
        client.post(&trajectory("a", 0, 1.0)).await.expect("stored");
        let receipt = client.post(&trajectory("a", 1, 0.0)).await.expect("stored");
        assert_eq!((receipt.verdict, receipt.duplicate), (Verdict::Kept, false));
        let bundle = [trajectory("b", 0, 1.0), trajectory("b", 1, 0.0)];
        client.post_bundle(&bundle).await.expect("stored");
        let lines = client.post_bulk(&bundle).await.expect("answered");
        assert!(lines.iter().all(|line| line.status == 200), "{lines:?}");
        let late = client.post(&trajectory("a", 2, 1.0)).await.expect("stored");
        assert_eq!(late.verdict, Verdict::Late);
        let error = client.post(&Trajectory { reward: Some(f64::NAN), ..trajectory("c", 0, 0.0) }).await;
        assert!(error.is_err(), "NaN must not become an absent reward");

        // The trainer.
        let request = BatchRequest { request_id: Some("1".into()), epoch: Some(epoch), ..BatchRequest::default() };
        let batch = client.lease(&request).await.expect("answered").expect("a batch is ready");
        let again = client.lease(&request).await.expect("answered").expect("the same request");
        assert_eq!((&again.batch_id, &again.lease), (&batch.batch_id, &batch.lease));
        let heartbeat = Heartbeat::start(client.clone(), &batch, Duration::from_mins(1)).expect("it has a lease");
        let rows = client.samples(&batch.batch_id).await.expect("rows");
        assert_eq!(rows.iter().map(|row| row.rollout_id.as_str()).collect::<Vec<_>>(), ["a-0", "a-1"]);
        assert_eq!(rows[0].logprobs, Some(vec![-0.5, -0.25]));
        assert!(!heartbeat.is_lost());
        let lease = batch.lease.clone().expect("the holder has the token");
        let ack = AckRequest { lease: lease.clone(), step: 1, epoch: Some(epoch) };
        drop(heartbeat);
        assert_eq!(client.ack(&batch.batch_id, &ack).await.expect("acked").state, BatchState::Trained);
        let publish = VersionRequest { version: 1, step: Some(1), uri: None, epoch: Some(epoch) };
        assert_eq!(client.publish("default", &publish).await.expect("published").version, 1);
        let above = client.wait_version_above("default", 0, 1_000).await.expect("answered");
        assert_eq!(above.map(|policy| policy.version), Some(1));
        let checkpoint = CheckpointRequest { step: 1, force: None, epoch: Some(epoch) };
        assert_eq!(client.checkpoint("default", &checkpoint).await.expect("settled").settled_batches, 1);
        let story = client.story("default", "a-0").await.expect("answered").expect("it is known");
        assert_eq!((story.state, story.step), (RolloutState::Checkpointed, Some(1)));
        assert!(client.story("default", "nobody").await.expect("answered").is_none());

        // A batch that was given back is delivered again, and a lost lease is reported as such.
        let second = client.lease(&BatchRequest::default()).await.expect("answered").expect("a batch is ready");
        let lease = second.lease.clone().expect("the holder has the token");
        let nack = NackRequest { lease, reason: Some("out of memory".into()), groups: None, epoch: None };
        assert_eq!(client.nack(&second.batch_id, &nack).await.expect("given back").state, BatchState::Returned);
        let error = client.nack(&second.batch_id, &nack).await.expect_err("the lease is gone");
        assert_eq!(error.kind(), Some("lease-lost"));
        assert!(client.stats().await.expect("answered").conserved);
    }

    async fn every_expression_of_the_dashboard_and_the_alerts_finds_its_metric(app: TestApp) {
        let filters = serde_json::json!([
            {"name": "broken", "scope": "rollout", "when": "metadata.missing == 1", "action": "drop"},
            {"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"},
            // On the long rollout, both filters together may exceed the cost limit of filters.
            {"name": "wide-1", "scope": "rollout", "when": WIDE, "action": "drop"},
            {"name": "wide-2", "scope": "rollout", "when": WIDE, "action": "drop"},
            {"name": "wide-3", "scope": "rollout", "when": WIDE, "action": "drop"},
            {"name": "wide-4", "scope": "rollout", "when": WIDE, "action": "drop"},
        ]);
        app.rules("default", serde_json::json!({"filter": filters})).await;
        let environments = serde_json::json!({"swe": {"min_share": 0.5}});
        app.rules("shared", serde_json::json!({"batch": {"environments": environments}})).await;
        let long = serde_json::json!({"metadata": {"tags": vec![1; 130_000]}});
        app.accept(crate::support::with(crate::support::rollout("long", 1.0), long)).await;
        for (name, reward) in [("a", 1.0), ("a", 1.0), ("b", -1.0), ("c", 0.0)] {
            app.accept(crate::support::rollout(name, reward)).await;
        }
        let batch = app.lease().await;
        app.samples(&batch).await;
        app.ack(&batch, 1).await.expect(200);
        app.get("/nope").await.refused(404, "no-such-route");
        crate::sessions::traffic(app).await;
        crate::agents::traffic(app).await;
        app.metrics().await;
        assert_eq!(crate::dashboards::complaints(&app.metrics().await), Vec::<String>::new());
    }
}
