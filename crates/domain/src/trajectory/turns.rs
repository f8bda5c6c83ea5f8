//! Posted turns: checked, hashed as they were posted, and assembled into segments.
//!
//! The place of a turn in its list is its place in time. The digest does not contain it, so that a retry may list the
//! same turns in another order.
//!
//! The segments are a pure function of the turns ([`assemble`](crate::assemble)). The digest covers the turns as they
//! were posted, so that another version of the function still recognises a retry. Whether repeated calls are trained is
//! a rule of the group, which is known only in the transaction; so where it matters, a rollout is packed in both forms
//! (`NewRollout::form`). Segments may be much larger than their turns, because branches repeat what they share: that
//! memory is taken from the budget of posts before the segments are built.

use std::collections::HashMap;

use forebay_wire::{self as wire, Retries, Segment, Turn, VersionSpan};

use super::{
    TrajectoryLimits, Violations, digest_spans, floats,
    segments::{check_logprobs, check_spans, each},
};
use crate::{
    assemble::{After, Assembly, Call, CallSet},
    formats::{
        canonical::{ContentDigest, Hasher},
        codes,
        columns::little_endian,
    },
    memory::{Memory, NoMemory},
    turn_calls::{self, TurnCalls},
};

/// The bytes that an assembled token takes, at most: an id, a bit of the mask and a log-probability, as they are
/// assembled, while they are packed, and packed.
const TOKEN_BYTES: usize = 24;

/// The segments that turns are assembled into.
pub(super) struct Assembled {
    pub(super) form: AssembledForm,
    /// The form by another rule about retries than the default, where it differs.
    pub(super) others: Vec<(Retries, AssembledForm)>,
}

/// What turns become by one rule about retries.
pub(super) struct AssembledForm {
    pub(super) segments: Vec<Segment>,
    pub(super) counts: wire::Assembly,
    pub(super) calls: Option<TurnCalls>,
}

/// Checks everything except how the turns follow each other.
pub(super) fn check(sent: &wire::Trajectory, limits: &TrajectoryLimits, found: &mut Violations) {
    let turns = &sent.turns;
    if turns.is_empty() {
        return;
    }
    if !sent.segments.is_empty() {
        found.push("/turns", "must not be sent together with `segments`: the service assembles segments from turns");
        return;
    }
    if turns.len() > limits.segments_max {
        found.push("/turns", format!("must have at most {} turns", limits.segments_max));
        return;
    }
    let tokens: usize = turns.iter().map(tokens).sum();
    if tokens > limits.tokens_max {
        let detail = format!(
            "must have at most {} tokens with their prompts, has {tokens}: with `after`, a prompt is only what is new \
             in it",
            limits.tokens_max
        );
        found.push("/turns", detail);
        return;
    }
    let sampled = || turns.iter().filter(|turn| !turn.tokens.is_empty());
    let some_logprobs = sampled().any(|turn| turn.logprobs.is_some());
    let some_versions = sampled().any(|turn| turn.versions.is_some());
    for (index, turn) in turns.iter().enumerate() {
        let at = format!("/turns/{index}");
        check_turn(&at, turn, found);
        let has_tokens = !turn.tokens.is_empty();
        if has_tokens && some_logprobs && turn.logprobs.is_none() {
            found.push(format!("{at}/logprobs"), "is needed, because other turns have it");
        }
        if has_tokens && some_versions && turn.versions.is_none() && sent.policy_version.is_none() {
            let detail = "is needed, because other turns have it and the trajectory has no `policy_version`";
            found.push(format!("{at}/versions"), detail);
        }
    }
    check_names(turns, found);
}

/// The number of ids that a turn brings.
fn tokens(turn: &Turn) -> usize {
    turn.prompt_tokens.len() + turn.tokens.len()
}

