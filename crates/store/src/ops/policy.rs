//! Policies: their rules and versions, and what the next batch is waiting for.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    ids::{Epoch, PolicyName, PolicyPk, Run, Step, Version},
    ingest::decide::GroupFill,
    lineage::{Publish, VERSION_RISE_MAX},
    looking::journal::Happening,
    policies::{
        EnvironmentGroups, ExistingPolicy, HeldBatch, OpenGroup, Policy, ReadEnvironments, RulesWritten,
        WaitingConsumer, WaitingFor, WriteRules,
    },
    refusal::Refusal,
    staleness::Pause,
    states::GroupState,
    tally::{Tallies, Tally},
};
use forebay_wire::{PolicyRules, Violation};
use std::collections::BTreeMap;

use super::{claim::turns, evals, journal, quotas};
use crate::{
    error::StoreError,
    op::Op,
    sql::{Row, Statement, Tx, args, locking},
    tally::{Recent, minute},
};

/// The most versions that are kept per policy. When there are more, every second version of the older half is deleted.
/// A resume to the newer half or to the last checkpoint then finds the exact version, and a resume further back finds
/// an earlier one. This is about a megabyte with the addresses of the weights.
const VERSIONS_MAX: i64 = 10_000;

/// The most open groups that a waiting trainer is told about.
const FULLEST_MAX: i64 = 5;

/// The most open groups that are read to find the fullest ones. The result is only shown to people, and must not cost a
/// scan.
const OPEN_SAMPLE_MAX: i64 = 1_000;

/// The most consumers that `waiting` shows, of those that wait and of those that hold a batch.
const SHOWN_MAX: i64 = 8;

/// How many minutes of drops `waiting` adds up.
pub(crate) const RECENT_MINUTES: i64 = 60;

macro_rules! select_policy {
    ($tail:literal) => {
        concat!(
            "-- select_policy
            SELECT policy_pk, name, rules_pk, run, epoch, version, version_step, version_uri, acked_step,
                checkpoint_step, steps_known, restored_epoch, refused, pause_version, pause_us,
                given_up_version
            FROM policy ",
            $tail
        )
    };
}

/// Reads a policy.
pub(super) async fn find(tx: &mut Tx<'_>, name: &PolicyName) -> Result<Option<Policy>, StoreError> {
    const SELECT_POLICY: Statement = Statement::new(select_policy!("WHERE name = $1"));
    let row = tx.fetch_optional(SELECT_POLICY, args![name.as_str()]).await?;
    read_optional(tx, row).await
}

/// Reads a policy and locks its row. This lock serialises claims, acks, versions and the lineage.
pub(super) async fn lock(tx: &mut Tx<'_>, name: &PolicyName) -> Result<Option<Policy>, StoreError> {
    const LOCK_POLICY: Statement = locking!(select_policy!("WHERE name = $1"));
    let row = tx.fetch_optional(LOCK_POLICY, args![name.as_str()]).await?;
    read_optional(tx, row).await
}

/// Locks the policy that a row refers to.
pub(super) async fn lock_by_key(tx: &mut Tx<'_>, policy_pk: PolicyPk) -> Result<Policy, StoreError> {
    const LOCK_POLICY_BY_KEY: Statement = locking!(select_policy!("WHERE policy_pk = $1"));
    let row = tx.fetch_one(LOCK_POLICY_BY_KEY, args![policy_pk]).await?;
    read(tx, row).await
}

async fn read_optional(tx: &mut Tx<'_>, row: Option<Row>) -> Result<Option<Policy>, StoreError> {
    match row {
        Some(row) => read(tx, row).await.map(Some),
        None => Ok(None),
    }
}

