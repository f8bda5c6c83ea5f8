//! Room cannot wedge: while a worker lives, training goes on.

mod decision;
mod workers;

use futures::FutureExt as _;
use proptest::prelude::*;
use serde_json::{Value, json};

use self::{
    decision::Memory,
    workers::{Ask, Fate, IDLE_S, Kind, Played, Plays, Scene, Service, TICK_S, TIMEOUT_S, play},
};
use crate::{
    sessions,
    support::{TestApp, group, member, on_both_stores, rollout, text, with},
};

/// A policy whose room is two batches of one group of eight.
fn of_eight() -> Value {
    json!({"group": {"size": 8, "timeout_s": 3600}, "batch": {"groups": 1}, "staleness": {"max": 1}, "settle": "ack"})
}

/// A policy whose batches have a group of the environment `slow` at least.
fn with_minimum() -> Value {
    json!({
        "batch": {"groups": 4, "environments": {"slow": {"min_share": 0.25}}}, "staleness": {"max": 1}, "settle": "ack",
    })
}

async fn ask(app: &TestApp, request: Value) -> Value {
    let answer = app.post("/admissions", request).await;
    let granted = answer.json["granted"].as_u64().expect("an admission says what it grants");
    let admission = answer.expect(if granted > 0 { 201 } else { 200 });
    assert_eq!(admission["reason"].is_null(), granted > 0, "{admission}");
    admission
}

async fn granted(app: &TestApp, request: Value) -> u64 {
    ask(app, request).await["granted"].as_u64().expect("a count")
}

/// Posts rollouts of a group that name an admission.
async fn post(app: &TestApp, group: &str, places: std::ops::Range<usize>, admission: &Value) {
    for place in places {
        let named = json!({"admission_id": admission["admission_id"], "policy_version": 0});
        app.accept(with(member(group, place, 1.0), named)).await;
    }
}

async fn labelled(app: &TestApp, environment: &str, rollouts: std::ops::Range<usize>) {
    for index in rollouts {
        app.accept(with(rollout(&format!("{environment}{index}"), 1.0), json!({"environment": environment}))).await;
    }
}

