//! Stage 1, validate: turns a trajectory on the wire into one that every later stage can rely on.
//!
//! One constructor checks everything that needs neither rules nor state, and returns every violation. The next stage is
//! [`ingest`](crate::ingest).

mod segments;
pub mod turns;

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use forebay_wire::{self as wire, Requirement, Retries, Sampling, Segment, Status, Violation};
use serde_json::value::RawValue;

use crate::{
    columns::{PostedColumn, SegmentShape, UPLOADS_MAX},
    credit::{self, Turn},
    evals::Evaluates,
    formats::{
        canonical::{CheckedJson, ContentDigest, Hasher, JsonKind, check_json, escape},
        codes,
        columns::little_endian,
    },
    ids::{AdmissionId, BlobDigest, ExecutionId, GroupId, InvalidId, PolicyName, RolloutId, Version},
    media::{self, Inline},
    memory::{Memory, NoMemory},
    staleness::{TrainedSpan, TrainedVersions},
    surrogates::LoneSurrogates,
    turn_calls::TurnCalls,
    warnings::{Warning, delivered_dropped, version_warning, warnings},
};

/// The most violations reported for one request: enough to fix a producer, and a bounded answer.
pub const VIOLATIONS_MAX: usize = 100;

/// The most rollouts of a group.
pub const GROUP_SIZE_MAX: u32 = 65_536;

/// The most entries of `reward_components`.
pub const REWARD_COMPONENTS_MAX: usize = 64;

/// Bounds that an operator sets.
#[derive(Clone, Copy, Debug)]
pub struct TrajectoryLimits {
    /// The most tokens over all segments, and over all turns with their prompts.
    pub tokens_max: usize,
    /// The most segments, and the most turns.
    pub segments_max: usize,
    /// The most bytes of `metadata` as sent.
    pub metadata_bytes_max: usize,
    /// What becomes of halves of surrogate pairs in `messages` and `metadata`.
    pub lone_surrogates: LoneSurrogates,
}

/// The complete record of one rollout, valid in itself.
#[derive(Debug)]
pub struct Trajectory {
    /// The policy, or its evaluations.
    pub policy: PolicyName,
    /// What it is a result of, if it evaluates the policy.
    pub evaluates: Option<Evaluates>,
    pub rollout_id: RolloutId,
    pub group_id: Option<GroupId>,
    pub group_size: Option<u32>,
    pub execution_id: Option<ExecutionId>,
    pub admission_id: Option<AdmissionId>,
    pub facts: Facts,
    pub sampling: Sampling,
    pub segments: Vec<Segment>,
    pub messages: Option<Box<RawValue>>,
    /// The media that its messages and segments name, each once.
    pub media: Vec<BlobDigest>,
    /// Those of them that it had as data URLs.
    pub inline: Vec<Inline>,
    pub content: ContentDigest,
    /// What became of its turns, if it was posted as turns.
    pub assembly: Option<wire::Assembly>,
    /// The same trajectory with the segments that it has by another rule about retries than the default, where they
    /// differ.
    pub others: Vec<(Retries, Self)>,
}

/// The facts about a rollout that rules and the ledger use without reading its payload.
#[derive(Debug, Clone)]
pub struct Facts {
    /// How the execution ended.
    pub status: Status,
    /// Reward as sent, except that -0 is 0.
    pub reward: Option<f64>,
    /// Named parts of the reward.
    pub reward_components: BTreeMap<String, f64>,
    /// Label of the environment.
    pub environment: Option<String>,
    /// Free-form object as sent.
    pub metadata: Option<Box<RawValue>>,
    /// Divisor of the logits at sampling.
    pub temperature: f32,
    /// The number of segments.
    pub segments: u32,
    /// Segments with a trained token.
    pub trained_segments: u32,
    /// Prompt and response tokens.
    pub tokens: u64,
    pub response_tokens: u64,
    /// Response tokens with mask 1.
    pub trained_tokens: u64,
    /// Tokens of the longest segment.
    pub max_segment_tokens: u64,
    /// Tokens of each segment, if there are several.
    pub segment_tokens: Option<Vec<u64>>,
    /// Which weights generated the tokens.
    pub versions: VersionFacts,
    /// The required columns that are present.
    pub columns: Columns,
    /// Warnings that do not depend on the policy.
    pub warnings: Vec<Warning>,
    /// Whether it was made of turns or calls, and none of them sampled a token.
    pub sampled_nothing: bool,
    /// Its turns in order; one more than a rollout may have where there are too many.
    pub turns: Arc<[Turn]>,
    /// Its segments with the columns that they name.
    pub shapes: Arc<[SegmentShape]>,
    /// The calls that these are, if it was made of turns or calls with ids.
    pub turn_calls: Option<Arc<TurnCalls>>,
    /// Trained tokens by segment and version. The version is none for tokens that no span describes.
    spans: Vec<UnresolvedSpan>,
}

