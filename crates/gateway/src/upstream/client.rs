//! The connections to an engine, with what probes have found out about it.
//!
//! Separate from what is asked of an engine: calls, probes and scores are in files of their own.

use std::sync::{Arc, atomic::AtomicBool};

use super::{allow::Withheld, error::UpstreamError, options::UpstreamOptions, transport::Transport};

/// An engine with one or more workers.
#[derive(Clone, Debug)]
pub struct Upstream {
    pub(super) options: UpstreamOptions,
    pub(super) transport: Transport,
    /// Whether the last probe found that SGLang's chat endpoint takes no ids, but `/generate` does.
    pub(super) generates: Arc<AtomicBool>,
    /// Whether the last probe found that vLLM parses nothing, so that the gateway can decode its answers.
    pub(super) speaks_plainly: Arc<AtomicBool>,
    /// Whether the last probe found that vLLM's endpoint of ids answers with events.
    pub(super) sends_events: Arc<AtomicBool>,
    pub(super) withheld: Arc<Withheld>,
}

impl Upstream {
    /// Creates a client. It does not connect yet.
    pub fn new(options: UpstreamOptions) -> Result<Self, UpstreamError> {
        let transport = Transport::new(&options)?;
        Ok(Self {
            options,
            transport,
            generates: Arc::default(),
            speaks_plainly: Arc::default(),
            sends_events: Arc::default(),
            withheld: Arc::default(),
        })
    }

    /// What the client was created with.
    #[must_use]
    pub fn options(&self) -> &UpstreamOptions {
        &self.options
    }
}
