//! What happens to a reader who stays: questions that are asked again, a tab in the background, a service that stops.

use serde_json::json;

use super::{browser::Browser, front::Front, open, origin};
use crate::support::{on_both_stores, rollout};

/// How often the page has asked for its data so far.
fn questions(page: &super::Page) -> usize {
    page.requests().iter().filter(|request| request.contains("/overview?")).count()
}

on_both_stores! {
    if crate::support::endure::is_long;

    async fn a_tab_in_the_background_asks_nothing_and_asks_once_when_it_returns(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let page = open(app, "").await;
        page.wait_for("document.querySelector('table') !== null").await;
        page.hide(true).await;
        let before = questions(&page);
        page.pass_ms(10_000).await;
        assert_eq!(questions(&page), before, "no request in 10 s");
        app.rules("another", json!({"group": {"size": 1}})).await;
        app.clock.advance_s(2.0);
        page.hide(false).await;
        page.wait_for_text("another").await;
        assert_eq!(questions(&page), before + 1, "{:?}", page.requests());
        page.assert_clean(origin(app));
    }

    async fn a_paused_page_asks_nothing_until_the_reader_goes_on(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let page = open(app, "").await;
        page.wait_for("document.querySelector('table') !== null").await;
        page.press("p").await;
        page.wait_for_text("paused ·").await;
        let before = questions(&page);
        page.pass_ms(60_000).await;
        page.hide(true).await;
        page.hide(false).await;
        assert_eq!(questions(&page), before, "a pause is a pause, also for a tab that returns");
        app.rules("another", json!({"group": {"size": 1}})).await;
        app.clock.advance_s(2.0);
        page.press("p").await;
        page.wait_for_text("another").await;
        page.assert_clean(origin(app));
    }

    async fn a_service_that_stops_is_reported_and_its_return_is_noticed(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let front = Front::start().await;
        front.point_to(&app.url);
        let page = Browser::shared().page().await;
        page.hold_time().await;
        page.goto(&format!("{}/", front.url)).await;
        page.wait_for("document.querySelector('table') !== null").await;
        app.stop().await;
        front.cut();
        page.pass_ms(3_000).await;
        page.wait_for("document.querySelector('[role=alert]') !== null").await;
        let said = page.text("[role=alert]").await;
        assert!(said.starts_with("The service does not answer, since "), "{said}");
        assert!(page.text("table").await.contains("default"), "what was known stays on the screen");
        app.restart().await;
        front.point_to(&app.url);
        app.rules("another", json!({"group": {"size": 1}})).await;
        // The page waits longer after each failure, at most a minute.
        page.pass_ms(80_000).await;
        page.wait_for_text("another").await;
        page.wait_for("document.querySelector('[role=alert]') === null").await;
        page.assert_clean(&front.url);
    }

    async fn a_reader_keeps_the_place_while_the_page_asks_again(app: TestApp) {
        for number in 0..60 {
            app.rules(&format!("policy-{number:02}"), json!({"group": {"size": 2}})).await;
        }
        let page = open(app, "").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 61").await;
        page.eval("[...document.querySelectorAll('[data-row]')].find((row) => row.innerText === 'policy-30').focus()")
            .await;
        page.eval("window.scrollTo(0, 400)").await;
        page.eval(
            "getSelection().selectAllChildren([...document.querySelectorAll('[data-row]')].at(20))",
        )
        .await;
        let state = "[document.activeElement.innerText, scrollY, getSelection().toString()]";
        let before = page.eval(state).await;
        assert_eq!(before, json!(["policy-30", 400, "policy-19"]));
        app.rules("policy-60", json!({"group": {"size": 2}})).await;
        app.clock.advance_s(60.0);
        page.pass_ms(3_000).await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 62").await;
        assert_eq!(page.eval(state).await, before);
        page.assert_clean(origin(app));
    }
}
