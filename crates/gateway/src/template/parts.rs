//! Whether a template reads the parts of messages.
//!
//! Engines look at the template's source: if it loops over the content of messages, it gets lists of parts, and otherwise one
//! text of them. Each engine finds the loops in its own way, so a template may get parts from one and a text from another.

use std::collections::BTreeSet;

/// What is between the marks of a tag, in the order of the source.
fn tags(source: &str) -> impl Iterator<Item = &str> {
    let inner = |behind: &'_ str| behind.split_once("%}").map_or(0, |(inner, _)| inner.len());
    source.split("{%").skip(1).map(move |behind| behind[..inner(behind)].trim_matches(['-', '+']).trim())
}

/// The target of a loop, and what it goes over.
fn loop_of(tag: &str) -> Option<(&str, &str)> {
    let (target, over) = tag.strip_prefix("for ")?.split_once(" in ")?;
    let over = over.split(" if ").next().unwrap_or(over);
    Some((target.trim(), plain(over)))
}

/// A variable or an attribute without filters, tests and slices.
fn plain(expression: &str) -> &str {
    let whole = expression.split('|').next().unwrap_or(expression);
    let whole = whole.split(" is ").next().unwrap_or(whole).trim();
    match whole.rsplit_once('[') {
        Some((inner, slice)) if slice.contains(':') && slice.ends_with(']') => inner.trim(),
        _ => whole,
    }
}

/// Whether an expression is the content of this message.
fn is_content(expression: &str, message: &str) -> bool {
    let attribute = plain(expression).strip_prefix(message).map(str::trim);
    matches!(attribute, Some(".content" | "['content']" | "[\"content\"]"))
}

/// As SGLang finds out: a template that names media reads parts, and one that loops over the content of a message with a
/// usual name.
pub(super) fn read_in_sglang(source: &str) -> bool {
    let names_media = ["image", "audio", "video", "vision"].iter().any(|word| source.contains(word));
    let loops = |(_, over): (&str, &str)| ["message", "msg", "m"].iter().any(|message| is_content(over, message));
    names_media || tags(source).filter_map(loop_of).any(loops)
}

/// As vLLM finds out: it follows names from `messages` to a message and its content, also into macros.
pub(super) fn read_in_vllm(source: &str) -> bool {
    let mut lists = BTreeSet::from(["messages"]);
    loop {
        let before = lists.len();
        let assigned = tags(source).filter_map(|tag| tag.strip_prefix("set ")?.split_once('='));
        lists.extend(
            assigned.filter(|(_, value)| lists.contains(plain(value))).map(|(name, _)| name.trim()).collect::<Vec<_>>(),
        );
        if lists.len() == before {
            break;
        }
    }
    let messages: BTreeSet<&str> =
        tags(source).filter_map(loop_of).filter(|(_, over)| lists.contains(over)).map(|(target, _)| target).collect();
    let is_content = |expression: &str| messages.iter().any(|message| is_content(expression, message));
    let mut in_macro: Option<BTreeSet<&str>> = None;
    for tag in tags(source) {
        if let Some(head) = tag.strip_prefix("macro ") {
            in_macro = Some(contents_of_macro(source, head, &is_content));
        } else if tag == "endmacro" {
            in_macro = None;
        }
        let Some((_, over)) = loop_of(tag) else { continue };
        let named = in_macro.as_ref().map_or(over == "content", |contents| contents.contains(over));
        if named || is_content(over) {
            return true;
        }
    }
    false
}

/// The parameters of a macro that are the content of a message in some call.
fn contents_of_macro<'a>(source: &str, head: &'a str, is_content: &impl Fn(&str) -> bool) -> BTreeSet<&'a str> {
    let Some((name, parameters)) = head.split_once('(') else { return BTreeSet::new() };
    let parameters = parameters.trim_end_matches(')').split(',');
    let parameters: Vec<&str> = parameters.map(|one| one.split('=').next().unwrap_or(one).trim()).collect();
    let call = format!("{}(", name.trim());
    let calls = source.split(call.as_str()).skip(1).filter_map(|behind| behind.split_once(')'));
    let arguments = calls.flat_map(|(arguments, _)| arguments.split(',').enumerate());
    let content = |(place, argument): (usize, &str)| match argument.split_once('=') {
        Some((name, value)) => {
            is_content(value.trim()).then(|| parameters.iter().copied().find(|one| *one == name.trim()))?
        }
        None => is_content(argument.trim()).then(|| parameters.get(place).copied())?,
    };
    arguments.filter_map(content).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loops_over_content_are_found_as_by_each_engine() {
        // Each with what vLLM and SGLang find.
        let sources = [
            ("{% for message in messages %}{{ message.content }}{% endfor %}", false, false),
            ("{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}", true, true),
            ("{%- for m in messages[1:] -%}{%- for c in m['content'] | list -%}{% endfor %}{% endfor %}", true, true),
            ("{% for turn in messages %}{% for c in turn[\"content\"] if c %}{% endfor %}{% endfor %}", true, false),
            (
                "{% set rest = messages[1:] %}{% for t in rest %}{% for c in t.content %}{% endfor %}{% endfor %}",
                true,
                false,
            ),
            (
                "{% for message in messages %}{% set content = message.content %}{% for c in content %}{% endfor %}{% endfor %}",
                true,
                false,
            ),
            (
                "{% macro text(body) %}{% for c in body %}{% endfor %}{% endmacro %}{% for m in messages %}{{ text(m.content) }}{% endfor %}",
                true,
                false,
            ),
            (
                "{% macro text(x, body=1) %}{% for c in body %}{% endfor %}{% endmacro %}{% for m in messages %}{{ text(1, body=m.content) }}{% endfor %}",
                true,
                false,
            ),
            (
                "{% macro text(content) %}{% for c in content %}{% endfor %}{% endmacro %}{% for m in messages %}{{ text(m.role) }}{% endfor %}",
                false,
                false,
            ),
            (
                "{% for tool in tools %}{% endfor %}{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}",
                false,
                false,
            ),
            ("{% for m in messages %}{{ '<image>' if false }}{{ m.content }}{% endfor %}", false, true),
        ];
        for (source, in_vllm, in_sglang) in sources {
            assert_eq!((read_in_vllm(source), read_in_sglang(source)), (in_vllm, in_sglang), "{source}");
        }
    }
}
