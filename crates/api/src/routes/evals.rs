//! `/policies/{policy}/suites`, `/policies/{policy}/evals`: evaluation beside training.

use std::time::Duration;

use axum::{
    Json as Answer,
    extract::State,
    http::StatusCode,
    response::{IntoResponse as _, Response},
};
use forebay_domain::{
    evals::{FindEvals, FindTasks, FoundSuite, FoundTask, FoundVersion, IsComplete, Suite, TaskResult},
    ids::{ID_BYTES_MAX, PolicyName, Version},
    refusal::Refusal,
};
use forebay_wire::{
    EvalList, EvalRollout, EvalTask, EvalTaskList, EvalTaskResult, EvalVersion, SuiteEvals, SuiteInfo, SuiteRequest,
};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        body::Json,
        guard::{Caller, caller_id},
        params::{self, PolicyPath, Query, SuitePath},
        problem::Failure,
    },
    openapi::{InvalidQuery, NoSuchPolicy},
    routes::batches::wait_ms,
};

/// The default number of versions of each suite.
const VERSIONS_DEFAULT: u32 = 20;

/// The largest number of versions of each suite.
const VERSIONS_MAX: u32 = 100;

/// The largest number of tasks of a page.
const TASKS_PAGE_MAX: u32 = 500;

/// Say when a suite is complete
///
/// A suite is complete at a version when as many tasks as it has have as many rollouts as it wants. It is created by its first
/// rollout, or by this call. A `threshold` counts for rollouts that are decided from now on.
#[utoipa::path(
    put,
    path = "/policies/{policy}/suites/{suite}",
    operation_id = "put_suite",
    tag = "evaluation",
    params(
        ("policy" = String, Path, description = "Name of the policy that is evaluated"),
        ("suite" = String, Path, description = "Name of the suite"),
    ),
    request_body = SuiteRequest,
    responses(
        (status = 201, description = "The suite is new", body = SuiteInfo),
        (status = 200, description = "The suite is changed", body = SuiteInfo),
        (status = 404, description = "No such policy, and the service creates none"),
        (status = 422, description = "Invalid, or one suite too many: a policy has at most 256"),
    )
)]
pub(crate) async fn put(
    State(api): State<Api>,
    SuitePath(policy, suite): SuitePath,
    Json(request): Json<SuiteRequest>,
) -> Result<Response, Failure> {
    let suite = Suite::parse(&suite, &request).map_err(Refusal::Invalid)?;
    let info = SuiteInfo {
        policy: policy.to_string(),
        suite: suite.name.clone(),
        tasks: suite.tasks,
        repeats: suite.repeats,
        threshold: suite.threshold,
    };
    let is_new = api.run_uncancelled(|buffer| async move { buffer.put_suite(policy, suite).await }).await?;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Answer(info)).into_response())
}

/// Which results to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct EvalQuery {
    /// Only this suite.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    suite: Option<String>,
    /// Only versions below this one.
    #[param(minimum = 0)]
    before: Option<i64>,
    /// The most versions of each suite, at most 100; 20 when absent.
    #[param(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// `suite@version`: waits until the suite is complete at this version. The answer has only this suite, and no newer
    /// versions, also if it is not complete in time.
    #[param(pattern = "^[A-Za-z0-9._-]+@[0-9]+$")]
    wait_complete: Option<String>,
    /// Milliseconds to wait, at most 60,000.
    #[param(maximum = 60000)]
    wait_ms: Option<u64>,
}

/// See what suites say about versions
///
/// Per suite and version, the newest first: the mean reward over tasks with its standard error, pass@k, whether the suite is
/// complete, and how the version differs from the one before over the tasks that both have. Rollouts count when they are
/// decided, and stay counted when they are deleted. The newest 1,000 versions of each suite are kept.
#[utoipa::path(
    get,
    path = "/policies/{policy}/evals",
    operation_id = "list_evals",
    tag = "evaluation",
    params(("policy" = String, Path, description = "Name of the policy that is evaluated"), EvalQuery),
    responses(
        (status = 200, description = "The suites of the policy", body = EvalList),
        NoSuchPolicy,
        InvalidQuery,
        (status = 503, description = "`too-many-waiters`: too many requests wait"),
    )
)]
pub(crate) async fn list(
    State(api): State<Api>,
    Caller(grant): Caller,
    PolicyPath(policy): PolicyPath,
    Query(query): Query<EvalQuery>,
) -> Result<Answer<EvalList>, Failure> {
    let wait = Duration::from_millis(wait_ms("wait_ms", query.wait_ms)?);
    let limit = query.limit.unwrap_or(VERSIONS_DEFAULT);
    if !(1..=VERSIONS_MAX).contains(&limit) {
        return Err(Failure::invalid("limit", format!("must be 1 to {VERSIONS_MAX}")));
    }
    let before = query.before.map(|before| params::version("before", before)).transpose()?;
    let mut find = FindEvals { policy: policy.clone(), suite: query.suite.clone(), before, limit };
    if let Some(text) = &query.wait_complete {
        let (suite, version) = suite_at(text)?;
        if query.suite.is_some() || before.is_some() {
            let pointer = if before.is_some() { "before" } else { "suite" };
            return Err(Failure::invalid(pointer, "must be absent beside `wait_complete`, which names both"));
        }
        let still = || api.guard.keyring.still_grants(&grant);
        let is = IsComplete { policy: policy.clone(), suite: suite.clone(), version };
        api.buffer.wait_complete(is, wait, caller_id(&grant).as_ref(), still).await?;
        find.suite = Some(suite);
        find.before = Some(Version(version.0.saturating_add(1)));
    }
    let limit = limit as usize;
    let listed = move |found: Vec<FoundSuite>| EvalList {
        policy: policy.to_string(),
        suites: found.into_iter().map(|suite| suite_on_wire(suite, limit)).collect(),
    };
    Ok(Answer(api.buffer.evals(find, listed).await?))
}

