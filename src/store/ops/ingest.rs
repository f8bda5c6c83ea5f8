//! Stage 2 in the store: bundles are inserted, verdicts given and complete groups decided in one transaction.
//!
//! Groups are locked in the order of their keys, so that bundles which share groups never wait for each other in a
//! circle; what a racing replica inserted meanwhile fails the unique index, and the transaction runs again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use async_trait::async_trait;
use forebay_client::wire::{GroupState, Verdict};

use super::{
    admission::{self, Rooms},
    fill,
    group::{self, LockedGroup},
    insert::{Arrived, insert},
    names, policy,
};
use crate::{
    buffer::{
        admission::Room,
        ids::{GroupPk, IdKey, PolicyName, PolicyPk},
        ingest::{GroupFill, NewRollout, RolloutDecision},
        refusal::Refusal,
        trajectory::ResolvedVersions,
    },
    store::{
        BundleOutcome, Ingest, Ingested, Policy, StoreError,
        dialect::{Class, Op},
        sql::{Row, Statement, Tx, args},
        tally::{ASSUMED_VERSION, LIVE_BYTES},
    },
};

#[async_trait]
impl Op for Ingest {
    type Output = Vec<BundleOutcome>;

    const CLASS: Class = Class::Bulk;

    fn bytes(&self) -> usize {
        self.bundles.iter().flatten().map(|new| new.payload.body.len()).sum()
    }

    /// What a refused bundle did before it was refused goes with the transaction when it has that to itself.
    fn undoes(outcomes: &Self::Output) -> bool {
        matches!(outcomes.as_slice(), [Err(_)])
    }

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        if let [bundle] = self.bundles.as_slice() {
            return Ok(vec![ingest_bundle(tx, self, bundle).await?]);
        }
        let mut outcomes: Vec<(usize, BundleOutcome)> = Vec::with_capacity(self.bundles.len());
        for index in in_lock_order(&self.bundles) {
            tx.savepoint().await?;
            let outcome = ingest_bundle(tx, self, &self.bundles[index]).await?;
            if outcome.is_ok() {
                tx.release().await?;
            } else {
                tx.rollback().await?;
            }
            outcomes.push((index, outcome));
        }
        outcomes.sort_by_key(|(index, _)| *index);
        Ok(outcomes.into_iter().map(|(_, outcome)| outcome).collect())
    }
}

/// The order in which the bundles of one transaction run: locks are kept until its end, so they are taken in one order
/// by all. Bundles of the same group stay in the order in which they came.
fn in_lock_order(bundles: &[Vec<NewRollout>]) -> Vec<usize> {
    let first_lock = |bundle: &Vec<NewRollout>| bundle.iter().map(lock_key).min();
    let mut order: Vec<usize> = (0..bundles.len()).collect();
    order.sort_by_key(|&index| first_lock(&bundles[index]));
    order
}

/// What orders the locks of groups.
fn lock_key(new: &NewRollout) -> (PolicyName, IdKey) {
    (new.policy.clone(), new.group().key())
}

/// A rollout that is already stored.
struct Stored {
    content: Vec<u8>,
    group_pk: GroupPk,
    decision: RolloutDecision,
    fill: GroupFill,
}

type RolloutKey = (PolicyPk, IdKey);