/// Trained tokens of a segment that one version generated, which may be absent.
#[derive(Debug, Clone, Copy)]
struct UnresolvedSpan {
    segment: u32,
    version: Option<Version>,
    tokens: u64,
}

/// The weight versions that generated a rollout, before an absent one is resolved.
#[derive(Debug, Clone, Copy, Default)]
pub struct VersionFacts {
    declared: Option<i64>,
    /// Versions of spans with a trained token.
    trained_spans: Option<TrainedVersions>,
    /// Oldest version of a span.
    oldest_span: Option<i64>,
    /// Newest version of a span.
    newest_span: Option<i64>,
    /// Whether no span describes some trained token, or the rollout as a whole.
    uncovered: bool,
    trains: bool,
    /// Whether the versions of some spans are assumed, because an engine did not say them.
    pub spans_assumed: bool,
}

/// A rollout's version once the current one is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResolvedVersions {
    /// The rollout's version: its oldest span with a trained token.
    pub version: Version,
    /// Versions of its trained tokens; none if no token is trained.
    pub trained: Option<TrainedVersions>,
    /// Whether the producer sent no version, or an engine said none in a session, and the current version stands in.
    pub assumed: bool,
}

impl VersionFacts {
    /// Resolves an absent version to the one of the admission, or else to the one that is current at arrival.
    #[must_use]
    pub fn resolve(&self, admitted: Option<Version>, current: Version) -> ResolvedVersions {
        let stated = self.stated(admitted, current);
        let is_absent = self.declared.is_none() && admitted.is_none() && self.uncovered;
        let assumed = is_absent || self.spans_assumed;
        let without_span = (self.uncovered && self.trains).then(|| TrainedVersions::one(stated));
        let trained = TrainedVersions::of_all([self.trained_spans, without_span]);
        let fallback = if self.uncovered { stated } else { self.oldest_span.map_or(stated, Version) };
        ResolvedVersions { version: trained.map_or(fallback, |trained| trained.oldest), trained, assumed }
    }

    /// A warning about the versions, given the current version.
    #[must_use]
    pub fn warning(&self, current: Version) -> Option<Warning> {
        version_warning(self.declared.max(self.newest_span), current)
    }

    /// The version of tokens that no span describes.
    #[must_use]
    pub fn stated(&self, admitted: Option<Version>, current: Version) -> Version {
        self.declared.map(Version).or(admitted).unwrap_or(current)
    }
}

/// Which of the columns that a policy may require are present.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "one per requirement, not a state machine")]
pub struct Columns {
    logprobs: bool,
    teacher_logprobs: bool,
    values: bool,
    advantages: bool,
    policy_version: bool,
}

impl Facts {
    /// Trained tokens by segment and version, in order; `stated` is the version of tokens that no span describes.
    #[must_use]
    pub fn trained_spans(&self, stated: Version) -> Vec<TrainedSpan> {
        let resolve = |&UnresolvedSpan { segment, version, tokens }: &UnresolvedSpan| TrainedSpan {
            segment,
            version: version.unwrap_or(stated),
            tokens,
        };
        self.spans.iter().map(resolve).collect()
    }

