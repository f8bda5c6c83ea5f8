//! What agents are told when a call cannot be answered.

use forebay_gateway::{
    Dialect, DialectError,
    dialect::{ErrorReply, Events},
};
use serde_json::Value;

use crate::{
    sse::read,
    support::{DIALECTS, envelope},
};

fn header<'a>(reply: &'a ErrorReply, name: &str) -> Option<&'a str> {
    reply.headers.iter().find(|(found, _)| *found == name).map(|(_, value)| value.as_str())
}

fn body(reply: &ErrorReply) -> Value {
    serde_json::from_slice(&reply.body).expect("an error is JSON")
}

/// One error of each kind, with its status.
fn all() -> Vec<(DialectError, u16)> {
    let why = || "because".to_owned();
    vec![
        (DialectError::Invalid { field: "messages".to_owned(), why: why() }, 400),
        (DialectError::Unsupported { field: "messages".to_owned(), why: why() }, 422),
        (DialectError::too_long(300, 200), 400),
        (DialectError::Closed { why: why() }, 400),
        (DialectError::Unauthorized, 401),
        (DialectError::NotFound { what: "the session".to_owned() }, 404),
        (DialectError::BodyTooLarge { bytes_max: 9 }, 413),
        (DialectError::Busy { why: why(), retry_after_s: 7 }, 503),
        (DialectError::Untrusted { why: why() }, 502),
        (DialectError::Upstream { why: why() }, 502),
        (DialectError::Refused { why: why() }, 400),
        (DialectError::Internal, 500),
    ]
}

#[test]
fn every_error_says_whether_to_repeat() {
    for (error, status) in all() {
        for dialect in DIALECTS {
            let reply = dialect.error(&error);
            assert_eq!(reply.status, status, "{error}");
            let expected = if status >= 500 { "true" } else { "false" };
            assert_eq!(header(&reply, "x-should-retry"), Some(expected), "{error}");
            assert_eq!(header(&reply, "retry-after").is_some(), status >= 500, "{error}");
            if let DialectError::Busy { retry_after_s, .. } = &error {
                assert_eq!(header(&reply, "retry-after"), Some(retry_after_s.to_string().as_str()));
            }
            assert!(![408, 409, 429].contains(&reply.status), "clients would repeat {error}");
            assert!(body(&reply)["error"]["message"].is_string());
        }
    }
}

#[test]
fn errors_of_chat_completions_have_openais_shape() {
    let invalid = body(&Dialect::Chat.error(&all()[0].0));
    assert_eq!(invalid["error"]["type"], "invalid_request_error");
    assert_eq!(invalid["error"]["param"], "messages");
    let long = body(&Dialect::Chat.error(&DialectError::too_long(300, 200)));
    assert_eq!(long["error"]["code"], "context_length_exceeded");
    assert!(long["error"]["message"].as_str().is_some_and(|text| text.contains("maximum context length")));
    let untrusted = body(&Dialect::Chat.error(&all()[8].0));
    assert_eq!(untrusted["error"]["code"], "upstream-untrusted");
    assert_eq!(untrusted["error"]["type"], "server_error");
}

#[test]
fn errors_of_messages_have_anthropics_shape() {
    let kinds = all().into_iter().map(|(error, _)| body(&Dialect::Messages.error(&error))["error"]["type"].clone());
    let expected = [
        "invalid_request_error",
        "invalid_request_error",
        "invalid_request_error",
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "overloaded_error",
        "api_error",
        "api_error",
        "invalid_request_error",
        "api_error",
    ];
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    let long = body(&Dialect::Messages.error(&DialectError::too_long(300, 200)));
    assert_eq!(long["type"], "error");
    assert_eq!(long["error"]["message"], "prompt is too long: 300 tokens > 200 maximum");
    let event = Events::new(Dialect::Messages).error(&DialectError::Internal, &envelope());
    assert_eq!(event.event, Some("error"));
}

#[test]
fn an_error_in_a_stream_is_its_last_event() {
    let event = Events::new(Dialect::Chat).error(&DialectError::Internal, &envelope());
    let seen = read(&event.encode());
    assert_eq!(seen.len(), 1);
    assert_eq!(seen[0].json()["error"]["code"], "internal");
}
