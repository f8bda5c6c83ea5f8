//! Sessions: the calls of agents are recorded, and become rollouts when the session ends.

use std::time::Duration;

use forebay::{
    access::Role,
    buffer::{
        port::RecordedCall,
        refusal::{BufferError, Refusal},
        session::{CallPermit, NewCall},
        states::SessionState,
    },
};
use forebay_client::wire::{self, AbortRequest, FinishRequest, SessionFinish, SessionRequest, VersionSpan};
use futures::FutureExt as _;
use serde_json::{Value, json};

use crate::support::{Backend, TestApp, member, on_both_stores, rollout, text, with};

/// A session with a break and a call that is dropped, so that all its metrics are exported.
pub(crate) async fn traffic(app: &TestApp) {
    let opened = open(app, json!({"rollout_id": "traffic"})).await;
    let prompt: Vec<i32> = (100..200).collect();
    record(app, &opened, call(&prompt, &[11, 12, E])).await;
    record(app, &opened, call(&[&prompt[..], &[17, E]].concat(), &[13, E])).await;
    try_record(app, &opened, call(&prompt, &[14, E])).await.expect("the call is recorded");
    finish(app, &opened, 1.0).await;
}

/// Opens a session, which must succeed.
async fn open(app: &TestApp, request: Value) -> Value {
    app.post("/sessions", request).await.expect(201)
}

/// A call that ended on a stop token. Its versions are 0.
fn call(prompt: &[i32], ids: &[i32]) -> NewCall {
    NewCall {
        dialect: "chat".to_owned(),
        model: "any".to_owned(),
        prompt: prompt.to_vec(),
        ids: ids.to_vec(),
        logprobs: ids.iter().map(|&id| -(id as f32) / 128.0).collect(),
        versions: if ids.is_empty() { Vec::new() } else { vec![VersionSpan(0, 0, ids.len() as i64)] },
        finish_reason: "stop".to_owned(),
        stopped_on_token: true,
        body_digest: *blake3_of(prompt, ids).as_bytes(),
        response: json!({"sampled": ids}).to_string(),
        ..NewCall::default()
    }
}

fn blake3_of(prompt: &[i32], ids: &[i32]) -> blake3::Hash {
    blake3::hash(format!("{prompt:?}{ids:?}").as_bytes())
}

async fn permit(app: &TestApp, session: &Value) -> Result<CallPermit, BufferError> {
    let id = text(&session["session_id"]).parse().expect("it is an id");
    app.buffer.session_for_call(Some(id), text(&session["key"]), Duration::ZERO).await
}

async fn try_record(app: &TestApp, session: &Value, call: NewCall) -> Result<RecordedCall, BufferError> {
    let permit = permit(app, session).await?;
    app.buffer.record_call(&permit, call).await
}

/// Records a call whose answer is delivered.
async fn record(app: &TestApp, session: &Value, call: NewCall) -> RecordedCall {
    app.clock.advance_s(1.0);
    let recorded = try_record(app, session, call).await.expect("the call is recorded");
    app.buffer.mark_delivered(recorded.call_pk);
    recorded
}

fn path(session: &Value, call: &str) -> String {
    format!("/sessions/{}{call}", text(&session["session_id"]))
}

async fn finish(app: &TestApp, session: &Value, reward: f64) -> Value {
    app.post(&path(session, "/finish"), json!({"reward": reward})).await.expect(200)
}

async fn session(app: &TestApp, session: &Value) -> Value {
    app.get(&path(session, "")).await.expect(200)
}

#[track_caller]
fn refused<T: std::fmt::Debug>(outcome: Result<T, BufferError>) -> Refusal {
    match outcome {
        Err(BufferError::Refused(refusal)) => refusal,
        other => panic!("not refused: {other:?}"),
    }
}

