//! Databases that another version left: those of 0.1.0 go on after an upgrade, and older ones are refused.
//!
//! `upgrade/0100` has the rows of a database of each kind as `pg_dump` wrote them (for SQLite in the same form), the
//! segment file, and what its clients knew. The schema is that of the first migration. Its checksum is among the rows, so
//! these tests fail if that migration changes.

use std::{collections::BTreeMap, path::Path};

use forebay_store::{self as store, OpenError};
use forebay_telemetry::metrics::Metrics;
use serde_json::{Value, json, value::RawValue};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use crate::support::{Backend, TestApp, eventually, fresh_database, group, rollout, text, with};

fn file(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    std::fs::read_to_string(path).expect("the file is there")
}

/// What the clients of the fixture of this kind knew.
fn known(backend: Backend) -> Value {
    let known: Value = serde_json::from_str(&file("tests/it/upgrade/0100/known.json")).expect("JSON");
    known[if backend == Backend::Sqlite { "sqlite" } else { "postgres" }].clone()
}

/// A new database, changed by a script, and its folder.
async fn scripted(backend: Backend, script: String) -> (String, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let script = AssertSqlSafe(script);
    let url = match backend {
        Backend::Sqlite => {
            let path = folder.path().join("forebay.db");
            let options = SqliteConnectOptions::new().filename(&path).create_if_missing(true);
            // The script's rows are in the order of their tables' names.
            let options = options.journal_mode(sqlx::sqlite::SqliteJournalMode::Wal).foreign_keys(false);
            let mut connection = SqliteConnection::connect_with(&options).await.expect("the file can be made");
            sqlx::raw_sql(script).execute(&mut connection).await.expect("the script runs");
            connection.close().await.expect("the file closes");
            format!("sqlite:{}", path.display())
        }
        Backend::Postgres => {
            let url = fresh_database().await;
            let mut connection = PgConnection::connect(&url).await.expect("the server accepts");
            sqlx::raw_sql(script).execute(&mut connection).await.expect("the script runs");
            connection.close().await.expect("the connection closes");
            url
        }
    };
    (url, folder)
}

/// The database of 0.1.0.
async fn restore(backend: Backend) -> (String, tempfile::TempDir) {
    let kind = if backend == Backend::Sqlite { "sqlite" } else { "postgres" };
    let schema = file(&format!("migrations/{kind}/0100_baseline.sql"));
    let rows = file(&format!("tests/it/upgrade/0100/{kind}.sql"));
    let (url, folder) = scripted(backend, schema + &rows).await;
    if backend == Backend::Sqlite {
        let segments = folder.path().join("forebay.db-segments");
        std::fs::create_dir(&segments).expect("a folder can be made");
        let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/upgrade/0100/forebay.db-segments");
        for file in std::fs::read_dir(stored).expect("the folder is there") {
            let file = file.expect("it can be read");
            std::fs::copy(file.path(), segments.join(file.file_name())).expect("it can be copied");
        }
    }
    (url, folder)
}

