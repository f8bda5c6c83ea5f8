//! Questions of somebody who runs training, answered from the first screen in few actions.

use serde_json::json;

use super::{open, origin};
use crate::support::{TestApp, group, member, on_both_stores, with};

/// A policy whose filter discards flat groups, with two trained steps, of which the second has the worst answer.
async fn history(app: &TestApp) {
    let rules = json!({
        "group": {"size": 2}, "batch": {"groups": 2}, "retention": {"dropped_s": 3600},
        "filter": [{"name": "zero-variance", "scope": "group", "when": "reward_std < 1e-6", "action": "drop"}],
    });
    app.rules("math.solver", rules).await;
    let post =
        async |groups: &[(&str, [f64; 2])]| {
            for (name, rewards) in groups {
                let members = group(name, rewards);
                let members = members.as_array().expect("a bundle").iter();
                let members = members.map(|each| with(each.clone(), json!({"policy": "math.solver", "messages": [
                {"role": "user", "content": "?"}, {"role": "assistant", "content": format!("answer of {name}")},
            ]})));
                app.accept(members.collect()).await;
            }
        };
    for (step, groups) in [
        (1, [("a", [1.0, 0.0]), ("flat-1", [0.0, 0.0]), ("b", [1.0, 0.5])]),
        (2, [("c", [1.0, 0.25]), ("flat-2", [0.0, 0.0]), ("d", [-0.75, 0.5])]),
    ] {
        post(&groups).await;
        let batch = app.lease_with(json!({"policy": "math.solver", "consumer": "trainer-0"})).await;
        app.pass_s(30.0).await;
        app.ack(&batch, step).await.expect(200);
        app.pass_s(60.0).await;
    }
    // It arrives after its group was decided.
    app.accept(with(member("a", 7, 1.0), json!({"policy": "math.solver"}))).await;
}

on_both_stores! {
    if crate::support::endure::is_long;

    async fn why_a_rollout_was_not_trained_takes_its_id(app: TestApp) {
        history(app).await;
        for (id, screen, expected) in [
            ("a-7", "rollout", "Not trained: its group a was decided"),
            ("flat-1-0", "rollout", "the filter zero-variance discarded group flat-1; all rewards were 0"),
            ("c-1", "rollout", "Trained by step 2"),
            ("flat-1", "groups", "zero-variance: drop when reward_std < 1e-6"),
        ] {
            let page = open(app, "").await;
            page.wait_for("document.querySelector('[data-row]') !== null").await;
            page.press("/").await;
            page.type_text(id).await;
            page.press("Enter").await;
            page.wait_for_text(expected).await;
            // Its own screen is one click away.
            page.click("#why .row [data-row]").await;
            page.wait_for(&format!("location.hash === '#/policies/math.solver/{screen}?id={id}'")).await;
            page.wait_for("document.querySelector('h1') !== null").await;
            page.eval("history.back()").await;
            page.wait_for_text(expected).await;
            page.eval("history.back()").await;
            page.wait_for("document.querySelector('td [data-row]') !== null").await;
            page.assert_clean(origin(app));
        }
        let page = open(app, "#/why?id=nobody").await;
        page.wait_for_text("never posted here, or it was forgotten").await;
    }

    async fn the_worst_answer_of_the_last_step_is_four_clicks_away(app: TestApp) {
        history(app).await;
        let page = open(app, "").await;
        page.click("text=math.solver").await;
        page.click("text=Steps").await;
        page.wait_for("document.querySelector('td [data-row]') !== null").await;
        assert_eq!(page.text("td [data-row]").await, "2", "the newest step is first");
        page.click("td [data-row]").await;
        page.wait_for("document.querySelector('#worst-title') !== null").await;
        let worst = page.text("section[aria-labelledby=worst-title] td [data-row]").await;
        assert_eq!(worst, "d-0");
        page.click("section[aria-labelledby=worst-title] td [data-row]").await;
        page.wait_for_text("answer of d").await;
        page.assert_clean(origin(app));
    }

    async fn what_a_filter_costs_is_seen_without_it(app: TestApp) {
        history(app).await;
        let page = open(app, "").await;
        page.click("text=math.solver").await;
        page.click("text=Try a filter").await;
        page.click("text=Remove").await;
        page.click("text=Try").await;
        page.wait_for_text("Copy as curl").await;
        let cells = "[...document.querySelectorAll('section[aria-labelledby=outcome-title] tbody tr')].slice(0, 2)\
             .map((row) => [...row.cells].map((cell) => cell.innerText.trim()))";
        assert_eq!(page.eval(cells).await, json!([["ready", "4", "4", "6", "+2"], ["zero-variance", "2", "2", "0", "−2"]]));
        let notes = page.eval("[...document.querySelectorAll('.notice.warn')].map((note) => note.innerText)").await;
        assert!(notes.to_string().contains('2'), "what comes in trains nothing: {notes}");
        // Nothing has changed.
        let status = app.get("/policies/math.solver").await.expect(200);
        assert_eq!(status["rules"]["filter"].as_array().map(Vec::len), Some(1));
        page.assert_clean(origin(app));
    }
}
