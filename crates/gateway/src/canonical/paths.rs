//! The messages of the calls of one policy in one session, with their ids.

use std::collections::HashMap;

use super::{
    history::{Extended, History, HistoryError},
    record::Record,
    request::Canonical,
};
use crate::completion::{AssistantMessage, ToolCall};

/// Ids that the calls of one policy in one session hold together: 16 MiB. Later calls are not added.
pub const IDS_MAX: usize = 4 << 20;

/// The recorded calls that a request may continue.
#[derive(Clone, Debug, Default)]
pub struct Paths {
    history: History,
    calls: HashMap<u32, Path>,
    ids: usize,
}

#[derive(Clone, Debug)]
struct Path {
    /// The call whose path has the first ids.
    before: Option<u32>,
    /// How many.
    shared: usize,
    /// The ids of the prompt behind them, and the sampled ids.
    own: Vec<i32>,
    tool_calls: Vec<ToolCall>,
}

/// What a request continues.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Continued {
    /// The number of the call.
    pub seq: u32,
    /// How many messages of the request stand for the call's request and answer.
    pub messages: usize,
    /// The ids of the call's prompt, and the ids that it sampled.
    pub path: Vec<i32>,
    /// The tool calls of its answer.
    pub tool_calls: Vec<ToolCall>,
}

impl Paths {
    /// The calls as messages.
    #[must_use]
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The number of ids that are held.
    #[must_use]
    pub fn ids(&self) -> usize {
        self.ids
    }

    /// What a request continues.
    #[must_use]
    pub fn continued(&self, request: &Canonical) -> Option<Continued> {
        let Extended { seq, messages } = self.history.find(request)?;
        let tool_calls = self.calls.get(&seq)?.tool_calls.clone();
        // Calls may have been added without ids.
        let path = Some(self.path(seq)).filter(|path| !path.is_empty())?;
        Some(Continued { seq, messages, path, tool_calls })
    }

    /// Notes that a request continues a call.
    pub fn take(&mut self, call: u32, request: &Canonical) {
        self.history.take(call, request);
    }

    /// Adds a recorded call with all ids of its prompt. In the mode `observe` the ids can be left out. Returns false if it is there already, or if there are too many.
    pub fn add(
        &mut self,
        seq: u32,
        record: &Record,
        prompt: &[i32],
        ids: &[i32],
        answer: &AssistantMessage,
    ) -> Result<bool, HistoryError> {
        let whole: Vec<i32> = prompt.iter().chain(ids).copied().collect();
        let before = record.after().map(|before| (before, self.path(before)));
        let shared = before.as_ref().map_or(0, |(_, path)| path.iter().zip(&whole).take_while(|(a, b)| a == b).count());
        let own = whole[shared..].to_vec();
        if self.ids + own.len() > IDS_MAX || !self.history.add(seq, record, answer)? {
            return Ok(false);
        }
        self.ids += own.len();
        let before = before.map(|(before, _)| before);
        self.calls.insert(seq, Path { before, shared, own, tool_calls: answer.tool_calls.clone() });
        Ok(true)
    }

    /// All ids of a call.
    fn path(&self, seq: u32) -> Vec<i32> {
        let Some(last) = self.calls.get(&seq) else { return Vec::new() };
        let mut length = last.shared + last.own.len();
        let mut ids = vec![0; length];
        let mut at = Some(last);
        while let Some(call) = at.filter(|_| length > 0) {
            if let Some(places) = ids.get_mut(call.shared..length) {
                places.iter_mut().zip(&call.own).for_each(|(place, id)| *place = *id);
            }
            length = length.min(call.shared);
            at = call.before.and_then(|before| self.calls.get(&before));
        }
        ids
    }
}
