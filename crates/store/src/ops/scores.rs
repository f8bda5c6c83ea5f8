//! Scores in the store: under the lock of its group, a rollout with its last score is judged, and the group is decided if it
//! waited only for that.

pub(super) mod turns;
pub mod work;

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    formats::seal::{RolloutSeal, SEAL_BYTES},
    groups::Group,
    ids::{GroupPk, IdKey, LeaseToken, PolicyName, PolicyPk, RolloutPk, Version},
    policies::Policy,
    reasons,
    refusal::Refusal,
    rules::Rules,
    scores::{self, PRODUCER, Score},
    scoring::{
        self, Complete, FindScores, FoundScores, Given, NamedTurn, NewScore, PutOutcome, PutScores, Scored,
        ScoredDecision, Stored,
    },
    staleness::TrainedSpan,
    states::{GroupMove, RolloutState, Verdict},
    tally::Tally,
};
use forebay_wire::Status;
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use self::turns::KnownTurns;
use super::{
    blobs, evals,
    group::{self, LockedGroup},
    looking::ledger,
    places::{count_released, read_place},
    policy, read_json, trained_spans,
};
use crate::{
    error::StoreError,
    op::Op,
    segment_files::Place,
    sql::{InsertRows, Row, Statement, Tx, among_keys, args, id_key_list, key_found, key_list},
    tally::TallyDelta,
};

/// A rollout that lacks scores, as its row has it. The row of its group is locked.
pub(super) struct Waiting {
    rollout_pk: RolloutPk,
    rollout_id: String,
    missing: Vec<String>,
    components: BTreeMap<String, f64>,
    status: Status,
    policy_version: Version,
    segments: u32,
    tokens: u64,
    response_tokens: u64,
    trained_tokens: u64,
    max_segment_tokens: u64,
    trained_spans: Option<Vec<TrainedSpan>>,
    payload: [u8; 32],
    payload_bytes: i64,
    received_at: Timestamp,
}

pub(super) static INSERT_SCORING: InsertRows =
    InsertRows::new("insert_scoring", "scoring", "rollout_pk, group_pk, policy_pk, missing, beside, since_us, due_us");

pub(super) static INSERT_SCORES: InsertRows =
    InsertRows::new("insert_scores", "score", "rollout_pk, name, scorer, applied, value, rationale, given_us");

/// Reads rollouts that lack scores, of those with these keys.
async fn waiting(tx: &mut Tx<'_>, rollouts: Vec<i64>) -> Result<HashMap<RolloutPk, Waiting>, StoreError> {
    const SELECT_SCORING: Statement = among_keys!(
        "-- select_scoring
        SELECT w.rollout_pk, w.missing, r.rollout_id, r.components, r.status, r.policy_version, r.segments, r.tokens,
            r.response_tokens, r.trained_tokens, r.max_segment_tokens, r.trained_spans, r.received_us, y.digest,
            CAST(COALESCE(y.length, LENGTH(y.body), 0) AS BIGINT) + CAST(COALESCE((
                SELECT SUM((SELECT b.bytes FROM blob AS b WHERE b.blob_pk = u.blob_pk))
                FROM blob_use AS u
                WHERE u.rollout_pk = w.rollout_pk
            ), 0) AS BIGINT) AS payload_bytes
        FROM scoring AS w
        JOIN rollout AS r ON r.rollout_pk = w.rollout_pk
        LEFT JOIN payload AS y ON y.rollout_pk = w.rollout_pk
        WHERE w.rollout_pk"
    );
    let mut found = HashMap::new();
    for mut row in tx.fetch_all(SELECT_SCORING, args![key_list(rollouts)]).await? {
        let one = read_waiting(&mut row)?;
        found.insert(one.rollout_pk, one);
    }
    Ok(found)
}

fn read_waiting(row: &mut Row) -> Result<Waiting, StoreError> {
    Ok(Waiting {
        rollout_pk: row.get("rollout_pk")?,
        rollout_id: row.get("rollout_id")?,
        missing: read_json(row, "missing")?.unwrap_or_default(),
        components: read_json(row, "components")?.unwrap_or_default(),
        status: row.get("status")?,
        policy_version: row.get("policy_version")?,
        segments: row.get("segments")?,
        tokens: row.get("tokens")?,
        response_tokens: row.get("response_tokens")?,
        trained_tokens: row.get("trained_tokens")?,
        max_segment_tokens: row.get("max_segment_tokens")?,
        trained_spans: trained_spans(row)?,
        // Without a payload, which only damage can bring about, the rollout is found to be damaged when it is read.
        payload: row.get::<Option<[u8; 32]>>("digest")?.unwrap_or_default(),
        payload_bytes: row.get("payload_bytes")?,
        received_at: row.get("received_us")?,
    })
}

/// All scores that were given to a rollout, ordered by name and scorer, and behind them those of its turns.
pub(super) async fn of_rollout(tx: &mut Tx<'_>, rollout: RolloutPk) -> Result<Vec<Score>, StoreError> {
    const SELECT_SCORES: Statement = Statement::new(
        "-- select_scores
        SELECT rollout_pk, name, scorer, applied, value, rationale, given_us, lease, attempt
        FROM score
        WHERE rollout_pk = $1
        ORDER BY name, scorer, applied",
    );
    let rows = tx.fetch_all(SELECT_SCORES, args![rollout]).await?;
    let with_rationale = |mut row: Row| Ok(Score { rationale: row.get("rationale")?, ..read_score(&mut row)? });
    let mut found = rows.into_iter().map(with_rationale).collect::<Result<Vec<_>, StoreError>>()?;
    found.extend(turns::of_rollout(tx, rollout).await?);
    Ok(found)
}

fn read_score(row: &mut Row) -> Result<Score, StoreError> {
    let lease: Option<String> = row.get("lease")?;
    Ok(Score {
        name: row.get("name")?,
        turn: None,
        scorer: row.get("scorer")?,
        value: row.get("value")?,
        rationale: None,
        applied: row.get("applied")?,
        given_at: row.get("given_us")?,
        lease: lease.as_deref().map(LeaseToken::presented).zip(row.get("attempt")?),
    })
}

