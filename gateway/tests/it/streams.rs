//! What the events of all dialects have in common.

use forebay_gateway::{completion::AssistantMessage, dialect::SseEvent};

use crate::support::{DIALECTS, completion, events, full_message};

/// Whether a client may do something because of this event.
fn invites_action(event: &SseEvent) -> bool {
    let words = [
        "\"tool_calls\"",
        "\"type\":\"tool_use\"",
        "\"type\":\"function_call\"",
        "\"finish_reason\":\"",
        "[DONE]",
        "\"stop_reason\":\"",
        "message_stop",
        "response.completed",
    ];
    words.iter().any(|word| event.data.contains(word))
}

#[test]
fn nothing_that_an_agent_acts_on_comes_before_the_commit() {
    let text = AssistantMessage { content: Some("a".to_owned()), ..AssistantMessage::default() };
    for dialect in DIALECTS {
        for completion in
            [completion(full_message()), completion(text.clone()), completion(AssistantMessage::default())]
        {
            let events = events(dialect, &completion);
            let first = events.iter().position(|event| event.after_commit).expect("the end waits for the commit");
            assert!(first > 0, "{dialect:?}: something can be sent before");
            assert!(events[first..].iter().all(|event| event.after_commit), "{dialect:?}");
            for event in &events[..first] {
                assert!(!invites_action(event), "{dialect:?}: {event:?}");
            }
        }
    }
}

#[test]
fn the_last_event_is_there_once_and_last() {
    for dialect in DIALECTS {
        let events = events(dialect, &completion(full_message()));
        let is_last = |event: &SseEvent| {
            event.data == "[DONE]" || matches!(event.event, Some("message_stop" | "response.completed"))
        };
        let places: Vec<usize> = (0..events.len()).filter(|&place| is_last(&events[place])).collect();
        assert_eq!(places, [events.len() - 1], "{dialect:?}");
    }
}
