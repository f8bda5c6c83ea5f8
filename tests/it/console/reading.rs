//! The screens of one rollout and of the stream of rollouts: what they show is what the service answers.

use forebay_wire::Role;
use serde_json::{Value, json};

use super::{Page, everyone, open, origin};
use crate::{
    sessions,
    support::{Backend, TestApp, endure, group, member, on_both_stores, rollout, text, with},
};

const GROUND: &str = "[...document.querySelectorAll('.tokens > span')].map((mark) => mark.classList.contains('inked'))";

const KINDS: &str = "[...document.querySelectorAll('.tokens > span')].map((mark) => mark.dataset.kind)";

/// A rollout of the group `g` with two segments and messages.
fn full(index: usize, reward: f64) -> Value {
    with(
        member("g", index, reward),
        json!({
            "environment": "web", "reward_components": {"tests": 0.5}, "sampling": {"temperature": 0.75},
            "segments": [
                {"kind": "turn", "tokens": [5, 6], "loss_mask": [1]},
                {
                    "kind": "final", "tokens": [7, 8, 9, 10, 11], "loss_mask": [1, 0, 1], "logprobs": [-0.5, 0.0, -1.5],
                    "values": [0.1, 0.2, 0.3], "versions": [[0, 0, 1], [0, 1, 2]]
                },
            ],
            "messages": [
                {"role": "user", "content": "What is the longest side?"},
                {"role": "assistant", "reasoning_content": "Heron.", "content": [{"type": "text", "text": "The longest is 10."}],
                 "tool_calls": [{"id": "c1", "function": {"name": "python", "arguments": "check(6)"}}]},
                {"role": "critic", "content": "The end.", "score": 1},
            ],
            "metadata": {"repository": "astropy"},
        }),
    )
}

async fn shows(app: &TestApp, rollout_id: &str, rest: &str) -> Page {
    let page = open(app, &format!("#/policies/default/rollout?id={rollout_id}{rest}")).await;
    page.wait_for("document.querySelector('main h1') !== null").await;
    page
}

/// The facts beside the story, by their names.
async fn facts(page: &Page) -> Value {
    let facts = "Object.fromEntries([...document.querySelectorAll('.story .facts > div')].map((fact) => \
         [fact.querySelector('dt').innerText, fact.querySelector('dd').innerText]))";
    page.eval(facts).await
}

async fn log_in(page: &Page, key: &str) {
    page.wait_for("document.activeElement.id === 'key'").await;
    page.type_text(key).await;
    page.press("Enter").await;
}

