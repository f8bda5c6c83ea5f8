//! Reads the stored data for the bundles of one transaction, under locks that keep it current.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use forebay_domain::{
    admission::{Backlog, room::NextBatch},
    clock::Timestamp,
    formats::canonical::escape,
    ids::{BlobDigest, GroupPk, IdKey, PolicyName, PolicyPk, SessionPk},
    ingest::{decide::RolloutDecision, new_rollout::NewRollout},
    media::{MEDIA_BYTES_MAX, SCHEME},
    policies::Policy,
    refusal::Refusal,
    rules::Rules,
    session::EndSession,
    trajectory::ResolvedVersions,
};
use forebay_wire::Retries;

use super::work::{GroupWork, Incoming, IncomingBundle, Keyed, Stored};
use crate::{
    error::StoreError,
    ops::{
        admission::{Allowances, StoredBacklog, next_batch},
        blobs::{self, BlobPk, Kept, NamedBlob},
        evals, fill, group, names, policy, read_json,
        session::{self, EndingSession},
        trained_versions,
    },
    sql::{NewKeys, Row, Statement, Tx, args, id_key_list, key_found, key_run},
};

/// The stored data.
pub(super) struct Snapshot {
    pub(super) policies: BTreeMap<PolicyName, Policy>,
    pub(super) stored: HashMap<Keyed, Stored>,
    pub(super) groups: BTreeMap<Keyed, GroupWork>,
    /// The backlogs of the policies for which groups may be opened.
    pub(super) backlogs: HashMap<PolicyName, StoredBacklog>,
    /// The next batches of those of these policies that may be full.
    pub(super) next_batches: HashMap<PolicyPk, NextBatch>,
    pub(super) allowances: Allowances,
    /// The names of the suites of those policies that are evaluations.
    pub(super) suites: HashMap<PolicyPk, BTreeSet<String>>,
    /// Ids of rollouts that evaluate a policy and that rollouts which are trained have: one of both could not be looked up.
    pub(super) taken: HashSet<Keyed>,
    /// The uploads that new rollouts name and that are stored whole.
    named: HashMap<BlobDigest, NamedBlob>,
    /// The sessions that bundles end.
    pub(super) sessions: HashMap<SessionPk, EndingSession>,
    /// Keys for the rows of new rollouts, ascending.
    pub(super) rollout_pks: NewKeys,
    /// Keys for the rows of groups that do not exist, ascending in the order in which the groups are first named.
    pub(super) group_pks: HashMap<Keyed, GroupPk>,
}

