//! The facade of slime's rollout buffer, as its clients use it.

mod leaving;
mod replicas;

use flate2::{Compression, write::GzEncoder};
use forebay_wire::Role;
use reqwest::Method;
use serde_json::{Value, json};

use super::Facade;
use crate::support::{TestApp, eventually, group, on_both_stores, text, with};

/// A facade for text, with groups of two.
async fn slime(app: &mut TestApp) {
    let rules = json!({"require": [], "group": {"size": 2, "on_drop": "shrink", "timeout_s": 60}, "settle": "ack"});
    app.rules("default", rules).await;
    app.reconfigure("[facades]\nslime = \"127.0.0.1:0\"").await;
}

/// An item as slime's generator makes it: its messages are in it twice.
fn item(instance: &str, uid: &str, reward: f64) -> Value {
    let messages = json!([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]);
    json!({"uid": uid, "messages": messages, "reward": reward, "instance_id": instance,
        "extra_info": {"label": "4", "messages": messages, "timestamp": "1.5", "finish_reason": "stop"}})
}

async fn write(app: &TestApp, item: &Value) -> Value {
    Facade::of(app, "slime").post("/buffer/write", item).await.expect(200)
}

/// Writes both items of a group.
async fn write_group(app: &TestApp, instance: &str) {
    for (index, reward) in [(0, 1.0), (1, 0.0)] {
        write(app, &item(instance, &format!("{instance}-{index}"), reward)).await;
    }
}

/// Reads as the consumer of a path.
async fn read_as(app: &TestApp, prefix: &str, body: Value) -> Value {
    Facade::of(app, "slime").at(prefix).post("/get_rollout_data", &body).await.expect(200)
}

/// The `uid`s of a read.
fn uids(read: &Value) -> Vec<String> {
    let items = read["data"]["data"].as_array().expect("a read has items");
    items.iter().map(|item| text(&item["uid"]).to_owned()).collect()
}

async fn read(app: &TestApp) -> Vec<String> {
    uids(&read_as(app, "", json!({})).await)
}

/// How many rollouts are in a state.
async fn count(app: &TestApp, state: &str) -> Value {
    let totals = app.get("/stats").await.expect(200);
    // A state without rollouts is left out.
    totals["policies"]["default"]["rollouts"][state].as_i64().unwrap_or(0).into()
}

