//! The label of the agent that makes a call.

use forebay_gateway::lineage::AgentLabel;
use http::{HeaderMap, HeaderName, HeaderValue};

fn label(headers: &[(&'static str, &str)]) -> Option<String> {
    let headers: HeaderMap = headers
        .iter()
        .map(|(name, value)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).expect("the value is a header's"))
        })
        .collect();
    AgentLabel::of(&headers).map(|label| label.as_str().to_owned())
}

#[test]
fn sub_agents_and_upkeep_have_labels_of_their_own() {
    let codex = |fields: &str| label(&[("x-codex-turn-metadata", fields)]);
    let cases = [
        (label(&[]), None),
        (label(&[("x-claude-code-session-id", "s")]), Some("main")),
        (
            label(&[
                ("x-claude-code-session-id", "s"),
                ("x-claude-code-agent-id", "a7"),
                ("x-claude-code-parent-agent-id", "p"),
            ]),
            Some("agent:a7"),
        ),
        (
            codex(r#"{"session_id":"s","thread_id":"t","turn_id":"1","agent_name":"/root","window_number":2}"#),
            Some("main"),
        ),
        (
            codex(r#"{"thread_id":"t2","parent_thread_id":"t","thread_source":"subagent","subagent_kind":"run"}"#),
            Some("agent:t2"),
        ),
        (codex(r#"{"thread_id":"t3","thread_source":"subagent","subagent_kind":"compact"}"#), Some("compact:t3")),
        (codex("no json"), None),
        (label(&[("x-openai-subagent", "review")]), Some("agent:review")),
        (label(&[("x-openai-subagent", "compact")]), Some("compact:compact")),
        (label(&[("x-session-id", "ses_1")]), Some("main")),
        (label(&[("x-session-id", "ses_2"), ("x-parent-session-id", "ses_1")]), Some("agent:ses_2")),
    ];
    for (index, (found, expected)) in cases.into_iter().enumerate() {
        assert_eq!(found.as_deref(), expected, "case {index}");
    }
}

#[test]
fn a_label_is_bounded() {
    let found = label(&[("x-claude-code-agent-id", &"a".repeat(10_000))]).expect("it has a label");
    assert!(found.len() <= 256, "{}", found.len());
    let words =
        format!(r#"{{"thread_id":"{0}","thread_source":"subagent","subagent_kind":"{0}"}}"#, "\\u00e9".repeat(500));
    let found = label(&[("x-codex-turn-metadata", &words)]).expect("it has a label");
    assert!(found.len() <= 256, "{}", found.len());
}
