//! Damage: a stored payload that is not what was sent is never delivered.

use serde_json::json;

use crate::support::{group, on_both_stores, text};

on_both_stores! {
    async fn a_damaged_payload_quarantines_its_group_and_is_not_delivered(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 3}})).await;
        for name in ["a", "b", "c"] {
            app.accept(group(name, &[1.0, 0.0])).await;
        }
        let batch = app.lease().await;
        // One bit of what the digest covers.
        let changed = app.tamper(
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

    async fn damage_on_a_later_page_breaks_the_stream(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 300}})).await;
        let rollouts: Vec<_> = (0..300).map(|index| crate::support::rollout(&format!("r{index:03}"), 1.0)).collect();
        app.accept(rollouts.into()).await;
        let batch = app.lease().await;
        app.tamper("UPDATE payload SET digest = (SELECT content_digest FROM rollout WHERE rollout_pk = 1) WHERE rollout_pk = 290").await;
        let url = format!("{}{}", app.url, text(&batch["samples_url"]));
        let response = app.http.get(url).send().await.expect("the head is sent");
        assert_eq!(response.status(), 200);
        assert!(response.bytes().await.is_err(), "the stream must not end as if it were whole");
        assert_eq!(app.story("r289").await["state"], "quarantined");
    }
}
