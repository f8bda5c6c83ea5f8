//! `PgBouncer` in transaction mode: the service keeps no state in a session of the server.

use serde_json::{Value, json};
use sqlx::{Connection as _, Row as _, postgres::PgConnectOptions};

use crate::support::{Pooler, TestApp, eventually, fresh_database, group, rollout, text};

/// A database, and a pooler in front of it.
async fn pooled() -> (String, Pooler) {
    let database = fresh_database().await;
    let behind = database.clone();
    let pooler = tokio::task::spawn_blocking(move || Pooler::start(&behind)).await.expect("nothing panics");
    (database, pooler)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_replicas_behind_a_pooler_are_one_service() {
    let (_, pooler) = pooled().await;
    // Both replicas migrate the empty database at the same time.
    let url = pooler.url();
    let (first, mut second) = tokio::join!(TestApp::start_on(&url), TestApp::start_on(&url));
    first.rules("default", json!({"group": {"size": 4}, "batch": {"groups": 1}})).await;
    let posts = (0..40).flat_map(|number| {
        let bundle = group(&format!("g{number}"), &[1.0, 0.0, 1.0, 0.0]);
        [first.post("/trajectories", bundle.clone()), second.post("/trajectories", bundle)]
    });
    let answers = futures::future::join_all(posts).await;
    let refused: Vec<_> = answers.iter().filter(|answer| !answer.status.is_success()).collect();
    assert!(refused.is_empty(), "{refused:#?}");
    let created = answers.iter().filter(|answer| answer.status == 201).count();
    let repeated = answers.iter().filter(|answer| answer.status == 200).count();
    assert_eq!((created, repeated), (40, 40));
    let trained = futures::future::join_all((0..20).map(|step| train_two(&first, &second, 2 * step + 1))).await;
    let mut groups = trained.concat();
    groups.sort();
    groups.dedup();
    assert_eq!(groups.len(), 40);
    second.stop().await;
    first.finish().await;
}

/// Leases, reads, extends and acks a batch at each replica. Returns the names of the groups.
async fn train_two(first: &TestApp, second: &TestApp, step: i64) -> Vec<String> {
    let mut groups = Vec::new();
    for (app, other, step) in [(first, second, step), (second, first, step + 1)] {
        let batch = app.lease().await;
        groups.extend(other.group_ids(&batch).await);
        let path = format!("/batches/{}/extend", text(&batch["batch_id"]));
        other.post(&path, json!({"lease": batch["lease"], "ttl_s": 60})).await.expect(200);
        other.ack(&batch, step).await.expect(200);
    }
    groups
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiters_behind_a_pooler_find_by_polling_what_the_other_replica_received() {
    let (_, pooler) = pooled().await;
    let first = TestApp::start_on(&pooler.url()).await;
    let mut second = first.replica().await;
    let waiting = first.post("/batches", json!({"wait_ms": 60_000}));
    let posting = async {
        eventually("a waiter", || async { first.metrics().await.contains("forebay_waiters 1") }).await;
        second.accept(group("g", &[1.0, 0.0])).await;
    };
    let (answer, ()) = tokio::join!(waiting, posting);
    let batch = answer.expect(201);
    assert_eq!(text(&second.batch(&batch).await["state"]), "leased");
    let waiting = first.get("/policies/default?wait_version_above=0&wait_ms=60000");
    let (answer, published) = tokio::join!(waiting, second.publish(1));
    published.expect(200);
    assert_eq!(answer.expect(200)["version"], 1);
    second.stop().await;
    first.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pooled_connection_keeps_no_state_of_the_service() {
    let (database, pooler) = pooled().await;
    for start in 0..3 {
        let app = TestApp::start_on(&pooler.url()).await;
        app.accept(Value::Array((0..8).map(|index| rollout(&format!("s{start}r{index}"), 1.0)).collect())).await;
        app.finish().await;
    }
    let mut connection = sqlx::PgConnection::connect(&database).await.expect("the server accepts");
    let held = "SELECT COUNT(*) FROM pg_locks
        WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let row = sqlx::query(held).fetch_one(&mut connection).await.expect("locks can be read");
    assert_eq!(row.get::<i64, _>(0), 0);
    // Each of the pooler's sessions in turn lists its prepared statements and its notification channels.
    let options: PgConnectOptions = pooler.url().parse().expect("the pooler's URL is valid");
    let mut behind = sqlx::PgConnection::connect_with(&options.extra_float_digits(None)).await.expect("it accepts");
    for _ in 0..10 {
        let left = "SELECT name FROM pg_prepared_statements UNION ALL SELECT pg_listening_channels()";
        let rows = sqlx::raw_sql(left).fetch_all(&mut behind).await.expect("the session can be read");
        let left: Vec<String> = rows.iter().map(|row| row.get_unchecked(0)).collect();
        assert!(left.is_empty(), "left behind in a session of the pooler: {left:?}");
    }
}
