//! Batches have exactly the registered number of sequences, and each read acks the one before.

use std::collections::{BTreeMap, BTreeSet};

use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::support::{Server, scored, seeds, sequences};
use crate::support::{TestApp, eventually, on_both_stores, with};

/// How many clients leave soon after their batch is leased, so that some of them leave before the answer begins.
const READERS: usize = 24;

async fn batches(app: &TestApp, state: &str) -> Vec<Value> {
    let listed = app.get(&format!("/batches?state={state}")).await.expect(200);
    listed["batches"].as_array().expect("a list").clone()
}

/// Begins to read an answer, and disconnects.
async fn read_and_disconnect(url: &str, path: &str) {
    let address = url.trim_start_matches("http://");
    let mut connection = tokio::net::TcpStream::connect(address).await.expect("the service listens");
    let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\n\r\n");
    connection.write_all(head.as_bytes()).await.expect("sent");
    let mut begin = [0; 16];
    connection.read_exact(&mut begin).await.expect("the answer begins");
}

on_both_stores! {
    async fn the_next_read_acks_and_settles_a_batch(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(2).await;
        for seed in 0..3 {
            server.post("/scored_data", scored(seed, 2)).await;
        }
        assert_eq!(seeds(&server.batch().await), [0]);
        let read = batches(server.app(), "leased").await;
        assert_eq!(read.len(), 1);
        let lasts_ms = read[0]["expires_in_ms"].as_i64().expect("it is leased");
        assert_eq!(lasts_ms, 86_400_000, "a day");
        server.restart().await;
        assert_eq!(seeds(&server.batch().await), [1], "the restart does not deliver it again");
        assert_eq!(batches(server.app(), "checkpointed").await.len(), 1);
        assert_eq!(seeds(&server.batch().await), [2]);
        assert!(server.batch().await.is_empty());
        assert_eq!(batches(server.app(), "checkpointed").await.len(), 3, "a read without a batch acks as well");
        assert_eq!(server.get("/status").await, json!({"current_step": 6, "queue_size": 0}));
    }

    async fn a_trainer_that_registers_again_gets_what_it_has_not_acked(app: TestApp) {
        let mut server = Server::of(app).await;
        server.start(2).await;
        server.post("/scored_data", scored(0, 2)).await;
        server.post("/scored_data", scored(1, 2)).await;
        assert_eq!(seeds(&server.batch().await), [0]);
        server.register(2).await;
        server.restart().await;
        assert_eq!(seeds(&server.batch().await), [0]);
        assert_eq!(server.get("/status").await["current_step"], json!(4), "it is the same step again");
        assert_eq!(seeds(&server.batch().await), [1]);
    }

    async fn a_batch_that_is_never_acked_comes_back_after_a_day(app: TestApp) {
        let server = Server::of(app).await;
        server.start(2).await;
        server.post("/scored_data", scored(0, 2)).await;
        assert_eq!(seeds(&server.batch().await), [0]);
        server.app().pass_s(86_401.0).await;
        assert_eq!(seeds(&server.batch().await), [0]);
    }

    async fn a_batch_whose_answer_does_not_arrive_comes_again(app: TestApp) {
        let server = Server::of(app).await;
        server.start(8).await;
        // Larger than what sockets hold, so that the service notices.
        let tokens = vec![vec![123_456; 120_000]; 8];
        let long = json!({"tokens": tokens, "masks": tokens, "scores": vec![0.5; 8]});
        server.post("/scored_data", long.clone()).await;
        server.post("/scored_data", scored(1, 8)).await;
        read_and_disconnect(&server.url(), "/batch").await;
        let app = server.app();
        eventually("the batch is given back", || async { batches(app, "returned").await.len() == 1 }).await;
        assert_eq!(batches(app, "returned").await[0]["reason"], "the answer did not arrive");
        assert_eq!(server.batch().await[0]["tokens"], long["tokens"]);
        assert_eq!(seeds(&server.batch().await), [1]);
        assert!(server.batch().await.is_empty());
    }

    async fn every_batch_is_a_step_also_if_its_first_reader_leaves(app: TestApp) {
        let server = Server::of(app).await;
        server.start(2).await;
        for seed in 0..READERS {
            server.post("/scored_data", scored(seed, 2)).await;
            let app = server.app();
            let leaves = tokio::spawn(app.http.get(format!("{}/batch", server.url())).send());
            eventually("the batch is leased", || async {
                batches(app, "leased").await.iter().any(|batch| batch["attempt"] == json!(1))
            })
            .await;
            leaves.abort();
            drop(leaves.await);
            // The batch was read, or comes back. Each read acks the one before.
            eventually("the batch is settled", || async {
                server.batch().await;
                batches(app, "checkpointed").await.len() == seed + 1
            })
            .await;
        }
        assert_eq!(server.get("/status").await["current_step"], json!(3 + READERS));
    }

    async fn environments_get_their_shares_of_a_batch(app: TestApp) {
        let server = Server::of(app).await;
        server.start(8).await;
        server.register_environment("a", 2, json!({})).await;
        server.register_environment("b", 2, json!({"min_batch_allocation": 0.5})).await;
        for seed in 0..5 {
            server.post("/scored_data", with(scored(seed, 2), json!({"env_id": 0}))).await;
        }
        assert!(server.batch().await.is_empty(), "b has a share, and nothing is there");
        for seed in 5..7 {
            server.post("/scored_data", with(scored(seed, 2), json!({"env_id": 1}))).await;
        }
        let batch = server.batch().await;
        assert_eq!(sequences(&batch), 8);
        assert_eq!(batch.iter().filter(|group| group["env_id"] == json!(1)).count(), 2);
        server.post("/disconnect-env", json!({"env_id": 1})).await;
        server.post("/scored_data", with(scored(7, 2), json!({"env_id": 0}))).await;
        assert_eq!(sequences(&server.batch().await), 8, "an environment that has left has no share");
    }

    async fn long_answers_are_compressed_for_clients_that_accept_it(app: TestApp) {
        let server = Server::of(app).await;
        server.start(1).await;
        let url = server.url();
        let read = async |path: &str, accept: &str| {
            let request = server.app().http.get(format!("{url}{path}")).header("accept-encoding", accept);
            let answer = request.send().await.expect("answered");
            let coding = answer.headers().get("content-encoding").map(|value| value.to_str().expect("text").to_owned());
            (coding, answer.bytes().await.expect("the answer arrives"))
        };
        let long = json!({"tokens": [vec![5; 3000]], "masks": [vec![5; 3000]], "scores": [1.0]});
        server.post("/scored_data", long.clone()).await;
        server.post("/scored_data", scored(1, 1)).await;
        let (coding, bytes) = read("/latest_example", "gzip").await;
        assert_eq!(coding, None, "it is short");
        assert!(serde_json::from_slice::<Value>(&bytes).is_ok());
        let (coding, bytes) = read("/batch", "gzip, deflate").await;
        assert_eq!(coding.as_deref(), Some("gzip"));
        let unpacked: Value = serde_json::from_reader(flate2::read::GzDecoder::new(&bytes[..])).expect("gzip of JSON");
        assert_eq!(unpacked["batch"][0]["tokens"], long["tokens"]);
        assert_eq!(read("/batch", "gzip").await.0, None, "it is short");
        server.post("/scored_data", long.clone()).await;
        assert_eq!(read("/batch", "identity").await.0, None);
    }

    /// What any history of posts and reads must have: every group at most once, whole and as it was posted, in batches
    /// of the exact size; of one environment with one size in the order of the posts; and at the end not enough is left.
    async fn random_groups_are_read_exactly_once(app: TestApp) {
        const BATCH: usize = 16;
        let mut server = Server::of(app).await;
        server.start(BATCH as u32).await;
        let sizes = [4, 8, 2];
        for size in sizes {
            server.register_environment("e", size, json!({})).await;
        }
        let mut random = StdRng::seed_from_u64(7);
        let mut posted: BTreeMap<i64, Value> = BTreeMap::new();
        let mut read: Vec<i64> = Vec::new();
        for seed in 0..240 {
            let env_id = random.random_range(0..3_usize);
            let size = if random.random_bool(0.8) { sizes[env_id] as usize } else { random.random_range(1..=8) };
            let group = with(scored(seed, size), json!({"env_id": env_id}));
            server.post("/scored_data", group.clone()).await;
            posted.insert(seed as i64, group);
            if random.random_bool(0.02) {
                server.restart().await;
            }
            if random.random_bool(0.15) {
                take(&server, &posted, &mut read, BATCH).await;
            }
        }
        while take(&server, &posted, &mut read, BATCH).await {}
        let distinct: BTreeSet<i64> = read.iter().copied().collect();
        assert_eq!(distinct.len(), read.len(), "no group is read twice");
        let whole = |seed: &&i64| {
            let env_id = posted[*seed]["env_id"].as_u64().expect("an id") as usize;
            posted[*seed]["tokens"].as_array().map(Vec::len) == Some(sizes[env_id] as usize)
        };
        let left: Vec<&i64> = posted.keys().filter(|seed| !distinct.contains(seed)).filter(whole).collect();
        let left: usize = left.into_iter().map(|seed| posted[seed]["tokens"].as_array().map_or(0, Vec::len)).sum();
        assert!(left < BATCH, "{left} sequences of whole groups are left");
        assert!(read.len() > 200, "{} groups were read", read.len());
    }
}

/// Reads a batch and checks it. Returns whether there was one.
async fn take(server: &Server<'_>, posted: &BTreeMap<i64, Value>, read: &mut Vec<i64>, size: usize) -> bool {
    let batch = server.batch().await;
    if batch.is_empty() {
        return false;
    }
    assert_eq!(sequences(&batch), size);
    for (seed, group) in seeds(&batch).into_iter().zip(&batch) {
        for (key, value) in posted[&seed].as_object().expect("an object") {
            assert_eq!(&group[key], value, "{key} of {seed}");
        }
        read.push(seed);
    }
    true
}
