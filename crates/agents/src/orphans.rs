//! Calls whose client left before the answer and may repeat them. Clients give up after some minutes, and proxies cut silent
//! connections earlier. The engine goes on for a while, so that a repeat gets what it samples in the meantime.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, ready},
    time::Duration,
};

use forebay_domain::ids::SessionId;
use forebay_gateway::{Dialect, DialectError};
use tokio::{runtime::Handle, task::JoinSet};
use tracing::Instrument as _;

use crate::call::{Answer, Call};

/// How long a call lives without a client. OpenAI's and Anthropic's clients repeat after at most 8 s.
const WAIT: Duration = Duration::from_secs(10);

pub(crate) type Answering = Pin<Box<dyn Future<Output = Result<Answer, DialectError>> + Send>>;

/// What a repeat has in common with its call: the session, its attempt, the dialect and the digest of the body.
type Key = (SessionId, u32, Dialect, [u8; 32]);

/// A call that goes on as a task, which ends if this is dropped.
type Task = JoinSet<Result<Answer, DialectError>>;

/// The calls without a client, with their numbers, in the order in which their clients left.
#[derive(Default)]
pub(crate) struct Orphans(Mutex<Left>);

#[derive(Default)]
struct Left {
    next: u64,
    tasks: HashMap<Key, Vec<(u64, Task)>>,
}

impl Orphans {
    fn left(&self) -> MutexGuard<'_, Left> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, key: Key, task: Task) -> u64 {
        let mut left = self.left();
        left.next += 1;
        let number = left.next;
        left.tasks.entry(key).or_default().push((number, task));
        number
    }

    /// Takes the first call of a key, or the one with a number.
    fn take(&self, key: &Key, number: Option<u64>) -> Option<Task> {
        let mut left = self.left();
        let tasks = left.tasks.get_mut(key)?;
        let place = tasks.iter().position(|(found, _)| number.is_none_or(|number| number == *found))?;
        let (_, task) = tasks.remove(place);
        if tasks.is_empty() {
            left.tasks.remove(key);
        }
        Some(task)
    }
}

/// The answer to a call without events. If it is dropped before, because the client has left, the call goes on without a
/// client, provided that the client repeats calls.
pub(crate) struct Unanswered {
    call: Arc<Call>,
    answering: Option<Answering>,
}

impl Unanswered {
    /// Goes on with the call whose client left and that this one repeats, if there is one.
    pub(crate) fn new(call: &Arc<Call>) -> Self {
        let repeated = call.is_repeat().then(|| call.agents.orphans().take(&key(call), None)).flatten();
        let answering: Answering = match repeated {
            Some(task) => Box::pin(adopted(Arc::clone(call), task)),
            None => Box::pin(Arc::clone(call).answer().in_current_span()),
        };
        Self { call: Arc::clone(call), answering: Some(answering) }
    }
}

fn key(call: &Call) -> Key {
    (call.permit.session_id(), call.permit.attempt(), call.dialect, call.digest)
}

/// The answer to a call that this one repeats.
async fn adopted(call: Arc<Call>, mut task: Task) -> Result<Answer, DialectError> {
    match task.join_next().await {
        // A recorded answer is taken from the store, which gives it out once.
        Some(Ok(Ok(answer))) if answer.recorded.is_some() => call.answer().await,
        Some(Ok(Ok(answer))) => {
            call.count("replayed");
            Ok(answer)
        }
        Some(Ok(Err(error))) => Err(error),
        // It panicked, and the panic is in the log.
        Some(Err(_)) | None => Err(DialectError::Internal),
    }
}

impl Future for Unanswered {
    type Output = Result<Answer, DialectError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answering = self.answering.as_mut().expect("an answer is taken once");
        let answered = ready!(answering.as_mut().poll(context));
        self.answering = None;
        Poll::Ready(answered)
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        let Some(answering) = self.answering.take().filter(|_| self.call.client_repeats()) else { return };
        // Outside of a runtime the process is ending.
        let Ok(runtime) = Handle::try_current() else { return };
        let (key, agents) = (key(&self.call), self.call.agents.clone());
        let mut task = Task::new();
        task.spawn_on(answering, &runtime);
        let number = agents.orphans().add(key, task);
        tracing::debug!("the client of a call left, and the call waits for its repeat");
        runtime.spawn(async move {
            tokio::time::sleep(WAIT).await;
            drop(agents.orphans().take(&key, Some(number)));
        });
    }
}