on_both_stores! {
    async fn whole_groups_come_back_as_they_were_written(app: TestApp) {
        slime(app).await;
        let none = json!({"success": false, "message": "No data available to read", "data": {"data": [], "meta_info": {}}});
        assert_eq!(read_as(app, "", json!({})).await, none);
        let odd = r#"{ "zeta":1.50, "uid":"u-1", "instance_id":7, "messages": [{"role":"assistant","content":"a\u0301"}], "reward":1e0,
            "extra_info":{"b":1E5, "a":[1.0, 2], "messages": [{"role":"assistant","content":"a\u0301"}], "n":null}, "tail":[]}"#;
        let facade = Facade::of(app, "slime");
        let echo = facade.text("/buffer/write", odd).await;
        assert!(echo.contains(odd) && echo.ends_with(r#"],"meta_info":"write to buffer"}}"#), "{echo}");
        assert_eq!(read(app).await, [""; 0], "the group is not complete");
        let second = write(app, &item("7", "u-2", 0.0)).await;
        assert_eq!(second["message"], "Data has been successfully written to buffer");
        assert_eq!((&second["success"], &second["data"]["data"][0]), (&json!(true), &item("7", "u-2", 0.0)));
        let text = facade.text("/get_rollout_data", "").await;
        let kept = r#""zeta":1.50,"uid":"u-1","instance_id":7,"messages":[{"role":"assistant","content":"a\u0301"}],"reward":1e0,"extra_info":{"b":1E5,"a":[1.0, 2],"messages":[{"role":"assistant","content":"a\u0301"}],"n":null},"tail":[]"#;
        assert!(text.contains(kept), "{text}");
        let read: Value = serde_json::from_str(&text).expect("it is JSON");
        assert_eq!(read["data"]["data"][1], item("7", "u-2", 0.0));
        let info = json!({"total_samples": 2, "num_groups": 1, "avg_group_size": 2.0, "avg_reward": 0.5, "finished_groups": [7]});
        assert_eq!((&read["message"], &read["data"]["meta_info"]), (&json!("Successfully read 2 items"), &info));
    }

    async fn a_repeated_item_is_one_and_another_with_its_uid_is_refused(app: TestApp) {
        slime(app).await;
        for _ in 0..3 {
            write(app, &item("a", "1", 1.0)).await;
        }
        let other = Facade::of(app, "slime").post("/buffer/write", &item("a", "1", 0.5)).await.expect(409);
        assert!(text(&other["detail"]).contains("already stored"), "{other}");
        assert_eq!(read(app).await, [""; 0]);
        write(app, &item("a", "2", 1.0)).await;
        assert_eq!(read(app).await, ["1", "2"]);
        // An item without a `uid` is always new.
        let mut anonymous = item("b", "", 1.0);
        anonymous.as_object_mut().expect("an item").remove("uid");
        for _ in 0..2 {
            write(app, &anonymous).await;
        }
        let found = read_as(app, "", json!({})).await;
        assert_eq!(found["data"]["data"], json!([anonymous, anonymous]));
    }

    async fn the_next_read_acks_and_a_start_gives_back_what_was_not_acked(app: TestApp) {
        slime(app).await;
        write_group(app, "a").await;
        assert_eq!(read(app).await, ["a-0", "a-1"]);
        assert_eq!((count(app, "leased").await, count(app, "checkpointed").await), (json!(2), json!(0)));
        app.pass_s(3_600.0).await;
        app.restart().await;
        assert_eq!(count(app, "leased").await, json!(2), "a read is kept for a day");
        // The trainer starts again: its last read comes back.
        let facade = Facade::of(app, "slime");
        for _ in 0..2 {
            assert_eq!(facade.post("/start_rollout", &json!({})).await.expect(200), json!({"message": "Rollout started"}));
        }
        assert_eq!(read(app).await, ["a-0", "a-1"]);
        write_group(app, "b").await;
        assert_eq!(read(app).await, ["b-0", "b-1"]);
        assert_eq!((count(app, "leased").await, count(app, "checkpointed").await), (json!(2), json!(2)));
        assert_eq!(read(app).await, [""; 0]);
        assert_eq!((count(app, "leased").await, count(app, "checkpointed").await), (json!(0), json!(4)));
        assert_eq!((&app.story("a-0").await["step"], &app.story("b-0").await["step"]), (&json!(0), &json!(1)));
        // A consumer that never comes again keeps nothing for ever.
        write_group(app, "c").await;
        assert_eq!(read(app).await, ["c-0", "c-1"]);
        app.pass_s(86_401.0).await;
        assert_eq!(uids(&read_as(app, "/c/another", json!({})).await), ["c-0", "c-1"]);
    }

    async fn several_readers_share_the_groups_and_ack_only_their_own(app: TestApp) {
        slime(app).await;
        for instance in ["a", "b", "c"] {
            write_group(app, instance).await;
        }
        let one = |body: Value| with(body, json!({"max_groups": "1"}));
        assert_eq!(uids(&read_as(app, "/c/x", one(json!({}))).await), ["a-0", "a-1"]);
        assert_eq!(uids(&read_as(app, "/c/y", json!({"num_samples": 1})).await), ["b-0", "b-1"]);
        assert_eq!(uids(&read_as(app, "/c/x", one(json!({}))).await), ["c-0", "c-1"]);
        assert_eq!((count(app, "leased").await, count(app, "checkpointed").await), (json!(4), json!(2)));
        Facade::of(app, "slime").at("/c/y").post("/start_rollout", &json!({})).await.expect(200);
        assert_eq!((count(app, "leased").await, count(app, "returned").await), (json!(2), json!(2)));
        // Readers with different keys are different consumers.
        let (key, other) = (app.key(Role::Train, &["*"]).await, app.key(Role::Train, &["*"]).await);
        assert_eq!(uids(&read_as(app, &format!("/k/{key}"), json!({})).await), ["b-0", "b-1"]);
        assert_eq!(uids(&read_as(app, &format!("/k/{other}"), json!({})).await), [""; 0]);
        let admin = app.key(Role::Admin, &["*"]).await;
        let batches = app.get_as(&admin, "/batches?state=leased").await.expect(200);
        let consumers: Vec<&str> =
            batches["batches"].as_array().expect("a page").iter().map(|batch| text(&batch["consumer"])).collect();
        assert!(consumers.contains(&"facade:slime/x") && consumers[0].starts_with("facade:slime/key/"), "{consumers:?}");
    }

    async fn items_of_later_epochs_form_groups_of_their_own_and_stragglers_are_recognised(app: TestApp) {
        slime(app).await;
        for epoch in 1..=5 {
            for index in 0..2 {
                write(app, &item("task", &format!("{epoch}-{index}"), f64::from(index))).await;
            }
            // The last item of this epoch and of the first one arrive again.
            write(app, &item("task", &format!("{epoch}-1"), 1.0)).await;
            write(app, &item("task", "1-0", 0.0)).await;
            app.restart().await;
        }
        write(app, &item("task", "6-0", 0.0)).await;
        let groups = app.get("/groups").await.expect(200);
        let groups: Vec<(&str, &str)> = groups["groups"]
            .as_array()
            .expect("a page")
            .iter()
            .map(|group| (text(&group["group_id"]), text(&group["state"])))
            .collect();
        let ready = ["task", "task@2", "task@3", "task@4", "task@5"].map(|id| (id, "ready"));
        assert_eq!(groups[..5], ready);
        assert_eq!(groups[5..], [("task@6", "open")]);
        // slime's client puts all items of an instance into one group, so a read has one generation of it.
        write_group(app, "other").await;
        let mut others = 0;
        for epoch in 1..=5 {
            let read = read_as(app, "", json!({})).await;
            assert_eq!(uids(&read)[..2], [format!("{epoch}-0"), format!("{epoch}-1")]);
            assert_eq!(read["data"]["meta_info"]["finished_groups"][0], "task");
            others += uids(&read).len() - 2;
        }
        assert_eq!(others, 2, "the other group was read once");
        assert_eq!(count(app, "late").await, json!(0));
    }

    async fn writers_of_the_same_instance_agree_on_its_generations(app: TestApp) {
        slime(app).await;
        let writes = (0..24).map(|index| {
            let item = item("task", &format!("{index}"), 1.0);
            let app = &*app;
            async move { write(app, &item).await }
        });
        futures::future::join_all(writes).await;
        let mut found = Vec::new();
        for generation in 1..=12 {
            let read = read(app).await;
            assert_eq!(read.len(), 2, "generation {generation}");
            found.extend(read);
        }
        found.sort();
        found.dedup();
        assert_eq!(found.len(), 24);
    }

    async fn an_incomplete_group_waits_and_its_end_is_in_the_ledger(app: TestApp) {
        slime(app).await;
        write(app, &item("a", "1", 1.0)).await;
        app.restart().await;
        app.pass_s(59.0).await;
        assert_eq!(count(app, "open").await, json!(1));
        app.pass_s(2.0).await;
        assert_eq!(read(app).await, [""; 0]);
        let story = app.story("1").await;
        assert_eq!((&story["state"], &story["group"]["reason"]), (&json!("discarded"), &json!("incomplete")));
        // The items that arrive later form the next generation.
        write(app, &item("a", "2", 1.0)).await;
        write(app, &item("a", "3", 1.0)).await;
        assert_eq!(read(app).await, ["2", "3"]);
    }

    async fn an_item_without_an_answer_harms_nobody(app: TestApp) {
        slime(app).await;
        let messages = json!([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": null}]);
        let written = write(app, &with(item("a", "1", 0.0), json!({"messages": messages}))).await;
        assert!(text(&written["message"]).ends_with("it will not be trained: no-reward"), "{written}");
        write(app, &item("a", "2", 1.0)).await;
        write_group(app, "b").await;
        assert_eq!(read(app).await, ["b-0", "b-1"]);
        let story = app.story("1").await;
        assert_eq!((&story["verdict"], &story["reason"]), (&json!("dropped"), &json!("no-reward")));
        assert_eq!(app.story("2").await["group"]["reason"], "incomplete");
    }

    async fn an_empty_response_votes(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}, "settle": "ack"})).await;
        app.reconfigure("[facades]\nslime = \"127.0.0.1:0\"").await;
        let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": ""}]);
        let empty = json!({"uid": "1", "instance_id": "a", "messages": messages, "reward": 0.0,
            "extra_info": {"finish_reason": "length"}, "tokens": [1, 2, 3], "response_length": 0, "loss_mask": []});
        write(app, &empty).await;
        let masked = json!({"uid": "2", "instance_id": "a", "messages": messages, "reward": 1.0, "tokens": [1, 2, 3],
            "response_length": 2, "loss_mask": [1.0, 0.0], "rollout_log_probs": [-0.5, null]});
        write(app, &masked).await;
        let found = read_as(app, "", json!({})).await["data"]["data"].clone();
        let numbers = with(masked, json!({"loss_mask": [1, 0], "rollout_log_probs": [-0.5, 0.0]}));
        assert_eq!(found, json!([empty, numbers]));
        let story = app.story("1").await;
        assert_eq!((&story["verdict"], &story["reward"]), (&json!("kept"), &json!(0.0)));
    }

    async fn ids_may_be_long_integers_and_rewards_have_names(app: TestApp) {
        slime(app).await;
        let config = "[facades.slime]\nlisten = \"127.0.0.1:0\"\nreward_key = \"score\"";
        app.reconfigure(config).await;
        let facade = Facade::of(app, "slime");
        let id = "123456789012345678901234567890";
        for (uid, reward) in [("1", r#"{"score":true,"format":0.5}"#), ("2", "0.25")] {
            let item = format!(r#"{{"uid":"{uid}","instance_id":{id},"messages":[],"reward":{reward}}}"#);
            facade.text("/buffer/write", &item).await;
        }
        let found = facade.text("/get_rollout_data", "").await;
        let kept = format!(r#"{{"uid":"1","instance_id":{id},"messages":[],"reward":{{"score":true,"format":0.5}}}}"#);
        assert!(found.contains(&kept) && found.contains(&format!(r#""finished_groups":[{id}]"#)), "{found}");
        assert_eq!(app.story("1").await["reward"], json!(1.0));
        assert_eq!(app.story("2").await["group"]["group_id"], id);
        for reward in [json!({"format": 1}), json!({"score": "high"})] {
            let item = with(item("b", "3", 1.0), json!({"reward": reward}));
            assert_eq!(facade.post("/buffer/write", &item).await.expect(422)["detail"][0]["loc"], json!(["body", "reward"]));
        }
    }

    async fn wrong_items_are_refused_by_name_and_nothing_is_stored(app: TestApp) {
        slime(app).await;
        let facade = Facade::of(app, "slime");
        let missing = facade.post("/buffer/write", &json!({"uid": "1", "reward": 1})).await.expect(422);
        assert_eq!(missing["detail"][0]["loc"], json!(["body", "instance_id"]));
        assert_eq!(missing["detail"][0]["type"], "missing");
        let tokens = json!({"tokens": [1, 2, 3]});
        for (fields, place) in [
            (json!({"instance_id": null}), json!(["body", "instance_id"])),
            (json!({"instance_id": ""}), json!(["body", "instance_id"])),
            (json!({"instance_id": "x".repeat(201)}), json!(["body", "instance_id"])),
            (json!({"instance_id": [1]}), json!(["body", "instance_id"])),
            (json!({"uid": "a\nb"}), json!(["body", "uid"])),
            (json!({"reward": "1"}), json!(["body", "reward"])),
            (json!({"reward": {"score": 1}}), json!(["body", "reward"])),
            (json!({"$forebay": {}}), json!(["body", "$forebay"])),
            (json!({"extra_info": {"x": "y".repeat(300_000)}}), json!(["body"])),
            (tokens.clone(), json!(["body", "response_length"])),
            (with(tokens.clone(), json!({"response_length": 3})), json!(["body", "response_length"])),
            (with(tokens.clone(), json!({"loss_mask": [2]})), json!(["body", "loss_mask", 0])),
            (with(tokens.clone(), json!({"loss_mask": [1], "rollout_log_probs": [0.5]})), json!(["body", "rollout_log_probs", 0])),
            (json!({"tokens": [1, "x"], "loss_mask": [1]}), json!(["body", "tokens"])),
        ] {
            let answer = facade.post("/buffer/write", &with(item("a", "1", 1.0), fields.clone())).await;
            assert_eq!(answer.clone().expect(422)["detail"][0]["loc"], place, "{}", answer.json);
        }
        for body in [r#"{"instance_id":"a","reward":NaN}"#, "{", "[1]", "\u{1}"] {
            let answer = facade.call(Method::POST, "/buffer/write", &[], body.as_bytes().to_vec()).await;
            assert!(matches!(answer.status.as_u16(), 400 | 422), "{body}: {}", answer.json);
            assert!(!answer.json["detail"].is_null());
        }
        facade.post("/get_rollout_data", &json!({"max_groups": 0})).await.expect(422);
        facade.post("/start_rollout", &json!({"num_repeat_per_sample": "many"})).await.expect(422);
        app.rules("default", json!({"group": {"size": 2}})).await;
        let text_only = facade.post("/buffer/write", &item("a", "1", 1.0)).await.expect(422);
        assert!(text(&text_only["detail"][0]["msg"]).contains("require = []"), "{text_only}");
        assert_eq!(app.get("/stats").await.expect(200)["policies"]["default"]["received"], json!(0));
    }

    async fn a_start_sets_the_size_of_groups_for_all_replicas(app: TestApp) {
        slime(app).await;
        write(app, &item("before", "0", 1.0)).await;
        let facade = Facade::of(app, "slime");
        let start = json!({"num_repeat_per_sample": "3", "task_type": "math", "num_process": "100", "skip_instance_ids": ["a"]});
        facade.post("/start_rollout", &start).await.expect(200);
        facade.post("/start_rollout", &start).await.expect(200);
        let rules = app.get("/policies/default").await.expect(200)["rules"].clone();
        assert_eq!((&rules["group"]["size"], &rules["group"]["timeout_s"]), (&json!(3), &json!(60)));
        app.restart().await;
        for index in 0..3 {
            write(app, &item("a", &format!("a-{index}"), 1.0)).await;
        }
        // A group that was open before keeps its size.
        write(app, &item("before", "1", 1.0)).await;
        assert_eq!(read(app).await, ["a-0", "a-1", "a-2", "0", "1"]);
        app.rules("default", json!({"require": [], "group": {"size": 4, "min_size": 3}})).await;
        let small = Facade::of(app, "slime").post("/start_rollout", &json!({"num_repeat_per_sample": 2})).await.expect(422);
        assert_eq!(small["detail"][0]["loc"], json!(["body", "group", "min_size"]));
    }

    async fn tokens_become_segments_which_batches_deliver_too(app: TestApp) {
        app.rules("default", json!({"group": {"size": 2}})).await;
        app.reconfigure("[facades]\nslime = \"127.0.0.1:0\"").await;
        let sample = json!({"tokens": [5, 6, 7, 8], "response_length": 2, "loss_mask": [1, 0], "rollout_log_probs": [-0.5, -0.25],
            "weight_versions": ["4", "3"], "status": "truncated"});
        let items: Vec<Value> = (0..2).map(|index| with(item("a", &format!("{index}"), f64::from(index)), sample.clone())).collect();
        for item in &items {
            write(app, item).await;
        }
        let batch = app.lease().await;
        let rows = app.samples(&batch).await;
        assert_eq!((&rows[0]["tokens"], &rows[0]["loss_mask"]), (&json!([5, 6, 7, 8]), &json!([1, 0])));
        assert_eq!((&rows[0]["logprobs"], &rows[0]["policy_version"]), (&json!([-0.5, -0.25]), &json!(3)));
        assert_eq!((&rows[0]["status"], &rows[0]["messages"]), (&json!("truncated"), &items[0]["messages"]));
        assert_eq!(rows[0]["metadata"]["extra_info"]["label"], "4");
        app.nack(&batch, &[]).await.expect(200);
        let read = read_as(app, "", json!({})).await;
        assert_eq!(read["data"]["data"], json!(items));
        // Rollouts that were not written as items can be read as items.
        app.accept(group("native", &[1.0, 0.0])).await;
        let read = read_as(app, "", json!({})).await;
        let first = json!({"uid": "native-0", "instance_id": "native", "messages": [], "reward": 1.0, "extra_info": {},
            "tokens": [1, 2, 3], "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -0.25], "response_length": 2});
        assert_eq!((&read["data"]["data"][0], uids(&read).len()), (&first, 2));
    }

    async fn a_read_that_does_not_arrive_is_not_acked(app: TestApp) {
        slime(app).await;
        let long = json!({"messages": [{"role": "assistant", "content": "x".repeat(4 << 20)}], "extra_info": {}});
        for instance in ["a", "b", "c", "d"] {
            for index in 0..2 {
                write(app, &with(item(instance, &format!("{instance}-{index}"), 1.0), long.clone())).await;
            }
        }
        // The client takes the head of the answer and goes.
        let url = format!("{}/get_rollout_data", app.facades["slime"]);
        let answer = app.http.post(url).json(&json!({})).send().await.expect("the facade answers");
        // Until it has all of it, another read of the same consumer does not ack it.
        assert_eq!(read(app).await, [""; 0]);
        assert_eq!((count(app, "leased").await, count(app, "checkpointed").await), (json!(8), json!(0)));
        drop(answer);
        eventually("the return of the batches", || async { count(app, "returned").await == json!(8) }).await;
        assert_eq!(read(app).await.len(), 8, "the next read did not ack them");
        assert_eq!(count(app, "checkpointed").await, json!(0));
        assert_eq!(read(app).await, [""; 0]);
        assert_eq!(count(app, "checkpointed").await, json!(8));
    }

    async fn an_item_waits_for_room_because_its_generator_would_drop_it(app: TestApp) {
        slime(app).await;
        let rules = json!({"require": [], "group": {"size": 2}, "backlog": {"max_ready_rollouts": 2}});
        app.rules("default", rules).await;
        write_group(app, "a").await;
        let third = item("b", "b-0", 1.0);
        let later = async {
            assert_eq!(read(app).await, ["a-0", "a-1"]);
            read(app).await
        };
        let (written, acked) = futures::future::join(write(app, &third), later).await;
        assert_eq!((&written["success"], acked.len()), (&json!(true), 0));
        assert_eq!(count(app, "open").await, json!(1));
    }

    async fn bodies_may_be_compressed(app: TestApp) {
        slime(app).await;
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        std::io::Write::write_all(&mut encoder, item("a", "1", 1.0).to_string().as_bytes()).expect("memory");
        let gzip = encoder.finish().expect("memory");
        let zstd = zstd::encode_all(item("a", "2", 1.0).to_string().as_bytes(), 1).expect("memory");
        let facade = Facade::of(app, "slime");
        facade.call(Method::POST, "/buffer/write", &[("content-encoding", "gzip")], gzip).await.expect(200);
        facade.call(Method::POST, "/buffer/write", &[("content-encoding", "zstd")], zstd).await.expect(200);
        assert_eq!(read(app).await, ["1", "2"]);
    }

    async fn values_take_bytes_from_the_budget(app: TestApp) {
        slime(app).await;
        let limits = "[limits]\nbody_bytes = 65536\ninflight_bytes = 262144\n";
        app.reconfigure(&format!("{limits}[facades]\nslime = \"127.0.0.1:0\"")).await;
        let dense = with(item("i", "dense", 1.0), json!({"objects": vec![json!({}); 4_000]}));
        let refused = Facade::of(app, "slime").post("/buffer/write", &dense).await.expect(413);
        assert!(text(&refused["detail"]).contains("limits.inflight_bytes"), "{refused}");
        write(app, &with(item("i", "text", 1.0), json!({"text": "x".repeat(12_000)}))).await;
    }
}
