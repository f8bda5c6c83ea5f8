//! Ids that are chosen to cause errors: in bodies, queries and paths.

use serde_json::{Value, json};

use super::{Raw, unharmed};
use crate::support::{Backend, TestApp, on_both_stores, rollout, text, with};

/// Every byte that is not a letter or digit, encoded as in a query or path.
fn encode(id: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric();
    id.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02x}") })
        .collect::<Vec<_>>()
        .concat()
}

fn odd_but_fit() -> Vec<String> {
    let mut ids: Vec<String> = [
        ".",
        "..",
        "../../etc/passwd",
        "%2F",
        "%00",
        "a/b",
        "a b",
        " ",
        "'",
        "\"",
        "\\",
        "';DROP TABLE rollout;--",
        "${jndi:ldap://x}",
        "<script>",
        "{{7*7}}",
        "\u{1F30A}\u{1F3FD}",
        "\u{202e}abc\u{202c}",
        "\u{5d0}\u{5d1}",
        "e\u{301}",
        "\u{e9}",
        "\u{feff}",
        "\u{200b}",
        "\u{2028}",
        "null",
        "-1",
        "0",
        "NaN",
        "*",
        "?",
        "#",
        "&policy=x",
        "=",
        "+",
        ";",
    ]
    .map(str::to_owned)
    .into();
    // Lengths around the longest id that an index stores unchanged; the ids differ in one byte at some position.
    for length in [79, 80, 81, 256] {
        let alike = |at: usize| format!("{}y{}", "x".repeat(at), "x".repeat(length - at - 1));
        ids.extend([0, 39, 40, length - 25, length - 24, length - 1].map(alike));
        ids.push("x".repeat(length));
    }
    ids.push("\u{e9}".repeat(128));
    ids
}

fn unfit() -> Vec<String> {
    let mut ids: Vec<String> =
        ["", "\0", "a\nb", "\r", "\u{1b}[31m", "\u{7f}", "\u{85}", "\u{9b}31m", "\t"].map(str::to_owned).into();
    ids.push("x".repeat(257));
    ids.push("\u{e9}".repeat(129));
    ids
}

