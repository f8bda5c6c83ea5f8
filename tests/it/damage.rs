//! Damage: a stored payload that differs from what was sent is never delivered.

use serde_json::{Value, json};

use crate::support::{TestApp, group, member, on_both_stores, text, with};

async fn three_groups(app: &TestApp) -> Value {
    let advantage = json!({"kind": "gdpo", "components": {"acc": 1.0}});
    app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 3}, "advantage": advantage})).await;
    for (index, name) in ["a", "b", "c"].into_iter().enumerate() {
        // No two payloads are equal.
        let segments = json!([{"tokens": [1, 2, index], "loss_mask": [1, 1]}]);
        let members = (0..2).map(|place| {
            with(
                member(name, place, place as f64),
                json!({"segments": segments, "reward_components": {"acc": place, "fmt": 1}}),
            )
        });
        app.accept(members.collect()).await;
    }
    app.lease().await
}

/// Changes one row directly in the database. Its group must be quarantined and the others delivered.
async fn found_in_the_second_group(app: &mut TestApp, sql: &'static str) {
    let batch = three_groups(app).await;
    assert_eq!(app.damage(sql).await, 1);
    let answer = app.get(text(&batch["samples_url"])).await;
    if answer.json["type"] != "damaged" {
        // A batch with damage is refused as a whole, and the trainer gives it back.
        answer.refused(500, "internal");
        return;
    }
    assert_eq!(app.story("b-0").await["state"], "quarantined");
    let rest = app.lease_with(json!({"partial": true})).await;
    assert_eq!(app.group_ids(&rest).await, ["a", "c"]);
}

async fn broken_off_on_a_later_page(app: &mut TestApp, coding: &str) {
    app.rules("default", json!({"batch": {"groups": 300}})).await;
    let rollouts: Vec<_> = (0..300).map(|index| crate::support::rollout(&format!("r{index:03}"), 1.0)).collect();
    app.accept(rollouts.into()).await;
    let batch = app.lease().await;
    app.damage(
        "UPDATE payload SET digest = (SELECT content_digest FROM rollout WHERE rollout_pk = 1) WHERE rollout_pk = 290",
    )
    .await;
    let url = format!("{}{}", app.url, text(&batch["samples_url"]));
    let response = app.http.get(url).header("accept-encoding", coding).send().await.expect("the head is sent");
    assert_eq!(
        (response.status().as_u16(), response.headers().contains_key("content-encoding")),
        (200, coding == "zstd")
    );
    assert!(response.bytes().await.is_err(), "the stream must not end as if it were whole");
    assert_eq!(app.story("r289").await["state"], "quarantined");
}

on_both_stores! {
    async fn a_damaged_payload_quarantines_its_group_and_is_not_delivered(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 3}})).await;
        for name in ["a", "b", "c"] {
            app.accept(group(name, &[1.0, 0.0])).await;
        }
        let batch = app.lease().await;
        // Changes one bit that the digest covers.
        let changed = app.damage(
            "UPDATE payload SET digest = (SELECT content_digest FROM rollout WHERE rollout_pk = 1) WHERE rollout_pk = 3",
        ).await;
        assert_eq!(changed, 1);
        app.get(text(&batch["samples_url"])).await.refused(500, "damaged");
        assert_eq!(app.batch(&batch).await["state"], "split");
        let story = app.story("b-0").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("quarantined"), &json!("damaged")));
        app.ack(&batch, 1).await.refused(409, "lease-lost");
        let rest = app.lease_with(json!({"partial": true})).await;
        assert_eq!(app.group_ids(&rest).await, ["a", "c"]);
    }

    async fn a_reward_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET reward = 0.5 WHERE rollout_pk = 3").await;
    }

    async fn an_advantage_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET advantage = 0.5 WHERE rollout_pk = 3").await;
    }

    async fn a_reward_component_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, r#"UPDATE rollout SET components = '{"acc":0.5}' WHERE rollout_pk = 3"#).await;
    }

    async fn a_reward_component_that_is_lost_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET components = NULL WHERE rollout_pk = 3").await;
    }

    async fn a_verdict_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET verdict = 'masked' WHERE rollout_pk = 3").await;
    }

    async fn a_mask_sum_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET trained_segments = 2 WHERE rollout_pk = 3").await;
    }

    async fn a_number_of_segments_that_changed_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "UPDATE rollout SET segments = 2 WHERE rollout_pk = 3").await;
    }

    async fn a_payload_of_another_rollout_is_not_delivered(app: TestApp) {
        found_in_the_second_group(app, "
            UPDATE payload
            SET body = (SELECT body FROM payload WHERE rollout_pk = 1),
                file = (SELECT file FROM payload WHERE rollout_pk = 1),
                start = (SELECT start FROM payload WHERE rollout_pk = 1),
                length = (SELECT length FROM payload WHERE rollout_pk = 1),
                digest = (SELECT digest FROM payload WHERE rollout_pk = 1)
            WHERE rollout_pk = 3").await;
    }

    async fn a_batch_whose_weights_changed_is_not_delivered(app: TestApp) {
        let batch = three_groups(app).await;
        assert_eq!(app.damage("UPDATE batch SET weight_tokens = weight_tokens + 1").await, 1);
        app.get(text(&batch["samples_url"])).await.refused(500, "internal");
    }

    async fn a_row_is_never_taken_for_one_of_another_name(app: TestApp) {
        app.rules("default", json!({"group": {"size": 3}})).await;
        app.accept(member("a", 0, 1.0)).await;
        assert_eq!(app.damage("UPDATE rollout_group SET group_id = 'b' WHERE group_id = 'a'").await, 1);
        app.post("/trajectories", member("a", 1, 1.0)).await.refused(500, "internal");
        app.post("/groups/close", json!({"policy": "default", "group_id": "a"})).await.refused(500, "internal");
        app.get("/groups?group_id=a").await.refused(500, "internal");
        app.get("/trajectories?group_id=a").await.refused(500, "internal");
        assert_eq!(app.damage("UPDATE rollout_group SET group_id = 'a' WHERE group_id = 'b'").await, 1);
        assert_eq!(app.damage("UPDATE rollout SET rollout_id = 'a-7' WHERE rollout_id = 'a-0'").await, 1);
        app.post("/trajectories", member("a", 0, 1.0)).await.refused(500, "internal");
        app.get("/trajectories?rollout_id=a-0").await.refused(500, "internal");
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["received"], 1);
    }

    async fn damage_on_a_later_page_breaks_the_stream(app: TestApp) {
        broken_off_on_a_later_page(app, "identity").await;
    }

    async fn damage_on_a_later_page_breaks_a_compressed_stream(app: TestApp) {
        broken_off_on_a_later_page(app, "zstd").await;
    }
}
