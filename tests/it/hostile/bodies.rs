//! Bodies that arrive slowly, in part, in bad chunks, or not at all.

use serde_json::json;

use super::{Raw, impatient, impatient_with, post, post_head, unharmed};
use crate::support::{Backend, TestApp, eventually, rollout, with};

/// Enough time for a busy machine to read a body that arrives at once, or to observe what is held while it waits.
const SEEN_BEFORE_THE_END: &str = "[limits]\nheader_timeout_s = 1\nbody_timeout_s = 5";

async fn waits_for_bytes(app: &TestApp, what: &str) {
    eventually(what, || async { !app.metrics().await.contains("forebay_body_bytes_in_flight 0\n") }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_sent_byte_by_byte_is_refused_when_its_time_is_over() {
    let app = impatient().await;
    // One call whose body counts against the byte budget, and one whose body does not.
    for path in ["/trajectories", "/batches"] {
        let mut slow = Raw::sending(&app, format!("{}content-length: 100000\r\n\r\n", post_head(path))).await;
        let (mut reader, mut writer) = slow.0.split();
        let trickle = async {
            let mut pace = tokio::time::interval(std::time::Duration::from_millis(50));
            while tokio::io::AsyncWriteExt::write_all(&mut writer, b" ").await.is_ok() {
                pace.tick().await;
            }
        };
        let mut answer = vec![0; 12];
        let read = tokio::io::AsyncReadExt::read_exact(&mut reader, &mut answer);
        tokio::select! {
            read = tokio::time::timeout(super::PATIENCE, read) => {
                read.expect("the server answers").expect("the answer comes before the end");
            }
            () = trickle => panic!("closed without an answer"),
        }
        assert_eq!(String::from_utf8_lossy(&answer), "HTTP/1.1 408", "{path}");
        app.accept(rollout(path, 1.0)).await;
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_never_arrives_releases_its_budget() {
    let app = impatient_with(SEEN_BEFORE_THE_END).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        let begun = format!("{}content-length: 1000000\r\n\r\n{}", post_head("/trajectories"), " ".repeat(100_000));
        silent.push(Raw::sending(&app, begun).await);
    }
    waits_for_bytes(&app, "bytes that are paid for").await;
    app.accept(rollout("meanwhile", 1.0)).await;
    for raw in &mut silent {
        let answer = raw.last_answer().await;
        assert_eq!((answer.status, answer.problem().as_str()), (408, "body-timeout"));
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_breaks_off_stores_nothing() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = rollout("half", 1.0).to_string();
    let whole = post("/trajectories", &body);
    let head = whole.len() - body.len();
    for (index, cut) in (head..whole.len()).enumerate() {
        let mut raw = Raw::sending(&app, &whole[..cut]).await;
        match index % 3 {
            0 => {
                raw.half_close().await;
                raw.rest().await;
            }
            1 => raw.reset(),
            _ => drop(raw),
        }
    }
    // The same with chunks, whose total length is not known beforehand.
    let chunk =
        format!("{}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n", post_head("/trajectories"), body.len());
    for end in ["", "0", "0\r\n"] {
        let mut raw = Raw::sending(&app, format!("{chunk}{end}")).await;
        raw.half_close().await;
        raw.rest().await;
    }
    app.get("/trajectories?rollout_id=half").await.refused(404, "not-found");
    let mut raw = Raw::sending(&app, format!("{chunk}0\r\n\r\n")).await;
    assert_eq!(raw.answer().await.expect("an answer").status, 201);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_are_not_chunks_are_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let long_extension = format!("1;{}\r\n", "x".repeat(1 << 20));
    for chunks in [
        "zz\r\n{}\r\n0\r\n\r\n",
        "-1\r\n{}\r\n0\r\n\r\n",
        "2 {}\r\n0\r\n\r\n",
        "fffffffffffffffff\r\n{}",
        "1\r\n{}\r\n0\r\n\r\n",
        "0x2\r\n{}\r\n0\r\n\r\n",
        "\r\n{}\r\n0\r\n\r\n",
        long_extension.as_str(),
    ] {
        let mut raw =
            Raw::sending(&app, format!("{}transfer-encoding: chunked\r\n\r\n{chunks}", post_head("/trajectories")))
                .await;
        if let Some(answer) = raw.answer().await {
            assert!(
                matches!((answer.status, answer.problem().as_str()), (400, "incomplete-body" | "malformed")),
                "{chunks:.20}"
            );
        }
        raw.rest().await;
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_trailers_is_refused() {
    let app = TestApp::start(Backend::Sqlite).await;
    let trailers = (0..100_000).map(|index| format!("x-{index}: y\r\n")).collect::<Vec<_>>().concat();
    let body = rollout("trailers", 1.0).to_string();
    let head = post_head("/trajectories");
    let request = format!("{head}transfer-encoding: chunked\r\n\r\n{:x}\r\n{body}\r\n0\r\n{trailers}\r\n", body.len());
    let mut raw = Raw::sending(&app, request).await;
    raw.half_close().await;
    let end = raw.rest().await;
    assert!(!end.starts_with(b"HTTP/1.1 5"), "{}", String::from_utf8_lossy(&end));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_byte_chunks_are_read_like_any_others() {
    let app = TestApp::start(Backend::Sqlite).await;
    let body = rollout("crumbs", 1.0).to_string();
    let chunks = body.chars().map(|byte| format!("1;x=y\r\n{byte}\r\n")).collect::<Vec<_>>().concat();
    let mut raw = Raw::sending(
        &app,
        format!("{}transfer-encoding: chunked\r\n\r\n{chunks}0\r\n\r\n", post_head("/trajectories")),
    )
    .await;
    assert_eq!(raw.answer().await.expect("an answer").status, 201);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expect_100_continue_is_answered_with_100_or_a_refusal() {
    let app = impatient_with(SEEN_BEFORE_THE_END).await;
    let body = rollout("asked", 1.0).to_string();
    let head = format!("{}expect: 100-continue\r\n", post_head("/trajectories"));
    let mut raw = Raw::sending(&app, format!("{head}content-length: {}\r\n\r\n", body.len())).await;
    assert_eq!(raw.answer().await.expect("an interim answer").status, 100);
    raw.send(&body).await;
    assert_eq!(raw.answer().await.expect("an answer").status, 201);

    // A client that is refused by its head alone must not be told to send the body.
    let large = format!("{head}content-length: 1000000000\r\n\r\n");
    let untaken = format!("{head}content-encoding: br\r\ncontent-length: 10\r\n\r\n");
    let mistyped = large.replace("application/json", "text/plain");
    for (request, status) in [(large, 413), (untaken, 415), (mistyped, 415)] {
        let answer = Raw::sending(&app, request).await.last_answer().await;
        assert_eq!(answer.status, status);
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unexpected_body_is_not_read_as_a_request() {
    let app = impatient().await;
    let smuggled = "GET /nope HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let request =
        format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n{smuggled}", smuggled.len());
    let mut raw =
        Raw::sending(&app, format!("{request}GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
            .await;
    assert_eq!(raw.answer().await.expect("an answer").status, 200);
    if let Some(second) = raw.answer().await {
        assert_eq!(second.status, 200, "the body was read as a request");
    }
    raw.rest().await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_oversized_body_to_any_call_is_answered_with_the_reason() {
    let app = impatient().await;
    let body = format!("{{\"consumer\":\"{}\"}}", "x".repeat(32 << 20));
    for path in ["/batches", "/policies/default/resume"] {
        let mut raw = Raw::connect(&app).await;
        // The body is larger than socket buffers: closing the connection at once would break the client's sending, and
        // most clients never read the answer after that.
        assert!(raw.send(post(path, &body)).await, "{path} closes on what it refused");
        let answer = raw.answer().await.expect("an answer");
        assert_eq!((answer.status, answer.problem().as_str()), (413, "too-large"));
    }
    unharmed(app).await;
}

/// Number of bytes that a budget has granted.
async fn held(app: &TestApp, budget: &str) -> usize {
    let prefix = format!("forebay_{budget}_bytes_in_flight ");
    let metrics = app.metrics().await;
    let value = metrics.lines().find_map(|line| line.strip_prefix(prefix.as_str()));
    value.and_then(|value| value.parse().ok()).expect("the service counts the bytes of its budgets")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endless_bodies_of_agents_do_not_block_acks_and_heartbeats() {
    const CONTROL_BYTES: usize = 4 << 20;
    const AGENTS: usize = 48;
    // The first bytes of each body are not counted; an ack has fewer bytes than that.
    const FREE_BYTES: usize = 4 << 10;
    let app = TestApp::start_with(Backend::Sqlite, &format!("[limits]\ncontrol_bytes = {CONTROL_BYTES}")).await;
    app.accept(rollout("a", 1.0)).await;
    let batch = app.lease().await;
    let unfinished = format!("{}content-length: 262144\r\n\r\n{}", post_head("/admissions"), " ".repeat(200 << 10));
    let mut agents = Vec::new();
    for _ in 0..AGENTS {
        agents.push(Raw::sending(&app, &unfinished).await);
    }
    eventually("the end of the budget", || async { held(&app, "control").await > CONTROL_BYTES - (256 << 10) }).await;
    assert!(held(&app, "control").await <= CONTROL_BYTES + AGENTS * FREE_BYTES);
    let large = json!({"rollouts": 1, "policy": "x".repeat(128 << 10)});
    app.post("/admissions", large).await.refused(503, "overloaded");

    let path = format!("/batches/{}/extend", crate::support::text(&batch["batch_id"]));
    app.post(&path, json!({"lease": batch["lease"], "ttl_s": 60})).await.expect(200);
    app.ack(&batch, 1).await.expect(200);
    app.accept(rollout("b", 1.0)).await;
    agents.into_iter().for_each(Raw::reset);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_control_body_that_is_announced_but_never_sent_holds_no_budget() {
    let app = TestApp::start_with(Backend::Sqlite, "[limits]\ncontrol_bytes = 4194304").await;
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(Raw::sending(&app, format!("{}content-length: 262144\r\n\r\n", post_head("/admissions"))).await);
    }
    app.post("/admissions", json!({"rollouts": 1, "policy": "x".repeat(128 << 10)})).await.refused(422, "invalid");
    silent.into_iter().for_each(Raw::reset);
    unharmed(app).await;
}

/// A bulk body in which only the last line is valid. Each other line is answered with kilobytes.
fn mostly_invalid(lines: usize) -> String {
    let bad = json!({"status": "failed", "segments": [{"tokens": vec![-1; 60], "loss_mask": [2]}]}).to_string();
    format!("{}\n{}", vec![bad; lines - 1].join("\n"), rollout("last", 1.0))
}

fn bulk(body: &str) -> String {
    let head = post_head("/trajectories").replace("application/json", "application/x-ndjson");
    format!("{head}content-length: {}\r\n\r\n{body}", body.len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_line_is_answered_however_long_the_answer_is() {
    let app = TestApp::start(Backend::Sqlite).await;
    let request = app.http.post(format!("{}/trajectories", app.url)).header("content-type", "application/x-ndjson");
    let answer = request.body(mostly_invalid(5_000)).send().await.expect("the server answers");
    let answer = answer.text().await.expect("the answer ends well");
    let lines: Vec<serde_json::Value> =
        answer.lines().map(|line| serde_json::from_str(line).expect("every line is JSON")).collect();
    assert!(answer.len() > 8 << 20, "longer than what sockets and the service hold: {}", answer.len());
    assert!(lines.iter().zip(1..).all(|(line, number)| line["line"] == number));
    assert_eq!((lines.len(), &lines[0]["status"], &lines[4_999]["status"]), (5_000, &json!(422), &json!(201)));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_body_is_stored_to_its_end_also_when_nobody_reads_the_answer() {
    let app = impatient_with("[limits]\nbody_timeout_s = 5\nstall_timeout_s = 600").await;
    let mut mute = Raw::sending(&app, bulk(&mostly_invalid(5_000))).await;
    assert_eq!(mute.answer().await.expect("a head").status, 200);
    // The end of the body is stored after the time for reading its answer is over.
    eventually("the last line", || async {
        app.get("/trajectories?rollout_id=last").await.status.is_success() && held(&app, "body").await < 2 << 20
    })
    .await;
    // The answer breaks off, so the client can tell that it is incomplete.
    let rest = mute.rest().await;
    assert!(!rest.ends_with(b"0\r\n\r\n"), "the answer looks whole");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bulk_body_is_stored_to_its_end_also_when_the_client_hangs_up() {
    let app = TestApp::start(Backend::Sqlite).await;
    let mut gone = Raw::sending(&app, bulk(&mostly_invalid(2_000))).await;
    assert_eq!(gone.answer().await.expect("a head").status, 200);
    gone.reset();
    eventually("the last line", || async { app.get("/trajectories?rollout_id=last").await.status.is_success() }).await;
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_problem_quotes_little_of_what_was_sent() {
    let app = TestApp::start(Backend::Sqlite).await;
    let long = |index: usize| format!("{index}{}", "x".repeat(50_000));
    let components: serde_json::Map<_, _> = (0..64).map(|index| (long(index), json!(1.0))).collect();
    let problem = app.post("/trajectories", with(rollout("a", 1.0), json!({"reward_components": components}))).await;
    let problem = problem.refused(422, "invalid");
    let errors = problem["errors"].as_array().expect("a problem lists its errors");
    assert!(!errors.is_empty() && problem.to_string().len() < 20 << 10, "{} bytes", problem.to_string().len());
    let problem = app.post("/trajectories", json!({"status": "y".repeat(1 << 20)})).await.expect(422);
    assert!(problem.to_string().len() < 8 << 10, "{} bytes", problem.to_string().len());
    unharmed(app).await;
}
