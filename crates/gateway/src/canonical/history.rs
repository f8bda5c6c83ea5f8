//! The calls of a session as a tree of canonical messages.

use std::collections::{BTreeMap, HashMap};

use super::{
    cause::BreakCause,
    defaults::Defaults,
    key::{Hash, Key},
    message::CanonicalMessage,
    record::Record,
    request::Canonical,
};
use crate::completion::AssistantMessage;

/// Calls that a history has. Later ones are not added.
pub const CALLS_MAX: usize = 1024;

/// Messages that a history has, which together take about 16 MiB. A call with more is not added.
pub const MESSAGES_MAX: usize = 1 << 16;

/// Sets of tools whose defaults a history has. The calls of further ones are compared without defaults.
const DEFAULTS_MAX: usize = 16;

/// The node before every first message.
const ROOT: u32 = 0;

/// The calls of one policy in one session.
///
/// It only grows. The requests of the calls are not kept as text, only their digests.
#[derive(Clone, Debug)]
pub struct History {
    /// Each node is a message behind those of the nodes before it. The first node is no message.
    nodes: Vec<Node>,
    /// The next nodes by the meaning of their message.
    next: HashMap<(u32, Hash), Vec<u32>>,
    /// The calls by their numbers.
    calls: BTreeMap<u32, Place>,
    /// The calls that were continued, each with the request that did, as far as it is known.
    continued: HashMap<u32, Option<Hash>>,
    /// The defaults of tools, by the digest that they are in.
    defaults: HashMap<Hash, Defaults>,
}

#[derive(Clone, Debug)]
struct Node {
    before: u32,
    /// The number of messages up to here.
    depth: u32,
    /// `None` only in the root.
    key: Option<Key>,
    /// The call that brought the message.
    call: u32,
    /// The calls whose answer is this message.
    answered: Vec<u32>,
}

/// Where a call is in the tree.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// The last message of its request.
    request: u32,
    /// Its answer.
    answer: u32,
    head: Hash,
    /// The ids of the tool calls in its request.
    ids: Hash,
    /// The same with those of its answer.
    ids_with_answer: Hash,
    /// Who made it, if the agent says so.
    agent: Option<Hash>,
    has_siblings: bool,
}

/// Which ids of tool calls come back as they were.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SameIds {
    None,
    /// The agent gave those of the last answer other names.
    BeforeTheAnswer,
    All,
}

/// What speaks for a call among calls with equal answers. What comes first counts more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Evidence {
    /// How far the ids of tool calls are those of its conversation. They are made anew for each answer.
    ids: SameIds,
    /// The results of tools are the same in each character.
    has_same_results: bool,
    /// The same agent made it.
    is_of_agent: bool,
    /// No other request has continued it.
    is_free: bool,
}

/// Nothing says which of several calls a request continues.
struct Siblings;

/// The call that a request continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extended {
    /// The number of the call.
    pub seq: u32,
    /// How many messages of the request stand for the call's request and answer. The others are new.
    pub messages: usize,
}

/// What a request has in common with calls that were made before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Repeated {
    /// The calls that had the same request.
    pub equal: Vec<u32>,
    /// The calls that it may continue.
    pub before: Vec<u32>,
}

/// Why a call cannot be added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HistoryError {
    /// The record continues a call that is not there.
    #[error("the record of call {seq} refers to {shared} messages of call {after}, which does not have them")]
    Damaged {
        /// The call.
        seq: u32,
        /// The call before.
        after: u32,
        /// How many of its messages.
        shared: u32,
    },
}

impl Default for History {
    fn default() -> Self {
        let root = Node { before: ROOT, depth: 0, key: None, call: 0, answered: Vec::new() };
        Self {
            nodes: vec![root],
            next: HashMap::new(),
            calls: BTreeMap::new(),
            continued: HashMap::new(),
            defaults: HashMap::new(),
        }
    }
}

impl History {
    /// The number of calls.
    #[must_use]
    pub fn len(&self) -> usize {
        self.calls.len()
    }

    /// The number of messages that the calls have together. Each takes about 250 bytes.
    #[must_use]
    pub fn messages(&self) -> usize {
        self.nodes.len() - 1
    }

    /// Whether there are no calls.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }

    /// Whether this call was added.
    #[must_use]
    pub fn contains(&self, seq: u32) -> bool {
        self.calls.contains_key(&seq)
    }

    /// The call that a request continues: its tools and template arguments are the request's, and the request begins
    /// with its messages and its answer. Of several, one with the most messages counts. Of these, the ids of tool calls
    /// decide, then who made the call, then which of them no other request has continued, and at last the latest one counts.
    /// But if all of them were continued already, nothing says which one is meant, and there is none.
    #[must_use]
    pub fn find(&self, request: &Canonical) -> Option<Extended> {
        self.look(request).unwrap_or_default()
    }

    /// Notes that a request continues a call.
    pub fn take(&mut self, call: u32, request: &Canonical) {
        self.continued.insert(call, Some(Hash::of_request(&request.keys, &request.ids)));
    }

