//! Eight failures as somebody finds them at two in the morning: the first sentence of the page says what is wrong.
//!
//! With `FOREBAY_PICTURES=FOLDER` (`./scripts/endure console::pictures`) a picture of each is written.

use serde_json::{Value, json};

use super::{Page, browser::Browser, open, origin, pictures::picture};
use crate::{
    faults::{Call, ENOSPC, Fault, Faults, On, database},
    support::{Backend, TestApp, endure, eventually, group, rollout, with},
};

const POLICY: &str = "math.solver";

fn members(name: &str, rewards: &[f64], version: i64) -> Value {
    let posted = group(name, rewards);
    let posted = posted.as_array().expect("a bundle").iter();
    posted.map(|member| with(member.clone(), json!({"policy": POLICY, "policy_version": version}))).collect()
}

/// A service whose policy has made steps without trouble: four groups a minute, and a step a minute.
async fn healthy(rules: Value, rewards: &[f64]) -> TestApp {
    let app = TestApp::start(Backend::Sqlite).await;
    let usual = json!({
        "group": {"size": 4}, "batch": {"groups": 4}, "lease": {"ttl_s": 7200}, "staleness": {"max": 4},
        "filter": [{"name": "zero-variance", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"}],
    });
    app.rules(POLICY, with(usual, rules)).await;
    for step in 1..=12_i64 {
        for name in 0..4 {
            app.accept(members(&format!("aime-{step}-{name}"), rewards, 0)).await;
        }
        let batch = lease(&app).await;
        app.pass_s(45.0).await;
        app.ack(&batch, step).await.expect(200);
        app.post("/policies/math.solver/checkpoints", json!({"step": step})).await.expect(200);
        app.pass_s(15.0).await;
    }
    app
}

async fn lease(app: &TestApp) -> Value {
    app.lease_with(json!({"policy": POLICY, "consumer": "trainer-0"})).await
}

/// The trainer asks for this long and gets nothing.
async fn asks(app: &TestApp, seconds: u32) {
    for _ in 0..seconds / 5 {
        app.post("/batches", json!({"policy": POLICY, "consumer": "trainer-0"})).await.expect(204);
        app.pass_s(5.0).await;
    }
}

/// Opens the overview, where the policy is the first, and then its screen, which begins with the sentence.
async fn looks(app: &TestApp, name: &str, state: &str, [begin, end]: [&str; 2]) -> Page {
    app.pass_s(2.0).await;
    let page = open(app, "").await;
    page.size(1200, 700).await;
    page.wait_for("document.querySelector('td [data-row]') !== null").await;
    assert_eq!(page.text("td [data-row]").await, POLICY, "the worst is first");
    page.click("td [data-row]").await;
    page.wait_for("document.querySelector('.strip') !== null").await;
    let sentence = page.text("h1 + .headline").await;
    assert!(sentence.starts_with(begin) && sentence.ends_with(end), "{sentence}");
    let title = page.text("h1").await.to_lowercase();
    assert!(title.contains(state), "{title}");
    picture(&page, &format!("night-{name}")).await;
    page.assert_clean(origin(app));
    page
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_filter_starves_the_trainer() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({}), &[1.0, 0.0, 1.0, 0.0]).await;
    for minute in 0..16 {
        for name in 0..4 {
            let rewards = if minute == 0 && name == 0 { [1.0, 0.0, 0.0, 0.0] } else { [1.0; 4] };
            app.accept(members(&format!("easy-{minute}-{name}"), &rewards, 0)).await;
        }
        asks(&app, 60).await;
    }
    let sentence = ["The trainer waits for 16 min", "1 of 4 groups is ready. zero-variance discards 100% of groups"];
    let page = looks(&app, "starved", "starved", sentence).await;
    page.wait_for_text("look at them").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_are_gone() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({}), &[1.0, 0.0, 1.0, 0.0]).await;
    app.accept(members("last", &[1.0, 0.0, 1.0, 0.0], 0)).await;
    asks(&app, 600).await;
    let sentence = ["The trainer waits for 10 min", "1 of 4 groups is ready. No post for 10 min 2 s"];
    looks(&app, "agents-gone", "starved", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trainer_is_gone() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({}), &[1.0, 0.0, 1.0, 0.0]).await;
    for minute in 0..42 {
        app.accept(members(&format!("aime-{minute}"), &[1.0, 0.0, 1.0, 0.0], 0)).await;
        app.pass_s(60.0).await;
    }
    let sentence = ["No trainer has asked for 42 min", ": 42 groups are ready"];
    looks(&app, "trainer-gone", "untaken", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trainer_is_stuck() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({}), &[1.0, 0.0, 1.0, 0.0]).await;
    for name in 0..8 {
        app.accept(members(&format!("aime-{name}"), &[1.0, 0.0, 1.0, 0.0], 0)).await;
    }
    let batch = lease(&app).await;
    app.pass_s(3_000.0).await;
    let id = batch["batch_id"].as_str().expect("an id");
    let begin = format!("Batch {}…{} is held by trainer-0 for 50 min", &id[..4], &id[id.len() - 4..]);
    let sentence = [begin.as_str(), "(median 45 s)"];
    looks(&app, "trainer-stuck", "stuck", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_backlog_is_full() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({"backlog": {"max_ready_rollouts": 64}}), &[1.0, 0.0, 1.0, 0.0]).await;
    for name in 0..16 {
        app.accept(members(&format!("aime-{name}"), &[1.0, 0.0, 1.0, 0.0], 0)).await;
    }
    lease(&app).await;
    app.post("/trajectories", members("more", &[1.0, 0.0, 1.0, 0.0], 0)).await.refused(429, "backlog-full");
    let sentence = ["Agents are refused: ", "64 of 64 rollouts wait to be trained"];
    looks(&app, "backlog-full", "held-back", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn groups_go_stale() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({"staleness": {"max": 1}}), &[1.0, 0.0, 1.0, 0.0]).await;
    for version in 1..=16_i64 {
        let publish = json!({"version": version, "step": 12});
        app.put("/policies/math.solver/version", publish).await;
        app.accept(members(&format!("old-{version}"), &[1.0, 0.0, 1.0, 0.0], (version - 3).max(0))).await;
        app.post("/batches", json!({"policy": POLICY, "consumer": "trainer-0"})).await;
        app.pass_s(2.0).await;
    }
    let sentence = ["", "(bound 1)"];
    looks(&app, "stale", "stale", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rewards_are_flat() {
    if !endure::is_long() {
        return;
    }
    let app = healthy(json!({"filter": []}), &[0.0; 4]).await;
    let sentence = ["100% of trained groups have equal rewards: 48 of 48", "steps, which train nothing"];
    looks(&app, "flat", "flat", sentence).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_store_is_full() {
    if !endure::is_long() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let faults = Faults::new(folder.path());
    let service = faults.start(&database(folder.path())).await.expect("it serves before it ends");
    let http = crate::support::http();
    let post = async |id: &str| {
        let send = http.post(format!("{}/trajectories", service.url)).json(&rollout(id, 1.0)).send();
        send.await.expect("the service answers").status().as_u16()
    };
    assert_eq!(post("before").await, 201);
    faults.arm_lasting(Fault::Fail(ENOSPC), Call::Write, On::Any);
    assert_eq!(post("during").await, 503);
    let page = Browser::shared().page().await;
    page.goto(&format!("{}/#/policies/default", service.url)).await;
    page.size(1200, 700).await;
    page.wait_for_text("cannot write").await;
    let sentence = "The store cannot write: every post and every ack is refused until it can";
    assert_eq!(page.text("h1 + .headline").await, sentence);
    picture(&page, "night-store-full").await;
    faults.disarm();
    eventually("it writes again", || async { post("after").await == 201 }).await;
    assert!(service.stop().await.success());
}
