//! Stage 5 in the store: the contents of a batch, read in pieces; the only place that reads the rows of payloads.

use async_trait::async_trait;
use forebay_domain::{
    clock::Timestamp,
    formats::payload::Payload,
    ids::{BatchId, PolicyName, RolloutPk},
    lease::{Batch, BatchFilter},
    pages::Page,
    rules::Rules,
    samples::{BatchMember, StoredPayload},
};
use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use super::{
    batch::{self, select_batch},
    bounded_scan::{InOrder, Scan, examine, in_order},
    group,
    places::read_place,
    read_json, read_sealed, scores,
};
use crate::{
    error::StoreError,
    op::Op,
    segment_files::Place,
    sql::{Row, Statement, Tx, among_keys, args, key_list},
};

/// The columns that [`read_members`] reads, of rollouts `r` in groups `g`.
macro_rules! select_members {
    ($name:literal, $from:literal) => {
        concat!(
            $name,
            "
            SELECT r.rollout_pk, r.group_pk, g.group_id, r.rollout_id, r.verdict, r.reward, r.advantage,
                r.policy_version, r.segments, r.trained_segments, r.tokens, r.segment_tokens, r.trained_tokens,
                r.unpacked_bytes, r.trained_spans, r.seal, g.seal AS group_seal, g.mask_below, g.purged_us,
                g.trained_tokens AS group_trained_tokens, g.rules_pk
            ",
            $from
        )
    };
}
pub(super) use select_members;

pub struct FindBatch(pub BatchId);

#[async_trait]
impl Op for FindBatch {
    type Output = Option<Batch>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        batch::find(tx, self.0).await
    }
}

#[async_trait]
impl Op for BatchFilter {
    type Output = Page<Batch>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const LIST_BATCHES: InOrder = in_order!(
            select_batch!(
                "WHERE p.name = $1 AND b.batch_pk > $2 AND b.batch_pk <= $5 AND (CAST($3 AS TEXT) IS NULL OR b.state = $3)
            ORDER BY b.batch_pk"
            ),
            "LIMIT $4"
        );
        const EXAMINE_BATCHES: InOrder = examine!(
            "-- examine_batches",
            "batch_pk",
            "batch
                    WHERE policy_pk = (SELECT policy_pk FROM policy WHERE name = $4)"
        );
        let policy: &PolicyName = &self.policy;
        let scan = match self.state {
            Some(_) => Scan::filtered(tx, self.from, EXAMINE_BATCHES, args![policy.as_str()]).await?,
            None => Scan::unfiltered(self.from),
        };
        let (above, to) = scan.range();
        let values = args![policy.as_str(), above, self.state, self.limit, to];
        let rows = tx.fetch_all(LIST_BATCHES.of(self.from), values).await?;
        let batches = rows.into_iter().map(batch::read).collect::<Result<Vec<_>, _>>()?;
        scan.page(tx, batches, self.limit, |batch| batch.batch_pk.0).await
    }
}

/// The rollouts of a batch in order, without payloads. None if the payloads are purged.
pub struct BatchMembers(pub Batch);

#[async_trait]
impl Op for BatchMembers {
    type Output = Option<Vec<BatchMember>>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_BATCH_MEMBERS: Statement = Statement::new(select_members!(
            "-- select_batch_members",
            "FROM batch_group AS bg
            JOIN rollout_group AS g ON g.group_pk = bg.group_pk
            JOIN rollout AS r ON r.group_pk = bg.group_pk
            WHERE bg.batch_pk = $1 AND r.verdict IN ('kept', 'masked')
            ORDER BY bg.place, r.rollout_pk"
        ));
        let mut rows = tx.fetch_all(SELECT_BATCH_MEMBERS, args![self.0.batch_pk]).await?;
        let purged = |row: &mut Row| Ok::<_, StoreError>(row.get::<Option<Timestamp>>("purged_us")?.is_some());
        let purged = rows.iter_mut().map(purged).collect::<Result<Vec<_>, _>>()?;
        if purged.contains(&true) {
            return Ok(None);
        }
        let members = read_members(tx, rows).await?;
        // Rows of deleted rollouts are missing, and so are their payloads.
        Ok((members.len() == self.0.rollouts as usize).then_some(members))
    }
}

