//! Evaluation in the store: the policy that the rollouts which evaluate another one belong to, and what suites say.
//!
//! Results are added in the transaction that decides about a rollout, so none is lost and none counts twice. They stay when
//! the rollouts are gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    evals::{
        self, Evaluates, FindEvals, FindEvaluating, FindTasks, FoundSuite, FoundTask, FoundTasks, FoundVersion,
        IsComplete, PutSuite, RESULTS_MAX, ROLLOUTS_SHOWN, SUITES_MAX, Suite, TASKS_MAX, TaskResult, VERSIONS_MAX,
    },
    ids::{IdKey, PolicyName, PolicyPk, RolloutId, RolloutPk, Run, Version},
    policies::Policy,
    refusal::Refusal,
};
use forebay_wire::{EvalRollout, PolicyRules};

use super::policy;
use crate::{
    error::StoreError,
    op::Op,
    sql::{InsertRows, Row, Statement, Tx, among_keys, args, id_key_list, key_list},
};

/// Creates the policy that rollouts which evaluate another one belong to. False if there is no such policy.
pub struct OpenEvaluations {
    pub policy: PolicyName,
    pub now: Timestamp,
}

#[async_trait]
impl Op for OpenEvaluations {
    type Output = bool;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<bool, StoreError> {
        let Some(trained) = policy::lock(tx, &self.policy).await? else { return Ok(false) };
        let name = self.policy.evaluations();
        if policy::find(tx, &name).await?.is_none() {
            let rules_pk = policy::insert_rules(tx, &evals::rules(&trained.rules), self.now).await?;
            policy::insert(tx, &name, rules_pk, self.now).await?;
            follow(tx, trained.policy_pk).await?;
        }
        Ok(true)
    }
}

/// Gives the evaluations of a policy its run and its version, which have changed.
pub(super) async fn follow(tx: &mut Tx<'_>, trained: PolicyPk) -> Result<(), StoreError> {
    const FOLLOW_POLICY: Statement = Statement::new(
        "-- follow_policy
        UPDATE policy
        SET run = p.run, version = p.version, version_step = p.version_step, version_uri = p.version_uri
        FROM policy AS p
        WHERE p.policy_pk = $1 AND policy.name = p.name || '@eval'",
    );
    tx.execute(FOLLOW_POLICY, args![trained]).await.map(drop)
}

/// Gives the evaluations of a policy the rules that follow from its new ones.
pub(super) async fn replace_rules(
    tx: &mut Tx<'_>,
    trained: &PolicyName,
    rules: &PolicyRules,
    now: Timestamp,
) -> Result<(), StoreError> {
    const REPLACE_RULES_OF_EVALUATIONS: Statement = Statement::new(
        "-- replace_rules_of_evaluations
        UPDATE policy
        SET rules_pk = $2
        WHERE policy_pk = $1",
    );
    let Some(policy) = policy::find(tx, &trained.evaluations()).await? else { return Ok(()) };
    let rules_pk = policy::insert_rules(tx, &evals::rules(rules), now).await?;
    tx.guarded(REPLACE_RULES_OF_EVALUATIONS, args![policy.policy_pk, rules_pk], 1).await
}

/// A suite, with the key of its row.
#[derive(Clone, Debug)]
struct StoredSuite {
    suite_pk: i64,
    suite: Suite,
}

fn read_suite(mut row: Row) -> Result<StoredSuite, StoreError> {
    let suite = Suite {
        name: row.get("name")?,
        tasks: row.get("tasks")?,
        repeats: row.get("repeats")?,
        threshold: row.get("threshold")?,
    };
    Ok(StoredSuite { suite_pk: row.get("suite_pk")?, suite })
}

