//! `/scores`: numbers about rollouts that come after them.

use axum::{
    Json as Answer,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse as _, Response},
};
use forebay_domain::{
    access::Grant,
    ids::RolloutId,
    scores::{PRODUCER, Score},
    scoring::{NewScore, POST_MAX, Scored},
};
use forebay_wire::{Object, ReceiptGroup, ScoreInfo, ScoreLine, ScoreList, ScoreReceipt, ScoreRequest};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};

use crate::{
    Api,
    http::{
        body::{self, JsonOrLines},
        guard::Caller,
        params::{self, Query},
        problem::Failure,
    },
    openapi::InvalidQuery,
    routes::trajectories::numbered_lines,
};

/// Who gives a score that names no scorer, if the service needs no keys.
const ANONYMOUS: &str = "anonymous";

/// One score, or several.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes a body")]
enum ScoreOrScores {
    Score(ScoreRequest),
    Scores(Vec<ScoreRequest>),
}

/// The receipt of one score, or the receipts of several in their order.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes an answer")]
enum ScoreReceiptOrReceipts {
    Receipt(ScoreReceipt),
    Receipts(Vec<ScoreReceipt>),
}

/// Score rollouts
///
/// A score is a named number about a rollout. If the rules of its policy require it (`scores.required`), the rollout has
/// its place in its group and is `scoring` until it comes. The post of the last one judges the rollout by the filters of its
/// group, and decides the group if that waited only for it. With the `lease` of work, the score settles the work, and is
/// refused if the lease has ended; `failed` in the place of `value` gives the work back. A JSON object is one score. An array is stored as a whole or
/// not at all. NDJSON: every line is stored or refused on its own. At most 256 scores.
#[utoipa::path(
    post,
    path = "/scores",
    operation_id = "post_scores",
    tag = "scorers",
    request_body(
        content((ScoreOrScores = "application/json"), (ScoreRequest = "application/x-ndjson")),
        description = "A JSON object, an array of objects, or one object per line"
    ),
    responses(
        (status = 201, description = "Stored. For an array: at least one score was new", body = ScoreReceiptOrReceipts),
        (status = 200, description = "All scores were stored before, or failed. For lines: one line for each line of the request",
            content((ScoreReceiptOrReceipts = "application/json"), (ScoreLine = "application/x-ndjson"))),
        (status = 404, description = "No such policy or rollout; nothing was stored"),
        (status = 409, description = "`score-conflict`: the scorer has given another value, and the score is not `replace`; `lease-lost`: the lease has ended; nothing was stored"),
        (status = 422, description = "Invalid: `errors` has a pointer for each violation; nothing was stored"),
    )
)]
pub(crate) async fn post(
    State(api): State<Api>,
    Caller(grant): Caller,
    sent: JsonOrLines<ScoreRequest>,
) -> Result<Response, Failure> {
    match sent {
        JsonOrLines::One(one) => {
            let unnamed = one.policy.is_none();
            let stored = put(&api, &grant, vec![one]).await;
            let mut stored = stored.map_err(|failure| of_one(failure, unnamed))?;
            let one = stored.pop().ok_or_else(body::stopped)?;
            Ok((status(std::slice::from_ref(&one)), Answer(receipt(one))).into_response())
        }
        JsonOrLines::Many(many) => {
            let stored = put(&api, &grant, many).await?;
            let answer: Vec<_> = stored.iter().cloned().map(receipt).collect();
            Ok((status(&stored), Answer(answer)).into_response())
        }
        JsonOrLines::Lines(bytes) => lines(&api, &grant, &bytes).await,
    }
}

/// Who a caller is that names no scorer.
pub(crate) fn scorer_of(grant: &Grant) -> String {
    grant.key_id.as_ref().map_or_else(|| ANONYMOUS.to_owned(), ToString::to_string)
}

/// Stores scores, all or none.
async fn put(api: &Api, grant: &Grant, sent: Vec<ScoreRequest>) -> Result<Vec<Scored>, Failure> {
    if sent.len() > POST_MAX {
        return Err(Failure::invalid("", format!("must be at most {POST_MAX} scores, are {}", sent.len())));
    }
    let scorer = scorer_of(grant);
    let (mut parsed, mut violations) = (Vec::with_capacity(sent.len()), Vec::new());
    for (index, mut one) in sent.into_iter().enumerate() {
        let at = format!("/{index}");
        let policy = params::policy(grant, &format!("{at}/policy"), one.policy.take().as_deref())?;
        match NewScore::parse(one, policy, &scorer, &at) {
            Ok(score) => parsed.push(score),
            Err(found) => violations.extend(found),
        }
    }
    if !violations.is_empty() {
        return Err(Failure::from(forebay_domain::refusal::Refusal::Invalid(violations)));
    }
    api.run_uncancelled(|buffer| async move { buffer.put_scores(parsed).await }).await
}

