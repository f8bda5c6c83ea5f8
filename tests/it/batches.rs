//! Batches and leases: order, fullness, fencing, expiry, redelivery, quarantine, samples.

use std::{collections::BTreeSet, time::Duration};

use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores, rollout, text, with};

async fn fill(app: &TestApp, groups: &[&str]) {
    for name in groups {
        app.accept(group(name, &[1.0, 0.0])).await;
    }
}

async fn none(app: &TestApp, request: Value) {
    app.post("/batches", request).await.expect(204);
}

/// Rows without what a new delivery may change: nothing.
async fn contents(app: &TestApp, batch: &Value) -> Vec<Value> {
    app.samples(batch).await
}

on_both_stores! {
    async fn groups_are_batched_whole_in_the_order_in_which_they_became_ready(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 2}})).await;
        // `late` is opened first and becomes ready last.
        app.accept(crate::support::member("late", 0, 1.0)).await;
        fill(app, &["a", "b"]).await;
        app.accept(crate::support::member("late", 1, 1.0)).await;
        let first = app.lease().await;
        assert_eq!(app.group_ids(&first).await, ["a", "b"]);
        assert_eq!((&first["groups"], &first["rollouts"], &first["samples"], &first["tokens"]),
            (&json!(2), &json!(4), &json!(4), &json!(12)));
        none(app, json!({})).await;
        fill(app, &["c"]).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["late", "c"]);
    }

    async fn a_batch_is_cut_short_where_the_next_group_would_pass_max_tokens(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 3, "max_tokens": 13}})).await;
        fill(app, &["a", "b"]).await;
        none(app, json!({})).await;
        fill(app, &["c"]).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["a", "b"]);
        let big = json!({"segments": [{"tokens": vec![1; 20], "loss_mask": [1]}], "group_size": 1, "group_id": "big"});
        app.accept(with(rollout("big", 1.0), big)).await;
        assert_eq!(app.group_ids(&app.lease().await).await, ["c"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["big"], "an oversize group goes alone");
    }

    async fn a_partial_batch_takes_what_is_there_when_the_time_is_up(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 4}})).await;
        none(app, json!({"partial": true})).await;
        fill(app, &["a"]).await;
        none(app, json!({})).await;
        let batch = app.lease_with(json!({"partial": true, "wait_ms": 5})).await;
        assert_eq!(batch["groups"], 1);
    }

    async fn a_waiting_trainer_is_woken_by_the_group_it_needs(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let waiting = app.post("/batches", json!({"wait_ms": 60_000}));
        let posting = async {
            crate::support::eventually("a waiter", || async {
                app.metrics().await.contains("forebay_waiters 1")
            }).await;
            fill(app, &["a"]).await;
        };
        let (answer, ()) = tokio::join!(waiting, posting);
        answer.expect(201);
    }

    async fn waiters_are_woken_and_do_not_just_happen_to_look(app: TestApp) {
        app.reconfigure("[limits]\nlook_ms = 3_600_000").await;
        app.rules("default", json!({"group": {"size": 2}})).await;
        let trainer = app.post("/batches", json!({"wait_ms": 60_000}));
        let second = app.post("/batches", json!({"wait_ms": 60_000}));
        let agent = app.get("/policies/default?wait_version_above=0&wait_ms=60000");
        let acting = async {
            crate::support::eventually("three waiters", || async {
                app.metrics().await.contains("forebay_waiters 3")
            }).await;
            fill(app, &["a", "b"]).await;
            app.publish(1).await.expect(200);
        };
        let all = async { tokio::join!(trainer, second, agent, acting) };
        let (first, second, version, ()) =
            tokio::time::timeout(Duration::from_secs(30), all).await.expect("everybody is woken long before");
        first.expect(201);
        second.expect(201);
        version.expect(200);
    }

    async fn several_waiting_trainers_get_a_batch_each(app: TestApp) {
        let waiting = (0..6).map(|_| app.post("/batches", json!({"wait_ms": 60_000})));
        let waiting = futures::future::join_all(waiting);
        let posting = async {
            let rollouts: Vec<Value> = (0..6).map(|index| rollout(&format!("r{index}"), 1.0)).collect();
            app.accept(Value::Array(rollouts)).await;
        };
        let (answers, ()) = tokio::join!(waiting, posting);
        let ids: BTreeSet<String> =
            answers.into_iter().map(|answer| text(&answer.expect(201)["batch_id"]).to_owned()).collect();
        assert_eq!(ids.len(), 6);
    }

    async fn a_trainer_that_hangs_up_while_it_waits_has_claimed_nothing(app: TestApp) {
        let url = format!("{}/batches", app.url);
        let request = app.http.post(url).json(&json!({"wait_ms": 60_000})).timeout(Duration::from_millis(50));
        request.send().await.expect_err("nothing is ready");
        crate::support::eventually("the waiter's end", || async {
            app.metrics().await.contains("forebay_waiters 0")
        }).await;
        app.accept(rollout("a", 1.0)).await;
        assert_eq!(app.lease().await["attempt"], 1);
    }

    async fn the_same_request_gets_the_same_batch_and_lease_renewed(app: TestApp) {
        app.accept(json!([rollout("a", 1.0), rollout("b", 1.0)])).await;
        let request = json!({"consumer": "t0", "request_id": "step-1"});
        let first = app.lease_with(request.clone()).await;
        app.clock.advance_s(300.0);
        let again = app.post("/batches", request.clone()).await.expect(200);
        assert_eq!((&again["batch_id"], &again["lease"]), (&first["batch_id"], &first["lease"]));
        assert_eq!(again["expires_in_ms"], 600_000);
        assert_eq!(again["attempt"], 1);
        // Another consumer's request of the same name is another request.
        let other = app.lease_with(json!({"consumer": "t1", "request_id": "step-1"})).await;
        assert_ne!(other["batch_id"], first["batch_id"]);
        app.ack(&first, 1).await.expect(200);
        none(app, request).await;
    }

    async fn a_group_is_in_at_most_one_live_lease(app: TestApp) {
        let rollouts: Vec<Value> = (0..20).map(|index| rollout(&format!("r{index}"), 1.0)).collect();
        app.accept(Value::Array(rollouts)).await;
        let leases = (0..30).map(|_| app.post("/batches", json!({})));
        let answers = futures::future::join_all(leases).await;
        let granted: Vec<Value> = answers.into_iter().filter(|a| a.status == 201).map(|a| a.json).collect();
        assert_eq!(granted.len(), 20);
        let mut groups = BTreeSet::new();
        for batch in &granted {
            groups.extend(app.group_ids(batch).await);
        }
        assert_eq!(groups.len(), 20);
    }

    async fn a_lease_is_lost_at_its_end_swept_or_not(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.clock.advance_s(600.0);
        for (call, body) in [("ack", json!({"step": 1})), ("nack", json!({})), ("extend", json!({"ttl_s": 60}))] {
            let path = format!("/batches/{}/{call}", text(&batch["batch_id"]));
            app.post(&path, with(body, json!({"lease": batch["lease"]}))).await.refused(409, "lease-lost");
        }
        let again = app.lease().await;
        assert_eq!((&again["batch_id"], &again["attempt"]), (&batch["batch_id"], &json!(2)));
        assert_ne!(again["lease"], batch["lease"]);
        app.ack(&batch, 1).await.refused(409, "lease-lost");
        app.ack(&again, 1).await.expect(200);
    }

    async fn a_heartbeat_keeps_the_lease(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        let path = format!("/batches/{}/extend", text(&batch["batch_id"]));
        for _ in 0..3 {
            app.pass_s(599.0).await;
            let body = json!({"lease": batch["lease"], "ttl_s": 600});
            assert_eq!(app.post(&path, body).await.expect(200)["expires_in_ms"], 600_000);
        }
        let too_long = json!({"lease": batch["lease"], "ttl_s": 86_401});
        assert_eq!(app.post(&path, too_long).await.pointers(422), ["/ttl_s"]);
        app.ack(&batch, 1).await.expect(200);
    }

    async fn a_batch_that_comes_back_is_delivered_as_it_was_cut_before_any_new_one(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 2}, "staleness": {"max": 1}})).await;
        fill(app, &["a", "b", "c", "d"]).await;
        let first = app.lease().await;
        let before = contents(app, &first).await;
        app.rules("default", json!({"group": {"size": 2}, "loss_weighting": "token_mean", "staleness": {"max": 1}})).await;
        app.publish(10).await.expect(200);
        app.nack(&first, &[]).await.expect(200);
        let again = app.lease().await;
        assert_eq!((&again["batch_id"], &again["attempt"], &again["groups"]),
            (&first["batch_id"], &json!(2), &json!(2)));
        assert_eq!(contents(app, &again).await, before);
        none(app, json!({})).await;
        assert_eq!(app.story("c-0").await["state"], "stale", "what was never delivered is tested");
    }

    async fn an_ack_is_recognised_when_repeated_and_final(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 3).await.expect(200);
        assert_eq!(app.ack(&batch, 3).await.expect(200)["state"], "trained");
        app.ack(&batch, 4).await.refused(409, "already-acked");
        app.nack(&batch, &[]).await.refused(409, "lease-lost");
        let forged = with(batch.clone(), json!({"lease": "forged"}));
        app.ack(&forged, 3).await.refused(409, "lease-lost");
        app.checkpoint(3).await;
        assert_eq!(app.ack(&batch, 3).await.expect(200)["state"], "checkpointed");
        let story = app.story("a").await;
        assert_eq!((&story["state"], &story["step"]), (&json!("checkpointed"), &json!(3)));
        assert_eq!(story["batches"], json!([batch["batch_id"]]));
    }

    async fn a_step_at_or_below_the_checkpoint_cannot_be_acked(app: TestApp) {
        app.accept(json!([rollout("a", 1.0), rollout("b", 1.0)])).await;
        let first = app.lease().await;
        app.ack(&first, 5).await.expect(200);
        app.checkpoint(5).await;
        let second = app.lease().await;
        app.ack(&second, 5).await.refused(409, "step-settled");
        app.ack(&second, 6).await.expect(200);
    }

    async fn deliveries_are_limited_by_expiry_and_nack_and_readmit_starts_afresh(app: TestApp) {
        app.rules("default", json!({"lease": {"ttl_s": 10, "max_deliveries": 2}})).await;
        app.accept(rollout("a", 1.0)).await;
        let first = app.lease().await;
        app.nack(&first, &[]).await.expect(200);
        let second = app.lease().await;
        app.pass_s(10.0).await;
        let batch = app.batch(&second).await;
        assert_eq!(text(&batch["state"]), "quarantined");
        assert_eq!(app.story("a").await["state"], "quarantined");
        none(app, json!({})).await;
        let path = format!("/batches/{}/readmit", text(&batch["batch_id"]));
        assert_eq!(app.post(&path, json!({})).await.expect(200)["state"], "returned");
        app.post(&path, json!({})).await.refused(409, "batch-state");
        let third = app.lease().await;
        app.nack(&third, &[]).await.expect(200);
        let fourth = app.lease().await;
        assert_eq!(fourth["batch_id"], first["batch_id"]);
        app.ack(&fourth, 1).await.expect(200);
    }

    async fn a_resume_and_a_restart_are_nobodys_failure(app: TestApp) {
        app.rules("default", json!({"lease": {"max_deliveries": 1}})).await;
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.restart().await;
        assert_eq!(app.batch(&batch).await["state"], "leased", "a lease outlives a restart of the service");
        for attempt in 2..5 {
            app.resume(None).await;
            assert_eq!(app.lease().await["attempt"], attempt);
        }
    }

    async fn named_groups_are_quarantined_and_the_others_return_to_their_places(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 3}})).await;
        fill(app, &["a", "b", "c", "d", "e"]).await;
        let batch = app.lease().await;
        let unknown = app.nack(&batch, &["b", "z"]).await;
        assert_eq!(unknown.pointers(422), ["/groups/1"]);
        assert_eq!(app.nack(&batch, &["b"]).await.expect(200)["state"], "split");
        let story = app.story("b-0").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("quarantined"), &json!("test")));
        let next = app.lease().await;
        assert_eq!(app.group_ids(&next).await, ["a", "c", "d"]);
        assert_eq!(next["attempt"], 2, "the delivery count goes with the groups");
        assert_eq!(app.story("a-0").await["batches"], json!([batch["batch_id"], next["batch_id"]]));
        let path = format!("/batches/{}/readmit", text(&batch["batch_id"]));
        app.post(&path, json!({})).await.expect(200);
        assert_eq!(app.story("b-0").await["state"], "ready");
        let last = app.lease_with(json!({"partial": true})).await;
        assert_eq!(app.group_ids(&last).await, ["b", "e"], "in the order in which they became ready");
        assert_eq!(last["attempt"], 1, "readmitted with a fresh count");
    }

    async fn expired_work_is_back_without_being_asked_for(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.clock.advance_s(601.0);
        // The service's own sweeper, not the test's.
        crate::support::eventually("the sweep", || async { app.batch(&batch).await["state"] == "returned" }).await;
    }

    async fn samples_are_sharded_by_whole_rollouts_without_a_gap(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 7}})).await;
        for index in 0..7_usize {
            let segment = json!({"tokens": vec![1; 10 * index + 2], "loss_mask": [1]});
            let segments = Value::Array(vec![segment; index % 3 + 1]);
            app.accept(with(rollout(&format!("r{index}"), 1.0), json!({"segments": segments}))).await;
        }
        let batch = app.lease().await;
        let all = app.samples(&batch).await;
        let counted = app.get(&format!("/batches/{}?shards=3", text(&batch["batch_id"]))).await.expect(200);
        let mut seen = Vec::new();
        for shard in 0..3 {
            let url = format!("{}?shard={shard}&shards=3", text(&batch["samples_url"]));
            let rows = app.samples(&with(batch.clone(), json!({"samples_url": url}))).await;
            let tokens: usize = rows.iter().map(|row| row["tokens"].as_array().map_or(0, Vec::len)).sum();
            let rollouts: BTreeSet<&str> = rows.iter().map(|row| text(&row["rollout_id"])).collect();
            let expected = json!({"rollouts": rollouts.len(), "samples": rows.len(), "tokens": tokens});
            assert_eq!(counted["shards"][shard], expected);
            seen.extend(rows);
        }
        let key = |row: &Value| (text(&row["rollout_id"]).to_owned(), row["segment"].as_i64());
        seen.sort_by_key(key);
        assert_eq!(seen, all, "ids sort in batch order here");
        let url = |query: &str| format!("{}?{query}", text(&batch["samples_url"]));
        for query in ["shard=3&shards=3", "shard=0", "shards=3", "shard=0&shards=0"] {
            assert_eq!(app.get(&url(query)).await.status, 422, "{query}");
        }
    }

    async fn samples_come_as_ndjson_or_json(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        app.accept(rollout("b", 1.0)).await;
        app.rules("default", json!({"batch": {"groups": 2}})).await;
        let batch = app.lease().await;
        let url = format!("{}{}", app.url, text(&batch["samples_url"]));
        let rows = app.samples(&batch).await;
        let ask = |accept: &'static str| app.http.get(&url).header("accept", accept).send();
        let json = ask("application/json").await.expect("the server answers");
        assert_eq!(json.headers()["content-type"], "application/json");
        assert_eq!(json.json::<Vec<Value>>().await.expect("an array"), rows);
        for accept in ["*/*", "application/x-ndjson", "text/html, application/x-ndjson;q=0.5"] {
            let answer = ask(accept).await.expect("the server answers");
            assert_eq!(answer.headers()["content-type"], "application/x-ndjson", "{accept}");
        }
        assert_eq!(ask("text/html").await.expect("the server answers").status(), 406);
    }

    async fn a_batch_of_many_pages_arrives_whole(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 700}})).await;
        for slice in 0..7 {
            let rollouts: Vec<Value> = (0..100).map(|index| rollout(&format!("r{slice}{index:02}"), 1.0)).collect();
            app.accept(Value::Array(rollouts)).await;
        }
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        let ids: Vec<&str> = rows.iter().map(|row| text(&row["rollout_id"])).collect();
        assert_eq!(ids.len(), 700);
        assert!(ids.is_sorted(), "in the order in which their groups became ready");
        let url = format!("{}{}", app.url, text(&batch["samples_url"]));
        let json = app.http.get(url).header("accept", "application/json").send().await.expect("the server answers");
        assert_eq!(json.json::<Vec<Value>>().await.expect("one array over all pages"), rows);
    }

    async fn batches_are_listed_by_state_without_their_leases(app: TestApp) {
        app.accept(json!([rollout("a", 1.0), rollout("b", 1.0), rollout("c", 1.0)])).await;
        let first = app.lease().await;
        let second = app.lease().await;
        app.ack(&first, 1).await.expect(200);
        let page = app.get("/batches?limit=1").await.expect(200);
        assert_eq!(page["batches"][0]["batch_id"], first["batch_id"]);
        let rest = app.get(&format!("/batches?after={}", text(&page["next"]))).await.expect(200);
        assert_eq!((&rest["batches"][0]["batch_id"], &rest["next"]), (&second["batch_id"], &Value::Null));
        let leased = app.get("/batches?state=leased").await.expect(200);
        assert_eq!(leased["batches"].as_array().map(Vec::len), Some(1));
        assert_eq!(leased["batches"][0].get("lease"), None);
        app.get("/batches/00000000-0000-0000-0000-000000000000").await.refused(404, "not-found");
        app.get("/batches/nonsense").await.refused(404, "not-found");
    }

    async fn groups_over_the_staleness_bound_are_never_first_delivered(app: TestApp) {
        app.rules("default", json!({"group": {"size": 1}, "staleness": {"max": 2}})).await;
        for version in [0, 1, 3] {
            app.accept(with(rollout(&format!("v{version}"), 1.0), json!({"policy_version": version}))).await;
        }
        // Only trained tokens count: the old span is masked.
        let spans = json!({"segments": [{"tokens": [1, 2, 3], "loss_mask": [0, 1], "versions": [[0, 0, 1], [3, 1, 1]]}]});
        app.accept(with(rollout("span", 1.0), spans)).await;
        app.publish(3).await.expect(200);
        let batch = app.lease().await;
        assert_eq!(app.group_ids(&batch).await, ["v1"]);
        assert_eq!(batch["policy_version"], json!({"current": 3, "min": 1, "max": 1}));
        assert_eq!((&batch["metrics"]["staleness/mean"], &batch["metrics"]["staleness/max"]), (&json!(2.0), &json!(2.0)));
        assert_eq!(app.story("v0").await["state"], "stale");
        assert_eq!(app.get("/policies/default").await.expect(200)["waiting"]["stale_last_hour"], 1);
        assert_eq!(app.group_ids(&app.lease().await).await, ["v3"]);
        assert_eq!(app.group_ids(&app.lease().await).await, ["span"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_batches_are_checked() {
    let app = TestApp::start(crate::support::Backend::Sqlite).await;
    for (body, pointer) in [
        (json!({"wait_ms": 60_001}), "/wait_ms"),
        (json!({"policy": "a b"}), "/policy"),
        (json!({"request_id": ""}), "/request_id"),
        (json!({"consumer": "\u{1}"}), "/consumer"),
        (json!({"nope": 1}), "/nope"),
    ] {
        assert_eq!(app.post("/batches", body.clone()).await.pointers(422), [pointer], "{body}");
    }
    app.post("/batches", json!({"policy": "nobody"})).await.refused(404, "unknown-policy");
    app.finish().await;
}
