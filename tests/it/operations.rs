//! Operations: health, OpenAPI, documents, starting and stopping.

use std::time::Duration;

use forebay_store::{self as store, OpenError};
use forebay_telemetry::metrics::Metrics;
use serde_json::{Value, json};

use crate::support::{Backend, TestApp, fresh_database, http, on_both_stores, process::Service, rollout, text, with};

on_both_stores! {
    async fn a_ready_service_says_so(app: TestApp) {
        let health = app.get("/healthz").await.expect(200);
        assert_eq!(health, json!({"status": "ok", "version": env!("CARGO_PKG_VERSION")}));
        assert_eq!(app.get("/readyz").await.expect(200)["status"], "ready");
    }

    async fn a_stop_answers_waiters_and_keeps_acknowledged_data(app: TestApp) {
        let url = format!("{}/batches", app.url);
        let request = app.http.post(url).json(&json!({"wait_ms": 60_000}));
        let waiting = tokio::spawn(async move { request.send().await.expect("the server answers").status() });
        crate::support::eventually("a waiter", || async { app.metrics().await.contains("forebay_waiters 1") }).await;
        app.rules("other", json!({"group": {"size": 2}})).await;
        let answer = app.post("/trajectories", with(rollout("a", 1.0), json!({"policy": "other", "group_id": "g"})));
        answer.await.expect(201);
        app.restart().await;
        assert_eq!(waiting.await.expect("the task ends"), 204);
        assert_eq!(app.get("/trajectories?policy=other&rollout_id=a").await.expect(200)["state"], "open");
    }

    async fn aborted_requests_leave_no_transaction_open(app: TestApp) {
        let body = Value::Array((0..20).map(|index| rollout(&format!("r{index}"), 1.0)).collect());
        let aborted = (0..300_u64).map(|index| {
            let request = app.http.post(format!("{}/trajectories", app.url)).json(&body);
            let request = request.timeout(Duration::from_micros(200 + index * 37 % 9_000));
            async move { drop(request.send().await) }
        });
        futures::future::join_all(aborted).await;
        // All later requests succeed as if nothing had happened.
        for index in 0..40 {
            app.accept(rollout(&format!("after{index}"), 1.0)).await;
        }
        let received = app.get("/stats").await.expect(200)["policies"]["default"]["received"].as_i64();
        assert!(received == Some(40) || received == Some(60), "a bundle is wholly there or absent: {received:?}");
    }
}

#[test]
fn the_checked_in_openapi_document_is_that_of_the_routes() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/openapi/forebay.json");
    let checked_in = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        checked_in == forebay_api::openapi(),
        "openapi/forebay.json has drifted from the routes: `make generate` writes it"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_are_readable_without_the_internet() {
    let app = TestApp::start(Backend::Sqlite).await;
    let served = app.get("/openapi.json").await.expect(200);
    let document: Value = serde_json::from_str(&forebay_api::openapi()).expect("the document is JSON");
    assert_eq!(served, document);
    let page = app.http.get(format!("{}/docs/", app.url)).send().await.expect("the server answers");
    assert_eq!(page.status(), 200);
    let page = page.text().await.expect("the page is text");
    assert!(!page.contains("https://") && !page.contains("//cdn"), "the page must not load from elsewhere: {page}");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_path_is_answered_with_a_problem() {
    let app = TestApp::start(Backend::Sqlite).await;
    let problem = app.get("/nope").await.refused(404, "no-such-route");
    assert!(!text(&problem["instance"]).is_empty());
    app.get("/batches/x/ack").await.refused(405, "method-not-allowed");
    let answer = app.http.get(format!("{}/nope", app.url)).header("x-request-id", "mine-1").send().await;
    let answer = answer.expect("the server answers");
    assert_eq!(answer.headers()["x-request-id"], "mine-1");
    assert_eq!(answer.headers()["content-type"], "application/problem+json");
    app.finish().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_beyond_the_budget_are_refused_before_they_are_read() {
    let config = "[limits]\nbody_bytes = 65536\ninflight_bytes = 131072";
    let app = TestApp::start_with(Backend::Sqlite, config).await;
    // One body has sent all but its last byte, and another one a part, so there is no room for a third.
    let mut held = Vec::new();
    for (announced, sent) in [(65_536, 65_535), (30_000, 16_000)] {
        use tokio::io::AsyncWriteExt as _;
        let address = app.url.trim_start_matches("http://").to_owned();
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("the server accepts");
        let request_head = format!(
            "POST /trajectories HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
             content-length: {announced}\r\n\r\n"
        );
        stream.write_all(request_head.as_bytes()).await.expect("the head is sent");
        stream.write_all(" ".repeat(sent).as_bytes()).await.expect("a part of the body is sent");
        held.push(stream);
    }
    crate::support::eventually("two bodies", || async {
        let metrics = app.metrics().await;
        let line = metrics.lines().find_map(|line| line.strip_prefix("forebay_body_bytes_in_flight "));
        line.and_then(|bytes| bytes.parse::<usize>().ok()).is_some_and(|bytes| bytes >= 65_536 + 16_000)
    })
    .await;
    let large = with(rollout("a", 1.0), json!({"metadata": {"padding": "x".repeat(60_000)}}));
    let response = app.http.post(format!("{}/trajectories", app.url)).json(&large).send().await;
    let response = response.expect("the server answers");
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().expect("a header"))
    );
    drop(held);
    crate::support::eventually("the budget's return", || async {
        app.post("/trajectories", rollout("a", 1.0)).await.status.is_success()
    })
    .await;
    app.finish().await;
}

