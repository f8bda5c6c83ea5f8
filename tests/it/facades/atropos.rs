//! The facade of Atropos: its environments post scored groups, and its trainer reads batches of a fixed number of
//! sequences.

mod crash;
mod keys;
mod posts;
mod reads;
mod replicas;
mod support;

use serde_json::{Value, json};

use self::support::{Server, scored};
use crate::support::{on_both_stores, with};

on_both_stores! {
    async fn before_a_trainer_registers_there_is_nothing(app: TestApp) {
        let server = Server::of(app).await;
        assert_eq!(server.get("/").await, json!({"message": "AtroposLib API"}));
        assert_eq!(server.get("/info").await, json!({"batch_size": -1, "max_token_len": -1}));
        assert_eq!(server.get("/wandb_info").await, json!({"group": null, "project": null}));
        assert_eq!(server.get("/status").await, json!({"current_step": 0, "queue_size": 0}));
        assert_eq!(server.get("/latest_example").await["tokens"], json!([]));
        let message = "Trainer not registered. Call /register first.";
        assert_eq!(server.get("/batch").await, json!({"status": "error", "message": message, "batch": []}));
        let waiting = json!({"status": "wait for trainer to start"});
        assert_eq!(server.register_environment("math", 4, json!({})).await, waiting);
        let failure = json!({"status": "failure", "error": "environment 0 is not registered"});
        assert_eq!(server.post("/disconnect-env", json!({"env_id": 0})).await, failure);
    }

    async fn a_registration_holds_for_environments_until_a_reset(app: TestApp) {
        let mut server = Server::of(app).await;
        let answer = server.register(4).await;
        assert!(answer.starts_with("{\"uuid\":") && answer.len() > 30, "a number of 128 bits: {answer}");
        let waiting = json!({"status": "wait for trainer to start"});
        assert_eq!(server.register_environment("math", 2, json!({})).await, waiting);
        assert_eq!(server.get("/batch").await, json!({"batch": null}));
        server.restart().await;
        let expected = json!({
            "status": "success", "env_id": 0, "wandb_name": "math_0", "checkpoint_dir": "/tmp/c", "starting_step": 3,
            "checkpoint_interval": 10, "num_steps": 1000,
        });
        assert_eq!(server.register_environment("math", 2, json!({})).await, expected);
        let second = server.register_environment("math", 2, json!({})).await;
        assert_eq!((&second["env_id"], &second["wandb_name"]), (&json!(1), &json!("math_1")));
        server.restart().await;
        assert_eq!(server.get("/info").await, json!({"batch_size": 4, "max_token_len": 512}));
        assert_eq!(server.get("/wandb_info").await, json!({"group": "g", "project": "p"}));
        assert_eq!(server.post("/disconnect-env", json!({"env_id": 1})).await, json!({"status": "success"}));
        assert_eq!(server.environment_status(0).await["env_weight"], json!(1.0));
        assert_eq!(server.text("/reset_data").await, "Reset successful");
        server.restart().await;
        assert_eq!(server.get("/info").await, json!({"batch_size": -1, "max_token_len": -1}));
        assert_eq!(server.get("/status").await, json!({"current_step": 0, "queue_size": 0}));
    }

    async fn a_reset_discards_what_was_not_read_and_the_ledger_tells(app: TestApp) {
        let server = Server::of(app).await;
        server.start(4).await;
        server.post("/scored_data", scored(1, 2)).await;
        assert_eq!(server.text("/reset_data").await, "Reset successful");
        assert_eq!(server.get("/latest_example").await["tokens"], json!([]));
        server.start(2).await;
        assert_eq!(server.get("/batch").await, json!({"batch": null}));
        let dropped = server.app().get("/stats").await.expect(200)["policies"]["default"]["dropped"].clone();
        assert_eq!(dropped["reset"], json!(1));
        // Ids of different runs never meet, so the same group may come again.
        server.post("/scored_data", scored(1, 2)).await;
        assert_eq!(server.batch().await.len(), 1);
    }

    async fn the_latest_example_is_the_newest_group(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(2).await;
        let sent = with(scored(1, 2), json!({"messages": [[{"role": "user", "content": "a"}], []]}));
        server.post("/scored_data", scored(0, 2)).await;
        server.post("/scored_data", sent.clone()).await;
        server.restart().await;
        let latest = server.get("/latest_example").await;
        for (key, value) in sent.as_object().expect("an object") {
            assert_eq!(&latest[key], value, "{key}");
        }
        assert!(latest["overrides"].is_null());
        server.batch().await;
        server.batch().await;
        assert_eq!(server.get("/latest_example").await["tokens"], sent["tokens"], "also after it was read");
    }

    async fn statuses_count_what_is_ready_and_not_held(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(8).await;
        server.register_environment("a", 4, json!({"min_batch_allocation": 0.5})).await;
        server.register_environment("b", 2, json!({})).await;
        for (seed, (env_id, size)) in [(0, 4), (1, 2), (1, 2), (0, 3)].into_iter().enumerate() {
            server.post("/scored_data", with(scored(seed, size), json!({"env_id": env_id}))).await;
        }
        server.restart().await;
        assert_eq!(server.get("/status").await, json!({"current_step": 3, "queue_size": 3}));
        let of_a = server.environment_status(0).await;
        let expected = json!({
            "current_step": 3, "queue_size": 2, "unallocated_fraction": 0.5, "self_queue_size": 1, "max_group_size": 4,
            "env_weight": 0.5,
        });
        assert_eq!(of_a, expected);
        let of_b = server.environment_status(1).await;
        assert_eq!((&of_b["queue_size"], &of_b["self_queue_size"]), (&json!(2), &json!(2)));
        let refusal = server.refused("/status-env", json!({"env_id": 2}), 422).await;
        assert_eq!(refusal["detail"][0]["loc"], json!(["body", "env_id"]));
        assert_eq!(server.batch().await.len(), 3, "4 + 2 + 2");
        assert_eq!(server.get("/status").await, json!({"current_step": 4, "queue_size": 0}));
    }

    async fn what_cannot_be_read_is_refused_as_fastapi_does(app: TestApp) {
        let server = Server::of(app).await;
        let message = json!({"tokens": [[1, 2]], "masks": [[1, 2]], "scores": [1], "messages": [[{"role": "user"}]]});
        let refusal = server.refused("/scored_data", message, 422).await;
        assert_eq!(refusal["detail"][0]["loc"], json!(["body", "messages", 0, 0]));
        let missing = server.refused("/scored_data", json!({"tokens": [[1]], "masks": [[1]]}), 422).await;
        assert_eq!(missing["detail"][0]["loc"], json!(["body", "scores"]));
        assert_eq!(missing["detail"][0]["type"], "missing");
        let list = json!([scored(0, 2), {"tokens": [[1, 2]], "masks": [[1]], "scores": [1]}]);
        let refusal = server.refused("/scored_data_list", list, 422).await;
        assert_eq!(refusal["detail"][0]["loc"], json!(["body", 1, "masks", 0]));
        assert_eq!(server.get("/status").await["queue_size"], json!(0), "nothing of the list is stored");
        server.refused("/register", json!({"batch_size": 4}), 422).await;
        server.refused("/register-env", json!({"desired_name": "a"}), 422).await;
        let unknown = server.app().http.get(format!("{}/nothing", server.url())).send().await.expect("answered");
        assert_eq!(unknown.status(), 404);
        assert_eq!(unknown.json::<Value>().await.expect("JSON"), json!({"detail": "Not Found"}));
    }
}
