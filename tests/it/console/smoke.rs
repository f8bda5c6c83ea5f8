//! A walk over every screen, and what readers do most: what `make test` does in a browser. The other tests of the live
//! page are for the long runs (`./scripts/endure console::`), because each of them takes seconds.

use std::{collections::BTreeSet, path::Path};

use forebay_wire::Role;
use serde_json::json;

use super::{open, origin, viewing::trained};
use crate::support::{Backend, TestApp, on_both_stores, rollout, text};

/// The screens by the names of their modules: an address, and what shows that its data is there.
fn screens(batch: &str) -> [(&'static str, String, &'static str); 14] {
    let of_policy = |rest: &str| format!("#/policies/default{rest}");
    [
        ("overview", String::new(), "td [data-row]"),
        ("policy", of_policy(""), "forebay-chart .plot"),
        ("rollouts", of_policy("/rollouts"), "td [data-row]"),
        ("rollout", of_policy("/rollout?id=puzzle-0"), ".tokens > span"),
        ("groups", of_policy("/groups"), "td [data-row]"),
        ("group", of_policy("/groups?id=puzzle"), ".sibling .message"),
        ("batches", of_policy("/batches"), "td [data-row]"),
        ("batch", of_policy(&format!("/batches?id={batch}")), "#worst-title"),
        ("steps", of_policy("/steps"), "td [data-row]"),
        ("step", of_policy("/steps?id=7"), "#worst-title"),
        ("suite", of_policy("/suites/puzzles?version=7"), "td.rewards a"),
        ("try", of_policy("/try"), "fieldset"),
        ("why", "#/why".to_owned(), "h1"),
        ("why", "#/why?id=puzzle-0&policy=default".to_owned(), "section.why"),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_screen_shows_its_data_and_complains_of_nothing() {
    let app = TestApp::start(Backend::Sqlite).await;
    let batch = trained(&app).await;
    let eval = |task: &str, version: i64| json!({"purpose": "eval", "suite": "puzzles", "task": task, "policy_version": version, "reward": 1.0});
    app.accept(json!([eval("a", 3), eval("a", 7), eval("b", 7)])).await;
    let screens = screens(text(&batch["batch_id"]));
    let views = Path::new(env!("CARGO_MANIFEST_DIR")).join("console/views");
    let views = std::fs::read_dir(views).expect("it is there").map(|view| view.expect("it is there").path());
    let views: BTreeSet<_> = views.filter_map(|view| Some(view.file_stem()?.to_str()?.to_owned())).collect();
    assert_eq!(views, screens.iter().map(|(name, ..)| (*name).to_owned()).collect(), "the walk has every screen");
    for (_, hash, is_ready) in screens {
        let page = open(&app, &hash).await;
        page.wait_for(&format!("document.querySelector('{is_ready}') !== null")).await;
        page.assert_clean(origin(&app));
    }
    app.finish().await;
}

on_both_stores! {
    async fn a_reader_logs_in_goes_to_a_rollout_and_asks_why(app: TestApp) {
        trained(app).await;
        let key = app.key(Role::Read, &["*"]).await;
        let page = open(app, "").await;
        page.wait_for("document.activeElement.id === 'key'").await;
        page.type_text(&key).await;
        page.press("Enter").await;
        page.click("text=default").await;
        page.click("text=Groups").await;
        page.click("text=puzzle").await;
        page.wait_for("document.querySelectorAll('.message').length > 0").await;
        page.click("text=puzzle-1").await;
        page.wait_for("location.hash === '#/policies/default/rollout?id=puzzle-1'").await;
        page.wait_for("document.querySelector('.tokens > span') !== null").await;
        page.press("w").await;
        page.wait_for("document.querySelector('section.why') !== null").await;
        page.assert_clean(origin(app));
    }

    async fn a_newcomer_is_told_what_to_post(app: TestApp) {
        let page = open(app, "").await;
        page.wait_for(&format!("document.querySelector('pre').textContent.includes('{}')", app.url)).await;
        app.accept(rollout("first", 1.0)).await;
        app.pass_s(90.0).await;
        page.goto(&format!("{}/#/policies/default", app.url)).await;
        page.wait_for("document.querySelector('.toolbar select')?.value === '10 min'").await;
        page.goto(&format!("{}/", app.url)).await;
        page.wait_for("document.querySelector('td [data-row]') !== null && document.querySelector('pre') === null").await;
        page.assert_clean(origin(app));
    }

    async fn a_reader_tries_a_filter_and_sees_what_it_would_have_done(app: TestApp) {
        trained(app).await;
        let page = open(app, "#/policies/default/try").await;
        page.click("text=Add a filter").await;
        page.wait_for("document.querySelectorAll('fieldset').length === 3").await;
        page.click("button.primary").await;
        page.wait_for("document.querySelectorAll('section[aria-busy] table').length > 0").await;
        page.assert_clean(origin(app));
    }

    async fn a_page_that_stays_open_shows_what_arrives(app: TestApp) {
        trained(app).await;
        let page = open(app, "").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 1").await;
        app.rules("another", json!({"group": {"size": 1}})).await;
        app.clock.advance_s(2.0);
        page.pass_ms(10_000).await;
        page.wait_for_text("another").await;
        page.assert_clean(origin(app));
    }
}
