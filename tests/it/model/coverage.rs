//! Counts which operations ran in which states: a run that never acks an expired lease proves nothing about that case.

use std::{collections::BTreeMap, fmt};

use forebay_wire::{BatchState, GroupState, Verdict};

use super::{
    reference::Reference,
    view::{
        Answer, Call, Ended, Holder, PER_GROUP, PolicyNumber, Post, Receipt, Recorded, Refused, Score, ScoreLease,
        WorkView, name_of,
    },
};

/// How often an operation ran in a state; the state is the one before the operation.
#[derive(Debug, Default)]
pub(crate) struct Coverage {
    met: BTreeMap<(&'static str, String), u64>,
}

/// Combinations that the default run must reach at least once.
#[rustfmt::skip]
const MUST_MEET: [(&str, &[&str]); 28] = [
    ("post", &["new", "open", "scoring", "full", "ready", "leased", "returned", "trained", "checkpointed", "discarded", "stale",
        "quarantined", "repeat", "conflict", "size conflict", "backlog full"]),
    ("score", &["waits", "kept", "masked", "dropped", "ready", "repeat", "conflict", "replaced", "after the decision",
        "late", "unknown"]),
    ("score work", &["waits", "kept", "ready", "repeat", "failed", "lease lost"]),
    ("lease work", &["rollout", "group", "rollout again", "group again", "several names", "held", "nothing", "unknown"]),
    ("extend work", &["held", "lost"]),
    ("retry work", &["exhausted", "nothing"]),
    ("close", &["open", "ready", "batched", "discarded", "unknown"]),
    ("discard", &["open", "ready", "batched", "discarded", "quarantined", "unknown"]),
    ("claim", &["held", "returned", "returned after ack", "ready", "shares", "stale", "slow rollout", "expired", "delivered", "nothing",
        "superseded"]),
    ("extend", &["leased", "leased, other lease", "expired", "returned", "trained", "checkpointed", "quarantined",
        "split", "superseded", "unknown"]),
    ("ack", &["leased", "leased, other lease", "expired", "returned", "trained", "trained, other step",
        "trained, other lease", "checkpointed", "quarantined", "split", "discarded", "superseded", "unknown",
        "step settled", "forgotten"]),
    ("nack", &["leased", "leased, other lease", "expired", "returned", "trained", "checkpointed", "quarantined",
        "split", "superseded", "unknown", "some groups", "foreign group"]),
    ("readmit", &["leased", "returned", "trained", "checkpointed", "quarantined", "split", "unknown"]),
    ("publish", &["new", "repeat", "conflict", "superseded"]),
    ("checkpoint", &["settles", "settles nothing", "forced", "step unknown", "superseded"]),
    ("resume", &["leased", "expired", "trained", "nothing", "gap", "forced", "purged", "abandoned", "again after a gap",
        "quarantined", "step unknown", "step unknown, forced", "superseded"]),
    ("reset", &["leased", "returned", "open", "ready", "quarantined", "trained", "superseded"]),
    ("put policy", &["open", "ready", "leased"]),
    ("sweep", &["nothing", "expired", "overdue", "unscored", "purge", "forget", "session, idle", "session, parked", "session, room needed",
        "session, too old",
        "session, busy", "session, posted", "session, purge", "session, forget"]),
    ("step", &["open", "ready", "leased", "trained"]),
    ("restart", &["open", "ready", "leased", "trained"]),
    ("open session", &["new", "repeat", "session conflict", "session is finished", "session is aborted",
        "session is expired", "rollout conflict", "size conflict", "invalid", "no room"]),
    ("resume session", &["new", "attempt over", "no attempts left", "reset", "unknown", "session is finished",
        "session is aborted", "session is expired"]),
    ("agent call", &["recorded", "replayed", "forwarded", "unknown model", "unknown key", "session is finished",
        "session is aborted", "session is expired", "full of calls", "full of segments", "full of tokens",
        "busy session"]),
    ("end call", &["recorded", "replayed", "gone", "session is finished", "session is expired",
        "cancelled", "cancelled and recorded"]),
    ("finish", &["new", "repeat", "other reward", "session is aborted", "session is expired", "no turns", "reset",
        "rollout conflict", "size conflict", "invalid", "unknown", "several", "several, refused", "several policies",
        "kept", "dropped", "late", "masked", "undelivered", "retry", "abandoned", "empty", "trimmed", "break", "full"]),
    ("abort", &["new", "repeat", "other reward", "session is finished", "session is expired", "unknown", "keep"]),
    ("turns", &["trained", "undelivered", "abandoned", "empty", "break", "unknown"]),
];

impl Coverage {
    /// Counts a call by the state before it and by its answer.
    pub(crate) fn count(&mut self, before: &Reference, call: &Call, answer: &Answer) {
        for (operation, state) in met(before, call, answer) {
            *self.met.entry((operation, state)).or_default() += 1;
        }
    }

