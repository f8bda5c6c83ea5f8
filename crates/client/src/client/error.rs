//! Why a call did not succeed.

use std::{error::Error, io};

use super::pinned;
use crate::wire::Problem;

/// Why a call did not succeed. Everything that was safe to repeat has been repeated already.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The service answered with a problem document.
    #[error("the service refused: {} ({}){}", .0.title, .0.kind, detail(.0))]
    Refused(Box<Problem>),
    /// No connection could be opened, or the connection broke before the answer was complete. In the second case the
    /// caller does not know whether the service has processed the request.
    #[error("the service could not be reached, or the connection broke before its answer was complete")]
    Transport(#[source] TransportError),
    /// The client did not accept the service's certificate, or the service did not accept the client's. No request was
    /// sent.
    #[error("{0}")]
    Certificate(String),
    /// The answer is not one that the API gives; it probably came from a proxy or another service.
    #[error("status {status} without a problem document: {body}")]
    Unexpected {
        /// HTTP status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// A successful answer whose body does not have the documented form.
    #[error("line {line} of the answer does not have the documented form")]
    Malformed {
        /// Line of the body, counted from 1.
        line: usize,
        /// The error of the parser.
        #[source]
        source: serde_json::Error,
    },
    /// A stream that ended in the middle of a line.
    #[error("the answer ended early, after {lines} complete lines")]
    Truncated {
        /// Number of complete lines before the end.
        lines: usize,
    },
    /// A stream without a length or chunks. Its end cannot be told from a broken connection, so a part could be
    /// mistaken for the whole.
    #[error("the answer has neither a content length nor chunks, so the client cannot tell whether it is complete")]
    Undelimited,
    /// The number of answers differs from the number of trajectories or scores that were sent, or the number of rows from that of
    /// the batch.
    #[error("received {answers} answers, but expected {expected}")]
    Incomplete {
        /// Number of answers received.
        answers: usize,
        /// Number of answers expected.
        expected: usize,
    },
    /// The request cannot be written as JSON. Nothing was sent.
    #[error("the request cannot be written as JSON")]
    Encode(#[source] serde_json::Error),
    /// The base URL cannot be used.
    #[error("`{url}` cannot be the base URL: {why}")]
    BaseUrl {
        /// The URL that the caller gave.
        url: String,
        /// Why it cannot be used.
        why: String,
    },
    /// The key contains characters that cannot be sent in a header.
    #[error("the key contains characters that are not allowed in a key")]
    Key,
    /// The certificates in the options cannot be used.
    #[error("TLS cannot be used: {0}")]
    Tls(String),
    /// The descriptor has no lease; only the answer to [`Client::lease`](crate::Client::lease) has one.
    #[error("batch `{batch_id}` has no lease")]
    NoLease {
        /// The batch without a lease.
        batch_id: String,
    },
}

impl ClientError {
    /// The problem document, if the service answered with one.
    #[must_use]
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Self::Refused(problem) => Some(problem),
            _ => None,
        }
    }

    /// The stable type of the problem, e.g. `lease-lost`, if the service answered with a problem document.
    #[must_use]
    pub fn kind(&self) -> Option<&str> {
        self.problem().map(|problem| problem.kind.as_str())
    }
}

/// An error of the transport. It is meant for logs; callers should not match on it.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct TransportError(#[from] reqwest::Error);

impl TransportError {
    /// Whether the connection was refused because nothing listens at the address.
    #[must_use]
    pub fn is_connection_refused(&self) -> bool {
        causes(&self.0).any(|cause| {
            cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        })
    }

    /// Describes the problem with the client's or the service's certificate, if that is why the connection failed.
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

/// Formats an error and its chain of causes, down to the first cause.
fn causes<'e>(error: &'e (dyn Error + 'static)) -> impl Iterator<Item = &'e (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| match error.downcast_ref::<io::Error>().and_then(io::Error::get_ref) {
        // `source()` of an `io::Error` returns the cause of the error that it wraps and skips that error itself.
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