/// The scores that were given to rollouts, without their rationales, which only people read.
async fn given(tx: &mut Tx<'_>, rollouts: Vec<i64>) -> Result<HashMap<RolloutPk, Vec<Score>>, StoreError> {
    const SELECT_GIVEN: Statement = among_keys!(
        "-- select_given_scores
        SELECT rollout_pk, name, scorer, applied, value, given_us, lease, attempt
        FROM score
        WHERE rollout_pk",
        "
        ORDER BY rollout_pk, name, scorer, applied"
    );
    by_rollout(tx.fetch_all(SELECT_GIVEN, args![key_list(rollouts)]).await?)
}

fn by_rollout(rows: Vec<Row>) -> Result<HashMap<RolloutPk, Vec<Score>>, StoreError> {
    let mut found: HashMap<RolloutPk, Vec<Score>> = HashMap::new();
    for mut row in rows {
        found.entry(row.get("rollout_pk")?).or_default().push(read_score(&mut row)?);
    }
    Ok(found)
}

/// The values of scores that the decisions about judged rollouts counted, without their rationales.
pub(super) async fn applied(
    tx: &mut Tx<'_>,
    rollouts: impl IntoIterator<Item = RolloutPk>,
) -> Result<HashMap<RolloutPk, Vec<Score>>, StoreError> {
    const SELECT_APPLIED: Statement = among_keys!(
        "-- select_applied_scores
        SELECT rollout_pk, name, scorer, applied, value, given_us, lease, attempt
        FROM score
        WHERE applied = 1 AND rollout_pk",
        "
        ORDER BY rollout_pk, name, scorer"
    );
    let keys: Vec<i64> = rollouts.into_iter().map(|rollout| rollout.0).collect();
    let mut found = HashMap::new();
    for page in keys.chunks(APPLIED_PAGE) {
        found.extend(by_rollout(tx.fetch_all(SELECT_APPLIED, args![key_list(page.to_vec())]).await?)?);
    }
    Ok(found)
}

/// Rollouts whose scores are read together.
const APPLIED_PAGE: usize = 1_024;

/// Bytes that filters read beside the rows of rollouts, from which a transaction has enough of them evaluated first.
const BESIDE_BYTES_MAX: usize = 4 << 20;

/// Rollouts that are dropped together for want of a score.
const UNSCORED_PAGE: usize = 256;

/// Those of these rollouts that lack scores.
pub(super) async fn waiting_among(tx: &mut Tx<'_>, rollouts: Vec<i64>) -> Result<Vec<RolloutPk>, StoreError> {
    const SELECT_WAITING: Statement = among_keys!(
        "-- select_waiting
        SELECT rollout_pk
        FROM scoring
        WHERE rollout_pk"
    );
    let rows = tx.fetch_all(SELECT_WAITING, args![key_list(rollouts)]).await?;
    rows.into_iter().map(|mut row| row.get("rollout_pk")).collect()
}

/// The rollouts of these groups that lack scores.
pub(super) async fn waiting_in(tx: &mut Tx<'_>, groups: Vec<i64>) -> Result<HashSet<RolloutPk>, StoreError> {
    const SELECT_WAITING_IN_GROUPS: Statement = among_keys!(
        "-- select_waiting_in_groups
        SELECT rollout_pk
        FROM scoring
        WHERE group_pk"
    );
    let rows = tx.fetch_all(SELECT_WAITING_IN_GROUPS, args![key_list(groups)]).await?;
    rows.into_iter().map(|mut row| row.get("rollout_pk")).collect()
}

/// The scores that decisions about rollouts counted.
pub struct AppliedScores(pub Vec<RolloutPk>);

#[async_trait]
impl Op for AppliedScores {
    type Output = HashMap<RolloutPk, Vec<Score>>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        applied(tx, self.0.iter().copied()).await
    }
}

/// A rollout that scores are posted for, under the lock of its group.
struct Scoring {
    rollout_pk: RolloutPk,
    group: GroupPk,
    verdict: Verdict,
    reason: Option<String>,
    /// None if its verdict is final.
    waiting: Option<Waiting>,
    /// What it lacks after the scores so far.
    missing: Vec<String>,
    /// The reward components of its row.
    components: BTreeMap<String, f64>,
    /// What its turns are called, if scores of this post are about them.
    turns: KnownTurns,
    scores: Vec<Score>,
    /// Those of `scores` that must be written.
    changed: Vec<Score>,
    decision: Option<(ScoredDecision, BTreeMap<String, f64>)>,
}

/// What became of a posted score.
struct Put {
    turn: Option<u32>,
    scorer: String,
    duplicate: bool,
    applied: bool,
    failed: bool,
}

impl Scoring {
    /// The number of the turn that a score is about.
    fn turn(&self, new: &NewScore, index: usize, rules: &Rules) -> Result<Option<u32>, Refusal> {
        let Some(named) = &new.turn else { return Ok(None) };
        let refuse = |detail: String| Err(Refusal::invalid(format!("/{index}/turn"), detail));
        if !rules.compare_turns() {
            return refuse(
                "the rules of the group compare no turns: `advantage` must be `turn_return` or `gigpo`".into(),
            );
        }
        match named {
            NamedTurn::Number(number) => match self.turns.count {
                Some(count) if *number as usize >= count => {
                    refuse(format!("the rollout has {count} turns, counted from 0 over all segments"))
                }
                _ => Ok(Some(*number)),
            },
            NamedTurn::Call(call) => match self.turns.calls.as_ref().and_then(|calls| calls.place(call)) {
                Some(place) => Ok(Some(place)),
                None => refuse(
                    "must be the id of a call that is a turn of the rollout. The ids of calls are known of turns that \
                     were posted with ids, and of sessions, if the rules of the group use scores"
                        .into(),
                ),
            },
        }
    }

