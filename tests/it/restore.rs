//! Backups that replace a database, and logs that belong to another file: no log is replayed into a backup, and running
//! trainers are informed.

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{member, process::Service, rollout, text, with};

/// Upper bound of the time that a command takes.
const PATIENCE: Duration = Duration::from_mins(1);

/// A database in its own folder, with its service and its clients.
struct Machine {
    folder: tempfile::TempDir,
    http: reqwest::Client,
}

impl Machine {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder can be made");
        Self { folder, http: crate::support::http() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn url(&self, name: &str) -> String {
        format!("sqlite:{}", self.path(name).display())
    }

    async fn start(&self) -> Service {
        Service::start(&self.url("f.db")).await
    }

    async fn post(&self, service: &Service, path: &str, body: Value) -> (u16, Value) {
        let sent = self.http.post(format!("{}{path}", service.url)).json(&body).send().await;
        let response = sent.expect("the service answers");
        (response.status().as_u16(), response.json().await.unwrap_or_default())
    }

    /// Stores rollouts with these ids.
    async fn store(&self, service: &Service, names: &[&str]) {
        for name in names {
            assert_eq!(self.post(service, "/trajectories", rollout(name, 1.0)).await.0, 201, "{name}");
        }
    }

    async fn has(&self, service: &Service, name: &str) -> bool {
        let found = self.http.get(format!("{}/trajectories?rollout_id={name}", service.url)).send().await;
        found.expect("the service answers").status() == 200
    }

    /// Returns the output of a command of the binary, after checking its exit status.
    async fn run(&self, succeeds: bool, arguments: &[&str]) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let output = command.args(arguments).kill_on_drop(true).output();
        // A service that should refuse to start, but starts, would run forever.
        let output = tokio::time::timeout(PATIENCE, output).await.expect("the command ends");
        let output = output.expect("the binary starts");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert_eq!(output.status.success(), succeeds, "{arguments:?}: {said}");
        said
    }

    async fn backup(&self, name: &str) {
        self.run(true, &["backup", text_of(&self.path(name)), "--database", &self.url("f.db")]).await;
    }

    async fn restore(&self, succeeds: bool, name: &str) -> String {
        self.run(succeeds, &["restore", text_of(&self.path(name)), "--database", &self.url("f.db")]).await
    }

    /// The error with which the service refuses to start.
    async fn refusal(&self) -> String {
        self.run(false, &["--listen", "127.0.0.1:0", "--database", &self.url("f.db")]).await
    }

    /// Copies files of the database to another name, as `cp` does.
    fn copy(&self, from: &str, to: &str, suffixes: &[&str]) {
        for suffix in suffixes {
            let [from, to] = [from, to].map(|name| self.path(&format!("{name}{suffix}")));
            if from.is_dir() {
                let _ = std::fs::remove_dir_all(&to);
                std::fs::create_dir(&to).expect("a folder can be made");
                for file in from.read_dir().expect("it can be read").flatten() {
                    std::fs::copy(file.path(), to.join(file.file_name())).expect("the file can be copied");
                }
            } else if from.exists() {
                std::fs::copy(from, to).expect("the file can be copied");
            }
        }
    }

    async fn doctor(&self) {
        self.run(true, &["doctor", "--database", &self.url("f.db")]).await;
    }
}