/// The suites of evaluations, by name.
async fn suites(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<Vec<StoredSuite>, StoreError> {
    const SELECT_SUITES: Statement = Statement::new(
        "-- select_suites
        SELECT suite_pk, name, tasks, repeats, threshold
        FROM suite
        WHERE policy_pk = $1
        ORDER BY name",
    );
    tx.fetch_all(SELECT_SUITES, args![policy]).await?.into_iter().map(read_suite).collect()
}

/// The names of the suites of evaluations.
pub(super) async fn suite_names(tx: &mut Tx<'_>, policy: PolicyPk) -> Result<BTreeSet<String>, StoreError> {
    Ok(suites(tx, policy).await?.into_iter().map(|stored| stored.suite.name).collect())
}

async fn suite(tx: &mut Tx<'_>, policy: PolicyPk, name: &str) -> Result<Option<StoredSuite>, StoreError> {
    const SELECT_SUITE: Statement = Statement::new(
        "-- select_suite
        SELECT suite_pk, name, tasks, repeats, threshold
        FROM suite
        WHERE policy_pk = $1 AND name = $2",
    );
    tx.fetch_optional(SELECT_SUITE, args![policy, name]).await?.map(read_suite).transpose()
}

/// The suite of this name. It is created if there is none.
async fn ensure_suite(tx: &mut Tx<'_>, policy: PolicyPk, new: &Suite) -> Result<StoredSuite, StoreError> {
    const INSERT_SUITE: Statement = Statement::new(
        "-- insert_suite
        INSERT INTO suite (policy_pk, name, tasks, repeats, threshold)
        VALUES ($1, $2, $3, $4, $5)
        ON CONFLICT (policy_pk, name) DO NOTHING",
    );
    if let Some(found) = suite(tx, policy, &new.name).await? {
        return Ok(found);
    }
    tx.execute(INSERT_SUITE, args![policy, &*new.name, new.tasks.map(i64::from), new.repeats, new.threshold]).await?;
    let found = suite(tx, policy, &new.name).await?;
    found.ok_or_else(|| StoreError::Corrupt(format!("suite `{}` is not there", new.name)))
}

#[async_trait]
impl Op for PutSuite {
    /// Whether it is new.
    type Output = Result<bool, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const REPLACE_SUITE: Statement = Statement::new(
            "-- replace_suite
            UPDATE suite
            SET tasks = $2, repeats = $3, threshold = $4
            WHERE suite_pk = $1",
        );
        let Some(policy) = policy::lock(tx, &self.policy.evaluations()).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.evaluations())));
        };
        let known = suite_names(tx, policy.policy_pk).await?;
        let is_new = !known.contains(&self.suite.name);
        if is_new && known.len() >= SUITES_MAX {
            return Ok(Err(too_many_suites("suite".to_owned())));
        }
        let stored = ensure_suite(tx, policy.policy_pk, &self.suite).await?;
        let Suite { tasks, repeats, threshold, .. } = self.suite;
        let values = args![stored.suite_pk, tasks.map(i64::from), repeats, threshold];
        tx.guarded(REPLACE_SUITE, values, 1).await?;
        Ok(Ok(is_new))
    }
}

pub(super) fn too_many_suites(pointer: String) -> Refusal {
    Refusal::invalid(pointer, format!("the policy has {SUITES_MAX} suites already, which is the most"))
}

/// A rollout that evaluates its policy and has arrived.
pub(super) struct NewEvaluation<'a> {
    pub(super) rollout_pk: RolloutPk,
    pub(super) policy_pk: PolicyPk,
    pub(super) run: Run,
    pub(super) of: &'a Evaluates,
    pub(super) version: Version,
    /// Whether its tokens are of several versions.
    pub(super) mixed: bool,
    /// Its reward, if it is decided and has a place in its group.
    pub(super) reward: Option<f64>,
}

/// Stores what rollouts are results of, and adds the results of those that are decided.
pub(super) async fn write(tx: &mut Tx<'_>, new: &[NewEvaluation<'_>], now: Timestamp) -> Result<(), StoreError> {
    static INSERT_EVAL_ROLLOUTS: InsertRows =
        InsertRows::new("insert_eval_rollouts", "eval_rollout", "rollout_pk, suite_pk, run, version, task, mixed");
    let mut suites: BTreeMap<(PolicyPk, &str), StoredSuite> = BTreeMap::new();
    for (policy, name) in new.iter().map(|one| (one.policy_pk, &*one.of.suite)).collect::<BTreeSet<_>>() {
        suites.insert((policy, name), ensure_suite(tx, policy, &Suite::unknown(name.to_owned())).await?);
    }
    let (mut rows, mut results) = (Vec::with_capacity(new.len()), Vec::new());
    for one in new {
        let stored = &suites[&(one.policy_pk, &*one.of.suite)];
        rows.push(args![one.rollout_pk, stored.suite_pk, one.run, one.version, &*one.of.task, one.mixed]);
        results.extend(one.reward.map(|reward| NewResult {
            at: At { suite_pk: stored.suite_pk, run: one.run, version: one.version },
            task: one.of.task.clone(),
            mixed: one.mixed,
            passes: reward >= stored.suite.threshold,
            reward,
        }));
    }
    INSERT_EVAL_ROLLOUTS.run(tx, rows).await?;
    add(tx, results, now).await
}

