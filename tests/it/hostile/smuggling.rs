//! Heads of requests: endless, oversized, ambiguous, or of another protocol.

use super::{Raw, impatient, post, post_head, unharmed};
use crate::support::rollout;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_never_ends_is_cut_off_while_others_are_served() {
    let app = impatient().await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(Raw::sending(&app, "POST /trajectories HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await);
    }
    app.accept(rollout("meanwhile", 1.0)).await;
    for slow in &mut silent {
        let end = slow.rest().await;
        assert!(end.is_empty() || end.starts_with(b"HTTP/1.1 408"), "{}", String::from_utf8_lossy(&end));
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_sent_byte_by_byte_gets_no_extra_time() {
    let app = impatient().await;
    let mut slow = Raw::sending(&app, "GET /healthz HTTP/1.1\r\nhost: localhost\r\nx-slow: ").await;
    let started = tokio::time::Instant::now();
    let mut pace = tokio::time::interval(std::time::Duration::from_millis(50));
    // Every byte is progress, so only a deadline for the whole head ends this.
    while slow.send("x").await {
        assert!(started.elapsed() < super::PATIENCE, "the connection is still open");
        pace.tick().await;
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_or_too_large_headers_are_refused() {
    let app = impatient().await;
    let flood = (0..65).map(|index| format!("x-{index}: y\r\n")).collect::<Vec<_>>().concat();
    let endless = (0..100_000).map(|index| format!("x-{index}: y\r\n")).collect::<Vec<_>>().concat();
    let huge = format!("x-huge: {}\r\n", "y".repeat(1 << 20));
    for headers in [flood, endless, huge] {
        let mut raw = Raw::sending(&app, format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n")).await;
        // The connection may be reset before the answer is read, because the client has unsent data.
        if let Some(answer) = raw.answer().await {
            assert_eq!(answer.status, 431);
        }
        raw.rest().await;
    }
    let few = (0..60).map(|index| format!("x-{index}: y\r\n")).collect::<Vec<_>>().concat();
    let mut raw = Raw::sending(&app, format!("GET /healthz HTTP/1.1\r\nhost: localhost\r\n{few}\r\n")).await;
    assert_eq!(raw.answer().await.expect("an answer").status, 200);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_huge_target_is_refused() {
    let app = impatient().await;
    for length in [70_000, 2 << 20] {
        let target = "y".repeat(length);
        let mut raw =
            Raw::sending(&app, format!("GET /trajectories?rollout_id={target} HTTP/1.1\r\nhost: localhost\r\n\r\n"))
                .await;
        if let Some(answer) = raw.answer().await {
            assert!(matches!(answer.status, 414 | 431), "{}", answer.status);
        }
        raw.rest().await;
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_that_can_be_read_in_two_ways_is_refused_and_ends_the_connection() {
    let app = impatient().await;
    let smuggled = "GET /healthz HTTP/1.1\r\nhost: smuggled\r\n\r\n";
    let length = smuggled.len();
    let ambiguous = [
        format!("content-length: {length}\r\ncontent-length: 0\r\n"),
        format!("content-length: {length}, 0\r\n"),
        format!("content-length: +{length}\r\n"),
        "content-length: -1\r\n".to_owned(),
        "content-length: 0x10\r\n".to_owned(),
        "content-length: 18446744073709551616\r\n".to_owned(),
        "transfer-encoding: gzip\r\n".to_owned(),
        "transfer-encoding: chunked, identity\r\n".to_owned(),
        format!("content-length : {length}\r\n"),
        format!("content-length: 0\r\n content-length: {length}\r\n"),
        "x-folded: a\r\n b\r\n".to_owned(),
    ];
    for headers in ambiguous {
        let mut raw = Raw::sending(&app, format!("{}{headers}\r\n{smuggled}", post_head("/trajectories"))).await;
        let answer = raw.last_answer().await;
        assert_eq!(answer.status, 400, "{headers:?}");
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_length_beside_chunks_is_refused_and_ends_the_connection() {
    let app = impatient().await;
    // A proxy that uses the length sees one request, but the chunks end earlier.
    let smuggled = "GET /healthz HTTP/1.1\r\nhost: smuggled\r\n\r\n";
    let whole = rollout("two-lengths", 1.0).to_string();
    let chunked = "transfer-encoding: chunked\r\n";
    for body in [format!("0\r\n\r\n{smuggled}"), format!("{:x}\r\n{whole}\r\n0\r\n\r\n{smuggled}", whole.len())] {
        let length = format!("Content-Length: {}\r\n", body.len());
        let wide = format!("content-length:{}{}\r\n", " ".repeat(1_000), body.len());
        for lengths in [format!("{length}{chunked}"), format!("{chunked}{length}"), format!("{chunked}{wide}")] {
            let head = format!("{}{lengths}\r\n{body}", post_head("/trajectories"));
            // The same after earlier requests on the connection whose ends are unambiguous.
            let before = post("/trajectories", &rollout("before", 1.0).to_string());
            let mut raw = Raw::sending(&app, format!("{before}{before}{head}")).await;
            for _ in 0..2 {
                assert!(matches!(raw.answer().await.expect("an answer").status, 200 | 201));
            }
            let answer = raw.last_answer().await;
            assert_eq!((answer.status, answer.problem().as_str()), (400, "two-lengths"), "{lengths:.60}");
        }
    }
    app.get("/trajectories?rollout_id=two-lengths").await.refused(404, "not-found");
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unsupported_transfer_codings_are_refused_and_end_the_connection() {
    let app = impatient().await;
    let body = rollout("coded", 1.0).to_string();
    let chunks = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    for codings in [
        "transfer-encoding: gzip, chunked\r\n",
        "transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n",
        "transfer-encoding: chunked, chunked\r\n",
        "transfer-encoding: identity, chunked\r\n",
    ] {
        let request =
            format!("{}{codings}\r\n{chunks}GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n", post_head("/trajectories"));
        let answer = Raw::sending(&app, request).await.last_answer().await;
        assert_eq!((answer.status, answer.problem().as_str()), (501, "transfer-coding"), "{codings}");
    }
    app.get("/trajectories?rollout_id=coded").await.refused(404, "not-found");
    let request = format!("{}transfer-encoding: Chunked\r\n\r\n{chunks}", post_head("/trajectories"));
    assert_eq!(Raw::sending(&app, request).await.answer().await.expect("an answer").status, 201);
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pipelined_requests_are_answered_in_order() {
    let app = impatient().await;
    let first = post("/trajectories", &rollout("first", 1.0).to_string());
    let second = post("/trajectories", &rollout("second", 1.0).to_string());
    let mut raw = Raw::sending(&app, format!("{first}GET /nope HTTP/1.1\r\nhost: localhost\r\n\r\n{second}")).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        seen.push(raw.answer().await.expect("an answer").status);
    }
    assert_eq!(seen, [201, 404, 201]);
    // A thousand requests at once; the client reads no answer before it disconnects.
    Raw::sending(&app, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n".repeat(1_000)).await.reset();
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_methods_and_targets_are_refused_by_name() {
    let app = impatient().await;
    for (line, status) in [
        ("CONNECT evil.example:443 HTTP/1.1", 421),
        ("TRACE /healthz HTTP/1.1", 405),
        ("DELETE /trajectories HTTP/1.1", 405),
        ("BREW /trajectories HTTP/1.1", 405),
        ("OPTIONS * HTTP/1.1", 404),
        ("GET http://evil.example/nope HTTP/1.1", 421),
        ("GET //healthz HTTP/1.1", 404),
        ("GET /%2e%2e/healthz HTTP/1.1", 404),
        ("GET /policies/a%2Fb HTTP/1.1", 422),
        ("GET /policies/a%00b HTTP/1.1", 422),
        ("GET /policies/%ff HTTP/1.1", 422),
        ("GET /batches/%ff HTTP/1.1", 422),
        ("GET /batches/..%2f..%2fetc%2fpasswd HTTP/1.1", 404),
    ] {
        let answer = Raw::sending(&app, format!("{line}\r\nhost: localhost\r\nconnection: close\r\n\r\n"))
            .await
            .last_answer()
            .await;
        assert_eq!((line, answer.status), (line, status));
        answer.problem();
    }
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_protocols_are_refused() {
    let app = impatient().await;
    let hello: &[u8] =
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\x00\x00\x02\x13\x01";
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
    let others: [&[u8]; 7] = [
        hello,
        preface,
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/2.0\r\n\r\n",
        b"GET /healthz HTTP/1.1\nhost: x\n\x00\n\n",
        b"\r\n\r\n\r\n\x00\x00\x00\x00\x00\x00",
        b"SSH-2.0-OpenSSH_9.6\r\n",
    ];
    for bytes in others {
        let mut raw = Raw::sending(&app, bytes).await;
        let end = raw.rest().await;
        let end = String::from_utf8_lossy(&end);
        assert!(end.is_empty() || end.starts_with("HTTP/1.1 400"), "{:?}: {end}", String::from_utf8_lossy(bytes));
    }
    // HTTP/1.0 requests are understood; an upgrade is ignored.
    let old = Raw::sending(&app, "GET /healthz HTTP/1.0\r\n\r\n").await.last_answer().await;
    let upgrade = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings, close\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n\r\n";
    let upgraded = Raw::sending(&app, upgrade).await.last_answer().await;
    assert_eq!((old.status, upgraded.status), (200, 200));
    unharmed(app).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_breaks_off_ends_only_its_own_connection() {
    let app = impatient().await;
    let head = "POST /trajectories HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n";
    for cut in 1..head.len() {
        let mut raw = Raw::sending(&app, &head[..cut]).await;
        if cut % 2 == 0 {
            raw.half_close().await;
            raw.rest().await;
        } else {
            raw.reset();
        }
    }
    unharmed(app).await;
}
