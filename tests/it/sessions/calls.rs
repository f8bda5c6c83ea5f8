//! The calls of sessions, and the segments that they become.

use forebay_domain::refusal::Refusal;
use forebay_service::session::record::{CallPermit, NewCall};
use forebay_wire::VersionSpan;
use serde_json::{Value, json};

use super::{
    A, E, N, S, T, U, begin_call, call, finish, open, path, permit, record, refused, segments, session, try_record,
};
use crate::support::{TestApp, on_both_stores, text};

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

/// The receipt says that answers were left out, and why.
#[track_caller]
fn assert_warned(ended: &Value, why: &str) {
    let warnings = ended["receipts"][0]["warnings"].as_array().expect("a list");
    let is_named = |warning: &&Value| text(warning).starts_with("delivered-dropped: ") && text(warning).contains(why);
    assert_eq!(warnings.iter().filter(is_named).count(), 1, "{ended}");
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
            begin_call(&app.buffer, &allowed, digest, count).await.expect("answered").map(|found| (found.call, found.response))
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

    async fn of_equal_calls_whose_answers_were_lost_each_is_answered_once(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let lost = call(&[S, U, A], &[11, E]);
        let mut answers = Vec::new();
        for _ in 0..3 {
            answers.push(try_record(app, &opened, lost.clone()).await.expect("recorded"));
        }
        let repeated = async |permit: &CallPermit| {
            let found = begin_call(&app.buffer, permit, lost.body_digest, 1).await.expect("answered");
            found.map(|found| found.call)
        };
        let permits = [permit(app, &opened).await, permit(app, &opened).await].map(|permit| permit.expect("it is open"));
        // While one of them is being sent, the next one is meant.
        assert_eq!(repeated(&permits[0]).await, Some(answers[0]));
        assert_eq!(repeated(&permits[1]).await, Some(answers[1]));
        app.buffer.mark_delivered(answers[0].call_pk);
        drop(permits);
        let permit = permit(app, &opened).await.expect("it is open");
        assert_eq!(repeated(&permit).await, Some(answers[1]), "the connection was cut once more");
        for answer in answers {
            app.buffer.mark_delivered(answer.call_pk);
        }
        assert_eq!(repeated(&permit).await, None, "an answer that was delivered belongs to another call");
    }

    async fn equal_calls_are_all_trained_unless_their_client_repeated_them(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "game"})).await;
        for (observation, move_) in [(5, 10), (6, 11), (5, 12)] {
            record(app, &opened, call(&[S, U, observation], &[move_, E])).await;
        }
        let ended = finish(app, &opened, 1.0).await;
        assert_eq!((&ended["assembly"]["segments"], &ended["receipts"][0]["warnings"]), (&json!(3), &json!([])));
        let opened = open(app, json!({"rollout_id": "repeated"})).await;
        record(app, &opened, call(&[S, U, A], &[11, E])).await;
        record(app, &opened, NewCall { retry_count: 1, ..call(&[S, U, A], &[12, E]) }).await;
        let ended = finish(app, &opened, 1.0).await;
        assert_eq!((&ended["assembly"]["segments"], &ended["assembly"]["dropped"]["retry"]), (&json!(1), &json!(1)));
        assert_warned(&ended, "its client repeated these calls");
        app.rules("default", json!({"sessions": {"retries": "last"}})).await;
        let opened = open(app, json!({"rollout_id": "last"})).await;
        for id in 10..13 {
            record(app, &opened, call(&[S, U, A], &[id, E])).await;
        }
        assert_warned(&finish(app, &opened, 1.0).await, "that are in no segment (2), because other calls");
    }

    async fn candidates_of_one_prompt_are_trained_if_the_rules_say_so(app: TestApp) {
        for (retries, segments, dropped) in [("last", 1, 2), ("drop", 1, 2), ("keep", 2, 0), ("transport", 2, 0)] {
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
        assert_eq!(refused(begin_call(&app.buffer, &allowed, [0; 32], 0).await), Refusal::SessionFull("calls"));
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

    async fn a_call_without_a_mark_counts_as_delivered_unless_it_was_repeated(app: TestApp) {
        app.rules("default", json!({"sessions": {"retries": "keep"}})).await;
        let lose_marks = async |app: &mut TestApp| {
            app.stop().await;
            // What a process leaves that is killed before it stores what became of its last answers.
            app.tamper("UPDATE session_call SET delivered = 0").await;
            app.restart().await;
        };
        let only = open(app, json!({"rollout_id": "only"})).await;
        record(app, &only, call(&[S, U, A], &[11, E])).await;
        let repeated = open(app, json!({"rollout_id": "repeated"})).await;
        record(app, &repeated, call(&[S, U, A], &[11, E])).await;
        let lost = open(app, json!({"rollout_id": "lost"})).await;
        record(app, &lost, call(&[S, U, A], &[11, E])).await;
        let candidates = open(app, json!({"rollout_id": "candidates"})).await;
        let began = app.buffer.now();
        for id in [11, 12] {
            record(app, &candidates, NewCall { started_at: Some(began), ..call(&[S, U, A], &[id, E]) }).await;
        }
        lose_marks(app).await;
        // The agent sends the same prompt again. Another agent with the same prompt repeats nothing.
        record(app, &repeated, call(&[S, U, A], &[12, E])).await;
        record(app, &repeated, NewCall { agent: Some("helper".to_owned()), ..call(&[S, U, A], &[13, E]) }).await;
        app.clock.advance_s(1.0);
        try_record(app, &lost, call(&[S, U, A], &[14, E])).await.expect("the call is recorded");
        let outcomes = async |session: &Value| {
            let turns = app.get(&path(session, "/turns")).await.expect(200);
            let turns = turns["turns"].as_array().expect("a list").clone();
            let outcome = |turn: &Value| (turn["delivered"] == true, text(&turn["outcome"]).to_owned());
            turns.iter().map(outcome).collect::<Vec<_>>()
        };
        let (trained, undelivered) = ("trained".to_owned(), "undelivered".to_owned());
        assert_eq!(outcomes(&only).await, [(false, trained.clone())]);
        // What is sampled at the same time is no repeat.
        assert_eq!(outcomes(&candidates).await, [(false, trained.clone()), (false, trained.clone())]);
        let expected = [(false, undelivered.clone()), (true, trained.clone()), (true, trained)];
        assert_eq!(outcomes(&repeated).await, expected);
        // The repeated answer was lost as well, and the process knows it.
        assert_eq!(outcomes(&lost).await, [(false, undelivered.clone()), (false, undelivered)]);
        assert_eq!(finish(app, &only, 1.0).await["assembly"]["segments"], 1);
        assert_eq!(finish(app, &repeated, 1.0).await["assembly"]["dropped"]["undelivered"], 1);
        app.post(&path(&lost, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
    }

    async fn an_answer_that_was_lost_stays_lost_after_a_restart(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        try_record(app, &opened, call(&[S, U, A], &[11, E])).await.expect("the call is recorded");
        app.restart().await;
        app.post(&path(&opened, "/finish"), json!({"reward": 1.0})).await.refused(422, "no-turns");
        let sending = permit(app, &opened).await.expect("open");
        let recorded = app.buffer.record_call(&sending, call(&[S, U, A], &[12, E])).await.expect("recorded");
        // The session does not wait for the answer, which counts as lost until it is delivered.
        let finish_path = path(&opened, "/finish");
        app.post(&finish_path, json!({"reward": 1.0, "wait_ms": 0})).await.refused(422, "no-turns");
        app.buffer.mark_delivered(recorded.call_pk);
        drop(sending);
        assert_eq!(finish(app, &opened, 1.0).await["assembly"]["dropped"]["undelivered"], 1);
    }

    async fn a_break_is_shown_where_it_is(app: TestApp) {
        let opened = open(app, json!({"rollout_id": "r"})).await;
        let prompt: Vec<i32> = (100..200).collect();
        record(app, &opened, call(&prompt, &[11, 12, E])).await;
        let drifted: Vec<i32> = prompt.iter().copied().chain([17, E, N]).collect();
        record(app, &opened, call(&drifted, &[13, E])).await;
        let turns = app.get(&path(&opened, "/turns")).await.expect(200);
        assert_eq!(turns["turns"][0].get("break"), None);
        let expected = json!({"nearest": 1, "position": 100, "cause": "unknown", "expected": [11, 12, E], "found": [17, E, N]});
        assert_eq!(turns["turns"][1]["break"], expected);
        assert_eq!(finish(app, &opened, 1.0).await["assembly"]["breaks"], 1);
    }
}
