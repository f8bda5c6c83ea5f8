//! System messages for chat templates that take only one.
//!
//! Templates of Qwen 3.5 and later raise an error if a system message is not the first message, and others leave it out
//! of the prompt. Agents send such messages: Claude Code has one behind the first question. Other templates render them
//! well, and their prompts stay as they are, because a policy is served with the prompts that it was trained with.

use serde_json::json;

use crate::{
    json::{Item, raw},
    request::{Content, Message, Request, Role},
};

/// What becomes of system messages that are not the first message of a conversation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaterSystem {
    /// They stay as the agent sent them.
    #[default]
    Keep,
    /// Those at the beginning become one message, and the others become messages of the user.
    User,
}

impl LaterSystem {
    /// The request as a template gets it.
    #[must_use]
    pub fn applied(self, request: Request) -> Request {
        match self {
            Self::Keep => request,
            Self::User => Request { messages: one_system(request.messages), ..request },
        }
    }
}

/// What stands between the texts of system messages that become one.
const BETWEEN: &str = "\n\n";

/// Takes instructions of so many bytes from the first message, which may have other texts of the system behind them.
pub fn without_instructions(messages: &mut Vec<Message>, bytes: usize) {
    let Some(Message { content: Content::Text(text), .. }) = messages.first_mut().filter(|_| bytes > 0) else { return };
    let rest = text.get(bytes..).unwrap_or_default();
    let rest = rest.strip_prefix(BETWEEN).unwrap_or(rest).to_owned();
    if rest.is_empty() {
        messages.remove(0);
    } else {
        *text = rest;
    }
}

fn one_system(mut messages: Vec<Message>) -> Vec<Message> {
    let is_system = |message: &Message| matches!(message.role, Role::System | Role::Developer);
    let leading = messages.iter().take_while(|message| is_system(message)).count();
    for later in messages[leading..].iter_mut().filter(|message| is_system(message)) {
        later.role = Role::User;
    }
    if leading > 1 {
        let content = joined(messages[..leading].iter().map(|message| &message.content));
        messages.drain(1..leading);
        messages[0].content = content;
    }
    messages
}

/// The contents of several messages as one: a text if all are texts, else a list of parts, which engines join in their
/// own way.
fn joined<'a>(contents: impl Iterator<Item = &'a Content>) -> Content {
    let (mut texts, mut parts) = (Vec::new(), Vec::new());
    for content in contents {
        match content {
            Content::Absent => {}
            Content::Text(text) if text.is_empty() => {}
            Content::Text(text) => {
                texts.push(text.as_str());
                parts.push(raw(&json!({"type": "text", "text": text})));
            }
            Content::Parts(list) => {
                let read = Item::field("content", list).each(|part| {
                    parts.push(part.to_raw());
                    Ok(())
                });
                debug_assert!(read.is_ok(), "the dialects have checked the parts: {read:?}");
            }
        }
    }
    if texts.len() == parts.len() { Content::Text(texts.join(BETWEEN)) } else { Content::Parts(raw(&parts)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dialect, json::text};

    fn sent(later: LaterSystem, messages: &serde_json::Value) -> Vec<(Role, String)> {
        let body = json!({"model": "m", "messages": messages}).to_string();
        let request = later.applied(Dialect::Chat.parse(body.as_bytes()).expect("the body is right"));
        request.messages.iter().map(|message| (message.role, text(&message.content))).collect()
    }

    fn said(role: Role, content: &str) -> (Role, String) {
        (role, content.to_owned())
    }

    #[test]
    fn leading_system_messages_become_one_and_later_ones_are_of_the_user() {
        let messages = json!([
            {"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, {"role": "user", "content": "hi"},
            {"role": "system", "content": "C"}, {"role": "assistant", "content": "Yes."},
            {"role": "developer", "content": "D"},
        ]);
        assert_eq!(
            sent(LaterSystem::User, &messages),
            [
                said(Role::System, "\"A\\n\\nB\""),
                said(Role::User, "\"hi\""),
                said(Role::User, "\"C\""),
                said(Role::Assistant, "\"Yes.\""),
                said(Role::User, "\"D\""),
            ]
        );
        assert_eq!(sent(LaterSystem::Keep, &messages).len(), 6);
        assert_eq!(sent(LaterSystem::Keep, &messages)[5], said(Role::Developer, "\"D\""));
    }

    #[test]
    fn instructions_are_taken_from_the_message_that_they_became_a_part_of() {
        let left = |texts: &[&str], bytes: usize| {
            let said = texts.iter().map(|text| Message::text(Role::System, *text));
            let mut messages = one_system(said.chain([Message::text(Role::User, "hi")]).collect());
            without_instructions(&mut messages, bytes);
            messages.iter().map(|message| text(&message.content)).collect::<Vec<_>>()
        };
        assert_eq!(left(&["One.", "Two."], 4), ["\"Two.\"", "\"hi\""]);
        assert_eq!(left(&["One."], 4), ["\"hi\""]);
        assert_eq!(left(&["One."], 0), ["\"One.\"", "\"hi\""]);
    }

    #[test]
    fn parts_of_leading_system_messages_stay_parts() {
        let part = |text: &str| json!({"type": "text", "text": text});
        let system = |content: serde_json::Value| json!({"role": "system", "content": content});
        let user = json!({"role": "user", "content": "hi"});
        let merged = |contents: &[serde_json::Value]| {
            let messages = contents.iter().cloned().map(system).chain([user.clone()]).collect();
            sent(LaterSystem::User, &messages)[0].1.clone()
        };
        let parts = json!([part("A"), part("B"), part("C")]).to_string();
        assert_eq!(merged(&[json!([part("A")]), json!("B"), json!(""), json!([part("C")])]), parts);
        assert_eq!(merged(&[json!([part("A"), part("B"), part("C")])]), parts, "one message stays as it is");
        assert_eq!(merged(&[json!(""), json!("B")]), "\"B\"");
    }
}