async fn read(tx: &mut Tx<'_>, mut row: Row) -> Result<Policy, StoreError> {
    let name: String = row.get("name")?;
    let rules_pk = row.get("rules_pk")?;
    let epoch: Epoch = row.get("epoch")?;
    let refused: String = row.get("refused")?;
    let pause: (Option<Version>, Option<Timestamp>) = (row.get("pause_version")?, row.get("pause_us")?);
    let pause = pause.0.zip(pause.1).map(|(version, since)| Pause { version, since });
    Ok(Policy {
        policy_pk: row.get("policy_pk")?,
        name: PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(format!("policy `{name}`: {error}")))?,
        rules: tx.rules(rules_pk).await?,
        rules_pk,
        run: row.get("run")?,
        epoch,
        version: row.get("version")?,
        version_step: row.get("version_step")?,
        version_uri: row.get("version_uri")?,
        acked_step: row.get("acked_step")?,
        checkpoint_step: row.get("checkpoint_step")?,
        steps_known: row.get("steps_known")?,
        restored: row.get::<Option<Epoch>>("restored_epoch")? == Some(epoch),
        refused: serde_json::from_str(&refused).map_err(|error| StoreError::Corrupt(format!("refused: {error}")))?,
        pause,
        given_up: row.get("given_up_version")?,
    })
}

/// Refuses a caller whose lineage has ended.
pub(super) fn check_epoch(named: Option<Epoch>, current: Epoch) -> Result<(), Refusal> {
    match named {
        Some(named) if named != current => Err(Refusal::Superseded { named, current }),
        _ => Ok(()),
    }
}

pub struct FindPolicy(pub PolicyName);

#[async_trait]
impl Op for FindPolicy {
    type Output = Option<Policy>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        find(tx, &self.0).await
    }
}

/// Policies after a name, in order.
pub struct ListPolicies {
    pub after: String,
    pub limit: u32,
    /// Whether their evaluations are among them.
    pub evaluations: bool,
}

#[async_trait]
impl Op for ListPolicies {
    type Output = Vec<Policy>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LIST_POLICIES: Statement = Statement::new(select_policy!(
            "WHERE name > $1 AND ($3 = 1 OR name NOT LIKE '%@%') ORDER BY name LIMIT $2"
        ));
        let mut policies = Vec::new();
        for row in tx.fetch_all(LIST_POLICIES, args![self.after.as_str(), self.limit, self.evaluations]).await? {
            policies.push(read(tx, row).await?);
        }
        Ok(policies)
    }
}

#[async_trait]
impl Op for WriteRules {
    type Output = Result<RulesWritten, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Replicas that count at the same time may each exceed the bound by one. That is harmless, because it only
        // bounds memory.
        const COUNT_POLICIES: Statement = Statement::new(
            "-- count_policies
            SELECT CAST(COUNT(*) AS BIGINT) AS policies
            FROM policy
            WHERE name NOT LIKE '%@%'",
        );
        const REPLACE_RULES: Statement = Statement::new(
            "-- replace_rules
            UPDATE policy
            SET rules_pk = $2
            WHERE policy_pk = $1",
        );
        if let Some(policy) = lock(tx, &self.policy).await? {
            if matches!(self.existing, ExistingPolicy::ReplaceOnly(rules_pk) if rules_pk != policy.rules_pk) {
                return Ok(Ok(RulesWritten::Outdated));
            }
            if self.existing != ExistingPolicy::Keep && **policy.rules != **self.rules {
                if let Some(quotas) = &self.quotas
                    && let Err(refusal) = quotas::check_rules(tx, quotas, self, Some(&policy.rules)).await?
                {
                    return Ok(Err(refusal));
                }
                let rules_pk = insert_rules(tx, &self.rules, self.now).await?;
                tx.guarded(REPLACE_RULES, args![policy.policy_pk, rules_pk], 1).await?;
                evals::replace_rules(tx, &policy.name, &self.rules, self.now).await?;
                if let Some(changed) = Happening::rules_changed(&policy.rules, &self.rules) {
                    journal::write(tx, policy.policy_pk, &changed, self.by.as_ref(), self.now).await?;
                }
            }
            return Ok(Ok(RulesWritten::Existed(policy.rules)));
        }
        if let Some(quotas) = &self.quotas {
            let policies: i64 = tx.fetch_one(COUNT_POLICIES, args![]).await?.get("policies")?;
            if policies >= i64::from(quotas.policies_max) {
                return Ok(Err(Refusal::TooManyPolicies(quotas.policies_max)));
            }
            if let Err(refusal) = quotas::check_rules(tx, quotas, self, None).await? {
                return Ok(Err(refusal));
            }
        }
        let rules_pk = insert_rules(tx, &self.rules, self.now).await?;
        insert(tx, &self.policy, rules_pk, self.now).await?;
        Ok(Ok(RulesWritten::Created))
    }
}