/// Adds the results of rollouts that waited for scores and are decided now, with their rewards. Others are left out.
pub(super) async fn settle(tx: &mut Tx<'_>, decided: &[(RolloutPk, f64)], now: Timestamp) -> Result<(), StoreError> {
    const SELECT_EVAL_ROLLOUTS: Statement = among_keys!(
        "-- select_eval_rollouts
        SELECT e.rollout_pk, e.suite_pk, e.run, e.version, e.task, e.mixed, s.threshold
        FROM eval_rollout AS e
        JOIN suite AS s ON s.suite_pk = e.suite_pk
        WHERE e.rollout_pk"
    );
    let rewards: HashMap<RolloutPk, f64> = decided.iter().copied().collect();
    let mut results = Vec::new();
    for mut row in tx.fetch_all(SELECT_EVAL_ROLLOUTS, args![key_list(rewards.keys().map(|key| key.0))]).await? {
        let reward = rewards[&row.get::<RolloutPk>("rollout_pk")?];
        results.push(NewResult {
            at: At { suite_pk: row.get("suite_pk")?, run: row.get("run")?, version: row.get("version")? },
            task: row.get("task")?,
            mixed: row.get("mixed")?,
            passes: reward >= row.get::<f64>("threshold")?,
            reward,
        });
    }
    add(tx, results, now).await
}

/// What these rollouts are results of.
pub(super) async fn of_rollouts(
    tx: &mut Tx<'_>,
    rollouts: Vec<i64>,
) -> Result<HashMap<RolloutPk, Evaluates>, StoreError> {
    const SELECT_EVALUATES: Statement = among_keys!(
        "-- select_evaluates
        SELECT e.rollout_pk, e.task, s.name
        FROM eval_rollout AS e
        JOIN suite AS s ON s.suite_pk = e.suite_pk
        WHERE e.rollout_pk"
    );
    let rows = tx.fetch_all(SELECT_EVALUATES, args![key_list(rollouts)]).await?;
    let read =
        |mut row: Row| Ok((row.get("rollout_pk")?, Evaluates { suite: row.get("name")?, task: row.get("task")? }));
    rows.into_iter().map(read).collect()
}

/// A suite at a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct At {
    suite_pk: i64,
    run: Run,
    version: Version,
}

struct NewResult {
    at: At,
    task: String,
    mixed: bool,
    passes: bool,
    reward: f64,
}

