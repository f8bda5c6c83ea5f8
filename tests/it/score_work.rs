//! Work for scorers: leases of scores that rollouts lack.

use std::{collections::BTreeSet, time::Duration};

use forebay_domain::ids::{LeaseToken, PolicyName};
use forebay_wire::Role;
use serde_json::{Value, json};

use crate::support::{TestApp, eventually, member, on_both_stores, text, with};

const LEASES: &str = "/scores/leases";

/// Nothing is found by polling.
pub(crate) const NEVER_POLL: &str = "[limits]\nwaiter_poll_interval_ms = 3_600_000";

/// Rules under which `judge` is leased, for groups of this size.
async fn rules(app: &TestApp, size: usize, work: Value) {
    app.rules(
        "default",
        json!({
            "group": {"size": size}, "batch": {"groups": 1}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge"], "reward": "scores.judge", "work": {"judge": work}},
        }),
    )
    .await;
}

async fn ask(app: &TestApp, fields: Value) -> Vec<Value> {
    let request = with(json!({"names": ["judge"], "scorer": "a"}), fields);
    let answer = app.post(LEASES, request).await.expect(200);
    answer["items"].as_array().expect("a list").clone()
}

async fn one(app: &TestApp, fields: Value) -> Value {
    let mut items = ask(app, fields).await;
    assert_eq!(items.len(), 1, "{items:?}");
    items.remove(0)
}

/// What a scorer that waits for a minute gets because of an event, long before it would look a last time.
pub(crate) async fn woken<T>(waits: impl Future<Output = T>, happens: impl Future<Output = ()>) -> (T, ()) {
    let both = async { tokio::join!(waits, happens) };
    tokio::time::timeout(Duration::from_secs(30), both).await.expect("it is woken long before")
}

/// The score of the first rollout of an item.
fn scored(item: &Value, value: f64) -> Value {
    json!({
        "rollout_id": item["rollouts"][0]["rollout_id"], "name": item["name"], "value": value, "lease": item["lease"],
    })
}

fn failed(item: &Value, reason: &str) -> Value {
    with(scored(item, 0.0), json!({"value": null, "failed": reason}))
}

fn ids(items: &[Value]) -> Vec<&str> {
    items.iter().map(|item| text(&item["rollouts"][0]["rollout_id"])).collect()
}