/// Inserts a policy, in its first run.
pub(super) async fn insert(
    tx: &mut Tx<'_>,
    name: &PolicyName,
    rules_pk: i64,
    now: Timestamp,
) -> Result<(), StoreError> {
    const INSERT_POLICY: Statement = Statement::new(
        "-- insert_policy
        INSERT INTO policy (name, rules_pk, run, epoch, version, tally_mark, created_us)
        VALUES ($1, $2, 1, 0, 0, '{}', $3)",
    );
    tx.guarded(INSERT_POLICY, args![name.as_str(), rules_pk, now], 1).await
}

pub(super) async fn insert_rules(tx: &mut Tx<'_>, rules: &PolicyRules, now: Timestamp) -> Result<i64, StoreError> {
    const INSERT_RULES: Statement = Statement::new(
        "-- insert_rules
        INSERT INTO rules (body, created_us)
        VALUES ($1, $2)
        RETURNING rules_pk",
    );
    let body = serde_json::to_string(rules).expect("rules are numbers, names and expressions");
    tx.fetch_one(INSERT_RULES, args![body, now]).await?.get("rules_pk")
}

/// Publishes to all replicas, this one included.
pub struct PublishVersion(pub Publish);

#[async_trait]
impl Op for PublishVersion {
    type Output = Result<bool, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const INSERT_VERSION: Statement = Statement::new(
            "-- insert_version
            INSERT INTO version (policy_pk, version, step, uri, published_us)
            VALUES ($1, $2, $3, $4, $5)",
        );
        // The oldest version has an odd position, so it stays. The version of the last checkpoint stays as well, or
        // without a checkpoint the version from before any ack, because every resume that is not forced must find it.
        const THIN_OUT_VERSIONS: Statement = Statement::new(
            "-- thin_out_versions
            DELETE FROM version
            WHERE policy_pk = $1
                AND version IN (
                    SELECT version
                    FROM (
                        SELECT version, ROW_NUMBER() OVER (ORDER BY version) AS place
                        FROM version
                        WHERE policy_pk = $1
                            AND version < (
                                SELECT version FROM version WHERE policy_pk = $1 ORDER BY version DESC LIMIT 1 OFFSET $3
                            )
                            AND EXISTS (
                                SELECT version FROM version WHERE policy_pk = $1 ORDER BY version DESC LIMIT 1 OFFSET $2
                            )
                    ) AS older
                    WHERE place % 2 = 0
                )
                AND version <> COALESCE((
                    SELECT version
                    FROM version
                    WHERE policy_pk = $1 AND (step IS NULL OR step <= $4)
                    ORDER BY version DESC
                    LIMIT 1
                ), -1)",
        );
        let publish = &self.0;
        let Some(policy) = lock(tx, &publish.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(publish.policy.clone())));
        };
        if let Err(refusal) = check_epoch(publish.epoch, policy.epoch) {
            return Ok(Err(refusal));
        }
        // A version without a step counts as published at the last acked step.
        let step = publish.step.or(policy.acked_step);
        if publish.version <= policy.version {
            let repeats = publish.version == policy.version
                && publish.uri == policy.version_uri
                && publish.step.is_none_or(|step| Some(step) == policy.version_step);
            return Ok(if repeats { Ok(false) } else { Err(Refusal::VersionConflict(policy.version)) });
        }
        if !publish.force && publish.version.0.saturating_sub(policy.version.0) > VERSION_RISE_MAX {
            let most = policy.version.0.saturating_add(VERSION_RISE_MAX);
            let detail = format!(
                "must be at most {most}, because version {} is current; send `\"force\": true` if a greater one is meant",
                policy.version
            );
            return Ok(Err(Refusal::Invalid(vec![Violation { pointer: "/version".to_owned(), detail }])));
        }
        let uri = publish.uri.as_deref();
        tx.guarded(INSERT_VERSION, args![policy.policy_pk, publish.version, step, uri, publish.now], 1).await?;
        let values = args![policy.policy_pk, VERSIONS_MAX, VERSIONS_MAX / 2, policy.checkpoint_step];
        tx.execute(THIN_OUT_VERSIONS, values).await?;
        set_version(tx, policy.policy_pk, publish.version, step, uri).await?;
        Ok(Ok(true))
    }
}