fn check_turn(at: &str, turn: &Turn, found: &mut Violations) {
    let labels =
        [("id", &turn.id), ("after", &turn.after), ("finish_reason", &turn.finish_reason), ("agent", &turn.agent)];
    for (name, label) in labels {
        found.text(&format!("{at}/{name}"), label.as_deref());
    }
    found.text(&format!("{at}/state_key"), turn.state_key.as_deref());
    found.require(turn.reward.is_none_or(f64::is_finite), &format!("{at}/reward"), "must be finite");
    if turn.tokens.is_empty() {
        let detail = "must not be sent for a turn without `tokens`, which is in no segment";
        found.require(turn.reward.is_none(), &format!("{at}/reward"), detail);
        found.require(turn.state_key.is_none(), &format!("{at}/state_key"), detail);
    }
    if turn.after.is_none() && turn.prompt_tokens.is_empty() {
        let detail = "must hold at least one token, unless `after` names the turn that comes before";
        found.push(format!("{at}/prompt_tokens"), detail);
    }
    for (name, ids) in [("prompt_tokens", &turn.prompt_tokens), ("tokens", &turn.tokens)] {
        each(&format!("{at}/{name}"), ids, |&id| id >= 0, "must be 0 or above", found);
    }
    let sampled = turn.tokens.len();
    if let Some(logprobs) = &turn.logprobs {
        let pointer = format!("{at}/logprobs");
        if logprobs.len() != sampled {
            found.push(&pointer, format!("has {} entries for {sampled} tokens", logprobs.len()));
        }
        each(&pointer, logprobs, |logprob| logprob.is_finite(), "must be finite as a 32-bit float", found);
        check_logprobs(&pointer, logprobs, &vec![1; logprobs.len()], found);
    }
    if let Some(spans) = &turn.versions {
        check_spans(&format!("{at}/versions"), spans, sampled, found);
    }
}

/// Checks that ids are unique, and that `after` names one of them.
fn check_names(turns: &[Turn], found: &mut Violations) {
    let names = names(turns);
    for (index, turn) in turns.iter().enumerate() {
        if let Some(first) = turn.id.as_deref().and_then(|id| names.get(id)).filter(|&&first| first != index) {
            found.push(format!("/turns/{index}/id"), format!("is also the id of turn {first}: ids must differ"));
        }
        if turn.after.as_deref().is_some_and(|after| !names.contains_key(after)) {
            found.push(format!("/turns/{index}/after"), "must be the id of a turn of this list");
        }
    }
}

/// The first turn with each id.
fn names(turns: &[Turn]) -> HashMap<&str, usize> {
    let mut names = HashMap::new();
    for (index, turn) in turns.iter().enumerate() {
        if let Some(id) = &turn.id {
            names.entry(id.as_str()).or_insert(index);
        }
    }
    names
}

/// Hashes the turns. The mark in front of them is no number of segments. The digests of the turns are sorted, so that
/// the order of the list does not matter.
pub(super) fn digest(hasher: &mut Hasher, turns: &[Turn]) {
    hasher.int(codes::TURNS);
    hasher.int(turns.len() as i64);
    let mut digests: Vec<ContentDigest> = turns.iter().map(digest_turn).collect();
    digests.sort_unstable_by(|one, other| one.as_bytes().cmp(other.as_bytes()));
    for digest in digests {
        hasher.digest(digest);
    }
}

