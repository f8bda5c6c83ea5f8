//! Groups: when they are decided, that this happens once, and what happens to late rollouts.

use serde_json::{Value, json};

use crate::support::{TestApp, group, member, on_both_stores, text, with};

async fn state(app: &TestApp, group_id: &str) -> (String, Option<String>) {
    let page = app.get(&format!("/groups?group_id={group_id}")).await.expect(200);
    let group = &page["groups"][0];
    (text(&group["state"]).to_owned(), group["reason"].as_str().map(str::to_owned))
}

fn is(state: &str, reason: &str) -> (String, Option<String>) {
    (state.to_owned(), Some(reason.to_owned()))
}

fn failed(group_id: &str, index: usize) -> Value {
    with(member(group_id, index, 0.0), json!({"status": "aborted"}))
}

#[expect(clippy::needless_pass_by_value, reason = "it reads as the rules that it makes")]
fn dropping(group: Value) -> Value {
    json!({"group": group, "filter": [
        {"name": "infra-abort", "scope": "rollout", "when": "status == \"aborted\"", "action": "drop"}]})
}

on_both_stores! {
    async fn the_post_that_completes_a_group_is_answered_after_the_decision(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let first = app.accept(member("g", 0, 1.0)).await;
        assert_eq!(first["group"], json!({"state": "open", "arrived": 1, "size": 2}));
        let second = app.accept(member("g", 1, 0.0)).await;
        assert_eq!(second["group"], json!({"state": "ready", "arrived": 2, "size": 2}));
    }

    async fn a_group_is_decided_exactly_once_under_concurrent_posts(app: TestApp) {
        app.rules("default", json!({"group": {"size": 4}})).await;
        let posts = (0..12).map(|index| app.post("/trajectories", member("g", index, index as f64)));
        let answers = futures::future::join_all(posts).await;
        let verdict = |name: &str| answers.iter().filter(|answer| answer.json["verdict"] == name).count();
        assert_eq!((verdict("kept"), verdict("late")), (4, 8));
        let batch = app.lease().await;
        assert_eq!(batch["rollouts"], 4);
        app.post("/batches", json!({})).await.expect(204);
    }

    async fn late_rollouts_are_ledgered_with_a_warning_and_never_merged(app: TestApp) {
        app.accept(group("g", &[1.0, 0.0])).await;
        let late = app.post("/trajectories", member("g", 2, 1.0)).await.expect(201);
        assert_eq!((text(&late["verdict"]), text(&late["reason"])), ("late", "group-decided"));
        assert_eq!(late["warnings"].as_array().map(Vec::len), Some(1));
        assert_eq!(app.story("g-2").await["state"], "late");
        // The identity check comes first, so a retry of a member is recognised as that member.
        let again = with(member("g", 0, 1.0), json!({"group_size": 2}));
        assert_eq!(app.post("/trajectories", again).await.expect(200)["verdict"], "kept");
        assert_eq!(app.lease().await["rollouts"], 2);
    }

    async fn the_first_rollout_fixes_the_size(app: TestApp) {
        app.accept(with(member("g", 0, 1.0), json!({"group_size": 3}))).await;
        let other = with(member("g", 1, 1.0), json!({"group_size": 4}));
        app.post("/trajectories", other).await.refused(409, "group-size-conflict");
        assert_eq!(app.accept(member("g", 1, 1.0)).await["group"]["arrived"], 2);
    }

    async fn a_rollout_needs_a_group_where_groups_have_more_than_one(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let alone = crate::support::rollout("a", 1.0);
        assert_eq!(app.post("/trajectories", alone).await.pointers(422), ["/group_id"]);
    }

    async fn refill_waits_for_replacements(app: TestApp) {
        app.rules("default", dropping(json!({"size": 2, "on_drop": "refill"}))).await;
        app.accept(member("g", 0, 1.0)).await;
        let dropped = app.accept(failed("g", 1)).await;
        assert_eq!((text(&dropped["verdict"]), text(&dropped["reason"])), ("dropped", "infra-abort"));
        assert_eq!(dropped["group"], json!({"state": "open", "arrived": 1, "size": 2}));
        assert_eq!(app.accept(member("g", 2, 0.0)).await["group"]["state"], "ready");
        assert_eq!(app.story("g-1").await["state"], "dropped");
    }

    async fn refill_gives_up_after_four_posts_per_place(app: TestApp) {
        app.rules("default", dropping(json!({"size": 2, "min_size": 2}))).await;
        app.accept(member("g", 0, 1.0)).await;
        for index in 1..7 {
            assert_eq!(app.accept(failed("g", index)).await["group"]["state"], "open");
        }
        let discarded = json!({"state": "discarded", "reason": "exhausted", "arrived": 1, "size": 2});
        assert_eq!(app.accept(failed("g", 7)).await["group"], discarded);
        assert_eq!(state(app, "g").await, is("discarded", "exhausted"));
        app.rules("default", dropping(json!({"size": 2, "min_size": 1}))).await;
        app.accept(member("h", 0, 1.0)).await;
        for index in 1..8 {
            app.accept(failed("h", index)).await;
        }
        assert_eq!(state(app, "h").await.0, "ready");
    }

    async fn shrink_lets_a_dropped_rollout_use_up_its_place(app: TestApp) {
        app.rules("default", dropping(json!({"size": 3, "min_size": 2, "on_drop": "shrink"}))).await;
        app.accept(member("g", 0, 1.0)).await;
        app.accept(failed("g", 1)).await;
        let last = app.accept(member("g", 2, 0.0)).await;
        assert_eq!(last["group"], json!({"state": "ready", "arrived": 2, "size": 3}));
        app.accept(member("h", 0, 1.0)).await;
        app.accept(failed("h", 1)).await;
        assert_eq!(app.accept(failed("h", 2)).await["group"]["state"], "discarded");
        assert_eq!(state(app, "h").await, is("discarded", "incomplete"));
    }

    async fn groups_that_time_out_together_become_ready_in_the_order_of_their_opening(app: TestApp) {
        app.rules("default", dropping(json!({"size": 2, "min_size": 1, "timeout_s": 60}))).await;
        for name in ["a", "b", "c"] {
            app.accept(member(name, 0, 1.0)).await;
        }
        // Moves the first group's row to the end of the table on Postgres.
        app.accept(failed("a", 1)).await;
        app.pass_s(60.0).await;
        for name in ["a", "b", "c"] {
            assert_eq!(app.group_ids(&app.lease().await).await, [name]);
        }
    }

    async fn a_timeout_counts_from_the_first_arrival_and_needs_min_size(app: TestApp) {
        app.rules("default", json!({"group": {"size": 4, "min_size": 2, "timeout_s": 100}})).await;
        app.accept(member("enough", 0, 1.0)).await;
        app.pass_s(50.0).await;
        app.accept(member("enough", 1, 0.0)).await;
        app.accept(member("few", 0, 1.0)).await;
        app.pass_s(49.0).await;
        assert_eq!(state(app, "enough").await.0, "open");
        app.pass_s(2.0).await;
        assert_eq!(state(app, "enough").await.0, "ready");
        assert_eq!(state(app, "few").await.0, "open");
        app.pass_s(50.0).await;
        assert_eq!(state(app, "few").await, is("discarded", "incomplete"));
        assert_eq!(app.story("few-0").await["state"], "discarded");
    }

    async fn a_group_is_closed_by_hand_as_if_timed_out(app: TestApp) {
        app.rules("default", json!({"group": {"size": 4, "min_size": 2}})).await;
        for index in 0..2 {
            app.accept(member("g", index, index as f64)).await;
        }
        let close = json!({"group_id": "g"});
        assert_eq!(app.post("/groups/close", close.clone()).await.expect(200)["state"], "ready");
        app.post("/groups/close", close).await.refused(409, "group-decided");
        app.post("/groups/close", json!({"group_id": "nope"})).await.refused(404, "not-found");
    }

    async fn a_group_is_discarded_by_hand_while_no_batch_carries_it(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.accept(member("open", 0, 1.0)).await;
        app.accept(group("ready", &[1.0, 0.0])).await;
        for name in ["open", "ready"] {
            let answer = app.post("/groups/discard", json!({"group_id": name, "reason": "bad data"})).await.expect(200);
            assert_eq!((text(&answer["state"]), text(&answer["reason"])), ("discarded", "bad data"));
        }
        let dropped = &app.get("/stats").await.expect(200)["policies"]["default"]["dropped"];
        assert_eq!(dropped, &json!({"by-hand": 2}), "reasons are free text, and counted by one name");
        app.post("/batches", json!({})).await.expect(204);
        app.accept(group("leased", &[1.0, 0.0])).await;
        app.lease().await;
        let answer = app.post("/groups/discard", json!({"group_id": "leased", "reason": "x"})).await;
        answer.refused(409, "group-decided");
        let answer = app.post("/groups/discard", json!({"group_id": "open", "reason": ""})).await;
        assert_eq!(answer.pointers(422), ["/reason"]);
    }

    async fn rules_apply_to_groups_opened_from_then_on(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "advantage": "reward"})).await;
        app.accept(member("old", 0, 3.0)).await;
        app.rules("default", json!({"group": {"size": 1}, "advantage": "none"})).await;
        assert_eq!(app.accept(member("old", 1, 5.0)).await["group"]["size"], 2);
        app.accept(member("new", 0, 7.0)).await;
        let old = app.lease().await;
        let advantages: Vec<_> = app.samples(&old).await.iter().map(|row| row["advantage"].as_f64()).collect();
        assert_eq!(advantages, [Some(3.0), Some(5.0)]);
        let new = app.lease().await;
        assert_eq!(app.samples(&new).await[0]["advantage"], 0.0);
    }

    async fn over_the_backlog_only_open_groups_take_rollouts(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "backlog": {"max_ready_rollouts": 3}})).await;
        app.accept(group("a", &[1.0, 0.0])).await;
        app.accept(member("b", 0, 1.0)).await;
        let refused = app.post("/trajectories", member("c", 0, 1.0)).await;
        refused.refused(429, "backlog-full");
        app.accept(member("b", 1, 1.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 1).await.expect(200);
        app.accept(member("c", 0, 1.0)).await;
    }
}