/// Makes a version current, also for the rollouts that evaluate the policy.
pub(super) async fn set_version(
    tx: &mut Tx<'_>,
    policy: PolicyPk,
    version: Version,
    step: Option<Step>,
    uri: Option<&str>,
) -> Result<(), StoreError> {
    const SET_VERSION: Statement = Statement::new(
        "-- set_version
        UPDATE policy
        SET version = $2, version_step = $3, version_uri = $4
        WHERE policy_pk = $1",
    );
    tx.guarded(SET_VERSION, args![policy, version, step, uri], 1).await?;
    evals::follow(tx, policy).await
}

/// Tallies of every policy, or of one.
pub struct ReadTallies(pub Option<PolicyPk>);

#[async_trait]
impl Op for ReadTallies {
    type Output = BTreeMap<PolicyName, Tallies>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // Policies without any tally are listed too.
        const SELECT_TALLIES: Statement = Statement::new(
            "-- select_tallies
            SELECT p.name AS policy, t.name AS tally, CAST(SUM(t.value) AS BIGINT) AS value, SUM(t.amount) AS amount,
                MAX(t.latest_us) AS latest_us
            FROM policy AS p
            LEFT JOIN tally_now AS t ON t.policy_pk = p.policy_pk
            WHERE $1 = 0 OR p.policy_pk = $1
            GROUP BY p.name, t.name",
        );
        let policy = self.0.unwrap_or(PolicyPk(0));
        let mut tallies: BTreeMap<PolicyName, Tallies> = BTreeMap::new();
        for mut row in tx.fetch_all(SELECT_TALLIES, args![policy]).await? {
            let name: String = row.get("policy")?;
            let name = PolicyName::stored(&name).map_err(|error| StoreError::Corrupt(error.to_string()))?;
            let of_policy = tallies.entry(name).or_default();
            let Some(tally) = row.get::<Option<String>>("tally")?.as_deref().and_then(Tally::parse) else { continue };
            let (amount, latest_us): (f64, i64) = (row.get("amount")?, row.get("latest_us")?);
            if amount != 0.0 {
                of_policy.amounts.insert(tally.clone(), amount);
            }
            if latest_us > 0 {
                of_policy.latest.insert(tally.clone(), Timestamp::from_micros(latest_us));
            }
            of_policy.counts.insert(tally, row.get("value")?);
        }
        Ok(tallies)
    }
}

/// What the next batch of the policy is waiting for.
pub struct ReadWaiting {
    pub policy: PolicyPk,
    pub run: Run,
    pub now: Timestamp,
}

