//! The integration tests of the gateway: the dialects as pure functions, and the upstream against a fake engine.

mod bodies;
mod canonical;
mod chat;
mod checks;
mod conversations;
mod engine;
mod errors;
mod hostile;
mod hostile_engine;
mod lineage;
mod messages;
mod probes;
mod responses;
mod sse;
mod streams;
mod support;
mod transport;
mod upstream;
mod versions;
