//! Chat templates compared with Jinja2: `scripts/template-fixtures` writes what it renders.

use std::{collections::BTreeMap, path::Path};

use forebay_gateway::template::{ChatTemplate, Conversation, Value};
use serde::Deserialize;

/// The time of `strftime_now`, in both.
const CLOCK_S: i64 = 1_700_000_000;

#[derive(Deserialize)]
struct Case {
    name: String,
    messages: Vec<Value>,
    tools: Option<Value>,
    #[serde(default)]
    variables: BTreeMap<String, Value>,
    opens_answer: Option<bool>,
}

#[derive(Deserialize)]
struct Rendered {
    template: String,
    case: String,
    /// `None` if the template refuses the messages.
    text: Option<String>,
}

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()))
}

#[test]
fn templates_are_rendered_as_by_jinja2() {
    let folder = tempfile::tempdir().expect("a temporary folder can be made");
    let config = r#"{"bos_token": "<s>"}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), config).expect("the folder can be written to");
    let cases: Vec<Case> = serde_json::from_str(&read("cases.json")).expect("it is a list of cases");
    let rendered: Vec<Rendered> = serde_json::from_str(&read("rendered.json")).expect("it is a list of texts");
    assert!(rendered.len() >= 4 * cases.len(), "every template is rendered with every case");
    for expected in rendered {
        let case = cases.iter().find(|case| case.name == expected.case).expect("the case exists");
        let template = ChatTemplate::of_text(read(&expected.template), folder.path()).expect("the files can be read");
        let conversation = Conversation {
            messages: case.messages.clone(),
            tools: case.tools.clone(),
            variables: case.variables.clone().into_iter().collect(),
            clock_s: CLOCK_S,
            opens_answer: case.opens_answer.unwrap_or(true),
            ..Conversation::default()
        };
        let found = template.expect("the template can be parsed").render(&conversation);
        let name = format!("{} with {:?}", expected.template, case.name);
        match expected.text {
            Some(text) => assert_eq!(found.unwrap_or_else(|error| panic!("{name}: {error}")), text, "{name}"),
            None => assert!(found.is_err(), "{name} is refused"),
        }
    }
}
