//! Lives: what became of one rollout, group, batch or session, in sentences from the ledger.
//!
//! The rule that decided is told as it was when the group was opened, because the rules of a policy change.

mod session;

use forebay_domain::{
    clock::Timestamp,
    evals::Evaluates,
    groups::Group,
    ids::{BatchId, GroupId, PolicyName, RolloutId, SessionId},
    lease::Batch,
    looking::{
        explain::sentence::{consumer, count, duration_us, is, plural},
        insight::{FindId, FindLife, IdMatches, Life, LifeOf},
        ledger::Story,
    },
    reasons,
    refusal::Refusal,
    rules::Rules,
    scores::{PRODUCER, Score},
    session::Session,
    states::{BatchState, GroupState, Verdict},
};
use forebay_store::ops::{
    policy::{FindPolicy, ListPolicies},
    samples::FindBatch,
    session::FindSession,
};
use forebay_wire::{FilterAction, FilterScope, Status};
use tracing::instrument;

use crate::{Buffer, error::BufferError, policies};

/// Policies in which an id is looked for.
pub const POLICIES_SEARCHED: usize = 256;

/// Ready groups before a group that are counted.
const LINE_MAX: i64 = 10_000;

/// Policies that are read at once.
const POLICIES_AT_ONCE: u32 = 100;

/// What an id can name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdKind {
    Rollout,
    Group,
    Batch,
    /// A session whose rollout has not arrived.
    Session,
}

/// Which kinds of things a caller may ask about.
#[derive(Clone, Copy, Debug)]
pub struct Askable {
    /// Rollouts, groups and sessions.
    pub rollouts: bool,
    pub batches: bool,
}

/// What became of a thing.
#[derive(Clone, Debug)]
pub struct LifeStory {
    /// What it is.
    pub kind: IdKind,
    pub policy: PolicyName,
    /// The time of the facts.
    pub at: Timestamp,
    /// Its state, as in the ledger.
    pub state: &'static str,
    /// The state in one sentence.
    pub headline: String,
    /// The steps of its life, the oldest first.
    pub steps: Vec<LifeStep>,
    /// A call that shows it, relative to the service's address.
    pub see: String,
    /// What else has the same id.
    pub also: Vec<(IdKind, PolicyName)>,
}

#[derive(Clone, Debug)]
pub struct LifeStep {
    /// A stable code.
    pub code: &'static str,
    /// When it happened; none if it has not happened, or if the time is not known.
    pub at: Option<Timestamp>,
    /// One sentence.
    pub text: String,
    /// The rule that decided, as it was when the group was opened.
    pub rule: Option<String>,
}

impl Buffer {
    /// What became of what has an id.
    #[instrument(level = "debug", skip_all)]
    pub async fn life(
        &self,
        id: &str,
        policy: Option<&PolicyName>,
        askable: Askable,
        sees: impl Fn(&PolicyName) -> bool + Send,
    ) -> Result<LifeStory, BufferError> {
        let now = self.clock.now();
        // As everywhere, a session is shown to who sees all of its policies.
        let sees_session = |session: &Session| session.policies.iter().all(|of| sees(&of.policy));
        let batch_id = id.parse::<BatchId>().ok().filter(|_| askable.batches);
        if let Some(batch_id) = batch_id
            && let Some(batch) = self.store.read(FindBatch(batch_id)).await?
            && sees(&batch.policy)
            && policy.is_none_or(|named| *named == batch.policy)
        {
            return Ok(of_batch(&batch, now));
        }
        if let Some(session) = id.parse::<SessionId>().ok().filter(|_| askable.rollouts)
            && let Some(session) = self.store.read(FindSession(session)).await?
            && sees_session(&session)
            && let Some(of) = session
                .policies
                .iter()
                .map(|of| of.policy.clone())
                .find(|of| policy.is_none_or(|named| *named == of.public()))
        {
            return Ok(session::alone(&session, of, now));
        }
        let found = if askable.rollouts { matches(self, id, policy, &sees).await? } else { IdMatches::default() };
        let IdMatches { rollouts, groups, sessions, open_sessions } = found;
        let session_of = async |policy: &PolicyName| match sessions.iter().find(|(of, _)| of == policy) {
            Some((_, session_id)) => {
                let session = self.store.read(FindSession(*session_id)).await;
                session.map(|session| session.filter(&sees_session))
            }
            None => Ok(None),
        };
        let rollouts = rollouts.into_iter().map(|policy| (IdKind::Rollout, policy));
        // What evaluates a policy is alone, and its group is nothing to look at.
        let groups = groups.into_iter().filter(|policy| !policy.is_evaluations());
        let mut all: Vec<_> = rollouts.chain(groups.map(|policy| (IdKind::Group, policy))).collect();
        while !all.is_empty() {
            let (kind, policy) = all.remove(0);
            let of = match kind {
                IdKind::Rollout => RolloutId::parse(id).map(LifeOf::Rollout),
                _ => GroupId::parse(id).map(LifeOf::Group),
            };
            let Ok(of) = of else { break };
            let find = FindLife { policy: policy.clone(), of, line_max: LINE_MAX };
            // It may have been forgotten since it was found.
            if let Some(life) = self.store.read(find).await? {
                let session = if life.story.is_some() { session_of(&policy).await? } else { None };
                let mut story = of_life(&life, session.as_ref(), policy, now);
                story.also = all;
                return Ok(story);
            }
        }
        for (policy, _) in &sessions {
            if let Some(session) = session_of(policy).await? {
                return Ok(session::alone(&session, policy.clone(), now));
            }
        }
        if let Some((policy, sessions)) = open_sessions.into_iter().next() {
            return Ok(session::group(sessions, policy, now));
        }
        Err(Refusal::UnknownId(id.to_owned()).into())
    }
}