on_both_stores! {
    async fn missing_places_of_a_group_that_has_begun_always_get_room(app: TestApp) {
        app.rules("default", of_eight()).await;
        for name in ["a", "b"] {
            let admission = ask(app, json!({"rollouts": 8, "group_id": name})).await;
            assert_eq!(admission["granted"], 8);
            post(app, name, 0..5, &admission).await;
        }
        // Both agents were killed. They ask for what is missing, although the room of the killed ones is still reserved.
        assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "a"})).await, 3);
        let admission = ask(app, json!({"rollouts": 3, "group_id": "b"})).await;
        assert_eq!(admission["granted"], 3);
        let refused = ask(app, json!({"rollouts": 8, "group_id": "c"})).await;
        let reason = text(&refused["reason"]);
        assert!(refused["granted"] == 0 && reason.contains("staleness.max"), "{refused}");
        assert!(reason.starts_with("10 rollouts wait for a trainer and "), "{refused}");
        post(app, "b", 5..8, &admission).await;
        // The room for a decided group is given back.
        app.ack(&app.lease().await, 1).await.expect(200);
        assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "c"})).await, 0, "group a has eight places");
        app.post("/groups/discard", json!({"group_id": "a", "reason": "test"})).await.expect(200);
        assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "c"})).await, 8);
        app.post("/admissions", json!({"rollouts": 1, "group_id": "a"})).await.refused(409, "group-decided");
    }

    async fn a_new_group_begins_only_if_all_of_its_places_fit(app: TestApp) {
        app.rules("default", of_eight()).await;
        assert_eq!(granted(app, json!({"rollouts": 2, "group_id": "a"})).await, 2);
        assert_eq!(granted(app, json!({"rollouts": 4, "group_id": "four", "group_size": 4})).await, 4);
        let refused = ask(app, json!({"rollouts": 1, "group_id": "b"})).await;
        assert!(text(&refused["reason"]).contains("all of its 8 places fit, and room for 4 is left"), "{refused}");
        assert_eq!(granted(app, json!({"rollouts": 1, "group_id": "a"})).await, 1, "its places were counted");
        let other = app.post("/admissions", json!({"rollouts": 1, "group_id": "four", "group_size": 5})).await;
        assert_eq!(other.pointers(422), ["/group_size"]);
        let invalid = json!({"rollouts": 0, "group_size": 2, "environment": ""});
        let pointers = app.post("/admissions", invalid).await.pointers(422);
        assert_eq!(pointers, ["/rollouts", "/group_size", "/environment"]);
    }

    async fn places_of_a_group_are_not_reserved_without_end(app: TestApp) {
        app.rules("default", of_eight()).await;
        for _ in 0..4 {
            assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "a"})).await, 8);
        }
        let refused = ask(app, json!({"rollouts": 8, "group_id": "a"})).await;
        assert!(text(&refused["reason"]).contains("4 times"), "{refused}");
    }

    async fn workers_that_play_single_places_complete_their_groups(app: TestApp) {
        app.rules("default", of_eight()).await;
        // Sixteen rollouts in five groups are all that would be fresh.
        for name in 0..16 {
            let admission = ask(app, json!({"rollouts": 1})).await;
            post(app, &format!("g{}", name % 5), name..name + 1, &admission).await;
        }
        for place in 16..40 {
            let admission = ask(app, json!({"rollouts": 1})).await;
            assert_eq!(admission["granted"], 1, "place {place}");
            post(app, &format!("g{}", place % 5), place..place + 1, &admission).await;
        }
        assert_eq!(granted(app, json!({"rollouts": 1})).await, 0, "no place is missing");
        assert_eq!(app.lease().await["groups"], 1);
    }

    async fn agents_that_name_no_group_go_on_after_they_were_killed(app: TestApp) {
        app.rules("default", of_eight()).await;
        for name in ["a", "b"] {
            let admission = ask(app, json!({"rollouts": 8})).await;
            post(app, name, 0..5, &admission).await;
        }
        assert_eq!(granted(app, json!({"rollouts": 3})).await, 0, "its own room may be in use");
        app.clock.advance_s(3_600.0 / 8.0);
        // Nobody used it for an eighth of the timeout, so both agents were killed.
        let admission = ask(app, json!({"rollouts": 3})).await;
        assert_eq!((&admission["granted"], granted(app, json!({"rollouts": 3})).await), (&json!(3), 3));
        assert_eq!(granted(app, json!({"rollouts": 3})).await, 0, "only for missing places");
        post(app, "a", 5..8, &admission).await;
        assert_eq!(app.lease().await["groups"], 1);
    }

    async fn a_dead_group_does_not_keep_the_room_for_a_new_one(app: TestApp) {
        app.rules("default", of_eight()).await;
        for name in ["a", "b"] {
            let admission = ask(app, json!({"rollouts": 5, "group_id": name})).await;
            post(app, name, 0..5, &admission).await;
        }
        // Nobody plays the rest of both groups.
        assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "c"})).await, 8);
        assert_eq!(granted(app, json!({"rollouts": 8, "group_id": "d"})).await, 0, "somebody is at work");
    }

    async fn workers_who_cannot_help_do_not_keep_the_room_for_what_the_next_batch_lacks(app: TestApp) {
        let rules = json!({"group": {"size": 2, "timeout_s": 3600}, "staleness": {"max": 0}});
        app.rules("default", with(with_minimum(), rules)).await;
        let dead = ask(app, json!({"rollouts": 2, "group_id": "dead", "environment": "slow"})).await;
        let sent = with(member("dead", 0, 1.0), json!({"environment": "slow", "admission_id": dead["admission_id"]}));
        app.accept(sent).await;
        for name in ["a", "b", "c", "d"] {
            app.accept(group(name, &[0.0, 1.0])).await;
        }
        app.clock.advance_s(3_600.0 / 8.0);
        // Somebody plays the missing places of a group of the other environment all the time.
        app.accept(with(member("fast", 0, 1.0), json!({"environment": "fast"}))).await;
        assert_eq!(granted(app, json!({"rollouts": 1, "group_id": "fast", "environment": "fast"})).await, 1);
        assert_eq!(granted(app, json!({"rollouts": 2, "group_id": "more", "environment": "fast"})).await, 0);
        assert_eq!(granted(app, json!({"rollouts": 2, "group_id": "new", "environment": "slow"})).await, 2);
        assert_eq!(granted(app, json!({"rollouts": 2, "group_id": "other", "environment": "slow"})).await, 0);
    }

    async fn room_is_kept_for_an_environment_that_the_next_batch_lacks(app: TestApp) {
        app.rules("default", with_minimum()).await;
        assert_eq!(granted(app, json!({"rollouts": 8, "environment": "fast"})).await, 7);
        let refused = ask(app, json!({"rollouts": 1, "environment": "fast", "group_id": "g"})).await;
        assert!(text(&refused["reason"]).contains("`slow`"), "{refused}");
        assert_eq!(granted(app, json!({"rollouts": 8, "environment": "slow"})).await, 1);
    }

    async fn an_environment_that_the_next_batch_lacks_gets_room_beyond_the_rest(app: TestApp) {
        app.rules("default", with_minimum()).await;
        labelled(app, "fast", 0..8).await;
        app.post("/batches", json!({})).await.expect(204);
        assert_eq!(granted(app, json!({"rollouts": 1, "environment": "fast"})).await, 0);
        assert_eq!(granted(app, json!({"rollouts": 2, "environment": "slow"})).await, 1, "what the batch lacks");
        assert_eq!(granted(app, json!({"rollouts": 1, "environment": "slow"})).await, 0);
        labelled(app, "slow", 0..1).await;
        assert_eq!(app.lease().await["groups"], 4);
    }

    async fn a_request_without_an_environment_may_be_for_the_one_that_lacks(app: TestApp) {
        app.rules("default", with_minimum()).await;
        labelled(app, "fast", 0..8).await;
        assert_eq!(granted(app, json!({"rollouts": 1})).await, 1);
        assert_eq!(granted(app, json!({"rollouts": 1})).await, 0, "one at a time");
    }

    async fn a_session_of_an_environment_that_lacks_gets_room(app: TestApp) {
        app.rules("default", with_minimum()).await;
        labelled(app, "fast", 0..8).await;
        let of = |environment: &str| json!({"environment": environment});
        let refused = app.post("/sessions", of("fast")).await;
        refused.refused(429, "no-room");
        app.post("/sessions", of("slow")).await.expect(201);
    }

    async fn a_group_that_the_next_batch_lacks_is_accepted_by_a_full_backlog(app: TestApp) {
        let of = |environment: &str, name: &str| with(rollout(name, 1.0), json!({"environment": environment}));
        app.rules("default", with(with_minimum(), json!({"backlog": {"max_ready_rollouts": 6}}))).await;
        labelled(app, "fast", 0..6).await;
        app.post("/batches", json!({})).await.expect(204);
        app.post("/trajectories", of("fast", "more")).await.refused(429, "backlog-full");
        let why = app.get("/policies/default/why").await.expect(200);
        assert!(why.to_string().contains("except groups of environment slow, which the batch waits for"), "{why:#}");
        app.accept(of("slow", "needed")).await;
        app.post("/trajectories", of("slow", "more")).await.refused(429, "backlog-full");
        // While a batch is trained, the next one lacks a group again.
        let batch = app.lease().await;
        app.post("/trajectories", of("fast", "more")).await.refused(429, "backlog-full");
        // A bundle is accepted as a whole. Its first group is not lacking, and its last one is.
        app.accept(json!([of("fast", "first"), of("slow", "last")])).await;
        app.post("/trajectories", json!([of("fast", "b"), of("slow", "b2")])).await.refused(429, "backlog-full");
        app.ack(&batch, 1).await.expect(200);
        assert_eq!(app.lease().await["groups"], 4);
    }

    async fn a_full_backlog_accepts_what_the_next_batch_lacks_up_to_twice_its_bound(app: TestApp) {
        let rules = json!({"group": {"size": 2}, "backlog": {"max_ready_rollouts": 8}});
        app.rules("default", with(with_minimum(), rules)).await;
        let of = |environment: &str, group: &str, place| {
            with(member(group, place, 1.0), json!({"environment": environment}))
        };
        for name in ["a", "b", "c", "d"] {
            for place in 0..2 {
                app.accept(of("fast", name, place)).await;
            }
        }
        // Single rollouts of groups that nobody completes.
        for index in 0..8 {
            app.accept(of("slow", &format!("open{index}"), 0)).await;
        }
        app.post("/trajectories", of("slow", "beyond", 0)).await.refused(429, "backlog-full");
        app.accept(of("slow", "open0", 1)).await;
        assert_eq!(app.lease().await["groups"], 4);
    }

    async fn open_groups_that_fill_the_backlog_do_not_refuse_new_ones(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "backlog": {"max_ready_rollouts": 4}, "settle": "ack"})).await;
        for index in 0..4 {
            app.accept(member(&format!("dead{index}"), 0, 1.0)).await;
        }
        app.accept(group("live", &[0.0, 1.0])).await;
        app.post("/trajectories", group("next", &[0.0, 1.0])).await.refused(429, "backlog-full");
        let batch = app.lease().await;
        app.post("/trajectories", group("next", &[0.0, 1.0])).await.refused(429, "backlog-full");
        app.ack(&batch, 1).await.expect(200);
        app.accept(group("next", &[0.0, 1.0])).await;
    }

    async fn batches_that_tokens_bound_are_smaller(app: TestApp) {
        let rules = json!({"group": {"size": 2}, "batch": {"groups": 50, "max_tokens": 12}, "staleness": {"max": 0}});
        app.rules("default", rules).await;
        assert_eq!(granted(app, json!({"rollouts": 200})).await, 100, "nothing is known of tokens");
        app.pass_s(4_000.0).await;
        // Groups of six tokens, so that a batch has two of them, and a third one shows that it is complete.
        app.accept(group("a", &[0.0, 1.0])).await;
        assert_eq!(granted(app, json!({"rollouts": 200})).await, 4);
        assert_eq!(granted(app, json!({"rollouts": 2, "group_id": "b"})).await, 0);
    }

    async fn why_says_who_is_refused_room_and_since_when(app: TestApp) {
        app.rules("default", with_minimum()).await;
        labelled(app, "fast", 0..8).await;
        for _ in 0..3 {
            ask(app, json!({"rollouts": 1, "environment": "fast"})).await;
            app.post("/sessions", json!({"environment": "fast"})).await.refused(429, "no-room");
            app.pass_s(30.0).await;
        }
        let why = app.get("/policies/default/why").await.expect(200);
        assert_eq!(why["state"], "starved", "{why:#}");
        assert_eq!(why["headline"], "0 of 1 group of environment slow are ready");
        let texts: Vec<&str> = why["causes"].as_array().expect("a list").iter().map(|cause| text(&cause["text"])).collect();
        let refused = |calls: &str| format!("{calls} of environment fast have been refused for 1 min 30 s: ");
        for calls in ["Admissions", "New sessions"] {
            assert!(texts.iter().any(|text| text.starts_with(&refused(calls))), "{why:#}");
        }
        // A refusal ends with a grant, and when nobody asks any more.
        labelled(app, "slow", 0..1).await;
        app.ack(&app.lease().await, 1).await.expect(200);
        assert_eq!(granted(app, json!({"rollouts": 1, "environment": "fast"})).await, 1);
        let why = || async {
            app.pass_s(2.0).await;
            app.get("/policies/default/why").await.expect(200).to_string()
        };
        let after = why().await;
        assert!(!after.contains("Admissions of environment fast"), "{after}");
        app.pass_s(120.0).await;
        assert!(!why().await.contains("New sessions"));
    }

    async fn a_group_of_two_environments_gets_a_warning(app: TestApp) {
        app.rules("default", json!({"group": {"size": 3}})).await;
        for (index, environment, warnings) in [(0, json!("math"), 0), (1, json!("math"), 0), (2, json!("swe"), 1)] {
            let sent = with(member("a", index, 1.0), json!({"environment": environment}));
            let receipt = app.accept(sent).await;
            assert_eq!(receipt["warnings"].as_array().map(Vec::len), Some(warnings), "{receipt}");
            if warnings > 0 {
                let warning = text(&receipt["warnings"][0]);
                assert!(warning.starts_with("mixed-environments: the rollout has `swe`, and its group has `math`"), "{warning}");
            }
        }
    }

    async fn a_filter_by_a_label_takes_rollouts_out_of_the_mean_reward(app: TestApp) {
        let drop = |name: &str, when: &str| json!({"name": name, "scope": "rollout", "when": when, "action": "drop"});
        let filters = json!([drop("held-out", "environment == 'test'"), drop("too-low", "reward < 0.0")]);
        app.rules("default", json!({"filter": filters})).await;
        app.accept(with(rollout("test", 9.0), json!({"environment": "test"}))).await;
        app.accept(rollout("low", -1.0)).await;
        app.accept(rollout("kept", 1.0)).await;
        let metrics = app.lease().await["metrics"].clone();
        assert_eq!((&metrics["reward/all"], &metrics["dropped/held-out"]), (&json!(0.0), &json!(1.0)), "{metrics}");
    }

    async fn live_workers_of_all_kinds_never_stop_training(app: TestApp) {
        train_with_all_kinds(app, 0).await;
    }

    async fn live_workers_of_all_kinds_never_stop_training_with_a_minimum(app: TestApp) {
        train_with_all_kinds(app, 1).await;
    }
}

