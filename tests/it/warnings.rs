//! Impossible values are refused. Doubtful values are stored as they were sent, with a named warning.

use serde_json::{Value, json};

use crate::support::{TestApp, group, member, on_both_stores, rollout, text, with};

/// A rollout whose first segment also has these fields.
fn with_segment(rollout_id: &str, fields: Value) -> Value {
    let mut rollout = rollout(rollout_id, 1.0);
    let segment = rollout["segments"][0].take();
    rollout["segments"][0] = with(segment, fields);
    rollout
}

/// The names of a receipt's warnings.
fn names(receipt: &Value) -> Vec<&str> {
    let warnings = receipt["warnings"].as_array().expect("a receipt has warnings");
    warnings.iter().map(|warning| text(warning).split(':').next().expect("a name stands first")).collect()
}

/// How many warnings of this name the metrics count for `default`.
async fn counted(app: &TestApp, name: &str) -> u64 {
    let line = format!("forebay_ingest_warnings_total{{policy=\"default\",warning=\"{name}\"}} ");
    let metrics = app.metrics().await;
    metrics.lines().find_map(|found| found.strip_prefix(&line)?.parse().ok()).unwrap_or(0)
}

on_both_stores! {
    async fn impossible_log_probabilities_are_refused_where_they_count(app: TestApp) {
        for (fields, pointers) in [
            (json!({"logprobs": [-0.5, 0.1]}), vec!["/segments/0/logprobs/1"]),
            (json!({"logprobs": [2, 0.1]}), vec!["/segments/0/logprobs/0", "/segments/0/logprobs/1"]),
            (json!({"teacher_logprobs": [0.5, -1]}), vec!["/segments/0/teacher_logprobs/0"]),
            // vLLM writes this if it has no log-probability.
            (json!({"logprobs": [-9999.0, 0.1]}), vec!["/segments/0/logprobs/0", "/segments/0/logprobs/1"]),
            (json!({"teacher_logprobs": [-0.1, -1e5]}), vec!["/segments/0/teacher_logprobs/1"]),
        ] {
            assert_eq!(app.post("/trajectories", with_segment("a", fields)).await.pointers(422), pointers);
        }
        // Masked values are ignored, and critic values may be any numbers.
        let masked = json!({"logprobs": [-0.5, 7], "loss_mask": [1, 0], "values": [3, 4]});
        assert_eq!(names(&app.accept(with_segment("masked", masked)).await), [""; 0]);
    }

    async fn doubtful_trajectories_are_stored_as_sent_with_a_named_warning(app: TestApp) {
        app.publish(3).await.expect(200);
        let cases = [
            ("plain", json!({}), json!({}), vec![]),
            ("rounded", json!({}), json!({"logprobs": [1e-7, -0.25]}), vec!["logprobs-above-zero"]),
            ("improbable", json!({}), json!({"logprobs": [-9998.0, -0.25]}), vec!["logprobs-improbable"]),
            ("masked", json!({}), json!({"logprobs": [-0.5, -9999.0], "loss_mask": [1, 0]}), vec![]),
            ("nucleus", json!({"sampling": {"top_p": 0.9}}), json!({}), vec!["sampling-truncated"]),
            ("candidates", json!({"sampling": {"top_k": 50}}), json!({}), vec!["sampling-truncated"]),
            ("untrained", json!({}), json!({"loss_mask": [0, 0]}), vec!["mask-without-ones"]),
            ("ahead", json!({"policy_version": 4}), json!({}), vec!["version-ahead"]),
            ("spans", json!({}), json!({"versions": [[3, 0, 1], [5, 1, 1]]}), vec!["version-ahead"]),
            ("current", json!({"policy_version": 3}), json!({}), vec![]),
            ("several", json!({"policy_version": 9, "sampling": {"top_k": 1}}), json!({"logprobs": [-500, -0.1]}),
                vec!["logprobs-improbable", "sampling-truncated", "version-ahead"]),
        ];
        for (name, fields, segment, expected) in cases {
            let sent = with(with_segment(name, segment), fields);
            let receipt = app.post("/trajectories", sent.clone()).await.expect(201);
            assert_eq!((text(&receipt["verdict"]), names(&receipt)), ("kept", expected.clone()), "{receipt}");
            let again = app.post("/trajectories", sent.clone()).await.expect(200);
            assert_eq!(names(&again), expected, "a retry is told the same");
            let row = app.samples(&app.lease().await).await.remove(0);
            let (found, sent) = (&row["logprobs"], &sent["segments"][0]["logprobs"]);
            for place in 0..2 {
                let number = |list: &Value| (list[place].as_f64().expect("a number") as f32).to_bits();
                assert_eq!(number(found), number(sent), "{name} is delivered as sent");
            }
        }
        let doubted = [("logprobs-improbable", 2), ("sampling-truncated", 3), ("version-ahead", 3), ("mask-without-ones", 1)];
        for (name, expected) in doubted {
            assert_eq!(counted(app, name).await, expected, "{name}");
        }
    }

    async fn a_rollout_without_a_reward_gets_a_warning_that_it_is_dropped(app: TestApp) {
        let filters = json!([{"name": "cut", "scope": "rollout", "when": "status == \"truncated\"", "action": "mask"}]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filters})).await;
        let without = |index: usize, status: &str| with(member("g", index, 0.0), json!({"reward": null, "status": status}));
        let dropped = app.accept(without(0, "completed")).await;
        assert_eq!((text(&dropped["verdict"]), names(&dropped)), ("dropped", vec!["no-reward"]));
        let masked = app.accept(without(1, "truncated")).await;
        assert_eq!((text(&masked["verdict"]), names(&masked)), ("masked", vec![]));
    }

    async fn a_second_pass_gets_a_warning_that_it_needs_new_groups(app: TestApp) {
        app.accept(group("g", &[1.0, 0.0])).await;
        let late = app.accept(member("g", 2, 1.0)).await;
        assert_eq!((text(&late["verdict"]), names(&late)), ("late", vec!["group-decided"]));
        assert!(text(&late["warnings"][0]).contains("needs new `group_id`s"), "{late}");
        let problem = app.post("/trajectories", member("g", 0, 0.5)).await.refused(409, "rollout-conflict");
        assert!(text(&problem["detail"]).contains("new `group_id`s"), "{problem}");
    }
}