async fn matches(
    buffer: &Buffer,
    id: &str,
    named: Option<&PolicyName>,
    sees: impl Fn(&PolicyName) -> bool,
) -> Result<IdMatches, BufferError> {
    let mut searched = Vec::new();
    if let Some(name) = named {
        searched.push(policies::existing_policy(buffer, name).await?.policy_pk);
        let evaluations = buffer.store.read(FindPolicy(name.evaluations())).await?;
        searched.extend(evaluations.map(|policy| policy.policy_pk));
    }
    let mut after = String::new();
    while named.is_none() && searched.len() < POLICIES_SEARCHED {
        let page = buffer.store.read(ListPolicies { after, limit: POLICIES_AT_ONCE, evaluations: true }).await?;
        let is_last = page.len() < POLICIES_AT_ONCE as usize;
        after = page.last().map(|policy| policy.name.as_str().to_owned()).unwrap_or_default();
        searched.extend(page.iter().filter(|policy| sees(&policy.name)).map(|policy| policy.policy_pk));
        if is_last {
            break;
        }
    }
    searched.truncate(POLICIES_SEARCHED);
    let (rollout_id, group_id) = (RolloutId::parse(id).ok(), GroupId::parse(id).ok());
    Ok(buffer.store.read(FindId { rollout_id, group_id, policies: searched }).await?)
}

/// A life that is being told.
struct Telling {
    steps: Vec<LifeStep>,
    headline: String,
    now: Timestamp,
}

impl Telling {
    /// Adds a step. The last one with a headline is the state in one sentence.
    fn tell(&mut self, code: &'static str, at: Option<Timestamp>, text: String) {
        self.headline.clone_from(&text);
        self.steps.push(LifeStep { code, at, text, rule: None });
    }

    fn by(&mut self, rule: Option<String>) {
        if let Some(step) = self.steps.last_mut() {
            step.rule = rule;
        }
    }

    fn ago(&self, at: Timestamp) -> String {
        format!("{} ago", duration_us(self.now.micros_since(at).max(0)))
    }
}

fn of_batch(batch: &Batch, now: Timestamp) -> LifeStory {
    let mut telling = Telling { steps: Vec::new(), headline: String::new(), now };
    cut(&mut telling, batch);
    deliveries(&mut telling, batch, "it");
    LifeStory {
        kind: IdKind::Batch,
        policy: batch.policy.clone(),
        at: now,
        state: batch.state.as_str(),
        headline: telling.headline,
        steps: telling.steps,
        see: format!("./batches/{}", batch.batch_id),
        also: Vec::new(),
    }
}