/// Groups of each batch that are of the environment `slow` at least: `minimum` of two.
async fn train_with_all_kinds(app: &TestApp, minimum: u32) {
    let workers = [
        kind(Plays::Place, true, true, true),
        kind(Plays::Place, false, true, false),
        kind(Plays::Group, true, false, false),
        kind(Plays::Group, false, true, true),
        kind(Plays::Session, true, true, true),
        kind(Plays::Session, true, true, false),
    ];
    let (workers, seed) = (workers.to_vec(), minimum.into());
    let scene = Scene { size: 3, groups: 2, staleness: 0, minimum, workers, trouble: 12, seed };
    let shares = json!({"slow": {"min_share": f64::from(minimum) / 2.0}});
    let rules = json!({
        "group": {"size": 3, "timeout_s": TIMEOUT_S}, "batch": {"groups": 2, "environments": shares},
        "staleness": {"max": 0}, "settle": "ack",
    });
    app.rules("default", rules).await;
    let steps = play(&scene, &mut Served { app, batch: None }).await;
    assert!(steps.is_ok(), "{steps:?}");
}

fn kind(plays: Plays, names_group: bool, names_environment: bool, is_slow: bool) -> Kind {
    Kind { plays, names_group, names_environment, is_slow }
}

/// The default policy of a service.
struct Served<'a> {
    app: &'a TestApp,
    batch: Option<Value>,
}