/// Adds results. Rows are changed in the order of their keys, so that transactions with common ones do not deadlock.
async fn add(tx: &mut Tx<'_>, results: Vec<NewResult>, now: Timestamp) -> Result<(), StoreError> {
    const TOUCH_EVAL_VERSION: Statement = Statement::new(
        "-- touch_eval_version
        UPDATE eval_version
        SET mixed = mixed + $4, last_us = CASE WHEN last_us < $5 THEN $5 ELSE last_us END
        WHERE suite_pk = $1 AND run = $2 AND version = $3
        RETURNING tasks",
    );
    const INSERT_EVAL_VERSION: Statement = Statement::new(
        "-- insert_eval_version
        INSERT INTO eval_version (suite_pk, run, version, tasks, mixed, first_us, last_us)
        VALUES ($1, $2, $3, 0, $4, $5, $5)
        ON CONFLICT (suite_pk, run, version) DO UPDATE SET mixed = eval_version.mixed + excluded.mixed
        RETURNING tasks",
    );
    const ADD_TO_EVAL_TASK: Statement = Statement::new(
        "-- add_to_eval_task
        UPDATE eval_task
        SET rollouts = rollouts + $5, passed = passed + $6, reward_sum = reward_sum + $7
        WHERE suite_pk = $1 AND run = $2 AND version = $3 AND task = $4",
    );
    const INSERT_EVAL_TASK: Statement = Statement::new(
        "-- insert_eval_task
        INSERT INTO eval_task (suite_pk, run, version, task, rollouts, passed, reward_sum)
        VALUES ($1, $2, $3, $4, $5, $6, $7)",
    );
    const COUNT_EVAL_TASKS: Statement = Statement::new(
        "-- count_eval_tasks
        UPDATE eval_version
        SET tasks = tasks + $4
        WHERE suite_pk = $1 AND run = $2 AND version = $3",
    );
    let mut by_version: BTreeMap<At, (i64, BTreeMap<String, TaskResult>)> = BTreeMap::new();
    for result in results {
        let (mixed, tasks) = by_version.entry(result.at).or_default();
        if result.mixed {
            *mixed += 1;
            continue;
        }
        tasks.entry(result.task).or_default().add(result.passes, result.reward);
    }
    for (at, (mixed, tasks)) in by_version {
        let key = || args![at.suite_pk, at.run, at.version, mixed, now];
        // The row is locked from here on: nobody else adds tasks of this version.
        let known: u32 = if let Some(mut row) = tx.fetch_optional(TOUCH_EVAL_VERSION, key()).await? {
            row.get("tasks")?
        } else {
            let known = tx.fetch_one(INSERT_EVAL_VERSION, key()).await?.get("tasks")?;
            forget_old(tx, at.suite_pk).await?;
            known
        };
        let mut added = 0;
        for (task, TaskResult { rollouts, passed, reward_sum }) in tasks {
            let values = || args![at.suite_pk, at.run, at.version, &*task, rollouts, passed, reward_sum];
            if tx.execute(ADD_TO_EVAL_TASK, values()).await? == 0 && known + added < TASKS_MAX {
                tx.guarded(INSERT_EVAL_TASK, values(), 1).await?;
                added += 1;
            }
        }
        if added > 0 {
            tx.guarded(COUNT_EVAL_TASKS, args![at.suite_pk, at.run, at.version, added], 1).await?;
        }
    }
    Ok(())
}

/// Forgets what suites said about versions from this one on, which a resume has undone: the numbers will be those of other
/// weights.
pub(super) async fn undo_from(tx: &mut Tx<'_>, trained: &Policy, version: Version) -> Result<(), StoreError> {
    const UNDO_EVAL_TASKS: Statement = Statement::new(
        "-- undo_eval_tasks
        DELETE FROM eval_task
        WHERE suite_pk = $1 AND run = $2 AND version >= $3",
    );
    const UNDO_EVAL_VERSIONS: Statement = Statement::new(
        "-- undo_eval_versions
        DELETE FROM eval_version
        WHERE suite_pk = $1 AND run = $2 AND version >= $3",
    );
    // They stay what they are, and are listed with no version any more: no run has this number.
    const UNDO_EVAL_ROLLOUTS: Statement = Statement::new(
        "-- undo_eval_rollouts
        UPDATE eval_rollout
        SET run = 0
        WHERE suite_pk = $1 AND run = $2 AND version >= $3",
    );
    let Some(evaluations) = policy::find(tx, &trained.name.evaluations()).await? else { return Ok(()) };
    for stored in suites(tx, evaluations.policy_pk).await? {
        // Versions first, because who adds results holds the row of the version.
        for statement in [UNDO_EVAL_VERSIONS, UNDO_EVAL_TASKS, UNDO_EVAL_ROLLOUTS] {
            tx.execute(statement, args![stored.suite_pk, evaluations.run, version]).await?;
        }
    }
    Ok(())
}

/// Deletes the results of versions that are too old, if there are some.
async fn forget_old(tx: &mut Tx<'_>, suite_pk: i64) -> Result<(), StoreError> {
    const FORGET_EVAL_TASKS: Statement = Statement::new(
        "-- forget_eval_tasks
        DELETE FROM eval_task
        WHERE suite_pk = $1 AND (run, version) IN (
            SELECT run, version
            FROM eval_version
            WHERE suite_pk = $1
            ORDER BY run DESC, version DESC
            LIMIT 16 OFFSET $2
        )",
    );
    const FORGET_EVAL_VERSIONS: Statement = Statement::new(
        "-- forget_eval_versions
        DELETE FROM eval_version
        WHERE suite_pk = $1 AND (run, version) IN (
            SELECT run, version
            FROM eval_version
            WHERE suite_pk = $1
            ORDER BY run DESC, version DESC
            LIMIT 16 OFFSET $2
        )",
    );
    for statement in [FORGET_EVAL_TASKS, FORGET_EVAL_VERSIONS] {
        tx.execute(statement, args![suite_pk, VERSIONS_MAX]).await?;
    }
    Ok(())
}

