//! The log of steps: what the batches of each step had, one by one and in buckets.

use serde_json::{Value, json};

use crate::support::{TestApp, group, on_both_stores};

async fn steps(app: &TestApp, query: &str) -> Value {
    app.get(&format!("/policies/default/steps?{query}")).await.expect(200)
}

fn column(page: &Value, name: &str) -> Vec<Value> {
    page["steps"].as_array().expect("a list").iter().map(|step| step[name].clone()).collect()
}

/// Trains a group with these rewards as a step. The trainer holds its batch for 2 s.
async fn train(app: &TestApp, step: i64, rewards: &[f64]) {
    app.accept(group(&format!("g{step}"), rewards)).await;
    let batch = app.lease().await;
    app.clock.advance_s(2.0);
    app.ack(&batch, step).await.expect(200);
}

on_both_stores! {
    async fn a_step_has_what_its_batches_had(app: TestApp) {
        app.publish(4).await.expect(200);
        app.accept(group("a", &[1.0, 0.0])).await;
        app.accept(group("b", &[0.5, 0.5, 0.5, 0.5])).await;
        let first = app.lease().await;
        app.clock.advance_s(2.0);
        app.ack(&first, 1).await.expect(200);
        let last = app.lease().await;
        app.clock.advance_s(2.0);
        app.ack(&last, 1).await.expect(200);
        let page = steps(app, "").await;
        assert_eq!(page["steps"].as_array().map(Vec::len), Some(1));
        let step = &page["steps"][0];
        let expected = json!({
            "step": 1, "epoch": step["epoch"], "acked_at": "2026-01-01T00:00:04.000000Z", "undone": false, "batches": 2,
            "groups": 2, "flat_groups": 1, "rollouts": 6, "tokens": 18, "trained_tokens": 12, "reward_trained": 0.5,
            "reward_all": step["reward_all"], "staleness_mean": 0.0, "staleness_max": 0, "waited_ms": 0,
            "held_ms": 4000, "attempts": 2, "version": 4,
        });
        assert_eq!(*step, expected);
        assert_eq!((&page["next"], &page["buckets"]), (&Value::Null, &json!([])));
        // A repeated ack changes nothing.
        app.ack(&last, 1).await.expect(200);
        assert_eq!(steps(app, "").await, page);
    }

    async fn steps_are_listed_in_both_orders_page_by_page(app: TestApp) {
        for step in 1..=5 {
            train(app, step, &[1.0, 0.0]).await;
        }
        for (order, expected) in [("oldest", [1, 2, 3, 4, 5]), ("newest", [5, 4, 3, 2, 1])] {
            let mut found = Vec::new();
            let mut query = format!("order={order}&limit=2");
            loop {
                let page = steps(app, &query).await;
                found.extend(column(&page, "step"));
                let Some(next) = page["next"].as_str() else { break };
                // The cursor has its order.
                query = format!("after={next}&limit=2");
            }
            assert_eq!(found, expected.map(Value::from), "{order}");
        }
        let next = steps(app, "order=newest&limit=2").await["next"].clone();
        let other = format!("/policies/default/steps?order=oldest&after={}", next.as_str().expect("a cursor"));
        assert_eq!(app.get(&other).await.pointers(422), ["after"]);
    }

    async fn a_resume_marks_the_steps_that_it_goes_back_before(app: TestApp) {
        for step in 1..=3 {
            train(app, step, &[1.0, 0.0]).await;
        }
        app.checkpoint(1).await;
        app.resume(Some(1)).await;
        assert_eq!(column(&steps(app, "").await, "undone"), [json!(false), json!(true), json!(true)]);
        let again = app.lease().await;
        app.ack(&again, 2).await.expect(200);
        let page = steps(app, "").await;
        assert_eq!(column(&page, "step"), [1, 2, 2, 3].map(Value::from));
        assert_eq!(column(&page, "undone"), [false, true, false, true].map(Value::from));
        let buckets = steps(app, "from=1&to=3&points=1").await["buckets"].clone();
        assert_eq!((&buckets[0]["steps"], &buckets[0]["undone"]), (&json!(2), &json!(2)));
    }

    async fn buckets_have_the_mean_and_the_bounds_of_their_steps(app: TestApp) {
        for (step, rewards) in [(1, [0.0, 0.5]), (2, [0.0, 1.0]), (3, [1.0, 1.0]), (6, [0.25, 0.25])] {
            train(app, step, &rewards).await;
        }
        let found = steps(app, "from=0&to=8&points=3").await;
        assert_eq!(found["steps"], json!([]));
        let buckets = found["buckets"].as_array().expect("a list");
        let of = |name: &str| buckets.iter().map(|bucket| bucket[name].clone()).collect::<Vec<_>>();
        // Steps 0 to 2, 3 to 5 and 6 to 8.
        assert_eq!(of("step_from"), [1, 3, 6].map(Value::from));
        assert_eq!(of("step_to"), [2, 3, 6].map(Value::from));
        assert_eq!(of("steps"), [2, 1, 1].map(Value::from));
        assert_eq!(of("reward_trained")[0], json!({"mean": 0.375, "min": 0.25, "max": 0.5}));
        assert_eq!(of("reward_trained")[1], json!({"mean": 1.0, "min": 1.0, "max": 1.0}));
        assert_eq!(of("flat_groups")[0], json!({"mean": 0.0, "min": 0.0, "max": 0.0}));
        assert_eq!(of("flat_groups")[2], json!({"mean": 1.0, "min": 1.0, "max": 1.0}));
        assert_eq!(of("held_ms")[0], json!({"mean": 2000.0, "min": 2000.0, "max": 2000.0}));
        assert_eq!(of("tokens")[0]["mean"], 6.0);
        assert_eq!(of("staleness_max"), [0, 0, 0].map(Value::from));
        assert_eq!(buckets[0]["acked_at"], "2026-01-01T00:00:04.000000Z");
    }

    async fn a_reset_begins_a_log_without_steps(app: TestApp) {
        train(app, 1, &[1.0, 0.0]).await;
        app.call(reqwest::Method::POST, "/policies/default/reset", None).await.expect(200);
        assert_eq!(steps(app, "").await["steps"], json!([]));
    }

    async fn the_newest_steps_are_kept(app: TestApp) {
        const MANY: &str = "
            WITH RECURSIVE acked (number) AS (
                SELECT CAST(1 AS BIGINT) UNION ALL SELECT number + 1 FROM acked WHERE number < 100100
            )
            INSERT INTO step_log (
                policy_pk, run, step, epoch, acked_us, batches, groups, flat_groups, rollouts, tokens, trained_tokens,
                reward_sum, reward_count, all_mean, stale_sum, stale_max, waited_us, held_us, attempts, version, undone
            )
            SELECT p.policy_pk, CASE WHEN a.number <= 50 THEN 0 ELSE 1 END, a.number, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0,
                0, 0, 0, 1, 0, 0
            FROM policy AS p
            CROSS JOIN acked AS a
            WHERE p.name = 'default'";
        app.tamper(MANY).await;
        let rows = || app.read_value("SELECT COUNT(*) FROM step_log".to_owned());
        for minute in 0..61 {
            app.publish(minute + 1).await.expect(200);
            app.pass_s(60.0).await;
        }
        assert_eq!(rows().await, 100_000);
        assert_eq!(steps(app, "limit=1").await["steps"][0]["step"], 101);
        let buckets = steps(app, "from=0&to=100100&points=500").await["buckets"].clone();
        assert_eq!(buckets.as_array().map(Vec::len), Some(499));
    }

    async fn what_cannot_be_shown_is_refused_with_the_name_of_the_parameter(app: TestApp) {
        for (query, parameter) in [
            ("from=1", "from"),
            ("to=1", "from"),
            ("points=3", "from"),
            ("from=2&to=1", "to"),
            ("from=-1&to=1", "from"),
            ("from=0&to=1&points=0", "points"),
            ("from=0&to=1&points=1001", "points"),
            ("from=0&to=1&order=newest", "from"),
            ("after=x", "after"),
            ("after=1", "after"),
            ("limit=1001", "limit"),
        ] {
            assert_eq!(app.get(&format!("/policies/default/steps?{query}")).await.pointers(422), [parameter], "{query}");
        }
        app.get("/policies/none/steps").await.refused(404, "unknown-policy");
    }
}
