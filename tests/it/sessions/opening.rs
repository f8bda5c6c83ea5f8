//! Sessions that are opened, called by their keys, listed and deleted.

use std::time::Duration;

use forebay_domain::{refusal::Refusal, states::SessionState};
use forebay_wire::{self as wire, AbortRequest, FinishRequest, Role, SessionFinish, SessionRequest};
use serde_json::json;

use super::{A, E, S, U, call, finish, open, path, permit, record, refused, session};
use crate::support::{member, on_both_stores, rollout, text, with};

on_both_stores! {
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
        app.rules("judged", json!({"advantage": "posted"})).await;
        app.accept(rollout("stored", 1.0)).await;
        app.accept(with(member("g", 0, 1.0), json!({"policy": "pair", "group_size": 3}))).await;
        app.post("/sessions", json!({"policy": "none"})).await.refused(404, "unknown-policy");
        app.post("/sessions", json!({"rollout_id": "stored"})).await.refused(409, "rollout-conflict");
        let sized = json!({"policy": "pair", "group_id": "g", "group_size": 2});
        assert_eq!(app.post("/sessions", sized).await.pointers(409), ["/group_size"]);
        for (request, pointers) in [
            (json!({"policy": "pair"}), vec!["/group_id"]),
            (json!({"policy": "valued"}), vec!["/models"]),
            (json!({"policy": "judged"}), vec!["/models"]),
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
        let refusal: serde_json::Value = full.json().await.expect("it is JSON");
        assert!(text(&refusal["detail"]).contains("staleness.max"), "{refusal}");
        let replacement = open(app, json!({"group_id": "a"})).await;
        // The room of a session that ends is used by its rollout, or given back. The places of its group stay missing.
        app.post(&path(&first, "/abort"), json!({"reason": "test"})).await.expect(200);
        app.post(&path(&replacement, "/abort"), json!({"reason": "test"})).await.expect(200);
        app.post("/sessions", json!({"group_id": "b"})).await.refused(429, "no-room");
        // The session that is left can no longer bring a batch nearer.
        app.post("/groups/close", json!({"group_id": "a"})).await.expect(200);
        open(app, json!({"group_id": "b"})).await;
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
        let abort = AbortRequest { reason: "test".to_owned(), keep: false, attempt: None };
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
}