/// Stores scores one by one.
async fn lines(api: &Api, grant: &Grant, bytes: &[u8]) -> Result<Response, Failure> {
    let numbered = numbered_lines(bytes)?;
    if numbered.len() > POST_MAX {
        return Err(Failure::invalid("", format!("must be at most {POST_MAX} lines, are {}", numbered.len())));
    }
    let mut text = Vec::new();
    for (line, bytes) in numbered {
        let stored = match body::parse::<Object<ScoreRequest>>(bytes) {
            Ok(Object(one)) => {
                let unnamed = one.policy.is_none();
                put(api, grant, vec![one]).await.map_err(|failure| of_one(failure, unnamed))
            }
            Err(failure) => Err(failure),
        };
        let answer = match stored.map(|mut stored| stored.pop()) {
            Ok(Some(one)) => {
                let status = status(std::slice::from_ref(&one)).as_u16();
                ScoreLine { line, status, receipt: Some(receipt(one)), problem: None }
            }
            Ok(None) => return Err(body::stopped()),
            Err(failure) => {
                let problem = failure.into_line();
                ScoreLine { line, status: problem.status, receipt: None, problem: Some(problem) }
            }
        };
        serde_json::to_writer(&mut text, &answer).expect("receipts and problems are plain data");
        text.push(b'\n');
    }
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], text).into_response())
}

fn of_one(failure: Failure, unnamed: bool) -> Failure {
    let failure = failure.of_single_object();
    if unnamed { failure.unnamed_policy() } else { failure }
}

fn status(stored: &[Scored]) -> StatusCode {
    if stored.iter().all(|one| one.duplicate || one.failed) { StatusCode::OK } else { StatusCode::CREATED }
}

fn receipt(scored: Scored) -> ScoreReceipt {
    ScoreReceipt {
        policy: scored.policy.to_string(),
        rollout_id: scored.rollout_id.to_string(),
        name: scored.name,
        turn: scored.turn,
        scorer: scored.scorer,
        duplicate: scored.duplicate,
        applied: scored.applied,
        failed: scored.failed,
        scoring: scored.scoring,
        verdict: scored.verdict.into(),
        reason: scored.reason,
        group: ReceiptGroup {
            state: scored.fill.state.into(),
            reason: scored.group_reason,
            arrived: scored.fill.arrived(),
            size: scored.fill.size,
        },
    }
}

/// The rollout whose scores to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ScoreQuery {
    /// Policy; `default` when absent.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
    /// Id of the rollout, in the current run of its policy.
    #[param(min_length = 1, max_length = 256)]
    rollout_id: String,
}

/// Look up the scores of a rollout
///
/// They are those of its producer, which are its reward and its reward components, and those of others.
#[utoipa::path(
    get,
    path = "/scores",
    operation_id = "get_scores",
    tag = "scorers",
    params(ScoreQuery),
    responses(
        (status = 200, description = "The scores", body = ScoreList),
        (status = 404, description = "No such policy or rollout"),
        InvalidQuery,
    )
)]
pub(crate) async fn get(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<ScoreQuery>,
) -> Result<Answer<ScoreList>, Failure> {
    let policy = params::policy(&grant, "policy", query.policy.as_deref())?;
    let rollout_id = RolloutId::parse(&query.rollout_id);
    let rollout_id = rollout_id.map_err(|error| Failure::invalid("rollout_id", error.to_string()))?;
    let found = api.buffer.scores(policy.clone(), rollout_id).await.map_err(Failure::from);
    let found = found.map_err(|failure| if query.policy.is_none() { failure.unnamed_policy() } else { failure })?;
    let on_wire = |score: Score| ScoreInfo {
        name: score.name,
        turn: score.turn,
        scorer: Some(score.scorer).filter(|scorer| scorer != PRODUCER),
        value: score.value,
        rationale: score.rationale,
        applied: score.applied,
        given_at: score.given_at.to_string(),
        attempt: score.lease.map(|(_, attempt)| attempt),
    };
    Ok(Answer(ScoreList {
        policy: policy.to_string(),
        rollout_id: query.rollout_id,
        scoring: found.missing,
        deadline_at: params::time(found.due_at),
        scores: found.scores.into_iter().map(on_wire).collect(),
    }))
}
