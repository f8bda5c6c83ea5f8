//! The table `[facades]`: listeners for the clients of other rollout buffers.

use forebay_domain::ids::PolicyName;
use forebay_facades::{FacadeConfig, Protocol, slime::SlimeOptions};
use forebay_wire::Violation;
use serde::Deserialize;
use toml::{Table, Value};

use super::{check_listen, collect};

/// The largest value of `max_groups`.
const GROUPS_MAX: u64 = 1_024;

/// The table. Each protocol has an address, or a table with more settings.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Facades {
    slime: Option<Slime>,
    atropos: Option<Atropos>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Slime {
    listen: Option<String>,
    policy: Option<String>,
    max_groups: Option<u64>,
    reward_key: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Atropos {
    listen: Option<String>,
    policy: Option<String>,
}

/// Reads the table `[facades]`.
pub(super) fn read(sent: Option<Value>, violations: &mut Vec<Violation>) -> Vec<FacadeConfig> {
    let Some(sent) = sent else { return Vec::new() };
    let Value::Table(mut table) = sent else {
        violations.push(Violation { pointer: "/facades".to_owned(), detail: "must be a table".to_owned() });
        return Vec::new();
    };
    // An address alone is a table with this address.
    for (_, value) in &mut table {
        if value.is_str() {
            let listen = std::mem::replace(value, Value::Table(Table::new()));
            *value = Value::Table(Table::from_iter([("listen".to_owned(), listen)]));
        }
    }
    let Facades { slime, atropos } = collect::read("/facades", table, violations);
    let mut facades = Vec::new();
    if let Some(slime) = slime {
        if slime.max_groups.is_some_and(|groups| !(1..=GROUPS_MAX).contains(&groups)) {
            let detail = format!("must be 1 to {GROUPS_MAX}");
            violations.push(Violation { pointer: "/facades/slime/max_groups".to_owned(), detail });
        }
        let options = SlimeOptions {
            max_groups: slime.max_groups.map(|groups| groups.min(GROUPS_MAX) as u32),
            reward_key: slime.reward_key,
        };
        facades.extend(facade("slime", slime.listen, slime.policy.as_deref(), Protocol::Slime(options), violations));
    }
    if let Some(atropos) = atropos {
        facades.extend(facade("atropos", atropos.listen, atropos.policy.as_deref(), Protocol::Atropos, violations));
    }
    facades
}

/// Checks what every facade has.
fn facade(
    name: &str,
    listen: Option<String>,
    policy: Option<&str>,
    protocol: Protocol,
    violations: &mut Vec<Violation>,
) -> Option<FacadeConfig> {
    let mut refuse = |key: &str, detail: String| {
        let pointer = format!("/facades/{name}/{key}");
        // A value of another type was left out, and its error is reported already.
        if !violations.iter().any(|violation| violation.pointer == pointer) {
            violations.push(Violation { pointer, detail });
        }
    };
    let policy = match policy.map_or(Ok(PolicyName::default()), PolicyName::parse) {
        Ok(policy) => policy,
        Err(error) => {
            refuse("policy", error.to_string());
            PolicyName::default()
        }
    };
    match listen.as_deref().map(check_listen) {
        None => refuse("listen", "is required: an address with a port".to_owned()),
        Some(Err(detail)) => refuse("listen", detail),
        Some(Ok(())) => return Some(FacadeConfig { listen: listen?, policy, protocol }),
    }
    None
}
