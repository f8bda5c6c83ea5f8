//! Decides one bundle after the other from the stored data, without the store.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use forebay_domain::{
    admission::{Gates, Room},
    clock::Timestamp,
    evals::SUITES_MAX,
    evaluation::EvaluationRequest,
    finalize::{self, GroupDecision, GroupSnapshot, Member, MemberAdvantage},
    ids::{GroupPk, PolicyName, PolicyPk, RolloutPk},
    ingest::{
        BundleOutcome, Ingested,
        decide::{self, GroupFill, RolloutDecision},
        new_rollout::NewRollout,
    },
    policies::Policy,
    refusal::Refusal,
    session::EndSession,
    states::{GroupState, RolloutState, SessionState, Verdict},
    tally::Tally,
};
use forebay_wire::Retries;

use super::{
    read::Snapshot,
    work::{GroupWork, Incoming, IncomingBundle, Keyed, Stored},
    write::Arrived,
};
use crate::{
    ops::{
        admission::{Allowances, Rooms, added_backlog},
        evals,
        group::{self, LockedGroup},
        session::EndedSession,
    },
    tally::TallyDelta,
};

/// Decides bundles in the order in which they arrived.
pub(super) struct Decider<'b> {
    snapshot: Snapshot,
    gates: &'b Gates,
    now: Timestamp,
    arrived: Vec<Arrived<'b>>,
    advantages: HashMap<RolloutPk, MemberAdvantage>,
    ready: Vec<Keyed>,
    ended: Vec<EndedSession<'b>>,
}

/// The changes to write.
pub(super) struct Changes<'b> {
    /// Groups that were changed, and groups that were only locked.
    pub(super) groups: BTreeMap<Keyed, GroupWork>,
    /// New rollouts, in the order of their arrival.
    pub(super) arrived: Vec<Arrived<'b>>,
    /// Advantages in groups that became ready: of new rollouts and of stored ones.
    pub(super) advantages: HashMap<RolloutPk, MemberAdvantage>,
    /// Groups that became ready, in this order.
    pub(super) ready: Vec<Keyed>,
    pub(super) allowances: Allowances,
    pub(super) ended: Vec<EndedSession<'b>>,
}

/// The changes of one bundle, until all of it is accepted.
struct Draft<'b> {
    rooms: Rooms,
    /// Policies whose training waits for a group that the bundle opens.
    lacked: BTreeSet<PolicyName>,
    groups: BTreeMap<Keyed, GroupWork>,
    stored: HashMap<Keyed, Stored>,
    arrived: Vec<Arrived<'b>>,
    advantages: Vec<MemberAdvantage>,
    ready: Vec<Keyed>,
    tallies: TallyDelta,
    /// Suites that rollouts of the bundle are the first results of.
    suites: BTreeSet<(PolicyPk, String)>,
}

impl<'b> Decider<'b> {
    pub(super) fn new(snapshot: Snapshot, gates: &'b Gates, now: Timestamp) -> Self {
        Self {
            snapshot,
            gates,
            now,
            arrived: Vec::new(),
            advantages: HashMap::new(),
            ready: Vec::new(),
            ended: Vec::new(),
        }
    }