impl Snapshot {
    pub(super) async fn read(
        tx: &mut Tx<'_>,
        bundles: &[IncomingBundle<'_>],
        now: Timestamp,
    ) -> Result<Self, StoreError> {
        let all: Vec<&Incoming<'_>> = bundles.iter().flat_map(|bundle| &bundle.rollouts).collect();
        let ends: Vec<&EndSession> = bundles.iter().flat_map(|bundle| bundle.ends).collect();
        let policies = policies(tx, &all, &ends).await?;
        let sessions = session::lock_ending(tx, &ends).await?;
        let stored = stored(tx, &policies, &all).await?;
        let is_new = |incoming: &&&Incoming<'_>| {
            let policy = policies.get(&incoming.new.policy);
            policy.is_some_and(|policy| !stored.contains_key(&(policy.policy_pk, incoming.rollout_key)))
        };
        let newcomers: Vec<&Incoming<'_>> = all.iter().filter(is_new).copied().collect();
        let named = newcomers.iter().flat_map(|incoming| incoming.new.named()).collect();
        let uploads = blobs::lock_named(tx, &named).await?;
        let allowances = Allowances::lock(tx, &policies, &newcomers, now).await?;
        let mut groups = BTreeMap::new();
        let (mut backlogs, mut next_batches) = (HashMap::new(), HashMap::new());
        for (name, policy) in &policies {
            let newcomers_of = newcomers_of(name, &newcomers);
            if newcomers_of.is_empty() {
                continue;
            }
            let locked =
                group::lock_all(tx, policy.policy_pk, policy.run, &newcomers_of.keys().copied().collect()).await?;
            let mut locked: BTreeMap<IdKey, GroupWork> =
                locked.into_iter().map(|(key, group)| (key, GroupWork::stored(group))).collect();
            if locked.len() < newcomers_of.len() {
                let backlog = StoredBacklog::read(tx, policy.policy_pk).await?;
                let with_new = backlog.with(policy.policy_pk, tx.tallies()) + largest(name, &newcomers, &uploads);
                if !with_new.is_far_below(&policy.rules.backlog) {
                    next_batches.insert(policy.policy_pk, next_batch(tx, policy, &backlog).await?);
                }
                backlogs.insert(name.clone(), backlog);
            }
            read_members(tx, locked.iter_mut().map(|(key, group)| (newcomers_of[key], group))).await?;
            groups.extend(locked.into_iter().map(|(key, group)| ((policy.policy_pk, key), group)));
        }
        let (mut suites, mut taken) = (HashMap::new(), HashSet::new());
        for policy in policies.values().filter(|policy| policy.name.is_evaluations()) {
            suites.insert(policy.policy_pk, evals::suite_names(tx, policy.policy_pk).await?);
            if let Some(trained) = policy::find(tx, &policy.name.public()).await? {
                let of_policy = newcomers.iter().filter(|incoming| incoming.new.policy == policy.name);
                let found = evals::known(tx, &trained, of_policy.map(|incoming| incoming.rollout_key)).await?;
                taken.extend(found.into_iter().map(|key| (policy.policy_pk, key)));
            }
        }
        // A verdict that was not final when it was read may have become so before the group was locked.
        let locked: HashSet<GroupPk> = groups.values().map(|group: &GroupWork| group.locked.group_pk).collect();
        let waits = |stored: &Stored| !stored.decision.scoring.is_empty() && locked.contains(&stored.group_pk);
        let stored = if stored.values().any(waits) { self::stored(tx, &policies, &all).await? } else { stored };
        let named = newcomers.iter().map(|incoming| (policies[&incoming.new.policy].policy_pk, incoming.group_key));
        let mut seen = HashSet::new();
        let missing: Vec<Keyed> = named.filter(|key| !groups.contains_key(key) && seen.insert(*key)).collect();
        let [group_pks, rollout_pks] = new_keys(tx, missing.len(), newcomers.len()).await?;
        Ok(Self {
            rollout_pks,
            group_pks: missing.into_iter().zip(group_pks.map(GroupPk)).collect(),
            policies,
            stored,
            groups,
            backlogs,
            next_batches,
            allowances,
            suites,
            taken,
            named: uploads,
            sessions,
        })
    }
}

/// Keys for the rows of new groups and of new rollouts, ascending.
async fn new_keys(tx: &mut Tx<'_>, groups: usize, rollouts: usize) -> Result<[NewKeys; 2], StoreError> {
    // SQLite, with its single writer, reads the last keys. Postgres uses sequences, whose names it looks up once instead
    // of once for each key.
    const NEXT_KEYS: Statement = Statement {
        sqlite: "-- next_keys
            SELECT 0 AS is_rollout, COALESCE(MAX(seq), 0) + $1 AS last, $1 AS run
            FROM sqlite_sequence
            WHERE name = 'rollout_group'
            UNION ALL
            SELECT 1, COALESCE(MAX(seq), 0) + $2, $2
            FROM sqlite_sequence
            WHERE name = 'rollout'",
        postgres: "-- next_keys
            SELECT 0::bigint AS is_rollout,
                nextval((SELECT pg_get_serial_sequence('rollout_group', 'group_pk')::regclass)) AS last,
                1::bigint AS run
            FROM generate_series(1, $1)
            UNION ALL
            SELECT 1, nextval((SELECT pg_get_serial_sequence('rollout', 'rollout_pk')::regclass)), 1
            FROM generate_series(1, $2)",
    };
    let mut keys = [Vec::with_capacity(groups), Vec::with_capacity(rollouts)];
    if groups + rollouts > 0 {
        for mut row in tx.fetch_all(NEXT_KEYS, args![groups, rollouts]).await? {
            keys[usize::from(row.get::<bool>("is_rollout")?)].extend(key_run(&mut row)?);
        }
    }
    Ok(keys.map(|mut keys| {
        keys.sort_unstable();
        keys.into_iter()
    }))
}

