//! Looking at groups, batches and steps: what is on the screen is what the service answers, and it stays as it is while
//! somebody reads.

use serde_json::{Value, json};

use super::{Page, open, origin};
use crate::support::{Backend, TestApp, endure, group, member, on_both_stores, text, with};

/// Rules with a filter of each kind, under which groups of four become batches of one.
fn rules() -> Value {
    json!({
        "group": {"size": 4}, "batch": {"groups": 1},
        "filter": [
            {"name": "too-long", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"},
            {"name": "zero-variance", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"},
        ],
    })
}

/// The messages of a rollout: two that all siblings have, and an answer.
fn messages(answer: &str) -> Value {
    json!([
        {"role": "system", "content": "You solve puzzles."},
        {"role": "user", "content": "How long is the hypotenuse?"},
        {"role": "assistant", "content": answer},
    ])
}

/// A group with a flat one beside it; the first has been trained by step 7.
pub(super) async fn trained(app: &TestApp) -> Value {
    app.rules("default", rules()).await;
    app.accept(group("flat", &[0.0, 0.0, 0.0, 0.0])).await;
    for (index, reward) in [1.0, 0.0, 0.5, 0.25].into_iter().enumerate() {
        let more = json!({
            "group_size": 4, "environment": "aime", "messages": messages(&format!("It is {index}.")),
            "status": if index == 1 { "truncated" } else { "completed" },
        });
        app.accept(with(member("puzzle", index, reward), more)).await;
    }
    let batch = app.lease_with(json!({"consumer": "trainer-0"})).await;
    app.ack(&batch, 7).await.expect(200);
    batch
}

/// The cells of the rows of the first table below an element.
async fn rows(page: &Page, scope: &str) -> Value {
    let cells = format!(
        "[...document.querySelectorAll('{scope} tbody tr')].map((row) => [...row.cells].map((cell) => \
         cell.innerText.trim()))"
    );
    page.eval(&cells).await
}

/// A number as the page writes it.
fn shown(value: &Value) -> String {
    let number = value.as_f64().expect("a number");
    if number.fract() == 0.0 { format!("{number}") } else { format!("{number:.3}") }
}

on_both_stores! {
    if crate::support::endure::is_long;

    async fn a_reader_clicks_from_all_policies_to_one_rollout(app: TestApp) {
        trained(app).await;
        let page = open(app, "").await;
        page.click("text=default").await;
        page.click("text=Groups").await;
        page.wait_for("location.hash === '#/policies/default/groups'").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 2").await;
        let answer = app.get("/groups?order=newest").await.expect(200);
        let found = rows(&page, "main").await;
        for (row, group) in found.as_array().expect("rows").iter().zip(answer["groups"].as_array().expect("groups")) {
            assert_eq!(row[0], group["group_id"]);
            assert!(text(&row[1]).ends_with(text(&group["state"])), "{row}");
            assert_eq!(row[2], group["reason"].as_str().unwrap_or_default());
            assert!(text(&row[5]).starts_with(&shown(&group["reward_mean"])), "{row} {group}");
            assert_eq!(row[7], group["tokens"].to_string());
            assert_eq!(row[8], group["trained_tokens"].to_string());
        }
        page.click("text=puzzle").await;
        page.wait_for("document.querySelector('h1').innerText.startsWith('group puzzle')").await;
        page.wait_for("document.querySelectorAll('.message').length > 0").await;
        page.click("text=puzzle-1").await;
        page.wait_for("location.hash === '#/policies/default/rollout?id=puzzle-1'").await;
        page.assert_clean(origin(app));
    }

    async fn a_reader_with_keys_alone_goes_from_all_policies_to_one_rollout(app: TestApp) {
        trained(app).await;
        let page = open(app, "").await;
        page.wait_for("document.querySelector('[data-row]') !== null").await;
        page.press("j").await;
        page.press("Enter").await;
        page.wait_for("document.querySelector('.strip') !== null").await;
        for _ in 0..8 {
            page.press("j").await;
            if page.eval("document.activeElement.innerText.trim() === 'verdicts, 15 min'").await == true {
                break;
            }
        }
        page.press("Enter").await;
        page.wait_for("location.hash === '#/policies/default/groups'").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 2").await;
        page.press("j").await;
        assert_eq!(page.eval("document.activeElement.innerText.trim()").await, "puzzle", "the newest group is first");
        page.press("Enter").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 4").await;
        page.press("w").await;
        assert_eq!(page.eval("document.activeElement.id").await, "why");
        page.press("j").await;
        assert_eq!(page.eval("document.activeElement.innerText.trim()").await, "puzzle-0", "the highest reward is first");
        page.press("Enter").await;
        page.wait_for("location.hash === '#/policies/default/rollout?id=puzzle-0'").await;
        page.assert_clean(origin(app));
    }

    async fn a_group_shows_why_it_was_decided_and_how_its_rollouts_compare(app: TestApp) {
        trained(app).await;
        let page = open(app, "#/policies/default/groups?id=puzzle").await;
        page.wait_for("document.querySelector('.beside') && !document.querySelector('.beside').innerText.includes('Loading')")
            .await;
        // The masked rollout counts in what the filters see.
        let decision = page.text(".decision").await;
        assert!(decision.contains("4 rewards: mean 0.438, std 0.370, 0 to 1; 3 rollouts kept, 1 masked"), "{decision}");
        assert!(decision.contains("zero-variance reward_std < 1e-6 does not match"), "{decision}");
        let story = app.get("/trajectories?group_id=puzzle").await.expect(200);
        let story = story["trajectories"].as_array().expect("stories");
        let found = rows(&page, "main").await;
        let order: Vec<&str> = found.as_array().expect("rows").iter().map(|row| text(&row[0])).collect();
        assert_eq!(order, ["puzzle-0", "puzzle-2", "puzzle-3", "puzzle-1"], "by reward");
        for row in found.as_array().expect("rows") {
            let rollout = story.iter().find(|rollout| rollout["rollout_id"] == row[0]).expect("it is there");
            assert!(text(&row[1]).ends_with(text(&rollout["verdict"])), "{row}");
            assert_eq!(row[2], rollout["status"]);
            assert_eq!(row[3], shown(&rollout["reward"]));
            let advantage = rollout["advantage"].as_f64().expect("a number");
            assert_eq!(text(&row[4]).replace('−', "-"), format!("{advantage:+.2}"));
            assert_eq!(row[5], rollout["tokens"].to_string());
            let trained = if rollout["verdict"] == "kept" { rollout["trained_tokens"].to_string() } else { "0".into() };
            assert_eq!(row[6], trained);
        }
        assert!(text(&found[3][8]).contains("too-long: counts in the baseline, trains nothing"), "{found}");
        // What all have in common is folded; the answers stand side by side.
        assert!(page.text("details summary").await.starts_with("2 messages in common: system, user"));
        let answers = page.eval("[...document.querySelectorAll('.words')].map((words) => words.innerText)").await;
        assert_eq!(answers, json!(["It is 0.", "It is 2.", "It is 3.", "It is 1."]));
        page.assert_clean(origin(app));
    }

    async fn a_discarded_group_names_the_filter_that_matched(app: TestApp) {
        trained(app).await;
        let page = open(app, "#/policies/default/groups?state=discarded&reason=zero-variance").await;
        page.click("text=flat").await;
        page.wait_for("document.querySelector('.decision') !== null").await;
        let decision = page.text(".decision").await;
        assert!(decision.contains("4 rewards: mean 0, std 0.000"), "{decision}");
        assert!(decision.contains("→ discarded as zero-variance"), "{decision}");
        assert!(decision.contains("zero-variance reward_std < 1e-6 matches"), "{decision}");
        page.press("u").await;
        page.wait_for("location.hash === '#/policies/default/groups'").await;
        page.assert_clean(origin(app));
    }

    async fn a_group_changes_only_when_the_reader_asks(app: TestApp) {
        app.rules("default", rules()).await;
        app.accept(with(member("g", 0, 1.0), json!({"group_size": 4}))).await;
        let page = open(app, "#/policies/default/groups?id=g").await;
        page.wait_for("document.querySelectorAll('tbody tr').length === 1").await;
        let contents = page.requests().iter().filter(|request| request.contains("/content?")).count();
        app.accept(with(member("g", 1, 0.0), json!({"group_size": 4}))).await;
        page.pass_ms(3_000).await;
        page.wait_for_text("1 rollout arrived since.").await;
        assert_eq!(page.eval("document.querySelectorAll('tbody tr').length").await, 1, "the reader has not asked");
        page.click("text=Show").await;
        page.wait_for("document.querySelectorAll('tbody tr').length === 2").await;
        page.wait_for("document.querySelectorAll('.sibling').length === 2").await;
        let again = page.requests().iter().filter(|request| request.contains("/content?")).count();
        assert_eq!(again, contents + 1, "what is known is not fetched again");
        page.assert_clean(origin(app));
    }

    async fn a_batch_shows_its_leases_its_groups_and_its_worst_rollout(app: TestApp) {
        let batch = trained(app).await;
        let page = open(app, "#/policies/default/batches").await;
        page.wait_for("document.querySelectorAll('[data-row]').length === 1").await;
        let batch = app.batch(&batch).await;
        let listed = rows(&page, "main").await;
        assert_eq!(listed[0][2], "7");
        assert_eq!(listed[0][7], shown(&batch["metrics"]["reward/all"]));
        assert_eq!(listed[0][8], shown(&batch["metrics"]["reward/trained"]));
        page.press("j").await;
        page.press("Enter").await;
        page.wait_for("document.querySelector('#worst-title') !== null").await;
        let facts = page.eval("Object.fromEntries([...document.querySelectorAll('dl.facts > div')].map((fact) => \
             [fact.children[0].innerText, fact.children[1].innerText]))").await;
        assert_eq!(facts["last holder"], "trainer-0");
        assert_eq!(facts["step"], "7");
        assert_eq!(facts["tokens"], batch["tokens"].to_string());
        let worst = rows(&page, "section[aria-labelledby=worst-title]").await;
        assert_eq!(worst[0][0], "puzzle-3", "the masked rollout was not trained: {worst}");
        page.click("text=7").await;
        page.wait_for("location.hash === '#/policies/default/steps?id=7'").await;
        // The batch is shown until the step has been read, and it has a table of the lowest rewards, too.
        page.wait_for("document.querySelector('#batches-title') !== null").await;
        page.wait_for("document.querySelector('#worst-title') !== null").await;
        assert_eq!(rows(&page, "section[aria-labelledby=worst-title]").await, worst);
        page.assert_clean(origin(app));
    }

    async fn charts_of_a_policy_show_the_history_that_the_service_has_kept(app: TestApp) {
        app.pass_s(70.0).await;
        let batch = trained(app).await;
        app.pass_s(70.0).await;
        let page = open(app, "#/policies/default").await;
        page.wait_for("document.querySelectorAll('forebay-chart').length === 6").await;
        page.press("t").await;
        page.wait_for("document.querySelectorAll('forebay-chart table').length >= 4").await;
        let answer = app.get("/policies/default/series?metrics=kept,masked").await.expect(200);
        let (kept, masked) = (&answer["metrics"]["kept"], &answer["metrics"]["masked"]);
        let tables = "[...document.querySelectorAll('forebay-chart')].map((chart) => [...chart.querySelectorAll('tbody tr')]\
             .map((row) => [...row.cells].map((cell) => cell.innerText)))";
        let tables = page.eval(tables).await;
        let shown = |row: &Value| row[1].as_str().expect("the text of a cell").to_owned();
        let shown_kept: Vec<String> = tables[0].as_array().expect("rows").iter().rev().map(shown).collect();
        let number = |value: &Value| value.as_f64().map_or("–".to_owned(), |value| format!("{value}"));
        let expected: Vec<String> = kept.as_array().expect("a column").iter().map(number).collect();
        // The page shows ten minutes of the hour, because nothing is older. They begin in the middle of a minute.
        assert!(shown_kept.len() > 10 && expected.ends_with(&shown_kept), "{shown_kept:?} and {expected:?}");
        let total = |column: &Value| column.as_array().expect("a column").iter().filter_map(Value::as_f64).sum::<f64>();
        assert_eq!((total(kept), total(masked)), (7.0, 1.0), "{answer}");
        // Charts over steps.
        let batch = app.batch(&batch).await;
        let mean = |name: &str| format!("{:.2}", batch["metrics"][name].as_f64().expect("a number"));
        assert_eq!(tables[3], json!([["step 7", mean("reward/all"), mean("reward/trained")]]));
        page.assert_clean(origin(app));
    }

    async fn a_list_has_filters_in_its_address_and_says_when_there_is_more(app: TestApp) {
        trained(app).await;
        let page = open(app, "#/policies/default/groups").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 2").await;
        page.eval("(() => { const state = document.querySelector('main select'); state.value = 'discarded'; \
             state.dispatchEvent(new Event('change', {bubbles: true})); })()").await;
        page.wait_for("location.hash === '#/policies/default/groups?state=discarded'").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 1").await;
        page.wait_for_text("Looked through 2: there are no more.").await;
        app.accept(group("later", &[1.0, 0.0, 1.0, 0.0])).await;
        page.pass_ms(3_000).await;
        page.wait_for_text("There are newer groups.").await;
        page.eval("history.back()").await;
        page.wait_for("document.querySelectorAll('td [data-row]').length === 3").await;
        page.assert_clean(origin(app));
    }
}

/// Texts that would do something if they were taken for anything but text.
const HOSTILE: &str = "<script>alert(1)</script><img src=x onerror=alert(2)>\u{202e}\u{1b}[31m";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_and_endless_texts_neither_run_nor_blow_up_a_group() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 3}, "filter": []})).await;
    let id = format!("{HOSTILE}/?#&")[..40].to_owned().replace('\u{1b}', "");
    for index in 0..3 {
        let messages: Vec<Value> = (0..120)
            .map(|number| match (index + number) % 4 {
                0 => json!({"role": HOSTILE, "content": HOSTILE}),
                1 => json!({"role": "assistant", "content": "x".repeat(200_000)}),
                2 => json!({"__proto__": {"a": HOSTILE}, "content": [[[1]], {"type": "image_url", "url": "javascript:alert(3)"}]}),
                _ => json!({"role": "tool", "name": HOSTILE, "content": null, "tool_calls": [7, {"function": {"name": HOSTILE}}]}),
            })
            .collect();
        let more = json!({"group_id": id, "group_size": 3, "messages": messages, "environment": "<i>env"});
        app.accept(with(member("h", index, [1.0, -2.5, 0.0][index]), more)).await;
    }
    let page = open(&app, "#/policies/default/groups").await;
    page.press("j").await;
    page.wait_for("document.querySelector('td [data-row]') !== null").await;
    page.eval("document.querySelector('td [data-row]').click()").await;
    page.wait_for("document.querySelectorAll('.sibling').length === 3").await;
    page.wait_for("!document.querySelector('.beside').innerText.includes('Loading')").await;
    let size = page
        .eval("[document.querySelectorAll('*').length, document.body.innerText.length, document.documentElement.scrollWidth - innerWidth]")
        .await;
    assert!(size[0].as_i64() < Some(20_000), "elements: {size}");
    assert!(size[1].as_i64() < Some(2_000_000), "characters: {size}");
    assert_eq!(size[2], 0, "nothing scrolls sideways");
    assert_eq!(page.eval("document.querySelectorAll('main script, main img, main iframe').length").await, 0);
    assert_eq!(page.axe().await, Vec::<String>::new());
    page.assert_clean(origin(&app));
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn columns_of_siblings_scroll_together_until_the_reader_separates_them() {
    if !endure::is_long() {
        return;
    }
    let app = TestApp::start(Backend::Sqlite).await;
    app.rules("default", json!({"group": {"size": 3}, "filter": []})).await;
    for index in 0..3 {
        let answer = format!("{index} ").repeat(1_400);
        let more = json!({"group_size": 3, "messages": messages(&answer)});
        app.accept(with(member("g", index, [0.0, 1.0, 0.5][index]), more)).await;
    }
    let page = open(&app, "#/policies/default/groups?id=g").await;
    page.wait_for(
        "document.querySelector('details') && !document.querySelector('.beside').innerText.includes('Loading')",
    )
    .await;
    let places = "[...document.querySelectorAll('.sibling .messages')].map((column) => column.scrollTop)";
    page.eval("document.querySelector('.sibling .messages').scrollTop = 120").await;
    page.wait_for(&format!("{places}.every((place) => place === 120)")).await;
    page.click("text=scroll together").await;
    page.eval("document.querySelectorAll('.sibling .messages')[1].scrollTop = 40").await;
    page.wait_for(&format!("JSON.stringify({places}) === '[120,40,120]'")).await;
    page.assert_clean(origin(&app));
    app.finish().await;
}
