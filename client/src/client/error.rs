//! Why a call did not succeed.

use crate::wire::Problem;

/// Why a call did not succeed. What could be repeated was repeated before.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service answered with a problem document.
    #[error("the service refused: {} ({}){}", .0.title, .0.kind, detail(.0))]
    Refused(Box<Problem>),
    /// No connection, or it broke before the answer was whole. Unless it is a connection that was never opened,
    /// whether the service has processed the request is not known.
    #[error("the service was not reached, or its answer broke off")]
    Transport(#[source] TransportError),
    /// An answer that the API does not give: a proxy's, or another service's.
    #[error("status {status} without a problem document: {body}")]
    Unexpected {
        /// HTTP status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// An answer of success whose body is not what the API promises.
    #[error("line {line} of the answer is not what the API promises")]
    Malformed {
        /// Line of the body, from 1.
        line: usize,
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
    /// A stream that ended within a line.
    #[error("the answer broke off after {lines} whole lines")]
    Truncated {
        /// Whole lines before the end.
        lines: usize,
    },
    /// A stream whose end nothing marks: a part of it could pass for the whole.
    #[error("the answer has neither a length nor chunks to tell whether it is whole")]
    Undelimited,
    /// Fewer or more answers than trajectories that were sent, or rows than a batch has.
    #[error("{answers} answers where {expected} were expected")]
    Incomplete {
        /// Answers that came.
        answers: usize,
        /// Answers that should have come.
        expected: usize,
    },
    /// The request has no JSON form. Nothing was sent.
    #[error("the request cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
    /// The base URL cannot be used.
    #[error("`{url}` cannot be the base URL: {why}")]
    BaseUrl {
        /// The URL as given.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The key has characters that cannot be sent.
    #[error("the key has characters that no key has")]
    Key,
    /// The certificates of the options cannot be used.
    #[error("TLS cannot be used: {0}")]
    Tls(String),
    /// The descriptor carries no lease: only the answer to [`Client::lease`](crate::Client::lease) does.
    #[error("batch `{batch_id}` comes without a lease")]
    NoLease {
        /// Batch in question.
        batch_id: String,
    },
}

impl ClientError {
    /// The problem document, where the service answered with one.
    #[must_use]
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) => Some(problem),
            _ => None,
        }
    }

    /// The stable type of the problem, e.g. `lease-lost`, where the service answered with one.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.problem().map(|problem| problem.kind.as_str())
    }
}

/// What went wrong below the API; a source to log, not to match on.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct TransportError(#[from] reqwest::Error);

fn detail(problem: &Problem) -> String {
    problem.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default()
}