async fn ingest_bundle(tx: &mut Tx<'_>, ingest: &Ingest, bundle: &[NewRollout]) -> Result<BundleOutcome, StoreError> {
    let policies = match policies(tx, bundle).await? {
        Ok(policies) => policies,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let mut stored = stored(tx, &policies, bundle).await?;
    let is_new = |new: &&NewRollout| !stored.contains_key(&(policies[&new.policy].policy_pk, new.rollout_id.key()));
    let newcomers: Vec<&NewRollout> = bundle.iter().filter(is_new).collect();
    let rooms = admission::take(tx, &policies, &newcomers, ingest.now).await?;
    let mut groups = match lock_groups(tx, ingest, &policies, &newcomers, &rooms).await? {
        Ok(groups) => groups,
        Err(refusal) => return Ok(Err(refusal)),
    };
    let mut receipts = Vec::with_capacity(bundle.len());
    let mut arrived = Vec::with_capacity(newcomers.len());
    for (index, new) in bundle.iter().enumerate() {
        let policy = &policies[&new.policy];
        let key = (policy.policy_pk, new.rollout_id.key());
        if let Some(stored) = stored.get(&key) {
            match repeat(stored, new, index, &groups, policy) {
                Ok(receipt) => receipts.push(receipt),
                Err(refusal) => return Ok(Err(refusal)),
            }
            continue;
        }
        let group = groups
            .get_mut(&(policy.policy_pk, new.group().key()))
            .expect("lock_groups locked the group of every newcomer");
        let place = Place { room: rooms.of(new), index };
        match admit(tx, ingest, policy, group, new, place, &mut arrived).await? {
            Ok(receipt) => {
                stored.insert(key, Stored::of(new, group, &receipt));
                receipts.push(receipt);
            }
            Err(refusal) => return Ok(Err(refusal)),
        }
    }
    insert(tx, ingest, &mut arrived).await?;
    for group in groups.values() {
        write_counts(tx, group).await?;
    }
    Ok(Ok(receipts))
}

impl Stored {
    fn of(new: &NewRollout, group: &Arrivals, receipt: &Ingested) -> Self {
        Self {
            content: new.content.as_bytes().to_vec(),
            group_pk: group.locked.group_pk,
            decision: receipt.decision.clone(),
            fill: receipt.fill,
        }
    }
}

async fn policies(
    tx: &mut Tx<'_>,
    bundle: &[NewRollout],
) -> Result<Result<BTreeMap<PolicyName, Policy>, Refusal>, StoreError> {
    let mut policies = BTreeMap::new();
    for new in bundle {
        if !policies.contains_key(&new.policy) {
            let Some(policy) = policy::find(tx, &new.policy).await? else {
                return Ok(Err(Refusal::UnknownPolicy(new.policy.clone())));
            };
            policies.insert(new.policy.clone(), policy);
        }
    }
    Ok(Ok(policies))
}

/// The rollouts of a bundle that are already stored.
async fn stored(
    tx: &mut Tx<'_>,
    policies: &BTreeMap<PolicyName, Policy>,
    bundle: &[NewRollout],
) -> Result<HashMap<RolloutKey, Stored>, StoreError> {
    const SELECT_STORED: Statement = Statement {
        sqlite: "-- select_stored
            SELECT r.rollout_pk, r.rollout_key, r.content_digest, r.verdict, r.reason, r.failed_filters,
                r.policy_version, r.version_assumed, r.group_pk, g.state, g.size, g.kept, g.masked, g.dropped
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.policy_pk = $1 AND r.run = $2 AND r.rollout_key IN (SELECT unhex(value) FROM json_each($3))",
        postgres: "-- select_stored
            SELECT r.rollout_pk, r.rollout_key, r.content_digest, r.verdict, r.reason, r.failed_filters,
                r.policy_version, r.version_assumed, r.group_pk, g.state, g.size, g.kept, g.masked, g.dropped
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.policy_pk = $1 AND r.run = $2
                AND r.rollout_key = ANY (ARRAY(SELECT decode(v, 'hex') FROM json_array_elements_text($3::json) AS v))",
    };
    let mut stored = HashMap::new();
    for (name, policy) in policies {
        let keys: Vec<String> =
            bundle.iter().filter(|new| new.policy == *name).map(|new| new.rollout_id.key().to_hex()).collect();
        let keys = serde_json::to_string(&keys).expect("hex keys always serialize");
        for mut row in tx.fetch_all(SELECT_STORED, args![policy.policy_pk, policy.run, keys]).await? {
            let key = IdKey::from_bytes(row.get("rollout_key")?);
            stored.insert((policy.policy_pk, key), read_stored(&mut row)?);
        }
    }
    Ok(stored)
}

fn read_stored(row: &mut Row) -> Result<Stored, StoreError> {
    Ok(Stored {
        content: row.get("content_digest")?,
        group_pk: row.get("group_pk")?,
        decision: RolloutDecision {
            admission_lapsed: false,
            trained_spans: None,
            verdict: row.parse("verdict")?,
            reason: row.get("reason")?,
            failed_filters: names(row.get("failed_filters")?),
            versions: ResolvedVersions {
                version: row.get("policy_version")?,
                trained: None,
                assumed: row.get("version_assumed")?,
            },
        },
        fill: fill(row, "state")?,
    })
}

/// The receipt of a retry, or the conflict of another rollout under the same name.
fn repeat(
    stored: &Stored,
    new: &NewRollout,
    index: usize,
    groups: &BTreeMap<RolloutKey, Arrivals>,
    policy: &Policy,
) -> Result<Ingested, Refusal> {
    if stored.content != new.content.as_bytes() {
        return Err(Refusal::RolloutConflict {
            rollout_id: new.rollout_id.to_string(),
            index,
            verdict: stored.decision.verdict,
        });
    }
    // A sibling in this bundle may have moved the group on.
    let now = groups.get(&(policy.policy_pk, new.group().key())).filter(|g| g.locked.group_pk == stored.group_pk);
    Ok(Ingested {
        policy: new.policy.clone(),
        rollout_id: new.rollout_id.clone(),
        group_id: new.group(),
        decision: stored.decision.clone(),
        duplicate: true,
        fill: now.map_or(stored.fill, |group| group.locked.fill),
        decided: None,
        discarded: None,
        failed_group_filters: Vec::new(),
    })
}

/// A locked group and what this bundle adds to it.
struct Arrivals {
    locked: LockedGroup,
    /// The group was decided before this bundle came, or in the middle of it.
    late: i64,
    changed: bool,
}

async fn lock_groups(
    tx: &mut Tx<'_>,
    ingest: &Ingest,
    policies: &BTreeMap<PolicyName, Policy>,
    newcomers: &[&NewRollout],
    rooms: &Rooms,
) -> Result<Result<BTreeMap<RolloutKey, Arrivals>, Refusal>, StoreError> {
    let mut first_of_group: BTreeMap<(PolicyName, IdKey), &NewRollout> = BTreeMap::new();
    for new in newcomers {
        first_of_group.entry(lock_key(new)).or_insert(new);
    }
    let mut groups = BTreeMap::new();
    let mut admitted = BTreeSet::new();
    for ((_, group_key), first) in first_of_group {
        let policy = &policies[&first.policy];
        let locked = if let Some(locked) = group::lock(tx, policy.policy_pk, policy.run, &first.group()).await? {
            locked
        } else {
            // Room that was reserved is there, whatever came in between.
            let reserved = matches!(rooms.of(first), Room::Reserved(_));
            if !reserved && admitted.insert(policy.policy_pk) {
                let backlog = admission::backlog(tx, policy.policy_pk).await?;
                if let Err(refusal) = ingest.decide.admits(&policy.name, &policy.rules, backlog) {
                    return Ok(Err(refusal));
                }
            }
            open_group(tx, ingest, policy, first).await?
        };
        groups.insert((policy.policy_pk, group_key), Arrivals { locked, late: 0, changed: false });
    }
    Ok(Ok(groups))
}

async fn open_group(
    tx: &mut Tx<'_>,
    ingest: &Ingest,
    policy: &Policy,
    first: &NewRollout,
) -> Result<LockedGroup, StoreError> {
    // A replica that opens the same group at once waits here for the other's commit and then fails the unique index.
    const OPEN_GROUP: Statement = Statement::new(
        "-- open_group
        INSERT INTO rollout_group (
            policy_pk, run, group_key, group_id, rules_pk, environment, state, size, min_size, kept, masked, dropped,
            late, payload_bytes, opened_us, deadline_us, samples, trained_samples, tokens, trained_tokens, reward_sum,
            reward_count, failed_deliveries, delivered
        )
        VALUES ($1, $2, $3, $4, $5, $6, 'open', $7, $8, 0, 0, 0, 0, 0, $9, $10, 0, 0, 0, 0, 0, 0, 0, 0)
        RETURNING group_pk",
    );
    let rules = &policy.rules;
    let group_id = first.group();
    let size = first.group_size.unwrap_or(rules.group.size);
    let min_size = rules.min_size(size);
    let environment = first.facts.environment.as_deref();
    let values = args![
        policy.policy_pk,
        policy.run,
        group_id.key().as_bytes(),
        group_id.as_str(),
        policy.rules_pk,
        environment,
        size,
        min_size,
        ingest.now,
        ingest.now.plus_seconds(rules.group.timeout_s),
    ];
    let group_pk = tx.fetch_one(OPEN_GROUP, values).await?.get("group_pk")?;
    tx.tallies().groups(policy.policy_pk, "open", 1);
    Ok(LockedGroup {
        group_pk,
        policy_pk: policy.policy_pk,
        run: policy.run,
        group_id: group_id.as_str().to_owned(),
        rules: std::sync::Arc::clone(rules),
        fill: GroupFill { state: GroupState::Open, size, kept: 0, masked: 0, dropped: 0 },
        reason: None,
        min_size,
        environment: environment.map(str::to_owned),
        failed_filters: Vec::new(),
        opened_at: ingest.now,
        payload_bytes: 0,
    })
}

/// Where a rollout stands in its bundle, and what its admission gives it.
struct Place {
    room: Room,
    index: usize,
}

async fn admit<'b>(
    tx: &mut Tx<'_>,
    ingest: &Ingest,
    policy: &Policy,
    group: &mut Arrivals,
    new: &'b NewRollout,
    Place { room, index }: Place,
    arrived: &mut Vec<Arrived<'b>>,
) -> Result<Result<Ingested, Refusal>, StoreError> {
    let size = group.locked.fill.size;
    if new.group_size.is_some_and(|declared| declared != size) {
        let group_id = group.locked.group_id.clone();
        return Ok(Err(Refusal::GroupSizeConflict { group_id, index, size }));
    }
    if let Err(refusal) = ingest.decide.check(&group.locked.rules, new, room) {
        return Ok(Err(at_index(refusal, index)));
    }
    let decision = ingest.decide.rollout(&group.locked.rules, new, room, policy.version, group.locked.fill);
    let row = Arrived::new(&group.locked, new, &decision);
    let bytes = row.live_bytes();
    arrived.push(row);
    tally_arrival(tx, ingest, policy.policy_pk, new, &decision, bytes);
    group.changed = true;
    group.locked.fill.count(decision.verdict);
    group.late += i64::from(decision.verdict == Verdict::Late);
    group.locked.payload_bytes += bytes;
    let mut decided = None;
    if group.locked.fill.state == GroupState::Open
        && let Some(cause) = group.locked.fill.due(group.locked.rules.group.on_drop)
    {
        // The decision reads the group's rows.
        insert(tx, ingest, arrived).await?;
        group::finalize(tx, &mut group.locked, cause, &*ingest.decide, ingest.now).await?;
        decided = Some(group.locked.fill.state);
    }
    Ok(Ok(Ingested {
        policy: new.policy.clone(),
        rollout_id: new.rollout_id.clone(),
        group_id: new.group(),
        decision,
        duplicate: false,
        fill: group.locked.fill,
        decided,
        discarded: decided.and(group.locked.reason.clone()),
        failed_group_filters: decided.map(|_| group.locked.failed_filters.clone()).unwrap_or_default(),
    }))
}

