//! Uploads: what rollouts name by its digest.

use serde::{Deserialize, Serialize};

/// How much of an upload is stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Upload {
    /// BLAKE3 digest of all bytes, in hexadecimal digits.
    pub digest: String,
    /// Bytes of the whole.
    pub bytes: u64,
    /// Bytes that are stored, from the first one on. It is whole when they are all; else go on with the byte after them.
    pub stored: u64,
    /// What a message names it by: `forebay:` and the digest.
    pub url: String,
    /// When it is deleted unless a rollout names it until then; null while one does.
    pub expires_at: Option<String>,
}
