//! Segment files: payloads beside a SQLite database. They survive kills, what no row names is cut off, files that are
//! missing or are others are noticed, payloads move between the database and the files, and copies are whole.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::Output,
};

use serde_json::{Value, json};
use tokio::process::Command;

use crate::support::{eventually, group, http, process::Service, text, with};

/// A folder with a database.
struct Machine {
    folder: tempfile::TempDir,
    http: reqwest::Client,
}

impl Machine {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a temporary folder can be made"), http: http() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn url(&self, name: &str) -> String {
        format!("sqlite:{}", self.path(name).display())
    }

    async fn start(&self, payloads: &[(&str, &str)]) -> Service {
        Service::start_with(&self.url("forebay.db"), &["--log", "json"], payloads).await
    }

    /// A service with three megabytes in two groups, each of which fills a file.
    async fn start_with_full_files(&self) -> Service {
        let config = self.path("forebay.toml");
        fs::write(&config, "segment_file_bytes = 1_048_576").expect("it can be written");
        let arguments = ["--config", config.to_str().expect("text")];
        let service = Service::start_with(&self.url("forebay.db"), &arguments, &[]).await;
        self.rules(&service, json!({})).await;
        for number in 0..2 {
            let mut bundle = group(&format!("large{number}"), &[1.0, 0.0]);
            for rollout in bundle.as_array_mut().expect("a bundle") {
                let logprobs: Vec<f64> = (1..200_000).map(|token| -1.0 / f64::from(token + number)).collect();
                let tokens = vec![7; 200_000];
                rollout["segments"] = json!([{"tokens": tokens, "loss_mask": vec![1; 199_999], "logprobs": logprobs}]);
            }
            let sent = self.http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
            assert_eq!(sent.expect("the service answers").status(), 201);
        }
        service
    }

    /// Posts groups of two rollouts, each with other tokens.
    async fn post(&self, service: &Service, groups: std::ops::Range<usize>) {
        for number in groups {
            let mut bundle = group(&format!("g{number}"), &[1.0, 0.0]);
            for (place, rollout) in bundle.as_array_mut().expect("a bundle").iter_mut().enumerate() {
                let tokens: Vec<usize> = (0..400).map(|token| token * 7_919 % (1_000 + 2 * number + place)).collect();
                rollout["segments"] = json!([{"tokens": tokens, "loss_mask": vec![1; 399]}]);
            }
            let sent = self.http.post(format!("{}/trajectories", service.url)).json(&bundle).send().await;
            assert_eq!(sent.expect("the service answers").status(), 201);
        }
    }

    /// All rows of the batches that are ready, one group in each.
    async fn delivered(&self, service: &Service) -> Vec<Value> {
        let mut rows = Vec::new();
        loop {
            let lease = self.http.post(format!("{}/batches", service.url)).json(&json!({})).send().await;
            let lease = lease.expect("the service answers");
            if lease.status() == 204 {
                return rows;
            }
            let batch: Value = lease.json().await.expect("a descriptor");
            let read = self.http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
            let lines = read.expect("the service answers").text().await.expect("the stream is whole");
            rows.extend(lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("a row")));
        }
    }

    fn segments(&self, name: &str) -> Vec<PathBuf> {
        segments_of(&self.path(name))
    }

    async fn rules(&self, service: &Service, more: Value) {
        let rules = with(json!({"group": {"size": 2}}), more);
        let put = self.http.put(format!("{}/policies/default", service.url)).json(&rules).send().await;
        assert!(put.expect("the service answers").status().is_success());
    }
}

/// The segment files of a database, in order.
fn segments_of(database: &Path) -> Vec<PathBuf> {
    let folder = PathBuf::from(format!("{}-segments", database.display()));
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.expect("it can be read").path()).collect();
    files.sort();
    files
}

async fn forebay(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(arguments).output().await.expect("the binary starts")
}

/// The line of the doctor about payloads.
async fn doctor(database: &str) -> (bool, String) {
    let output = forebay(&["doctor", "--database", database]).await;
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), table)
}