    /// Combinations that should have been reached and were not.
    pub(crate) fn missing(&self) -> Vec<String> {
        let expected = MUST_MEET.iter().flat_map(|(operation, states)| states.iter().map(move |s| (*operation, *s)));
        let absent = expected.filter(|(operation, state)| !self.met.contains_key(&(*operation, (*state).to_owned())));
        absent.map(|(operation, state)| format!("{operation} x {state}")).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = "";
        for ((operation, state), count) in &self.met {
            if *operation != last {
                write!(f, "\n  {operation:<10}")?;
                last = operation;
            }
            write!(f, " | {state} {count}")?;
        }
        Ok(())
    }
}

type Met = Vec<(&'static str, String)>;

fn met(before: &Reference, call: &Call, answer: &Answer) -> Met {
    let one = |operation, state: &str| vec![(operation, state.to_owned())];
    if *answer == Answer::Refused(Refused::Superseded) {
        return one(operation(call), "superseded");
    }
    match call {
        Call::Post(_) if *answer == Answer::Refused(Refused::BacklogFull) => one("post", "backlog full"),
        Call::Post(bundle) => {
            let mut met: Met = bundle.iter().map(|post| ("post", post_met(before, post))).collect();
            if let Answer::Receipts(receipts) = answer {
                met.extend(
                    receipts.iter().filter(|receipt| receipt.scoring > 0).map(|_| ("post", "scoring".to_owned())),
                );
                let full = |receipt: &&Receipt| receipt.reason.as_deref() == Some("group-full");
                met.extend(receipts.iter().filter(full).map(|_| ("post", "full".to_owned())));
            }
            met
        }
        Call::Score(scores) => scores_met(before, scores, answer),
        Call::LeaseWork { names, .. } => match answer {
            Answer::Work { held: true, .. } => one("lease work", "held"),
            Answer::Work { items, .. } if items.is_empty() => one("lease work", "nothing"),
            Answer::Work { items, .. } => {
                let state = |item: &WorkView| {
                    let about = if item.name == PER_GROUP { "group" } else { "rollout" };
                    ("lease work", if item.attempt > 1 { format!("{about} again") } else { about.to_owned() })
                };
                let several = (names.len() > 1).then(|| ("lease work", "several names".to_owned()));
                items.iter().map(state).chain(several).collect()
            }
            _ => one("lease work", "unknown"),
        },
        Call::ExtendWork { .. } => match answer {
            Answer::Extended(held) => {
                held.iter().map(|held| ("extend work", if *held { "held" } else { "lost" }.to_owned())).collect()
            }
            _ => Vec::new(),
        },
        Call::RetryWork { .. } => {
            one("retry work", if *answer == Answer::Retried(0) { "nothing" } else { "exhausted" })
        }
        Call::Close { policy, group } | Call::Discard { policy, group } => {
            let state = before.group_named(*policy, *group).map(|number| before.groups[&number].state);
            vec![(operation(call), state.map_or("unknown".to_owned(), |state| name_of(&state)))]
        }
        Call::Claim { policy, consumer, request, .. } => claim_met(before, *policy, *consumer, *request),
        Call::Extend { holder, .. } | Call::Ack { holder, .. } | Call::Nack { holder, .. } => {
            let mut met = vec![(operation(call), holder_met(before, *holder))];
            met.extend(also(call, before, answer).map(|state| (operation(call), state.to_owned())));
            met
        }
        Call::Readmit { batch } => vec![("readmit", batch_met(before, *batch))],
        Call::Publish { .. } => match answer {
            Answer::Published { new: true } => one("publish", "new"),
            Answer::Published { new: false } => one("publish", "repeat"),
            _ => one("publish", "conflict"),
        },
        Call::Checkpoint { policy, step, force, .. } => match answer {
            Answer::Refused(_) => one("checkpoint", "step unknown"),
            _ if *force && before.is_unknown(*policy, Some(*step)) => one("checkpoint", "forced"),
            Answer::Settled { batches: 1.., .. } => one("checkpoint", "settles"),
            _ => one("checkpoint", "settles nothing"),
        },
        Call::Resume { policy, step, force, .. } => resume_met(before, *policy, *step, *force, answer),
        Call::Reset { policy, .. } => of_policy(before, "reset", *policy),
        Call::PutPolicy { policy, .. } => of_policy(before, "put policy", *policy),
        Call::Advance { .. } => Vec::new(),
        Call::Step { .. } => of_policy(before, "step", 0),
        Call::Sweep => before.due().into_iter().map(|due| ("sweep", due.to_owned())).collect(),
        Call::Restart => of_policy(before, "restart", 0),
        _ => session_met(before, call, answer),
    }
}

fn session_met(before: &Reference, call: &Call, answer: &Answer) -> Met {
    let mut met: Vec<String> = Vec::new();
    match answer {
        Answer::Attempt { .. } => met.push("new".to_owned()),
        Answer::Opened { duplicate, .. } => met.push(if *duplicate { "repeat" } else { "new" }.to_owned()),
        Answer::Call { recorded, cancelled } => {
            let state = match recorded {
                Ok(Recorded::New { .. }) => "recorded".to_owned(),
                Ok(Recorded::Replayed { .. }) => "replayed".to_owned(),
                Ok(Recorded::Forwarded) => "forwarded".to_owned(),
                Ok(Recorded::Gone) => "gone".to_owned(),
                Err(refused) => refused_met(refused),
            };
            met.extend(cancelled.then(|| "cancelled".to_owned()));
            met.extend((*cancelled && state == "recorded").then(|| "cancelled and recorded".to_owned()));
            met.push(state);
        }
        Answer::Ended(ended) => met.extend(ended.iter().flat_map(ended_met)),
        Answer::Turns(turns) => {
            met.extend(turns.iter().map(|turn| turn.outcome.to_owned()));
            met.extend(turns.iter().any(|turn| turn.divergence.is_some()).then(|| "break".to_owned()));
        }
        Answer::Refused(refused) => met.push(refused_met(refused)),
        _ => {}
    }
    if let Call::Finish(finishes) = call {
        let refused = matches!(answer, Answer::Refused(_));
        let several = if refused { "several, refused" } else { "several" };
        met.extend((finishes.len() > 1).then(|| several.to_owned()));
        let full = finishes.iter().filter_map(|finish| before.sessions.get(&finish.session?)).any(|known| known.full);
        met.extend((full && !refused).then(|| "full".to_owned()));
    }
    if let Call::Abort(abort) = call {
        met.extend(abort.keep.then(|| "keep".to_owned()));
    }
    met.into_iter().map(|state| (operation(call), state)).collect()
}

fn refused_met(refused: &Refused) -> String {
    match refused {
        Refused::SessionEnded(state) => format!("session is {}", name_of(state)),
        Refused::EndConflict(_) => "other reward".to_owned(),
        Refused::SessionConflict => "session conflict".to_owned(),
        Refused::SessionReset(_) => "reset".to_owned(),
        Refused::AttemptOver => "attempt over".to_owned(),
        Refused::NoAttemptsLeft => "no attempts left".to_owned(),
        Refused::SessionFull(what) => format!("full of {what}"),
        Refused::SessionBusy => "busy session".to_owned(),
        Refused::UnknownSessionKey => "unknown key".to_owned(),
        Refused::UnknownModel => "unknown model".to_owned(),
        Refused::NoTurns => "no turns".to_owned(),
        Refused::NoRoom => "no room".to_owned(),
        Refused::RolloutConflict { .. } => "rollout conflict".to_owned(),
        Refused::GroupSizeConflict { .. } => "size conflict".to_owned(),
        Refused::Invalid(_) => "invalid".to_owned(),
        Refused::Unknown => "unknown".to_owned(),
        other => format!("{other:?}"),
    }
}

fn ended_met(ended: &Ended) -> Vec<String> {
    if ended.duplicate {
        return vec!["repeat".to_owned()];
    }
    let assembly = &ended.assembly;
    let mut met = vec!["new".to_owned()];
    met.extend((ended.receipts.len() > 1).then(|| "several policies".to_owned()));
    met.extend(ended.receipts.iter().map(|receipt| receipt.verdict.as_str().to_owned()));
    let dropped = &assembly.dropped;
    for (state, count) in [
        ("undelivered", dropped.undelivered),
        ("retry", dropped.retry),
        ("abandoned", dropped.abandoned),
        ("empty", dropped.empty),
        ("trimmed", assembly.trimmed),
        ("break", assembly.breaks),
    ] {
        met.extend((count > 0).then(|| state.to_owned()));
    }
    met
}

fn operation(call: &Call) -> &'static str {
    match call {
        Call::Post(_) => "post",
        Call::Score(_) => "score",
        Call::LeaseWork { .. } => "lease work",
        Call::ExtendWork { .. } => "extend work",
        Call::RetryWork { .. } => "retry work",
        Call::Close { .. } => "close",
        Call::Discard { .. } => "discard",
        Call::Claim { .. } => "claim",
        Call::Extend { .. } => "extend",
        Call::Ack { .. } => "ack",
        Call::Nack { .. } => "nack",
        Call::Readmit { .. } => "readmit",
        Call::Publish { .. } => "publish",
        Call::Checkpoint { .. } => "checkpoint",
        Call::Resume { .. } => "resume",
        Call::Reset { .. } => "reset",
        Call::PutPolicy { .. } => "put policy",
        Call::Advance { .. } => "advance",
        Call::Step { .. } => "step",
        Call::Sweep => "sweep",
        Call::Restart => "restart",
        Call::OpenSession(_) => "open session",
        Call::ResumeSession { .. } => "resume session",
        Call::Record { .. } => "agent call",
        Call::Begin { .. } => "begin call",
        Call::Answered { .. } => "end call",
        Call::Finish(_) => "finish",
        Call::Abort(_) => "abort",
        Call::Turns { .. } => "turns",
    }
}

fn scores_met(before: &Reference, sent: &[Score], answer: &Answer) -> Met {
    let mut met: Vec<String> = Vec::new();
    match answer {
        Answer::Scored(scored) => {
            for (score, (applied, receipt)) in sent.iter().zip(scored) {
                let known = before.rollout_named(score.policy, score.rollout);
                let replaces =
                    known.is_some_and(|known| known.unscored_at.is_some() && known.scores[score.name].is_some());
                let state = match receipt {
                    receipt if receipt.duplicate => "repeat",
                    _ if score.value.is_none() => "failed",
                    _ if !applied => "after the decision",
                    _ if replaces => "replaced",
                    receipt if receipt.scoring > 0 => "waits",
                    receipt => receipt.verdict.as_str(),
                };
                met.push(state.to_owned());
                met.extend((receipt.verdict == Verdict::Late).then(|| "late".to_owned()));
                met.extend((*applied && receipt.state == GroupState::Ready).then(|| "ready".to_owned()));
            }
        }
        Answer::Refused(Refused::ScoreConflict) => met.push("conflict".to_owned()),
        Answer::Refused(Refused::LeaseLost) => met.push("lease lost".to_owned()),
        Answer::Refused(refused) => met.push(refused_met(refused)),
        _ => {}
    }
    let operation = if sent.iter().any(|score| score.lease != ScoreLease::None) { "score work" } else { "score" };
    met.into_iter().map(|state| (operation, state)).collect()
}

fn post_met(before: &Reference, post: &Post) -> String {
    if let Some(known) = before.rollout_named(post.policy, post.rollout) {
        let same = known.body == post.body && before.groups[&known.group].name == post.group();
        return if same { "repeat" } else { "conflict" }.to_owned();
    }
    let Some(number) = before.group_named(post.policy, post.group()) else { return "new".to_owned() };
    if post.group_size.is_some_and(|size| size != before.groups[&number].size) {
        return "size conflict".to_owned();
    }
    name_of(&before.group_state(number))
}

fn claim_met(before: &Reference, policy: PolicyNumber, consumer: usize, request: Option<usize>) -> Met {
    let mut met = Vec::new();
    let leased = |batch: &super::reference::Batch| batch.policy == policy && batch.state == BatchState::Leased;
    if before.batches.values().any(|batch| leased(batch) && !before.is_live(batch)) {
        met.push("expired");
    }
    let returned = before.next_returned(policy);
    let ready = before.ready(policy);
    let stale = |group: &usize| {
        let bound = before.policies[policy].rules.staleness;
        bound.is_some_and(|bound| before.staleness(*group) > bound)
    };
    if before.held(policy, consumer, request).is_some() {
        met.push("held");
    } else if let Some(batch) = returned {
        met.push(if before.batches[&batch].step.is_some() { "returned after ack" } else { "returned" });
    } else if ready.is_empty() {
        met.push("nothing");
    } else {
        met.push("ready");
        if !before.policies[policy].rules.environments.is_empty() {
            met.push("shares");
        }
        if ready.iter().any(stale) {
            met.push("stale");
        }
        if before.waits_for(policy, consumer, None).is_some() {
            met.push("slow rollout");
        }
        if ready.iter().any(|group| before.groups[group].delivered) {
            met.push("delivered");
        }
    }
    met.into_iter().map(|state| ("claim", state.to_owned())).collect()
}

fn batch_met(before: &Reference, batch: Option<usize>) -> String {
    let Some(number) = batch else { return "unknown".to_owned() };
    before.batches.get(&number).map_or("forgotten".to_owned(), |batch| name_of(&batch.state))
}

fn holder_met(before: &Reference, holder: Holder) -> String {
    let state = batch_met(before, holder.batch);
    let Some(batch) = holder.batch.and_then(|number| before.batches.get(&number)) else { return state };
    let same_lease = holder.lease.is_some() && batch.leases.last() == holder.lease.as_ref();
    match (batch.state, same_lease) {
        (BatchState::Leased, true) if !before.is_live(batch) => "expired".to_owned(),
        (BatchState::Leased | BatchState::Trained | BatchState::Checkpointed, false) => format!("{state}, other lease"),
        _ => state,
    }
}

/// What an answer says in addition to the state before the call.
fn also(call: &Call, before: &Reference, answer: &Answer) -> Option<&'static str> {
    match (call, answer) {
        (Call::Ack { .. }, Answer::Refused(Refused::AlreadyAcked(_))) => Some("trained, other step"),
        (Call::Ack { .. }, Answer::Refused(Refused::StepSettled { .. })) => Some("step settled"),
        (Call::Nack { groups, holder }, Answer::Batch(batch)) if !groups.is_empty() => {
            let carried = holder.batch.map(|number| before.batches[&number].carried.len());
            (carried > Some(groups.len()) && batch.state == BatchState::Split).then_some("some groups")
        }
        (Call::Nack { .. }, Answer::Refused(Refused::Invalid(_))) => Some("foreign group"),
        _ => None,
    }
}

