//! Bodies that come slowly, in part, in bad chunks, or not at all.

use super::{Raw, impatient, post, post_head, unharmed};
use crate::support::{TestApp, eventually, rollout};

async fn waits_for_bytes(app: &TestApp, what: &str) {
    eventually(what, || async { !app.metrics().await.contains("forebay_body_bytes_in_flight 0\n") }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_comes_byte_by_byte_is_refused_when_its_time_is_over() {
    let app = impatient().await;
    // One call that is paid for from the byte budget, and one that is not.
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
async fn a_body_that_never_comes_gives_its_bytes_back() {
    let app = impatient().await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(Raw::sending(&app, format!("{}content-length: 1000000\r\n\r\n", post_head("/trajectories"))).await);
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
async fn a_body_that_is_left_in_the_middle_stores_nothing() {
    let app = impatient().await;
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
    // The same in chunks, where the end is not known beforehand.
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
    let app = impatient().await;
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
    let app = impatient().await;
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
async fn one_byte_chunks_are_only_bytes() {
    let app = impatient().await;
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
async fn who_asks_before_sending_is_told_to_go_on_or_refused_at_once() {
    let app = impatient().await;
    let body = rollout("asked", 1.0).to_string();
    let head = format!("{}expect: 100-continue\r\n", post_head("/trajectories"));
    let mut raw = Raw::sending(&app, format!("{head}content-length: {}\r\n\r\n", body.len())).await;
    assert_eq!(raw.answer().await.expect("an interim answer").status, 100);
    raw.send(&body).await;
    assert_eq!(raw.answer().await.expect("an answer").status, 201);

    // Who is refused by the head alone must not be told to send the body.
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
async fn a_body_where_none_is_expected_is_not_taken_for_a_request() {
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
async fn who_sends_too_much_to_any_call_still_hears_why() {
    let app = impatient().await;
    let body = format!("{{\"consumer\":\"{}\"}}", "x".repeat(32 << 20));
    for path in ["/batches", "/policies/default/resume"] {
        let mut raw = Raw::connect(&app).await;
        // More than sockets hold: closing on it would break the client's sending, and most never read on after that.
        assert!(raw.send(post(path, &body)).await, "{path} closes on what it refused");
        let answer = raw.answer().await.expect("an answer");
        assert_eq!((answer.status, answer.problem().as_str()), (413, "too-large"));
    }
    unharmed(app).await;
}