fn of_life(life: &Life, session: Option<&Session>, policy: PolicyName, now: Timestamp) -> LifeStory {
    let mut telling = Telling { steps: Vec::new(), headline: String::new(), now };
    let group = &life.group;
    let (kind, state, see) = if let Some(story) = &life.story {
        if let Some(session) = session {
            session::steps(&mut telling, session);
        }
        arrival(&mut telling, story, session.is_some());
        let see = format!("./trajectories?policy={policy}&rollout_id={}", encoded(&story.rollout_id));
        (IdKind::Rollout, story.state.as_str(), see)
    } else {
        telling.tell("opened", Some(group.opened_at), "The first rollout of the group arrived".to_owned());
        let see = format!("./groups?policy={policy}&group_id={}", encoded(&group.group_id));
        (IdKind::Group, group.fill.state.as_str(), see)
    };
    let verdict = life.story.as_ref().map_or(Verdict::Kept, |story| story.verdict);
    for score in life.scores.iter().filter(|score| score.scorer != PRODUCER) {
        scored(&mut telling, score);
    }
    if let Some(story) = &life.story {
        judged(&mut telling, story, life, session);
    }
    if verdict.takes_place() {
        decided(&mut telling, life);
        for batch in &life.batches {
            cut(&mut telling, batch);
            let is_current = group.batch_id == Some(batch.batch_id);
            if is_current {
                deliveries(&mut telling, batch, "its batch");
            }
        }
        after_batches(&mut telling, group);
    }
    if let Some(at) = group.purged_at {
        let headline = std::mem::take(&mut telling.headline);
        telling.tell("purged", Some(at), "The payload was deleted; what the ledger knows stays for a while".to_owned());
        telling.headline = headline;
    }
    LifeStory { kind, policy, at: now, state, headline: telling.headline, steps: telling.steps, see, also: Vec::new() }
}

fn arrival(telling: &mut Telling, story: &Story, of_session: bool) {
    let reward = story.reward.map_or_else(|| "no reward".to_owned(), |reward| format!("reward {}", number(reward)));
    let assumed = match (story.version_assumed, of_session) {
        (false, _) => "",
        (true, false) => ", which was assumed because none was sent",
        (true, true) => ", which was assumed because the engine told none",
    };
    let text = format!(
        "Received with {reward}, {} in {}, of version {}{assumed}",
        plural(i64::try_from(story.tokens).unwrap_or(i64::MAX), "token"),
        plural(i64::from(story.segments), "segment"),
        story.policy_version.0
    );
    telling.tell("received", Some(story.received_at), text);
}