on_both_stores! {
    if crate::support::endure::is_long;

    async fn a_rollout_is_shown_with_its_story_its_messages_and_its_tokens(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 1}})).await;
        app.accept(full(0, 1.0)).await;
        app.accept(full(1, 0.0)).await;
        let batch = app.lease().await;
        app.ack(&batch, 7).await.expect(200);
        let page = shows(app, "g-0", "&segment=1").await;
        page.wait_for("document.querySelectorAll('.tokens > span').length === 5").await;
        assert_eq!(page.text("h1").await, "rollout g-0");
        let story = page.eval("[...document.querySelectorAll('.story li > b')].map((moment) => moment.innerText)").await;
        assert_eq!(story, json!(["received", "kept", "group ready", "batch", "trained by step 7"]));
        assert!(page.text(".story ol").await.contains("a resume below step 7 brings it back"));
        let found = app.get("/trajectories/content?rollout_id=g-0&segment=1").await.expect(200);
        let shown = facts(&page).await;
        let advantage = found["story"]["advantage"].as_f64().expect("a number");
        assert_eq!(shown["advantage"], format!("+{advantage:.2}"));
        assert_eq!((&shown["tokens"], &shown["trained"]), (&json!("7"), &json!("3")));
        assert_eq!((&shown["tests"], &shown["temperature"]), (&json!("0.500"), &json!("0.75")));
        assert_eq!((&shown["environment"], &shown["group"]), (&json!("web"), &json!("g")));
        let said = page.text(".chat").await;
        for part in ["USER", "What is the longest side?", "Heron.", "python", "check(6)", "critic", "The end."] {
            assert!(said.contains(part), "{part} in {said}");
        }
        // The tokens, and what is known of one of them.
        assert_eq!(page.eval(KINDS).await, json!(["prompt", "prompt", "trained", "masked", "trained"]));
        assert_eq!(page.eval(GROUND).await, json!([false, false, false, false, false]));
        page.press("l").await;
        page.wait_for("location.hash.includes('colour=logprob')").await;
        page.wait_for("document.querySelectorAll('.tokens > .inked').length === 2").await;
        assert_eq!(page.eval(GROUND).await, json!([false, false, true, false, true]));
        page.eval("document.querySelector('.tokens').focus()").await;
        for _ in 0..4 {
            page.press("ArrowRight").await;
        }
        let card = page.text("forebay-token-card").await;
        for part in ["#4 · id 11", "mask 1 · logprob −1.50 (p 0.223)", "advantage +", "weight ", "value +0.300", "version 0"] {
            assert!(card.contains(part), "{part} in {card}");
        }
        page.press("g").await;
        page.wait_for("document.querySelectorAll('.tokens > .inked').length === 3").await;
        page.press("v").await;
        page.wait_for("document.querySelector('.legend-line').innerText.includes('+0.3')").await;
        // Other segments and siblings.
        page.press("[").await;
        page.wait_for("document.querySelectorAll('.tokens > span').length === 2").await;
        page.wait_for_text("segment 1 of 2").await;
        page.press("]").await;
        page.wait_for("document.querySelectorAll('.tokens > span').length === 5").await;
        page.press("j").await;
        page.wait_for("document.querySelector('h1')?.innerText === 'rollout g-1'").await;
        page.wait_for_text("sibling 2 of 2").await;
        page.press("k").await;
        page.wait_for("document.querySelector('h1')?.innerText === 'rollout g-0'").await;
        page.assert_clean(origin(app));
    }

    async fn rollouts_that_arrive_are_announced_and_shown_when_the_reader_asks(app: TestApp) {
        app.accept(rollout("a", 1.0)).await;
        let page = open(app, "#/policies/default/rollouts").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 1").await;
        app.accept(rollout("b", 1.0)).await;
        app.accept(rollout("c", 1.0)).await;
        page.pass_ms(3_000).await;
        page.wait_for_text("2 rollouts arrived since.").await;
        let rows = "[...document.querySelectorAll('[data-row]')].map((row) => row.innerText)";
        assert_eq!(page.eval(rows).await, json!(["a"]), "nothing moves under the reader");
        page.click("text=Show").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 3").await;
        assert_eq!(page.eval(rows).await, json!(["c", "b", "a"]));
        page.wait_for("!document.body.innerText.includes('arrived since')").await;
        page.press("j").await;
        page.press("Enter").await;
        page.wait_for("document.querySelector('h1')?.innerText === 'rollout c'").await;
        page.assert_clean(origin(app));
    }

    async fn news_of_a_rollout_are_announced_and_shown_when_the_reader_asks(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "batch": {"groups": 1}})).await;
        app.accept(group("g", &[1.0, 0.0])).await;
        let page = shows(app, "g-0", "").await;
        page.wait_for("document.querySelector('main .badge')?.innerText.includes('ready')").await;
        let batch = app.lease().await;
        app.ack(&batch, 7).await.expect(200);
        page.pass_ms(3_000).await;
        page.wait_for_text("This rollout is now trained.").await;
        assert!(page.text("main .badge").await.contains("ready"), "nothing changes under the reader");
        page.click("text=Show").await;
        page.wait_for("document.querySelector('main .badge')?.innerText.includes('trained, step 7')").await;
        page.assert_clean(origin(app));
    }

    async fn the_stream_is_filtered_and_goes_on(app: TestApp) {
        let filter = json!([{"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
        app.rules("default", json!({"group": {"size": 1}, "filter": filter})).await;
        let many = (0..150).map(|index| with(rollout(&format!("r{index}"), 1.0), json!({"environment": "web"})));
        app.accept(many.collect()).await;
        app.accept(rollout("lost", -1.0)).await;
        let page = open(app, "#/policies/default/rollouts").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 100").await;
        page.click("text=Look further").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 51").await;
        page.click("text=Back to the newest").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 100").await;
        let choose = |name: &str, value: &str| {
            format!("(() => {{ const field = document.querySelector('select[name={name}]'); field.value = '{value}'; \
                 field.dispatchEvent(new Event('change', {{ bubbles: true }})); }})()")
        };
        page.eval(&choose("verdict", "dropped")).await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 1").await;
        assert_eq!(page.eval("location.hash").await, "#/policies/default/rollouts?verdict=dropped");
        let found = app.get("/trajectories?order=newest&verdict=dropped&limit=100").await.expect(200);
        let shown = page.text("main").await;
        for part in ["lost", "low", &format!("Looked through {}: there are no more.", found["examined"])] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        page.eval(&choose("verdict", "")).await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 100").await;
        page.click("input[name=environment]").await;
        page.type_text("elsewhere").await;
        page.press("Enter").await;
        page.wait_for_text("No rollout matches.").await;
        page.assert_clean(origin(app));
    }

    async fn the_calls_of_a_recorded_session_are_shown_with_their_breaks(app: TestApp) {
        sessions::traffic(app).await;
        let page = shows(app, "traffic", "").await;
        page.wait_for_text("recorded session").await;
        let shown = page.text("section[aria-labelledby=session-title]").await;
        for part in ["3 calls", "1 break", "after 100 tokens of call 1", "Expected 11 12 5, found 17 5"] {
            assert!(shown.contains(part), "{part} in {shown}");
        }
        page.assert_clean(origin(app));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mask_that_is_delivered_otherwise_than_sent_is_shown_where_it_differs() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    let filter = json!([{"name": "short", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"}]);
    app.rules("default", json!({"group": {"size": 2}, "filter": filter})).await;
    let segments = json!([{"tokens": [1, 2, 3, 4], "loss_mask": [1, 0, 1]}]);
    app.accept(with(member("g", 0, 1.0), json!({"segments": segments, "status": "truncated"}))).await;
    app.accept(member("g", 1, 0.0)).await;
    let page = shows(&app, "g-0", "").await;
    page.wait_for("document.querySelectorAll('.tokens > span').length === 4").await;
    assert_eq!(page.eval(KINDS).await, json!(["prompt", "withheld", "masked", "withheld"]));
    assert!(page.text(".legend-line").await.contains("mask 1 as sent, not trained as delivered"));
    assert!(page.text(".story ol").await.contains("masked by short"));
    assert_eq!(facts(&page).await["trained"], "0 of 2 with mask 1");
    page.eval("document.querySelector('.tokens > span:nth-child(2)').click()").await;
    assert!(page.text("forebay-token-card").await.contains("mask 1 as sent, not trained as delivered"));
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_shown_is_said_in_sentences() {
    if !endure::is_long() {
        return;
    }
    let mut app = TestApp::start(Backend::Sqlite).await;
    let filter = json!([{"name": "low", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
    app.rules("default", json!({"group": {"size": 1}, "filter": filter})).await;
    app.accept(rollout("a", 1.0)).await;
    app.accept(with(rollout("b", 1.0), json!({"segments": [{"tokens": [1, 9], "loss_mask": [1]}]}))).await;
    app.accept(rollout("lost", -1.0)).await;
    let damage =
        "UPDATE payload SET digest = (SELECT content_digest FROM rollout WHERE rollout_pk = 2) WHERE rollout_pk = 1";
    assert_eq!(app.damage(damage).await, 1);
    for (id, sentences) in [
        ("lost", ["not stored any more", "retention.dropped_s", "dropped by low"]),
        ("a", ["is damaged", "Nothing was changed", "received"]),
        ("nobody", ["No such rollout", "was never posted, or the ledger has forgotten it", "nobody"]),
    ] {
        let page = shows(&app, id, "").await;
        for sentence in sentences {
            page.wait_for_text(sentence).await;
        }
        assert_eq!(page.axe().await, Vec::<String>::new(), "{id}");
        page.assert_clean(origin(&app));
    }
    for (role, sentences) in [
        (Role::Produce, ["This key has the role produce.", "received"]),
        (Role::Train, ["This key has the role train.", "can be looked at with a key"]),
    ] {
        let key = app.key(role, &["*"]).await;
        let page = open(&app, "#/policies/default/rollout?id=b").await;
        log_in(&page, &key).await;
        for sentence in sentences {
            page.wait_for_text(sentence).await;
        }
        page.assert_clean(origin(&app));
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_text_is_found_in_messages_and_across_tokens() {
    if !endure::is_long() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("tokenizer.json");
    let file = json!({
        "model": {"type": "BPE", "vocab": {"The": 7, "Ġlong": 8, "est": 9, "æĹ": 10, "¥": 11}},
        "decoder": {"type": "ByteLevel"},
    });
    std::fs::write(&path, file.to_string()).expect("the file is written");
    let config = format!("[console]\ntokenizers = {{ \"*\" = '{}' }}", path.display());
    let app = TestApp::start_with(Backend::Sqlite, &config).await;
    app.rules("default", json!({"group": {"size": 2}})).await;
    app.accept(full(0, 1.0)).await;
    let page = shows(&app, "g-0", "&segment=1").await;
    page.wait_for_text("Text by the tokenizer that the operator configured").await;
    page.wait_for("document.querySelector('.tokens').innerText === 'The longest·日'").await;
    page.press("f").await;
    page.type_text("LONGEST").await;
    page.wait_for_text("1 of 3").await;
    assert_eq!(page.eval("CSS.highlights.get('found').size").await, 3);
    page.press("Enter").await;
    page.wait_for_text("2 of 3").await;
    page.eval("document.querySelector('#find').value = ''").await;
    page.type_text("nowhere").await;
    page.wait_for_text("not found in what is shown").await;
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tokenizer_that_the_reader_picks_stays_in_the_browser() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.accept(rollout("a", 1.0)).await;
    let page = shows(&app, "a", "").await;
    page.wait_for_text("These are ids").await;
    assert_eq!(page.text(".tokens").await, "1 2 3");
    let pick = async |text: &str| {
        let pick = format!(
            "(() => {{ const data = new DataTransfer(); \
             data.items.add(new File([{}], 'tokenizer.json')); \
             const field = document.querySelector('.pick input'); field.files = data.files; \
             field.dispatchEvent(new Event('change', {{ bubbles: true }})); }})()",
            Value::from(text)
        );
        page.eval(&pick).await;
    };
    pick("no tokenizer").await;
    page.wait_for_text("The file is not JSON").await;
    pick(r#"{"model": {"type": "WordLevel", "vocab": {"one": 1, "two": 2, "three": 3}}}"#).await;
    page.wait_for("document.querySelector('.tokens').innerText === 'one two three'").await;
    // It is there again in a new document, until the reader forgets it.
    page.goto("about:blank").await;
    page.goto(&format!("{}/#/policies/default/rollout?id=a", app.url)).await;
    page.wait_for("document.querySelector('.tokens')?.innerText === 'one two three'").await;
    page.wait_for_text("Text by the file tokenizer.json").await;
    assert!(page.requests().iter().all(|request| request.starts_with("GET ")), "nothing is sent");
    page.click("text=Forget the file").await;
    page.wait_for_text("These are ids").await;
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_are_copied_without_a_clipboard_and_the_answer_opens_as_text() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 2}})).await;
    app.accept(full(0, 1.0)).await;
    let page = shows(&app, "g-0", "").await;
    page.wait_for("document.querySelector('.message .copy button') !== null").await;
    page.eval("Object.defineProperty(navigator, 'clipboard', { value: undefined })").await;
    page.eval("document.querySelector('.message .copy button').click()").await;
    page.wait_for("document.activeElement.value === 'What is the longest side?'").await;
    let selected = "document.activeElement.selectionEnd - document.activeElement.selectionStart";
    assert_eq!(page.eval(selected).await, "What is the longest side?".len());
    let keep = "(() => { URL.createObjectURL = (blob) => { window.kept = blob; return 'blob:none'; }; \
         window.open = (...given) => { window.asked = given; }; })()";
    page.eval(keep).await;
    page.click("text=Open raw JSON").await;
    page.wait_for("window.kept !== undefined").await;
    assert_eq!(
        page.eval("[kept.type, ...asked]").await,
        json!(["text/plain;charset=utf-8", "blob:none", "_blank", "noopener"])
    );
    let raw = page.eval("kept.text()").await;
    let raw: Value = serde_json::from_str(text(&raw)).expect("it is JSON");
    assert_eq!(raw, app.get("/trajectories/content?rollout_id=g-0").await.expect(200));
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_and_the_stream_are_for_everyone() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 2}})).await;
    app.accept(full(0, 1.0)).await;
    app.accept(full(1, 0.0)).await;
    let tokens = "document.querySelectorAll('.tokens > span').length === 5";
    for colour in ["mask", "logprob", "advantage", "value", "version"] {
        everyone::check(&app, &format!("#/policies/default/rollout?id=g-0&segment=1&colour={colour}"), tokens).await;
    }
    everyone::check(&app, "#/policies/default/rollouts", "document.querySelector('[data-row]') !== null").await;
    everyone::check(&app, "#/policies/default/rollouts?verdict=late", "document.querySelector('form select') !== null")
        .await;
    app.finish().await;
}
