//! Quotas: what the policies of a team may have together, whatever its keys may do.

use axum::http::Method;
use serde_json::{Value, json};

use crate::support::{Answer, Backend, TestApp, on_both_stores, rollout, text, with};

const GIB: u64 = 1 << 30;

fn backlog(bytes: u64) -> Value {
    json!({"backlog": {"max_bytes": bytes}})
}

async fn open(app: &TestApp, rollout_id: &str, policy: &str) -> Answer {
    app.post("/sessions", json!({"rollout_id": rollout_id, "policy": policy})).await
}

on_both_stores! {
    async fn a_team_has_as_many_policies_as_its_quota_allows(app: TestApp) {
        app.reconfigure("auto_create = true\n[[quota]]\npolicies = ['a.*', 'all-a']\nmax_policies = 2").await;
        app.put("/policies/a.one", json!({})).await.expect(201);
        app.put("/policies/all-a", json!({})).await.expect(201);
        let problem = app.put("/policies/a.three", json!({})).await.refused(409, "over-quota");
        assert!(text(&problem["detail"]).contains("2 policies match `a.*,all-a`"), "{problem}");
        let post = with(rollout("r", 1.0), json!({"policy": "a.three"}));
        app.post("/trajectories", post).await.refused(409, "over-quota");
        app.post("/admissions", json!({"policy": "a.three", "rollouts": 1})).await.refused(409, "over-quota");
        open(app, "r", "a.three").await.refused(409, "over-quota");
        app.get("/policies/a.three").await.refused(404, "unknown-policy");
        // What exists can be changed, and others have no quota.
        app.put("/policies/a.one", json!({"advantage": "rloo"})).await.expect(200);
        app.put("/policies/b.one", json!({})).await.expect(201);
    }

    async fn the_backlogs_of_a_team_are_within_its_quota(app: TestApp) {
        let quota = |bytes: u64| format!("[[quota]]\npolicies = ['a.*']\nmax_backlog_bytes = {bytes}");
        app.reconfigure(&quota(3 * GIB)).await;
        app.put("/policies/a.one", backlog(GIB)).await.expect(201);
        let problem = app.put("/policies/a.two", backlog(2 * GIB + 1)).await.refused(409, "over-quota");
        let detail = text(&problem["detail"]);
        assert!(detail.contains(&format!("may be at most {} here", 2 * GIB)), "{detail}");
        app.put("/policies/a.two", backlog(2 * GIB)).await.expect(201);
        app.put("/policies/other", backlog(9 * GIB)).await.expect(201);
        let raised = backlog(GIB + 1);
        app.put("/policies/a.one", raised.clone()).await.refused(409, "over-quota");
        app.call(Method::PATCH, "/policies/a.one", Some(raised)).await.refused(409, "over-quota");
        let rules = app.get("/policies/a.one").await.expect(200);
        assert_eq!(rules["rules"]["backlog"]["max_bytes"], json!(GIB), "{rules}");
        // An operator who lowers a quota stops no change of another rule.
        app.reconfigure(&quota(GIB)).await;
        app.call(Method::PATCH, "/policies/a.two", Some(json!({"advantage": "rloo"}))).await.expect(200);
        app.put("/policies/a.two", backlog(GIB)).await.expect(200);
        app.put("/policies/a.two", backlog(GIB + 1)).await.refused(409, "over-quota");
    }

    async fn a_team_has_as_many_open_sessions_as_its_quota_allows(app: TestApp) {
        app.reconfigure("auto_create = true\n[[quota]]\npolicies = ['a.*']\nmax_sessions = 2").await;
        let first = open(app, "r1", "a.one").await.expect(201);
        open(app, "r2", "a.two").await.expect(201);
        let problem = open(app, "r3", "a.one").await.refused(429, "no-room");
        assert!(text(&problem["detail"]).contains("2 sessions of policies that match `a.*` are open"), "{problem}");
        app.clock.advance_s(60.0);
        open(app, "r3", "a.one").await.refused(429, "no-room");
        let why = app.get("/policies/a.one/why").await.expect(200);
        assert_eq!(why["state"], "held-back", "{why}");
        assert_eq!(why["headline"], "Agents have waited for 1 min: as many sessions are open as a quota allows");
        open(app, "r3", "other").await.expect(201);
        // A request that is sent again gets its session.
        assert_eq!(open(app, "r1", "a.one").await.expect(200)["duplicate"], json!(true));
        let abort = format!("/sessions/{}/abort", text(&first["session_id"]));
        app.post(&abort, json!({"reason": "failed"})).await.expect(200);
        open(app, "r3", "a.one").await.expect(201);
    }
}

/// Two requests at one moment do not both find the last room.
#[tokio::test]
async fn requests_at_one_moment_share_a_quota() {
    let app = TestApp::start_with(Backend::Postgres, "[[quota]]\npolicies = ['a.*']\nmax_policies = 1").await;
    let names: Vec<String> = (0..8).map(|number| format!("/policies/a.{number}")).collect();
    let answers = futures::future::join_all(names.iter().map(|path| app.put(path, json!({})))).await;
    let created = answers.iter().filter(|answer| answer.status == 201).count();
    assert_eq!(created, 1, "{:?}", answers.iter().map(|answer| answer.status).collect::<Vec<_>>());
    app.finish().await;
}
