//! Teachers score the segments of finished sessions. The teacher is a fake engine whose distribution is sharper than that
//! of the engine that samples, so each score is checked against the teacher's own function of the true context.

use std::sync::Arc;

use forebay_fake_engine::{Answer, EngineKind, FakeEngine, LogprobFault, model::logprob};
use serde_json::{Value, json};

use super::{Agent, Dialect, check_row, metric};
use crate::support::{Backend, TestApp, rollout, text};

const BACKENDS: [Backend; 2] = [Backend::Sqlite, Backend::Postgres];

/// How much sharper the teacher is.
const SHARPNESS: f64 = 1.7;

/// Far above what any test needs.
const EVERY_CALL: u32 = 1_000_000;

/// A service with an engine that samples and a teacher, which the default policy has and requires.
struct Class {
    app: TestApp,
    student: FakeEngine,
    teacher: Arc<FakeEngine>,
}

impl Class {
    async fn start(backend: Backend, kind: EngineKind) -> Self {
        let (student, teacher) = (FakeEngine::start(EngineKind::Sglang).await, FakeEngine::start(kind).await);
        teacher.switch(|switches| switches.sharpness = SHARPNESS);
        let config = format!(
            "[[upstream]]\nname = 'student'\nkind = 'sglang'\nurls = ['{}']\n\
             [[upstream]]\nname = 'teacher'\nkind = '{}'\nurls = ['{}']\npolicies = []\n\
             [policy_defaults]\nrequire = ['tokens', 'logprobs', 'teacher_logprobs']\n\
             sessions = {{ teacher = 'teacher' }}\n",
            student.url(),
            if kind == EngineKind::Vllm { "vllm" } else { "sglang" },
            teacher.url()
        );
        Self { app: TestApp::start_with(backend, &config).await, student, teacher: Arc::new(teacher) }
    }

    /// An agent whose session has two segments, because its first answer drifts, and tokens that are not trained.
    async fn agent(&self, request: Value) -> Agent {
        let first = Answer::text("The tokens of this answer drift.").in_bytes();
        self.student.script("Drift", [first, Answer::text("Second."), Answer::text("Third.")]);
        let agent = Agent::open(&self.app, request).await;
        agent.talk(Dialect::Chat, false, 3, "Drift").await;
        agent
    }

    /// How many sequences the teacher was asked to score behind what probes ask.
    fn asked(&self) -> usize {
        let log = self.teacher.log();
        let calls = log.at("/generate").chain(log.at("/v1/completions"));
        calls.filter(|call| !call.text.contains("forebay-probe")).count()
    }

    /// Leases the next batch, checks its scores, and returns the number of rows.
    async fn check_scores(&self, temperature: f64) -> usize {
        let batch = self.app.lease().await;
        let rows = self.app.samples(&batch).await;
        for row in &rows {
            check_row(row, temperature);
            check_scores(row, temperature / SHARPNESS);
        }
        rows.len()
    }

    async fn state(&self, agent: &Agent) -> String {
        let session = self.app.get(&format!("/sessions/{}", agent.id())).await.expect(200);
        text(&session["state"]).to_owned()
    }
}