/// The policy that callers know, and its evaluations, if there are some.
async fn both(tx: &mut Tx<'_>, name: &PolicyName) -> Result<Result<(Policy, Option<Policy>), Refusal>, StoreError> {
    let Some(trained) = policy::find(tx, name).await? else { return Ok(Err(Refusal::UnknownPolicy(name.clone()))) };
    Ok(Ok((trained, policy::find(tx, &name.evaluations()).await?)))
}

#[async_trait]
impl Op for FindEvals {
    type Output = Result<Vec<FoundSuite>, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let (trained, evaluations) = match both(tx, &self.policy).await? {
            Ok(found) => found,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(evaluations) = evaluations else { return Ok(Ok(Vec::new())) };
        let (mut found, mut results) = (Vec::new(), 0);
        for stored in suites(tx, evaluations.policy_pk).await? {
            if self.suite.as_ref().is_none_or(|name| *name == stored.suite.name) {
                found.push(versions(self, tx, (&trained, &evaluations), stored, &mut results).await?);
            }
        }
        Ok(Ok(found))
    }
}

/// The newest versions of a suite, with their results. `results` are those that were read of other suites: if these are many
/// already, there are more versions instead.
async fn versions(
    find: &FindEvals,
    tx: &mut Tx<'_>,
    (trained, evaluations): (&Policy, &Policy),
    stored: StoredSuite,
    results: &mut u64,
) -> Result<FoundSuite, StoreError> {
    const SELECT_EVAL_VERSIONS: Statement = Statement::new(
        "-- select_eval_versions
        SELECT e.version, e.tasks, e.mixed, e.first_us, e.last_us, (
            SELECT v.step FROM version AS v WHERE v.policy_pk = $5 AND v.version = e.version
        ) AS step
        FROM eval_version AS e
        WHERE e.suite_pk = $1 AND e.run = $2 AND e.version < $3 AND e.tasks > 0
        ORDER BY e.version DESC
        LIMIT $4",
    );
    const SELECT_EVAL_TASKS: Statement = Statement::new(
        "-- select_eval_tasks
        SELECT version, task, rollouts, passed, reward_sum
        FROM eval_task
        WHERE suite_pk = $1 AND run = $2 AND version >= $3 AND version <= $4",
    );
    let before = find.before.map_or(i64::MAX, |before| before.0);
    // One more, to be compared with.
    let values = args![stored.suite_pk, evaluations.run, before, find.limit + 1, trained.policy_pk];
    // A version and the one that it is compared with fit, however large they are.
    let least = if *results == 0 { 2 } else { 0 };
    let mut found: Vec<FoundVersion> = Vec::new();
    let rows = tx.fetch_all(SELECT_EVAL_VERSIONS, values).await?;
    let all = rows.len();
    for mut row in rows {
        let tasks: u64 = row.get("tasks")?;
        if *results + tasks > RESULTS_MAX && found.len() >= least {
            break;
        }
        *results += tasks;
        found.push(FoundVersion {
            version: row.get("version")?,
            step: row.get("step")?,
            mixed: row.get("mixed")?,
            first_at: row.get("first_us")?,
            last_at: row.get("last_us")?,
            tasks: BTreeMap::new(),
        });
    }
    let more = found.len() < all || all > find.limit as usize;
    if let (Some(newest), Some(oldest)) = (found.first(), found.last()) {
        let values = args![stored.suite_pk, evaluations.run, oldest.version, newest.version];
        let places: HashMap<Version, usize> =
            found.iter().enumerate().map(|(place, version)| (version.version, place)).collect();
        for mut row in tx.fetch_all(SELECT_EVAL_TASKS, values).await? {
            if let Some(place) = places.get(&row.get("version")?) {
                found[*place].tasks.insert(row.get("task")?, read_result(&mut row)?);
            }
        }
    }
    Ok(FoundSuite { suite: stored.suite, versions: found, more })
}

fn read_result(row: &mut Row) -> Result<TaskResult, StoreError> {
    Ok(TaskResult { rollouts: row.get("rollouts")?, passed: row.get("passed")?, reward_sum: row.get("reward_sum")? })
}

