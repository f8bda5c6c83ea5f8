//! Keys: what each caller may do, and with which policies. There is no HTTP and no SQL in this module.
//!
//! It is separate from [`buffer`](crate::buffer), because the buffer does not check permissions: callers are checked
//! before the buffer is called.
//!
//! - [`globs`]: which policies a key may access. [`key`]: a key, its secret and its hash.
//! - [`key_store`]: the port to the store.
//! - [`keyring`]: the keys of the store, kept in memory and at most a second old.
//!
//! A table in [`api`](crate::api) says which route needs which role.
//!
//! Secrets are stored as plain BLAKE3 hashes. Password hashes are slow on purpose, because people choose passwords that
//! can be guessed. A secret of a key is 256 random bits and cannot be guessed at any speed, and a slow hash would let
//! unauthenticated clients use up the service's CPU time. Hashes are compared in constant time.

pub mod globs;
pub mod key;
pub mod key_store;
pub mod keyring;

pub use forebay_wire::Role;

use forebay_domain::{ids::PolicyName, refusal::Refusal};

use self::{globs::PolicyGlobs, key::KeyId};

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
        self.policies.matches(policy.as_str())
    }

    /// Refuses a policy that the caller may not access. The error is the same as for a policy that does not exist.
    pub fn check(&self, policy: &PolicyName) -> Result<(), Refusal> {
        if self.sees(policy) { Ok(()) } else { Err(Refusal::UnknownPolicy(policy.clone())) }
    }
}