fn text_of(path: &Path) -> &str {
    path.to_str().expect("temporary paths are text")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_beside_the_log_of_another_database_is_refused_and_restore_is_the_way_out() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["before"]).await;
    machine.backup("copy.db").await;
    machine.store(&service, &["after-0", "after-1"]).await;
    service.kill().await;
    let copy = std::fs::read(machine.path("copy.db")).expect("it is there");
    machine.copy("copy.db", "f.db", &[""]);
    let refusal = machine.refusal().await;
    assert!(refusal.contains("does not belong") && refusal.contains("forebay restore"), "{refusal}");
    let doctor = machine.run(false, &["doctor", "--database", &machine.url("f.db")]).await;
    assert!(doctor.contains("does not belong"), "{doctor}");
    let other = machine.path("other.db");
    let backup = machine.run(false, &["backup", text_of(&other), "--database", &machine.url("f.db")]).await;
    assert!(backup.contains("does not belong") && !other.exists(), "{backup}");
    assert_eq!(std::fs::read(machine.path("f.db")).expect("it is there"), copy, "nothing was replayed into it");

    let said = machine.restore(true, "copy.db").await;
    assert!(said.contains("f.db.replaced-"), "{said}");
    assert_eq!(std::fs::read(machine.path("copy.db")).expect("it is there"), copy, "the copy can be restored again");
    machine.doctor().await;
    let service = machine.start().await;
    assert!(machine.has(&service, "before").await && !machine.has(&service, "after-0").await);
    machine.store(&service, &["later"]).await;
    service.kill().await;
    let service = machine.start().await;
    assert!(machine.has(&service, "later").await, "its own log is replayed");
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_keeps_a_complete_copy_of_what_it_replaces() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.backup("copy.db").await;
    machine.store(&service, &["only-in-the-log"]).await;
    service.kill().await;
    let said = machine.restore(true, "copy.db").await;
    let mut kept = machine.folder.path().read_dir().expect("the folder is there").flatten();
    let kept = kept.find(|entry| entry.file_name().to_string_lossy().ends_with('Z')).expect("it is kept").path();
    assert!(said.contains(text_of(&kept)), "{said}");
    let service = Service::start(&format!("sqlite:{}", kept.display())).await;
    assert!(machine.has(&service, "only-in-the-log").await);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_fences_trainers_that_are_alive() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.post(&service, "/trajectories", member("a", 0, 1.0)).await;
    let (_, resumed) = machine.post(&service, "/policies/default/resume", json!({"step": null})).await;
    let (status, batch) = machine.post(&service, "/batches", json!({"epoch": resumed["epoch"]})).await;
    assert_eq!(status, 201);
    machine.backup("copy.db").await;
    assert!(service.stop().await.success());
    let mut epochs = vec![resumed["epoch"].clone()];
    // Restoring twice begins two epochs, and neither of them was granted before.
    for _ in 0..2 {
        machine.restore(true, "copy.db").await;
        let service = machine.start().await;
        for epoch in &epochs {
            let (status, problem) = machine.post(&service, "/batches", json!({"epoch": epoch})).await;
            assert_eq!((status, &problem["type"]), (409, &json!("superseded")));
        }
        let restored = async || {
            let policy = machine.http.get(format!("{}/policies/default", service.url)).send().await;
            policy.expect("the service answers").json::<Value>().await.expect("JSON")["restored"].clone()
        };
        assert_eq!(restored().await, true, "a trainer can tell that nobody else has taken over");
        let ack = json!({"lease": batch["lease"], "step": 1});
        let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
        let (status, problem) = machine.post(&service, &path, ack.clone()).await;
        assert_eq!((status, &problem["type"]), (409, &json!("lease-lost")), "the lease is of another history");
        let (status, problem) = machine.post(&service, &path, with(ack, json!({"epoch": epochs[0]}))).await;
        assert_eq!((status, &problem["type"]), (409, &json!("superseded")));
        let (status, resumed) = machine.post(&service, "/policies/default/resume", json!({"step": null})).await;
        assert_eq!((status, restored().await), (200, json!(false)));
        let (status, again) = machine.post(&service, "/batches", json!({"epoch": resumed["epoch"]})).await;
        assert_eq!((status, &again["batch_id"]), (201, &batch["batch_id"]), "the batch comes back");
        let newest = epochs.iter().map(Value::as_i64).max().expect("there is one");
        assert!(resumed["epoch"].as_i64() > newest, "{resumed} after {epochs:?}");
        epochs.push(resumed["epoch"].clone());
        assert!(service.stop().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_refuses_an_unusable_copy_and_changes_nothing() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["kept"]).await;
    machine.backup("copy.db").await;
    let said = machine.restore(false, "copy.db").await;
    assert!(said.contains("another forebay serves it"), "{said}");
    machine.copy("f.db", "live.db", &["", "-wal"]);
    assert!(service.stop().await.success());

    std::fs::write(machine.path("text.db"), "no database at all, but long enough").expect("it can be written");
    rusqlite_file(&machine.path("other.db"));
    let mut torn = std::fs::read(machine.path("copy.db")).expect("it is there");
    torn.truncate(torn.len() / 2);
    std::fs::write(machine.path("torn.db"), torn).expect("it can be written");
    let refused = [
        ("text.db", "not a SQLite database"),
        ("other.db", "not a database of Forebay"),
        ("torn.db", "torn.db cannot be restored"),
        ("live.db", "has a log beside it"),
        ("f.db", "is the database itself"),
        ("missing.db", "missing.db cannot be restored: it does not exist: name a file that `forebay backup` made"),
    ];
    for (name, why) in refused {
        let said = machine.restore(false, name).await;
        assert!(said.contains(why), "{name}: {said}");
    }
    let nested = format!("sqlite:{}", machine.path("no/such.db").display());
    let said = machine.run(false, &["restore", text_of(&machine.path("copy.db")), "--database", &nested]).await;
    assert!(said.contains("no/such.db does not exist: correct the path, or create the folder"), "{said}");
    let url = "postgres://me:secret@db/forebay";
    let said = machine.run(false, &["restore", text_of(&machine.path("copy.db")), "--database", url]).await;
    assert!(said.contains("pg_restore") && !said.contains("secret"), "{said}");
    let left = machine.folder.path().read_dir().expect("the folder is there").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(!left.iter().any(|name| name.contains("restoring") || name.contains("replaced")), "{left:?}");
    let service = machine.start().await;
    assert!(machine.has(&service, "kept").await);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_that_is_damaged_or_served_is_not_restored() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["kept"]).await;
    machine.backup("copy.db").await;
    machine.backup("damaged.db").await;
    assert!(service.stop().await.success());
    lose_an_index(&machine.path("damaged.db"));
    let said = machine.restore(false, "damaged.db").await;
    assert!(said.contains("it is damaged"), "{said}");
    let service = Service::start(&machine.url("copy.db")).await;
    let said = machine.restore(false, "copy.db").await;
    assert!(said.contains("it is being served"), "{said}");
    assert!(service.stop().await.success());
    machine.restore(true, "copy.db").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_never_matches_the_log_of_its_database() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.backup("copy.db").await;
    assert!(service.stop().await.success());
    let session = |name: &str| -> i64 {
        let connection = rusqlite::Connection::open(machine.path(name)).expect("the file can be opened");
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).expect("it is a number")
    };
    let (database, copy) = (session("f.db"), session("copy.db"));
    assert!(database != 0 && copy != 0 && database != copy, "{database} and {copy}");
}

