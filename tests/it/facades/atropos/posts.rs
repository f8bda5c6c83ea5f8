//! Scored groups are stored whole, once, and with everything they came with.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use serde_json::{Value, json};

use super::support::{CONFIG, Server, scored, seeds, sequences};
use crate::support::{on_both_stores, with};

fn gzip(body: &Value) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(body.to_string().as_bytes()).expect("it writes to memory");
    encoder.finish().expect("it writes to memory")
}

on_both_stores! {
    async fn a_group_is_returned_as_it_was_posted(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(2).await;
        let sent = json!({
            "tokens": [[1, 2, 3, 4], [5, 6, 7]], "masks": [[-100, -100, 3, 4], [1, 1, 1]], "scores": [1.5, -2.0],
            "advantages": [[0.1, 0.2], [0.3]], "ref_logprobs": [[-0.123_456_789_012_345], [-1.0]],
            "messages": [[{"role": "user", "content": [{"type": "text", "text": "\u{e9}"}], "reward": null}], []],
            "generation_params": {"temperature": 0.7}, "inference_logprobs": [[1.0, 1.0, -0.1, -0.25], [-1.0, -2.5, -3.0]],
            "overrides": [{"set_advantage_to_zero": true}, {}], "group_overrides": {"sft": true},
            "images": ["data"], "env_id": null, "distill_token_ids": [[[1, 2]], [[3]]],
            "distill_logprobs": [[[-0.5, -1.0]], [[-2.0]]],
        });
        assert_eq!(server.post("/scored_data", sent.clone()).await, json!({"status": "received"}));
        server.restart().await;
        assert_eq!(server.batch().await, [sent]);
    }

    async fn fields_that_were_not_sent_are_null_in_batches(app: TestApp) {
        let server = Server::of(app).await;
        server.start(1).await;
        server.post("/scored_data", json!({"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1]})).await;
        let batch = server.batch().await;
        for name in ["advantages", "overrides", "messages", "group_overrides", "inference_logprobs", "env_id", "images"] {
            assert!(batch[0].get(name).is_some_and(Value::is_null), "{name}");
        }
    }

    async fn bodies_may_be_compressed(app: TestApp) {
        let server = Server::of(app).await;
        server.start(4).await;
        let url = server.url();
        let post = |path: &str, body: Vec<u8>| {
            let request = server.app().http.post(format!("{url}{path}")).header("content-encoding", "gzip").body(body);
            async move { request.send().await.expect("answered") }
        };
        let answer = post("/scored_data", gzip(&scored(0, 2))).await;
        assert_eq!(answer.json::<Value>().await.expect("JSON"), json!({"status": "received"}));
        let answer = post("/scored_data_list", gzip(&json!([scored(1, 1), scored(2, 1)]))).await;
        assert_eq!(answer.json::<Value>().await.expect("JSON"), json!({"status": "received", "groups_processed": 2}));
        assert_eq!(post("/scored_data", b"no gzip".to_vec()).await.status(), 400);
        assert_eq!(seeds(&server.batch().await), [0, 1, 2]);
    }

    async fn odd_groups_are_held_until_they_add_up(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(4).await;
        server.register_environment("a", 4, json!({})).await;
        let mut post = async |seed: usize, size: usize| {
            server.restart().await;
            server.post("/scored_data", with(scored(seed, size), json!({"env_id": 0}))).await
        };
        assert_eq!(post(0, 3).await, json!({"status": "buffered", "buffer_size": 3}));
        assert_eq!(post(1, 2).await, json!({"status": "buffered", "buffer_size": 5}));
        assert_eq!(post(2, 4).await, json!({"status": "received"}));
        assert_eq!(post(3, 2).await, json!({"status": "buffered", "buffer_size": 3}), "2 + 2 add up");
        assert_eq!(server.get("/status").await["queue_size"], json!(3));
        assert_eq!(seeds(&server.batch().await), [2]);
        assert_eq!(seeds(&server.batch().await), [1, 3]);
        assert!(server.batch().await.is_empty());
        let list = json!([with(scored(4, 1), json!({"env_id": 0})), with(scored(5, 4), json!({"env_id": 0}))]);
        let answer = json!({"status": "received", "groups_processed": 2, "buffered": 1, "last_buffer_size": 0});
        assert_eq!(server.post("/scored_data_list", list).await, answer);
        assert_eq!(sequences(&server.batch().await), 4);
        assert_eq!(sequences(&server.batch().await), 4);
    }

    async fn groups_of_an_environment_that_left_are_not_held(app: TestApp) {
        let server = Server::of(app).await;
        server.start(3).await;
        server.register_environment("a", 4, json!({})).await;
        server.post("/scored_data", with(scored(0, 3), json!({"env_id": 0}))).await;
        assert!(server.batch().await.is_empty());
        server.post("/disconnect-env", json!({"env_id": 0})).await;
        assert_eq!(seeds(&server.batch().await), [0]);
    }

    async fn the_same_group_may_be_posted_on_purpose(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(6).await;
        for _ in 0..3 {
            assert_eq!(server.post("/scored_data", scored(0, 2)).await, json!({"status": "received"}));
        }
        assert_eq!(seeds(&server.batch().await), [0, 0, 0]);
        // After a restart, nothing is known about the answer, so a body of the last minutes is a retry.
        server.restart().await;
        server.post("/scored_data", scored(0, 2)).await;
        assert_eq!(server.get("/status").await["queue_size"], json!(0));
        server.post("/scored_data", scored(0, 2)).await;
        assert_eq!(server.get("/status").await["queue_size"], json!(1));
        server.restart().await;
        server.app().pass_s(3600.0).await;
        server.post("/scored_data", scored(0, 2)).await;
        assert_eq!(server.get("/status").await["queue_size"], json!(2), "an hour later it is another post");
    }

    async fn sequences_that_filters_drop_are_not_waited_for(app: TestApp) {
        let server = Server::of(app).await;
        let rules = json!({
            "group": {"min_size": 1, "on_drop": "refill", "size": 1},
            "filter": [{"name": "zero", "scope": "rollout", "when": "reward == 0.0", "action": "drop"}],
        });
        server.app().rules("default", rules).await;
        server.start(2).await;
        server.post("/scored_data", scored(0, 3)).await;
        let batch = server.batch().await;
        assert_eq!(batch[0]["scores"], json!([1.0, 2.0]));
    }

    async fn what_each_sequence_repeats_takes_bytes_from_the_budget(app: TestApp) {
        app.reconfigure(&format!("[limits]\nbody_bytes = 65536\ninflight_bytes = 262144\n{CONFIG}")).await;
        let server = Server::running(app);
        server.start(8).await;
        let params = json!({"generation_params": {"stop": "x".repeat(40_000)}});
        server.refused("/scored_data", with(scored(1, 8), params.clone()), 413).await;
        server.post("/scored_data", with(scored(2, 2), params)).await;
    }
}
