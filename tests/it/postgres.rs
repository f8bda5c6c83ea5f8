//! Postgres as an operator runs it: its log, its defaults, and locks that others hold.

use serde_json::Value;
use sqlx::{Connection as _, Row as _};

use crate::support::{Backend, Cluster, TestApp, eventually, fresh_database, group, rollout, without_autovacuum};

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
async fn a_database_that_holds_a_post_in_a_lock_is_not_ready() {
    let app = TestApp::start_on(&fresh_database().await).await;
    app.get("/readyz").await.expect(200);
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let mut holder = connection.begin().await.expect("a transaction begins");
    sqlx::raw_sql("LOCK TABLE payload IN SHARE MODE").execute(&mut *holder).await.expect("nobody else has a lock");
    // Answered when the transaction has waited as long as it waits for a lock.
    app.post("/trajectories", rollout("held", 1.0)).await.refused(503, "store-unavailable");
    // Nothing is due that would write, and the lock is still there.
    for _ in 0..3 {
        app.get("/readyz").await.refused(503, "not-ready");
    }
    holder.rollback().await.expect("the transaction ends");
    eventually("readiness", || async { app.get("/readyz").await.status == 200 }).await;
    app.accept(rollout("held", 1.0)).await;
    app.finish().await;
}

/// Pages that reading the tallies of a policy touches, as a lease does it.
async fn pages_of_tallies(connection: &mut sqlx::PgConnection) -> i64 {
    const READ: &str = "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON)
        SELECT name, SUM(value), SUM(amount) FROM tally_now WHERE policy_pk = 1 GROUP BY name";
    let row = sqlx::raw_sql(READ).fetch_one(connection).await.expect("tallies can be read");
    let plan: Value = serde_json::from_str(&row.get_unchecked::<String, _>(0)).expect("the plan is JSON");
    let pages = |kind: &str| plan[0]["Plan"][kind].as_i64().expect("pages are counted");
    pages("Shared Hit Blocks") + pages("Shared Read Blocks")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_transaction_elsewhere_does_not_make_tallies_dear() {
    const POSTS: usize = 300;
    let app = TestApp::start(Backend::Postgres).await;
    without_autovacuum(&app.database).await;
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    app.accept(rollout("first", 1.0)).await;
    app.buffer.fold_tallies().await.expect("the store can write");
    // As pg_dump begins: no row that is deleted or replaced from here on may be removed.
    let mut dump = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let begin = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY; SELECT * FROM policy";
    sqlx::raw_sql(begin).fetch_all(&mut dump).await.expect("the snapshot is taken");
    let before = pages_of_tallies(&mut connection).await;
    for post in 0..POSTS {
        app.accept(rollout(&format!("r{post}"), 1.0)).await;
    }
    app.buffer.fold_tallies().await.expect("the store can write");
    let after = pages_of_tallies(&mut connection).await;
    assert!(after < before + POSTS as i64 / 4, "{POSTS} posts took it from {before} to {after} pages");
    sqlx::raw_sql("ROLLBACK").execute(&mut dump).await.expect("the transaction ends");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_goes_on_elsewhere_keeps_no_change_from_its_tally() {
    let app = TestApp::start(Backend::Postgres).await;
    // It has a number, so that no transaction after it is below the oldest one that goes on.
    let mut writer = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let mut transaction = writer.begin().await.expect("a transaction begins");
    sqlx::raw_sql("SELECT pg_current_xact_id()").execute(&mut *transaction).await.expect("it has a number");
    for post in 0..3 {
        app.accept(rollout(&format!("r{post}"), 1.0)).await;
        // Each time, what was added before must not be added again.
        app.buffer.fold_tallies().await.expect("the store can write");
    }
    let mut connection = sqlx::PgConnection::connect(&app.database).await.expect("the server accepts");
    let left: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM tally_change")
        .fetch_one(&mut connection)
        .await
        .expect("changes can be counted");
    assert_eq!(left, 0, "changes that every post and lease would read");
    transaction.rollback().await.expect("the transaction ends");
    let stats = app.get("/stats").await.expect(200);
    assert_eq!(stats["policies"]["default"]["received"], 3);
    app.finish().await;
}