#[tokio::test]
async fn a_database_that_another_process_serves_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let url = format!("sqlite:{}", folder.path().join("x.db").display());
    let first = store::open(&url, Metrics::new().store()).await.expect("the first opens it");
    let second = store::open(&url, Metrics::new().store()).await.err().expect("the second must not");
    assert!(matches!(second, OpenError::Locked(_)), "{second}");
    first.close().await;
}

#[tokio::test]
async fn a_file_that_is_no_database_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("x.db");
    std::fs::write(&path, vec![7; 10_000]).expect("the file can be written");
    let error = store::open(&format!("sqlite:{}", path.display()), Metrics::new().store()).await.err();
    let error = error.expect("it must not open");
    assert!(matches!(error, OpenError::Database { .. }) && error.to_string().contains("x.db"), "{error}");
    let error = store::open("mysql://x", Metrics::new().store()).await.err().expect("no such kind");
    assert!(matches!(error, OpenError::Url(_)));
}

#[tokio::test]
async fn a_database_of_a_newer_version_is_named() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let path = folder.path().join("x.db");
    let sqlite = format!("sqlite:{}", path.display());
    let postgres = crate::support::fresh_database().await;
    for url in [sqlite.as_str(), postgres.as_str()] {
        store::open(url, Metrics::new().store()).await.expect("it opens").close().await;
        let insert =
            "INSERT INTO _sqlx_migrations (version, description, installed_on, success, checksum, execution_time)
            VALUES (9999, 'later', CURRENT_TIMESTAMP, true, '', 0)";
        if url.starts_with("sqlite") {
            use sqlx::Connection as _;
            let mut connection = sqlx::SqliteConnection::connect(url).await.expect("it opens");
            sqlx::query(insert).execute(&mut connection).await.expect("the row is written");
            connection.close().await.expect("it closes");
        } else {
            use sqlx::Connection as _;
            let mut connection = sqlx::PgConnection::connect(url).await.expect("it opens");
            sqlx::query(insert).execute(&mut connection).await.expect("the row is written");
        }
        let error = store::open(url, Metrics::new().store()).await.err().expect("it must not open");
        assert!(matches!(error, OpenError::Newer { version: 9999, .. }), "{error:?}");
    }
}

/// With thousands of policies, their rules do not fit into memory, and a scrape would parse all of them each time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scrape_reads_no_rules_of_policies_that_have_no_label() {
    const POLICIES: usize = 300;
    let (database, http) = (fresh_database().await, http());
    let service = Service::start(&database).await;
    for number in 1..=POLICIES {
        let rules = json!({"group": {"size": number}});
        let put = http.put(format!("{}/policies/p{number}", service.url)).json(&rules).send().await;
        assert_eq!(put.expect("the service answers").status(), 201);
    }
    assert!(service.stop().await.success());
    let log = ("RUST_LOG", "info,sqlx::query=debug");
    let service = Service::start_with(&database, &["--log", "json"], &[log]).await;
    let scrape = http.get(format!("{}/metrics", service.url)).send().await.expect("the service answers");
    assert_eq!(scrape.status(), 200);
    let lines = service.terminate().await;
    let read = |name: &str| lines.iter().filter(|line| line.contains(&format!("-- {name}\\n"))).count();
    assert_eq!(read("select_versions"), 2, "at the start, and for the scrape");
    assert_eq!(read("select_rules"), 1, "at the start, those of the policy default");
}