    /// Adds a score. With a lease, the work that it settles must be among the held.
    fn put(
        &mut self,
        new: &NewScore,
        index: usize,
        rules: &Rules,
        held: &mut HashMap<String, work::Held>,
        now: Timestamp,
    ) -> Result<Put, Refusal> {
        let turn = self.turn(new, index, rules)?;
        let is_decided = self.waiting.is_none();
        let is_same = |score: &&Score| match (&new.lease, &score.lease) {
            // A repeated post is recognised before any check that could refuse it: its lease has ended.
            (Some(lease), Some((own, _))) => own == lease,
            (Some(_), None) => false,
            (None, _) => new.scorer.as_ref() == Some(&score.scorer),
        };
        if let Given::Value(value) = new.given {
            let of_name = |score: &&Score| score.name == new.name && score.turn == turn;
            let mut same = self.scores.iter().filter(of_name).filter(is_same);
            if let Some(same) = same.find(|score| score.value.to_bits() == value.to_bits()) {
                let scorer = same.scorer.clone();
                return Ok(Put { turn, scorer, duplicate: true, applied: same.applied, failed: false });
            }
        }
        let held = match &new.lease {
            Some(lease) => Some(work::Held::of(held, lease, (self.group, self.rollout_pk, &new.name), index)?),
            None => None,
        };
        let of_lease = held.as_ref().map(|held| held.scorer.clone());
        let attempt = new.lease.clone().zip(held.as_ref().map(|held| held.attempt));
        let scorer = new.scorer.clone().or(of_lease).expect("a score without a lease has a scorer");
        let value = match (&new.given, held) {
            (Given::Failed(reason), held) => {
                held.expect("only leased work can fail").failed = Some(reason.clone());
                return Ok(Put { turn, scorer, duplicate: false, applied: false, failed: true });
            }
            (Given::Value(value), _) => *value,
        };
        scoring::check(new, turn, &scorer, index, &self.components, &self.scores, is_decided)?;
        let score = Score {
            name: new.name.clone(),
            turn,
            scorer: scorer.clone(),
            value,
            rationale: new.rationale.clone(),
            applied: !is_decided,
            given_at: now,
            lease: attempt,
        };
        let own = |score: &&Score| (&score.name, score.turn, &score.scorer) == (&new.name, turn, &scorer);
        for list in [&mut self.scores, &mut self.changed] {
            list.retain(|old| !(own(&old) && old.applied == score.applied));
            list.push(score.clone());
        }
        self.scores.sort_by(|one, other| place_of(one).cmp(&place_of(other)));
        Ok(Put { turn, scorer, duplicate: false, applied: score.applied, failed: false })
    }

    /// The names of the scores that it was given now and that it lacked.
    fn given(&self) -> impl Iterator<Item = &str> {
        let lacked = self.waiting.iter().flat_map(|waiting| &waiting.missing);
        let is_given = |name: &&String| self.changed.iter().any(|score| score.turn.is_none() && score.name == **name);
        lacked.filter(is_given).map(String::as_str)
    }
}

/// The key of a rollout in the current run of its policy.
type Keyed = (PolicyPk, IdKey);

