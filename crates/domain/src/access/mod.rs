//! Keys: what each caller may do, and with which policies.
//!
//! Callers are checked before anything is decided about rollouts, so no other part of the domain knows keys.
//!
//! - [`globs`]: which policies a key may access. [`key`]: a key, its secret and its hash.
//!
//! Secrets are stored as plain BLAKE3 hashes. Password hashes are slow on purpose, because people choose passwords that
//! can be guessed. A secret of a key is 256 random bits and cannot be guessed at any speed, and a slow hash would let
//! unauthenticated clients use up the service's CPU time. Hashes are compared in constant time.

pub mod globs;
pub mod key;

pub use forebay_wire::Role;

use self::{globs::PolicyGlobs, key::KeyId};
use crate::{ids::PolicyName, refusal::Refusal};

/// What a caller may do, as its key says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// The role of the caller.
    pub role: Role,
    /// The policies that the caller may access.
    pub policies: PolicyGlobs,
    /// The caller's key, or none if the service needs no keys.
    pub key_id: Option<KeyId>,
}

impl Grant {
    /// The grant of every caller while the service needs no keys: everything is allowed.
    #[must_use]
    pub fn open() -> Self {
        Self { role: Role::Admin, policies: PolicyGlobs::all(), key_id: None }
    }

    /// Whether the caller may access a policy.
    #[must_use]
    pub fn sees(&self, policy: &PolicyName) -> bool {
        self.policies.matches(policy.public().as_str())
    }

    /// Refuses a policy that the caller may not access. The error is the same as for a policy that does not exist.
    pub fn check(&self, policy: &PolicyName) -> Result<(), Refusal> {
        if self.sees(policy) { Ok(()) } else { Err(Refusal::UnknownPolicy(policy.clone())) }
    }
}