fn digest_turn(turn: &Turn) -> ContentDigest {
    let Turn {
        id,
        after,
        prompt_tokens,
        tokens,
        logprobs,
        versions,
        finish_reason,
        stopped_on_token,
        agent,
        delivered,
        retry_count,
        reward,
        state_key,
    } = turn;
    let mut hasher = Hasher::default();
    hasher.option(id.as_deref(), Hasher::text);
    hasher.option(after.as_deref(), Hasher::text);
    hasher.bytes(&little_endian(prompt_tokens));
    hasher.bytes(&little_endian(tokens));
    hasher.option(logprobs.as_deref(), floats);
    hasher.option(versions.as_deref(), digest_spans);
    hasher.option(finish_reason.as_deref(), Hasher::text);
    hasher.tag(u8::from(*stopped_on_token));
    hasher.option(agent.as_deref(), Hasher::text);
    hasher.tag(u8::from(*delivered));
    // A turn that is no repeat has the same digest as one that does not say so.
    if *retry_count > 0 {
        hasher.int((*retry_count).into());
    }
    // Each is hashed behind its name, and adds nothing if it is absent.
    if let Some(reward) = reward {
        hasher.text("reward");
        hasher.float(*reward);
    }
    if let Some(state_key) = state_key {
        hasher.text("state_key");
        hasher.text(state_key);
    }
    hasher.finish()
}

/// Assembles checked turns. What the segments hold beyond the turns is asked for before they are built.
pub(super) fn assemble(
    sent: &wire::Trajectory,
    limits: &TrajectoryLimits,
    found: &mut Violations,
    memory: &mut Memory<'_>,
) -> Result<Option<Assembled>, NoMemory> {
    let turns = &sent.turns;
    let versions = versions(sent);
    let calls = match CallSet::new(calls(turns, &versions)) {
        Ok(calls) => calls,
        Err(no_beginning) => {
            for index in no_beginning.0 {
                let detail = "leads back to the same turn: the first of turns that follow each other has no `after`";
                found.push(format!("/turns/{index}/after"), detail);
            }
            return Ok(None);
        }
    };
    let default = calls.assemble(Retries::default());
    let others = [Retries::Last, Retries::Keep].map(|retries| (retries, calls.assemble(retries)));
    let others: Vec<_> = others.into_iter().filter(|(_, other)| other.chains != default.chains).collect();
    let mut held = 0;
    for assembly in [&default].into_iter().chain(others.iter().map(|(_, other)| other)) {
        if assembly.tokens() > limits.tokens_max {
            let detail = format!(
                "would be assembled into segments with {} tokens, and a trajectory may have {}",
                assembly.tokens(),
                limits.tokens_max
            );
            found.push("/turns", detail);
            return Ok(None);
        }
        held += assembly.tokens();
    }
    let beyond = held.saturating_sub(turns.iter().map(tokens).sum());
    let repeated = others.len() * json_bytes(sent);
    if beyond + repeated > 0 && !memory(beyond * TOKEN_BYTES + repeated) {
        return Err(NoMemory);
    }
    let form = |assembly: &Assembly| {
        let segments: Vec<Segment> = assembly.chains.iter().map(|chain| calls.segment(chain)).collect();
        let of_turns = turn_calls::of_assembly(assembly, &segments, |turn| turns[turn].id.as_deref());
        AssembledForm { segments, counts: assembly.counts(), calls: of_turns.map(TurnCalls::Posted) }
    };
    Ok(Some(Assembled {
        form: form(&default),
        others: others.iter().map(|(retries, other)| (*retries, form(other))).collect(),
    }))
}

/// The bytes of the parts that are stored as they were sent.
fn json_bytes(sent: &wire::Trajectory) -> usize {
    [&sent.messages, &sent.metadata].into_iter().flatten().map(|json| json.get().len()).sum()
}

/// The spans of each turn. A turn without spans among turns that have them has the version of the trajectory.
fn versions(sent: &wire::Trajectory) -> Vec<Option<Vec<VersionSpan>>> {
    let some = sent.turns.iter().any(|turn| !turn.tokens.is_empty() && turn.versions.is_some());
    let declared = sent.policy_version.filter(|_| some);
    let of = |turn: &Turn| {
        let whole = |version| vec![VersionSpan(version, 0, turn.tokens.len() as i64)];
        turn.versions.clone().or_else(|| declared.map(whole))
    };
    sent.turns.iter().map(of).collect()
}

