//! The checker: verifies every promise of the service from what the clients saw and what the final ledger says.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Call, Event, GROUP_SIZE, Outcome};
use crate::support::text;

/// Checks a history in which every group was posted and trained.
pub(super) async fn check(http: &reqwest::Client, url: &str, history: &[Event], groups: usize) {
    let stories = all(http, &format!("{url}/trajectories?limit=1000"), "trajectories").await;
    let batches = all(http, &format!("{url}/batches?policy=default&limit=1000"), "batches").await;
    acknowledged_is_there(history, &stories);
    bundles_are_whole(history, &stories);
    trained_once(history, &stories, &batches, groups);
    delivered_whole(history);
    leases_do_not_overlap(history);
    let stats: Value = http.get(format!("{url}/stats")).send().await.expect("it answers").json().await.expect("JSON");
    assert_eq!(stats["conserved"], true, "{stats}");
    assert_eq!(stats["policies"]["default"]["received"], groups * GROUP_SIZE, "{stats}");
}

async fn all(http: &reqwest::Client, url: &str, field: &str) -> Vec<Value> {
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let response = http.get(format!("{url}{after}")).send().await.expect("the service answers");
        let mut page: Value = response.json().await.expect("JSON");
        found.append(page[field].as_array_mut().expect("a page is a list"));
        let Some(next) = page["next"].as_str() else { return found };
        after = format!("&after={next}");
    }
}

fn rollout_ids(stories: &[Value]) -> BTreeSet<&str> {
    stories.iter().map(|story| text(&story["rollout_id"])).collect()
}

fn acknowledged_is_there(history: &[Event], stories: &[Value]) {
    let there = rollout_ids(stories);
    assert_eq!(there.len(), stories.len(), "a rollout is in the ledger twice");
    for event in history {
        if let (Call::Post { rollouts }, Outcome::Ok(_)) = (&event.call, &event.outcome) {
            for rollout in rollouts {
                assert!(there.contains(rollout.as_str()), "{rollout} was acknowledged and is lost");
            }
        }
    }
}

/// The first answered post of each rollout gets 201 or 200. Of all answered posts of a rollout, at most one gets 201.
fn bundles_are_whole(history: &[Event], stories: &[Value]) {
    let there = rollout_ids(stories);
    let mut firsts: BTreeMap<String, usize> = BTreeMap::new();
    for event in history {
        let Call::Post { rollouts } = &event.call else { continue };
        let present = rollouts.iter().filter(|rollout| there.contains(rollout.as_str())).count();
        assert!(present == 0 || present == rollouts.len(), "a bundle is torn: {rollouts:?}");
        let Outcome::Ok(receipts) = &event.outcome else { continue };
        let receipts = receipts.as_array().cloned().unwrap_or_else(|| vec![receipts.clone()]);
        for receipt in receipts.iter().filter(|receipt| receipt["duplicate"] == false) {
            *firsts.entry(text(&receipt["rollout_id"]).to_owned()).or_default() += 1;
        }
    }
    for (rollout, count) in firsts {
        assert_eq!(count, 1, "{rollout} was stored for the first time more than once");
    }
}

/// Every group is trained by one batch, and every successful ack belongs to such a batch.
fn trained_once(history: &[Event], stories: &[Value], batches: &[Value], groups: usize) {
    let trained: BTreeSet<&str> =
        batches.iter().filter(|batch| batch["state"] == "trained").map(|batch| text(&batch["batch_id"])).collect();
    let mut of_group: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for story in stories {
        assert_eq!(story["state"], "trained", "{story}");
        let carried = story["batches"].as_array().expect("a story lists its batches");
        let carried = carried.iter().map(text).filter(|batch| trained.contains(batch));
        of_group.entry(text(&story["group"]["group_id"])).or_default().extend(carried);
    }
    assert_eq!(of_group.len(), groups);
    for (group, batches) in &of_group {
        assert_eq!(batches.len(), 1, "{group} is trained by {batches:?}");
    }
    let mut leases: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for event in history {
        if let (Call::Ack { batch, lease }, Outcome::Ok(_)) = (&event.call, &event.outcome) {
            assert!(trained.contains(batch.as_str()), "{batch} was acked and is not trained");
            leases.entry(batch).or_default().insert(lease);
        }
    }
    for (batch, leases) in leases {
        assert_eq!(leases.len(), 1, "{batch} was acked under several leases");
    }
}

/// Every delivery consists of whole groups, and a batch has the same contents each time.
fn delivered_whole(history: &[Event]) {
    let mut contents: BTreeMap<&str, &Vec<String>> = BTreeMap::new();
    for event in history {
        let Call::Read { batch, rollouts } = &event.call else { continue };
        let before = contents.entry(batch).or_insert(rollouts);
        assert_eq!(*before, rollouts, "{batch} changed between deliveries");
        let mut members: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for rollout in rollouts {
            let (group, _) = rollout.rsplit_once('-').expect("ids are group-index");
            assert!(members.entry(group).or_default().insert(rollout), "{rollout} is delivered twice");
        }
        for (group, members) in members {
            assert_eq!(members.len(), GROUP_SIZE, "{group} is delivered in part: {members:?}");
        }
    }
}

/// No call under a lease succeeds if it was made after a later lease of the same batch had been granted.
fn leases_do_not_overlap(history: &[Event]) {
    // The attempt number of each lease, and when the client learned of it.
    let mut granted: BTreeMap<&str, (i64, u64, &str)> = BTreeMap::new();
    for event in history {
        let (Call::Lease, Outcome::Ok(descriptor)) = (&event.call, &event.outcome) else { continue };
        if descriptor.is_null() {
            continue;
        }
        let attempt = descriptor["attempt"].as_i64().expect("a number");
        let entry = (attempt, event.ended, text(&descriptor["batch_id"]));
        let known = granted.entry(text(&descriptor["lease"])).or_insert(entry);
        assert_eq!((known.0, known.2), (entry.0, entry.2), "a lease is of one delivery");
        known.1 = known.1.min(entry.1);
    }
    let mut by_batch: BTreeMap<&str, Vec<(i64, u64)>> = BTreeMap::new();
    for &(attempt, ended, batch) in granted.values() {
        by_batch.entry(batch).or_default().push((attempt, ended));
    }
    for deliveries in by_batch.values() {
        let attempts: BTreeSet<i64> = deliveries.iter().map(|(attempt, _)| *attempt).collect();
        assert_eq!(attempts.len(), deliveries.len(), "two leases are of the same delivery");
    }
    for event in history {
        let (Call::Extend { batch, lease } | Call::Ack { batch, lease } | Call::Nack { batch, lease }) = &event.call
        else {
            continue;
        };
        let Outcome::Ok(_) = event.outcome else { continue };
        let Some(&(attempt, ..)) = granted.get(lease.as_str()) else { continue };
        let superseded =
            by_batch[batch.as_str()].iter().any(|&(later, known)| later > attempt && known < event.invoked);
        // A repeated ack is recognised under the lease that acked.
        let is_ack = matches!(event.call, Call::Ack { .. });
        assert!(!superseded || is_ack && acked_before(history, event, lease), "{event:?} succeeded under a lost lease");
    }
}

/// Whether an earlier call had acked under the same lease, with a known or an unknown outcome.
fn acked_before(history: &[Event], event: &Event, lease: &str) -> bool {
    history.iter().any(|earlier| {
        earlier.invoked < event.invoked && matches!(&earlier.call, Call::Ack { lease: same, .. } if same == lease)
    })
}
