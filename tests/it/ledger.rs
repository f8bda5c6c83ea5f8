//! The ledger: stories, lists, retention and totals.

use serde_json::{Value, json};

use crate::support::{group, member, on_both_stores, rollout, text, with};

fn ids(page: &Value) -> Vec<&str> {
    page["trajectories"].as_array().expect("a page").iter().map(|story| text(&story["rollout_id"])).collect()
}

on_both_stores! {
    async fn rollouts_are_listed_by_verdict_and_state(app: TestApp) {
        let filters = json!([{"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filters})).await;
        app.accept(group("g", &[1.0, 0.0])).await;
        app.accept(member("g", 2, 1.0)).await;
        app.accept(member("h", 0, -1.0)).await;
        app.accept(member("h", 1, 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 7).await.expect(200);
        for (query, expected) in [
            ("verdict=late", vec!["g-2"]),
            ("reason=low", vec!["h-0"]),
            ("state=open", vec!["h-1"]),
            ("state=trained", vec!["g-0", "g-1"]),
            ("step=7", vec!["g-0", "g-1"]),
            ("step=8", vec![]),
            ("group_id=h", vec!["h-0", "h-1"]),
            ("group_id=g&verdict=kept&limit=1", vec!["g-0"]),
        ] {
            let page = app.get(&format!("/trajectories?{query}")).await.expect(200);
            assert_eq!(ids(&page), expected, "{query}");
        }
        for query in ["state=nope", "limit=0", "limit=1001", "after=x", "step=-1", "colour=red"] {
            app.get(&format!("/trajectories?{query}")).await.refused(422, "invalid");
        }
        app.get("/trajectories?policy=nobody").await.refused(404, "unknown-policy");
    }

    async fn lists_are_read_oldest_or_newest_first(app: TestApp) {
        for number in 0..5 {
            app.accept(rollout(&format!("r{number}"), 1.0)).await;
        }
        for _ in 0..2 {
            app.lease().await;
        }
        let newest = app.get("/trajectories?order=newest&limit=2").await.expect(200);
        assert_eq!(ids(&newest), ["r4", "r3"]);
        let (next, mut seen) = (text(&newest["next"]).to_owned(), Vec::new());
        let mut after = next.clone();
        loop {
            // Rollouts that arrive meanwhile are newer than the cursor.
            app.accept(rollout(&format!("later{}", seen.len()), 1.0)).await;
            let page = app.get(&format!("/trajectories?after={after}&limit=2")).await.expect(200);
            seen.extend(ids(&page).into_iter().map(str::to_owned));
            assert_eq!(page["examined"], ids(&page).len());
            match &page["next"] {
                Value::Null => break,
                next => text(next).clone_into(&mut after),
            }
        }
        assert_eq!(seen, ["r2", "r1", "r0"]);
        let repeated = app.get(&format!("/trajectories?order=newest&after={next}&limit=1")).await.expect(200);
        assert_eq!(ids(&repeated), ["r2"]);
        app.get(&format!("/trajectories?order=oldest&after={next}")).await.refused(422, "invalid");
        app.get("/trajectories?order=newest&after=3").await.refused(422, "invalid");
        for query in ["order=down", "after=n", "after=nn3", "after=n3x"] {
            app.get(&format!("/trajectories?{query}")).await.refused(422, "invalid");
        }
        let names = |page: &Value, list: &str, name: &str| -> Vec<String> {
            page[list].as_array().expect("a page").iter().map(|entry| text(&entry[name]).to_owned()).collect()
        };
        for (list, place, name) in [("groups", "/groups?limit=1", "group_id"), ("batches", "/batches?limit=1", "batch_id")] {
            let all = names(&app.get(&format!("{place}000")).await.expect(200), list, name);
            let mut page = app.get(&format!("{place}&order=newest")).await.expect(200);
            let mut found = names(&page, list, name);
            while page["next"].is_string() {
                page = app.get(&format!("{place}&after={}", text(&page["next"]))).await.expect(200);
                found.extend(names(&page, list, name));
            }
            assert_eq!(found, all.iter().rev().cloned().collect::<Vec<_>>(), "{list}");
            assert!(all.len() > 1, "{list}");
        }
    }

    async fn the_groups_of_a_batch_are_listed_in_their_places(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 3}})).await;
        let mut batches = Vec::new();
        for batch in 0..2 {
            for place in 0..3 {
                app.accept(rollout(&format!("b{batch}p{place}"), 1.0)).await;
            }
            batches.push(app.lease().await);
        }
        let first = text(&batches[0]["batch_id"]);
        // The groups are in it even after a nack has given some of them back.
        app.nack(&batches[0], &["b0p1"]).await.expect(200);
        for (order, expected) in [("oldest", ["b0p0", "b0p1", "b0p2"]), ("newest", ["b0p2", "b0p1", "b0p0"])] {
            let mut found = Vec::new();
            let mut page = app.get(&format!("/groups?batch_id={first}&order={order}&limit=1")).await.expect(200);
            loop {
                let groups = page["groups"].as_array().expect("a page");
                found.extend(groups.iter().map(|group| text(&group["group_id"]).to_owned()));
                let Value::String(next) = &page["next"] else { break };
                page = app.get(&format!("/groups?batch_id={first}&after={next}&limit=1")).await.expect(200);
            }
            assert_eq!(found, expected, "{order}");
        }
        let quarantined = app.get(&format!("/groups?batch_id={first}&state=quarantined")).await.expect(200);
        assert_eq!(quarantined["groups"][0]["group_id"], "b0p1");
        app.rules("other", json!({})).await;
        let other = app.get(&format!("/groups?policy=other&batch_id={first}")).await.expect(200);
        assert_eq!(other["groups"], json!([]));
        app.get("/groups?batch_id=x").await.refused(422, "invalid");
    }

    async fn groups_are_listed_by_reason_and_environment(app: TestApp) {
        let flat = json!([{"name": "flat", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 2}, "filter": flat})).await;
        app.accept(group("a", &[1.0, 0.0])).await;
        app.accept(group("b", &[1.0, 1.0])).await;
        app.accept(with(member("c", 0, 1.0), json!({"environment": "web"}))).await;
        let listed = |page: Value| -> Vec<String> {
            page["groups"].as_array().expect("a page").iter().map(|group| text(&group["group_id"]).to_owned()).collect()
        };
        for (query, expected) in [
            ("reason=flat", vec!["b"]),
            ("reason=flat&state=ready", vec![]),
            ("environment=web", vec!["c"]),
            ("environment=none", vec![]),
            ("group_id=a&environment=web", vec![]),
            ("group_id=c&environment=web", vec!["c"]),
            ("order=newest", vec!["c", "b", "a"]),
        ] {
            assert_eq!(listed(app.get(&format!("/groups?{query}")).await.expect(200)), expected, "{query}");
        }
        let page = app.get("/trajectories?environment=web").await.expect(200);
        assert_eq!(ids(&page), ["c-0"]);
        assert_eq!(page["trajectories"][0]["group"]["environment"], "web");
        for query in ["reason=", "environment=%00", "colour=red"] {
            app.get(&format!("/groups?{query}")).await.refused(422, "invalid");
        }
    }

    async fn a_batch_that_a_rollback_returned_is_consumed_by_no_step(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        app.accept(rollout("b", 1.0)).await;
        let kept = app.lease().await;
        app.ack(&kept, 6).await.expect(200);
        app.checkpoint(6).await;
        let undone = app.lease().await;
        app.ack(&undone, 7).await.expect(200);
        app.resume(Some(6)).await;
        for lease in [false, true] {
            if lease {
                app.lease().await;
            }
            let page = app.get("/trajectories?step=7").await.expect(200);
            assert_eq!(ids(&page), Vec::<&str>::new(), "step 7 was undone");
            let story = app.story("b").await;
            assert_eq!((&story["step"], &story["acked_at"]), (&Value::Null, &Value::Null));
        }
        assert_eq!(ids(&app.get("/trajectories?step=6").await.expect(200)), ["a"]);
    }

    async fn pages_go_on_where_the_one_before_ended(app: TestApp) {
        for index in 0..5 {
            app.accept(rollout(&format!("r{index}"), 1.0)).await;
        }
        let mut after = String::new();
        let mut seen = Vec::new();
        loop {
            let page = app.get(&format!("/trajectories?limit=2{after}")).await.expect(200);
            seen.extend(ids(&page).into_iter().map(str::to_owned));
            let Some(next) = page["next"].as_str() else { break };
            after = format!("&after={next}");
        }
        assert_eq!(seen, ["r0", "r1", "r2", "r3", "r4"]);
        let groups = app.get("/groups?limit=3").await.expect(200);
        let rest = app.get(&format!("/groups?limit=3&after={}", text(&groups["next"]))).await.expect(200);
        assert_eq!(rest["groups"].as_array().map(Vec::len), Some(2));
    }

    async fn payloads_are_purged_and_tombstones_forgotten_in_their_time(app: TestApp) {
        let retention = json!({"trained_s": 1000, "settled_s": 100, "dropped_s": 0, "tombstone_s": 500});
        app.rules("default", json!({"retention": retention})).await;
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        app.pass_s(99.0).await;
        assert_eq!(app.samples(&batch).await.len(), 1);
        app.pass_s(2.0).await;
        app.get(text(&batch["samples_url"])).await.refused(410, "purged");
        assert_eq!(app.story("a").await["purged_at"], "2026-01-01T00:01:41.000000Z");
        // The rollout is known until the tombstone expires.
        app.post("/trajectories", rollout("a", 1.0)).await.expect(200);
        app.post("/trajectories", rollout("a", 0.5)).await.refused(409, "rollout-conflict");
        app.pass_s(500.0).await;
        app.get("/trajectories?rollout_id=a").await.refused(404, "not-found");
        app.get(&format!("/batches/{}", text(&batch["batch_id"]))).await.refused(404, "not-found");
        let stats = app.get("/stats").await.expect(200);
        assert_eq!(stats["policies"]["default"]["rollouts"]["forgotten"], 1);
        assert_eq!(stats["conserved"], true);
        app.post("/trajectories", rollout("a", 1.0)).await.expect(201);
    }

    async fn discarded_and_stale_groups_are_purged_by_the_same_rules(app: TestApp) {
        let retention = json!({"dropped_s": 50, "tombstone_s": 50});
        let filters = json!([{"name": "flat", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 2}, "retention": retention, "filter": filters,
            "staleness": {"max": 0}})).await;
        app.accept(group("flat", &[1.0, 1.0])).await;
        let old = with(member("old", 0, 1.0), json!({"policy_version": 0}));
        app.accept(json!([old, member("old", 1, 0.0)])).await;
        app.publish(1).await.expect(200);
        app.post("/batches", json!({})).await.expect(204);
        app.accept(member("old", 2, 0.0)).await;
        assert_eq!(app.story("old-0").await["state"], "stale");
        app.pass_s(51.0).await;
        app.pass_s(51.0).await;
        let stats = app.get("/stats").await.expect(200);
        assert_eq!(stats["policies"]["default"]["rollouts"]["forgotten"], 5);
        assert_eq!(stats["policies"]["default"]["live_bytes"], 0);
    }

    async fn received_is_the_sum_of_all_states_whatever_happened(app: TestApp) {
        let filters = json!([
            {"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"},
            {"name": "mid", "scope": "rollout", "when": "reward == 0.25", "action": "mask"},
            {"name": "flat", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"},
        ]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filters, "lease": {"max_deliveries": 2}})).await;
        for index in 0..12 {
            let rewards = [[1.0, 0.0], [0.5, 0.5], [0.25, 1.0], [-1.0, 1.0]][index % 4];
            app.accept(group(&format!("g{index}"), &rewards)).await;
            app.check_books().await;
        }
        app.accept(member("g0", 9, 1.0)).await;
        let one = app.lease().await;
        app.ack(&one, 1).await.expect(200);
        app.check_books().await;
        let two = app.lease().await;
        app.nack(&two, &[]).await.expect(200);
        let two = app.lease().await;
        let named = app.group_ids(&two).await;
        app.nack(&two, &[&named[0]]).await.expect(200);
        app.check_books().await;
        let three = app.lease().await;
        app.ack(&three, 2).await.expect(200);
        app.checkpoint(1).await;
        let four = app.lease().await;
        app.resume(Some(1)).await;
        app.check_books().await;
        let _ = four;
        app.post("/policies/default/reset", json!({})).await.expect(200);
        let stats = app.get("/stats").await.expect(200);
        assert_eq!((&stats["conserved"], &stats["policies"]["default"]["received"]), (&json!(true), &json!(25)));
    }
}
