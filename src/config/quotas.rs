//! The array `[[quota]]`: what the policies of a team may have together.

use std::sync::Arc;

use forebay_domain::{access::globs::PolicyGlobs, ids::PolicyName, quotas::Quota, rules::Rules};
use forebay_wire::{BacklogRules, Violation};
use serde::Deserialize;

use super::collect;

/// The most quotas. Each new policy and session is compared with all of them.
const QUOTAS_MAX: usize = 256;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Entry {
    policies: Vec<String>,
    max_policies: Option<u32>,
    max_backlog_bytes: Option<u64>,
    max_sessions: Option<u32>,
}

/// The quotas of the file.
pub(super) fn read(sent: Option<toml::Value>, violations: &mut Vec<Violation>) -> Vec<Quota> {
    let tables = collect::tables("quota", sent, violations);
    if tables.len() > QUOTAS_MAX {
        let detail = format!("must have at most {QUOTAS_MAX} tables");
        violations.push(Violation { pointer: "/quota".to_owned(), detail });
    }
    tables.into_iter().filter_map(|(at, table)| quota(&at, table, violations)).collect()
}

/// Checks that the policies of the file are within its quotas. They are created in any case, so nothing else would.
pub(super) fn check(quotas: &[Quota], policies: &[(PolicyName, Arc<Rules>)], violations: &mut Vec<Violation>) {
    for (index, quota) in quotas.iter().enumerate() {
        let of_team = || policies.iter().filter(|(name, _)| quota.policies.matches(name.as_str()));
        let mut refuse = |key: &str, detail: String| {
            violations.push(Violation { pointer: format!("/quota/{index}/{key}"), detail });
        };
        if let Some(max) = quota.policies_max.filter(|max| of_team().count() > *max as usize) {
            refuse("max_policies", format!("is {max}, and this file has {} of these policies", of_team().count()));
        }
        let sum: u64 = of_team().map(|(_, rules)| rules.backlog.max_bytes).fold(0, u64::saturating_add);
        if let Some(max) = quota.backlog_bytes_max.filter(|max| sum > *max) {
            let detail = format!(
                "is {max}, and `backlog.max_bytes` of these policies in this file adds up to {sum}; a [[policy]] that does \
                 not set it has {}",
                BacklogRules::default().max_bytes
            );
            refuse("max_backlog_bytes", detail);
        }
    }
}

fn quota(at: &str, table: toml::Table, violations: &mut Vec<Violation>) -> Option<Quota> {
    let before = violations.len();
    let entry: Entry = collect::read(at, table, violations);
    if violations.len() > before {
        return None;
    }
    let mut refuse = |pointer: String, detail: String| violations.push(Violation { pointer, detail });
    let policies = PolicyGlobs::parse(&entry.policies)
        .map_err(|(index, error)| {
            let place = if entry.policies.is_empty() { String::new() } else { format!("/{index}") };
            refuse(format!("{at}/policies{place}"), error.to_string());
        })
        .ok()?;
    let Entry { policies: _, max_policies, max_backlog_bytes, max_sessions } = entry;
    if max_policies.is_none() && max_backlog_bytes.is_none() && max_sessions.is_none() {
        let detail = "bounds nothing: write `max_policies`, `max_backlog_bytes` or `max_sessions`";
        refuse(at.to_owned(), detail.to_owned());
    }
    Some(Quota {
        policies,
        policies_max: max_policies,
        backlog_bytes_max: max_backlog_bytes,
        sessions_max: max_sessions,
    })
}
