//! What the real service reads while a new Postgres database without statistics grows.

use futures::StreamExt as _;
use reqwest::StatusCode;
use serde_json::{Value, json};
use sqlx::{Connection as _, Row as _};

use crate::support::{fresh_database, group, http, process::Service, text, with, without_autovacuum};

/// Number of groups that are posted before the counters are read, and again after that.
const GROUPS: usize = 400;

/// Upper bound of the rows and index entries that are read for a group of eight, from its posts to its ack.
const ROWS_PER_GROUP_MAX: i64 = 400;

/// Groups of a batch. All batches that the groups suffice for are trained.
const BATCH_GROUPS: usize = 16;

/// Number of table rows and index entries that all ended sessions have read so far.
///
/// Tallies, the history and the consumers that wait are left out, because how much of them is read depends on time, such
/// as that since tallies were last folded, and not on the size of the ledger.
async fn rows_read(database: &str) -> i64 {
    const COUNT: &str = "
        SELECT CAST(SUM(seq_tup_read + COALESCE(idx_tup_fetch, 0)) AS BIGINT) FROM pg_stat_user_tables
        WHERE relname !~ '^(tally|history|waiting_consumer)'
        UNION ALL
        SELECT CAST(SUM(idx_tup_read) AS BIGINT) FROM pg_stat_user_indexes WHERE relname !~ '^(tally|history|waiting_consumer)'";
    let mut connection = sqlx::PgConnection::connect(database).await.expect("the server accepts");
    // A session reports its counters when it ends.
    let others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()";
    while !sqlx::query(others).fetch_all(&mut connection).await.expect("sessions can be read").is_empty() {
        tokio::task::yield_now().await;
    }
    let rows = sqlx::query(COUNT).fetch_all(&mut connection).await.expect("counters can be read");
    rows.iter().map(|row| row.get::<i64, _>(0)).sum()
}

/// Posts groups from several agents, trains on all of them, and stops. Returns the number of rows that were read.
async fn work(database: &str, first: usize) -> i64 {
    let before = rows_read(database).await;
    let service = Service::start(database).await;
    let http = http();
    let rules = json!({"group": {"size": 8}, "batch": {"groups": BATCH_GROUPS}});
    let put = http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
    assert!(put.expect("the service answers").status().is_success());
    let post = async |number: usize| {
        let bundle = group(&format!("g{number}"), &[1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]);
        let sent = http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
        assert_eq!(sent.expect("the service answers").status(), StatusCode::CREATED);
    };
    futures::stream::iter(first..first + GROUPS).map(post).buffer_unordered(8).collect::<Vec<()>>().await;
    let call = async |path: String, body: Value| {
        let sent = http.post(format!("{}{path}", service.url)).json(&body).send().await.expect("the service answers");
        assert!(sent.status().is_success());
        sent.json::<Value>().await.expect("JSON")
    };
    for step in first / BATCH_GROUPS..(first + GROUPS) / BATCH_GROUPS {
        let batch = call("/batches".to_owned(), json!({"request_id": format!("s{step}")})).await;
        let ack = with(json!({"step": step + 1}), json!({"lease": batch["lease"]}));
        call(format!("/batches/{}/ack", text(&batch["batch_id"])), ack).await;
    }
    assert!(service.stop().await.success());
    rows_read(database).await - before
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn posts_and_leases_read_no_more_once_the_ledger_has_grown() {
    let database = fresh_database().await;
    Service::start(&database).await.stop().await;
    without_autovacuum(&database).await;
    let first = work(&database, 0).await;
    let second = work(&database, GROUPS).await;
    let third = work(&database, 2 * GROUPS).await;
    // By now, a statement that reads all rollouts of the policy for each post would have read millions of rows.
    let bound = GROUPS as i64 * ROWS_PER_GROUP_MAX;
    assert!(third < bound, "as much work read {first}, then {second}, then {third} rows, and may read {bound}");
}
