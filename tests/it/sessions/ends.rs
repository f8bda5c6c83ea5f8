//! Sessions that are finished, aborted or expire.

use forebay_domain::{refusal::Refusal, states::SessionState};
use forebay_service::session::record::NewCall;
use futures::FutureExt as _;
use serde_json::{Value, json};

use super::{A, E, S, T, U, call, finish, open, path, permit, record, refused, segments, session, try_record};
use crate::support::{Backend, TestApp, member, on_both_stores, rollout, text, with};

on_both_stores! {
    async fn a_session_has_a_rollout_of_each_policy(app: TestApp) {
        app.rules("solver", json!({"group": {"size": 2}})).await;
        app.rules("critic", json!({"group": {"size": 2}})).await;
        let models = json!({"s": {"policy": "solver"}, "c": {"policy": "critic"}, "judge": {"policy": null}});
        let opened = open(app, json!({"rollout_id": "r", "group_id": "g", "models": models})).await;
        let allowed = permit(app, &opened).await.expect("the session is open");
        let policy = |model: &str| allowed.policy(model).map(|policy| policy.map(|policy| policy.policy.to_string()));
        assert_eq!(policy("s"), Ok(Some("solver".to_owned())));
        assert_eq!(policy("judge"), Ok(None), "its calls are forwarded and not recorded");
        assert_eq!(policy("other"), Err(Refusal::UnknownModel("other".to_owned())));
        drop(allowed);
        let solver = forebay_domain::ids::PolicyName::parse("solver").expect("a name");
        record(app, &opened, NewCall { policy: solver, ..call(&[S, U, A], &[11, E]) }).await;
        app.post(&path(&opened, "/finish"), json!({"rewards": {"judge": 1.0}})).await.refused(422, "invalid");
        let body = json!({"reward": 0.5, "rewards": {"solver": 1.0}});
        let ended = app.post(&path(&opened, "/finish"), body).await.expect(200);
        let receipts = ended["receipts"].as_array().expect("one per policy");
        let of = |index: usize| (text(&receipts[index]["policy"]), text(&receipts[index]["verdict"]));
        assert_eq!((of(0), of(1)), (("critic", "dropped"), ("solver", "kept")));
        assert_eq!(receipts[0]["reason"], "no-reward", "a policy without a call gives its place back");
        let story = app.get("/trajectories?policy=solver&rollout_id=r").await.expect(200);
        assert_eq!((&story["reward"], &story["segments"]), (&json!(1.0), &json!(1)));
        let story = app.get("/trajectories?policy=critic&rollout_id=r").await.expect(200);
        assert_eq!((&story["reward"], &story["segments"]), (&Value::Null, &json!(0)));
    }

    async fn what_became_of_a_rollout_is_known_while_its_session_is_open(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "sessions": {"max_attempts": 1}})).await;
        let why = async |id: &str| app.get(&format!("/why?id={id}")).await.expect(200);
        let opened = open(app, json!({"rollout_id": "r", "group_id": "g", "idle_s": 600})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let of_rollout = why("r").await;
        assert_eq!((&of_rollout["kind"], &of_rollout["state"]), (&json!("session"), &json!("open")));
        let headline = "Waits: its session is open with 1 call; it expires in 10 min unless a call comes or somebody \
                        finishes it";
        assert_eq!(of_rollout["headline"], headline);
        let of_session = why(text(&opened["session_id"])).await;
        assert_eq!((&of_session["headline"], &of_session["see"]), (&of_rollout["headline"], &of_rollout["see"]));
        assert_eq!(why("g").await["headline"], "Waits: 1 session of the group is open, and no rollout has arrived");
        let policy = app.get("/policies/default/why").await.expect(200);
        assert_eq!(policy["headline"], "Nothing has been posted yet: 1 session is open");
        app.pass_s(601.0).await;
        let expired = why("r").await;
        assert_eq!(expired["kind"], "rollout", "it has a place in the ledger now");
        let told: Vec<&str> =
            expired["causes"].as_array().expect("a list").iter().map(|step| text(&step["code"])).collect();
        assert_eq!(told, ["session-opened", "session-expired", "received", "dropped"]);
        let why_expired = text(&expired["causes"][1]["text"]);
        assert!(why_expired.contains("no call had come for 10 min 1 s (`idle_s`)"), "{why_expired}");
        let headline = "Not trained: its session ended without a reward, so its place in the group is free";
        assert_eq!(expired["headline"], headline);
        let second = open(app, json!({"rollout_id": "r2", "group_id": "g"})).await;
        let models = json!({"a": {"policy": "default"}, "b": {"policy": "hidden"}});
        app.rules("hidden", json!({})).await;
        let of_two = open(app, json!({"rollout_id": "two", "group_id": "pair", "models": models})).await;
        assert_eq!(why("two").await["kind"], "session");
        record(app, &second, call(&[S, U, A], &[11, E])).await;
        finish(app, &second, 1.0).await;
        let finished = why("r2").await;
        assert_eq!(text(&finished["causes"][1]["text"]), "The session was finished with 1 call");
        assert!(text(&finished["headline"]).starts_with("Waits: group g has 1 of 2 rollouts"), "{finished}");
        // Who sees one of the policies does not see the session.
        let key = app.key(forebay_wire::Role::Produce, &["default"]).await;
        for id in ["two", text(&of_two["session_id"])] {
            app.get_as(&key, &format!("/why?id={id}")).await.refused(404, "not-found");
        }
    }

    async fn calls_are_rewarded_after_the_end_of_their_session(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "batch": {"groups": 1}, "advantage": {"kind": "turn_return", "gamma": 0.9},
            "scores": {"required": ["reward"]},
        })).await;
        for (rollout, calls) in [("a", 2), ("b", 3)] {
            let opened = open(app, json!({"rollout_id": rollout, "group_id": "g"})).await;
            let mut prompt = vec![S, U, A];
            for number in 0..calls {
                let call = NewCall { id: Some(format!("{number:032x}")), ..call(&prompt, &[11 + number, E]) };
                prompt.extend([&call.ids[..], &[T, U, A]].concat());
                record(app, &opened, call).await;
            }
            app.post(&path(&opened, "/finish"), json!({})).await.expect(200);
        }
        let of = |rollout: &str, turn: Value, value: f64| {
            json!({"rollout_id": rollout, "name": "reward", "turn": turn, "value": value})
        };
        let unknown = of("a", json!(format!("chatcmpl-{:032x}", 2)), 1.0);
        assert_eq!(app.post("/scores", unknown).await.pointers(422), ["/turn"]);
        let scores = json!([
            of("a", json!(format!("chatcmpl-{:032x}", 0)), 0.5), of("a", Value::Null, 1.0),
            of("b", json!(format!("msg_{:032x}", 2)), 0.25), of("b", Value::Null, 0.0),
        ]);
        app.post("/scores", scores).await.expect(201);
        let rows = app.samples(&app.lease_with(json!({})).await).await;
        let expected = [&[1.420_544, 0.696_238_6][..], &[-0.747_845_4, -0.707_103_2, -0.661_834_1]];
        for (row, expected) in rows.iter().zip(expected) {
            let all = row["advantages"].as_array().expect("the row has advantages");
            assert_eq!(all.len(), 5 * expected.len() - 3);
            for (turn, expected) in all.chunks(5).zip(expected) {
                assert!((turn[0].as_f64().expect("a number") - expected).abs() < 1e-6, "{turn:?} is not {expected}");
            }
        }
    }

    async fn a_finish_rewards_calls_by_their_answers_or_numbers(app: TestApp) {
        app.rules("default", json!({
            "group": {"size": 2}, "batch": {"groups": 1}, "advantage": {"kind": "turn_return", "gamma": 0.9},
        })).await;
        let played = async |rollout: &str, calls: i32| {
            let opened = open(app, json!({"rollout_id": rollout, "group_id": "g"})).await;
            let mut prompt = vec![S, U, A];
            for number in 0..calls {
                let id = format!("{number:032x}");
                let call = NewCall { id: Some(id), ..call(&prompt, &[11 + number, E]) };
                prompt.extend([&call.ids[..], &[T, U, A]].concat());
                record(app, &opened, call).await;
            }
            opened
        };
        let first = played("a", 2).await;
        let turns = app.get(&path(&first, "/turns")).await.expect(200);
        assert_eq!(turns["turns"][1]["id"], format!("{:032x}", 1));
        for (rewards, name) in [
            (json!({"3": 1.0}), "3"),
            (json!({"chatcmpl-77": 1.0}), "chatcmpl-77"),
            (json!({"1": 1.0, "msg_00000000000000000000000000000000": 1.0}), "msg_00000000000000000000000000000000"),
        ] {
            let refused = app.post(&path(&first, "/finish"), json!({"reward": 1.0, "turn_rewards": rewards})).await;
            assert_eq!(refused.pointers(422), [format!("/turn_rewards/{name}")]);
        }
        let body = json!({"reward": 1.0, "turn_rewards": {format!("chatcmpl-{:032x}", 0): 0.5}});
        app.post(&path(&first, "/finish"), body.clone()).await.expect(200);
        assert_eq!(app.post(&path(&first, "/finish"), body).await.expect(200)["duplicate"], true);
        app.post(&path(&first, "/finish"), json!({"reward": 1.0})).await.refused(409, "end-conflict");
        let second = played("b", 3).await;
        app.post(&path(&second, "/finish"), json!({"reward": 0.0, "turn_rewards": {"3": 0.25}})).await.expect(200);
        let rows = app.samples(&app.lease_with(json!({})).await).await;
        let expected = [&[1.420_544, 0.696_238_6][..], &[-0.747_845_4, -0.707_103_2, -0.661_834_1]];
        for (row, expected) in rows.iter().zip(expected) {
            let all = row["advantages"].as_array().expect("the row has advantages");
            let begins = all.chunks(5).map(|turn| turn[0].as_f64().expect("a number"));
            for (found, expected) in begins.zip(expected) {
                assert!((found - expected).abs() < 1e-6, "{found} is not {expected}");
            }
            assert_eq!(all.len(), 5 * expected.len() - 3);
        }
        // Calls that began in the same state are compared with each other.
        app.rules("states", json!({
            "group": {"size": 2}, "advantage": {"kind": "gigpo", "gamma": 0.9, "norm": "none"},
        })).await;
        let in_states = async |rollout: &str, reward: f64, states: &[&str]| {
            let models = json!({"any": {"policy": "states"}, "other": {"policy": null}});
            let opened = open(app, json!({"rollout_id": rollout, "group_id": "s", "models": models})).await;
            let mut prompt = vec![S, U, A];
            for number in 0..states.len() {
                let policy = forebay_domain::ids::PolicyName::parse("states").expect("a name");
                let call = NewCall { policy, ..call(&prompt, &[11 + number as i32, E]) };
                prompt.extend([&call.ids[..], &[T, U, A]].concat());
                record(app, &opened, call).await;
            }
            let keys: Value = states.iter().zip(1..).map(|(state, call): (_, i32)| (call.to_string(), json!(state))).collect();
            let wrong = json!({"reward": reward, "turn_state_keys": {"1": ""}});
            assert_eq!(app.post(&path(&opened, "/finish"), wrong).await.pointers(422), ["/turn_state_keys/1"]);
            let body = json!({"reward": reward, "turn_state_keys": keys});
            app.post(&path(&opened, "/finish"), body.clone()).await.expect(200);
            assert_eq!(app.post(&path(&opened, "/finish"), body).await.expect(200)["duplicate"], true);
        };
        in_states("s-1", 1.0, &["s0", "s1"]).await;
        in_states("s-2", 0.0, &["s0", "s0", "s2"]).await;
        let rows = app.samples(&app.lease_with(json!({"policy": "states"})).await).await;
        let begins: Vec<f64> = rows.iter().flat_map(|row| {
            row["advantages"].as_array().expect("the row has advantages").chunks(5).map(|turn| turn[0].as_f64().expect("a number"))
        }).collect();
        for (found, expected) in begins.iter().zip([1.1, 0.5, -0.8, -0.8, -0.5]) {
            assert!((found - expected).abs() < 1e-6, "{begins:?}");
        }
        assert_eq!(begins.len(), 5);
        // Of several sessions, the pointer says which.
        let bad = played("d", 1).await;
        let finishes = json!([
            {"session_id": played("e", 1).await["session_id"], "reward": 1.0},
            {"session_id": bad["session_id"], "reward": 1.0, "turn_rewards": {"a/b": 1.0}},
        ]);
        assert_eq!(app.post("/sessions/finish", finishes).await.pointers(422), ["/1/turn_rewards/a~1b"]);
        // A session makes no more calls than its rollout may have turns.
        let bounded = json!({"rollout_id": "f", "group_id": "large", "group_size": 32_768, "max_calls": 100});
        let bounded = open(app, bounded).await;
        for number in 0..32 {
            record(app, &bounded, call(&[S, U, A], &[11 + number, E])).await;
        }
        assert!(matches!(refused(try_record(app, &bounded, call(&[S, U, A], &[9, E])).await), Refusal::SessionFull(_)));
        let none = open(app, json!({"rollout_id": "c", "group_id": "h"})).await;
        let body = json!({"status": "failed", "turn_rewards": {"1": 1.0}});
        assert_eq!(app.post(&path(&none, "/finish"), body).await.pointers(422), ["/turn_rewards/1"]);
    }

    async fn a_repeated_finish_has_the_same_answer(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let opened = open(app, json!({"rollout_id": "r", "group_id": "g"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let first = finish(app, &opened, 1.0).await;
        // The group changes, and the answer does not.
        app.accept(member("g", 1, 0.0)).await;
        let again = finish(app, &opened, 1.0).await;
        assert_eq!(again["duplicate"], true);
        assert_eq!(with(again, json!({"duplicate": false})), first);
        app.post(&path(&opened, "/finish"), json!({"reward": 0.0})).await.refused(409, "end-conflict");
        app.post(&path(&opened, "/abort"), json!({"reason": "late"})).await.refused(409, "session-ended");
        let after = session(app, &opened).await;
        assert_eq!((&after["receipts"], &after["assembly"]), (&first["receipts"], &first["assembly"]));
        assert_eq!(app.story("r").await["reward"], 1.0);
    }

    async fn concurrent_finishes_end_the_session_once(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let one = || finish(app, &opened, 1.0);
        let (a, b, c) = tokio::join!(one(), one(), one());
        let first: Vec<&Value> = [&a, &b, &c].into_iter().filter(|ended| ended["duplicate"] == false).collect();
        assert_eq!(first.len(), 1);
        assert_eq!((&a["receipts"], &b["receipts"]), (&b["receipts"], &c["receipts"]));
    }

    async fn a_finish_without_calls_changes_nothing(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
        let lost = permit(app, &opened).await.expect("open");
        app.buffer.record_call(&lost, call(&[S, U, A], &[])).await.expect("the call is recorded");
        drop(lost);
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
        assert_eq!(session(app, &opened).await["state"], "open");
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        assert_eq!(finish(app, &opened, 1.0).await["receipts"][0]["verdict"], "kept");
        let failed = open(app, json!({"rollout_id": "f"})).await;
        let ended = app.post(&path(&failed, "/finish"), json!({"status": "failed", "reward": -1.0})).await.expect(200);
        assert_eq!(ended["receipts"][0]["verdict"], "kept");
    }

    async fn a_session_with_empty_answers_votes_and_trains_nothing(app: TestApp) {
        let filter = json!([{"name": "flat", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"}]);
        let rules = json!({"group": {"size": 2}, "require": ["tokens", "logprobs", "policy_version"], "filter": filter});
        app.rules("default", rules.clone()).await;
        app.rules("critic", rules).await;
        let models = json!({"a": {"policy": "default"}, "b": {"policy": "critic"}});
        let empty = open(app, json!({"rollout_id": "empty", "group_id": "g", "models": models})).await;
        for _ in 0..2 {
            record(app, &empty, call(&[S, U, A], &[])).await;
        }
        let ended = finish(app, &empty, 0.0).await;
        let (assembly, receipts) = (&ended["assembly"], &ended["receipts"]);
        assert_eq!((&assembly["dropped"]["empty"], &assembly["segments"]), (&json!(2), &json!(0)), "{ended}");
        // The critic was never called, so its rollout is aborted.
        let verdicts = [&receipts[0], &receipts[1]].map(|receipt| (text(&receipt["policy"]), text(&receipt["verdict"])));
        assert_eq!(verdicts, [("critic", "dropped"), ("default", "kept")], "{ended}");
        assert_eq!(app.story("empty").await["status"], "completed");
        let other = open(app, json!({"rollout_id": "other", "group_id": "g"})).await;
        record(app, &other, call(&[S, U, A], &[11, E])).await;
        assert_eq!(finish(app, &other, 1.0).await["receipts"][0]["group"]["state"], "ready", "the rewards differ");
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        let trained = |row: &Value| row["loss_mask"].as_array().map_or(0, Vec::len);
        let found: Vec<(&str, usize, bool)> = rows
            .iter()
            .map(|row| (text(&row["rollout_id"]), trained(row), row["advantage"].as_f64().expect("a number") > 0.0))
            .collect();
        assert_eq!(found, [("empty", 0, false), ("other", 2, true)]);
    }

    async fn an_aborted_session_takes_no_place(app: TestApp) {
        for (name, keep, segments) in [("kept", true, 1), ("gone", false, 0)] {
            let opened = open(app, json!({"rollout_id": name})).await;
            record(app, &opened, call(&[S, U, A], &[11, 12, E])).await;
            let abort = json!({"reason": "broken", "keep": keep});
            let ended = app.post(&path(&opened, "/abort"), abort.clone()).await.expect(200);
            assert_eq!((&ended["state"], &ended["reason"]), (&json!("aborted"), &json!("broken")));
            assert_eq!(ended["receipts"][0]["verdict"], "dropped");
            assert_eq!(ended["assembly"]["dropped_tokens"]["aborted"], if keep { 0 } else { 3 });
            let story = app.story(name).await;
            assert_eq!((&story["segments"], &story["reason"]), (&json!(segments), &json!("no-reward")));
            assert_eq!(app.post(&path(&opened, "/abort"), abort).await.expect(200)["duplicate"], true);
            app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(409, "session-ended");
        }
    }

    async fn a_session_may_end_before_its_rollout_is_scored(app: TestApp) {
        app.rules("default", json!({"group": {"size": 1}, "scores": {"required": ["tests", "reward"]}})).await;
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        // `scores` is another name of `reward_components`.
        let ended = app.post(&path(&opened, "/finish"), json!({"scores": {"tests": 0.5}})).await.expect(200);
        let receipt = &ended["receipts"][0];
        assert_eq!((&receipt["verdict"], &receipt["scoring"]), (&json!("kept"), &json!(["reward"])));
        let score = json!({"rollout_id": "r", "name": "reward", "value": 0.75});
        assert_eq!(app.post("/scores", score).await.expect(201)["group"]["state"], "ready");
        assert_eq!(app.story("r").await["reward"], 0.75);
        // Nobody scores what was aborted.
        for (name, end) in [("aborted", true), ("expired", false)] {
            let opened = open(app, json!({"rollout_id": name, "ttl_s": 60})).await;
            record(app, &opened, call(&[S, U, A], &[11, E])).await;
            if end {
                app.post(&path(&opened, "/abort"), json!({"reason": "broken", "keep": true})).await.expect(200);
            } else {
                app.pass_s(61.0).await;
            }
            let story = app.story(name).await;
            assert_eq!((&story["verdict"], &story["reason"]), (&json!("dropped"), &json!("no-reward")), "{name}");
        }
    }

    async fn a_session_that_expires_makes_room_in_its_group(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2, "timeout_s": 100_000}})).await;
        let request = |index: u32| json!({"rollout_id": format!("r{index}"), "group_id": "g", "idle_s": 60, "ttl_s": 100});
        let (lost, kept) = (open(app, request(0)).await, open(app, request(1)).await);
        record(app, &kept, call(&[S, U, A], &[11, E])).await;
        finish(app, &kept, 1.0).await;
        app.pass_s(50.0).await;
        record(app, &lost, call(&[S, U, A], &[11, E])).await;
        // A call makes the session idle from its end on, but not beyond its time to live.
        app.pass_s(40.0).await;
        assert_eq!(session(app, &lost).await["state"], "open");
        app.pass_s(20.0).await;
        let expired = session(app, &lost).await;
        assert_eq!((&expired["state"], &expired["reason"]), (&json!("expired"), &json!("session-expired")));
        assert_eq!(app.story("r0").await["verdict"], "dropped");
        assert_eq!(refused(try_record(app, &lost, call(&[S], &[1])).await), Refusal::SessionEnded(SessionState::Expired));
        app.post(&path(&lost, "/finish"), json!({"reward": 1.0})).await.refused(409, "session-ended");
        let replacement = open(app, request(2)).await;
        record(app, &replacement, call(&[S, U, A], &[12, E])).await;
        assert_eq!(finish(app, &replacement, 0.0).await["receipts"][0]["group"]["state"], "ready");
    }

    async fn a_finish_waits_for_calls_in_flight_and_cancels_the_rest(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let (waited, hung) = (permit(app, &opened).await.expect("open"), permit(app, &opened).await.expect("open"));
        let finish_path = path(&opened, "/finish");
        let finish = app.post(&finish_path, json!({"reward": 1.0, "wait_ms": 600_000}));
        let calls = async {
            while session(app, &opened).await["state"] != "finishing" {
                tokio::task::yield_now().await;
            }
            let late = permit(app, &opened).await;
            assert_eq!(refused(late), Refusal::SessionEnded(SessionState::Finishing), "no new call is accepted");
            let call = call(&[S, U, A, 11, E, T, A], &[12, E]);
            let recorded = app.buffer.record_call(&waited, call).await.expect("a call in flight is recorded");
            app.buffer.mark_delivered(recorded.call_pk);
            drop(waited);
            drop(hung);
        };
        let (ended, ()) = tokio::join!(finish, calls);
        assert_eq!(ended.expect(200)["assembly"]["calls"], 2);
        // A call that does not end in time is cancelled, and its answer is not recorded.
        let opened = open(app, json!({"rollout_id": "s"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let hung = permit(app, &opened).await.expect("open");
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0, "wait_ms": 0})).await.expect(200);
        hung.cancelled().await;
        let late = app.buffer.record_call(&hung, call(&[S], &[11, E])).await;
        assert_eq!(refused(late), Refusal::SessionEnded(SessionState::Finished));
    }

    async fn a_call_that_begins_after_a_refused_finish_is_not_cancelled(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let before = permit(app, &opened).await.expect("open");
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0, "wait_ms": 0})).await.refused(422, "no-turns");
        before.cancelled().await;
        let after = permit(app, &opened).await.expect("the session is open again");
        assert!(after.cancelled().now_or_never().is_none());
        app.buffer.record_call(&after, call(&[S, U, A], &[11, E])).await.expect("the call is recorded");
    }

    async fn a_refused_finish_of_several_names_the_session(app: TestApp) {
        app.rules("solver", json!({})).await;
        let models = json!({"a": {"policy": "default"}, "b": {"policy": "solver"}});
        let first = open(app, json!({"rollout_id": "a", "group_id": "a", "models": models})).await;
        let second = open(app, json!({"rollout_id": "b"})).await;
        for opened in [&first, &second] {
            record(app, opened, call(&[S, U, A], &[11, E])).await;
        }
        app.rules("default", json!({"group": {"size": 2}})).await;
        let both = json!([
            {"session_id": first["session_id"], "reward": 1.0}, {"session_id": second["session_id"], "reward": 1.0},
        ]);
        assert_eq!(app.post("/sessions/finish", both).await.pointers(422), ["/1/group_id"]);
    }

    async fn several_sessions_finish_together_or_not_at_all(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        let a = open(app, json!({"rollout_id": "a", "group_id": "g"})).await;
        let b = open(app, json!({"rollout_id": "b", "group_id": "g"})).await;
        record(app, &a, call(&[S, U, A], &[11, E])).await;
        let both = json!([
            {"session_id": a["session_id"], "reward": 1.0}, {"session_id": b["session_id"], "reward": 0.0},
        ]);
        app.post("/sessions/finish", both.clone()).await.refused(422, "no-turns");
        assert_eq!(session(app, &a).await["state"], "open", "the other session goes on");
        assert_eq!(app.get("/trajectories").await.expect(200)["trajectories"], json!([]));
        record(app, &b, call(&[S, U, A], &[12, E])).await;
        let ended = app.post("/sessions/finish", both.clone()).await.expect(200);
        assert_eq!(ended[1]["receipts"][0]["rollout_id"], "b");
        assert_eq!(ended[1]["receipts"][0]["group"]["state"], "ready", "the last rollout decides the group");
        let again = app.post("/sessions/finish", both.clone()).await.expect(200);
        assert_eq!(again[0]["receipts"], ended[0]["receipts"]);
        let twice = json!([both[0], both[0]]);
        assert_eq!(app.post("/sessions/finish", twice).await.pointers(422), ["/1/session_id"]);
        app.post("/sessions/finish", json!([])).await.refused(422, "invalid");
    }

    async fn rollouts_belong_to_the_execution_of_their_session(app: TestApp) {
        let request = json!({"rollout_id": "a", "execution_id": "x"});
        let a = open(app, request.clone()).await;
        app.post("/sessions", with(request.clone(), json!({"execution_id": "y"}))).await.refused(409, "session-conflict");
        app.post("/sessions", request).await.expect(200);
        let unfit = json!({"rollout_id": "z", "execution_id": "a\nb"});
        assert_eq!(app.post("/sessions", unfit).await.pointers(422), ["/execution_id"]);
        assert_eq!(session(app, &a).await["execution_id"], "x");
        let execution = |ended: &Value| text(&ended["receipts"][0]["execution_id"]).to_owned();
        record(app, &a, call(&[S, U, A], &[11, E])).await;
        assert_eq!(execution(&finish(app, &a, 1.0).await), "x");
        // Sessions without one that are finished together share a new one.
        let b = open(app, json!({"rollout_id": "b"})).await;
        let c = open(app, json!({"rollout_id": "c"})).await;
        let d = open(app, json!({"rollout_id": "d", "execution_id": "x"})).await;
        assert_eq!(session(app, &b).await["execution_id"], Value::Null);
        let mut all = Vec::new();
        for opened in [&b, &c, &d] {
            record(app, opened, call(&[S, U, A], &[12, E])).await;
            all.push(json!({"session_id": opened["session_id"], "reward": 1.0}));
        }
        let ended = app.post("/sessions/finish", json!(all)).await.expect(200);
        let minted = execution(&ended[0]);
        assert_eq!((execution(&ended[1]), execution(&ended[2])), (minted.clone(), "x".to_owned()));
        assert_ne!(minted, "x");
        assert_eq!(session(app, &b).await["execution_id"], *minted);
        let again = app.post("/sessions/finish", json!(all)).await.expect(200);
        assert_eq!(execution(&again[1]), minted);
        for (id, rollouts) in [(minted.as_str(), ["b", "c"]), ("x", ["a", "d"])] {
            let page = app.get(&format!("/trajectories?execution_id={id}")).await.expect(200);
            let found = page["trajectories"].as_array().expect("a page").iter().map(|story| text(&story["rollout_id"]));
            assert_eq!(found.collect::<Vec<_>>(), rollouts);
        }
    }

    async fn a_reset_ends_the_rollouts_of_its_policy_alone(app: TestApp) {
        app.rules("solver", json!({})).await;
        let models = json!({"a": {"policy": "default"}, "b": {"policy": "solver"}});
        let opened = open(app, json!({"rollout_id": "r", "models": models, "idle_s": 60})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        app.post("/policies/default/reset", json!({})).await.expect(200);
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(409, "session-reset");
        app.pass_s(61.0).await;
        assert_eq!(session(app, &opened).await["state"], "expired");
        app.get("/trajectories?rollout_id=r").await.refused(404, "not-found");
        app.get("/trajectories?rollout_id=r&policy=solver").await.expect(200);
        assert_eq!(app.get("/policies/default").await.expect(200)["waiting"]["reserved_rollouts"], 0);
    }

    async fn a_session_whose_rollout_was_posted_meanwhile_ends_all_the_same(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r", "ttl_s": 60})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        app.accept(rollout("r", 1.0)).await;
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(409, "rollout-conflict");
        assert_eq!(session(app, &opened).await["state"], "open");
        app.pass_s(61.0).await;
        let expired = session(app, &opened).await;
        assert_eq!((&expired["state"], &expired["receipts"]), (&json!("expired"), &json!([])));
        assert_eq!(app.get("/policies/default").await.expect(200)["waiting"]["reserved_rollouts"], 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_another_replica_has_just_delivered_is_trained() {
    let app = TestApp::start(Backend::Postgres).await;
    let other = app.replica().await;
    let opened = open(&app, json!({"rollout_id": "r"})).await;
    record(&app, &opened, call(&[S, U, A], &[11, E])).await;
    assert_eq!(finish(&other, &opened, 1.0).await["assembly"]["trained_tokens"], 2);
    other.finish().await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_another_replica_has_just_lost_is_not_trained() {
    let app = TestApp::start(Backend::Postgres).await;
    let other = app.replica().await;
    let opened = open(&app, json!({"rollout_id": "r"})).await;
    try_record(&app, &opened, call(&[S, U, A], &[11, E])).await.expect("the call is recorded");
    other.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
    other.finish().await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_replicas_serve_one_session() {
    let app = TestApp::start(Backend::Postgres).await;
    let other = app.replica().await;
    let opened = open(&app, json!({"rollout_id": "r"})).await;
    let mut prompt: Vec<i32> = (0..2_000).collect();
    let mut bytes = Vec::new();
    for turn in 0..6_i32 {
        let replica = if turn % 2 == 0 { &app } else { &other };
        record(replica, &opened, call(&prompt, &[3_000 + turn, E])).await;
        replica.buffer.sweep().await.expect("swept");
        prompt.extend([3_000 + turn, E, T, A]);
        bytes.push(session(replica, &opened).await["bytes"].as_u64().expect("a number"));
    }
    assert!(bytes[5] - bytes[0] < 2_500, "every replica stores tails: {bytes:?}");
    for replica in [&app, &other] {
        replica.buffer.session_turns(text(&opened["session_id"]).parse().expect("an id")).await.expect("listed");
    }
    let (one, two) = tokio::join!(finish(&app, &opened, 1.0), finish(&other, &opened, 1.0));
    assert_eq!((&one["receipts"], &one["assembly"]), (&two["receipts"], &two["assembly"]));
    assert_ne!(one["duplicate"], two["duplicate"]);
    assert_eq!(segments(&app).await.len(), 1);
    other.finish().await;
    app.finish().await;
}
