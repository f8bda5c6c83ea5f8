//! Whether a template can be continued: a short conversation is rendered in parts and as a whole.

use super::{
    ExactError, Renderer,
    encode::Bounds,
    renderer::{Setting, message},
};
use crate::{
    cancel::Cancellation,
    completion::ToolCall,
    json,
    request::{Message, Request, Role, Tool},
};

/// How much of both texts is shown where they differ.
const SHOWN_CHARS: usize = 60;

/// What a renderer found out about its template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SelfTest {
    /// Whether the template renders results of tools. If it does not, conversations with tools are refused.
    pub has_tools: bool,
    /// Where a longer conversation does not begin with the prompt of a shorter one, if it does not. This is where an
    /// engine that renders every prompt anew breaks a conversation.
    pub difference: Option<Difference>,
}

/// Where two texts differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What the shorter conversation has.
    pub before: String,
    /// What the longer one has in its place.
    pub after: String,
}

pub(super) fn run(renderer: &Renderer) -> Result<SelfTest, ExactError> {
    let mut refusal = None;
    // Some templates refuse system messages, some refuse tools.
    for (has_system, has_tools) in [(true, true), (false, true), (true, false), (false, false)] {
        match check(renderer, has_system, has_tools) {
            Err(ExactError::Template(error)) => refusal = refusal.or(Some(error)),
            outcome => return outcome,
        }
    }
    Err(refusal.map_or_else(|| ExactError::SelfTest("no conversation was rendered".to_owned()), ExactError::Template))
}

/// Renders a conversation of six messages.
fn check(renderer: &Renderer, has_system: bool, has_tools: bool) -> Result<SelfTest, ExactError> {
    let reasoning = renderer.separates_reasoning().then(|| "I need the weather.".to_owned());
    let call =
        ToolCall { id: "call_1".to_owned(), name: "weather".to_owned(), arguments: r#"{"city": "Kyiv"}"#.to_owned() };
    let calls = if has_tools { vec![call] } else { Vec::new() };
    let tool = Tool::function("weather".to_owned(), vec![("parameters".to_owned(), json::raw(&serde_json::json!({})))]);
    let asks = Message { reasoning, tool_calls: calls.clone(), ..Message::text(Role::Assistant, "I look.") };
    let result = Message { tool_call_id: Some("call_1".to_owned()), ..Message::text(Role::Tool, "Rain.") };
    let result = if has_tools { result } else { Message::text(Role::User, "Rain.") };
    let mut messages: Vec<Message> = has_system.then(|| Message::text(Role::System, "You help.")).into_iter().collect();
    messages.push(Message::text(Role::User, "How is the weather?"));
    let first = messages.len();
    messages.extend([asks, result, Message::text(Role::Assistant, "It rains."), Message::text(Role::User, "Thanks.")]);
    let request = Request {
        model: String::new(),
        messages,
        tools: if has_tools { vec![tool] } else { Vec::new() },
        tool_choice: None,
        stream: false,
        stream_usage: false,
        max_tokens: None,
        stop: Vec::new(),
        sampling: Vec::new(),
        other: Vec::new(),
        warnings: Vec::new(),
        bytes: 0,
    };
    let never = Cancellation::default();
    let texts = &renderer.special().marked();
    let setting = Setting { request: &request, clock_s: 0, texts, bounds: Bounds::none(&never) };
    let whole = |count: usize| renderer.render(&setting, request.messages[..count].iter().map(message).collect());
    let encode = |text: &str| renderer.encode(text, &never);
    let (second, third) = (first + 2, first + 4);
    for (answer, end, calls) in [(first, second, &calls[..]), (second, third, &[])] {
        let text = whole(end)?;
        let suffix = renderer.suffix(&setting, &request.messages[answer + 1..end], calls)?;
        let Some(before) = text.strip_suffix(suffix.as_str()) else {
            let shown = format!("a prompt ends with {:?} instead of {suffix:?}", tail(&text, suffix.chars().count()));
            return Err(ExactError::SelfTest(shown));
        };
        let parts: Vec<i32> = [encode(before)?, encode(&suffix)?].concat();
        if parts != encode(&text)? {
            let shown = format!("the ids of {suffix:?} depend on the text before it");
            return Err(ExactError::SelfTest(shown));
        }
        let closes = renderer.family().close;
        let closes = closes.is_none_or(|close| encode(&suffix).is_ok_and(|ids| ids.first() == Some(&close)));
        if !closes {
            return Err(ExactError::SelfTest(format!(
                "{suffix:?} does not begin with the token that closes a message"
            )));
        }
    }
    Ok(SelfTest { has_tools, difference: difference(&whole(second)?, &whole(third)?) })
}

/// Where a longer text does not begin with a shorter one.
fn difference(shorter: &str, longer: &str) -> Option<Difference> {
    if longer.starts_with(shorter) {
        return None;
    }
    let common = shorter.char_indices().zip(longer.chars()).find(|((_, one), other)| one != other);
    let at = common.map_or(shorter.len().min(longer.len()), |((at, _), _)| at);
    let shown = |text: &str| text[at..].chars().take(SHOWN_CHARS).collect();
    Some(Difference { before: shown(shorter), after: shown(longer) })
}

fn tail(text: &str, chars: usize) -> &str {
    let start = text.char_indices().rev().nth(chars.saturating_sub(1)).map_or(0, |(start, _)| start);
    &text[start..]
}