    /// Whether a required column is present. A rollout without generated tokens needs no column except its version.
    #[must_use]
    pub fn has(&self, requirement: Requirement) -> bool {
        let ended_early = matches!(self.status, Status::Aborted | Status::Failed);
        let never_generated = self.segments == 0 && (ended_early || self.sampled_nothing);
        match requirement {
            Requirement::PolicyVersion => self.columns.policy_version,
            _ if never_generated => true,
            Requirement::Tokens => self.segments > 0,
            Requirement::Logprobs => self.columns.logprobs,
            Requirement::TeacherLogprobs => self.columns.teacher_logprobs,
            Requirement::Values => self.columns.values,
            Requirement::Advantages => self.columns.advantages,
        }
    }
}

impl Trajectory {
    /// Checks a trajectory; on failure returns up to [`VIOLATIONS_MAX`] violations with pointers into it.
    pub fn parse(sent: wire::Trajectory, limits: &TrajectoryLimits) -> Result<Self, Vec<Violation>> {
        Self::parse_within(sent, limits, &mut |_| true).unwrap_or_else(|NoMemory| Err(Vec::new()))
    }

    /// Like [`parse`](Self::parse), but asks for memory before segments are assembled that are larger than their turns.
    pub fn parse_within(
        mut sent: wire::Trajectory,
        limits: &TrajectoryLimits,
        memory: &mut Memory<'_>,
    ) -> Result<Result<Self, Vec<Violation>>, NoMemory> {
        let replaced = limits.lone_surrogates.replace(&mut sent);
        let inline = take_inline(&mut sent, memory)?;
        let mut found = Violations::default();
        let policy = found.id("/policy", sent.policy.as_deref(), PolicyName::parse).unwrap_or_default();
        let named_rollout = found.id("/rollout_id", sent.rollout_id.as_deref(), RolloutId::parse);
        let group_id = found.id("/group_id", sent.group_id.as_deref(), GroupId::parse);
        let execution_id = found.id("/execution_id", sent.execution_id.as_deref(), ExecutionId::parse);
        let admission_id = found.id("/admission_id", sent.admission_id.as_deref(), str::parse);
        found.text("/environment", sent.environment.as_deref());
        check_scalars(&sent, &mut found);
        let named = (sent.purpose, sent.suite.as_deref(), sent.task.as_deref());
        let own_id = sent.rollout_id.as_deref().unwrap_or_default();
        let evaluates = Evaluates::parse(named, own_id, |pointer, detail| found.push(pointer, detail));
        let policy = if evaluates.is_some() { policy.evaluations() } else { policy };
        if evaluates.is_some() {
            let detail = "must be absent with `\"purpose\": \"eval\"`: such a rollout is compared with no other";
            found.require(sent.group_id.is_none(), "/group_id", detail);
            found.require(sent.group_size.is_none(), "/group_size", detail);
        }
        segments::clear_ignored(&mut sent.segments);
        segments::check(&sent.segments, limits, &mut found);
        turns::check(&sent, limits, &mut found);
        let messages = found.json("/messages", sent.messages.as_deref(), usize::MAX, JsonKind::Array);
        let metadata = found.json("/metadata", sent.metadata.as_deref(), limits.metadata_bytes_max, JsonKind::Object);
        let mut media = sent.messages.as_deref().map_or_else(Vec::new, |messages| media::named_in(messages.get()));
        add_spans(&mut media, &sent.segments);
        let uploads: usize = sent.segments.iter().map(|segment| segment.columns.len()).sum();
        let most = format!("must name at most {UPLOADS_MAX} columns, names {uploads}");
        found.require(uploads <= UPLOADS_MAX, "/segments", &most);
        let most = format!("must name at most {} media", media::NAMED_MAX);
        found.require(media.len() <= media::NAMED_MAX, "/messages", &most);
        if !found.0.is_empty() {
            return Ok(Err(found.0));
        }
        let rollout_id = named_rollout.unwrap_or_else(RolloutId::mint);
        // Without an id of its own, it was not known when its task was named by it.
        let evaluates =
            evaluates.map(|of| if of.task.is_empty() { Evaluates { task: rollout_id.to_string(), ..of } } else { of });
        let content = digest(&sent, &policy, &rollout_id, messages, metadata);
        let sampled_nothing = !sent.turns.is_empty() && sent.turns.iter().all(|turn| turn.tokens.is_empty());
        let checked = |sent: wire::Trajectory, retries, form: Option<turns::AssembledForm>, others| {
            let (segments, assembly, calls) = match form {
                Some(form) => (form.segments, Some(form.counts), form.calls),
                None => (sent.segments, None, None),
            };
            let sent = wire::Trajectory { segments, ..sent };
            let mut facts = facts(&sent, sampled_nothing);
            facts.turn_calls = calls.map(Arc::new);
            facts.warnings.extend(replaced.clone());
            facts
                .warnings
                .extend(assembly.and_then(|assembly| delivered_dropped(assembly.dropped.retry.into(), retries)));
            Self {
                facts,
                policy: policy.clone(),
                evaluates: evaluates.clone(),
                rollout_id: rollout_id.clone(),
                group_id: group_id.clone(),
                group_size: sent.group_size,
                execution_id: execution_id.clone(),
                admission_id,
                sampling: sent.sampling,
                segments: sent.segments,
                messages: sent.messages,
                media: media.clone(),
                inline: inline.clone(),
                content,
                assembly,
                others,
            }
        };
        if sent.turns.is_empty() {
            return Ok(Ok(checked(sent, Retries::default(), None, Vec::new())));
        }
        let Some(assembled) = turns::assemble(&sent, limits, &mut found, memory)? else {
            return Ok(Err(found.0));
        };
        sent.turns = Vec::new();
        let of_rule = |(retries, form)| (retries, checked(sent.clone(), retries, Some(form), Vec::new()));
        let others = assembled.others.into_iter().map(of_rule).collect();
        Ok(Ok(checked(sent, Retries::default(), Some(assembled.form), others)))
    }
}

