//! Messages: a refusal tells its reader what to do.

use serde_json::{Value, json};

use crate::support::{Answer, on_both_stores, process::Service, rollout, text};

#[track_caller]
fn detail(answer: Answer) -> String {
    let Answer { mut json, .. } = answer;
    text(&json["detail"].take()).to_owned()
}

on_both_stores! {
    async fn a_lost_lease_says_how_it_was_lost(app: TestApp) {
        app.rules("default", json!({"lease": {"ttl_s": 60}})).await;
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        let mut other = batch.clone();
        other["lease"] = "guessed".into();
        let wrong = detail(app.ack(&other, 1).await);
        assert!(wrong.contains("another token") && !wrong.contains(text(&batch["lease"])), "{wrong}");
        app.clock.advance_s(61.0);
        assert!(detail(app.ack(&batch, 1).await).contains("the lease has expired: "));
        app.pass_s(0.0).await;
        assert!(detail(app.ack(&batch, 1).await).contains("the batch is not leased"));
        let batch = app.lease().await;
        let epoch = app.resume(None).await["epoch"].clone();
        let lost = detail(app.ack(&batch, 1).await);
        assert!(lost.contains("a resume has ended the lease") && lost.contains(&epoch.to_string()), "{lost}");
        let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
        let zombie = json!({"lease": batch["lease"], "step": 1, "epoch": batch["epoch"]});
        app.post(&path, zombie).await.refused(409, "superseded");
    }

    async fn a_not_found_answer_says_where_the_service_looked(app: TestApp) {
        let unknown = detail(app.get("/policies/new").await);
        assert!(unknown.contains("PUT /policies/new") && unknown.contains("auto_create"), "{unknown}");
        app.rules("other", json!({})).await;
        for answer in [
            app.get("/trajectories?rollout_id=a").await,
            app.post("/groups/close", json!({"group_id": "a"})).await,
            app.post("/groups/discard", json!({"group_id": "a", "reason": "x"})).await,
        ] {
            let detail = detail(answer);
            assert!(detail.contains("`a` does not exist in the current run of policy `default`; the request names no other"), "{detail}");
        }
        let named = detail(app.get("/trajectories?policy=other&rollout_id=a").await);
        assert_eq!(named, "rollout `a` does not exist in the current run of policy `other`");
    }

    async fn one_purged_batch_is_named_in_the_singular(app: TestApp) {
        app.rules("default", json!({"retention": {"trained_s": 10}})).await;
        for step in 1..3 {
            app.accept(rollout(&format!("r{step}"), 1.0)).await;
            app.ack(&app.lease().await, step).await.expect(200);
        }
        app.pass_s(11.0).await;
        for (step, counted) in [(1, "of a batch that was acked"), (0, "of 2 batches that were acked")] {
            let detail = detail(app.post("/policies/default/resume", json!({"step": step})).await);
            assert!(detail.contains(counted), "{detail}");
        }
    }

    async fn wrong_values_are_explained_in_terms_of_json(app: TestApp) {
        let wrong = [
            ("/trajectories", json!({"reward": "high", "status": "aborted"}), "/reward", "must be a number, not the text \"high\""),
            ("/trajectories", json!({"reward": 1, "status": "done"}), "/status", "`done` is not one of the allowed values: `completed`, "),
            ("/trajectories", json!({"reward": 1, "segments": [{"tokens": 5}]}), "/segments/0/tokens", "must be an array, not 5"),
            ("/batches", json!({"wait_ms": -1}), "/wait_ms", "must be a whole number of at least 0, not -1"),
            ("/batches", json!({"wait": 1}), "/wait", "unknown field `wait`: the fields here are `policy`, "),
            ("/policies/default/checkpoints", json!({}), "/step", "the field `step` is missing"),
        ];
        for (path, body, pointer, explained) in wrong {
            let problem = app.post(path, body).await.expect(422);
            let error = &problem["errors"][0];
            assert_eq!(error["pointer"], pointer, "{problem}");
            assert!(text(&error["detail"]).starts_with(explained), "{problem}");
        }
        for (query, pointer, explained) in [
            ("limit=many", "limit", "must be a whole number"),
            ("state=lost", "state", "`lost` is not one of the allowed values: "),
            ("stat=x", "stat", "unknown field `stat`: "),
        ] {
            let problem = app.get(&format!("/batches?{query}")).await.expect(422);
            assert!(text(&problem["errors"][0]["detail"]).starts_with(explained), "{problem}");
            assert!(["", pointer].contains(&text(&problem["errors"][0]["pointer"])), "{problem}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_event_of_the_log_names_its_span_once() {
    let service = Service::start_with("sqlite::memory:", &["--log", "json"], &[("RUST_LOG", "forebay=debug")]).await;
    let request = crate::support::http().get(format!("{}/policies/nobody", service.url));
    request.header("x-request-id", "only-once").send().await.expect("the service answers");
    let log = service.terminate().await;
    let of_request: Vec<&String> = log.iter().filter(|line| line.contains("only-once")).collect();
    assert!(!of_request.is_empty(), "the request is in the log: {log:#?}");
    for line in of_request {
        let event: Value = serde_json::from_str(line).expect("an event is JSON");
        assert_eq!(event["spans"][0]["request.id"], "only-once", "{line}");
        assert!(event.get("span").is_none(), "{line}");
    }
}
