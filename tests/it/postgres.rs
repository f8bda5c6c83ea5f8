//! Postgres as an operator runs it: its log, its defaults, and locks that other programs hold.

mod tls;

use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection as _, Row as _};

use crate::support::{
    Backend, Cluster, Proxy, TestApp, eventually, fresh_database, group, rollout, without_autovacuum,
};

/// Leases, trains and settles a group that was posted in two parts.
async fn work(app: &TestApp) {
    app.accept(group("g", &[1.0, 0.0])).await;
    app.accept(rollout("alone", 1.0)).await;
    for step in 1..3 {
        let batch = app.lease().await;
        app.samples(&batch).await;
        app.ack(&batch, step).await.expect(200);
    }
    app.checkpoint(2).await;
    app.resume(Some(2)).await;
    app.pass_s(1e9).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_to_the_servers_log() {
    let start = || Cluster::start().expect("a cluster starts");
    let cluster = tokio::task::spawn_blocking(start).await.expect("nothing panics");
    let app = TestApp::start_on(&cluster.fresh_database().await).await;
    work(&app).await;
    app.finish().await;
    let log = cluster.log();
    assert!(log.contains("LOG:  "), "the server logs its start: {log}");
    let severe = ["WARNING:  ", "ERROR:  ", "FATAL:  ", "PANIC:  "];
    let complaints: Vec<&str> = log.lines().filter(|line| severe.iter().any(|word| line.contains(word))).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

/// The messages of a transaction that contains these bytes, of the one with the fewest. A statement that is new on its
/// connection is parsed first, with a message of its own.
fn fewest_messages(proxy: &Proxy, content: &str) -> Vec<String> {
    let transactions = proxy.transactions_with(content);
    let fewest = transactions.iter().min_by_key(|messages| messages.len()).expect("one was committed");
    fewest.iter().map(|message| String::from_utf8_lossy(message).into_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_takes_few_round_trips() {
    let proxy = Proxy::start(&fresh_database().await, Duration::ZERO).await;
    let app = TestApp::start_on(proxy.url()).await;
    for number in 0..12 {
        app.accept(group(&format!("whole-{number}"), &[1.0, 0.0])).await;
    }
    // BEGIN, the policy, the stored rollouts, the groups, the backlog, the keys, the place in the line, the rows of all
    // tables, COMMIT.
    let whole = fewest_messages(&proxy, "whole-");
    assert_eq!(whole.len(), 9, "{whole:#?}");
    for number in 0..12 {
        let batch = app.lease().await;
        app.ack(&batch, number).await.expect(200);
    }
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_a_rollout_is_the_same_by_a_unix_socket() {
    let start = || Cluster::start().expect("a cluster starts");
    let cluster = tokio::task::spawn_blocking(start).await.expect("nothing panics");
    let app = TestApp::start_on(&cluster.by_socket(&cluster.fresh_database().await)).await;
    work(&app).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_life_of_a_rollout_is_the_same_far_from_the_database() {
    let proxy = Proxy::start(&fresh_database().await, Duration::from_millis(1)).await;
    let app = TestApp::start_on(proxy.url()).await;
    work(&app).await;
    // More than one statement takes: the rows go in several, and are counted once.
    app.accept(group("many", &[1.0; 300])).await;
    app.accept(Value::Array((0..300).map(|number| rollout(&format!("r{number}"), 1.0)).collect())).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transactions_are_read_committed_whatever_the_databases_default() {
    const WATCH: &str = "
        DO $$ BEGIN
            EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = serializable', current_database());
        END $$;
        CREATE TABLE level (name TEXT PRIMARY KEY);
        CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO level VALUES (current_setting('transaction_isolation')) ON CONFLICT DO NOTHING;
            RETURN NULL;
        END $$;
        CREATE TRIGGER watch AFTER INSERT OR UPDATE ON rollout_group EXECUTE FUNCTION watch();
        CREATE TRIGGER watch AFTER INSERT OR UPDATE ON batch EXECUTE FUNCTION watch();";
    let mut app = TestApp::start(Backend::Postgres).await;
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    sqlx::raw_sql(WATCH).execute(&mut connection).await.expect("triggers can be made");
    // New connections have the new default.
    app.restart().await;
    work(&app).await;
    let levels: Vec<String> =
        sqlx::query_scalar("SELECT name FROM level").fetch_all(&mut connection).await.expect("the levels can be read");
    assert_eq!(levels, ["read committed"]);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_whose_posts_wait_for_a_lock_is_not_ready() {
    let app = TestApp::start_on(&fresh_database().await).await;
    app.get("/readyz").await.expect(200);
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let mut holder = connection.begin().await.expect("a transaction begins");
    sqlx::raw_sql("LOCK TABLE payload IN SHARE MODE").execute(&mut *holder).await.expect("nobody else has a lock");
    // The post is answered when its transaction has reached the lock timeout.
    app.post("/trajectories", rollout("held", 1.0)).await.refused(503, "store-unavailable");
    // No write is due, and the lock is still held at every health check.
    for _ in 0..3 {
        app.buffer.ping().await.expect_err("the table cannot be written");
        app.get("/readyz").await.refused(503, "not-ready");
    }
    holder.rollback().await.expect("the transaction ends");
    eventually("readiness", || async { app.get("/readyz").await.status == 200 }).await;
    app.accept(rollout("held", 1.0)).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_statement_timeout_makes_the_service_unready() {
    // The server's error for a cancelled statement, without waiting a minute for it.
    const CANCEL: &str = "
        CREATE FUNCTION cancel() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
        END $$;
        CREATE TRIGGER cancel BEFORE INSERT ON payload FOR EACH STATEMENT EXECUTE FUNCTION cancel();
        CREATE TRIGGER cancel BEFORE UPDATE ON policy FOR EACH ROW EXECUTE FUNCTION cancel();";
    let app = TestApp::start(Backend::Postgres).await;
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    sqlx::raw_sql(CANCEL).execute(&mut connection).await.expect("triggers can be made");
    app.post("/trajectories", rollout("held", 1.0)).await.refused(503, "store-unavailable");
    for _ in 0..3 {
        app.buffer.ping().await.expect_err("the row cannot be written");
        app.get("/readyz").await.refused(503, "not-ready");
    }
    sqlx::raw_sql("DROP FUNCTION cancel CASCADE").execute(&mut connection).await.expect("triggers can be dropped");
    eventually("readiness", || async { app.get("/readyz").await.status == 200 }).await;
    app.accept(rollout("held", 1.0)).await;
    app.finish().await;
}

/// Number of pages that reading the tallies of a policy touches, in the same way as a lease.
async fn pages_of_tallies(connection: &mut sqlx::PgConnection) -> i64 {
    const READ: &str = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
        SELECT name, SUM(value), SUM(amount) FROM tally_now WHERE policy_pk = 1 GROUP BY name";
    let row = sqlx::raw_sql(READ).fetch_one(connection).await.expect("tallies can be read");
    let plan: Value = serde_json::from_str(&row.get_unchecked::<String, _>(0)).expect("the plan is JSON");
    let pages = |kind: &str| plan[0]["Plan"][kind].as_i64().expect("pages are counted");
    pages("Shared Hit Blocks") + pages("Shared Read Blocks")
}

/// Changes that are not yet added to their tallies.
async fn changes_left(app: &TestApp) -> i64 {
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let left = sqlx::query_scalar("SELECT COUNT(*) FROM tally_change").fetch_one(&mut connection).await;
    left.expect("changes can be counted")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_elsewhere_does_not_make_tallies_slow() {
    const POSTS: usize = 300;
    let app = TestApp::start(Backend::Postgres).await;
    without_autovacuum(&app.database).await;
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    app.accept(rollout("first", 1.0)).await;
    app.buffer.fold_tallies().await.expect("the store can write");
    // The transaction starts as pg_dump does: rows that are deleted or replaced from here on cannot be removed.
    let mut dump = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT * FROM policy";
    sqlx::raw_sql(begin).fetch_all(&mut dump).await.expect("the snapshot is taken");
    let before = pages_of_tallies(&mut connection).await;
    for post in 0..POSTS {
        app.accept(rollout(&format!("r{post}"), 1.0)).await;
    }
    app.buffer.fold_tallies().await.expect("the store can write");
    let after = pages_of_tallies(&mut connection).await;
    // While another test of the same cluster writes, a read cannot begin behind what was added up since, hence the room.
    assert!(after < before + POSTS as i64 / 4, "{POSTS} posts took it from {before} to {after} pages");
    sqlx::raw_sql("ROLLBACK").execute(&mut dump).await.expect("the transaction ends");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tally_counts_every_change_once_while_a_transaction_is_open_elsewhere() {
    let app = TestApp::start(Backend::Postgres).await;
    // The transaction has a transaction id, so that all later ones are above the oldest open one.
    let mut writer = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let mut transaction = writer.begin().await.expect("a transaction begins");
    sqlx::raw_sql("SELECT pg_current_xact_id()").execute(&mut *transaction).await.expect("it has a number");
    for post in 0..3 {
        app.accept(rollout(&format!("r{post}"), 1.0)).await;
        // What was added before must not be added again.
        app.buffer.fold_tallies().await.expect("the store can write");
    }
    assert_eq!(changes_left(&app).await, 0, "changes that every post and lease would read");
    transaction.rollback().await.expect("the transaction ends");
    let stats = app.get("/stats").await.expect(200);
    assert_eq!(stats["policies"]["default"]["received"], 3);
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tallies_go_on_after_a_dump_is_restored_in_another_cluster() {
    let app = TestApp::start(Backend::Postgres).await;
    app.accept(rollout("before", 1.0)).await;
    app.buffer.fold_tallies().await.expect("the store can write");
    // The cluster of the dump had used more transaction ids than this one.
    let folded = app.tamper("UPDATE tally_folded SET below = 4611686018427387904").await;
    assert_eq!(folded, 1);
    for post in 0..3 {
        app.accept(rollout(&format!("r{post}"), 1.0)).await;
        eventually("a tally with the post", || async {
            app.buffer.fold_tallies().await.expect("the store can write");
            let stats = app.get("/stats").await.expect(200);
            stats["policies"]["default"]["received"] == 2 + post
        })
        .await;
    }
    app.finish().await;
}