/// Checks the scores of a row: the teacher's for what is trained, and 0 for all else.
fn check_scores(row: &Value, temperature: f64) {
    let list = |name: &str| row[name].as_array().unwrap_or_else(|| panic!("{name} is missing in {row}"));
    let tokens: Vec<i32> = list("tokens").iter().map(|id| id.as_i64().expect("an id") as i32).collect();
    let (mask, scores) = (list("loss_mask"), list("teacher_logprobs"));
    assert_eq!(mask.len(), scores.len());
    let prompt = tokens.len() - mask.len();
    for (place, (bit, score)) in mask.iter().zip(scores).enumerate() {
        let at = prompt + place;
        let expected = if *bit == 1 { logprob(&tokens[..at], tokens[at], temperature) } else { 0.0 };
        let score = score.as_f64().expect("a number");
        assert!((score - f64::from(expected)).abs() < 1e-5, "token {at} has {score} instead of {expected}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_finish_fills_in_what_the_teacher_says_about_every_trained_token() {
    for backend in BACKENDS {
        for kind in [EngineKind::Sglang, EngineKind::Vllm] {
            let class = Class::start(backend, kind).await;
            let agent = class.agent(json!({"sampling": {"temperature": 0.7}})).await;
            assert_eq!(class.asked(), 0, "nothing is scored before the finish");
            agent.finish(&class.app, 1.0).await;
            assert_eq!(class.check_scores(0.7).await, 2);
            assert_eq!(class.asked(), 2, "once for each segment");
            let scored = "forebay_teacher_rollouts_total{outcome=\"scored\",policy=\"default\"}";
            assert_eq!(metric(&class.app, scored).await, Some(1.0));
            assert_eq!(metric(&class.app, "forebay_teacher_seconds_count{policy=\"default\"}").await, Some(1.0));
            let again = agent.finish(&class.app, 1.0).await;
            assert_eq!(again["duplicate"], true);
            assert_eq!(class.asked(), 2, "a repeated finish is not scored again");
            class.app.finish().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_teacher_fails_goes_on_and_its_finish_may_be_repeated() {
    for backend in BACKENDS {
        let class = Class::start(backend, EngineKind::Sglang).await;
        let agent = class.agent(json!({})).await;
        let path = format!("/sessions/{}/finish", agent.id());
        let faults: [fn(&mut forebay_fake_engine::Switches); 3] = [
            |switches| switches.failures = Some((EVERY_CALL, 503, r#"{"message": "paused"}"#.to_owned())),
            |switches| switches.logprob_fault = LogprobFault::Sentinel,
            |switches| switches.context_tokens = 3,
        ];
        for (round, fault) in faults.into_iter().enumerate() {
            class.teacher.switch(fault);
            let response = class.app.http.post(format!("{}{path}", class.app.url)).json(&json!({"reward": 1.0}));
            let response = response.send().await.expect("the service answers");
            assert_eq!(response.status(), 503);
            assert!(response.headers().contains_key("retry-after"));
            let problem: Value = response.json().await.expect("a problem is JSON");
            assert_eq!(problem["type"], "teacher-failed", "{problem}");
            let detail = text(&problem["detail"]);
            assert!(detail.contains("`teacher`") && detail.contains("`default`"), "{detail}");
            assert_eq!(class.state(&agent).await, "open");
            agent.ask(&format!("The agent can go on, {round}.")).await;
            class.teacher.switch(|switches| {
                (switches.failures, switches.logprob_fault) = (None, LogprobFault::None);
                switches.context_tokens = 65_536;
            });
        }
        let failed = "forebay_teacher_rollouts_total{outcome=\"failed\",policy=\"default\"}";
        assert_eq!(metric(&class.app, failed).await, Some(3.0));
        class.app.post("/batches", json!({})).await.expect(204);
        class.app.post(&path, json!({"reward": 1.0})).await.expect(200);
        assert_eq!(class.check_scores(1.0).await, 5);
        class.app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teacher_that_was_restarted_with_other_values_scores_nothing() {
    let mut class = Class::start(Backend::Sqlite, EngineKind::Vllm).await;
    let agent = class.agent(json!({"sampling": {"temperature": 0.7}})).await;
    class.teacher.switch(|switches| switches.raw_logprobs = true);
    // The service probes its teachers again.
    class.app.restart().await;
    let path = format!("/sessions/{}/finish", agent.id());
    let problem = class.app.post(&path, json!({"reward": 1.0})).await.refused(503, "teacher-failed");
    assert!(text(&problem["detail"]).contains("temperature"), "{problem}");
    let unsuited = "forebay_teacher_rollouts_total{outcome=\"unsuited\",policy=\"default\"}";
    assert_eq!(metric(&class.app, unsuited).await, Some(1.0));
    assert_eq!((class.asked(), class.state(&agent).await.as_str()), (0, "open"));
    class.app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_sessions_are_scored_and_finished_together_or_not_at_all() {
    for backend in BACKENDS {
        let class = Class::start(backend, EngineKind::Vllm).await;
        let agents = [class.agent(json!({})).await, class.agent(json!({})).await];
        let finishes: Vec<Value> =
            agents.iter().map(|agent| json!({"session_id": agent.id(), "reward": 1.0})).collect();
        // One of the four segments is not scored.
        class.teacher.switch(|switches| switches.failures = Some((1, 500, "{}".to_owned())));
        class.app.post("/sessions/finish", json!(finishes)).await.refused(503, "teacher-failed");
        for agent in &agents {
            assert_eq!(class.state(agent).await, "open");
        }
        class.app.post("/sessions/finish", json!(finishes)).await.expect(200);
        for _ in &agents {
            assert_eq!(class.check_scores(1.0).await, 2);
        }
        class.app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_transaction_waits_for_a_teacher() {
    for backend in BACKENDS {
        let class = Class::start(backend, EngineKind::Sglang).await;
        let agent = class.agent(json!({"group_id": "g"})).await;
        class.teacher.switch(|switches| switches.stall = true);
        let url = format!("{}/sessions/{}/finish", class.app.url, agent.id());
        let finish = tokio::spawn(class.app.http.post(url).json(&json!({"reward": 1.0})).send());
        class.teacher.wait(|log| log.stalled == 2).await;
        // Another rollout of the policy is stored, and its batch is leased and acked.
        let mut other = rollout("other", 1.0);
        other["segments"][0]["teacher_logprobs"] = json!([-0.5, -0.25]);
        class.app.post("/trajectories", other).await.expect(201);
        let batch = class.app.lease().await;
        class.app.ack(&batch, 1).await.expect(200);
        assert_eq!(class.state(&agent).await, "finishing");
        class.teacher.switch(|switches| switches.stall = false);
        let response = finish.await.expect("the task goes on").expect("the service answers");
        assert_eq!(response.status(), 200);
        assert_eq!(class.check_scores(1.0).await, 2);
        class.app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_end_without_a_finish_are_not_scored() {
    for backend in BACKENDS {
        let class = Class::start(backend, EngineKind::Sglang).await;
        let (aborted, expired) = (class.agent(json!({})).await, class.agent(json!({})).await);
        class.teacher.switch(|switches| switches.failures = Some((EVERY_CALL, 500, "{}".to_owned())));
        let path = format!("/sessions/{}/abort", aborted.id());
        let ended = class.app.post(&path, json!({"reason": "given up", "keep": true})).await.expect(200);
        assert_eq!(ended["receipts"][0]["verdict"], "dropped");
        assert_eq!(ended["assembly"]["segments"], 0, "the policy requires scores, which an aborted rollout lacks");
        class.app.pass_s(90_000.0).await;
        assert_eq!(class.state(&expired).await, "expired");
        assert_eq!(class.asked(), 0);
        class.app.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_not_opened_if_its_teacher_could_not_score_it() {
    let class = Class::start(Backend::Sqlite, EngineKind::Vllm).await;
    let app = &class.app;
    // Rules may come before the configuration, so they are accepted with a warning.
    let written = app.put("/policies/lonely", json!({"sessions": {"teacher": "nobody"}})).await.expect(201);
    assert!(written["warnings"].to_string().contains("nobody"), "{written}");
    let written = app.put("/policies/taught", json!({"sessions": {"teacher": "teacher"}})).await.expect(201);
    assert_eq!(written.get("warnings").unwrap_or(&json!([])), &json!([]), "{written}");
    let problem = app.post("/sessions", json!({"policy": "lonely"})).await.expect(422);
    assert!(problem.to_string().contains("policy `lonely`"), "{problem}");
    app.put("/policies/strict", json!({"require": ["tokens", "teacher_logprobs"]})).await.expect(201);
    let problem = app.post("/sessions", json!({"policy": "strict"})).await.expect(422);
    assert!(problem.to_string().contains("sessions.teacher"), "{problem}");
    let long = app.put("/policies/long", json!({"sessions": {"teacher": "x".repeat(257)}})).await;
    assert_eq!(long.pointers(422), ["/sessions/teacher"]);

    class.teacher.switch(|switches| switches.failures = Some((1, 500, "{}".to_owned())));
    app.post("/sessions", json!({})).await.refused(503, "teacher-failed");
    class.teacher.switch(|switches| switches.raw_logprobs = true);
    let raw = app.post("/sessions", json!({"sampling": {"temperature": 0.7}})).await;
    assert_eq!(raw.pointers(422), ["/sampling/temperature"]);
    // At temperature 1 both are the same.
    let agent = class.agent(json!({})).await;
    agent.finish(app, 1.0).await;
    assert_eq!(class.check_scores(1.0).await, 2);
    class.app.finish().await;
}