fn resume_met(before: &Reference, policy: PolicyNumber, step: Option<i64>, force: bool, answer: &Answer) -> Met {
    let mut met = Vec::new();
    let of_policy = || before.batches.values().filter(|batch| batch.policy == policy);
    let leased = || of_policy().filter(|batch| batch.state == BatchState::Leased);
    if force && before.is_unknown(policy, step) {
        met.push("step unknown, forced");
    }
    if matches!(answer, Answer::Resumed { .. }) && !force && before.gave_up(policy) {
        met.push("again after a gap");
    }
    if matches!(answer, Answer::Resumed { quarantined: 1.., .. }) {
        met.push("quarantined");
    }
    let lost = |batch: &super::reference::Batch| batch.state == BatchState::Trained;
    if matches!(answer, Answer::Resumed { undeliverable: 1.., .. }) && of_policy().any(lost) {
        met.push("abandoned");
    }
    match answer {
        Answer::Refused(Refused::StepUnknown { .. }) => met.push("step unknown"),
        Answer::Refused(_) => met.push("gap"),
        Answer::Resumed { undeliverable: 1.., .. } => met.push("purged"),
        Answer::Resumed { returned: 0, .. } => met.push("nothing"),
        _ => {}
    }
    if leased().any(|batch| before.is_live(batch)) {
        met.push("leased");
    }
    if leased().any(|batch| !before.is_live(batch)) {
        met.push("expired");
    }
    if of_policy().any(|batch| batch.state == BatchState::Trained) {
        met.push("trained");
    }
    if force {
        met.push("forced");
    }
    met.into_iter().map(|state| ("resume", state.to_owned())).collect()
}

/// The different states of a policy's groups, each once.
fn of_policy(before: &Reference, operation: &'static str, policy: PolicyNumber) -> Met {
    let run = before.policies[policy].run;
    let mut states: Vec<String> = Vec::new();
    for (number, group) in &before.groups {
        if group.policy == policy && group.run == run {
            let quarantined = group.state == GroupState::Quarantined;
            states.push(if quarantined { "quarantined".to_owned() } else { name_of(&before.group_state(*number)) });
        }
    }
    states.sort();
    states.dedup();
    states.into_iter().map(|state| (operation, state)).collect()
}