#[async_trait]
impl Op for PutScores {
    type Output = Result<PutOutcome, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let mut policies: BTreeMap<&PolicyName, Policy> = BTreeMap::new();
        for name in self.scores.iter().map(|new| &new.policy).collect::<BTreeSet<_>>() {
            let Some(policy) = policy::find(tx, name).await? else {
                return Ok(Err(Refusal::UnknownPolicy(name.clone())));
            };
            policies.insert(name, policy);
        }
        let (mut rollouts, mut groups) = lock(tx, &policies, &self.scores).await?;
        let mut held = work::held(tx, &self.scores, self.now).await?;
        let mut put = Vec::with_capacity(self.scores.len());
        for (index, new) in self.scores.iter().enumerate() {
            let key = (policies[&new.policy].policy_pk, new.rollout_id.key());
            let Some(rollout) = rollouts.get_mut(&key) else {
                let id = new.rollout_id.to_string();
                return Ok(Err(Refusal::UnknownInPolicy { what: "rollout", id, policy: new.policy.clone() }));
            };
            let rules = &groups[&rollout.group].rules;
            match rollout.put(new, index, rules, &mut held, self.now) {
                Ok(outcome) => put.push((key, outcome)),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
        let complete = judge(tx, self, &policies, &mut rollouts, &groups).await?;
        if !complete.is_empty() {
            return Ok(Ok(PutOutcome::Judge(complete)));
        }
        let decided = write(tx, &rollouts, &mut groups, self.now).await?;
        if policies.keys().any(|name| name.is_evaluations()) {
            let found =
                rollouts.values().filter_map(|rollout| Some((rollout.rollout_pk, &rollout.decision.as_ref()?.0)));
            let found = found.filter(|(_, decision)| decision.verdict.takes_place());
            let results: Vec<_> = found.filter_map(|(rollout, decision)| Some((rollout, decision.reward?))).collect();
            evals::settle(tx, &results, self.now).await?;
        }
        let given = rollouts.values().filter(|rollout| groups[&rollout.group].rules.have_work());
        let given = given.flat_map(|rollout| {
            let rules = &groups[&rollout.group].rules;
            let work = |name| Some((rollout.group, rollout.rollout_pk, name, rules.work(name)?.per));
            rollout.given().filter_map(work)
        });
        let work = work::settle(tx, &given.collect(), &held).await?;
        let scored = self.scores.iter().zip(put).map(|(new, (key, put))| {
            let Put { turn, scorer, duplicate, applied, failed } = put;
            let rollout = &rollouts[&key];
            let group = &groups[&rollout.group];
            let decision = rollout.decision.as_ref().map(|(decision, _)| decision);
            Scored {
                policy: new.policy.clone(),
                rollout_id: new.rollout_id.clone(),
                name: new.name.clone(),
                turn,
                scorer,
                duplicate,
                applied,
                failed,
                scoring: rollout.missing.clone(),
                verdict: decision.map_or(rollout.verdict, |decision| decision.verdict),
                reason: decision.map_or_else(|| rollout.reason.clone(), |decision| decision.reason.clone()),
                group_id: group.group_id.clone(),
                fill: group.fill,
                group_reason: group.reason.clone(),
                decision: decision.cloned(),
                decided: decided.contains(&rollout.group).then(|| (group.fill.state, group.failed_filters.clone())),
            }
        });
        Ok(Ok(PutOutcome::Stored(Stored { scores: scored.collect(), work })))
    }
}

/// The rollouts that scores are posted for, and their groups, which are locked in the order in which ingest locks them.
async fn lock(
    tx: &mut Tx<'_>,
    policies: &BTreeMap<&PolicyName, Policy>,
    scores: &[NewScore],
) -> Result<(BTreeMap<Keyed, Scoring>, HashMap<GroupPk, LockedGroup>), StoreError> {
    const SELECT_SCORED: Statement = Statement {
        sqlite: "-- select_scored
            SELECT r.rollout_pk, r.rollout_id, g.group_id
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            WHERE r.policy_pk = $1 AND r.run = $2 AND r.rollout_key IN (SELECT unhex(value) FROM json_each($3))",
        postgres: "-- select_scored
            SELECT r.rollout_pk, r.rollout_id, g.group_id
            FROM unnest($3::bytea[]) AS k (rollout_key)
            -- One lookup in the unique index for each key, as in `select_stored`.
            CROSS JOIN LATERAL (
                SELECT rollout_pk, rollout_id, group_pk
                FROM rollout
                WHERE policy_pk = $1 AND run = $2 AND rollout_key = k.rollout_key
                OFFSET 0
            ) AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk",
    };
    const SELECT_VERDICTS: Statement = among_keys!(
        "-- select_verdicts
        SELECT rollout_pk, group_pk, verdict, reason, components
        FROM rollout
        WHERE rollout_pk"
    );
    let mut keys: BTreeMap<RolloutPk, Keyed> = BTreeMap::new();
    let mut groups = HashMap::new();
    for (name, policy) in policies {
        let named = scores.iter().filter(|new| new.policy == **name).map(|new| new.rollout_id.key());
        let named: BTreeSet<IdKey> = named.collect();
        let list = id_key_list(named.iter().copied());
        let mut group_keys = BTreeSet::new();
        for mut row in tx.fetch_all(SELECT_SCORED, args![policy.policy_pk, policy.run, list]).await? {
            let key = key_found(&row.get::<String>("rollout_id")?, |found| named.contains(found))?;
            keys.insert(row.get("rollout_pk")?, (policy.policy_pk, key));
            group_keys.insert(IdKey::of(&row.get::<String>("group_id")?));
        }
        if !group_keys.is_empty() {
            let locked = group::lock_all(tx, policy.policy_pk, policy.run, &group_keys).await?;
            groups.extend(locked.into_iter().map(|(_, group)| (group.group_pk, group)));
        }
    }
    // Read under the locks of the groups.
    let mut waiting = waiting(tx, keys.keys().map(|rollout| rollout.0).collect()).await?;
    let mut given = given(tx, keys.keys().map(|rollout| rollout.0).collect()).await?;
    let (mut known, mut given_to_turns) = of_turns(tx, scores, &keys).await?;
    let mut rollouts = BTreeMap::new();
    for mut row in tx.fetch_all(SELECT_VERDICTS, args![key_list(keys.keys().map(|rollout| rollout.0))]).await? {
        let rollout_pk = row.get("rollout_pk")?;
        let group = row.get("group_pk")?;
        // An earlier version, which does not know these rows, may have discarded the group.
        let is_open = groups.get(&group).is_some_and(|group: &LockedGroup| group.fill.state.is_open());
        let waiting = waiting.remove(&rollout_pk).filter(|_| is_open);
        let rollout = Scoring {
            rollout_pk,
            group,
            verdict: row.get("verdict")?,
            reason: row.get("reason")?,
            missing: waiting.as_ref().map(|waiting| waiting.missing.clone()).unwrap_or_default(),
            waiting,
            components: read_json(&mut row, "components")?.unwrap_or_default(),
            turns: known.remove(&rollout_pk).unwrap_or_default(),
            scores: in_order(given.remove(&rollout_pk), given_to_turns.remove(&rollout_pk)),
            changed: Vec::new(),
            decision: None,
        };
        rollouts.insert(keys[&rollout_pk], rollout);
    }
    Ok((rollouts, groups))
}

/// What is known of the turns of those rollouts whose turns are scored, and the scores that these have.
async fn of_turns(
    tx: &mut Tx<'_>,
    scores: &[NewScore],
    keys: &BTreeMap<RolloutPk, Keyed>,
) -> Result<(HashMap<RolloutPk, KnownTurns>, HashMap<RolloutPk, Vec<Score>>), StoreError> {
    let named: HashSet<IdKey> =
        scores.iter().filter(|new| new.turn.is_some()).map(|new| new.rollout_id.key()).collect();
    let rollouts: Vec<RolloutPk> =
        keys.iter().filter(|(_, (_, key))| named.contains(key)).map(|(rollout, _)| *rollout).collect();
    if rollouts.is_empty() {
        return Ok(Default::default());
    }
    let by_call = |new: &&NewScore| matches!(new.turn, Some(NamedTurn::Call(_)));
    let by_calls: HashSet<IdKey> = scores.iter().filter(by_call).map(|new| new.rollout_id.key()).collect();
    let by_calls = keys.iter().filter(|(_, (_, key))| by_calls.contains(key)).map(|(rollout, _)| *rollout);
    let known = turns::known(tx, rollouts.iter().map(|rollout| rollout.0).collect(), by_calls.collect()).await?;
    Ok((known, turns::given(tx, &rollouts).await?))
}

/// The order of scores.
fn place_of(score: &Score) -> (Option<u32>, &str, &str) {
    (score.turn, &score.name, &score.scorer)
}

fn in_order(of_rollout: Option<Vec<Score>>, of_turns: Option<Vec<Score>>) -> Vec<Score> {
    of_rollout.into_iter().chain(of_turns).flatten().collect()
}

/// Decides about rollouts that have all of their scores now. Returns those whose filters must be evaluated first: some of
/// them, if what filters read of them is large.
async fn judge(
    tx: &mut Tx<'_>,
    put: &PutScores,
    policies: &BTreeMap<&PolicyName, Policy>,
    rollouts: &mut BTreeMap<Keyed, Scoring>,
    groups: &HashMap<GroupPk, LockedGroup>,
) -> Result<Vec<Complete>, StoreError> {
    const SELECT_BESIDE: Statement = Statement::new(
        "-- select_beside
        SELECT beside
        FROM scoring
        WHERE rollout_pk = $1",
    );
    let versions: HashMap<PolicyPk, Version> =
        policies.values().map(|policy| (policy.policy_pk, policy.version)).collect();
    let mut not_evaluated = Vec::new();
    let mut bytes = 0;
    for (key, rollout) in rollouts.iter_mut().filter(|(_, rollout)| !rollout.changed.is_empty()) {
        let Some(waiting) = &rollout.waiting else { continue };
        let rules = &groups[&rollout.group].rules;
        let scores = scores::of_row(rules, &waiting.components, None, rollout.scores.iter());
        rollout.missing = rules.missing_scores(&scores);
        if !rollout.missing.is_empty() {
            continue;
        }
        let mut complete = waiting.complete(rules, scores, versions[&key.0]);
        if let Some(decision) = complete.decide(&put.judged) {
            rollout.decision = Some((decision, complete.components()));
            continue;
        }
        let mut row = tx.fetch_one(SELECT_BESIDE, args![complete.rollout_pk]).await?;
        let beside: Option<String> = row.get("beside")?;
        bytes += beside.as_ref().map_or(0, String::len);
        let parse = |text: &String| serde_json::from_str(text);
        let parsed = beside.as_ref().map(parse).transpose();
        complete.beside = parsed.map_err(|error| StoreError::Corrupt(format!("column `beside`: {error}")))?;
        not_evaluated.push(complete);
        if bytes >= BESIDE_BYTES_MAX {
            break;
        }
    }
    Ok(not_evaluated)
}

impl Waiting {
    fn complete(&self, rules: &Arc<Rules>, scores: BTreeMap<String, f64>, current: Version) -> Complete {
        Complete {
            rollout_pk: self.rollout_pk,
            rules: Arc::clone(rules),
            scores,
            status: self.status,
            reward_components: self.components.clone(),
            policy_version: self.policy_version,
            current,
            segments: self.segments,
            tokens: self.tokens,
            response_tokens: self.response_tokens,
            trained_tokens: self.trained_tokens,
            max_segment_tokens: self.max_segment_tokens,
            beside: None,
        }
    }
}

/// Writes scores and what was decided by them. Returns the groups that were decided.
async fn write(
    tx: &mut Tx<'_>,
    rollouts: &BTreeMap<Keyed, Scoring>,
    groups: &mut HashMap<GroupPk, LockedGroup>,
    now: Timestamp,
) -> Result<HashSet<GroupPk>, StoreError> {
    const PUT_SCORE: Statement = Statement::new(
        "-- put_score
        INSERT INTO score (rollout_pk, name, scorer, applied, value, rationale, given_us, lease, attempt)
        VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
        ON CONFLICT (rollout_pk, name, scorer, applied)
        DO UPDATE SET value = excluded.value, rationale = excluded.rationale, given_us = excluded.given_us,
            lease = excluded.lease, attempt = excluded.attempt",
    );
    const SET_MISSING: Statement = Statement::new(
        "-- set_missing_scores
        UPDATE scoring
        SET missing = $2
        WHERE rollout_pk = $1",
    );
    let (mut touched, mut places) = (BTreeSet::new(), Vec::new());
    for rollout in rollouts.values().filter(|rollout| !rollout.changed.is_empty()) {
        for score in rollout.changed.iter().chain(&rollout.by_producer()) {
            if let Some(turn) = score.turn {
                turns::put(tx, rollout.rollout_pk, turn, score).await?;
                continue;
            }
            let values = args![
                rollout.rollout_pk,
                &*score.name,
                &*score.scorer,
                score.applied,
                score.value,
                score.rationale.as_deref(),
                score.given_at,
                score.lease.as_ref().map(|(lease, _)| lease.as_str()),
                score.lease.as_ref().map(|(_, attempt)| i64::from(*attempt))
            ];
            tx.guarded(PUT_SCORE, values, 1).await?;
        }
        let Some(waiting) = &rollout.waiting else { continue };
        if rollout.changed.iter().any(|score| score.turn.is_some()) {
            turns::reward(tx, rollout.rollout_pk, &rollout.scores).await?;
        }
        match &rollout.decision {
            Some((decision, components)) => {
                let group = groups.get_mut(&rollout.group).expect("its group is locked");
                places.extend(settle(tx, group, waiting, decision, components, now).await?);
                touched.insert(rollout.group);
            }
            None if rollout.missing != waiting.missing => {
                let missing = serde_json::to_string(&rollout.missing).expect("names always serialize");
                tx.guarded(SET_MISSING, args![rollout.rollout_pk, missing], 1).await?;
            }
            None => {}
        }
    }
    count_released(tx, &places, now).await?;
    let mut decided = HashSet::new();
    // In the order of their keys, because that is the order in which they become ready.
    for key in touched {
        if finish(tx, groups.get_mut(&key).expect("its group is locked"), now).await? {
            decided.insert(key);
        }
    }
    Ok(decided)
}

impl Scoring {
    /// What the producer sent under names that others have scored as well: the row of the rollout will have what was made of
    /// both.
    fn by_producer(&self) -> Vec<Score> {
        let (Some(waiting), Some(_)) = (&self.waiting, &self.decision) else { return Vec::new() };
        let of_rollout = self.scores.iter().filter(|score| score.turn.is_none());
        let names: BTreeSet<&str> = of_rollout.map(|score| &*score.name).collect();
        let sent = waiting.components.iter().filter(|(name, _)| names.contains(&***name) && *name != scores::REWARD);
        let of_producer = |(name, value): (&String, &f64)| Score {
            name: name.clone(),
            turn: None,
            scorer: PRODUCER.to_owned(),
            value: *value,
            rationale: None,
            applied: true,
            given_at: waiting.received_at,
            lease: None,
        };
        sent.map(of_producer).collect()
    }
}

/// Makes the verdict of a rollout final, and changes the counts of its group in memory. Returns the place of its payload, if
/// that is deleted.
async fn settle(
    tx: &mut Tx<'_>,
    group: &mut LockedGroup,
    waiting: &Waiting,
    decision: &ScoredDecision,
    components: &BTreeMap<String, f64>,
    now: Timestamp,
) -> Result<Vec<Place>, StoreError> {
    const JUDGE_SCORED: Statement = Statement::new(
        "-- judge_scored
        UPDATE rollout
        SET verdict = $2, reason = $3, failed_filters = $4, reward = $5, components = $6, trained_spans = $7,
            version_min = CASE WHEN $2 = 'kept' THEN version_min END,
            version_max = CASE WHEN $2 = 'kept' THEN version_max END,
            turns = CASE WHEN $2 <> 'dropped' THEN turns END, seal = $8
        WHERE rollout_pk = $1 AND verdict = 'kept'",
    );
    const END_SCORING: Statement = Statement::new(
        "-- end_scoring
        DELETE FROM scoring
        WHERE rollout_pk = $1",
    );
    let verdict = decision.verdict;
    let trained_spans = waiting.trained_spans.as_deref().filter(|_| verdict == Verdict::Kept);
    let seal = waiting.seal(group, verdict, decision.reward);
    let components = (!components.is_empty()).then(|| to_json(components));
    let failed = Some(decision.failed_filters.join(",")).filter(|names| !names.is_empty());
    let values = args![
        waiting.rollout_pk,
        verdict,
        decision.reason.as_deref(),
        failed,
        decision.reward,
        components,
        trained_spans.map(to_json),
        &seal[..]
    ];
    tx.guarded(JUDGE_SCORED, values, 1).await?;
    tx.guarded(END_SCORING, args![waiting.rollout_pk], 1).await?;
    let is_judged = group.rules.judges(verdict, decision.reason.as_deref());
    tx.tallies().rewarded(group.policy_pk, decision.reward.filter(|_| is_judged));
    count(tx.tallies(), group, waiting, verdict, decision.reason.as_deref().unwrap_or_default(), now);
    let deletes = !verdict.takes_place() && group.rules.retention.dropped_s == 0;
    if deletes { delete_payloads(tx, vec![waiting.rollout_pk.0], now).await } else { Ok(Vec::new()) }
}

/// Changes the counts for a rollout that got its final verdict.
fn count(
    tallies: &mut TallyDelta,
    group: &mut LockedGroup,
    waiting: &Waiting,
    verdict: Verdict,
    reason: &str,
    now: Timestamp,
) {
    let (policy, delivered) = (group.policy_pk, verdict.takes_place());
    tallies.rollouts(policy, RolloutState::Scoring, -1);
    tallies.rollouts(policy, if delivered { RolloutState::Open } else { RolloutState::Dropped }, 1);
    tallies.add(policy, Tally::Masked, i64::from(verdict == Verdict::Masked));
    group.fill.count_scored(verdict);
    if !delivered {
        tallies.add(policy, Tally::LiveBytes, -waiting.payload_bytes);
        tallies.dropped(policy, reason, now);
        group.payload_bytes -= waiting.payload_bytes;
    }
}

/// Deletes the payloads of rollouts. Returns the places of those that are outside of the database.
async fn delete_payloads(tx: &mut Tx<'_>, rollouts: Vec<i64>, now: Timestamp) -> Result<Vec<Place>, StoreError> {
    const DROP_PAYLOADS: Statement = among_keys!(
        "-- drop_payloads
        DELETE FROM payload
        WHERE rollout_pk",
        "
        RETURNING file, start, length"
    );
    let mut places = Vec::new();
    for mut row in tx.fetch_all(DROP_PAYLOADS, args![key_list(rollouts.iter().copied())]).await? {
        places.extend(read_place(&mut row)?);
    }
    blobs::release(tx, rollouts, now).await?;
    Ok(places)
}

impl Waiting {
    fn seal(&self, group: &LockedGroup, verdict: Verdict, reward: Option<f64>) -> [u8; SEAL_BYTES] {
        RolloutSeal {
            rollout_id: &self.rollout_id,
            group_id: &group.group_id,
            verdict,
            reward,
            policy_version: self.policy_version,
            trained_spans: self.trained_spans.as_deref().filter(|_| verdict == Verdict::Kept),
            payload: &self.payload,
        }
        .checksum()
    }
}

/// Writes the counts of a group some of whose rollouts were judged, and decides it if that is due. Returns whether it was.
async fn finish(tx: &mut Tx<'_>, group: &mut LockedGroup, now: Timestamp) -> Result<bool, StoreError> {
    write_counts(tx, group, now).await?;
    let Some(cause) = group.fill.due(group.rules.group.on_drop) else { return Ok(false) };
    group::finalize(tx, group, cause, now).await?;
    Ok(true)
}

async fn write_counts(tx: &mut Tx<'_>, group: &LockedGroup, now: Timestamp) -> Result<(), StoreError> {
    // Once no rollout waits, the group has its own deadline again, which may be over.
    const COUNT_SCORED: Statement = Statement::new(
        "-- count_scored
        UPDATE rollout_group
        SET kept = $2, masked = $3, dropped = $4, scoring = $5, payload_bytes = $6,
            deadline_us = CASE WHEN CAST($5 AS BIGINT) = 0 THEN $7 ELSE deadline_us END
        WHERE group_pk = $1 AND state = 'open'",
    );
    let fill = &group.fill;
    let deadline = group.opened_at.plus_seconds(group.rules.group.timeout_s).max(now);
    let values =
        args![group.group_pk, fill.kept, fill.masked, fill.dropped, fill.scoring, group.payload_bytes, deadline];
    tx.guarded(COUNT_SCORED, values, 1).await
}

/// Which rollouts of an open group are dropped for want of a score.
pub(super) enum Unscored {
    All,
    /// Those whose time is over, up to a number.
    Due {
        now: Timestamp,
        limit: usize,
    },
}

/// Drops rollouts of an open group that lack scores, and writes the counts of the group. Returns how many there were.
pub(super) async fn drop_unscored(
    tx: &mut Tx<'_>,
    group: &mut LockedGroup,
    which: &Unscored,
    now: Timestamp,
) -> Result<usize, StoreError> {
    const SELECT_UNSCORED: Statement = Statement::new(
        "-- select_unscored
        SELECT rollout_pk
        FROM scoring
        WHERE group_pk = $1 AND (CAST($2 AS BIGINT) IS NULL OR due_us <= $2)
        ORDER BY rollout_pk
        LIMIT $3",
    );
    if group.fill.scoring == 0 {
        return Ok(0);
    }
    let (due, limit) = match which {
        Unscored::All => (None, usize::MAX),
        Unscored::Due { now, limit } => (Some(*now), *limit),
    };
    let mut dropped = 0;
    while dropped < limit {
        let page = UNSCORED_PAGE.min(limit - dropped);
        let rows = tx.fetch_all(SELECT_UNSCORED, args![group.group_pk, due, page]).await?;
        let keys = rows.into_iter().map(|mut row| row.get("rollout_pk")).collect::<Result<Vec<i64>, _>>()?;
        dropped += keys.len();
        let is_last = keys.len() < page;
        if !keys.is_empty() {
            drop_page(tx, group, keys, now).await?;
        }
        if is_last {
            break;
        }
    }
    write_counts(tx, group, now).await?;
    Ok(dropped)
}

/// Drops rollouts that lack scores, with a few statements for all of them.
async fn drop_page(tx: &mut Tx<'_>, group: &mut LockedGroup, keys: Vec<i64>, now: Timestamp) -> Result<(), StoreError> {
    const DROP_UNSCORED: Statement = among_keys!(
        "-- drop_unscored
        UPDATE rollout
        SET verdict = 'dropped', reason = $2, reward = NULL, trained_spans = NULL, version_min = NULL, version_max = NULL,
            turns = NULL
        WHERE verdict = 'kept' AND rollout_pk"
    );
    const SEAL_UNSCORED: Statement = Statement {
        sqlite: "-- seal_unscored
            UPDATE rollout
            SET seal = $2
            WHERE rollout_pk = $1",
        postgres: "-- seal_unscored
            UPDATE rollout
            SET seal = v.seal
            FROM UNNEST($1::bigint[], $2::bytea[]) AS v (rollout_pk, seal)
            WHERE rollout.rollout_pk = v.rollout_pk",
    };
    // What was given to them counts for nothing.
    const WITHDRAW_SCORES: Statement = among_keys!(
        "-- withdraw_scores
        UPDATE score
        SET applied = 0
        WHERE applied = 1 AND scorer <> '' AND rollout_pk"
    );
    const END_SCORING_OF: Statement = among_keys!(
        "-- end_scoring_of
        DELETE FROM scoring
        WHERE rollout_pk"
    );
    let found = waiting(tx, keys.clone()).await?;
    let seals = found.values().map(|waiting| {
        let seal = waiting.seal(group, Verdict::Dropped, None);
        (waiting.rollout_pk.0, seal[..].into())
    });
    let seals: Vec<_> = seals.collect();
    tx.guarded(DROP_UNSCORED, args![key_list(keys.clone()), reasons::UNSCORED], keys.len()).await?;
    tx.set_each(SEAL_UNSCORED, seals).await?;
    tx.execute(WITHDRAW_SCORES, args![key_list(keys.clone())]).await?;
    turns::withdraw(tx, keys.clone()).await?;
    tx.guarded(END_SCORING_OF, args![key_list(keys.clone())], keys.len()).await?;
    work::end_of_rollouts(tx, group, keys.clone()).await?;
    for waiting in found.values() {
        count(tx.tallies(), group, waiting, Verdict::Dropped, reasons::UNSCORED, now);
    }
    if group.rules.retention.dropped_s == 0 {
        let places = delete_payloads(tx, keys, now).await?;
        count_released(tx, &places, now).await?;
    }
    Ok(())
}

/// Forgets what the rollouts of discarded groups lack. What was given to them counts for nothing.
pub(super) async fn end_of_groups(tx: &mut Tx<'_>, groups: Vec<i64>) -> Result<(), StoreError> {
    const WITHDRAW_SCORES_OF_GROUPS: Statement = Statement {
        sqlite: "-- withdraw_scores_of_groups
            UPDATE score
            SET applied = 0
            WHERE applied = 1 AND scorer <> '' AND rollout_pk IN (
                SELECT rollout_pk FROM scoring WHERE group_pk IN (SELECT value FROM json_each($1))
            )",
        postgres: "-- withdraw_scores_of_groups
            UPDATE score
            SET applied = 0
            WHERE applied = 1 AND scorer <> '' AND rollout_pk = ANY (ARRAY(
                SELECT rollout_pk FROM scoring WHERE group_pk = ANY ($1::bigint[])
            ))",
    };
    const END_SCORING_OF_GROUPS: Statement = among_keys!(
        "-- end_scoring_of_groups
        DELETE FROM scoring
        WHERE group_pk"
    );
    const NONE_SCORING: Statement = among_keys!(
        "-- none_scoring
        UPDATE rollout_group
        SET scoring = 0
        WHERE scoring > 0 AND group_pk"
    );
    tx.execute(WITHDRAW_SCORES_OF_GROUPS, args![key_list(groups.clone())]).await?;
    turns::withdraw_of_groups(tx, groups.clone()).await?;
    tx.execute(NONE_SCORING, args![key_list(groups.clone())]).await?;
    tx.execute(END_SCORING_OF_GROUPS, args![key_list(groups.clone())]).await?;
    work::end_of_groups(tx, groups).await
}

/// Sweep: groups with rollouts whose time to be scored is over, up to `limit` rollouts.
pub struct UnscoredGroups {
    pub now: Timestamp,
    pub limit: u32,
}

#[async_trait]
impl Op for UnscoredGroups {
    type Output = Vec<GroupPk>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_UNSCORED_GROUPS: Statement = Statement::new(
            "-- select_unscored_groups
            SELECT group_pk
            FROM scoring
            WHERE due_us <= $1
            -- Groups that become ready at once do so in the order of their rollouts' arrival.
            ORDER BY due_us, rollout_pk
            LIMIT $2",
        );
        let rows = tx.fetch_all(SELECT_UNSCORED_GROUPS, args![self.now, self.limit]).await?;
        let keys = rows.into_iter().map(|mut row| row.get("group_pk")).collect::<Result<Vec<_>, _>>()?;
        let mut seen = HashSet::new();
        Ok(keys.into_iter().filter(|key| seen.insert(*key)).collect())
    }
}