/// Violations of a bundle start with the index of their trajectory; the caller knows whether there was an array.
fn at_index(refusal: Refusal, index: usize) -> Refusal {
    let Refusal::Invalid(mut violations) = refusal else { return refusal };
    for violation in &mut violations {
        violation.pointer.insert_str(0, &format!("/{index}"));
    }
    Refusal::Invalid(violations)
}

fn tally_arrival(
    tx: &mut Tx<'_>,
    ingest: &Ingest,
    policy: PolicyPk,
    new: &NewRollout,
    decision: &RolloutDecision,
    bytes: i64,
) {
    let tallies = tx.tallies();
    tallies.received(policy, new.facts.reward, ingest.now);
    tallies.add(policy, LIVE_BYTES, bytes);
    tallies.add(policy, ASSUMED_VERSION, i64::from(decision.versions.assumed));
    match decision.verdict {
        Verdict::Kept | Verdict::Masked => tallies.rollouts(policy, "open", 1),
        Verdict::Late => tallies.rollouts(policy, "late", 1),
        Verdict::Dropped => {
            tallies.rollouts(policy, "dropped", 1);
            tallies.dropped(policy, decision.reason.as_deref().unwrap_or_default(), ingest.now);
        }
    }
}

/// Writes what a bundle added to a group; its state, if it was decided, is already written.
async fn write_counts(tx: &mut Tx<'_>, group: &Arrivals) -> Result<(), StoreError> {
    const WRITE_COUNTS: Statement = Statement::new(
        "-- write_counts
        UPDATE rollout_group
        SET kept = $2, masked = $3, dropped = $4, late = late + $5, payload_bytes = $6
        WHERE group_pk = $1",
    );
    if !group.changed {
        return Ok(());
    }
    let LockedGroup { group_pk, fill, payload_bytes, .. } = &group.locked;
    let values = args![*group_pk, fill.kept, fill.masked, fill.dropped, group.late, *payload_bytes];
    tx.guarded(WRITE_COUNTS, values, 1).await
}