#[async_trait]
impl Op for IsComplete {
    type Output = Result<bool, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_KNOWN_TASKS: Statement = Statement::new(
            "-- select_known_eval_tasks
            SELECT tasks
            FROM eval_version
            WHERE suite_pk = $1 AND run = $2 AND version = $3",
        );
        const COUNT_COMPLETE_TASKS: Statement = Statement::new(
            "-- count_complete_tasks
            SELECT COUNT(*) AS tasks
            FROM eval_task
            WHERE suite_pk = $1 AND run = $2 AND version = $3 AND rollouts >= $4",
        );
        let evaluations = match both(tx, &self.policy).await? {
            Ok((_, evaluations)) => evaluations,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let Some(evaluations) = evaluations else { return Ok(Ok(false)) };
        let Some(stored) = suite(tx, evaluations.policy_pk, &self.suite).await? else { return Ok(Ok(false)) };
        let Some(wanted) = stored.suite.tasks else { return Ok(Ok(false)) };
        // Nearly always there are too few, which takes one row to know.
        let at = args![stored.suite_pk, evaluations.run, self.version];
        let known: Option<Row> = tx.fetch_optional(SELECT_KNOWN_TASKS, at).await?;
        let known: u32 = known.map_or(Ok(0), |mut row| row.get("tasks"))?;
        if known < wanted {
            return Ok(Ok(false));
        }
        let values = args![stored.suite_pk, evaluations.run, self.version, stored.suite.repeats];
        let done: u64 = tx.fetch_one(COUNT_COMPLETE_TASKS, values).await?.get("tasks")?;
        Ok(Ok(done >= u64::from(wanted)))
    }
}

#[async_trait]
impl Op for FindTasks {
    type Output = Result<FoundTasks, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_TWO_VERSIONS: Statement = Statement::new(
            "-- select_two_eval_versions
            SELECT version
            FROM eval_version
            WHERE suite_pk = $1 AND run = $2 AND version <= $3 AND tasks > 0
            ORDER BY version DESC
            LIMIT 2",
        );
        let evaluations = match both(tx, &self.policy).await? {
            Ok((_, evaluations)) => evaluations,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let unknown =
            || Refusal::UnknownInPolicy { what: "suite", id: self.suite.clone(), policy: self.policy.clone() };
        let Some(evaluations) = evaluations else { return Ok(Err(unknown())) };
        let Some(stored) = suite(tx, evaluations.policy_pk, &self.suite).await? else {
            return Ok(Err(unknown()));
        };
        let newest = self.version.map_or(i64::MAX, |version| version.0);
        let rows = tx.fetch_all(SELECT_TWO_VERSIONS, args![stored.suite_pk, evaluations.run, newest]).await?;
        let found = rows.into_iter().map(|mut row| row.get("version")).collect::<Result<Vec<Version>, _>>()?;
        let (version, before) = match (self.version, &found[..]) {
            (None, []) => return Ok(Err(unknown())),
            // A version without results has none beside those before it.
            (Some(asked), [newest, ..]) if *newest != asked => (asked, Some(*newest)),
            (Some(asked), []) => (asked, None),
            (_, [newest, rest @ ..]) => (*newest, rest.first().copied()),
        };
        let at = |version| At { suite_pk: stored.suite_pk, run: evaluations.run, version };
        let mut now = tasks(self, tx, at(version)).await?;
        let mut earlier = match before {
            Some(before) => tasks(self, tx, at(before)).await?,
            None => BTreeMap::new(),
        };
        let names: BTreeSet<String> = now.keys().chain(earlier.keys()).cloned().collect();
        let more = names.len() > self.limit as usize;
        let names: Vec<String> = names.into_iter().take(self.limit as usize).collect();
        let mut shown_now = rollouts(tx, at(version), &names).await?;
        let mut shown_before = match before {
            Some(before) => rollouts(tx, at(before), &names).await?,
            None => HashMap::new(),
        };
        let found = names.into_iter().map(|task| FoundTask {
            now: now.remove(&task).map(|result| (result, shown_now.remove(&task).unwrap_or_default())),
            before: earlier.remove(&task).map(|result| (result, shown_before.remove(&task).unwrap_or_default())),
            task,
        });
        Ok(Ok(FoundTasks { version, before, tasks: found.collect(), more }))
    }
}

