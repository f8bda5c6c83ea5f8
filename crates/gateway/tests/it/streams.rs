//! What the events of all dialects have in common.

use forebay_gateway::{
    Completion, Dialect, DialectError,
    completion::{AssistantMessage, Finish},
    dialect::{Events, SseEvent},
};
use serde_json::{Value, json};

use crate::{
    sse::read_events,
    support::{DIALECTS, LATE, completion, envelope, full_message, late_events, pieces, tool_call},
};

/// Whether a client may do something because of this event.
fn invites_action(event: &SseEvent) -> bool {
    // A call may have begun. These events complete it.
    let completes_call = match event.event {
        // The blocks before are the one that the signs of life have opened, the thought and the text.
        Some("content_block_stop") => event.data.contains("\"index\":3"),
        Some("response.output_item.done") => event.data.contains("function_call"),
        _ => false,
    };
    let words = [
        "response.function_call_arguments.done",
        "\"finish_reason\":\"",
        "[DONE]",
        "\"stop_reason\":\"",
        "message_stop",
        "response.completed",
    ];
    completes_call || words.iter().any(|word| event.data.contains(word))
}

#[test]
fn a_sign_of_life_is_an_event_that_nobody_acts_on() {
    for dialect in DIALECTS {
        let mut events = Events::new(dialect);
        for _ in 0..3 {
            let signs = events.alive(&envelope());
            assert!(!signs.is_empty(), "{dialect:?}");
            for sign in signs {
                assert!(!invites_action(&sign), "{dialect:?}: {sign:?}");
                assert!(sign.event != Some("ping"), "clients do not count it");
            }
        }
        for piece in pieces(&full_message()) {
            for event in events.piece(&piece, &envelope()) {
                assert!(!invites_action(&event), "{dialect:?}: {event:?}");
            }
        }
        let last = events.error(&DialectError::Internal, &envelope());
        assert!(!invites_action(&last), "{dialect:?}: {last:?}");
    }
}

#[test]
fn the_last_event_is_there_once_and_last() {
    for dialect in DIALECTS {
        for (signs, pieces) in LATE {
            let events = late_events(dialect, &completion(full_message()), signs, pieces);
            let is_last = |event: &SseEvent| {
                event.data == "[DONE]" || matches!(event.event, Some("message_stop" | "response.completed"))
            };
            let places: Vec<usize> = (0..events.len()).filter(|&place| is_last(&events[place])).collect();
            assert_eq!(places, [events.len() - 1], "{dialect:?}");
        }
    }
}

/// The bound of tokens has cut the arguments, of which a part was sent.
#[test]
fn half_a_call_can_be_told_from_a_whole_one() {
    let half = r#"{"command": "rm -r /tmp/o"#;
    let message = AssistantMessage { tool_calls: vec![tool_call("c", "bash", half)], ..full_message() };
    let cut = Completion { finish: Finish::Length, ..completion(message) };
    for dialect in DIALECTS {
        let events = late_events(dialect, &cut, 0, 65);
        let seen = read_events(&events);
        let seen: Vec<Value> = seen.iter().filter_map(|event| serde_json::from_str(&event.data).ok()).collect();
        let texts = |at: &str| -> String { seen.iter().filter_map(|data| data.pointer(at)?.as_str()).collect() };
        match dialect {
            Dialect::Chat => {
                assert_eq!(texts("/choices/0/delta/tool_calls/0/function/arguments"), half);
                assert_eq!(texts("/choices/0/finish_reason"), "length");
            }
            // An object that has not the beginning of the command.
            Dialect::Messages => {
                assert_eq!(texts("/delta/partial_json"), json!({"invalid_arguments": half}).to_string());
                assert_eq!(texts("/delta/stop_reason"), "max_tokens");
            }
            Dialect::Responses => {
                let done = seen.iter().rfind(|data| data["type"] == "response.output_item.done").expect("the call");
                assert_eq!((&done["item"]["status"], &done["item"]["arguments"]), (&json!("incomplete"), &json!(half)));
                assert_eq!(seen.last().expect("the end")["response"]["output"][2], done["item"]);
            }
        }
    }
}
