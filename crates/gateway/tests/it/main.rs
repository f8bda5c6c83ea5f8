//! The integration tests of the gateway: the dialects as pure functions, and the upstream against a fake engine.

mod allowed;
mod bodies;
mod canonical;
mod chat;
mod checks;
mod client_tools;
mod conversations;
mod engine;
mod errors;
mod exact;
mod hostile;
mod hostile_engine;
mod lineage;
mod messages;
mod probes;
mod recorded;
mod responses;
mod scores;
mod sse;
mod streams;
mod support;
mod templates;
mod transport;
mod upstream;
mod versions;
