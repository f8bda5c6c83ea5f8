//! The owner of a folder of objects: copies, earlier states and other databases with the same objects remove none.

use std::path::Path;

use forebay_domain::clock::{AnchoredClock, Clock as _, Timestamp};
use forebay_store::{self as store, PayloadKind, PayloadOptions, Store};
use forebay_telemetry::metrics::Metrics;
use serde_json::json;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, postgres::PgConnectOptions};
use tempfile::TempDir;

use super::{
    delivered, number, post, rules,
    s3::{ADOPTED, Mode, S3},
};
use crate::support::{eventually, fresh_database, http, process::Service};

/// A folder of objects, which several databases may use.
struct Folder(TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder can be made"))
    }

    /// A folder with one object for each group of a database, which nobody serves.
    async fn with_groups(http: &reqwest::Client, groups: usize) -> (Self, String) {
        let (folder, database) = (Self::new(), fresh_database().await);
        let service = folder.serve(&database, &[]).await;
        rules(http, &service, json!({})).await;
        for number in 0..groups {
            assert_eq!(post(http, &service, number).await, 201);
        }
        assert!(service.stop().await.success());
        (folder, database)
    }

    fn url(&self) -> String {
        format!("file://{}", self.0.path().display())
    }

    async fn serve(&self, database: &str, arguments: &[&str]) -> Service {
        let environment = [("FOREBAY_PAYLOADS", "objects"), ("FOREBAY_OBJECTS_URL", &self.url())];
        Service::start_with(database, &[&["--log", "json"], arguments].concat(), &environment).await
    }

    async fn open(&self, database: &str) -> std::sync::Arc<Store> {
        let options = PayloadOptions {
            kind: Some(PayloadKind::Objects),
            objects_url: Some(self.url()),
            objects_grace_s: 0,
            ..PayloadOptions::default()
        };
        store::open_or_create(database, options, Metrics::new().store()).await.expect("it opens").store
    }

    /// How many payload objects there are, of all databases.
    fn objects(&self) -> usize {
        fn names(folder: &Path) -> Vec<String> {
            let entries = std::fs::read_dir(folder).expect("it can be read");
            let entries = entries.map(|entry| entry.expect("it can be read"));
            entries.map(|entry| entry.file_name().into_string().expect("a name is text")).collect()
        }
        let folders = names(self.0.path());
        let names = folders.iter().flat_map(|folder| names(&self.0.path().join(folder)));
        names.filter(|name| i64::from_str_radix(name, 16).is_ok()).count()
    }
}

/// A database with the same rows, as after `pg_dump` and `pg_restore`. Nobody may be connected to the original.
async fn copy_of(original: &str) -> String {
    let options: PgConnectOptions = original.parse().expect("the URL was made by a test");
    let name = options.get_database().expect("the URL names a database");
    let copy = AssertSqlSafe(format!("CREATE DATABASE {name}_copy TEMPLATE {name}"));
    let mut connection = PgConnection::connect_with(&options.clone().database("postgres")).await;
    let connection = connection.as_mut().expect("the server accepts");
    sqlx::raw_sql(copy).execute(connection).await.expect("nobody is connected to the original");
    original.replace(name, &format!("{name}_copy"))
}

/// Looks after the payloads, so many hours from now.
async fn look(store: &Store, hours: i64) {
    let at = AnchoredClock::new().now().as_micros() + hours * 3_600_000_000;
    store.look_after_payloads(Timestamp::from_micros(at)).await.expect("the folder can be read");
}