/// Prompt, response and mask of the samples of the next batch, in order.
async fn segments(app: &TestApp) -> Vec<(Vec<i64>, Vec<i64>, Vec<i64>)> {
    let batch = app.lease().await;
    let rows = app.samples(&batch).await;
    let ids = |value: &Value| value.as_array().expect("a list").iter().map(|id| id.as_i64().expect("an id")).collect();
    let segment = |row: &Value| {
        let (tokens, mask): (Vec<i64>, Vec<i64>) = (ids(&row["tokens"]), ids(&row["loss_mask"]));
        let (prompt, response) = tokens.split_at(tokens.len() - mask.len());
        (prompt.to_vec(), response.to_vec(), mask)
    };
    rows.iter().map(segment).collect()
}

// Openers of turns, the stop token and the newline that a template adds.
const S: i32 = 1;
const U: i32 = 2;
const A: i32 = 3;
const T: i32 = 4;
const E: i32 = 5;
const N: i32 = 6;

/// The worked examples of the assembling rule: calls, and the segments that they become.
struct Example {
    name: &'static str,
    calls: Vec<NewCall>,
    segments: Vec<(Vec<i64>, Vec<i64>, Vec<i64>)>,
    /// Calls that are in no segment, and trimmed stop tokens.
    dropped: u64,
    trimmed: u64,
}

fn ids(of: &[i32]) -> Vec<i64> {
    of.iter().map(|&id| i64::from(id)).collect()
}

fn example(name: &'static str, calls: Vec<NewCall>, segments: &[(&[i32], &[i32], &[i32])]) -> Example {
    let segments = segments.iter().map(|(prompt, response, mask)| (ids(prompt), ids(response), ids(mask)));
    Example { name, calls, segments: segments.collect(), dropped: 0, trimmed: 0 }
}

fn examples() -> Vec<Example> {
    let first = || call(&[S, U, A], &[11, 12, E]);
    let second = || call(&[S, U, A, 11, 12, E, N, T, A], &[13, E]);
    let sub = |prompt: &[i32], ids: &[i32]| NewCall { agent: Some("helper".to_owned()), ..call(prompt, ids) };
    let cut = NewCall { stopped_on_token: false, finish_reason: "length".to_owned(), ..call(&[S, U, A], &[11, 12]) };
    let merged: (&[i32], &[i32], &[i32]) = (&[S, U, A], &[11, 12, E, N, T, A, 13, E], &[1, 1, 1, 0, 0, 0, 1, 1]);
    vec![
        example("extension", vec![first(), second()], &[merged]),
        example(
            "drift",
            vec![first(), call(&[S, U, A, 17, E, N, T, A], &[13, E])],
            &[(&[S, U, A], &[11, 12, E], &[1, 1, 1]), (&[S, U, A, 17, E, N, T, A], &[13, E], &[1, 1])],
        ),
        example(
            "sub-agent",
            vec![first(), sub(&[9, U, A], &[21, E]), sub(&[9, U, A, 21, E, T, A], &[22, E]), second()],
            &[(&[9, U, A], &[21, E, T, A, 22, E], &[1, 1, 0, 0, 1, 1]), merged],
        ),
        example(
            "fork",
            vec![first(), second(), call(&[S, U, A, 11, 12, E, N, 8, A], &[14, E])],
            &[merged, (&[S, U, A, 11, 12, E, N, 8, A], &[14, E], &[1, 1])],
        ),
        example(
            "cut by max_tokens",
            vec![cut, call(&[S, U, A, 11, 12, E, N, U, A], &[13, E])],
            &[(&[S, U, A], &[11, 12, E, N, U, A, 13, E], &[1, 1, 0, 0, 0, 0, 1, 1])],
        ),
        Example {
            trimmed: 1,
            ..example(
                "stop is the next opener",
                vec![call(&[S, U, A], &[11, U]), call(&[S, U, A, 11, T, 50, A], &[13, U])],
                &[(&[S, U, A], &[11, T, 50, A, 13, U], &[1, 0, 0, 0, 1, 1])],
            )
        },
        Example { dropped: 1, ..example("nothing sampled", vec![call(&[S, U, A], &[]), first(), second()], &[merged]) },
    ]
}

