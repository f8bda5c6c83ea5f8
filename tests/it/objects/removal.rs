//! Objects that no row names any more, or none has ever named.

use std::{path::PathBuf, sync::Arc};

use forebay_domain::clock::Timestamp;
use forebay_store::{self as store, PayloadKind, PayloadOptions, Store};
use forebay_telemetry::metrics::Metrics;
use serde_json::json;
use sqlx::{Connection as _, PgConnection};
use tempfile::TempDir;

use super::{
    delivered, number, post, rules,
    s3::{ADOPTED, S3},
};
use crate::support::{eventually, fresh_database};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn objects_whose_payloads_are_purged_are_removed() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[objects]\ngrace_s = 0").expect("it can be written");
    let service = s3.serve(&database, Some(&config)).await;
    rules(&s3.http, &service, json!({})).await;
    for number in 0..2 {
        assert_eq!(post(&s3.http, &service, number).await, 201);
    }
    assert_eq!(s3.keys().await.len(), 2);
    let discard = json!({"group_id": "g0", "reason": "test"});
    let discarded = s3.http.post(format!("{}/groups/discard", service.url)).json(&discard).send().await;
    assert_eq!(discarded.expect("the service answers").status(), 200);
    eventually("one object", || async { s3.keys().await.len() == 1 }).await;
    let forgotten = || async { number(&database, "SELECT COUNT(*) FROM segment_file").await == 1 };
    eventually("one row", forgotten).await;
    let (statuses, rows) = delivered(&s3.http, &service).await;
    assert_eq!((statuses, rows.len()), (vec![200], 2), "the other group is whole");
    service.kill().await;
}

/// A folder of objects whose database names none of them.
struct Unnamed {
    database: String,
    store: Arc<Store>,
    folder: TempDir,
}

impl Unnamed {
    async fn new() -> Self {
        let (database, folder) = (fresh_database().await, tempfile::tempdir().expect("a folder can be made"));
        let options = PayloadOptions {
            kind: Some(PayloadKind::Objects),
            objects_url: Some(format!("file://{}", folder.path().display())),
            ..PayloadOptions::default()
        };
        let opened = store::open_or_create(&database, options, Metrics::new().store()).await.expect("it opens");
        Self { database, store: opened.store, folder }
    }

    /// The path of an object, by its number in hexadecimal, or of the owner object.
    async fn path(&self, name: &str) -> PathBuf {
        let store_id = number(&self.database, "SELECT store_id FROM payload_store").await;
        self.folder.path().join(format!("{store_id:08x}/{name}"))
    }

    /// Writes an object.
    async fn write(&self, number: u64) -> PathBuf {
        let path = self.path(&format!("{number:016x}")).await;
        std::fs::write(&path, "object").expect("it can be written");
        path
    }

    async fn run(&self, sql: &'static str) {
        let mut connection = PgConnection::connect(&self.database).await.expect("the server accepts");
        sqlx::raw_sql(sql).execute(&mut connection).await.expect("it is valid");
    }

    /// Looks after the objects at a time, in microseconds.
    async fn look(&self, at: i64) {
        self.store.look_after_payloads(Timestamp::from_micros(at)).await.expect("the folder can be read");
    }
}

const HOUR: i64 = 3_600_000_000;

/// The number of an object that is made now.
fn number_of_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("it is after 1970");
    since.as_secs() << 28
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_object_without_a_row_is_removed_when_no_transaction_can_be_open_any_more() {
    let unnamed = Unnamed::new().await;
    let now = number_of_now();
    // The clock of the replica that has numbered the first one is two days slow.
    let (left, committed) = (unnamed.write(now - (172_800 << 28)).await, unnamed.write(now).await);
    unnamed.look(HOUR).await;
    unnamed.look(2 * HOUR - 1_000_000).await;
    assert!(left.exists() && committed.exists(), "their transactions may be open");
    let mut connection = PgConnection::connect(&unnamed.database).await.expect("the server accepts");
    let commit = sqlx::query("INSERT INTO segment_file VALUES ($1, 1, 64, 1, 64, NULL)").bind(now as i64);
    commit.execute(&mut connection).await.expect("the row is new");
    unnamed.look(2 * HOUR).await;
    assert!(!left.exists() && committed.exists());
    unnamed.look(4 * HOUR).await;
    assert!(committed.exists(), "it has a row");
    unnamed.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ownership_is_proved_before_each_hundred_removals() {
    // With the second proof from now on, another database adopts the objects.
    const ADOPT: &str = "CREATE SEQUENCE proofs;
        CREATE FUNCTION adopt() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            IF nextval('proofs') = 2 THEN NEW.incarnation := OLD.incarnation - 1; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER adopt BEFORE UPDATE OF fence ON payload_store FOR EACH ROW EXECUTE FUNCTION adopt()";
    let unnamed = Unnamed::new().await;
    let (now, mut objects) = (number_of_now(), Vec::new());
    for number in 0..250 {
        objects.push(unnamed.write(now + number).await);
    }
    unnamed.look(HOUR).await;
    unnamed.run(ADOPT).await;
    for hours in 2..5 {
        unnamed.look(hours * HOUR).await;
    }
    assert_eq!(objects.iter().filter(|object| object.exists()).count(), 150);
    unnamed.store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_adopts_its_objects_again_looks_twice_before_it_removes_any() {
    let unnamed = Unnamed::new().await;
    let owner = unnamed.path("owner").await;
    unnamed.look(HOUR).await;
    let object = unnamed.write(number_of_now()).await;
    unnamed.look(2 * HOUR).await;
    // Another database adopts the objects, and names this one. Then this database adopts them again.
    let own = std::fs::read(&owner).expect("it is there");
    std::fs::write(&owner, ADOPTED).expect("it can be written");
    unnamed.look(3 * HOUR).await;
    std::fs::write(&owner, own).expect("it can be written");
    unnamed.look(4 * HOUR).await;
    assert!(object.exists());
    unnamed.look(5 * HOUR).await;
    assert!(!object.exists());
    unnamed.store.close().await;
}
