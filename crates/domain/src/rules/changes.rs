//! Changes of rules: which settings a replacement resets, and which settings a patch keeps.

use forebay_wire::PolicyRules;
use serde_json::{Map, Value};

/// Bytes of a setting's value in a warning. A longer value is only described.
const SHOWN_BYTES_MAX: usize = 80;

/// Applies a JSON merge patch (RFC 7396) to the rules, as JSON. Settings that the patch does not name stay, and `null`
/// resets a setting to its default.
#[must_use]
pub fn patched(rules: &PolicyRules, patch: &Value) -> Value {
    let mut merged = on_wire(rules);
    merge(&mut merged, patch);
    merged
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (name, value) in patch {
        if value.is_null() {
            target.remove(name);
        } else {
            merge(target.entry(name).or_insert(Value::Null), value);
        }
    }
}

/// Warnings for the caller that replaced rules: which settings that the request did not name have changed, and how.
#[must_use]
pub fn resets(before: &PolicyRules, after: &PolicyRules, request: &Value) -> Vec<String> {
    let mut resets = Vec::new();
    collect(&on_wire(before), &on_wire(after), request, "", &mut resets);
    if !resets.is_empty() {
        resets.push("PUT replaces all rules; PATCH changes only those that it names".to_owned());
    }
    resets
}

fn collect(before: &Value, after: &Value, request: &Value, path: &str, resets: &mut Vec<String>) {
    let (Value::Object(old), Value::Object(new)) = (before, after) else {
        resets.push(format!(
            "`{path}` is not in the request: it is back at its default, {}; it was {}",
            show(after),
            show(before)
        ));
        return;
    };
    let added = new.keys().filter(|name| !old.contains_key(*name));
    for name in old.keys().chain(added) {
        let (old, new) = (old.get(name).unwrap_or(&Value::Null), new.get(name).unwrap_or(&Value::Null));
        let named = request.get(name);
        // A setting that the request names changes on purpose.
        let is_named = named.is_some_and(|named| !(named.is_object() && new.is_object()));
        if old != new && !is_named {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            collect(old, new, named.unwrap_or(&Value::Null), &path, resets);
        }
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::Null => "not set".to_owned(),
        Value::Array(entries) if value.to_string().len() > SHOWN_BYTES_MAX => match entries.len() {
            1 => "1 entry".to_owned(),
            entries => format!("{entries} entries"),
        },
        _ => value.to_string(),
    }
}

/// What another set of rules changes, by names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changed {
    /// Names of filters that are new.
    pub filters_added: Vec<String>,
    /// Names of filters that are gone.
    pub filters_removed: Vec<String>,
    /// Names of filters that are other ones or have other places.
    pub filters_changed: Vec<String>,
    /// Other settings, such as `group.size`.
    pub settings: Vec<String>,
}

impl Changed {
    /// Whether nothing is changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Compares rules.
#[must_use]
pub fn changed(before: &PolicyRules, after: &PolicyRules) -> Changed {
    let filter_of = |rules: &PolicyRules, name: &str| rules.filter.iter().find(|filter| filter.name == name).cloned();
    let names = |rules: &PolicyRules| rules.filter.iter().map(|filter| filter.name.clone()).collect::<Vec<_>>();
    let (old, new) = (names(before), names(after));
    let without = |names: &[String], others: &[String]| -> Vec<String> {
        names.iter().filter(|name| !others.contains(name)).cloned().collect()
    };
    let (filters_added, filters_removed) = (without(&new, &old), without(&old, &new));
    // The first filter that applies decides, so the order of the filters that stay is part of the rules.
    let (old_order, new_order) = (without(&old, &filters_removed), without(&new, &filters_added));
    let is_moved = |name: &String| {
        let place = |names: &[String]| names.iter().position(|other| other == name);
        place(&old_order) != place(&new_order)
    };
    let is_other = |name: &String| is_moved(name) || filter_of(before, name) != filter_of(after, name);
    let filters_changed = new_order.iter().filter(|name| is_other(name)).cloned().collect();
    let mut settings = Vec::new();
    let (old, new) = (on_wire(before), on_wire(after));
    differences(&old, &new, "", &mut settings);
    Changed { filters_added, filters_removed, filters_changed, settings }
}

/// Names of the settings that differ, except the filters.
fn differences(old: &Value, new: &Value, path: &str, found: &mut Vec<String>) {
    let (Value::Object(old), Value::Object(new)) = (old, new) else {
        found.push(path.to_owned());
        return;
    };
    let added = new.keys().filter(|name| !old.contains_key(*name));
    for name in old.keys().chain(added).filter(|name| *name != "filter") {
        let (old, new) = (old.get(name).unwrap_or(&Value::Null), new.get(name).unwrap_or(&Value::Null));
        if old != new {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            differences(old, new, &path, found);
        }
    }
}

fn on_wire(rules: &PolicyRules) -> Value {
    serde_json::to_value(rules).expect("rules are numbers, names and expressions")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rules(value: Value) -> PolicyRules {
        serde_json::from_value(value).expect("these are rules")
    }

    #[test]
    fn a_merge_patch_is_that_of_rfc_7396() {
        // The cases of appendix A of the RFC.
        let cases = [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b"}), json!({"b": "c"}), json!({"a": "b", "b": "c"})),
            (json!({"a": "b"}), json!({"a": null}), json!({})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "c"}), json!({"a": ["b"]}), json!({"a": ["b"]})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({"a": [{"b": "c"}]}), json!({"a": [1]}), json!({"a": [1]})),
            (json!(["a", "b"]), json!(["c", "d"]), json!(["c", "d"])),
            (json!({"a": "b"}), json!(["c"]), json!(["c"])),
            (json!({"a": "foo"}), json!(null), json!(null)),
            (json!({"e": null}), json!({"a": 1}), json!({"e": null, "a": 1})),
            (json!([1, 2]), json!({"a": "b", "c": null}), json!({"a": "b"})),
            (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
        ];
        for (mut target, patch, result) in cases {
            merge(&mut target, &patch);
            assert_eq!(target, result, "{patch}");
        }
    }

    #[test]
    fn what_a_request_names_or_leaves_as_it_was_is_no_reset() {
        let before = rules(json!({"group": {"size": 8, "min_size": 2}, "batch": {"groups": 16}, "advantage": "rloo"}));
        let named = json!({"group": {"size": 4}, "batch": {"groups": 1}});
        let resets = resets(&before, &rules(named.clone()), &named);
        assert_eq!(resets.len(), 3, "{resets:#?}");
        assert_eq!(
            resets[0],
            "`advantage` is not in the request: it is back at its default, \"grpo\"; it was \"rloo\""
        );
        assert!(resets[1].starts_with("`group.min_size` ") && resets[1].ends_with("not set; it was 2"), "{resets:#?}");
    }
}
