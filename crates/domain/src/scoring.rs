//! Scores that are posted, and what follows from them.
//!
//! Separate from [`scores`], which says what scores are, because the stages use that, and this uses the
//! stages: the last score judges a rollout as its arrival does where none is missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use forebay_wire::{ScoreTurn, Status, Violation};

use crate::{
    clock::Timestamp,
    credit::TURNS_MAX,
    evaluation::{self, FilterVerdict},
    ids::{LeaseToken, PolicyName, RolloutId, RolloutPk, Version, check_name},
    ingest::decide::{self, GroupFill},
    refusal::Refusal,
    rules::{Rules, filter::facts::RolloutFacts},
    score_work::WorkEvent,
    scores::{self, BesideRow, PRODUCER, REWARD, Score, Standing},
    states::{GroupState, Verdict},
    trajectory::REWARD_COMPONENTS_MAX,
};

/// The most scores of a rollout by others than its producer, those after its decision included.
pub const SCORES_MAX: usize = 64;

/// The most scores of one request.
pub const POST_MAX: usize = 256;

/// The most rewards of turns of a rollout by others than its producer, those after its decision included.
pub const TURN_SCORES_MAX: usize = TURNS_MAX;

/// The longest rationale.
pub const RATIONALE_BYTES_MAX: usize = 16 << 10;

/// The longest rationale of the reward of a turn.
pub const TURN_RATIONALE_BYTES_MAX: usize = 1 << 10;

/// The longest reason for which a score is not given.
pub const FAILED_BYTES_MAX: usize = 1_024;

/// How often a request is tried again if scores, rules or versions change meanwhile.
pub const ATTEMPTS_MAX: u32 = 8;

/// A score that is posted, valid in itself.
#[derive(Clone, Debug)]
pub struct NewScore {
    pub policy: PolicyName,
    pub rollout_id: RolloutId,
    pub name: String,
    /// The turn that it is about; none if it is about the whole rollout.
    pub turn: Option<NamedTurn>,
    /// None for the scorer that holds the lease.
    pub scorer: Option<String>,
    pub given: Given,
    /// The lease of the work that it settles.
    pub lease: Option<LeaseToken>,
    pub rationale: Option<String>,
    /// Whether it may take the place of another value by the same scorer.
    pub replace: bool,
}

/// A turn as a scorer names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedTurn {
    /// By its number, counted from 0 over all segments.
    Number(u32),
    /// By the id of its call.
    Call(String),
}

/// What a scorer has to say.
#[derive(Clone, Debug, PartialEq)]
pub enum Given {
    Value(f64),
    /// It could not give the score, for this reason.
    Failed(String),
}

impl NewScore {
    /// Checks a score, whose pointers begin with `at`. Without a scorer of its own and without a lease it has `scorer`.
    pub fn parse(
        sent: forebay_wire::ScoreRequest,
        policy: PolicyName,
        scorer: &str,
        at: &str,
    ) -> Result<Self, Vec<Violation>> {
        let mut violations = Vec::new();
        let mut require = |holds: bool, field: &str, detail: String| {
            if !holds {
                violations.push(Violation { pointer: format!("{at}/{field}"), detail });
            }
        };
        let rollout_id = RolloutId::parse(&sent.rollout_id);
        if let Err(error) = &rollout_id {
            require(false, "rollout_id", error.to_string());
        }
        let scorer = sent.scorer.or_else(|| sent.lease.is_none().then(|| scorer.to_owned()));
        let named = [("name", Some(&sent.name)), ("scorer", scorer.as_ref()), ("lease", sent.lease.as_ref())];
        for (field, text) in named {
            if let Some(Err(detail)) = text.map(|text| check_name(text)) {
                require(false, field, detail);
            }
        }
        let given = match (sent.value, sent.failed) {
            (Some(value), None) => {
                require(value.is_finite(), "value", "must be finite".to_owned());
                Some(Given::Value(value + 0.0))
            }
            (None, Some(reason)) => {
                let detail = format!("must be 1 to {FAILED_BYTES_MAX} bytes without control characters");
                let is_text = (1..=FAILED_BYTES_MAX).contains(&reason.len()) && !reason.chars().any(char::is_control);
                require(is_text, "failed", detail);
                require(
                    sent.lease.is_some(),
                    "lease",
                    "is needed beside `failed`: only leased work can fail".to_owned(),
                );
                Some(Given::Failed(reason))
            }
            (Some(_), Some(_)) => {
                require(false, "failed", "must not stand beside `value`".to_owned());
                None
            }
            (None, None) => {
                require(false, "value", "is needed".to_owned());
                None
            }
        };
        let turn = sent.turn.map(|turn| match turn {
            ScoreTurn::Number(number) => {
                let is_number = (0..TURNS_MAX as i64).contains(&number);
                require(is_number, "turn", format!("must be 0 to {}", TURNS_MAX - 1));
                NamedTurn::Number(u32::try_from(number).unwrap_or_default())
            }
            ScoreTurn::Call(call) => {
                if let Err(detail) = check_name(&call) {
                    require(false, "turn", detail);
                }
                NamedTurn::Call(call)
            }
        });
        if turn.is_some() {
            let detail = format!("must be `{REWARD}` beside `turn`: it is all that a turn can be given");
            require(sent.name == REWARD, "name", detail);
            let detail = "must not stand beside `turn`: the score of the rollout settles the work";
            require(sent.lease.is_none(), "lease", detail.to_owned());
        }
        let bytes = sent.rationale.as_ref().map_or(0, String::len);
        // The turns of a rollout may have thousands, which are shown together.
        let most = if turn.is_some() { TURN_RATIONALE_BYTES_MAX } else { RATIONALE_BYTES_MAX };
        require(bytes <= most, "rationale", format!("must be at most {most} bytes, is {bytes}"));
        // Postgres has no text with it.
        let has_zero = sent.rationale.as_ref().is_some_and(|rationale| rationale.contains('\0'));
        require(!has_zero, "rationale", "must not contain U+0000".to_owned());
        match (rollout_id, given) {
            (Ok(rollout_id), Some(given)) if violations.is_empty() => Ok(Self {
                policy,
                rollout_id,
                name: sent.name,
                turn,
                scorer,
                given,
                lease: sent.lease.as_deref().map(LeaseToken::presented),
                rationale: sent.rationale,
                replace: sent.replace,
            }),
            _ => Err(violations),
        }
    }
}

