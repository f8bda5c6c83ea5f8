//! Policies: rules, defaults, creation on demand, versions.

use reqwest::Method;
use serde_json::json;

use crate::support::{Backend, TestApp, member, on_both_stores, rollout, text, with};

async fn waits(app: &TestApp) {
    crate::support::eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1") }).await;
}

on_both_stores! {
    async fn rules_are_deleted_once_no_policy_and_no_group_has_them(app: TestApp) {
        let rows = async || app.tamper("UPDATE rules SET created_us = created_us").await;
        let first = rows().await;
        app.rules("default", json!({"group": {"size": 2}, "retention": {"tombstone_s": 60}})).await;
        app.accept(crate::support::member("a", 0, 1.0)).await;
        for size in [3, 4, 5] {
            app.rules("default", json!({"group": {"size": size}})).await;
        }
        assert_eq!(rows().await, first + 4);
        // A post may be in progress with rules that were just replaced, so the first check marks them and the next one
        // deletes them.
        let found = app.buffer.forget_rules(&std::collections::BTreeSet::new()).await.expect("the store answers");
        assert_eq!(rows().await, first + 4);
        app.buffer.forget_rules(&found).await.expect("the store answers");
        assert_eq!(rows().await, 2, "those of the policy and of the open group");
        app.accept(crate::support::member("a", 1, 0.0)).await;
        let batch = app.lease().await;
        assert_eq!(batch["rollouts"], 2, "the group goes on with its rules");
        app.ack(&batch, 1).await.expect(200);
        app.checkpoint(1).await;
        // The first sweep purges the payloads, and the second forgets the tombstone.
        app.pass_s(1e6).await;
        app.pass_s(1e6).await;
        app.buffer.forget_rules(&found).await.expect("the store answers");
        assert_eq!(rows().await, 1);
    }

    async fn rules_are_created_then_replaced_whole(app: TestApp) {
        let created = app.put("/policies/math.solver", json!({"group": {"size": 8, "min_size": 2}})).await.expect(201);
        assert_eq!((&created["rules"]["group"]["timeout_s"], &created["rules"]["batch"]["groups"]), (&json!(3600), &json!(1)));
        let replaced = app.put("/policies/math.solver", json!({"batch": {"groups": 16}})).await.expect(200);
        assert_eq!(replaced["rules"]["group"], json!({"size": 1, "timeout_s": 3600, "on_drop": "refill"}));
        let names: Vec<_> = app.get("/policies").await.expect(200)["policies"].as_array().expect("a page").iter()
            .map(|policy| policy["policy"].clone()).collect();
        assert_eq!(names, ["default", "math.solver"]);
    }

    async fn a_backlog_below_one_batch_is_refused(app: TestApp) {
        let rules = |backlog| json!({"group": {"size": 4}, "batch": {"groups": 8}, "backlog": backlog});
        for (backlog, pointer) in [
            (json!({"max_ready_rollouts": 31}), "/backlog/max_ready_rollouts"),
            (json!({"max_ready_rollouts": 0}), "/backlog/max_ready_rollouts"),
            (json!({"max_bytes": 2047}), "/backlog/max_bytes"),
        ] {
            assert_eq!(app.put("/policies/default", rules(backlog)).await.pointers(422), [pointer]);
        }
        let many = json!({"group": {"size": 128}, "batch": {"groups": 1024}});
        assert_eq!(app.put("/policies/default", many).await.pointers(422), ["/backlog/max_ready_rollouts"]);
        app.rules("default", rules(json!({"max_ready_rollouts": 32, "max_bytes": 2048}))).await;
    }

    async fn a_loss_constant_that_overflows_weights_is_refused(app: TestApp) {
        let rules = |constant: f64| json!({"loss_weighting": "constant", "loss_constant": constant});
        for constant in [1e-320, 1e-21, 1e21, 1e308, 0.0, -1.0] {
            let answer = app.put("/policies/default", rules(constant)).await;
            assert_eq!(answer.pointers(422), ["/loss_constant"], "{constant:e}");
        }
        for constant in [1e-20, 1e20] {
            app.rules("default", rules(constant)).await;
            app.accept(rollout(&format!("{constant:e}"), 1.0)).await;
            let row = app.samples(&app.lease().await).await.remove(0);
            assert_eq!(row["loss_weight"].as_f64(), Some(1.0 / constant));
        }
    }

    async fn replacing_rules_warns_of_what_it_resets(app: TestApp) {
        let filter = json!([{"name": "bad", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
        let rules = json!({"require": ["tokens", "logprobs"], "group": {"size": 8, "min_size": 2}, "filter": filter});
        let created = app.put("/policies/p", rules.clone()).await.expect(201);
        assert_eq!(created["warnings"], json!(null), "nothing was there before");
        assert_eq!(app.put("/policies/p", rules).await.expect(200)["warnings"], json!(null), "nothing changes");
        let answer = app.put("/policies/p", json!({"group": {"size": 4}, "require": ["tokens"]})).await.expect(200);
        let warnings: Vec<_> = answer["warnings"].as_array().expect("warnings").iter().map(text).collect();
        assert_eq!(warnings.len(), 3, "{warnings:#?}");
        assert!(warnings[0].starts_with("`filter` is not in the request: it is back at its default, []; it was "), "{warnings:#?}");
        assert_eq!(warnings[1], "`group.min_size` is not in the request: it is back at its default, not set; it was 2");
        assert!(warnings[2].contains("PATCH"), "{warnings:#?}");
        assert_eq!(app.get("/policies/p").await.expect(200)["warnings"], json!(null));
    }

    async fn a_patch_changes_what_it_names(app: TestApp) {
        let patch = |body| app.call(Method::PATCH, "/policies/p", Some(body));
        patch(json!({"batch": {"groups": 2}})).await.refused(404, "unknown-policy");
        let filter = json!([{"name": "bad", "scope": "rollout", "when": "reward < 0.0", "action": "drop"}]);
        let rules = json!({"group": {"size": 8, "min_size": 2}, "batch": {"groups": 16}, "filter": filter});
        let before = app.put("/policies/p", rules).await.expect(201)["rules"].clone();
        let after = patch(json!({"group": {"timeout_s": 60, "min_size": null}, "batch": {"max_tokens": 1000}})).await;
        let after = after.expect(200)["rules"].clone();
        assert_eq!(after["group"], json!({"size": 8, "timeout_s": 60, "on_drop": "refill"}));
        assert_eq!(after["batch"], with(before["batch"].clone(), json!({"max_tokens": 1000})));
        assert_eq!((&after["filter"], &after["lease"]), (&before["filter"], &before["lease"]));
        assert_eq!(patch(json!({})).await.expect(200)["rules"], after);
        // The resulting rules are validated as a whole, and an invalid patch changes nothing.
        assert_eq!(patch(json!({"group": {"size": 0}})).await.pointers(422), ["/group/size", "/group/min_size"][..1]);
        assert_eq!(patch(json!({"grup": {"size": 1}})).await.pointers(422), ["/grup"]);
        assert_eq!(patch(json!({"group": {"size": "x"}})).await.pointers(422), ["/group/size"]);
        patch(json!([1])).await.refused(422, "invalid");
        assert_eq!(app.get("/policies/p").await.expect(200)["rules"], after);
        let raw = |media: &'static str| {
            let request = app.http.patch(format!("{}/policies/p", app.url)).header("content-type", media);
            async move { request.body(r#"{"filter": null}"#).send().await.expect("the server answers").status().as_u16() }
        };
        assert_eq!(raw("application/json-patch+json").await, 415);
        assert_eq!(raw("application/merge-patch+json").await, 200);
        assert_eq!(app.get("/policies/p").await.expect(200)["rules"]["filter"], json!([]));
    }

    async fn concurrent_patches_all_count(app: TestApp) {
        app.put("/policies/p", json!({})).await.expect(201);
        let patches = [
            json!({"group": {"size": 3}}), json!({"group": {"timeout_s": 7}}), json!({"batch": {"groups": 5}}),
            json!({"batch": {"max_tokens": 9}}), json!({"lease": {"ttl_s": 11}}), json!({"advantage": "rloo"}),
        ];
        let all = patches.map(|patch| app.call(Method::PATCH, "/policies/p", Some(patch)));
        for answer in futures::future::join_all(all).await {
            answer.expect(200);
        }
        let rules = app.get("/policies/p").await.expect(200)["rules"].clone();
        assert_eq!((&rules["group"]["size"], &rules["group"]["timeout_s"]), (&json!(3), &json!(7)));
        assert_eq!((&rules["batch"]["groups"], &rules["batch"]["max_tokens"]), (&json!(5), &json!(9)));
        assert_eq!((&rules["lease"]["ttl_s"], &rules["advantage"]), (&json!(11), &json!("rloo")));
    }

    async fn versions_only_grow_and_identical_repeats_are_recognised(app: TestApp) {
        let version = json!({"version": 13, "step": 40, "uri": "file:///ckpt/v13"});
        let answer = app.put("/policies/default/version", version.clone()).await.expect(200);
        assert_eq!((&answer["version"], &answer["version_step"]), (&json!(13), &json!(40)));
        app.put("/policies/default/version", version).await.expect(200);
        for other in [json!({"version": 12}), json!({"version": 13}), json!({"version": 13, "step": 41, "uri": "file:///ckpt/v13"})] {
            app.put("/policies/default/version", other).await.refused(409, "version-conflict");
        }
        app.put("/policies/nobody/version", json!({"version": 1})).await.refused(404, "unknown-policy");
        let answer = app.put("/policies/default/version", json!({"version": -1})).await;
        assert_eq!(answer.pointers(422), ["/version"]);
    }

    async fn a_wait_for_a_version_is_woken_by_it_and_by_a_resume_that_lowers_it(app: TestApp) {
        app.get("/policies/default?wait_version_above=0&wait_ms=1").await.expect(204);
        let waiting = app.get("/policies/default?wait_version_above=0&wait_ms=60000");
        let publishing = async {
            waits(app).await;
            app.put("/policies/default/version", json!({"version": 1, "step": 5})).await.expect(200);
        };
        let (answer, ()) = tokio::join!(waiting, publishing);
        assert_eq!(answer.expect(200)["version"], 1);
        let waiting = app.get("/policies/default?wait_version_above=1&wait_ms=60000");
        let resuming = async {
            waits(app).await;
            app.resume(None).await;
        };
        let (answer, ()) = tokio::join!(waiting, resuming);
        assert_eq!(answer.expect(200)["version"], 0);
    }

    async fn waiting_says_what_a_trainer_waits_for(app: TestApp) {
        app.rules("default", json!({"group": {"size": 3}, "batch": {"groups": 4}})).await;
        app.accept(json!([member("a", 0, 1.0), member("b", 0, 1.0), member("b", 1, 1.0)])).await;
        app.accept(crate::support::group("c", &[1.0, 0.5, 0.0])).await;
        let policy = app.get("/policies/default").await.expect(200);
        let waiting = &policy["waiting"];
        assert_eq!((&waiting["ready_groups"], &waiting["needed_groups"], &waiting["open_groups"]), (&json!(1), &json!(4), &json!(2)));
        assert_eq!(waiting["fullest"][0], json!({"group_id": "b", "state": "open", "arrived": 2, "size": 3}));
        assert_eq!(waiting["last_post_at"], "2026-01-01T00:00:00.000000Z");
        assert_eq!(policy["rollouts"], json!({"open": 3, "ready": 3}));
    }

    async fn the_database_is_the_truth_for_rules(app: TestApp) {
        app.reconfigure("[[policy]]\nname = 'p'\nadvantage = 'rloo'").await;
        assert_eq!(app.get("/policies/p").await.expect(200)["rules"]["advantage"], "rloo");
        app.reconfigure("[[policy]]\nname = 'p'\nadvantage = 'reward'").await;
        assert_eq!(app.get("/policies/p").await.expect(200)["rules"]["advantage"], "rloo");
    }

    async fn policies_are_created_on_demand_only_where_that_is_allowed(app: TestApp) {
        let unknown = with(rollout("a", 1.0), json!({"policy": "new"}));
        app.post("/trajectories", unknown.clone()).await.refused(404, "unknown-policy");
        app.get("/policies/new").await.refused(404, "unknown-policy");
        app.reconfigure("auto_create = true\n[policy_defaults]\nadvantage = 'reward'").await;
        let other = with(rollout("b", 1.0), json!({"policy": "other"}));
        app.post("/trajectories", json!([unknown, other])).await.expect(201);
        assert_eq!(app.get("/policies/new").await.expect(200)["rules"]["advantage"], "reward");
        app.post("/admissions", json!({"policy": "third", "rollouts": 1})).await.expect(201);
        app.get("/policies/third").await.expect(200);
    }

    async fn only_producers_create_policies_on_demand(app: TestApp) {
        app.reconfigure("auto_create = true").await;
        let calls = [
            (Method::GET, "/policies/new", None),
            (Method::HEAD, "/policies/new", None),
            (Method::GET, "/policies/new?wait_version_above=0&wait_ms=1", None),
            (Method::GET, "/trajectories?policy=new", None),
            (Method::GET, "/groups?policy=new", None),
            (Method::GET, "/batches?policy=new", None),
            (Method::POST, "/batches", Some(json!({"policy": "new"}))),
            (Method::POST, "/policies/new/resume", Some(json!({}))),
            (Method::POST, "/policies/new/checkpoints", Some(json!({"step": 1}))),
            (Method::POST, "/policies/new/reset", None),
            (Method::PUT, "/policies/new/version", Some(json!({"version": 1}))),
            (Method::POST, "/groups/close", Some(json!({"policy": "new", "group_id": "a"}))),
            (Method::POST, "/groups/discard", Some(json!({"policy": "new", "group_id": "a", "reason": "x"}))),
        ];
        for (method, path, body) in calls {
            let answer = app.call(method.clone(), path, body).await;
            assert_eq!(answer.status, 404, "{method} {path}: {}", answer.json);
        }
        // A page of another origin can cause this request to be sent, but cannot read the answer.
        let of_page = app.http.get(format!("{}/policies/new", app.url)).header("origin", "http://evil.example");
        assert_eq!(of_page.send().await.expect("the server answers").status(), 404);
        let stats = app.get("/stats").await.expect(200);
        assert_eq!(stats["policies"].as_object().expect("by name").keys().collect::<Vec<_>>(), ["default"]);
    }

    async fn policies_are_bounded(app: TestApp) {
        app.reconfigure("auto_create = true\n[limits]\npolicies = 2\n[[policy]]\nname = 'of-file'").await;
        let of = |policy: &str, id: &str| with(rollout(id, 1.0), json!({"policy": policy}));
        let problem = app.put("/policies/third", json!({})).await.refused(409, "too-many-policies");
        assert!(text(&problem["detail"]).contains("limits.policies"), "{problem}");
        app.post("/trajectories", of("third", "a")).await.refused(409, "too-many-policies");
        app.post("/admissions", json!({"policy": "third", "rollouts": 1})).await.refused(409, "too-many-policies");
        app.get("/policies/third").await.refused(404, "unknown-policy");
        // Existing policies still work: their rules can be replaced. Lines of a bulk body are independent of each
        // other.
        app.put("/policies/of-file", json!({"advantage": "rloo"})).await.expect(200);
        let lines = ["third", "of-file", "fourth", "default"].map(|policy| of(policy, "b").to_string()).join("\n");
        let request = app.http.post(format!("{}/trajectories", app.url)).body(lines);
        let answer = request.header("content-type", "application/x-ndjson").send().await.expect("the server answers");
        let answers = answer.text().await.expect("text");
        let statuses: Vec<_> = answers.lines().map(|line| line.split(',').nth(1).unwrap_or_default().to_owned()).collect();
        assert_eq!(statuses, ["\"status\":409", "\"status\":201", "\"status\":409", "\"status\":201"], "{answers}");
        // Policies of the configuration file do not count against the limit.
        app.reconfigure("[limits]\npolicies = 1\n[[policy]]\nname = 'one-more'").await;
        app.get("/policies/one-more").await.expect(200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_without_traffic_take_no_metric_labels() {
    let app = TestApp::start(Backend::Sqlite).await;
    for index in 0..300 {
        app.put(&format!("/policies/a{index}"), json!({})).await.expect(201);
    }
    assert!(!app.metrics().await.contains("policy=\"a"), "nothing has happened to them");
    app.put("/policies/zebra", json!({})).await.expect(201);
    app.accept(with(rollout("x", 1.0), json!({"policy": "zebra"}))).await;
    app.put("/policies/zebra/version", json!({"version": 7})).await.expect(200);
    let metrics = app.metrics().await;
    for shown in [
        "forebay_rollouts_total{policy=\"zebra\",verdict=\"kept\"} 1",
        "forebay_ledger_received{policy=\"zebra\"} 1",
        "forebay_policy_version{policy=\"zebra\"} 7",
    ] {
        assert!(metrics.contains(shown), "{shown} is not in {metrics}");
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_with_traffic_beyond_the_labels_are_added_up() {
    let mut app = TestApp::start_with(Backend::Sqlite, "auto_create = true").await;
    for index in 0..300 {
        let rollouts = ["a", "b"].map(|id| with(rollout(id, 1.0), json!({"policy": format!("p{index:03}")})));
        app.accept(json!(rollouts)).await;
    }
    // 256 labels with two rollouts each; 44 policies share the common label.
    let others = "forebay_ledger_received{policy=\"_other\"} 88";
    let counted = "forebay_rollouts_total{policy=\"_other\",verdict=\"kept\"} 88";
    let metrics = app.metrics().await;
    assert!(metrics.contains(others) && metrics.contains(counted), "{metrics}");
    let labels = metrics.lines().filter(|line| line.starts_with("forebay_ledger_received{")).count();
    assert_eq!(labels, 257);
    // A service that starts gives its labels to the policies that were used last.
    app.clock.advance_s(1.0);
    app.accept(with(rollout("c", 1.0), json!({"policy": "p299"}))).await;
    app.restart().await;
    let metrics = app.metrics().await;
    assert!(metrics.contains("forebay_ledger_received{policy=\"p299\"} 3"), "{metrics}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bulk_lines_create_policies_on_demand_too() {
    let app = TestApp::start_with(Backend::Sqlite, "auto_create = true").await;
    let lines: Vec<String> = ["x", "y", "x"]
        .iter()
        .enumerate()
        .map(|(i, p)| with(rollout(&format!("r{i}"), 1.0), json!({"policy": p})).to_string())
        .collect();
    let url = format!("{}/trajectories", app.url);
    let answer = app.http.post(url).header("content-type", "application/x-ndjson").body(lines.join("\n")).send().await;
    let body = answer.expect("the server answers").text().await.expect("text");
    assert_eq!(body.matches("\"status\":201").count(), 3, "{body}");
    app.finish().await;
}
