//! The errors of the buffer.

use forebay_domain::refusal::Refusal;
use forebay_store::error::StoreError;

/// An answer other than success: a refusal of the domain, or a store that cannot answer.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// The request cannot be granted; nothing changed.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store failed; a retry of an idempotent request is safe.
    #[error(transparent)]
    Store(#[from] StoreError),
}
