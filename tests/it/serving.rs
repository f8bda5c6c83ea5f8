//! `forebay serve` as a process: what its log and its files say about it, and what it does on SIGHUP.

use std::path::Path;

use rcgen::{CertificateParams, KeyPair};
use serde_json::{Value, json};

use crate::support::{eventually, process::Service, rollout, text};

fn events(log: &str) -> Vec<Value> {
    log.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line:?} is not an event"))).collect()
}

fn event(log: &str, message: &str) -> Option<Value> {
    events(log).into_iter().find(|event| event["message"] == message)
}

async fn status(service: &Service, path: &str) -> u16 {
    let sent = crate::support::http().get(format!("{}{path}", service.url)).send().await;
    sent.expect("the service answers").status().as_u16()
}

fn certificate(folder: &Path) {
    let key = KeyPair::generate().expect("a key can be made");
    let params = CertificateParams::new(["localhost".to_owned()]).expect("the name is valid");
    std::fs::write(folder.join("tls.pem"), params.self_signed(&key).expect("it signs itself").pem()).expect("written");
    std::fs::write(folder.join("tls.key"), key.serialize_pem()).expect("written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_line_says_what_is_served_and_how() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let database = format!("sqlite:{}", folder.path().join("x.db").display());
    for is_new in [true, false] {
        let service = Service::try_start(&database, &[]).await.expect("it serves");
        let start = event(&service.log(), "serving").expect("it says so");
        assert_eq!((text(&start["version"]), text(&start["database"])), (env!("CARGO_PKG_VERSION"), database.as_str()));
        assert_eq!((&start["database_created"], &start["policies"]), (&is_new.into(), &1.into()));
        assert_eq!((&start["keys"], &start["keys_required"], text(&start["tls"])), (&0.into(), &false.into(), "none"));
        assert!(service.stop().await.success());
    }
    let database = crate::support::fresh_database().await;
    let with_password = database.replacen('@', ":hunter2@", 1);
    assert!(with_password.contains("hunter2"));
    for is_new in [true, false] {
        let service = Service::try_start(&with_password, &[]).await.expect("it serves");
        let start = event(&service.log(), "serving").expect("it says so");
        assert_eq!(start["database_created"], is_new);
        assert!(!service.log().contains("hunter2"), "{start}");
        assert!(service.stop().await.success());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_port_file_holds_the_bound_address_while_the_service_runs() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let file = folder.path().join("port");
    let arguments = ["--log", "json", "--port-file", file.to_str().expect("the path is text")];
    let service = Service::start_with("sqlite::memory:", &arguments, &[]).await;
    let address = std::fs::read_to_string(&file).expect("it was written before the service said that it serves");
    assert_eq!(format!("http://{}", address.trim_end()), service.url);
    assert_eq!(std::fs::read_dir(folder.path()).expect("the folder is there").count(), 1, "nothing else is left");
    assert!(service.stop().await.success());
    assert!(!file.exists(), "nothing is served there any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_reloads_certificates_or_is_ignored_and_the_log_says_which() {
    let mut service = Service::try_start("sqlite::memory:", &[]).await.expect("it serves");
    service.signal("HUP").await;
    eventually("a word about it", || async { service.log().contains("SIGHUP is ignored") }).await;
    assert_eq!(status(&service, "/readyz").await, 200);
    assert!(service.runs());
    assert!(service.stop().await.success());

    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    certificate(folder.path());
    let config = folder.path().join("forebay.toml");
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(&config, format!("[tls]\ncertificate = '{}'\nkey = '{}'", path("tls.pem"), path("tls.key")))
        .expect("the file is written");
    let arguments = ["--log", "json", "--config", config.to_str().expect("the path is text")];
    let mut service = Service::start_with("sqlite::memory:", &arguments, &[]).await;
    assert_eq!(text(&event(&service.log(), "serving").expect("it says so")["tls"]), "server");
    // Unusable certificate files change nothing.
    std::fs::write(folder.path().join("tls.key"), "no key").expect("the file is written");
    service.signal("HUP").await;
    eventually("a warning", || async { service.log().contains("SIGHUP: certificate reload failed") }).await;
    certificate(folder.path());
    service.signal("HUP").await;
    eventually("new certificates", || async { service.log().contains("SIGHUP: the certificates were read again") })
        .await;
    assert!(service.runs());
    assert!(service.stop().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_that_drains_only_fails_its_readiness() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = folder.path().join("forebay.toml");
    std::fs::write(&config, "[limits]\ndrain_s = 3600").expect("the file is written");
    let arguments = ["--log", "json", "--config", config.to_str().expect("the path is text")];
    let mut service = Service::start_with("sqlite::memory:", &arguments, &[]).await;
    assert_eq!(status(&service, "/readyz").await, 200);
    service.signal("TERM").await;
    eventually("a balancer that is told", || async { status(&service, "/readyz").await == 503 }).await;
    // On a new connection, as one that a balancer opens which has not looked yet.
    let posted =
        crate::support::http().post(format!("{}/trajectories", service.url)).json(&rollout("a", 1.0)).send().await;
    assert_eq!(posted.expect("the service answers").status(), 201);
    assert!(service.runs());
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_requests_are_logged_with_the_id_that_their_problem_names() {
    let service = Service::try_start("sqlite::memory:", &[("RUST_LOG", "info")]).await.expect("it serves");
    let http = crate::support::http();
    let mut wrong = rollout("a", 1.0);
    wrong["segments"][0]["loss_mask"] = json!([1]);
    let sent = http.post(format!("{}/trajectories", service.url)).json(&wrong).send().await.expect("it answers");
    let problem: Value = sent.json().await.expect("it is a problem");
    let logged = || event(&service.log(), "request refused");
    eventually("a line about it", || async { logged().is_some() }).await;
    let logged = logged().expect("it was there");
    assert_eq!(logged["problem.instance"], problem["instance"]);
    assert_eq!((&logged["problem.kind"], &logged["problem.status"]), (&problem["type"], &422.into()));
    assert_eq!(logged["level"], "INFO");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_refusals_is_counted_and_does_not_fill_the_log() {
    const FLOOD: u64 = 400;
    let service = Service::try_start("sqlite::memory:", &[("RUST_LOG", "info")]).await.expect("it serves");
    let http = crate::support::http();
    let posts = (0..FLOOD).map(|_| {
        let post = http.post(format!("{}/trajectories", service.url)).header("content-type", "application/json");
        async { post.body("{").send().await.expect("it answers").status().as_u16() }
    });
    assert!(futures::future::join_all(posts).await.iter().all(|status| *status == 400));
    let counted = |log: &str| {
        let about: Vec<Value> = events(log).into_iter().filter(|event| event["problem.kind"] == "malformed").collect();
        let left_out: u64 = about.iter().filter_map(|event| event["left_out"].as_u64()).sum();
        let logged = about.iter().filter(|event| event["message"] == "request refused").count() as u64;
        (logged, left_out)
    };
    eventually("every refusal logged or counted", || async {
        let (logged, left_out) = counted(&service.log());
        logged + left_out == FLOOD
    })
    .await;
    let (logged, _) = counted(&service.log());
    assert!(logged < FLOOD / 2, "{logged} of {FLOOD} are logged");
    service.kill().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_service_looks_for_rules_that_nothing_uses() {
    let log = ("RUST_LOG", "info,sqlx::query=debug");
    let service = Service::start_with("sqlite::memory:", &["--log", "json"], &[log]).await;
    eventually("a look", || async { service.log().contains("-- select_superseded_rules") }).await;
    assert!(service.stop().await.success());
}
