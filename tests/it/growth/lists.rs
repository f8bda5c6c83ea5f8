//! Lists: a page of a filtered list examines a bounded number of rows, however few of them match.

use serde_json::{Value, json};

use crate::support::{TestApp, on_both_stores, rollout, text, with};

/// More rollouts, and groups, than one page examines.
const ROLLOUTS: usize = 10_500;

/// The most that one page examines.
const EXAMINED_MAX: usize = 10_000;

/// Rollouts of one bulk body.
const BODY: usize = 3_500;

/// Reads all pages of a list, in one of the orders. Returns the number of entries of each, and how many were examined.
async fn pages(app: &TestApp, list: &str, order: &str, entries: &str) -> Vec<(usize, usize)> {
    let mut pages = Vec::new();
    let mut page = app.get(&format!("{list}&order={order}")).await.expect(200);
    loop {
        let examined = page["examined"].as_u64().expect("a number") as usize;
        pages.push((page[entries].as_array().expect("a page").len(), examined));
        assert!(pages.len() < 20, "the walk goes on without an end: {pages:?}");
        page = match &page["next"] {
            Value::Null => return pages,
            // The cursor has the order.
            next => app.get(&format!("{list}&after={}", text(next))).await.expect(200),
        };
    }
}

/// The pages of a list in which few entries match, in both orders.
async fn sparse_pages(app: &TestApp, list: &str, entries: &str, expected: [usize; 2]) {
    let rest = ROLLOUTS - EXAMINED_MAX;
    for order in ["oldest", "newest"] {
        let found = pages(app, list, order, entries).await;
        assert_eq!(found, [(expected[0], EXAMINED_MAX), (expected[1], rest)], "{list} {order}");
    }
}

async fn post_lines(app: &TestApp, lines: &[String]) {
    let request = app.http.post(format!("{}/trajectories", app.url)).body(lines.join("\n"));
    let request = request.header("content-type", "application/x-ndjson");
    let answers = request.send().await.expect("the server answers").text().await.expect("text");
    assert_eq!(answers.matches("\"status\":201").count(), lines.len());
}

/// A ledger of one policy in which almost no row matches the filters: only those of the first and the last rollout.
async fn fill(app: &TestApp) {
    app.rules(
        "default",
        json!({"filter": [
            {"name": "bad", "scope": "rollout", "when": "reward < 0.0", "action": "drop"},
            {"name": "odd", "scope": "group", "when": "reward_mean > 1.5", "action": "drop"}
        ]}),
    )
    .await;
    for body in 0..ROLLOUTS / BODY {
        let lines: Vec<String> = (0..BODY)
            .map(|index| {
                let number = body * BODY + index;
                let sent = match number {
                    0 => json!({"reward": -1.0, "environment": "rare"}),
                    1 => json!({"reward": 2.0}),
                    _ if number + 2 == ROLLOUTS => json!({"reward": 2.0}),
                    _ if number + 1 == ROLLOUTS => json!({"reward": -1.0, "environment": "rare"}),
                    _ => json!({}),
                };
                with(with(rollout(&format!("r{number}"), 1.0), json!({"execution_id": "x"})), sent).to_string()
            })
            .collect();
        post_lines(app, &lines).await;
    }
}

on_both_stores! {
    async fn a_page_of_a_filtered_list_examines_a_bounded_number_of_rows(app: TestApp) {
        fill(app).await;
        for filter in ["verdict=dropped", "reason=bad", "state=dropped", "environment=rare", "state=discarded"] {
            sparse_pages(app, &format!("/trajectories?{filter}"), "trajectories", [1, 1]).await;
        }
        sparse_pages(app, "/trajectories?step=1", "trajectories", [0, 0]).await;
        for filter in ["reason=odd", "state=discarded", "state=discarded&reason=odd", "environment=rare"] {
            sparse_pages(app, &format!("/groups?{filter}"), "groups", [1, 1]).await;
        }
        for filter in ["state=quarantined", "reason=none", "environment=none"] {
            sparse_pages(app, &format!("/groups?{filter}"), "groups", [0, 0]).await;
        }
        // A list of all policies says nothing of rows that the caller may not see.
        app.rules("other", json!({})).await;
        for (filter, expected) in [("verdict=dropped", 1), ("policy=other", 0), ("group_id=none", 0)] {
            for order in ["oldest", "newest"] {
                let list = format!("/trajectories?execution_id=x&{filter}&limit=1000");
                let found: Vec<_> = pages(app, &list, order, "trajectories").await.iter().map(|page| page.0).collect();
                assert_eq!(found, [expected, expected], "{filter} {order}");
            }
        }
        // A page of an unfiltered list is limited only by its size, and ends when it is full.
        for order in ["oldest", "newest"] {
            let full = [vec![(1000, 1000); 10], vec![(500, 500)]].concat();
            assert_eq!(pages(app, "/trajectories?limit=1000", order, "trajectories").await, full);
        }
        // A page that is full has examined the rows up to its last entry.
        let kept = pages(app, "/trajectories?limit=1000&verdict=kept", "newest", "trajectories").await;
        let full = [vec![(1000, 1001)], vec![(1000, 1000); 9], vec![(498, 499)]].concat();
        assert_eq!(kept, full);
    }

    async fn pages_of_groups_with_many_late_rollouts_are_bounded_too(app: TestApp) {
        let late = |number: usize| with(rollout(&format!("r{number}"), 1.0), json!({"group_id": "g", "group_size": 1}));
        for body in 0..ROLLOUTS / BODY {
            let lines: Vec<String> = (0..BODY).map(|index| late(body * BODY + index).to_string()).collect();
            post_lines(app, &lines).await;
        }
        let rest = ROLLOUTS - EXAMINED_MAX;
        for (order, expected) in [("oldest", [1, 0]), ("newest", [0, 1])] {
            let found = pages(app, "/trajectories?group_id=g&verdict=kept", order, "trajectories").await;
            assert_eq!(found, [(expected[0], EXAMINED_MAX), (expected[1], rest)], "{order}");
        }
    }
}
