//! Scores of turns: rewards that come after their rollout and take the place of those that came with it.
//!
//! They are put into the turns of the rollout's row when they come, so the decision of a group reads no scores.

use std::collections::HashMap;

use forebay_domain::{
    credit,
    ids::RolloutPk,
    scores::{self, REWARD, Score},
    turn_calls::TurnCalls,
};

use crate::{
    error::StoreError,
    ops::read_json,
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// Rollouts whose scores are read together.
const PAGE: usize = 64;

/// What is known of the turns of a rollout.
#[derive(Debug, Default)]
pub(super) struct KnownTurns {
    /// How many it has; none if it takes no place in its group.
    pub(super) count: Option<usize>,
    pub(super) calls: Option<TurnCalls>,
}

/// What is known of the turns of these rollouts, and the names of the calls of some.
pub(super) async fn known(
    tx: &mut Tx<'_>,
    rollouts: Vec<i64>,
    by_calls: Vec<RolloutPk>,
) -> Result<HashMap<RolloutPk, KnownTurns>, StoreError> {
    const SELECT_TURN_CALLS: Statement = Statement::new(
        "-- select_turn_calls
        SELECT turn_calls
        FROM rollout
        WHERE rollout_pk = $1",
    );
    const SELECT_KNOWN_TURNS: Statement = among_keys!(
        "-- select_known_turns
        SELECT rollout_pk, CAST(LENGTH(turns) AS BIGINT) AS bytes
        FROM rollout
        WHERE rollout_pk"
    );
    let mut found = HashMap::new();
    for mut row in tx.fetch_all(SELECT_KNOWN_TURNS, args![key_list(rollouts)]).await? {
        let bytes: Option<u64> = row.get("bytes")?;
        let count = bytes.map(|bytes| bytes as usize / credit::TURN_BYTES);
        found.insert(row.get("rollout_pk")?, KnownTurns { count, calls: None });
    }
    // The names of calls may be a megabyte.
    for rollout in by_calls {
        let mut row = tx.fetch_one(SELECT_TURN_CALLS, args![rollout]).await?;
        found.entry(rollout).or_default().calls = read_json(&mut row, "turn_calls")?;
    }
    Ok(found)
}

fn read(row: &mut Row) -> Result<Score, StoreError> {
    Ok(Score {
        name: REWARD.to_owned(),
        turn: Some(row.get("turn")?),
        scorer: row.get("scorer")?,
        value: row.get("value")?,
        rationale: None,
        applied: row.get("applied")?,
        given_at: row.get("given_us")?,
        lease: None,
    })
}

/// All scores of the turns of a rollout, in their order.
pub(super) async fn of_rollout(tx: &mut Tx<'_>, rollout: RolloutPk) -> Result<Vec<Score>, StoreError> {
    const SELECT_TURN_SCORES: Statement = Statement::new(
        "-- select_turn_scores
        SELECT rollout_pk, turn, scorer, applied, value, rationale, given_us
        FROM turn_score
        WHERE rollout_pk = $1
        ORDER BY turn, scorer, applied",
    );
    let rows = tx.fetch_all(SELECT_TURN_SCORES, args![rollout]).await?;
    rows.into_iter().map(|mut row| Ok(Score { rationale: row.get("rationale")?, ..read(&mut row)? })).collect()
}

/// The rewards that turns of these rollouts were given and that count, with the numbers of the turns. In the order of
/// [`given`], because the mean of several depends on it.
pub(in crate::ops) async fn rewards(
    tx: &mut Tx<'_>,
    rollouts: &[RolloutPk],
) -> Result<HashMap<RolloutPk, Vec<(u32, f64)>>, StoreError> {
    const SELECT_TURN_REWARDS: Statement = among_keys!(
        "-- select_turn_rewards
        SELECT rollout_pk, turn, value
        FROM turn_score
        WHERE applied = 1 AND rollout_pk",
        "
        ORDER BY rollout_pk, turn, scorer"
    );
    let mut found: HashMap<RolloutPk, Vec<(u32, f64)>> = HashMap::new();
    for page in rollouts.chunks(PAGE) {
        let keys = key_list(page.iter().map(|rollout| rollout.0));
        for mut row in tx.fetch_all(SELECT_TURN_REWARDS, args![keys]).await? {
            found.entry(row.get("rollout_pk")?).or_default().push((row.get("turn")?, row.get("value")?));
        }
    }
    Ok(found)
}

/// The scores of the turns of these rollouts, without their rationales.
pub(super) async fn given(
    tx: &mut Tx<'_>,
    rollouts: &[RolloutPk],
) -> Result<HashMap<RolloutPk, Vec<Score>>, StoreError> {
    const SELECT_GIVEN_TURN_SCORES: Statement = among_keys!(
        "-- select_given_turn_scores
        SELECT rollout_pk, turn, scorer, applied, value, given_us
        FROM turn_score
        WHERE rollout_pk",
        "
        ORDER BY rollout_pk, turn, scorer, applied"
    );
    let mut found: HashMap<RolloutPk, Vec<Score>> = HashMap::new();
    for page in rollouts.chunks(PAGE) {
        let keys = key_list(page.iter().map(|rollout| rollout.0));
        for mut row in tx.fetch_all(SELECT_GIVEN_TURN_SCORES, args![keys]).await? {
            found.entry(row.get("rollout_pk")?).or_default().push(read(&mut row)?);
        }
    }
    Ok(found)
}

/// Stores the score of a turn.
pub(super) async fn put(tx: &mut Tx<'_>, rollout: RolloutPk, turn: u32, score: &Score) -> Result<(), StoreError> {
    const PUT_TURN_SCORE: Statement = Statement::new(
        "-- put_turn_score
        INSERT INTO turn_score (rollout_pk, turn, scorer, applied, value, rationale, given_us)
        VALUES ($1, $2, $3, $4, $5, $6, $7)
        ON CONFLICT (rollout_pk, turn, scorer, applied)
        DO UPDATE SET value = excluded.value, rationale = excluded.rationale, given_us = excluded.given_us",
    );
    let values =
        args![rollout, turn, &*score.scorer, score.applied, score.value, score.rationale.as_deref(), score.given_at];
    tx.guarded(PUT_TURN_SCORE, values, 1).await
}

/// Puts the rewards that were given into the turns of a rollout that waits.
pub(super) async fn reward(tx: &mut Tx<'_>, rollout: RolloutPk, given: &[Score]) -> Result<(), StoreError> {
    const SELECT_TURNS_TO_REWARD: Statement = Statement::new(
        "-- select_turns_to_reward
        SELECT turns
        FROM rollout
        WHERE rollout_pk = $1",
    );
    const REWARD_TURNS: Statement = Statement::new(
        "-- reward_turns
        UPDATE rollout
        SET turns = $2
        WHERE rollout_pk = $1 AND turns IS NOT NULL",
    );
    let mut row = tx.fetch_one(SELECT_TURNS_TO_REWARD, args![rollout]).await?;
    let stored: Option<Vec<u8>> = row.get("turns")?;
    // Damage is found when the batch is read.
    let Some(mut turns) = stored.and_then(|packed| credit::unpack(&packed)) else { return Ok(()) };
    credit::reward(&mut turns, scores::of_turns(given));
    tx.guarded(REWARD_TURNS, args![rollout, &credit::pack(&turns)[..]], 1).await
}

/// What was given to the turns of rollouts that are dropped counts for nothing.
pub(super) async fn withdraw(tx: &mut Tx<'_>, rollouts: Vec<i64>) -> Result<(), StoreError> {
    const WITHDRAW_TURN_SCORES: Statement = among_keys!(
        "-- withdraw_turn_scores
        UPDATE turn_score
        SET applied = 0
        WHERE applied = 1 AND rollout_pk"
    );
    tx.execute(WITHDRAW_TURN_SCORES, args![key_list(rollouts)]).await?;
    Ok(())
}

/// The same for the rollouts of discarded groups that lack scores.
pub(super) async fn withdraw_of_groups(tx: &mut Tx<'_>, groups: Vec<i64>) -> Result<(), StoreError> {
    const WITHDRAW_TURN_SCORES_OF_GROUPS: Statement = Statement {
        sqlite: "-- withdraw_turn_scores_of_groups
            UPDATE turn_score
            SET applied = 0
            WHERE applied = 1 AND rollout_pk IN (
                SELECT rollout_pk FROM scoring WHERE group_pk IN (SELECT value FROM json_each($1))
            )",
        postgres: "-- withdraw_turn_scores_of_groups
            UPDATE turn_score
            SET applied = 0
            WHERE applied = 1 AND rollout_pk = ANY (ARRAY(
                SELECT rollout_pk FROM scoring WHERE group_pk = ANY ($1::bigint[])
            ))",
    };
    tx.execute(WITHDRAW_TURN_SCORES_OF_GROUPS, args![key_list(groups)]).await?;
    Ok(())
}