/// Adds the media that stand in segments.
fn add_spans(media: &mut Vec<BlobDigest>, segments: &[Segment]) {
    let spans = || segments.iter().flat_map(|segment| &segment.media);
    if spans().next().is_none() {
        return;
    }
    let mut seen: HashSet<BlobDigest> = media.iter().copied().collect();
    media.extend(spans().filter_map(|span| span.2.parse().ok()).filter(|digest| seen.insert(*digest)));
}

/// Takes the data URLs out of messages.
fn take_inline(sent: &mut wire::Trajectory, memory: &mut Memory<'_>) -> Result<Vec<Inline>, NoMemory> {
    let Some(messages) = &sent.messages else { return Ok(Vec::new()) };
    let Some((messages, inline)) = media::take_inline(messages.get(), memory)? else { return Ok(Vec::new()) };
    sent.messages = Some(RawValue::from_string(messages).expect("a text of JSON is replaced by another"));
    Ok(inline)
}

/// The violations found so far, bounded in number.
#[derive(Default)]
struct Violations(Vec<Violation>);

impl Violations {
    fn push(&mut self, pointer: impl Into<String>, detail: impl Into<String>) {
        if self.0.len() < VIOLATIONS_MAX {
            self.0.push(Violation { pointer: pointer.into(), detail: detail.into() });
        }
    }

    fn require(&mut self, holds: bool, pointer: &str, detail: &str) {
        if !holds {
            self.push(pointer, detail);
        }
    }

    fn id<T>(&mut self, pointer: &str, text: Option<&str>, parse: impl Fn(&str) -> Result<T, InvalidId>) -> Option<T> {
        match parse(text?) {
            Ok(id) => Some(id),
            Err(error) => {
                self.push(pointer, error.to_string());
                None
            }
        }
    }

    fn text(&mut self, pointer: &str, text: Option<&str>) {
        self.id(pointer, text, GroupId::parse);
    }

