//! What a try may cost, and that nothing is changed by it.

use std::time::Duration;

use forebay_domain::{
    ids::PolicyName,
    looking::dry_run::{Bounds, TryFilters, report::Report},
};
use futures::future::join_all;
use serde_json::{Value, json};

use super::{PATH, attempt, filter};
use crate::support::{TestApp, group, member, on_both_stores, with};

/// Tries filters that name metadata, within bounds.
async fn within(app: &TestApp, bounds: Bounds) -> Report {
    let draft = json!([filter("poor", "rollout", "has(metadata.quality)", "drop")]);
    let request = TryFilters {
        policy: PolicyName::default(),
        filter: serde_json::from_value(draft).expect("filters"),
        groups_max: 2_000,
        environment: None,
        examples_max: 10,
        bounds,
    };
    app.buffer.try_filters(request).await.expect("the draft is valid").run().await.expect("the store can be read")
}

on_both_stores! {
    async fn a_try_looks_at_the_newest_groups_and_at_no_more_than_it_may(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for index in 0..4 {
            app.accept(with_environment(group(&format!("web-{index}"), &[0.0, 1.0]), "web")).await;
        }
        for index in 0..6 {
            app.accept(group(&format!("other-{index}"), &[0.0, 1.0])).await;
        }
        let looked_at = |found: Value| (found["looked_at"]["groups"].clone(), found["looked_at"]["examined"].clone());
        let filter = json!([filter("all", "group", "true", "drop")]);
        let found = app.post(PATH, json!({"filter": filter, "groups": 2})).await.expect(200);
        assert_eq!(found["changes"][0]["group_id"], "other-5");
        assert_eq!(looked_at(found), (json!(2), json!(2)));
        // Twice as many groups as wanted are examined.
        let of_web = |groups: u32| json!({"filter": filter, "groups": groups, "environment": "web"});
        assert_eq!(looked_at(app.post(PATH, of_web(2)).await.expect(200)), (json!(0), json!(4)));
        assert_eq!(looked_at(app.post(PATH, of_web(4)).await.expect(200)), (json!(2), json!(8)));
        let all = app.post(PATH, of_web(2_000)).await.expect(200);
        assert_eq!(all["looked_at"]["complete"], true);
        assert_eq!(looked_at(all), (json!(4), json!(10)));
    }

    async fn a_try_ends_with_what_it_has_when_its_bytes_or_its_time_are_used_up(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for index in 0..20 {
            app.accept(group(&format!("g-{index}"), &[0.0, 1.0])).await;
        }
        let whole = within(app, Bounds::default()).await;
        assert_eq!((whole.groups, whole.is_complete), (20, true));
        let bytes = whole.payload_bytes / 2;
        let found = within(app, Bounds { payload_bytes: bytes, ..Bounds::default() }).await;
        assert!(!found.is_complete && (9..=10).contains(&found.groups), "{found:?}");
        assert!(found.payload_bytes <= bytes, "{found:?}");
        assert_eq!(found.draft.ready, found.groups);
        let found = within(app, Bounds { evaluation: Duration::ZERO, ..Bounds::default() }).await;
        assert_eq!((found.groups, found.is_complete, found.draft.ready), (0, false, 0));
    }

    async fn a_second_try_at_once_is_told_to_come_back(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for index in 0..40 {
            app.accept(group(&format!("g-{index}"), &[0.0, 1.0])).await;
        }
        let draft = json!([filter("poor", "rollout", "has(metadata.quality) && temperature > 2.0", "drop")]);
        let answers = join_all((0..12).map(|_| attempt(app, draft.clone()))).await;
        let (done, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
        assert!(!done.is_empty() && !refused.is_empty(), "{} answers of 12", done.len());
        for answer in refused {
            let problem = answer.refused(429, "busy");
            assert_eq!(problem["retry_after_s"], 1);
        }
        attempt(app, draft).await.expect(200);
        // A draft that is refused gives its place back.
        attempt(app, json!([filter("x", "group", "nothing", "drop")])).await.expect(422);
        attempt(app, json!([])).await.expect(200);
    }

    async fn a_group_with_more_rollouts_than_a_page_is_passed_over(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.accept(group("small", &[0.0, 1.0])).await;
        let members: Vec<Value> = (0..2_100).map(|index| with(member("big", index, 1.0), json!({"group_size": 2}))).collect();
        app.accept(json!(members[..1_050])).await;
        app.accept(json!(members[1_050..])).await;
        let within = attempt(app, json!([])).await.expect(200);
        assert_eq!((&within["looked_at"]["groups"], &within["looked_at"]["rollouts"]), (&json!(2), &json!(2_102)));
        let more: Vec<Value> = (2_100..4_200).map(|index| with(member("big", index, 1.0), json!({"group_size": 2}))).collect();
        app.accept(json!(more)).await;
        let found = attempt(app, json!([])).await.expect(200);
        assert_eq!((&found["looked_at"]["groups"], &found["looked_at"]["complete"]), (&json!(1), &json!(false)));
    }
}

fn with_environment(members: Value, environment: &str) -> Value {
    let Value::Array(members) = members else { panic!("a group is a list") };
    members.into_iter().map(|member| with(member, json!({"environment": environment}))).collect()
}
