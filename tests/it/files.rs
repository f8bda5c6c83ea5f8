//! The files of a database in service: only one process can serve them, whichever path it was given, and it notices
//! when they are moved or replaced.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::process::Command;

use crate::support::{eventually, process::Service, rollout};

/// Offsets in the shared memory of a write-ahead log. Numbers have the byte order of the machine.
const FRAMES_AT: usize = 16;
const COPIED_FRAMES_AT: usize = 96;

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

    async fn start(&self, name: &str) -> Service {
        Service::start(&url(&self.path(name))).await
    }

    /// The answer to a post; `None` if the service has ended.
    async fn post(&self, service: &Service, name: &str) -> Option<u16> {
        let sent = self.http.post(format!("{}/trajectories", service.url)).json(&rollout(name, 1.0)).send().await;
        sent.ok().map(|answer| answer.status().as_u16())
    }

    async fn has(&self, service: &Service, name: &str) -> bool {
        let found = self.http.get(format!("{}/trajectories?rollout_id={name}", service.url)).send().await;
        found.expect("the service answers").status() == 200
    }
}

fn url(path: &Path) -> String {
    format!("sqlite:{}", path.display())
}

/// The error of the binary when it cannot serve a file.
async fn refusal(path: &Path) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.args(["--listen", "127.0.0.1:0", "--database", &url(path)]).kill_on_drop(true);
    // A service that starts would run forever.
    let output = tokio::time::timeout(Duration::from_mins(1), command.output()).await.expect("the process ends");
    let output = output.expect("the binary starts");
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_serves_a_file_under_all_of_its_names() {
    let machine = Machine::new();
    let service = machine.start("f.db").await;
    let other = machine.path("other");
    std::fs::create_dir(&other).expect("the folder can be made");
    std::fs::hard_link(machine.path("f.db"), other.join("hard.db")).expect("it can be linked");
    std::os::unix::fs::symlink(machine.path("f.db"), other.join("soft.db")).expect("it can be linked");
    std::os::unix::fs::symlink(machine.folder.path(), machine.path("folder")).expect("it can be linked");
    for path in
        [other.join("hard.db"), other.join("soft.db"), machine.path("folder/f.db"), machine.path("other/../f.db")]
    {
        let said = refusal(&path).await;
        assert!(said.contains("another forebay serves it"), "{}: {said}", path.display());
    }
    assert_eq!(machine.post(&service, "a").await, Some(201));
    assert!(service.stop().await.success());
    let service = Service::start(&url(&other.join("soft.db"))).await;
    assert!(machine.has(&service, "a").await);
    assert!(machine.path("f.db-wal").exists(), "the log is beside the file, not beside the link");
    assert!(service.stop().await.success());
}

/// Starts the service, moves files and posts. Nothing more may be acknowledged, and the process must end and say why.
async fn displace(machine: &Machine, displace: impl FnOnce(), why: &str) {
    let service = serve_a_post(machine).await;
    displace_from(machine, service, displace, why).await;
}

/// A service that has answered a post.
async fn serve_a_post(machine: &Machine) -> Service {
    let service = machine.start("f.db").await;
    assert_eq!(machine.post(&service, "before").await, Some(201));
    service
}

/// Moves files of a service and posts.
async fn displace_from(machine: &Machine, service: Service, displace: impl FnOnce(), why: &str) {
    displace();
    assert!(machine.post(&service, "after").await.is_none_or(|status| status == 503), "{why}");
    eventually("the reason in the log", || async { service.log().contains(why) }).await;
    assert_eq!(service.ended().await.code(), Some(1), "{why}");
}

