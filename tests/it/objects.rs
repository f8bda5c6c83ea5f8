//! Payloads of Postgres in an object store.

mod faults;
mod owner;
mod removal;
mod s3;

use serde_json::{Value, json};
use sqlx::{Connection as _, PgConnection};

use self::s3::{Mode, S3};
use crate::support::{eventually, fresh_database, group, process::Service, text, with};

/// A group with two rollouts.
fn bundle(number: usize) -> Value {
    let mut bundle = group(&format!("g{number}"), &[1.0, 0.0]);
    for (place, rollout) in bundle.as_array_mut().expect("a bundle").iter_mut().enumerate() {
        rollout["segments"] = json!([{"tokens": tokens(2 * number + place), "loss_mask": vec![1; 399]}]);
    }
    bundle
}

async fn post(http: &reqwest::Client, service: &Service, number: usize) -> u16 {
    let sent = http.post(format!("{}/trajectories", service.url)).json(&bundle(number)).send().await;
    sent.expect("the service answers").status().as_u16()
}

async fn is_ready(http: &reqwest::Client, service: &Service) -> bool {
    let ready = http.get(format!("{}/readyz?full=1", service.url)).send().await;
    ready.is_ok_and(|answer| answer.status() == 200)
}

fn tokens(index: usize) -> Vec<usize> {
    (0..400).map(|token| token * 7_919 % (1_000 + index)).collect()
}

async fn rules(http: &reqwest::Client, service: &Service, more: Value) {
    let rules = with(json!({"group": {"size": 2}}), more);
    let put = http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
    assert!(put.expect("the service answers").status().is_success());
}

/// The statuses of reading all batches that are ready, and their rows.
async fn delivered(http: &reqwest::Client, service: &Service) -> (Vec<u16>, Vec<Value>) {
    let (mut statuses, mut rows) = (Vec::new(), Vec::new());
    loop {
        let lease = http.post(format!("{}/batches", service.url)).json(&json!({})).send().await;
        let lease = lease.expect("the service answers");
        if lease.status() == 204 {
            return (statuses, rows);
        }
        let batch: Value = lease.json().await.expect("a descriptor");
        let read = http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
        let read = read.expect("the service answers");
        statuses.push(read.status().as_u16());
        let lines = read.text().await.unwrap_or_default();
        if statuses.last() == Some(&200) {
            rows.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a row")));
        }
    }
}

async fn number(database: &str, sql: &'static str) -> i64 {
    let mut connection = PgConnection::connect(database).await.expect("the server accepts");
    sqlx::query_scalar(sql).fetch_one(&mut connection).await.expect("it is valid")
}

