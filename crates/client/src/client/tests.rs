//! Tests of what the client repeats, which answers it refuses, and the form of its requests.

use reqwest::Method;
use serde_json::{json, value::RawValue};

use super::{
    Client, ClientError, RetryPolicy,
    exchange::Call,
    retry::{Effect, Repeat},
    stub::{self, BROKEN, Stub},
};
use crate::wire::{BatchRequest, NackRequest, Receipt, ResetRequest, ResumeRequest, Trajectory};

fn receipt() -> serde_json::Value {
    json!({
        "policy": "default", "rollout_id": "r1", "group_id": "r1", "verdict": "kept", "reason": null,
        "duplicate": false, "execution_id": "e1", "warnings": [], "group": {"state": "open", "arrived": 1, "size": 1}
    })
}

fn sample(segment: i32) -> String {
    let row = json!({
        "rollout_id": "r1", "group_id": "r1", "segment": segment, "segments": 2, "kind": null, "environment": null,
        "verdict": "kept", "status": "completed", "tokens": [1, 2], "response_length": 1, "loss_mask": [1],
        "logprobs": null, "teacher_logprobs": null, "values": null, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
        "reward": 1.0, "advantage": 0.5, "loss_weight": 1.0, "policy_version": 0, "versions": null, "messages": null,
        "metadata": null
    });
    format!("{row}\n")
}

fn rows(body: &str) -> String {
    stub::with_body(200, "application/x-ndjson", "", body)
}

fn named() -> Trajectory {
    Trajectory { rollout_id: Some("r1".to_owned()), ..Trajectory::default() }
}

fn overloaded() -> String {
    stub::problem(503, "overloaded", "retry-after: 0\r\n")
}

#[tokio::test]
async fn call_is_repeated_when_the_service_is_overloaded() {
    let backlog = stub::problem(429, "backlog-full", "retry-after: 0\r\n");
    let stub = Stub::start([overloaded(), backlog, stub::json(201, &receipt())]).await;
    let receipt = stub.client().post(&Trajectory::default()).await.expect("the third attempt succeeds");
    assert_eq!(receipt.rollout_id, "r1");
    let requests = stub.requests();
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[0], requests[2]);
}

#[tokio::test]
async fn body_that_arrived_too_slowly_is_sent_again() {
    let stub = Stub::start([stub::problem(408, "body-timeout", ""), stub::json(201, &receipt())]).await;
    stub.client().post(&Trajectory::default()).await.expect("the second attempt succeeds");
    assert_eq!(stub.requests().len(), 2);
}

#[tokio::test]
async fn retry_after_longer_than_the_total_of_pauses_fails_at_once() {
    let stub = Stub::start([stub::problem(429, "backlog-full", "retry-after: 61\r\n")]).await;
    let error = stub.client().post(&named()).await.expect_err("the wait is too long");
    assert_eq!(error.kind(), Some("backlog-full"));
    assert_eq!(stub.requests().len(), 1);
}

#[tokio::test]
async fn retry_after_may_be_a_date() {
    // All three date formats of RFC 9110, each 61 seconds after the answer's own date.
    for date in ["Sun, 06 Nov 1994 08:49:37 GMT", "Sunday, 06-Nov-94 08:49:37 GMT", "Sun Nov  6 08:49:37 1994"] {
        let headers = format!("date: Sun, 06 Nov 1994 08:48:36 GMT\r\nretry-after: {date}\r\n");
        let stub = Stub::start([stub::problem(503, "overloaded", &headers)]).await;
        stub.client().post(&named()).await.expect_err("the wait is too long");
        assert_eq!(stub.requests().len(), 1, "{date}");
    }
    // A date in the past causes no wait.
    let over = stub::problem(503, "overloaded", "retry-after: Sun, 06 Nov 1994 08:49:37 GMT\r\n");
    let stub = Stub::start([over, stub::json(201, &receipt())]).await;
    stub.client().post(&named()).await.expect("the second attempt succeeds");
}

#[tokio::test]
async fn client_gives_up_after_its_last_attempt() {
    let stub = Stub::start([overloaded()]).await;
    let error = stub.client().post(&named()).await.expect_err("it is never accepted");
    assert_eq!(error.kind(), Some("overloaded"));
    assert_eq!(stub.requests().len(), 3);
}

#[tokio::test]
async fn no_retry_is_one_attempt() {
    let stub = Stub::start([overloaded()]).await;
    let client = stub.client().with_retry(RetryPolicy::none());
    client.post(&named()).await.expect_err("it is never accepted");
    assert_eq!(stub.requests().len(), 1);
}

#[tokio::test]
async fn refusal_is_surfaced_with_its_type() {
    let stub = Stub::start([stub::problem(409, "rollout-conflict", "")]).await;
    let error = stub.client().post(&named()).await.expect_err("it is refused");
    let problem = error.problem().expect("it is a problem document");
    assert_eq!((problem.kind.as_str(), problem.status), ("rollout-conflict", 409));
    assert_eq!(error.to_string(), "the service refused: Refused (rollout-conflict): for the test");
    assert_eq!(stub.requests().len(), 1);
}