on_both_stores! {
    async fn the_worked_examples_become_these_segments(app: TestApp) {
        for Example { name, calls, segments: expected, dropped, trimmed } in examples() {
            let opened = open(app, json!({"rollout_id": name})).await;
            let sampled: usize = calls.iter().map(|call| call.ids.len()).sum();
            let count = calls.len();
            for call in calls {
                record(app, &opened, call).await;
            }
            let ended = finish(app, &opened, 1.0).await;
            assert_eq!((&ended["state"], &ended["duplicate"]), (&json!("finished"), &json!(false)), "{name}");
            let receipt = &ended["receipts"][0];
            assert_eq!((&receipt["verdict"], &receipt["rollout_id"]), (&json!("kept"), &json!(name)), "{name}");
            let assembly = &ended["assembly"];
            assert_eq!((&assembly["calls"], &assembly["segments"]), (&json!(count), &json!(expected.len())), "{name}");
            assert_eq!((&assembly["dropped"]["empty"], &assembly["trimmed"]), (&json!(dropped), &json!(trimmed)), "{name}");
            assert_eq!(assembly["sampled_tokens"], json!(sampled), "{name}");
            assert_eq!(segments(app).await, expected, "{name}");
            assert_eq!(app.story(&name.replace(' ', "%20")).await["policy_version_assumed"], false);
        }
    }

    async fn versions_and_logprobs_are_those_of_the_calls(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        app.publish(6).await.expect(200);
        let of = |version, call: NewCall| NewCall { versions: vec![VersionSpan(version, 0, call.ids.len() as i64)], ..call };
        record(app, &opened, of(5, call(&[S, U, A], &[11, 12, E]))).await;
        record(app, &opened, of(6, call(&[S, U, A, 11, 12, E, N, T, A], &[13, E]))).await;
        finish(app, &opened, 1.0).await;
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        assert_eq!(rows[0]["versions"], json!([[5, 0, 3], [6, 3, 5]]));
        assert_eq!(rows[0]["logprobs"][0], json!(-11.0 / 128.0));
        assert_eq!(rows[0]["logprobs"][6], json!(-13.0 / 128.0));
        assert_eq!(rows[0]["policy_version"], 5);
    }

    async fn the_same_request_opens_one_session(app: TestApp) {
        let request = json!({"rollout_id": "r", "group_id": "g", "metadata": {"a": 1}});
        let first = open(app, request.clone()).await;
        let again = app.post("/sessions", request.clone()).await.expect(200);
        assert_eq!((&again["session_id"], &again["duplicate"]), (&first["session_id"], &json!(true)));
        assert_ne!(again["key"], first["key"]);
        for opened in [&first, &again] {
            record(app, opened, call(&[S, U, A], &[11, E])).await;
        }
        app.post("/sessions", with(request.clone(), json!({"metadata": {"a": 2}}))).await.refused(409, "session-conflict");
        let reserved = app.get("/policies/default").await.expect(200)["waiting"]["reserved_rollouts"].clone();
        assert_eq!(reserved, 1, "room is reserved once");
        finish(app, &first, 1.0).await;
        app.post("/sessions", request).await.refused(409, "session-ended");
        assert_eq!(app.get("/policies/default").await.expect(200)["waiting"]["reserved_rollouts"], 0);
        // Without an id, every request opens a session.
        assert_ne!(open(app, json!({})).await["rollout_id"], open(app, json!({})).await["rollout_id"]);
    }

    async fn what_ingest_would_refuse_is_refused_at_the_start(app: TestApp) {
        app.rules("pair", json!({"group": {"size": 2}})).await;
        app.rules("valued", json!({"require": ["tokens", "values"]})).await;
        app.accept(rollout("stored", 1.0)).await;
        app.accept(with(member("g", 0, 1.0), json!({"policy": "pair", "group_size": 3}))).await;
        app.post("/sessions", json!({"policy": "none"})).await.refused(404, "unknown-policy");
        app.post("/sessions", json!({"rollout_id": "stored"})).await.refused(409, "rollout-conflict");
        let sized = json!({"policy": "pair", "group_id": "g", "group_size": 2});
        assert_eq!(app.post("/sessions", sized).await.pointers(409), ["/group_size"]);
        for (request, pointers) in [
            (json!({"policy": "pair"}), vec!["/group_id"]),
            (json!({"policy": "valued"}), vec!["/models"]),
            (json!({"metadata": []}), vec!["/metadata"]),
            (json!({"rollout_id": ""}), vec!["/rollout_id"]),
            (json!({"models": {"a\nb": {"policy": "pair"}}}), vec!["/models/a\nb"]),
            (json!({"sampling": {"temperature": 0.0}}), vec!["/sampling/temperature"]),
            (json!({"policy": "pair", "models": {"m": {"policy": "pair"}}}), vec!["/policy"]),
            (json!({"models": {"m": {"policy": null}}}), vec!["/models"]),
            (json!({"ttl_s": 0, "idle_s": 0, "max_calls": 2_000}), vec!["/ttl_s", "/idle_s", "/max_calls"]),
        ] {
            assert_eq!(app.post("/sessions", request.clone()).await.pointers(422), pointers, "{request}");
        }
        assert_eq!(app.get("/sessions").await.expect(200)["sessions"], json!([]));
    }

    async fn sizes_of_a_group_that_is_not_yet_open_agree(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        open(app, json!({"group_id": "g", "group_size": 3})).await;
        app.post("/sessions", json!({"group_id": "g", "group_size": 2})).await.refused(409, "group-size-conflict");
        let second = open(app, json!({"group_id": "g"})).await;
        record(app, &second, call(&[S], &[11, E])).await;
        assert_eq!(finish(app, &second, 1.0).await["receipts"][0]["group"]["size"], 3);
    }

    async fn room_is_refused_except_to_a_group_that_has_begun(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "staleness": {"max": 0}, "batch": {"groups": 1}})).await;
        let first = open(app, json!({"group_id": "a"})).await;
        open(app, json!({"group_id": "a"})).await;
        let full = app.http.post(format!("{}/sessions", app.url)).json(&json!({"group_id": "b"})).send().await;
        let full = full.expect("the server answers");
        assert_eq!((full.status().as_u16(), full.headers().contains_key("retry-after")), (429, true));
        let replacement = open(app, json!({"group_id": "a"})).await;
        // The room of a session that ends is used by its rollout, or given back.
        app.post(&path(&first, "/abort"), json!({"reason": "test"})).await.expect(200);
        app.post(&path(&replacement, "/abort"), json!({"reason": "test"})).await.expect(200);
        open(app, json!({"group_id": "b"})).await;
    }

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
        let solver = forebay::buffer::ids::PolicyName::parse("solver").expect("a name");
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
        record(app, &opened, call(&[S, U, A], &[])).await;
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
        assert_eq!(session(app, &opened).await["state"], "open");
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        assert_eq!(finish(app, &opened, 1.0).await["receipts"][0]["verdict"], "kept");
        let failed = open(app, json!({"rollout_id": "f"})).await;
        let ended = app.post(&path(&failed, "/finish"), json!({"status": "failed", "reward": -1.0})).await.expect(200);
        assert_eq!(ended["receipts"][0]["verdict"], "kept");
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

    async fn a_key_opens_nothing_but_its_session(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let produce = app.key(Role::Produce, &["default"]).await;
        let opened = app.post_as(&produce, "/sessions", json!({"rollout_id": "r"})).await.expect(201);
        let other = app.post_as(&produce, "/sessions", json!({"rollout_id": "s"})).await.expect(201);
        let key = text(&opened["key"]);
        for call in ["/finish", "/abort"] {
            app.post_as(key, &path(&opened, call), json!({"reason": "x"})).await.refused(401, "unauthorized");
        }
        app.get_as(key, &path(&opened, "")).await.refused(401, "unauthorized");
        let mixed = json!({"session_id": other["session_id"], "key": opened["key"]});
        assert_eq!(refused(permit(app, &mixed).await), Refusal::UnknownSessionKey);
        assert!(app.buffer.session_for_call(None, key, Duration::ZERO).await.is_ok(), "the key alone names the session");
        // A key of the service is no key of a session, and other policies are not seen.
        assert_eq!(refused(app.buffer.session_for_call(None, &produce, Duration::ZERO).await), Refusal::UnknownSessionKey);
        let foreign = app.key(Role::Produce, &["other"]).await;
        app.get_as(&foreign, &path(&opened, "")).await.refused(404, "not-found");
        app.post_as(&foreign, &path(&opened, "/abort"), json!({"reason": "x"})).await.refused(404, "not-found");
        app.post_as(&foreign, "/sessions", json!({})).await.refused(404, "unknown-policy");
        let reader = app.key(Role::Read, &["*"]).await;
        app.get_as(&reader, &path(&opened, "/turns")).await.expect(200);
        app.post_as(&reader, &path(&opened, "/abort"), json!({"reason": "x"})).await.expect(403);
        // The database has the hashes of keys and no key.
        let hash = blake3::hash(key.as_bytes()).to_hex();
        let secret = key.trim_start_matches("fbs_");
        for (digits, found) in [(hash.as_str(), 1), (secret, 0)] {
            let literal = if app.database.starts_with("sqlite") { format!("x'{digits}'") } else { format!("'\\x{digits}'") };
            let sql = format!("SELECT COUNT(*) FROM session_key WHERE hash = {literal}");
            assert_eq!(app.read_value(sql).await, found);
        }
        app.post_as(&admin, &path(&opened, "/abort"), json!({"reason": "x"})).await.expect(200);
        let ended = app.buffer.session_for_call(None, key, Duration::ZERO).await;
        assert_eq!(refused(ended), Refusal::SessionEnded(SessionState::Aborted));
    }

    async fn a_session_goes_on_after_a_restart(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let prompt: Vec<i32> = (0..5_000).map(|id| id % 997).collect();
        record(app, &opened, call(&prompt, &[11, 12, E])).await;
        let before = session(app, &opened).await["bytes"].as_u64().expect("a number");
        app.restart().await;
        let longer: Vec<i32> = prompt.iter().copied().chain([11, 12, E, N, T, A]).collect();
        record(app, &opened, call(&longer, &[13, E])).await;
        let after = session(app, &opened).await["bytes"].as_u64().expect("a number");
        assert!(after - before < 500, "only the tail of the prompt is stored: {before} and then {after}");
        finish(app, &opened, 1.0).await;
        let found = segments(app).await;
        assert_eq!((found.len(), &found[0].0, &found[0].1[6..]), (1, &ids(&prompt), &ids(&[13, E])[..]));
    }

    async fn a_repeated_call_is_answered_as_before(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let lost = call(&[S, U, A], &[11, E]);
        let recorded = try_record(app, &opened, lost.clone()).await.expect("recorded");
        let allowed = permit(app, &opened).await.expect("the session is open");
        let replay = async |digest, count| {
            app.buffer.replay(&allowed, "chat", digest, count).await.expect("answered").map(|found| (found.call, found.response))
        };
        assert_eq!(replay(lost.body_digest, 1).await, Some((recorded, lost.response.clone())));
        assert_eq!(replay(lost.body_digest, 0).await, None, "the same body is no repeat");
        assert_eq!(replay([7; 32], 1).await, None);
        drop(allowed);
        // It was not delivered, and another call took its place.
        record(app, &opened, NewCall { retry_count: 1, ..call(&[S, U, A], &[14, E]) }).await;
        record(app, &opened, call(&[S, U, A, 14, E, T, A], &[15, E])).await;
        let turns = app.get(&path(&opened, "/turns")).await.expect(200);
        let outcomes: Vec<&str> = turns["turns"].as_array().expect("a list").iter().map(|turn| text(&turn["outcome"])).collect();
        assert_eq!(outcomes, ["undelivered", "trained", "trained"]);
        let ended = finish(app, &opened, 1.0).await;
        assert_eq!(ended["assembly"]["dropped_tokens"]["undelivered"], 2);
        assert_eq!(segments(app).await.len(), 1);
    }

    async fn candidates_of_one_prompt_are_trained_if_the_rules_say_so(app: TestApp) {
        for (retries, segments, dropped) in [("drop", 1, 2), ("keep", 2, 0)] {
            app.rules("default", json!({"sessions": {"retries": retries}})).await;
            let opened = open(app, json!({"rollout_id": retries})).await;
            record(app, &opened, call(&[S, U, A], &[11, E])).await;
            record(app, &opened, call(&[S, U, A], &[12, E])).await;
            let assembly = finish(app, &opened, 1.0).await["assembly"].clone();
            assert_eq!((&assembly["segments"], &assembly["dropped_tokens"]["retry"]), (&json!(segments), &json!(dropped)));
        }
    }

    async fn a_full_session_is_truncated(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r", "max_calls": 1})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let allowed = permit(app, &opened).await.expect("a repeated call may still be answered");
        assert_eq!(refused(app.buffer.check_room(&allowed).await), Refusal::SessionFull("calls"));
        drop(allowed);
        assert_eq!(session(app, &opened).await["full"], true);
        finish(app, &opened, 1.0).await;
        let batch = app.lease().await;
        assert_eq!(app.samples(&batch).await[0]["status"], "truncated");
    }

    async fn calls_that_could_not_be_ingested_are_refused(app: TestApp) {
        app.reconfigure("[limits]\ntrajectory_tokens = 20\ntrajectory_segments = 2\n[sessions]\nmax_in_flight = 1\n").await;
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let good = call(&[S, U, A], &[11, 12, E]);
        for wrong in [
            NewCall { prompt: Vec::new(), ..good.clone() },
            NewCall { logprobs: vec![-1.0], ..good.clone() },
            NewCall { logprobs: vec![f32::NAN; 3], ..good.clone() },
            NewCall { versions: vec![VersionSpan(0, 0, 2)], ..good.clone() },
            NewCall { ids: vec![11, -1, E], ..good.clone() },
            NewCall { agent: Some("\u{0}".to_owned()), ..good.clone() },
        ] {
            assert!(matches!(refused(try_record(app, &opened, wrong).await), Refusal::Invalid(_)));
        }
        let allowed = permit(app, &opened).await.expect("the session is open");
        assert_eq!(refused(permit(app, &opened).await), Refusal::SessionBusy(1));
        drop(allowed);
        record(app, &opened, good).await;
        // A continuation adds its tail; another prompt would add a segment with all its ids.
        record(app, &opened, call(&[S, U, A, 11, 12, E, N], &[13, E])).await;
        let fork = call(&[S, U, A, 11, 12, 9, 9, 9, 9, 9], &[13, E]);
        assert_eq!(refused(try_record(app, &opened, fork).await), Refusal::SessionFull("tokens"));
        record(app, &opened, call(&[7, 7], &[8, E])).await;
        assert_eq!(refused(try_record(app, &opened, call(&[8], &[8])).await), Refusal::SessionFull("segments"));
        finish(app, &opened, 1.0).await;
        assert_eq!(segments(app).await.len(), 2);
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

    async fn what_was_delivered_before_a_stop_is_trained(app: TestApp) {
        for round in 0..4 {
            let opened = open(app, json!({"rollout_id": format!("r{round}")})).await;
            record(app, &opened, call(&[S, U, A], &[11, E])).await;
            app.restart().await;
            assert_eq!(finish(app, &opened, 1.0).await["assembly"]["trained_tokens"], 2);
        }
    }

    async fn a_prompt_without_the_stop_token_is_another_segment(app: TestApp) {
        app.reconfigure("[limits]\ntrajectory_segments = 1\n").await;
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, 12, E])).await;
        // Nothing follows in the place of the stop token, so the call continues nothing.
        let cut = call(&[S, U, A, 11, 12], &[13, E]);
        assert_eq!(refused(try_record(app, &opened, cut).await), Refusal::SessionFull("segments"));
        finish(app, &opened, 1.0).await;
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

    async fn tokens_are_trained_or_dropped_with_a_reason(app: TestApp) {
        // A tree of calls with retries, forks, drift and answers that were lost.
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let mut paths: Vec<Vec<i32>> = vec![vec![S, U, A]];
        let mut sampled = 0;
        let mut state = 7_u32;
        let mut random = |below: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) % below
        };
        for index in 0..60_i32 {
            let mut prompt = paths[random(paths.len() as u32) as usize].clone();
            match random(5) {
                0 => prompt[1] = 90 + index,
                1 => {}
                _ => prompt.extend([N, T, A]),
            }
            let ids: Vec<i32> = (0..random(4) as i32).map(|place| 100 + 4 * index + place).collect();
            sampled += ids.len() as u64;
            let call = NewCall { stopped_on_token: random(2) == 0, ..call(&prompt, &ids) };
            if random(4) == 0 {
                app.clock.advance_s(1.0);
                try_record(app, &opened, call).await.expect("recorded");
            } else {
                record(app, &opened, call).await;
            }
            paths.push([prompt, ids].concat());
            if index == 30 {
                app.restart().await;
            }
        }
        let ended = finish(app, &opened, 1.0).await;
        let assembly = &ended["assembly"];
        let count = |value: &Value| value.as_u64().expect("a number");
        let sum = |value: &Value| value.as_object().expect("reasons").values().map(count).sum::<u64>();
        let dropped = sum(&assembly["dropped_tokens"]);
        assert_eq!(count(&assembly["sampled_tokens"]), sampled);
        assert_eq!(count(&assembly["trained_tokens"]) + dropped + count(&assembly["trimmed"]), sampled);
        assert!(dropped > 0 && sum(&assembly["dropped"]) > 3, "{assembly}");
        let trained: i64 = segments(app).await.iter().flat_map(|segment| &segment.2).sum();
        assert_eq!(json!(trained), assembly["trained_tokens"], "what is delivered is what was counted");
        let metrics = app.metrics().await;
        assert!(metrics.contains("forebay_ledger_sessions{policy=\"default\",state=\"finished\"} 1"), "{metrics}");
        let undelivered = &assembly["dropped_tokens"]["undelivered"];
        let line = format!("forebay_session_tokens_dropped_total{{policy=\"default\",reason=\"undelivered\"}} {undelivered}");
        assert!(metrics.contains(&line), "{line} is missing in {metrics}");
    }

    async fn a_break_is_shown_where_it_is(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let prompt: Vec<i32> = (100..200).collect();
        record(app, &opened, call(&prompt, &[11, 12, E])).await;
        let drifted: Vec<i32> = prompt.iter().copied().chain([17, E, N]).collect();
        record(app, &opened, call(&drifted, &[13, E])).await;
        let turns = app.get(&path(&opened, "/turns")).await.expect(200);
        assert_eq!(turns["turns"][0].get("break"), None);
        let expected = json!({"nearest": 1, "position": 100, "cause": "tokens", "expected": [11, 12, E], "found": [17, E, N]});
        assert_eq!(turns["turns"][1]["break"], expected);
        assert_eq!(finish(app, &opened, 1.0).await["assembly"]["breaks"], 1);
    }

    async fn the_client_has_a_method_for_each_call(app: TestApp) {
        let client = app.client();
        let request = SessionRequest { rollout_id: Some("r".to_owned()), ..SessionRequest::default() };
        let opened = client.open_session(&request).await.expect("opened");
        let id = opened.session_id.as_str();
        let named = json!({"session_id": id, "key": opened.key});
        record(app, &named, call(&[S, U, A], &[11, E])).await;
        assert_eq!(client.session_turns(id).await.expect("listed").turns.len(), 1);
        let finish = FinishRequest { reward: Some(1.0), ..FinishRequest::default() };
        let ended = client.finish_session(id, &finish).await.expect("finished");
        assert_eq!((ended.state, ended.receipts.len()), (wire::SessionState::Finished, 1));
        let again = client.finish_sessions(&[SessionFinish::of(id, finish)]).await.expect("repeated");
        assert!(again[0].duplicate);
        let other = client.open_session(&SessionRequest::default()).await.expect("opened");
        let abort = AbortRequest { reason: "test".to_owned(), keep: false };
        let ended = client.abort_session(&other.session_id, &abort).await.expect("aborted");
        assert_eq!(ended.state, wire::SessionState::Aborted);
        let found = client.session(id).await.expect("answered").expect("it is known");
        assert_eq!(found.calls, 1);
        assert!(client.session("none").await.expect("answered").is_none());
        assert_eq!(client.sessions("default", &[("state", "aborted")]).await.expect("listed").sessions.len(), 1);
        assert!(!format!("{opened:?}").contains(&opened.key), "the key stays out of logs");
    }

    async fn sessions_are_listed_by_policy_and_state(app: TestApp) {
        app.rules("solver", json!({})).await;
        let first = open(app, json!({"rollout_id": "a"})).await;
        let second = open(app, json!({"rollout_id": "b"})).await;
        open(app, json!({"rollout_id": "c", "policy": "solver"})).await;
        app.post(&path(&first, "/abort"), json!({"reason": "x"})).await.expect(200);
        let listed = async |query: &str| -> Vec<String> {
            let page = app.get(&format!("/sessions{query}")).await.expect(200);
            let sessions = page["sessions"].as_array().expect("a list").clone();
            sessions.iter().map(|session| text(&session["rollout_id"]).to_owned()).collect()
        };
        assert_eq!(listed("").await, ["a", "b"]);
        assert_eq!(listed("?state=open").await, ["b"]);
        assert_eq!(listed("?policy=solver").await, ["c"]);
        let page = app.get("/sessions?limit=1").await.expect(200);
        assert_eq!(listed(&format!("?after={}", text(&page["next"]))).await, ["b"]);
        let shown = session(app, &second).await;
        assert_eq!((&shown["state"], &shown["group_id"], &shown["calls"]), (&json!("open"), &json!("b"), &json!(0)));
        app.get("/sessions?policy=none").await.refused(404, "unknown-policy");
        app.get("/sessions/none").await.refused(404, "not-found");
    }

    async fn rows_of_sessions_go(app: TestApp) {
        app.rules("default", json!({"retention": {"settled_s": 100, "tombstone_s": 1_000, "dropped_s": 0}})).await;
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        finish(app, &opened, 1.0).await;
        app.pass_s(99.0).await;
        assert_eq!(app.get(&path(&opened, "/turns")).await.expect(200)["turns"].as_array().map(Vec::len), Some(1));
        app.pass_s(1.0).await;
        assert_eq!(app.get(&path(&opened, "/turns")).await.expect(200)["turns"], json!([]));
        assert_eq!(finish(app, &opened, 1.0).await["duplicate"], true, "the answer stays");
        assert_eq!(refused(permit(app, &opened).await), Refusal::UnknownSessionKey);
        app.pass_s(1_000.0).await;
        app.get(&path(&opened, "")).await.refused(404, "not-found");
        for table in ["session", "session_policy", "session_key", "session_call", "admission"] {
            assert_eq!(app.read_value(format!("SELECT COUNT(*) FROM {table}")).await, 0, "{table}");
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
        let opened = open(app, json!({"rollout_id": "r", "idle_s": 60})).await;
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
