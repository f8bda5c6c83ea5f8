//! Filters: CEL for rollouts and groups, counted by name, refused if they cannot work.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use forebay_domain::{evaluation, ingest::Ingest, reasons, refusal::Refusal};
use forebay_wire::Trajectory;
use serde_json::{Value, json};

use crate::support::{group, member, on_both_stores, rollout, text, with};

/// Where the code of the service gives a reason, with a literal instead of a constant of `forebay_domain::reasons`.
const LITERAL_REASONS: &str =
    r#"const (REASON|RULE)_\w+: &str|\breason = '|Discard\("|\.dropped(_many)?\([^;{]*"[a-z]|\breason: Some\(""#;

/// A filter with the name of a reason could not be told apart from it, so the list of reasons must be complete.
#[test]
fn the_service_gives_only_reasons_that_are_in_its_list() {
    let literal = regex::Regex::new(LITERAL_REASONS).expect("the pattern is valid");
    let mut folders = ["crates/service/src", "crates/store/src", "crates/domain/src"]
        .map(|folder| Path::new(env!("CARGO_MANIFEST_DIR")).join(folder))
        .to_vec();
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("the source can be read") {
            let path = entry.expect("the source can be read").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let source = std::fs::read_to_string(&path).expect("source is text");
            let code = source.split("#[cfg(test)]").next().unwrap_or_default();
            found.extend(literal.find_iter(code).map(|found| format!("{}: {}", path.display(), found.as_str())));
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

#[test]
fn every_reason_of_the_service_is_documented() {
    let document = include_str!("../../docs/api.md");
    let section =
        document.split("\n## Reasons\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("it is there");
    let named = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    // The name of a state, which is no reason.
    let named: BTreeSet<&str> = named.chain(["quarantined"]).collect();
    assert_eq!(named, reasons::ALL.iter().copied().collect());
}

fn filter(name: &str, scope: &str, when: &str, action: &str) -> Value {
    json!({"name": name, "scope": scope, "when": when, "action": action})
}

on_both_stores! {
    async fn a_transaction_evaluates_no_filter_and_answers_which_to_evaluate(app: TestApp) {
        app.rules("default", json!({"filter": [filter("low", "rollout", "reward < 0.5", "drop")]})).await;
        let sent: Trajectory = serde_json::from_value(rollout("a", 0.25)).expect("a trajectory");
        let bundles = Arc::new(vec![app.buffer.prepare(vec![sent]).expect("the trajectory is valid").into()]);
        let store_now = || {
            let ingest = Ingest { bundles: Arc::clone(&bundles), gates: Arc::default(), now: app.buffer.now() };
            app.buffer.store().ingest(ingest)
        };
        let outcome = store_now().await.expect("the store answers").remove(0);
        let Err(Refusal::NotEvaluated(requests)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((requests.len(), requests[0].index, requests[0].is_current), (1, 0, true));
        let (new, request) = (&bundles[0][0], &requests[0]);
        let evaluated = || new.evaluation.by(&request.rules, request.versions, request.current);
        assert_eq!(evaluated(), None, "nothing was asked in the transaction");
        // Another thread evaluates the filter, and the next transaction uses its result.
        evaluation::evaluate(new, request.clone());
        let outcome = store_now().await.expect("the store answers").remove(0).expect("the bundle is stored");
        assert_eq!(outcome[0].decision.reason.as_deref(), Some("low"));
        assert!(!outcome[0].duplicate, "the first transaction has stored nothing");
    }

    async fn the_first_match_decides_and_is_named(app: TestApp) {
        let filters = json!([
            filter("truncated", "rollout", "status == 'truncated'", "mask"),
            filter("low", "rollout", "reward < 0.5", "drop"),
        ]);
        app.rules("default", json!({"filter": filters})).await;
        let cases = [
            (with(rollout("a", 0.0), json!({"status": "truncated"})), "masked", json!("truncated")),
            (rollout("b", 0.0), "dropped", json!("low")),
            (rollout("c", 1.0), "kept", Value::Null),
        ];
        for (body, verdict, reason) in cases {
            let receipt = app.accept(body).await;
            assert_eq!((text(&receipt["verdict"]), &receipt["reason"]), (verdict, &reason));
        }
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["dropped"]["low"], 1);
        assert!(app.metrics().await.contains(r#"forebay_dropped_total{policy="default",reason="low"} 1"#));
    }

    async fn a_rollout_without_a_reward_never_votes(app: TestApp) {
        let filters = json!([filter("infra", "rollout", "status == 'failed'", "mask")]);
        app.rules("default", json!({"group": {"size": 3}, "filter": filters})).await;
        let mut bare = member("g", 0, 0.0);
        bare.as_object_mut().expect("a rollout is an object").remove("reward");
        let dropped = app.accept(bare.clone()).await;
        assert_eq!((text(&dropped["verdict"]), text(&dropped["reason"])), ("dropped", "no-reward"));
        let masked = app.accept(with(bare, json!({"rollout_id": "g-m", "status": "failed"}))).await;
        assert_eq!((text(&masked["verdict"]), &masked["group"]["arrived"]), ("masked", &json!(1)));
        app.accept(member("g", 1, 1.0)).await;
        app.accept(member("g", 2, 0.0)).await;
        let rows = app.samples(&app.lease().await).await;
        assert_eq!(rows.len(), 3);
        assert_eq!((&rows[0]["reward"], &rows[0]["advantage"], &rows[0]["loss_mask"]),
            (&Value::Null, &json!(0.0), &json!([0, 0])));
        // The baseline is the mean of the two rollouts that have a reward.
        let advantage = rows[1]["advantage"].as_f64().expect("a number");
        assert!((advantage - 0.707_105_8).abs() < 1e-6, "{advantage}");
    }

    async fn a_masked_rollout_votes_and_trains_nothing(app: TestApp) {
        let filters = json!([filter("long", "rollout", "tokens > 3", "mask")]);
        app.rules("default", json!({"group": {"size": 2}, "advantage": "grpo_mean", "filter": filters})).await;
        app.accept(member("g", 0, 1.0)).await;
        let long = json!({"segments": [{"tokens": [1, 2, 3, 4], "loss_mask": [1, 1]}], "policy_version": 0});
        app.accept(with(member("g", 1, 0.0), long)).await;
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        assert_eq!((&rows[0]["advantage"], &rows[1]["advantage"]), (&json!(0.5), &json!(-0.5)));
        assert_eq!((&rows[1]["verdict"], &rows[1]["loss_mask"]), (&json!("masked"), &json!([0, 0])));
        // The rollout still counts in G.
        assert_eq!(rows[0]["loss_weight"], 0.25);
    }

    async fn a_group_filter_discards_with_its_name(app: TestApp) {
        let filters = json!([filter("zero-variance", "group", "reward_std < 1e-6", "drop")]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filters})).await;
        let receipts = app.accept(group("flat", &[0.5, 0.5])).await;
        assert_eq!(receipts[0]["group"], json!({"state": "open", "arrived": 1, "size": 2}));
        let discarded = json!({"state": "discarded", "reason": "zero-variance", "arrived": 2, "size": 2});
        assert_eq!(receipts[1]["group"], discarded);
        // Repeats and what comes too late learn it as well.
        assert_eq!(app.accept(group("flat", &[0.5, 0.5])).await[0]["group"], discarded);
        assert_eq!(app.accept(member("flat", 2, 0.5)).await["group"], discarded);
        let story = app.story("flat-0").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("discarded"), &json!("zero-variance")));
        app.accept(group("varied", &[0.0, 1.0])).await;
        let batch = app.lease().await;
        assert_eq!(app.group_ids(&batch).await, ["varied"]);
        assert_eq!(batch["metrics"]["dropped/zero-variance"], 1.0);
        assert_eq!((&batch["metrics"]["reward/all"], &batch["metrics"]["reward/trained"]), (&json!(0.5), &json!(0.5)));
        let waiting = &app.get("/policies/default").await.expect(200)["waiting"];
        assert_eq!(waiting["dropped_last_hour"], json!({"zero-variance": 1}));
        app.pass_s(3_700.0).await;
        let waiting = &app.get("/policies/default").await.expect(200)["waiting"];
        assert_eq!(waiting["dropped_last_hour"], json!({}));
    }

    async fn a_group_without_any_kept_rollout_is_discarded(app: TestApp) {
        let filters = json!([
            filter("mask-all", "rollout", "true", "mask"),
            filter("never-reached", "group", "true", "drop"),
        ]);
        app.rules("default", json!({"filter": filters})).await;
        assert_eq!(app.accept(rollout("a", 1.0)).await["group"]["state"], "discarded");
        assert_eq!(app.story("a").await["group"]["reason"], "all-masked");
    }

    async fn a_filter_that_cannot_be_evaluated_does_not_match_and_is_named(app: TestApp) {
        let filters = json!([filter("quality", "rollout", "metadata.quality < 0.5", "drop")]);
        app.rules("default", json!({"filter": filters})).await;
        let receipt = app.accept(with(rollout("a", 1.0), json!({"metadata": {"other": 1}}))).await;
        assert_eq!((text(&receipt["verdict"]), receipt["warnings"].as_array().map(Vec::len)), ("kept", Some(1)));
        assert_eq!(app.story("a").await["failed_filters"], json!(["quality"]));
        assert!(app.metrics().await.contains(r#"forebay_filter_failures_total{filter="quality",policy="default"} 1"#));
        let receipt = app.accept(with(rollout("b", 1.0), json!({"metadata": {"quality": 0.1}}))).await;
        assert_eq!(receipt["verdict"], "dropped");
    }

    async fn a_filter_that_may_cost_too_much_is_named_and_does_not_match(app: TestApp) {
        let exists = |name: &str| filter(name, "rollout", "metadata.tags.exists(t, t == 2 || t == 3)", "drop");
        let filters = json!([exists("a"), exists("b"), exists("c"), exists("d"), filter("low", "rollout", "reward < 0.5", "drop")]);
        app.rules("default", json!({"filter": filters})).await;
        let tags = |name: &str, reward: f64| with(rollout(name, reward), json!({"metadata": {"tags": vec![1; 130_000]}}));
        let receipt = app.post("/trajectories", tags("x", 1.0)).await.expect(201);
        let warnings: Vec<&str> = receipt["warnings"].as_array().expect("warnings").iter().map(text).collect();
        assert!(warnings.iter().any(|warning| warning.starts_with("filter-over-budget: filter `d`")), "{receipt}");
        assert_eq!(receipt["verdict"], "kept");
        assert!(app.metrics().await.contains(r#"forebay_filters_over_budget_total{filter="d",policy="default"} 1"#));
        assert_eq!(app.story("x").await["failed_filters"].as_array().and_then(|names| names.last()), Some(&json!("d")));
        assert_eq!(app.post("/trajectories", tags("x", 1.0)).await.expect(200)["duplicate"], true);
        // Cheap filters are evaluated, whatever the others would cost.
        assert_eq!(app.accept(tags("y", 0.0)).await["reason"], "low");
    }

    async fn a_group_uses_the_filters_that_it_was_opened_with(app: TestApp) {
        let below = |bound: f64| json!({"group": {"size": 3},
            "filter": [filter("low", "rollout", &format!("reward < {bound:?}"), "drop")]});
        app.rules("default", below(0.25)).await;
        app.accept(member("old", 0, 0.5)).await;
        app.rules("default", below(0.75)).await;
        // One bundle, evaluated by both filters.
        let receipts = app.accept(json!([member("old", 1, 0.5), member("new", 0, 0.5), member("new", 1, 0.8)])).await;
        let verdicts: Vec<&str> = receipts.as_array().expect("a bundle").iter().map(|one| text(&one["verdict"])).collect();
        assert_eq!(verdicts, ["kept", "dropped", "kept"]);
        app.rules("default", json!({"group": {"size": 3}})).await;
        assert_eq!(app.accept(member("new", 2, 0.5)).await["verdict"], "dropped");
        assert_eq!(app.accept(member("newest", 0, 0.5)).await["verdict"], "kept");
    }

    async fn a_group_filter_that_cannot_be_evaluated_is_named_too(app: TestApp) {
        let filters = json!([filter("seventh", "group", "rewards[7] > 0.9", "drop")]);
        app.rules("default", json!({"group": {"size": 2}, "filter": filters})).await;
        app.accept(group("g", &[1.0, 0.0])).await;
        let page = app.get("/groups?group_id=g").await.expect(200);
        assert_eq!((&page["groups"][0]["state"], &page["groups"][0]["failed_filters"]), (&json!("ready"), &json!(["seventh"])));
        assert!(app.metrics().await.contains(r#"forebay_filter_failures_total{filter="seventh",policy="default"} 1"#));
    }

    async fn staleness_at_ingest_is_measured_against_the_current_version(app: TestApp) {
        let filters = json!([filter("old", "rollout", "staleness > 2", "drop")]);
        app.rules("default", json!({"filter": filters})).await;
        app.publish(5).await.expect(200);
        assert_eq!(app.accept(with(rollout("a", 1.0), json!({"policy_version": 2}))).await["verdict"], "dropped");
        assert_eq!(app.accept(with(rollout("b", 1.0), json!({"policy_version": 3}))).await["verdict"], "kept");
        assert_eq!(app.accept(rollout("c", 1.0)).await["verdict"], "kept", "an absent version is the current one");
        let story = app.story("c").await;
        assert_eq!((&story["policy_version"], &story["policy_version_assumed"]), (&json!(5), &json!(true)));
    }

    async fn filters_that_an_earlier_version_accepted_under_the_name_of_a_reason_go_on(app: TestApp) {
        let rules = |name: &str| json!({"filter": [filter(name, "rollout", "reward < 0.5", "drop")]});
        app.rules("default", rules("low")).await;
        assert_eq!(app.put("/policies/default", rules("damaged")).await.pointers(422), ["/filter/0/name"]);
        app.stop().await;
        let changed = app.tamper(r#"UPDATE rules SET body = REPLACE(body, '"low"', '"damaged"') WHERE body LIKE '%"low"%'"#).await;
        assert_eq!(changed, 1);
        app.restart().await;
        assert_eq!(app.get("/policies/default").await.expect(200)["rules"]["filter"][0]["name"], "damaged");
        assert_eq!(app.accept(rollout("a", 0.0)).await["reason"], "damaged");
        assert_eq!(app.accept(rollout("b", 1.0)).await["verdict"], "kept");
    }

    async fn rules_that_cannot_work_are_refused_with_their_place(app: TestApp) {
        let cases = [
            (json!({"filter": [filter("x", "rollout", "reward < 0 || nope > 1", "drop")]}), "/filter/0/when"),
            (json!({"filter": [filter("x", "rollout", "reward * 2 > 1.0", "drop")]}), "/filter/0/when"),
            (json!({"filter": [filter("x", "rollout", "1 + ", "drop")]}), "/filter/0/when"),
            (json!({"filter": [filter("x", "group", "reward_std < 1.0", "mask")]}), "/filter/0/action"),
            (json!({"filter": [filter("no-reward", "rollout", "true", "drop")]}), "/filter/0/name"),
            (json!({"group": {"size": 2, "min_size": 3}}), "/group/min_size"),
            (json!({"loss_weighting": "constant"}), "/loss_constant"),
            (json!({"lease": {"ttl_s": 0}}), "/lease/ttl_s"),
            (json!({"advantage": "best"}), "/advantage"),
            (json!({"batch": {"order": "lifo"}}), "/batch/order"),
            (json!({"nope": 1}), "/nope"),
        ];
        for (rules, pointer) in cases {
            let answer = app.put("/policies/default", rules.clone()).await;
            assert_eq!(answer.pointers(422), [pointer], "{rules}");
        }
        assert_eq!(app.get("/policies/default").await.expect(200)["rules"]["filter"], json!([]));
    }
}