/// The next tasks of a suite at a version, one more than were asked for.
async fn tasks(find: &FindTasks, tx: &mut Tx<'_>, at: At) -> Result<BTreeMap<String, TaskResult>, StoreError> {
    const SELECT_NEXT_TASKS: Statement = Statement::new(
        "-- select_next_eval_tasks
        SELECT task, rollouts, passed, reward_sum
        FROM eval_task
        WHERE suite_pk = $1 AND run = $2 AND version = $3 AND task > $4
        ORDER BY task
        LIMIT $5",
    );
    let values = args![at.suite_pk, at.run, at.version, &*find.after, find.limit + 1];
    let rows = tx.fetch_all(SELECT_NEXT_TASKS, values).await?;
    rows.into_iter().map(|mut row| Ok((row.get("task")?, read_result(&mut row)?))).collect()
}

/// The rollouts of tasks at a version whose rows are still there, of each the first few.
async fn rollouts(tx: &mut Tx<'_>, at: At, tasks: &[String]) -> Result<HashMap<String, Vec<EvalRollout>>, StoreError> {
    const SELECT_ROLLOUTS_OF_TASKS: Statement = Statement::new(
        "-- select_rollouts_of_tasks
        SELECT e.task, r.rollout_id, r.reward, r.status
        FROM (
            SELECT task, rollout_pk, ROW_NUMBER() OVER (PARTITION BY task ORDER BY rollout_pk) AS place
            FROM eval_rollout
            WHERE suite_pk = $1 AND run = $2 AND version = $3 AND task >= $4 AND task <= $5
        ) AS e
        JOIN rollout AS r ON r.rollout_pk = e.rollout_pk
        WHERE e.place <= $6
        ORDER BY e.task, e.rollout_pk",
    );
    let (Some(first), Some(last)) = (tasks.first(), tasks.last()) else { return Ok(HashMap::new()) };
    let values = args![at.suite_pk, at.run, at.version, &**first, &**last, ROLLOUTS_SHOWN];
    let mut found: HashMap<String, Vec<EvalRollout>> = HashMap::new();
    for mut row in tx.fetch_all(SELECT_ROLLOUTS_OF_TASKS, values).await? {
        let status = row.get("status")?;
        let rollout = EvalRollout { rollout_id: row.get("rollout_id")?, reward: row.get("reward")?, status };
        found.entry(row.get("task")?).or_default().push(rollout);
    }
    Ok(found)
}

#[async_trait]
impl Op for FindEvaluating {
    type Output = HashSet<RolloutId>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let Some(evaluations) = policy::find(tx, &self.policy.evaluations()).await? else {
            return Ok(HashSet::new());
        };
        let keys: HashMap<IdKey, &RolloutId> = self.rollouts.iter().map(|id| (id.key(), id)).collect();
        let mut found = known(tx, &evaluations, keys.keys().copied()).await?;
        if !found.is_empty()
            && let Some(trained) = policy::find(tx, &self.policy).await?
        {
            // An id that both have is that of what is trained.
            let trained = known(tx, &trained, found.iter().copied().collect::<Vec<_>>()).await?;
            found.retain(|key| !trained.contains(key));
        }
        Ok(found.iter().filter_map(|key| keys.get(key)).map(|id| (*id).clone()).collect())
    }
}

/// Those of these ids that a policy has rollouts of.
pub(super) async fn known(
    tx: &mut Tx<'_>,
    policy: &Policy,
    keys: impl IntoIterator<Item = IdKey>,
) -> Result<HashSet<IdKey>, StoreError> {
    const SELECT_KNOWN_ROLLOUTS: Statement = Statement {
        sqlite: "-- select_known_rollouts
            SELECT rollout_id
            FROM rollout
            WHERE policy_pk = $1 AND run = $2 AND rollout_key IN (SELECT unhex(value) FROM json_each($3))",
        postgres: "-- select_known_rollouts
            SELECT r.rollout_id
            FROM unnest($3::bytea[]) AS k (rollout_key)
            -- One lookup in the unique index for each key, as in `select_stored`.
            CROSS JOIN LATERAL (
                SELECT rollout_id
                FROM rollout
                WHERE policy_pk = $1 AND run = $2 AND rollout_key = k.rollout_key
                OFFSET 0
            ) AS r",
    };
    let values = args![policy.policy_pk, policy.run, id_key_list(keys)];
    let rows = tx.fetch_all(SELECT_KNOWN_ROLLOUTS, values).await?;
    rows.into_iter().map(|mut row| Ok(IdKey::of(&row.get::<String>("rollout_id")?))).collect()
}
