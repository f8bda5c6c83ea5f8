//! Definitions of tools, as `tools` in the metadata of a rollout. Exports have a column for them, which chat templates
//! need to render the messages again.

use serde_json::{Map, Value, json, value::RawValue};

use crate::{
    format::{Imported, Note},
    json::{self, raw},
};

/// The most bytes of definitions. The metadata of a rollout has 256 KiB, unless the service is configured otherwise.
const TOOLS_BYTES_MAX: usize = 192 << 10;

/// Adds the definitions to metadata that has none. What the metadata has besides them stays as it is written.
pub(crate) fn add(metadata: &mut Option<Box<RawValue>>, tools: Option<&RawValue>, imported: &mut Imported) {
    let Some(tools) = tools.map(RawValue::get).filter(|tools| tools.starts_with('[') && *tools != "[]") else { return };
    let written = metadata.as_deref().map_or("{}", RawValue::get);
    let Ok(fields) = json::fields(written.as_bytes()) else { return };
    if fields.contains_key("tools") {
        return;
    }
    if tools.len() > TOOLS_BYTES_MAX {
        imported.note(Note::ToolsLeftOut, 1);
        return;
    }
    let comma = if fields.is_empty() { "" } else { "," };
    let added = format!("{{\"tools\":{tools}{comma}{}", &written[1..]);
    *metadata = Some(RawValue::from_string(added).expect("an entry was added to an object"));
}

/// Definitions of OpenAI's Responses API in the form of chat completions. Those of other kinds of tools stay as they are.
pub(crate) fn of_responses(tools: Vec<Value>) -> Box<RawValue> {
    let chat = |tool| match tool {
        Value::Object(mut fields)
            if fields.get("type") == Some(&json!("function")) && !fields.contains_key("function") =>
        {
            fields.remove("type");
            Value::Object(Map::from_iter([
                ("type".to_owned(), json!("function")),
                ("function".to_owned(), Value::Object(fields)),
            ]))
        }
        other => other,
    };
    raw(&tools.into_iter().map(chat).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn added(metadata: Option<&str>, tools: &str) -> (Option<String>, Imported) {
        let json = |text: &str| RawValue::from_string(text.to_owned()).expect("it is JSON");
        let (mut metadata, mut imported) = (metadata.map(json), Imported::default());
        add(&mut metadata, Some(&json(tools)), &mut imported);
        (metadata.map(|metadata| metadata.get().to_owned()), imported)
    }

    #[test]
    fn definitions_are_added_to_metadata_that_has_none() {
        for (metadata, tools, expected) in [
            (Some(r#"{"b": 1e2}"#), "[1]", Some(r#"{"tools":[1],"b": 1e2}"#)),
            (Some("{ }"), "[1]", Some(r#"{"tools":[1] }"#)),
            (None, "[1]", Some(r#"{"tools":[1]}"#)),
            (Some(r#"{"tools":[2]}"#), "[1]", Some(r#"{"tools":[2]}"#)),
            (Some("7"), "[1]", Some("7")),
            (None, "null", None),
            (None, "[]", None),
        ] {
            assert_eq!(added(metadata, tools).0.as_deref(), expected);
        }
        let large = format!("[\"{}\"]", "x".repeat(TOOLS_BYTES_MAX));
        let (metadata, imported) = added(Some("{}"), &large);
        assert_eq!((metadata.as_deref(), imported.notes), (Some("{}"), vec![(Note::ToolsLeftOut, 1)]));
    }
}