#[tokio::test]
async fn post_with_a_rollout_id_is_repeated_after_the_connection_broke() {
    let stub = Stub::start([BROKEN.to_owned(), stub::json(200, &receipt())]).await;
    stub.client().post(&named()).await.expect("the second attempt succeeds");
    assert_eq!(stub.requests().len(), 2);
}

#[tokio::test]
async fn post_without_a_rollout_id_is_not_repeated_after_the_connection_broke() {
    let stub = Stub::start([BROKEN.to_owned(), stub::json(201, &receipt())]).await;
    let error = stub.client().post_bundle(&[named(), Trajectory::default()]).await.expect_err("the outcome is open");
    assert!(matches!(error, ClientError::Transport(_)), "{error:?}");
    assert_eq!(stub.requests().len(), 1);
}

#[tokio::test]
async fn post_without_a_rollout_id_is_not_repeated_when_its_outcome_is_unknown() {
    let gateway = stub::with_body(503, "text/html", "retry-after: 0\r\n", "<h1>Unavailable</h1>");
    for answer in [stub::problem(503, "store-unavailable", "retry-after: 0\r\n"), gateway] {
        let stub = Stub::start([answer]).await;
        stub.client().post(&Trajectory::default()).await.expect_err("the outcome is open");
        assert_eq!(stub.requests().len(), 1);
        stub.client().post(&named()).await.expect_err("it stays so");
        assert_eq!(stub.requests().len(), 4);
    }
}

#[tokio::test]
async fn any_post_is_repeated_when_no_connection_was_opened() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("loopback has a free port");
    let address = listener.local_addr().expect("the listener is bound");
    drop(listener);
    let client = Client::new(&format!("http://{address}")).expect("it is a URL");
    let call = Call::new(Method::POST, client.url(&["trajectories"], &[]), Repeat::UnlessBegun);
    let failure = call.value::<Receipt>(&client.http).await.expect_err("nobody listens");
    assert_eq!(failure.effect, Effect::NotBegun);
    assert!(call.repeat.allows(failure.effect));
}

#[tokio::test]
async fn lease_is_repeated_only_under_a_request_id() {
    let named = BatchRequest { request_id: Some("step-1".to_owned()), ..BatchRequest::default() };
    let stub = Stub::start([BROKEN.to_owned(), stub::json(200, &stub::batch("b1", Some("k1")))]).await;
    let batch = stub.client().lease(&named).await.expect("the second attempt succeeds").expect("there is a batch");
    assert_eq!(batch.lease.as_deref(), Some("k1"));

    let stub = Stub::start([BROKEN.to_owned()]).await;
    stub.client().lease(&BatchRequest::default()).await.expect_err("a repeat would take another batch");
    assert_eq!(stub.requests().len(), 1);
}

#[tokio::test]
async fn call_whose_repeat_would_be_refused_is_not_repeated() {
    let stub = Stub::start([BROKEN.to_owned()]).await;
    let client = stub.client();
    let nack = NackRequest { lease: "k1".to_owned(), reason: None, groups: None, epoch: None };
    client.nack("b1", &nack).await.expect_err("the outcome is open");
    client.reset("default", &ResetRequest::default()).await.expect_err("the outcome is open");
    client.close_group("default", "g1").await.expect_err("the outcome is open");
    let fenced = ResumeRequest { epoch: Some(1), ..ResumeRequest::default() };
    client.resume("default", &fenced).await.expect_err("the outcome is open");
    assert_eq!(stub.requests().len(), 4);
    client.resume("default", &ResumeRequest::default()).await.expect_err("it breaks each time");
    assert_eq!(stub.requests().len(), 7);
}

#[tokio::test]
async fn timeout_without_a_batch_or_version_returns_none() {
    let stub = Stub::start(["HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n".to_owned()]).await;
    let lease = stub.client().lease(&BatchRequest::default()).await.expect("it is no error");
    assert!(lease.is_none());
    let version = stub.client().wait_version_above("math.solver", 12, 30_000).await.expect("it is no error");
    assert!(version.is_none());
    assert!(
        stub.requests()[1].starts_with("GET /policies/math.solver?wait_version_above=12&wait_ms=30000 HTTP"),
        "{:?}",
        stub.requests()
    );
}

#[tokio::test]
async fn unknown_rollout_is_none_and_unknown_policy_is_an_error() {
    let stub = Stub::start([stub::problem(404, "not-found", ""), stub::problem(404, "unknown-policy", "")]).await;
    assert!(stub.client().story("default", "r1").await.expect("it is no error").is_none());
    let error = stub.client().story("default", "r1").await.expect_err("there is no such policy");
    assert_eq!(error.kind(), Some("unknown-policy"));
    assert!(stub.client().policy("default").await.expect("it is no error").is_none());
}

