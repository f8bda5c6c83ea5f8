//! Screens for everyone: axe finds nothing in both schemes, nothing scrolls sideways at 200%, nothing moves for readers
//! who want less motion, and the keyboard suffices.

use forebay_wire::Role;
use serde_json::json;

use super::{open, origin};
use crate::support::{Backend, TestApp, endure, group, on_both_stores, rollout, with};

/// Checks a screen.
pub(super) async fn check(app: &TestApp, hash: &str, is_ready: &str) {
    check_after(app, hash, is_ready, ("", "true")).await;
}

/// Checks a screen after a script of the reader's actions, once its outcome is there.
async fn check_after(app: &TestApp, hash: &str, is_ready: &str, (actions, is_done): (&str, &str)) {
    for scheme in ["light", "dark"] {
        let page = open(app, hash).await;
        page.prefers(scheme, true).await;
        page.wait_for(is_ready).await;
        page.eval(actions).await;
        page.wait_for(is_done).await;
        assert_eq!(page.axe().await, Vec::<String>::new(), "{hash}, {scheme}");
        // 200%: the same window has half as many pixels of CSS.
        page.size(740, 450).await;
        let width = page.eval("[document.documentElement.scrollWidth, innerWidth]").await;
        assert!(width[0].as_i64() <= width[1].as_i64(), "{hash} scrolls sideways: {width}");
        assert_eq!(page.axe().await, Vec::<String>::new(), "{hash}, {scheme}, 200%");
        assert_eq!(page.eval("document.getAnimations().length").await, 0, "{hash}: nothing moves");
        page.assert_clean(origin(app));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_login_the_first_screen_and_a_policy_are_for_everyone() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.accept(rollout("a", 1.0)).await;
    check(&app, "", "document.querySelector('[data-row]') !== null").await;
    check(&app, "#/policies/default", "document.querySelector('.strip') !== null").await;
    check(&app, "#/policies/nobody", "document.querySelector('h1') !== null").await;
    check(&app, "#/nowhere", "document.querySelector('h1') !== null").await;
    app.key(Role::Read, &["*"]).await;
    check(&app, "", "document.querySelector('#key') !== null").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_and_what_they_lead_to_are_for_everyone() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let filter = json!([
        {"name": "too-long", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"},
        {"name": "zero-variance", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"},
    ]);
    app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 1}, "filter": filter})).await;
    for (name, rewards) in [("a", [1.0, 0.0]), ("b", [0.0, 0.0]), ("c", [0.5, 0.25])] {
        let members = group(name, &rewards);
        let members = members.as_array().expect("a bundle").iter();
        let chat = json!({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": name}]});
        app.accept(members.map(|member| with(member.clone(), chat.clone())).collect()).await;
    }
    let batch = app.lease_with(json!({"consumer": "trainer-0"})).await;
    app.ack(&batch, 1).await.expect(200);
    let lists = "document.querySelector('td [data-row]') !== null";
    check(&app, "#/policies/default/groups", lists).await;
    check(&app, "#/policies/default/groups?id=a", "document.querySelectorAll('.sibling .message').length === 2").await;
    check(&app, "#/policies/default/batches", lists).await;
    let id = batch["batch_id"].as_str().expect("text");
    let worst = "document.querySelector('#worst-title') !== null";
    check(&app, &format!("#/policies/default/batches?id={id}"), worst).await;
    check(&app, "#/policies/default/steps?id=1", worst).await;
    check(&app, "#/why", "document.querySelector('h1') !== null").await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn steps_are_for_everyone() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 1}})).await;
    check(&app, "#/policies/default/steps", "document.querySelector('main section p') !== null").await;
    // A step that a checkpoint covers, one of two deliveries that a resume undoes, and one after it.
    for step in 1..=2 {
        app.accept(group(&format!("g{step}"), &[1.0, 0.0])).await;
        app.clock.advance_s(5.0);
        if step == 2 {
            let failed = app.lease().await;
            app.nack(&failed, &[]).await.expect(200);
        }
        let batch = app.lease().await;
        app.clock.advance_s(30.0);
        app.ack(&batch, step).await.expect(200);
    }
    app.checkpoint(1).await;
    app.resume(Some(1)).await;
    app.accept(group("flat", &[1.0, 1.0])).await;
    let again = app.lease().await;
    app.ack(&again, 2).await.expect(200);
    let all = "document.querySelectorAll('td [data-row]').length === 3 && document.querySelector('tr.undone') !== null";
    check(&app, "#/policies/default/steps", all).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trying_a_filter_is_for_everyone() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let filter = json!([
        {"name": "too-long", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"},
        {"name": "zero-variance", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"},
    ]);
    app.rules("default", json!({"group": {"size": 2}, "filter": filter})).await;
    for (name, rewards) in [("a", [1.0, 0.0]), ("b", [0.0, 0.0]), ("c", [0.5, 0.25])] {
        app.accept(group(name, &rewards)).await;
    }
    let (hash, form) = ("#/policies/default/try", "document.querySelectorAll('fieldset').length === 2");
    check(&app, hash, form).await;
    // A draft that differs in every way: a filter is changed, one removed, and one added.
    let draft = |when: &str| {
        format!(
            "(async () => {{
                const drawn = () => new Promise((next) => requestAnimationFrame(() => requestAnimationFrame(next)));
                const button = (text) => [...document.querySelectorAll('form button')].findLast((one) => one.innerText === text);
                button('Remove').click();
                await drawn();
                button('Add a filter').click();
                await drawn();
                const when = document.querySelector('textarea');
                when.value = '{when}';
                when.dispatchEvent(new Event('input', {{ bubbles: true }}));
                await drawn();
                button('Try').click();
            }})()"
        )
    };
    let tried = "document.querySelectorAll('section[aria-busy] table').length === 3";
    check_after(&app, hash, form, (&draft("reward < 0.4"), tried)).await;
    let failed = "document.querySelector('section[aria-busy] .notice.bad') !== null";
    check_after(&app, hash, form, (&draft("metadata.missing == 1"), failed)).await;
    let refused = "document.querySelector('fieldset [role=alert]') !== null";
    check_after(&app, hash, form, (&draft("reward <"), refused)).await;
    app.finish().await;
}