#[async_trait]
impl Op for ReadWaiting {
    type Output = WaitingFor;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<WaitingFor, StoreError> {
        const SELECT_FULLEST: Statement = Statement::new(
            "-- select_fullest
            SELECT group_id, size, kept, masked, dropped, scoring
            FROM (
                SELECT group_pk, group_id, size, kept, masked, dropped, scoring
                FROM rollout_group
                WHERE policy_pk = $1 AND run = $2 AND state = 'open'
                LIMIT $3
            ) AS open_groups
            ORDER BY size - kept - masked, group_pk
            LIMIT $4",
        );
        const SELECT_RECENT: Statement = Statement::new(
            "-- select_recent
            SELECT name, CAST(SUM(value) AS BIGINT) AS value
            FROM recent
            WHERE policy_pk = $1 AND minute > $2
            GROUP BY name",
        );
        const SELECT_ASKING: Statement = Statement::new(
            "-- select_asking
            SELECT consumer, since_us, until_us
            FROM waiting_consumer
            WHERE policy_pk = $1 AND until_us > $2
            ORDER BY since_us, consumer
            LIMIT $3",
        );
        const SELECT_HOLDING: Statement = Statement::new(
            "-- select_holding
            SELECT batch_id, consumer, granted_us AS since_us, expires_us, attempt
            FROM batch
            WHERE policy_pk = $1 AND run = $2 AND state = 'leased'
            ORDER BY granted_us, batch_pk
            LIMIT $3",
        );
        let mut waiting = WaitingFor::default();
        let open = args![self.policy, self.run, OPEN_SAMPLE_MAX, FULLEST_MAX];
        for mut row in tx.fetch_all(SELECT_FULLEST, open).await? {
            let fill = GroupFill {
                state: GroupState::Open,
                size: row.get("size")?,
                kept: row.get("kept")?,
                masked: row.get("masked")?,
                dropped: row.get("dropped")?,
                scoring: row.get("scoring")?,
            };
            waiting.fullest.push(OpenGroup { group_id: row.get("group_id")?, fill });
        }
        let since = minute(self.now) - RECENT_MINUTES;
        for mut row in tx.fetch_all(SELECT_RECENT, args![self.policy, since]).await? {
            match Recent::parse(&row.get::<String>("name")?) {
                Some(Recent::Dropped(rule)) => {
                    waiting.dropped.insert(rule, row.get("value")?);
                }
                Some(Recent::Stale) => waiting.stale = row.get("value")?,
                None => {}
            }
        }
        for mut row in tx.fetch_all(SELECT_ASKING, args![self.policy, self.now, SHOWN_MAX]).await? {
            waiting.asking.push(WaitingConsumer {
                consumer: row.get("consumer")?,
                since: row.get("since_us")?,
                until: row.get("until_us")?,
            });
        }
        for mut row in tx.fetch_all(SELECT_HOLDING, args![self.policy, self.run, SHOWN_MAX]).await? {
            waiting.holding.push(HeldBatch {
                batch_id: row.get("batch_id")?,
                consumer: row.get("consumer")?,
                since: row.get("since_us")?,
                expires_at: row.get("expires_us")?,
                attempt: row.get("attempt")?,
            });
        }
        Ok(waiting)
    }
}

#[async_trait]
impl Op for ReadEnvironments {
    type Output = EnvironmentGroups;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<EnvironmentGroups, StoreError> {
        const COUNT_OPEN_OF: Statement = Statement::new(
            "-- count_open_of
            SELECT COALESCE(environment, '') AS label, COUNT(*) AS open
            FROM (
                SELECT environment
                FROM rollout_group
                WHERE policy_pk = $1 AND run = $2 AND state = 'open'
                LIMIT $3
            ) AS open_groups
            GROUP BY COALESCE(environment, '')",
        );
        let mut found = EnvironmentGroups { ready: count_ready_of(self, tx).await?, ..EnvironmentGroups::default() };
        for mut row in tx.fetch_all(COUNT_OPEN_OF, args![self.policy, self.run, OPEN_SAMPLE_MAX]).await? {
            found.open.insert(row.get("label")?, row.get("open")?);
        }
        found.carried = turns::carried(tx, self.policy, self.run).await?;
        Ok(found)
    }
}

/// The ready groups of each environment.
pub(super) async fn count_ready_of(
    read: &ReadEnvironments,
    tx: &mut Tx<'_>,
) -> Result<BTreeMap<String, i64>, StoreError> {
    const COUNT_READY_OF: Statement = Statement {
        sqlite: "-- count_ready_of
            SELECT value AS label, (
                SELECT COUNT(*)
                FROM (
                    SELECT 1
                    FROM rollout_group
                    WHERE policy_pk = $1 AND run = $2 AND state = 'ready' AND COALESCE(environment, '') = e.value
                    LIMIT $4
                )
            ) AS ready
            FROM json_each($3) AS e",
        postgres: "-- count_ready_of
            SELECT e.value AS label, (
                SELECT COUNT(*)
                FROM (
                    SELECT 1
                    FROM rollout_group
                    WHERE policy_pk = $1 AND run = $2 AND state = 'ready' AND COALESCE(environment, '') = e.value
                    LIMIT $4
                ) AS counted
            ) AS ready
            FROM json_array_elements_text($3::json) AS e (value)",
    };
    let labels = serde_json::to_string(&read.labels).expect("texts always serialize");
    let mut ready = BTreeMap::new();
    for mut row in tx.fetch_all(COUNT_READY_OF, args![read.policy, read.run, labels, read.ready_max]).await? {
        ready.insert(row.get("label")?, row.get("ready")?);
    }
    Ok(ready)
}
