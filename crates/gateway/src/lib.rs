//! The dialects of agents and the client of inference engines, for recorded sessions.
//!
//! An agent speaks OpenAI chat completions, OpenAI Responses or Anthropic Messages to a session. The service records
//! the exact token ids of each call. This crate is what lies between the two and needs no database: pure functions for
//! the dialects, and an HTTP client for engines. It knows neither handlers nor stores nor the buffer.
//!
//! A call passes through the modules in this order:
//!
//! 1. [`lineage`] reads from the headers which of an agent's sub-agents calls.
//! 2. [`structure`] says what the body costs, before anything is built of it.
//! 3. [`dialect`] parses the body into one [`Request`], whatever the dialect. At the end it writes the answer, as a
//!    body or as events.
//! 4. [`system`] changes system messages that the chat template of the model does not take.
//! 5. [`upstream`] sends the request to an engine, checks the answer, and returns a [`Completion`].
//!
//! [`canonical`] compares the requests of a session with the calls before them. It finds the call that a request
//! continues, and says why one does not.
//!
//! With the feature `exact` there is the mode in which the gateway renders prompts itself, in the module `exact`, and
//! the chat templates for it, in the module `template`.
//!
//! [`cancel`] ends work whose caller is gone.
//!
//! The crate `forebay-fake-engine` is an engine for tests.

mod json;

pub mod cancel;
pub mod canonical;
pub mod completion;
pub mod dialect;
#[cfg(feature = "exact")]
pub mod exact;
pub mod hash;
pub mod lineage;
pub mod request;
pub mod structure;
pub mod system;
#[cfg(feature = "template")]
pub mod template;
pub mod upstream;

pub use completion::Completion;
pub use dialect::{Dialect, DialectError};
pub use json::Fields;
pub use request::Request;
pub use upstream::{Upstream, UpstreamError};