/// Sweep: drops rollouts of a group whose time to be scored is over, up to `limit`.
pub struct DropUnscored {
    pub group: GroupPk,
    pub now: Timestamp,
    pub limit: usize,
}

/// What became of them.
pub struct DroppedUnscored {
    pub policy: PolicyName,
    pub dropped: usize,
    /// Their group, if it was decided by that.
    pub decided: Option<Group>,
}

#[async_trait]
impl Op for DropUnscored {
    type Output = Option<DroppedUnscored>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        let group = group::lock_by_key(tx, self.group).await?;
        let Some(mut group) = group.filter(|group| group.fill.state.is_open()) else {
            // Only an earlier version can have left a row here: it does not know them.
            end_of_groups(tx, vec![self.group.0]).await?;
            return Ok(None);
        };
        let (policy, run) = group::policy_of(tx, &group).await?;
        if group.run != run {
            group::discard(tx, &mut group, GroupMove::Straggle, reasons::RESET.to_owned(), reasons::RESET, self.now)
                .await?;
            return Ok(None);
        }
        let due = Unscored::Due { now: self.now, limit: self.limit };
        let dropped = drop_unscored(tx, &mut group, &due, self.now).await?;
        let cause = group.fill.due(group.rules.group.on_drop);
        if let Some(cause) = cause {
            group::finalize(tx, &mut group, cause, self.now).await?;
        }
        let decided = match cause {
            Some(_) => Some(ledger::group(tx, group.group_pk).await?),
            None => None,
        };
        Ok(Some(DroppedUnscored { policy, dropped, decided }))
    }
}