on_both_stores! {
    async fn work_is_leased_oldest_first_and_settled_by_its_score(app: TestApp) {
        rules(app, 3, json!({})).await;
        assert_eq!(ask(app, json!({})).await, Vec::<Value>::new());
        for index in 0..3 {
            let parts = json!({"reward_components": {"tests": 0.5}, "status": "truncated"});
            app.accept(with(member("g", index, 1.0), parts)).await;
        }
        let first = one(app, json!({})).await;
        let expected = json!({
            "lease": first["lease"], "expires_at": first["expires_at"], "expires_in_ms": 60_000, "attempt": 1,
            "max_attempts": 5, "policy": "default", "name": "judge", "per": "rollout", "group_id": "g",
            "rollouts": [{
                "rollout_id": "g-0", "scoring": ["judge"], "policy_version": 0, "status": "truncated", "reward": 1.0,
                "reward_components": {"tests": 0.5},
            }],
        });
        assert_eq!(first, expected);
        let others = ask(app, json!({"max": 9, "scorer": "b"})).await;
        assert_eq!(ids(&others), ["g-1", "g-2"]);
        assert!(ask(app, json!({"max": 9})).await.is_empty(), "everything is leased");
        let receipt = app.post("/scores", scored(&first, 0.25)).await.expect(201);
        assert_eq!((&receipt["scorer"], &receipt["applied"]), (&json!("a"), &json!(true)));
        // The same post again, as after a lost answer.
        let again = app.post("/scores", scored(&first, 0.25)).await.expect(200);
        assert_eq!((&again["duplicate"], &again["scorer"]), (&json!(true), &json!("a")));
        app.post("/scores", scored(&first, 0.5)).await.refused(409, "lease-lost");
        let both = json!([scored(&others[0], 0.5), scored(&others[1], 1.0)]);
        let receipts = app.post("/scores", both).await.expect(201);
        assert_eq!(receipts[1]["group"]["state"], "ready");
        let list = app.get("/scores?rollout_id=g-1").await.expect(200);
        let judged = list["scores"].as_array().expect("a list").iter().find(|score| score["name"] == "judge");
        assert_eq!(judged.map(|score| (&score["scorer"], &score["attempt"])), Some((&json!("b"), &json!(1))));
        let work = app.read_value("SELECT COUNT(*) FROM score_work".to_owned()).await;
        assert_eq!(work, 0);
        let metrics = app.metrics().await;
        for line in [r#"event="granted",policy="default"} 3"#, r#"event="settled",policy="default"} 3"#] {
            assert!(metrics.contains(&format!("forebay_score_work_total{{{line}")), "{line}");
        }
    }

    async fn a_scorer_that_dies_loses_nothing_and_what_it_sends_late_is_refused(app: TestApp) {
        rules(app, 1, json!({"max_attempts": 2})).await;
        app.accept(member("g", 0, 1.0)).await;
        let dead = one(app, json!({})).await;
        app.pass_s(59.0).await;
        let extend = |leases: &[&Value], fields: Value| with(json!({"leases": leases}), fields);
        let extended = app.post("/scores/leases/extend", extend(&[&dead["lease"], &json!("other")], json!({}))).await.expect(200);
        assert_eq!((&extended["held"], &extended["lost"]), (&json!([dead["lease"]]), &json!(["other"])));
        assert_eq!(extended["expires_in_ms"], 60_000);
        app.pass_s(59.0).await;
        assert!(ask(app, json!({})).await.is_empty(), "the lease was extended");
        app.pass_s(1.0).await;
        let next = one(app, json!({"scorer": "b"})).await;
        assert_eq!((&next["attempt"], next["lease"] == dead["lease"]), (&json!(2), false));
        for late in [scored(&dead, 1.0), failed(&dead, "late")] {
            app.post("/scores", late).await.refused(409, "lease-lost");
        }
        let extended = app.post("/scores/leases/extend", extend(&[&dead["lease"]], json!({"ttl_s": 5}))).await.expect(200);
        assert_eq!((&extended["held"], &extended["lost"]), (&json!([]), &json!([dead["lease"]])));
        let list = app.get("/scores?rollout_id=g-0").await.expect(200);
        assert_eq!(list["scoring"], json!(["judge"]), "nothing was stored");
        app.post("/scores", scored(&next, 0.5)).await.expect(201);
        // The value that the other one gave is no proof that its lease is alive.
        app.post("/scores", scored(&dead, 0.5)).await.refused(409, "lease-lost");
        let list = app.get("/scores?rollout_id=g-0").await.expect(200);
        let judged: Vec<_> = list["scores"].as_array().expect("a list").iter().filter(|score| score["name"] == "judge").collect();
        assert_eq!(judged.len(), 1, "paid once: {list}");
        assert_eq!((&judged[0]["scorer"], &judged[0]["attempt"]), (&json!("b"), &json!(2)));
    }

    async fn attempts_are_used_up_and_given_back(app: TestApp) {
        rules(app, 1, json!({"max_attempts": 2})).await;
        app.accept(member("g", 0, 1.0)).await;
        app.accept(member("h", 0, 1.0)).await;
        let first = one(app, json!({})).await;
        let receipt = app.post("/scores", failed(&first, "timeout")).await.expect(200);
        assert_eq!((&receipt["failed"], &receipt["applied"], &receipt["scoring"]), (&json!(true), &json!(false), &json!(["judge"])));
        app.post("/scores", failed(&first, "timeout")).await.refused(409, "lease-lost");
        let again = one(app, json!({})).await;
        assert_eq!((ids(std::slice::from_ref(&again)), &again["attempt"]), (vec!["g-0"], &json!(2)), "it has kept its place");
        app.pass_s(60.0).await;
        assert_eq!(ids(&ask(app, json!({"max": 9})).await), ["h-0"], "g-0 is exhausted");
        let retry = app.post("/scores/retry", json!({"name": "judge"})).await.expect(200);
        assert_eq!(retry, json!({"retried": 1}));
        let retried = one(app, json!({})).await;
        assert_eq!((ids(std::slice::from_ref(&retried)), &retried["attempt"]), (vec!["g-0"], &json!(1)));
        assert_eq!(app.post("/scores/retry", json!({"name": "judge"})).await.expect(200), json!({"retried": 0}));
        app.post("/scores", scored(&retried, 1.0)).await.expect(201);
        assert_eq!(app.lease().await["rollouts"], 1);
    }

    async fn a_group_is_leased_as_a_whole_once_it_is_full(app: TestApp) {
        let filter = json!([{"name": "weak", "scope": "rollout", "when": "status == 'failed'", "action": "mask"}]);
        app.rules("default", json!({
            "group": {"size": 3, "timeout_s": 100, "min_size": 2}, "batch": {"groups": 1}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge", "tests"], "work": {"judge": {"per": "group"}, "tests": {}}},
            "filter": filter,
        })).await;
        app.accept(json!([member("g", 0, 1.0), member("g", 1, 0.0)])).await;
        let tests = ask(app, json!({"names": ["judge", "tests"], "max": 9})).await;
        let named: Vec<_> = tests.iter().map(|item| (text(&item["name"]), text(&item["per"]))).collect();
        assert_eq!(named, [("tests", "rollout"); 2], "the group is not full");
        // The last place is taken by a rollout that waits for nothing, because a filter has decided about it.
        app.accept(with(member("g", 2, 0.0), json!({"reward_components": {"judge": 0.0, "tests": 0.0}, "status": "failed"}))).await;
        let group = one(app, json!({})).await;
        assert_eq!((&group["per"], &group["group_id"]), (&json!("group"), &json!("g")));
        let scoring: Vec<_> = group["rollouts"].as_array().expect("a list").iter()
            .map(|rollout| (text(&rollout["rollout_id"]), rollout["scoring"].as_array().map(Vec::len)))
            .collect();
        assert_eq!(scoring, [("g-0", Some(2)), ("g-1", Some(2)), ("g-2", Some(0))]);
        let of = |index: usize, value: f64| with(scored(&group, value), json!({"rollout_id": format!("g-{index}")}));
        app.post("/scores", of(0, 0.75)).await.expect(201);
        assert!(ask(app, json!({})).await.is_empty(), "it is leased until all of its scores are there");
        app.post("/scores", of(1, 0.25)).await.expect(201);
        app.post("/scores", of(1, 0.5)).await.refused(409, "lease-lost");
        for item in &tests {
            app.post("/scores", scored(item, 1.0)).await.expect(201);
        }
        assert_eq!(app.story("g-1").await["group"]["state"], "ready");

        // A group that does not get full is leased when its own time is over.
        app.accept(json!([member("short", 0, 1.0), member("short", 1, 0.0)])).await;
        app.pass_s(99.0).await;
        assert!(ask(app, json!({})).await.is_empty());
        app.pass_s(1.0).await;
        let short = one(app, json!({})).await;
        assert_eq!((&short["group_id"], short["rollouts"].as_array().map(Vec::len)), (&json!("short"), Some(2)));
    }

    async fn the_last_place_wakes_those_who_wait_for_the_group_whoever_takes_it(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        rules(app, 2, json!({"per": "group"})).await;
        app.accept(member("g", 0, 1.0)).await;
        let waits = one(app, json!({"wait_ms": 60_000}));
        let fills = async {
            eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
            app.accept(with(member("g", 1, 0.0), json!({"reward_components": {"judge": 0.0}}))).await;
        };
        let (item, ()) = woken(waits, fills).await;
        assert_eq!(item["rollouts"].as_array().map(Vec::len), Some(2));
    }

    async fn a_scorer_that_waits_gets_a_group_when_its_time_has_come(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        app.rules("default", json!({
            "group": {"size": 2, "min_size": 1, "timeout_s": 1},
            "scores": {"required": ["judge"], "work": {"judge": {"per": "group"}}},
        })).await;
        app.accept(member("g", 0, 1.0)).await;
        let waits = one(app, json!({"wait_ms": 60_000}));
        let passes = async {
            eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
            app.clock.advance_s(1.0);
        };
        let (item, ()) = woken(waits, passes).await;
        assert_eq!(item["rollouts"].as_array().map(Vec::len), Some(1));
    }

    async fn a_scorer_is_not_blamed_for_rollouts_that_it_was_not_given(app: TestApp) {
        let filter = json!([{"name": "bad", "scope": "rollout", "when": "scores.judge < 0.1", "action": "drop"}]);
        app.rules("default", json!({
            "group": {"size": 2, "on_drop": "refill"}, "batch": {"groups": 1}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge"], "reward": "scores.judge", "work": {"judge": {"per": "group"}}},
            "filter": filter,
        })).await;
        app.accept(json!([member("g", 0, 0.0), member("g", 1, 0.0)])).await;
        let item = one(app, json!({})).await;
        let of = |item: &Value, index: usize, value: f64| with(scored(item, value), json!({"rollout_id": format!("g-{index}")}));
        assert_eq!(app.post("/scores", of(&item, 0, 0.0)).await.expect(201)["reason"], "bad");
        app.accept(member("g", 2, 0.0)).await;
        app.post("/scores", of(&item, 1, 1.0)).await.expect(201);
        // Its holder has done what it was given.
        app.post("/scores", of(&item, 2, 1.0)).await.refused(409, "lease-lost");
        let rest = one(app, json!({"scorer": "b"})).await;
        assert_eq!((&rest["attempt"], rest["rollouts"].as_array().map(Vec::len)), (&json!(1), Some(2)));
        app.post("/scores", of(&rest, 2, 0.5)).await.expect(201);
        assert_eq!(app.story("g-2").await["group"]["state"], "ready");
    }

    async fn work_goes_with_what_it_is_for(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2, "min_size": 1}, "batch": {"groups": 1}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge", "tests"], "timeout_s": 100, "work": {"judge": {"per": "group"}, "tests": {}}},
        })).await;
        let left = async || app.read_value("SELECT COUNT(*) FROM score_work".to_owned()).await;
        for group in ["scored", "closed", "discarded", "unscored", "reset"] {
            app.accept(json!([member(group, 0, 1.0), member(group, 1, 0.0)])).await;
        }
        assert_eq!(left().await, 15);
        // A score without a lease settles it as well, also if somebody holds it.
        let held = one(app, json!({"names": ["tests"]})).await;
        let given = |index: usize, name: &str| json!({"rollout_id": format!("scored-{index}"), "name": name, "value": 1.0});
        app.post("/scores", json!([given(0, "tests"), given(1, "tests"), given(0, "judge")])).await.expect(201);
        app.post("/scores", scored(&held, 0.5)).await.refused(409, "lease-lost");
        assert_eq!(left().await, 13, "one of the group lacks the judge's score");
        app.post("/scores", given(1, "judge")).await.expect(201);
        assert_eq!(left().await, 12);
        app.post("/groups/close", json!({"group_id": "closed"})).await.expect(200);
        assert_eq!(left().await, 9);
        let held = one(app, json!({"names": ["tests"]})).await;
        assert_eq!(held["group_id"], "discarded");
        app.post("/groups/discard", json!({"group_id": "discarded", "reason": "bad"})).await.expect(200);
        app.post("/scores", scored(&held, 0.5)).await.refused(409, "lease-lost");
        assert_eq!(left().await, 6);
        app.accept(member("later", 0, 1.0)).await;
        app.pass_s(100.0).await;
        assert_eq!(left().await, 0);
        app.accept(json!([member("gone", 0, 1.0), member("gone", 1, 0.0)])).await;
        assert_eq!(left().await, 3);
        app.post("/policies/default/reset", json!({})).await.expect(200);
        assert_eq!(left().await, 0);
    }

    async fn a_request_is_repeatable_and_waits(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        app.rules("default", json!({
            "group": {"size": 1, "timeout_s": 1_000}, "lease": {"ttl_s": 60},
            "scores": {"required": ["judge"], "work": {"judge": {}}},
        })).await;
        app.rules("other", json!({"scores": {"required": ["tests"], "work": {"tests": {}}}})).await;
        let patient = json!({"wait_ms": 60_000, "request_id": "r", "max": 2});
        let waits = ask(app, patient.clone());
        let posts = async {
            eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
            app.accept(json!([member("g", 0, 1.0), member("h", 0, 1.0)])).await;
        };
        let (items, ()) = woken(waits, posts).await;
        assert_eq!(ids(&items), ["g-0", "h-0"]);
        app.accept(member("i", 0, 1.0)).await;
        app.clock.advance_s(30.0);
        let again = ask(app, patient.clone()).await;
        let leases = |items: &[Value]| items.iter().map(|item| item["lease"].clone()).collect::<Vec<_>>();
        assert_eq!((leases(&again), &again[0]["expires_in_ms"]), (leases(&items), &json!(60_000)));
        assert_eq!(ids(&ask(app, with(patient.clone(), json!({"scorer": "b"}))).await), ["i-0"]);
        app.post("/scores", scored(&items[0], 1.0)).await.expect(201);
        assert_eq!(leases(&ask(app, patient.clone()).await), leases(&items[1..]), "the other one is settled");
        app.pass_s(60.0).await;
        assert_eq!(ids(&ask(app, patient).await), ["h-0", "i-0"], "after its leases the request is a new one");
    }

    async fn a_failure_and_an_expiry_wake_those_who_wait(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        rules(app, 1, json!({})).await;
        app.accept(member("g", 0, 1.0)).await;
        let mut held = one(app, json!({})).await;
        for end in ["fails", "expires"] {
            let waits = ask(app, json!({"wait_ms": 60_000, "scorer": "b"}));
            let ends = async {
                eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
                if end == "fails" {
                    app.post("/scores", failed(&held, "no idea")).await.expect(200);
                } else {
                    app.pass_s(60.0).await;
                }
            };
            let (mut items, ()) = woken(waits, ends).await;
            held = items.remove(0);
        }
        assert_eq!(held["attempt"], 3);
    }

    async fn items_carry_what_they_are_asked_for(app: TestApp) {
        rules(app, 1, json!({})).await;
        let messages = json!([{"role": "user", "content": "hi"}]);
        app.accept(with(member("g", 0, 1.0), json!({"messages": messages, "metadata": {"task": 7}}))).await;
        app.accept(member("h", 0, 1.0)).await;
        let items = ask(app, json!({"max": 9, "include": ["messages", "metadata", "segments", "text"]})).await;
        let of = |item: usize| &items[item]["rollouts"][0];
        assert_eq!((&of(0)["messages"], &of(0)["metadata"]), (&messages, &json!({"task": 7})));
        let sent = member("g", 0, 1.0);
        assert_eq!(of(0)["segments"][0]["tokens"], sent["segments"][0]["tokens"]);
        for absent in ["text", "omitted"] {
            assert!(of(0).get(absent).is_none(), "there is no tokenizer, and nothing is missing");
        }
        assert!(of(1).get("messages").is_none());
        app.pass_s(60.0).await;
        let only = one(app, json!({"include": ["metadata"]})).await;
        assert!(only["rollouts"][0].get("segments").is_none() && only["rollouts"][0]["metadata"]["task"] == 7);
    }

    async fn claims_at_the_same_time_take_different_work_unless_they_are_one_request(app: TestApp) {
        rules(app, 40, json!({})).await;
        app.accept((0..40).map(|index| member("g", index, 1.0)).collect()).await;
        let repeated = (0..20).map(|_| one(app, json!({"request_id": "r"})));
        let others = (0..39).map(|_| one(app, json!({"scorer": "b"})));
        let (repeated, others) = tokio::join!(futures::future::join_all(repeated), futures::future::join_all(others));
        let leases = |items: &[Value]| items.iter().map(|item| text(&item["lease"]).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(leases(&repeated).len(), 1, "a repeated request holds what it held");
        assert_eq!(leases(&others).len(), 39, "nothing is leased twice");
        assert!(leases(&repeated).is_disjoint(&leases(&others)));
    }

    async fn what_is_released_was_never_leased(app: TestApp) {
        app.reconfigure(NEVER_POLL).await;
        rules(app, 1, json!({})).await;
        app.accept(member("g", 0, 1.0)).await;
        let item = one(app, json!({"request_id": "r"})).await;
        let policy = PolicyName::default();
        let waits = ask(app, json!({"wait_ms": 60_000, "request_id": "r", "scorer": "b"}));
        let releases = async {
            eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1\n") }).await;
            let leases = vec![LeaseToken::presented(text(&item["lease"]))];
            app.buffer.release_work(&policy, leases).await.expect("the store writes");
        };
        let (items, ()) = woken(waits, releases).await;
        assert_eq!((items.len(), &items[0]["attempt"]), (1, &json!(1)));
        app.post("/scores", scored(&item, 1.0)).await.refused(409, "lease-lost");
    }

    async fn many_small_segments_are_leased_in_parts(app: TestApp) {
        rules(app, 1, json!({})).await;
        let segment = json!({"tokens": [1, 2], "loss_mask": [1]});
        for group in 0..100 {
            let segments = json!({"segments": vec![segment.clone(); 100]});
            app.accept(with(member(&format!("g{group}"), 0, 1.0), segments)).await;
        }
        let (mut leased, mut answers) = (0, 0);
        while leased < 100 {
            let items = ask(app, json!({"max": 100, "include": ["metadata"]})).await;
            assert!(items.iter().all(|item| item["rollouts"][0].get("omitted").is_none()), "{answers}");
            (leased, answers) = (leased + items.len(), answers + 1);
        }
        assert!(answers > 1, "they do not fit into one answer");
    }

    async fn large_rollouts_are_leased_in_parts(app: TestApp) {
        rules(app, 1, json!({})).await;
        // Two of these are more than 8 MiB.
        let tokens = 1_200_000;
        let segments = json!([{"tokens": vec![1; tokens], "loss_mask": vec![1; tokens - 1]}]);
        for group in ["g", "h", "i"] {
            app.accept(with(member(group, 0, 1.0), json!({"segments": segments}))).await;
        }
        let items = ask(app, json!({"max": 3, "include": ["segments"]})).await;
        assert!((1..3).contains(&items.len()), "{}", items.len());
        assert_eq!(items[0]["rollouts"][0]["segments"][0]["tokens"].as_array().map(Vec::len), Some(tokens));
        let rest = ask(app, json!({"max": 3})).await;
        assert_eq!(items.len() + rest.len(), 3, "without their contents they are not too many");
        // The rollouts of a group come together, and what does not fit is named.
        app.rules("groups", json!({
            "group": {"size": 3}, "scores": {"required": ["judge"], "work": {"judge": {"per": "group"}}},
        })).await;
        for index in 0..3 {
            app.accept(with(member("g", index, 1.0), json!({"policy": "groups", "segments": segments}))).await;
        }
        let group = one(app, json!({"policy": "groups", "include": ["segments"]})).await;
        let omitted: Vec<_> = group["rollouts"].as_array().expect("a list").iter().map(|rollout| rollout["omitted"].as_str()).collect();
        assert_eq!((omitted[0], omitted[2]), (None, Some("size")));
    }

    async fn why_says_what_the_work_waits_for(app: TestApp) {
        rules(app, 1, json!({"max_attempts": 1})).await;
        app.accept(json!([member("g", 0, 1.0), member("h", 0, 1.0)])).await;
        let why = async || {
            // A trainer asks again and again.
            for _ in 0..20 {
                app.post("/batches", json!({"wait_ms": 1})).await.expect(204);
                app.pass_s(9.0).await;
            }
            let found = app.get("/policies/default/why").await.expect(200);
            let missing = found["causes"].as_array().expect("a list").iter().find(|cause| cause["code"] == "scores-missing");
            text(&missing.expect("it is a cause")["text"]).to_owned()
        };
        let told = why().await;
        assert!(told.ends_with("; nobody has ever asked for work for judge"), "{told}");
        let item = one(app, json!({"ttl_s": 1_000})).await;
        let told = why().await;
        assert!(told.ends_with("; 1 item of the work for judge is with scorers"), "{told}");
        app.post("/scores", failed(&item, "no disk")).await.expect(200);
        let told = why().await;
        let expected = "; 1 item of the work for judge has no attempts left, the last time with: no disk \
                        (`POST /scores/retry` gives them back)";
        assert!(told.ends_with(expected), "{told}");
    }

    async fn bad_requests_are_refused_and_change_nothing(app: TestApp) {
        rules(app, 1, json!({})).await;
        app.accept(json!([member("g", 0, 1.0), member("h", 0, 1.0)])).await;
        let request = |fields: Value| with(json!({"names": ["judge"]}), fields);
        for (fields, pointer) in [
            (json!({"names": []}), "/names"),
            (json!({"names": ["judge", ""]}), "/names/1"),
            (json!({"max": 0}), "/max"),
            (json!({"max": 257}), "/max"),
            (json!({"wait_ms": 60_001}), "/wait_ms"),
            (json!({"ttl_s": 0}), "/ttl_s"),
            (json!({"scorer": ""}), "/scorer"),
            (json!({"request_id": ""}), "/request_id"),
        ] {
            assert_eq!(app.post(LEASES, request(fields.clone())).await.pointers(422), [pointer], "{fields}");
        }
        app.post(LEASES, request(json!({"policy": "other"}))).await.refused(404, "unknown-policy");
        let problem = app.post(LEASES, request(json!({"names": ["judge", "jugde"]}))).await.refused(404, "not-found");
        assert!(text(&problem["detail"]).contains("`jugde`: `scores.work` of its rules has judge"), "{problem}");
        app.post("/scores/retry", json!({"policy": "other", "name": "judge"})).await.refused(404, "unknown-policy");
        let extend = json!({"policy": "other", "leases": ["x"]});
        app.post("/scores/leases/extend", extend).await.refused(404, "unknown-policy");
        assert_eq!(app.post("/scores/leases/extend", json!({"leases": []})).await.pointers(422), ["/leases"]);
        let zero = json!({"leases": ["x", "a\u{0}b"]});
        assert_eq!(app.post("/scores/leases/extend", zero).await.pointers(422), ["/leases/1"]);
        let item = one(app, json!({})).await;
        for (fields, pointer) in [
            (json!({"value": null}), "/value"),
            (json!({"failed": "why"}), "/failed"),
            (json!({"value": null, "failed": ""}), "/failed"),
            (json!({"value": null, "failed": "a\u{0}b"}), "/failed"),
            (json!({"rationale": "a\u{0}b"}), "/rationale"),
            (json!({"value": null, "failed": "why", "lease": null}), "/lease"),
            (json!({"lease": ""}), "/lease"),
            (json!({"rollout_id": "h-0"}), "/lease"),
            (json!({"name": "tests"}), "/lease"),
        ] {
            assert_eq!(app.post("/scores", with(scored(&item, 1.0), fields.clone())).await.pointers(422), [pointer], "{fields}");
        }
        app.post("/scores", with(scored(&item, 1.0), json!({"lease": "never"}))).await.refused(409, "lease-lost");
        app.post("/scores", scored(&item, 1.0)).await.expect(201);
        // Without the rule, work that is left can still be leased.
        app.rules("default", json!({"scores": {"required": ["judge"]}})).await;
        assert_eq!(ids(&ask(app, json!({})).await), ["h-0"]);
        let refused = async |work: Value| {
            let rules = json!({"scores": {"required": ["judge"], "work": work}});
            app.put("/policies/default", rules).await.pointers(422)
        };
        assert_eq!(refused(json!({"tests": {}})).await, ["/scores/work/tests"]);
        assert_eq!(refused(json!({"judge": {"max_attempts": 0}})).await, ["/scores/work/judge/max_attempts"]);
        assert_eq!(refused(json!({"judge": {"max_attempts": 1001}})).await, ["/scores/work/judge/max_attempts"]);
    }

    async fn a_scorer_sees_only_its_policies(app: TestApp) {
        rules(app, 1, json!({})).await;
        app.rules("mine", json!({"scores": {"required": ["judge"], "work": {"judge": {}}}})).await;
        app.accept(with(member("g", 0, 1.0), json!({"policy": "mine"}))).await;
        let key = app.key(Role::Score, &["mine"]).await;
        let request = json!({"names": ["judge"], "policy": "mine"});
        app.post_as(&key, LEASES, json!({"names": ["judge"]})).await.refused(404, "unknown-policy");
        let items = app.post_as(&key, LEASES, request).await.expect(200);
        let item = &items["items"][0];
        let score = with(scored(item, 1.0), json!({"policy": "mine"}));
        let receipt = app.post_as(&key, "/scores", score).await.expect(201);
        let id = key.split('_').nth(1).expect("the id of the key");
        assert!(text(&receipt["scorer"]).contains(id), "{receipt}");
    }
}