    fn json(&mut self, pointer: &str, raw: Option<&RawValue>, bytes_max: usize, kind: JsonKind) -> Option<CheckedJson> {
        let raw = raw?;
        if raw.get().len() > bytes_max {
            self.push(pointer, format!("must be at most {bytes_max} bytes"));
            return None;
        }
        match check_json(raw) {
            Err(detail) => {
                self.push(pointer, detail);
                None
            }
            Ok(json) => {
                let shape = if kind == JsonKind::Array { "must be an array" } else { "must be an object" };
                self.require(json.kind == kind, pointer, shape);
                Some(json)
            }
        }
    }
}

/// Checks what is no id, no segment and no JSON. All fields are named, so that a new one is not forgotten.
fn check_scalars(sent: &wire::Trajectory, found: &mut Violations) {
    let wire::Trajectory {
        group_id,
        group_size,
        policy_version,
        reward,
        reward_components,
        sampling: Sampling { temperature, top_p, top_k },
        // Every status may be sent.
        status: _,
        // The caller checks these.
        policy: _,
        rollout_id: _,
        environment: _,
        execution_id: _,
        admission_id: _,
        segments: _,
        turns: _,
        messages: _,
        metadata: _,
        purpose: _,
        suite: _,
        task: _,
    } = sent;
    if let Some(size) = *group_size {
        found.require((1..=GROUP_SIZE_MAX).contains(&size), "/group_size", &format!("must be 1 to {GROUP_SIZE_MAX}"));
        found.require(
            group_id.is_some() || size == 1,
            "/group_size",
            "must be 1 without a `group_id`: the rollout is then a group of its own",
        );
    }
    found.require(policy_version.is_none_or(|v| v >= 0), "/policy_version", "must be 0 or above");
    found.require(reward.is_none_or(f64::is_finite), "/reward", "must be finite");
    found.require(
        reward_components.len() <= REWARD_COMPONENTS_MAX,
        "/reward_components",
        &format!("must have at most {REWARD_COMPONENTS_MAX} entries"),
    );
    for (name, value) in reward_components {
        let pointer = format!("/reward_components/{}", escape(name));
        found.text(&pointer, Some(name));
        found.require(value.is_finite(), &pointer, "must be finite");
    }
    found.require(temperature.is_finite() && *temperature > 0.0, "/sampling/temperature", "must be finite and above 0");
    found.require(*top_p > 0.0 && *top_p <= 1.0, "/sampling/top_p", "must be above 0 and at most 1");
    found.require(*top_k == -1 || *top_k > 0, "/sampling/top_k", "must be -1 (all) or above 0");
}

fn facts(sent: &wire::Trajectory, sampled_nothing: bool) -> Facts {
    let trained = |segment: &Segment| segment.loss_mask.iter().map(|&bit| u64::from(bit)).sum::<u64>();
    let every = |has: fn(&Segment) -> bool| !sent.segments.is_empty() && sent.segments.iter().all(has);
    let tokens = || sent.segments.iter().map(|segment| segment.tokens.len() as u64);
    let versions = version_facts(sent);
    Facts {
        status: sent.status,
        // Adding 0 turns -0 into 0. SQLite does not store the sign, and both databases must give the same values.
        reward: sent.reward.map(|reward| reward + 0.0),
        reward_components: sent.reward_components.clone(),
        environment: sent.environment.clone(),
        metadata: sent.metadata.clone(),
        temperature: sent.sampling.temperature,
        segments: sent.segments.len() as u32,
        trained_segments: sent.segments.iter().filter(|segment| trained(segment) > 0).count() as u32,
        tokens: tokens().sum(),
        response_tokens: sent.segments.iter().map(|segment| segment.loss_mask.len() as u64).sum(),
        trained_tokens: sent.segments.iter().map(trained).sum(),
        max_segment_tokens: tokens().max().unwrap_or(0),
        segment_tokens: (sent.segments.len() > 1).then(|| tokens().collect()),
        columns: Columns {
            logprobs: every(|segment| segment.logprobs.is_some() || segment.loss_mask.is_empty()),
            teacher_logprobs: every(|segment| segment.teacher_logprobs.is_some() || segment.loss_mask.is_empty()),
            values: every(|segment| segment.values.is_some() || segment.loss_mask.is_empty()),
            advantages: every(|segment| segment.advantages.is_some() || segment.loss_mask.is_empty()),
            policy_version: sent.policy_version.is_some() || every(|segment| segment.versions.is_some()),
        },
        warnings: warnings(&sent.sampling, &sent.segments),
        versions,
        sampled_nothing,
        turns: credit::of_segments(&sent.segments),
        shapes: sent.segments.iter().map(shape).collect(),
        turn_calls: None,
        spans: trained_spans(&sent.segments),
    }
}

