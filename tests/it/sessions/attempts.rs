//! An agent that died is started again, and goes on in the same session.

use forebay_domain::{refusal::Refusal, states::SessionState};
use serde_json::json;

use super::{A, E, S, T, U, call, finish, open, path, permit, record, refused, segments, session, try_record};
use crate::support::{on_both_stores, text};

on_both_stores! {
    async fn an_idle_session_is_parked_and_can_be_resumed(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r", "idle_s": 60})).await;
        assert_eq!(opened["attempt"], 1);
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        app.pass_s(61.0).await;
        let parked = session(app, &opened).await;
        assert_eq!((&parked["state"], &parked["due_at"]), (&json!("parked"), &parked["expires_at"]));
        let list = app.get("/sessions?state=parked").await.expect(200);
        assert_eq!(list["sessions"][0]["session_id"], opened["session_id"]);
        let why = app.get("/why?id=r").await.expect(200);
        assert_eq!((&why["kind"], &why["state"]), (&json!("session"), &json!("parked")));
        let resumed = app.post(&path(&opened, "/resume"), json!({"attempt": 1})).await.expect(200);
        assert_eq!((&resumed["attempt"], &resumed["session_id"]), (&json!(2), &opened["session_id"]));
        assert_eq!(session(app, &opened).await["state"], "open");
        // The agent that was given up is told so, and what it had under way is not recorded.
        let superseded = Refusal::AttemptSuperseded { attempt: 2, of: 1 };
        assert_eq!(refused(permit(app, &opened).await), superseded);
        record(app, &resumed, call(&[S, U, A, 11, E, T, A], &[12, E])).await;
        assert_eq!(finish(app, &resumed, 1.0).await["assembly"]["dropped"]["abandoned"], 0);
        assert_eq!(segments(app).await.len(), 1);
        app.post(&path(&opened, "/resume"), json!({})).await.refused(409, "session-ended");
    }

    async fn a_call_of_the_attempt_that_was_given_up_is_not_recorded(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let (hung, busy) = (permit(app, &opened).await.expect("open"), permit(app, &opened).await.expect("open"));
        let resumed = app.post(&path(&opened, "/resume"), json!({})).await.expect(200);
        hung.cancelled().await;
        let superseded = Refusal::AttemptSuperseded { attempt: 2, of: 1 };
        assert_eq!(refused(app.buffer.record_call(&busy, call(&[S, U, A], &[11, E])).await), superseded);
        assert_eq!(refused(app.buffer.keep_session(&busy).await), superseded);
        // Its program does not end the session, either.
        app.post(&path(&opened, "/finish"), json!({"reward": 0.0, "attempt": 1})).await.refused(409, "attempt-over");
        app.post(&path(&opened, "/abort"), json!({"reason": "died", "attempt": 1})).await.refused(409, "attempt-over");
        assert_eq!(session(app, &opened).await["state"], "open");
        record(app, &resumed, call(&[S, U, A], &[12, E])).await;
        let finish = json!({"reward": 1.0, "attempt": 2});
        app.post(&path(&opened, "/finish"), finish.clone()).await.expect(200);
        assert_eq!(app.post(&path(&opened, "/finish"), finish).await.expect(200)["duplicate"], true);
    }

    async fn what_the_last_attempt_did_not_use_is_abandoned(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        record(app, &opened, call(&[S, U, A, 11, E, T, A], &[12, E])).await;
        let resumed = app.post(&path(&opened, "/resume"), json!({})).await.expect(200);
        // An attempt without calls gives nothing up: the program may only have had to score what was there.
        let outcomes = async || {
            let turns = app.get(&path(&opened, "/turns")).await.expect(200);
            let turns = turns["turns"].as_array().expect("a list").clone();
            turns.iter().map(|turn| (text(&turn["outcome"]).to_owned(), turn["attempt"].as_u64())).collect::<Vec<_>>()
        };
        let of = |outcome: &str, attempt| (outcome.to_owned(), Some(attempt));
        assert_eq!(outcomes().await, [of("trained", 1), of("trained", 1)]);
        // It goes on behind the first call, which the agent may know from a file.
        record(app, &resumed, call(&[S, U, A, 11, E, T, 5, A], &[13, E])).await;
        assert_eq!(outcomes().await, [of("trained", 1), of("abandoned", 1), of("trained", 2)]);
        let assembly = finish(app, &resumed, 1.0).await["assembly"].clone();
        assert_eq!((&assembly["dropped"]["abandoned"], &assembly["dropped_tokens"]["abandoned"]), (&json!(1), &json!(2)));
        assert_eq!(segments(app).await.len(), 1);
        assert_eq!(app.story("r").await["attempts"], 2);
    }

    async fn a_parked_session_goes_on_with_a_call_of_its_agent(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r", "idle_s": 60, "ttl_s": 1_000})).await;
        app.pass_s(61.0).await;
        assert_eq!(session(app, &opened).await["state"], "parked");
        // A call that is under way keeps it open, although it records nothing.
        drop(permit(app, &opened).await.expect("its agent is there after all"));
        assert_eq!(session(app, &opened).await["state"], "open");
        app.pass_s(61.0).await;
        assert_eq!(session(app, &opened).await["state"], "parked");
        // Whoever repeats its opening gets another key of the same attempt.
        let again = app.post("/sessions", json!({"rollout_id": "r", "idle_s": 60, "ttl_s": 1_000})).await.expect(200);
        assert_eq!((&again["duplicate"], &again["attempt"]), (&json!(true), &json!(1)));
        record(app, &again, call(&[S, U, A], &[11, E])).await;
        app.pass_s(61.0).await;
        // A finish needs no agent.
        assert_eq!(finish(app, &opened, 1.0).await["state"], "finished");
        let late = open(app, json!({"rollout_id": "late", "idle_s": 60, "ttl_s": 100})).await;
        app.pass_s(61.0).await;
        assert_eq!(session(app, &late).await["state"], "parked");
        app.pass_s(60.0).await;
        assert_eq!(session(app, &late).await["state"], "expired");
        assert_eq!(refused(try_record(app, &late, call(&[S], &[1])).await), Refusal::SessionEnded(SessionState::Expired));
    }

    async fn a_session_without_attempts_left_expires(app: TestApp) {
        app.rules("default", json!({"sessions": {"max_attempts": 2}})).await;
        let opened = open(app, json!({"rollout_id": "r", "idle_s": 60})).await;
        // New rules are those of later sessions.
        app.rules("default", json!({"sessions": {"max_attempts": 1}})).await;
        app.post(&path(&opened, "/resume"), json!({"attempt": 2})).await.refused(409, "attempt-over");
        app.post(&path(&opened, "/resume"), json!({})).await.expect(200);
        app.post(&path(&opened, "/resume"), json!({})).await.refused(409, "no-attempts-left");
        app.pass_s(61.0).await;
        assert_eq!(session(app, &opened).await["state"], "expired");
        let single = open(app, json!({"rollout_id": "s", "idle_s": 60})).await;
        app.pass_s(61.0).await;
        assert_eq!(session(app, &single).await["state"], "expired");
    }

    async fn a_parked_session_gives_up_its_room_when_it_is_needed(app: TestApp) {
        app.rules("default", json!({"batch": {"groups": 1}, "staleness": {"max": 0}})).await;
        let lost = open(app, json!({"rollout_id": "lost", "idle_s": 60})).await;
        record(app, &lost, call(&[S, U, A], &[11, E])).await;
        app.pass_s(61.0).await;
        assert_eq!(session(app, &lost).await["state"], "parked");
        // While nobody needs the room, the agent can be started again.
        app.pass_s(600.0).await;
        assert_eq!(session(app, &lost).await["state"], "parked");
        app.post("/sessions", json!({"rollout_id": "next"})).await.refused(429, "no-room");
        app.pass_s(1.0).await;
        assert_eq!(session(app, &lost).await["state"], "expired");
        let next = open(app, json!({"rollout_id": "next"})).await;
        record(app, &next, call(&[S, U, A], &[12, E])).await;
        finish(app, &next, 1.0).await;
        assert_eq!(segments(app).await.len(), 1);
    }

    async fn a_session_keeps_the_state_that_was_saved_last(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let at = format!("{}{}", app.url, path(&opened, "/state"));
        let put = async |query: &str, content: Vec<u8>| {
            let sent = app.http.put(format!("{at}{query}")).body(content).send().await.expect("the service answers");
            (sent.status().as_u16(), sent.json::<serde_json::Value>().await.expect("an answer is JSON"))
        };
        let get = async || {
            let found = app.http.get(&at).send().await.expect("the service answers");
            let call = found.headers().get("forebay-call").map(|call| call.to_str().expect("a number").to_owned());
            (found.status().as_u16(), call, found.bytes().await.expect("the answer ends well").to_vec())
        };
        assert_eq!(get().await.0, 404);
        assert_eq!(put("", b"begun".to_vec()).await.1["call"], 0);
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        let bytes: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
        let (status, saved) = put("?call=1&attempt=1", bytes.clone()).await;
        assert_eq!((status, &saved["call"], &saved["bytes"]), (200, &json!(1), &json!(1 << 20)));
        assert_eq!(get().await, (200, Some("1".to_owned()), bytes));
        assert_eq!(put("", vec![0; (1 << 20) + 1]).await.0, 413);
        assert_eq!(put("?call=2", Vec::new()).await.0, 422);
        app.post(&path(&opened, "/resume"), json!({})).await.expect(200);
        assert_eq!(put("?attempt=1", b"late".to_vec()).await.1["type"], json!("attempt-over"));
        assert_eq!(put("", b"second".to_vec()).await.1["attempt"], 2);
        assert_eq!(get().await.2, b"second");
        finish(app, &opened, 1.0).await;
        assert_eq!(put("", Vec::new()).await.0, 409);
        // It goes with the calls.
        app.pass_s(4_000.0).await;
        assert_eq!(get().await.0, 404);
    }
}
