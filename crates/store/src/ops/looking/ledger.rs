//! The ledger: rollouts and groups in the form in which the API lists them.

use async_trait::async_trait;
use forebay_domain::{
    groups::Group,
    ids::{BatchId, GroupId, GroupPk, PolicyName, RolloutId},
    looking::ledger::{GroupFilter, Story, StoryFilter},
    pages::Page,
    states::{BatchState, GroupState, RolloutState, Verdict, rollout_state},
};
use std::collections::HashMap;

use crate::{
    error::StoreError,
    op::Op,
    ops::{
        bounded_scan::{InOrder, Scan, examine, in_order},
        evals, fill, names, read_json, trained_versions,
    },
    sql::{Row, Statement, Tx, args, key_found, key_list},
};

/// The policy is the rollout's or its group's, whichever the condition uses. If both were compared, Postgres would join
/// all rollouts of the policy. The condition names the policy.
macro_rules! select_story {
    ($whose:literal, $where:literal) => {
        in_order!(
            concat!(
                "-- select_story
            SELECT s.*
            FROM (
                SELECT r.rollout_pk, p.name AS policy, r.run, r.rollout_id, r.execution, r.verdict, r.reason, r.failed_filters,
                    g.group_pk, g.group_id, g.state AS group_state, b.state AS batch_state, g.reason AS group_reason, g.size, g.kept,
                    g.masked, g.dropped, g.scoring, g.environment, w.missing,
                    CASE WHEN r.verdict IN ('kept', 'masked') AND b.state IN ('trained', 'checkpointed') THEN b.step END AS step, r.reward, r.advantage, r.policy_version, r.version_assumed,
                    r.version_min, r.version_max, r.segments, r.tokens, r.trained_tokens, r.response_tokens, r.status, r.received_us, g.decided_us,
                    b.created_us AS batched_us, b.acked_us, g.purged_us,
                    (
                        SELECT e.attempt
                        FROM session_policy AS sp
                        JOIN session AS e ON e.session_pk = sp.session_pk
                        WHERE sp.policy_pk = r.policy_pk AND sp.run = r.run AND sp.rollout_key = r.rollout_key
                    ) AS attempts
                FROM rollout AS r
                JOIN rollout_group AS g ON g.group_pk = r.group_pk
                JOIN policy AS p ON p.policy_pk = ",
                $whose,
                ".policy_pk
                LEFT JOIN batch AS b ON b.batch_pk = g.batch_pk AND g.state = 'batched'
                LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
                WHERE ",
                $where,
                "
            ) AS s
            WHERE s.rollout_pk > $3 AND s.rollout_pk <= $9
                AND (CAST($4 AS TEXT) IS NULL OR s.verdict = $4)
                AND (CAST($5 AS TEXT) IS NULL OR s.reason = $5)
                AND (
                    CAST($6 AS TEXT) IS NULL
                    OR $6 LIKE '%[' || CASE WHEN s.missing IS NULL THEN s.verdict ELSE 'scoring' END || ' ' || s.group_state || ' '
                        || COALESCE(s.batch_state, '') || ']%'
                )
                AND (CAST($7 AS BIGINT) IS NULL OR s.step = $7)
                AND (CAST($10 AS TEXT) IS NULL OR s.group_id = $10)
                AND (CAST($11 AS TEXT) IS NULL OR s.environment = $11)
            ORDER BY s.rollout_pk"
            ),
            "LIMIT $8"
        )
    };
}

