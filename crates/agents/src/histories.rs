//! The calls of sessions as messages, so that a request can be compared with the calls before it.
//!
//! This is only a cache. It is built from the stored calls if it is missing, also from those of other replicas.

use std::collections::HashMap;

use forebay_bounds::work;
use forebay_domain::ids::PolicyName;
use forebay_gateway::{
    Completion,
    canonical::{Canonical, Continued, Paths, Record, Repeated},
    completion::AssistantMessage,
};
use forebay_service::{
    Buffer,
    error::BufferError,
    session::{
        recent::{KnownCalls, RecentSessions},
        record::CallPermit,
        texts::{RecordedText, RecordedTexts},
    },
};
use forebay_store::error::StoreError;
use serde::Deserialize;

/// Ids that the histories of all sessions hold together: 64 MiB. A message counts as much as the ids in its memory.
const SIZE_MAX: usize = 16 << 20;

/// A message takes as much memory as this many ids.
const MESSAGE_IDS: usize = 64;

/// The histories of the sessions that were active last.
pub(crate) type Histories = RecentSessions<SessionHistory>;

/// No histories yet.
pub(crate) fn none() -> Histories {
    RecentSessions::new(SIZE_MAX)
}

/// What a history holds of its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// Their messages, with which requests are compared.
    Messages,
    /// Also their ids, for prompts that continue them.
    Ids,
}

/// The calls of a session, per policy.
#[derive(Debug, Default)]
pub(crate) struct SessionHistory {
    policies: HashMap<PolicyName, Paths>,
    known: KnownCalls,
    /// The most ids of a call's prompt and answer, also of one whose ids are not held.
    longest_path: usize,
    /// The number of each call by the id of its answer.
    answers: HashMap<String, u32>,
}

/// A call that was recorded.
pub(crate) struct Recorded<'a> {
    pub(crate) seq: u32,
    pub(crate) policy: &'a PolicyName,
    pub(crate) record: &'a Record,
    pub(crate) prompt: &'a [i32],
    pub(crate) ids: &'a [i32],
    pub(crate) message: &'a AssistantMessage,
    /// The id of the answer.
    pub(crate) id: &'a str,
}

impl SessionHistory {
    /// Adds the stored calls that are missing: all after a restart, and those that other replicas have recorded.
    pub(crate) async fn catch_up(
        &mut self,
        buffer: &Buffer,
        permit: &CallPermit,
        holds: Holds,
    ) -> Result<(), BufferError> {
        if self.known.has_all(permit.calls()) {
            return Ok(());
        }
        let texts = buffer.recorded_texts(permit).await?;
        let mut history = std::mem::take(self);
        let read = work::on_thread(move || history.read(&texts, holds).map(|()| history));
        *self = read.await.map_err(|_| StoreError::Closed)??;
        Ok(())
    }

    fn read(&mut self, texts: &RecordedTexts, holds: Holds) -> Result<(), StoreError> {
        for text in texts.iter() {
            let text = text?;
            if !self.known.has(text.seq) {
                self.add_stored(&text, holds);
            }
        }
        Ok(())
    }

    fn add_stored(&mut self, text: &RecordedText, holds: Holds) {
        self.longest_path = self.longest_path.max(text.prompt.len() + text.ids.len());
        match (Record::from_json(&text.request), answer(&text.response)) {
            (Ok(record), Ok(Answer { id, message })) => {
                let call = Recorded {
                    seq: text.seq,
                    policy: &text.policy,
                    record: &record,
                    prompt: &text.prompt,
                    ids: &text.ids,
                    message: &message,
                    id: &id,
                };
                self.add(&call, holds);
            }
            (Err(error), _) | (_, Err(error)) => {
                tracing::error!(error = %error, call.seq = text.seq, "the stored request of a call cannot be read");
                self.known.learn(text.seq);
            }
        }
    }

    /// The number of the call with this answer.
    pub(crate) fn call_of(&self, answer: &str) -> Option<u32> {
        self.answers.get(answer).copied()
    }

    /// The most ids that a prompt can have in common with a call.
    pub(crate) fn longest_path(&self) -> usize {
        self.longest_path
    }

    /// What a request continues.
    pub(crate) fn continued(&self, policy: &PolicyName, request: &Canonical) -> Option<Continued> {
        self.policies.get(policy)?.continued(request)
    }

    /// The calls that had the same request, and those that it may continue.
    pub(crate) fn repeated(&self, policy: &PolicyName, request: &Canonical) -> Repeated {
        self.policies.get(policy).map(|paths| paths.history().repeated(request)).unwrap_or_default()
    }

    /// Notes that a request continues a call.
    pub(crate) fn take(&mut self, policy: &PolicyName, call: u32, request: &Canonical) {
        self.policies.entry(policy.clone()).or_default().take(call, request);
    }

    /// What is stored of a request.
    pub(crate) fn record(&mut self, policy: &PolicyName, request: &Canonical) -> Record {
        self.policies.entry(policy.clone()).or_default().history().record(request)
    }

    pub(crate) fn add(&mut self, call: &Recorded<'_>, holds: Holds) {
        if self.known.has(call.seq) {
            return;
        }
        self.longest_path = self.longest_path.max(call.prompt.len() + call.ids.len());
        self.answers.insert(call.id.to_owned(), call.seq);
        let paths = self.policies.entry(call.policy.clone()).or_default();
        let (prompt, ids) = match holds {
            Holds::Messages => (&[][..], &[][..]),
            Holds::Ids => (call.prompt, call.ids),
        };
        if let Err(error) = paths.add(call.seq, call.record, prompt, ids, call.message) {
            tracing::error!(error = %error, call.seq, "the stored request of a call cannot be used");
        }
        self.known.learn(call.seq);
    }

    pub(crate) fn size(&self) -> usize {
        let size = |paths: &Paths| paths.ids() + MESSAGE_IDS * paths.history().messages();
        self.policies.values().map(size).sum::<usize>() + MESSAGE_IDS * self.answers.len()
    }
}

/// What is needed of a stored answer.
struct Answer {
    id: String,
    message: AssistantMessage,
}

fn answer(response: &str) -> Result<Answer, serde_json::Error> {
    #[derive(Deserialize)]
    struct Stored {
        id: String,
        completion: Completion,
    }
    let Stored { id, completion } = serde_json::from_str(response)?;
    Ok(Answer { id, message: completion.message })
}

/// The message of a stored answer.
pub(crate) fn message(response: &str) -> Result<AssistantMessage, serde_json::Error> {
    answer(response).map(|answer| answer.message)
}
