//! `GET /overview`, `/policies/{policy}/why` and `/why`: how policies are and why, and what became of an id.

use std::collections::BTreeMap;

use axum::{Json as Answer, extract::State};
use forebay_domain::{
    ids::{GroupId, PolicyName},
    looking::explain::{Cause, Finding, Numbers},
};
use forebay_service::looking::{
    insight::Insight,
    life::{Askable, IdKind, LifeStep, LifeStory},
};
use forebay_wire::{
    self as wire, IdMatch, IdWhy, Overview, OverviewPolicy, OverviewReward, OverviewStaleness, PolicyWhy, Role,
    WhyCause, WhyFinding, WhyNumbers,
};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::{
    Api,
    http::{
        guard::Caller,
        params::{self, PolicyPath, Query},
        problem::Failure,
    },
    openapi::{InvalidQuery, NoSuchPolicy},
};

/// The most policies in a page of the overview.
const PAGE_MAX: usize = 200;

/// Which part of the overview to show.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct OverviewQuery {
    /// The `next` of the previous page.
    after: Option<String>,
    /// The most policies in the page, at most 200.
    #[param(minimum = 1, maximum = 200)]
    limit: Option<usize>,
}

/// See all policies that the caller may access, the worst first
///
/// The answer may be a second old, and older if there are so many policies that working it out takes long.
#[utoipa::path(
    get,
    path = "/overview",
    operation_id = "get_overview",
    tag = "console",
    params(OverviewQuery),
    responses((status = 200, description = "A page of policies with their states", body = Overview), InvalidQuery)
)]
pub(crate) async fn overview(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<OverviewQuery>,
) -> Result<Answer<Overview>, Failure> {
    let limit @ 1..=PAGE_MAX = query.limit.unwrap_or(PAGE_MAX) else {
        return Err(Failure::invalid("limit", format!("must be 1 to {PAGE_MAX}")));
    };
    let skipped = match query.after.as_deref() {
        Some(after) => usize::try_from(params::row_key(after)?).unwrap_or(usize::MAX),
        None => 0,
    };
    let glance = api.buffer.overview().await?;
    let mut visible = glance.policies.iter().filter(|insight| grant.sees(&insight.policy)).skip(skipped);
    let policies: Vec<OverviewPolicy> = visible.by_ref().take(limit).map(at_a_glance).collect();
    let next = visible.next().map(|_| (skipped + policies.len()).to_string());
    Ok(Answer(Overview { at: glance.at.to_string(), policies, next }))
}

fn at_a_glance(insight: &Insight) -> OverviewPolicy {
    let facts = &insight.facts;
    let (quarter, hour) = (&facts.windows.quarter, &facts.windows.hour);
    let (trained, change_20_steps) = insight.reward();
    let newest = facts.steps.iter().take(20);
    let staleness = (!facts.steps.is_empty()).then(|| OverviewStaleness {
        mean: newest.clone().map(|step| step.stale_mean).sum::<f64>() / newest.clone().count() as f64,
        max: newest.map(|step| step.stale_max).max().unwrap_or(0),
        bound: facts.limits.staleness_max.and_then(|bound| u64::try_from(bound).ok()),
    });
    OverviewPolicy {
        policy: insight.policy.to_string(),
        state: insight.explanation.state,
        headline: insight.explanation.headline.clone(),
        received_per_min: quarter.per_minute(quarter.received as f64),
        tokens_per_min: quarter.per_minute(quarter.tokens),
        ready_groups: facts.gauges.ready_groups,
        needed_groups: facts.gauges.needed_groups,
        staleness,
        reward: trained.map(|trained| OverviewReward { trained: Some(trained), change_20_steps }),
        lost_last_hour: (hour.seconds > 0).then(|| hour.lost_rollouts()),
        last_post_at: params::time(facts.last_post),
        last_ack_at: params::time(facts.last_ack),
        version: facts.version.current,
    }
}

/// See why a policy is as it is
///
/// Its state, what explains it with numbers, what was looked at and is not the reason, and what cannot be known. The
/// answer may be a second old.
#[utoipa::path(
    get,
    path = "/policies/{policy}/why",
    operation_id = "get_policy_why",
    tag = "console",
    params(("policy" = String, Path, description = "Name of the policy")),
    responses((status = 200, description = "The state and its causes", body = PolicyWhy), NoSuchPolicy)
)]
pub(crate) async fn policy(
    State(api): State<Api>,
    PolicyPath(policy): PolicyPath,
) -> Result<Answer<PolicyWhy>, Failure> {
    let insight = api.buffer.why(&policy).await?;
    let explanation = &insight.explanation;
    Ok(Answer(PolicyWhy {
        policy: policy.to_string(),
        at: insight.facts.now.to_string(),
        state: explanation.state,
        headline: explanation.headline.clone(),
        causes: explanation.causes.iter().map(cause_on_wire).collect(),
        ruled_out: explanation.ruled_out.iter().map(finding_on_wire).collect(),
        unknown: explanation.unknown.iter().map(finding_on_wire).collect(),
    }))
}