/// The error of a service that must not start.
async fn refusal(database: &str) -> String {
    let output = forebay(&["--listen", "127.0.0.1:0", "--database", database]).await;
    assert_eq!(output.status.code(), Some(1));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_survive_a_kill_and_what_no_row_names_is_cut_off() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.rules(&service, json!({})).await;
    machine.post(&service, 0..5).await;
    service.kill().await;
    let [file] = &machine.segments("forebay.db")[..] else { panic!("there is one file") };
    let torn = [fs::read(file).expect("it is there"), b"FBFR torn".repeat(1_000)].concat();
    fs::write(file, torn).expect("it can be written");
    let service = machine.start(&[]).await;
    machine.post(&service, 5..10).await;
    let rows = machine.delivered(&service).await;
    assert_eq!(rows.len(), 20);
    for (index, row) in rows.iter().enumerate() {
        let modulus = 1_000 + index;
        let expected: Vec<usize> = (0..400).map(|token| token * 7_919 % modulus).collect();
        assert_eq!(row["tokens"], json!(expected), "{index}");
    }
    assert!(service.stop().await.success());
    assert!(!String::from_utf8_lossy(&fs::read(file).expect("it is there")).contains("torn"));
    let (healthy, table) = doctor(&machine.url("forebay.db")).await;
    assert!(healthy && table.contains("0 in the database, 20 in 1 segment files"), "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_does_not_start_on_files_that_are_missing_or_others() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.post(&service, 0..2).await;
    assert!(service.stop().await.success());
    let url = machine.url("forebay.db");
    let file = machine.segments("forebay.db").pop().expect("there is one file");
    let whole = fs::read(&file).expect("it is there");

    let aside = machine.path("aside");
    fs::rename(&file, &aside).expect("it can be moved");
    let said = refusal(&url).await;
    assert!(said.contains(&file.display().to_string()) && said.contains("No such file"), "{said}");

    fs::write(&file, &whole[..whole.len() - 1]).expect("it can be written");
    let said = refusal(&url).await;
    assert!(said.contains("shorter than what the database has stored in it"), "{said}");

    let other = Machine::new();
    let service = other.start(&[]).await;
    other.post(&service, 0..2).await;
    assert!(service.stop().await.success());
    fs::copy(other.segments("forebay.db").pop().expect("there is one file"), &file).expect("it can be copied");
    let said = refusal(&url).await;
    assert!(said.contains("another file"), "{said}");

    fs::rename(&aside, &file).expect("it can be moved");
    let service = machine.start(&[]).await;
    assert_eq!(machine.delivered(&service).await.len(), 4);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_answered_after_the_file_that_is_written_was_removed() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.post(&service, 0..1).await;
    fs::remove_file(machine.segments("forebay.db").pop().expect("there is one file")).expect("it can be removed");
    let sent = machine.http.post(format!("{}/trajectories", service.url)).json(&group("g", &[1.0, 0.0])).send().await;
    assert!(sent.is_err() || sent.is_ok_and(|answer| answer.status() != 201));
    assert!(!service.ended().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_finds_damage_in_a_file_and_its_group_is_not_delivered() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.rules(&service, json!({})).await;
    machine.post(&service, 0..3).await;
    assert!(service.stop().await.success());
    let file = machine.segments("forebay.db").pop().expect("there is one file");
    let whole = fs::read(&file).expect("it is there");
    // The last byte of the file is in the last payload. The byte behind the head of the file is in the head of a frame.
    for (place, finding) in [(whole.len() - 1, "rollout g2-1 of group g2"), (64, "0 of the 6 frames that rows name")] {
        let mut damaged = whole.clone();
        damaged[place] ^= 1;
        fs::write(&file, damaged).expect("it can be written");
        let (healthy, table) = doctor(&machine.url("forebay.db")).await;
        assert!(!healthy && table.contains(finding), "{table}");
    }
    let mut damaged = whole;
    *damaged.last_mut().expect("it is not empty") ^= 1;
    fs::write(&file, damaged).expect("it can be written");
    let service = machine.start(&[]).await;
    for expected in [200, 200, 500] {
        let lease = machine.http.post(format!("{}/batches", service.url)).json(&json!({})).send().await;
        let batch: Value = lease.expect("the service answers").json().await.expect("a descriptor");
        let read = machine.http.get(format!("{}{}", service.url, text(&batch["samples_url"]))).send().await;
        assert_eq!(read.expect("the service answers").status(), expected);
    }
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_every_file_that_cannot_be_read_and_goes_on() {
    let machine = Machine::new();
    let service = machine.start_with_full_files().await;
    machine.post(&service, 0..1).await;
    assert!(service.stop().await.success());
    let mut files = machine.segments("forebay.db");
    files.sort();
    let [first, second, _] = files.as_slice() else { panic!("there are three files: {files:?}") };
    for file in [first, second] {
        fs::remove_file(file).expect("it is there");
    }
    std::os::unix::fs::symlink(second, second).expect("nothing is there");
    let output = forebay(&["doctor", "--database", &machine.url("forebay.db")]).await;
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{table}");
    assert_eq!(table.matches("No such file").count(), 1, "{table}");
    assert_eq!(table.matches("symbolic links").count(), 3, "for the file and for each of its rollouts: {table}");
    assert_eq!(table.matches("- rollout large").count(), 4, "{table}");
    assert!(table.contains("6 rollouts") && !table.contains("- rollout g0"), "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_move_to_where_the_configuration_wants_them() {
    let machine = Machine::new();
    let service = machine.start(&[("FOREBAY_PAYLOADS", "database")]).await;
    machine.rules(&service, json!({})).await;
    machine.post(&service, 0..4).await;
    assert!(service.stop().await.success());
    assert!(machine.segments("forebay.db").is_empty());
    let url = machine.url("forebay.db");
    let (healthy, table) = doctor(&url).await;
    assert!(healthy && table.contains("8 in the database, 0 in 0 segment files"), "{table}");

    let service = machine.start(&[]).await;
    machine.post(&service, 4..6).await;
    eventually("the payloads are moved", || async {
        service.metric(&machine.http, "forebay_payloads_moved_total").await >= 8.0
    })
    .await;
    assert_eq!(machine.delivered(&service).await.len(), 12);
    assert!(service.stop().await.success());
    let (healthy, table) = doctor(&url).await;
    assert!(healthy && table.contains("0 in the database, 12 in 1 segment files"), "{table}");

    let output = forebay(&["move-payloads", "database", "--database", &url]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let (healthy, table) = doctor(&url).await;
    assert!(healthy && table.contains("12 in the database, 0 in 0 segment files"), "{table}");
    assert!(machine.segments("forebay.db").is_empty(), "a file without payloads is removed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn payloads_whose_bytes_are_gone_stay_and_the_command_says_so() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.post(&service, 0..3).await;
    assert!(service.stop().await.success());
    let url = machine.url("forebay.db");
    let connection = rusqlite::Connection::open(machine.path("forebay.db")).expect("it is a database");
    let beyond = "UPDATE payload SET start = 1000000 WHERE rollout_pk = 2";
    assert_eq!(connection.execute(beyond, []).expect("it is valid"), 1);
    drop(connection);
    let output = forebay(&["move-payloads", "database", "--database", &url]).await;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("payloads cannot be read and stay where they are: 1;"), "{said}");
    let (healthy, table) = doctor(&url).await;
    assert!(!healthy && table.contains("5 in the database, 1 in 1 segment files"), "{table}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_and_its_restore_have_all_payloads() {
    let machine = Machine::new();
    let service = machine.start(&[]).await;
    machine.rules(&service, json!({})).await;
    machine.post(&service, 0..3).await;
    let (url, copy) = (machine.url("forebay.db"), machine.path("copy.db"));
    let copied = forebay(&["backup", copy.to_str().expect("text"), "--database", &url]).await;
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    machine.post(&service, 3..6).await;
    assert!(service.stop().await.success());

    let (healthy, table) = doctor(&machine.url("copy.db")).await;
    assert!(healthy && table.contains("6 in 1 segment files"), "{table}");
    let restored = forebay(&["restore", copy.to_str().expect("text"), "--database", &url]).await;
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let service = machine.start(&[]).await;
    assert_eq!(machine.delivered(&service).await.len(), 6);
    machine.post(&service, 10..11).await;
    assert!(service.stop().await.success());
    let (healthy, table) = doctor(&machine.url("copy.db")).await;
    assert!(healthy && table.contains("6 in 1 segment files"), "the copy is unchanged: {table}");

    let replaced = fs::read_dir(machine.folder.path()).expect("it can be read").find_map(|entry| {
        let name = entry.expect("it can be read").file_name().into_string().expect("names are text");
        (name.contains(".replaced-") && name.ends_with('Z')).then_some(name)
    });
    let (healthy, table) = doctor(&machine.url(&replaced.expect("the old database is kept"))).await;
    assert!(healthy && table.contains("12 in 1 segment files"), "{table}");

    fs::remove_dir_all(machine.path("copy.db-segments")).expect("it is there");
    let refused = forebay(&["restore", copy.to_str().expect("text"), "--database", &url]).await;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("COPY-segments belongs beside the copy"), "{said}");
    let service = machine.start(&[]).await;
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_files_are_linked_into_backups_and_the_newest_is_copied() {
    let machine = Machine::new();
    let service = machine.start_with_full_files().await;
    machine.post(&service, 0..1).await;
    let (url, copy) = (machine.url("forebay.db"), machine.path("copy.db"));
    let copied = forebay(&["backup", copy.to_str().expect("text"), "--database", &url]).await;
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    let links = |name: &str| -> Vec<u64> {
        let metadata = |path: &PathBuf| fs::metadata(path).expect("it is there").nlink();
        machine.segments(name).iter().map(metadata).collect()
    };
    assert_eq!(links("forebay.db"), [2, 2, 1]);
    assert_eq!(links("copy.db"), [2, 2, 1]);
    assert_eq!(machine.delivered(&service).await.len(), 6);
    service.kill().await;
}