#[tokio::test]
async fn samples_are_all_rows() {
    let stub = Stub::start([rows(&format!("{}{}", sample(0), sample(1))), rows("")]).await;
    let samples = stub.client().samples("b1", &[]).await.expect("the stream is whole");
    assert_eq!(samples.iter().map(|row| row.segment).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(stub.client().samples_of_shard("b1", 1, 2).await.expect("the stream is whole").len(), 0);
    let requests = stub.requests();
    assert!(requests[0].contains("accept: application/x-ndjson\r\n"), "{requests:?}");
    assert!(requests[1].starts_with("GET /batches/b1/samples?shard=1&shards=2 HTTP"), "{requests:?}");
}

#[tokio::test]
async fn broken_stream_of_samples_is_an_error() {
    let row = sample(0);
    let (half, length) = (&row[..row.len() / 2], row.len());
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n";
    let short = format!("{head}content-length: {}\r\n\r\n{row}", 2 * length);
    let unterminated = format!("{head}transfer-encoding: chunked\r\n\r\n{length:x}\r\n{row}\r\n");
    let cases = [short, unterminated, rows(&format!("{row}{half}")), format!("{head}\r\n{row}"), rows("{}\n")];
    let mut errors = Vec::new();
    for answer in cases {
        let stub = Stub::start([answer]).await;
        let client = stub.client().with_retry(RetryPolicy::none());
        errors.push(client.samples("b1", &[]).await.expect_err("not all rows arrived"));
    }
    assert!(matches!(
        errors.as_slice(),
        [
            ClientError::Transport(_),
            ClientError::Transport(_),
            ClientError::Truncated { lines: 1 },
            ClientError::Undelimited,
            ClientError::Malformed { line: 1, .. },
        ]
    ));
}

#[tokio::test]
async fn broken_stream_of_samples_is_read_again_from_its_start() {
    let whole = format!("{}{}", sample(0), sample(1));
    let broken = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{}", whole.len(), sample(0));
    let stub = Stub::start([broken, rows(&whole)]).await;
    let samples = stub.client().samples("b1", &[]).await.expect("the second stream is whole");
    assert_eq!(samples.iter().map(|row| row.segment).collect::<Vec<_>>(), [0, 1]);
}

#[tokio::test]
async fn bulk_sends_a_line_per_trajectory() {
    let line = |number| format!("{}\n", json!({"line": number, "status": 201, "receipt": receipt()}));
    let stub = Stub::start([rows(&format!("{}{}", line(1), line(2))), rows(&line(1))]).await;
    let messages = RawValue::from_string("[\n{\"role\": \"user\\n\"}\r\n]".to_owned()).expect("it is JSON");
    let trajectories = [Trajectory { messages: Some(messages), ..named() }, named()];
    let lines = stub.client().post_bulk(&trajectories).await.expect("both are answered");
    assert_eq!(lines.iter().map(|line| line.line).collect::<Vec<_>>(), [1, 2]);
    let requests = stub.requests();
    let (head, body) = requests[0].split_once("\r\n\r\n").expect("the request has a head");
    assert!(head.contains("content-type: application/x-ndjson"), "{head}");
    assert_eq!(body.lines().count(), 2);
    assert!(body.contains(r#""messages":[ {"role": "user\n"}  ]"#), "{body}");

    let error = stub.client().post_bulk(&trajectories).await.expect_err("the second is not answered");
    assert!(matches!(error, ClientError::Incomplete { answers: 1, expected: 2 }), "{error:?}");
}

#[tokio::test]
async fn queries_are_escaped_and_base_paths_kept() {
    let page = json!({"trajectories": [], "next": null, "examined": 0});
    let stub = Stub::start([stub::json(200, &page)]).await;
    let client = Client::new(&format!("{}/forebay/", stub.base_url())).expect("it is a URL");
    client.stories("default", &[("group_id", "a&b=c d"), ("limit", "5")]).await.expect("it is a page");
    let requests = stub.requests();
    let line = requests[0].lines().next().unwrap_or_default();
    assert_eq!(line, "GET /forebay/trajectories?policy=default&group_id=a%26b%3Dc+d&limit=5 HTTP/1.1");
}

#[tokio::test]
async fn unexpected_answer_is_quoted_in_the_error() {
    let page = format!("<h1>Not here</h1>{}", "x".repeat(1_000));
    let stub = Stub::start([stub::with_body(404, "text/html", "", &page)]).await;
    match stub.client().batch("b1").await {
        Err(ClientError::Unexpected { status: 404, body }) => {
            assert!(body.starts_with("<h1>Not here</h1>"));
            assert_eq!(body.len(), 256);
        }
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn base_url_that_cannot_work_is_refused() {
    for url in ["ftp://forebay", "127.0.0.1:8080", "http://forebay/?a=b", "forebay", "mailto:a@b"] {
        assert!(matches!(Client::new(url), Err(ClientError::BaseUrl { .. })), "{url}");
    }
}