impl Service for Served<'_> {
    async fn ask(&mut self, ask: Ask) -> Option<(u32, String)> {
        let Ask { rollouts, group, environment } = ask;
        let asked = json!({"rollouts": rollouts, "group_id": group, "environment": environment});
        let answer = self.app.post("/admissions", asked).await;
        if answer.status.as_u16() == 409 {
            return None;
        }
        let granted = answer.json["granted"].as_u64().expect("a count") as u32;
        Some((granted, text(&answer.json["admission_id"]).to_owned()))
    }

    async fn open(&mut self, rollout: &str, group: &str, environment: Option<&str>) -> Option<String> {
        let asked = json!({"rollout_id": rollout, "group_id": group, "environment": environment, "idle_s": IDLE_S});
        let answer = self.app.post("/sessions", asked).await;
        match answer.status.as_u16() {
            201 => Some(answer.json.to_string()),
            429 => None,
            _ => panic!("{answer:?}"),
        }
    }

    async fn post(&mut self, played: Played) -> Fate {
        let named = json!({
            "group_id": played.group, "environment": played.environment, "admission_id": played.room
        });
        let mut sent = with(rollout(&played.rollout, 1.0), named);
        if played.failed {
            (sent["status"], sent["reward"]) = (json!("aborted"), Value::Null);
        }
        let receipt = self.app.accept(sent).await;
        if receipt["group"]["state"] == "open" { Fate::Open } else { Fate::Decided }
    }

    async fn end(&mut self, played: Played) -> Fate {
        let opened: Value = serde_json::from_str(&played.room).expect("it is JSON");
        let ended = sessions::end(self.app, &opened, !played.failed).await;
        if ended["receipts"][0]["group"]["state"] == "open" { Fate::Open } else { Fate::Decided }
    }

    async fn lease(&mut self) -> bool {
        let answer = self.app.post("/batches", json!({})).await;
        self.batch = (answer.status.as_u16() == 201).then_some(answer.json);
        self.batch.is_some()
    }

    async fn ack(&mut self, step: i64) {
        let batch = self.batch.take().expect("a batch is held");
        // No version is published, so that no group goes stale, as in memory.
        self.app.ack(&batch, step).await.expect(200);
    }

    async fn pass(&mut self) {
        self.app.pass_s(TICK_S as f64).await;
    }
}