/// Stores scores in one transaction.
#[derive(Clone, Debug)]
pub struct PutScores {
    pub scores: Arc<Vec<NewScore>>,
    /// What was evaluated after an attempt that asked for it.
    pub judged: Arc<Vec<Judged>>,
    pub now: Timestamp,
}

/// What became of scores.
#[derive(Clone, Debug)]
pub enum PutOutcome {
    /// They are stored.
    Stored(Stored),
    /// Nothing is stored: these rollouts would have all of their scores, and their filters must be evaluated first.
    Judge(Vec<Complete>),
}

/// Scores that are stored.
#[derive(Clone, Debug)]
pub struct Stored {
    /// In their order.
    pub scores: Vec<Scored>,
    /// What happened to the work whose leases came with them.
    pub work: Vec<(PolicyName, WorkEvent)>,
}

/// A stored score, and what its rollout is after it.
#[derive(Clone, Debug)]
pub struct Scored {
    pub policy: PolicyName,
    pub rollout_id: RolloutId,
    pub name: String,
    pub turn: Option<u32>,
    pub scorer: String,
    /// Whether the same score was stored before.
    pub duplicate: bool,
    /// Whether the decision about the rollout counts it, or will.
    pub applied: bool,
    /// Whether there is no score, because the holder of a lease could not give it.
    pub failed: bool,
    /// The required scores that the rollout still lacks.
    pub scoring: Vec<String>,
    pub verdict: Verdict,
    pub reason: Option<String>,
    pub group_id: String,
    pub fill: GroupFill,
    pub group_reason: Option<String>,
    /// What this post decided; none if the verdict was final before or still is not.
    pub decision: Option<ScoredDecision>,
    /// The state of the group if this post decided it, with the group filters that failed.
    pub decided: Option<(GroupState, Vec<String>)>,
}

/// The decision about a rollout whose scores are complete.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredDecision {
    pub verdict: Verdict,
    pub reason: Option<String>,
    pub failed_filters: Vec<String>,
    pub over_budget: Vec<String>,
    pub reward: Option<f64>,
}

/// Looks up the scores of a rollout.
#[derive(Clone, Debug)]
pub struct FindScores {
    pub policy: PolicyName,
    pub rollout_id: RolloutId,
}

/// The scores of a rollout.
#[derive(Clone, Debug)]
pub struct FoundScores {
    /// By name and scorer.
    pub scores: Vec<Score>,
    /// The required scores that it lacks.
    pub missing: Vec<String>,
    /// When it is dropped if it still lacks one.
    pub due_at: Option<Timestamp>,
}

/// A rollout with all of its scores, as its row and the scores say.
#[derive(Clone, Debug)]
pub struct Complete {
    pub rollout_pk: RolloutPk,
    pub rules: Arc<Rules>,
    pub scores: BTreeMap<String, f64>,
    pub status: Status,
    pub reward_components: BTreeMap<String, f64>,
    pub policy_version: Version,
    /// The policy's version.
    pub current: Version,
    pub segments: u32,
    pub tokens: u64,
    pub response_tokens: u64,
    pub trained_tokens: u64,
    pub max_segment_tokens: u64,
    pub beside: Option<BesideRow>,
}

/// What the filters say about a rollout with all of its scores.
#[derive(Clone, Debug)]
pub struct Judged {
    rollout_pk: RolloutPk,
    scores: BTreeMap<String, f64>,
    current: Version,
    found: FilterVerdict,
}

