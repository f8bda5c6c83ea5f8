//! Why a call did not succeed.

use std::{error::Error, io};

use super::pinned;
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
    /// The service showed a certificate that is not accepted, or did not accept this client's. Nothing was sent.
    #[error("{0}")]
    Certificate(String),
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

impl TransportError {
    /// Whether the machine answered that nothing listens at the address.
    #[must_use]
    pub fn is_connection_refused(&self) -> bool {
        causes(&self.0).any(|cause| {
            cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        })
    }

    /// What is wrong with the certificate of either side, where that ended the connection.
    #[must_use]
    pub fn certificate(&self) -> Option<String> {
        causes(&self.0).find_map(|cause| match cause.downcast_ref()? {
            rustls::Error::InvalidCertificate(error) => {
                Some(format!("the service's certificate is not accepted: {}", pinned::describe(error)))
            }
            rustls::Error::AlertReceived(alert) if is_about_certificates(*alert) => {
                Some(format!("the service does not accept this client's certificate, or needs one: it sent {alert:?}"))
            }
            _ => None,
        })
    }
}

/// An error and what caused it, down to the first cause.
fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // An error of input and output names the cause of what it wraps, and passes over that itself.
        Some(wrapped) => Some(wrapped as &(dyn Error + 'static)),
        None => error.source(),
    })
}

fn is_about_certificates(alert: rustls::AlertDescription) -> bool {
    use rustls::AlertDescription as A;
    matches!(
        alert,
        A::CertificateRequired
            | A::BadCertificate
            | A::UnknownCA
            | A::CertificateExpired
            | A::CertificateRevoked
            | A::CertificateUnknown
            | A::UnsupportedCertificate
    )
}

fn detail(problem: &Problem) -> String {
    problem.detail.as_ref().map(|detail| format!(": {detail}")).unwrap_or_default()
}