fn suite_at(text: &str) -> Result<(String, Version), Failure> {
    let parsed = text.split_once('@').and_then(|(suite, version)| Some((suite, version.parse::<i64>().ok()?)));
    match parsed.filter(|(suite, version)| PolicyName::parse(suite).is_ok() && *version >= 0) {
        Some((suite, version)) => Ok((suite.to_owned(), Version(version))),
        None => Err(Failure::invalid("wait_complete", "must be `suite@version`, such as `aime24@7`")),
    }
}

fn suite_on_wire(FoundSuite { suite, versions, more }: FoundSuite, limit: usize) -> SuiteEvals {
    let of = |(place, found): (usize, &FoundVersion)| {
        let (mean, standard_error) = found.mean();
        EvalVersion {
            version: found.version.0,
            step: found.step,
            complete: found.is_complete(&suite),
            n: found.tasks.values().map(|task| task.rollouts).sum(),
            tasks: found.tasks.len() as u64,
            mixed_versions: found.mixed,
            mean,
            standard_error,
            pass_at: found.pass_at(&suite),
            difference: versions[place + 1..].iter().find_map(|before| found.difference(before)),
            first_at: found.first_at.to_string(),
            last_at: found.last_at.to_string(),
        }
    };
    let shown = if more { versions.len().saturating_sub(1).clamp(1, limit) } else { versions.len() };
    SuiteEvals {
        versions: versions.iter().enumerate().take(shown).map(of).collect(),
        suite: suite.name,
        tasks: suite.tasks,
        repeats: suite.repeats,
        threshold: suite.threshold,
        more,
    }
}

/// Which tasks to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TaskQuery {
    /// Weight version; the newest with results when absent.
    #[param(minimum = 0)]
    version: Option<i64>,
    /// The `next` of the previous page.
    #[param(min_length = 1, max_length = 256)]
    after: Option<String>,
    /// The most tasks in the page, at most 500; 100 when absent.
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// See the tasks of a suite at a version
///
/// Each task by name, beside what it said at the version before: which tasks were won, and which were lost.
#[utoipa::path(
    get,
    path = "/policies/{policy}/suites/{suite}/tasks",
    operation_id = "list_eval_tasks",
    tag = "evaluation",
    params(
        ("policy" = String, Path, description = "Name of the policy that is evaluated"),
        ("suite" = String, Path, description = "Name of the suite"),
        TaskQuery,
    ),
    responses(
        (status = 200, description = "A page of tasks", body = EvalTaskList),
        (status = 404, description = "No such policy or suite, or no results"),
        InvalidQuery,
    )
)]
pub(crate) async fn tasks(
    State(api): State<Api>,
    SuitePath(policy, suite): SuitePath,
    Query(query): Query<TaskQuery>,
) -> Result<Answer<EvalTaskList>, Failure> {
    let limit = query.limit.unwrap_or(params::PAGE_DEFAULT);
    if !(1..=TASKS_PAGE_MAX).contains(&limit) {
        return Err(Failure::invalid("limit", format!("must be 1 to {TASKS_PAGE_MAX}")));
    }
    let version = query.version.map(|version| params::version("version", version)).transpose()?;
    let after = query.after.map(|after| params::text("after", after, ID_BYTES_MAX)).transpose()?.unwrap_or_default();
    let find = FindTasks { policy: policy.clone(), suite: suite.clone(), version, after, limit };
    let found = api.buffer.eval_tasks(find).await?;
    let next = found.tasks.last().filter(|_| found.more).map(|task| task.task.clone());
    Ok(Answer(EvalTaskList {
        policy: policy.to_string(),
        suite,
        version: found.version.0,
        before: found.before.map(|before| before.0),
        tasks: found.tasks.into_iter().map(task_on_wire).collect(),
        next,
    }))
}

fn task_on_wire(FoundTask { task, now, before }: FoundTask) -> EvalTask {
    let of = |(result, rollouts): (TaskResult, Vec<EvalRollout>)| EvalTaskResult {
        n: result.rollouts,
        passed: result.passed,
        mean: result.mean(),
        rollouts,
    };
    EvalTask { task, now: now.map(of), before: before.map(of) }
}
