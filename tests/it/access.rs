//! Access control: the roles and policies of each key, and the checks before the body is read.

use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::{Backend, TestApp, on_both_stores, rollout, text, with};

/// Id of a batch or key that does not exist.
const NOBODY: &str = "0197d000-0000-7000-8000-000000000000";

/// Which roles may make each call, as documented. P produce, T train, R read, A admin; `-` needs no key.
const PROMISED: [(&str, &str); 65] = [
    ("POST /admissions", "PA"),
    ("POST /trajectories", "PA"),
    ("POST /imports/{format}", "PA"),
    ("POST /media", "PA"),
    ("PUT /media/{digest}", "PA"),
    ("POST /columns", "PA"),
    ("PUT /columns/{digest}", "PA"),
    ("GET /media/{digest}", "PSTRA"),
    ("GET /trajectories", "PSRA"),
    ("POST /sessions", "PA"),
    ("POST /scores", "PSA"),
    ("POST /scores/leases", "SA"),
    ("POST /scores/leases/extend", "SA"),
    ("POST /scores/retry", "SA"),
    ("GET /scores", "PSRA"),
    ("GET /sessions", "PRA"),
    ("GET /sessions/{id}", "PRA"),
    ("GET /sessions/{id}/turns", "PRA"),
    ("POST /sessions/{id}/resume", "PA"),
    ("PUT /sessions/{id}/state", "PA"),
    ("GET /sessions/{id}/state", "PA"),
    ("POST /sessions/{id}/finish", "PA"),
    ("POST /sessions/{id}/abort", "PA"),
    ("POST /sessions/finish", "PA"),
    ("GET /groups", "PSRA"),
    ("POST /groups/close", "A"),
    ("POST /groups/discard", "A"),
    ("POST /batches", "TA"),
    ("GET /batches", "TRA"),
    ("GET /batches/{id}", "TRA"),
    ("GET /batches/{id}/samples", "TRA"),
    ("POST /batches/{id}/extend", "TA"),
    ("POST /batches/{id}/ack", "TA"),
    ("POST /batches/{id}/nack", "TA"),
    ("POST /batches/{id}/readmit", "A"),
    ("GET /policies", "PSTRA"),
    ("GET /policies/{policy}", "PSTRA"),
    ("PUT /policies/{policy}", "A"),
    ("PATCH /policies/{policy}", "A"),
    ("PUT /policies/{policy}/version", "TA"),
    ("PUT /policies/{policy}/suites/{suite}", "PTA"),
    ("GET /policies/{policy}/evals", "PSTRA"),
    ("GET /policies/{policy}/suites/{suite}/tasks", "PSTRA"),
    ("POST /policies/{policy}/checkpoints", "TA"),
    ("POST /policies/{policy}/resume", "TA"),
    ("POST /policies/{policy}/reset", "A"),
    ("GET /keys", "A"),
    ("POST /keys", "A"),
    ("DELETE /keys/{id}", "A"),
    ("GET /trajectories/content", "SRA"),
    ("GET /overview", "PSTRA"),
    ("GET /policies/{policy}/why", "PSTRA"),
    ("GET /why", "PSTRA"),
    ("GET /policies/{policy}/series", "TRA"),
    ("GET /policies/{policy}/steps", "TRA"),
    ("GET /policies/{policy}/journal", "TRA"),
    ("GET /policies/{policy}/tokenizer", "RA"),
    ("POST /policies/{policy}/filters/try", "RA"),
    ("GET /filters/variables", "PSTRA"),
    ("GET /whoami", "PSTRA"),
    ("GET /exports", "RA"),
    ("GET /stats", "RA"),
    ("GET /metrics", "RA"),
    ("GET /healthz", "-"),
    ("GET /readyz", "-"),
];

/// Every documented call, and `/metrics`.
fn calls() -> Vec<String> {
    let document: Value = serde_json::from_str(&forebay_api::openapi()).expect("it is JSON");
    let mut calls = vec!["GET /metrics".to_owned()];
    for (path, verbs) in document["paths"].as_object().expect("it has paths") {
        let verbs = verbs.as_object().expect("a path has verbs").keys();
        calls.extend(verbs.map(|verb| format!("{} {path}", verb.to_uppercase())));
    }
    calls
}