    fn look(&self, request: &Canonical) -> Result<Option<Extended>, Siblings> {
        let (messages, calls) = self.continuable(request);
        let Some(last) = messages.checked_sub(1) else { return Ok(None) };
        let before = last.checked_sub(1).map_or(Hash::NO_IDS, |before| request.ids[before]);
        let repeated = request.is_repeat.then(|| Hash::of_request(&request.keys, &request.ids));
        let evidence = |(seq, has_same_results): (u32, bool)| {
            let call = &self.calls[&seq];
            let evidence = Evidence {
                ids: match (request.ids[last] == call.ids_with_answer, before == call.ids) {
                    (true, _) => SameIds::All,
                    (false, true) => SameIds::BeforeTheAnswer,
                    (false, false) => SameIds::None,
                },
                has_same_results,
                is_of_agent: request.agent == call.agent,
                is_free: self.continued.get(&seq).is_none_or(|other| repeated.is_some() && *other == repeated),
            };
            (evidence, seq)
        };
        let found: Vec<(Evidence, u32)> = calls.into_iter().map(evidence).collect();
        let Some(&(best, seq)) = found.iter().max() else { return Ok(None) };
        let is_tied = found.iter().filter(|(evidence, _)| *evidence == best).count() > 1;
        if is_tied && !best.is_free { Err(Siblings) } else { Ok(Some(Extended { seq, messages })) }
    }

    /// The calls that a request may continue, which are those with the most messages, and the number of these messages with
    /// the answer. Each has whether the results of tools are the same in each character.
    fn continuable(&self, request: &Canonical) -> (usize, Vec<(u32, bool)>) {
        let (mut deepest, mut found) = (0, Vec::new());
        let mut reached = vec![(ROOT, true)];
        while let Some((place, is_same)) = reached.pop() {
            let node = &self.nodes[place as usize];
            let messages = node.depth as usize;
            let equal_head = |seq: &u32| self.calls.get(seq).is_some_and(|call| call.head == request.head);
            let mut answered = node.answered.iter().copied().filter(equal_head).peekable();
            if messages >= deepest && answered.peek().is_some() {
                if messages > deepest {
                    found.clear();
                }
                deepest = messages;
                found.extend(answered.map(|seq| (seq, is_same)));
            }
            let Some(key) = request.keys.get(messages) else { continue };
            reached.extend(self.stood_for(place, is_same, key, request.is_again));
        }
        (deepest, found)
    }

    /// The messages behind a place for which a message of a request stands.
    fn stood_for(&self, place: u32, is_same: bool, key: &Key, is_again: bool) -> impl Iterator<Item = (u32, bool)> {
        let next = self.next.get(&(place, key.meaning)).into_iter().flatten().copied();
        next.filter_map(move |next| {
            let stored = self.key(next).filter(|stored| key.stands_for(stored, is_again))?;
            Some((next, is_same && key.has_same_result(stored)))
        })
    }

    /// The calls that had the same request: the same tools and template arguments, messages that this request stands for,
    /// and the same agent. If some of them have the same results of tools in each character, only these, and of these, if
    /// some have the ids of its tool calls, only those.
    #[must_use]
    pub fn repeated(&self, request: &Canonical) -> Repeated {
        let mut reached = vec![(ROOT, true)];
        for key in &request.keys {
            let next =
                reached.iter().flat_map(|&(place, is_same)| self.stood_for(place, is_same, key, request.is_again));
            reached = next.collect();
        }
        let is_equal = |call: &Place, has_same_results: bool| {
            call.head == request.head
                && call.agent == request.agent
                && reached.iter().any(|&(place, is_same)| place == call.request && (is_same || !has_same_results))
        };
        let is_known = self.calls.values().any(|call| is_equal(call, true));
        let is_equal = |call: &Place| is_equal(call, is_known);
        let equal: Vec<(u32, Hash)> =
            self.calls.iter().filter(|(_, call)| is_equal(call)).map(|(&seq, call)| (seq, call.ids)).collect();
        let ids = request.ids.last().copied().unwrap_or(Hash::NO_IDS);
        let has_ids = equal.iter().any(|(_, of)| *of == ids);
        let equal = equal.into_iter().filter(|(_, of)| !has_ids || *of == ids).map(|(seq, _)| seq).collect();
        Repeated { equal, before: self.continuable(request).1.into_iter().map(|(seq, _)| seq).collect() }
    }

    /// What the call with this request adds to the history.
    #[must_use]
    pub fn record(&self, request: &Canonical) -> Record {
        let mut place = ROOT;
        for key in &request.keys {
            let Some(next) = self.next_equal(place, key) else { break };
            place = next;
        }
        let node = &self.nodes[place as usize];
        let is_known = self.defaults.contains_key(&request.head) || self.defaults.len() >= DEFAULTS_MAX;
        Record {
            after: (place != ROOT).then_some(node.call),
            shared: node.depth,
            head: request.head,
            defaults: (!is_known && !request.defaults.is_empty()).then(|| request.defaults.clone()),
            ids: request.ids.last().copied().unwrap_or(Hash::NO_IDS),
            agent: request.agent,
            continues: None,
            has_siblings: self.look(request).is_err(),
            messages: request.messages[node.depth as usize..].to_vec(),
            links: request.links.iter().skip(node.depth as usize).flatten().cloned().collect(),
        }
    }

