//! The calls of sessions as messages, so that a request can be compared with the calls before it.
//!
//! This is only a cache. It is built from the stored calls if it is missing, also from those of other replicas.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use forebay_gateway::{
    Completion,
    canonical::{Canonical, Continued, Paths, Record},
    completion::AssistantMessage,
};
use serde::Deserialize;

use crate::buffer::{
    Buffer,
    ids::{PolicyName, SessionId},
    port::StoreError,
    refusal::BufferError,
    session::{CallPermit, RecordedText, RecordedTexts},
};

/// Ids that the histories of all sessions hold together: 64 MiB. A message counts as much as the ids in its memory.
const SIZE_MAX: usize = 16 << 20;

/// A message takes as much memory as this many ids.
const MESSAGE_IDS: usize = 64;

/// Sessions that have a history.
const SESSIONS_MAX: usize = 4_096;

/// The histories of the sessions that were active last.
#[derive(Debug, Default)]
pub(super) struct Histories(Mutex<Cached>);

#[derive(Debug, Default)]
struct Cached {
    sessions: HashMap<SessionId, Entry>,
    size: usize,
    /// Counts uses.
    uses: u64,
}

#[derive(Debug)]
struct Entry {
    history: SharedHistory,
    size: usize,
    used: u64,
}

/// The history of a session, of which several calls may be in flight.
pub(super) type SharedHistory = Arc<tokio::sync::Mutex<SessionHistory>>;

impl Histories {
    pub(super) fn of(&self, session: SessionId) -> SharedHistory {
        let mut cached = self.cached();
        cached.uses += 1;
        let used = cached.uses;
        let entry = cached.sessions.entry(session);
        let entry = entry.or_insert_with(|| Entry { history: Arc::default(), size: 0, used });
        entry.used = used;
        Arc::clone(&entry.history)
    }

    /// Notes how large a history is, and drops those that were used the longest time ago if they are too large together.
    pub(super) fn note(&self, session: SessionId, size: usize) {
        let mut cached = self.cached();
        let Some(entry) = cached.sessions.get_mut(&session) else { return };
        let before = std::mem::replace(&mut entry.size, size);
        cached.size = cached.size + size - before;
        while cached.size > SIZE_MAX || cached.sessions.len() > SESSIONS_MAX {
            let oldest = cached.sessions.iter().min_by_key(|(_, entry)| entry.used).map(|(session, _)| *session);
            let Some(dropped) = oldest.and_then(|session| cached.sessions.remove(&session)) else { return };
            cached.size -= dropped.size;
        }
    }

    fn cached(&self) -> std::sync::MutexGuard<'_, Cached> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a history holds of its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Holds {
    /// Their messages, with which requests are compared.
    Messages,
    /// Also their ids, for prompts that continue them.
    Ids,
}

/// The calls of a session, per policy.
#[derive(Debug, Default)]
pub(super) struct SessionHistory {
    policies: HashMap<PolicyName, Paths>,
    /// All calls up to this number are known.
    up_to: u32,
    /// Further calls that are.
    beyond: BTreeSet<u32>,
}

/// A call that was recorded.
pub(super) struct Recorded<'a> {
    pub(super) seq: u32,
    pub(super) policy: &'a PolicyName,
    pub(super) record: &'a Record,
    pub(super) prompt: &'a [i32],
    pub(super) ids: &'a [i32],
    pub(super) message: &'a AssistantMessage,
}

impl SessionHistory {
    /// Adds the stored calls that are missing: all after a restart, and those that other replicas have recorded.
    pub(super) async fn catch_up(
        &mut self,
        buffer: &Buffer,
        permit: &CallPermit,
        holds: Holds,
    ) -> Result<(), BufferError> {
        if (self.up_to + 1..=permit.calls()).all(|seq| self.beyond.contains(&seq)) {
            return Ok(());
        }
        let texts = buffer.recorded_texts(permit).await?;
        let mut history = std::mem::take(self);
        let read = tokio::task::spawn_blocking(move || history.read(&texts, holds).map(|()| history));
        *self = read.await.map_err(|_| StoreError::Closed)??;
        Ok(())
    }

    fn read(&mut self, texts: &RecordedTexts, holds: Holds) -> Result<(), StoreError> {
        for text in texts.iter() {
            let text = text?;
            if !self.knows(text.seq) {
                self.add_stored(&text, holds);
            }
        }
        Ok(())
    }

    fn add_stored(&mut self, text: &RecordedText, holds: Holds) {
        /// The part of a stored answer that is needed.
        #[derive(Deserialize)]
        struct Answer {
            completion: Completion,
        }
        let record = text.request.as_deref().map(Record::from_json);
        match (record, serde_json::from_str::<Answer>(&text.response)) {
            (Some(Ok(record)), Ok(answer)) => {
                let call = Recorded {
                    seq: text.seq,
                    policy: &text.policy,
                    record: &record,
                    prompt: &text.prompt,
                    ids: &text.ids,
                    message: &answer.completion.message,
                };
                self.add(&call, holds);
            }
            // No request continues a call that an earlier version of the service recorded.
            (None, _) => self.learn(text.seq),
            (Some(Err(error)), _) | (_, Err(error)) => {
                tracing::error!(error = %error, call.seq = text.seq, "the stored request of a call cannot be read");
                self.learn(text.seq);
            }
        }
    }

    /// What a request continues.
    pub(super) fn continued(&self, policy: &PolicyName, request: &Canonical) -> Option<Continued> {
        self.policies.get(policy)?.continued(request)
    }

    /// What is stored of a request.
    pub(super) fn record(&mut self, policy: &PolicyName, request: &Canonical) -> Record {
        self.policies.entry(policy.clone()).or_default().history().record(request)
    }

    /// Adds a call.
    pub(super) fn add(&mut self, call: &Recorded<'_>, holds: Holds) {
        if self.knows(call.seq) {
            return;
        }
        let paths = self.policies.entry(call.policy.clone()).or_default();
        let (prompt, ids) = match holds {
            Holds::Messages => (&[][..], &[][..]),
            Holds::Ids => (call.prompt, call.ids),
        };
        if let Err(error) = paths.add(call.seq, call.record, prompt, ids, call.message) {
            tracing::error!(error = %error, call.seq, "the stored request of a call cannot be used");
        }
        self.learn(call.seq);
    }

    pub(super) fn size(&self) -> usize {
        let size = |paths: &Paths| paths.ids() + MESSAGE_IDS * paths.history().messages();
        self.policies.values().map(size).sum()
    }

    fn knows(&self, seq: u32) -> bool {
        seq <= self.up_to || self.beyond.contains(&seq)
    }

    fn learn(&mut self, seq: u32) {
        self.beyond.insert(seq);
        while self.beyond.remove(&(self.up_to + 1)) {
            self.up_to += 1;
        }
    }
}