#[async_trait]
impl Op for StoryFilter {
    type Output = Page<Story>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        // A name means the rollout or group of the current run. Runs never share rows. An execution may have rollouts of
        // several policies, so it is looked up in all of their runs.
        const BY_ROLLOUT: InOrder = select_story!("r", "p.name = $1 AND r.run = p.run AND r.rollout_key = $2");
        const BY_EXECUTION: InOrder = select_story!(
            "r",
            "(CAST($1 AS TEXT) IS NULL OR p.name = $1) AND r.execution = $2 AND r.rollout_pk > $3 AND r.rollout_pk <= $9"
        );
        const BY_GROUP: InOrder = select_story!("g", "p.name = $1 AND g.run = p.run AND g.group_key = $2");
        const BY_POLICY: InOrder =
            select_story!("r", "p.name = $1 AND CAST($2 AS TEXT) IS NULL AND r.rollout_pk > $3 AND r.rollout_pk <= $9");
        let state = self.state.map(state_list);
        let scan = scan(self, tx).await?;
        let (above, to) = scan.range();
        let rollout = self.rollout_id.as_ref().map(RolloutId::key);
        let group = self.group_id.as_ref().map(GroupId::key);
        let of_execution = self.execution_id.is_some().then(|| self.group_id.as_ref().map(GroupId::as_str)).flatten();
        let (statement, second) = match (rollout, &self.execution_id, group) {
            (Some(key), _, _) => (BY_ROLLOUT, args![key]),
            (None, Some(execution_id), _) => (BY_EXECUTION, args![execution_id]),
            (None, None, Some(key)) => (BY_GROUP, args![key]),
            (None, None, None) => (BY_POLICY, args![None::<String>]),
        };
        let rest = args![
            above,
            self.verdict,
            self.reason.as_deref(),
            state,
            self.step,
            self.limit,
            to,
            of_execution,
            self.environment.as_deref()
        ];
        let policy = self.policy.as_ref().map(PolicyName::as_str);
        let values = [args![policy], second, rest].concat();
        let mut stories = Vec::new();
        let mut groups = Vec::new();
        for mut row in tx.fetch_all(statement.of(self.from), values).await? {
            groups.push(row.get::<GroupPk>("group_pk")?);
            let story = read_story(&mut row)?;
            let name = if rollout.is_some() { &story.rollout_id } else { &story.group_id };
            let by_group = group.filter(|_| self.execution_id.is_none());
            if let Some(key) = rollout.or(by_group) {
                key_found(name, |found| *found == key)?;
            }
            stories.push(story);
        }
        let evaluating = stories.iter().filter(|story: &&Story| story.policy.is_evaluations());
        let evaluating: Vec<i64> = evaluating.map(|story| story.rollout_pk.0).collect();
        if !evaluating.is_empty() {
            let mut found = evals::of_rollouts(tx, evaluating).await?;
            for story in &mut stories {
                story.evaluates = found.remove(&story.rollout_pk);
            }
        }
        let carriers = carriers(tx, &groups).await?;
        for (story, group) in stories.iter_mut().zip(groups) {
            if story.verdict.takes_place() {
                story.batches = carriers.get(&group).cloned().unwrap_or_default();
            }
        }
        scan.page(tx, stories, self.limit, |story| story.rollout_pk.0).await
    }
}

/// The rows that the page examines.
async fn scan(filter: &StoryFilter, tx: &mut Tx<'_>) -> Result<Scan, StoreError> {
    const OF_POLICY: InOrder = examine!(
        "-- examine_rollouts",
        "rollout_pk",
        "rollout
                WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $4)"
    );
    const OF_GROUP: InOrder = examine!(
        "-- examine_rollouts_of_group",
        "r.rollout_pk",
        "policy AS p
                JOIN rollout_group AS g ON g.policy_pk = p.policy_pk AND g.run = p.run
                JOIN rollout AS r ON r.group_pk = g.group_pk
                WHERE p.name = $4 AND g.group_key = $5"
    );
    const OF_EXECUTION: InOrder = examine!(
        "-- examine_rollouts_of_execution",
        "rollout_pk",
        "rollout
                WHERE execution = $4"
    );
    if !filter.has_filters() || filter.rollout_id.is_some() {
        return Ok(Scan::unfiltered(filter.from));
    }
    if let Some(execution_id) = &filter.execution_id {
        return Scan::filtered(tx, filter.from, OF_EXECUTION, args![execution_id]).await;
    }
    let policy = filter.policy.as_ref().map(PolicyName::as_str);
    match &filter.group_id {
        None => Scan::filtered(tx, filter.from, OF_POLICY, args![policy]).await,
        Some(group_id) => {
            let owner = args![policy, group_id.key()];
            Scan::filtered(tx, filter.from, OF_GROUP, owner).await
        }
    }
}

/// The combinations of verdict, group state and batch state that put a rollout into a state, in the form that the
/// statement compares: `[kept batched leased]`. The last word is missing if the group is in no batch. In place of the
/// verdict of a rollout that lacks scores stands `scoring`.
fn state_list(state: RolloutState) -> String {
    if state == RolloutState::Scoring {
        return "[scoring open ]".to_owned();
    }
    let mut list = String::new();
    for &verdict in Verdict::ALL {
        for &group in GroupState::ALL {
            let batches: &[BatchState] = if group == GroupState::Batched { BatchState::ALL } else { &[] };
            let batches = batches.iter().copied().map(Some).chain([None]);
            for batch in batches.filter(|batch| rollout_state(verdict, false, group, *batch) == Some(state)) {
                let names = [verdict.as_str(), group.as_str(), batch.map_or("", BatchState::as_str)];
                list.extend(["[", &names.join(" "), "]"]);
            }
        }
    }
    list
}

