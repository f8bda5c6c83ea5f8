//! What the events of all dialects have in common.

use forebay_gateway::{
    DialectError,
    completion::Piece,
    dialect::{Events, SseEvent},
};

use crate::support::{DIALECTS, LATE, completion, envelope, full_message, late_events};

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
        for piece in [Piece::Reasoning("t".to_owned()), Piece::Text("a".to_owned())] {
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
