//! The recorded calls of a session, read as a whole.

use std::{
    collections::{BTreeMap, HashMap},
    num::NonZero,
    sync::LazyLock,
};

use forebay_domain::{
    formats::canonical::escape,
    ids::{SessionId, SessionPk},
    refusal::Refusal,
    session::StoredCall,
    turn_calls,
};
use forebay_store::{error::StoreError, ops::session::calls::FindCalls};
use tokio::sync::{Semaphore, SemaphorePermit};
use tracing::Instrument as _;

use crate::{Buffer, session::ending::Ending};

/// Calls that are read at once.
const CALLS_PAGE: u32 = 64;

/// The recorded calls of a session, in the order of their numbers.
#[derive(Debug, Default)]
pub(super) struct SessionCalls {
    pub(super) calls: Vec<StoredCall>,
}

/// What a finish says of calls, by their numbers.
#[derive(Debug, Default)]
pub(super) struct SaidOfCalls {
    pub(super) rewards: BTreeMap<u32, f64>,
    /// The names of the states in which they were made.
    pub(super) states: BTreeMap<u32, String>,
}

fn by_number<T: Clone>(
    field: &str,
    said: &BTreeMap<String, T>,
    number: impl Fn(&str) -> Option<u32>,
) -> Result<BTreeMap<u32, T>, Refusal> {
    let mut found = BTreeMap::new();
    for (name, value) in said {
        let is_new = number(name).is_some_and(|number| found.insert(number, value.clone()).is_none());
        if !is_new {
            let detail = "must be the id of an answer that the session recorded, or the number of such a call, each once: \
                          `GET /sessions/{id}/turns` has them";
            return Err(Refusal::invalid(format!("/{field}/{}", escape(name)), detail));
        }
    }
    Ok(found)
}

impl SessionCalls {
    /// Reads all calls of a session. They may take `sessions.max_session_bytes` of memory, so callers hold
    /// [`one_of_few`] until they have dropped them.
    pub(super) async fn read(buffer: &Buffer, session: SessionPk) -> Result<Self, StoreError> {
        let mut calls: Vec<StoredCall> = Vec::new();
        loop {
            let after = calls.last().map_or(0, |call| call.seq);
            let page = buffer.store.read(FindCalls { session, after, limit: CALLS_PAGE }).await?;
            let is_last = page.len() < CALLS_PAGE as usize;
            calls.extend(page);
            if is_last {
                return Ok(Self { calls });
            }
        }
    }

    pub(super) fn call(&self, seq: u32) -> Option<&StoredCall> {
        let index = self.calls.binary_search_by_key(&seq, |call| call.seq).ok()?;
        self.calls.get(index)
    }

    /// What a finish says of calls. A call is named by its number, or by the id of its answer as the agent received it.
    /// Refuses a name that is that of no call, or of one that another name is for.
    pub(super) fn said(&self, wanted: &Ending) -> Result<SaidOfCalls, Refusal> {
        let Some(finish) = wanted.of_calls() else { return Ok(SaidOfCalls::default()) };
        let with_id = |call: &'_ StoredCall| Some((call.columns.id.clone()?, call.seq));
        let numbers: HashMap<String, u32> = self.calls.iter().filter_map(with_id).collect();
        let number = |name: &str| {
            let by_number = || name.parse().ok().filter(|number| self.call(*number).is_some());
            numbers.get(turn_calls::without_prefix(name)).copied().or_else(by_number)
        };
        Ok(SaidOfCalls {
            rewards: by_number("turn_rewards", &finish.turn_rewards, number)?,
            states: by_number("turn_state_keys", &finish.turn_state_keys, number)?,
        })
    }

    /// The ids of the whole prompt of a call.
    pub(super) fn prompt(&self, call: &StoredCall) -> Vec<i32> {
        let mut prompt = self.path(call, call.shared + call.columns.tail.len());
        prompt.truncate(call.prompt);
        prompt
    }

    /// The first `length` ids of the path of a call, which is its prompt and its ids.
    pub(super) fn path(&self, call: &StoredCall, length: usize) -> Vec<i32> {
        let mut ids = vec![0; length];
        let (mut at, mut length) = (Some(call), length);
        while let Some(call) = at.filter(|_| length > 0) {
            let own = call.columns.tail.iter().chain(&call.columns.ids);
            if let Some(places) = ids.get_mut(call.shared..length) {
                places.iter_mut().zip(own).for_each(|(place, id)| *place = *id);
            }
            length = length.min(call.shared);
            at = call.parent.and_then(|parent| self.call(parent));
        }
        ids
    }
}

/// Takes one of the places of sessions whose calls are in memory. There are as many as cores. A place does not bound
/// work: a session keeps it while its calls are read from the database, and takes a core only for what it does with
/// them.
pub(super) async fn one_of_few() -> Result<SemaphorePermit<'static>, StoreError> {
    static SESSIONS: LazyLock<Semaphore> =
        LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, NonZero::get)));
    SESSIONS.acquire().await.map_err(|_| StoreError::Closed)
}

/// Runs what takes one of the few places in a task of its own, for callers that write an answer: nobody polls them
/// while their client does not read, and such a client would keep the place.
pub(super) async fn in_own_task<T: Send + 'static>(
    reading: impl Future<Output = Result<T, StoreError>> + Send + 'static,
) -> Result<T, StoreError> {
    tokio::spawn(reading.in_current_span()).await.map_err(|_| StoreError::Closed)?
}

/// The error for calls that follow each other in a circle, which are damaged.
pub(super) fn circular(session: SessionId) -> StoreError {
    StoreError::Corrupt(format!("calls of session {session} follow each other in a circle"))
}