/// Discards a group, and waits until its payloads are purged. Then its object has no payload that a row names.
async fn discard(http: &reqwest::Client, service: &Service, database: &str, group: &str) {
    const EMPTIED: &str = "SELECT COUNT(*) FROM segment_file WHERE live_frames = 0";
    let discard = json!({"group_id": group, "reason": "test"});
    let discarded = http.post(format!("{}/groups/discard", service.url)).json(&discard).send().await;
    assert_eq!(discarded.expect("the service answers").status(), 200);
    eventually("an object without payloads", || async { number(database, EMPTIED).await == 1 }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_of_a_database_removes_no_object_of_its_original() {
    let http = http();
    let (folder, database) = Folder::with_groups(&http, 2).await;
    let copy = copy_of(&database).await;
    let original = folder.serve(&database, &[]).await;
    assert_eq!(post(&http, &original, 2).await, 201);

    let served = folder.serve(&copy, &[]).await;
    let store = folder.open(&copy).await;
    discard(&http, &served, &copy, "g0").await;
    for hours in 1..4 {
        look(&store, hours).await;
    }
    assert_eq!(folder.objects(), 3, "neither what the copy purged nor what it does not know is removed");
    assert_eq!(post(&http, &served, 3).await, 201);
    assert_eq!(number(&copy, super::INSIDE).await, 2, "it stores new payloads in its database");
    let (statuses, rows) = delivered(&http, &served).await;
    assert_eq!((statuses, rows.len()), (vec![200; 2], 4), "it reads the objects of its original");
    let (statuses, rows) = delivered(&http, &original).await;
    assert_eq!((statuses, rows.len()), (vec![200; 3], 6));
    store.close().await;
    served.kill().await;
    original.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_replaces_another_adopts_its_objects_and_the_other_removes_none_any_more() {
    let http = http();
    let (folder, database) = Folder::with_groups(&http, 2).await;
    let restored = copy_of(&database).await;

    let original = folder.open(&database).await;
    let (replicas, adopting) =
        (folder.serve(&restored, &[]).await, folder.serve(&restored, &["--adopt-objects"]).await);
    assert!(replicas.log().contains("another database owns them"), "{}", replicas.log());
    assert!(adopting.log().contains("has adopted the objects"), "{}", adopting.log());
    assert_eq!(post(&http, &adopting, 2).await, 201);
    assert_eq!(number(&restored, super::INSIDE).await, 0, "its payloads are objects");
    for hours in 1..4 {
        look(&original, hours).await;
    }
    assert_eq!(folder.objects(), 3, "the former owner does not know the newest one, and keeps it");
    original.close().await;

    let store = folder.open(&restored).await;
    look(&store, 1).await;
    discard(&http, &adopting, &restored, "g0").await;
    look(&store, 2).await;
    assert_eq!(folder.objects(), 2, "the owner removes what it purged");
    store.close().await;
    let again = folder.serve(&restored, &["--adopt-objects"]).await;
    assert!(again.log().contains("owns its objects already"), "{}", again.log());
    for service in [replicas, adopting, again] {
        service.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_earlier_state_of_a_database_and_the_later_one_remove_nothing_until_one_adopts() {
    let http = http();
    let (folder, database) = Folder::with_groups(&http, 1).await;
    let service = folder.serve(&database, &[]).await;
    discard(&http, &service, &database, "g0").await;
    service.kill().await;

    // The files of both servers are the same, so the identity is, too. Only one of them can be played with one server.
    let fence = number(&database, "SELECT fence FROM payload_store").await;
    let later = folder.open(&database).await;
    let earlier = folder.open(&database).await;
    set_fence(&database, fence).await;
    look(&earlier, 1).await;
    assert_eq!(folder.objects(), 1, "its fence is lower than that of the owner object");
    set_fence(&database, i64::from(u32::MAX)).await;
    look(&later, 1).await;
    assert_eq!(folder.objects(), 1, "nothing shows which of the two is in use");
    later.close().await;
    earlier.close().await;

    let adopting = folder.serve(&database, &["--adopt-objects"]).await;
    let store = folder.open(&database).await;
    look(&store, 1).await;
    assert_eq!(folder.objects(), 0);
    store.close().await;
    adopting.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adoption_during_a_proof_is_not_undone() {
    let (s3, database) = (S3::start().await, fresh_database().await);
    let service = s3.serve(&database, None).await;
    rules(&s3.http, &service, json!({})).await;
    assert!(service.stop().await.success());
    s3.set(Mode::Adopt);
    let service = s3.serve(&database, None).await;
    assert_eq!(s3.owner().await, ADOPTED);
    assert!(service.log().contains("another database owns them"), "{}", service.log());
    assert_eq!(post(&s3.http, &service, 0).await, 201);
    assert_eq!(number(&database, super::INSIDE).await, 2, "it writes no objects");
    service.kill().await;
}

/// What a restore or another server would have recorded.
async fn set_fence(database: &str, fence: i64) {
    let mut connection = PgConnection::connect(database).await.expect("the server accepts");
    let set = sqlx::query("UPDATE payload_store SET fence = $1").bind(fence);
    set.execute(&mut connection).await.expect("it is valid");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_that_start_at_once_own_the_objects_together() {
    let http = http();
    let (folder, database) = Folder::with_groups(&http, 1).await;
    // As before the first replica has claimed them.
    let mut connection = PgConnection::connect(&database).await.expect("the server accepts");
    let forget = sqlx::raw_sql("UPDATE payload_store SET identity = NULL, incarnation = NULL, fence = NULL");
    forget.execute(&mut connection).await.expect("it is valid");
    let store_id = number(&database, "SELECT store_id FROM payload_store").await;
    let owner = folder.0.path().join(format!("{store_id:08x}/owner"));
    std::fs::remove_file(owner).expect("it is there");

    let stores = futures::future::join_all((0..4).map(|_| folder.open(&database))).await;
    let looks = stores.iter().map(|store| look(store, 1));
    futures::future::join_all(looks).await;
    let service = folder.serve(&database, &[]).await;
    assert!(!service.log().contains("no object is removed"), "{}", service.log());
    discard(&http, &service, &database, "g0").await;
    look(&stores[3], 2).await;
    assert_eq!(folder.objects(), 0, "every one of them owns the objects");
    for store in stores {
        store.close().await;
    }
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_needs_no_object_of_its_original_gets_a_folder_of_its_own() {
    let http = http();
    let (folder, database) = Folder::with_groups(&http, 1).await;
    let copy = copy_of(&database).await;

    let run = async |arguments: &[&str]| {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        let output = command.args(arguments).args(["--database", &copy]).output().await.expect("the binary starts");
        (output.status.success(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (healthy, said) = run(&["doctor"]).await;
    assert!(healthy && said.contains("2 in 1 segment files or objects"), "{said}");
    let (moved, said) = run(&["move-payloads", "objects"]).await;
    assert!(!moved && said.contains("forebay move-payloads database"), "{said}");
    let (moved, said) = run(&["move-payloads", "database"]).await;
    assert!(moved && said.contains("2 in the database"), "{said}");
    let (moved, said) = run(&["move-payloads", "objects"]).await;
    assert!(moved && said.contains("0 in the database, 2 outside of it"), "{said}");
    assert_ne!(
        number(&copy, "SELECT store_id FROM payload_store").await,
        number(&database, "SELECT store_id FROM payload_store").await
    );
    assert_eq!(folder.objects(), 2);
    let (original, copied) = (folder.serve(&database, &[]).await, folder.serve(&copy, &[]).await);
    for service in [original, copied] {
        assert_eq!(delivered(&http, &service).await.0, [200]);
        service.kill().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_not_ask_for_the_identity_is_told_what_to_grant() {
    let (folder, database) = (Folder::new(), fresh_database().await);
    let mut connection = PgConnection::connect(&database).await.expect("the server accepts");
    let options: PgConnectOptions = database.parse().expect("the URL was made by a test");
    let name = options.get_database().expect("the URL names a database");
    let restrict = format!(
        "CREATE ROLE {name}_role LOGIN; ALTER DATABASE {name} OWNER TO {name}_role; \
         REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC"
    );
    sqlx::raw_sql(AssertSqlSafe(restrict)).execute(&mut connection).await.expect("it is valid");
    let database = database.replacen("forebay@", &format!("{name}_role@"), 1);
    let options = PayloadOptions {
        kind: Some(PayloadKind::Objects),
        objects_url: Some(folder.url()),
        ..PayloadOptions::default()
    };
    let opened = store::open_or_create(&database, options.clone(), Metrics::new().store()).await;
    let refusal = opened.err().expect("ownership cannot be proved").to_string();
    assert!(refusal.contains("GRANT EXECUTE ON FUNCTION pg_control_system()"), "{refusal}");
    let grant = AssertSqlSafe(format!("GRANT EXECUTE ON FUNCTION pg_control_system() TO {name}_role"));
    sqlx::raw_sql(grant).execute(&mut connection).await.expect("it is valid");
    let opened = store::open_or_create(&database, options, Metrics::new().store()).await;
    opened.unwrap_or_else(|error| panic!("{error}")).store.close().await;
}