async fn goes_on(backend: Backend) {
    let known = known(backend);
    let (database, _folder) = restore(backend).await;
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
    assert_eq!(samples(&app, &batch).await, *leased["rows"].as_array().expect("rows"));
    app.post(&format!("{path}/ack"), json!({"lease": leased["lease"], "step": 3})).await.expect(200);
    // The lineage continues: what was acked after the checkpoint comes back as it was cut.
    let resumed = app.resume(Some(1)).await;
    assert_eq!((&resumed["returned_batches"], &resumed["version"]), (&json!(2), &json!(1)));
    let again = app.lease().await;
    assert_eq!(again["batch_id"], known["trained"]["batch_id"]);
    assert_eq!(samples(&app, &again).await, *known["trained"]["rows"].as_array().expect("rows"));
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
async fn a_sqlite_database_of_the_first_schema_is_upgraded_and_used() {
    goes_on(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_of_the_first_schema_is_upgraded_and_used() {
    goes_on(Backend::Postgres).await;
}

/// Rows have digests and seals that contain the number codes of statuses and verdicts.
async fn keeps_digests_and_seals(backend: Backend) {
    let (database, _folder) = restore(backend).await;
    let app = TestApp::start_on(&database).await;
    // Compared as text, because one of them has an integer that a `Value` would round.
    let known_text = file("tests/it/upgrade/0100/known.json");
    let parts: BTreeMap<&str, &RawValue> = serde_json::from_str(&known_text).expect("JSON");
    let posts: Vec<&RawValue> = serde_json::from_str(parts["posts"].get()).expect("an array");
    let json_type = [("content-type", "application/json")];
    for (post, verdict) in posts.into_iter().zip(["dropped", "kept", "masked", "kept", "late"]) {
        let receipt = app.post_raw("/trajectories", &json_type, post.get()).await.expect(200);
        assert_eq!((&receipt["duplicate"], &receipt["verdict"]), (&json!(true), &json!(verdict)), "{receipt}");
    }
    let sealed = &known(backend)["sealed"];
    let batch = app.get(&format!("/batches/{}", text(&sealed["batch_id"]))).await.expect(200);
    assert_eq!(samples(&app, &batch).await, *sealed["rows"].as_array().expect("rows"));
    // The doctor compares every payload and row with its digest and seal.
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sqlite_database_of_the_first_schema_keeps_its_digests_and_seals() {
    keeps_digests_and_seals(Backend::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_postgres_database_of_the_first_schema_keeps_its_digests_and_seals() {
    keeps_digests_and_seals(Backend::Postgres).await;
}

/// The rows of a batch, without a column that the first schema's rows did not have yet.
async fn samples(app: &TestApp, batch: &Value) -> Vec<Value> {
    let mut rows = app.samples(batch).await;
    for row in &mut rows {
        let row = row.as_object_mut().expect("a row is an object");
        assert_eq!(row.remove("advantages"), Some(Value::Null));
    }
    rows
}

/// A transaction of somebody else has made one of the tables. It then waits for the lock of the migrations, while they
/// wait for the table.
#[tokio::test]
async fn a_postgres_database_is_upgraded_although_the_migrations_meet_a_deadlock() {
    let database = fresh_database().await;
    let connect = async || PgConnection::connect(&database).await.expect("the server accepts");
    let (mut other, observer) = (connect().await, Mutex::new(connect().await));
    let count = async |sql: &'static str| {
        let counted = sqlx::query_scalar::<_, i64>(sql).fetch_one(&mut *observer.lock().await).await;
        counted.expect("the server tells")
    };
    // Postgres looks for a deadlock once, so long after a transaction has begun to wait, and ends this transaction. The
    // migrations look after the other has begun to wait, and the other looks later than they.
    let slow = "DO $$ BEGIN
        EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = %L', current_database(), '4s');
    END $$";
    sqlx::raw_sql(slow).execute(&mut other).await.expect("the user is a superuser");
    let begin = "SET deadlock_timeout = '2min'; BEGIN; CREATE TABLE waiting_consumer (policy_pk BIGINT)";
    sqlx::raw_sql(begin).execute(&mut other).await.expect("the table can be made");
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let before = count(deadlocks).await;
    let waits = async {
        let waiting = "SELECT count(*) FROM pg_locks AS l, pg_database AS d
            WHERE NOT l.granted AND d.datname = current_database()
                AND (l.locktype = 'transactionid' OR l.database = d.oid)";
        eventually("the migrations wait for the table", || async { count(waiting).await > 0 }).await;
        let lock = "SELECT pg_advisory_xact_lock(7308896101216); ROLLBACK";
        sqlx::raw_sql(lock).execute(&mut other).await.expect("the lock can be taken in the end");
    };
    let (app, ()) = tokio::join!(TestApp::start_on(&database), waits);
    // A server process reports what it did when it ends.
    eventually("a deadlock is counted", || async { count(deadlocks).await > before }).await;
    app.finish().await;
}

/// What databases of before 0.1.0 have in common.
const OLD: &str = "
    CREATE TABLE _sqlx_migrations (
        version BIGINT PRIMARY KEY,
        description TEXT NOT NULL,
        installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
        success BOOLEAN NOT NULL,
        checksum BYTEA NOT NULL,
        execution_time BIGINT NOT NULL
    );
    INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
    VALUES (1, 'ledger', true, '', 0), (28, 'session notes', true, '', 0);
    CREATE TABLE rollout (rollout_id TEXT NOT NULL);
    INSERT INTO rollout VALUES ('task7-0');
";

#[track_caller]
fn refuses(opened: Result<std::sync::Arc<store::Store>, OpenError>) {
    let error = opened.err().expect("it must not open");
    assert!(matches!(error, OpenError::TooOld { .. }), "{error:?}");
    let said = error.to_string();
    for part in ["of before 0.1.0", "`forebay export --format forebay`", "`forebay import --format forebay`"] {
        assert!(said.contains(part), "{said}");
    }
}

#[tokio::test]
async fn a_sqlite_database_of_before_the_first_schema_is_refused_and_stays_as_it_is() {
    let (database, folder) = scripted(Backend::Sqlite, OLD.to_owned()).await;
    let path = folder.path().join("forebay.db");
    let before = std::fs::read(&path).expect("the file is there");
    refuses(store::open(&database, Metrics::new().store()).await);
    refuses(store::open_reading(&database, Metrics::new().store()).await);
    assert!(std::fs::read(&path).expect("the file is there") == before, "the file has changed");
}

#[tokio::test]
async fn a_postgres_database_of_before_the_first_schema_is_refused_and_stays_as_it_is() {
    let (database, _folder) = scripted(Backend::Postgres, OLD.to_owned()).await;
    refuses(store::open(&database, Metrics::new().store()).await);
    refuses(store::open_reading(&database, Metrics::new().store()).await);
    let mut connection = PgConnection::connect(&database).await.expect("the server accepts");
    let found =
        "SELECT (SELECT string_agg(tablename, ' ' ORDER BY tablename) FROM pg_tables WHERE schemaname = 'public')
        || (SELECT string_agg(' ' || version, '' ORDER BY version) FROM _sqlx_migrations)
        || (SELECT string_agg(' ' || rollout_id, '') FROM rollout)";
    let found: String = sqlx::query_scalar(found).fetch_one(&mut connection).await.expect("the tables can be read");
    assert_eq!(found, "_sqlx_migrations rollout 1 28 task7-0");
}