fn cause_on_wire(cause: &Cause) -> WhyCause {
    WhyCause {
        code: cause.code.to_owned(),
        filter: cause.filter.clone(),
        weight: rounded(cause.weight, 1e3),
        text: cause.text.clone(),
        numbers: numbers_on_wire(&cause.numbers),
        see: cause.see.clone(),
    }
}

fn finding_on_wire(finding: &Finding) -> WhyFinding {
    WhyFinding { code: finding.code.to_owned(), text: finding.text.clone(), numbers: numbers_on_wire(&finding.numbers) }
}

/// Whole numbers stay whole numbers.
fn numbers_on_wire(numbers: &Numbers) -> WhyNumbers {
    let number = |value: f64| {
        let value = rounded(value, 1e4);
        let is_whole = value.fract() == 0.0 && value.abs() < 9e15;
        if is_whole { Some(serde_json::Number::from(value as i64)) } else { serde_json::Number::from_f64(value) }
    };
    let named = |(name, value): (&&str, &f64)| Some(((*name).to_owned(), number(*value)?));
    numbers.iter().filter_map(named).collect::<BTreeMap<_, _>>()
}

fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

/// What to tell about.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct WhyQuery {
    /// Id of a rollout, a group, a batch or a session.
    #[param(min_length = 1, max_length = 256)]
    id: String,
    /// Only in this policy. When absent, up to 256 policies that the caller may access are searched.
    #[param(min_length = 1, max_length = 128, pattern = "^[A-Za-z0-9._-]+$")]
    policy: Option<String>,
}

/// See what became of a rollout, a group, a batch or a session
///
/// The steps of its life in sentences, with the rule that decided as it was when the group was opened. Keys of role
/// `train` can ask about batches, and keys of role `produce` about rollouts, groups and sessions.
#[utoipa::path(
    get,
    path = "/why",
    operation_id = "get_why",
    tag = "console",
    params(WhyQuery),
    responses(
        (status = 200, description = "What became of it", body = IdWhy),
        (status = 404, description = "`not-found`: nothing that the caller may see has the id"),
        InvalidQuery,
    )
)]
pub(crate) async fn id(
    State(api): State<Api>,
    Caller(grant): Caller,
    Query(query): Query<WhyQuery>,
) -> Result<Answer<IdWhy>, Failure> {
    // Ids of groups and of rollouts have the same form, and those of batches are among them.
    params::optional("id", Some(&query.id), GroupId::parse)?;
    let policy = query.policy.as_deref().map(|name| params::policy(&grant, "policy", Some(name))).transpose()?;
    let askable = Askable { rollouts: grant.role != Role::Train, batches: grant.role != Role::Produce };
    let sees = |policy: &PolicyName| grant.sees(policy);
    let story = api.buffer.life(&query.id, policy.as_ref(), askable, sees).await?;
    Ok(Answer(life_on_wire(query.id, story)))
}

fn kind_on_wire(kind: IdKind) -> wire::IdKind {
    match kind {
        IdKind::Rollout => wire::IdKind::Rollout,
        IdKind::Group => wire::IdKind::Group,
        IdKind::Batch => wire::IdKind::Batch,
        IdKind::Session => wire::IdKind::Session,
    }
}

fn life_on_wire(id: String, story: LifeStory) -> IdWhy {
    let step = |step: LifeStep| wire::LifeStep {
        code: step.code.to_owned(),
        at: params::time(step.at),
        text: step.text,
        rule: step.rule,
    };
    let also = |(kind, policy): (IdKind, PolicyName)| IdMatch { kind: kind_on_wire(kind), policy: policy.to_string() };
    IdWhy {
        id,
        kind: kind_on_wire(story.kind),
        policy: story.policy.to_string(),
        at: story.at.to_string(),
        state: story.state.to_owned(),
        headline: story.headline,
        causes: story.steps.into_iter().map(step).collect(),
        ruled_out: Vec::new(),
        unknown: Vec::new(),
        see: story.see,
        also: story.also.into_iter().map(also).collect(),
    }
}
