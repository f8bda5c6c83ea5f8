//! Object stores that fail, lose or alter what they are given, or do not answer.

use serde_json::{Value, json};

use super::{
    bundle, delivered, is_ready, number, post, rules,
    s3::{Mode, S3},
};
use crate::support::{eventually, fresh_database, group, text};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_fails_refuses_posts_and_an_answer_that_is_lost_stores_once() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[objects]\ncache_bytes = 0").expect("it can be written");
    let service = s3.serve(&database, Some(&config)).await;
    rules(&s3.http, &service, json!({})).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    let objects = s3.keys().await.len();

    s3.set(Mode::Refuse);
    assert_eq!(post(&s3.http, &service, 1).await, 503);
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 2, "nothing is stored without its payload");
    let readiness = async |query: &str| {
        let answer = s3.http.get(format!("{}/readyz{query}", service.url)).send().await;
        answer.expect("the service answers").status().as_u16()
    };
    let refused = s3.struck();
    eventually("a probe", || async { s3.struck() > refused }).await;
    assert_eq!(readiness("?full=1").await, 503, "the database can be written, and that is not enough");
    assert_eq!(readiness("").await, 200, "a balancer that took all replicas away would take leases and acks away too");
    let (statuses, rows) = delivered(&s3.http, &service).await;
    assert_eq!((statuses, rows.len()), (vec![503], 0), "leases go on, and samples can be read later");
    s3.set(Mode::Forward);
    eventually("readiness", || async { readiness("?full=1").await == 200 }).await;
    assert_eq!(post(&s3.http, &service, 1).await, 201);

    let refused = s3.struck();
    s3.set(Mode::LoseAnswers);
    let posting = {
        let (http, url) = (s3.http.clone(), service.url.clone());
        tokio::spawn(async move {
            let sent = http.post(format!("{url}/trajectories")).json(&group("lost", &[1.0, 0.0])).send().await;
            sent.expect("the service answers").status().as_u16()
        })
    };
    eventually("a lost answer", || async { s3.struck() > refused }).await;
    s3.set(Mode::Forward);
    assert_eq!(posting.await.expect("a client only posts"), 201, "the request is made again");
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 6);
    assert_eq!(s3.keys().await.len(), objects + 2, "the object has the same name each time");
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(healthy, "{table}");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_that_another_replica_does_not_see_yet_is_not_lost() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let (first, second) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    rules(&s3.http, &first, json!({})).await;
    s3.set(Mode::NotVisible);
    assert_eq!(post(&s3.http, &first, 0).await, 201);
    let lease = s3.http.post(format!("{}/batches", second.url)).json(&json!({})).send().await;
    let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
    let samples = format!("{}{}", second.url, text(&batch["samples_url"]));
    let read = || async { s3.http.get(&samples).send().await.expect("the service answers") };
    assert_eq!(read().await.status().as_u16(), 503, "the same call may succeed later");
    s3.set(Mode::Forward);
    let answer = read().await;
    assert_eq!(answer.status().as_u16(), 200, "the lease is still valid, and nothing is quarantined");
    assert_eq!(answer.text().await.expect("rows").lines().count(), 2);
    first.kill().await;
    second.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_write_was_answered_and_that_is_not_stored_is_noticed_before_the_commit() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    s3.set(Mode::Forget);
    assert_eq!(post(&s3.http, &service, 0).await, 503);
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 0, "no row names what is not there");
    s3.set(Mode::Forward);
    eventually("readiness", || is_ready(&s3.http, &service)).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    assert_eq!(delivered(&s3.http, &service).await.0, [200]);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_every_rollout_whose_object_is_missing_also_if_it_was_just_written() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..3 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert!(service.stop().await.success());
    for key in s3.keys().await.iter().take(2) {
        s3.remove(key).await;
    }
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains("6 rollouts"), "{table}");
    assert_eq!(table.matches("- rollout ").count(), 4, "{table}");
    assert_eq!(table.matches("is missing").count(), 2, "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_never_answers_refuses_posts_and_holds_up_nothing_else() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[objects]\ncache_bytes = 0").expect("it can be written");
    let service = s3.serve(&database, Some(&config)).await;
    rules(&s3.http, &service, json!({})).await;
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    s3.set(Mode::Hang);
    let inside = s3.serve_with(&database, None, "database").await;
    let posting = {
        let group = bundle(1);
        let post = s3.http.post(format!("{}/trajectories", service.url)).json(&group);
        tokio::spawn(async move { post.send().await.expect("the service answers").status().as_u16() })
    };
    eventually("a request without an answer", || async { s3.struck() > 0 }).await;

    assert_eq!(post(&s3.http, &inside, 2).await, 201, "its payloads are in the database");
    let samples = async || {
        let lease = s3.http.post(format!("{}/batches", service.url)).json(&json!({})).send().await;
        let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
        s3.http.get(format!("{}{}", service.url, text(&batch["samples_url"])))
    };
    let (in_object, in_database) = (samples().await, samples().await);
    let read = in_database.send().await.expect("the service answers");
    assert_eq!(read.status().as_u16(), 200, "payloads of the database are read");
    assert_eq!(read.text().await.expect("rows").lines().count(), 2);
    let ready = async |query: &str| {
        let answer = s3.http.get(format!("{}/readyz{query}", service.url)).send().await.expect("the service answers");
        (answer.status().as_u16(), answer.text().await.expect("a problem is text"))
    };
    assert_eq!(ready("").await.0, 200);
    assert!(!posting.is_finished(), "nothing of this had to wait until the post was given up");

    let reading = tokio::spawn(async move { in_object.send().await.expect("the service answers").status().as_u16() });
    eventually("two answers", || async { posting.is_finished() && reading.is_finished() }).await;
    assert_eq!(posting.await.expect("a client only posts"), 503);
    assert_eq!(reading.await.expect("a client only reads"), 503);
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout").await, 4, "nothing is stored without its payload");
    let (status, problem) = ready("?full=1").await;
    assert!(status == 503 && problem.contains("the object store takes no payloads"), "{status} {problem}");
    assert_eq!(ready("").await.0, 200);
    assert_eq!(post(&s3.http, &service, 3).await, 503, "the store is known to take nothing");
    for replica in [service, inside] {
        let log = replica.terminate().await.join("\n");
        assert!(!log.contains("in time"), "neither requests nor the store hold up the end: {log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_whose_bytes_were_altered_is_found_when_it_is_read() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let (writes, reads) = (s3.serve(&database, None).await, s3.serve(&database, None).await);
    rules(&s3.http, &writes, json!({})).await;
    s3.set(Mode::Alter);
    assert_eq!(post(&s3.http, &writes, 0).await, 201, "it has the right length");
    s3.set(Mode::Forward);
    let (healthy, table) = s3.run(&["doctor", "--database", &database]).await;
    assert!(!healthy && table.contains("- rollout "), "{table}");
    assert_eq!(delivered(&s3.http, &reads).await, (vec![500], Vec::new()), "no trainer gets it");
    assert_eq!(number(&database, "SELECT COUNT(*) FROM rollout_group WHERE state = 'quarantined'").await, 1);

    s3.set(Mode::Alter);
    let (_, said) =
        s3.run(&["serve", "--listen", "127.0.0.1:0", "--payloads", "objects", "--database", &database]).await;
    assert!(
        said.contains("it has other bytes than were written"),
        "a store that alters all objects is not used: {said}"
    );
    writes.kill().await;
    reads.kill().await;
}