    /// Adds a recorded call. Returns false if it is already there, or if the history is full.
    pub fn add(&mut self, seq: u32, record: &Record, answer: &AssistantMessage) -> Result<bool, HistoryError> {
        let begin = match record.after {
            None => Some(ROOT).filter(|_| record.shared == 0),
            Some(after) => self.calls.get(&after).and_then(|call| self.ancestor(call.answer, record.shared)),
        };
        let after = record.after.unwrap_or_default();
        let begin = begin.ok_or(HistoryError::Damaged { seq, after, shared: record.shared })?;
        let is_full = self.calls.len() >= CALLS_MAX || self.nodes.len() + record.messages.len() >= MESSAGES_MAX;
        if is_full || self.contains(seq) {
            return Ok(false);
        }
        if let Some(defaults) = record.defaults.as_ref().filter(|_| self.defaults.len() < DEFAULTS_MAX) {
            self.defaults.insert(record.head, defaults.clone());
        }
        let defaults = self.defaults.get(&record.head).cloned().unwrap_or_default();
        let extend = |place: u32, message: &CanonicalMessage| self.extend(place, Key::of(message, &defaults), seq);
        let ids_with_answer = record.ids.with_ids(&answer.tool_calls);
        let answer = CanonicalMessage::of_answer(answer);
        let request = record.messages.iter().fold(begin, extend);
        let answer = self.extend(request, Key::of(&answer, &defaults), seq);
        self.nodes[answer as usize].answered.push(seq);
        if let Some(call) = record.continues {
            self.continued.entry(call).or_default();
        }
        let Record { head, ids, agent, has_siblings, .. } = *record;
        self.calls.insert(seq, Place { request, answer, head, ids, ids_with_answer, agent, has_siblings });
        Ok(true)
    }

    /// Why a request does not continue a call: the first difference between the call's messages with its answer, and
    /// the messages of the request. `None` if the call is not there.
    #[must_use]
    pub fn cause(&self, nearest: u32, request: &Canonical) -> Option<BreakCause> {
        self.difference(nearest, request.head, request.keys.iter(), 0)
    }

    /// Why a recorded call does not continue another one. Both may have the ids of a third call, `after`, with its
    /// answer: what differs in its messages made no difference to the ids, and is passed over. `None` if one of the calls
    /// is not there.
    #[must_use]
    pub fn cause_between(&self, nearest: u32, seq: u32, after: Option<u32>) -> Option<BreakCause> {
        let call = self.calls.get(&seq)?;
        if call.has_siblings {
            return Some(BreakCause::Siblings);
        }
        let equal = match after {
            Some(after) => self.nodes[self.calls.get(&after)?.answer as usize].depth as usize,
            None => 0,
        };
        self.difference(nearest, call.head, self.path(call.request).into_iter(), equal)
    }

    fn difference<'a>(
        &'a self,
        nearest: u32,
        head: Hash,
        new: impl Iterator<Item = &'a Key>,
        equal: usize,
    ) -> Option<BreakCause> {
        let nearest = self.calls.get(&nearest)?;
        if nearest.head != head {
            return Some(BreakCause::System);
        }
        Some(BreakCause::between(self.path(nearest.answer).into_iter().skip(equal), new.skip(equal)))
    }

    /// The messages up to a node.
    fn path(&self, place: u32) -> Vec<&Key> {
        let before = |place: &u32| Some(self.nodes[*place as usize].before);
        let places = std::iter::successors(Some(place), before).take_while(|&place| place != ROOT);
        let mut keys: Vec<&Key> = places.filter_map(|place| self.key(place)).collect();
        keys.reverse();
        keys
    }

    fn ancestor(&self, mut place: u32, depth: u32) -> Option<u32> {
        while self.nodes[place as usize].depth > depth {
            place = self.nodes[place as usize].before;
        }
        (self.nodes[place as usize].depth == depth).then_some(place)
    }

    fn key(&self, place: u32) -> Option<&Key> {
        self.nodes[place as usize].key.as_ref()
    }

    fn next_equal(&self, place: u32, key: &Key) -> Option<u32> {
        let next = self.next.get(&(place, key.meaning))?;
        next.iter().copied().find(|&next| self.key(next) == Some(key))
    }

    fn extend(&mut self, place: u32, key: Key, call: u32) -> u32 {
        if let Some(next) = self.next_equal(place, &key) {
            return next;
        }
        let added = self.nodes.len() as u32;
        let depth = self.nodes[place as usize].depth + 1;
        self.nodes.push(Node { before: place, depth, key: Some(key), call, answered: Vec::new() });
        self.next.entry((place, key.meaning)).or_default().push(added);
        added
    }
}