/// A reward as people write it.
fn number(value: f64) -> String {
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn rule_text(rules: &Rules, name: &str, scope: FilterScope) -> Option<String> {
    let rule = rules.filter.iter().find(|rule| rule.name == name && rule.scope == scope)?;
    let action = match rule.action {
        FilterAction::Drop => "drop",
        FilterAction::Mask => "mask",
    };
    Some(format!("{}: {action} when {}", rule.name, rule.when))
}

fn scored(telling: &mut Telling, score: &Score) {
    let after = if score.applied { "" } else { ", which counts for nothing" };
    let attempt = match score.lease {
        Some((_, attempt)) if attempt > 1 => format!(", in attempt {attempt}"),
        _ => String::new(),
    };
    let turn = score.turn.map(|turn| format!(" for turn {turn}")).unwrap_or_default();
    let given = number(score.value);
    let text = format!("{} gave it the score {} {given}{turn}{attempt}{after}", score.scorer, score.name);
    telling.tell("scored", Some(score.given_at), text);
}

fn judged(telling: &mut Telling, story: &Story, life: &Life, session: Option<&Session>) {
    let reason = story.reason.as_deref().unwrap_or_default();
    // A rollout that waited for scores was judged later.
    let at = Some(story.received_at).filter(|_| !life.rules.use_scores());
    match story.verdict {
        Verdict::Kept if !story.scoring.is_empty() => {
            let scores = if story.scoring.len() == 1 { "score" } else { "scores" };
            telling.tell("scoring", None, format!("Waits for the {scores} {}", story.scoring.join(", ")));
        }
        Verdict::Kept => {}
        Verdict::Masked => {
            let text = format!("Masked by {reason}: it counts in the baseline of its group and is not trained");
            telling.tell("masked", at, text);
        }
        Verdict::Dropped if reason == reasons::NO_REWARD => {
            let how = match story.status {
                Status::Completed | Status::Truncated if life.rules.use_scores() => {
                    "it had no reward when it had all of its scores, and was dropped"
                }
                Status::Aborted if session.is_some() => {
                    "its session ended without a reward, so its place in the group is free"
                }
                Status::Aborted => "it was posted as aborted, without a reward, so its place in the group is free",
                Status::Failed => "it was posted as failed, without a reward, and dropped",
                Status::Completed | Status::Truncated => "it was posted without a reward and dropped",
            };
            telling.tell("dropped", at, format!("Not trained: {how}"));
        }
        Verdict::Dropped if reason == reasons::UNSCORED => {
            let text = "Not trained: it lacked a score that its rules require when its time was over".to_owned();
            telling.tell("dropped", None, text);
        }
        Verdict::Dropped => {
            let when = if life.rules.use_scores() { "" } else { " at its arrival" };
            telling.tell("dropped", at, format!("Not trained: the filter {reason} dropped it{when}"));
        }
        Verdict::Late if reason == reasons::GROUP_FULL => {
            let text = format!(
                "Not trained: all places of its group {} were taken, by rollouts that waited for scores",
                story.group_id
            );
            telling.tell("late", at, text);
        }
        Verdict::Late => {
            let decided = story.decided_at.map_or_else(String::new, |decided| {
                format!(" {} before", duration_us(story.received_at.micros_since(decided).max(0)))
            });
            let completed =
                life.last_member.as_ref().filter(|_| story.group.kept + story.group.masked >= story.group.size);
            let by = completed.map(|last| format!("; {} took its last place", last.rollout_id)).unwrap_or_default();
            telling.tell("late", at, format!("Not trained: its group {} was decided{decided}{by}", story.group_id));
        }
    }
    telling.by(rule_text(&life.rules, reason, FilterScope::Rollout));
    for filter in &story.failed_filters {
        let headline = std::mem::take(&mut telling.headline);
        telling.tell("filter-fails", at, format!("The filter {filter} could not be evaluated, so it did not match"));
        telling.headline = headline;
    }
}

fn decided(telling: &mut Telling, life: &Life) {
    let group = &life.group;
    let taken = i64::from(group.fill.kept + group.fill.masked);
    let name = &group.group_id;
    let reason = group.reason.as_deref().unwrap_or_default();
    match group.fill.state {
        GroupState::Open => {
            let until = group.deadline_at.map_or_else(String::new, |at| {
                format!(", and it is decided in {} at the latest", duration_us(at.micros_since(telling.now).max(0)))
            });
            let scoring = match group.fill.scoring {
                0 => String::new(),
                1 => ", of which 1 waits for scores".to_owned(),
                some => format!(", of which {some} wait for scores"),
            };
            let text = format!(
                "Waits: group {name} has {} of {}{scoring}{until}",
                count(taken),
                plural(i64::from(group.fill.size), "rollout")
            );
            telling.tell("open", None, text);
        }
        GroupState::Ready => {
            let before = life.line.unwrap_or(0);
            let per_batch = i64::from(life.rules.batch.groups).max(1);
            let more = if before >= LINE_MAX { "at least " } else { "" };
            let text = format!(
                "Ready to be trained: {more}{} {} before group {name}, so {} out before its batch",
                plural(before, "group"),
                is(before),
                match before / per_batch {
                    0 => "no other batch goes".to_owned(),
                    1 => "1 batch goes".to_owned(),
                    batches => format!("{} go", plural(batches, "batch")),
                }
            );
            telling.tell("ready", group.decided_at, text);
        }
        GroupState::Discarded => discarded(telling, life, taken, reason),
        GroupState::Batched | GroupState::Stale | GroupState::Quarantined => {
            let last = life.last_member.as_ref().filter(|_| taken >= i64::from(group.fill.size));
            let by = last.map(|last| format!(": {} took its last place", last.rollout_id)).unwrap_or_default();
            telling.tell("complete", group.decided_at, format!("Group {name} became ready{by}"));
        }
    }
    for filter in &group.failed_filters {
        telling.tell("filter-fails", None, format!("The filter {filter} could not be evaluated, so it did not match"));
    }
}

fn evaluates(life: &Life) -> Option<&Evaluates> {
    life.story.as_ref()?.evaluates.as_ref()
}

/// What is said of a rollout that evaluates its policy.
fn evaluated(life: &Life) -> String {
    let (Some(of), Some(story)) = (evaluates(life), &life.story) else { return String::new() };
    let counts = match story.trained_versions {
        Some(versions) if versions.oldest != versions.newest => {
            ", and does not count, because its tokens are of several versions"
        }
        _ => "",
    };
    format!("Evaluated: it is a result of the suite {} for the task {}{counts}", of.suite, of.task)
}

fn discarded(telling: &mut Telling, life: &Life, taken: i64, reason: &str) {
    let group = &life.group;
    let rewards = match (group.reward_min, group.reward_max) {
        (Some(least), Some(most)) if least >= most => format!("; all rewards were {}", number(least)),
        (Some(least), Some(most)) => format!("; the rewards were {} to {}", number(least), number(most)),
        _ => String::new(),
    };
    // The rule that takes it out of what is trained is nobody's.
    let rule = rule_text(&life.rules, reason, FilterScope::Group).filter(|_| evaluates(life).is_none());
    let name = &group.group_id;
    let text = match (reason, &rule) {
        (reasons::EVALUATED, _) if evaluates(life).is_some() => evaluated(life),
        (reasons::INCOMPLETE, _) => format!(
            "Not trained: group {name} had {} at its end and needed {}",
            plural(taken, "rollout"),
            count(i64::from(group.min_size))
        ),
        (reasons::EXHAUSTED, _) => format!(
            "Not trained: the posts of group {name} were used up with {}, and it needed {}",
            plural(taken, "rollout"),
            count(i64::from(group.min_size))
        ),
        (reasons::ALL_MASKED, _) => format!("Not trained: no rollout of group {name} was kept"),
        (reasons::RESET, _) => format!("Not trained: a reset ended the run of group {name}"),
        (_, Some(_)) => format!("Not trained: the filter {reason} discarded group {name}{rewards}"),
        (_, None) => format!("Not trained: group {name} was discarded ({reason})"),
    };
    telling.tell("discarded", group.decided_at, text);
    telling.by(rule);
}

/// What became of a group that no batch carries now.
fn after_batches(telling: &mut Telling, group: &Group) {
    match group.fill.state {
        GroupState::Stale => {
            let versions = group.trained_versions.map_or_else(String::new, |versions| {
                format!(": its trained tokens are of versions {} to {}", versions.oldest.0, versions.newest.0)
            });
            let text =
                format!("Not trained: the group was over the staleness bound when a batch could take it{versions}");
            telling.tell("stale", None, text);
        }
        GroupState::Quarantined => {
            let reason = group.reason.as_deref().unwrap_or("no reason");
            telling.tell("quarantined", None, format!("Quarantined ({reason}): an operator decides about it"));
        }
        GroupState::Open | GroupState::Ready | GroupState::Batched | GroupState::Discarded => {}
    }
}

fn cut(telling: &mut Telling, batch: &Batch) {
    let text = format!(
        "Cut into batch {} of {} and {}, at version {}",
        batch.batch_id,
        plural(i64::from(batch.groups), "group"),
        plural(i64::from(batch.rollouts), "rollout"),
        batch.version_current.0
    );
    telling.tell("batched", Some(batch.created_at), text);
}

/// What became of a batch; `named` is how a sentence names it.
fn deliveries(telling: &mut Telling, batch: &Batch, named: &str) {
    let holder = consumer(&batch.consumer);
    let reason = batch.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    if batch.failed_deliveries > 0 {
        let failed = i64::from(batch.failed_deliveries);
        let text = format!("{} of {named} failed{reason}", plural(failed, "delivery"));
        telling.tell("deliveries-failed", None, text);
    }
    let step = batch.step.map_or_else(String::new, |step| format!(" by step {}", step.0));
    match batch.state {
        BatchState::Leased => {
            let since = batch.granted_at;
            let ends = batch.expires_at.map_or_else(String::new, |at| {
                format!(
                    "; the lease ends in {} unless it is extended",
                    duration_us(at.micros_since(telling.now).max(0))
                )
            });
            let text = format!(
                "In training: {holder} has held {named} for {}{ends}",
                duration_us(telling.now.micros_since(since).max(0))
            );
            telling.tell("leased", Some(since), text);
        }
        BatchState::Returned => {
            telling.tell("returned", None, format!("Waits: {named} came back{reason} and goes out before new ones"));
        }
        BatchState::Trained => {
            let ago = batch.acked_at.map_or_else(String::new, |at| format!(", {}", telling.ago(at)));
            let text = format!("Trained{step}{ago}; no checkpoint covers it yet");
            telling.tell("trained", batch.acked_at, text);
        }
        BatchState::Checkpointed => {
            let ago = batch.acked_at.map_or_else(String::new, |at| format!(", {}", telling.ago(at)));
            telling.tell("checkpointed", batch.acked_at, format!("Trained{step}{ago}, and a checkpoint covers it"));
        }
        BatchState::Quarantined => {
            let text = format!("Quarantined{reason}: {named} is not delivered until an operator readmits it");
            telling.tell("quarantined", None, text);
        }
        BatchState::Split => {
            telling.tell("split", None, format!("Split{reason}: a trainer named groups that cannot be trained"));
        }
        BatchState::Discarded => telling.tell("discarded", None, format!("Not trained: discarded{reason}")),
    }
}

fn encoded(id: &str) -> String {
    percent_encoding::utf8_percent_encode(id, percent_encoding::NON_ALPHANUMERIC).to_string()
}
