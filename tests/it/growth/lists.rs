//! Lists: a page of a filtered list examines a bounded number of rows, however few of them match.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, rollout, text, with};

/// More rollouts, and groups, than one page examines.
const ROLLOUTS: usize = 4_500;

/// Rollouts of one bulk body.
const BODY: usize = 1_500;

/// Reads all pages of a list and returns the number of entries of each.
async fn pages(app: &TestApp, list: &str, entries: &str) -> Vec<usize> {
    let (mut pages, mut after) = (Vec::new(), "0".to_owned());
    loop {
        let page = app.get(&format!("{list}&after={after}")).await.expect(200);
        pages.push(page[entries].as_array().expect("a page").len());
        match &page["next"] {
            Value::Null => return pages,
            next => text(next).clone_into(&mut after),
        }
        assert!(pages.len() < 10, "the walk goes on without an end: {pages:?}");
    }
}

/// A ledger of one policy in which almost no row matches the filters.
async fn fill(app: &TestApp) {
    app.rules(
        "default",
        json!({"filter": [{"name": "bad", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]}),
    )
    .await;
    for body in 0..ROLLOUTS / BODY {
        let lines: Vec<String> = (0..BODY)
            .map(|index| {
                let number = body * BODY + index;
                // The first and the last rollout.
                let reward = if number + 1 == ROLLOUTS || number == 0 { -1.0 } else { 1.0 };
                with(rollout(&format!("r{number}"), reward), json!({"execution_id": "x"})).to_string()
            })
            .collect();
        let request = app.http.post(format!("{}/trajectories", app.url)).body(lines.join("\n"));
        let answer = request.header("content-type", "application/x-ndjson").send().await.expect("the server answers");
        let answers = answer.text().await.expect("text");
        assert_eq!(answers.matches("\"status\":201").count(), BODY);
    }
}

on_both_stores! {
    async fn a_page_of_a_filtered_list_examines_a_bounded_number_of_rows(app: TestApp) {
        fill(app).await;
        for list in ["verdict=dropped", "reason=bad", "state=dropped"] {
            assert_eq!(pages(app, &format!("/trajectories?{list}"), "trajectories").await, [1, 1], "{list}");
        }
        assert_eq!(pages(app, "/trajectories?step=1", "trajectories").await, [0, 0]);
        app.rules("other", json!({})).await;
        for filter in ["verdict=dropped", "policy=other", "group_id=none"] {
            let expected = if filter == "verdict=dropped" { [1, 1] } else { [0, 0] };
            let list = format!("/trajectories?execution_id=x&{filter}&limit=1000");
            assert_eq!(pages(app, &list, "trajectories").await, expected, "{filter}");
        }
        assert_eq!(pages(app, "/groups?state=quarantined", "groups").await, [0, 0]);
        // A page of an unfiltered list is limited only by its size, and ends when it is full.
        assert_eq!(pages(app, "/trajectories?limit=1000", "trajectories").await, [1000, 1000, 1000, 1000, 500]);
        assert_eq!(pages(app, "/trajectories?limit=1000&verdict=kept", "trajectories").await, [1000, 1000, 1000, 1000, 498]);
    }

    async fn pages_of_groups_with_many_late_rollouts_are_bounded_too(app: TestApp) {
        let late = |number: usize| with(rollout(&format!("r{number}"), 1.0), json!({"group_id": "g", "group_size": 1}));
        for body in 0..ROLLOUTS / BODY {
            let lines: Vec<String> = (0..BODY).map(|index| late(body * BODY + index).to_string()).collect();
            let request = app.http.post(format!("{}/trajectories", app.url)).body(lines.join("\n"));
            let request = request.header("content-type", "application/x-ndjson");
            let answers = request.send().await.expect("the server answers").text().await.expect("text");
            assert_eq!(answers.matches("\"status\":201").count(), BODY);
        }
        assert_eq!(pages(app, "/trajectories?group_id=g&verdict=kept", "trajectories").await, [1, 0]);
    }
}