/// Removes an index from the schema and leaves its pages in the file.
fn lose_an_index(path: &Path) {
    let connection = rusqlite::Connection::open(path).expect("the file can be opened");
    let lose = "PRAGMA writable_schema = ON; DELETE FROM sqlite_schema WHERE name = 'batch_in_order'";
    connection.execute_batch(lose).expect("the schema can be written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_a_restore_ends_counts_neither_as_a_failed_delivery_nor_as_a_resume() {
    let machine = Machine::new();
    let service = machine.start().await;
    let rules = json!({"lease": {"max_deliveries": 1, "max_resumes": 1}});
    let put = machine.http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
    assert!(put.expect("the service answers").status().is_success());
    machine.store(&service, &["a"]).await;
    let (_, batch) = machine.post(&service, "/batches", json!({})).await;
    machine.backup("copy.db").await;
    assert!(service.stop().await.success());
    machine.restore(true, "copy.db").await;
    let service = machine.start().await;
    let (status, again) = machine.post(&service, "/batches", json!({})).await;
    assert_eq!((status, &again["batch_id"]), (201, &batch["batch_id"]), "{again}");
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_gets_the_permissions_of_the_database_that_it_replaces() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.backup("copy.db").await;
    assert!(service.stop().await.success());
    let database = machine.path("f.db");
    std::fs::set_permissions(&database, Permissions::from_mode(0o600)).expect("it is our file");
    machine.restore(true, "copy.db").await;
    let mode = database.metadata().expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "nobody else may read it, as before");
}

