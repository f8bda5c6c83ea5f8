//! Diagnosis of a whole store: its file, its books, its structure, and every payload that can still be delivered.
//!
//! Separate from everything that serves: it reads all there is, and changes nothing.

use std::collections::BTreeMap;

use super::{
    ids::{GroupPk, RolloutPk},
    payload::Payload,
    samples::checked::{CheckedRollout, broken_groups},
};
use crate::store::{BatchMember, Examination, Store, StoreError};

/// Groups whose rollouts are listed at once.
const GROUPS: u32 = 64;

/// Unpacked bytes of payloads that are held at once, unless a single rollout has more.
const PAGE_BYTES: u64 = 16 << 20;

/// Findings that are kept; more are as bad.
const FINDINGS_MAX: usize = 100;

/// What was looked at and what was found.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// Parts in the order in which they were looked at.
    pub parts: Vec<Part>,
}

/// One part of a diagnosis.
#[derive(Clone, Debug)]
pub struct Part {
    /// What was looked at.
    pub name: &'static str,
    /// How much there was of it.
    pub extent: String,
    /// What is wrong, at most 100 entries.
    pub findings: Vec<String>,
}

impl Diagnosis {
    /// All that is wrong.
    pub fn findings(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().flat_map(|part| part.findings.iter().map(String::as_str))
    }

    /// Whether nothing is wrong.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.findings().next().is_none()
    }
}

/// Looks at rows alone: books and structure, in one snapshot.
pub async fn examine_rows(store: &dyn Store) -> Result<Diagnosis, StoreError> {
    let examination = store.examine().await?;
    Ok(Diagnosis { parts: vec![books(&examination), structure(&examination)] })
}

/// Looks at everything. `progress` is told how many rollouts' contents were read.
pub async fn examine(store: &dyn Store, progress: impl FnMut(u64)) -> Result<Diagnosis, StoreError> {
    let file =
        Part { name: "file", extent: "pages, indexes, references".to_owned(), findings: store.integrity().await? };
    let mut diagnosis = examine_rows(store).await?;
    diagnosis.parts.insert(0, file);
    diagnosis.parts.push(contents(store, progress).await?);
    Ok(diagnosis)
}

/// Every tally against the rows that it counts, and what was received against the sum of all states.
fn books(examination: &Examination) -> Part {
    let mut findings = Vec::new();
    let mut received = 0;
    for (policy, tallies) in &examination.tallies {
        received += tallies.received();
        if tallies.unconserved() != 0 {
            findings.push(format!("policy {policy}: {} rollouts are in no state", tallies.unconserved()));
        }
        let nothing = BTreeMap::new();
        let counted = examination.counted.get(policy.as_str()).unwrap_or(&nothing);
        let names = tallies.values.keys().filter(|name| is_counted(name)).chain(counted.keys());
        for name in names.collect::<std::collections::BTreeSet<_>>() {
            let (tally, rows) = (tallies.value(name), counted.get(name).copied().unwrap_or(0));
            if tally != rows {
                findings.push(format!("policy {policy}: tally {name} is {tally}, the rows say {rows}"));
            }
        }
    }
    findings.truncate(FINDINGS_MAX);
    let extent = format!("{} policies, {received} rollouts received", examination.tallies.len());
    Part { name: "books", extent, findings }
}

/// Whether rows stand behind a tally: what is forgotten has none, and flows are not states.
fn is_counted(name: &str) -> bool {
    let counts = ["rollout.", "group.", "batch."].iter().any(|family| name.starts_with(family));
    (counts || matches!(name, "live_bytes" | "reserved")) && name != "rollout.forgotten"
}

fn structure(examination: &Examination) -> Part {
    let finding = |found: &crate::store::Contradiction| {
        format!("{} (at least {}): {}", found.what, found.at_least, found.named.join(", "))
    };
    let findings = examination.contradictions.iter().map(finding).collect();
    Part { name: "structure", extent: "groups, batches and what they carry".to_owned(), findings }
}

/// Every payload against its digest, every rollout and group against its seal.
async fn contents(store: &dyn Store, mut progress: impl FnMut(u64)) -> Result<Part, StoreError> {
    let (mut rollouts, mut bytes) = (0, 0);
    let mut findings = Vec::new();
    let mut after = GroupPk(0);
    loop {
        let members = store.group_members(after, GROUPS).await?;
        let Some(last) = members.last() else { break };
        after = last.group_pk;
        for member in broken_groups(&members) {
            findings.push(format!("group {}: its advantages differ from their seal", member.group_id));
        }
        for page in pages(members) {
            rollouts += page.len() as u64;
            bytes += page.iter().map(|member| member.unpacked_bytes).sum::<u64>();
            findings.extend(check(store, page).await?);
            findings.truncate(FINDINGS_MAX);
            progress(rollouts);
        }
    }
    Ok(Part { name: "contents", extent: format!("{rollouts} rollouts, {bytes} bytes unpacked"), findings })
}

fn pages(members: Vec<BatchMember>) -> Vec<Vec<BatchMember>> {
    let mut pages: Vec<Vec<BatchMember>> = Vec::new();
    let mut bytes = 0;
    for member in members {
        bytes += member.unpacked_bytes;
        match pages.last_mut() {
            Some(page) if bytes <= PAGE_BYTES => page.push(member),
            _ => {
                bytes = member.unpacked_bytes;
                pages.push(vec![member]);
            }
        }
    }
    pages
}

/// What is wrong with a page of rollouts. Payloads that are missing are a matter of structure.
async fn check(store: &dyn Store, members: Vec<BatchMember>) -> Result<Vec<String>, StoreError> {
    let keys: Vec<RolloutPk> = members.iter().map(|member| member.rollout_pk).collect();
    let stored = store.payloads(keys).await?.into_iter();
    let mut payloads: BTreeMap<RolloutPk, Payload> = stored.map(|one| (one.rollout_pk, one.payload)).collect();
    let check = move || {
        let check = |member: BatchMember| {
            let payload = payloads.remove(&member.rollout_pk)?;
            let name = format!("rollout {} of group {}", member.rollout_id, member.group_id);
            CheckedRollout::new(member, &payload).err().map(|damage| format!("{name}: {damage}"))
        };
        members.into_iter().filter_map(check).collect()
    };
    tokio::task::spawn_blocking(check).await.map_err(|_| StoreError::Closed)
}
