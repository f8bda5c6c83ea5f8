//! Requests and answers in a form in which they can be compared.
//!
//! An agent sends the whole conversation with every call, and rarely in the words of the answers that it received: it
//! drops reasoning, writes the arguments of tool calls with other spaces or with their defaults, divides a text into
//! parts. If it is started again, its tools take another time.
//! [`Canonical`] is a request without such differences. [`History`] is the calls of one session, and finds the call that
//! a request continues. [`History::cause`] says why a request does not continue a call that it should have continued. Nothing
//! here decides what is trained: segments follow from token ids alone.
//!
//! # How the service uses it
//!
//! There is one [`History`] for each policy of a session, in memory. [`Paths`] is a history with the ids of its calls,
//! which the mode `exact` needs.
//!
//! 1. A call arrives: `let canonical = Canonical::of(&request)`. In the mode `exact`, [`History::find`] names the call
//!    that it continues. In the mode `observe` this step is left out.
//! 2. The engine has answered: `history.record(&canonical)` is what the call adds to the history. Its JSON
//!    ([`Record::to_json`]) belongs into the row of the call (`NewCall::request`). It contains only the messages that
//!    no earlier call has, so the rows of a session grow linearly. Take it from the same history to which the earlier
//!    calls were added, at any time before the call is stored.
//! 3. The row is committed and has its number: `history.add(seq, &record, &completion.message)`.
//! 4. After a restart, or to catch up with another replica: for each row in the order of the numbers, read the record
//!    from the row ([`Record::from_json`]) and the message from the stored [`Completion`](crate::Completion), and add
//!    them. A call that is already there is skipped.
//! 5. The session ends. [`chat_messages`] makes the conversation of its rollout from the rows of the last call and of
//!    those that it follows ([`Record::after`]).
//! 6. The assembler reports a break between a call and its nearest earlier call. [`History::cause_between`] names the
//!    cause, from the rows of the session.

mod cause;
mod chat;
mod defaults;
mod history;
mod key;
mod message;
mod paths;
mod record;
mod request;
mod volatile;

pub use cause::BreakCause;
pub use chat::chat_messages;
pub use history::{CALLS_MAX, Extended, History, HistoryError, MESSAGES_MAX, Repeated};
pub use message::{CanonicalCall, CanonicalMessage, CanonicalRole};
pub use paths::{Continued, IDS_MAX, Paths};
pub use record::Record;
pub use request::Canonical;
