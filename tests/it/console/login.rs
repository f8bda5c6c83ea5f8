//! Who may look: the login, keys that end while the page is open, and tabs that share a key.

use forebay_wire::Role;
use serde_json::json;

use super::{browser::Browser, open, origin};
use crate::support::{on_both_stores, rollout, with};

on_both_stores! {
    if crate::support::endure::is_long;

    async fn without_keys_the_page_shows_policies_at_once(app: TestApp) {
        app.accept(with(rollout("a", 1.0), json!({"policy": "default"}))).await;
        let page = open(app, "").await;
        page.wait_for_text("default").await;
        assert_eq!(page.eval("document.querySelector('input[type=password]')").await, serde_json::Value::Null);
        page.assert_clean(origin(app));
    }

    async fn a_bad_key_is_refused_and_a_good_one_opens_the_page(app: TestApp) {
        let key = app.key(Role::Read, &["*"]).await;
        let page = open(app, "#/policies/default").await;
        page.wait_for("document.activeElement.id === 'key'").await;
        page.type_text("fb_wrong").await;
        page.press("Enter").await;
        page.wait_for_text("the key is unknown to this service").await;
        page.eval("document.querySelector('#key').value = ''").await;
        page.click("#key").await;
        page.type_text(&key).await;
        page.press("Enter").await;
        page.wait_for_text("test read").await;
        // The reader is where the address pointed to.
        page.wait_for("document.querySelector('h1').innerText.startsWith('default')").await;
        let sent = page.request_headers("/policies/default");
        assert!(sent.iter().all(|headers| headers["authorization"] == format!("Bearer {key}")), "{sent:?}");
        assert!(page.requests().iter().all(|request| !request.contains("fb_")), "a key is in no address");
        page.assert_clean(origin(app));
    }

    async fn a_key_that_is_revoked_while_the_page_is_open_closes_it(app: TestApp) {
        app.accept(with(rollout("a", 1.0), json!({"policy": "default"}))).await;
        let admin = app.key(Role::Admin, &["*"]).await;
        let key = app.key(Role::Read, &["*"]).await;
        let page = open(app, "").await;
        page.wait_for("document.activeElement.id === 'key'").await;
        page.type_text(&key).await;
        page.press("Enter").await;
        page.wait_for("document.querySelector('table') !== null").await;
        let keys = app.get_as(&admin, "/keys").await.expect(200);
        let keys = keys["keys"].as_array().expect("it lists keys");
        let mine = keys.iter().find(|key| key["role"] == "read").expect("it is there");
        let path = format!("/keys/{}", mine["key_id"].as_str().expect("it has an id"));
        app.call_as(&admin, reqwest::Method::DELETE, &path, None).await.expect(200);
        app.keyring.reload().await.expect("the store can be read");
        page.pass_ms(10_000).await;
        page.wait_for("document.querySelector('#key') !== null").await;
        page.wait_for_text("revoked").await;
        let shown = page.eval("document.body.innerText").await;
        assert!(!shown.as_str().expect("text").contains("default"), "the data is gone: {shown}");
        assert_eq!(page.eval("sessionStorage.length + localStorage.length").await, 0);
    }

    async fn a_new_tab_gets_the_key_of_another_one_and_loses_it_with_that_one(app: TestApp) {
        let key = app.key(Role::Read, &["*"]).await;
        let first = open(app, "").await;
        first.wait_for("document.activeElement.id === 'key'").await;
        first.type_text(&key).await;
        first.press("Enter").await;
        first.wait_for_text("test read").await;
        let second = first.other_tab().await;
        second.goto(&format!("{}/#/policies/default", app.url)).await;
        second.wait_for_text("test read").await;
        // Another browser gets nothing.
        let stranger = Browser::shared().page().await;
        stranger.goto(&app.url).await;
        stranger.wait_for("document.querySelector('#key') !== null").await;
        second.click("text=Forget").await;
        first.wait_for_text("forgotten in another tab").await;
        second.wait_for("document.querySelector('#key') !== null").await;
        first.assert_clean(origin(app));
        second.assert_clean(origin(app));
    }
}
