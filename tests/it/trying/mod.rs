//! Trying filters: what a draft would have done with the groups that were decided last. Nothing is changed.

mod bounds;
mod repeats;

use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};

use crate::support::{Answer, TestApp, group, member, on_both_stores, text, with};

const PATH: &str = "/policies/default/filters/try";

fn filter(name: &str, scope: &str, when: &str, action: &str) -> Value {
    json!({"name": name, "scope": scope, "when": when, "action": action})
}

async fn attempt(app: &TestApp, filter: Value) -> Answer {
    app.post(PATH, json!({"filter": filter})).await
}

async fn tried(app: &TestApp, filter: Value) -> Value {
    attempt(app, filter).await.expect(200)
}

/// The codes of the notes.
fn notes(found: &Value) -> Vec<&str> {
    found["notes"].as_array().expect("a list").iter().map(|note| text(&note["code"])).collect()
}

fn flat() -> Value {
    filter("zero-variance", "group", "reward_std < 1e-6", "drop")
}

/// A rollout with this number of tokens.
fn long(body: Value, tokens: usize) -> Value {
    with(body, json!({"segments": [{"tokens": vec![1; tokens], "loss_mask": [1, 1]}]}))
}

on_both_stores! {
    async fn a_draft_is_shown_beside_what_was_decided_and_beside_the_rules_now(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "filter": [flat()]})).await;
        for (name, rewards) in [("a", [0.0, 1.0]), ("b", [0.5, 0.5]), ("c", [1.0, 1.0])] {
            app.clock.advance_s(1.0);
            app.accept(group(name, &rewards)).await;
        }
        app.accept(member("open", 0, 1.0)).await;
        let same = tried(app, json!([flat()])).await;
        assert_eq!(same["looked_at"], json!({"groups": 3, "rollouts": 6, "examined": 4, "payload_bytes": 0,
            "from": "2026-01-01T00:00:01.000000Z", "to": "2026-01-01T00:00:03.000000Z", "complete": true}));
        let as_decided = json!({"ready": 1, "discarded": {"zero-variance": 2}, "open": 0, "unjudged": 0});
        for column in ["as_decided", "rules_now", "draft"] {
            assert_eq!(same["groups"][column], as_decided, "{column}");
            assert_eq!(same["rollouts"][column], json!({"kept": 6, "masked": {}, "dropped": {}, "late": 0, "unjudged": 0}));
        }
        assert_eq!((&same["changed_groups"], &same["changes"], &same["notes"]), (&json!(0), &json!([]), &json!([])));
        // The rules have changed since.
        app.rules("default", json!({"group": {"size": 2}, "filter": [filter("hard", "group", "reward_mean < 0.6", "drop")]})).await;
        let found = tried(app, json!([])).await;
        assert_eq!(found["groups"]["as_decided"], as_decided);
        assert_eq!(found["groups"]["rules_now"], json!({"ready": 1, "discarded": {"hard": 2}, "open": 0, "unjudged": 0}));
        assert_eq!(found["groups"]["draft"], json!({"ready": 3, "discarded": {}, "open": 0, "unjudged": 0}));
        let ready = json!({"state": "ready", "reason": null});
        let because = |reason: &str| json!({"state": "discarded", "reason": reason});
        assert_eq!(found["changed_groups"], 2);
        assert_eq!(found["changes"], json!([
            {"group_id": "b", "was": because("zero-variance"), "now": because("hard"), "would_be": ready, "members": 2,
             "rewards": [0.5, 0.5]},
            {"group_id": "a", "was": ready, "now": because("hard"), "would_be": ready, "members": 2, "rewards": [0.0, 1.0]},
        ]));
        let one = app.post(PATH, json!({"filter": [], "examples": 1})).await.expect(200);
        assert_eq!((&one["changed_groups"], one["changes"].as_array().map(Vec::len)), (&json!(2), Some(1)));
    }

    async fn rollouts_that_a_draft_drops_or_keeps_change_their_group(app: TestApp) {
        let low = |bound: &str| filter("low", "rollout", &format!("reward < {bound}"), "drop");
        app.rules("default", json!({"group": {"size": 2, "min_size": 1, "on_drop": "shrink"}, "filter": [low("0.2")]})).await;
        app.accept(group("a", &[0.1, 1.0])).await;
        app.accept(group("b", &[0.5, 1.0])).await;
        let masked = filter("mid", "rollout", "reward < 0.6", "mask");
        let found = tried(app, json!([masked])).await;
        assert_eq!(found["rollouts"]["as_decided"], json!({"kept": 3, "masked": {}, "dropped": {"low": 1}, "late": 0, "unjudged": 0}));
        assert_eq!(found["rollouts"]["draft"], json!({"kept": 2, "masked": {"mid": 2}, "dropped": {}, "late": 0, "unjudged": 0}));
        assert_eq!((&found["changed_groups"], notes(&found)), (&json!(0), vec![]));
        let found = tried(app, json!([low("2.0")])).await;
        assert_eq!(found["groups"]["draft"]["discarded"], json!({"incomplete": 2}));
        assert_eq!(found["rollouts"]["draft"]["dropped"], json!({"low": 4}));
        assert!(!notes(&found).contains(&"refill-not-simulated"));
        // What was late takes a place that the draft leaves free, but not after a timeout.
        app.rules("default", json!({"group": {"size": 2}, "filter": []})).await;
        app.accept(group("c", &[0.1, 1.0])).await;
        app.accept(with(member("c", 2, 0.9), json!({"group_size": 2}))).await;
        app.accept(member("d", 0, 1.0)).await;
        app.pass_s(3_601.0).await;
        app.accept(member("d", 1, 1.0)).await;
        let only = |found: &Value, group: &str| found["changes"].as_array().expect("a list").iter()
            .find(|change| change["group_id"] == group).cloned().unwrap_or_default();
        let found = tried(app, json!([low("0.2")])).await;
        assert_eq!(found["rollouts"]["as_decided"]["late"], 2);
        assert_eq!((only(&found, "c"), only(&found, "d")), (Value::Null, Value::Null));
        assert_eq!(found["rollouts"]["draft"]["late"], 1, "the late rollout of `c` takes the place of the dropped one");
        let found = tried(app, json!([low("0.95")])).await;
        assert_eq!(only(&found, "c")["would_be"], json!({"state": "open", "reason": null}), "{found}");
        assert_eq!(found["groups"]["draft"]["open"], 1);
    }

    async fn each_note_appears_and_disappears(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "filter": [flat(), filter("lengthy", "rollout", "tokens > 5", "drop")]})).await;
        app.accept(group("flat", &[1.0, 1.0])).await;
        app.accept(group("good", &[0.0, 1.0])).await;
        for (index, tokens) in [(0, 11), (1, 3), (2, 3)] {
            app.accept(long(member("mixed", index, index as f64), tokens)).await;
        }
        let lengthy = filter("lengthy", "rollout", "tokens > 5", "drop");
        assert!(notes(&tried(app, json!([flat(), lengthy])).await).is_empty());
        let found = tried(app, json!([lengthy])).await;
        assert_eq!(notes(&found), ["flat-groups-enter"]);
        assert!(text(&found["notes"][0]["text"]).contains("1 of 1 groups"), "{found}");
        // The long rollout takes the place of a short one.
        let found = tried(app, json!([flat()])).await;
        assert_eq!(notes(&found), ["length-shift", "refill-not-simulated"]);
        assert!(text(&found["notes"][0]["text"]).contains("5 tokens on average, and have 3"), "{found}");
        let old = filter("old", "rollout", "staleness > 100", "drop");
        assert_eq!(notes(&tried(app, json!([flat(), lengthy, old])).await), ["versions-derived"]);
    }

    async fn filters_that_cannot_be_evaluated_are_named_with_an_example(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let quality = |reward: f64, name: usize, group: &str| with(member(group, name, reward), json!({"metadata": {"quality": reward}}));
        app.accept(quality(0.25, 0, "a")).await;
        app.accept(member("a", 1, 1.0)).await;
        app.accept(group("b", &[0.0, 1.0])).await;
        let found = tried(app, json!([
            filter("poor", "rollout", "metadata.quality < 0.5", "mask"),
            filter("seventh", "group", "rewards[7] > 0.9", "drop"),
        ])).await;
        assert_eq!(found["failed"][0]["count"], 3);
        assert_eq!((&found["failed"][0]["filter"], &found["failed"][0]["group_id"]), (&json!("poor"), &json!("b")));
        assert_eq!(found["failed"][0]["rollout_id"], "b-0");
        assert!(text(&found["failed"][1]["message"]).to_lowercase().contains("index"), "{found}");
        assert_eq!((&found["failed"][1]["scope"], &found["failed"][1]["count"]), (&json!("group"), &json!(2)));
        assert_eq!((&found["failed"][1]["rollout_id"], &found["failed"][1]["group_id"]), (&Value::Null, &json!("b")));
        assert_eq!(found["rollouts"]["draft"]["masked"], json!({"poor": 1}));
        assert!(found["looked_at"]["payload_bytes"].as_u64() > Some(0));
    }

    async fn groups_without_payloads_are_judged_if_the_draft_does_not_need_them(app: TestApp) {
        let poor = |bound: &str| filter("poor", "rollout", &format!("has(metadata.quality) && metadata.quality < {bound}"), "drop");
        app.rules("default", json!({"group": {"size": 2}, "filter": [poor("0.5")]})).await;
        app.accept(with(member("a", 0, 1.0), json!({"metadata": {"quality": 0.1}}))).await;
        app.accept(member("a", 1, 0.0)).await;
        app.accept(member("a", 2, 1.0)).await;
        app.accept(group("b", &[0.0, 1.0])).await;
        // The payload of the dropped rollout was never stored.
        let found = tried(app, json!([poor("0.05")])).await;
        assert_eq!(found["unjudged"], json!([{"reason": "payload-purged", "rollouts": 1}]));
        assert_eq!(found["groups"]["draft"], json!({"ready": 1, "discarded": {}, "open": 0, "unjudged": 1}));
        assert_eq!(found["rollouts"]["draft"], json!({"kept": 2, "masked": {}, "dropped": {}, "late": 0, "unjudged": 3}));
        assert_eq!(found["changes"][0]["would_be"], json!({"state": "unjudged", "reason": "payload-purged"}));
        assert_eq!(found["groups"]["rules_now"]["ready"], 2, "the group was decided by the same filters");
        let found = tried(app, json!([poor("0.5"), flat()])).await;
        assert_eq!((&found["unjudged"], &found["looked_at"]["payload_bytes"]), (&json!([]), &json!(0)));
        assert_eq!(found["rollouts"]["draft"]["dropped"], json!({"poor": 1}));
        let found = tried(app, json!([filter("negative", "rollout", "reward < 0.0", "drop")])).await;
        assert_eq!((&found["unjudged"], &found["groups"]["draft"]["ready"]), (&json!([]), &json!(2)));
    }

    async fn a_draft_of_a_group_filter_looks_at_components(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        for (name, correct) in [("flat", 0.0), ("mixed", 1.0)] {
            let of = |index: usize| {
                let acc = if index == 0 { correct } else { 0.0 };
                with(member(name, index, acc), json!({"reward_components": {"acc": acc}}))
            };
            app.accept(json!([of(0), of(1)])).await;
        }
        let found = tried(app, json!([filter("flat-accuracy", "group", "components.acc.std < 1e-6", "drop")])).await;
        assert_eq!(found["groups"]["draft"], json!({"ready": 1, "discarded": {"flat-accuracy": 1}, "open": 0, "unjudged": 0}));
        assert!(found["looked_at"]["payload_bytes"].as_u64() > Some(0));
        app.damage("DELETE FROM payload WHERE rollout_pk = 1").await;
        let found = tried(app, json!([filter("flat-accuracy", "group", "components.acc.std < 1e-6", "drop")])).await;
        assert_eq!(found["groups"]["draft"], json!({"ready": 1, "discarded": {}, "open": 0, "unjudged": 1}));
        assert_eq!(found["unjudged"], json!([{"reason": "payload-purged", "rollouts": 1}]));
    }

    async fn a_draft_that_put_refuses_is_refused_with_the_same_pointers(app: TestApp) {
        let drafts = [
            json!([filter("a", "rollout", "rewards > 1", "drop"), filter("a", "group", "reward_std <", "mask")]),
            json!([filter("incomplete", "rollout", "reward * 2 > 1.0", "drop")]),
            json!([{"name": "x", "scope": "rollout", "when": "true"}]),
            json!([{"name": "x", "scope": "nowhere", "when": "true", "action": "drop"}]),
            json!({"name": "x"}),
            json!(vec![flat(); 65]),
        ];
        for draft in drafts {
            let put = app.put("/policies/default", json!({"filter": draft})).await;
            let found = attempt(app, draft).await;
            assert_eq!(found.json["errors"], put.json["errors"]);
            assert_eq!(found.clone().pointers(422).is_empty(), put.pointers(422).is_empty());
        }
        for body in [json!({}), json!({"filter": [], "groups": 0}), json!({"filter": [], "groups": 2_001}),
            json!({"filter": [], "examples": 101}), json!({"filter": [], "environment": ""}), json!({"filter": [], "x": 1})] {
            app.post(PATH, body).await.refused(422, "invalid");
        }
        app.post("/policies/nobody/filters/try", json!({"filter": []})).await.refused(404, "unknown-policy");
    }

    async fn a_try_sees_only_what_its_key_may_see(app: TestApp) {
        app.rules("math", json!({})).await;
        let keys = [(Role::Read, true), (Role::Admin, true), (Role::Produce, false), (Role::Train, false)];
        for (role, may) in keys {
            let key = app.key(role, &["math"]).await;
            let found = app.post_as(&key, "/policies/math/filters/try", json!({"filter": []})).await;
            assert_eq!(found.status.as_u16(), if may { 200 } else { 403 }, "{role}");
            let hidden = app.post_as(&key, PATH, json!({"filter": []})).await;
            let status = app.get_as(&key, "/policies/default").await.status;
            assert_eq!(hidden.status, if may { status } else { reqwest::StatusCode::FORBIDDEN }, "{role}");
            app.get_as(&key, "/filters/variables").await.expect(200);
        }
        app.call(Method::GET, "/filters/variables", None).await.refused(401, "unauthorized");
    }

    async fn the_names_that_filters_know_are_listed(app: TestApp) {
        let names = app.get("/filters/variables").await.expect(200);
        let variables = names["variables"].as_array().expect("a list");
        assert_eq!(variables[1], json!({"scope": "rollout", "name": "reward", "type": "double or null",
            "meaning": "the reward of the rollout", "typical": "0.5"}));
        // Each works in a filter of its scope, and in no other unless that lists it too.
        for scope in ["rollout", "group"] {
            for variable in variables {
                let name = text(&variable["name"]);
                let is_listed = variables.iter().any(|other| other["scope"] == scope && other["name"] == name);
                // Of all variables, this one alone is only asked for one entry.
                let when = if name == "components" { "has(components.acc)" } else { &format!("{name} == {name}") };
                let found = attempt(app, json!([filter("x", scope, when, "drop")])).await;
                assert_eq!(found.status.as_u16(), if is_listed { 200 } else { 422 }, "{scope} {name}");
            }
        }
        assert!(names["functions"].as_array().is_some_and(|names| names.contains(&json!("double"))));
        assert!(names["methods"].as_array().is_some_and(|names| names.contains(&json!("startsWith"))));
        assert!(names["macros"].as_array().is_some_and(|names| names.contains(&json!("exists"))));
    }

    async fn groups_that_no_rules_decided_are_passed_over(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.accept(member("by-hand", 0, 1.0)).await;
        app.post("/groups/discard", json!({"group_id": "by-hand", "reason": "no"})).await.expect(200);
        app.accept(group("ready", &[0.0, 1.0])).await;
        app.post("/groups/discard", json!({"group_id": "ready", "reason": "no"})).await.expect(200);
        app.accept(member("alone", 0, 1.0)).await;
        let found = tried(app, json!([flat()])).await;
        assert_eq!((&found["looked_at"]["groups"], &found["looked_at"]["examined"]), (&json!(1), &json!(3)), "{found}");
        assert_eq!(found["groups"]["as_decided"]["ready"], 1, "it was ready before it was discarded");
        // A run that has ended says nothing about the filters of this one.
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(tried(app, json!([])).await["looked_at"]["groups"], 0);
    }
}
