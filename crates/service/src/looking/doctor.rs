//! Diagnosis of a whole store: its file, its tallies, its structure, and every payload that can still be delivered.
//!
//! Separate from everything that serves requests, because it reads all rows and payloads and changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use forebay_bounds::work;
use forebay_domain::{
    blobs,
    formats::payload::Payload,
    ids::GroupPk,
    looking::diagnosis::{Contradiction, Examination, PayloadPlaces},
    samples::{
        BatchMember,
        checked::{CheckedRollout, broken_groups},
        pages::Members,
    },
    tally::Tally,
};
use forebay_store::{
    Store,
    error::StoreError,
    ops::looking::examine::{Examine, GroupMembers, Uploads},
};

use crate::payloads::read_payloads;

/// Groups whose rollouts are listed at once.
const GROUPS: u32 = 64;

/// Findings that are named. The others are counted.
const FINDINGS_MAX: usize = 100;

/// What was examined and what was found.
#[derive(Clone, Debug)]
pub struct Diagnosis {
    /// Parts in the order in which they were examined.
    pub parts: Vec<Part>,
}

/// One part of a diagnosis.
#[derive(Clone, Debug)]
pub struct Part {
    /// What was examined.
    pub name: &'static str,
    /// How much of it there was.
    pub extent: String,
    /// What is wrong: at most 100 entries, and then how many more there are.
    pub findings: Vec<String>,
}

/// What is found in one part. All of it is counted, because a doctor that only says that something is missing does not
/// say how much a restore has to bring back.
#[derive(Debug, Default)]
struct Findings {
    kept: Vec<String>,
    more: usize,
}

impl Findings {
    fn add(&mut self, findings: impl IntoIterator<Item = String>) {
        for finding in findings {
            if self.kept.len() < FINDINGS_MAX {
                self.kept.push(finding);
            } else {
                self.more += 1;
            }
        }
    }

    fn into_entries(self) -> Vec<String> {
        let more = (self.more > 0).then(|| format!("and {} more", self.more));
        self.kept.into_iter().chain(more).collect()
    }
}

impl Diagnosis {
    /// Every finding.
    pub fn findings(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().flat_map(|part| part.findings.iter().map(String::as_str))
    }

    /// Whether nothing was found.
    #[must_use]
    pub fn is_healthy(&self) -> bool {
        self.findings().next().is_none()
    }
}

/// Examines rows only: tallies and structure, in one snapshot.
pub async fn examine_rows(store: &Store) -> Result<Diagnosis, StoreError> {
    let examination = store.read(Examine).await?;
    Ok(Diagnosis { parts: vec![books(&examination), structure(&examination)] })
}

/// Examines everything. `progress` is called with the number of rollouts whose payloads were read.
pub async fn examine(store: &Store, progress: impl FnMut(u64)) -> Result<Diagnosis, StoreError> {
    let file =
        Part { name: "file", extent: "pages, indexes, references".to_owned(), findings: store.integrity().await? };
    let mut diagnosis = examine_rows(store).await?;
    diagnosis.parts.insert(0, file);
    diagnosis.parts.push(places(store.payload_places().await?));
    diagnosis.parts.push(contents(store, progress).await?);
    diagnosis.parts.push(uploads(store).await?);
    Ok(diagnosis)
}

/// Compares every tally with the rows that it counts, and the rollouts received with the sum over all states.
fn books(examination: &Examination) -> Part {
    let mut findings = Findings::default();
    let mut received = 0;
    for (policy, tallies) in &examination.tallies {
        received += tallies.received();
        if tallies.unconserved() != 0 {
            let unconserved = tallies.unconserved();
            findings.add([format!("policy {policy}: {unconserved} rollouts are not counted in any state")]);
        }
        let nothing = BTreeMap::new();
        let counted = examination.counted.get(policy).unwrap_or(&nothing);
        let both = tallies.counts.keys().filter(|tally| is_counted(tally)).chain(counted.keys());
        for tally in both.collect::<BTreeSet<_>>() {
            let (count, rows) = (tallies.count(tally), counted.get(tally).copied().unwrap_or(0));
            if count != rows {
                let name = tally.name();
                findings.add([format!("policy {policy}: tally {name} is {count}, the rows say {rows}")]);
            }
        }
    }
    let findings = findings.into_entries();
    let extent = format!("{} policies, {received} rollouts received", examination.tallies.len());
    Part { name: "tallies", extent, findings }
}

/// Whether a tally counts rows. Deleted rollouts have no rows, and some tallies count events instead of states.
fn is_counted(tally: &Tally) -> bool {
    match tally {
        Tally::Rollouts(_)
        | Tally::Groups(_)
        | Tally::Batches(_)
        | Tally::Sessions(_)
        | Tally::LiveBytes
        | Tally::Reserved => true,
        Tally::Received
        | Tally::Masked
        | Tally::LateTotal
        | Tally::Reward
        | Tally::AssumedVersion
        | Tally::Forgotten
        | Tally::Dropped(_)
        | Tally::Discarded(_)
        | Tally::DecidedReady
        | Tally::Stale
        | Tally::Leases(_)
        | Tally::Waited
        | Tally::Acked
        | Tally::AckedRollouts => false,
    }
}