const INSIDE: &str = "SELECT COUNT(*) FROM payload WHERE file IS NULL";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_are_objects_that_every_replica_reads_and_a_kill_loses_none() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    s3.set(Mode::Slow);
    for number in 0..5 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    service.kill().await;
    s3.set(Mode::Forward);
    let (first, second) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    assert_eq!(post(&s3.http, &first, 5).await, 201);
    let (statuses, rows) = delivered(&s3.http, &second).await;
    assert_eq!(statuses, [200; 6]);
    for (index, row) in rows.iter().enumerate() {
        assert_eq!(row["tokens"], json!(tokens(index)), "{index}");
    }
    assert_eq!((rows.len(), number(&database, INSIDE).await), (12, 0));
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy && table.contains("0 in the database, 12 in 6"), "{table}");
    first.kill().await;
    second.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_are_objects_and_bytes_that_differ_leave_none() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    let image: Vec<u8> = (0..5_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let put = async |digest: &str, bytes: &[u8]| {
        let put = s3.http.put(format!("{}/media/{digest}", service.url)).body(bytes.to_vec()).send().await;
        put.expect("the service answers").status().as_u16()
    };
    for length in [1_000, image.len()] {
        let image = &image[..length];
        let digest = blake3::hash(image).to_hex();
        let mut wrong = image.to_vec();
        wrong[length - 1] ^= 1;
        assert_eq!(put(&digest, &wrong).await, 422, "{length}");
        assert_eq!(put(&digest, image).await, 201, "{length}");
        let got = s3.http.get(format!("{}/media/{digest}", service.url)).send().await.expect("the service answers");
        assert!(got.bytes().await.expect("it is whole") == image, "{length}");
    }
    assert_eq!(number(&database, INSIDE).await, 0);
    assert!(service.stop().await.success());
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy && table.contains("2 uploads, 5001000 bytes"), "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_or_read_lately_is_read_from_memory() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let (writes, reads) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    rules(&s3.http, &writes, json!({})).await;
    assert_eq!(post(&s3.http, &writes, 0).await, 201);
    let lease = s3.http.post(format!("{}/batches", writes.url)).json(&json!({})).send().await;
    let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
    let samples = async |service: &Service| {
        let read = s3.http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
        let lines = read.expect("the service answers").text().await.unwrap_or_default();
        let row = |line: &str| serde_json::from_str::<Value>(line).expect("a row")["tokens"].clone();
        lines.lines().map(row).collect::<Vec<_>>()
    };
    let stored = [0, 1].map(|index| json!(tokens(index)));
    let found = async |service: &Service, from: &str| {
        service.metric(&s3.http, &format!("forebay_object_payloads_read_total{{from=\"{from}\"}}")).await as u64
    };
    s3.set(Mode::Refuse);
    assert_eq!(samples(&writes).await, stored);
    assert_eq!(found(&writes, "cache").await, 2);

    s3.set(Mode::Forward);
    assert_eq!(samples(&reads).await, stored);
    assert_eq!(found(&reads, "store").await, 2);
    s3.set(Mode::Refuse);
    assert_eq!(samples(&reads).await, stored);
    assert_eq!(found(&reads, "cache").await, 2);
    assert_eq!(found(&reads, "store").await, 2);
    writes.kill().await;
    reads.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_move_into_objects_and_back_and_an_object_that_was_replaced_is_damage() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = Service::start(&database).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..4 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert!(service.stop().await.success());
    assert_eq!(number(&database, INSIDE).await, 8);
    let service = s3.serve(&database, None).await;
    eventually("all payloads are objects", || async { number(&database, INSIDE).await == 0 }).await;
    assert!(service.stop().await.success());

    let (moved, said) = s3.run(&["move-payloads", "database", "--database", &database]).await;
    assert!(moved && said.contains("8 in the database, 0 outside of it"), "{said}");
    let (moved, said) = s3.run(&["move-payloads", "objects", "--database", &database]).await;
    assert!(moved && said.contains("0 in the database, 8 outside of it"), "{said}");
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy, "{table}");

    let newest = number(&database, "SELECT MAX(file) FROM payload").await;
    let keys = s3.keys().await;
    let key = keys.iter().find(|key| key.ends_with(&format!("{newest:016x}"))).expect("it is there");
    s3.remove(key).await;
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains(&format!("{newest:016x}")), "{table}");
    let replaced = s3.http.put(s3.url(key)).body("short").send().await;
    assert_eq!(replaced.expect("the server answers").status(), 200);
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains("another one"), "{table}");
    let service = s3.serve(&database, None).await;
    let (statuses, _) = delivered(&s3.http, &service).await;
    assert!(statuses.contains(&500), "{statuses:?}");
    assert!(number(&database, "SELECT COUNT(*) FROM rollout_group WHERE state = 'quarantined'").await > 0);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_that_a_database_cannot_have_is_refused() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let refusal = async |database: &str, arguments: &[&str]| {
        let arguments = [&["--listen", "127.0.0.1:0", "--database", database], arguments].concat();
        let (succeeds, said) = s3.run(&arguments).await;
        assert!(!succeeds, "{said}");
        said
    };
    let said = refusal(&database, &["--payloads", "segments"]).await;
    assert!(said.contains("for SQLite"), "{said}");
    let said = refusal("sqlite::memory:", &["--payloads", "objects"]).await;
    assert!(said.contains("for Postgres"), "{said}");
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "ftp://host/folder"]).await;
    assert!(said.contains("must be s3://BUCKET/PATH"), "{said}");
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "s3://missing/folder"]).await;
    assert!(said.contains("the object store cannot be used"), "{said}");

    let service = s3.serve(&database, None).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    assert!(service.stop().await.success());
    let said = refusal(&database, &["--payloads", "objects", "--objects-url", "s3://bucket/other"]).await;
    assert!(said.contains("move them into the database first"), "{said}");
}