async fn policies(
    tx: &mut Tx<'_>,
    all: &[&Incoming<'_>],
    ends: &[&EndSession],
) -> Result<BTreeMap<PolicyName, Policy>, StoreError> {
    let mut names: BTreeSet<&PolicyName> = all.iter().map(|incoming| &incoming.new.policy).collect();
    names.extend(ends.iter().flat_map(|end| &end.runs).map(|(policy, _)| policy));
    let mut policies = BTreeMap::new();
    for name in names {
        if let Some(policy) = policy::find(tx, name).await? {
            policies.insert(name.clone(), policy);
        }
    }
    Ok(policies)
}

/// The stored rollouts among those of the bundles.
async fn stored(
    tx: &mut Tx<'_>,
    policies: &BTreeMap<PolicyName, Policy>,
    all: &[&Incoming<'_>],
) -> Result<HashMap<Keyed, Stored>, StoreError> {
    const SELECT_STORED: Statement = Statement {
        sqlite: "-- select_stored
            SELECT r.rollout_pk, r.rollout_id, r.execution, r.content_digest, r.verdict, r.reason,
                r.failed_filters, r.policy_version, r.version_assumed, r.version_min, r.version_max, r.group_pk,
                g.rules_pk, g.state, g.reason AS group_reason, g.size, g.kept, g.masked, g.dropped, g.scoring, r.reward,
                w.missing
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
            WHERE r.policy_pk = $1 AND r.run = $2 AND r.rollout_key IN (SELECT unhex(value) FROM json_each($3))",
        postgres: "-- select_stored
            SELECT r.rollout_pk, r.rollout_id, r.execution, r.content_digest, r.verdict, r.reason,
                r.failed_filters, r.policy_version, r.version_assumed, r.version_min, r.version_max, r.group_pk,
                g.rules_pk, g.state, g.reason AS group_reason, g.size, g.kept, g.masked, g.dropped, g.scoring, r.reward,
                w.missing
            FROM unnest($3::bytea[]) AS k (rollout_key)
            -- One lookup in the unique index for each key. Without OFFSET and without statistics, the planner would
            -- read a range of the index once and filter it, because it estimates that as cheap.
            CROSS JOIN LATERAL (
                SELECT rollout_pk, rollout_id, execution, content_digest, verdict, reason, failed_filters,
                    policy_version, version_assumed, version_min, version_max, group_pk, reward
                FROM rollout
                WHERE policy_pk = $1 AND run = $2 AND rollout_key = k.rollout_key
                OFFSET 0
            ) AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk",
    };
    let mut stored = HashMap::new();
    for (name, policy) in policies {
        let of_policy = || all.iter().filter(|incoming| incoming.new.policy == *name);
        let keys: BTreeSet<IdKey> = of_policy().map(|incoming| incoming.rollout_key).collect();
        let by_rules = of_policy().filter(|incoming| incoming.new.depends_on_rules());
        let by_rules: BTreeSet<IdKey> = by_rules.map(|incoming| incoming.rollout_key).collect();
        let list = id_key_list(keys.iter().copied());
        for mut row in tx.fetch_all(SELECT_STORED, args![policy.policy_pk, policy.run, list]).await? {
            let key = key_found(&row.get::<String>("rollout_id")?, |found| keys.contains(found))?;
            let depends_on_rules = by_rules.contains(&key);
            stored.insert((policy.policy_pk, key), read_stored(tx, &mut row, depends_on_rules).await?);
        }
    }
    Ok(stored)
}

/// Reads a stored rollout. The rules of its group are read only if its receipt depends on them.
async fn read_stored(tx: &mut Tx<'_>, row: &mut Row, depends_on_rules: bool) -> Result<Stored, StoreError> {
    let rules_pk = row.get("rules_pk")?;
    let retries = if depends_on_rules { tx.rules(rules_pk).await?.sessions.retries } else { Retries::default() };
    Ok(Stored {
        content: row.get("content_digest")?,
        execution_id: row.get("execution")?,
        group_pk: row.get("group_pk")?,
        decision: RolloutDecision {
            admission_lapsed: false,
            retries,
            trained_spans: None,
            reward: row.get("reward")?,
            scoring: read_json(row, "missing")?.unwrap_or_default(),
            over_budget: Vec::new(),
            verdict: row.get("verdict")?,
            reason: row.get("reason")?,
            failed_filters: names(row.get("failed_filters")?),
            versions: ResolvedVersions {
                version: row.get("policy_version")?,
                trained: trained_versions(row)?,
                assumed: row.get("version_assumed")?,
            },
        },
        fill: fill(row, "state")?,
        discarded: row.get("group_reason")?,
    })
}

impl Snapshot {
    /// The uploads that a new rollout names, each once. All must be stored whole.
    pub(super) fn named(&self, index: usize, new: &NewRollout, rules: &Rules) -> Result<Vec<NamedBlob>, Refusal> {
        let mut named: BTreeMap<BlobPk, NamedBlob> = BTreeMap::new();
        let mut add = |blob: NamedBlob| {
            let known = named.entry(blob.blob_pk).or_insert(blob);
            known.kept = known.kept.max(blob.kept);
            known.is_column &= blob.is_column;
        };
        for digest in &new.media {
            let blob = self.named.get(digest).copied().ok_or_else(|| {
                let (message, upload) = (format!("`{SCHEME}{digest}`"), format!("/media/{digest}"));
                not_here(format!("/{index}/messages"), &message, &upload)
            })?;
            if blob.bytes > MEDIA_BYTES_MAX {
                let detail = format!(
                    "names `{SCHEME}{digest}`, which has {} bytes: a medium has at most {MEDIA_BYTES_MAX}",
                    blob.bytes
                );
                return Err(Refusal::invalid(format!("/{index}/messages"), detail));
            }
            add(blob);
        }
        for (segment, shape) in new.form(rules.sessions.retries).facts.shapes.iter().enumerate() {
            for (name, column) in &shape.columns {
                let pointer = format!("/{index}/segments/{segment}/columns/{}", escape(name));
                let (digest, bytes) = (column.digest, column.bytes);
                let blob = self.named.get(&digest).copied().ok_or_else(|| {
                    not_here(pointer.clone(), &format!("the upload {digest}"), &format!("/columns/{digest}"))
                })?;
                if blob.bytes != bytes {
                    let detail = format!("is of {bytes} bytes, but the upload {digest} has {}", blob.bytes);
                    return Err(Refusal::invalid(pointer, detail));
                }
                let kept = rules.columns.get(name).map_or(Kept::Rollout, |rule| rule.retention.into());
                add(NamedBlob { kept, is_column: true, ..blob });
            }
        }
        Ok(named.into_values().collect())
    }
}

fn not_here(pointer: String, named: &str, upload: &str) -> Refusal {
    let detail = format!(
        "names {named}, which is not here: upload it whole with PUT {upload} first, and not more than a day before the rollout"
    );
    Refusal::invalid(pointer, detail)
}

/// The groups of the new rollouts of a policy, and how many new rollouts each group has.
fn newcomers_of(policy: &PolicyName, newcomers: &[&Incoming<'_>]) -> BTreeMap<IdKey, u32> {
    let mut count = BTreeMap::new();
    for incoming in newcomers.iter().filter(|incoming| incoming.new.policy == *policy) {
        *count.entry(incoming.group_key).or_default() += 1;
    }
    count
}

/// The most that the new rollouts of a policy add to its backlog.
fn largest(policy: &PolicyName, newcomers: &[&Incoming<'_>], uploads: &HashMap<BlobDigest, NamedBlob>) -> Backlog {
    let mut sum = Backlog::default();
    for incoming in newcomers.iter().filter(|incoming| incoming.new.policy == *policy) {
        sum.rollouts += 1;
        let named: BTreeSet<BlobDigest> = incoming.new.named().collect();
        let named = named.iter().filter_map(|digest| uploads.get(digest)).map(|named| named.bytes);
        sum.bytes += incoming.new.payload_bytes() as u64 + named.sum::<u64>();
    }
    sum
}

/// Reads the members of the groups that the new rollouts may complete.
async fn read_members<'g>(
    tx: &mut Tx<'_>,
    groups: impl Iterator<Item = (u32, &'g mut GroupWork)>,
) -> Result<(), StoreError> {
    let may_be_due = |(more, group): &(u32, &mut GroupWork)| group.locked.fill.may_be_due(*more);
    let mut due: Vec<&mut GroupWork> = groups.filter(may_be_due).map(|(_, group)| group).collect();
    if due.is_empty() {
        return Ok(());
    }
    let mut members = group::members(tx, due.iter().map(|group| (group.locked.group_pk, &*group.locked.rules))).await?;
    for group in &mut due {
        group.members = members.remove(&group.locked.group_pk).unwrap_or_default();
    }
    Ok(())
}