/// A policy with one leased batch.
async fn policy_with_batch(app: &TestApp, admin: &str, policy: &str) -> Value {
    app.call_as(admin, Method::PUT, &format!("/policies/{policy}"), Some(json!({}))).await.expect(201);
    let posted = with(rollout(&format!("{policy}-0"), 1.0), json!({"policy": policy}));
    app.post_as(admin, "/trajectories", posted).await.expect(201);
    app.post_as(admin, "/batches", json!({"policy": policy})).await.expect(201)
}

/// A problem without the fields that differ between any two requests.
fn anonymous(mut problem: Value, policy: &str) -> String {
    problem["instance"] = Value::Null;
    problem.to_string().replace(policy, "POLICY")
}

on_both_stores! {
    async fn every_call_is_for_the_roles_that_are_promised(app: TestApp) {
        let mut keys = Vec::new();
        for role in Role::ALL {
            keys.push((role, app.key(role, &["*"]).await));
        }
        let calls = calls();
        assert_eq!(calls.len(), PROMISED.len(), "every call has a promise");
        for call in calls {
            let promise = PROMISED.iter().find(|(promised, _)| *promised == call);
            let roles = promise.unwrap_or_else(|| panic!("nobody has promised who may {call}")).1;
            let (method, path) = call.split_once(' ').expect("method and path");
            let path = path.replace("{id}", NOBODY).replace("{policy}", "default").replace("{format}", "chat");
            let method: Method = method.parse().expect("it is a method");
            let body = matches!(method, Method::POST | Method::PUT | Method::PATCH).then(|| json!({}));
            let unknown = app.call(method.clone(), &path, body.clone()).await;
            if roles == "-" {
                unknown.expect(200);
                continue;
            }
            unknown.refused(401, "unauthorized");
            for (role, key) in &keys {
                let answer = app.call_as(key, method.clone(), &path, body.clone()).await;
                let initial = role.as_str()[..1].to_uppercase();
                if roles.contains(&initial) {
                    assert!(!matches!(answer.status.as_u16(), 401 | 403 | 405 | 500), "{role} {call}: {answer:?}");
                } else {
                    assert_eq!((answer.status.as_u16(), text(&answer.json["type"])), (403, "forbidden"), "{role} {call}");
                }
            }
        }
    }

    async fn a_policy_that_a_key_does_not_see_does_not_exist_for_it(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let (seen, hidden) = ("math.solver", "code.solver");
        let seen_batch = policy_with_batch(app, &admin, seen).await;
        let hidden_batch = policy_with_batch(app, &admin, hidden).await;
        let read = app.key(Role::Read, &["math.*"]).await;
        let train = app.key(Role::Train, &["math.*"]).await;
        let operate = app.key(Role::Admin, &["math.*"]).await;

        // Calls that name a policy.
        let gets = ["/policies/{p}", "/policies/{p}?wait_version_above=0", "/batches?policy={p}", "/groups?policy={p}",
            "/sessions?policy={p}", "/trajectories?policy={p}", "/trajectories?policy={p}&rollout_id=code.solver-0"];
        for path in gets {
            let visible = path.replace("{p}", seen).replace("code.solver-0", "math.solver-0");
            assert!(app.get_as(&read, &visible).await.status.is_success(), "{visible}");
            let refused = app.get_as(&read, &path.replace("{p}", hidden)).await.refused(404, "unknown-policy");
            let absent = app.get_as(&admin, &path.replace("{p}", "code.absent")).await.refused(404, "unknown-policy");
            assert_eq!(anonymous(refused, hidden), anonymous(absent, "code.absent"), "{path}");
        }
        let changes = [
            (&train, "/batches", json!({"policy": hidden})),
            (&train, "/policies/code.solver/resume", json!({})),
            (&train, "/policies/code.solver/checkpoints", json!({"step": 1})),
            (&operate, "/policies/code.solver/reset", json!({})),
            (&operate, "/groups/close", json!({"policy": hidden, "group_id": "code.solver-0"})),
            (&operate, "/groups/discard", json!({"policy": hidden, "group_id": "code.solver-0", "reason": "x"})),
        ];
        for (key, path, body) in changes {
            app.post_as(key, path, body).await.refused(404, "unknown-policy");
        }
        let version = json!({"version": 7});
        let path = "/policies/code.solver/version";
        app.call_as(&train, Method::PUT, path, Some(version)).await.refused(404, "unknown-policy");
        let rules = Some(json!({}));
        app.call_as(&operate, Method::PUT, "/policies/code.new", rules.clone()).await.refused(404, "unknown-policy");
        app.call_as(&operate, Method::PUT, "/policies/math.new", rules).await.expect(201);

        // Calls that name a batch.
        let (hidden_id, seen_id) = (text(&hidden_batch["batch_id"]), text(&seen_batch["batch_id"]));
        app.get_as(&read, &format!("/batches/{seen_id}")).await.expect(200);
        for path in ["/batches/B", "/batches/B/samples"] {
            let refused = app.get_as(&read, &path.replace('B', hidden_id)).await.refused(404, "not-found");
            let absent = app.get_as(&read, &path.replace('B', NOBODY)).await.refused(404, "not-found");
            assert_eq!(anonymous(refused, "-"), anonymous(absent, "-"), "{path}");
        }
        let lease = &hidden_batch["lease"];
        for (verb, body) in [
            ("extend", json!({"lease": lease, "ttl_s": 60})),
            ("ack", json!({"lease": lease, "step": 1})),
            ("nack", json!({"lease": lease})),
        ] {
            app.post_as(&train, &format!("/batches/{hidden_id}/{verb}"), body).await.refused(404, "not-found");
        }
        let readmit = format!("/batches/{hidden_id}/readmit");
        app.call_as(&operate, Method::POST, &readmit, None).await.refused(404, "not-found");

        // Calls that name a session.
        let produce = app.key(Role::Produce, &["math.*"]).await;
        app.post_as(&produce, "/sessions", json!({"policy": hidden})).await.refused(404, "unknown-policy");
        app.post_as(&produce, "/sessions", json!({"policy": seen})).await.expect(201);
        let hidden_session = app.post_as(&admin, "/sessions", json!({"policy": hidden})).await.expect(201);
        let hidden_session = text(&hidden_session["session_id"]);
        for path in ["/sessions/S", "/sessions/S/turns"] {
            let refused = app.get_as(&read, &path.replace('S', hidden_session)).await.refused(404, "not-found");
            let absent = app.get_as(&read, &path.replace('S', NOBODY)).await.refused(404, "not-found");
            assert_eq!(anonymous(refused, "-"), anonymous(absent, "-"), "{path}");
        }
        let reason = json!({"reason": "x"});
        for (verb, body) in [("finish", json!({"reward": 1.0})), ("abort", reason), ("resume", json!({}))] {
            let path = format!("/sessions/{hidden_session}/{verb}");
            app.post_as(&produce, &path, body).await.refused(404, "not-found");
        }
        let of_session = format!("/sessions/{hidden_session}/state");
        app.call_as(&produce, Method::PUT, &of_session, Some(json!({}))).await.refused(404, "not-found");
        app.get_as(&produce, &of_session).await.refused(404, "not-found");
        let finishes = json!([{"session_id": hidden_session, "reward": 1.0}]);
        app.post_as(&produce, "/sessions/finish", finishes).await.refused(404, "not-found");

        // Lists.
        let listed = app.get_as(&read, "/policies?limit=2").await.expect(200);
        let names: Vec<_> = listed["policies"].as_array().expect("a list").iter().map(|p| text(&p["policy"])).collect();
        assert_eq!(names, ["math.new", "math.solver"]);
        let stats = app.get_as(&read, "/stats").await.expect(200);
        let names: Vec<_> = stats["policies"].as_object().expect("by name").keys().cloned().collect();
        assert_eq!(names, ["math.new", "math.solver"]);
        app.get_as(&read, "/metrics").await.refused(403, "forbidden");
        app.get_as(&operate, "/keys").await.refused(403, "forbidden");
        // None of these calls has changed the hidden policy.
        let batch = app.get_as(&admin, &format!("/batches/{hidden_id}")).await.expect(200);
        assert_eq!(batch["state"], "leased");
        let session = app.get_as(&admin, &format!("/sessions/{hidden_session}")).await.expect(200);
        assert_eq!(session["state"], "open");
    }

    async fn trajectories_of_a_policy_that_a_key_does_not_see_are_not_stored(app: TestApp) {
        app.reconfigure("auto_create = true").await;
        let admin = app.key(Role::Admin, &["*"]).await;
        let agent = app.key(Role::Produce, &["math.*"]).await;
        let of = |policy: &str, id: &str| with(rollout(id, 1.0), json!({"policy": policy}));
        app.post_as(&agent, "/trajectories", of("code.a", "1")).await.refused(404, "unknown-policy");
        app.post_as(&agent, "/trajectories", rollout("2", 1.0)).await.refused(404, "unknown-policy");
        let bundle = json!([of("math.a", "3"), of("code.a", "3")]);
        app.post_as(&agent, "/trajectories", bundle).await.refused(404, "unknown-policy");
        let lines = format!("{}\n{}\n", of("code.a", "4"), of("math.a", "4"));
        let request = app.http.post(format!("{}/trajectories", app.url)).bearer_auth(&agent);
        let request = request.header("content-type", "application/x-ndjson").body(lines);
        let answer = request.send().await.expect("the server answers").text().await.expect("text");
        let lines: Vec<Value> = answer.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
        assert_eq!((&lines[0]["status"], &lines[0]["problem"]["type"]), (&json!(404), &json!("unknown-policy")));
        assert_eq!(lines[1]["status"], 201);
        let stats = app.get_as(&admin, "/stats").await.expect(200);
        let received: Vec<_> = stats["policies"].as_object().expect("by name").iter()
            .map(|(name, stats)| (name.as_str(), stats["received"].as_i64())).collect();
        assert_eq!(received, [("default", Some(0)), ("math.a", Some(1))], "code.a was not even created");
    }

    async fn a_revoked_key_is_refused_from_then_on(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let request = json!({"name": "agents", "role": "produce", "policies": ["default"]});
        let created = app.post_as(&admin, "/keys", request).await.expect(201);
        let (agent, id) = (text(&created["key"]), text(&created["info"]["key_id"]));
        app.post_as(agent, "/trajectories", rollout("a", 1.0)).await.expect(201);
        let path = format!("/keys/{id}");
        app.call_as(&admin, Method::DELETE, &path, None).await.expect(200);
        app.post_as(agent, "/trajectories", rollout("b", 1.0)).await.refused(401, "unauthorized");
        let again = app.call_as(&admin, Method::DELETE, &path, None).await.expect(200);
        assert!(again["revoked_at"].is_string());
        app.call_as(&admin, Method::DELETE, "/keys/0123456789ab", None).await.refused(404, "not-found");
        // The key stays refused when the service starts again.
        app.restart().await;
        app.post_as(agent, "/trajectories", rollout("b", 1.0)).await.refused(401, "unauthorized");
    }

    async fn when_a_key_was_last_used_is_visible(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let agent = app.key(Role::Produce, &["*"]).await;
        let last_used = |keys: &Value| keys["keys"][1]["last_used_at"].clone();
        assert_eq!(last_used(&app.get_as(&admin, "/keys").await.expect(200)), Value::Null);
        app.clock.advance_s(60.0);
        app.get_as(&agent, "/policies/default").await.expect(200);
        app.clock.advance_s(60.0);
        let keys = app.get_as(&admin, "/keys").await.expect(200);
        assert_eq!(last_used(&keys), "2026-01-01T00:01:00.000000Z");
        // The time of last use is stored even if nobody asked for it before the process ended.
        app.get_as(&agent, "/policies/default").await.expect(200);
        app.restart().await;
        assert_eq!(last_used(&app.get_as(&admin, "/keys").await.expect(200)), "2026-01-01T00:02:00.000000Z");
    }

    async fn an_expired_key_is_refused_and_leaves_the_service_closed(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        let request = json!({"name": "n", "role": "admin", "expires_in_s": 60});
        let created = app.post_as(&admin, "/keys", request).await.expect(201);
        let id = text(&app.get_as(&admin, "/keys").await.expect(200)["keys"][0]["key_id"]).to_owned();
        let short = text(&created["key"]);
        app.call_as(short, Method::DELETE, &format!("/keys/{id}"), None).await.expect(200);
        app.clock.advance_s(60.0);
        app.get_as(short, "/policies").await.refused(401, "unauthorized");
        app.get("/policies").await.refused(401, "unauthorized");
    }

    async fn the_first_key_closes_the_service_and_must_be_an_operators(app: TestApp) {
        app.post("/keys", json!({"name": "agents", "role": "produce"})).await.refused(409, "first-key");
        app.post("/keys", json!({"name": "n", "role": "admin", "policies": ["math.*"]})).await.refused(409, "first-key");
        app.get("/policies").await.expect(200);
        let created = app.post("/keys", json!({"name": "n", "role": "admin"})).await.expect(201);
        app.get("/policies").await.refused(401, "unauthorized");
        app.get_as(text(&created["key"]), "/policies").await.expect(200);
    }

    async fn a_caller_learns_what_its_key_may_do(app: TestApp) {
        let open = app.get("/whoami").await.expect(200);
        let everything = json!({"role": "admin", "policies": ["*"], "key_id": null, "name": null, "keys_required": false,
            "version": env!("CARGO_PKG_VERSION"), "at": "2026-01-01T00:00:00.000000Z"});
        assert_eq!(open, everything);
        let admin = app.key(Role::Admin, &["*"]).await;
        let request = json!({"name": "dashboards", "role": "read", "policies": ["math.*", "default"]});
        let created = app.post_as(&admin, "/keys", request).await.expect(201);
        let (key, id) = (text(&created["key"]), text(&created["info"]["key_id"]));
        let read = app.get_as(key, "/whoami").await.expect(200);
        assert_eq!(read["role"], "read");
        assert_eq!(read["policies"], json!(["math.*", "default"]));
        assert_eq!((text(&read["key_id"]), text(&read["name"])), (id, "dashboards"));
        assert_eq!(read["keys_required"], true);
        app.call_as(&admin, Method::DELETE, &format!("/keys/{id}"), None).await.expect(200);
        for refused in [app.get_as(key, "/whoami").await, app.get("/whoami").await] {
            refused.refused(401, "unauthorized");
        }
    }

    async fn a_key_of_another_id_or_secret_is_refused(app: TestApp) {
        let one = app.key(Role::Admin, &["*"]).await;
        let other = app.key(Role::Admin, &["*"]).await;
        for key in [
            format!("{}{}", &one[..16], &other[16..]),
            format!("{}0", &one[..one.len() - 1]),
            format!("fb_0123456789ab{}", &one[15..]),
            one[3..].to_owned(),
            String::new(),
        ] {
            // The last digit may have been a zero already.
            if key != one {
                app.get_as(&key, "/policies").await.refused(401, "unauthorized");
            }
        }
        let twice = app.http.get(format!("{}/policies", app.url)).bearer_auth(&one).bearer_auth(&other);
        assert_eq!(twice.send().await.expect("the server answers").status(), 401);
    }

    async fn a_waiter_gets_nothing_once_its_key_is_revoked_or_has_expired(app: TestApp) {
        let admin = app.key(Role::Admin, &["*"]).await;
        for revokes in [true, false] {
            let request = json!({"name": "trainer", "role": "train", "expires_in_s": 60});
            let key = app.post_as(&admin, "/keys", request).await.expect(201);
            let secret = text(&key["key"]).to_owned();
            let batch = app.post_as(&secret, "/batches", json!({"wait_ms": 60_000}));
            let version = app.get_as(&secret, "/policies/default?wait_version_above=0&wait_ms=60000");
            let acting = async {
                crate::support::eventually("two waiters", || async {
                    app.metrics_as_admin().await.contains("forebay_waiters 2")
                }).await;
                if revokes {
                    let path = format!("/keys/{}", &secret[3..15]);
                    app.call_as(&admin, Method::DELETE, &path, None).await.expect(200);
                } else {
                    app.clock.advance_s(61.0);
                }
                app.post_as(&admin, "/trajectories", rollout(&format!("r{revokes}"), 1.0)).await.expect(201);
            };
            let (batch, version, ()) = tokio::join!(batch, version, acting);
            batch.refused(401, "unauthorized");
            version.refused(401, "unauthorized");
            let batch = app.post_as(&admin, "/batches", json!({})).await.expect(201);
            assert_eq!(batch["attempt"], 1, "nobody else had it");
        }
    }

    async fn the_database_holds_no_secret(app: TestApp) {
        let key = app.key(Role::Admin, &["*"]).await;
        let (id, secret) = (&key[3..15], &key[16..]);
        let mut stored = Vec::new();
        if let Some(path) = app.database.strip_prefix("sqlite:") {
            for suffix in ["", "-wal"] {
                stored.extend(std::fs::read(format!("{path}{suffix}")).unwrap_or_default());
            }
        } else {
            use sqlx::Connection as _;
            let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
            let rows: Vec<String> = sqlx::query_scalar("SELECT access_key::text FROM access_key")
                .fetch_all(&mut connection).await.expect("the table is there");
            stored.extend(rows.concat().into_bytes());
        }
        let holds = |what: &[u8]| stored.windows(what.len()).any(|window| window == what);
        assert!(holds(id.as_bytes()), "the key is stored");
        assert!(!holds(secret.as_bytes()), "its secret is not");
        let raw: Vec<u8> = (0..32).map(|i| u8::from_str_radix(&secret[2 * i..2 * i + 2], 16).expect("hex")).collect();
        assert!(!holds(&raw), "nor in bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_another_replica_created_is_known_at_once_and_one_that_it_revokes_is_refused() {
    let app = TestApp::start(Backend::Postgres).await;
    let other = app.replica().await;
    let admin = app.key(Role::Admin, &["*"]).await;
    other.keyring.reload().await.expect("the store can be read");
    for _ in 0..5 {
        let new = app.key(Role::Produce, &["*"]).await;
        other.get_as(&new, "/policies").await.expect(200);
        let mut forged = new.clone();
        forged.replace_range(new.len() - 1.., if new.ends_with('0') { "1" } else { "0" });
        other.get_as(&forged, "/policies").await.expect(401);
        // The time of the answer must not tell that the key exists, so the keys are read for its wrong secret, too.
        assert!(other.keyring.is_unknown(Some(&forged)) && !other.keyring.is_unknown(Some(&new)));
    }
    let agent = app.key(Role::Produce, &["*"]).await;
    let ask = || async { other.get_as(&agent, "/policies").await.status.as_u16() };
    assert_eq!(ask().await, 200);
    app.call_as(&admin, Method::DELETE, &format!("/keys/{}", &agent[3..15]), None).await.expect(200);
    crate::support::eventually("the revocation", || async { ask().await == 401 }).await;
    other.finish().await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_sent_without_waiting_for_the_body() {
    let app = TestApp::start(Backend::Sqlite).await;
    let _closed = app.key(Role::Admin, &["*"]).await;
    let agent = app.key(Role::Train, &["*"]).await;
    for (authorization, status) in [(String::new(), "401"), (format!("authorization: Bearer {agent}\r\n"), "403")] {
        let address = app.url.trim_start_matches("http://");
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("the server accepts");
        let head = format!(
            "POST /trajectories HTTP/1.1\r\nhost: localhost\r\n{authorization}content-type: application/json\r\n\
             expect: 100-continue\r\ncontent-length: 1000000\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.expect("the head is sent");
        let mut answer = vec![0; 12];
        let read = tokio::time::timeout(std::time::Duration::from_secs(10), stream.read_exact(&mut answer));
        read.await.expect("nobody waits for the body").expect("the server answers");
        assert_eq!(String::from_utf8_lossy(&answer), format!("HTTP/1.1 {status}"));
    }
    assert!(app.metrics_as_admin().await.contains("forebay_body_bytes_in_flight 0"));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_that_rebinds_its_host_name_to_the_service_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let ask = |host: &'static str, path: &str| {
        let request = app.http.get(format!("{}{path}", app.url)).header("host", host);
        async move { request.send().await.expect("the server answers").status().as_u16() }
    };
    assert_eq!(ask("localhost:1234", "/policies").await, 200);
    assert_eq!(ask("evil.example", "/policies").await, 421);
    assert_eq!(ask("evil.example", "/healthz").await, 200, "a probe may use any name");
    // With keys, a page without one is refused whatever host name it uses.
    let key = app.key(Role::Read, &["*"]).await;
    assert_eq!(ask("evil.example", "/policies").await, 401);
    let request = app.http.get(format!("{}/policies", app.url)).header("host", "forebay.example").bearer_auth(key);
    assert_eq!(request.send().await.expect("the server answers").status(), 200);
    app.finish().await;

    let app = TestApp::start_with(Backend::Sqlite, "[access]\nhosts = ['forebay.example']").await;
    let request = app.http.get(format!("{}/policies", app.url)).header("host", "forebay.example:80");
    assert_eq!(request.send().await.expect("the server answers").status(), 200);
    // Prometheus names a replica by its address. That takes a key, so it is refused while there is none.
    let scrape = |path: &str| app.http.get(format!("{}{path}", app.url)).header("host", "10.0.0.7:8080");
    assert_eq!(scrape("/metrics").send().await.expect("the server answers").status(), 421);
    let key = app.key(Role::Read, &["*"]).await;
    for (request, status) in [
        (scrape("/metrics"), 401),
        (scrape("/metrics").bearer_auth(&key), 200),
        (scrape("/policies").bearer_auth(&key), 421),
    ] {
        assert_eq!(request.send().await.expect("the server answers").status(), status);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_of_another_origin_cannot_post() {
    let app = TestApp::start(Backend::Sqlite).await;
    let post = |headers: &'static [(&'static str, &'static str)], path: &str| {
        let request = app.http.post(format!("{}{path}", app.url));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        async move { request.send().await.expect("the server answers").status().as_u16() }
    };
    assert_eq!(post(&[("origin", "http://evil.example")], "/policies/default/reset").await, 403);
    assert_eq!(post(&[("origin", "null")], "/policies/default/reset").await, 403);
    assert_eq!(
        post(&[("content-type", "application/x-www-form-urlencoded")], "/policies/default/reset").await,
        415,
        "an empty form is a form"
    );
    assert_eq!(post(&[("content-type", "text/plain")], "/trajectories").await, 415);
    assert_eq!(post(&[], "/trajectories").await, 415);
    assert_eq!(post(&[], "/policies/default/reset").await, 200);
    let same = app.url.clone();
    let request = app.http.post(format!("{}/policies/default/reset", app.url)).header("origin", same);
    assert_eq!(request.send().await.expect("the server answers").status(), 200);
    let answer = app.http.request(Method::OPTIONS, format!("{}/trajectories", app.url)).send().await;
    let answer = answer.expect("the server answers");
    assert!(!answer.headers().keys().any(|name| name.as_str().starts_with("access-control")), "{answer:?}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_callers_are_counted_and_told_how_to_authenticate() {
    let app = TestApp::start_with(Backend::Sqlite, "[access]\nrequired = true").await;
    let answer = app.http.get(format!("{}/policies", app.url)).send().await.expect("the server answers");
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["www-authenticate"]),
        (401, &"Bearer realm=\"forebay\"".parse().expect("a header"))
    );
    app.get_as("fb_nonsense", "/policies").await.refused(401, "unauthorized");
    app.get_as("fb_nonsense", "/no-such-route").await.refused(401, "unauthorized");
    let metrics = app.metrics_as_admin().await;
    assert!(metrics.contains("forebay_auth_failures_total{reason=\"missing\"} 1"), "{metrics}");
    assert!(metrics.contains("forebay_auth_failures_total{reason=\"invalid\"} 2"), "{metrics}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_may_load_only_their_own_files_and_answers_are_not_kept() {
    let app = TestApp::start(Backend::Sqlite).await;
    let page = app.http.get(format!("{}/docs/", app.url)).send().await.expect("the server answers");
    let policy = page.headers()["content-security-policy"].to_str().expect("text").to_owned();
    assert!(policy.contains("default-src 'self'") && policy.contains("frame-ancestors 'none'"), "{policy}");
    let html = page.text().await.expect("the page is text");
    // The content security policy forbids inline scripts, so the page must have none.
    for script in html.split("<script").skip(1) {
        assert!(script.trim_start().starts_with("src="), "{script}");
    }
    let answer = app.http.get(format!("{}/policies", app.url)).send().await.expect("the server answers");
    for (name, value) in [
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
        ("content-security-policy", "default-src 'none'; frame-ancestors 'none'"),
        ("x-frame-options", "DENY"),
        ("referrer-policy", "no-referrer"),
    ] {
        assert_eq!(answer.headers()[name], value);
    }
    app.finish().await;
}