fn kinds() -> impl Strategy<Value = Kind> {
    let plays = prop_oneof![Just(Plays::Place), Just(Plays::Group), Just(Plays::Session)];
    (plays, any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(plays, names_group, names_environment, is_slow)| {
        kind(plays, names_group, names_environment, is_slow)
    })
}

fn scenes() -> impl Strategy<Value = Scene> {
    let policy = (1..5_u32, 1..4_u32, 0..3_u32, 0..2_u32);
    (policy, prop::collection::vec(kinds(), 1..12), 4..40_u32, any::<u64>()).prop_map(
        |((size, groups, staleness, minimum), mut workers, trouble, seed)| {
            // Somebody must play the environment without which there is no batch.
            workers[0].is_slow |= minimum > 0;
            // Who names neither group nor environment may play what a batch lacks, as far as the service knows. If
            // such workers are killed again and again, the batch waits until their room expires.
            if minimum > 0 {
                for worker in &mut workers {
                    worker.names_environment |= !worker.names_group;
                }
            }
            Scene { size, groups, staleness, minimum, workers, trouble, seed }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn training_never_stops_while_a_worker_lives(scene in scenes()) {
        let played = play(&scene, &mut Memory::new(&scene)).now_or_never().expect("a policy in memory waits for nothing");
        prop_assert!(played.is_ok(), "{played:?}");
    }
}
