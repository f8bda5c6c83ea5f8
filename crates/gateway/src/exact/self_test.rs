//! Whether a template can be continued: a short conversation is rendered in parts and as a whole.

use serde_json::value::RawValue;

use super::{
    encode::Bounds,
    error::ExactError,
    renderer::{Renderer, Setting},
};
use crate::{
    cancel::Cancellation,
    completion::ToolCall,
    dialect::ClientTools,
    json,
    request::{Content, Message, Request, Role, Tool, Warnings},
    system::LaterSystem,
    upstream::probe::{SYSTEM_TEXTS, system_conversation},
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
    /// What becomes of system messages behind the first message, so that the template renders them.
    pub later_system: LaterSystem,
}

/// Where two texts differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// What the shorter conversation has, or the renderer.
    pub before: String,
    /// What the longer one has in its place, or the engine.
    pub after: String,
}

pub(super) fn run(renderer: &Renderer) -> Result<SelfTest, ExactError> {
    let mut refusal = None;
    // Some templates refuse system messages, some refuse tools.
    for (has_system, has_tools) in [(true, true), (false, true), (true, false), (false, false)] {
        match check(renderer, has_system, has_tools) {
            Err(ExactError::Template(error)) => refusal = refusal.or(Some(error)),
            outcome => return Ok(SelfTest { later_system: later_system(renderer), ..outcome? }),
        }
    }
    Err(refusal.map_or_else(|| ExactError::SelfTest("no conversation was rendered".to_owned()), ExactError::Template))
}

/// A conversation of six messages, and the place of its first answer.
fn conversation(renderer: &Renderer, has_system: bool, has_tools: bool) -> (Request, usize) {
    let reasoning = renderer.separates_reasoning().then(|| "I need the weather.".to_owned());
    let call =
        ToolCall { id: "call_1".to_owned(), name: "weather".to_owned(), arguments: r#"{"city": "Kyiv"}"#.to_owned() };
    let calls = if has_tools { vec![call] } else { Vec::new() };
    let tool = Tool::function("weather".to_owned(), vec![("parameters".to_owned(), json::raw(&serde_json::json!({})))]);
    let asks = Message { reasoning, tool_calls: calls, ..Message::text(Role::Assistant, "I look.") };
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
        client_tools: ClientTools::default(),
        warnings: Warnings::default(),
        image: None,
        instructions: 0,
        bytes: 0,
    };
    (request, first)
}

/// Conversations whose prompts an engine is asked for, because engines differ there: a text in parts, results of tools, and
/// arguments that are no object. An engine may refuse tools, so one has none.
pub(super) fn odd(renderer: &Renderer) -> Vec<Request> {
    let parts = r#"[{"type": "text", "text": "How is"}, {"type": "text", "text": "the weather? 天气"}]"#;
    let has_tools = renderer.self_test().has_tools;
    let odd = |has_tools: bool| {
        let (mut request, first) = conversation(renderer, false, has_tools);
        let question = &mut request.messages[first - 1];
        question.content = Content::Parts(RawValue::from_string(parts.to_owned()).expect("it is JSON"));
        (request, first)
    };
    let (whole, first) = odd(has_tools);
    let mut begun = Request { messages: whole.messages[..first + 2].to_vec(), ..whole.clone() };
    for call in begun.messages.iter_mut().flat_map(|message| &mut message.tool_calls) {
        "Kyiv".clone_into(&mut call.arguments);
    }
    vec![whole, begun, odd(false).0]
}

/// Renders a conversation of six messages.
fn check(renderer: &Renderer, has_system: bool, has_tools: bool) -> Result<SelfTest, ExactError> {
    let (request, first) = conversation(renderer, has_system, has_tools);
    let calls = request.messages[first].tool_calls.clone();
    let never = Cancellation::default();
    let texts = &renderer.special().marked();
    let setting = Setting { request: &request, clock_s: 0, texts, bounds: Bounds::none(&never) };
    let whole = |count: usize| renderer.render(&setting, &request.messages[..count]);
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
    let difference = difference(&whole(second)?, &whole(third)?);
    Ok(SelfTest { has_tools, difference, later_system: LaterSystem::default() })
}

/// How a template renders all system messages. One that renders none in either way gets them as they are, because its
/// refusal tells the agent what is wrong.
fn later_system(renderer: &Renderer) -> LaterSystem {
    let renders_all = |later: &LaterSystem| {
        let request = later.applied(system_conversation());
        let never = Cancellation::default();
        let texts = &renderer.special().marked();
        let setting = Setting { request: &request, clock_s: 0, texts, bounds: Bounds::none(&never) };
        renderer
            .render(&setting, &request.messages)
            .is_ok_and(|text| SYSTEM_TEXTS.iter().all(|rule| text.contains(rule)))
    };
    [LaterSystem::Keep, LaterSystem::User].into_iter().find(renders_all).unwrap_or_default()
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
