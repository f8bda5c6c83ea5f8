//! Rollouts that attack their reader: text stays text, nothing is fetched, and the page stays small.

use serde_json::{Value, json};

use super::{Page, open, origin};
use crate::support::{Backend, TestApp, endure, rollout, with};

/// All nodes of a document: a browser with more of them is slow.
const NODES_MAX: i64 = 20_000;

const ALERT: &str = "\"><script>alert(1)</script><img src=x onerror=alert(2)><svg onload=alert(3)>";

async fn assert_harmless(page: &Page, app: &TestApp) {
    let nodes = "(() => { const nodes = document.createNodeIterator(document); let count = 0; \
         while (nodes.nextNode()) { count += 1; } return count; })()";
    let nodes = page.eval(nodes).await;
    assert!(nodes.as_i64().is_some_and(|count| count < NODES_MAX), "{nodes} nodes");
    let foreign = "[...document.querySelectorAll('a[href]')].map((link) => link.getAttribute('href'))\
         .filter((href) => !href.startsWith('#'))";
    assert_eq!(page.eval(foreign).await, json!([]));
    assert_eq!(page.eval("document.querySelectorAll('main script, main svg, main iframe, main img').length").await, 0);
    assert_eq!(page.eval("({}).polluted").await, Value::Null);
    page.assert_clean(origin(app));
}

async fn shows(app: &TestApp, rollout_id: &str) -> Page {
    let query = url_query(rollout_id);
    let page = open(app, &format!("#/policies/default/rollout?id={query}")).await;
    page.wait_for("document.querySelector('.chat') !== null").await;
    page
}

/// An id as a part of a query: every byte is escaped.
fn url_query(id: &str) -> String {
    use std::fmt::Write as _;
    id.bytes().fold(String::new(), |mut query, byte| {
        write!(query, "%{byte:02X}").expect("text takes everything");
        query
    })
}

/// Opens everything that can be opened.
async fn open_all(page: &Page) {
    page.eval("document.querySelectorAll('details').forEach((details) => { details.open = true; })").await;
    page.eval("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(() => drawn(0))))").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_of_rollouts_stays_text() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let id = format!("javascript:alert(0)//{ALERT}");
    let messages = json!([
        {"role": ALERT, "name": ALERT, "content": ALERT},
        {"role": "user\u{202e}nimda", "content": "a \u{202e}LIVE\u{202c} \u{1b}[31mred\u{1b}[0m \u{7} zero\u{200b}width"},
        {"role": "assistant", "content": [
            {"type": "image_url", "image_url": {"url": "http://192.0.2.1/x.png"}},
            {"type": "image_url", "image_url": {"url": "javascript:alert(4)"}},
            {"type": "image_url", "image_url": {"url": format!("data:text/html,{ALERT}")}},
            {"type": ALERT, "text": ALERT},
        ]},
        {"role": "tool", "content": "[x](javascript:alert(5)) ![y](http://192.0.2.1/y.png) <style>*{display:none}</style>"},
        {"role": "assistant", "tool_calls": [{"id": ALERT, "function": {"name": ALERT, "arguments": ALERT}}]},
        {"role": "assistant", "content": vec![json!({"type": "text", "text": ALERT}); 1_500]},
        ALERT, 7, null, [[1]],
    ]);
    let segments = json!([{"kind": ALERT, "tokens": [1, 2, 3], "loss_mask": [1, 1]}]);
    let fields = json!({"environment": ALERT, "execution_id": ALERT, "messages": messages, "segments": segments,
        "metadata": {ALERT: ALERT}, "reward_components": {"<b>x</b>": 1.0}});
    app.accept(with(rollout(&id, 1.0), fields)).await;
    let page = shows(&app, &id).await;
    assert_eq!(page.text("h1").await, format!("rollout {id}"));
    open_all(&page).await;
    let shown = page.text(".chat").await;
    for part in
        ["a \\u{202e}LIVE\\u{202c} ␛[31mred␛[0m ␇ zero\\u{200b}width", "user\\u{202e}nimda", "http://192.0.2.1/x.png"]
    {
        assert!(shown.contains(part), "{part} in {shown:.2000}");
    }
    assert_harmless(&page, &app).await;
    assert_eq!(page.axe().await, Vec::<String>::new());
    let stream = open(&app, "#/policies/default/rollouts").await;
    stream.wait_for("document.querySelector('[data-row]') !== null").await;
    assert_eq!(stream.text("[data-row]").await, id);
    assert_harmless(&stream, &app).await;
    stream.press("j").await;
    stream.press("Enter").await;
    stream.wait_for("document.querySelector('.chat') !== null").await;
    assert_harmless(&stream, &app).await;
    app.finish().await;
}