fn shape(segment: &Segment) -> SegmentShape {
    let column = |(name, column): (&String, &wire::ColumnUpload)| {
        let digest = column.digest.parse().ok()?;
        Some((name.clone(), PostedColumn { digest, bytes: column.bytes }))
    };
    SegmentShape {
        tokens: segment.tokens.len() as u64,
        response: segment.loss_mask.len() as u64,
        columns: segment.columns.iter().filter_map(column).collect(),
    }
}

fn trained_spans(segments: &[Segment]) -> Vec<UnresolvedSpan> {
    let mut found: Vec<UnresolvedSpan> = Vec::new();
    let mut add = |segment: usize, version: Option<Version>, mask: &[u8]| {
        let segment = segment as u32;
        let tokens = mask.iter().map(|&bit| u64::from(bit)).sum();
        match found.last_mut() {
            _ if tokens == 0 => {}
            Some(last) if (last.segment, last.version) == (segment, version) => last.tokens += tokens,
            _ => found.push(UnresolvedSpan { segment, version, tokens }),
        }
    };
    for (index, segment) in segments.iter().enumerate() {
        let mask = &segment.loss_mask;
        match &segment.versions {
            None => add(index, None, mask),
            Some(spans) => {
                for &wire::VersionSpan(version, start, length) in spans {
                    add(index, Some(Version(version)), &mask[start as usize..(start + length) as usize]);
                }
            }
        }
    }
    found
}

fn version_facts(sent: &wire::Trajectory) -> VersionFacts {
    let mut facts = VersionFacts {
        declared: sent.policy_version,
        uncovered: sent.segments.iter().all(|segment| segment.versions.is_none()),
        ..VersionFacts::default()
    };
    for segment in &sent.segments {
        let trains = segment.loss_mask.contains(&1);
        facts.trains |= trains;
        let Some(spans) = &segment.versions else {
            facts.uncovered |= trains;
            continue;
        };
        for &wire::VersionSpan(version, start, length) in spans {
            facts.newest_span = facts.newest_span.max(Some(version));
            facts.oldest_span = Some(facts.oldest_span.map_or(version, |oldest| oldest.min(version)));
            if segment.loss_mask[start as usize..(start + length) as usize].contains(&1) {
                let trained = Some(TrainedVersions::one(Version(version)));
                facts.trained_spans = TrainedVersions::of_all([facts.trained_spans, trained]);
            }
        }
    }
    facts
}

