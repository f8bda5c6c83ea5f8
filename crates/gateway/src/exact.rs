//! The mode `exact`: the gateway renders prompts itself and sends ids, so that a conversation always extends itself.
//!
//! An engine that renders a conversation anew writes the answers before in its own words: it drops reasoning, writes
//! arguments in another spelling, and cuts the text into other tokens than the model sampled. Each time the prompt no
//! longer extends the call before, and a segment ends. Here only what an agent appends to an answer is rendered, and
//! is put behind the exact ids of the call that it continues. So the stored spelling of an answer wins over what the
//! agent sends back. If an agent changes an answer beyond what [`canonical`](crate::canonical) disregards, the whole
//! conversation is rendered, and a new segment begins. Nothing is ever repaired.
//!
//! A call takes this way:
//!
//! 1. [`Renderer::load`] reads the tokenizer and the template once per upstream, and tests itself.
//! 2. [`Paths::continued`](crate::canonical::Paths::continued) finds the call that a request continues. It has the calls
//!    of one policy in one session, and is filled like the [`History`](crate::canonical::History) in it.
//! 3. [`Renderer::prompt_within`] makes the ids of the prompt, in pieces (`encode`) and within [`Bounds`]. It takes long
//!    for a long prompt, so it belongs on a thread for such work.
//! 4. [`EngineCall::exact`](crate::upstream::EngineCall) carries them to the engine, whose answer must name the same
//!    ids.

mod encode;
mod error;
mod family;
mod fields;
mod messages;
mod renderer;
mod self_test;
mod special;

pub use encode::Bounds;
pub use error::ExactError;
pub use family::Family;
pub use renderer::{Prompt, Renderer, RendererOptions};
pub use self_test::{Difference, SelfTest};
