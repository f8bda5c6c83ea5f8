//! Databases of earlier versions: their contents can be used after the upgrade.
//!
//! `upgrade/NNNN` contains, for the schema of that number, a database of each kind as text, written by the version with
//! that schema, and what its clients knew.

use std::{collections::BTreeMap, path::Path, str::FromStr as _};

use serde_json::{Value, json, value::RawValue};
use sqlx::{AssertSqlSafe, Connection as _, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use crate::support::{Backend, TestApp, eventually, fresh_database, group, rollout, text, with};

fn fixture(schema: &str, name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/upgrade").join(schema).join(name);
    std::fs::read_to_string(path).expect("the fixture is there")
}

/// A database of the fixture's schema, and its folder.
async fn restore(schema: &str, backend: Backend) -> (String, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let url = match backend {
        Backend::Sqlite => {
            let url = format!("sqlite:{}", folder.path().join("forebay.db").display());
            let script = AssertSqlSafe(fixture(schema, "sqlite.sql"));
            // The script's tables are in the order of their names.
            let options = SqliteConnectOptions::from_str(&url).expect("a URL").create_if_missing(true);
            let options = options.foreign_keys(false);
            let mut connection = sqlx::SqliteConnection::connect_with(&options).await.expect("the file can be made");
            sqlx::raw_sql(script).execute(&mut connection).await.expect("the script runs");
            connection.close().await.expect("the file closes");
            url
        }
        Backend::Postgres => {
            let url = fresh_database().await;
            let script = AssertSqlSafe(fixture(schema, "postgres.sql"));
            let mut connection = sqlx::PgConnection::connect(&url).await.expect("the server accepts");
            sqlx::raw_sql(script).execute(&mut connection).await.expect("the script runs");
            connection.close().await.expect("the connection closes");
            url
        }
    };
    (url, folder)
}

async fn goes_on(schema: &str, backend: Backend) {
    let known: Value = serde_json::from_str(&fixture(schema, "known.json")).expect("JSON");
    let known = &known[if backend == Backend::Sqlite { "sqlite" } else { "postgres" }];
    let (database, _folder) = restore(schema, backend).await;
    let app = TestApp::start_on(&database).await;
    assert_eq!(app.get("/stats").await.expect(200), known["stats"]);
    for (rollout, state) in
        [("settled-0", "checkpointed"), ("trained-1", "trained"), ("ready-0", "ready"), ("open-0", "open")]
    {
        assert_eq!(app.story(rollout).await["state"], state, "{rollout}");
    }
    // A rollout that an earlier version stored is found, and a repeat of it is recognised.
    app.post("/trajectories", rollout("open-0", 0.5)).await.refused(409, "rollout-conflict");
    let other_size = json!({"rollout_id": "open-9", "group_id": "open", "group_size": 5});
    app.post("/trajectories", with(rollout("open-9", 1.0), other_size)).await.refused(409, "group-size-conflict");
    assert_eq!(app.story("noreward").await["verdict"], "dropped");
    assert_eq!(app.story("ready-2").await["verdict"], "late");
    // A lease that an earlier version granted is valid and delivers its batch.
    let leased = &known["leased"];
    let path = format!("/batches/{}", text(&leased["batch_id"]));
    let batch = app.get(&path).await.expect(200);
    assert_eq!(app.samples(&batch).await, *leased["rows"].as_array().expect("rows"));
    app.post(&format!("{path}/ack"), json!({"lease": leased["lease"], "step": 3})).await.expect(200);
    // The lineage continues: what was acked after the checkpoint comes back as it was cut.
    let resumed = app.resume(Some(1)).await;
    assert_eq!((&resumed["returned_batches"], &resumed["version"]), (&json!(2), &json!(1)));
    let again = app.lease().await;
    assert_eq!(again["batch_id"], known["trained"]["batch_id"]);
    assert_eq!(app.samples(&again).await, *known["trained"]["rows"].as_array().expect("rows"));
    app.ack(&again, 2).await.expect(200);
    let second = app.lease().await;
    app.ack(&second, 3).await.expect(200);
    // Later requests find the groups from before the upgrade.
    app.rules("default", json!({"group": {"size": 2}, "batch": {"order": "freshest"}})).await;
    assert_eq!(app.group_ids(&app.lease().await).await, ["ready"]);
    app.accept(group("new", &[1.0, 0.0])).await;
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sqlite_database_of_schema_1_is_upgraded_and_used() {
    goes_on("0001", Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_of_schema_1_is_upgraded_and_used() {
    goes_on("0001", Backend::Postgres).await;
}

/// A replica's transaction has read one table. It then reads a table that the migrations have locked, while the
/// migrations wait for the first table.
#[tokio::test]
async fn a_postgres_database_is_upgraded_although_the_migrations_meet_a_deadlock() {
    let (database, _folder) = restore("0011", Backend::Postgres).await;
    let connect = async || sqlx::PgConnection::connect(&database).await.expect("the server accepts");
    let (mut reader, observer) = (connect().await, Mutex::new(connect().await));
    let count = async |sql: &'static str| {
        let counted = sqlx::query_scalar::<_, i64>(sql).fetch_one(&mut *observer.lock().await).await;
        counted.expect("the server tells")
    };
    // Postgres looks for a deadlock once, so long after a transaction has begun to wait, and ends this transaction. The
    // migrations look after the reader has begun to wait, and the reader looks later than they.
    let slow = "DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = %L', current_database(), '4s');
    END $$";
    sqlx::raw_sql(slow).execute(&mut reader).await.expect("the user is a superuser");
    let begin = "SET deadlock_timeout = '2min'; BEGIN; SELECT 1 FROM payload LIMIT 1";
    sqlx::raw_sql(begin).execute(&mut reader).await.expect("the table can be read");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let before = count(deadlocks).await;
    let reads = async {
        let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'payload'::regclass";
        eventually("the migrations wait for the table", || async { count(waiting).await > 0 }).await;
        for table in ["rollout", "rollout_group", "rules", "policy"] {
            let read = AssertSqlSafe(format!("SELECT 1 FROM {table} LIMIT 1"));
            sqlx::raw_sql(read).execute(&mut reader).await.expect("the table can be read in the end");
        }
        sqlx::raw_sql("COMMIT").execute(&mut reader).await.expect("the reader ends");
    };
    let (app, ()) = tokio::join!(TestApp::start_on(&database), reads);
    // A server process reports what it did when it ends.
    eventually("a deadlock is counted", || async { count(deadlocks).await > before }).await;
    app.finish().await;
}

/// Rows have digests and seals that contain the number codes of statuses and verdicts.
async fn keeps_digests_and_seals(schema: &str, backend: Backend) {
    let known: Value = serde_json::from_str(&fixture(schema, "known.json")).expect("JSON");
    let here = &known[if backend == Backend::Sqlite { "sqlite" } else { "postgres" }];
    let (database, _folder) = restore(schema, backend).await;
    let app = TestApp::start_on(&database).await;
    let list = |value: &Value| value.as_array().expect("an array").clone();
    // Compared as text, because one of them has an integer that a `Value` would round.
    let text_of_known = fixture(schema, "known.json");
    let parts: BTreeMap<&str, &RawValue> = serde_json::from_str(&text_of_known).expect("JSON");
    let posts: Vec<&RawValue> = serde_json::from_str(parts["posts"].get()).expect("an array");
    let json_type = [("content-type", "application/json")];
    for (post, verdict) in posts.into_iter().zip(list(&known["verdicts"])) {
        let receipt = app.post_raw("/trajectories", &json_type, post.get()).await.expect(200);
        assert_eq!((&receipt["duplicate"], &receipt["verdict"]), (&json!(true), &verdict), "{receipt}");
    }
    let batch = app.get(&format!("/batches/{}", text(&here["batch_id"]))).await.expect(200);
    assert_eq!(app.samples(&batch).await, list(&here["rows"]));
    // The doctor compares every payload and row with its digest and seal.
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sqlite_database_of_schema_11_keeps_its_digests_and_seals() {
    keeps_digests_and_seals("0011", Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_of_schema_11_keeps_its_digests_and_seals() {
    keeps_digests_and_seals("0011", Backend::Postgres).await;
}
