//! The Rust client against the real service: an agent and a trainer, from the first post to the settled step.

use std::time::Duration;

use forebay_client::{
    Heartbeat,
    wire::{
        AckRequest, BatchRequest, BatchState, CheckpointRequest, FilterAction, FilterRule, FilterScope, NackRequest,
        PolicyRules, PolicySteps, ResumeRequest, Role, RolloutState, Segment, Status, Trajectory, TryRequest, Verdict,
        VersionRequest,
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
        let rows = client.samples(&batch.batch_id, &[]).await.expect("rows");
        assert_eq!(rows.iter().map(|row| row.rollout_id.as_str()).collect::<Vec<_>>(), ["a-0", "a-1"]);
        assert_eq!(rows[0].logprobs, Some(vec![-0.5, -0.25]));
        assert!(!heartbeat.is_lost());
        let lease = batch.lease.clone().expect("the holder has the token");
        let ack = AckRequest { lease: lease.clone(), step: 1, epoch: Some(epoch) };
        drop(heartbeat);
        assert_eq!(client.ack(&batch.batch_id, &ack).await.expect("acked").state, BatchState::Trained);
        let publish = VersionRequest { version: 1, step: Some(1), uri: None, epoch: Some(epoch), force: None };
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

    async fn a_reader_in_rust_sees_what_happened(app: TestApp) {
        let client = app.client();
        assert_eq!(client.whoami().await.expect("answered").role, Role::Admin);
        client.put_policy("default", &PolicyRules::default()).await.expect("rules are written");
        let epoch = client.resume("default", &ResumeRequest::default()).await.expect("a resume").epoch;
        for step in 1..=3 {
            let group = [trajectory(&format!("g{step}"), 0, 1.0), trajectory(&format!("g{step}"), 1, 0.0)];
            client.post_bundle(&group).await.expect("stored");
            let batch = client.lease(&BatchRequest::default()).await.expect("answered").expect("a batch is ready");
            let lease = batch.lease.clone().expect("the holder has the token");
            client.ack(&batch.batch_id, &AckRequest { lease, step, epoch: Some(epoch) }).await.expect("acked");
        }

        let window = [("from", "2026-01-01T00:00:00Z"), ("step_s", "60")];
        let series = client.series("default", &["received", "version"], &window).await.expect("answered");
        assert_eq!((series.step_s, series.at.len()), (60, 1));
        assert_eq!(series.metrics["received"], [Some(6.0)]);
        assert_eq!(series.metrics.keys().collect::<Vec<_>>(), ["received", "version"]);
        let names = |steps: &PolicySteps| steps.steps.iter().map(|step| step.step).collect::<Vec<_>>();
        let page = client.steps("default", &[("order", "newest"), ("limit", "2")]).await.expect("answered");
        assert_eq!(names(&page), [3, 2]);
        let after = page.next.as_deref().expect("there is another page");
        assert_eq!(names(&client.steps("default", &[("after", after)]).await.expect("answered")), [1]);
        let range = [("from", "0"), ("to", "3"), ("points", "1")];
        let buckets = client.steps("default", &range).await.expect("answered").buckets;
        assert_eq!(buckets.iter().map(|bucket| bucket.steps).collect::<Vec<_>>(), [3]);
        let journal = client.journal("default", &[("order", "newest")]).await.expect("answered");
        assert_eq!(journal.entries[0].kind, "resumed");

        let query = [("from", "1"), ("limit", "2")];
        let content = client.content("default", "g1-0", &query).await.expect("answered").expect("it is known");
        assert_eq!(content.window.map(|window| window.tokens), Some(vec![2, 3]));
        assert!(client.content("default", "nobody", &[]).await.expect("answered").is_none());
        let known = client.filter_variables().await.expect("answered").variables;
        assert!(known.iter().any(|variable| variable.name == "reward_std"), "{known:?}");
        let low = FilterRule {
            name: "low".to_owned(),
            scope: FilterScope::Group,
            when: "reward_mean < 1.0".to_owned(),
            action: FilterAction::Drop,
        };
        let draft = TryRequest { filter: vec![low], groups: None, environment: None, examples: Some(2) };
        let tried = client.try_filters("default", &draft).await.expect("answered");
        assert_eq!((tried.looked_at.groups, tried.changed_groups, tried.changes.len()), (3, 3, 2));
        for error in [
            client.series("nobody", &["received"], &[]).await.expect_err("there is no such policy"),
            client.steps("nobody", &[]).await.expect_err("there is no such policy"),
            client.journal("nobody", &[]).await.expect_err("there is no such policy"),
        ] {
            assert_eq!(error.kind(), Some("unknown-policy"));
        }
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
        let parts = serde_json::json!({"gold": 1.0});
        let long = serde_json::json!({"metadata": {"tags": vec![1; 130_000]}, "reward_components": parts});
        app.accept(crate::support::with(crate::support::rollout("long", 1.0), long)).await;
        for (name, reward) in [("a", 1.0), ("a", 1.0), ("b", -1.0), ("c", 0.0)] {
            let parts = serde_json::json!({"reward_components": parts});
            app.accept(crate::support::with(crate::support::rollout(name, reward), parts)).await;
        }
        let work = serde_json::json!({"judge": {"max_attempts": 1}});
        app.rules("judged", serde_json::json!({"scores": {"required": ["judge"], "work": work}})).await;
        let judged = serde_json::json!({"policy": "judged"});
        app.accept(crate::support::with(crate::support::rollout("judged", 1.0), judged)).await;
        let score = serde_json::json!({"policy": "judged", "rollout_id": "judged", "name": "judge", "value": 1.0});
        let work = serde_json::json!({"policy": "judged", "names": ["judge"]});
        let work = app.post("/scores/leases", work).await.expect(200)["items"][0]["lease"].clone();
        let fields = serde_json::json!({"value": null, "failed": "no", "lease": work});
        app.post("/scores", crate::support::with(score.clone(), fields)).await.expect(200);
        app.post("/scores", score).await.expect(201);
        let batch = app.lease().await;
        app.samples(&batch).await;
        app.ack(&batch, 1).await.expect(200);
        app.get("/nope").await.refused(404, "no-such-route");
        crate::sessions::traffic(app).await;
        crate::agents::traffic(app).await;
        app.metrics().await;
        let metrics = app.metrics().await + &crate::agents::audits::metrics().await;
        assert_eq!(crate::dashboards::complaints(&metrics), Vec::<String>::new());
    }
}
