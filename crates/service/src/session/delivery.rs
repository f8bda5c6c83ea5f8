//! Whether agents received the answers of recorded calls.
//!
//! It is stored lazily, several times a second: a mark that waits for the commit of its own would delay every answer. If
//! the process is killed before, nothing is known about its last calls ([`Delivery::Unknown`]). The calls of a session
//! count as delivered then, except those that the agent repeated ([`counts`]).
//!
//! They do not count as undelivered, because a session whose only answer was delivered could not be finished then. What
//! a living process knows to be lost is stored as lost, so an answer that no agent received is not trained because of a
//! later restart.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use forebay_domain::{
    ids::{CallPk, SessionId},
    session::{Delivery, StoredCall},
};
use forebay_store::{error::StoreError, ops::session::calls::MarkCalls};

use crate::{Buffer, session::calls::SessionCalls};

/// What became of the answers of this process, as far as it is not stored.
#[derive(Debug, Default)]
pub(crate) struct Delivered {
    marks: Mutex<Marks>,
    /// Held while calls are marked, so that the end of a session waits for marks that another task writes.
    writing: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Marks {
    /// Recorded calls whose answers are being sent.
    sending: HashMap<CallPk, SessionId>,
    /// What is to be stored, in this order.
    pending: Vec<(CallPk, Delivery)>,
}

impl Delivered {
    /// Notes that the answer of a call is being sent.
    pub(super) fn begin(&self, call: CallPk, session: SessionId) {
        self.marks().sending.insert(call, session);
    }

    /// The calls of a session whose answers are being sent.
    pub(super) fn sending(&self, session: SessionId) -> Vec<CallPk> {
        self.marks().sending.iter().filter(|(_, of)| **of == session).map(|(call, _)| *call).collect()
    }

    /// Notes that the answer of a call is no longer being sent. If it was not delivered, it is lost.
    pub(super) fn end(&self, call: CallPk) {
        let mut marks = self.marks();
        if marks.sending.remove(&call).is_some() {
            marks.pending.push((call, Delivery::Lost));
        }
    }

    /// Gives up the answers of a session that are still being sent, because the session ends. An answer that is delivered
    /// all the same is marked as such, which matters if the session goes on.
    pub(super) fn give_up(&self, session: SessionId) {
        let mut marks = self.marks();
        let given_up = marks.sending.iter().filter(|(_, of)| **of == session).map(|(call, _)| (*call, Delivery::Lost));
        let mut given_up: Vec<_> = given_up.collect();
        marks.pending.append(&mut given_up);
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Buffer {
    /// Notes that the agent received the answer of a call. It is stored with the next sweep, or when a session ends.
    pub fn mark_delivered(&self, call: CallPk) {
        let mut marks = self.delivered.marks();
        marks.sending.remove(&call);
        marks.pending.push((call, Delivery::Delivered));
    }

    /// Stores which calls were delivered; needed before the process ends.
    pub async fn flush_delivered(&self) -> Result<(), StoreError> {
        let _writing = self.delivered.writing.lock().await;
        // They stay noted until they are marked, also if this is cancelled. Meanwhile others are only added behind them.
        let pending = self.delivered.marks().pending.clone();
        for delivery in [Delivery::Lost, Delivery::Delivered] {
            let calls: Vec<CallPk> =
                pending.iter().filter(|(_, mark)| *mark == delivery).map(|(call, _)| *call).collect();
            if !calls.is_empty() {
                self.store.write(MarkCalls { calls, delivery }).await?;
            }
        }
        self.delivered.marks().pending.drain(..pending.len());
        Ok(())
    }
}

/// Whether each of these calls, in the order of their numbers, counts as delivered. If it is not known of a call, the call
/// counts unless the same agent sent the same prompt again afterwards, as clients do that lost an answer: so no
/// answer is dropped that an agent may have used, and none is trained together with the one that replaced it.
pub(super) fn counts(all: &SessionCalls, calls: &[&StoredCall]) -> Vec<bool> {
    let is_unknown = |call: &StoredCall| call.delivery == Delivery::Unknown;
    if !calls.iter().any(|call| is_unknown(call)) {
        return calls.iter().map(|call| call.delivery == Delivery::Delivered).collect();
    }
    let keys = calls.iter().map(|call| {
        let mut hasher = blake3::Hasher::new();
        for id in all.prompt(call) {
            hasher.update(&id.to_le_bytes());
        }
        (call.head.agent.as_deref(), *hasher.finalize().as_bytes())
    });
    let keys: Vec<_> = keys.collect();
    let mut alike: HashMap<_, Vec<&StoredCall>> = HashMap::new();
    for (key, call) in keys.iter().zip(calls) {
        alike.entry(key).or_default().push(call);
    }
    let is_repeated = |key: &(Option<&str>, [u8; 32]), call: &StoredCall| {
        // Candidates that an agent samples at the same time are no repeats.
        alike[key].iter().any(|other| other.seq > call.seq && other.head.started_at >= call.ended_at)
    };
    let counts = |(key, call): (_, &&StoredCall)| match call.delivery {
        Delivery::Delivered => true,
        Delivery::Lost => false,
        Delivery::Unknown => !is_repeated(key, call),
    };
    keys.iter().zip(calls).map(counts).collect()
}