fn calls<'a>(turns: &'a [Turn], versions: &'a [Option<Vec<VersionSpan>>]) -> Vec<Call<'a>> {
    let names = names(turns);
    let after = |after: &Option<String>| {
        let call = after.as_deref().and_then(|after| names.get(after).copied());
        call.map(|call| After { call, trimmed: false })
    };
    let call = |(index, (turn, versions)): (usize, (&'a Turn, &'a Option<Vec<VersionSpan>>))| Call {
        ended: index as u64,
        after: after(&turn.after),
        prompt: &turn.prompt_tokens,
        ids: &turn.tokens,
        logprobs: turn.logprobs.as_deref(),
        versions: versions.as_deref(),
        stopped_on_token: turn.stopped_on_token,
        agent: turn.agent.as_deref(),
        delivered: turn.delivered,
        abandoned: false,
        retry_count: turn.retry_count,
        reward: turn.reward,
        state_key: turn.state_key.as_deref(),
    };
    turns.iter().zip(versions).enumerate().map(call).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::Trajectory, *};
    use crate::surrogates::LoneSurrogates;

    const LIMITS: TrajectoryLimits = TrajectoryLimits {
        tokens_max: 100,
        segments_max: 16,
        metadata_bytes_max: 100,
        lone_surrogates: LoneSurrogates::Replace,
    };

    fn turn(id: &str, after: Option<&str>, prompt: usize, tokens: &[i32]) -> Turn {
        Turn {
            id: Some(id.to_owned()),
            after: after.map(str::to_owned),
            prompt_tokens: vec![1; prompt],
            tokens: tokens.to_vec(),
            ..Turn::default()
        }
    }

    fn with(turns: Vec<Turn>) -> wire::Trajectory {
        let metadata = serde_json::value::RawValue::from_string("{}".to_owned());
        wire::Trajectory { turns, metadata: metadata.ok(), ..wire::Trajectory::default() }
    }

    /// The memory that is asked for, and the tokens of the segments.
    fn memory(turns: Vec<Turn>) -> Result<(usize, u64), Vec<String>> {
        let mut asked = 0;
        let parsed = Trajectory::parse_within(with(turns), &LIMITS, &mut |bytes| {
            asked += bytes;
            true
        });
        let violations = |found: Vec<wire::Violation>| found.into_iter().map(|found| found.pointer).collect::<Vec<_>>();
        let parsed = parsed.expect("all memory is given").map_err(violations)?;
        Ok((asked, parsed.facts.tokens))
    }

    #[test]
    fn segments_that_are_larger_than_their_turns_take_memory_first() {
        let merged = vec![turn("a", None, 20, &[2, 3]), turn("b", Some("a"), 1, &[4])];
        assert_eq!(memory(merged), Ok((0, 24)));
        // Two branches hold what they share twice.
        let fork =
            |tail| vec![turn("a", None, 20, &[2, 3]), turn("b", Some("a"), 1, &[4]), turn("c", Some("a"), tail, &[4])];
        assert_eq!(memory(fork(2)), Ok((22 * TOKEN_BYTES, 24 + 25)));
        // If one of the two may be dropped as a retry, both forms are held, with the metadata.
        assert_eq!(memory(fork(1)), Ok(((24 + 24 + 24 - 26) * TOKEN_BYTES + 2, 24 + 24)));
        let refused = Trajectory::parse_within(with(fork(2)), &LIMITS, &mut |_| false);
        assert_eq!(refused.expect_err("no memory is given"), NoMemory);
        // The limit holds for the segments, not only for the turns.
        let wide = |branches: usize| {
            let branch = |number: usize| turn(&number.to_string(), Some("a"), number + 1, &[4]);
            let branches = (0..branches).map(branch);
            std::iter::once(turn("a", None, 20, &[2, 3])).chain(branches).collect()
        };
        assert!(memory(wide(3)).is_ok());
        assert_eq!(memory(wide(4)), Err(vec!["/turns".to_owned()]));
    }
}