/// Reads rollouts with what their advantages were computed from.
pub(super) async fn read_members(tx: &mut Tx<'_>, rows: Vec<Row>) -> Result<Vec<BatchMember>, StoreError> {
    let mut members = Vec::with_capacity(rows.len());
    for mut row in rows {
        let rules = tx.rules(row.get("rules_pk")?).await?;
        members.push(read_member(row, rules)?);
    }
    let reading = members.iter().filter(|member| member.rules.read_components());
    let reading: Vec<_> = reading.map(|member| (member.row.rollout_pk, &*member.rules)).collect();
    let mut found = group::components(tx, &reading).await?;
    for member in &mut members {
        member.components = found.remove(&member.row.rollout_pk).unwrap_or_default();
    }
    let using = members.iter().filter(|member| member.rules.use_scores() && member.rules.read_components());
    let using: Vec<_> = using.map(|member| member.row.rollout_pk).collect();
    let mut found = scores::applied(tx, using).await?;
    // A rollout that waits has not been judged by the scores that it has. Its group has no seal.
    if members.iter().any(|member| member.group_seal.is_none() && found.contains_key(&member.row.rollout_pk)) {
        for waiting in scores::waiting_among(tx, found.keys().map(|rollout| rollout.0).collect()).await? {
            found.remove(&waiting);
        }
    }
    for member in &mut members {
        let mut given = found.remove(&member.row.rollout_pk).unwrap_or_default();
        given.retain(|score| member.rules.reads_component(&score.name));
        member.scores = given;
    }
    let comparing = members.iter().filter(|member| member.rules.compare_turns());
    let comparing: Vec<_> = comparing.map(|member| member.row.rollout_pk).collect();
    let mut found = group::turns(tx, &comparing).await?;
    let using = members.iter().filter(|member| member.rules.use_scores() && member.rules.compare_turns());
    let using: Vec<_> = using.map(|member| member.row.rollout_pk).collect();
    let mut given = scores::turns::rewards(tx, &using).await?;
    for member in &mut members {
        member.turn_rewards = given.remove(&member.row.rollout_pk).unwrap_or_default();
        let Some(stored) = found.remove(&member.row.rollout_pk) else { continue };
        member.row.made_bytes = member.row.tokens.saturating_mul(4);
        member.turns = Some(blake3::hash(&stored.turns));
        member.turn_advantages = stored.advantages;
    }
    Ok(members)
}

fn read_member(mut row: Row, rules: Arc<Rules>) -> Result<BatchMember, StoreError> {
    let group_id = row.get("group_id")?;
    Ok(BatchMember {
        row: read_sealed(&mut row, group_id)?,
        group_pk: row.get("group_pk")?,
        advantage: row.get::<Option<f64>>("advantage")?.unwrap_or(0.0),
        trained_segments: row.get("trained_segments")?,
        segment_tokens: read_json(&mut row, "segment_tokens")?,
        trained_tokens: row.get("trained_tokens")?,
        group_trained_tokens: row.get("group_trained_tokens")?,
        mask_below: row.get("mask_below")?,
        group_seal: row.get("group_seal")?,
        rules,
        components: BTreeMap::new(),
        scores: Vec::new(),
        turns: None,
        turn_rewards: Vec::new(),
        turn_advantages: None,
    })
}

/// A payload as its row has it.
pub(crate) struct FoundPayload {
    /// Its body is empty if it is elsewhere.
    pub(crate) stored: StoredPayload,
    /// Where its body is, if it is not in the database.
    pub(crate) place: Option<Place>,
}

pub(crate) struct ReadPayloads(pub Vec<RolloutPk>);

#[async_trait]
impl Op for ReadPayloads {
    type Output = Vec<FoundPayload>;

    async fn run(&self, tx: &mut Tx<'_>) -> Result<Self::Output, StoreError> {
        const SELECT_PAYLOADS: Statement = among_keys!(
            "-- select_payloads
            SELECT y.rollout_pk, y.codec, y.digest, y.body, y.file, y.start, y.length,
                CAST(COALESCE(r.unpacked_bytes, y.length, LENGTH(y.body)) AS BIGINT) AS unpacked_bytes
            FROM payload AS y
            LEFT JOIN rollout AS r ON r.rollout_pk = y.rollout_pk
            WHERE y.rollout_pk"
        );
        let keys = key_list(self.0.iter().map(|rollout| rollout.0));
        let mut payloads: HashMap<RolloutPk, (Payload, Option<Place>)> = HashMap::with_capacity(self.0.len());
        for mut row in tx.fetch_all(SELECT_PAYLOADS, args![keys]).await? {
            let payload = Payload {
                codec: row.get("codec")?,
                digest: row.get("digest")?,
                body: row.get("body")?,
                unpacked_bytes: row.get::<u64>("unpacked_bytes")? as usize,
            };
            payloads.insert(row.get("rollout_pk")?, (payload, read_place(&mut row)?));
        }
        let in_order = self.0.iter().filter_map(|&rollout_pk| {
            payloads
                .remove(&rollout_pk)
                .map(|(payload, place)| FoundPayload { stored: StoredPayload { rollout_pk, payload }, place })
        });
        Ok(in_order.collect())
    }
}