fn read_story(row: &mut Row) -> Result<Story, StoreError> {
    let policy: String = row.get("policy")?;
    let verdict: Verdict = row.get("verdict")?;
    let delivered = verdict.takes_place();
    let group = fill(row, "group_state")?;
    let contradict = || StoreError::Corrupt("a rollout's group and batch contradict each other".to_owned());
    let missing: Option<Vec<String>> = read_json(row, "missing")?;
    let state = rollout_state(verdict, missing.is_some(), group.state, row.get("batch_state")?);
    let state = state.ok_or_else(contradict)?;
    Ok(Story {
        rollout_pk: row.get("rollout_pk")?,
        policy: PolicyName::stored(&policy).map_err(|error| StoreError::Corrupt(error.to_string()))?,
        evaluates: None,
        run: row.get("run")?,
        rollout_id: row.get("rollout_id")?,
        execution_id: row.get("execution")?,
        verdict,
        reason: row.get("reason")?,
        failed_filters: names(row.get("failed_filters")?),
        state,
        scoring: missing.unwrap_or_default(),
        group_id: row.get("group_id")?,
        group,
        group_reason: row.get("group_reason")?,
        environment: row.get("environment")?,
        batches: Vec::new(),
        step: row.get("step")?,
        reward: row.get("reward")?,
        advantage: row.get("advantage")?,
        policy_version: row.get("policy_version")?,
        version_assumed: row.get("version_assumed")?,
        trained_versions: trained_versions(row)?,
        segments: row.get("segments")?,
        tokens: row.get("tokens")?,
        trained_tokens: row.get("trained_tokens")?,
        response_tokens: row.get("response_tokens")?,
        status: row.get("status")?,
        attempts: row.get("attempts")?,
        received_at: row.get("received_us")?,
        decided_at: row.get("decided_us")?,
        batched_at: row.get::<Option<_>>("batched_us")?.filter(|_| delivered),
        acked_at: row.get::<Option<_>>("acked_us")?.filter(|_| delivered),
        purged_at: row.get("purged_us")?,
    })
}

/// The batches that have ever carried each group, in the order in which they were cut.
async fn carriers(tx: &mut Tx<'_>, groups: &[GroupPk]) -> Result<HashMap<GroupPk, Vec<BatchId>>, StoreError> {
    const SELECT_CARRIERS: Statement = Statement {
        sqlite: "-- select_carriers_of_groups
            SELECT bg.group_pk, b.batch_id
            FROM batch_group AS bg
            JOIN batch AS b ON b.batch_pk = bg.batch_pk
            WHERE bg.group_pk IN (SELECT value FROM json_each($1))
            ORDER BY b.batch_pk",
        postgres: "-- select_carriers_of_groups
            SELECT bg.group_pk, b.batch_id
            FROM batch_group AS bg
            -- OFFSET keeps the planner from reading all batches for the few that it needs.
            CROSS JOIN LATERAL (SELECT batch_id FROM batch WHERE batch_pk = bg.batch_pk OFFSET 0) AS b
            WHERE bg.group_pk = ANY ($1::bigint[])
            ORDER BY bg.batch_pk",
    };
    let mut carriers: HashMap<GroupPk, Vec<BatchId>> = HashMap::new();
    for mut row in tx.fetch_all(SELECT_CARRIERS, args![key_list(groups.iter().map(|group| group.0))]).await? {
        carriers.entry(row.get("group_pk")?).or_default().push(row.get("batch_id")?);
    }
    Ok(carriers)
}

/// `$more` are further columns.
macro_rules! select_group {
    ($more:literal, $tail:literal) => {
        concat!(
            "-- select_group
            SELECT g.group_pk, g.run, g.group_id, g.state, g.reason, g.failed_filters, g.environment, g.size, g.min_size, g.kept,
                g.masked, g.dropped, g.scoring, g.late, b.batch_id, g.samples, g.tokens, g.trained_tokens, g.reward_sum, g.reward_count,
                g.reward_min, g.reward_max, g.version_min, g.version_max, g.opened_us, g.deadline_us, g.decided_us, g.purged_us",
            $more,
            "
            FROM rollout_group AS g
            JOIN policy AS p ON p.policy_pk = g.policy_pk
            LEFT JOIN batch AS b ON b.batch_pk = g.batch_pk ",
            $tail
        )
    };
}

/// The groups of a list from the parameter 3 to the parameter 6, at most as many as the parameter 5.
macro_rules! list_groups {
    ($more:literal, $tail:literal, $key:literal) => {
        in_order!(
            concat!(
                select_group!($more, $tail),
                "
                AND (CAST($4 AS TEXT) IS NULL OR g.state = $4)
                AND (CAST($7 AS TEXT) IS NULL OR g.reason = $7)
                AND (CAST($8 AS TEXT) IS NULL OR g.environment = $8)
            ORDER BY ",
                $key
            ),
            "LIMIT $5"
        )
    };
}