impl Judged {
    #[must_use]
    pub fn rollout_pk(&self) -> RolloutPk {
        self.rollout_pk
    }
}

impl Complete {
    /// Evaluates the filters. This takes up to a second for the worst filters, so neither a transaction nor an async worker
    /// may call it.
    #[must_use]
    pub fn judge(self) -> Judged {
        let found = evaluation::judge(&self.rules, &self.facts(), &Standing::Complete);
        let Self { rollout_pk, scores, current, .. } = self;
        Judged { rollout_pk, scores, current, found }
    }

    fn facts(&self) -> RolloutFacts<'_> {
        let beside = self.beside.as_ref();
        RolloutFacts {
            status: self.status.as_str(),
            reward: self.scores.get(REWARD).copied(),
            reward_components: &self.reward_components,
            scores: &self.scores,
            environment: beside.and_then(|beside| beside.environment.as_deref()),
            policy_version: self.policy_version.0,
            version_current: self.current.0,
            staleness: self.current.0.saturating_sub(self.policy_version.0).max(0),
            segments: i64::from(self.segments),
            tokens: self.tokens as i64,
            response_tokens: self.response_tokens as i64,
            trained_tokens: self.trained_tokens as i64,
            max_segment_tokens: self.max_segment_tokens as i64,
            temperature: beside.map_or(1.0, |beside| f64::from(beside.temperature)),
            metadata: beside.and_then(|beside| beside.metadata.as_deref()),
        }
    }

    /// The decision, by what was evaluated; none if this must be evaluated first.
    #[must_use]
    pub fn decide(&self, judged: &[Judged]) -> Option<ScoredDecision> {
        let found = if self.rules.evaluate_rollouts() {
            let is_same = |judged: &&Judged| {
                judged.rollout_pk == self.rollout_pk
                    && judged.scores == self.scores
                    && (judged.current == self.current || !self.rules.depend_on_versions())
            };
            judged.iter().find(is_same)?.found.clone()
        } else {
            FilterVerdict::default()
        };
        let reward = if self.rules.reward().is_some() { found.reward } else { self.scores.get(REWARD).copied() };
        let (verdict, reason) = decide::verdict(found.matched, reward);
        let failed_filters = found.failed.into_iter().take(evaluation::FAILED_FILTERS_MAX).collect();
        Some(ScoredDecision { verdict, reason, failed_filters, over_budget: found.over_budget, reward })
    }

    /// Its reward components, with the scores that others gave: what advantages by component and metrics of batches read.
    #[must_use]
    pub fn components(&self) -> BTreeMap<String, f64> {
        scores::components(&self.reward_components, self.scores.clone())
    }
}

/// Refuses a score that would be another one by the same scorer, or one too many: by others, or by its name. A rollout has no
/// more names than reward components, so that filters cost no more, and an export can be posted. `stored` are the scores that were
/// given.
pub fn check(
    new: &NewScore,
    turn: Option<u32>,
    scorer: &str,
    index: usize,
    sent: &BTreeMap<String, f64>,
    stored: &[Score],
    is_decided: bool,
) -> Result<(), Refusal> {
    let own = |score: &&Score| (&*score.name, score.turn, &*score.scorer) == (&*new.name, turn, scorer);
    let mut others = stored.iter().filter(own);
    if !is_decided
        && !new.replace
        && let Some(other) = others.next()
    {
        return Err(Refusal::ScoreConflict {
            rollout_id: new.rollout_id.to_string(),
            index,
            name: new.name.clone(),
            scorer: scorer.to_owned(),
            value: other.value,
        });
    }
    let is_new = !stored.iter().any(|score| own(&score) && (score.applied != is_decided));
    let is_like = |score: &&Score| score.turn.is_some() == turn.is_some() && score.scorer != PRODUCER;
    let by_others = stored.iter().filter(is_like).count();
    if turn.is_some() {
        if is_new && by_others >= TURN_SCORES_MAX {
            let detail = format!("the turns of the rollout have {TURN_SCORES_MAX} scores already, which is the most");
            return Err(Refusal::invalid(format!("/{index}/turn"), detail));
        }
        return Ok(());
    }
    if is_new && by_others >= SCORES_MAX {
        let detail = format!("the rollout has {SCORES_MAX} scores already, which is the most");
        return Err(Refusal::invalid(format!("/{index}/name"), detail));
    }
    let mut names: BTreeSet<&str> =
        sent.keys().chain(stored.iter().map(|score| &score.name)).map(String::as_str).collect();
    names.insert(&new.name);
    names.remove(REWARD);
    if names.len() > REWARD_COMPONENTS_MAX {
        let detail =
            format!("with it, the rollout would have more than {REWARD_COMPONENTS_MAX} names of components and scores");
        return Err(Refusal::invalid(format!("/{index}/name"), detail));
    }
    Ok(())
}