on_both_stores! {
    if crate::support::endure::is_long;

    async fn a_reader_with_a_keyboard_goes_everywhere(app: TestApp) {
        app.rules("math.solver", json!({"group": {"size": 1}})).await;
        // The policy that no trainer takes anything from is the first one, and has a panel that says why.
        app.accept(with(rollout("r", 1.0), json!({"policy": "math.solver"}))).await;
        app.pass_s(700.0).await;
        let page = open(app, "").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 2").await;
        page.press("j").await;
        let first = page.eval("document.activeElement.innerText").await;
        page.press("j").await;
        let second = page.eval("document.activeElement.innerText").await;
        assert_ne!(first, second);
        page.press("k").await;
        assert_eq!(page.eval("document.activeElement.innerText").await, first);
        page.press("Enter").await;
        page.wait_for(&format!("document.querySelector('h1').innerText.startsWith({first})")).await;
        assert_eq!(page.eval("document.activeElement.id").await, "main", "the focus is on the new screen");
        page.press("w").await;
        assert_eq!(page.eval("document.activeElement.id").await, "why");
        page.press("?").await;
        page.wait_for("document.querySelector('dialog[open]') !== null").await;
        let keys = page.eval("[...document.querySelectorAll('dialog kbd')].map((key) => key.innerText)").await;
        for key in ["/", "j", "k", "w", "t", "p", "u", "?"] {
            assert!(keys.as_array().is_some_and(|keys| keys.contains(&key.into())), "{key} in {keys}");
        }
        page.press("Escape").await;
        page.wait_for("document.querySelector('dialog') === null").await;
        page.press("u").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 2").await;
        page.press("/").await;
        assert_eq!(page.eval("document.activeElement.id").await, "ask");
        // Keys are letters again while the reader types.
        page.type_text("a/1").await;
        page.press("p").await;
        assert_eq!(page.eval("document.querySelector('#ask').value").await, "a/1p");
        page.press("Enter").await;
        page.wait_for("location.hash === '#/why?id=a%2F1p'").await;
        page.assert_clean(origin(app));
    }

    async fn a_reader_with_a_mouse_goes_to_a_policy_and_back(app: TestApp) {
        app.rules("math.solver", json!({"group": {"size": 1}, "batch": {"groups": 3}})).await;
        let page = open(app, "").await;
        page.click("text=math.solver").await;
        page.wait_for("document.querySelector('h1').innerText.startsWith('math.solver')").await;
        let status = app.get("/policies/math.solver").await.expect(200);
        let ready = page.text(".stage:nth-child(4) .figure").await;
        assert_eq!(ready, format!("{} / {}", status["waiting"]["ready_groups"], status["waiting"]["needed_groups"]));
        page.eval("history.back()").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 2").await;
        page.assert_clean(origin(app));
    }
}