/// Whether the whole log has been copied into the database, which the service does when it has nothing to do. The shared
/// memory has the number of frames of the log, and the number of those that were copied.
/// <https://sqlite.org/walformat.html#the_wal_index_file_format>
fn log_is_copied(shared_memory: &Path) -> bool {
    let bytes = std::fs::read(shared_memory).expect("it is there");
    let number = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    number(FRAMES_AT) > 0 && number(FRAMES_AT) == number(COPIED_FRAMES_AT)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_data_survives_a_deleted_log() {
    for removed in [&["f.db-wal"][..], &["f.db-shm"], &["f.db-wal", "f.db-shm"]] {
        let machine = Machine::new();
        let remove = || removed.iter().for_each(|name| std::fs::remove_file(machine.path(name)).expect("it is there"));
        displace(&machine, remove, "was removed while the database was served").await;
        let service = machine.start("f.db").await;
        assert!(machine.has(&service, "before").await, "{removed:?}");
        assert!(service.stop().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_moved_away_is_complete_in_its_new_place() {
    let machine = Machine::new();
    let rename = || {
        for suffix in ["", "-segments"] {
            let [from, to] = ["f.db", "moved.db"].map(|name| machine.path(&format!("{name}{suffix}")));
            std::fs::rename(from, to).expect("it can be renamed");
        }
    };
    displace(&machine, rename, "f.db was removed while the database was served").await;
    let service = machine.start("moved.db").await;
    assert!(machine.has(&service, "before").await);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replacing_the_database_during_service_ends_the_process_and_leaves_the_new_file_unchanged() {
    for renames in [true, false] {
        let machine = Machine::new();
        let service = machine.start("f.db").await;
        assert_eq!(machine.post(&service, "copied").await, Some(201));
        let (copy, database) = (machine.path("copy.db"), machine.path("f.db"));
        let mut backup = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let backup = backup.arg("backup").arg(&copy).args(["--database", &url(&database)]).status().await;
        assert!(backup.expect("the binary starts").success());
        assert!(service.stop().await.success());
        let bytes = std::fs::read(&copy).expect("it is there");
        let replace = || {
            // Replaces the file in the way of `mv`, and in the way of `cp`.
            if renames {
                std::fs::rename(&copy, &database).expect("it can be renamed");
            } else {
                std::fs::copy(&copy, &database).expect("it can be copied");
            }
        };
        let why = if renames { "f.db was replaced" } else { "f.db was overwritten" };
        let service = serve_a_post(&machine).await;
        if !renames {
            // Otherwise the service may be copying the log into the file while the file is overwritten.
            eventually("a copied log", || async { log_is_copied(&machine.path("f.db-shm")) }).await;
        }
        displace_from(&machine, service, replace, why).await;
        let found = std::fs::read(&database).expect("it is there");
        assert!(found == bytes, "something was written into the copy");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_is_replaced_is_not_replayed() {
    let machine = Machine::new();
    let foreign = machine.path("f.db-wal");
    let replace = || {
        let other = machine.path("other-wal");
        std::fs::write(&other, vec![7; 100_000]).expect("it can be written");
        std::fs::rename(&other, &foreign).expect("it can be renamed");
    };
    displace(&machine, replace, "f.db-wal was replaced").await;
    assert!(refusal(&machine.path("f.db")).await.contains("does not belong"));
    std::fs::remove_file(foreign).expect("it is there");
    let service = machine.start("f.db").await;
    assert!(machine.has(&service, "before").await);
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_service_notices_a_replaced_database_too() {
    let machine = Machine::new();
    let service = machine.start("f.db").await;
    std::fs::remove_file(machine.path("f.db")).expect("it is there");
    assert_eq!(service.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_temporary_database_that_a_killed_process_left_is_removed_by_the_next() {
    let machine = Machine::new();
    let temporary = || {
        let mut names = machine.folder.path().read_dir().expect("it is there").flatten();
        names.by_ref().map(|entry| entry.file_name().into_string().expect("text")).collect::<Vec<_>>()
    };
    let folder = machine.folder.path().to_str().expect("text").to_owned();
    let start = || async { Service::start_with("sqlite::memory:", &[], &[("TMPDIR", folder.as_str())]).await };
    let (killed, lives) = (start().await, start().await);
    assert_eq!(temporary().len(), 2, "{:?}", temporary());
    killed.kill().await;
    let next = start().await;
    assert_eq!(temporary().len(), 2, "one is gone, and the one that lives has its own: {:?}", temporary());
    assert_eq!(machine.post(&lives, "a").await, Some(201));
    assert!(lives.stop().await.success() && next.stop().await.success());
    assert_eq!(temporary(), Vec::<String>::new());
}