#[async_trait]
impl Op for FindScores {
    type Output = Result<FoundScores, Refusal>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_SCORES_OF: Statement = Statement::new(
            "-- select_scores_of
            SELECT r.rollout_pk, r.rollout_id, r.reward, r.components, r.received_us, g.rules_pk, w.missing, w.due_us
            FROM rollout AS r
            JOIN rollout_group AS g ON g.group_pk = r.group_pk
            LEFT JOIN scoring AS w ON w.rollout_pk = r.rollout_pk
            WHERE r.policy_pk = $1 AND r.run = $2 AND r.rollout_key = $3",
        );
        let Some(policy) = policy::find(tx, &self.policy).await? else {
            return Ok(Err(Refusal::UnknownPolicy(self.policy.clone())));
        };
        let key = self.rollout_id.key();
        let row = tx.fetch_optional(SELECT_SCORES_OF, args![policy.policy_pk, policy.run, key]).await?;
        let Some(mut row) = row else {
            let id = self.rollout_id.to_string();
            return Ok(Err(Refusal::UnknownInPolicy { what: "rollout", id, policy: self.policy.clone() }));
        };
        key_found(&row.get::<String>("rollout_id")?, |found| *found == key)?;
        let rollout_pk: RolloutPk = row.get("rollout_pk")?;
        let rules = tx.rules(row.get("rules_pk")?).await?;
        let mut found = of_rollout(tx, rollout_pk).await?;
        let missing: Option<Vec<String>> = read_json(&mut row, "missing")?;
        // The row of a judged rollout has what was made of the scores that it counts.
        let is_told =
            |score: &&Score| score.turn.is_none() && (score.scorer == PRODUCER || (missing.is_none() && score.applied));
        let names: BTreeSet<String> = found.iter().filter(is_told).map(|score| score.name.clone()).collect();
        let mut sent: BTreeMap<String, f64> = read_json(&mut row, "components")?.unwrap_or_default();
        // Where rules use scores, what the producer sent as the reward is among the given.
        let reward: Option<f64> = row.get("reward")?;
        sent.remove(scores::REWARD);
        sent.extend(reward.filter(|_| !rules.use_scores()).map(|reward| (scores::REWARD.to_owned(), reward)));
        let given_at = row.get("received_us")?;
        found.extend(sent.into_iter().filter(|(name, _)| !names.contains(name)).map(|(name, value)| Score {
            name,
            turn: None,
            scorer: PRODUCER.to_owned(),
            value,
            rationale: None,
            applied: true,
            given_at,
            lease: None,
        }));
        found.sort_by(|one, other| place_of(one).cmp(&place_of(other)));
        Ok(Ok(FoundScores { scores: found, missing: missing.unwrap_or_default(), due_at: row.get("due_us")? }))
    }
}

fn to_json(value: &(impl Serialize + ?Sized)) -> String {
    serde_json::to_string(value).expect("lists and maps of finite numbers always serialize")
}