/// A SQLite database of another program.
fn rusqlite_file(path: &Path) {
    let connection = rusqlite::Connection::open(path).expect("the file can be made");
    connection.execute_batch("CREATE TABLE notes (text TEXT)").expect("it is valid");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_moved_with_its_log_can_be_served() {
    for (suffixes, what) in
        [(&["", "-segments", "-wal", ".lock"][..], "all files"), (&["", "-segments", "-wal"], "the file and its log")]
    {
        let machine = Machine::new();
        let service = machine.start().await;
        machine.store(&service, &["first"]).await;
        service.kill().await;
        machine.copy("f.db", "moved.db", suffixes);
        let service = Service::start(&machine.url("moved.db")).await;
        assert!(machine.has(&service, "first").await, "{what}");
        machine.store(&service, &["second"]).await;
        assert!(service.stop().await.success());
        // After a clean stop the file and its payloads are the database, whichever was served under this path before.
        machine.copy("moved.db", "f.db", &["", "-segments"]);
        for suffix in ["-wal", "-shm"] {
            let _ = std::fs::remove_file(machine.path(&format!("f.db{suffix}")));
        }
        let service = machine.start().await;
        assert!(machine.has(&service, "second").await, "{what}");
        assert!(service.stop().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_without_its_database_is_kept() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["kept"]).await;
    service.kill().await;
    std::fs::rename(machine.path("f.db"), machine.path("away.db")).expect("it can be renamed");
    let refusal = machine.refusal().await;
    assert!(refusal.contains("is missing or empty"), "{refusal}");
    // The same after a start that created an empty file.
    std::fs::write(machine.path("f.db"), "").expect("it can be written");
    assert!(machine.refusal().await.contains("is missing or empty"));
    std::fs::rename(machine.path("away.db"), machine.path("f.db")).expect("it can be renamed");
    let service = machine.start().await;
    assert!(machine.has(&service, "kept").await);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_copies_to_one_place_do_not_disturb_each_other() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["kept"]).await;
    // The files that a killed process has left.
    std::fs::write(machine.path("copy.db.AbCdEf.partial"), "half").expect("it can be written");
    let copies = (0..4).map(|_| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["backup", text_of(&machine.path("copy.db")), "--database", &machine.url("f.db")]);
        async move { command.output().await.expect("the binary starts") }
    });
    let outputs = futures::future::join_all(copies).await;
    assert_eq!(outputs.iter().filter(|output| output.status.success()).count(), 1, "{outputs:?}");
    for output in outputs.iter().filter(|output| !output.status.success()) {
        assert!(String::from_utf8_lossy(&output.stderr).contains("already exists"), "{output:?}");
    }
    let left = machine.folder.path().read_dir().expect("the folder is there").flatten();
    let left: Vec<_> = left.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    assert!(!left.iter().any(|name| name.contains("partial")), "{left:?}");
    machine.run(true, &["doctor", "--database", &machine.url("copy.db")]).await;
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_is_ahead_of_the_copy_resumes_from_what_it_has_saved() {
    let machine = Machine::new();
    let service = machine.start().await;
    machine.store(&service, &["a", "b"]).await;
    for step in 1..3 {
        let (_, batch) = machine.post(&service, "/batches", json!({})).await;
        let path = format!("/batches/{}/ack", text(&batch["batch_id"]));
        let (status, answer) = machine.post(&service, &path, json!({"lease": batch["lease"], "step": step})).await;
        assert_eq!(status, 200, "{answer}");
        if step == 1 {
            machine.backup("copy.db").await;
        }
    }
    assert!(service.stop().await.success());
    machine.restore(true, "copy.db").await;
    let service = machine.start().await;
    let (status, answer) = machine.post(&service, "/policies/default/resume", json!({"step": 2})).await;
    assert_eq!(status, 200, "the copy knows step 1 only: {answer}");
    assert!(service.stop().await.success());
}