    pub(super) fn into_changes(self) -> Changes<'b> {
        let Self { snapshot: Snapshot { groups, allowances, .. }, arrived, advantages, ready, ended, .. } = self;
        Changes { groups, arrived, advantages, ready, allowances, ended }
    }

    /// Decides a bundle, all or nothing.
    pub(super) fn bundle(&mut self, bundle: &IncomingBundle<'b>, tallies: &mut TallyDelta) -> BundleOutcome {
        let rollouts = &bundle.rollouts;
        for end in bundle.ends {
            self.check_end(end)?;
        }
        let mut draft = self.draft(rollouts)?;
        let mut receipts = Vec::with_capacity(rollouts.len());
        for (index, incoming) in rollouts.iter().enumerate() {
            receipts.push(self.rollout(&mut draft, index, incoming, tallies)?);
        }
        self.accept(draft, tallies);
        self.end_sessions(bundle.ends, &receipts, tallies);
        Ok(receipts)
    }

    /// Refuses the end of a session that has ended, has recorded further calls, has begun another attempt, or belongs to a
    /// run that has ended.
    fn check_end(&self, end: &EndSession) -> Result<(), Refusal> {
        let session = self.snapshot.sessions.get(&end.session_pk).ok_or(Refusal::Unknown("the session"))?;
        if !session.state.is_live() {
            return Err(Refusal::SessionEnded(session.state));
        }
        for (policy, run) in &end.runs {
            if self.snapshot.policies.get(policy).is_none_or(|policy| policy.run != *run) {
                return Err(Refusal::SessionReset(policy.clone()));
            }
        }
        // An agent may have come back since the sweep saw that the session was due.
        let is_kept = end.state == SessionState::Expired && session.due_at.is_some_and(|due_at| due_at > self.now);
        let is_same = (session.calls, session.attempt) == (end.calls, end.attempt) && !is_kept;
        if is_same { Ok(()) } else { Err(Refusal::SessionChanged) }
    }

    /// Ends the sessions of a bundle that was accepted.
    fn end_sessions(&mut self, ends: &'b [EndSession], receipts: &[Ingested], tallies: &mut TallyDelta) {
        let mut rest = receipts;
        for end in ends {
            let (own, others) = rest.split_at(end.rollouts.min(rest.len()));
            rest = others;
            let session = self.snapshot.sessions.get_mut(&end.session_pk).expect("the end was checked");
            for policy in &session.policies {
                tallies.add(*policy, Tally::Sessions(session.state), -1);
                tallies.add(*policy, Tally::Sessions(end.state), 1);
            }
            session.state = end.state;
            let retention = end.runs.iter().map(|(policy, _)| &self.snapshot.policies[policy].rules.retention);
            let settled_s = retention.clone().map(|retention| retention.settled_s).max().unwrap_or(0);
            let tombstone_s = retention.map(|retention| retention.tombstone_s).max().unwrap_or(0);
            let purge_at = self.now.plus_seconds(settled_s);
            let forget_at = purge_at.plus_seconds(tombstone_s);
            self.ended.push(EndedSession { end, outcome: end.outcome(own), purge_at, forget_at });
        }
    }

    fn draft(&mut self, bundle: &[Incoming<'b>]) -> Result<Draft<'b>, Refusal> {
        if let Some(incoming) =
            bundle.iter().find(|incoming| !self.snapshot.policies.contains_key(&incoming.new.policy))
        {
            return Err(Refusal::UnknownPolicy(incoming.new.policy.clone()));
        }
        let newcomers: Vec<&Incoming<'b>> =
            bundle.iter().filter(|incoming| !self.snapshot.stored.contains_key(&self.rollout_key(incoming))).collect();
        let rooms = self.snapshot.allowances.rooms(&newcomers);
        let requests = self.requests(bundle, &rooms);
        if !requests.is_empty() {
            return Err(Refusal::NotEvaluated(requests));
        }
        Ok(Draft {
            rooms,
            lacked: self.lacked(&newcomers),
            groups: BTreeMap::new(),
            stored: HashMap::new(),
            arrived: Vec::with_capacity(newcomers.len()),
            advantages: Vec::new(),
            ready: Vec::new(),
            tallies: TallyDelta::default(),
            suites: BTreeSet::new(),
        })
    }

    /// The inputs on which the filters of new rollouts must be evaluated, outside of the transaction.
    fn requests(&self, bundle: &[Incoming<'b>], rooms: &Rooms) -> Vec<EvaluationRequest> {
        let mut requests = Vec::new();
        for (index, incoming) in bundle.iter().enumerate() {
            if self.snapshot.stored.contains_key(&self.rollout_key(incoming)) {
                continue;
            }
            let policy = &self.snapshot.policies[&incoming.new.policy];
            let group = self.snapshot.groups.get(&self.group_key(incoming));
            if group.is_some_and(|group| !group.locked.fill.state.is_open()) {
                continue;
            }
            let rules = group.map_or(&policy.rules, |group| &group.locked.rules);
            let request = decide::pending_evaluation(rules, incoming.new, rooms.of(incoming), policy.version);
            let is_current = Arc::ptr_eq(rules, &policy.rules);
            requests.extend(request.map(|request| EvaluationRequest { index, is_current, ..request }));
        }
        requests
    }

    /// The policies whose training waits for a group that these rollouts open. Their bundle is accepted or refused as a
    /// whole, so one such group is enough.
    fn lacked(&self, newcomers: &[&Incoming<'b>]) -> BTreeSet<PolicyName> {
        let waits = |incoming: &&&Incoming<'b>| {
            let new = incoming.new;
            let environment = new.form(Retries::default()).facts.environment.as_deref().unwrap_or_default();
            let is_new = !self.snapshot.groups.contains_key(&self.group_key(incoming));
            let policy = &self.snapshot.policies[&new.policy];
            let next = self.snapshot.next_batches.get(&policy.policy_pk);
            // Training waits for nothing that evaluates the policy.
            let is_trained = new.evaluates.is_none();
            is_trained && is_new && next.is_some_and(|next| next.waits_for(&policy.rules, environment))
        };
        newcomers.iter().filter(waits).map(|incoming| incoming.new.policy.clone()).collect()
    }

    /// Adds the group of a new rollout to the draft. A new group is opened if the backlog has room for it.
    fn take_group(&self, draft: &mut Draft<'b>, incoming: &Incoming<'b>, tallies: &TallyDelta) -> Result<(), Refusal> {
        let key = self.group_key(incoming);
        if draft.groups.contains_key(&key) {
            return Ok(());
        }
        let group = if let Some(group) = self.snapshot.groups.get(&key) {
            group.clone()
        } else {
            let policy = &self.snapshot.policies[&incoming.new.policy];
            // Reserved room is available even if the backlog has filled up since.
            if !matches!(draft.rooms.of(incoming), Room::Reserved(_)) {
                let backlog = self.snapshot.backlogs[&policy.name].with(policy.policy_pk, tallies);
                let bundle = added_backlog(policy.policy_pk, &draft.tallies);
                let is_lacked = draft.lacked.contains(&policy.name);
                self.gates.admit(&policy.name, &policy.rules, backlog, bundle, is_lacked)?;
            }
            draft.tallies.groups(policy.policy_pk, GroupState::Open, 1);
            open_group(policy, incoming.new, self.snapshot.group_pks[&key], self.now)
        };
        draft.groups.insert(key, group);
        Ok(())
    }

    fn rollout(
        &mut self,
        draft: &mut Draft<'b>,
        index: usize,
        incoming: &Incoming<'b>,
        tallies: &TallyDelta,
    ) -> Result<Ingested, Refusal> {
        let key = self.rollout_key(incoming);
        if let Some(stored) = draft.stored.get(&key).or_else(|| self.snapshot.stored.get(&key)) {
            return self.repeat(draft, stored, index, incoming);
        }
        let policy = &self.snapshot.policies[&incoming.new.policy];
        let (group_key, new) = (self.group_key(incoming), incoming.new);
        if self.snapshot.taken.contains(&key) {
            let rollout_id = new.rollout_id.to_string();
            return Err(Refusal::RolloutConflict { rollout_id, index, verdict: Verdict::Kept });
        }
        if let (Some(of), Some(known)) = (&new.evaluates, self.snapshot.suites.get(&policy.policy_pk))
            && !known.contains(&of.suite)
        {
            draft.suites.insert((policy.policy_pk, of.suite.clone()));
            let new_ones = draft.suites.iter().filter(|(of, _)| *of == policy.policy_pk).count();
            if known.len() + new_ones > SUITES_MAX {
                return Err(evals::too_many_suites(format!("/{index}/suite")));
            }
        }
        let room = draft.rooms.of(incoming);
        self.take_group(draft, incoming, tallies)?;
        let group = draft.groups.get_mut(&group_key).expect("the group was just taken");
        let fill = &group.locked.fill;
        if new.only_open && (!fill.state.is_open() || fill.filled(group.locked.rules.group.on_drop).is_some()) {
            return Err(Refusal::GroupDecided(group.locked.fill.state));
        }
        let size = group.locked.fill.size;
        if new.group_size.is_some_and(|declared| declared != size) {
            let group_id = group.locked.group_id.clone();
            return Err(Refusal::GroupSizeConflict { group_id, index, size });
        }
        decide::check(&group.locked.rules, new, room, size).map_err(|refusal| at_index(refusal, index))?;
        let named = self.snapshot.named(index, new, &group.locked.rules)?;
        let decision = decide::decide(&group.locked.rules, new, room, policy.version, group.locked.fill);
        let decision = decision.ok_or_else(|| Refusal::NotEvaluated(Vec::new()))?;
        let rollout_pk = RolloutPk(self.snapshot.rollout_pks.next().expect("there is a key for every newcomer"));
        let row = Arrived::new(rollout_pk, incoming, &group.locked, &decision, named);
        group.add(new, rollout_pk, &decision, row.live_bytes());
        if !decision.scoring.is_empty() {
            let due = self.now.plus_seconds(group.locked.rules.scores.timeout_s);
            group.scored_until = group.scored_until.max(Some(due));
        }
        let is_judged =
            decision.scoring.is_empty() && group.locked.rules.judges(decision.verdict, decision.reason.as_deref());
        tally_arrival(&mut draft.tallies, policy.policy_pk, new, &decision, (row.live_bytes(), is_judged), self.now);
        draft.arrived.push(row);
        let mut decided = None;
        if group.locked.fill.state.is_open()
            && let Some(cause) = group.locked.fill.due(group.locked.rules.group.on_drop)
        {
            let outcome = finalize::decide(&group.locked.rules, &group.snapshot(), cause, self.now);
            let decision = group::settle(&mut draft.tallies, &mut group.locked, outcome, self.now);
            if let GroupDecision::Ready(ready) = &decision {
                draft.advantages.extend(ready.advantages.iter().cloned());
                draft.ready.push(group_key);
            }
            group.decision = Some(decision);
            decided = Some(group.locked.fill.state);
        }
        let mut warnings = decide::warnings(new, &decision, policy.version);
        warnings.extend(decide::environment_warning(new, group.locked.environment.as_deref()));
        let receipt = Ingested {
            policy: new.policy.clone(),
            rollout_id: new.rollout_id.clone(),
            group_id: new.group(),
            execution_id: new.execution_id.clone(),
            warnings,
            assembly: new.form(decision.retries).assembly,
            decision,
            duplicate: false,
            fill: group.locked.fill,
            decided,
            discarded: group.locked.reason.clone(),
            failed_group_filters: decided.map(|_| group.locked.failed_filters.clone()).unwrap_or_default(),
        };
        draft.stored.insert(key, Stored::of(new, group, &receipt));
        Ok(receipt)
    }

    /// The receipt for a retry, or the conflict with a different rollout of the same id.
    fn repeat(
        &self,
        draft: &Draft<'b>,
        stored: &Stored,
        index: usize,
        incoming: &Incoming<'b>,
    ) -> Result<Ingested, Refusal> {
        let new = incoming.new;
        if stored.content != new.content.as_bytes() {
            return Err(Refusal::RolloutConflict {
                rollout_id: new.rollout_id.to_string(),
                index,
                verdict: stored.decision.verdict,
            });
        }
        // An earlier rollout of this transaction may have changed the group.
        let key = self.group_key(incoming);
        let now = draft.groups.get(&key).or_else(|| self.snapshot.groups.get(&key));
        let now = now.filter(|group| group.locked.group_pk == stored.group_pk);
        Ok(Ingested {
            policy: new.policy.clone(),
            rollout_id: new.rollout_id.clone(),
            group_id: new.group(),
            execution_id: stored.execution_id.clone(),
            warnings: decide::warnings(new, &stored.decision, self.snapshot.policies[&new.policy].version),
            assembly: new.form(stored.decision.retries).assembly,
            decision: stored.decision.clone(),
            duplicate: true,
            fill: now.map_or(stored.fill, |group| group.locked.fill),
            decided: None,
            discarded: now.map_or_else(|| stored.discarded.clone(), |group| group.locked.reason.clone()),
            failed_group_filters: Vec::new(),
        })
    }

    fn accept(&mut self, draft: Draft<'b>, tallies: &mut TallyDelta) {
        let Draft { rooms, lacked: _, groups, stored, arrived, advantages, ready, tallies: counted, suites } = draft;
        for (policy, suite) in suites {
            self.snapshot.suites.entry(policy).or_default().insert(suite);
        }
        self.snapshot.allowances.use_up(&rooms, tallies);
        self.snapshot.groups.extend(groups);
        for key in &ready {
            if let (Some(next), Some(group)) =
                (self.snapshot.next_batches.get_mut(&key.0), self.snapshot.groups.get(key))
            {
                next.add_ready(group.locked.environment.as_deref().unwrap_or_default());
            }
        }
        self.snapshot.stored.extend(stored);
        self.arrived.extend(arrived);
        self.advantages.extend(advantages.into_iter().map(|advantage| (advantage.rollout_pk, advantage)));
        self.ready.extend(ready);
        tallies.merge(counted);
    }

    fn rollout_key(&self, incoming: &Incoming<'_>) -> Keyed {
        (self.snapshot.policies[&incoming.new.policy].policy_pk, incoming.rollout_key)
    }

    fn group_key(&self, incoming: &Incoming<'_>) -> Keyed {
        (self.snapshot.policies[&incoming.new.policy].policy_pk, incoming.group_key)
    }
}

impl Stored {
    fn of(new: &NewRollout, group: &GroupWork, receipt: &Ingested) -> Self {
        Self {
            content: new.content.as_bytes().to_vec(),
            execution_id: receipt.execution_id.clone(),
            group_pk: group.locked.group_pk,
            decision: receipt.decision.clone(),
            fill: receipt.fill,
            discarded: receipt.discarded.clone(),
        }
    }
}

impl GroupWork {
    /// Counts a rollout.
    fn add(&mut self, new: &NewRollout, rollout_pk: RolloutPk, decision: &RolloutDecision, live_bytes: i64) {
        let facts = &new.form(decision.retries).facts;
        self.changed = true;
        self.locked.fill.count(decision.verdict);
        self.locked.fill.scoring += u32::from(!decision.scoring.is_empty());
        self.locked.payload_bytes += live_bytes;
        match decision.verdict {
            Verdict::Kept | Verdict::Masked => self.members.push(Member {
                rollout_pk,
                verdict: decision.verdict,
                reward: decision.reward,
                components: self.locked.rules.components_of(&facts.reward_components),
                turns: if self.locked.rules.compare_turns() { Arc::clone(&facts.turns) } else { Arc::default() },
                segments: facts.segments,
                trained_segments: facts.trained_segments,
                tokens: facts.tokens,
                trained_tokens: facts.trained_tokens,
                trained_versions: decision.trained_versions(),
            }),
            Verdict::Late => self.late += 1,
            Verdict::Dropped => {}
        }
    }

    fn snapshot(&self) -> GroupSnapshot {
        self.locked.snapshot(self.members.clone())
    }
}

fn open_group(policy: &Policy, first: &NewRollout, group_pk: GroupPk, now: Timestamp) -> GroupWork {
    let rules = &policy.rules;
    let size = first.group_size.unwrap_or(rules.group.size);
    let locked = LockedGroup {
        group_pk,
        policy_pk: policy.policy_pk,
        run: policy.run,
        group_id: first.group().as_str().to_owned(),
        rules: Arc::clone(rules),
        fill: GroupFill { state: GroupState::Open, size, kept: 0, masked: 0, dropped: 0, scoring: 0 },
        reason: None,
        min_size: rules.min_size(size),
        environment: first.form(rules.sessions.retries).facts.environment.clone(),
        failed_filters: Vec::new(),
        totals: None,
        opened_at: now,
        payload_bytes: 0,
    };
    GroupWork { opened_under: Some(policy.rules_pk), ..GroupWork::stored(locked) }
}

/// Makes the pointers of violations start with the index of their trajectory. The caller removes it if the body was not
/// an array.
fn at_index(refusal: Refusal, index: usize) -> Refusal {
    let Refusal::Invalid(mut violations) = refusal else { return refusal };
    for violation in &mut violations {
        violation.pointer.insert_str(0, &format!("/{index}"));
    }
    Refusal::Invalid(violations)
}

fn tally_arrival(
    tallies: &mut TallyDelta,
    policy: PolicyPk,
    new: &NewRollout,
    decision: &RolloutDecision,
    (live_bytes, is_judged): (i64, bool),
    now: Timestamp,
) {
    let facts = &new.form(decision.retries).facts;
    tallies.received(policy, facts.tokens, decision.reward.filter(|_| is_judged), now);
    tallies.add(policy, Tally::LiveBytes, live_bytes);
    tallies.add(policy, Tally::AssumedVersion, i64::from(decision.versions.assumed));
    match decision.verdict {
        Verdict::Kept if !decision.scoring.is_empty() => tallies.rollouts(policy, RolloutState::Scoring, 1),
        Verdict::Kept => tallies.rollouts(policy, RolloutState::Open, 1),
        Verdict::Masked => {
            tallies.rollouts(policy, RolloutState::Open, 1);
            tallies.add(policy, Tally::Masked, 1);
        }
        Verdict::Late => {
            tallies.rollouts(policy, RolloutState::Late, 1);
            tallies.add(policy, Tally::LateTotal, 1);
        }
        Verdict::Dropped => {
            tallies.rollouts(policy, RolloutState::Dropped, 1);
            tallies.dropped(policy, decision.reason.as_deref().unwrap_or_default(), now);
        }
    }
}
