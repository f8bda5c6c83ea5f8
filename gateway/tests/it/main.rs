//! The integration tests of the gateway: the dialects as pure functions, and the upstream against a fake engine.

mod bodies;
mod chat;
mod errors;
mod hostile;
mod lineage;
mod sse;
mod support;
