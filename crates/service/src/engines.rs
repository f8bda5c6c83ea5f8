//! What answers the calls of sessions.

use async_trait::async_trait;
use forebay_domain::session::SessionSpec;

/// The inference engines. A session is opened only if they can answer its calls.
#[async_trait]
pub trait Engines: Send + Sync + 'static {
    /// Whether all calls of a session can be answered and recorded. It waits for engines that have not been probed yet.
    /// An error comes with the name of the model for which there is no engine.
    async fn check(&self, spec: &SessionSpec) -> Result<(), (String, NoUpstream)>;
}

/// Why no engine answers a session's calls.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoUpstream {
    /// The configuration has none for it.
    #[error("no [[upstream]] of the configuration serves {what}")]
    Unrouted {
        /// The policy or model.
        what: String,
    },
    /// There is one, but its answers cannot be recorded now.
    #[error("upstream `{name}` is not ready: {why}")]
    NotReady {
        name: String,
        /// What is wrong, and what to do.
        why: String,
    },
}

impl NoUpstream {
    /// What an agent looked for.
    pub fn what(&self) -> String {
        match self {
            Self::Unrouted { what } => format!("an inference engine for {what}"),
            Self::NotReady { name, .. } => format!("the upstream `{name}`"),
        }
    }
}