on_both_stores! {
    async fn ids_are_kept_as_they_are_and_never_confused(app: TestApp) {
        let ids = odd_but_fit();
        app.rules("default", json!({"batch": {"groups": ids.len()}})).await;
        for id in &ids {
            let receipt = app.accept(with(rollout(id, 1.0), json!({"group_id": id, "environment": id, "execution_id": id}))).await;
            assert_eq!((&receipt["rollout_id"], &receipt["duplicate"]), (&json!(id), &json!(false)));
        }
        for id in &ids {
            let story = app.get(&format!("/trajectories?rollout_id={}", encode(id))).await.expect(200);
            assert_eq!((text(&story["rollout_id"]), text(&story["execution_id"])), (id.as_str(), id.as_str()));
            let page = app.get(&format!("/trajectories?execution_id={}", encode(id))).await.expect(200);
            let found = page["trajectories"].as_array().expect("a page");
            assert_eq!((found.len(), &found[0]["rollout_id"]), (1, &json!(id)));
            let groups = app.get(&format!("/groups?group_id={}", encode(id))).await.expect(200);
            assert_eq!((groups["groups"].as_array().map(Vec::len), &groups["groups"][0]["group_id"]), (Some(1), &json!(id)));
        }
        let mut delivered = app.group_ids(&app.lease_with(json!({"consumer": "\u{1F30A}", "request_id": "../%00"})).await).await;
        delivered.sort();
        let mut expected = ids;
        expected.sort();
        assert_eq!(delivered, expected);
    }

    async fn unfit_ids_are_refused_wherever_they_stand(app: TestApp) {
        for id in unfit() {
            for field in ["rollout_id", "group_id", "environment", "execution_id", "admission_id", "policy"] {
                let answer = app.post("/trajectories", with(rollout("x", 1.0), json!({field: id}))).await;
                assert_eq!(answer.pointers(422), [format!("/{field}")], "{id:?}");
            }
            for (path, body) in [
                ("/batches", json!({"consumer": id})),
                ("/batches", json!({"request_id": id})),
                ("/batches", json!({"policy": id})),
                ("/admissions", json!({"policy": id, "rollouts": 1})),
                ("/groups/close", json!({"policy": "default", "group_id": id})),
                ("/groups/discard", json!({"policy": "default", "group_id": "g", "reason": id})),
            ] {
                app.post(path, body).await.refused(422, "invalid");
            }
            for query in ["/trajectories?rollout_id=", "/trajectories?group_id=", "/trajectories?execution_id=", "/groups?group_id=", "/groups?policy=", "/policies?after="] {
                app.get(&format!("{query}{}", encode(&id))).await.refused(422, "invalid");
            }
            if !id.is_empty() {
                app.get(&format!("/policies/{}", encode(&id))).await.refused(422, "invalid");
                app.get(&format!("/batches/{}", encode(&id))).await.refused(404, "not-found");
            }
            let component = json!({"reward_components": {(id): 1}});
            assert_eq!(app.post("/trajectories", with(rollout("x", 1.0), component)).await.pointers(422).len(), 1);
        }
        // A label is text from a client too.
        let kind = json!({"segments": [{"kind": "a\u{1b}b", "tokens": [1, 2], "loss_mask": [1]}]});
        assert_eq!(app.post("/trajectories", with(rollout("x", 1.0), kind)).await.pointers(422), ["/segments/0/kind"]);
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["received"], 0);
    }

    async fn a_lease_that_was_never_given_holds_nothing(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let batch = app.lease().await;
        for token in ["", "\0", "' OR 1=1 --", "%", "_", &"x".repeat(100_000)] {
            for call in ["ack", "extend", "nack"] {
                let path = format!("/batches/{}/{call}", text(&batch["batch_id"]));
                let mut body = json!({"lease": token});
                match call {
                    "ack" => body["step"] = 1.into(),
                    "extend" => body["ttl_s"] = 60.into(),
                    _ => {}
                }
                app.post(&path, body).await.refused(409, "lease-lost");
            }
        }
        app.ack(&batch, 1).await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_that_a_path_cannot_name_are_refused() {
    let app = TestApp::start_with(Backend::Sqlite, "auto_create = true").await;
    // Clients and proxies resolve dots in a path before they send it, so such a policy could not be read.
    for name in [".", ".."] {
        let answer = app.post("/trajectories", with(rollout("x", 1.0), json!({"policy": name}))).await;
        assert_eq!(answer.pointers(422), ["/policy"], "{name}");
        app.post("/batches", json!({"policy": name})).await.refused(422, "invalid");
        let body = super::post(&format!("/policies/{name}"), "{}").replacen("POST", "PUT", 1);
        let mut raw = Raw::sending(&app, body).await;
        assert_eq!(raw.answer().await.expect("an answer").status, 422, "{name}");
    }
    for name in ["...", "a.", ".a", "-", "_"] {
        app.accept(with(rollout("x", 1.0), json!({"policy": name}))).await;
        assert_eq!(app.get(&format!("/policies/{name}")).await.expect(200)["policy"], Value::from(name));
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn queries_that_are_not_queries_are_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    app.accept(rollout("a", 1.0)).await;
    for query in [
        "rollout_id=%ff",
        "rollout_id=a&rollout_id=b",
        "limit=0",
        "limit=1001",
        "limit=-1",
        "limit=1e3",
        "limit=99999999999999999999",
        "after=x",
        "after=9223372036854775808",
        "step=1.0",
        "verdict=KEPT",
        "state=",
        "nope=1",
        "%00=1",
        "rollout_id[]=a",
    ] {
        let answer = app.get(&format!("/trajectories?{query}")).await;
        assert!(matches!(answer.status.as_u16(), 400 | 422), "{query}: {} {}", answer.status, answer.json);
    }
    unharmed(app).await;
}