/// The digest of the canonical content: aliases and defaults are resolved, floats are hashed as bits, and keys are
/// sorted. Values that the server created or assumed count as absent. The size of the group is not part of it, because
/// it belongs to the group.
fn digest(
    sent: &wire::Trajectory,
    policy: &PolicyName,
    rollout_id: &RolloutId,
    messages: Option<CheckedJson>,
    metadata: Option<CheckedJson>,
) -> ContentDigest {
    // All fields are named: two rollouts that differ only in one that is forgotten here would count as the same.
    let wire::Trajectory {
        group_id,
        environment,
        execution_id,
        policy_version,
        status,
        reward,
        reward_components,
        sampling: Sampling { temperature, top_p, top_k },
        segments,
        turns,
        purpose,
        suite,
        task,
        // Given as they were parsed.
        policy: _,
        rollout_id: _,
        messages: _,
        metadata: _,
        // Not a part of the content.
        group_size: _,
        admission_id: _,
    } = sent;
    let mut hasher = Hasher::default();
    hasher.text(policy.as_str());
    hasher.text(rollout_id.as_str());
    hasher.text(group_id.as_deref().unwrap_or(rollout_id.as_str()));
    hasher.option(environment.as_deref(), Hasher::text);
    hasher.option(*policy_version, Hasher::int);
    hasher.tag(codes::of_status(*status));
    hasher.option(*reward, Hasher::float);
    hasher.int(reward_components.len() as i64);
    for (name, value) in reward_components {
        hasher.text(name);
        hasher.float(*value);
    }
    hasher.float(f64::from(*temperature));
    hasher.float(f64::from(*top_p));
    hasher.int(i64::from(*top_k));
    if turns.is_empty() {
        hasher.int(segments.len() as i64);
        for segment in segments {
            digest_segment(&mut hasher, segment);
        }
    } else {
        turns::digest(&mut hasher, turns);
    }
    hasher.option(messages, |hasher, json| hasher.digest(json.digest));
    hasher.option(metadata, |hasher, json| hasher.digest(json.digest));
    // It adds nothing if it is absent, so such contents have the digests that versions without executions stored. A
    // further field must be hashed like this, and behind its name: a rollout with only this field would otherwise
    // have the digest of one whose execution has the same text as its id.
    if let Some(execution_id) = execution_id {
        hasher.text(execution_id);
    }
    if *purpose == wire::Purpose::Eval {
        hasher.text("eval");
        hasher.option(suite.as_deref(), Hasher::text);
        hasher.option(task.as_deref(), Hasher::text);
    }
    for (index, segment) in segments.iter().enumerate() {
        if let Some(advantages) = &segment.advantages {
            hasher.text("advantages");
            hasher.int(index as i64);
            floats(&mut hasher, advantages);
        }
    }
    for (index, segment) in segments.iter().enumerate() {
        if let Some(turns) = &segment.turns {
            hasher.text("turns");
            hasher.int(index as i64);
            hasher.int(turns.len() as i64);
            for wire::TurnSpan { start, length, reward, state_key } in turns {
                hasher.int(*start);
                hasher.int(*length);
                hasher.option(*reward, Hasher::float);
                hasher.option(state_key.as_deref(), Hasher::text);
            }
        }
    }
    for (index, segment) in segments.iter().enumerate() {
        if !segment.columns.is_empty() {
            hasher.text("columns");
            hasher.int(index as i64);
            hasher.int(segment.columns.len() as i64);
            for (name, wire::ColumnUpload { digest, bytes }) in &segment.columns {
                hasher.text(name);
                hasher.text(digest);
                hasher.int(*bytes as i64);
            }
        }
        if !segment.media.is_empty() {
            hasher.text("media");
            hasher.int(index as i64);
            hasher.int(segment.media.len() as i64);
            for wire::MediaSpan(start, length, digest, kind) in &segment.media {
                hasher.int(*start);
                hasher.int(*length);
                hasher.text(digest);
                hasher.text(kind);
            }
        }
    }
    hasher.finish()
}

fn digest_segment(hasher: &mut Hasher, segment: &Segment) {
    // The length of the response is that of the mask, and what came later is hashed behind everything else.
    let Segment {
        kind,
        tokens,
        loss_mask,
        response_length: _,
        logprobs,
        teacher_logprobs,
        values,
        advantages: _,
        versions,
        turns: _,
        columns: _,
        media: _,
    } = segment;
    hasher.option(kind.as_deref(), Hasher::text);
    hasher.bytes(&little_endian(tokens));
    hasher.bytes(loss_mask);
    hasher.option(logprobs.as_deref(), floats);
    hasher.option(teacher_logprobs.as_deref(), floats);
    hasher.option(values.as_deref(), floats);
    hasher.option(versions.as_deref(), digest_spans);
}

fn floats(hasher: &mut Hasher, column: &[f32]) {
    hasher.bytes(&little_endian(column));
}

fn digest_spans(hasher: &mut Hasher, spans: &[wire::VersionSpan]) {
    hasher.int(spans.len() as i64);
    for wire::VersionSpan(version, start, length) in spans {
        hasher.int(*version);
        hasher.int(*start);
        hasher.int(*length);
    }
}
