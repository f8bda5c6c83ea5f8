//! `/filters/variables` and `/policies/{policy}/filters/try`: for people who write filters.
//!
//! Separate from [`policies`](crate::routes::policies), because nothing is written: a draft is tried on the groups that were
//! decided last, one draft at a time in a process, and its memory is taken from the budget of
//! [`samples`](crate::routes::samples).

use axum::{Json as Answer, extract::State, http::StatusCode};
use forebay_domain::{
    clock::Timestamp,
    ids::GroupId,
    looking::dry_run::{
        Bounds, EXAMPLES_MAX, GROUPS_MAX, TryFilters,
        judge::Outcome,
        report::{Change, Column, Failed, Report},
    },
};
use forebay_service::error::BufferError;
use forebay_wire::{
    FailedFilter, FilterNames, GroupOutcomes, LookedAt, RolloutOutcomes, TriedChange, TriedGroups, TriedOutcome,
    TriedRollouts, TriedState, TryNote, TryRequest, TryResult, Unjudged,
};

use crate::{
    Api,
    http::{
        body::Json,
        pages::FIRST_PAGE_WAIT,
        params::{self, PolicyPath},
        problem::Failure,
    },
    openapi::{InvalidRules, NoSuchPolicy},
};

/// How many drafts are tried at a time, so that people who try leave the processor to agents and trainers.
pub(crate) const TRIES_MAX: usize = 1;

/// The groups of a try if the caller does not say.
const GROUPS: u32 = 500;

/// The examples of a try if the caller does not say.
const EXAMPLES: u32 = 10;

/// List the names that filters know
///
/// The variables of both scopes with their types and meanings, the functions and the macros.
#[utoipa::path(
    get,
    path = "/filters/variables",
    operation_id = "get_filter_variables",
    tag = "console",
    responses((status = 200, description = "All names", body = FilterNames))
)]
pub(crate) async fn variables() -> Answer<FilterNames> {
    Answer(forebay_domain::rules::filter::names::names_on_wire())
}

/// Try filters on the groups that were decided last
///
/// The answer compares how the groups were decided with how the filters that the policy has now, and those of the
/// request, would decide them. Nothing is changed. One draft is tried at a time; the answer has what could be judged in
/// bounded time and memory.
#[utoipa::path(
    post,
    path = "/policies/{policy}/filters/try",
    operation_id = "try_filters",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy")),
    request_body = TryRequest,
    responses(
        (status = 200, description = "What the draft would have done", body = TryResult),
        NoSuchPolicy,
        InvalidRules,
        (status = 429, description = "`busy`: another draft is being tried; retry"),
        (status = 503, description = "Other readers use up the byte budget; retry"),
    )
)]
pub(crate) async fn attempt(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
    Json(request): Json<TryRequest>,
) -> Result<Answer<TryResult>, Failure> {
    let request = TryFilters {
        policy,
        groups_max: within("/groups", request.groups.unwrap_or(GROUPS), 1, GROUPS_MAX)?,
        examples_max: within("/examples", request.examples.unwrap_or(EXAMPLES), 0, EXAMPLES_MAX)?,
        environment: params::optional("/environment", request.environment.as_deref(), GroupId::parse)?
            .map(|label| label.to_string()),
        filter: request.filter,
        bounds: Bounds::default(),
    };
    let permit = api.filter_tries.clone().try_acquire_owned().map_err(|_| busy())?;
    let dry_run = api.buffer.try_filters(request).await?;
    let share = api.budgets.samples.wait_at_most(FIRST_PAGE_WAIT, dry_run.bytes() as usize).await?;
    // The task goes on if the client disconnects, so that the bytes are counted as long as they are in memory.
    let run = api.run_uncancelled(|buffer| async move {
        let report = dry_run.run().await?;
        drop((permit, share));
        Ok::<_, BufferError>(answer(report, buffer.now()))
    });
    Ok(Answer(run.await?))
}

fn within(pointer: &str, value: u32, least: u32, most: u32) -> Result<u32, Failure> {
    if (least..=most).contains(&value) {
        return Ok(value);
    }
    Err(Failure::invalid(pointer, format!("must be {least} to {most}, is {value}")))
}

fn busy() -> Failure {
    Failure::new(StatusCode::TOO_MANY_REQUESTS, "busy", "Another draft is being tried")
        .detail("one draft is tried at a time, and nothing was changed; retry after a pause")
        .retry()
}

fn answer(report: Report, now: Timestamp) -> TryResult {
    let notes = report.notes().into_iter().map(|note| TryNote { code: note.code.to_owned(), text: note.text });
    let unjudged = report.unjudged.iter();
    let unjudged = unjudged.map(|(reason, rollouts)| Unjudged { reason: (*reason).to_owned(), rollouts: *rollouts });
    let (as_decided, rules_now, draft) =
        (outcomes(report.as_decided), outcomes(report.rules_now), outcomes(report.draft));
    TryResult {
        looked_at: LookedAt {
            groups: report.groups,
            rollouts: report.rollouts,
            examined: report.examined,
            from: report.decided.map(|(first, _)| first.to_string()),
            to: report.decided.map(|(_, last)| last.to_string()),
            payload_bytes: report.payload_bytes,
            complete: report.is_complete,
        },
        notes: notes.collect(),
        unjudged: unjudged.collect(),
        groups: TriedGroups { as_decided: as_decided.0, rules_now: rules_now.0, draft: draft.0 },
        rollouts: TriedRollouts { as_decided: as_decided.1, rules_now: rules_now.1, draft: draft.1 },
        changed_groups: report.changed,
        changes: report.changes.into_iter().map(change).collect(),
        failed: report.failed.into_iter().map(failed).collect(),
        at: now.to_string(),
    }
}

fn outcomes(column: Column) -> (GroupOutcomes, RolloutOutcomes) {
    let groups = GroupOutcomes {
        ready: column.ready,
        discarded: column.discarded,
        open: column.open,
        unjudged: column.unjudged,
    };
    let rollouts = RolloutOutcomes {
        kept: column.kept,
        masked: column.masked,
        dropped: column.dropped,
        late: column.late,
        unjudged: column.unjudged_rollouts,
    };
    (groups, rollouts)
}

fn change(change: Change) -> TriedChange {
    TriedChange {
        group_id: change.group_id,
        was: outcome(change.was),
        now: outcome(change.now),
        would_be: outcome(change.would_be),
        members: change.members,
        rewards: change.rewards,
    }
}

fn outcome(outcome: Outcome) -> TriedOutcome {
    let (state, reason) = match outcome {
        Outcome::Ready => (TriedState::Ready, None),
        Outcome::Discarded(reason) => (TriedState::Discarded, Some(reason)),
        Outcome::Open => (TriedState::Open, None),
        Outcome::Unjudged(reason) => (TriedState::Unjudged, Some(reason.to_owned())),
    };
    TriedOutcome { state, reason }
}

fn failed(failed: Failed) -> FailedFilter {
    FailedFilter {
        filter: failed.filter,
        scope: failed.scope,
        count: failed.count,
        message: failed.message,
        group_id: failed.group_id,
        rollout_id: failed.rollout_id,
    }
}