fn structure(examination: &Examination) -> Part {
    let finding =
        |found: &Contradiction| format!("{} (at least {}): {}", found.what, found.at_least, found.named.join(", "));
    let findings = examination.contradictions.iter().map(finding).collect();
    Part { name: "structure", extent: "groups, batches and what they carry".to_owned(), findings }
}

fn places(found: PayloadPlaces) -> Part {
    let PayloadPlaces { in_database, in_files, files, file_bytes, named_bytes, findings: found } = found;
    let mut findings = Findings::default();
    findings.add(found);
    let findings = findings.into_entries();
    let extent = format!(
        "{in_database} in the database, {in_files} in {files} segment files or objects of {file_bytes} bytes, of which \
         {named_bytes} are named by rows"
    );
    Part { name: "payloads", extent, findings }
}

/// Compares every payload with its digest, and every rollout and group with its seal.
async fn contents(store: &Store, mut progress: impl FnMut(u64)) -> Result<Part, StoreError> {
    let (mut rollouts, mut bytes) = (0, 0);
    let mut findings = Findings::default();
    let mut after = GroupPk(0);
    loop {
        let members = store.read(GroupMembers { after, groups: GROUPS }).await?;
        let Some(last) = members.last() else { break };
        after = last.group_pk;
        for member in broken_groups(&members) {
            findings.add([format!("group {}: its advantages differ from their seal", member.row.group_id)]);
        }
        let mut members = Members::from(members);
        loop {
            let page = members.take_page();
            if page.is_empty() {
                break;
            }
            let (page, unread) = read(store, page).await;
            findings.add(unread);
            rollouts += page.len() as u64;
            bytes += page.iter().map(|(member, _)| member.row.unpacked_bytes).sum::<u64>();
            findings.add(check(page).await?);
            progress(rollouts);
        }
    }
    let extent = format!("{rollouts} rollouts, {bytes} bytes unpacked");
    Ok(Part { name: "contents", extent, findings: findings.into_entries() })
}

/// Compares every piece of every upload with its digest.
async fn uploads(store: &Store) -> Result<Part, StoreError> {
    let (mut count, mut bytes) = (0_u64, 0);
    let mut findings = Findings::default();
    let mut after = None;
    loop {
        let page = store.read(Uploads { after, limit: GROUPS }).await?;
        let Some((last, _)) = page.last() else { break };
        after = Some(*last);
        for (key, blob) in page {
            count += 1;
            bytes += blob.stored;
            let mut damaged = 0_u64;
            for index in 0..blobs::pieces(blob.stored) {
                // A missing piece is reported with the structure, and a file that cannot be read is damage like any other.
                let read = store.payloads(vec![key.piece(index)]).await;
                let is_intact = work::on_thread(move || match read {
                    Ok(read) => read.iter().all(|stored| blobs::is_intact(blob.bytes, index, &stored.payload)),
                    Err(_) => false,
                });
                damaged += u64::from(!is_intact.await.map_err(|_| StoreError::Closed)?);
            }
            let digest = blob.digest;
            findings.add((damaged > 0).then(|| format!("upload {digest}: {damaged} pieces are damaged")));
        }
    }
    let extent = format!("{count} uploads, {bytes} bytes");
    Ok(Part { name: "uploads", extent, findings: findings.into_entries() })
}

/// Reads the payloads of a page, and says which cannot be read. A file or an object that cannot be read is damage like any
/// other, so the doctor goes on with the rest. If the database fails, the next page of groups says so.
async fn read(store: &Store, page: Vec<BatchMember>) -> (Vec<(BatchMember, Option<Payload>)>, Vec<String>) {
    if let Ok(payloads) = read_payloads(store, &page).await {
        return (page.into_iter().zip(payloads).collect(), Vec::new());
    }
    let (mut with_payloads, mut unread) = (Vec::new(), Vec::new());
    for member in page {
        let payload = read_payloads(store, std::slice::from_ref(&member)).await.unwrap_or_else(|error| {
            unread.push(format!("{}: {error}", name_of(&member)));
            Vec::new()
        });
        with_payloads.push((member, payload.into_iter().next().flatten()));
    }
    (with_payloads, unread)
}

fn name_of(member: &BatchMember) -> String {
    format!("rollout {} of group {}", member.row.rollout_id, member.row.group_id)
}

/// What is wrong with a page of rollouts. Missing payloads are reported with the structure.
async fn check(page: Vec<(BatchMember, Option<Payload>)>) -> Result<Vec<String>, StoreError> {
    let check = move || {
        let check = |(member, payload): (BatchMember, Option<Payload>)| {
            let name = name_of(&member);
            CheckedRollout::new(member, &payload?).err().map(|damage| format!("{name}: {damage}"))
        };
        page.into_iter().filter_map(check).collect()
    };
    tokio::task::spawn_blocking(check).await.map_err(|_| StoreError::Closed)
}