/// Reads one group.
pub(in crate::ops) async fn group(tx: &mut Tx<'_>, group: GroupPk) -> Result<Group, StoreError> {
    const SELECT_GROUP: Statement = Statement::new(select_group!("", "WHERE g.group_pk = $1"));
    read_group(tx.fetch_one(SELECT_GROUP, args![group]).await?)
}

#[async_trait]
impl Op for GroupFilter {
    type Output = Page<Group>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const BY_ID: InOrder = list_groups!(
            "",
            "WHERE p.name = $1 AND g.run = p.run AND g.group_key = $2 AND g.group_pk > $3 AND g.group_pk <= $6",
            "g.group_pk"
        );
        const BY_POLICY: InOrder = list_groups!(
            "",
            "WHERE p.name = $1 AND CAST($2 AS TEXT) IS NULL AND g.group_pk > $3 AND g.group_pk <= $6",
            "g.group_pk"
        );
        // The cursor is the place in the batch, counted from 1.
        const BY_BATCH: InOrder = list_groups!(
            ", bg.place + 1 AS place",
            "JOIN batch_group AS bg ON bg.group_pk = g.group_pk
            WHERE p.name = $1 AND bg.batch_pk = (SELECT batch_pk FROM batch WHERE batch_id = $2)
                AND bg.place >= $3 AND bg.place < $6",
            "bg.place"
        );
        const EXAMINE_GROUPS: InOrder = examine!(
            "-- examine_groups",
            "group_pk",
            "rollout_group
                    WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $4)"
        );
        let is_filtered = self.state.is_some() || self.reason.is_some() || self.environment.is_some();
        let scan = if is_filtered && self.group_id.is_none() && self.batch_id.is_none() {
            Scan::filtered(tx, self.from, EXAMINE_GROUPS, args![self.policy.as_str()]).await?
        } else {
            Scan::unfiltered(self.from)
        };
        let (above, to) = scan.range();
        let key = self.group_id.as_ref().map(GroupId::key);
        let (statement, second) = match (key, self.batch_id) {
            (Some(key), _) => (BY_ID, args![key]),
            (None, Some(batch_id)) => (BY_BATCH, args![batch_id.as_bytes()]),
            (None, None) => (BY_POLICY, args![None::<String>]),
        };
        let rest = args![above, self.state, self.limit, to, self.reason.as_deref(), self.environment.as_deref()];
        let values = [args![self.policy.as_str()], second, rest].concat();
        let mut groups = Vec::new();
        for mut row in tx.fetch_all(statement.of(self.from), values).await? {
            let in_batch = key.is_none() && self.batch_id.is_some();
            let place: Option<i64> = if in_batch { Some(row.get("place")?) } else { None };
            let group = read_group(row)?;
            if let Some(key) = &key {
                key_found(&group.group_id, |found| found == key)?;
            }
            groups.push((place.unwrap_or(group.group_pk.0), group));
        }
        let page = scan.page(tx, groups, self.limit, |(key, _)| *key).await?;
        let entries = page.entries.into_iter().map(|(_, group)| group).collect();
        Ok(Page { entries, next: page.next, examined: page.examined })
    }
}

fn read_group(mut row: Row) -> Result<Group, StoreError> {
    let (reward_sum, reward_count): (f64, u32) = (row.get("reward_sum")?, row.get("reward_count")?);
    let has_sums = row.get::<u64>("samples")? > 0;
    Ok(Group {
        group_pk: row.get("group_pk")?,
        run: row.get("run")?,
        group_id: row.get("group_id")?,
        fill: fill(&mut row, "state")?,
        reason: row.get("reason")?,
        failed_filters: names(row.get("failed_filters")?),
        environment: row.get("environment")?,
        min_size: row.get("min_size")?,
        late: row.get("late")?,
        batch_id: row.get("batch_id")?,
        // The sums are written when the group is decided. A rollout has at least one sample.
        tokens: row.get::<Option<u64>>("tokens")?.filter(|_| has_sums),
        trained_tokens: row.get::<Option<u64>>("trained_tokens")?.filter(|_| has_sums),
        trained_versions: trained_versions(&mut row)?,
        reward_min: row.get("reward_min")?,
        reward_max: row.get("reward_max")?,
        reward_mean: (reward_count > 0).then(|| reward_sum / f64::from(reward_count)),
        opened_at: row.get("opened_us")?,
        deadline_at: row.get("deadline_us")?,
        decided_at: row.get("decided_us")?,
        purged_at: row.get("purged_us")?,
    })
}