/// A PNG of one pixel.
const PIXEL: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_is_fetched_when_the_reader_wants_it_and_is_nothing_but_an_image() {
    let app = TestApp::start(Backend::Sqlite).await;
    let part = |kind: &str| json!({"image": format!("data:{kind};base64,{PIXEL}"), "type": "image"});
    // The second one has another digest, because its bytes differ, and is no image for a browser.
    let page = json!({"image": format!("data:text/html;base64,{}", &PIXEL[4..]), "type": "image"});
    let messages = json!([{"role": "user", "content": [part("image/png"), page]}]);
    app.accept(with(rollout("seen", 1.0), json!({"messages": messages}))).await;
    let page = shows(&app, "seen").await;
    assert_eq!(page.eval("document.querySelectorAll('main img').length").await, 0);
    page.eval("[...document.querySelectorAll('.chat button, .messages button')].filter((button) => button.innerText === 'Show it')\
        .forEach((button) => button.click())").await;
    page.wait_for("document.querySelector('main img')?.naturalWidth === 1").await;
    page.wait_for_text("which is not shown").await;
    assert_eq!(page.eval("document.querySelectorAll('main img').length").await, 1);
    assert_eq!(page.axe().await, Vec::<String>::new());
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_of_ten_megabytes_and_a_million_tokens_are_looked_at_in_parts() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let tokens = 1_000_000;
    let long: String = std::iter::repeat_n("0123456789", 1_000_000).collect();
    let mut messages = vec![json!({"role": "user", "content": long})];
    messages.extend((0..250).map(|index| json!({"role": "assistant", "content": format!("message {index}.")})));
    let segment = json!({
        "tokens": (0..tokens).collect::<Vec<u32>>(),
        "loss_mask": (0..tokens - 1).map(|token| token / 100_000 % 2).collect::<Vec<u32>>(),
        "logprobs": vec![-0.5; tokens as usize - 1],
    });
    app.accept(with(rollout("big", 1.0), json!({"segments": [segment], "messages": messages}))).await;
    let page = shows(&app, "big").await;
    page.wait_for("document.querySelectorAll('.tokens > span').length === 4096").await;
    assert_harmless(&page, &app).await;
    // The map leads to the end.
    page.eval("document.querySelector('forebay-map').focus()").await;
    let key = "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'End', bubbles: true }))";
    page.wait_for("document.querySelector('forebay-map').ariaValueText !== null").await;
    page.eval(key).await;
    page.wait_for_text("tokens 995,904 to 999,999 of 1,000,000").await;
    page.wait_for("document.querySelector('.tokens > span:last-child').innerText.trim() === '999999'").await;
    let drawn = "(() => { const canvas = document.querySelector('forebay-map canvas'); \
         const { data } = canvas.getContext('2d').getImageData(0, canvas.height / 2, canvas.width, 1); \
         return new Set([...Array(canvas.width).keys()].map((at) => data.slice(4 * at, 4 * at + 3).join())).size; })()";
    page.wait_for("document.querySelector('forebay-map').ariaValueNow === '995904'").await;
    assert!(page.eval(drawn).await.as_i64() > Some(1), "the map has trained and masked parts");
    // The long message comes alone, and its beginning is shown.
    page.click("text=Show it").await;
    page.wait_for("document.querySelector('.message .said')?.innerText.length === 20000").await;
    page.click("text=Show more").await;
    page.wait_for("document.querySelector('.message .said')?.innerText.length === 220000").await;
    page.click("text=Next").await;
    page.wait_for_text("message 150.").await;
    assert_eq!(page.text(".tokens > span:last-child").await, "999999", "the window of tokens stays");
    assert_harmless(&page, &app).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_that_attacks_scripts_is_shown_or_refused() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let post = async |messages: &str| {
        let body = format!(
            r#"{{"rollout_id": "odd", "reward": 1, "segments": [{{"tokens": [1, 2], "loss_mask": [1]}}],
                "messages": {messages}, "metadata": {{"__proto__": {{"polluted": true}}, "a": 1}}}}"#
        );
        app.post_raw("/trajectories", &[("content-type", "application/json")], body).await
    };
    // The service does not store this; `tokens.rs` shows that the page could write it.
    let deep = format!(r#"[{{"content": {}{}}}]"#, "[".repeat(10_000), "]".repeat(10_000));
    assert_eq!(post(&deep).await.pointers(422), ["/messages"]);
    let odd = r#"[{"role": "user", "content": "hi", "__proto__": {"polluted": true}, "constructor": {"prototype": {"polluted": 1}},
        "toString": 7, "hasOwnProperty": "no"}, {"__proto__": null}, {"role": "user", "content": "a\ud800b"}, {"role": "__proto__", "content": {"__proto__": [1]}}]"#;
    post(odd).await.expect(201);
    let page = shows(&app, "odd").await;
    open_all(&page).await;
    page.wait_for("document.querySelectorAll('pre.json').length >= 3").await;
    let shown = page.text("main").await;
    for part in ["\"__proto__\": {", "\"toString\": 7", "\"hasOwnProperty\": \"no\"", "hi", "a\u{fffd}b"] {
        assert!(shown.contains(part), "{part} in {shown}");
    }
    assert_harmless(&page, &app).await;
    app.finish().await;
}
