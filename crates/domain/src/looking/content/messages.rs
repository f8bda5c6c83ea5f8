//! A page of the chat messages of a rollout, taken out of their array without parsing them.

use std::fmt;

use forebay_wire::{ContentMessage, MessagePage};
use serde::{
    Deserialize, Deserializer as _,
    de::{SeqAccess, Visitor},
};
use serde_json::value::RawValue;

use super::Part;

/// Bytes of the messages of a page.
const PAGE_BYTES: usize = 1 << 20;

/// A longer message is left out, unless it is asked for alone.
const MESSAGE_BYTES_MAX: usize = 256 << 10;

/// A longer `role` is left out with its message.
const ROLE_BYTES_MAX: usize = 256;

/// Reads a page of an array of messages.
pub fn page(messages: &RawValue, part: Part) -> Result<MessagePage, serde_json::Error> {
    let mut reader = serde_json::Deserializer::from_str(messages.get());
    let page = reader.deserialize_seq(Pages { from: part.messages_from, limit: part.messages_limit })?;
    reader.end().map(|()| page)
}

/// Reads messages one after the other, and keeps those of the page: an array may have millions of them.
struct Pages {
    from: u64,
    limit: u64,
}

impl<'de> Visitor<'de> for Pages {
    type Value = MessagePage;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<MessagePage, A::Error> {
        let mut page = MessagePage { count: 0, from: self.from, items: Vec::new(), next: None };
        let mut bytes = 0;
        while let Some(message) = messages.next_element::<&RawValue>()? {
            let index = page.count;
            page.count += 1;
            if index < self.from || page.next.is_some() {
                continue;
            }
            let item = item(index, message, self.limit == 1);
            bytes += item.message.as_ref().map_or(0, |message| message.get().len());
            let is_full = page.items.len() as u64 >= self.limit || (bytes > PAGE_BYTES && !page.items.is_empty());
            if is_full {
                page.next = Some(index);
            } else {
                page.items.push(item);
            }
        }
        page.from = page.from.min(page.count);
        Ok(page)
    }
}

fn item(index: u64, message: &RawValue, is_alone: bool) -> ContentMessage {
    let bytes = message.get().len();
    let is_shown = is_alone || bytes <= MESSAGE_BYTES_MAX;
    ContentMessage {
        index,
        bytes: bytes as u64,
        message: is_shown.then(|| message.to_owned()),
        role: if is_shown { None } else { role(message) },
    }
}

/// The role of a message that is left out.
fn role(message: &RawValue) -> Option<String> {
    #[derive(Deserialize)]
    struct Role<'a> {
        #[serde(borrow)]
        role: Option<&'a RawValue>,
    }
    let role = serde_json::from_str::<Role<'_>>(message.get()).ok()?.role?;
    (role.get().len() <= ROLE_BYTES_MAX).then(|| serde_json::from_str(role.get()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(messages: &Value, from: u64, limit: u64) -> MessagePage {
        let raw = serde_json::value::to_raw_value(messages).expect("it is JSON");
        let part = Part { segment: 0, from: 0, limit: 0, messages_from: from, messages_limit: limit };
        page(&raw, part).expect("it is an array")
    }

    fn indices(page: &MessagePage) -> Vec<u64> {
        page.items.iter().map(|item| item.index).collect()
    }

    #[test]
    fn pages_follow_each_other() {
        let messages = json!([{"role": "user"}, 1, "two", null, []]);
        let first = read(&messages, 0, 2);
        assert_eq!((indices(&first), first.count, first.next), (vec![0, 1], 5, Some(2)));
        assert_eq!(first.items[0].message.as_ref().map(|message| message.get()), Some(r#"{"role":"user"}"#));
        let last = read(&messages, 2, 100);
        assert_eq!((indices(&last), last.next), (vec![2, 3, 4], None));
        let none = read(&messages, 9, 100);
        assert_eq!((none.from, none.count, none.next, indices(&none)), (5, 5, None, vec![]));
        let counted = read(&messages, 0, 0);
        assert_eq!((counted.count, counted.next, indices(&counted)), (5, Some(0), vec![]));
    }

    #[test]
    fn a_long_message_is_left_out_unless_it_is_asked_for_alone() {
        let long = json!({"content": "x".repeat(MESSAGE_BYTES_MAX), "role": "tool"});
        let messages = json!([{"role": "user"}, long, {"role": "assistant"}]);
        let page = read(&messages, 0, 100);
        assert_eq!(indices(&page), [0, 1, 2]);
        assert!(page.items[1].message.is_none() && page.items[1].bytes > MESSAGE_BYTES_MAX as u64);
        assert_eq!(page.items[1].role.as_deref(), Some("tool"));
        let alone = read(&messages, 1, 1);
        assert_eq!((indices(&alone), alone.next), (vec![1], Some(2)));
        assert_eq!(alone.items[0].message.as_ref().map(|message| message.get()), Some(long.to_string().as_str()));
        // A role that is not a text, or not there, is none.
        for role in [json!({"role": 7}), json!({}), json!({"role": "r".repeat(300)})] {
            let mut long = role.as_object().expect("an object").clone();
            long.insert("content".to_owned(), "x".repeat(MESSAGE_BYTES_MAX).into());
            assert_eq!(read(&json!([long]), 0, 2).items[0].role, None);
        }
    }

    #[test]
    fn a_page_ends_when_its_bytes_are_used_up() {
        let messages = Value::Array(vec![json!("x".repeat(200 << 10)); 12]);
        let (mut from, mut sizes) = (0, Vec::new());
        loop {
            let page = read(&messages, from, 1_000);
            sizes.push(page.items.len());
            match page.next {
                Some(next) => from = next,
                None => break,
            }
        }
        assert_eq!(sizes, [5, 5, 2]);
    }
}
