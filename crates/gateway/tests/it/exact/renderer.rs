//! Templates that can be continued, and templates that cannot.

use forebay_fake_engine::{
    EngineKind,
    tokenizer::{decode, encode},
};
use forebay_gateway::{
    Dialect, DialectError,
    cancel::Cancellation,
    canonical::{Canonical, Paths},
    completion::AssistantMessage,
    exact::{Family, Renderer, RendererOptions},
    system::LaterSystem,
    upstream::SpecialTokensInText,
};
use serde_json::json;

use super::{family, renderer, renderer_with, user};
use crate::support::{parsed, question};

#[test]
fn a_renderer_says_where_its_template_breaks_conversations() {
    let found = renderer().self_test().clone();
    assert!(found.has_tools);
    let difference = found.difference.expect("the reasoning of earlier answers is dropped");
    assert!(difference.before.starts_with("<think>"), "{difference:?}");
    assert!(difference.after.starts_with("I look."), "{difference:?}");
    let keeps = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
                 {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let found = renderer_with(Some(keeps), family()).expect("the template fits").self_test().clone();
    assert_eq!(found.difference, None);
}

#[test]
fn a_renderer_says_which_system_messages_its_template_takes() {
    let messages = |head: &str, shown: &str| {
        let text = format!(
            "{head}{{% for m in messages %}}{{% if {shown} %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n\
             {{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
        );
        renderer_with(Some(&text), family()).expect("the template fits").self_test().later_system
    };
    let refuses = |condition: &str| {
        let head = "{% for m in messages %}{% if m.role == 'system' and CONDITION %}{{ raise_exception('no') }}{% endif %}\
                    {% endfor %}";
        messages(&head.replace("CONDITION", condition), "true")
    };
    assert_eq!(renderer().self_test().later_system, LaterSystem::Keep);
    assert_eq!(messages("", "true"), LaterSystem::Keep);
    assert_eq!(refuses("not loop.first"), LaterSystem::User);
    assert_eq!(
        messages("", "m.role != 'system' or loop.first"),
        LaterSystem::User,
        "others are left out of the prompt"
    );
    assert_eq!(refuses("true"), LaterSystem::Keep, "the refusal tells the agent what is wrong");
}

#[test]
fn a_template_that_cannot_be_continued_is_refused() {
    let refused = |template: Option<&str>, family: Family| match renderer_with(template, family) {
        Ok(_) => panic!("the renderer is refused"),
        Err(error) => error.to_string(),
    };
    let plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    assert!(refused(Some(plain), family()).contains("do not fit each other"));
    let unknown = Family { close: Some("<|end|>".to_owned()), ..family() };
    assert!(refused(None, unknown).contains("\"<|end|>\""));
    let other = Family { close: Some("</think>".to_owned()), ..family() };
    assert!(refused(None, other).contains("do not fit each other"));
    assert!(refused(None, Family { close: None, ..family() }).contains("close"));
    assert!(refused(Some("{% for %}"), family()).contains("cannot be used"));
    assert!(refused(Some("{{ raise_exception('never') }}"), family()).contains("never"));
    // A template that counts messages from the end renders an answer differently when more follows.
    let counts = "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n\
                  {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {{ messages | length }}\n{% endif %}";
    assert!(refused(Some(counts), family()).contains("instead of"));
    let missing = Renderer::load(&RendererOptions {
        tokenizer: "none.json".into(),
        template: None,
        family: family(),
        special_tokens_in_text: SpecialTokensInText::Allow,
        kind: EngineKind::Sglang,
    });
    assert!(missing.expect_err("there is no file").to_string().contains("none.json"));
}

#[test]
fn tokens_without_a_place_in_the_conversation_are_replaced() {
    let paths = |ids: &[i32]| {
        let request = question("Start.");
        let mut paths = Paths::default();
        let record = paths.history().record(&Canonical::of(&request));
        let said = AssistantMessage { content: Some("Yes.".to_owned()), ..AssistantMessage::default() };
        paths.add(1, &record, &encode("<|im_start|>user\nStart."), ids, &said).expect("the record fits");
        paths
    };
    let next = json!([user("Start."), {"role": "assistant", "content": "Yes."}, user("More.")]);
    let next = parsed(Dialect::Chat, &json!({"model": "m", "messages": next}));
    let rest = "<|im_end|>\n<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n";
    let prompt = |ids: &[i32], family: Family| {
        let continued = paths(ids).continued(&Canonical::of(&next)).expect("the request continues the call");
        let renderer = renderer_with(None, family).expect("the family fits");
        decode(&renderer.prompt(&next, 0, Some(&continued), &Cancellation::default()).expect("it can be rendered").ids)
    };
    let trims = Family { trims: vec!["</think>".to_owned()], ..family() };
    let begun = "<|im_start|>user\nStart.Yes.";
    assert_eq!(prompt(&encode("Yes.</think>"), trims.clone()), format!("{begun}{rest}"));
    assert_eq!(prompt(&encode("Yes.</think>"), family()), format!("{begun}</think>{rest}"));
    assert_eq!(prompt(&encode("Yes.<|im_end|>"), trims), format!("{begun}{rest}"));
    assert_eq!(prompt(&[], family()), format!("<|im_start|>user\nStart.{rest}"));
    // Messages that have only an opening token: it ends the answer, and belongs to the next message.
    let opening = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}<|im_start|>assistant\n";
    let family = Family { stops: vec!["<|im_start|>".to_owned()], close: None, trims: vec!["<|im_start|>".to_owned()] };
    let renderer = renderer_with(Some(opening), family).expect("the family fits");
    let continued = paths(&encode("Yes.<|im_start|>")).continued(&Canonical::of(&next)).expect("it continues the call");
    let prompt = renderer.prompt(&next, 0, Some(&continued), &Cancellation::default()).expect("it can be rendered");
    assert_eq!(decode(&prompt.ids), format!("{begun}<|im_start|>user\nMore.<|im_start|>assistant"));
}

#[test]
fn a_request_that_the_template_refuses_is_told_to_the_agent() {
    let part = json!([{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}]);
    let request = parsed(Dialect::Chat, &json!({"model": "m", "messages": part}));
    let error =
        renderer().prompt(&request, 0, None, &Cancellation::default()).expect_err("the template takes text only");
    let told = DialectError::from(&error);
    assert_eq!(told.status(), 400);
    assert!(told.to_string().contains("messages"), "{told}");
}

#[test]
fn the_date_of_a_prompt_is_that_of_its_session() {
    let template = "{{ strftime_now('%d %b %Y') }} {{ effort }} {{ reasoning_effort }}{% for m in messages %}\
                    <|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n";
    let renderer = renderer_with(Some(template), family()).expect("the template fits");
    let body = json!({"model": "m", "messages": [user("Go.")], "reasoning_effort": "low",
                      "chat_template_kwargs": {"effort": 3}});
    let prompt = renderer
        .prompt(&parsed(Dialect::Chat, &body), 1_700_000_000, None, &Cancellation::default())
        .expect("it can be rendered");
    assert!(decode(&prompt.ids).starts_with("14 Nov 2023 3 low<|im_start|>"));
}
