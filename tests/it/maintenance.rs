//! Maintenance: backups during service, the doctor, and one process per file.

use std::{
    collections::BTreeSet,
    path::Path,
    process::Output,
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};
use sqlx::Connection as _;
use tokio::process::Command;

use crate::support::{eventually, fresh_database, group, process::Service, rollout};

async fn forebay(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_forebay")).args(arguments).output().await.expect("the binary starts")
}

fn sqlite(folder: &Path, name: &str) -> String {
    format!("sqlite:{}", folder.join(name).display())
}

async fn post(http: &reqwest::Client, url: &str, body: &Value) -> u16 {
    let sent = http.post(format!("{url}/trajectories")).json(body).send().await;
    sent.expect("the service answers").status().as_u16()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_during_posts_contains_everything_acknowledged_before_it() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = sqlite(folder.path(), "forebay.db");
    let service = Service::start(&database).await;
    let http = crate::support::http();
    let acknowledged: Arc<Mutex<Vec<String>>> = Arc::default();
    let posting = {
        let (http, url, acknowledged) = (http.clone(), service.url.clone(), Arc::clone(&acknowledged));
        tokio::spawn(async move {
            for index in 0.. {
                let id = format!("r{index}");
                assert_eq!(post(&http, &url, &rollout(&id, 1.0)).await, 201);
                acknowledged.lock().expect("nobody panics").push(id);
            }
        })
    };
    let count = || acknowledged.lock().expect("nobody panics").len();
    eventually("some posts", || async { count() > 20 }).await;
    let before: BTreeSet<String> = acknowledged.lock().expect("nobody panics").iter().cloned().collect();
    let copy = folder.path().join("copy.db");
    let output = forebay(&["backup", copy.to_str().expect("text"), "--database", &database]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), copy.to_str().expect("text"));
    let (so_far, after) = (count(), count() + 5);
    eventually("posts during and after the copy", || async { count() >= after }).await;
    posting.abort();
    assert!(so_far >= before.len());
    assert!(service.stop().await.success());

    let restored = sqlite(folder.path(), "copy.db");
    let output = forebay(&["doctor", "--database", &restored]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let service = Service::start(&restored).await;
    for id in before {
        let found = http.get(format!("{}/trajectories?rollout_id={id}", service.url)).send().await;
        assert_eq!(found.expect("the service answers").status(), 200, "{id} is not in the copy");
    }
    assert_eq!(post(&http, &service.url, &rollout("after", 1.0)).await, 201);
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_replaces_no_file_and_names_what_it_cannot_copy() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let there = folder.path().join("there.db");
    std::fs::write(&there, "precious").expect("the file can be written");
    let database = sqlite(folder.path(), "x.db");
    let output = forebay(&["backup", there.to_str().expect("text"), "--database", &database]).await;
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("already exists"));
    assert_eq!(std::fs::read(&there).expect("it is there"), b"precious");
    let copy = folder.path().join("copy.db");
    let url = "postgres://me:secret@db/forebay";
    let output = forebay(&["backup", copy.to_str().expect("text"), "--database", url]).await;
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("pg_dump") && !message.contains("secret"), "{message}");
    assert!(!copy.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_the_problems_that_it_finds() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = sqlite(folder.path(), "forebay.db");
    let service = Service::start(&database).await;
    let http = crate::support::http();
    let rules = json!({"group": {"size": 2}});
    http.put(format!("{}/policies/default", service.url)).json(&rules).send().await.expect("the service answers");
    assert_eq!(post(&http, &service.url, &group("a", &[1.0, 0.0])).await, 201);
    assert!(service.stop().await.success());
    let healthy = forebay(&["doctor", "--database", &database]).await;
    assert!(healthy.status.success());
    let table = String::from_utf8_lossy(&healthy.stdout).into_owned();
    assert_eq!(
        table.lines().map(|line| line.split_whitespace().nth(1)).collect::<Vec<_>>(),
        [Some("ok"); 6],
        "{table}"
    );

    let found = async |sql: &'static str| {
        let mut connection = sqlx::SqliteConnection::connect(&database).await.expect("the file opens");
        sqlx::raw_sql(sql).execute(&mut connection).await.expect("it is valid");
        connection.close().await.expect("the file closes");
        let damaged = forebay(&["doctor", "--database", &database]).await;
        assert_eq!(damaged.status.code(), Some(1), "{sql}");
        String::from_utf8_lossy(&[damaged.stdout, damaged.stderr].concat()).into_owned()
    };
    let table = found("UPDATE rollout SET reward = 7 WHERE rollout_pk = 1").await;
    assert!(table.contains("rollout a-0 of group a"), "{table}");
    let table = found("UPDATE rollout SET rollout_key = CAST('a-7' AS BLOB) WHERE rollout_pk = 2").await;
    assert!(table.contains("rollouts that cannot be found by their names (at least 1): a-1"), "{table}");
    let table = found("UPDATE rollout_group SET group_key = CAST('b' AS BLOB) WHERE group_id = 'a'").await;
    assert!(table.contains("groups that cannot be found by their names (at least 1): a"), "{table}");

    let missing = forebay(&["doctor", "--database", &sqlite(folder.path(), "no.db")]).await;
    assert!(String::from_utf8_lossy(&missing.stderr).contains("does not exist"));
    assert!(!folder.path().join("no.db").exists(), "looking for a database does not make one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_checks_postgres_during_service() {
    let database = fresh_database().await;
    let service = Service::start(&database).await;
    let http = crate::support::http();
    for index in 0..5 {
        assert_eq!(post(&http, &service.url, &rollout(&format!("r{index}"), 1.0)).await, 201);
    }
    let output = forebay(&["doctor", "--database", &database]).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert!(String::from_utf8_lossy(&output.stdout).contains("5 rollouts"));
    service.kill().await;

    // No foreign key ties these rows to each other, so the doctor does.
    let mut connection = sqlx::PgConnection::connect(&database).await.expect("the database accepts connections");
    for (sql, found) in [
        ("DELETE FROM rollout WHERE rollout_id = 'r0'", "payloads without a rollout (at least 1): "),
        ("DELETE FROM rollout_group WHERE group_id = 'r1'", "rollouts without a group (at least 1): r1"),
    ] {
        sqlx::raw_sql(sql).execute(&mut connection).await.expect("it is valid");
        let damaged = forebay(&["doctor", "--database", &database]).await;
        let table = String::from_utf8_lossy(&damaged.stdout).into_owned();
        assert!(damaged.status.code() == Some(1) && table.contains(found), "{table}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_process_serves_a_file() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = sqlite(folder.path(), "forebay.db");
    let service = Service::start(&database).await;
    let second = forebay(&["--listen", "127.0.0.1:0", "--database", &database]).await;
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains("another forebay serves it"));
    let http = crate::support::http();
    let ready = http.get(format!("{}/readyz", service.url)).send().await;
    assert_eq!(ready.expect("the first goes on").status(), 200);
    service.kill().await;
}
